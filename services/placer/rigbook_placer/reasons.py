"""Why a demand cannot be placed: codes and numbers, split into never here, never big enough, later.

The same tests as `feasible`, which only answers yes or no; a property test holds them together. Made when
somebody asks, or when a verdict may have changed; never on every round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.placeholders import problems
from rigbook_schemas.values import Engine, Horizon, Mode, Reason, ReasonCode

from rigbook_placer.feasible import NOBODY, NOTHING_SEEN, kept_from, model_fits, need_bytes, sensible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rigbook_ledger.state import Card, Node, State
    from rigbook_schemas.events import DemandRaised
    from rigbook_schemas.values import Request

    from rigbook_placer.feasible import Ask, Asker, Seen

__all__ = ["REASONS_MAX", "card_says_no", "hopeless", "invalid", "node_says_no", "signature", "why_not"]

# A reason list goes into an event and before a person's eyes: it is cut here, nearest miss first.
REASONS_MAX: Final = 24
_ORDER: Final = {Horizon.LATER: 0, Horizon.NEVER_BIG_ENOUGH: 1, Horizon.NEVER_HERE: 2}


def invalid(spec: DemandRaised, policies: Mapping[str, object] | None = None) -> Reason | None:
    """What no fleet could ever meet: refused at once."""
    request = spec.resources
    if not sensible(request):
        return Reason(
            code=ReasonCode.INVALID_UNIT, horizon=Horizon.NEVER_BIG_ENOUGH, asked_bytes=request.memory_bytes
        )
    if request.node and request.nodes > 1:
        return _invalid("resources.node", "one node is named and several are asked for")
    if spec.placement and policies is not None and spec.placement not in policies:
        return _invalid(
            "placement", f"no policy is called {spec.placement[:32]!r}; there are {', '.join(policies)}"
        )
    for window in spec.windows:
        if window.start == window.end:
            return _invalid("windows", f"a window from {window.start} to {window.end} is no time at all")
    names = [c.name for c in spec.components]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        return _invalid("components", f"the name {twice[0]} stands twice")
    for component in spec.components:
        if not component.command and not component.image:
            return _invalid(f"component {component.name}", "neither command nor image is given")
        wrong = problems(component)
        if wrong:
            return _invalid(f"component {component.name}", wrong[0])
    return None


def _invalid(field: str, what: str) -> Reason:
    return Reason(code=ReasonCode.INVALID_REQUEST, horizon=Horizon.NEVER_HERE, asked=field, found=what)


def hopeless(reasons: Sequence[Reason]) -> bool:
    """No release, uncordon or return of a known node would help: only another fleet, or another rule, would."""
    return bool(reasons) and (
        all(r.horizon is not Horizon.LATER for r in reasons)
        # A reason of the fleet as a whole stands for all of its nodes.
        or any(r.horizon is not Horizon.LATER and not r.node for r in reasons)
    )


def signature(reasons: Sequence[Reason]) -> frozenset[tuple[str, str, str, tuple[str, ...]]]:
    """What makes a reason a different one: codes, and holders that should have let go.

    Numbers move with every binding elsewhere; they do not count.
    """
    return frozenset((r.code, r.horizon, r.node, r.holders_stopped) for r in reasons)


def why_not(
    state: State,
    ask: Ask,
    seen: Mapping[str, Seen],
    asker: Asker = NOBODY,
    *,
    among: Iterable[str] | None = None,
) -> list[Reason]:
    """Why the demand cannot be placed now: one reason per node and code, the nearest miss of each.

    Empty when `feasible` has an answer (for a gang: when enough nodes have one). `among`: of these nodes only.
    """
    request = ask.request
    if not state.nodes:
        return [Reason(code=ReasonCode.NO_NODES)]
    if request.node and request.node not in state.nodes:
        known = ", ".join(sorted(state.nodes)[:5])
        return [
            Reason(code=ReasonCode.NODE_MISMATCH, horizon=Horizon.NEVER_HERE, asked=request.node, found=known)
        ]
    reasons: list[Reason] = []
    options = 0
    for node in state.nodes.values() if among is None else [state.nodes[name] for name in among]:
        said = _node_refusals(state, node, ask, seen, asker)
        if said is None:
            options += 1
        else:
            reasons.extend(said)
    if options >= request.nodes:
        return []
    shown = _shortest(reasons)
    if request.nodes > 1:
        ever = options + len({r.node for r in reasons if r.horizon is Horizon.LATER})
        gang = Reason(
            code=ReasonCode.COUNT_SHORT, asked=f"{request.nodes} nodes", found=f"{options} nodes",
            horizon=Horizon.LATER if ever >= request.nodes else Horizon.NEVER_BIG_ENOUGH,
        )  # fmt: skip
        shown = [gang, *shown[: REASONS_MAX - 1]]
    return shown


def _node_refusals(
    state: State, node: Node, ask: Ask, seen: Mapping[str, Seen], asker: Asker
) -> list[Reason] | None:
    """Why this node cannot take it; None when it can."""
    request = ask.request
    said = node_says_no(node, ask)
    if said is not None:
        return [said]
    cards = [state.cards[u] for u in node.cards if u in state.cards]
    no = [card_says_no(state, c, request, seen.get(c.uuid, NOTHING_SEEN), asker) for c in cards]
    refusals = [reason for reason in no if reason is not None]
    fitting = len(no) - len(refusals)
    if fitting >= request.count:
        return None
    later = [r for r in refusals if r.horizon is Horizon.LATER]
    if fitting + len(later) < request.count and len(later) < len(refusals):
        return list(_nearest([r for r in refusals if r.horizon is not Horizon.LATER]))
    if len(cards) < request.count:
        return [
            Reason(
                code=ReasonCode.COUNT_SHORT, horizon=Horizon.NEVER_BIG_ENOUGH, node=node.name,
                asked=str(request.count), found=str(len(cards)),
            )
        ]  # fmt: skip
    short = Reason(code=ReasonCode.COUNT_SHORT, node=node.name, asked=str(request.count), found=str(fitting))
    return [*([short] if fitting else ()), *_nearest(refusals)]


def _shortest(reasons: Sequence[Reason]) -> list[Reason]:
    return sorted(reasons, key=lambda r: (_ORDER[r.horizon], r.short_bytes or 0, r.node, r.index or 0))[
        :REASONS_MAX
    ]


def _nearest(refusals: Sequence[Reason]) -> Iterator[Reason]:
    """Of the cards of one node that give the same code, the one that misses by least speaks for all."""
    by_code: dict[ReasonCode, list[Reason]] = {}
    for reason in refusals:
        by_code.setdefault(reason.code, []).append(reason)
    for group in by_code.values():
        best = min(group, key=lambda r: (r.short_bytes or 0, r.index or 0))
        holders = tuple(dict.fromkeys(h for r in group for h in r.holders))
        stopped = tuple(dict.fromkeys(h for r in group for h in r.holders_stopped))
        yield msgspec.structs.replace(
            best, cards=len(group), holders=holders[:8], holders_stopped=stopped[:8]
        )


def node_says_no(node: Node, ask: Ask) -> Reason | None:
    """Why the node as a whole cannot take it, whatever its cards say."""

    def no(code: ReasonCode, horizon: Horizon, asked: str = "", found: str = "") -> Reason:
        return Reason(
            code=code, horizon=horizon, node=node.name, asked=asked, found=found, cards=len(node.cards) or 1
        )

    request = ask.request
    if request.node and request.node != node.name:
        return no(ReasonCode.NODE_MISMATCH, Horizon.NEVER_HERE, request.node, node.name)
    for key, value in request.require.items():
        if node.labels.get(key) != value:
            found = f"{key}={node.labels[key]}" if key in node.labels else f"no label {key}"
            return no(ReasonCode.LABEL_MISMATCH, Horizon.NEVER_HERE, f"{key}={value}", found)
    missing = [e for e in ask.engines if e not in node.engines]
    if missing:
        return no(ReasonCode.ENGINE_MISSING, Horizon.NEVER_HERE, ", ".join(missing), ", ".join(node.engines))
    if node.container_gpus and Engine.DOCKER in ask.engines:
        found = f"docker without cards ({node.container_gpus})"
        return no(ReasonCode.ENGINE_MISSING, Horizon.LATER, "docker with cards", found[:300])
    if not node.driver_ok:
        return no(ReasonCode.DRIVER_MISMATCH, Horizon.LATER, found=node.driver_text)
    if node.unreachable_ns:
        return no(ReasonCode.NODE_UNREACHABLE, Horizon.LATER)
    if node.cordoned is not None:
        return no(ReasonCode.NODE_CORDONED, Horizon.LATER, found=node.cordoned)
    return None


def card_says_no(
    state: State, card: Card, request: Request, seen: Seen, asker: Asker = NOBODY
) -> Reason | None:
    """Why the card cannot take one card's part of the request."""
    bindings = state.holders_of(card)
    stopped = tuple(
        b.demand for b in bindings if not state.demands[b.demand].wanted or b.eviction is not None
    )
    need = need_bytes(request)
    free = card.memory_bytes - card.reserved_bytes - seen.foreign_bytes

    def no(
        code: ReasonCode, horizon: Horizon = Horizon.LATER, asked: str = "", found: str = "", keeper: str = ""
    ) -> Reason:
        return Reason(
            code=code, horizon=horizon, node=card.node, card=card.uuid, index=card.index, model=card.model,
            asked_bytes=need, free_bytes=max(0, free), total_bytes=card.memory_bytes,
            bound_bytes=card.reserved_bytes, foreign_bytes=seen.foreign_bytes or None,
            short_bytes=max(0, need - free), asked=asked, found=found,
            holders=(keeper,) if keeper else tuple(b.demand for b in bindings), holders_stopped=stopped,
        )  # fmt: skip

    if not model_fits(request.model, card.model):
        return no(ReasonCode.MODEL_MISMATCH, Horizon.NEVER_HERE, request.model, card.model)
    if card.memory_bytes < need and card.usable:
        return no(ReasonCode.CAPACITY_NEVER, Horizon.NEVER_BIG_ENOUGH)
    if not card.present:
        return no(ReasonCode.GPU_UNKNOWN, found="its node no longer shows it")
    if not card.usable:
        return no(ReasonCode.GPU_UNKNOWN, found=card.why)
    if seen.unknown:
        return no(ReasonCode.GPU_UNKNOWN, found=seen.unknown)
    if card.quarantined is not None:
        return no(ReasonCode.GPU_QUARANTINED, found=card.quarantined)
    if card.switching:
        return no(ReasonCode.MODE_SWITCHING, found=card.switching)
    if any(b.mode is Mode.EXCLUSIVE for b in bindings):
        return no(ReasonCode.EXCLUSIVE_HELD)
    serves = state.mode_of(card)
    if serves is not None and serves is not request.mode:
        if request.mode is Mode.EXCLUSIVE and bindings and card.mode is None:
            return no(ReasonCode.GPU_BUSY)
        return no(ReasonCode.MODE_CONFLICT, asked=str(request.mode), found=str(serves))
    if request.mode is Mode.EXCLUSIVE and bindings:
        return no(ReasonCode.GPU_BUSY)
    if free < need:
        if seen.foreign_bytes and free + seen.foreign_bytes >= need:
            return no(ReasonCode.FOREIGN_USE, found=seen.foreign_who)
        return no(ReasonCode.VRAM_SHORT)
    keeper = kept_from(card, asker)
    return no(ReasonCode.HELD_BACK, keeper=keeper) if keeper else None

"""`feasible`: which nodes and cards could take a demand now. The filter; `rank` scores what is left.

Counts reservations on the ledger, never a sampled "free memory", which is stale, and which an
inference engine's pre-allocation makes a lie. Observed use by processes that are not ours only
subtracts. Every card that says no can say why (`why_not`), with a code, numbers and a horizon:
never here, never big enough, later.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_ledger.state import Card, Node
from rigbook_schemas.values import (
    MEMORY_BYTES_MAX,
    MEMORY_BYTES_MIN,
    Engine,
    Horizon,
    Mode,
    Reason,
    ReasonCode,
    Request,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rigbook_ledger.state import State
    from rigbook_schemas.events import DemandRaised

__all__ = ["Ask", "Option", "Seen", "ask_of", "feasible", "free_bytes", "invalid", "model_fits", "why_not"]


class Seen(msgspec.Struct, frozen=True):
    """What a card's latest sample says that the ledger cannot know."""

    foreign_bytes: int = 0  # memory of processes that are not ours
    foreign_who: str = ""
    unknown: str = ""  # why the card's sample cannot be trusted; then it takes nothing


NOTHING_SEEN: Final = Seen()


class Ask(msgspec.Struct, frozen=True):
    """What a demand needs of a node: demands with equal asks fit, or do not, together."""

    request: Request
    engines: tuple[str, ...]  # that its components need


def ask_of(spec: DemandRaised) -> Ask:
    """The ask of a demand."""
    engines = {Engine.DOCKER if c.image else Engine.PROCESS for c in spec.components}
    return Ask(spec.resources, tuple(sorted(engines)))


class Option(msgspec.Struct, frozen=True):
    """A node that could take the demand, and all of its cards that fit, in index order."""

    node: Node
    cards: tuple[Card, ...]


def invalid(spec: DemandRaised) -> Reason | None:
    """What no fleet could ever meet: refused at once."""
    request = spec.resources
    if not MEMORY_BYTES_MIN <= request.memory_bytes <= MEMORY_BYTES_MAX:
        return Reason(
            code=ReasonCode.INVALID_UNIT, horizon=Horizon.NEVER_BIG_ENOUGH, asked_bytes=request.memory_bytes
        )
    if request.node and request.nodes > 1:
        return _invalid("resources.node", "one node is named and several are asked for")
    names = [c.name for c in spec.components]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        return _invalid("components", f"the name {twice[0]} stands twice")
    for component in spec.components:
        if not component.command and not component.image:
            return _invalid(f"component {component.name}", "neither command nor image is given")
    return None


def _invalid(field: str, what: str) -> Reason:
    return Reason(code=ReasonCode.INVALID_REQUEST, horizon=Horizon.NEVER_HERE, asked=field, found=what)


def feasible(state: State, ask: Ask, seen: Mapping[str, Seen]) -> Iterator[Option]:
    """Nodes with at least `request.count` fitting cards, in the order they joined."""
    request = ask.request
    nodes = (
        [state.nodes[request.node]]
        if request.node in state.nodes
        else ()
        if request.node
        else state.nodes.values()
    )
    for node in nodes:
        if _node_says_no(node, ask) is not None:
            continue
        cards = [state.cards[u] for u in node.cards if u in state.cards]
        fitting = tuple(c for c in cards if _fits(state, c, request, seen.get(c.uuid, NOTHING_SEEN)))
        if len(fitting) >= request.count:
            yield Option(node, fitting)


def model_fits(asked: str, model: str) -> bool:
    """`RTX4090` means "NVIDIA GeForce RTX 4090": spaces, hyphens and case do not count. Empty asks for any."""
    return not asked or _plain(asked) in _plain(model)


@cache
def _plain(name: str) -> str:
    return name.lower().translate(_SPACERS)


_SPACERS: Final = str.maketrans("", "", " -_")


def free_bytes(card: Card, seen: Seen) -> int:
    """What a shared binding could still get of the card."""
    return card.memory_bytes - card.reserved_bytes - seen.foreign_bytes


def _fits(state: State, card: Card, request: Request, seen: Seen) -> bool:
    """The same tests as `_card_says_no`, without making a reason: this is the hot path."""
    if not card.present or not card.usable or card.quarantined is not None or seen.unknown:
        return False
    if not model_fits(request.model, card.model):
        return False
    if card.memory_bytes - card.reserved_bytes - seen.foreign_bytes < request.memory_bytes:
        return False
    if card.mode is not None and card.mode is not request.mode:
        return False
    if not card.holders:
        return True
    return request.mode is not Mode.EXCLUSIVE and state.bindings[card.holders[0]].mode is request.mode


def why_not(state: State, ask: Ask, seen: Mapping[str, Seen]) -> list[Reason]:
    """Why the demand cannot be placed now: one reason per node and code, the nearest miss of each.

    Empty when `feasible` has an answer (for a gang: when enough nodes have one).
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
    for node in state.nodes.values():
        said = _node_says_no(node, ask)
        if said is not None:
            reasons.append(said)
            continue
        cards = [state.cards[u] for u in node.cards if u in state.cards]
        no = [(c, _card_says_no(state, c, request, seen.get(c.uuid, NOTHING_SEEN))) for c in cards]
        fitting = sum(1 for _, reason in no if reason is None)
        if fitting >= request.count:
            options += 1
            continue
        refusals = [reason for _, reason in no if reason is not None]
        possible = fitting + sum(1 for r in refusals if r.horizon is Horizon.LATER)
        if (
            possible < request.count
            and fitting + len(refusals) > 0
            and any(r.horizon is not Horizon.LATER for r in refusals)
        ):
            reasons.extend(_nearest([r for r in refusals if r.horizon is not Horizon.LATER] or refusals))
        elif len(cards) < request.count:
            reasons.append(
                Reason(
                    code=ReasonCode.COUNT_SHORT, horizon=Horizon.NEVER_BIG_ENOUGH, node=node.name,
                    asked=str(request.count), found=str(len(cards)),
                )
            )  # fmt: skip
        else:
            if fitting:
                reasons.append(
                    Reason(
                        code=ReasonCode.COUNT_SHORT,
                        node=node.name,
                        asked=str(request.count),
                        found=str(fitting),
                    )
                )
            reasons.extend(_nearest(refusals))
    return [] if options >= request.nodes else _shortest(reasons)


# A reason list goes into an event and before a person's eyes: it is cut here, nearest miss first.
REASONS_MAX: Final = 24
_ORDER: Final = {Horizon.LATER: 0, Horizon.NEVER_BIG_ENOUGH: 1, Horizon.NEVER_HERE: 2}


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


def _node_says_no(node: Node, ask: Ask) -> Reason | None:
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
    if not node.driver_ok:
        return no(ReasonCode.DRIVER_MISMATCH, Horizon.LATER, found=node.driver_text)
    if node.unreachable_ns:
        return no(ReasonCode.NODE_UNREACHABLE, Horizon.LATER)
    if node.cordoned is not None:
        return no(ReasonCode.NODE_CORDONED, Horizon.LATER, found=node.cordoned)
    return None


def _card_says_no(state: State, card: Card, request: Request, seen: Seen) -> Reason | None:
    bindings = state.holders_of(card)
    stopped = tuple(
        b.demand for b in bindings if not state.demands[b.demand].wanted or b.eviction is not None
    )
    free = card.memory_bytes - card.reserved_bytes - seen.foreign_bytes

    def no(code: ReasonCode, horizon: Horizon = Horizon.LATER, asked: str = "", found: str = "") -> Reason:
        return Reason(
            code=code, horizon=horizon, node=card.node, card=card.uuid, index=card.index, model=card.model,
            asked_bytes=request.memory_bytes, free_bytes=max(0, free), total_bytes=card.memory_bytes,
            bound_bytes=card.reserved_bytes, foreign_bytes=seen.foreign_bytes or None,
            short_bytes=max(0, request.memory_bytes - free), asked=asked, found=found,
            holders=tuple(b.demand for b in bindings), holders_stopped=stopped,
        )  # fmt: skip

    if not model_fits(request.model, card.model):
        return no(ReasonCode.MODEL_MISMATCH, Horizon.NEVER_HERE, request.model, card.model)
    if card.memory_bytes < request.memory_bytes and card.usable:
        return no(ReasonCode.CAPACITY_NEVER, Horizon.NEVER_BIG_ENOUGH)
    if not card.present:
        return no(ReasonCode.GPU_UNKNOWN, found="its node no longer shows it")
    if not card.usable:
        return no(ReasonCode.GPU_UNKNOWN, found=card.why)
    if seen.unknown:
        return no(ReasonCode.GPU_UNKNOWN, found=seen.unknown)
    if card.quarantined is not None:
        return no(ReasonCode.GPU_QUARANTINED, found=card.quarantined)
    if any(b.mode is Mode.EXCLUSIVE for b in bindings):
        return no(ReasonCode.EXCLUSIVE_HELD)
    serves = state.mode_of(card)
    if serves is not None and serves is not request.mode:
        if request.mode is Mode.EXCLUSIVE and bindings and card.mode is None:
            return no(ReasonCode.GPU_BUSY)
        return no(ReasonCode.MODE_CONFLICT, asked=str(request.mode), found=str(serves))
    if request.mode is Mode.EXCLUSIVE and bindings:
        return no(ReasonCode.GPU_BUSY)
    if free < request.memory_bytes:
        if seen.foreign_bytes and free + seen.foreign_bytes >= request.memory_bytes:
            return no(ReasonCode.FOREIGN_USE, found=seen.foreign_who)
        return no(ReasonCode.VRAM_SHORT)
    return None

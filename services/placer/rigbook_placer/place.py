"""`place`: a waiting demand, the state, and what is seen, to a binding, a deferral or a refusal. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from rigbook_schemas.events import Bound, Deferred, Refused
from rigbook_schemas.values import Allotment, CardSeen, Mode, NodeShare, Reason, ReasonCode

from rigbook_placer.feasible import NOTHING_SEEN, Kept, Seen, ask_of, asker_of, feasible, need_bytes
from rigbook_placer.rank import POLICIES, rank, taste_of
from rigbook_placer.reasons import card_says_no, hopeless, invalid, node_says_no, signature, why_not
from rigbook_placer.rules import over_cap, over_quota, rule_says_no

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rigbook_ledger.state import Demand, State
    from rigbook_schemas.events import DemandRaised

    from rigbook_placer.feasible import Ask, Asker
    from rigbook_placer.rank import Ranked, Scoring, Taste
    from rigbook_placer.rules import Totals

__all__ = [
    "FETCH_BYTES_PER_SECOND", "POLICY_VERSION", "SEEN_MAX", "Shortlist", "explain", "hopeless", "place", "policy_of",
    "seen_by_decision", "signature", "verdict",
]  # fmt: skip

# Goes into every `bound`, so that a replay knows which rules decided.
POLICY_VERSION: Final = 2
# What fetching model weights is expected to take, where nothing better is known: one gigabit per second, less overhead.
FETCH_BYTES_PER_SECOND: Final = 100 * 1024**2
NOTES_MAX: Final = 4
# Cards that a `bound` tells of; with more, it would be long, and the proof of it is told as not possible.
SEEN_MAX: Final = 64


class Shortlist(Protocol):
    """Knows the best nodes without looking at all of them; gives the same answer as looking (see `index`)."""

    def best(
        self, ask: Ask, taste: Taste, policy: str, asker: Asker, count: int
    ) -> tuple[Sequence[str], int]:
        """The `count` best feasible nodes (fewer: that is all), and how many feasible ones there are."""
        ...

    def scoring(self, policy: str) -> Scoring:
        """The policy, as far as it can be had more cheaply than from the state alone."""
        ...

    def able(self, ask: Ask) -> Sequence[str]:
        """The likeliest of the nodes that could hold it if they were empty."""
        ...

    @property
    def totals(self) -> Totals: ...


def policy_of(state: State, spec: DemandRaised, default: str) -> str:
    """The demand's own, else the operator's, else the placer's."""
    if spec.placement in POLICIES:
        return spec.placement
    return state.policy.placement if state.policy.placement in POLICIES else default


def place(
    state: State,
    spec: DemandRaised,
    seen: Mapping[str, Seen],
    policy: str = "pack",
    *,
    now_ns: int | None = None,
    kept: Mapping[str, Kept] | None = None,
    shortlist: Shortlist | None = None,
) -> Bound | None:
    """The binding that the demand would get now, or None. Decided on `state.position`.

    `now_ns`: None leaves out the rules about time. `kept`: cards kept for demands that came first.
    """
    request = spec.resources
    totals = shortlist.totals if shortlist is not None else None
    if invalid(spec, POLICIES) is not None or rule_says_no(state, spec, now_ns=now_ns, totals=totals):
        return None
    name = policy_of(state, spec, policy)
    ask, asker = ask_of(spec), asker_of(spec, kept or {}, now_ns)
    taste = taste_of(spec, state.demands.get(spec.demand))
    among: Sequence[str] | None = None
    others = 0
    if shortlist is not None:
        among, others = shortlist.best(ask, taste, name, asker, request.nodes)
    options = list(feasible(state, ask, seen, asker, among=among))
    if len(options) < request.nodes:
        return None
    others = max(others, len(options)) - request.nodes
    scoring = shortlist.scoring(name) if shortlist is not None else POLICIES[name]
    chosen = rank(state, request, options, seen, scoring, taste, asker.kept)[: request.nodes]
    cards = [card for ranked in chosen for card in ranked.cards]
    if over_quota(state, spec, cards) is not None or over_cap(state, spec, totals, cards) is not None:
        return None
    return Bound(
        demand=spec.demand,
        project=spec.project,
        shares=tuple(_share(spec, ranked) for ranked in chosen),
        policy=name,
        policy_version=POLICY_VERSION,
        position=state.position,
        feasible=min(others, 100_000),
        owner=spec.owner,
        restart=spec.restart,
        workload=spec.workload,
        notes=_notes(state, spec, ask, seen, asker, chosen) if request.weights else (),
        seen=seen_by_decision(seen, kept or {}),
    )


def seen_by_decision(seen: Mapping[str, Seen], kept: Mapping[str, Kept]) -> tuple[CardSeen, ...]:
    """What the decision knew of cards beyond the ledger: with it a replay can decide again (`rigbook replay check`)."""
    if not seen and not kept:
        return ()
    nobody = Kept("")
    return tuple(
        CardSeen(
            card=card,
            foreign_bytes=seen.get(card, NOTHING_SEEN).foreign_bytes,
            unknown=bool(seen.get(card, NOTHING_SEEN).unknown),
            kept_for=kept.get(card, nobody).demand,
            kept_from_ns=kept.get(card, nobody).from_ns,
        )
        for card in sorted({*seen, *kept})[:SEEN_MAX]
    )


def _share(spec: DemandRaised, ranked: Ranked) -> NodeShare:
    request = spec.resources
    need = need_bytes(request)
    return NodeShare(
        node=ranked.option.node.name,
        allotments=tuple(
            Allotment(
                card=card.uuid,
                # Nobody else can use what an exclusive binding leaves: the whole card is on its books.
                memory_bytes=card.memory_bytes if request.mode is Mode.EXCLUSIVE else need,
                mode=request.mode,
            )
            for card in ranked.cards
        ),
        components=spec.components,
    )


def _notes(
    state: State,
    spec: DemandRaised,
    ask: Ask,
    seen: Mapping[str, Seen],
    asker: Asker,
    chosen: Sequence[Ranked],
) -> tuple[Reason, ...]:
    """Where the weights would have been, why not there, and what fetching them is expected to take."""
    request = spec.resources
    without = [r.option.node for r in chosen if request.weights not in r.option.node.weights]
    if not without:
        return ()
    seconds = (request.weights_bytes or request.memory_bytes) / FETCH_BYTES_PER_SECOND
    notes = [
        Reason(
            code=ReasonCode.WEIGHTS_NOT_CACHED,
            node=node.name,
            asked=request.weights,
            seconds=round(seconds, 1),
        )
        for node in without[:1]
    ]
    for node in state.nodes.values():
        if request.weights in node.weights and len(notes) < NOTES_MAX:
            said = node_says_no(node, ask)
            cards = [state.cards[u] for u in node.cards if u in state.cards] if said is None else []
            no = [card_says_no(state, c, request, seen.get(c.uuid, NOTHING_SEEN), asker) for c in cards]
            refusals = [reason for reason in no if reason is not None]
            if refusals:
                said = min(refusals, key=lambda r: (r.short_bytes or 0, r.index or 0))
            if said is not None:
                notes.append(said)
    return tuple(notes)


def explain(
    state: State,
    spec: DemandRaised,
    seen: Mapping[str, Seen],
    policy: str = "pack",
    *,
    now_ns: int | None = None,
    kept: Mapping[str, Kept] | None = None,
    totals: Totals | None = None,
    among: Iterable[str] | None = None,
) -> tuple[Reason, ...]:
    """Why `place` says None, nearest miss first; empty when it would not."""
    bad = invalid(spec, POLICIES)
    if bad is not None:
        return (bad,)
    rule = rule_says_no(state, spec, now_ns=now_ns, totals=totals)
    if rule is not None:
        return (rule,)
    ask, asker = ask_of(spec), asker_of(spec, kept or {}, now_ns)
    reasons = why_not(state, ask, seen, asker, among=among)
    if reasons:
        return tuple(reasons)
    taste = taste_of(spec, state.demands.get(spec.demand))
    options = list(feasible(state, ask, seen, asker, among=among))
    scoring = POLICIES[policy_of(state, spec, policy)]
    chosen = rank(state, spec.resources, options, seen, scoring, taste, asker.kept)
    cards = [card for ranked in chosen[: spec.resources.nodes] for card in ranked.cards]
    rule = over_quota(state, spec, cards) or over_cap(state, spec, totals, cards)
    return (rule,) if rule is not None else ()


def verdict(
    state: State, demand: Demand, reasons: tuple[Reason, ...], *, final: bool
) -> Deferred | Refused | None:
    """What to tell about a demand that cannot be placed: nothing, when it was told already."""
    spec = demand.spec
    if final:
        return Refused(demand=spec.demand, project=spec.project, reasons=reasons, position=state.position)
    if signature(reasons) == signature(demand.reasons):
        return None
    return Deferred(demand=spec.demand, project=spec.project, reasons=reasons, position=state.position)

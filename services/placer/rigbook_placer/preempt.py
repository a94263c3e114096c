"""`preempt`: who would have to go so that a demand fits. Opt-in on both sides, simulated first, minimal.

- The demand says `preempts`; every victim says `preemptible`, has a strictly lower priority, runs for at least the
  minimum run time, and is on nobody's way out already. Priorities never change, so no two demands can evict
  each other in turn.
- Nobody is evicted unless the demand fits afterwards, its quota and the cap included. A demand that can never fit
  evicts nobody, nor does one that fits as soon as what is already ending has ended.
- Of all sets of victims on a node the smallest is taken; of equal ones that with the lowest priorities, then that
  with the least run time lost. No part of the set would do.
- It is an order like any other: the victims are asked to save, then stopped, and wait again. The cards are kept
  for the demand from the order on.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
from rigbook_ledger.state import Binding, Card, Node, Phase
from rigbook_schemas.events import EvictionOrdered
from rigbook_schemas.values import EvictionReason, Mode

from rigbook_placer.feasible import (
    NOTHING_SEEN,
    ask_of,
    asker_of,
    kept_from,
    model_fits,
    need_bytes,
    node_fits,
)
from rigbook_placer.rules import Totals, over_cap, over_quota, time_says_no, totals_of
from rigbook_placer.soonest import held_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rigbook_ledger.state import Demand, State
    from rigbook_schemas.events import DemandRaised
    from rigbook_schemas.values import Request

    from rigbook_placer.feasible import Ask, Asker, Kept, Seen

__all__ = ["PREEMPTIONS_MAX", "Preemption", "evictions", "preempt"]

# A demand that was given room this often and still waits has something else in its way.
PREEMPTIONS_MAX: Final = 3
# On one node, sets of victims are tried one by one up to this many; beyond, victims are dropped one by one.
SETS_MAX: Final = 2_000


# The cards that would fit once these bindings are gone, None when too few.
_CardsWithout: TypeAlias = "Callable[[Iterable[int]], tuple[Card, ...] | None]"


class Preemption(msgspec.Struct, frozen=True):
    """Who goes, and which cards the demand gets then."""

    nodes: tuple[str, ...]
    cards: tuple[str, ...]
    victims: tuple[Binding, ...]


class _Choice(msgspec.Struct, frozen=True):
    """One node's part."""

    cost: tuple[int, int, int]
    node: Node
    victims: tuple[Binding, ...]
    cards: tuple[Card, ...]


def preempt(
    state: State,
    spec: DemandRaised,
    seen: Mapping[str, Seen],
    now_ns: int,
    *,
    kept: Mapping[str, Kept] | None = None,
    totals: Totals | None = None,
    among: Iterable[str] | None = None,
) -> Preemption | None:
    """The victims that have to go; None when nobody may be evicted for it, or that would not help."""
    demand = state.demands.get(spec.demand)
    if not spec.preempts or not state.policy.preemption:
        return None
    if demand is not None and (demand.room or demand.preemptions >= PREEMPTIONS_MAX):
        return None
    ask = ask_of(spec)
    request = spec.resources
    asker = asker_of(spec, kept or {}, now_ns)
    choices: list[_Choice] = []
    leaving = 0  # nodes that will do without any eviction
    for name in state.nodes if among is None else among:
        node = state.nodes.get(name)
        if node is None or not node_fits(node, ask):
            continue
        choice = _on_node(state, node, spec, ask, seen, asker, now_ns)
        if choice is None:
            continue
        leaving += not choice.victims
        choices.append(choice)
    if len(choices) < request.nodes or leaving >= request.nodes:
        return None
    choices.sort(key=lambda c: c.cost)
    best = choices[: request.nodes]
    victims = tuple({b.epoch: b for c in best for b in c.victims}.values())
    cards = tuple(card for c in best for card in c.cards)
    if not _allowed(state, spec, victims, cards, now_ns, totals):
        return None
    return Preemption(tuple(c.node.name for c in best), tuple(c.uuid for c in cards), victims)


def _allowed(
    state: State,
    spec: DemandRaised,
    victims: Sequence[Binding],
    cards: Sequence[Card],
    now_ns: int,
    totals: Totals | None,
) -> bool:
    """No rule keeps it waiting once the victims are gone."""
    freed = sum(b.memory_bytes for b in victims if b.project == spec.project)
    if over_quota(state, spec, cards, freed_bytes=freed) is not None:
        return False
    # Victims are below it, and may all the same be of high priority: then they give back of the cap, too.
    before = totals or totals_of(state)
    cap = state.policy.cap_priority
    high = sum(b.memory_bytes for b in victims if state.demands[b.demand].spec.priority >= cap)
    after = Totals(before.fleet_bytes, before.high_bytes - high)
    return over_cap(state, spec, after, cards) is None and time_says_no(state, spec, now_ns) is None


def victims_of(state: State, spec: DemandRaised, node: Node, now_ns: int) -> list[Binding]:
    """Bindings on the node that may be evicted for the demand."""
    least_ns = int(state.policy.preemption_run_seconds_min * 1e9)
    found: dict[int, Binding] = {}
    for uuid in node.cards:
        card = state.cards.get(uuid)
        for epoch in card.holders if card is not None else ():
            binding = state.bindings[epoch]
            demand = state.demands[binding.demand]
            if (
                demand.spec.preemptible
                and demand.spec.priority < spec.priority
                and demand.wanted
                and demand.phase in (Phase.BOUND, Phase.STARTING, Phase.RUNNING)
                and binding.eviction is None
                and now_ns - binding.bound_ns >= least_ns
            ):
                found[epoch] = binding
    return list(found.values())


def _cost(state: State, victims: Iterable[Binding], now_ns: int) -> tuple[int, int, int]:
    """(how many, their priorities, run time lost)."""
    all_of = list(victims)
    return (
        len(all_of),
        sum(state.demands[b.demand].spec.priority for b in all_of),
        sum(now_ns - b.bound_ns for b in all_of),
    )


def _on_node(
    state: State,
    node: Node,
    spec: DemandRaised,
    ask: Ask,
    seen: Mapping[str, Seen],
    asker: Asker,
    now_ns: int,
) -> _Choice | None:
    """The cheapest set of victims on the node, () when what is ending anyway is enough; None when none will do."""
    request = ask.request
    leaving = {
        epoch
        for uuid in node.cards
        if uuid in state.cards
        for epoch in state.cards[uuid].holders
        if state.demands[state.bindings[epoch].demand].phase is Phase.RELEASING
    }

    def cards_without(gone: Iterable[int]) -> tuple[Card, ...] | None:
        return _cards_without(state, node, request, seen, asker, leaving.union(gone))

    cards = cards_without(())
    if cards is not None:
        return _Choice((0, 0, 0), node, (), cards)
    may_go = victims_of(state, spec, node, now_ns)
    if cards_without(b.epoch for b in may_go) is None:
        return None
    victims = _fewest(state, may_go, now_ns, cards_without)
    cards = cards_without(b.epoch for b in victims)
    assert cards is not None
    return _Choice(_cost(state, victims, now_ns), node, victims, cards)


def _fewest(
    state: State, may_go: list[Binding], now_ns: int, cards_without: _CardsWithout
) -> tuple[Binding, ...]:
    """Smallest set that will do; of equal ones the cheapest. All of `may_go` together will."""
    tried = 0
    for size in range(1, len(may_go) + 1):
        best: tuple[tuple[int, int, int], tuple[Binding, ...]] | None = None
        for some in combinations(may_go, size):
            tried += 1
            if tried > SETS_MAX:
                return _thinned(state, may_go, now_ns, cards_without)
            cost = _cost(state, some, now_ns)
            if (best is None or cost < best[0]) and cards_without(b.epoch for b in some) is not None:
                best = (cost, some)
        if best is not None:
            return best[1]
    return tuple(may_go)


def _thinned(
    state: State, may_go: list[Binding], now_ns: int, cards_without: _CardsWithout
) -> tuple[Binding, ...]:
    """Spare them one by one, the dearest first, as long as the rest will do: nobody in it could be spared."""
    left = list(may_go)
    for binding in sorted(may_go, key=lambda b: _cost(state, (b,), now_ns), reverse=True):
        rest = [b for b in left if b.epoch != binding.epoch]
        if cards_without(b.epoch for b in rest) is not None:
            left = rest
    return tuple(left)


def _cards_without(
    state: State, node: Node, request: Request, seen: Mapping[str, Seen], asker: Asker, gone: set[int]
) -> tuple[Card, ...] | None:
    """The cards of the node that fit once these bindings are gone, the least left over first; None when too few."""
    need = need_bytes(request)
    fitting: list[tuple[int, int, Card]] = []
    for uuid in node.cards:
        card = state.cards.get(uuid)
        if (
            card is None
            or not card.present
            or not card.usable
            or card.quarantined is not None
            or card.switching
        ):
            continue
        if not model_fits(request.model, card.model) or kept_from(card, asker):
            continue
        shown = seen.get(uuid, NOTHING_SEEN)
        if shown.unknown or (card.mode is not None and card.mode is not request.mode):
            continue
        staying = [b for b in state.holders_of(card) if b.epoch not in gone]
        if staying and (request.mode is Mode.EXCLUSIVE or staying[0].mode is not request.mode):
            continue
        left = card.memory_bytes - shown.foreign_bytes - sum(held_bytes(b, card) for b in staying) - need
        if left >= 0:
            fitting.append((left, card.index, card))
    if len(fitting) < request.count:
        return None
    fitting.sort(key=lambda f: f[:2])
    return tuple(card for _, _, card in fitting[: request.count])


def evictions(demand: Demand, found: Preemption) -> Iterator[EvictionOrdered]:
    """The stop orders. Each names who the room is for, and all cards that are kept for it."""
    for binding in found.victims:
        yield EvictionOrdered(
            demand=binding.demand,
            epoch=binding.epoch,
            nodes=tuple(share.node for share in binding.shares),
            reason=EvictionReason.PREEMPTION,
            by="placer",
            grace_seconds=max(
                (c.stop_grace_seconds for s in binding.shares for c in s.components), default=10.0
            ),
            requeue=True,
            text=f"makes room for {demand.spec.demand} (priority {demand.spec.priority})",
            room_for=demand.spec.demand,
            room=found.cards,
        )

"""`soonest`: which releases would help a demand that must wait, and when they are due at the earliest.

A binding ends at the latest when its maximum run time is over; without one its end is unknown. The same answer
serves three: a person who asks, the cards that are kept for a demand that was passed too often, and `plan`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.values import Mode

from rigbook_placer.feasible import NOTHING_SEEN, kept_from, model_fits, need_bytes, node_fits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rigbook_ledger.state import Binding, Card, Node, State
    from rigbook_schemas.values import Request

    from rigbook_placer.feasible import Ask, Asker, Seen

__all__ = ["UNKNOWN_NS", "Soonest", "ends_ns", "soonest"]

# Later than anything: the end of what has no maximum run time.
UNKNOWN_NS: Final = sys.maxsize


class Soonest(msgspec.Struct, frozen=True):
    """The cards that a demand could have first, and what has to end before."""

    nodes: tuple[str, ...]
    cards: tuple[str, ...]
    waits_for: tuple[str, ...]  # demands that hold them
    at_ns: int = 0  # when the last of them has to end; 0 = unknown


class _Wait(msgspec.Struct, frozen=True, order=True):
    """How long a card or node is waited for. Sorts by what is known to come first."""

    unknown: int  # bindings without a known end
    at_ns: int  # the last known end
    endings: int  # bindings that have to end


_FREE: Final = _Wait(0, 0, 0)


def ends_ns(state: State, binding: Binding, now_ns: int) -> int:
    """When the binding ends at the latest; UNKNOWN_NS = nobody knows."""
    grace_ns = int(
        max((c.stop_grace_seconds for s in binding.shares for c in s.components), default=10.0) * 1e9
    )
    if binding.eviction is not None or not state.demands[binding.demand].wanted:
        return now_ns + grace_ns
    limit = state.demands[binding.demand].spec.max_run_seconds
    return UNKNOWN_NS if limit is None else max(now_ns, binding.bound_ns + int(limit * 1e9)) + grace_ns


def soonest(
    state: State,
    ask: Ask,
    seen: Mapping[str, Seen],
    asker: Asker,
    now_ns: int,
    *,
    among: Iterable[str] | None = None,
) -> Soonest | None:
    """None when no ending of bindings would help: everything else stays as it is."""
    request = ask.request
    waits: list[tuple[_Wait, int, Node, list[tuple[Card, list[Binding]]]]] = []
    for number, name in enumerate(state.nodes if among is None else among):
        node = state.nodes.get(name)
        if node is None or not node_fits(node, ask):
            continue
        found = _node_wait(state, node, request, seen, asker, now_ns)
        if found is not None:
            waits.append((found[0], number, node, found[1]))
    if len(waits) < request.nodes:
        return None
    waits.sort(key=lambda w: w[:2])
    best = waits[: request.nodes]
    endings = {b.epoch: b for _, _, _, cards in best for _, bindings in cards for b in bindings}
    whole = _sum([wait for wait, _, _, _ in best])
    return Soonest(
        nodes=tuple(node.name for _, _, node, _ in best),
        cards=tuple(card.uuid for _, _, _, cards in best for card, _ in cards),
        waits_for=tuple(dict.fromkeys(b.demand for b in endings.values())),
        at_ns=0 if whole.unknown else whole.at_ns,
    )


def _sum(waits: Sequence[_Wait]) -> _Wait:
    return _Wait(
        sum(w.unknown for w in waits), max((w.at_ns for w in waits), default=0), sum(w.endings for w in waits)
    )


def _node_wait(
    state: State, node: Node, request: Request, seen: Mapping[str, Seen], asker: Asker, now_ns: int
) -> tuple[_Wait, list[tuple[Card, list[Binding]]]] | None:
    cards: list[tuple[_Wait, int, Card, list[Binding]]] = []
    for uuid in node.cards:
        card = state.cards.get(uuid)
        if card is None:
            continue
        endings = endings_needed(state, card, request, seen.get(uuid, NOTHING_SEEN), asker, now_ns)
        if endings is None:
            continue
        ends = [ends_ns(state, b, now_ns) for b in endings]
        known = [end for end in ends if end != UNKNOWN_NS]
        wait = _Wait(len(ends) - len(known), max(known, default=0), len(ends)) if ends else _FREE
        cards.append((wait, card.index, card, endings))
    if len(cards) < request.count:
        return None
    cards.sort(key=lambda c: c[:2])
    best = cards[: request.count]
    return _sum([wait for wait, _, _, _ in best]), [(card, endings) for _, _, card, endings in best]


def endings_needed(
    state: State, card: Card, request: Request, seen: Seen, asker: Asker, now_ns: int
) -> list[Binding] | None:
    """The bindings that have to end for the card to fit, those that end first; None when that would not help."""
    if not card.present or not card.usable or card.quarantined is not None or card.switching or seen.unknown:
        return None
    if not model_fits(request.model, card.model):
        return None
    if card.mode is not None and card.mode is not request.mode:
        return None
    if kept_from(card, asker):
        return None
    need = need_bytes(request)
    if card.memory_bytes - seen.foreign_bytes < need:
        return None
    bindings = state.holders_of(card)
    if request.mode is Mode.EXCLUSIVE or any(b.mode is not request.mode for b in bindings):
        return bindings
    free = card.memory_bytes - card.reserved_bytes - seen.foreign_bytes
    needed: list[Binding] = []
    for binding in sorted(bindings, key=lambda b: (ends_ns(state, b, now_ns), b.epoch)):
        if free >= need:
            break
        needed.append(binding)
        free += held_bytes(binding, card)
    return needed


def held_bytes(binding: Binding, card: Card) -> int:
    """What the binding has of the card."""
    return sum(a.memory_bytes for s in binding.shares for a in s.allotments if a.card == card.uuid)

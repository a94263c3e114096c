"""`rank`: which of the feasible nodes, and which of its cards. The score; `feasible` filtered before.

`pack` (the default) fills few servers and leaves whole servers empty: the node with the least free
memory that still fits, then the card with the least left over. A preferred label outranks packing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_ledger.state import Card
from rigbook_schemas.values import Mode

from rigbook_placer.feasible import Option, Seen, free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rigbook_ledger.state import State
    from rigbook_schemas.values import Request

__all__ = ["POLICIES", "Ranked", "pack", "rank", "spread"]

_UNSEEN: Final = Seen()


class Ranked(msgspec.Struct, frozen=True):
    """A node and the cards on it that the demand would get. Sorts by `score`, lowest first."""

    score: tuple[int, ...]
    option: Option
    cards: tuple[Card, ...]


def rank(
    state: State,
    request: Request,
    options: Sequence[Option],
    seen: Mapping[str, Seen],
    policy: Callable[[State, Request, Option, Mapping[str, Seen]], Ranked],
) -> list[Ranked]:
    """All options, best first. Ties go to the node that joined first, so the answer is one."""
    ranked = [policy(state, request, option, seen) for option in options]
    ranked.sort(key=lambda r: r.score)
    return ranked


def _missed_preferences(request: Request, option: Option) -> int:
    return sum(1 for key, value in request.prefer.items() if option.node.labels.get(key) != value)


def _node_free(state: State, option: Option) -> int:
    return sum(
        state.cards[u].memory_bytes - state.cards[u].reserved_bytes
        for u in option.node.cards
        if u in state.cards
    )


def _tightest(request: Request, option: Option, seen: Mapping[str, Seen]) -> tuple[Card, ...]:
    """The cards with the least left over; among equals one already in use, then the lowest index."""

    def key(card: Card) -> tuple[int, int, int]:
        left = free_bytes(card, seen.get(card.uuid, _UNSEEN)) - request.memory_bytes
        # An exclusive binding wastes what it leaves of the card; a shared one leaves it for others.
        waste = card.memory_bytes if request.mode is Mode.EXCLUSIVE else left
        return (waste, 0 if card.holders else 1, card.index)

    return tuple(sorted(option.cards, key=key)[: request.count])


def pack(state: State, request: Request, option: Option, seen: Mapping[str, Seen]) -> Ranked:
    """Fill few servers."""
    cards = _tightest(request, option, seen)
    left = sum(free_bytes(c, seen.get(c.uuid, _UNSEEN)) - request.memory_bytes for c in cards)
    wasted = sum(c.memory_bytes for c in cards) if request.mode is Mode.EXCLUSIVE else 0
    return Ranked(
        (_missed_preferences(request, option), wasted, _node_free(state, option), left), option, cards
    )


def spread(state: State, request: Request, option: Option, seen: Mapping[str, Seen]) -> Ranked:
    """Use the emptiest server, and on it the emptiest cards."""
    cards = tuple(
        sorted(option.cards, key=lambda c: (-free_bytes(c, seen.get(c.uuid, _UNSEEN)), c.index))[
            : request.count
        ]
    )
    return Ranked((_missed_preferences(request, option), -_node_free(state, option)), option, cards)


POLICIES: Final[dict[str, Callable[[State, Request, Option, Mapping[str, Seen]], Ranked]]] = {
    "pack": pack,
    "spread": spread,
}

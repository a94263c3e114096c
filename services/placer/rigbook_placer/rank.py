"""`rank`: which of the feasible nodes, and which of its cards. The score; `feasible` filtered before.

`pack` (the default) fills few servers and leaves whole servers empty: the node with the least free
memory that still fits, then the card with the least left over. `spread` does the opposite. `best-fit` looks
at the left over alone. What a demand prefers (labels, a node with its model weights, a node where its start
has not failed) outranks each policy's score, and excludes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
from rigbook_ledger.state import Card
from rigbook_schemas.values import Labels, Mode

from rigbook_placer.feasible import NOTHING_SEEN, Option, free_bytes, need_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rigbook_ledger.state import Demand, Node, State
    from rigbook_schemas.events import DemandRaised
    from rigbook_schemas.values import Request

    from rigbook_placer.feasible import Seen

__all__ = [
    "NO_TASTE", "POLICIES", "Ranked", "Scored", "Taste", "best_fit", "missed", "pack", "rank", "spread", "taste_of",
]  # fmt: skip


class Ranked(msgspec.Struct, frozen=True):
    """A node and the cards on it that the demand would get. Sorts by `score`, lowest first."""

    score: tuple[int, ...]
    option: Option
    cards: tuple[Card, ...]


# A policy's answer for one node: its score (lowest first) and the cards.
Scored: TypeAlias = tuple[tuple[int, ...], tuple[Card, ...]]


class Taste(msgspec.Struct, frozen=True):
    """What a demand would rather have. Never excludes a node."""

    prefer: Labels = {}
    weights: str = ""
    avoid: tuple[str, ...] = ()  # nodes where it could not be started


NO_TASTE: Final = Taste()
# One node to be avoided weighs more than all labels together.
_AVOIDED: Final = 1000


def taste_of(spec: DemandRaised, demand: Demand | None) -> Taste:
    request = spec.resources
    avoid = demand.failed_on if demand is not None and demand.failures else ()
    if not request.prefer and not request.weights and not avoid:
        return NO_TASTE
    return Taste(request.prefer, request.weights, avoid)


def missed(taste: Taste, node: Node) -> int:
    """How many of its wishes the node does not meet."""
    if taste is NO_TASTE:
        return 0
    count = sum(1 for key, value in taste.prefer.items() if node.labels.get(key) != value)
    if taste.weights and taste.weights not in node.weights:
        count += 1
    return count + _AVOIDED if node.name in taste.avoid else count


def rank(
    state: State,
    request: Request,
    options: Iterable[Option],
    seen: Mapping[str, Seen],
    policy: Callable[[State, Request, Option, Mapping[str, Seen]], Scored],
    taste: Taste = NO_TASTE,
) -> list[Ranked]:
    """All options, best first. Ties go to the node that joined first, so the answer is one."""
    ranked: list[Ranked] = []
    for option in options:
        score, cards = policy(state, request, option, seen)
        ranked.append(Ranked((missed(taste, option.node), *score), option, cards))
    ranked.sort(key=lambda r: r.score)
    return ranked


def _node_free(state: State, option: Option) -> int:
    return sum(
        state.cards[u].memory_bytes - state.cards[u].reserved_bytes
        for u in option.node.cards
        if u in state.cards
    )


def _left(card: Card, need: int, seen: Mapping[str, Seen]) -> int:
    return free_bytes(card, seen.get(card.uuid, NOTHING_SEEN)) - need


def _tightest(
    request: Request, option: Option, seen: Mapping[str, Seen]
) -> tuple[tuple[Card, ...], int, int]:
    """The cards with the least left over, what they leave, and what an exclusive binding wastes of them.

    Among equals one already in use, then the lowest index. An exclusive binding has the whole card on its
    books, however much was asked: of cards that fit, the smallest.
    """
    need = need_bytes(request)
    exclusive = request.mode is Mode.EXCLUSIVE

    def key(card: Card) -> tuple[int, int, int, int]:
        return (
            card.memory_bytes if exclusive else 0,
            _left(card, need, seen),
            0 if card.holders else 1,
            card.index,
        )

    cards = tuple(sorted(option.cards, key=key)[: request.count])
    wasted = sum(c.memory_bytes for c in cards) if exclusive else 0
    return cards, sum(_left(c, need, seen) for c in cards), wasted


def pack(state: State, request: Request, option: Option, seen: Mapping[str, Seen]) -> Scored:
    """Fill few servers: (bytes of the cards taken whole, free bytes of the node, left over)."""
    cards, left, wasted = _tightest(request, option, seen)
    return (wasted, _node_free(state, option), left), cards


def best_fit(state: State, request: Request, option: Option, seen: Mapping[str, Seen]) -> Scored:
    """The least left over, wherever that is: (bytes of the cards taken whole, left over)."""
    del state
    cards, left, wasted = _tightest(request, option, seen)
    return (wasted, left), cards


def spread(state: State, request: Request, option: Option, seen: Mapping[str, Seen]) -> Scored:
    """Use the emptiest server, and on it the emptiest cards: (minus free bytes of the node)."""
    cards = tuple(sorted(option.cards, key=lambda c: (-_left(c, 0, seen), c.index))[: request.count])
    return (-_node_free(state, option),), cards


POLICIES: Final[dict[str, Callable[[State, Request, Option, Mapping[str, Seen]], Scored]]] = {
    "pack": pack,
    "spread": spread,
    "best-fit": best_fit,
}

"""`rank`: which of the feasible nodes, and which of its cards. The score; `feasible` filtered before.

`pack` (the default) fills few servers and leaves whole servers empty: the node with the least free
memory that still fits, then the card with the least left over. `spread` does the opposite. `best-fit` looks
at the left over alone. `fgd` and `rigbook` look at the whole mix of demands (`packing`). What a demand prefers (labels, a node with its model weights, a node where its start
has not failed) outranks each policy's score, and excludes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
from rigbook_ledger.state import Card
from rigbook_schemas.values import Labels, Mode

from rigbook_placer.feasible import NOTHING_SEEN, Option, free_bytes, need_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rigbook_ledger.state import Demand, Node, State
    from rigbook_schemas.events import DemandRaised
    from rigbook_schemas.values import Request

    from rigbook_placer.feasible import Kept, Seen
    from rigbook_placer.packing.books import Books

__all__ = [
    "NO_TASTE", "PACKING", "POLICIES", "Ranked", "Scored", "Scoring", "Taste", "best_fit", "missed", "pack", "packed", "rank", "spread", "taste_of",
]  # fmt: skip


class Ranked(msgspec.Struct, frozen=True):
    """A node and the cards on it that the demand would get. Sorts by `score`, lowest first."""

    score: tuple[float, ...]
    option: Option
    cards: tuple[Card, ...]


# A policy's answer for one node: its score (lowest first) and the cards.
Scored: TypeAlias = tuple[tuple[float, ...], tuple[Card, ...]]
# The one signature: the state, what is asked, the feasible nodes, what is seen and what is kept; a score for each node.
Scoring: TypeAlias = (
    "Callable[[State, Request, Sequence[Option], Mapping[str, Seen], Mapping[str, Kept]], list[Scored]]"
)


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
    options: Sequence[Option],
    seen: Mapping[str, Seen],
    policy: Scoring,
    taste: Taste = NO_TASTE,
    kept: Mapping[str, Kept] | None = None,
) -> list[Ranked]:
    """All options, best first. Ties go to the node that joined first, so the answer is one."""
    ranked = [
        Ranked((missed(taste, option.node), *score), option, cards)
        for option, (score, cards) in zip(
            options, policy(state, request, options, seen, kept or {}), strict=True
        )
    ]
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


def packed(
    books: Books, state: State, request: Request, options: Sequence[Option], seen: Mapping[str, Seen]
) -> list[Scored]:
    """By a policy that looks at the whole mix; where its terms do not reach, by `pack`, after all others."""
    scored: list[Scored] = []
    for option, chosen in zip(options, books.score(request, options), strict=True):
        if chosen is not None:
            scored.append((chosen.score, tuple(state.cards[uuid] for uuid in chosen.cards)))
        else:
            score, cards = pack(state, request, option, seen)
            scored.append(((1, *score), cards))
    return scored


def _each(policy: Callable[[State, Request, Option, Mapping[str, Seen]], Scored]) -> Scoring:
    def scores(
        state: State,
        request: Request,
        options: Sequence[Option],
        seen: Mapping[str, Seen],
        kept: Mapping[str, Kept],
    ) -> list[Scored]:
        del kept
        return [policy(state, request, option, seen) for option in options]

    return scores


def _whole_mix(name: str) -> Scoring:
    def scores(
        state: State,
        request: Request,
        options: Sequence[Option],
        seen: Mapping[str, Seen],
        kept: Mapping[str, Kept],
    ) -> list[Scored]:
        from rigbook_placer.packing.books import Books  # numpy is loaded by who asks for this

        return packed(Books(name, state, seen, kept), state, request, options, seen)

    return scores


# Policies that need the books of the whole fleet (`packing.books`), made anew for each decision or kept (`index`).
PACKING: Final = ("fgd", "rigbook")
POLICIES: Final[dict[str, Scoring]] = {
    "pack": _each(pack),
    "spread": _each(spread),
    "best-fit": _each(best_fit),
    **{name: _whole_mix(name) for name in PACKING},
}

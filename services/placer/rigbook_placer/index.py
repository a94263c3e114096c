"""`Index`: the best nodes for an ask without looking at the whole fleet; the same answer as looking at it.

On one array per field (`arrays`). For each shape asked for (ask, taste, policy) it keeps the score of every
feasible node in a heap, and looks again only at nodes that changed since the shape was last asked for: a decision
costs about the same at a hundred cards and at a hundred thousand. The scores are those of `rank`, made for all nodes at once when a shape is new, and by
`rank`'s own functions for a node that changed. Nothing here decides.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from rigbook_schemas.values import Mode

from rigbook_placer.arrays import Arrays
from rigbook_placer.feasible import Asker, feasible, need_bytes, plain_model
from rigbook_placer.rank import NO_TASTE, PACKING, POLICIES, missed, packed, rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from rigbook_ledger.state import State
    from rigbook_schemas.values import Request

    from rigbook_placer.feasible import Ask, Kept, Option, Seen
    from rigbook_placer.packing.books import Books
    from rigbook_placer.rank import Scored, Scoring, Taste

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

__all__ = ["Index"]

# Shapes kept, and nodes in all of them together; the least recently asked goes first. About 150 bytes a node.
SHAPES_MAX: Final = 512
ENTRIES_MAX: Final = 1_000_000
# Below this many feasible nodes the plain way is as quick.
PLAIN_NODES_MAX: Final = 16
# A shape that missed more changes than this is made anew.
CATCH_UP_MAX: Final = 512

_ALL: Final = slice(None)
# From this many changed nodes on they are scored all at once.
TOGETHER_MIN: Final = 6

_Score = tuple[float, ...]


class _Shape:
    """Scores of the feasible nodes for one (ask, taste, policy)."""

    __slots__ = ("ask", "heap", "mark", "policy", "scores", "taste")

    def __init__(self, ask: Ask, taste: Taste, policy: str, mark: int) -> None:
        self.ask = ask
        self.taste = taste
        self.policy = policy
        self.mark = mark  # changes looked at so far
        self.scores: dict[int, _Score] = {}
        self.heap: list[tuple[_Score, int]] = []


class Index(Arrays):
    """Follows one state: call `follow` after every batch, `look` when what is seen of a card changed."""

    def __init__(self, state: State, seen: Mapping[str, Seen]) -> None:
        self._shapes: OrderedDict[bytes, _Shape] = OrderedDict()
        self._entries = 0
        self._books: dict[str, Books] = {}
        super().__init__(state, seen)

    def keep(self, kept: Mapping[str, Kept]) -> None:
        super().keep(kept)
        self._books.clear()

    def _changed(self, numbers: Iterable[int]) -> None:
        changed = list(numbers)
        super()._changed(changed)
        for number in changed if self._books else ():
            for policy in [p for p, books in self._books.items() if not books.put(self._names[number])]:
                del self._books[policy]

    def best(self, ask: Ask, taste: Taste, policy: str, asker: Asker, count: int) -> tuple[list[str], int]:
        """The `count` best feasible nodes in joining order of equals, and how many feasible ones there are."""
        if policy in PACKING:
            return self._best_packed(ask, taste, policy, asker, count)
        own = self._own_nodes(asker)
        key = msgspec.msgpack.encode((ask, taste, policy))
        if not own and key not in self._shapes and need_bytes(ask.request) > self.at_most(ask.request.mode):
            return [], 0
        shape = self._shape(key, ask, taste, policy)
        found: list[tuple[_Score, int]] = []
        popped: list[tuple[_Score, int]] = []
        while shape.heap and len(found) < count:
            entry = heapq.heappop(shape.heap)
            if shape.scores.get(entry[1]) == entry[0]:
                popped.append(entry)
                if self._names[entry[1]] not in own:
                    found.append(entry)
        for entry in popped:
            heapq.heappush(shape.heap, entry)
        feasible_count = len(shape.scores)
        if own:  # some cards are kept for this very demand: its nodes are looked at as it sees them
            for name in own:
                score = self._score(ask, taste, policy, name, asker)
                number = self._number[name]
                feasible_count += (score is not None) - (number in shape.scores)
                if score is not None:
                    found.append((score, number))
            found.sort()
        return [self._names[number] for _, number in found[:count]], feasible_count

    def scoring(self, policy: str) -> Scoring:
        """The policy on the books that are kept here; for the plain ones, they themselves."""
        if policy not in PACKING:
            return POLICIES[policy]

        def scores(
            state: State,
            request: Request,
            options: Sequence[Option],
            seen: Mapping[str, Seen],
            kept: Mapping[str, Kept],
        ) -> list[Scored]:
            del kept
            return packed(self._books_of(policy), state, request, options, seen)

        return scores

    def _books_of(self, policy: str) -> Books:
        from rigbook_placer.packing.books import Books, as_of

        books = self._books.get(policy)
        if books is None or books.as_of != as_of(self._state.position):
            books = self._books[policy] = Books(policy, self._state, self._seen, self._kept)
        return books

    def _best_packed(
        self, ask: Ask, taste: Taste, policy: str, asker: Asker, count: int
    ) -> tuple[list[str], int]:
        """The best by the books, and what `pack` would take where they do not reach."""
        names, feasible_count = self.best(ask, taste, "pack", asker, 2 * count)
        if not names:
            return names, feasible_count
        shape = self._shapes.get(msgspec.msgpack.encode((ask, taste, "pack")))
        if shape is None:
            return names, feasible_count
        numbers = np.fromiter(shape.scores, np.int64, len(shape.scores))
        allowed = np.zeros(len(self._names), np.bool_)
        allowed[numbers] = True
        wishes = None
        if taste is not NO_TASTE:
            wishes = np.zeros(len(self._names), np.int64)
            wishes[numbers] = [missed(taste, self._state.nodes[self._names[n]]) for n in numbers]
        best = self._books_of(policy).best(ask.request, allowed, wishes, count)
        mine = [self._names[row] for _, row in best]
        # Of equals the one that joined first: the order of the names is the order of the answer.
        both = sorted({*mine, *names, *self._own_nodes(asker)}, key=lambda name: self._number[name])
        return both, feasible_count

    def too_big(self, request: Request, mark: int) -> bool:
        """The cheap part of `unfit`: no card that gained since has as much as it asks for."""
        if mark == self.gained:
            return True
        return mark >= self._gains_base and need_bytes(request) > self._largest_since(mark)[request.mode]

    def unfit(self, ask: Ask, mark: int) -> bool:
        """It was not feasible at `mark`, and what has changed since does not help."""
        if self.too_big(ask.request, mark):
            return True
        if mark < self._gains_base:
            return False
        numbers = set(self._gains[mark - self._gains_base :])
        if ask.request.nodes > 1 or len(numbers) > PLAIN_NODES_MAX:
            return False
        names = [self._names[n] for n in numbers]
        return next(feasible(self._state, ask, self._seen, self._everybody, among=names), None) is None

    def _own_nodes(self, asker: Asker) -> list[str]:
        """Nodes with cards that are kept, and not from this demand."""
        demand = self._state.demands.get(asker.demand)
        cards = list(demand.room) if demand is not None else []
        cards += [
            u
            for u, kept in asker.kept.items()
            if kept.demand == asker.demand
            or (asker.ends_ns and kept.from_ns and asker.ends_ns <= kept.from_ns)
        ]
        return list(dict.fromkeys(self._state.cards[u].node for u in cards if u in self._state.cards))

    def _shape(self, key: bytes, ask: Ask, taste: Taste, policy: str) -> _Shape:
        shape = self._shapes.get(key)
        if shape is not None and shape.mark >= self._base:
            numbers = list(dict.fromkeys(self._changes[shape.mark - self._base :]))
            if len(numbers) <= CATCH_UP_MAX:
                self._shapes.move_to_end(key)
                self._catch_up(shape, numbers)
                return shape
        if shape is not None:
            del self._shapes[key]
            self._entries -= len(shape.scores)
        shape = _Shape(ask, taste, policy, self._mark)
        shape.scores = self._scores(ask, taste, policy)
        shape.heap = [(score, number) for number, score in shape.scores.items()]
        heapq.heapify(shape.heap)
        if shape.scores:
            self._shapes[key] = shape
            self._entries += len(shape.scores)
            while len(self._shapes) > SHAPES_MAX or (self._entries > ENTRIES_MAX and len(self._shapes) > 1):
                _, oldest = self._shapes.popitem(last=False)
                self._entries -= len(oldest.scores)
        return shape

    def _catch_up(self, shape: _Shape, numbers: Sequence[int]) -> None:
        ask, taste, policy = shape.ask, shape.taste, shape.policy
        together: dict[int, _Score] | None = None
        if len(numbers) >= TOGETHER_MIN and policy in _SCORED:
            rows = np.array([row for n in numbers for row in self._rows_of[n]], np.int64)
            together = self._scores(ask, taste, policy, rows)
        for number in numbers:
            if together is not None:
                score = together.get(number)
            else:
                score = self._score(ask, taste, policy, self._names[number], self._everybody)
            if score is None:
                self._entries -= shape.scores.pop(number, None) is not None
            elif shape.scores.get(number) != score:
                self._entries += number not in shape.scores
                shape.scores[number] = score
                heapq.heappush(shape.heap, (score, number))
        shape.mark = self._mark
        if len(shape.heap) > 4 * len(shape.scores) + 64:
            shape.heap = [(score, number) for number, score in shape.scores.items()]
            heapq.heapify(shape.heap)

    def _score(self, ask: Ask, taste: Taste, policy: str, name: str, asker: Asker) -> _Score | None:
        """By the plain functions, for one node."""
        option = next(feasible(self._state, ask, self._seen, asker, among=(name,)), None)
        if option is None:
            return None
        return rank(self._state, ask.request, (option,), self._seen, self.scoring(policy), taste)[0].score

    def _scores(self, ask: Ask, taste: Taste, policy: str, among: Ints | None = None) -> dict[int, _Score]:
        """Of all feasible nodes at once; `among`: rows of the nodes to look at."""
        if not len(self._total) or not self._names:
            return {}
        request = ask.request
        some: Ints | slice = _ALL if among is None else among
        mask = (
            self._open[some] & (self._free[some] >= need_bytes(request)) & self._serving(request.mode, some)
        )
        if request.model:
            asked = plain_model(request.model)
            models = [n for model, n in self._models.items() if asked in model]
            mask &= np.isin(self._model[some], models)
        mask &= (self._node_open & self._eligible_for(ask))[self._node[some]]
        rows = np.flatnonzero(mask) if among is None else among[mask]
        counts = np.bincount(self._node[rows], minlength=len(self._node_open))
        numbers = np.flatnonzero(counts >= request.count)
        if policy not in _SCORED or (among is None and len(numbers) <= PLAIN_NODES_MAX):
            found = {
                int(n): self._score(ask, taste, policy, self._names[n], self._everybody) for n in numbers
            }
            return {n: score for n, score in found.items() if score is not None}
        if not len(numbers):
            return {}
        if request.count > 1:
            rows = rows[(counts >= request.count)[self._node[rows]]]
        keys = self._keys(rows, numbers, ask, policy)
        wishes = [0] * len(numbers)
        if taste is not NO_TASTE:
            wishes = [missed(taste, self._state.nodes[self._names[n]]) for n in numbers]
        return dict(zip(numbers.tolist(), zip(wishes, *(k.tolist() for k in keys), strict=True), strict=True))

    def _keys(self, rows: Ints, numbers: Ints, ask: Ask, policy: str) -> list[Ints]:
        """The parts of `rank`'s score after the wishes, one array each, for the nodes `numbers`."""
        if policy == "spread":
            return [-self._node_free[numbers]]
        request = ask.request
        exclusive = request.mode is Mode.EXCLUSIVE
        left = self._free[rows] - need_bytes(request)
        size = self._total[rows] if exclusive else np.zeros(len(rows), np.int64)
        order = np.lexsort((self._index[rows], self._serves[rows] == -1, left, size, self._node[rows]))
        nodes = self._node[rows][order]
        starts = np.searchsorted(nodes, numbers)
        taken = (starts[:, None] + np.arange(request.count)).ravel()
        best = order[taken].reshape(len(numbers), request.count)
        wasted, over = size[best].sum(axis=1), left[best].sum(axis=1)
        return [wasted, self._node_free[numbers], over] if policy == "pack" else [wasted, over]


# Policies whose scores are made for all nodes at once; others are made node by node when a shape is new.
_SCORED: Final = frozenset({"pack", "spread", "best-fit"})

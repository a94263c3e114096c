"""`Index`: the best nodes for an ask without looking at the whole fleet; the same answer as looking at it.

One array per field (struct of arrays), a row per card, kept up to date by what the log touched. For each shape
asked for (ask, taste, policy) it keeps the score of every feasible node in a heap, and looks again only at
nodes that changed since the shape was last asked for: a decision costs about the same at a hundred cards and at
a hundred thousand. The scores are those of `rank`, made for all nodes at once when a shape is new, and by
`rank`'s own functions for a node that changed. Nothing here decides.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import numpy as np
from rigbook_schemas.values import Mode

from rigbook_placer.feasible import NOBODY, Asker, feasible, need_bytes, plain_model
from rigbook_placer.rank import NO_TASTE, PACKING, POLICIES, missed, packed, rank
from rigbook_placer.rules import Totals

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from rigbook_ledger.state import Card, Node, State
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
# Changes are remembered for shapes that have not been asked for in a while.
CHANGES_MAX: Final = 200_000

# Nodes looked at for what could be free soonest, and for preemption.
ABLE_MAX: Final = 2_000

_MODE: Final[dict[Mode | None, int]] = {None: -1, Mode.EXCLUSIVE: 0, Mode.MEMORY_SLICE: 1, Mode.TIME_SLICE: 2}
_GROW: Final = 1024
_ALL: Final = slice(None)
_FIELDS: Final = ("_total", "_free", "_node", "_index", "_model", "_pinned", "_serves", "_open", "_usable")
# After so many changes the most that a card has free is looked up anew.
ROOMIEST_CHANGES: Final = 1024
# From this many changed nodes on they are scored all at once.
TOGETHER_MIN: Final = 6

_Score = tuple[float, ...]
_Field = TypeVar("_Field", np.int64, np.bool_)


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


class Index:
    """Follows one state: call `follow` after every batch, `look` when what is seen of a node changed."""

    def __init__(self, state: State, seen: Mapping[str, Seen]) -> None:
        self._state = state
        self._seen = seen
        self._kept: Mapping[str, Kept] = {}
        self._everybody = NOBODY
        self._names: list[str] = []
        self._number: dict[str, int] = {}  # of a node: nodes that joined first come first
        self._row: dict[str, int] = {}  # of a card
        self._unused: list[int] = []
        self._total = np.zeros(0, np.int64)
        self._free = np.zeros(0, np.int64)
        self._node = np.zeros(0, np.int64)
        self._index = np.zeros(0, np.int64)
        self._model = np.zeros(0, np.int64)
        self._pinned = np.zeros(0, np.int64)
        self._serves = np.zeros(0, np.int64)  # mode of its bindings, -1 = holds none
        self._open = np.zeros(0, np.bool_)
        self._usable = np.zeros(0, np.bool_)  # open, or kept for somebody
        self._node_open = np.zeros(0, np.bool_)
        self._node_free = np.zeros(0, np.int64)
        self._models: dict[str, int] = {}
        self._eligible: dict[tuple[tuple[str, ...], tuple[tuple[str, str], ...], str], Bools] = {}
        self._changes: list[int] = []
        self._base = 0  # changes forgotten
        self._gains: list[int] = []  # nodes whose change may let something fit that did not
        self._gains_base = 0
        self._rows_of: list[list[int]] = []  # of a node
        self._roomiest: dict[Mode, int] = {}  # no open card has more free bytes than this, by mode
        self._roomiest_mark = 0
        self._shapes: OrderedDict[bytes, _Shape] = OrderedDict()
        self._entries = 0
        self._high: dict[int, int] = {}  # epoch of high priority: bytes
        self._cap_priority = state.policy.cap_priority
        self._fleet_bytes = 0
        self._present: dict[str, int] = {}
        self._largest: dict[int, dict[Mode, int]] = {}
        self._books: dict[str, Books] = {}
        self.follow(state.nodes, state.cards, state.bindings)

    # -- following --------------------------------------------------------------------------

    @property
    def gained(self) -> int:
        """Counts changes that may let something fit that did not: the mark for `unfit`."""
        return self._gains_base + len(self._gains)

    @property
    def _mark(self) -> int:
        """Counts all changes."""
        return self._base + len(self._changes)

    @property
    def totals(self) -> Totals:
        if self._cap_priority != self._state.policy.cap_priority:
            self._cap_priority = self._state.policy.cap_priority
            self._high.clear()
            self._note_high(self._state.bindings)
        return Totals(self._fleet_bytes, sum(self._high.values()))

    def follow(self, nodes: Iterable[str], cards: Iterable[str], bindings: Iterable[int] = ()) -> None:
        """What the log touched since the last time."""
        state = self._state
        changed: dict[int, None] = {}
        for name in nodes:
            node = state.nodes.get(name)
            if node is not None:
                changed[self._put_node(node)] = None
                for uuid in node.cards:
                    if uuid not in self._row and uuid in state.cards:
                        self._put_card(state.cards[uuid])
        for uuid in cards:
            card = state.cards.get(uuid)
            number = self._drop_card(uuid) if card is None else self._put_card(card)
            if number is not None:
                changed[number] = None
        self._note_high(bindings)
        self._changed(changed)

    def look(self, uuids: Iterable[str]) -> None:
        """What is seen of these cards has changed."""
        self.follow((), [u for u in uuids if u in self._state.cards])

    def keep(self, kept: Mapping[str, Kept]) -> None:
        """Cards kept for demands that came first: for others they are not there."""
        different = [u for u in {*kept, *self._kept} if kept.get(u) != self._kept.get(u)]
        self._kept = dict(kept)
        self._everybody = Asker(kept=self._kept)
        self._books.clear()
        self.look(different)

    def _changed(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            node = self._state.nodes[self._names[number]]
            cards = [self._state.cards[u] for u in node.cards if u in self._state.cards]
            self._node_free[number] = sum(c.memory_bytes - c.reserved_bytes for c in cards)
            self._changes.append(number)
            for policy in [p for p, books in self._books.items() if not books.put(node.name)]:
                del self._books[policy]
        half = CHANGES_MAX // 2
        if len(self._changes) > CHANGES_MAX:
            del self._changes[:half]
            self._base += half
        if len(self._gains) > CHANGES_MAX:
            del self._gains[:half]
            self._gains_base += half

    def _put_node(self, node: Node) -> int:
        number = self._number.get(node.name)
        if number is None:
            number = self._number[node.name] = len(self._names)
            self._names.append(node.name)
            self._rows_of.append([])
            if number >= len(self._node_open):
                self._node_open = _grown(self._node_open)
                self._node_free = _grown(self._node_free)
                self._eligible.clear()
        self._node_open[number] = node.driver_ok and not node.unreachable_ns and node.cordoned is None
        for (engines, require, name), eligible in self._eligible.items():
            eligible[number] = _eligible(node, engines, require, name)
        self._gains.append(number)
        self._largest.clear()
        self._roomiest.clear()
        return number

    def _put_card(self, card: Card) -> int | None:
        number = self._number.get(card.node)
        if number is None:
            return None
        row = self._row.get(card.uuid)
        if row is None:
            row = self._row[card.uuid] = self._unused.pop() if self._unused else len(self._row)
            if row >= len(self._total):
                for name in _FIELDS:
                    setattr(self, name, _grown(getattr(self, name)))
            self._open[row] = self._usable[row] = False
            self._node[row] = number
            self._rows_of[number].append(row)
        elif self._node[row] != number:
            self._rows_of[int(self._node[row])].remove(row)
            self._rows_of[number].append(row)
        seen = self._seen.get(card.uuid)
        before = (
            (int(self._free[row]), int(self._serves[row]), int(self._pinned[row]))
            if self._usable[row]
            else None
        )
        self._total[row] = card.memory_bytes
        self._free[row] = card.memory_bytes - card.reserved_bytes - (seen.foreign_bytes if seen else 0)
        self._node[row] = number
        self._index[row] = card.index
        self._model[row] = self._models.setdefault(plain_model(card.model), len(self._models))
        self._pinned[row] = _MODE[card.mode]
        self._serves[row] = _MODE[self._state.bindings[card.holders[0]].mode] if card.holders else -1
        was_open = bool(self._open[row])
        self._usable[row] = (
            card.present
            and card.usable
            and card.quarantined is None
            and not card.switching
            and not (seen is not None and seen.unknown)
        )
        self._open[row] = self._usable[row] and not card.held_for and card.uuid not in self._kept
        if self._usable[row]:
            self._note_gain(row, number, before if was_open or not self._open[row] else None)
        was = self._present.get(card.uuid, 0)
        now = card.memory_bytes if card.present else 0
        if was != now:
            self._present[card.uuid] = now
            self._fleet_bytes += now - was
        return number

    def _note_gain(self, row: int, number: int, before: tuple[int, int, int] | None) -> None:
        free, serves = int(self._free[row]), int(self._serves[row])
        if (
            before is None
            or free > before[0]
            or (before[1] != -1 and serves != before[1])
            or self._pinned[row] != before[2]
        ):
            self._gains.append(number)
            self._largest.clear()
            for mode in self._roomiest:
                self._roomiest[mode] = max(self._roomiest[mode], free)

    def _drop_card(self, uuid: str) -> int | None:
        row = self._row.pop(uuid, None)
        if row is None:
            return None
        self._open[row] = self._usable[row] = False
        self._unused.append(row)
        self._rows_of[int(self._node[row])].remove(row)
        self._fleet_bytes -= self._present.pop(uuid, 0)
        return int(self._node[row])

    def _note_high(self, bindings: Iterable[int]) -> None:
        state = self._state
        for epoch in bindings:
            binding = state.bindings.get(epoch)
            if binding is None:
                self._high.pop(epoch, None)
            elif state.demands[binding.demand].spec.priority >= self._cap_priority:
                self._high[epoch] = binding.memory_bytes

    # -- asking -----------------------------------------------------------------------------

    def best(self, ask: Ask, taste: Taste, policy: str, asker: Asker, count: int) -> tuple[list[str], int]:
        """The `count` best feasible nodes in joining order of equals, and how many feasible ones there are."""
        if policy in PACKING:
            return self._best_packed(ask, taste, policy, asker, count)
        own = self._own_nodes(asker)
        key = msgspec.msgpack.encode((ask, taste, policy))
        if not own and key not in self._shapes and need_bytes(ask.request) > self._at_most(ask.request.mode):
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

    def able(self, ask: Ask, most: int = ABLE_MAX) -> list[str]:
        """Nodes that could hold it if they were empty, those with the most free memory first."""
        if not len(self._total) or not self._names:
            return []
        request = ask.request
        mask = self._total >= need_bytes(request)
        if request.model:
            asked = plain_model(request.model)
            mask &= np.isin(self._model, [n for model, n in self._models.items() if asked in model])
        mask &= (self._node_open & self._eligible_for(ask))[self._node]
        counts = np.bincount(self._node[mask], minlength=len(self._node_open))
        numbers = np.flatnonzero(counts >= request.count)
        best = numbers[np.argsort(-self._node_free[numbers], kind="stable")[:most]]
        return [self._names[n] for n in best.tolist()]

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

    def _at_most(self, mode: Mode) -> int:
        """No open card has more free bytes in this mode. Seldom too high: bindings lower it a while later."""
        if mode not in self._roomiest or self._mark - self._roomiest_mark > ROOMIEST_CHANGES:
            if self._mark - self._roomiest_mark > ROOMIEST_CHANGES:
                self._roomiest.clear()
            self._roomiest_mark = self._mark
            free = self._free[self._open & self._node_open[self._node] & self._serving(mode)]
            self._roomiest[mode] = int(free.max()) if len(free) else -1
        return self._roomiest[mode]

    def _largest_since(self, mark: int) -> dict[Mode, int]:
        """No open card of the nodes that gained since has more free bytes, by mode."""
        known = self._largest.get(mark)
        if known is None:
            rows = [row for n in set(self._gains[mark - self._gains_base :]) for row in self._rows_of[n]]
            some = np.array(rows, np.int64)
            mask = self._open[some] & self._node_open[self._node[some]]
            known = {}
            for mode in Mode:
                free = self._free[some[mask & self._serving(mode, some)]]
                known[mode] = int(free.max()) if len(free) else -1
            if len(self._largest) > 256:
                self._largest.clear()
            self._largest[mark] = known
        return known

    def _serving(self, mode: Mode, rows: Ints | slice = _ALL) -> Bools:
        code = _MODE[mode]
        pinned, serves = self._pinned[rows], self._serves[rows]
        fits: Bools = (pinned == -1) | (pinned == code)
        fits &= serves == -1 if mode is Mode.EXCLUSIVE else (serves == -1) | (serves == code)
        return fits

    # -- shapes -----------------------------------------------------------------------------

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

    def _eligible_for(self, ask: Ask) -> Bools:
        request = ask.request
        key = (ask.engines, tuple(sorted(request.require.items())), request.node)
        known = self._eligible.get(key)
        if known is None:
            known = np.zeros(len(self._node_open), np.bool_)
            for number, name in enumerate(self._names):
                known[number] = _eligible(self._state.nodes[name], *key)
            if len(self._eligible) > 256:
                self._eligible.clear()
            self._eligible[key] = known
        return known


# Policies whose scores are made for all nodes at once; others are made node by node when a shape is new.
_SCORED: Final = frozenset({"pack", "spread", "best-fit"})


def _grown(array: NDArray[_Field]) -> NDArray[_Field]:
    return np.concatenate([array, np.zeros(max(_GROW, len(array)), array.dtype)])


def _eligible(node: Node, engines: Sequence[str], require: Sequence[tuple[str, str]], name: str) -> bool:
    """The part of `feasible.node_fits` that only a new inventory changes."""
    if name and name != node.name:
        return False
    return all(e in node.engines for e in engines) and all(node.labels.get(k) == v for k, v in require)

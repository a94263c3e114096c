"""The fleet as one array per field: a row per card, a number per node, kept up to date by what the log touched.

What `index` stands on. It knows no policy: it tells which cards are open, what they have free, which nodes could
ever hold an ask, and what has changed since when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from rigbook_schemas.values import Mode

from rigbook_placer.feasible import NOBODY, Asker, need_bytes, plain_model
from rigbook_placer.rules import Totals

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from rigbook_ledger.state import Card, Node, State

    from rigbook_placer.feasible import Ask, Kept, Seen

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

__all__ = ["Arrays"]

# Changes are remembered for shapes that have not been asked for in a while.
CHANGES_MAX: Final = 200_000
# Nodes looked at for what could be free soonest, and for preemption.
ABLE_MAX: Final = 2_000
# After so many changes the most that a card has free is looked up anew.
ROOMIEST_CHANGES: Final = 1024

_MODE: Final[dict[Mode | None, int]] = {None: -1, Mode.EXCLUSIVE: 0, Mode.MEMORY_SLICE: 1, Mode.TIME_SLICE: 2}
_GROW: Final = 1024
_ALL: Final = slice(None)
_FIELDS: Final = ("_total", "_free", "_node", "_index", "_model", "_pinned", "_serves", "_open", "_usable")

_Field = TypeVar("_Field", np.int64, np.bool_)


class Arrays:
    """Follows one state: call `follow` after every batch, `look` when what is seen of a card changed."""

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
        self._high: dict[int, int] = {}  # epoch of high priority: bytes
        self._cap_priority = state.policy.cap_priority
        self._fleet_bytes = 0
        self._present: dict[str, int] = {}
        self._largest: dict[int, dict[Mode, int]] = {}
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
        self.look(different)

    def _changed(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            node = self._state.nodes[self._names[number]]
            cards = [self._state.cards[u] for u in node.cards if u in self._state.cards]
            self._node_free[number] = sum(c.memory_bytes - c.reserved_bytes for c in cards)
            self._changes.append(number)
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

    def at_most(self, mode: Mode) -> int:
        """No open card has more free bytes in this mode. Seldom too high: bindings lower it a while later."""
        if mode not in self._roomiest or self._mark - self._roomiest_mark > ROOMIEST_CHANGES:
            if self._mark - self._roomiest_mark > ROOMIEST_CHANGES:
                self._roomiest.clear()
            self._roomiest_mark = self._mark
            free = self._free[self._open & self._node_open[self._node] & self._serving(mode)]
            self._roomiest[mode] = int(free.max()) if len(free) else -1
        return self._roomiest[mode]

    def largest_since(self, mark: int) -> dict[Mode, int] | None:
        """The most free bytes of any open card, by mode, of nodes that gained since; None when it is too long ago."""
        return self._largest_since(mark) if mark >= self._gains_base else None

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


def _grown(array: NDArray[_Field]) -> NDArray[_Field]:
    return np.concatenate([array, np.zeros(max(_GROW, len(array)), array.dtype)])


def _eligible(node: Node, engines: Sequence[str], require: Sequence[tuple[str, str]], name: str) -> bool:
    """The part of `feasible.node_fits` that only a new inventory changes."""
    if name and name != node.name:
        return False
    return all(e in node.engines for e in engines) and all(node.labels.get(k) == v for k, v in require)

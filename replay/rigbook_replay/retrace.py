"""Retracing: a fold of the log that stands, at each decision, exactly where the decision stood.

A placer decides on the state at a position and appends; meanwhile other events may come between. So the
fold lags behind the reading: events are read on until the next `bound`, folded up to the position that it
names, and only then the decision is looked at. Bindings are appended against the position of the last
ownership event, so positions never go back, and one fold is enough.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import State
from rigbook_schemas.events import Bound

from rigbook_replay.timetravel import CannotFold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_schemas.wire import Record

__all__ = ["Retrace", "Watcher"]

# Events read and not yet folded, at most. A placer is at most moments behind; one that seems to be further
# behind names a position that is no longer at hand, and its decision is told as such.
BEHIND_MAX: Final = 10_000


class Watcher:
    """What somebody wants to see on the way. Override what matters."""

    def decision(self, state: State, record: Record, *, exact: bool) -> None:
        """A `bound`, and the state it was decided on; `exact` False = the state is a later or earlier one."""

    def before(self, state: State, record: Record) -> None:
        """The event is about to be folded."""

    def after(self, state: State, record: Record) -> None:
        """The event was folded."""


class Retrace:
    """Feed it records in sequence, then `close`."""

    def __init__(self, watcher: Watcher, *, partial: bool = False) -> None:
        self.state = State()
        self._watcher = watcher
        self._partial = partial
        self._read = 0
        self._behind: deque[Record] = deque()

    def take(self, records: Sequence[Record]) -> None:
        """Raises CannotFold when events are missing."""
        for record in records:
            if record.seq != self._read + 1 and not self._partial:
                raise CannotFold(f"events {self._read + 1} to {record.seq - 1} are not in the record")
            self._read = record.seq
            if isinstance(record.data, Bound):
                self._fold_to(record.data.position)
                self._watcher.decision(self.state, record, exact=self._stands_at(record))
            self._behind.append(record)
            if len(self._behind) > BEHIND_MAX:
                self._fold_one()
        self.state.touched.clear()

    def close(self) -> State:
        """Fold what is left; the state at the end."""
        while self._behind:
            self._fold_one()
        self.state.touched.clear()
        return self.state

    def _stands_at(self, record: Record) -> bool:
        assert isinstance(record.data, Bound)
        position = record.data.position
        if self._partial:  # the event at the position may not be in it: nothing between counts
            return self.state.position <= position < record.seq
        return self.state.position == position

    def _fold_to(self, position: int) -> None:
        while self._behind and self._behind[0].seq <= position:
            self._fold_one()

    def _fold_one(self) -> None:
        record = self._behind.popleft()
        self._watcher.before(self.state, record)
        self.state = evolve(self.state, record)
        self._watcher.after(self.state, record)

"""Time travel: the state as it was at a moment of the past, or at a position.

The state at a moment is the fold of all events before the first one that the server received after it.
(The server's clock may be put back; then some later events carry earlier times. The order of the log
decides, and `Arrival.note` says that it happened.)

A journal is folded from the nearest snapshot before the moment. Snapshots lie beside the journal in
`NAME.snapshots`: a cache, made while one folds by, safe to delete, and never part of the evidence.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from rigbook_ledger.evolve import fold
from rigbook_ledger.state import State
from rigbook_schemas.wire import rfc3339

from rigbook_replay.snapshots import Snapshots
from rigbook_replay.source import JournalSource

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rigbook_schemas.wire import Record

    from rigbook_replay.journal import Journal
    from rigbook_replay.source import Source

__all__ = [
    "Arrival",
    "BeforeRecord",
    "CannotFold",
    "Travel",
    "fold_journal",
    "state_at",
    "state_on",
    "undisturbed",
]


class BeforeRecord(Exception):
    """The moment lies before the first event."""

    code = "before_record"


class CannotFold(Exception):
    """The journal does not hold every event up to there: what was, cannot be told."""

    code = "journal_incomplete"


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """Where a journey ended."""

    state: State
    at_ns: int  # the moment asked for; for a position, the receive time of its event
    next_seq: int | None  # the first event after the moment; None = there is none in the record
    note: str = ""  # what the asker should know


class Travel:
    """A fold that stops at a moment or a position. Feed it records in sequence until it says it is there."""

    def __init__(
        self, state: State | None = None, *, at_ns: int | None = None, position: int | None = None, partial: bool = False
    ) -> None:  # fmt: skip
        self.state = state or State()
        self.next_seq: int | None = None
        self._at_ns = at_ns
        self._position = position
        self._partial = partial

    @property
    def arrived(self) -> bool:
        """The next event is after the moment."""
        return self.next_seq is not None

    def take(self, records: Sequence[Record]) -> bool:
        """Fold those that belong to the past asked for; True when there was one that does not.

        Raises CannotFold when events before them are missing.
        """
        state = self.state
        last = records[-1]
        whole = (self._at_ns is None or max(r.received_ns for r in records) <= self._at_ns) and (
            self._position is None or last.seq <= self._position
        )
        if not self._partial and records[0].seq > state.position + 1:
            raise CannotFold(
                f"events {state.position + 1} to {records[0].seq - 1} are not in the record; "
                f"it can be asked up to event {state.position}"
            )
        if whole:
            self.state = fold(state, records)
            return False
        for at, record in enumerate(records):
            if self._beyond(record):
                self.next_seq = record.seq
                self.state = fold(state, records[:at])
                return True
        self.state = fold(state, records)
        return False

    def _beyond(self, record: Record) -> bool:
        if self._at_ns is not None and record.received_ns > self._at_ns:
            return True
        return self._position is not None and record.seq > self._position

    def arrival(self, note: str = "") -> Arrival:
        """Raises BeforeRecord when nothing had happened yet."""
        state = self.state
        if not state.position:
            asked = f"{rfc3339(self._at_ns)} is" if self._at_ns is not None else f"event {self._position} is"
            raise BeforeRecord(f"{asked} before the record begins")
        state.touched.clear()
        return Arrival(
            state=state,
            at_ns=self._at_ns if self._at_ns is not None else state.received_ns,
            next_seq=self.next_seq,
            note=note,
        )


def state_at(
    journal: Journal,
    *,
    at_ns: int | None = None,
    position: int | None = None,
    snapshots: Snapshots | None = None,
    told: Callable[[int, int], None] | None = None,
) -> Arrival:
    """The state at a moment or position; with neither, at the journal's end.

    `told(position, last)` hears of the progress. Raises BeforeRecord, CannotFold.
    """
    start = None if snapshots is None else snapshots.nearest(at_ns=at_ns, position=position)
    travel = Travel(start, at_ns=at_ns, position=position, partial=bool(journal.header.partial))
    last = _last_needed(journal, at_ns=at_ns, position=position)
    with undisturbed():
        for records in journal.records(after=travel.state.position, until=last, whole=False):
            arrived = travel.take(records)
            travel.state.touched.clear()
            if told is not None:
                told(travel.state.position, last)
            if arrived:
                break
            if snapshots is not None:
                snapshots.passed(travel.state)
    if not travel.arrived and last > travel.state.position:
        raise CannotFold(f"{journal.path}: {'; '.join(one.words() for one in journal.damage)}")
    if not travel.arrived and position is not None and journal.last_seq > position:
        travel.next_seq = position + 1
    return travel.arrival(_note(journal, travel, at_ns))


def _last_needed(journal: Journal, *, at_ns: int | None, position: int | None) -> int:
    """Sequence of the last event that has to be read: what lies behind it, whole or damaged, does not matter."""
    last = journal.last_seq if position is None else min(position, journal.last_seq)
    if at_ns is not None:
        last = min(last, next((block.last_seq for block in journal.blocks if block.latest_ns > at_ns), last))
    return last


def _note(journal: Journal, travel: Travel, at_ns: int | None) -> str:
    notes: list[str] = []
    if journal.header.partial:
        notes.append(f"this journal is partial: {journal.header.partial}")
    if at_ns is not None and travel.next_seq is not None:
        back = [f for f in journal.blocks if f.first_seq > travel.next_seq and f.earliest_ns <= at_ns]
        if back:
            notes.append(
                f"the server's clock was put back later on: events from {back[0].first_seq} on carry times before this moment, "
                "and are not counted to it"
            )
    if at_ns is not None and travel.next_seq is None and not journal.finished:
        notes.append("the export was interrupted: there may be later events before this moment")
    return "; ".join(notes)


def fold_journal(journal: Journal, *, told: Callable[[int, int], None] | None = None) -> State:
    """The state at the end. Memory goes with what lives, not with the length. Raises CannotFold, BeforeRecord."""
    return state_at(journal, told=told).state


@contextmanager
def undisturbed() -> Generator[None]:
    """Without the cyclic garbage collector: a fold makes millions of values and not one cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


async def state_on(
    source: Source, *, at_ns: int | None = None, position: int | None = None, told: Callable[[int, int], None] | None = None
) -> Arrival:  # fmt: skip
    """The same on any source: on a journal from the nearest snapshot, on a bus by reading the stream up to there.

    Raises BeforeRecord, CannotFold, NoLedger, BusError.
    """
    if isinstance(source, JournalSource):
        snapshots = Snapshots(source.journal)
        return state_at(source.journal, at_ns=at_ns, position=position, snapshots=snapshots, told=told)
    travel = Travel(at_ns=at_ns, position=position)
    last = source.last_seq if position is None else min(position, source.last_seq)
    if at_ns is not None:
        last = min(last, await source.seq_at(at_ns) + 1)
    with undisturbed():
        async for records in source.records(until=last, whole=False):
            arrived = travel.take(records)
            travel.state.touched.clear()
            if told is not None:
                told(travel.state.position, last)
            if arrived:
                break
    return travel.arrival()

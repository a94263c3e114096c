"""Following the log: read a batch, fold it, know when one has caught up. The loop all deciders share.

A follower begins where its snapshot ends, and only after it has seen that the stream is still the one
it knew: same creation time, not behind the snapshot, the same event id at its position. Anything else
is `LogDiscontinued`: whoever follows must stop deciding (safe mode).
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_bus.protocol import BusError, BusUnavailable, Link
from rigbook_schemas.subjects import LEDGER_STREAM
from rigbook_schemas.wire import Record, decode

from rigbook_ledger.evolve import evolve
from rigbook_ledger.identity import fold_identity
from rigbook_ledger.state import State, restore, snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rigbook_bus.protocol import Bus, Message, Tail

__all__ = ["Follower", "LogAbsent", "LogDiscontinued", "Saved", "SnapshotFile", "check_continues"]

BATCH_MAX: Final = 2000

Known = tuple[int, int, str]
"""(creation time of the stream, position, event id there): enough to tell whether a log continues it."""


class LogDiscontinued(Exception):
    """The log does not continue what we knew: it was made anew, lost its end, or holds other events."""

    code = "log_discontinued"


class LogAbsent(LogDiscontinued):
    """There is no ledger stream, and we never knew one: the ledger has not made it yet."""

    code = "log_absent"


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot, the identity of the stream it is of, and of the fold that made it."""

    fold: str
    stream_created_ns: int
    state: bytes


class SnapshotFile:
    """A follower's snapshot as a file. Deletable: without it the whole log is folded again.

    Replaced atomically and not synced: after a power cut an older or no snapshot is as good.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> tuple[int, State] | None:
        """(stream creation time, state), or None when there is none of this code version."""
        try:
            saved = msgspec.msgpack.decode(self._path.read_bytes(), type=Saved)
            if saved.fold != fold_identity():
                return None  # this code may fold to something else
            return saved.stream_created_ns, restore(saved.state)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError:
            return None  # another version's: fold the log again

    def save(self, stream_created_ns: int, state: State) -> None:
        body = msgspec.msgpack.encode(
            Saved(fold=fold_identity(), stream_created_ns=stream_created_ns, state=snapshot(state))
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(body)
        os.replace(fresh, self._path)  # noqa: PTH105 - the atomicity is the point


async def check_continues(bus: Bus, created_ns: int | None, position: int, event_id: str) -> int:
    """Raise LogDiscontinued unless the ledger stream continues (created_ns, position, event_id).

    Returns the stream's creation time. `created_ns` None = we know nothing yet.
    """
    facts = await bus.stream(LEDGER_STREAM)
    if facts is None and created_ns is None:
        raise LogAbsent(
            f"stream {LEDGER_STREAM} does not exist yet; a ledger makes it (`rigbook serve ledger`)"
        )
    if facts is None:
        raise LogDiscontinued(
            f"stream {LEDGER_STREAM} does not exist; is this the right server and data folder?"
        )
    if created_ns is not None and facts.created_ns != created_ns:
        raise LogDiscontinued(f"stream {LEDGER_STREAM} is another one than before (creation time changed)")
    if facts.last_seq < position:
        raise LogDiscontinued(
            f"stream {LEDGER_STREAM} ends at {facts.last_seq}, we had read to {position}: its end is lost"
        )
    if position:
        there = await bus.message(LEDGER_STREAM, position)
        found = "" if there is None else decode(there.seq, there.subject, there.received_ns, there.body).id
        if there is None or found != event_id:
            raise LogDiscontinued(
                f"event {position} of {LEDGER_STREAM} is {found or 'gone'!r}, we had read {event_id!r}"
            )
    return facts.created_ns


class Follower:
    """Folds the ledger stream into `state`."""

    def __init__(
        self,
        bus: Bus,
        *,
        snapshots: SnapshotFile | None = None,
        every: int = 20_000,
        known: Known | None = None,
    ) -> None:
        self._bus = bus
        self._known = known  # what an earlier run of this process had read
        self._snapshots = snapshots
        self._every = every  # events between two snapshots
        self._saved_at = 0
        self._tail: Tail | None = None
        self._created_ns: int | None = None
        self._goal = 0
        self._reconnected = False
        self._held: Sequence[Message] = ()  # read, and not folded yet
        self.state = State()
        # weakly: a service makes a new follower after each trouble, and the old one's state must go
        bus.on_link(functools.partial(_note_link, weakref.ref(self)))

    @property
    def caught_up(self) -> bool:
        """True once everything that stood on the log when we began has been folded."""
        return self._tail is not None and self.state.position >= self._goal

    @property
    def known(self) -> Known | None:
        """What has been read of which log; None = nothing yet. For the next run: see `__init__`."""
        if self._created_ns is None or not self.state.position:
            return self._known
        return self._created_ns, self.state.position, self.state.event_id

    async def open(self) -> None:
        """Raises LogDiscontinued, BusError."""
        if self._known is not None:
            await check_continues(self._bus, *self._known)
        loaded = self._snapshots.load() if self._snapshots else None
        if loaded is not None:
            self._created_ns, self.state = loaded
            self._saved_at = self.state.position
        self._created_ns = await check_continues(
            self._bus, self._created_ns, self.state.position, self.state.event_id
        )
        facts = await self._bus.stream(LEDGER_STREAM)
        self._goal = facts.last_seq if facts else 0
        self._tail = await self._bus.tail(LEDGER_STREAM, start_seq=self.state.position + 1)

    async def batch(self, *, wait_seconds: float | None, max_messages: int = BATCH_MAX) -> list[Record]:
        """Read and fold what is there; waits for the first event. Raises LogDiscontinued, BusError."""
        assert self._tail is not None, "open() first"
        if not self._held:
            try:
                self._held = await self._tail.batch(max_messages=max_messages, wait_seconds=wait_seconds)
            except BusUnavailable as error:
                raise LogDiscontinued(str(error)) from error
        if self._reconnected:
            self._reconnected = False
            try:
                await check_continues(self._bus, self._created_ns, self.state.position, self.state.event_id)
            except BusError:
                self._reconnected = True  # no answer: what was read is held until it has been looked at
                raise
        held, self._held = self._held, ()
        return self.take(held)

    def note_reconnected(self) -> None:
        """The server may have come back with a shorter log that grew again: look before folding on."""
        self._reconnected = True

    def take(self, messages: Sequence[Message]) -> list[Record]:
        """Fold messages already read. Raises LogDiscontinued before a gap."""
        records = [decode(m.seq, m.subject, m.received_ns, m.body) for m in messages]
        state = self.state
        for record in records:
            if record.seq > state.position + 1:
                raise LogDiscontinued(
                    f"event {record.seq} came after {state.position}: the events between are lost"
                )
            state = evolve(state, record)
        self.state = state
        if self._snapshots and state.position - self._saved_at >= self._every:
            self.save()
        return records

    def save(self) -> None:
        """Write the snapshot now."""
        if self._snapshots and self._created_ns is not None:
            self._snapshots.save(self._created_ns, self.state)
            self._saved_at = self.state.position

    async def close(self) -> None:
        if self._tail is not None:
            await self._tail.close()
            self.save()
            self._tail = None


def _note_link(follower: weakref.ref[Follower], link: Link, why: str) -> None:
    del why
    there = follower()
    if there is not None and link is Link.CONNECTED:
        there.note_reconnected()

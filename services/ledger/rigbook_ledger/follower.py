"""Following the log: read a batch, fold it, know when one has caught up. The loop all deciders share.

A follower begins where its snapshot ends, and only after it has seen that the stream is still the one
it knew (`continuity`). Anything else is `LogDiscontinued`: whoever follows must stop deciding (safe mode).
When an operator has recovered the log, it begins anew.
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

from rigbook_ledger.continuity import (
    Known,
    LogAbsent,
    LogDiscontinued,
    LogRecovered,
    check_continues,
    known_of,
)
from rigbook_ledger.evolve import evolve
from rigbook_ledger.identity import fold_identity
from rigbook_ledger.state import State, restore, snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rigbook_bus.protocol import Bus, Message, Tail

__all__ = [
    "Follower",
    "Known",
    "LogAbsent",
    "LogDiscontinued",
    "LogRecovered",
    "Saved",
    "SnapshotFile",
    "check_continues",
]

BATCH_MAX: Final = 2000


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
        self._remembered: Known | None = None

    def known(self) -> Known | None:
        """What was read of which log when `remember` was last called."""
        try:
            return msgspec.json.decode(self._known_file.read_bytes(), type=Known)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def remember(self, known: Known | None) -> None:
        """Cheap, and called often: snapshots are rare, and a killed decider must not forget which log it knew."""
        if known is not None and known != self._remembered:
            _replace(self._known_file, msgspec.json.encode(known))
            self._remembered = known

    @property
    def _known_file(self) -> Path:
        return self._path.with_suffix(".known")

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
        _replace(self._path, body)


def _replace(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(body)
    os.replace(fresh, path)  # noqa: PTH105 - the atomicity is the point


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
        return known_of(self._created_ns, self.state)

    def remember(self) -> None:
        """Note on disk which log was read how far; for services to call now and then."""
        if self._snapshots:
            self._snapshots.remember(self.known)

    async def open(self) -> None:
        """Raises LogDiscontinued, BusError. A log that was recovered is folded anew."""
        loaded = self._snapshots.load() if self._snapshots else None
        if loaded is not None:
            self._created_ns, self.state = loaded
            self._saved_at = self.state.position
        known = [self._known, self._snapshots.known() if self._snapshots else None]
        if loaded is not None:
            known.append(known_of(*loaded))
        try:
            for one in known:
                if one is not None:
                    await check_continues(self._bus, one)
        except LogRecovered:
            self.state = State()
            self._saved_at = 0
        self._created_ns = await check_continues(self._bus, None)
        facts = await self._bus.stream(LEDGER_STREAM)
        self._goal = facts.last_seq if facts else 0
        self._tail = await self._bus.tail(LEDGER_STREAM, start_seq=self.state.position + 1)

    async def assure(self) -> None:
        """Before anything is decided on what was read: is it still the same log? Raises LogDiscontinued, BusError.

        Takes no time while the connection stands. A tail notices a log that was cut only when it is read next,
        and an append can be quicker.
        """
        if self._reconnected:
            self._reconnected = False
            try:
                await check_continues(self._bus, self.known)
            except BusError:
                self._reconnected = True  # no answer: what was read is held until it has been looked at
                raise

    async def batch(self, *, wait_seconds: float | None, max_messages: int = BATCH_MAX) -> list[Record]:
        """Read and fold what is there; waits for the first event. Raises LogDiscontinued, BusError."""
        assert self._tail is not None, "open() first"
        if not self._held:
            try:
                self._held = await self._tail.batch(max_messages=max_messages, wait_seconds=wait_seconds)
            except BusUnavailable as error:
                raise LogDiscontinued(str(error)) from error
        await self.assure()
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
            self.remember()

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

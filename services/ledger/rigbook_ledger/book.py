"""The book: the folded state in memory, and its copy on disk that follows a moment later.

Folding and writing are two steps of a pipeline. The fold takes a batch and returns at once; what it
adds is gathered, and one task writes it, so that many small batches of a busy moment become one
transaction. A disk that is full or locked therefore stops neither the fold nor the answers about the
present: the gathered entries wait, up to a bound, and nothing is lost, for the stream has it all.
"""

from __future__ import annotations

import asyncio
import sqlite3
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from rigbook_schemas.subjects import LEDGER_STREAM

from rigbook_ledger.continuity import Known, LogDiscontinued, check_continues
from rigbook_ledger.entries import AUDIT, Entries, Gap
from rigbook_ledger.identity import fold_identity
from rigbook_ledger.state import Finding, State, restore, snapshot
from rigbook_ledger.store import Mark, Store, StoreUnreadable, move_aside

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus, Message

    from rigbook_ledger.entries import Transition

__all__ = ["Book", "open_book"]

# Entries gathered this long go into one transaction; answers about the past lag by as much.
GATHER_SECONDS: Final = 0.02
# Events that may wait for the disk; then the fold waits too (and the stream keeps what comes).
WAITING_EVENTS_MAX: Final = 20_000
RETRY_SECONDS_MIN: Final = 0.25
RETRY_SECONDS_MAX: Final = 15.0
# What a clean stop may take for the last transaction; the rest is read again from the stream.
CLOSE_SECONDS_MAX: Final = 5.0

_log = structlog.get_logger()


class Book:
    """One ledger's state and store, kept in step. `fold` is called by one task only."""

    def __init__(self, store: Store, state: State, *, clock: Clock, snapshot_every: int) -> None:
        self.store = store
        self.state = state
        self.stream_created_ns = 0 if store.mark is None else store.mark.stream_created_ns
        self.trouble = ""  # why the store cannot be written right now
        self.written = state.position  # position of what is committed
        self._clock = clock
        self._every = snapshot_every
        self._snapshot_at = state.position
        self._gathered = Entries()
        self._wanted = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closing = False
        self._broken = False
        self._waiters: list[tuple[int, bool, asyncio.Future[None]]] = []
        self._audited: set[tuple[str, str]] = set()
        self._keeper = asyncio.create_task(self._keep(), name="ledger book")

    # -- the present ----------------------------------------------------------------------------

    def fold(self, messages: Sequence[Message], transitions: list[Transition] | None = None) -> None:
        """Fold what was read. Raises LogDiscontinued when it does not follow on what was folded before."""
        try:
            self.state = self._gathered.take(self.state, messages, transitions)
        except Gap as error:
            raise LogDiscontinued(str(error)) from error
        except BaseException:
            self._broken = True  # an event is half folded: nothing of this state may reach the disk
            raise
        finally:
            if self._gathered.count >= WAITING_EVENTS_MAX:
                self._room.clear()
            self._wanted.set()
            self._tell()

    async def room(self) -> None:
        """Wait until the disk has kept up far enough that more may be folded."""
        await self._room.wait()

    def note(self, stream: str, finding: Finding, at_ns: int) -> None:
        """Keep a finding that the fold did not make: of a heartbeat, or of the audit."""
        if stream == AUDIT:
            # the same violation is seen again with every batch that touches the card: said once
            if (finding.code, finding.text) in self._audited or len(self._audited) > WAITING_EVENTS_MAX:
                return
            self._audited.add((finding.code, finding.text))
        if len(self._gathered.findings) >= WAITING_EVENTS_MAX:
            return  # the disk has been in trouble for long
        self._gathered.note_finding(stream, finding, at_ns)
        self._wanted.set()

    async def reached(self, position: int, *, written: bool, timeout_seconds: float) -> bool:
        """Whether `position` is folded (or also written) before the time is over."""
        if (self.written if written else self.state.position) >= position:
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((position, written, waiter))
        try:
            async with asyncio.timeout(timeout_seconds):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters = [one for one in self._waiters if one[2] is not waiter]
        return True

    def _tell(self) -> None:
        for position, written, waiter in self._waiters:
            if (self.written if written else self.state.position) >= position and not waiter.done():
                waiter.set_result(None)

    # -- the copy on disk -----------------------------------------------------------------------

    def mark(self) -> Mark:
        """The place in the log that the state stands for."""
        return Mark(
            stream_created_ns=self.stream_created_ns,
            position=self.state.position,
            event_id=self.state.event_id,
            received_ns=self.state.received_ns,
            chain=self.state.chain,
        )

    async def keep(self) -> None:
        """Runs as long as the book is kept. Raises StoreLost."""
        await asyncio.shield(self._keeper)

    async def close(self) -> None:
        """Write what is gathered and a last snapshot, then close the file."""
        self._closing = True
        self._wanted.set()
        done, _ = await asyncio.wait({self._keeper}, timeout=CLOSE_SECONDS_MAX)
        if not done:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
            _log.warning("the store was closed before all was written; the rest is read again from the stream",
                         position=self.written, why=self.trouble)  # fmt: skip
        await self.store.close()

    async def _keep(self) -> None:
        while not self._closing:
            await self._wanted.wait()
            self._wanted.clear()
            await self._write()
            if not self._closing:
                await self._clock.sleep(GATHER_SECONDS)
        await self._write()

    async def _write(self) -> None:
        if self._broken:
            return
        entries, self._gathered = self._gathered, Entries()
        self._room.set()
        mark = self.mark()
        due = mark.position - self._snapshot_at >= self._every or (
            self._closing and mark.position > self._snapshot_at
        )
        if entries.empty and not due:
            return
        body = snapshot(self.state) if due else None
        pause = RETRY_SECONDS_MIN
        while True:
            try:
                await self.store.write(entries, mark, snapshot=body)
                break
            except sqlite3.Error as error:
                self._say_trouble(error)
                if self._closing:
                    return
            await self._clock.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)
        if self.trouble:
            _log.info("the store is written again", position=mark.position)
            self.trouble = ""
        self.written = mark.position
        if body is not None:
            self._snapshot_at = mark.position
        self._tell()

    def _say_trouble(self, error: sqlite3.Error) -> None:
        words = f"{self.store.path} cannot be written ({error}); answers about the past end at position {self.written}"
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            words += (
                "; stop the ledger, move the file away and start it: the book is made anew from the stream"
            )
        if words != self.trouble:
            self.trouble = words
            _log.error("the store cannot be written; trying again", why=words)


# -- opening ------------------------------------------------------------------------------------


async def open_book(
    bus: Bus,
    path: Path,
    *,
    clock: Clock,
    snapshot_every: int,
    open_store: Callable[[Path], Awaitable[Store]] = Store.open,
) -> Book:
    """The book as it was left: from the snapshot and the raw events behind it.

    A file that is damaged or of another version is moved aside, to be made anew from the stream, but
    only when the stream still has what the file stood for: else it may be the only copy. Raises
    StoreInUse, StoreUnreadable, StoreError, BusError.
    """
    try:
        store = await open_store(path)
        try:
            state = await _load(store)
        except BaseException:
            await store.close()
            raise
    except StoreUnreadable as error:
        store = await _replace(bus, path, error)
        state = State()
    return Book(store, state, clock=clock, snapshot_every=snapshot_every)


async def _replace(bus: Bus, path: Path, error: StoreUnreadable) -> Store:
    known = error.known
    if known is None:
        raise StoreUnreadable(
            f"{error}, and it does not say how far it had read. See with `rigbook doctor` that the stream "
            f"{LEDGER_STREAM} is whole, then move the file away; the book is made anew from the stream"
        ) from error
    try:
        await check_continues(
            bus,
            Known(created_ns=known.stream_created_ns, position=known.position, event_id=known.event_id),
        )
    except LogDiscontinued as lost:
        raise StoreUnreadable(
            f"{error}, and {lost}. This file may be the only copy of {known.position} events: keep it, "
            "restore the stream, and start again"
        ) from lost
    aside = move_aside(path)
    _log.warning(
        "the store was moved aside and is made anew from the stream", why=str(error), aside=str(aside)
    )
    return await Store.open(path)


async def _load(store: Store) -> State:
    """Raises StoreUnreadable when the file does not agree with itself."""
    mark = store.mark
    if mark is None:
        return State()
    try:
        state = await _fold_stored(store) if store.current else await _fold_anew(store)
    except (sqlite3.DatabaseError, Gap, UnicodeDecodeError) as error:
        raise StoreUnreadable(f"{store.path} is damaged ({error})", mark) from error
    if (state.position, state.event_id, state.chain) != (mark.position, mark.event_id, mark.chain):
        raise StoreUnreadable(
            f"{store.path} does not agree with itself: it stands at {mark.position}, its events lead to {state.position}",
            mark,
        )
    return state


async def _fold_stored(store: Store) -> State:
    """The snapshot, and the raw events behind it; their rows are in the tables already."""
    state = State()
    saved = await store.snapshot()
    if saved is not None:
        try:
            state = restore(saved[1])
        except msgspec.MsgspecError:
            _log.warning("the snapshot is not readable; all events are folded again", position=saved[0])
    async for batch in store.events(state.position):
        state = Entries(raw=False).take(state, batch)
        state.touched.clear()
        await asyncio.sleep(0)
    return state


async def _fold_anew(store: Store) -> State:
    """Another version of the fold filled the tables: fold the raw events again, and the tables with them."""
    mark = store.mark
    assert mark is not None
    _log.info(
        "the fold has changed since the store was written; its tables are made anew", events=mark.position
    )
    await store.forget_derived()
    state = State()
    async for batch in store.events(0):
        entries = Entries(raw=False)
        state = entries.take(state, batch)
        state.touched.clear()
        done = state.position >= mark.position
        await store.write(
            entries, mark, fold=fold_identity() if done else "", snapshot=snapshot(state) if done else None
        )
    store.current = True
    return state

"""The book on disk: one SQLite file, written in one transaction per stretch of the log.

Three parts in one file:

- the raw events of the ledger stream, byte for byte: the second copy, should the stream lose its end;
- the position with the stream's identity, the event id and the running hash there, and a snapshot of
  the fold every N events: always of the same transaction, so they cannot disagree;
- tables for questions about the past: demands, tenures (who held which card), drifts, findings.

The file is a cache of the stream and may be deleted; it is folded again to the same digest. The
derived tables carry the identity of the code that folded them: another fold's are made anew from
the raw events, never silently misread.

WAL with `synchronous=NORMAL`: a commit does not wait for the disk, only a checkpoint does. A power
cut can cost the last commits, never the consistency; the stream, which syncs always, has those events,
and the position in the file says from where to read again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import aiosqlite
import msgspec
from rigbook_bus.protocol import Message
from rigbook_schemas.subjects import HEARTBEAT_STREAM

from rigbook_ledger.identity import fold_identity
from rigbook_ledger.tables import (
    APPLICATION_ID,
    DERIVED,
    FORMAT,
    INSERTS,
    ROWS_MAX,
    SCHEMA,
    UPDATES,
    WRITE_BOOK,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

    from rigbook_ledger.entries import Entries, Row
    from rigbook_ledger.tables import Insert

__all__ = ["Mark", "Store", "StoreError", "StoreInUse", "StoreLost", "StoreUnreadable"]

# How long a write waits for another process's lock (somebody's `sqlite3` shell) before it says so.
BUSY_SECONDS_MAX: Final = 2.0
READ_BATCH: Final = 2000
# Findings about heartbeats are kept up to this many; those about the log itself all.
HEARTBEAT_FINDINGS_MAX: Final = 1000


class StoreError(Exception):
    """The ledger's file cannot be used; the text says what to do."""

    code = "store_error"


class StoreInUse(StoreError):
    """Another process works on this data folder: give each ledger its own."""

    code = "store_in_use"


class StoreUnreadable(StoreError):
    """The file is damaged, or of another version of Rigbook.

    `known` is the place in the log it stands for, as far as that could be read.
    """

    code = "store_unreadable"

    def __init__(self, text: str, known: Mark | None = None) -> None:
        super().__init__(text)
        self.known = known


class StoreLost(StoreError):
    """The file was deleted or replaced while the ledger ran: start it again, it makes the book anew."""

    code = "store_lost"


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the log: enough to tell whether a stream continues it."""

    stream_created_ns: int
    position: int
    event_id: str
    received_ns: int = 0
    chain: bytes = b""


class Store:
    """The ledger's SQLite file. One writing and one reading connection, each with its own thread."""

    def __init__(
        self, path: Path, lock: int, writer: aiosqlite.Connection, reader: aiosqlite.Connection
    ) -> None:
        self.path = path
        self._lock = lock
        self._writer = writer
        self._reader = reader
        self._inode = path.stat().st_ino
        self.mark: Mark | None = None  # of what is committed
        self.current = True  # False: the derived tables are another fold's

    @classmethod
    async def open(cls, path: Path) -> Store:
        """Open or make the file.

        Raises StoreInUse, StoreUnreadable, and StoreError when folder or file cannot be used at all.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(path.with_suffix(".lock"))
        except OSError as error:
            raise StoreError(
                f"{path}: {error.strerror or error}; choose another data folder or mend its rights"
            ) from error
        try:
            return await cls._open(path, lock)
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    async def _open(cls, path: Path, lock: int) -> Store:
        if not path.exists():  # noqa: ASYNC240 - one look, before anything runs; the file was deleted, and what belongs to it was left
            for companion in _companions(path):
                companion.unlink(missing_ok=True)
        writer = await _connect(path)
        reader: aiosqlite.Connection | None = None
        try:
            await _prepare(writer, path)
            reader = await _connect(path, read_only=True)
            store = cls(path, lock, writer, reader)
            found = await _book(writer)
            if found is not None:
                store.mark, fold = found
                store.current = fold == fold_identity()
        except sqlite3.OperationalError as error:
            await _close(reader, writer)
            raise StoreError(f"{path}: {error}; mend the disk or choose another data folder") from error
        except sqlite3.DatabaseError as error:
            known = await _known(writer)
            await _close(reader, writer)
            raise StoreUnreadable(f"{path} is damaged ({error})", known) from error
        except BaseException:
            await _close(reader, writer)
            raise
        return store

    # -- writing --------------------------------------------------------------------------------

    async def write(
        self, entries: Entries, mark: Mark, *, snapshot: bytes | None = None, fold: str | None = None
    ) -> None:
        """Everything of a stretch of the log, or nothing.

        Guarded by what was read: the file must still stand where this stretch began. Raises
        sqlite3.Error (disk full, locked, damaged) with nothing written, StoreLost.
        """
        self._check_there()
        db = self._writer
        await db.execute("BEGIN IMMEDIATE")
        try:
            for insert in INSERTS:
                await self._insert(insert, getattr(entries, insert.rows))
            for update in UPDATES:
                rows = getattr(entries, update.rows)
                if rows:
                    await db.executemany(update.statement, rows)
            if any(row[0] == HEARTBEAT_STREAM for row in entries.findings):
                await db.execute(
                    "DELETE FROM findings WHERE stream = ?1 AND number NOT IN "
                    "(SELECT number FROM findings WHERE stream = ?1 ORDER BY number DESC LIMIT ?2)",
                    (HEARTBEAT_STREAM, HEARTBEAT_FINDINGS_MAX),
                )
            if entries.base is not None:
                await self._advance(mark, fold)
            if snapshot is not None:
                await db.execute(
                    "INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?)", (mark.position, snapshot)
                )
            await db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                await db.execute("ROLLBACK")
            raise
        if entries.base is not None:
            self.mark = mark

    async def _insert(self, insert: Insert, given: list[Row] | dict[str, Row]) -> None:
        if not given:
            return
        rows = list(given.values()) if isinstance(given, dict) else given
        full = len(rows) - len(rows) % ROWS_MAX
        if full:
            chunks = ([*chain.from_iterable(rows[at : at + ROWS_MAX])] for at in range(0, full, ROWS_MAX))
            await self._writer.executemany(insert.statement(ROWS_MAX), chunks)
        if full < len(rows):
            await self._writer.executemany(insert.statement(1), rows[full:])

    async def _advance(self, mark: Mark, fold: str | None) -> None:
        before = 0 if self.mark is None else self.mark.position
        cursor = await self._writer.execute(
            WRITE_BOOK,
            (
                mark.stream_created_ns, mark.position, mark.event_id, mark.received_ns, mark.chain,
                fold_identity() if fold is None else fold, before,
            ),
        )  # fmt: skip
        if cursor.rowcount != 1:
            raise StoreLost(f"{self.path} no longer stands at position {before}: another process wrote to it")

    async def forget_derived(self) -> None:
        """Empty the tables that a fold makes; the raw events stay. They are marked as nobody's until refilled."""
        db = self._writer
        await db.execute("BEGIN IMMEDIATE")
        for table in DERIVED:
            await db.execute(f"DELETE FROM {table}")  # noqa: S608 - our own names
        await db.execute("DELETE FROM findings WHERE stream <> ?", (HEARTBEAT_STREAM,))
        await db.execute("UPDATE book SET fold = ''")
        await db.execute("COMMIT")

    def _check_there(self) -> None:
        try:
            there = self.path.stat().st_ino == self._inode
        except FileNotFoundError:
            there = False
        if not there:
            raise StoreLost(
                f"{self.path} was deleted or replaced while the ledger ran; start the ledger again"
            )

    # -- reading --------------------------------------------------------------------------------

    async def snapshot(self) -> tuple[int, bytes] | None:
        """(position, bytes) of the latest snapshot of the fold."""
        rows = await self.rows("SELECT position, body FROM snapshot")
        return (rows[0][0], rows[0][1]) if rows else None

    async def events(self, after: int) -> AsyncGenerator[list[Message], None]:
        """The raw events past `after`, in sequence, in batches."""
        async with self._reader.execute(
            "SELECT seq, subject, received_ns, body FROM events WHERE seq > ? ORDER BY seq", (after,)
        ) as cursor:
            while rows := await cursor.fetchmany(READ_BATCH):
                yield [Message(row[0], row[1], row[2], row[3]) for row in rows]

    async def rows(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """What a question to the tables gives; sees only what is committed. Raises sqlite3.Error."""
        return list(await self._reader.execute_fetchall(statement, parameters))  # type: ignore[arg-type]

    async def close(self) -> None:
        await _close(self._reader, self._writer)  # the writer last: it folds the WAL into the file
        os.close(self._lock)


def move_aside(path: Path) -> Path:
    """Rename the file and what belongs to it to the first free `.aside-N`; nothing is deleted."""
    number = 1
    while (aside := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    for old, new in zip((path, *_companions(path)), (aside, *_companions(aside)), strict=True):
        with suppress(FileNotFoundError):
            old.rename(new)
    return aside


def _companions(path: Path) -> tuple[Path, Path]:
    return path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")


def _take_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise StoreInUse(
            f"{path.parent} is in use by the ledger with process id {holder or '?'}; give each ledger its own data folder"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


async def _connect(path: Path, *, read_only: bool = False) -> aiosqlite.Connection:
    # `isolation_level=None`: transactions begin where we say so, not where the module guesses.
    uri = f"file:{quote(str(path))}?mode={'ro' if read_only else 'rwc'}"
    connecting = asyncio.ensure_future(
        _connected(aiosqlite.connect(uri, uri=True, isolation_level=None, timeout=BUSY_SECONDS_MAX))
    )
    try:
        return await asyncio.shield(connecting)
    except asyncio.CancelledError:  # its thread goes on all the same: nothing may be left open
        with suppress(sqlite3.Error):
            await (await connecting).close()
        raise


async def _connected(connection: aiosqlite.Connection) -> aiosqlite.Connection:
    return await connection


async def _prepare(db: aiosqlite.Connection, path: Path) -> None:
    """Check whose file it is; make the tables in a new one. Raises StoreError, StoreUnreadable, sqlite3.Error."""
    application = await _number(db, "PRAGMA application_id")
    version = await _number(db, "PRAGMA user_version")
    if application == 0 and version == 0 and await _number(db, "SELECT count(*) FROM sqlite_master") == 0:
        await db.execute_fetchall("PRAGMA journal_mode = WAL")
        await db.executescript(
            f"BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT}; COMMIT;"
        )
    elif application != APPLICATION_ID:
        raise StoreError(f"{path} is not a file of the ledger; choose another data folder")
    elif version != FORMAT:
        raise StoreUnreadable(
            f"{path} has format {version}, this version of Rigbook reads format {FORMAT}", await _known(db)
        )
    await db.execute("PRAGMA synchronous = NORMAL")


async def _number(db: aiosqlite.Connection, statement: str) -> int:
    rows = list(await db.execute_fetchall(statement))
    return int(rows[0][0])


async def _book(db: aiosqlite.Connection) -> tuple[Mark, str] | None:
    rows = list(
        await db.execute_fetchall(
            "SELECT stream_created_ns, position, event_id, received_ns, chain, fold FROM book"
        )
    )
    if not rows:
        return None
    created_ns, position, event_id, received_ns, chain, fold = rows[0]
    mark = Mark(
        stream_created_ns=created_ns,
        position=position,
        event_id=event_id,
        received_ns=received_ns,
        chain=chain,
    )
    return mark, fold


async def _known(db: aiosqlite.Connection) -> Mark | None:
    """The place in the log, from a file that cannot be read as a whole: these columns are kept in every format."""
    try:
        rows = list(await db.execute_fetchall("SELECT stream_created_ns, position, event_id FROM book"))
    except (sqlite3.Error, UnicodeDecodeError):
        return None
    if not rows or not isinstance(rows[0][1], int):
        return None
    return Mark(stream_created_ns=rows[0][0], position=rows[0][1], event_id=rows[0][2])


async def _close(*connections: aiosqlite.Connection | None) -> None:
    for connection in connections:
        if connection is not None:
            with suppress(sqlite3.Error, ValueError):
                await connection.close()

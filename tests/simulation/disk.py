"""The disk of a simulated machine: folders on tmpfs, and a ledger's book in memory behind the store's face."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rigbook_bus.protocol import Message
from rigbook_ledger.store import Mark, Store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from rigbook_ledger.entries import Entries

__all__ = ["Folder", "MemoryStore", "Shelf", "open_inline"]

TMPFS = Path("/dev/shm")


class Folder:
    """The data folder of a program. Each run gets its own copy: what a killed one writes late goes nowhere."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._name = name
        self._run = 0
        self._now: Path | None = None

    def next(self) -> Path:
        """What was on the disk when the last run ended."""
        self._run += 1
        fresh = self._root / f"{self._name}.{self._run}"
        if self._now is not None and self._now.exists():
            shutil.copytree(self._now, fresh)
        else:
            fresh.mkdir(parents=True)
        self._now = fresh
        return fresh

    def lose(self) -> None:
        """A new disk."""
        self._now = None

    def back_to(self, older: Path) -> None:
        """An older copy is put in place."""
        self._now = older

    @property
    def exists(self) -> bool:
        return self._now is not None

    @property
    def now(self) -> Path:
        assert self._now is not None
        return self._now


class Shelf:
    """What is committed of one ledger's book; outlives its runs."""

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.events: list[Message] = []
        self.snapshot: tuple[int, bytes] | None = None
        self.full = False
        self.findings: list[Any] = []

    def copy(self) -> Shelf:
        other = Shelf()
        other.mark, other.snapshot, other.findings = self.mark, self.snapshot, list(self.findings)
        other.events = list(self.events)
        return other


class MemoryStore:
    """The face of `rigbook_ledger.store.Store`; keeps the raw events, the mark and the snapshot."""

    def __init__(self, shelf: Shelf, path: Path) -> None:
        self.path = path
        self._shelf = shelf
        self.mark = shelf.mark
        self.current = True

    async def write(
        self, entries: Entries, mark: Mark, *, snapshot: bytes | None = None, fold: str | None = None
    ) -> None:
        if self._shelf.full:
            raise sqlite3.OperationalError("database or disk is full")
        shelf = self._shelf
        if entries.base is not None:
            position = 0 if shelf.mark is None else shelf.mark.position
            assert entries.base == position, (
                f"a stretch that begins at {entries.base} behind a book at {position}"
            )
            shelf.events += [
                Message(seq, subject, at, body) for seq, subject, at, _kind, body in entries.events
            ]
            shelf.mark = self.mark = mark
        shelf.findings += entries.findings
        if snapshot is not None:
            shelf.snapshot = (mark.position, snapshot)

    async def snapshot(self) -> tuple[int, bytes] | None:
        return self._shelf.snapshot

    async def events(self, after: int) -> AsyncGenerator[list[Message], None]:
        found = [m for m in self._shelf.events if m.seq > after]
        if found:
            yield found

    async def forget_derived(self) -> None:
        return

    async def rows(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return []

    async def close(self) -> None:
        return


class _Inline:
    """`aiosqlite.Connection` without its thread: the file is on tmpfs, and a call takes no virtual time."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> _Answer:
        return _Answer(self._db, statement, parameters)

    async def executemany(self, statement: str, rows: Any) -> sqlite3.Cursor:
        return self._db.executemany(statement, rows)

    async def executescript(self, script: str) -> sqlite3.Cursor:
        return self._db.executescript(script)

    async def execute_fetchall(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        return self._db.execute(statement, parameters).fetchall()

    async def close(self) -> None:
        self._db.close()


class _Answer:
    def __init__(self, db: sqlite3.Connection, statement: str, parameters: Sequence[Any]) -> None:
        self._ask = lambda: db.execute(statement, parameters)

    def __await__(self) -> Any:
        async def run() -> sqlite3.Cursor:
            return self._ask()

        return run().__await__()

    async def __aenter__(self) -> _Rows:
        return _Rows(self._ask())

    async def __aexit__(self, *_: object) -> None:
        return


class _Rows:
    def __init__(self, cursor: sqlite3.Cursor) -> None:
        self._cursor = cursor

    async def fetchmany(self, size: int) -> list[Any]:
        return self._cursor.fetchmany(size)


async def open_inline(path: Path) -> Store:
    """The shipped store on a real SQLite file, without threads."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def connect(path: Path, *, read_only: bool = False) -> _Inline:
        mode = "ro" if read_only else "rwc"
        return _Inline(sqlite3.connect(f"file:{path}?mode={mode}", uri=True, isolation_level=None))

    from rigbook_ledger import store as module

    writer: Any = connect(path)
    await module._prepare(writer, path)
    reader: Any = connect(path, read_only=True)
    made = Store(path, os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644), writer, reader)
    found = await module._book(writer)
    if found is not None:
        made.mark, fold = found
        made.current = fold == module.fold_identity()
    return made


@contextlib.contextmanager
def root_folder(name: str) -> Any:
    """A folder of this run only, in memory where the machine has tmpfs."""
    base = TMPFS if TMPFS.is_dir() and os.access(TMPFS, os.W_OK) else Path("/tmp")
    root = base / f"rigbook-sim-{os.getpid()}-{name}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)

"""The book on disk. Goal: one transaction per stretch of the log, and no way to misread a file.

Method: real SQLite files, made by the store itself, then killed, damaged, locked, filled up or replaced.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
from rigbook_bus.protocol import Message
from rigbook_ledger.book import open_book
from rigbook_ledger.digest import digest
from rigbook_ledger.entries import Entries, Gap
from rigbook_ledger.service import FILE
from rigbook_ledger.state import State, snapshot
from rigbook_ledger.store import Mark, Store, StoreError, StoreInUse, StoreLost, StoreUnreadable

from tests.unit import ledger_story as s
from tests.unit.running_ledger import ledger, world

if TYPE_CHECKING:
    from pathlib import Path


def messages(*steps: s.Step) -> list[Message]:
    """The story's events as they stand on the stream."""
    story = s.Story()
    found: list[Message] = []
    for step in steps:
        seq = story.state.position + 1
        data = step(story.state) if callable(step) else step
        draft = s.Draft(data=data, id=f"event-{seq}", source="test", time=s.rfc3339(s.START_NS))
        found.append(Message(seq, s.subject_of(data), s.START_NS, s.encode(draft)))
        story.tell(step)
    return found


def mark_of(state: State) -> Mark:
    return Mark(
        stream_created_ns=1,
        position=state.position,
        event_id=state.event_id,
        received_ns=state.received_ns,
        chain=state.chain,
    )


LIFE = (s.joined(), s.raised(), s.bound(), s.started(), s.exited(), s.released())


async def fill(path: Path, *steps: s.Step, with_snapshot: bool = False) -> State:
    store = await Store.open(path)
    entries = Entries()
    state = entries.take(State(), messages(*steps))
    await store.write(entries, mark_of(state), snapshot=snapshot(state) if with_snapshot else None)
    await store.close()
    return state


async def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / FILE
    state = await fill(path, *LIFE, with_snapshot=True)
    store = await Store.open(path)
    assert store.mark == mark_of(state)
    assert store.current
    assert [m async for batch in store.events(0) for m in batch] == messages(*LIFE)
    saved = await store.snapshot()
    assert saved == (6, snapshot(state))
    await store.close()
    assert not list(tmp_path.glob("*-wal")), "a clean end folds the WAL into the file"


async def test_killed_in_the_middle_of_a_transaction_nothing_of_it_is_there(tmp_path: Path) -> None:
    # Goal: the commit is the only moment that counts. Method: a process that kills itself when SQLite asks
    # for a later table's rows, after the events of the same transaction were inserted.
    path = tmp_path / FILE
    code = textwrap.dedent(
        f"""
        import asyncio, os, signal
        from pathlib import Path
        from rigbook_ledger.entries import Entries
        from rigbook_ledger.state import State
        from rigbook_ledger.store import Store
        from tests.unit.test_ledger_store import LIFE, mark_of, messages

        class Deadly(list):
            def __iter__(self):
                os.kill(os.getpid(), signal.SIGKILL)

        async def main():
            store = await Store.open(Path({str(path)!r}))
            story = messages(*LIFE)
            first = Entries()
            state = first.take(State(), story[:3])
            await store.write(first, mark_of(state))
            second = Entries()
            state = second.take(state, story[3:])
            second.releases = Deadly(second.releases)
            await store.write(second, mark_of(state))

        asyncio.run(main())
        """
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ended = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], env=env, check=False, timeout=30, capture_output=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    store = await Store.open(path)
    assert store.mark is not None
    assert store.mark.position == 3
    assert await store.rows("SELECT max(seq) FROM events") == [(3,)]
    assert await store.rows("SELECT phase FROM demands") == [("bound",)]
    assert await store.rows("SELECT released_ns FROM tenures") == [(0,)]
    await store.close()


async def test_a_write_is_guarded_by_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / FILE
    store = await Store.open(path)
    entries = Entries()
    state = entries.take(State(), messages(*LIFE)[:2])
    await store.write(entries, mark_of(state))
    with sqlite3.connect(path) as other:
        other.execute("UPDATE book SET position = 1")
    other.close()
    entries = Entries()
    entries.take(state, messages(*LIFE)[2:])
    with pytest.raises(StoreLost, match="another process wrote"):
        await store.write(entries, mark_of(state))
    assert await store.rows("SELECT max(seq) FROM events") == [(2,)]
    await store.close()


async def test_a_gap_is_not_folded() -> None:
    story = messages(*LIFE)
    entries = Entries()
    state = entries.take(State(), story[:2])
    with pytest.raises(Gap, match="event 4 came after 2"):
        entries.take(state, story[3:])
    assert state.position == 2
    with pytest.raises(Gap, match="event 2 came after 0"):
        Entries().take(State(), story[1:])


async def test_one_ledger_per_folder(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / FILE)
    with pytest.raises(StoreInUse, match=str(os.getpid())):
        await Store.open(tmp_path / FILE)
    await store.close()
    await (await Store.open(tmp_path / FILE)).close()


async def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / FILE
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE letters (text)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not a file of the ledger"):
        await Store.open(path)
    assert path.read_bytes() == before


async def test_what_is_left_of_a_deleted_file_is_not_taken_for_its_content(tmp_path: Path) -> None:
    path = tmp_path / FILE
    await fill(path, *LIFE)
    path.unlink()
    path.with_name(FILE + "-wal").write_bytes(b"left over")
    store = await Store.open(path)
    assert store.mark is None
    await store.close()


async def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="choose another data folder"):
        await Store.open(tmp_path / "file" / FILE)


async def test_a_file_deleted_while_in_use_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / FILE
    store = await Store.open(path)
    path.unlink()
    entries = Entries()
    state = entries.take(State(), messages(*LIFE))
    with pytest.raises(StoreLost, match="deleted or replaced"):
        await store.write(entries, mark_of(state))
    await store.close()


# -- opening the book ---------------------------------------------------------------------------


async def told(tmp_path: Path) -> tuple[str, int]:
    """A data folder with a story in it; (digest, number of tenures)."""
    async with world() as w, ledger(w, tmp_path):
        await w.tell(*LIFE, s.raised("d2"), s.bound("d2"))
        tenures = await w.rows("who", since="2020-01-01T00:00:00Z")
        return digest(w.state), len(tenures)


async def reopened(tmp_path: Path) -> tuple[str, int, list[str]]:
    """The same events on a server, and a ledger that takes up the folder as it is."""
    async with world() as w:
        await w.tell(*LIFE, s.raised("d2"), s.bound("d2"))
        book_ns = w.server.streams["RIG_LEDGER"].created_ns
        with sqlite3.connect(tmp_path / FILE) as db:
            db.execute("UPDATE book SET stream_created_ns = ?", (book_ns,))
        db.close()
        async with ledger(w, tmp_path):
            tenures = await w.rows("who", since="2020-01-01T00:00:00Z")
            status = (await w.rows("status", digest=True))[0]
            aside = sorted(p.name for p in tmp_path.glob("*.aside-*"))
            return status.digest, len(tenures), aside


async def test_tables_of_another_fold_are_made_anew(tmp_path: Path) -> None:
    before = await told(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("UPDATE book SET fold = 'older'")
        db.execute("UPDATE tenures SET owner = 'somebody else'")
        db.execute("UPDATE snapshot SET body = x'00'")
    db.close()
    assert await reopened(tmp_path) == (*before, [])
    with sqlite3.connect(tmp_path / FILE) as db:
        assert db.execute("SELECT DISTINCT owner FROM tenures").fetchall() == [("ada",)]
        assert db.execute("SELECT count(*) FROM events").fetchall() == [(8,)]
    db.close()


async def test_an_unreadable_snapshot_only_costs_time(tmp_path: Path) -> None:
    before = await told(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("UPDATE snapshot SET body = x'00'")
    db.close()
    assert await reopened(tmp_path) == (*before, [])


async def test_another_format_is_moved_aside_and_made_anew(tmp_path: Path) -> None:
    before = await told(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("PRAGMA user_version = 999")
    db.close()
    assert await reopened(tmp_path) == (*before, [f"{FILE}.aside-1"])


async def test_a_file_that_contradicts_itself_is_moved_aside_and_made_anew(tmp_path: Path) -> None:
    before = await told(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("DELETE FROM snapshot")
        db.execute("UPDATE events SET body = replace(body, 'event-3', 'event-x') WHERE seq = 3")
    db.close()
    assert await reopened(tmp_path) == (*before, [f"{FILE}.aside-1"])


async def test_a_damaged_file_is_never_put_away_when_the_stream_is_behind_it(tmp_path: Path) -> None:
    # Goal: the second copy survives. Method: the file is of another format, the stream lost its end.
    await told(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("PRAGMA user_version = 999")
    db.close()
    async with world() as w:
        await w.tell(s.joined())
        with pytest.raises(StoreUnreadable, match="only copy of 8 events"):
            await open_book(w.client, tmp_path / FILE, clock=w.clock, snapshot_every=100)
    assert (tmp_path / FILE).exists()
    assert not list(tmp_path.glob("*.aside-*"))


async def test_a_file_of_rubbish_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"rubbish " * 1000)
    async with world() as w:
        with pytest.raises(StoreUnreadable, match="move the file away"):
            await open_book(w.client, tmp_path / FILE, clock=w.clock, snapshot_every=100)
    assert (tmp_path / FILE).read_bytes() == b"rubbish " * 1000

"""The follower that placer and reaper share. Goal: nobody decides on a log that is not the one it knew.

Method: a follower over the in-memory server, whose stream is cut, made anew, or answers no question for a while.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
from rigbook_bus.protocol import BusUnavailable, Message
from rigbook_ledger.digest import digest
from rigbook_ledger.follower import Follower, LogDiscontinued, SnapshotFile
from rigbook_schemas.subjects import LEDGER_STREAM

from tests.unit import ledger_story as s
from tests.unit.running_ledger import world

if TYPE_CHECKING:
    from pathlib import Path

    from rigbook_bus.memory import MemoryBus

LIFE = (s.joined(), s.raised(), s.bound(), s.started())


async def test_it_begins_where_its_snapshot_ends(tmp_path: Path) -> None:
    file = SnapshotFile(tmp_path / "placer.snapshot")
    async with world() as w:
        await w.tell(*LIFE[:2])
        follower = Follower(w.client, snapshots=file)
        await follower.open()
        assert len(await follower.batch(wait_seconds=1.0)) == 2
        assert follower.caught_up
        await follower.close()
        await w.tell(*LIFE[2:])
        again = Follower(w.client, snapshots=file)
        await again.open()
        assert again.state.position == 2
        await again.batch(wait_seconds=1.0)
        assert digest(again.state) == digest(w.state)
        await again.close()


async def test_a_snapshot_of_another_fold_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SnapshotFile(tmp_path / "placer.snapshot")
    async with world() as w:
        await w.tell(*LIFE)
        file.save(1, w.state)
        assert file.load() is not None
        monkeypatch.setattr("rigbook_ledger.follower.fold_identity", lambda: "another")
        assert file.load() is None


async def test_a_gap_is_a_log_that_does_not_continue() -> None:
    async with world() as w:
        follower = Follower(w.client)
        with pytest.raises(LogDiscontinued, match="event 2 came after 0"):
            follower.take([Message(2, "rig.demand.p", 0, b"{}")])


async def test_a_log_that_was_cut_and_grew_again_is_noticed_on_reconnect() -> None:
    async with world() as w:
        await w.tell(*LIFE)
        follower = Follower(w.client)
        await follower.open()
        await follower.batch(wait_seconds=1.0)
        w.server.stop()
        stream = w.server.streams[LEDGER_STREAM]
        stream.truncate(3)
        w.server.start()
        await w.client.append("rig.demand.p", b"{}", message_id="other-4")
        await w.client.append("rig.demand.p", b"{}", message_id="other-5")
        with pytest.raises(LogDiscontinued):
            await follower.batch(wait_seconds=1.0)
        await follower.close()


async def test_what_was_read_is_not_lost_when_the_look_gets_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world() as w:
        await w.tell(*LIFE[:2])
        follower = Follower(w.client)
        await follower.open()
        await follower.batch(wait_seconds=1.0)
        w.server.restart()
        await w.tell(*LIFE[2:])
        asked = type(w.client).stream

        async def silent(self: MemoryBus, name: str) -> None:
            raise BusUnavailable("away")

        monkeypatch.setattr(type(w.client), "stream", silent)
        with pytest.raises(BusUnavailable):
            await follower.batch(wait_seconds=1.0)
        assert follower.state.position == 2
        monkeypatch.setattr(type(w.client), "stream", asked)
        while follower.state.position < 4:
            assert await follower.batch(wait_seconds=1.0)
        assert digest(follower.state) == digest(w.state)
        await follower.close()


async def test_a_follower_that_is_done_with_is_not_kept_by_the_bus() -> None:
    async with world() as w:
        follower = Follower(w.client)
        gone = weakref.ref(follower)
        del follower
        gc.collect()
        assert gone() is None
        w.server.restart()

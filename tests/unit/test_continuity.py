"""Is it still the log we knew? Goal: whoever knew more of a log than is there does not go on, also after a restart or
`kill -9`, until the log is back as it was, or an operator's newer word stands on it.

Method: the in-memory server, whose streams are truncated, made anew, written again and put back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest
from rigbook_bus.protocol import BusError
from rigbook_ledger.continuity import (
    Known,
    LogAbsent,
    LogDiscontinued,
    LogRecovered,
    check_continues,
    known_of,
    ledger_doubts,
    recovery_under_way,
)
from rigbook_ledger.follower import Follower, SnapshotFile
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas.subjects import LEDGER_STREAM
from rigbook_schemas.wire import Draft, encode

from tests.unit import ledger_story as s
from tests.unit.running_ledger import ledger, world

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.running_ledger import World

LIFE = (s.joined(), s.raised(), s.bound(), s.started())


async def known(w: World) -> Known:
    facts = await w.client.stream(LEDGER_STREAM)
    assert facts is not None
    follower = Follower(w.client)
    await follower.open()
    await follower.batch(wait_seconds=1.0)
    await follower.close()
    return known_of(facts.created_ns, follower.state)


async def recover(w: World, generation: int, *, created: str = "") -> None:
    facts = await w.client.stream(LEDGER_STREAM)
    assert facts is not None
    data = e.LogRecovered(
        generation=generation, stream_created=created or str(facts.created_ns), how="adopted"
    )
    w.number += 1
    draft = Draft(data=data, id=f"recovered-{w.number}", source="operator/test", time="2026-11-30T20:00:00Z")
    await w.client.append(subjects.policy(subjects.RECOVERY), encode(draft), message_id=draft.id)


async def test_a_log_that_goes_on_continues() -> None:
    async with world() as w:
        await w.tell(*LIFE[:2])
        knew = await known(w)
        await w.tell(*LIFE[2:])
        assert await check_continues(w.client, knew) == knew.created_ns
        assert await check_continues(w.client, None) == knew.created_ns


async def test_what_is_absent_is_told_from_what_is_gone() -> None:
    async with world() as w:
        await w.tell(*LIFE)
        knew = await known(w)
        w.server.remove(LEDGER_STREAM)
        with pytest.raises(LogAbsent):
            await check_continues(w.client, None)
        with pytest.raises(LogDiscontinued, match="does not exist"):
            await check_continues(w.client, knew)


async def test_the_same_events_written_anew_are_not_the_log() -> None:
    async with world() as w:
        await w.tell(*LIFE)
        knew = await known(w)
        stream = w.server.streams[LEDGER_STREAM]
        lost = [stream.records[3], stream.records[4]]
        w.server.truncate(LEDGER_STREAM, 2)
        w.clock.move(60)
        for m in lost:
            await w.client.append(m.subject, m.body, message_id=f"again-{m.seq}")
        with pytest.raises(LogDiscontinued, match="written anew") as raised:
            await check_continues(w.client, knew)
        assert not isinstance(raised.value, LogRecovered)
        await recover(w, 1)
        with pytest.raises(LogRecovered):
            await check_continues(w.client, knew)


async def test_only_a_newer_recovery_of_this_very_stream_counts() -> None:
    async with world() as w:
        await w.tell(*LIFE)
        knew = msgspec.structs.replace(await known(w), generation=1)
        w.server.truncate(LEDGER_STREAM, 2)
        for generation, created in ((1, ""), (2, "12345")):
            await recover(w, generation, created=created)
            with pytest.raises(LogDiscontinued) as raised:
                await check_continues(w.client, knew)
            assert not isinstance(raised.value, LogRecovered)
        await recover(w, 2)
        with pytest.raises(LogRecovered):
            await check_continues(w.client, knew)


async def test_a_killed_follower_remembers_without_a_snapshot(tmp_path: Path) -> None:
    """Snapshots are written every 20,000 events: after `kill -9` the small file is all there is."""
    file = SnapshotFile(tmp_path / "placer.snapshot")
    async with world() as w:
        await w.tell(*LIFE)
        follower = Follower(w.client, snapshots=file)
        await follower.open()
        await follower.batch(wait_seconds=1.0)
        follower.remember()  # and no close
        assert file.load() is None
        w.server.truncate(LEDGER_STREAM, 2)
        again = Follower(w.client, snapshots=file)
        with pytest.raises(LogDiscontinued, match="its end is lost"):
            await again.open()
        await recover(w, 1)
        await again.open()
        await again.batch(wait_seconds=1.0)
        assert (again.state.position, again.state.generation) == (3, 1)
        assert again.state.bindings == {}
        await again.close()
        after = Follower(w.client, snapshots=SnapshotFile(tmp_path / "placer.snapshot"))
        await after.open()
        assert after.state.position == 3
        await after.close()


async def test_a_recovery_that_was_folded_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    """The log is lost a second time, back to just behind the first recovery."""
    async with world() as w:
        await w.tell(*LIFE[:2])
        await recover(w, 1)
        await w.tell(s.joined("b"))
        knew = await known(w)
        assert knew.generation == 1
        w.server.truncate(LEDGER_STREAM, 3)
        with pytest.raises(LogDiscontinued) as raised:
            await check_continues(w.client, knew)
        assert not isinstance(raised.value, LogRecovered)


async def test_the_ledger_says_that_it_doubts(tmp_path: Path) -> None:
    async with world() as w:
        assert await ledger_doubts(w.client) == ""  # nobody answers
        async with ledger(w, tmp_path):
            await w.tell(*LIFE)
            await w.rows("events")
            assert await ledger_doubts(w.client) == ""
            w.server.truncate(LEDGER_STREAM, 2)
            while not (doubts := await ledger_doubts(w.client)):
                pass
            assert "its end is lost" in doubts


async def test_the_ledger_makes_its_book_anew_when_the_log_is_recovered(tmp_path: Path) -> None:
    async with world() as w, ledger(w, tmp_path):
        await w.tell(*LIFE)
        await w.rows("events")
        w.server.truncate(LEDGER_STREAM, 2)
        while not await ledger_doubts(w.client):
            pass
        copy = await w.all_pages("raw", since_seq=2)
        assert [row.seq for row in copy[0]] == [3, 4]
        await recover(w, 1)
        async with asyncio.timeout(10):
            while not await _trusts(w):
                await asyncio.sleep(0.01)
        (row,) = (await w.ask("status")).items
        assert (row["position"], row["generation"]) == (3, 1)
        assert (tmp_path / "ledger.sqlite3.aside-1").exists()


async def _trusts(w: World) -> bool:
    """The ledger answers (not while it makes its book anew), has read on, and is in no safe mode."""
    try:
        answer = await w.ask("status")
    except BusError:
        return False
    return answer.position == 3 and not answer.safe_mode


def test_nobody_decides_while_a_recovery_is_under_way() -> None:
    story = s.Story().given(s.joined(), e.SequenceSkipped(generation=1))
    assert "recovery 1 of the log has begun" in recovery_under_way(story.state)
    story.given(e.LogRecovered(generation=1, stream_created="1", how="adopted"))
    assert recovery_under_way(story.state) == ""
    story.given(e.SequenceSkipped(generation=1))  # late, of one that is over
    assert recovery_under_way(story.state) == ""

"""A log that is lost, and the way back. Goal: nothing is bound, reaped or started on a log that is not the one we
knew, what runs, runs on, and after the recovery ownership says what runs.

Method: a whole cell with real processes over the in-memory bus; its stream is truncated, made anew or removed;
the operator's library calls (`rigbook recover` is those and nothing else) bring it back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from rigbook.recovery.plan import plan
from rigbook.recovery.survey import survey, what_was_lost
from rigbook_ledger.digest import digest
from rigbook_ledger.state import Phase, State
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas.queries import Question
from rigbook_schemas.values import Workload

from tests.e2e.recovery_cell import RecoveryCell

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

QUIET_SECONDS = 1.0


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[RecoveryCell]:
    cell = RecoveryCell(tmp_path)
    try:
        await cell.open("a", "b")
        yield cell
        await settle(cell)
    finally:
        await cell.close()


async def settle(cell: RecoveryCell) -> None:
    """End what runs, through the log as it is now; each end is seen, so the log is one that works."""
    for did, demand in cell.state().demands.items():
        if not demand.phase.terminal:
            await cell.client.withdraw(did, "nlp")
    await cell.until(lambda s: all(d.phase.terminal for d in s.demands.values()))
    assert {f.code for f in cell.state().findings} <= {"stale_epoch", "release_by_non_holder"}


def running(*names: str):
    return lambda s: all(n in s.demands and s.demands[n].phase is Phase.RUNNING for n in names)


async def ledger_agrees(cell: RecoveryCell) -> None:
    """The ledger's digest is that of a fresh fold of the stream."""
    async with asyncio.timeout(10):
        while True:
            page = await cell.client.ask("status", Question(digest=True))
            state: State = cell.state()
            if page.rows[0].position == state.position:
                assert page.rows[0].digest == digest(state)
                return
            await asyncio.sleep(0.05)


def epochs(cell: RecoveryCell) -> dict[str, int]:
    return {b.demand: b.epoch for b in cell.state().bindings.values()}


async def lose_the_end(cell: RecoveryCell) -> int:
    """`one` runs on the part that is kept, `two` on the part that is lost. The length of what is kept."""
    await cell.demand("one", node="a", workload=Workload.SERVICE)
    await cell.until(running("one"))
    kept = cell.last_seq()
    await cell.demand("two", node="b", workload=Workload.SERVICE)
    await cell.until(running("two"))
    await asyncio.sleep(0.3)  # the ledger's copy follows a moment later
    cell.server.truncate(subjects.LEDGER_STREAM, kept)
    return kept


async def test_a_lost_end_is_restored_from_the_second_copy(cell: RecoveryCell) -> None:
    kept = await lose_the_end(cell)
    await cell.ledger_says(safe=True)
    found = await cell.agents_distrust("b")
    lost = what_was_lost(found.copy)
    assert lost is not None
    assert (lost.first, lost.kinds["bound"], lost.kinds["started"]) == (kept + 1, 1, 1)
    assert lost.demands == ("two",)
    before = found.before
    assert before is not None
    await asyncio.sleep(QUIET_SECONDS)
    assert cell.last_seq() == kept  # nobody wrote: agents, placer and reaper hold still

    done = await cell.recover()
    assert (done.how, done.said, done.skip_to) == ("restored", (), 0)
    await cell.ledger_says(safe=False)
    assert epochs(cell) == {b.demand: b.epoch for b in before.bindings.values()}
    assert running("one", "two")(cell.state())
    await cell.demand("three", workload=Workload.SERVICE)
    await cell.until(running("three"))
    await ledger_agrees(cell)
    assert (cell.folder / "ledger" / "ledger.sqlite3.aside-1").exists()


async def test_a_stream_that_is_gone_is_made_again_from_the_second_copy(cell: RecoveryCell) -> None:
    await cell.demand("one", node="a", workload=Workload.SERVICE)
    await cell.until(running("one"))
    await asyncio.sleep(0.3)
    last = cell.last_seq()
    cell.server.remove(subjects.LEDGER_STREAM)
    cell.server.remove(subjects.HEARTBEAT_STREAM)
    await cell.ledger_says(safe=True)
    await cell.agents_distrust("a", "b")
    assert (await cell.recover()).how == "restored"
    await cell.ledger_says(safe=False)
    assert running("one")(cell.state())
    assert cell.last_seq() >= last + 1
    await cell.demand("two", workload=Workload.SERVICE)
    await cell.until(running("two"))
    await ledger_agrees(cell)


async def test_a_log_that_others_wrote_on_is_gone_on_with_and_what_runs_is_adopted(
    cell: RecoveryCell,
) -> None:
    kept = await lose_the_end(cell)
    await cell.ledger_says(safe=True)
    old = await cell.agents_distrust("b")
    assert old.before is not None
    two = next(b.epoch for b in old.before.bindings.values() if b.demand == "two")
    await cell.demand("three", workload=Workload.SERVICE)  # a client that knows of nothing
    await asyncio.sleep(QUIET_SECONDS)
    assert cell.state().demands["three"].phase is Phase.WAITING

    done = await cell.recover()
    assert (done.how, done.foreign, done.adopted) == ("adopted", 1, (two,))
    assert done.skip_to >= old.before.position
    await cell.ledger_says(safe=False)
    await cell.until(running("one", "two", "three"))
    state = cell.state()
    assert state.demands["two"].epoch == two  # under its old epoch, which no event of this log has
    assert state.demands["three"].epoch > old.before.position > kept
    assert state.bindings[two].policy == "adopted"
    assert state.generation == 1
    await ledger_agrees(cell)


async def test_what_ended_while_the_log_was_lost_is_told_afterwards(
    cell: RecoveryCell, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    kept = cell.last_seq()
    await cell.demand("one", "sh", "-c", f"until test -e {go}; do sleep 0.05; done", node="a")
    await cell.until(running("one"))
    await asyncio.sleep(0.3)
    cell.server.truncate(subjects.LEDGER_STREAM, kept)
    await cell.agents_distrust("a")
    go.touch()
    await asyncio.sleep(QUIET_SECONDS)
    assert cell.last_seq() == kept  # the end is known to the agent, and kept until the log is one again
    await cell.recover()
    await cell.until(lambda s: s.demands["one"].phase is Phase.ENDED)
    assert str(cell.state().demands["one"].verdict) == "completed"


async def test_a_ledger_that_lost_its_copy_too_adopts_what_the_agents_report(cell: RecoveryCell) -> None:
    await cell.demand("one", node="a", workload=Workload.SERVICE)
    await cell.demand("two", node="b", workload=Workload.SERVICE)
    await cell.until(running("one", "two"))
    old = epochs(cell)
    for part in ("ledger", "placer", "reaper"):
        await cell.stop(part)
    cell.server.recreate(subjects.LEDGER_STREAM)
    for file in (*(cell.folder / "ledger").iterdir(), *(cell.folder / "placer").iterdir()):
        file.unlink()
    for part in ("ledger", "placer", "reaper"):
        await cell.start(part)  # they know nothing, and begin with the empty log
    await cell.demand("three", node="a", workload=Workload.SERVICE)
    await cell.agents_distrust("a", "b")
    await asyncio.sleep(QUIET_SECONDS)
    assert cell.state().bindings == {}  # no node has joined a log that it does not trust
    found = await survey(cell.client)
    refused = plan(found, without=frozenset(), without_copy=False, by="", reason="")
    assert "the ledger trusts this log and agents do not" in refused.refusals[0]

    done = await cell.recover(without_copy=True)
    assert set(done.adopted) == set(old.values())
    await cell.until(running("one", "two", "three"))
    state = cell.state()
    assert {d: state.demands[d].epoch for d in old} == old
    assert state.demands["three"].epoch > max(old.values())
    assert state.demands["one"].spec.components[0].command == ("sleep", "600")
    await ledger_agrees(cell)


async def test_a_node_that_does_not_report_must_be_named_and_is_fenced_when_it_comes_back(
    cell: RecoveryCell,
) -> None:
    kept = await lose_the_end(cell)
    await cell.ledger_says(safe=True)
    await cell.stop("b")
    # the copy is lost as well: nobody who answers knows of `two`
    for part in ("ledger", "placer"):
        await cell.stop(part)
        for file in (cell.folder / part).iterdir():
            file.unlink()
    for part in ("ledger", "placer"):
        await cell.start(part)
    found = await survey(cell.client)
    assert found.agents["b"] is None
    # nobody who is there sees anything wrong: the kept part is whole, and ends where they had read to
    if found.troubled:
        told = plan(found, without=frozenset(), without_copy=True, by="", reason="").refusals
        assert any("node b does not report" in line for line in told)
    await cell.start("b")
    await cell.agents_distrust("b")
    done = await cell.recover(without_copy=True)
    assert done.adopted
    await cell.until(running("one", "two"))
    assert cell.state().demands["two"].epoch > kept


async def test_deciders_that_restart_in_safe_mode_do_not_forget_it(cell: RecoveryCell) -> None:
    kept = await lose_the_end(cell)
    await cell.ledger_says(safe=True)
    for part in ("placer", "reaper"):
        await cell.stop(part)
        await cell.start(part)
    await cell.start("placer-2")  # one that never knew the log: the ledger's word holds it
    await cell.demand("three", workload=Workload.SERVICE)
    await asyncio.sleep(QUIET_SECONDS)
    assert cell.last_seq() == kept + 1
    await cell.recover()
    await cell.until(running("one", "two", "three"))


async def test_a_log_that_is_put_back_as_it_was_needs_no_operator(cell: RecoveryCell) -> None:
    await cell.demand("one", node="a", workload=Workload.SERVICE)
    await cell.until(running("one"))
    await asyncio.sleep(0.3)
    right = cell.server.streams[subjects.LEDGER_STREAM]
    cell.server.recreate(subjects.LEDGER_STREAM)
    await cell.ledger_says(safe=True)
    await cell.agents_distrust("a")
    cell.server.stop()
    cell.server.streams[subjects.LEDGER_STREAM] = right
    cell.server.start()
    await cell.ledger_says(safe=False)
    await cell.demand("two", workload=Workload.SERVICE)
    await cell.until(running("one", "two"))
    found = await survey(cell.client)
    assert plan(found, without=frozenset(), without_copy=False, by="", reason="").how == ""


async def test_events_appended_again_without_an_operators_word_are_not_the_log(cell: RecoveryCell) -> None:
    kept = await lose_the_end(cell)
    await cell.ledger_says(safe=True)
    found = await cell.agents_distrust("b")
    import zlib

    for row in found.copy:
        body = zlib.decompress(row.body)
        await cell.bus.append(row.subject, body, message_id=f"again-{row.seq}")
    await asyncio.sleep(QUIET_SECONDS)
    await cell.ledger_says(safe=True)
    assert (await cell.agents_distrust("b")).foreign == 0
    done = await cell.recover()
    assert (done.how, len(done.copy)) == ("restored", 0)
    await cell.until(running("one", "two"))
    assert cell.last_seq() > kept
    assert isinstance(cell.state().generation, int)
    assert cell.state().generation == 1


async def test_what_was_said_in_the_lost_part_is_said_again(cell: RecoveryCell) -> None:
    kept = cell.last_seq()
    await cell.client.set_policy("nlp", e.QuotaSet(project="nlp", memory_bytes=100 * 1024**3, by="op"))
    await cell.client.set_policy("node", e.NodeCordoned(node="b", by="op", reason="fans"))
    await cell.demand("waits", node="b", workload=Workload.SERVICE)
    await cell.demand("done", "true", node="a")
    await cell.until(lambda s: "done" in s.demands and s.demands["done"].phase is Phase.ENDED)
    await asyncio.sleep(0.3)
    cell.server.truncate(subjects.LEDGER_STREAM, kept)
    await cell.ledger_says(safe=True)
    await cell.demand("new", node="a", workload=Workload.SERVICE)  # written on the stream after the loss
    await cell.recover()
    await cell.until(running("new"))
    state = cell.state()
    assert state.projects["nlp"].quota_bytes == 100 * 1024**3
    assert state.nodes["b"].cordoned == "fans"
    assert state.demands["waits"].phase is Phase.WAITING
    assert "done" not in state.demands  # it ran and ended; it is not run again

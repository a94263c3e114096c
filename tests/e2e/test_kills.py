"""`kill -9` of each service and of the nats-server in the middle of 200 demands.

What must hold afterwards: no double binding at any position of the log, no lost demand, each demand
released exactly once, and the ledger's digest equal to the one of a fresh replay.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from rigbook_ledger.audit import audit, audit_touched
from rigbook_ledger.digest import digest
from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import Phase, State
from rigbook_schemas import subjects
from rigbook_schemas.events import Released
from rigbook_schemas.values import GIB, Mode, Request
from rigbook_schemas.wire import decode

from tests.e2e.cell import ProcessCell

if TYPE_CHECKING:
    from pathlib import Path

DEMANDS = 200

pytestmark = [pytest.mark.nats, pytest.mark.slow]


async def test_kill_everything_once_in_the_middle_of_200_demands(tmp_path: Path) -> None:
    cell = ProcessCell(tmp_path, gpus="sim:4xRTX4090", placers=2)
    await cell.open()
    try:
        await cell.until(lambda: bool(cell.state.nodes))
        slice_ = Request(memory_bytes=6 * GIB, mode=Mode.MEMORY_SLICE)

        async def client() -> None:
            for i in range(DEMANDS):
                await cell.raise_demand(f"d-{i}", "sleep", "0.05", resources=slice_, now_ns=time.time_ns())
                await asyncio.sleep(0.01)

        raising = asyncio.create_task(client())

        def done() -> int:
            return sum(1 for d in cell.state.demands.values() if d.phase is Phase.ENDED)

        for number, part in enumerate(
            ["placer-1", "agent-a", "nats", "ledger-1", "reaper-1", "placer-2", "agent-a", "nats"], 1
        ):
            share = number * DEMANDS // 10
            await cell.until(lambda share=share: done() >= share)  # type: ignore[misc]
            print(f"{done()} of {DEMANDS} ended: kill -9 {part}")
            if part == "nats":
                await cell.kill_server()
            else:
                cell.kill_part(part)
        await raising
        await cell.until(lambda: done() == DEMANDS)
        assert cell.state.bindings == {}

        state, released = await replay(cell)
        assert sorted(released) == sorted(f"d-{i}" for i in range(DEMANDS))
        assert {f.code for f in state.findings} <= {"release_by_non_holder", "stale_epoch"}, state.findings
        # told twice by an agent that was killed before it read the acknowledgement: never more than kills
        assert state.finding_count <= 2 * cell.kills
        assert digest(state) == await ledger_digest(cell, state.position)
        assert cell.ended_parts() == []
    finally:
        await cell.close()


async def replay(cell: ProcessCell) -> tuple[State, list[str]]:
    """The whole log folded again, audited at every position; and every release that counted."""
    tail = await cell.bus.tail(subjects.LEDGER_STREAM, start_seq=1)
    state, released = State(), []
    while state.position < cell.state.position:
        for m in await tail.batch(max_messages=1000, wait_seconds=5.0):
            record = decode(m.seq, m.subject, m.received_ns, m.body)
            before = state.finding_count
            state = evolve(state, record)
            assert audit_touched(state) == [], f"at {m.seq}"
            state.touched.clear()
            if isinstance(record.data, Released) and state.finding_count == before:
                released.append(record.data.demand)
    await tail.close()
    assert audit(state) == []
    return state, released


async def ledger_digest(cell: ProcessCell, position: int) -> str:
    """The live ledger's, once it has folded as far."""
    async with asyncio.timeout(30):
        while True:
            answer = await cell.ask("status", digest=True)
            assert answer.error is None
            if answer.position == position and answer.caught_up:
                return str(answer.items[0]["digest"])
            assert answer.position <= position, "the log went on: nothing should happen any more"
            await asyncio.sleep(0.1)

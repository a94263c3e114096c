"""Parts of a real cell killed at random for a while, the bus included. Goal: the invariants hold at every position, no
demand is lost, each is released once, and the live ledger agrees with a fresh replay.

RIGBOOK_SOAK_SECONDS says for how long (default 10; with RIGBOOK_CI=1 it is 180).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import TYPE_CHECKING

import pytest
from rigbook_ledger.digest import digest
from rigbook_ledger.state import Phase
from rigbook_schemas import subjects
from rigbook_schemas.events import DemandWithdrawn
from rigbook_schemas.values import GIB, Mode, Request

from tests.e2e.cell import ProcessCell
from tests.e2e.test_kills import ledger_digest, replay

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.nats, pytest.mark.slow]

SECONDS = float(os.environ.get("RIGBOOK_SOAK_SECONDS") or (180 if os.environ.get("RIGBOOK_CI") else 10))
SEED = int(os.environ.get("RIGBOOK_SOAK_SEED") or time.time_ns() % 1_000_000)
LIVE_MAX = 40


async def test_parts_are_killed_at_random(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    cell = ProcessCell(tmp_path, gpus="sim:4xRTX4090", placers=2)
    try:
        await cell.open()
        await cell.until(lambda: bool(cell.state.nodes))
        until = time.monotonic() + SECONDS
        raised: list[str] = []

        def live() -> int:
            return sum(not d.phase.terminal for d in cell.state.demands.values())

        async def client() -> None:
            while time.monotonic() < until:
                if live() < LIVE_MAX:
                    name = f"d-{len(raised)}"
                    mode = rng.choice((Mode.EXCLUSIVE, Mode.MEMORY_SLICE, Mode.MEMORY_SLICE))
                    request = Request(memory_bytes=rng.choice((4, 6, 11)) * GIB, mode=mode)
                    seconds = "600" if rng.random() < 0.2 else f"{rng.uniform(0.05, 1.0):.2f}"
                    await cell.raise_demand(name, "sleep", seconds, resources=request, now_ns=time.time_ns())
                    raised.append(name)
                    if seconds == "600":
                        endless.append(name)
                elif endless:
                    await withdraw(endless.pop(0))
                await asyncio.sleep(rng.uniform(0.01, 0.15))

        endless: list[str] = []

        async def withdraw(name: str) -> None:
            said = DemandWithdrawn(demand=name, project="nlp", by="test")
            await cell.append(subjects.demand("nlp"), said, now_ns=time.time_ns())

        killed: dict[str, int] = {}

        async def killer() -> None:
            while time.monotonic() < until:
                await asyncio.sleep(rng.uniform(0.3, 2.0))
                part = rng.choice([*cell.parts, "nats"])
                killed[part] = killed.get(part, 0) + 1
                await cell.kill_server() if part == "nats" else cell.kill_part(part)

        both = asyncio.gather(client(), killer())
        await cell.until(both.done, SECONDS + 60)
        await both
        for name in endless:
            await withdraw(name)
        await cell.until(
            lambda: (
                len(cell.state.demands) == len(raised)
                and all(d.phase.terminal for d in cell.state.demands.values())
            ),
            90,
        )
        assert cell.state.bindings == {}
        state, released = await replay(cell)
        ended = [d for d, x in state.demands.items() if x.phase is Phase.ENDED]
        assert sorted(released) == sorted(ended)
        assert {f.code for f in state.findings} <= {"release_by_non_holder", "stale_epoch"}, state.findings
        assert digest(state) == await ledger_digest(cell, state.position)
        assert cell.ended_parts() == []
        print(
            f"seed {SEED}: {SECONDS:.0f} s, {cell.kills} kills {killed}, {len(raised)} demands, {state.position} events"
        )
    except BaseException:
        print(f"RIGBOOK_SOAK_SEED={SEED}")
        raise
    finally:
        await cell.close()

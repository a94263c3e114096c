"""`rigbook doctor` and `rigbook recover` as an operator types them, on a real nats-server whose data folder was put back to
an older copy while it was down: the stream has lost its end, and nobody was told.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from rigbook_ledger.digest import digest
from rigbook_ledger.state import Phase
from rigbook_schemas.values import Workload

from tests.e2e.cell import ProcessCell
from tests.e2e.test_kills import ledger_digest, replay

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.nats, pytest.mark.slow]


def rigbook(cell: ProcessCell, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rigbook", *words, "--nats", cell.url()],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "COLUMNS": "400", "NO_COLOR": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("foreign", [False, True], ids=["restored", "gone on with"])
async def test_an_older_copy_of_the_data_folder(tmp_path: Path, foreign: bool) -> None:
    cell = ProcessCell(tmp_path, gpus="sim:4xRTX4090")
    try:
        await cell.open()
        await cell.until(lambda: bool(cell.state.nodes))
        now = time.time_ns()
        await cell.raise_demand("one", "sleep", "600", workload=Workload.SERVICE, now_ns=now)
        await cell.until(
            lambda: cell.state.demands["one"].phase is Phase.RUNNING if cell.state.demands else False
        )
        await cell.server.stop()
        store = tmp_path / "nats" / "jetstream"
        shutil.copytree(store, tmp_path / "older")
        await cell.server.start()
        await cell.raise_demand("two", "sleep", "600", workload=Workload.SERVICE, now_ns=now)
        await cell.until(
            lambda: "two" in cell.state.demands and cell.state.demands["two"].phase is Phase.RUNNING
        )
        two = cell.state.demands["two"].epoch
        await asyncio.sleep(1.0)  # the second copy follows a moment later
        await cell.server.stop()
        shutil.rmtree(store)
        shutil.copytree(tmp_path / "older", store)
        await cell.server.start()

        async with asyncio.timeout(40):
            while not (await cell.ask("status")).safe_mode:
                await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        told = await asyncio.to_thread(rigbook, cell, "doctor")
        assert told.returncode == 9, told
        for word in (
            "SAFE MODE",
            "1 bound",
            "demands: two",
            f"bindings (epochs): {two}",
            "distrusts this log",
        ):
            assert word in told.stdout, f"{word!r} is not in\n{told.stdout}"
        if foreign:
            await cell.raise_demand("three", "sleep", "600", workload=Workload.SERVICE, now_ns=now)
        dry = await asyncio.to_thread(rigbook, cell, "recover")
        assert dry.returncode == 0, dry
        assert ("GONE ON WITH" if foreign else "RESTORED") in dry.stdout
        assert "nothing was done" in dry.stdout
        print(told.stdout, dry.stdout)
        done = await asyncio.to_thread(rigbook, cell, "recover", "--yes", "--json", "--reason", "older copy")
        assert done.returncode == 0, done
        said = json.loads(done.stdout)
        assert said["done"]
        assert said["adopted"] == ([two] if foreign else [])

        await cell.begin_anew()
        await cell.raise_demand("four", "true", now_ns=time.time_ns())
        names = ("one", "two", *(("three",) if foreign else ()))
        await cell.until(
            lambda: (
                all(n in cell.state.demands and cell.state.demands[n].phase is Phase.RUNNING for n in names)
                and "four" in cell.state.demands
                and cell.state.demands["four"].phase is Phase.ENDED
            )
        )
        assert cell.state.demands["two"].epoch == two
        state, _ = await replay(cell)
        assert digest(state) == await ledger_digest(cell, state.position)
        healthy = await asyncio.to_thread(rigbook, cell, "recover")
        assert "nothing is wrong with the log" in healthy.stdout
    finally:
        await cell.close()

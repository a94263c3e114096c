"""Disks that lose power, are slow, or full. Goal: what was acknowledged is there afterwards, in its order, and
everything goes on by itself when the disk does.

Method: nats-server (and the ledger's SQLite) on an ext4 of the test's own, see `tests.e2e.disks`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rigbook_bus.embedded import EmbeddedServer, find_binary
from rigbook_bus.jetstream import JetStreamBus
from rigbook_bus.protocol import BusError, BusUnknown, Link
from rigbook_ledger.digest import digest
from rigbook_ledger.streams import ensure_streams
from rigbook_schemas import events as e
from rigbook_schemas import subjects

from tests.e2e.cell import ProcessCell
from tests.e2e.disks import BLKIO, Disk, why_no_disk
from tests.e2e.test_kills import ledger_digest, replay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = [
    pytest.mark.nats,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_disk()), reason=why_no_disk()),
]

WRITERS = 16
SUBJECT = subjects.policy("test")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with Disk(tmp_path, mib=96) as disk:
        yield disk


class Writers:
    """Several at once, each behind its own last acknowledgement; remembers what was acknowledged."""

    def __init__(self, bus: JetStreamBus) -> None:
        self._bus = bus
        self.acked: dict[int, str] = {}  # sequence to message id
        self._tasks = [asyncio.create_task(self._write(n)) for n in range(WRITERS)]

    async def _write(self, number: int) -> None:
        count = 0
        while True:
            count += 1
            mid = f"w{number}-{count}"
            try:
                done = await self._bus.append(
                    SUBJECT, mid.encode() + b" " * 200, message_id=mid, timeout_seconds=1.0
                )
            except BusError:
                await asyncio.sleep(0.02)
            else:
                self.acked[done.seq] = mid

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def stored(bus: JetStreamBus) -> dict[int, str]:
    async with asyncio.timeout(20):
        while bus.link is not Link.CONNECTED:
            await asyncio.sleep(0.02)
    facts = await bus.stream(subjects.LEDGER_STREAM)
    assert facts is not None
    found: dict[int, str] = {}
    if not facts.last_seq:
        return found
    tail = await bus.tail(subjects.LEDGER_STREAM, start_seq=1)
    while len(found) < facts.last_seq:
        for m in await tail.batch(max_messages=5000, wait_seconds=5.0):
            found[m.seq] = m.body.split(b" ")[0].decode()
    await tail.close()
    return found


async def until_writing(writers: Writers, more: int, seconds: float = 20.0) -> None:
    goal = len(writers.acked) + more
    async with asyncio.timeout(seconds):
        while len(writers.acked) < goal:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("run", [1, 2, 3] if os.environ.get("RIGBOOK_CI") else [2])
async def test_a_power_cut_loses_nothing_that_was_acknowledged(disk: Disk, run: int) -> None:
    server = EmbeddedServer(disk.path / "nats")
    await server.start()
    bus = await JetStreamBus.connect(server.url, name="writers")
    try:
        await ensure_streams(bus)
        writers = Writers(bus)
        await until_writing(writers, 500 * run)
        disk.cut_power()  # while they write
        await asyncio.sleep(0.3)
        await server.kill()
        await writers.stop()
        disk.restore_power()
        await server.start()
        found = await stored(bus)
    finally:
        await bus.close()
        await server.stop()
    lost = {seq for seq, mid in writers.acked.items() if found.get(seq) != mid}
    print(f"{len(writers.acked)} acknowledged, {len(found)} stored, {len(lost)} lost")
    assert not lost
    assert sorted(found) == list(range(1, len(found) + 1))


async def test_the_power_cut_would_show_a_server_that_does_not_sync(tmp_path: Path, disk: Disk) -> None:
    """The control: the same cut, with the server's default of two minutes between syncs."""
    folder = tmp_path / "nats"
    folder.mkdir()
    config = folder / "nats.conf"
    config.write_text(
        f'host: 127.0.0.1\nport: -1\nports_file_dir: "{folder}"\njetstream {{ store_dir: "{disk.path}/js" }}\n'
    )

    def start() -> subprocess.Popen[bytes]:
        for old in folder.glob("*.ports"):
            old.unlink()
        return subprocess.Popen([find_binary(), "-c", config], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL, cwd="/")  # fmt: skip

    async def connect(process: subprocess.Popen[bytes]) -> JetStreamBus:
        import json

        ports = folder / f"nats-server_{process.pid}.ports"
        async with asyncio.timeout(20):
            while not (ports.exists() and ports.stat().st_size):
                await asyncio.sleep(0.01)
        return await JetStreamBus.connect(json.loads(ports.read_text())["nats"][0], name="writers")

    process = start()
    try:
        bus = await connect(process)
        await ensure_streams(bus)
        writers = Writers(bus)
        await until_writing(writers, 3000)
        disk.cut_power()
        await asyncio.sleep(0.3)
        process.kill()
        process.wait()
        await writers.stop()
        await bus.close()
        disk.restore_power()
        process = start()
        bus = await connect(process)
        facts = await bus.stream(subjects.LEDGER_STREAM)
        found = await stored(bus) if facts is not None else {}
        await bus.close()
    finally:
        process.kill()
        process.wait()
    lost = {seq for seq, mid in writers.acked.items() if found.get(seq) != mid}
    print(f"default sync_interval: {len(writers.acked)} acknowledged, {len(lost)} lost")
    assert len(lost) > len(writers.acked) // 2


async def test_the_control_machine_loses_power_while_its_nodes_live_on(tmp_path: Path, disk: Disk) -> None:
    """Bus, ledger, placer and reaper on the disk that dies; the agent is another machine."""
    cell = ProcessCell(tmp_path, gpus="sim:4xRTX4090", on=disk.path)
    await cell.open()
    try:
        await cell.until(lambda: bool(cell.state.nodes))
        for i in range(40):
            await cell.raise_demand(f"d-{i}", "sleep", "0.3", now_ns=time.time_ns())
        await cell.until(lambda: sum(d.phase.terminal for d in cell.state.demands.values()) >= 8)
        disk.cut_power()
        await asyncio.sleep(0.3)
        await cell.power_off(("ledger-1", "placer-1", "reaper-1"))
        before = cell.state.position
        disk.restore_power()
        await cell.power_on()
        await cell.until(lambda: sum(d.phase.terminal for d in cell.state.demands.values()) == 40)
        state, released = await replay(cell)
        assert state.position >= before
        assert sorted(released) == sorted(f"d-{i}" for i in range(40))
        assert {f.code for f in state.findings} <= {"release_by_non_holder", "stale_epoch"}
        assert digest(state) == await ledger_digest(cell, state.position)
    finally:
        await cell.close()


async def test_a_full_disk_of_the_bus_loses_nothing_and_a_restart_with_room_goes_on(disk: Disk) -> None:
    server = EmbeddedServer(disk.path / "nats")
    await server.start()
    bus = await JetStreamBus.connect(server.url, name="writer")
    acked: dict[int, str] = {}

    async def write(count: int) -> BusError | None:
        for _ in range(count):
            mid = f"m{len(acked)}-{time.monotonic_ns()}"
            try:
                done = await bus.append(
                    SUBJECT, mid.encode() + b" " * 2000, message_id=mid, timeout_seconds=1.0
                )
            except BusError as error:
                return error
            acked[done.seq] = mid
        return None

    try:
        await ensure_streams(bus)
        assert await write(50) is None
        ballast = disk.fill(leave_bytes=300_000)
        error = await write(2000)
        # nats-server 2.15 does not answer then: "unknown", which everybody of ours reads as "read on, decide again"
        assert isinstance(error, BusUnknown)
        found = await stored(bus)  # reading goes on
        assert all(found[seq] == mid for seq, mid in acked.items())
        ballast.unlink()
        os.kill(server.pid or 0, signal.SIGTERM)  # what `rigbook up` does when there is room again
        await server.wait()
        await server.start()
        async with asyncio.timeout(10):
            while await write(1) is not None:
                await asyncio.sleep(0.1)
        assert await write(50) is None
        found = await stored(bus)
        assert all(found[seq] == mid for seq, mid in acked.items())
        assert sorted(found) == list(range(1, len(found) + 1))
    finally:
        await bus.close()
        await server.stop()


async def test_a_full_disk_of_the_ledger_is_said_and_it_catches_up(tmp_path: Path, disk: Disk) -> None:
    cell = ProcessCell(tmp_path, gpus="sim:2xRTX4090", ledger_on=disk.path)
    await cell.open()
    try:
        await cell.until(lambda: bool(cell.state.nodes))
        await cell.raise_demand("before", "true", now_ns=time.time_ns())
        await cell.until(
            lambda: "before" in cell.state.demands and cell.state.demands["before"].phase.terminal
        )
        ballast = disk.fill(leave_bytes=64_000)
        now = time.time_ns()
        text = "x" * 1500
        for i in range(200):
            quota = e.QuotaSet(project="other", memory_bytes=i, by="test", reason=text)
            await cell.append(subjects.policy("other"), quota, now_ns=now)
        async with asyncio.timeout(20):
            while not (row := (await cell.ask("status")).items[0]).get("store"):
                await asyncio.sleep(0.1)
        assert "cannot be written" in row["store"]
        # the present is still answered, and work goes on
        await cell.raise_demand("meanwhile", "true", now_ns=time.time_ns())
        await cell.until(
            lambda: "meanwhile" in cell.state.demands and cell.state.demands["meanwhile"].phase.terminal
        )
        answer = await cell.ask("demand", id="before")
        assert answer.error is None
        ballast.unlink()
        async with asyncio.timeout(30):
            while (row := (await cell.ask("status")).items[0]).get("store") or row[
                "written"
            ] < cell.state.position:
                await asyncio.sleep(0.2)
        state, _ = await replay(cell)
        assert digest(state) == await ledger_digest(cell, state.position)
    finally:
        await cell.close()


@pytest.fixture
async def slow(disk: Disk) -> AsyncIterator[EmbeddedServer]:
    if not (BLKIO / "blkio.throttle.write_iops_device").exists():
        pytest.skip("needs cgroup v1 blkio throttling")
    server = EmbeddedServer(disk.path / "nats")
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def test_a_slow_disk_slows_and_loses_nothing(disk: Disk, slow: EmbeddedServer) -> None:
    """The kernel lets the bus write 40 times a second: every append is still synced before it is acknowledged."""
    bus = await JetStreamBus.connect(slow.url, name="writers")
    try:
        await ensure_streams(bus)
        writers = Writers(bus)
        await until_writing(writers, 300)
        assert slow.pid is not None
        disk.slow_down(slow.pid, writes_per_second=40)
        before, began = len(writers.acked), time.monotonic()
        await asyncio.sleep(4.0)
        rate = (len(writers.acked) - before) / (time.monotonic() - began)
        print(f"{rate:.0f} appends/s on the slow disk")
        assert 1 < rate < 200
        disk.slow_down(slow.pid, writes_per_second=1_000_000)
        await until_writing(writers, 300)
        await writers.stop()
        found = await stored(bus)
        assert all(found[seq] == mid for seq, mid in writers.acked.items())
    finally:
        await bus.close()

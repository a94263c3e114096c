"""What an agent costs a node: resident memory and processor time at one heartbeat a second with eight cards.

Method: a real agent process (`python -m rigbook agent`) joined to a real bus and ledger, eight simulated cards and
some services on them; /proc/<pid> read before and after. The driver's own library is not in this figure: NVML adds
what the library maps (about 15 MiB resident with a real driver).

    python bench/bench_agent.py [--seconds 30] [--components 8]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from rigbook_bus.clock import SystemClock
from rigbook_bus.embedded import EmbeddedServer
from rigbook_bus.jetstream import JetStreamBus
from rigbook_bus.runner import random_id
from rigbook_ledger.follower import Follower, LogAbsent
from rigbook_ledger.state import Phase
from rigbook_schemas import subjects
from rigbook_schemas.events import DemandRaised, DemandWithdrawn
from rigbook_schemas.values import GIB, Component, Mode, Owner, Probe, Request, Workload
from rigbook_schemas.wire import Draft, encode, rfc3339

MIB = 1024**2
BUDGET_BYTES = 60 * MIB
BUDGET_CORE = 0.01
CARDS = "sim:8xRTX4090"
TICKS = os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> tuple[int, int, int]:
    """(resident, of it private, highest resident), bytes."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    rollup = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        if ":" in line
    )
    private = sum(int(rollup[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
    return int(status["VmRSS"].split()[0]) * 1024, private * 1024, int(status["VmHWM"].split()[0]) * 1024


def processor(pid: int) -> float:
    """Seconds of processor time so far, children not included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def measure(seconds: float, components: int, *, probes: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="rigbook-bench-") as name:
        folder = Path(name)
        server = EmbeddedServer(folder / "nats")
        await server.start()
        rigbook = [sys.executable, "-m", "rigbook"]
        common = ["--log-level", "warning"]
        parts = {
            "ledger": [*rigbook, "serve", "ledger", "--nats", server.url, "--data", str(folder / "ledger"), *common],
            "placer": [*rigbook, "serve", "placer", "--nats", server.url, "--data", str(folder / "placer"), *common],
            "agent": [*rigbook, "agent", "--join", server.url, "--node", "bench", "--gpus", CARDS,
                      "--engine", "process", "--heartbeat", "1", "--data", str(folder / "agent"), *common],
        }  # fmt: skip
        running = {part: await asyncio.create_subprocess_exec(*command) for part, command in parts.items()}
        bus = await JetStreamBus.connect(server.url, name="bench")
        try:
            follower = Follower(bus)
            while True:
                try:
                    await follower.open()
                    break
                except LogAbsent:
                    await asyncio.sleep(0.1)
            while not follower.state.cards:
                await follower.batch(wait_seconds=0.2)
            agent = running["agent"].pid
            await asyncio.sleep(5.0)
            print(f"{'':34}{'resident':>10}{'private':>10}{'highest':>10}{'of a core':>11}")
            await report("idle, 8 cards", agent, seconds)
            if components:
                await raise_services(bus, components, probes=probes)
                while sum(d.phase is Phase.RUNNING for d in follower.state.demands.values()) < components:
                    await follower.batch(wait_seconds=0.2)
                await asyncio.sleep(5.0)
                await report(
                    f"{components} services, probed every 10 s" if probes else f"{components} services",
                    agent,
                    seconds,
                )
                await withdraw_services(bus, components)
                while any(not d.phase.terminal for d in follower.state.demands.values()):
                    await follower.batch(wait_seconds=0.2)
        finally:
            await bus.close()
            for part in reversed(running.values()):
                part.terminate()
            for part in running.values():
                await part.wait()
            await server.stop()


async def raise_services(bus: JetStreamBus, components: int, *, probes: bool) -> None:
    clock = SystemClock()
    probe = Probe(kind="exec", command=("true",), every_seconds=10) if probes else None
    for number in range(components):
        demand = DemandRaised(
            demand=f"svc-{number}", project="bench", owner=Owner(name="bench"), workload=Workload.SERVICE,
            resources=Request(memory_bytes=4 * GIB, mode=Mode.EXCLUSIVE if components <= 8 else Mode.MEMORY_SLICE),
            components=(Component(command=("sleep", "600"), memory_bytes=256 * MIB, probe=probe),),
        )  # fmt: skip
        draft = Draft(data=demand, id=random_id(), source="bench", time=rfc3339(clock.now_ns()))
        await bus.append(subjects.demand("bench"), encode(draft), message_id=draft.id)


async def withdraw_services(bus: JetStreamBus, components: int) -> None:
    now = rfc3339(SystemClock().now_ns())
    for number in range(components):
        data = DemandWithdrawn(demand=f"svc-{number}", project="bench", by="bench")
        draft = Draft(data=data, id=random_id(), source="bench", time=now)
        await bus.append(subjects.demand("bench"), encode(draft), message_id=draft.id)


async def report(what: str, pid: int, seconds: float) -> None:
    before, began = processor(pid), time.monotonic()
    await asyncio.sleep(seconds)
    share = (processor(pid) - before) / (time.monotonic() - began)
    now, private, highest = resident(pid)
    over = " over the budget" if now > BUDGET_BYTES or share > BUDGET_CORE else ""
    print(
        f"{what:34}{now / MIB:>6.1f} MiB{private / MIB:>6.1f} MiB{highest / MIB:>6.1f} MiB{share:>10.2%}{over}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    parser.add_argument("--components", type=int, default=8, help="services that run on the cards")
    asked = parser.parse_args()
    asyncio.run(measure(asked.seconds, asked.components, probes=True))
    print(f"budget: {BUDGET_BYTES // MIB} MiB resident, {BUDGET_CORE:.0%} of a core")


if __name__ == "__main__":
    main()

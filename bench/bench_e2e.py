"""From demand to started, and demands through the whole system per second, on the system as users run it.

`rigbook up` with 8 simulated cards, the process engine and the durable server (`sync_interval: always`);
every event is read back from the log by this client. Prints medians, the 99th percentile and where the
time of a demand goes.

    python bench/bench_e2e.py [--demands 1000] [--idle 200] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rigbook.context import read_context
from rigbook_bus.jetstream import JetStreamBus
from rigbook_bus.runner import random_id
from rigbook_ledger.audit import audit
from rigbook_ledger.follower import Follower
from rigbook_schemas import subjects
from rigbook_schemas.events import Bound, DemandRaised, Exited, Released, Started
from rigbook_schemas.values import GIB, Component, Owner, Request
from rigbook_schemas.wire import Draft, Record, encode, rfc3339

CARDS = "sim:8xRTX4090"


class Measured:
    """When this client read each event of a demand, seconds (monotonic), and the server's stamps."""

    def __init__(self) -> None:
        self.sent: dict[str, float] = {}
        self.read: dict[str, dict[type, float]] = {}
        self.stamps: dict[str, dict[type, int]] = {}

    def note(self, records: list[Record]) -> None:
        now = time.monotonic()
        for record in records:
            if record.correlation in self.sent:
                self.read.setdefault(record.correlation, {})[type(record.data)] = now
                self.stamps.setdefault(record.correlation, {})[type(record.data)] = record.received_ns


def draft(name: str) -> Draft:
    return Draft(
        data=DemandRaised(
            demand=name, project="bench", owner=Owner(name="bench"), resources=Request(memory_bytes=8 * GIB),
            components=(Component(command=("/bin/true",)),),
        ),
        id=random_id(), source="client/bench", time=rfc3339(time.time_ns()),
    )  # fmt: skip


async def idle(bus: JetStreamBus, follower: Follower, count: int) -> Measured:
    """One demand at a time on an idle system."""
    measured = Measured()
    for number in range(count):
        name = f"idle-{random_id()[:8]}-{number}"
        one = draft(name)
        measured.sent[name] = time.monotonic()
        await bus.append(subjects.demand("bench"), encode(one), message_id=one.id)
        while Released not in measured.read.get(name, {}):
            measured.note(await follower.batch(wait_seconds=5.0))
        await asyncio.sleep(0.01)
    return measured


async def flood(bus: JetStreamBus, follower: Follower, count: int) -> tuple[float, Measured]:
    """All at once; seconds until the last release was read back."""
    measured = Measured()
    drafts = [draft(f"flood-{random_id()[:8]}-{n}") for n in range(count)]
    began = time.monotonic()
    for one in drafts:
        measured.sent[one.data.demand] = began  # type: ignore[attr-defined]
    sending = asyncio.create_task(
        bus.append_many(
            [(subjects.demand("bench"), encode(one), one.id) for one in drafts], timeout_seconds=120
        )
    )
    released = 0
    while released < count:
        records = await follower.batch(wait_seconds=10.0)
        measured.note(records)
        released += sum(1 for r in records if isinstance(r.data, Released) and r.correlation in measured.sent)
    await sending
    return time.monotonic() - began, measured


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def table(measured: Measured) -> None:
    kinds = [DemandRaised, Bound, Started, Exited, Released]
    names = ["raised", "bound", "started", "exited", "released"]
    print("  where the time goes (server stamps, ms, median and 99th percentile):")
    for (a, na), (b, nb) in itertools.pairwise(zip(kinds, names, strict=True)):
        steps = [(s[b] - s[a]) / 1e6 for s in measured.stamps.values() if a in s and b in s]
        print(f"    {na:>8} -> {nb:<8}  {statistics.median(steps):7.2f}  {percentile(steps, 0.99):7.2f}")


def cpu_seconds(parts: dict[str, int]) -> dict[str, float]:
    """User and system time of each part, its ended children included."""
    ticks = os.sysconf("SC_CLK_TCK")
    spent: dict[str, float] = {}
    for name, pid in parts.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent[name] = sum(int(fields[i]) for i in (11, 12)) / ticks
        if name == "agent":
            spent["programs"] = sum(int(fields[i]) for i in (13, 14)) / ticks
    spent["this client"] = sum(os.times()[:2])
    return spent


async def run(url: str, parts: dict[str, int], args: argparse.Namespace) -> None:
    bus = await JetStreamBus.connect(url, name="bench")
    follower = Follower(bus)
    await follower.open()
    while not follower.state.nodes:
        await follower.batch(wait_seconds=1.0)
    await idle(bus, follower, 20)  # warm-up
    measured = await idle(bus, follower, args.idle)
    latencies = [1000 * (measured.read[n][Started] - measured.sent[n]) for n in measured.sent]
    print(f"idle submit -> started read back, {args.idle} demands: p50 {statistics.median(latencies):.1f} ms, "
          f"p99 {percentile(latencies, 0.99):.1f} ms (budget: p50 20 ms)")  # fmt: skip
    table(measured)
    rates: list[float] = []
    before = cpu_seconds(parts)
    for number in range(args.rounds):
        seconds, measured = await flood(bus, follower, args.demands)
        rates.append(args.demands / seconds)
        print(
            f"round {number + 1}: {args.demands} demands in {seconds:.2f} s = {rates[-1]:.0f} per second",
            flush=True,
        )
    print(f"median {statistics.median(rates):.0f} demands per second (budget: 200)")
    table(measured)
    spent = {name: seconds - before[name] for name, seconds in cpu_seconds(parts).items()}
    print(f"  processor time per demand, ms ({os.cpu_count()} cores here):")
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"    {name:<12} {1000 * seconds / (args.rounds * args.demands):6.2f}")
    print(f"    {'all':<12} {1000 * sum(spent.values()) / (args.rounds * args.demands):6.2f}")
    findings = follower.state.findings + audit(follower.state)
    print(f"findings: {len(findings)}; events on the log: {follower.state.position}")
    await follower.close()
    await bus.close()
    if findings:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demands", type=int, default=1000)
    parser.add_argument("--idle", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rigbook-bench-") as folder:
        up = subprocess.Popen(
            [sys.executable, "-m", "rigbook", "up", "--data", folder, "--gpus", CARDS, "--port", "0",
             "--engine", "process", "--log-level", "warning"],
            stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            context = None
            while context is None:
                if up.poll() is not None:
                    raise SystemExit("`rigbook up` ended; run it by hand to see why")
                time.sleep(0.2)
                context = read_context(Path(folder))
            asyncio.run(run(context.url, context.parts, args))
        finally:
            up.terminate()
            up.wait(timeout=30)


if __name__ == "__main__":
    main()

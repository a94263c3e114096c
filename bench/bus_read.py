"""What the bus costs: appends and reads per second on a real nats-server and in memory.

    PYTHONPATH=bus python bench/bus_read.py [--events 200000] [--uvloop] [--json]

Every append is acknowledged, every event is read back and counted. The log is synced per message
(`sync_interval: always`) except where `persist_mode: async` is said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

from rigbook_bus.embedded import EmbeddedServer
from rigbook_bus.jetstream import JetStreamBus
from rigbook_bus.memory import MemoryBus, MemoryServer
from rigbook_bus.protocol import Appended, Bus, ConsumerSpec, Expect, StreamSpec

SYNCED = StreamSpec(name="SYNCED", subjects=("synced.>",))
LOOSE = StreamSpec(name="LOOSE", subjects=("loose.>",), synced=False, append_only=False)
BODY = b"x" * 300


class Figures:
    def __init__(self) -> None:
        self.rows: dict[str, float] = {}

    def note(self, what: str, value: float, unit: str = "per second") -> None:
        self.rows[f"{what}, {unit}"] = round(value, 3 if value < 10 else 0)
        print(f"  {what:58} {value:12,.3f} {unit}" if value < 10 else f"  {what:58} {value:12,.0f} {unit}")


async def appends(bus: Bus, figures: Figures, where: str, count: int) -> None:
    await bus.ensure_stream(SYNCED)
    times: list[float] = []
    position = 0
    begun = time.perf_counter()
    for n in range(count):
        at = time.perf_counter()
        position = (
            await bus.append("synced.a", BODY, message_id=f"s{n}", expect=Expect(position, "synced.>"))
        ).seq
        times.append(time.perf_counter() - at)
    figures.note(f"{where}: append one by one, with an expectation", count / (time.perf_counter() - begun))
    figures.note(f"{where}: the same, p50", statistics.median(times) * 1000, "ms")
    figures.note(f"{where}: the same, p99", sorted(times)[int(len(times) * 0.99)] * 1000, "ms")

    gate = asyncio.Semaphore(64)

    async def one(n: int) -> None:
        async with gate:
            await bus.append("synced.a", BODY, message_id=f"c{n}")

    begun = time.perf_counter()
    await asyncio.gather(*(one(n) for n in range(count)))
    figures.note(f"{where}: append, 64 at a time", count / (time.perf_counter() - begun))
    begun = time.perf_counter()
    answers = await bus.append_many([("synced.a", BODY, f"m{n}") for n in range(2 * count)])
    figures.note(f"{where}: append_many", 2 * count / (time.perf_counter() - begun))
    assert all(isinstance(answer, Appended) for answer in answers)


async def tails(bus: Bus, figures: Figures, where: str, events: int) -> None:
    await bus.ensure_stream(LOOSE)
    begun = time.perf_counter()
    for at in range(0, events, 50_000):
        answers = await bus.append_many(
            [("loose.a", BODY, f"t{n}") for n in range(at, min(events, at + 50_000))]
        )
        assert all(isinstance(answer, Appended) for answer in answers)
    figures.note(f"{where}: append_many, persist_mode async", events / (time.perf_counter() - begun))
    rates = []
    processor_rates = []
    for _ in range(3):
        begun = time.perf_counter()
        processor_begun = time.process_time()
        tail = await bus.tail("LOOSE")
        seen = 0
        while seen < events:
            for message in await tail.batch(max_messages=5000, wait_seconds=10):
                seen += 1
                assert message.seq == seen
        rates.append(events / (time.perf_counter() - begun))
        processor_rates.append(events / (time.process_time() - processor_begun))
        await tail.close()
    figures.note(f"{where}: tail, median of 3", statistics.median(rates))
    # what our own process spends: steadier than the clock on a machine that others use too
    figures.note(f"{where}: tail, by our own processor time", statistics.median(processor_rates))

    await bus.ensure_consumer(ConsumerSpec(stream="LOOSE", name="reader", max_ack_pending=10_000))
    reader = await bus.reader("LOOSE", "reader")
    count = min(events, 20_000)
    seen = 0
    begun = time.perf_counter()
    while seen < count:
        for delivery in await reader.batch(max_messages=500, wait_seconds=10):
            await delivery.ack()
            seen += 1
    figures.note(f"{where}: durable consumer, each one acknowledged", seen / (time.perf_counter() - begun))


async def live(bus: Bus, figures: Figures, where: str, count: int = 500) -> None:
    """From the call of append to the event in the hands of a waiting tail on the same connection."""
    facts = await bus.stream("SYNCED")
    assert facts is not None
    tail = await bus.tail("SYNCED", start_seq=facts.last_seq + 1)
    times = []
    for n in range(count):
        begun = time.perf_counter()
        sending = asyncio.create_task(bus.append("synced.a", BODY, message_id=f"l{n}"))
        await tail.batch(max_messages=1, wait_seconds=10)
        times.append(time.perf_counter() - begun)
        await sending
    figures.note(f"{where}: append to tail, p50", statistics.median(times) * 1000, "ms")

    async def answer(_subject: str, body: bytes) -> bytes:
        return body

    stop = await bus.serve("ask.x", answer)
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        await bus.request("ask.x", b"?")
        times.append(time.perf_counter() - begun)
    await stop()
    figures.note(f"{where}: request and answer, p50", statistics.median(times) * 1000, "ms")


async def main(events: int) -> Figures:
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        async with EmbeddedServer(Path(folder) / "nats") as server:
            figures.note("embedded server: ready", (time.perf_counter() - begun) * 1000, "ms")
            bus = await JetStreamBus.connect(server.url, name="bench")
            await appends(bus, figures, "nats-server", 3000)
            await tails(bus, figures, "nats-server", events)
            await live(bus, figures, "nats-server")
            await bus.close()
    memory = await MemoryBus.connect(MemoryServer(), name="bench")
    await appends(memory, figures, "memory", 3000)
    await tails(memory, figures, "memory", min(events, 50_000))
    await memory.close()
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object at the end")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    if options.uvloop:
        import uvloop

        result = uvloop.run(main(options.events))
    else:
        result = asyncio.run(main(options.events))
    if options.json:
        print(json.dumps(result.rows, indent=2))

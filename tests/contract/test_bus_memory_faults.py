"""Goal: the in-memory server injects the faults the simulation needs, deterministically, and keeps its own promises."""

from __future__ import annotations

import asyncio

import pytest
from rigbook_bus.memory import Faults, MemoryBus, MemoryServer
from rigbook_bus.protocol import (
    Appended,
    BusConflict,
    BusDenied,
    BusUnavailable,
    BusUnknown,
    ConsumerSpec,
    Expect,
    Link,
    StreamSpec,
)

LOG = StreamSpec(name="LOG", subjects=("log.>",), duplicate_window_seconds=120)


class TestClock:
    """A wall and a monotonic clock in one hand."""

    __test__ = False

    def __init__(self) -> None:
        self.now = 1000.0

    def now_ns(self) -> int:
        return int(self.now * 1e9)

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


async def test_a_lost_acknowledgement_is_unknown_and_the_message_is_there():
    class Lost(Faults):
        def answer_seconds(self, client, subject):
            return None if subject == "log.a" else 0.0

    server = MemoryServer(faults=Lost())
    bus = await MemoryBus.connect(server, name="t")
    await bus.ensure_stream(LOG)
    with pytest.raises(BusUnknown):
        await bus.append("log.a", b"", message_id="m", timeout_seconds=0.01)
    assert (await bus.stream("LOG")).last_seq == 1
    server.faults = Faults()
    with pytest.raises(BusConflict):  # the real answer to the repeat, with an expectation
        await bus.append("log.a", b"", message_id="m", expect=Expect(0, "log.>"))
    assert await bus.append("log.a", b"", message_id="m") == Appended(seq=1, duplicate=True)


async def test_a_lost_request_is_unknown_and_nothing_is_there():
    class Lost(Faults):
        def request_seconds(self, client, subject):
            return None if subject == "log.a" else 0.0

    bus = await MemoryBus.connect(MemoryServer(faults=Lost()), name="t")
    await bus.ensure_stream(LOG)
    with pytest.raises(BusUnknown):
        await bus.append("log.a", b"", message_id="m", timeout_seconds=0.01)
    assert (await bus.stream("LOG")).last_seq == 0


async def test_delays_differ_between_connections_and_keep_the_order_on_each():
    class Slow(Faults):
        def delivery_seconds(self, client, stream, seq):
            return 0.3 / seq if client == "slow" else 0.0  # later messages would overtake

    server = MemoryServer(faults=Slow())
    fast, slow = [await MemoryBus.connect(server, name=name) for name in ("fast", "slow")]
    await fast.ensure_stream(LOG)
    tails = [await bus.tail("LOG") for bus in (fast, slow)]
    await fast.append_many([("log.a", b"", f"m{n}") for n in range(5)])
    assert len(await tails[0].batch(max_messages=9, wait_seconds=0)) == 5
    assert len(await tails[1].batch(max_messages=9, wait_seconds=0)) == 0
    got = []
    while len(got) < 5:
        got += [m.seq for m in await tails[1].batch(max_messages=9, wait_seconds=5)]
    assert got == [1, 2, 3, 4, 5]


async def test_copies_and_losses_of_deliveries():
    class Copies(Faults):
        def delivery_copies(self, client, stream, seq):
            return {1: 2, 2: 0}.get(seq, 1)

    server = MemoryServer(faults=Copies())
    bus = await MemoryBus.connect(server, name="t")
    await bus.ensure_stream(LOG)
    await bus.ensure_consumer(ConsumerSpec(stream="LOG", name="c", ack_wait_seconds=0.02))
    await bus.append_many([("log.a", b"", f"m{n}") for n in range(3)])
    reader = await bus.reader("LOG", "c")
    got = await reader.batch(max_messages=9, wait_seconds=1)
    assert [d.message.seq for d in got] == [1, 1, 3]
    server.faults = Faults()
    for delivery in got:
        await delivery.ack()
    (again,) = await reader.batch(max_messages=9, wait_seconds=1)
    assert (again.message.seq, again.delivered) == (2, 2)


async def test_one_connection_is_cut_and_the_others_live():
    server = MemoryServer()
    one, two = [await MemoryBus.connect(server, name=name) for name in ("one", "two")]
    await one.ensure_stream(LOG)
    tail = await one.tail("LOG")
    under_way = asyncio.create_task(one.append("log.a", b"", message_id="lost"))
    await asyncio.sleep(0)
    one.cut()
    with pytest.raises(BusUnknown):
        await under_way
    with pytest.raises(BusUnavailable):
        await one.append("log.a", b"", message_id="x")
    await two.append("log.a", b"", message_id="y")
    assert list(await tail.batch(max_messages=9, wait_seconds=0.01)) == []
    server.restart()
    assert (one.link, two.link) == (Link.AWAY, Link.CONNECTED)  # cut by itself: a restart does not heal it
    one.restore()
    assert one.link is Link.CONNECTED
    assert len(await tail.batch(max_messages=9, wait_seconds=1)) >= 1


async def test_a_full_disk_refuses_and_recovers():
    server = MemoryServer()
    bus = await MemoryBus.connect(server, name="t")
    await bus.ensure_stream(LOG)
    server.refuse()
    with pytest.raises(BusDenied, match="no space left"):
        await bus.append("log.a", b"", message_id="m")
    server.accept()
    assert (await bus.append("log.a", b"", message_id="m")).seq == 1


async def test_the_duplicate_window_ends_by_the_servers_clock():
    clock = TestClock()
    bus = await MemoryBus.connect(MemoryServer(clock=clock), name="t")
    await bus.ensure_stream(LOG)
    await bus.append("log.a", b"", message_id="m")
    clock.now += 119
    assert (await bus.append("log.a", b"", message_id="m")).duplicate
    clock.now += 2
    assert await bus.append("log.a", b"", message_id="m") == Appended(seq=2, duplicate=False)


async def test_old_messages_expire_by_the_servers_clock():
    clock = TestClock()
    bus = await MemoryBus.connect(MemoryServer(clock=clock), name="t")
    await bus.ensure_stream(
        StreamSpec(name="BEAT", subjects=("beat.*",), max_age_seconds=60, duplicate_window_seconds=10)
    )
    await bus.append("beat.a", b"", message_id="1")
    clock.now += 50
    await bus.append("beat.a", b"", message_id="2")
    clock.now += 20
    facts = await bus.stream("BEAT")
    assert (facts.first_seq, facts.last_seq, facts.messages) == (2, 2, 1)


async def test_sequences_are_used_again_after_a_lost_end():
    """The trap of bit rot: a reader that was away and behind sees nothing wrong; only the event ids tell."""
    server = MemoryServer()
    bus = await MemoryBus.connect(server, name="t")
    await bus.ensure_stream(LOG)
    await bus.append_many([("log.a", b"old", f"m{n}") for n in range(5)])
    server.truncate("LOG", 2)
    assert (await bus.append("log.a", b"new", message_id="n")).seq == 3
    assert (await bus.append("log.a", b"old", message_id="m4")).seq == 4  # its id went with it
    assert await bus.append("log.a", b"old", message_id="m0") == Appended(seq=1, duplicate=True)
    assert (await bus.last("LOG", "log.>")).seq == 4


async def test_the_same_run_twice_is_the_same():
    async def run() -> list[tuple[str, int]]:
        server = MemoryServer(clock=TestClock())
        buses = [await MemoryBus.connect(server, name=f"b{n}") for n in range(4)]
        await buses[0].ensure_stream(LOG)
        seen: list[tuple[str, int]] = []

        async def work(number: int) -> None:
            tail = await buses[number].tail("LOG")
            for n in range(5):
                await buses[number].append(f"log.{number}", b"", message_id=f"{number}.{n}")
                batch = await tail.batch(max_messages=2, wait_seconds=0)
                seen.extend((f"{number} {message.subject}", message.seq) for message in batch)

        await asyncio.gather(*(work(number) for number in range(4)))
        return seen

    first = await run()
    assert first == await run()
    assert len(first) >= 20

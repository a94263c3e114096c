"""Goal: a tail gives every matching message once and in order, whatever happens to server and connection."""

from __future__ import annotations

import asyncio

import pytest
from rigbook_bus.protocol import Bus, BusDenied, BusUnavailable, Link, Message, StreamSpec, Tail

LOG = StreamSpec(name="LOG", subjects=("log.>",))
SOON = 10.0


async def fill(bus: Bus, first: int, last: int, subject: str = "log.a") -> None:
    answers = await bus.append_many([(subject, b"%d" % n, f"m{n}") for n in range(first, last + 1)])
    assert [answer.seq for answer in answers] == list(range(first, last + 1))


async def take(tail: Tail, count: int, *, at_most: int = 10_000) -> list[Message]:
    got: list[Message] = []
    async with asyncio.timeout(SOON):
        while len(got) < count:
            got += await tail.batch(max_messages=at_most, wait_seconds=SOON)
    return got


async def test_from_the_start_and_from_n(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await fill(bus, 1, 10)
    whole = await take(await bus.tail("LOG"), 10)
    assert [m.seq for m in whole] == list(range(1, 11))
    assert whole[4] == await bus.message("LOG", 5)
    assert [m.seq for m in await take(await bus.tail("LOG", start_seq=8), 3)] == [8, 9, 10]


async def test_batches_are_bounded_and_an_idle_wait_ends_empty(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await fill(bus, 1, 5)
    tail = await bus.tail("LOG")
    first = await tail.batch(max_messages=2, wait_seconds=SOON)
    assert [m.seq for m in first] == [1, 2]
    assert [m.seq for m in first + await take(tail, 3)] == [1, 2, 3, 4, 5]
    assert list(await tail.batch(max_messages=10, wait_seconds=0.01)) == []
    assert list(await tail.batch(max_messages=10, wait_seconds=0)) == []


async def test_what_comes_later_wakes_the_reader(world):
    one, two = await world.connect("reader"), await world.connect("writer")
    await one.ensure_stream(LOG)
    tail = await one.tail("LOG")
    waiting = asyncio.create_task(tail.batch(max_messages=10, wait_seconds=None))
    await asyncio.sleep(0)
    await two.append("log.x", b"hello", message_id="m")
    async with asyncio.timeout(SOON):
        assert [m.body for m in await waiting] == [b"hello"]


async def test_start_right_behind_the_end_is_fine_and_further_is_not(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await fill(bus, 1, 3)
    tail = await bus.tail("LOG", start_seq=4)
    await fill(bus, 4, 4)
    assert [m.seq for m in await take(tail, 1)] == [4]
    with pytest.raises(BusUnavailable, match="its end is lost"):
        await bus.tail("LOG", start_seq=6)
    with pytest.raises(BusDenied):
        await bus.tail("NOPE")


@pytest.mark.parametrize("filters", [("log.b",), ("log.b.>", "log.b"), ("*.b",)])
async def test_a_filter(world, filters):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    for n in range(1, 11):
        await bus.append("log.b" if n % 3 == 0 else "log.a", b"%d" % n, message_id=f"m{n}")
    tail = await bus.tail("LOG", filters=filters)
    assert [m.seq for m in await take(tail, 3)] == [3, 6, 9]
    await bus.append("log.a", b"", message_id="x")
    await bus.append("log.b", b"", message_id="y")
    assert [m.seq for m in await take(tail, 1)] == [12]


async def test_twenty_thousand_at_once(world):
    """With nats-py's default limits an ordered consumer gave 1,800 of them, silently."""
    bus = await world.connect()
    spec = StreamSpec(name="LOG", subjects=("log.>",), synced=False, append_only=False)
    await bus.ensure_stream(spec)
    answers = await bus.append_many([("log.a", b"x" * 100, f"m{n}") for n in range(20_000)])
    assert answers[-1].seq == 20_000
    tail = await bus.tail("LOG")
    assert [m.seq for m in await take(tail, 20_000)] == list(range(1, 20_001))


async def test_a_slow_reader_loses_nothing(world):
    """More is stored than a tail may hold ahead of its reader, who takes little sips, the first after all is there."""
    bus, writer = await world.connect("reader"), await world.connect("writer")
    spec = StreamSpec(name="LOG", subjects=("log.>",), synced=False, append_only=False)
    await bus.ensure_stream(spec)
    tail = await bus.tail("LOG")
    for at in range(0, 30_000, 10_000):
        await writer.append_many([("log.a", b"", f"m{n}") for n in range(at, at + 10_000)])
    if world.real:
        assert len(tail._buffer) <= 12_500
    got = await take(tail, 30_000, at_most=700)
    assert [m.seq for m in got] == list(range(1, 30_001))


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("filters", [(), ("log.a",)])
async def test_over_restarts_of_the_server(world, watch, patience, how, filters):
    reader, writer = await world.connect("reader"), await world.connect("writer")
    await reader.ensure_stream(LOG)
    tail = await reader.tail("LOG", filters=filters)
    link = watch(reader)
    got: list[Message] = []
    for round_number in range(3):
        for n in range(20):
            await patience.stored(writer, "log.a", b"", f"m{round_number}.{n}")
        if round_number == 1:
            got += await take(tail, 40 - len(got))
        await (world.stop() if how == "stop" else world.kill())
        await link.until(Link.AWAY)
        await world.start()
        await link.until(Link.CONNECTED)
    got += await take(tail, 60 - len(got))
    assert [m.seq for m in got] == list(range(1, 61))
    await patience.stored(writer, "log.a", b"last", "last")
    assert [m.seq for m in await take(tail, 1)] == [61]


async def test_a_wait_lasts_over_an_outage(world, watch, patience):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    tail = await bus.tail("LOG")
    link = watch(bus)
    waiting = asyncio.create_task(tail.batch(max_messages=10, wait_seconds=None))
    await world.kill()
    await link.until(Link.AWAY)
    assert not waiting.done()
    await world.start()
    await link.until(Link.CONNECTED)
    await patience.stored(bus, "log.a", b"", "m")
    async with asyncio.timeout(SOON):
        assert [m.seq for m in await waiting] == [1]


async def test_a_stream_made_anew_ends_the_tail(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await fill(bus, 1, 3)
    tail = await bus.tail("LOG")
    await take(tail, 3)
    await world.recreate(LOG)
    with pytest.raises(BusUnavailable, match=r"created anew|gone"):
        await tail.batch(max_messages=10, wait_seconds=SOON)
    with pytest.raises(BusUnavailable):  # and stays ended
        await tail.batch(max_messages=10, wait_seconds=SOON)


async def test_a_stream_that_is_gone_ends_the_tail(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    tail = await bus.tail("LOG")
    await world.remove(LOG)
    with pytest.raises(BusUnavailable, match="gone"):
        await tail.batch(max_messages=10, wait_seconds=SOON)


async def test_a_lost_end_ends_the_tail(world, watch):
    """The server comes back with less than was already delivered: nothing tells, except this check."""
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await fill(bus, 1, 5)
    link = watch(bus)
    if world.real:
        await world.stop()
        await link.until(Link.AWAY)
        await world.keep_folder()
        await link.until(Link.CONNECTED)
    await fill(bus, 6, 9)
    tail = await bus.tail("LOG")
    await take(tail, 9)
    await world.come_back_without_the_end(LOG, 5)
    with pytest.raises(BusUnavailable, match="ends at 5, this reader has had 9"):
        await tail.batch(max_messages=10, wait_seconds=SOON)


async def test_a_closed_tail_says_so(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    tail = await bus.tail("LOG")
    waiting = asyncio.create_task(tail.batch(max_messages=10, wait_seconds=None))
    await asyncio.sleep(0)
    await tail.close()
    await tail.close()
    with pytest.raises(BusUnavailable, match="closed"):
        await waiting


async def test_a_closed_bus_ends_its_tails(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    tail = await bus.tail("LOG")
    waiting = asyncio.create_task(tail.batch(max_messages=10, wait_seconds=None))
    await asyncio.sleep(0)
    await bus.close()
    with pytest.raises(BusUnavailable):
        await waiting


async def test_many_tails_on_one_connection(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    tails = [await bus.tail("LOG", filters=(f"log.{n % 3}",)) for n in range(12)]
    for n in range(30):
        await bus.append(f"log.{n % 3}", b"", message_id=f"m{n}")
    for number, tail in enumerate(tails):
        assert [m.seq for m in await take(tail, 10)] == list(range(number % 3 + 1, 31, 3))


@pytest.mark.nats
async def test_a_consumer_that_the_server_lost_is_made_again(nats):
    """The server may drop an ephemeral consumer at any time (idle, memory, an operator): the reader notices nothing."""
    bus = await nats.connect()
    await bus.ensure_stream(LOG)
    await fill(bus, 1, 3)
    tail = await bus.tail("LOG")
    await take(tail, 3)
    names = [tail._consumer]
    assert await bus.delete_consumer("LOG", tail._consumer)
    await fill(bus, 4, 6)
    assert [m.seq for m in await take(tail, 3)] == [4, 5, 6]
    assert tail._consumer not in names


@pytest.mark.nats
async def test_a_lost_delivery_is_noticed_and_read_again(nats):
    """A message that the client swallowed (here: by hand) is a gap in the consumer's own count."""
    bus = await nats.connect()
    await bus.ensure_stream(LOG)
    tail = await bus.tail("LOG", filters=("log.>",))
    swallowed = []
    real_take = tail._take

    def swallow_third(subject, reply, body, headers):
        if body == b"3" and not swallowed:
            swallowed.append(body)
            return
        real_take(subject, reply, body, headers)

    # the parser's table is the only place where a message can be made to vanish
    direct = bus._connection._client.takers
    for sid, taker in direct.items():
        if taker == real_take:
            direct[sid] = swallow_third
    await fill(bus, 1, 6)
    assert [m.seq for m in await take(tail, 6)] == [1, 2, 3, 4, 5, 6]
    assert swallowed


@pytest.mark.nats
async def test_a_silent_server_is_noticed_by_its_missing_heartbeat(nats):
    """A pull that the server forgot: nothing comes, no error either; the heartbeat tells within two seconds."""
    bus = await nats.connect()
    await bus.ensure_stream(LOG)
    tail = await bus.tail("LOG")
    await fill(bus, 1, 1)
    await take(tail, 1)
    direct = bus._connection._client.takers
    for sid, taker in tuple(direct.items()):
        if taker == tail._take:
            direct[sid] = lambda *_: None
    await fill(bus, 2, 2)
    assert [m.seq for m in await take(tail, 1)] == [2]

"""Goal: durable consumers redeliver, survive and share alike in memory and on a real nats-server."""

from __future__ import annotations

import asyncio

import pytest
from rigbook_bus.protocol import BusDenied, BusUnavailable, ConsumerSpec, Delivery, Link, Reader, StreamSpec

LOG = StreamSpec(name="LOG", subjects=("log.>",))
SOON = 10.0


async def stocked(bus, count: int, **spec) -> None:
    await bus.ensure_stream(LOG)
    await bus.ensure_consumer(ConsumerSpec(stream="LOG", name="c", **spec))
    for n in range(1, count + 1):
        await bus.append("log.even" if n % 2 == 0 else "log.odd", b"%d" % n, message_id=f"m{n}")


async def take(reader: Reader, count: int, *, at_most: int = 100) -> list[Delivery]:
    got: list[Delivery] = []
    async with asyncio.timeout(SOON):
        while len(got) < count:
            got += await reader.batch(max_messages=at_most, wait_seconds=SOON)
    return got


def seqs(deliveries: list[Delivery]) -> list[int]:
    return [delivery.message.seq for delivery in deliveries]


async def test_in_order_once_acknowledged(world):
    bus = await world.connect()
    await stocked(bus, 5)
    reader = await bus.reader("LOG", "c")
    got = await take(reader, 5)
    assert seqs(got) == [1, 2, 3, 4, 5]
    assert [d.delivered for d in got] == [1] * 5
    assert got[2].message == await bus.message("LOG", 3)
    for delivery in got:
        await delivery.ack()
    assert list(await reader.batch(max_messages=10, wait_seconds=0.02)) == []


async def test_batches_are_bounded(world):
    bus = await world.connect()
    await stocked(bus, 5)
    reader = await bus.reader("LOG", "c")
    for _ in range(3):
        assert len(await reader.batch(max_messages=1, wait_seconds=SOON)) == 1
    rest = []
    async with asyncio.timeout(SOON):
        while len(rest) < 2:  # a poll without waiting gets what is there, too
            rest += await reader.batch(max_messages=10, wait_seconds=0)
    assert seqs(rest) == [4, 5]


async def test_what_comes_later_wakes_the_reader(world):
    bus = await world.connect()
    await stocked(bus, 0)
    reader = await bus.reader("LOG", "c")
    waiting = asyncio.create_task(reader.batch(max_messages=10, wait_seconds=SOON))
    await asyncio.sleep(0)
    await bus.append("log.x", b"", message_id="x")
    assert seqs(await waiting) == [1]


async def test_unacknowledged_comes_again_and_counts(world):
    bus = await world.connect()
    await stocked(bus, 2, ack_wait_seconds=0.15)
    reader = await bus.reader("LOG", "c")
    first = await take(reader, 2)
    await first[0].ack()
    again = await take(reader, 1)
    assert seqs(again) == [2]
    assert again[0].delivered == 2
    third = await take(reader, 1)
    assert third[0].delivered == 3
    await first[1].ack()  # a late acknowledgement of an earlier try counts
    assert list(await reader.batch(max_messages=10, wait_seconds=0.3)) == []


async def test_nak_at_once_and_with_a_delay(world):
    bus = await world.connect()
    await stocked(bus, 1)
    reader = await bus.reader("LOG", "c")
    (delivery,) = await take(reader, 1)
    await delivery.nak()
    (delivery,) = await take(reader, 1)
    assert delivery.delivered == 2
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await delivery.nak(delay_seconds=0.15)
    (delivery,) = await take(reader, 1)
    assert delivery.delivered == 3
    assert 0.1 < loop.time() - begun < 5
    await delivery.ack()


async def test_max_deliver(world):
    bus = await world.connect()
    await stocked(bus, 1, max_deliver=2, ack_wait_seconds=30)
    reader = await bus.reader("LOG", "c")
    for tries in (1, 2):
        (delivery,) = await take(reader, 1)
        assert delivery.delivered == tries
        await delivery.nak()
    assert list(await reader.batch(max_messages=10, wait_seconds=0.1)) == []


async def test_max_ack_pending_holds_the_rest_back(world):
    bus = await world.connect()
    await stocked(bus, 5, max_ack_pending=2)
    reader = await bus.reader("LOG", "c")
    got = await take(reader, 2)
    assert seqs(got) == [1, 2]
    assert list(await reader.batch(max_messages=10, wait_seconds=0.05)) == []
    await got[0].ack()
    assert seqs(await take(reader, 1)) == [3]


@pytest.mark.parametrize(
    ("filters", "expected"), [(("log.even",), [2, 4, 6]), (("log.even", "log.odd"), [2, 3, 4])]
)
async def test_filters_and_a_start(world, filters, expected):
    bus = await world.connect()
    await stocked(bus, 6, filters=filters, start_seq=2)
    reader = await bus.reader("LOG", "c")
    assert seqs(await take(reader, 3))[:3] == expected


async def test_the_position_outlives_the_reader(world):
    bus = await world.connect()
    await stocked(bus, 4)
    reader = await bus.reader("LOG", "c")
    got = await take(reader, 2, at_most=1)
    for delivery in got[:2]:
        await delivery.ack()
    await reader.close()
    await bus.ensure_consumer(ConsumerSpec(stream="LOG", name="c"))  # left alone
    assert seqs(await take(await bus.reader("LOG", "c"), 2)) == [3, 4]


async def test_a_closed_reader_gives_back_what_it_did_not_take(world):
    bus = await world.connect()
    await stocked(bus, 3)
    reader = await bus.reader("LOG", "c")
    (first,) = await take(reader, 1, at_most=1)
    await first.ack()
    await reader.close()
    with pytest.raises(BusUnavailable, match="closed"):
        await reader.batch(max_messages=1, wait_seconds=1)
    other = await world.connect("other")
    assert sorted(seqs(await take(await other.reader("LOG", "c"), 2))) == [2, 3]


async def test_two_readers_share_one_consumer(world):
    one, two = await world.connect("one"), await world.connect("two")
    await stocked(one, 20)
    readers = [await one.reader("LOG", "c"), await two.reader("LOG", "c")]
    got: list[int] = []
    async with asyncio.timeout(SOON):
        while len(got) < 20:
            for reader in readers:
                for delivery in await reader.batch(max_messages=3, wait_seconds=0.05):
                    got.append(delivery.message.seq)
                    await delivery.ack()
    assert sorted(got) == list(range(1, 21))


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_over_a_restart_of_the_server(world, watch, patience, how):
    bus = await world.connect()
    await stocked(bus, 4, ack_wait_seconds=0.3)
    reader = await bus.reader("LOG", "c")
    first = await take(reader, 2, at_most=1)
    await first[0].ack()
    await first[1].ack()
    assert await bus.stream("LOG") is not None  # the acks have been taken: answers come in order
    link = watch(bus)
    waiting = asyncio.create_task(take(reader, 3))
    await (world.stop() if how == "stop" else world.kill())
    await link.until(Link.AWAY)
    await world.start()
    await link.until(Link.CONNECTED)
    await patience.stored(bus, "log.x", b"", "x")
    got = await waiting
    assert set(seqs(got)) >= {3, 4, 5} or set(seqs(got)) | set(seqs(await take(reader, 1))) >= {3, 4, 5}
    if how == "stop":
        assert not set(seqs(got)) & {1, 2}


async def test_away_is_said_when_the_time_is_over(world, watch):
    bus = await world.connect()
    await stocked(bus, 1)
    reader = await bus.reader("LOG", "c")
    (delivery,) = await take(reader, 1)
    link = watch(bus)
    await world.stop()
    await link.until(Link.AWAY)
    with pytest.raises(BusUnavailable):
        await delivery.ack()
    with pytest.raises(BusUnavailable):
        await reader.batch(max_messages=1, wait_seconds=0.02)


async def test_no_such_consumer_is_denied(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    with pytest.raises(BusDenied, match="no consumer nope"):
        await bus.reader("LOG", "nope")
    with pytest.raises(BusDenied):
        await bus.reader("NOPE", "nope")
    with pytest.raises(BusDenied):
        await bus.ensure_consumer(ConsumerSpec(stream="NOPE", name="c"))
    assert not await bus.delete_consumer("LOG", "nope")


async def test_a_consumer_deleted_under_its_reader_is_denied(world):
    bus = await world.connect()
    await stocked(bus, 0)
    reader = await bus.reader("LOG", "c")
    waiting = asyncio.create_task(reader.batch(max_messages=1, wait_seconds=SOON))
    await bus.stream("LOG")  # by now the question is open at the server
    assert await bus.delete_consumer("LOG", "c")
    with pytest.raises(BusDenied, match="no consumer c"):
        await waiting


async def test_a_thousand_with_acks(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await bus.ensure_consumer(ConsumerSpec(stream="LOG", name="c"))
    await bus.append_many([("log.a", b"", f"m{n}") for n in range(1000)])
    reader = await bus.reader("LOG", "c")
    got = []
    async with asyncio.timeout(SOON):
        while len(got) < 1000:
            for delivery in await reader.batch(max_messages=100, wait_seconds=SOON):
                got.append(delivery.message.seq)
                await delivery.ack()
    assert got == list(range(1, 1001))

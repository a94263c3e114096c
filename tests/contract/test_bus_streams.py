"""Goal: streams are made, checked and asked alike in memory and on a real nats-server."""

from __future__ import annotations

import time

import pytest
from rigbook_bus.protocol import BusDenied, BusUnavailable, Expect, Link, StreamFacts, StreamSpec

LOG = StreamSpec(name="LOG", subjects=("log.>",))


async def test_a_new_stream_is_empty_and_knows_when_it_was_made(world):
    bus = await world.connect()
    before = time.time_ns()
    facts = await bus.ensure_stream(LOG)
    assert before - 10**9 < facts.created_ns < time.time_ns() + 10**9
    assert facts == StreamFacts(
        name="LOG", created_ns=facts.created_ns, first_seq=1, last_seq=0, messages=0, bytes=0
    )
    assert await bus.stream("LOG") == facts
    assert await bus.ensure_stream(LOG) == facts


async def test_no_such_stream_is_an_answer(world):
    bus = await world.connect()
    assert await bus.stream("NOPE") is None
    with pytest.raises(BusDenied, match="create the stream first"):
        await bus.message("NOPE", 1)
    with pytest.raises(BusDenied):
        await bus.last("NOPE", ">")


async def test_no_answer_is_no_answer(world, watch):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    link = watch(bus)
    await world.stop()
    await link.until(Link.AWAY)
    with pytest.raises(BusUnavailable):
        await bus.stream("LOG")
    with pytest.raises(BusUnavailable):
        await bus.last("LOG", ">")


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (StreamSpec(name="LOG", subjects=("log.>",), max_bytes=10_000), "max_bytes"),
        (StreamSpec(name="LOG", subjects=("log.>", "more.>")), "subjects"),
        (StreamSpec(name="LOG", subjects=("log.>",), append_only=False), "deny_delete"),
        (StreamSpec(name="LOG", subjects=("log.>",), synced=False), "persist_mode"),
        (StreamSpec(name="LOG", subjects=("log.>",), max_age_seconds=3600), "max_age"),
        (StreamSpec(name="LOG", subjects=("log.>",), max_per_subject=5), "max_msgs_per_subject"),
        (StreamSpec(name="LOG", subjects=("log.>",), duplicate_window_seconds=1), "duplicate_window"),
    ],
)
async def test_another_spec_is_denied_and_the_difference_named(world, other, word):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    with pytest.raises(BusDenied, match=word):
        await bus.ensure_stream(other)
    await bus.ensure_stream(LOG)


async def test_every_option_survives_a_round_trip(world):
    bus = await world.connect()
    spec = StreamSpec(
        name="HEARTBEAT",
        subjects=("beat.*", "pulse.>"),
        max_age_seconds=3600.0,
        max_bytes=1_000_000,
        max_per_subject=10,
        append_only=False,
        synced=False,
        duplicate_window_seconds=30.0,
    )
    assert await bus.ensure_stream(spec) == await bus.ensure_stream(spec)


async def test_two_streams_may_not_share_a_subject(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    with pytest.raises(BusDenied, match="overlap"):
        await bus.ensure_stream(StreamSpec(name="TWO", subjects=("x.y", "log.a")))


async def test_a_duplicate_window_longer_than_the_age_is_denied(world):
    bus = await world.connect()
    with pytest.raises(BusDenied, match="window"):
        await bus.ensure_stream(StreamSpec(name="LOG", subjects=("log.>",), max_age_seconds=1.0))


async def test_message_and_last(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    assert await bus.last("LOG", "log.>") is None
    for n, word in enumerate(("a", "b", "a", "c.d")):
        await bus.append(f"log.{word}", b"%d" % n, message_id=f"m{n}")
    assert (await bus.message("LOG", 2)).body == b"1"
    for seq in (-1, 0, 5, 10**9):
        assert await bus.message("LOG", seq) is None
    assert (await bus.last("LOG", "log.a")).seq == 3
    assert (await bus.last("LOG", "log.*")).seq == 3
    assert (await bus.last("LOG", "log.>")).seq == 4
    assert await bus.last("LOG", "log.zzz") is None
    stored = await bus.message("LOG", 1)
    assert abs(stored.received_ns - time.time_ns()) < 60 * 10**9


async def test_bytes_are_counted_alike(world):
    """The figure a metric shows and `max_bytes` compares: equal in both worlds, headers included."""
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await bus.append("log.a", b"x" * 50, message_id="id")
    assert (await bus.stream("LOG")).bytes == 30 + 5 + 50 + 4 + len("NATS/1.0\r\nNats-Msg-Id: id\r\n\r\n")
    await bus.append("log.b", b"", message_id="id2", expect=Expect(1, "log.>"))
    assert (await bus.stream("LOG")).bytes == 118 + 30 + 5 + 4 + len(
        "NATS/1.0\r\nNats-Msg-Id: id2\r\nNats-Expected-Last-Subject-Sequence: 1\r\n"
        "Nats-Expected-Last-Subject-Sequence-Subject: log.>\r\n\r\n"
    )


async def test_only_the_last_of_each_subject_are_kept(world):
    bus = await world.connect()
    await bus.ensure_stream(
        StreamSpec(name="BEAT", subjects=("beat.*",), max_per_subject=2, append_only=False)
    )
    for n in range(6):
        await bus.append(f"beat.{'ab'[n % 2]}", b"%d" % n, message_id=f"m{n}")
    facts = await bus.stream("BEAT")
    assert (facts.first_seq, facts.last_seq, facts.messages) == (3, 6, 4)
    assert await bus.message("BEAT", 1) is None
    tail = await bus.tail("BEAT")
    assert (await tail.batch(max_messages=4, wait_seconds=5))[0].seq == 3


async def test_a_stream_outlives_the_server(world, watch):
    bus = await world.connect()
    facts = await bus.ensure_stream(LOG)
    await bus.append("log.a", b"kept", message_id="m")
    link = watch(bus)
    await world.kill()
    await link.until(Link.AWAY)
    await world.start()
    await link.until(Link.CONNECTED)
    again = await bus.stream("LOG")
    assert again.created_ns == facts.created_ns
    assert (await bus.message("LOG", 1)).body == b"kept"

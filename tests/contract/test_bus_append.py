"""Goal: appending answers alike in memory and on a real nats-server. Method: one suite, two worlds."""

from __future__ import annotations

import asyncio

import pytest
from rigbook_bus.protocol import (
    Appended,
    BusConflict,
    BusDenied,
    BusUnavailable,
    BusUnknown,
    Expect,
    Link,
    StreamSpec,
)

LOG = StreamSpec(name="LOG", subjects=("rig.demand.*", "rig.own.>", "rig.run.*"))
OWN = "rig.own.>"


async def test_sequences_start_at_1_and_have_no_gap(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    answers = [await bus.append("rig.demand.p", b"%d" % n, message_id=f"m{n}") for n in range(3)]
    assert answers == [Appended(seq=n, duplicate=False) for n in (1, 2, 3)]


async def test_expectation_0_means_nothing_matching_yet(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await bus.append("rig.demand.p", b"", message_id="d1")
    assert (await bus.append("rig.own.bind.n1", b"", message_id="b1", expect=Expect(0, OWN))).seq == 2
    with pytest.raises(BusConflict) as refused:
        await bus.append("rig.own.bind.n2", b"", message_id="b2", expect=Expect(0, OWN))
    assert refused.value.nats_code == 10071


async def test_expectation_over_a_wildcard_ignores_other_subjects_and_catches_any_matching_one(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    seq = (await bus.append("rig.own.bind.n1", b"", message_id="b1", expect=Expect(0, OWN))).seq
    for n in range(5):
        await bus.append("rig.demand.p", b"", message_id=f"d{n}")
    second = await bus.append("rig.own.policy.quota", b"", message_id="q1", expect=Expect(seq, OWN))
    assert second == Appended(seq=7, duplicate=False)
    with pytest.raises(BusConflict):
        await bus.append("rig.own.bind.n1", b"", message_id="b2", expect=Expect(seq, OWN))
    with pytest.raises(BusConflict):  # a position past the last matching message is just as wrong
        await bus.append("rig.own.bind.n1", b"", message_id="b2", expect=Expect(8, OWN))
    assert (await bus.stream("LOG")).last_seq == 7


async def test_expectation_over_the_own_subject(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await bus.append("rig.run.n1", b"", message_id="a", expect=Expect(0, "rig.run.n1"))
    await bus.append("rig.run.n2", b"", message_id="b", expect=Expect(0, "rig.run.n2"))
    await bus.append("rig.run.n1", b"", message_id="c", expect=Expect(1, "rig.run.n1"))
    with pytest.raises(BusConflict):
        await bus.append("rig.run.n2", b"", message_id="d", expect=Expect(1, "rig.run.n2"))


async def test_the_expectation_is_checked_before_the_duplicate(world):
    """The answer to a repeat after a lost acknowledgement: a conflict, not "duplicate"."""
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await bus.append("rig.own.bind.n1", b"", message_id="b1", expect=Expect(0, OWN))
    with pytest.raises(BusConflict):
        await bus.append("rig.own.bind.n1", b"", message_id="b1", expect=Expect(0, OWN))
    # right expectation, known id: a duplicate, naming the first one's sequence
    again = await bus.append("rig.own.bind.n1", b"", message_id="b1", expect=Expect(1, OWN))
    assert again == Appended(seq=1, duplicate=True)


async def test_a_duplicate_is_one_by_id_whatever_the_content_and_the_subject(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await bus.append("rig.demand.p", b"one", message_id="same")
    other = await bus.append("rig.run.n1", b"another", message_id="same")
    assert other == Appended(seq=1, duplicate=True)
    assert (await bus.stream("LOG")).messages == 1


async def test_duplicates_are_per_stream(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await bus.ensure_stream(StreamSpec(name="OTHER", subjects=("other.>",)))
    await bus.append("rig.demand.p", b"", message_id="same")
    assert await bus.append("other.x", b"", message_id="same") == Appended(seq=1, duplicate=False)


async def test_ids_are_remembered_over_a_restart(world, watch, patience):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await bus.append("rig.demand.p", b"", message_id="same")
    link = watch(bus)
    await world.stop()
    await link.until(Link.AWAY)
    await world.start()
    await link.until(Link.CONNECTED)
    assert await patience.stored(bus, "rig.demand.p", b"", "same") == 1
    assert (await bus.stream("LOG")).last_seq == 1


async def test_two_writers_racing_on_one_position_never_both_win(world):
    one, two = await world.connect("one"), await world.connect("two")
    await one.ensure_stream(LOG)
    position, wins = 0, 0
    for n in range(50):
        answers = await asyncio.gather(
            one.append("rig.own.bind.n1", b"", message_id=f"a{n}", expect=Expect(position, OWN)),
            two.append("rig.own.bind.n2", b"", message_id=f"b{n}", expect=Expect(position, OWN)),
            return_exceptions=True,
        )
        stored = [answer for answer in answers if isinstance(answer, Appended)]
        assert len(stored) == 1
        assert sum(isinstance(answer, BusConflict) for answer in answers) == 1
        position = stored[0].seq
        wins += 1
    assert (await one.stream("LOG")).last_seq == wins == position


async def test_append_many_keeps_the_order_and_answers_each(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    answers = await bus.append_many([("rig.demand.p", b"%d" % n, f"m{n % 900}") for n in range(1000)])
    assert answers[:900] == [Appended(seq=n + 1, duplicate=False) for n in range(900)]
    assert answers[900:] == [Appended(seq=n + 1, duplicate=True) for n in range(100)]
    assert (await bus.message("LOG", 700)).body == b"699"


async def test_append_many_answers_a_denial_in_its_place(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    answers = await bus.append_many(
        [("rig.demand.p", b"", "a"), ("nobody.stores.this", b"", "b"), ("rig.demand.p", b"", "c")]
    )
    assert answers[0] == Appended(seq=1, duplicate=False)
    assert isinstance(answers[1], BusDenied)
    assert answers[2] == Appended(seq=2, duplicate=False)
    assert await bus.append_many([]) == []


async def test_nobody_stores_the_subject(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    with pytest.raises(BusDenied, match=r"no stream takes nobody\.stores\.this"):
        await bus.append("nobody.stores.this", b"", message_id="a")


async def test_a_full_stream_refuses_the_new_and_drops_nothing(world):
    bus = await world.connect()
    spec = StreamSpec(name="SMALL", subjects=("small.>",), max_bytes=2000)
    await bus.ensure_stream(spec)
    answers = await bus.append_many([("small.x", b"x" * 100, f"m{n}") for n in range(20)])
    stored = sum(isinstance(answer, Appended) for answer in answers)
    with pytest.raises(BusDenied) as refused:
        await bus.append("small.x", b"x" * 100, message_id="next")
    assert refused.value.nats_code == 10077
    assert "nothing was dropped" in str(refused.value)
    facts = await bus.stream("SMALL")
    assert (facts.messages, facts.first_seq, facts.last_seq) == (stored, 1, stored)
    assert facts.bytes <= 2000
    assert stored == 11  # both worlds count the same bytes per record
    assert (await bus.append("small.x", b"", message_id="m0")).duplicate  # a duplicate needs no room
    with pytest.raises(BusConflict):  # and the expectation is still checked first
        await bus.append("small.x", b"x" * 100, message_id="n", expect=Expect(0, "small.>"))


@pytest.mark.parametrize("body", [b"", b"\x00\xff\r\n", "ünï".encode(), b"x" * 500_000])
async def test_bodies_come_back_byte_by_byte(world, body):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await bus.append("rig.demand.p", body, message_id="m")
    stored = await bus.message("LOG", 1)
    assert (stored.seq, stored.subject, stored.body) == (1, "rig.demand.p", body)


async def test_too_large_is_denied_and_the_connection_lives(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    with pytest.raises(BusDenied, match="at most"):
        await bus.append("rig.demand.p", b"x" * 1024 * 1024, message_id="m")
    assert (await bus.append("rig.demand.p", b"x", message_id="m")).seq == 1
    assert bus.link is Link.CONNECTED


@pytest.mark.parametrize(
    "subject", ["", "rig..x", "rig.demand.>", "rig.demand.*", "rig demand", "rig.x\r\nPUB a 0\r\n"]
)
async def test_a_subject_that_is_none_is_denied(world, subject):
    bus = await world.connect()
    with pytest.raises(BusDenied):
        await bus.append(subject, b"", message_id="m")


@pytest.mark.parametrize("message_id", ["", "two words", "line\r\nbreak", "ü", "x" * 129])
async def test_an_id_that_would_change_on_the_way_is_denied(world, message_id):
    bus = await world.connect()
    with pytest.raises(BusDenied):
        await bus.append("rig.demand.p", b"", message_id=message_id)


async def test_nothing_is_stored_late(world, watch, patience):
    """What was refused during an outage must not be sent by the library after the reconnect."""
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await bus.append("rig.demand.p", b"before", message_id="before")
    link = watch(bus)
    await world.stop()
    await link.until(Link.AWAY)
    for n in range(20):
        with pytest.raises(BusUnavailable):
            await bus.append("rig.demand.p", b"during", message_id=f"during{n}")
    answers = await bus.append_many([("rig.demand.p", b"during", f"many{n}") for n in range(20)])
    assert all(isinstance(answer, BusUnavailable) for answer in answers)
    with pytest.raises(BusUnavailable):
        await bus.publish("rig.demand.p", b"during")
    await world.start()
    await link.until(Link.CONNECTED)
    assert await patience.stored(bus, "rig.demand.p", b"after", "after") == 2
    assert (await bus.stream("LOG")).last_seq == 2


async def test_a_crash_under_load_answers_every_append_and_stores_none_twice(world, watch, patience):
    """kill -9 with a window of appends under way: each is stored, refused, or unknown; and all acknowledged are there."""
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    link = watch(bus)
    load = asyncio.gather(
        *(bus.append("rig.demand.p", b"%d" % n, message_id=f"m{n}") for n in range(400)),
        return_exceptions=True,
    )
    await bus.append("rig.demand.p", b"first", message_id="first")
    await world.kill()
    answers = await load
    await link.until(Link.AWAY)
    assert {type(answer) for answer in answers} <= {Appended, BusUnknown, BusUnavailable}
    await world.start()
    await link.until(Link.CONNECTED)
    end = await patience.stored(bus, "rig.run.n1", b"", "end")
    bodies = []
    tail = await bus.tail("LOG")
    while len(bodies) < end:
        bodies += [m.body for m in await tail.batch(max_messages=1000, wait_seconds=5)]
    for n, answer in enumerate(answers):
        stored = bodies.count(b"%d" % n)
        assert stored == 1 if isinstance(answer, Appended) else stored <= 1
        if isinstance(answer, BusUnavailable):
            assert stored == 0
        if isinstance(answer, Appended):
            assert bodies[answer.seq - 1] == b"%d" % n


async def test_a_cancelled_append_leaves_the_bus_usable(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    task = asyncio.create_task(bus.append("rig.demand.p", b"", message_id="a"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await bus.append("rig.demand.p", b"", message_id="b")).seq in (1, 2)


async def test_after_close_nothing_is_sent(world):
    bus = await world.connect()
    await bus.ensure_stream(LOG)
    await bus.close()
    await bus.close()
    assert bus.link is Link.CLOSED
    with pytest.raises(BusUnavailable):
        await bus.append("rig.demand.p", b"", message_id="a")

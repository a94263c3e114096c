"""Goal: requests, hints and the link behave alike in memory and on a real nats-server."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from rigbook_bus.protocol import BusDenied, BusUnavailable, BusUnknown, Link, StreamSpec

SOON = 10.0


async def test_ask_and_answer(world):
    server, client = await world.connect("server"), await world.connect("client")

    async def answer(subject: str, body: bytes) -> bytes:
        return subject.encode() + b"|" + body

    stop = await server.serve("rig.query.*", answer)
    assert await client.request("rig.query.nodes", b"{}") == b"rig.query.nodes|{}"
    assert await server.request("rig.query.self", b"") == b"rig.query.self|"
    await stop()
    with pytest.raises(BusUnavailable, match="nobody serves"):
        await client.request("rig.query.nodes", b"{}")


async def test_nobody_serves(world):
    bus = await world.connect()
    with pytest.raises(BusUnavailable, match="nobody serves"):
        await bus.request("rig.query.nodes", b"")


async def test_an_answer_that_does_not_come_is_unknown(world):
    bus = await world.connect()
    called = asyncio.Event()

    async def never(_subject: str, _body: bytes) -> bytes:
        called.set()
        await asyncio.Event().wait()
        return b""

    await bus.serve("rig.query.slow", never)
    with pytest.raises(BusUnknown):
        await bus.request("rig.query.slow", b"", timeout_seconds=0.05)
    assert called.is_set()


async def test_a_service_that_fails_says_so_and_lives_on(world, caplog):
    bus = await world.connect()

    async def answer(_subject: str, body: bytes) -> bytes:
        return b"%d" % (100 // int(body))

    await bus.serve("rig.query.div", answer)
    with pytest.raises(BusDenied, match="ZeroDivisionError"):
        await bus.request("rig.query.div", b"0")
    assert await bus.request("rig.query.div", b"5") == b"20"
    assert "ZeroDivisionError" in caplog.text


async def test_answers_overlap(world):
    """One slow question must not hold up the next."""
    bus = await world.connect()
    gate = asyncio.Event()

    async def answer(_subject: str, body: bytes) -> bytes:
        if body == b"slow":
            await gate.wait()
        return body

    await bus.serve("rig.query.x", answer)
    slow = asyncio.create_task(bus.request("rig.query.x", b"slow"))
    assert await bus.request("rig.query.x", b"quick") == b"quick"
    gate.set()
    assert await slow == b"slow"


async def test_a_queue_shares_the_questions(world):
    one, two, client = [await world.connect(name) for name in ("one", "two", "client")]
    asked: list[str] = []

    def answering(name: str):
        async def answer(_subject: str, _body: bytes) -> bytes:
            asked.append(name)
            return name.encode()

        return answer

    await one.serve("rig.query.q", answering("one"), queue="q")
    await two.serve("rig.query.q", answering("two"), queue="q")
    for _ in range(40):
        assert await client.request("rig.query.q", b"") in (b"one", b"two")
    assert len(asked) == 40
    assert set(asked) == {"one", "two"}


async def test_hints(world):
    one, two = await world.connect("one"), await world.connect("two")
    hints = one.listen("rig.hint.>")
    first = asyncio.create_task(anext(hints))
    async with asyncio.timeout(SOON):
        while not first.done():
            await two.publish("rig.hint.a", b"1")
            await asyncio.sleep(0.001)
    assert first.result() == ("rig.hint.a", b"1")
    await two.publish("rig.hint.b.c", b"2")
    async with asyncio.timeout(SOON):
        while (hint := await anext(hints)) == ("rig.hint.a", b"1"):
            pass
    assert hint == ("rig.hint.b.c", b"2")
    await hints.aclose()


async def test_a_stored_message_is_a_hint_too(world):
    """Core subscribers hear what is appended, as on the real server."""
    bus = await world.connect()
    await bus.ensure_stream(StreamSpec(name="LOG", subjects=("log.>",)))
    hints = bus.listen("log.>")
    first = asyncio.create_task(anext(hints))
    await bus.stream("LOG")  # the interest has arrived: one connection, one order
    await bus.append("log.a", b"x", message_id="m")
    async with asyncio.timeout(SOON):
        assert await first == ("log.a", b"x")
    await hints.aclose()


async def test_services_and_hints_are_back_after_an_outage(world, watch):
    bus = await world.connect()

    async def answer(_subject: str, body: bytes) -> bytes:
        return body

    await bus.serve("rig.query.x", answer)
    link = watch(bus)
    await world.kill()
    await link.until(Link.AWAY)
    with pytest.raises(BusUnavailable):
        await bus.request("rig.query.x", b"")
    await world.start()
    await link.until(Link.CONNECTED)
    assert await bus.request("rig.query.x", b"back") == b"back"


async def test_a_question_under_way_when_the_link_breaks_is_unknown_at_once(world, watch):
    bus = await world.connect()
    called = asyncio.Event()

    async def never(_subject: str, _body: bytes) -> bytes:
        called.set()
        await asyncio.Event().wait()
        return b""

    await bus.serve("rig.query.slow", never)
    question = asyncio.create_task(bus.request("rig.query.slow", b"", timeout_seconds=600))
    await called.wait()
    await world.kill()
    async with asyncio.timeout(SOON):
        with pytest.raises(BusUnknown):
            await question


async def test_the_link_is_told_with_its_reason(world, watch):
    bus = await world.connect()
    link = watch(bus)
    assert bus.link is Link.CONNECTED
    await world.stop()
    await link.until(Link.AWAY)
    await world.start()
    await link.until(Link.CONNECTED)
    await bus.close()
    assert [seen for seen, _ in link.seen] == [Link.AWAY, Link.CONNECTED, Link.CLOSED]
    assert all(why for _, why in link.seen)


async def test_nobody_is_there_to_connect_to(world):
    await world.stop()
    if world.real:
        from rigbook_bus.jetstream import JetStreamBus

        with pytest.raises(BusUnavailable, match="is the nats-server running"):
            await JetStreamBus.connect(world.server.url, name="late", wait_seconds=0.3)
    else:
        with pytest.raises(BusUnavailable):
            await world.connect("late")


@pytest.mark.nats
async def test_connecting_waits_for_a_server_that_comes_later(nats):
    from rigbook_bus.jetstream import JetStreamBus

    await nats.stop()
    connecting = asyncio.create_task(JetStreamBus.connect(nats.server.url, name="early", wait_seconds=None))
    await asyncio.sleep(0)
    await nats.start()
    async with asyncio.timeout(SOON):
        bus = await connecting
    assert bus.link is Link.CONNECTED
    await bus.close()


@pytest.mark.nats
@pytest.mark.parametrize("url", ["nats://127.0.0.1:1", "not a url", "nats://127.0.0.1:99999"])
async def test_a_wrong_address_is_said(url):
    from rigbook_bus.jetstream import JetStreamBus

    with pytest.raises((BusUnavailable, BusDenied), match=r"127\.0\.0\.1|not a url"):
        await JetStreamBus.connect(url, name="t", wait_seconds=0.3)


@pytest.mark.nats
async def test_a_slow_link_listener_that_fails_breaks_nothing(nats, watch):
    bus = await nats.connect()

    def told(_link: Link, _why: str) -> None:
        raise RuntimeError("a listener's own bug")

    bus.on_link(told)
    link = watch(bus)
    await nats.stop()
    await link.until(Link.AWAY)
    await nats.start()
    await link.until(Link.CONNECTED)
    with contextlib.suppress(BusUnavailable):
        await bus.publish("x.y", b"")

"""Goal: what a user may not do is said at once and by name, instead of timing out. Method: real rights on a real server."""

from __future__ import annotations

import asyncio

import pytest
from rigbook_bus.embedded import EmbeddedServer
from rigbook_bus.jetstream import JetStreamBus
from rigbook_bus.protocol import BusDenied, BusUnavailable, ConsumerSpec, Link, StreamSpec

pytestmark = pytest.mark.nats

USERS = """
authorization {
  users = [
    { user: service, password: s }
    { user: node, password: n, permissions: {
        publish: ["rig.run.n1", "$JS.API.CONSUMER.MSG.NEXT.LOG.node-n1", "$JS.ACK.LOG.node-n1.>"]
        subscribe: ["_INBOX_node.>"]
    } }
  ]
}
"""
LOG = StreamSpec(name="LOG", subjects=("rig.run.*", "rig.own.>"))


@pytest.fixture
async def guarded(tmp_path):
    async with EmbeddedServer(tmp_path / "nats", extra_config=USERS) as server:
        buses = []

        async def connect(user: str, password: str, **options) -> JetStreamBus:
            url = server.url.replace("nats://", f"nats://{user}:{password}@")
            buses.append(await JetStreamBus.connect(url, name=user, wait_seconds=5, **options))
            return buses[-1]

        yield connect
        for bus in buses:
            await bus.close()


async def test_a_node_may_append_its_own_and_read_its_consumer_and_no_more(guarded):
    service = await guarded("service", "s")
    await service.ensure_stream(LOG)
    await service.ensure_consumer(ConsumerSpec(stream="LOG", name="node-n1", filters=("rig.own.>",)))
    await service.ensure_consumer(ConsumerSpec(stream="LOG", name="node-n2"))
    await service.append("rig.own.bind.n1", b"order", message_id="b1")
    node = await guarded("node", "n", inbox_prefix="_INBOX_node")

    assert (await node.append("rig.run.n1", b"", message_id="r1")).seq == 2
    reader = await node.reader("LOG", "node-n1")
    (delivery,) = await reader.batch(max_messages=10, wait_seconds=5)
    assert delivery.message.body == b"order"
    await delivery.ack()
    assert list(await reader.batch(max_messages=10, wait_seconds=0.05)) == []

    for denied in (
        node.append("rig.own.bind.n1", b"", message_id="x"),
        node.append("rig.run.n2", b"", message_id="x"),
        node.stream("LOG"),
        node.tail("LOG"),
        node.request("rig.query.nodes", b""),
    ):
        async with asyncio.timeout(2):
            with pytest.raises(BusDenied, match="no right to publish"):
                await denied
    async with asyncio.timeout(2):
        with pytest.raises(BusDenied, match="no right"):
            await node.reader("LOG", "node-n2")
    assert node.link is Link.CONNECTED
    assert (await service.stream("LOG")).last_seq == 2


async def test_a_denial_among_many_hits_only_its_own(guarded):
    service = await guarded("service", "s")
    await service.ensure_stream(LOG)
    node = await guarded("node", "n", inbox_prefix="_INBOX_node")
    answers = await node.append_many(
        [("rig.run.n1", b"", "a"), ("rig.run.n2", b"", "b"), ("rig.run.n1", b"", "c")]
    )
    assert [type(answer).__name__ for answer in answers] == ["Appended", "BusDenied", "Appended"]


async def test_the_wrong_inbox_is_said_when_connecting(guarded):
    with pytest.raises(BusDenied, match="may not subscribe"):
        await guarded("node", "n")


async def test_wrong_credentials_are_said_at_once(guarded):
    async with asyncio.timeout(2):
        with pytest.raises(BusDenied, match=r"(?i)authorization"):
            await guarded("node", "wrong")


async def test_serving_and_listening_without_the_right_is_said(guarded):
    node = await guarded("node", "n", inbox_prefix="_INBOX_node")

    async def answer(_subject: str, body: bytes) -> bytes:
        return body

    with pytest.raises(BusDenied, match="no right to subscribe"):
        await node.serve("rig.query.nodes", answer)
    with pytest.raises(BusDenied, match="no right to subscribe"):
        await anext(node.listen("rig.hint.>"))


async def test_a_missing_credentials_file_is_said(guarded, tmp_path):
    with pytest.raises((BusDenied, BusUnavailable), match=r"nope\.creds|nkeys"):
        await guarded("node", "n", credentials=tmp_path / "nope.creds")

"""Goal: messages arrive whole however the line is cut, and control lines reach nats-py. Method: every cut, random cuts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.errors import ProtocolError
from rigbook_bus.wire_parser import WireParser

LINE = (
    b'INFO {"server_id":"x"}\r\n'
    b"MSG a.b 7 5\r\nhello\r\n"
    b"PING\r\n"
    b"MSG a.b 7 reply.to 0\r\n\r\n"
    b"HMSG a.c 7 reply.to 12 14\r\nNATS/1.0\r\n\r\nhi\r\n"
    b"HMSG a.d 7 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
    b"MSG other 8 2\r\nno\r\n"
    b"+OK\r\nPONG\r\n"
    b"-ERR 'Permissions Violation for Publish to \"X\"'\r\n"
    b"MSG a.b 7 4\r\n\r\n\r\n\r\n"
)
MESSAGES = [
    (b"a.b", b"", b"hello", None),
    (b"a.b", b"reply.to", b"", None),
    (b"a.c", b"reply.to", b"hi", b"NATS/1.0\r\n\r\n"),
    (b"a.d", b"", b"", b"NATS/1.0 503\r\n\r\n"),
    (b"a.b", b"", b"\r\n\r\n", None),
]
CONTROL = ["info", "ping", "pong", "error"]


class Client:
    """What nats-py's parser calls."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def _process_info(self, _information: object) -> None:
        self.told.append("info")

    async def _process_ping(self) -> None:
        self.told.append("ping")

    async def _process_pong(self) -> None:
        self.told.append("pong")

    async def _process_err(self, _text: str) -> None:
        self.told.append("error")


def parser() -> tuple[WireParser, Client, list[tuple[bytes, bytes, bytes, bytes | None]]]:
    seen: list[tuple[bytes, bytes, bytes, bytes | None]] = []
    client = Client()
    return WireParser(client, {b"7": lambda *message: seen.append(message)}), client, seen


@pytest.mark.parametrize("cut", range(1, len(LINE)))
async def test_any_cut(cut):
    under_test, client, seen = parser()
    await under_test.parse(LINE[:cut])
    await under_test.parse(LINE[cut:])
    assert seen == MESSAGES
    assert client.told == CONTROL


async def test_byte_by_byte():
    under_test, client, seen = parser()
    for at in range(len(LINE)):
        await under_test.parse(LINE[at : at + 1])
    assert seen == MESSAGES
    assert client.told == CONTROL


@given(st.lists(st.integers(1, 40), max_size=60))
async def test_random_pieces(sizes):
    under_test, _, seen = parser()
    at = 0
    for size in [*sizes, len(LINE)]:
        await under_test.parse(LINE[at : at + size])
        at += size
    assert seen == MESSAGES


async def test_a_taker_that_fails_stops_nothing(caplog):
    client = Client()
    seen: list[bytes] = []

    def take(_subject, _reply, body, _headers):
        if body == b"bad":
            raise RuntimeError("a bug")
        seen.append(body)

    under_test = WireParser(client, {b"1": take})
    await under_test.parse(b"MSG a 1 3\r\nbad\r\nMSG a 1 4\r\ngood\r\n")
    assert seen == [b"good"]
    assert "a bug" in caplog.text


async def test_a_reset_forgets_half_a_message():
    under_test, _, seen = parser()
    await under_test.parse(b"MSG a.b 7 5\r\nhel")
    under_test.reset()
    await under_test.parse(b"MSG a.b 7 2\r\nok\r\n")
    assert [message[2] for message in seen] == [b"ok"]


@pytest.mark.parametrize(
    "line", [b"MSG a\r\n", b"MSG a 7 x\r\n", b"HMSG a 7 1\r\n", b"WHAT\r\n", b"x" * 9000]
)
async def test_nonsense_is_a_protocol_error(line):
    under_test, _, _ = parser()
    with pytest.raises(ProtocolError):
        await under_test.parse(line)

"""The reading side of a durable pull consumer, with no more rights than asking for the next messages and acking."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from rigbook_bus.connection import NO_RESPONDERS, header_of, status_of
from rigbook_bus.protocol import READER_WAIT_SECONDS_MIN, BusDenied, BusError, BusUnavailable, Link, Message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_bus.connection import Connection, Subscription

__all__ = ["JetStreamDelivery", "JetStreamReader"]

log = logging.getLogger("rigbook_bus")

NS = 1_000_000_000
PROBE_SECONDS = 5.0
EXPIRES_SECONDS_MAX = 30.0
EXPIRES_SECONDS_MIN = 0.001
HEARTBEAT_SECONDS = 0.5
SILENT_SECONDS_MAX = 1.75
RETRY_SECONDS = 0.1
# A consumer without a leader answers like one that is not there: an election is given this long.
ABSENT_SECONDS_MAX = 5.0


class JetStreamDelivery:
    """One message of a durable consumer."""

    __slots__ = ("_connection", "_reply", "delivered", "message")

    def __init__(self, connection: Connection, reply: str, delivered: int, message: Message) -> None:
        self._connection = connection
        self._reply = reply
        self.delivered = delivered
        self.message = message

    async def ack(self) -> None:
        await self._connection.publish(self._reply, b"+ACK")

    async def nak(self, delay_seconds: float = 0.0) -> None:
        body = b"-NAK"
        if delay_seconds > 0:
            body += b' {"delay": %d}' % round(delay_seconds * NS)
        await self._connection.publish(self._reply, body)


class JetStreamReader:
    """Asks for exactly what its caller asks for, so that no message waits here while its ack time runs."""

    def __init__(self, connection: Connection, stream: str, name: str) -> None:
        self._connection = connection
        self._stream = stream
        self._name = name
        self._buffer: deque[JetStreamDelivery] = deque()
        self._subscription: Subscription | None = None
        self._inbox = connection.new_inbox()
        self._asked = 0
        self._heard = 0.0
        self._expires_at = 0.0
        self._heartbeats = False
        self._absent_since: float | None = None
        self._failure: BusError | None = None
        self._arrived = asyncio.Event()
        self._question = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"
        self._forget_link = connection.on_link(self._on_link)
        self._forget_denial = connection.on_denial(self._on_denial)

    async def start(self) -> None:
        """Bind. Raises BusDenied when there is no such consumer, or no right to read it."""
        try:
            self._subscription = await self._connection.subscribe(self._inbox, self._take)
            await self._probe()
        except BaseException:
            await self.close()
            raise

    async def _probe(self) -> None:
        """Learn whether the consumer exists without the right to ask: a pull for nothing that can match.

        A pull of one message with `no_wait` answers 404 (nothing there), a message (kept), or nobody answers.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PROBE_SECONDS
        await self._ask(1, 0.0)
        while self._asked > 0 and self._absent_since is None and self._failure is None:
            self._arrived.clear()
            left = deadline - loop.time()
            if left <= 0:
                raise BusUnavailable(f"consumer {self._name} of stream {self._stream} does not answer")
            try:
                async with asyncio.timeout(left):
                    await self._arrived.wait()
            except TimeoutError:
                continue
        if self._failure is not None:
            raise self._failure
        if self._absent_since is not None:
            raise self._absent()

    async def batch(self, *, max_messages: int, wait_seconds: float) -> Sequence[JetStreamDelivery]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max(wait_seconds, READER_WAIT_SECONDS_MIN)
        while not self._buffer:
            if self._failure is not None:
                raise self._failure
            now = loop.time()
            if self._absent_since is not None and now - self._absent_since > ABSENT_SECONDS_MAX:
                raise self._absent()
            left = deadline - now
            connected = self._connection.link is Link.CONNECTED
            if left <= 0:
                if not connected:
                    self._connection.require()
                return ()
            pause = left
            if connected:
                self._notice_silence(now)
                if self._asked <= 0:
                    await self._ask(max_messages, left)
                pause = min(left, RETRY_SECONDS if self._absent_since is not None else HEARTBEAT_SECONDS)
            self._arrived.clear()
            try:
                async with asyncio.timeout(pause):
                    await self._arrived.wait()
            except TimeoutError:
                if self._absent_since is not None:
                    self._asked = 0  # ask again: an election may be over
        return [self._buffer.popleft() for _ in range(min(max_messages, len(self._buffer)))]

    async def close(self) -> None:
        """Give back at once what was not taken, so that another reader need not wait for the ack time-out."""
        self._forget_link()
        self._forget_denial()
        if self._failure is None:
            self._failure = BusUnavailable(f"the reader {self._name} is closed")
        self._arrived.set()
        if self._subscription is not None:
            await self._connection.unsubscribe(self._subscription)
            self._subscription = None
        while self._buffer:
            try:
                await self._buffer.popleft().nak()
            except BusError:
                self._buffer.clear()

    # ---- inside --------------------------------------------------------------------------------------------

    def _absent(self) -> BusDenied:
        return BusDenied(
            f"stream {self._stream} has no consumer {self._name}; a service makes it "
            "(an agent's appears when the ledger has folded its node.joined)"
        )

    def _notice_silence(self, now: float) -> None:
        silent = now - self._heard
        if self._asked > 0 and (
            (self._heartbeats and silent > SILENT_SECONDS_MAX) or now > self._expires_at + SILENT_SECONDS_MAX
        ):
            log.info("reader %s: the server fell silent, asking again", self._name)
            self._asked = 0

    async def _ask(self, messages: int, wait_seconds: float) -> None:
        question: dict[str, int | bool] = {"batch": messages}
        expires = min(wait_seconds, EXPIRES_SECONDS_MAX)
        self._heartbeats = expires >= 2 * HEARTBEAT_SECONDS
        if expires < EXPIRES_SECONDS_MIN:
            question["no_wait"] = True
        else:
            question["expires"] = round(expires * NS)
        if self._heartbeats:
            question["idle_heartbeat"] = round(HEARTBEAT_SECONDS * NS)
        self._heard = asyncio.get_running_loop().time()
        self._expires_at = self._heard + expires
        self._asked = messages
        await self._connection.publish(
            self._question,
            msgspec.json.encode(question),
            reply=self._inbox,
        )

    def _take(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        self._heard = asyncio.get_running_loop().time()
        self._absent_since = None
        if not reply.startswith(b"$JS.ACK."):
            self._take_status(status_of(headers), headers or b"")
            return
        parts = reply.split(b".")
        at = 4 if len(parts) == 9 else 6
        message = Message(int(parts[at + 1]), subject.decode(), int(parts[at + 3]), body)
        self._asked -= 1
        self._buffer.append(JetStreamDelivery(self._connection, reply.decode(), int(parts[at]), message))
        self._arrived.set()

    def _take_status(self, status: int, headers: bytes) -> None:
        if status == 100:
            return
        if status == NO_RESPONDERS:
            self._absent_since = self._absent_since or self._heard
        elif status == 409 and b"Consumer Deleted" in headers:
            self._failure = self._absent()
        elif status == 409 and b"push based" in headers:
            self._failure = BusDenied(f"consumer {self._name} of stream {self._stream} is no pull consumer")
        pending = header_of(headers, b"Nats-Pending-Messages")
        self._asked = max(0, self._asked - int(pending)) if pending else 0
        self._arrived.set()

    def _on_denial(self, kind: str, subject: str) -> None:
        if kind == "publish" and subject == self._question.lower():
            self._failure = BusDenied(f"{self._connection.name} has no right to read consumer {self._name}")
            self._arrived.set()

    def _on_link(self, link: Link, why: str) -> None:
        self._asked = 0
        if link is Link.CLOSED and self._failure is None:
            self._failure = BusUnavailable(f"the connection is closed for good: {why}")
        self._arrived.set()

"""The reading side of a durable pull consumer of the in-memory server."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from rigbook_bus.memory_stream import Pull
from rigbook_bus.protocol import READER_WAIT_SECONDS_MIN, BusDenied, BusError, BusUnavailable, Link, Message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_bus.memory import MemoryBus

__all__ = ["MemoryDelivery", "MemoryReader"]


class MemoryDelivery:
    """One message of a durable consumer."""

    __slots__ = ("_reader", "delivered", "message")

    def __init__(self, reader: MemoryReader, delivered: int, message: Message) -> None:
        self._reader = reader
        self.delivered = delivered
        self.message = message

    async def ack(self) -> None:
        self._reader.settle(self.message.seq, None)
        await asyncio.sleep(0)

    async def nak(self, delay_seconds: float = 0.0) -> None:
        self._reader.settle(self.message.seq, delay_seconds)
        await asyncio.sleep(0)


class MemoryReader:
    """The reading side of a durable pull consumer."""

    def __init__(self, bus: MemoryBus, stream: str, name: str) -> None:
        self._bus = bus
        self._stream = stream
        self._name = name
        self._buffer: deque[MemoryDelivery] = deque()
        self._pull: Pull | None = None
        self._failure: BusError | None = None
        self._arrived = asyncio.Event()

    async def batch(self, *, max_messages: int, wait_seconds: float) -> Sequence[MemoryDelivery]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max(wait_seconds, READER_WAIT_SECONDS_MIN)
        await asyncio.sleep(0)
        while not self._buffer:
            if self._failure is not None:
                raise self._failure
            left = deadline - loop.time()
            if self._bus.link is Link.CONNECTED and self._pull is None and left > 0:
                self._ask(max_messages, left)
            self._arrived.clear()
            try:
                async with asyncio.timeout(max(0.0, left)):
                    await self._arrived.wait()
            except TimeoutError:
                self._bus.require()
                break
        self._withdraw()
        return [self._buffer.popleft() for _ in range(min(max_messages, len(self._buffer)))]

    async def close(self) -> None:
        self._bus.detach(self)
        self._withdraw()
        if self._failure is None:
            self._failure = BusUnavailable(f"the reader {self._name} is closed")
        self._arrived.set()
        while self._buffer:
            try:
                await self._buffer.popleft().nak()
            except BusError:
                self._buffer.clear()

    def settle(self, seq: int, delay_seconds: float | None) -> None:
        self._bus.send(
            f"$JS.ACK.{self._stream}.{self._name}",
            partial(self._bus.server.settle, self._stream, self._name, seq, delay_seconds),
        )

    def lose(self) -> None:
        self._withdraw()
        self.wake()

    def wake(self) -> None:
        self._arrived.set()

    def _ask(self, most: int, seconds: float) -> None:
        server = self._bus.server
        pull = Pull(
            self._deliver, self._lost, left=most, expires_at=server.clock.monotonic() + max(seconds, 1e-6)
        )
        self._pull = pull

        def at_server() -> None:
            try:
                server.pull(self._stream, self._name, pull)
            except BusDenied as error:
                self._lost(error)

        self._bus.send(f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}", at_server)

    def _withdraw(self) -> None:
        pull, self._pull = self._pull, None
        if pull is not None:
            pull.left = 0
            self._bus.server.withdraw(self._stream, self._name, pull)

    def _deliver(self, message: Message, tries: int) -> None:
        """At the server: put it on the line, as often as the world wants."""
        faults = self._bus.server.faults
        for _ in range(faults.delivery_copies(self._bus.name, self._stream, message.seq)):
            seconds = faults.delivery_seconds(self._bus.name, self._stream, message.seq)
            self._bus.down.send(partial(self._take, MemoryDelivery(self, tries, message)), seconds)

    def _take(self, delivery: MemoryDelivery) -> None:
        self._buffer.append(delivery)
        self._arrived.set()

    def _lost(self, error: BusDenied) -> None:
        def at_client() -> None:
            self._failure = error
            self._arrived.set()

        self._bus.down.send(at_client)

"""An ordered read of a stream of the in-memory server, with the same promises as over the network."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from rigbook_bus.protocol import BusError, BusUnavailable, Link, Message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_bus.memory import MemoryBus

__all__ = ["MemoryTail"]


class MemoryTail:
    """An ordered read of a stream; sees a message when it has arrived on its connection."""

    def __init__(self, bus: MemoryBus, stream: str, *, start_seq: int, filters: Sequence[str]) -> None:
        self._bus = bus
        self._stream = stream
        self._filters = tuple(filters)
        self._position = max(1, start_seq) - 1
        self._visible = 0
        self._created_ns = 0
        self._failure: BusError | None = None
        self._arrived = asyncio.Event()

    async def start(self) -> None:
        def ask() -> None:
            found = self._bus.server.stream(self._stream, f"reading stream {self._stream}")
            self._created_ns = found.created_ns
            self._check(found.last_seq)
            self._bus.attach(self)

        await self._bus.call(f"$JS.API.CONSUMER.CREATE.{self._stream}", ask)

    async def batch(self, *, max_messages: int, wait_seconds: float | None) -> Sequence[Message]:
        await asyncio.sleep(0)
        found = self._read(max_messages)
        if found:
            return found
        try:
            async with asyncio.timeout(wait_seconds):
                while not found:
                    if self._failure is not None:
                        raise self._failure
                    self._arrived.clear()
                    await self._arrived.wait()
                    found = self._read(max_messages)
        except TimeoutError:
            return ()
        return found

    async def close(self) -> None:
        self._bus.detach(self)
        if self._failure is None:
            self._failure = BusUnavailable(f"the tail of {self._stream} is closed")
        self._arrived.set()
        await asyncio.sleep(0)

    def _read(self, most: int) -> list[Message]:
        stream = self._bus.server.streams.get(self._stream)
        if self._failure is not None or stream is None or self._visible <= self._position:
            return []
        if self._bus.link is not Link.CONNECTED:
            return []
        found, self._position = stream.after(self._position, self._visible, self._filters, most)
        return found

    # ---- told by the connection ----------------------------------------------------------------------------

    def stored(self, stream: str, seq: int, subject: str) -> None:
        if stream != self._stream or self._bus.link is not Link.CONNECTED:
            return
        if self._bus.server.streams[stream].wanted(self._filters, subject):
            seconds = self._bus.server.faults.delivery_seconds(self._bus.name, stream, seq)
            self._bus.down.send(partial(self._see, seq), seconds)

    def lose(self) -> None:
        self._visible = self._position

    def regain(self) -> None:
        self._bus.down.send(self._check_again)

    def _check_again(self) -> None:
        stream = self._bus.server.streams.get(self._stream)
        if stream is None:
            self._lost(f"stream {self._stream} is gone")
        elif stream.created_ns != self._created_ns:
            self._lost(f"stream {self._stream} is not the one this reader began on: it was created anew")
        else:
            try:
                self._check(stream.last_seq)
            except BusUnavailable as error:
                self._failure = error
                self._arrived.set()

    def _check(self, last_seq: int) -> None:
        if last_seq < self._position:
            raise BusUnavailable(
                f"stream {self._stream} ends at {last_seq}, this reader has had {self._position}: its end is lost; "
                "check every belief that was read from it (`rigbook doctor`)"
            )
        self._see(last_seq)

    def _see(self, seq: int) -> None:
        self._visible = max(self._visible, seq)
        self._arrived.set()

    def _lost(self, what: str) -> None:
        self._failure = BusUnavailable(f"{what}; check every belief that was read from it (`rigbook doctor`)")
        self._arrived.set()

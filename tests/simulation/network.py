"""The bus of a simulated world: the shipped in-memory server and connections, with weather on the wires.

Nothing of the server's rules is changed here. Added: what the auditor needs to see, connections that break
off as a killed process's do, and delays and losses drawn from the seed.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING, Any

from rigbook_bus.memory import MemoryBus
from rigbook_bus.memory_server import Faults, Line, MemoryServer
from rigbook_bus.memory_stream import MemoryConsumer, MemoryStream
from rigbook_bus.protocol import Link
from rigbook_schemas.subjects import HEARTBEAT_STREAM, LEDGER_STREAM

from tests.simulation.loop import OUTSIDE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rigbook_bus.clock import Clock
    from rigbook_bus.memory_tail import MemoryTail
    from rigbook_bus.protocol import Appended, Expect, Message

    from tests.simulation.loop import Process

__all__ = ["Condition", "SimBus", "SimServer", "Weather"]


class Condition:
    """Bad weather for some clients for a while."""

    def __init__(self, seed: str, clients: str, **odds: float) -> None:
        self.rng = random.Random(seed)
        self.clients = clients  # "" = everybody, else the beginning of their names
        self.odds = odds  # of each thing that may happen to a message


class Weather(Faults):
    """Delay, loss and repetition, drawn from the seed. `count` is told of every fault that really happened."""

    def __init__(self, seed: int, *, latency_seconds: float, count: Callable[[str], None]) -> None:
        self._rng = random.Random(f"latency {seed}")
        self._latency = latency_seconds
        self._count = count
        self.conditions: list[Condition] = []
        self.was_bad = False  # some message was lost or late in this world

    def _seconds(self) -> float:
        return self._rng.random() * self._latency if self._latency else 0.0

    def _happens(self, client: str, what: str) -> random.Random | None:
        for condition in self.conditions:
            odds = condition.odds.get(what, 0.0)
            if odds and client.startswith(condition.clients) and condition.rng.random() < odds:
                self._count(what)
                self.was_bad = True
                return condition.rng
        return None

    def request_seconds(self, client: str, subject: str) -> float | None:
        if self.conditions:
            if self._happens(client, "request_lost"):
                return None
            slow = self._happens(client, "request_slow")
            if slow is not None:
                return slow.random() * 3.0
        return self._seconds()

    def answer_seconds(self, client: str, subject: str) -> float | None:
        if self.conditions:
            if self._happens(client, "ack_lost"):
                return None
            slow = self._happens(client, "ack_slow")
            if slow is not None:
                return slow.random() * 6.0  # an append waits five seconds
        return self._seconds()

    def delivery_seconds(self, client: str, stream: str, seq: int) -> float:
        if self.conditions:
            slow = self._happens(client, "delivery_slow")
            if slow is not None:
                return slow.random() * 4.0
        return self._seconds()

    def delivery_copies(self, client: str, stream: str, seq: int) -> int:
        if self.conditions:
            if self._happens(client, "delivery_lost"):
                return 0
            if self._happens(client, "delivery_again"):
                return 2
        return 1


class SimLine(Line):
    """Things under way belong to no process: they arrive when their sender is dead."""

    def send(self, arrive: Callable[[], None], seconds: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        due = max(now + seconds, self._last_due)
        self._items.append(arrive)
        if due <= now:
            loop.call_soon(self._arrived, self._generation, context=OUTSIDE)
        else:
            self._last_due = due
            loop.call_at(due, self._arrived, self._generation, context=OUTSIDE)

    def take(self) -> list[Callable[[], None]]:
        """What is under way; the line itself forgets it."""
        items = list(self._items)
        self.cut()
        return items


class SimServer(MemoryServer):
    """The in-memory server, watched."""

    def __init__(
        self, clock: Clock, faults: Faults, saw: Callable[[str, Message, SimBus | None], None]
    ) -> None:
        super().__init__(clock, faults)
        self._saw = saw
        self.acked: dict[str, set[int]] = {}  # consumer to acknowledged sequences
        self.sender: SimBus | None = None  # whose message the server handles now
        self._kept: tuple[str, list[Message], int, dict[str, Any]] | None = None

    def append(self, subject: str, body: bytes, message_id: str, expect: Expect | None) -> Appended:
        appended = super().append(subject, body, message_id, expect)
        if not appended.duplicate:
            stream = self.stream_for(subject)
            assert stream is not None
            self._saw(stream.spec.name, stream.records[appended.seq], self.sender)
        return appended

    def settle(self, stream: str, name: str, seq: int, delay_seconds: float | None) -> None:
        if delay_seconds is None and self.consumer_there(stream, name):
            self.acked.setdefault(name, set()).add(seq)
        super().settle(stream, name, seq, delay_seconds)

    def consumer_there(self, stream: str, name: str) -> bool:
        found = self.streams.get(stream)
        return found is not None and name in found.consumers

    def last_heartbeats(self) -> dict[str, Message]:
        """By subject."""
        found = self.streams.get(HEARTBEAT_STREAM)
        if found is None:
            return {}
        return {m.subject: m for m in found.records.values()}

    def swap_ledger(self, last_seq: int) -> MemoryStream:
        """Come back with an older copy of the ledger stream (0 = a new, empty one); returns the right one."""
        right = self.streams[LEDGER_STREAM]

        def change() -> None:
            if last_seq <= 0:
                self.streams[LEDGER_STREAM] = MemoryStream(right.spec, self._created_ns())
                return
            old = MemoryStream(right.spec, right.created_ns)
            for m in right.records.values():
                if m.seq <= last_seq:
                    old.records[m.seq] = m
                    old._sizes[m.seq] = right._sizes[m.seq]
                    old._stored_at[m.seq] = right._stored_at[m.seq]
                    old._index(m.seq, m.subject)
            old.last_seq = last_seq
            old.bytes = sum(old._sizes.values())
            old._ids = {key: value for key, value in right._ids.items() if value[0] <= last_seq}
            for name, consumer in right.consumers.items():
                copy = MemoryConsumer(consumer.spec, old)
                copy._next_seq = min(consumer._next_seq, last_seq + 1)
                copy._unacked = {seq: one for seq, one in consumer._unacked.items() if seq <= last_seq}
                old.consumers[name] = copy
            self.streams[LEDGER_STREAM] = old

        self._while_down(change)
        return right

    def put_back(self, right: MemoryStream) -> None:
        """The right data folder is mounted again."""

        def change() -> None:
            for consumer in right.consumers.values():
                consumer.forget_pulls()
            self.streams[LEDGER_STREAM] = right

        self._while_down(change)


class SimBus(MemoryBus):
    """A connection of one process."""

    def __init__(self, server: SimServer, *, name: str, process: Process) -> None:
        super().__init__(server, name=name)
        self.sim = server
        self.process = process
        self.up: SimLine = SimLine()
        self.down: SimLine = SimLine()
        self.read_to = 0  # how far this process has been given the ledger stream
        self.knows_more = False  # it has read beyond the end of the log that is there now

    def send(self, subject: str, at_server: Callable[[], None]) -> None:
        super().send(subject, partial(self._at_server, at_server))

    def _at_server(self, at_server: Callable[[], None]) -> None:
        self.sim.sender = self
        try:
            at_server()
        finally:
            self.sim.sender = None

    async def tail(self, stream: str, *, start_seq: int = 1, filters: Sequence[str] = ()) -> MemoryTail:
        tail = await super().tail(stream, start_seq=start_seq, filters=filters)
        if stream == LEDGER_STREAM:
            read = tail._read

            def watched(most: int) -> list[Message]:
                found = read(most)
                if found:
                    self.read_to = max(self.read_to, found[-1].seq)
                return found

            tail._read = watched  # type: ignore[method-assign]
        return tail

    async def _subscribe(
        self, subject: str, queue: str, arrive: Callable[..., None]
    ) -> Callable[[], Awaitable[None]]:
        # an answer is work of the process that gives it
        return await super()._subscribe(subject, queue, partial(self.process.context.run, arrive))

    def hang_up(self, *, arrives: bool) -> None:
        """The process is dead. What it had sent arrives, or is lost with it."""
        under_way = self.up.take() if arrives and self._link is Link.CONNECTED else []
        self._told.clear()
        self._link = Link.CLOSED
        self._drop("the process is dead")
        self.server.dismiss(self)

        def arrive() -> None:
            for one in under_way:
                one()

        if under_way:
            asyncio.get_running_loop().call_soon(arrive, context=OUTSIDE)

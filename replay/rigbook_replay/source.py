"""Where events come from: a bus or a journal, behind one face, so that every question works on both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from rigbook_schemas.subjects import HEARTBEAT_STREAM, LEDGER_STREAM, heartbeat
from rigbook_schemas.wire import decode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from rigbook_bus.protocol import Bus, Message, Tail
    from rigbook_schemas.wire import Record

    from rigbook_replay.journal import Journal

__all__ = ["BusSource", "JournalSource", "NoLedger", "Source", "Window"]

BATCH_MAX: Final = 5000
# Nothing for this long while there is more to come: the bus is away.
SILENCE_SECONDS_MAX: Final = 30.0


class NoLedger(Exception):
    """There is no ledger to read: no such stream, or it went away while it was read."""

    code = "no_ledger"


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time on one node, of which the heartbeats are wanted."""

    node: str
    from_ns: int
    to_ns: int


class Source(Protocol):
    """A ledger stream to read from."""

    name: str
    created_ns: int  # of the stream
    first_seq: int
    last_seq: int  # when we began to look
    partial: str  # "" = everything up to `last_seq` is there

    def messages(
        self, *, after: int = 0, until: int | None = None
    ) -> AsyncGenerator[Sequence[Message], None]:
        """Messages with `after` < sequence <= `until` (default: `last_seq`). Raises NoLedger, BusError."""
        ...

    def records(
        self, *, after: int = 0, until: int | None = None, whole: bool = True
    ) -> AsyncGenerator[Sequence[Record], None]:
        """The same, decoded. `whole` False: without what a fold does not read."""
        ...

    async def heartbeats(self, windows: Sequence[Window]) -> list[Message]:
        """Heartbeats in any of the windows, in sequence; as far as they are still there."""
        ...

    async def seq_at(self, at_ns: int) -> int:
        """The last sequence received at or before the moment, 0 = none."""
        ...


class BusSource:
    """The stream of a running bus, up to what stood on it when we began."""

    partial = ""

    def __init__(self, bus: Bus, *, name: str, created_ns: int, first_seq: int, last_seq: int) -> None:
        self.name = name
        self.created_ns = created_ns
        self.first_seq = first_seq
        self.last_seq = last_seq
        self._bus = bus

    @classmethod
    async def of(cls, bus: Bus, name: str) -> BusSource:
        """Raises NoLedger, BusError."""
        facts = await bus.stream(LEDGER_STREAM)
        if facts is None:
            raise NoLedger(
                f"there is no stream {LEDGER_STREAM} on {name}; the ledger makes it when it first starts"
            )
        return cls(
            bus, name=name, created_ns=facts.created_ns, first_seq=facts.first_seq, last_seq=facts.last_seq
        )

    async def messages(
        self, *, after: int = 0, until: int | None = None
    ) -> AsyncGenerator[Sequence[Message], None]:
        last = self.last_seq if until is None else min(until, self.last_seq)
        if after >= last:
            return
        tail = await self._bus.tail(LEDGER_STREAM, start_seq=after + 1)
        try:
            async for batch in _up_to(tail, last, LEDGER_STREAM):
                yield batch
        finally:
            await tail.close()

    async def records(
        self, *, after: int = 0, until: int | None = None, whole: bool = True
    ) -> AsyncGenerator[Sequence[Record], None]:
        del whole
        async for batch in self.messages(after=after, until=until):
            yield [decode(m.seq, m.subject, m.received_ns, m.body) for m in batch]

    async def heartbeats(self, windows: Sequence[Window]) -> list[Message]:
        facts = await self._bus.stream(HEARTBEAT_STREAM)
        if facts is None or not windows or facts.first_seq > facts.last_seq:
            return []
        found: dict[int, Message] = {}
        for node in sorted({window.node for window in windows}):
            last = await self._bus.last(HEARTBEAT_STREAM, heartbeat(node))
            if last is None:
                continue
            tail = await self._bus.tail(HEARTBEAT_STREAM, filters=[heartbeat(node)])
            try:
                async for batch in _up_to(tail, last.seq, HEARTBEAT_STREAM):
                    found.update({m.seq: m for m in batch if _wanted(m, windows)})
            finally:
                await tail.close()
        return [found[seq] for seq in sorted(found)]

    async def seq_at(self, at_ns: int) -> int:
        """By bisection over single messages; where the server's clock was put back, one of the right ones."""
        low, high = self.first_seq - 1, self.last_seq
        while low < high:
            middle = (low + high + 1) // 2
            message = await self._bus.message(LEDGER_STREAM, middle)
            if message is None:
                raise NoLedger(f"event {middle} of {LEDGER_STREAM} is gone")
            if message.received_ns <= at_ns:
                low = middle
            else:
                high = middle - 1
        return low if low >= self.first_seq else 0


class JournalSource:
    """A journal file. Damage is in `journal.damage` as it is met."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.name = str(journal.path)
        self.created_ns = journal.header.created_ns
        self.first_seq = journal.blocks[0].first_seq if journal.blocks else 1
        self.last_seq = journal.last_seq
        self.partial = journal.header.partial

    async def messages(
        self, *, after: int = 0, until: int | None = None
    ) -> AsyncGenerator[Sequence[Message], None]:
        for batch in self.journal.messages(after=after, until=until):
            yield batch

    async def records(
        self, *, after: int = 0, until: int | None = None, whole: bool = True
    ) -> AsyncGenerator[Sequence[Record], None]:
        for batch in self.journal.records(after=after, until=until, whole=whole):
            yield batch

    async def heartbeats(self, windows: Sequence[Window]) -> list[Message]:
        return [m for batch in self.journal.heartbeats() for m in batch if _wanted(m, windows)]

    async def seq_at(self, at_ns: int) -> int:
        before = 0
        for block in self.journal.blocks:
            if block.latest_ns <= at_ns:
                before = block.last_seq
                continue
            for records in self.journal.records(after=block.first_seq - 1, until=block.last_seq, whole=False):
                for record in records:
                    if record.received_ns > at_ns:
                        return before
                    before = record.seq
        return before


def _wanted(message: Message, windows: Sequence[Window]) -> bool:
    return any(
        message.subject == heartbeat(window.node) and window.from_ns <= message.received_ns <= window.to_ns
        for window in windows
    )


async def _up_to(tail: Tail, last: int, stream: str) -> AsyncGenerator[Sequence[Message], None]:
    """Batches until sequence `last` was seen."""
    seen = 0
    while seen < last:
        batch = await tail.batch(max_messages=BATCH_MAX, wait_seconds=SILENCE_SECONDS_MAX)
        if not batch:
            raise NoLedger(
                f"{stream}: nothing came for {SILENCE_SECONDS_MAX:.0f} s after event {seen}, {last} is the last"
            )
        seen = batch[-1].seq
        if seen > last:
            batch = [message for message in batch if message.seq <= last]
        if batch:
            yield batch

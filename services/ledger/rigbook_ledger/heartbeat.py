"""What each node told last: heartbeats, read as they come, kept one per node. Never part of the fold.

When a node was heard is measured on our own monotonic clock at the moment of reading, so that a node
with a wrong clock, or a step of ours, makes nobody look silent. A heartbeat found on the stream at
start is as old as the server's receive time says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
from rigbook_bus.protocol import BusError
from rigbook_schemas.events import Heartbeat
from rigbook_schemas.subjects import HEARTBEAT_STREAM, heartbeat
from rigbook_schemas.wire import Malformed, Unknown, decode, instant

from rigbook_ledger.evolve import SKEW_SECONDS_MAX
from rigbook_ledger.heard import Heard
from rigbook_ledger.state import Finding

if TYPE_CHECKING:
    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus, Message, Tail
    from rigbook_bus.telemetry import Telemetry
    from rigbook_schemas.wire import Record

    from rigbook_ledger.book import Book

__all__ = ["Heartbeats"]

WAIT_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 1.0
BATCH_MAX: Final = 2000
# Nodes whose heartbeat is kept; a name that never joined costs memory too.
NODES_MAX: Final = 10_000
# The same fault of the same subject is told again after this long, not with each heartbeat.
TOLD_AGAIN_SECONDS: Final = 60.0
TOLD_MAX: Final = 1000

_log = structlog.get_logger()


class Heartbeats:
    """Reads the heartbeat stream; `latest` has what the answers need."""

    def __init__(self, bus: Bus, book: Book, *, clock: Clock, telemetry: Telemetry) -> None:
        self.latest: dict[str, Heard] = {}
        self.read = 0
        self._bus = bus
        self._book = book
        self._clock = clock
        self._telemetry = telemetry
        self._told: dict[tuple[str, str], float] = {}
        self._asked: set[str] = set()  # nodes whose heartbeat from before our start was looked for

    async def watch(self) -> None:
        """For ever. An outage or a stream made anew only means that nothing is heard for a while."""
        away = False
        while True:
            try:
                facts = await self._bus.stream(HEARTBEAT_STREAM)
                if facts is not None:
                    tail = await self._bus.tail(HEARTBEAT_STREAM, start_seq=facts.last_seq + 1)
                    away = False
                    try:
                        await self._follow(tail)
                    finally:
                        await tail.close()
            except BusError as error:
                if not away:
                    _log.warning("heartbeats are not read", why=str(error))
                away = True
            await self._clock.sleep(RETRY_SECONDS)

    async def _follow(self, tail: Tail) -> None:
        self._asked.clear()
        while True:
            for node in self._book.state.nodes.keys() - self._asked:
                self._asked.add(node)
                before = await self._bus.last(HEARTBEAT_STREAM, heartbeat(node))
                if before is not None and node not in self.latest:
                    age = (self._clock.now_ns() - before.received_ns) / 1e9
                    self._take(before, self._clock.monotonic() - max(0.0, age))
            for message in await tail.batch(max_messages=BATCH_MAX, wait_seconds=WAIT_SECONDS):
                self.read += 1
                self._take(message, self._clock.monotonic())

    def _take(self, message: Message, at: float) -> None:
        record = decode(message.seq, message.subject, message.received_ns, message.body)
        beat = record.data
        if not isinstance(beat, Heartbeat):
            if isinstance(beat, Malformed):
                self._find(record, beat.code, beat.text)
            elif isinstance(beat, Unknown):
                self._find(
                    record,
                    "unknown_kind",
                    f"{beat.type[:200]!r} is not a kind this version knows; it was skipped",
                )
            else:
                self._find(record, "wrong_stream", f"{record.kind} does not belong on the heartbeat stream")
            return
        if record.subject != f"rig.heartbeat.{beat.node}":
            self._find(
                record,
                "wrong_subject",
                f"a heartbeat of node {beat.node} does not belong on {record.subject}",
            )
            return
        if beat.node not in self.latest and len(self.latest) >= NODES_MAX:
            return
        told = instant(record.time)
        skew = None if told is None else (told - record.received_ns) / 1e9
        if skew is None:
            self._find(
                record, "invalid_time", f"heartbeat: time {record.time[:64]!r} is not RFC 3339 with a zone"
            )
        elif abs(skew) > SKEW_SECONDS_MAX:
            side = "ahead of" if skew > 0 else "behind"
            self._find(
                record,
                "clock_skew",
                f"the clock of node {beat.node} is {abs(skew):.0f} s {side} the server's",
            )
        self.latest[beat.node] = Heard(beat, message.seq, at, skew)

    def _find(self, record: Record, code: str, text: str) -> None:
        self._telemetry.findings.add(1, {"code": code, "stream": HEARTBEAT_STREAM})
        now = self._clock.monotonic()
        told = self._told.get((record.subject, code))
        if told is not None and now - told < TOLD_AGAIN_SECONDS:
            return
        if len(self._told) >= TOLD_MAX:
            self._told.clear()
        self._told[record.subject, code] = now
        finding = Finding(
            seq=record.seq, code=code, text=text[:500], subject=record.subject[:200], event_id=record.id[:200]
        )
        self._book.note(HEARTBEAT_STREAM, finding, record.received_ns)
        _log.warning("finding", stream=HEARTBEAT_STREAM, seq=record.seq, code=code, text=finding.text,
                     subject=finding.subject)  # fmt: skip

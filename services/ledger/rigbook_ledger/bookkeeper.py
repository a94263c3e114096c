"""The bookkeeper follows the log: reads what is there, folds it into the book, holds it against the invariants.

It begins only on a log that continues what the book knows. When the log is another one, has lost its
end, or skips events, it stops folding and says so (safe mode); questions are answered from the book
as it stands, and the log is looked at again until it continues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
from rigbook_bus.protocol import BusDenied, BusError, BusUnavailable, Link
from rigbook_schemas.subjects import LEDGER_STREAM
from rigbook_schemas.wire import rfc3339

from rigbook_ledger.audit import audit_touched
from rigbook_ledger.continuity import LogAbsent, LogDiscontinued, LogRecovered, check_continues, known_of
from rigbook_ledger.entries import AUDIT
from rigbook_ledger.streams import ensure_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus, Message, Tail
    from rigbook_bus.telemetry import Telemetry

    from rigbook_ledger.book import Book
    from rigbook_ledger.entries import Transition
    from rigbook_ledger.orders import Orders

__all__ = ["Bookkeeper", "StreamMisfit"]

# Folding this many takes about 10 ms, for which the loop answers nobody.
BATCH_MAX: Final = 1000
RECHECK_SECONDS: Final = 2.0
RETRY_SECONDS_MIN: Final = 0.25
RETRY_SECONDS_MAX: Final = 5.0

_log = structlog.get_logger()


class StreamMisfit(Exception):
    """A stream is there with other settings than Rigbook needs; the text names the difference."""

    code = "stream_misfit"


class Bookkeeper:
    """Keeps one book in step with the log."""

    def __init__(
        self, bus: Bus, book: Book, orders: Orders, *, replicas: int, clock: Clock, telemetry: Telemetry,
        settled: Callable[[], None],
    ) -> None:  # fmt: skip
        self.safe_mode = ""  # why nothing is folded, "" = all is well
        self.caught_up = False
        self._bus = bus
        self._book = book
        self._orders = orders
        self._replicas = replicas
        self._clock = clock
        self._telemetry = telemetry
        self._settled = (
            settled  # called when caught up, or in safe mode: the first honest answer can be given
        )
        self._goal = 0  # last sequence of the log when we began
        self._began_at = 0
        self._began = clock.monotonic()
        self._reconnected = False
        self._bindings_told = 0
        bus.on_link(self._on_link)

    async def follow(self) -> None:
        """For ever. Raises StreamMisfit, and LogRecovered when the book must be made anew from the log."""
        pause = RETRY_SECONDS_MIN
        while True:
            try:
                tail = await self._begin()
                pause = RETRY_SECONDS_MIN
                try:
                    await self._read(tail)
                finally:
                    self.caught_up = False
                    await tail.close()
            except LogAbsent:
                await self._clock.sleep(pause)
            except LogRecovered:
                raise
            except LogDiscontinued as error:
                self._enter_safe_mode(str(error))
                await self._clock.sleep(RECHECK_SECONDS)
            except BusError as error:
                _log.warning("the log cannot be read; trying again", why=str(error), after_seconds=pause)
                await self._clock.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS_MAX)

    # -- beginning ------------------------------------------------------------------------------

    async def _begin(self) -> Tail:
        """Raises LogDiscontinued, StreamMisfit, BusError."""
        if self._book.state.position == 0:
            await self._ensure_streams()
        await self._check()
        if self._book.state.position:
            await self._ensure_streams()
        facts = await self._bus.stream(LEDGER_STREAM)
        if facts is None:
            raise LogDiscontinued(f"stream {LEDGER_STREAM} does not exist")
        position = self._book.state.position
        if position == 0 and facts.last_seq and facts.first_seq > 1:
            raise LogDiscontinued(
                f"stream {LEDGER_STREAM} begins at {facts.first_seq}: its beginning is lost"
            )
        self._goal, self._began_at, self._began = facts.last_seq, position, self._clock.monotonic()
        tail = await self._bus.tail(LEDGER_STREAM, start_seq=position + 1)
        if self.safe_mode:
            _log.warning("the log continues what was known; folding again", position=position)
            self.safe_mode = ""
        return tail

    async def _ensure_streams(self) -> None:
        try:
            await ensure_streams(self._bus, replicas=self._replicas)
        except BusDenied as error:
            raise StreamMisfit(str(error)) from error

    async def _check(self) -> None:
        state = self._book.state
        known = known_of(self._book.stream_created_ns, state) if state.position else None
        self._book.stream_created_ns = await check_continues(self._bus, known)

    def _enter_safe_mode(self, why: str) -> None:
        if why != self.safe_mode:
            _log.error(
                "safe mode: the log does not continue what is in the book; nothing is folded, questions are answered "
                "from the book. See `rigbook doctor`, then `rigbook recover`",
                why=why, position=self._book.state.position, file=str(self._book.store.path),
            )  # fmt: skip
        self.safe_mode = why
        self._settled()

    def _on_link(self, link: Link, why: str) -> None:
        if link is Link.CONNECTED:
            # The server may have come back with a shorter log that grew again: look before folding on.
            self._reconnected = True
            _log.info("connected to the bus", why=why)
        else:
            _log.warning("the bus is away", link=link.value, why=why)

    # -- reading --------------------------------------------------------------------------------

    async def _read(self, tail: Tail) -> None:
        """Until the tail is of no use any more. Raises LogDiscontinued, BusError."""
        while True:
            self._see_caught_up()
            try:
                messages = await tail.batch(max_messages=BATCH_MAX, wait_seconds=None)
            except BusUnavailable as error:
                await self._check()  # says what is wrong, if it still is
                _log.warning("the log is read anew", why=str(error))
                await self._clock.sleep(RETRY_SECONDS_MIN)
                return
            if self._reconnected:
                await self._check()
                self._reconnected = False
            if messages:
                await self._book.room()
                self._fold(messages)

    def _fold(self, messages: Sequence[Message]) -> None:
        began = self._clock.monotonic()
        live = self.caught_up
        transitions: list[Transition] | None = [] if live else None
        try:
            self._book.fold(messages, transitions)
        except LogDiscontinued:
            self._after(live, transitions or (), len(messages), began)  # what came before the gap
            raise
        self._after(live, transitions or (), len(messages), began)

    def _after(self, live: bool, transitions: Sequence[Transition], count: int, began: float) -> None:  # noqa: FBT001
        state = self._book.state
        for finding in audit_touched(state):
            self._telemetry.findings.add(1, {"code": finding.code, "stream": AUDIT})
            self._book.note(AUDIT, finding, state.received_ns)
            _log.error(
                "an invariant of ownership is violated", code=finding.code, text=finding.text, seq=finding.seq
            )
        for finding in state.touched.findings:
            self._telemetry.findings.add(1, {"code": finding.code, "stream": LEDGER_STREAM})
            if live:
                _log.warning("finding", stream=LEDGER_STREAM, seq=finding.seq, code=finding.code, text=finding.text,
                             subject=finding.subject)  # fmt: skip
        for t in transitions:
            with self._telemetry.span("ledger.fold", t.traceparent, kind=t.kind, seq=t.seq, demand=t.demand):
                _log.info(
                    "demand", demand=t.demand, epoch=t.epoch or None, node=",".join(t.nodes) or None, seq=t.seq,
                    kind=t.kind, before=t.before or None, after=t.after,
                )  # fmt: skip
        if live:
            self._orders.want(state.touched.nodes)
        state.touched.clear()
        self._telemetry.folded.add(count)
        self._telemetry.seconds.record(self._clock.monotonic() - began, {"step": "fold"})
        self._telemetry.gauge.add(len(state.bindings) - self._bindings_told, {"name": "bindings"})
        self._bindings_told = len(state.bindings)

    def _see_caught_up(self) -> None:
        state = self._book.state
        if self.caught_up or state.position < self._goal:
            return
        self.caught_up = True
        seconds = self._clock.monotonic() - self._began
        events = state.position - self._began_at
        _log.info(
            "caught up with the log", position=state.position, events=events, seconds=round(seconds, 3),
            per_second=round(events / seconds) if seconds > 0 else None,
            as_of=rfc3339(state.received_ns) if state.position else None,
        )  # fmt: skip
        self._orders.want(state.nodes)
        self._settled()

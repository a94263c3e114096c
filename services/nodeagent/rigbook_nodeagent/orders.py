"""The agent's order book: which bindings it must run and which it must stop, as it was told.

Orders come from a durable consumer in the sequence of the log. The book is written before an order is
acknowledged, one JSON line each, flushed but not synced: it must survive `kill -9` of the agent. After a
power cut nothing runs any more, and what the ledger still holds for this node is asked for at the start.
"""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.events import Adopted, Bound, EvictionOrdered
from rigbook_schemas.values import (
    CardBaseline,
    EvictionReason,
    NodeShare,
    Owner,
    Restart,
    StopScope,
    Workload,
)
from rigbook_schemas.wire import instant

if TYPE_CHECKING:
    from pathlib import Path

    from rigbook_schemas.wire import Record

__all__ = ["Order", "OrderBook", "Stop"]

# Closed orders in the file before it is written anew at the next start-up or compaction.
COMPACT_AFTER: Final = 5_000
# Closed epochs kept in mind, so that nothing delivered again is begun again. Orders do not come in order:
# what an agent that died had read and not acknowledged comes again after newer ones. Twice the consumer's
# `max_ack_pending`; below the oldest one kept (`floor`) every epoch counts as closed.
CLOSED_KEPT: Final = 2_000
# Stop orders kept for bindings that have not come yet: a `bound` whose delivery was lost comes again after the
# stop, and must not be begun then.
EARLY_KEPT: Final = 2_000
# Stands for the boot in a book that waits for the ledger's word.
UNTRUSTED: Final = "?"


class Stop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stop order for one epoch; the latest one counts."""

    epoch: int
    demand: str
    seq: int
    event_id: str
    reason: EvictionReason
    grace_seconds: float = 10.0
    scope: StopScope = StopScope.COMPONENTS
    by: str = ""
    traceparent: str = ""
    insist: bool = False  # kill also what was asked to save and did not answer


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One binding's share on this node, and the stop order for it if there is one."""

    epoch: int
    demand: str
    project: str
    event_id: str
    share: NodeShare
    owner: Owner | None = None
    restart: Restart = Restart()
    workload: Workload = Workload.BATCH
    traceparent: str = ""
    bound_ns: int = 0  # the server's clock
    stop: Stop | None = None
    started: bool = False  # `started` went out: if nothing is found later, it ended; it is not begun again
    baseline: tuple[CardBaseline, ...] = ()  # its cards right before its start
    attempt: int = 1  # which start of it that is, or will be
    orphan: bool = False  # of a log that was lost and recovered without us: no log knows it


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the file: at most one of the first four, and how far the log was read."""

    order: Order | None = None
    stop: Stop | None = None
    started: int = 0
    baseline: tuple[CardBaseline, ...] = ()
    again: int = 0
    attempt: int = 0  # of `again`
    closed: int = 0
    seq: int = 0
    floor: int = 0
    known: int = 0
    boot: str = ""  # of the machine, when the book was written anew


class OrderBook:
    """Open orders by epoch. Not thread-safe; owned by the agent's loop."""

    def __init__(self, node: str, path: Path) -> None:
        self._node = node
        self._path = path
        self._file: IO[bytes] | None = None
        self._closed_lines = 0
        self.open_orders: dict[int, Order] = {}
        self._closed: dict[int, None] = {}
        self._early: dict[int, Stop] = {}  # by epoch: the stop came before the binding
        self.floor = 0  # at or below it, what is not open is closed
        self.position = 0  # highest sequence read so far; orders before it may still be on their way
        self.known_to = 0  # everything on the log up to here that concerns this node is in the book
        self.damaged_lines = 0
        self.trusted = True
        self._boot = ""

    def open(self, boot: str = "") -> None:
        """Read the book and write it anew without what is closed.

        `trusted` is False when there was none, or it is of another boot of the machine: lines of it that were
        never on the disk may be missing, so what is open and what is closed has to be asked for (`begin_anew`).
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            lines = []
        written = ""
        for raw in lines:
            try:
                line = msgspec.json.decode(raw, type=_Line)
            except msgspec.MsgspecError:
                self.damaged_lines += 1  # the last line of an agent that was killed while writing
                continue
            written = line.boot or written
            self._fold(line)
        self.trusted = bool(lines) and written in ("", boot)
        self._boot = boot if self.trusted else UNTRUSTED
        self._compact()

    def begin_anew(self, position: int, orders: list[Order], *, boot: str) -> None:
        """What the ledger says at `position` is what is open; all else up to there is closed."""
        self.open_orders = {o.epoch: self._merged(o) for o in orders}
        self._fold(_Line(known=position))
        self._closed.clear()
        self._early.clear()
        self.trusted, self._boot = True, boot
        self._compact()

    def _merged(self, told: Order) -> Order:
        """What is left of the book may say more than the ledger's view: a stop order, a later start."""
        ours = self.open_orders.get(told.epoch)
        if ours is None:
            return told
        latest = max(told, ours, key=lambda order: (order.attempt, order.started))
        return msgspec.structs.replace(
            told, stop=ours.stop or told.stop, attempt=latest.attempt, started=latest.started
        )

    def take(self, record: Record) -> Order | Stop | None:
        """Fold one record of the log; what is new in it for this node, or None.

        What is open is not opened twice, and what was closed is never opened again.
        """
        data = record.data
        line: _Line | None = None
        if isinstance(data, Bound) and not self._known(record.seq):
            share = next((s for s in data.shares if s.node == self._node), None)
            if share is not None:
                order = Order(
                    epoch=record.seq,
                    demand=data.demand,
                    project=data.project,
                    event_id=record.id,
                    share=share,
                    owner=data.owner,
                    restart=data.restart,
                    workload=data.workload,
                    traceparent=record.traceparent,
                    bound_ns=record.received_ns,
                )
                line = _Line(order=order, seq=record.seq)
        elif isinstance(data, Adopted):
            adopted = self._adopted(record, data)
            line = _Line(order=adopted, seq=record.seq) if adopted is not None else None
        elif isinstance(data, EvictionOrdered) and self._node in data.nodes:
            stop = Stop(
                epoch=data.epoch,
                demand=data.demand,
                seq=record.seq,
                event_id=record.id,
                reason=data.reason,
                grace_seconds=data.grace_seconds,
                scope=data.scope,
                by=data.by,
                insist=data.insist,
                traceparent=record.traceparent,
            )
            line = _Line(stop=stop, seq=record.seq)
        if line is None:
            self.position = max(self.position, record.seq)
            return None
        self._fold(line)
        self._write(line)
        return line.order or line.stop

    def _adopted(self, record: Record, data: Adopted) -> Order | None:
        """A binding that an operator told again. One that is open stays as it is; one that was closed ended while
        the log was lost: it is opened as something that was begun, so that its end is told again.
        """
        share = next((s for s in data.shares if s.node == self._node), None)
        if share is None or data.epoch in self.open_orders:
            return None
        was_closed = data.epoch in self._closed or data.epoch <= self.floor
        self._closed.pop(data.epoch, None)
        return Order(
            epoch=data.epoch,
            demand=data.demand,
            project=data.spec.project,
            event_id=record.id,
            share=share,
            owner=data.spec.owner,
            restart=data.spec.restart,
            workload=data.spec.workload,
            traceparent=record.traceparent,
            bound_ns=instant(data.bound) or record.received_ns,
            started=was_closed or self._node in data.started,
        )

    def fence(self, last: int, event_id: str) -> list[Stop]:
        """The log was recovered, and nobody there knew of anything beyond `last`: what we were told beyond it has
        no right, and its epochs may be given again. The stops of what is open.
        """
        self.floor, self.known_to = min(self.floor, last), min(self.known_to, last)
        self.position = min(self.position, last)
        self._closed = {epoch: None for epoch in self._closed if epoch <= last}
        self._early = {epoch: stop for epoch, stop in self._early.items() if epoch <= last}
        stops: list[Stop] = []
        for epoch, order in self.open_orders.items():
            if epoch > last:
                stop = Stop(
                    epoch=epoch, demand=order.demand, seq=2**62, event_id=event_id,
                    reason=EvictionReason.FENCED, scope=StopScope.EVERYTHING, by="recovery",
                )  # fmt: skip
                self.open_orders[epoch] = msgspec.structs.replace(order, stop=stop, orphan=True)
                stops.append(stop)
        self._compact()
        return stops

    def reconcile(self, position: int, orders: list[Order]) -> list[Order | Stop]:
        """Hold the book against what the ledger says this node holds at `position`; what was new in it.

        Deliveries get lost and come again late, after newer ones. From here on nothing at or before `position` can
        surprise: what is live there is open, what is to be stopped is marked so, all else is closed for ever.
        """
        new: list[Order | Stop] = []
        for order in orders:
            mine = self.open_orders.get(order.epoch)
            line: _Line | None = None
            if mine is None and not self._known(order.epoch):
                line = _Line(order=order)
            elif mine is not None and mine.stop is None and order.stop is not None:
                line = _Line(stop=order.stop)
            if line is not None:
                self._fold(line)
                self._write(line)
                new.append(self.open_orders[order.epoch] if line.order is not None else order.stop or order)
        if position > self.known_to:
            self._fold(_Line(known=position))
            self._write(_Line(known=position))
            self._closed_lines += 1
        self.flush()
        return new

    def mark_started(self, epoch: int, baseline: tuple[CardBaseline, ...] = ()) -> None:
        """It runs: from here on "nothing found" means that it ended. `baseline`: its cards right before."""
        order = self.open_orders.get(epoch)
        if order is not None and not order.started:
            line = _Line(started=epoch, baseline=baseline)
            self._fold(line)
            self._write(line)
            self.flush()

    def mark_attempt(self, epoch: int, attempt: int) -> None:
        """Its end was told, and it is to be started again: an agent that restarts goes on counting from here."""
        if epoch in self.open_orders:
            self._fold(_Line(again=epoch, attempt=attempt))
            self._write(_Line(again=epoch, attempt=attempt))
            self.flush()

    def close_order(self, epoch: int) -> None:
        """The binding was released: forget it."""
        if epoch not in self.open_orders:
            return
        self._fold(_Line(closed=epoch))
        self._write(_Line(closed=epoch))
        self._closed_lines += 1
        if self._closed_lines >= COMPACT_AFTER:
            self._compact()

    def flush(self) -> None:
        """Hand what was written to the kernel: from here it survives the agent's death."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _known(self, epoch: int) -> bool:
        return epoch in self.open_orders or epoch in self._closed or epoch <= self.floor

    def _fold(self, line: _Line) -> None:
        self.position = max(self.position, line.seq)
        self.known_to = max(self.known_to, line.known)
        self.floor = max(self.floor, line.floor, line.known)
        if line.order is not None:
            self.open_orders[line.order.epoch] = line.order
            early = self._early.pop(line.order.epoch, None)
            if early is not None and early.demand == line.order.demand:
                self._stop(early)
        elif line.stop is not None:
            self._stop(line.stop)
        elif line.started:
            order = self.open_orders.get(line.started)
            if order is not None:
                self.open_orders[order.epoch] = msgspec.structs.replace(
                    order, started=True, baseline=line.baseline
                )
        elif line.again:
            order = self.open_orders.get(line.again)
            if order is not None:
                self.open_orders[order.epoch] = msgspec.structs.replace(
                    order, started=False, attempt=line.attempt
                )
        elif line.closed:
            self.open_orders.pop(line.closed, None)
            self._closed[line.closed] = None
            if len(self._closed) > CLOSED_KEPT:
                oldest = next(iter(self._closed))
                del self._closed[oldest]
                self.floor = max(self.floor, oldest)

    def _stop(self, stop: Stop) -> None:
        order = self.open_orders.get(stop.epoch)
        if order is not None:
            if order.demand == stop.demand and (order.stop is None or order.stop.seq < stop.seq):
                self.open_orders[order.epoch] = msgspec.structs.replace(order, stop=stop)
        elif not self._known(stop.epoch):
            early = self._early.get(stop.epoch)
            if early is None or early.seq < stop.seq:
                self._early[stop.epoch] = stop
            if len(self._early) > EARLY_KEPT:
                del self._early[next(iter(self._early))]

    def _write(self, line: _Line) -> None:
        assert self._file is not None, "open() first"
        self._file.write(msgspec.json.encode(line) + b"\n")

    def _compact(self) -> None:
        self.close()
        fresh = self._path.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(
                msgspec.json.encode(
                    _Line(seq=self.position, floor=self.floor, known=self.known_to, boot=self._boot)
                )
                + b"\n"
            )
            for epoch in self._closed:
                file.write(msgspec.json.encode(_Line(closed=epoch)) + b"\n")
            for stop in self._early.values():
                file.write(msgspec.json.encode(_Line(stop=stop)) + b"\n")
            for order in self.open_orders.values():
                file.write(msgspec.json.encode(_Line(order=order)) + b"\n")
        os.replace(fresh, self._path)  # noqa: PTH105 - the atomicity is the point
        self._file = self._path.open("ab")
        self._closed_lines = 0

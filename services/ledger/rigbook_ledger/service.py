"""The ledger service: keeps the book of the log, answers questions about it, makes the agents' consumers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from rigbook_bus.telemetry import Telemetry

from rigbook_ledger.answers import Answers
from rigbook_ledger.book import open_book
from rigbook_ledger.bookkeeper import Bookkeeper
from rigbook_ledger.continuity import LogRecovered
from rigbook_ledger.heartbeat import Heartbeats
from rigbook_ledger.orders import Orders
from rigbook_ledger.store import Store, move_aside

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus

__all__ = ["FILE", "Options", "serve"]

# The book's file in the data folder. Deletable while the ledger is down.
FILE: Final = "ledger.sqlite3"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a ledger is run. Each instance has its own data folder."""

    data: Path
    instance: str = "ledger-1"
    replicas: int = 1  # of the streams, when they are made
    snapshot_every: int = 20_000  # events between two snapshots; a restart folds at most so many


async def serve(
    bus: Bus,
    options: Options,
    *,
    clock: Clock,
    new_id: Callable[[], str],
    telemetry: Telemetry | None = None,
    ready: asyncio.Event | None = None,
    open_store: Callable[[Path], Awaitable[Store]] = Store.open,
) -> None:
    """Run until cancelled; then the last entries and a snapshot are written.

    When the log was recovered, the book is moved aside (it may be the only copy of what was lost) and made
    anew from the log. `ready` is set once questions are answered and the log is caught up with (or safe mode is entered).
    Raises StoreError (folder in use, file unusable), StreamMisfit, BusError when the bus is not there at
    the start.
    """
    del new_id  # the ledger is nobody's author
    telemetry = telemetry or Telemetry("ledger")
    while True:
        # A task of its own: a TaskGroup forgets that it was cancelled when one of its own fails at that moment.
        keeping = asyncio.create_task(_keep(bus, options, clock, telemetry, ready, open_store))
        try:
            await asyncio.wait({keeping})
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        try:
            keeping.result()
        except LogRecovered as recovered:
            aside = move_aside(options.data / FILE)
            structlog.get_logger().bind(instance=options.instance).warning(
                "the log was recovered; the book is moved aside and made anew",
                why=str(recovered),
                aside=str(aside),
            )


async def _keep(
    bus: Bus,
    options: Options,
    clock: Clock,
    telemetry: Telemetry,
    ready: asyncio.Event | None,
    open_store: Callable[[Path], Awaitable[Store]],
) -> None:
    log = structlog.get_logger().bind(instance=options.instance)
    settled = asyncio.Event()
    began = clock.monotonic()
    book = await open_book(
        bus, options.data / FILE, clock=clock, snapshot_every=options.snapshot_every, open_store=open_store
    )
    try:
        log.info("the book is open", position=book.state.position, file=str(book.store.path),
                 seconds=round(clock.monotonic() - began, 3))  # fmt: skip
        orders = Orders(bus, book, clock=clock)
        keeper = Bookkeeper(
            bus,
            book,
            orders,
            replicas=options.replicas,
            clock=clock,
            telemetry=telemetry,
            settled=settled.set,
        )
        heartbeats = Heartbeats(bus, book, clock=clock, telemetry=telemetry)
        answers = Answers(bus, book, keeper, heartbeats, instance=options.instance, clock=clock)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(book.keep(), name="ledger keep")
            tasks.create_task(keeper.follow(), name="ledger follow")
            tasks.create_task(orders.make(), name="ledger orders")
            tasks.create_task(answers.serve(), name="ledger answers")
            await answers.open.wait()
            await settled.wait()
            tasks.create_task(heartbeats.watch(), name="ledger heartbeats")
            if ready is not None:
                ready.set()
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
    finally:
        await book.close()
        log.info("the book is closed", position=book.state.position, written=book.written)

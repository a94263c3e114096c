"""Running one service as a process of its own: its options, its bus, and how its starter hears that it is ready.

A service module has `Options` (a msgspec struct) and `serve(bus, options, *, clock, new_id, telemetry,
ready)`. It is loaded by name, so that a command that starts a placer needs nothing of the ledger's store.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import msgspec

from rigbook.exitcodes import Exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus, Link

__all__ = ["MODULES", "Start", "run_part"]

MODULES: Final = {
    "ledger": "rigbook_ledger.service",
    "placer": "rigbook_placer.service",
    "reaper": "rigbook_reaper.service",
    "agent": "rigbook_nodeagent.service",
}
# Causes that trying again does not mend: the options, or somebody else who is there already.
FINAL_CODES: Final = frozenset(
    {"node_already_served", "store_in_use", "ledger_in_use", "invalid_name", "invalid_option"}
)


class _Service(Protocol):
    """What every service module offers."""

    Options: type[Any]

    async def serve(
        self,
        bus: Bus,
        options: Any,
        *,
        clock: Clock,
        new_id: Callable[[], str],
        telemetry: Any = None,
        ready: asyncio.Event | None = None,
    ) -> None: ...


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a service, beside its own options."""

    service: str
    url: str
    options: dict[str, Any]  # those that the service knows are taken
    credentials: str = ""
    ready_fd: int = -1  # a line is written there when it is ready
    lifeline: bool = False  # standard input is a pipe of our starter: its end is ours
    log_form: str = "auto"
    log_level: str = "info"


def run_part(start: Start) -> int:
    """Run until SIGTERM or SIGINT. The exit code: 0 asked to end, 1 a bug, 2 options that cannot work, 3 no bus."""
    from rigbook_bus.runner import run_service

    module = cast("_Service", importlib.import_module(MODULES[start.service]))
    known = {name: value for name, value in start.options.items() if name in module.Options.__struct_fields__}
    outcome = [int(Exit.OK)]
    code = run_service(
        start.service,
        lambda: _serve(start, module, module.Options(**known), outcome),
        log_form=start.log_form,
        log_level=start.log_level,
    )
    return code or outcome[0]


async def _serve(start: Start, module: _Service, options: Any, outcome: list[int]) -> None:
    import structlog
    from rigbook_bus.clock import SystemClock
    from rigbook_bus.jetstream import JetStreamBus
    from rigbook_bus.protocol import BusError
    from rigbook_bus.runner import random_id

    log = structlog.get_logger()
    if start.lifeline:
        asyncio.get_running_loop().add_reader(0, _lifeline)
    name = f"{start.service}-{getattr(options, 'node', '') or getattr(options, 'instance', '')}".strip("-")
    try:
        bus = await JetStreamBus.connect(
            start.url,
            name=name,
            credentials=start.credentials or None,
            wait_seconds=None if start.lifeline else 30.0,
        )
    except BusError as error:
        log.error("no bus", code=error.code, why=str(error))  # noqa: TRY400 - no traceback for a wrong address
        outcome[0] = Exit.NO_ANSWER
        return
    bus.on_link(lambda link, why: _told(log, link, why))
    ready = asyncio.Event()
    telling = asyncio.create_task(_tell_ready(ready, start.ready_fd))
    try:
        await module.serve(bus, options, clock=SystemClock(), new_id=random_id, ready=ready)
    except Exception as error:
        code = getattr(error, "code", "")
        if code not in FINAL_CODES and not isinstance(error, ValueError):
            raise
        log.error("cannot run like this", code=code or "invalid_option", why=str(error))  # noqa: TRY400
        outcome[0] = Exit.USAGE
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling
        await bus.close()


def _told(log: Any, link: Link, why: str) -> None:
    if link.value == "away":
        log.warning("the bus is away", why=why)
    else:
        log.info("bus", link=link.value, why=why)


def _lifeline() -> None:
    """Our starter never writes there: readable means that it is gone."""
    asyncio.get_running_loop().remove_reader(0)
    os.kill(os.getpid(), signal.SIGTERM)


async def _tell_ready(ready: asyncio.Event, descriptor: int) -> None:
    await ready.wait()
    if descriptor >= 0:
        os.write(descriptor, b"ready\n")
        os.close(descriptor)

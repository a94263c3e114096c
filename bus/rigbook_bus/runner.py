"""Running a service as a process: logging, signals, the connection, a bounded end.

Exit codes: 0 stopped as asked, 1 a bug or an invariant, 2 unusable options, 3 the bus closed for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from typing import TYPE_CHECKING, Final

import structlog

from rigbook_bus.telemetry import configure_logging, configure_tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["Ids", "random_id", "run_service"]

# How long a service may take to put its things in order after SIGTERM.
STOP_SECONDS_MAX: Final = 10.0

Ids = "Callable[[], str]"


def random_id() -> str:
    """32 hexadecimal digits; 128 random bits."""
    return secrets.token_hex(16)


def run_service(
    service: str,
    main: Callable[[], Coroutine[None, None, None]],
    *,
    log_form: str = "auto",
    log_level: str = "info",
) -> int:
    """Run `main()` until it ends or a SIGTERM/SIGINT cancels it. Returns the exit code."""
    configure_logging(service, form=log_form, level=log_level)
    configure_tracing(service)
    return asyncio.run(_supervise(service, main))


async def _supervise(service: str, main: Callable[[], Coroutine[None, None, None]]) -> int:
    log = structlog.get_logger()
    task = asyncio.create_task(main(), name=service)
    loop = asyncio.get_running_loop()
    asked: list[str] = []

    def stop(name: str) -> None:
        asked.append(name)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    try:
        await asyncio.wait({task})
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    if task.cancelled():
        log.info("stopped", by=asked[0] if asked else "cancellation")
        return 0
    error = task.exception()
    if error is None:
        return 0
    log.error("the service ended by an error", code=getattr(error, "code", "bug"), exc_info=error)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    return 1

"""Ends processes of an epoch that no engine of this agent lists: only a card shows them.

A process keeps our labels in its environment wherever it moves itself, so it is ours for certain. Everything
else on a card is foreign, and is never signalled.
"""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Final

from rigbook_schemas.values import StopScope

from rigbook_nodeagent.engines.procfs import send_signal, stat_of
from rigbook_nodeagent.engines.protocol import EngineError
from rigbook_nodeagent.gpus.protocol import GpusError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    import structlog
    from rigbook_bus.clock import Clock
    from rigbook_schemas.values import CardObservation

    from rigbook_nodeagent.engines.protocol import Engines
    from rigbook_nodeagent.orders import Stop

__all__ = ["end_strays", "stop_without_right", "strays_of"]

POLL_SECONDS: Final = 0.1
RETRY_SECONDS: Final = 2.0
# In the middle of an exec a process has no environment to know it by: one look that finds nothing is not enough.
LOOKS: Final = 2
LOOK_AGAIN_SECONDS: Final = 0.2
ANY_DEMAND: Final = "unknown"  # a stop order for something whose demand nobody knows
INSIST_SECONDS: Final = 5.0  # from SIGKILL to giving up: longer means the kernel holds it (state D)


async def stop_without_right(
    stop: Stop,
    *,
    engines: Callable[[], Sequence[Engines]],
    sample: Callable[[], Awaitable[Sequence[CardObservation]]],
    clock: Clock,
    log: structlog.stdlib.BoundLogger,
) -> None:
    """End all that runs under an epoch that is in no book: what engines list, then what only a card shows."""
    quiet = 0
    while quiet < LOOKS:
        if quiet:
            await clock.sleep(LOOK_AGAIN_SECONDS)
        quiet += 1
        try:
            for engine in engines():
                for running in await engine.inventory():
                    if running.epoch == stop.epoch and stop.demand in (running.demand, ANY_DEMAND):
                        quiet = 0
                        log.warning(
                            "stopping what has no right to run", demand=running.demand, epoch=stop.epoch
                        )
                        await engine.stop(
                            running, grace_seconds=stop.grace_seconds, scope=StopScope.EVERYTHING
                        )
                        with contextlib.suppress(EngineError):
                            await engine.remove(running)
            demand = "" if stop.demand == ANY_DEMAND else stop.demand
            strays = strays_of(await sample(), epoch=stop.epoch, demand=demand)
            if strays:
                quiet = 0
                log.warning("stopping what only a card shows", pids=sorted(strays), epoch=stop.epoch)
                await end_strays(strays, grace_seconds=stop.grace_seconds, clock=clock)
        except (EngineError, GpusError) as error:
            quiet = 0
            log.warning("stop failed; will try again", epoch=stop.epoch, why=str(error))
            await clock.sleep(RETRY_SECONDS)


def strays_of(sample: Iterable[CardObservation], *, epoch: int, demand: str) -> dict[int, int]:
    """Living processes of this epoch on any card: pid to start time. `sample` is attributed; demand "" = any."""
    found: dict[int, int] = {}
    for card in sample:
        for process in card.processes or ():
            if process.epoch != epoch or demand not in {"", process.demand}:
                continue
            stat = stat_of(process.pid)
            if stat is not None and stat.alive:
                found[process.pid] = stat.start_ticks
    return found


async def end_strays(strays: dict[int, int], *, grace_seconds: float, clock: Clock) -> None:
    """SIGTERM, the grace, SIGKILL. Raises EngineError for one that does not end, or may not be signalled."""
    for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, INSIST_SECONDS)):
        until = clock.monotonic() + seconds
        try:
            for pid, start_ticks in strays.items():
                send_signal(pid, start_ticks, number)
        except PermissionError as error:
            raise EngineError(f"not allowed to signal a process on a card: {error}") from error
        while strays and clock.monotonic() < until:
            await clock.sleep(POLL_SECONDS)
            strays = {pid: start for pid, start in strays.items() if _lives(pid, start)}
        if not strays:
            return
    raise EngineError(
        f"does not end after SIGKILL: {sorted(strays)}; state D is held by a driver: reboot the node"
    )


def _lives(pid: int, start_ticks: int) -> bool:
    stat = stat_of(pid)
    return stat is not None and stat.alive and stat.start_ticks == start_ticks

"""Time as a parameter: a service asks its `Clock`, so that a simulation can own time."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Two clocks that must not be mixed up: wall time is data, monotonic time measures."""

    def now_ns(self) -> int:
        """Wall clock, Unix nanoseconds. May step; goes into events, never into a time-out."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never steps."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clocks."""

    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

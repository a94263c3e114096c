"""An event loop whose time jumps to the next timer: a test of minutes takes milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

START_NS = 1_790_000_000 * 10**9


class _Jumping(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found:
            assert timeout is not None, "everything waits, and nothing will ever happen"
            self.now += max(0.0, timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything can run."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        # A timer is due within the loop's clock resolution; rounding keeps sums of steps from falling short.
        return round(self._jumping.now, 9)


class VirtualClock:
    """`rigbook_bus.clock.Clock` on the running loop's time."""

    def now_ns(self) -> int:
        return START_NS + int(self.monotonic() * 1e9)

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtual(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)

"""An event loop that owns time, order and death: one seed, one run.

- Time stands still while anything can run, then jumps to the next timer. No threads, no sockets, no sleep.
- Callbacks that are ready together run in an order drawn from the seed. asyncio promises first come first
  served; nothing of ours may lean on it, since over a real network it does not hold between two connections.
- Each callback belongs to a `Process` (by its context). A process can be killed between any two awaits: no
  `finally`, no last flush, as with `kill -9`; or be stopped and go on later, as with SIGSTOP.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import random
from collections import deque
from typing import TYPE_CHECKING, Any

from rigbook_schemas.wire import rfc3339

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

__all__ = ["OUTSIDE", "START_NS", "Process", "SimClock", "SimLoop", "Stuck"]

START_NS = 1_790_000_000 * 10**9
# Callbacks at one instant: beyond this something spins.
STEPS_AT_ONCE_MAX = 200_000

_process: contextvars.ContextVar[Process] = contextvars.ContextVar("process")
# What belongs to no process: the server, the wires, the world itself.
OUTSIDE = contextvars.Context()


class Stuck(AssertionError):
    """Everything waits and nothing will ever happen, or something runs for ever without time passing."""


class Process:
    """One run of a program. Its coroutines run in its context, and end with it."""

    def __init__(self, name: str, loop: SimLoop) -> None:
        self.name = name
        self.dead = False
        self.stopped = False
        self.steps = 0
        self.fuse = 0  # dies after this many more steps, 0 = does not
        self.at_fuse: Callable[[], None] | None = None
        self.held: list[asyncio.Handle] = []
        self._loop = loop
        self.context = contextvars.Context()
        self.context.run(_process.set, self)

    def spawn(self, body: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._loop.create_task(body, name=self.name, context=self.context)

    def go_on(self) -> None:
        """After `stopped`: what came meanwhile is handled now."""
        self.stopped = False
        held, self.held = self.held, []
        self._loop.push(held)


class SimTask(asyncio.Task[Any]):
    """Sets of tasks iterate in an order that does not depend on addresses."""

    def __init__(self, coro: Any, *, number: int, **more: Any) -> None:
        self._number = number  # first: asyncio puts the task into a set while it is made
        super().__init__(coro, **more)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.BaseEventLoop):
    """See the module."""

    def __init__(self, seed: int | str) -> None:
        super().__init__()
        self._now = 0.0
        self._rng = random.Random(f"order {seed}")
        self._made = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_made = 0
        self.steps = 0
        self.problems: list[str] = []
        self._tasks: list[SimTask] = []
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._now

    def push(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        return  # it is thrown away when its time comes

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        if not ready:
            timers = self._timers
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise Stuck("everything waits, and nothing will ever happen")
            due = timers[0][0]
            if due > self._now:
                self._now = due
                self._at_once = 0
            while timers and timers[0][0] <= due:
                timer = heapq.heappop(timers)[2]
                if not timer._cancelled:
                    ready.append(timer)
        if len(ready) == 1:
            self._step(ready.popleft())
            return
        batch = list(ready)
        ready.clear()
        self._rng.shuffle(batch)
        for handle in batch:
            self._step(handle)

    _at_once = 0

    def _step(self, handle: asyncio.Handle) -> None:
        if handle._cancelled:
            return
        process = handle._context.get(_process)
        if process is not None:
            if process.dead:
                return
            if process.stopped:
                process.held.append(handle)
                return
            process.steps += 1
            if process.fuse:
                process.fuse -= 1
                if not process.fuse and process.at_fuse is not None:
                    process.at_fuse()
                    return
        self.steps += 1
        self._at_once += 1
        if self._at_once > STEPS_AT_ONCE_MAX:
            raise Stuck(
                f"time does not pass: {STEPS_AT_ONCE_MAX} steps at {self._now}, the last one {handle!r}"
            )
        handle._run()

    # -- what asyncio asks of a loop -------------------------------------------------------------------------

    def _process_events(self, event_list: Any) -> None:
        raise AssertionError("there are no file descriptors in a simulated world")

    def _write_to_self(self) -> None:
        return

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """There are no threads: it is done at a later step, and whoever waits goes on after that."""
        done = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - whoever waits gets it
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        self.call_soon(work)
        return done

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> SimTask:
        self._made += 1
        task = SimTask(coro, number=self._made, loop=loop, **more)
        self._tasks.append(task)
        if len(self._tasks) > 4096:
            self._tasks = [one for one in self._tasks if not one.done()]
        return task

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.problems.append(f"{context.get('message')}: {error!r}")

    def end(self) -> None:
        """Throw away what still waits, without running it on."""
        self.set_exception_handler(lambda _loop, _context: None)
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                chain: list[Any] = [task.get_coro()]
                while getattr(chain[-1], "cr_await", None) is not None:
                    chain.append(chain[-1].cr_await)
                for coro in reversed(chain):
                    _close(coro)
        self._tasks.clear()
        self._ready.clear()  # type: ignore[attr-defined]
        self._timers.clear()
        self.close()

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """For building a world before its loop runs."""
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)


def _close(coro: Any) -> None:
    if not hasattr(coro, "close"):
        return
    for _ in range(16):  # a `finally` that awaits refuses to be closed until it is through
        try:
            coro.close()
        except RuntimeError:
            continue
        except BaseException:  # noqa: BLE001 - the dying words of the dead
            return
        return


class SimClock:
    """`rigbook_bus.clock.Clock` of one machine: its wall clock may be wrong, and may step."""

    def __init__(self, loop: SimLoop, *, wrong_seconds: float = 0.0, began: float = 0.0) -> None:
        self._loop = loop
        self.wrong_seconds = wrong_seconds
        self._began = began

    def now_ns(self) -> int:
        # whole microseconds: what an event carries
        return START_NS + int((self._loop.time() + self.wrong_seconds) * 1e6) * 1000

    def monotonic(self) -> float:
        return self._began + self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def text(self) -> str:
        return rfc3339(self.now_ns())

"""One thread that owns the driver, because a driver call can hang for minutes or for ever.

A call that takes too long is an error at once for whoever waits, and unknown is what the sample says. No
second thread is started next to a hung one: it would hang in the same lock of the driver, and threads
would pile up. The thread serves again as soon as the hung call returns; its late answer is dropped.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from rigbook_nodeagent.gpus.protocol import GpusError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rigbook_schemas.values import CardInventory, CardObservation

    from rigbook_nodeagent.gpus.protocol import DriverFacts, Gpus

__all__ = ["GpuWorker", "WorkerStatus"]

TIMEOUT_SECONDS: Final = 5.0  # nvidia-smi itself takes 1 to 2 s on a loaded 8-card machine
T = TypeVar("T")


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How the driver's thread stands."""

    call: str = ""  # what runs in the driver now
    seconds: float = 0.0  # for how long
    hung: bool = False  # longer than the time-out
    timeouts: int = 0  # calls given up since the start
    failures: int = 0  # calls that raised
    samples_rejected: int = 0


class GpuWorker:
    """The driver as async calls. Each raises GpusError when the driver does not answer in time."""

    def __init__(
        self,
        gpus: Gpus,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = gpus
        self._timeout_seconds = timeout_seconds
        self._monotonic = monotonic
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._turn = asyncio.Lock()
        self._call = ""
        self._since = 0.0
        self._timeouts = 0
        self._failures = 0

    @property
    def status(self) -> WorkerStatus:
        call = self._call
        seconds = self._monotonic() - self._since if call else 0.0
        return WorkerStatus(
            call=call,
            seconds=seconds,
            hung=seconds > self._timeout_seconds,
            timeouts=self._timeouts,
            failures=self._failures,
            samples_rejected=self._gpus.samples_rejected,
        )

    async def facts(self) -> DriverFacts:
        """Open the driver, or try a broken one again."""
        return await self._ask("open", self._gpus.open)

    async def inventory(self) -> Sequence[CardInventory]:
        return await self._ask("inventory", self._gpus.inventory)

    async def sample(self) -> Sequence[CardObservation]:
        return await self._ask("sample", self._gpus.sample)

    async def device_nodes(self) -> Mapping[str, str]:
        return await self._ask("device_nodes", self._gpus.device_nodes)

    async def limit_processes(self, cards: Mapping[str, bool]) -> Mapping[str, str]:
        return await self._ask("limit_processes", lambda: self._gpus.limit_processes(cards))

    async def close(self) -> None:
        """Close the driver and end the thread; a hung one is left behind (it ends with the process)."""
        if self._thread is None:
            return
        try:
            await self._ask("close", self._gpus.close)
        except GpusError:
            pass  # it hangs, or was broken: nothing is lost by not closing it
        else:
            self._orders.put(None)
            await asyncio.to_thread(self._thread.join, self._timeout_seconds)
        self._thread = None

    async def _ask(self, name: str, function: Callable[[], T]) -> T:
        async with self._turn:
            if self._call:  # an earlier caller gave up on it, and it has not returned
                raise GpusError(
                    f"the driver hangs: `{self._call}` has not returned for {self.status.seconds:.0f} s"
                )
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[T] = loop.create_future()

            def settle(result: T | None, error: Exception | None) -> None:
                if answer.done():
                    return  # too late; whoever asked was told so
                if error is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(result)  # type: ignore[arg-type]  # None only where T is None

            def order() -> None:
                result: T | None = None
                failed: Exception | None = None
                try:
                    result = function()
                except Exception as error:  # noqa: BLE001 - whatever a driver throws, the agent lives
                    failed = error
                self._call = ""
                try:
                    loop.call_soon_threadsafe(settle, result, failed)
                except RuntimeError:
                    return  # the loop is closed: nobody waits any more

            self._call, self._since = name, self._monotonic()
            self._serve(order)
            return await self._answer(name, answer)

    async def _answer(self, name: str, answer: asyncio.Future[T]) -> T:
        try:
            # Not `wait_for`: Python 3.11's forgets that it was cancelled when the answer comes at that moment.
            async with asyncio.timeout(self._timeout_seconds):
                return await answer
        except TimeoutError:
            self._timeouts += 1
            raise GpusError(
                f"the driver did not answer `{name}` within {self._timeout_seconds:g} s"
            ) from None
        except GpusError:
            self._failures += 1
            raise
        except Exception as error:
            self._failures += 1
            raise GpusError(f"the driver failed in `{name}`: {type(error).__name__}: {error}") from error

    def _serve(self, order: Callable[[], None]) -> None:
        if self._thread is None:
            # A daemon, so that a call that never returns does not keep the agent from ending.
            self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)
            self._thread.start()
        self._orders.put(order)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            order()

"""The driver's thread: a hang is an error at once, and threads do not pile up.

Method: a whole driver of our own that can be held up and made to fail at will; no clock is waited for
beyond time-outs of a few milliseconds.
"""

from __future__ import annotations

import asyncio
import threading

import pytest
from rigbook_nodeagent.gpus.protocol import DriverFacts, GpusError
from rigbook_nodeagent.gpus.worker import GpuWorker

SOON_SECONDS = 5.0


class HeldUp:
    """A driver with one gate in front of every call."""

    samples_rejected = 3

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.threads: set[int] = set()

    def _answer(self, value):
        self.threads.add(threading.get_ident())
        assert self.gate.wait(SOON_SECONDS)
        if self.error is not None:
            raise self.error
        return value

    def open(self):
        return self._answer(DriverFacts(driver_version="1"))

    def inventory(self):
        return self._answer(["card"])

    def sample(self):
        return self._answer(["sample"])

    def environment(self, cards):
        return {}

    def close(self):
        self._answer(None)


@pytest.fixture
async def driver():
    driver = HeldUp()
    yield driver
    driver.gate.set()


@pytest.fixture
async def worker(driver):
    worker = GpuWorker(driver, timeout_seconds=0.03)
    yield worker
    driver.gate.set()
    driver.error = None
    while worker.status.call:
        await asyncio.sleep(0.001)
    await worker.close()


async def test_answers_come_from_one_thread_that_is_not_ours(driver, worker):
    assert (await worker.facts()).driver_version == "1"
    assert await asyncio.gather(worker.inventory(), worker.sample()) == [["card"], ["sample"]]
    assert len(driver.threads) == 1
    assert driver.threads != {threading.get_ident()}
    assert (worker.status.call, worker.status.samples_rejected) == ("", 3)


async def test_a_hang_is_told_to_all_and_no_thread_is_added(driver, worker):
    await worker.facts()
    threads = threading.active_count()
    driver.gate.clear()
    with pytest.raises(GpusError, match=r"did not answer `sample` within 0.03 s"):
        await worker.sample()
    for _ in range(5):
        with pytest.raises(GpusError, match="hangs: `sample` has not returned"):
            await worker.inventory()
    assert threading.active_count() == threads
    assert (worker.status.call, worker.status.hung, worker.status.timeouts) == ("sample", True, 1)
    driver.gate.set()
    while worker.status.call:
        await asyncio.sleep(0.001)
    assert await worker.inventory() == ["card"], "the late answer of the other call is not taken for this one"
    assert len(driver.threads) == 1


@pytest.mark.parametrize("error", [RuntimeError("segment"), OSError(5, "io"), ValueError("x"), MemoryError()])
async def test_whatever_the_driver_throws_is_a_gpus_error(driver, worker, error):
    driver.error = error
    with pytest.raises(GpusError, match=f"failed in `sample`: {type(error).__name__}"):
        await worker.sample()
    assert worker.status.failures == 1
    driver.error = None
    assert await worker.sample() == ["sample"]


async def test_a_gpus_error_passes_as_it_is(driver, worker):
    driver.error = GpusError("the driver is not open")
    with pytest.raises(GpusError, match=r"^the driver is not open$"):
        await worker.inventory()


async def test_a_caller_that_gives_up_does_not_block_the_next(driver, worker):
    driver.gate.clear()
    waiting = asyncio.ensure_future(worker.sample())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    driver.gate.set()
    while worker.status.call:
        await asyncio.sleep(0.001)
    assert await worker.inventory() == ["card"]


async def test_closing_does_not_wait_for_a_hung_driver(driver):
    worker = GpuWorker(driver, timeout_seconds=0.03)
    await worker.facts()
    driver.gate.clear()
    with pytest.raises(GpusError):
        await worker.sample()
    await worker.close()

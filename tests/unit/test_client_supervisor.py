"""Parts are kept running. Goal: back-off, crash loops and the order of the end, with real small processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rigbook.supervisor import BACKOFF_SECONDS_MAX, LOOP_ENDS, Backoff, Part, Parts, State, last_lines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

READY = """
import os, signal, sys, time
fd = int(sys.argv[sys.argv.index("--ready-fd") + 1])
print("hello", flush=True)
os.write(fd, b"ready\\n")
signal.signal(signal.SIGTERM, lambda *_: (print("bye", flush=True), os._exit(0)))
while True: time.sleep(60)
"""
DIES = "import sys; print('no luck', flush=True); sys.exit(3)"
CANNOT = "import sys; sys.exit(2)"
LIFELINE = """
import os, sys
os.write(int(sys.argv[sys.argv.index("--ready-fd") + 1]), b"ready\\n")
sys.stdin.read()
"""


class Told:
    """What the parts told, and a place to wait for it."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, State, str]] = []
        self.parts = Parts(self._tell)
        self._news = asyncio.Event()

    def _tell(self, name: str, state: State, text: str) -> None:
        self.lines.append((name, state, text))
        self._news.set()

    async def until(self, name: str, state: State, times: int = 1) -> None:
        async with asyncio.timeout(20):
            while sum((line[0], line[1]) == (name, state) for line in self.lines) < times:
                self._news.clear()
                await self._news.wait()


@pytest.fixture
async def told() -> AsyncIterator[Told]:
    it = Told()
    yield it
    await it.parts.stop([[name for name, *_ in it.parts.states()]])


def part(tmp_path: Path, name: str, program: str) -> Part:
    return Part(name=name, command=(sys.executable, "-c", program), log=tmp_path / f"{name}.log")


def test_the_wait_doubles_and_a_loop_is_called_one() -> None:
    backoff = Backoff()
    waits = [backoff.ended(started=float(n), now=float(n)) for n in range(LOOP_ENDS)]
    assert waits == [0.25, 0.5, 1, 2, BACKOFF_SECONDS_MAX]
    assert backoff.looping
    # it ran for a minute: forgiven
    assert backoff.ended(started=100.0, now=161.0) == 0.25
    assert not backoff.looping


def test_ends_far_apart_are_no_loop() -> None:
    backoff = Backoff()
    for n in range(10):
        backoff.ended(started=n * 30.0, now=n * 30.0 + 1)
    assert not backoff.looping


async def test_ready_then_stopped_in_order(tmp_path: Path, told: Told) -> None:
    told.parts.start([part(tmp_path, "a", READY), part(tmp_path, "b", READY)])
    assert await told.parts.ready(["a", "b"], ends_max=1) == ""
    assert all(pid for _, _, pid, _ in told.parts.states())
    await told.parts.stop([["b"], ["a"]])
    stopped = [name for name, state, _ in told.lines if state is State.STOPPED]
    assert stopped == ["b", "a"]
    assert last_lines(tmp_path / "a.log", 5) == ["hello", "bye"]


async def test_one_that_is_killed_comes_back(tmp_path: Path, told: Told) -> None:
    told.parts.start([part(tmp_path, "a", READY)])
    await told.parts.ready(["a"], ends_max=1)
    (_, _, pid, _) = told.parts.states()[0]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await told.until("a", State.READY, times=2)
    assert told.parts.states()[0][3] == 1
    assert any("signal 9" in text for _, _, text in told.lines)


async def test_one_that_never_comes_up_is_named(tmp_path: Path, told: Told) -> None:
    told.parts.start([part(tmp_path, "good", READY), part(tmp_path, "bad", DIES)])
    assert await told.parts.ready(["good", "bad"], ends_max=2) == "bad"
    assert last_lines(told.parts.log_of("bad"), 1) == ["no luck"]


async def test_options_that_cannot_work_are_not_tried_again(tmp_path: Path, told: Told) -> None:
    told.parts.start([part(tmp_path, "a", CANNOT)])
    assert await told.parts.ready(["a"], ends_max=3) == "a"
    assert told.parts.states()[0][1] is State.FAILED
    assert sum(state is State.STARTING for _, state, _ in told.lines) == 1


async def test_no_such_program(tmp_path: Path, told: Told) -> None:
    told.parts.start([Part(name="a", command=("/no/such/program",), log=tmp_path / "a.log")])
    assert await told.parts.ready(["a"], ends_max=1) == "a"


async def test_a_part_ends_with_its_supervisor(tmp_path: Path) -> None:
    # Goal: `kill -9` of the supervisor leaves nothing behind. Method: the supervisor is a process of its own.
    program = f"""
import asyncio, pathlib, sys
from rigbook.supervisor import Part, Parts
async def main():
    parts = Parts(lambda *_: None)
    parts.start([Part(name="a", command=(sys.executable, "-c", {LIFELINE!r}), log=pathlib.Path({str(tmp_path / "a.log")!r}))])
    await parts.ready(["a"], ends_max=1)
    print(parts.states()[0][2], flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    supervisor = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert supervisor.stdout is not None
    pid = int(await supervisor.stdout.readline())
    supervisor.kill()
    await supervisor.wait()
    async with asyncio.timeout(10):
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(pid, 0)
                if _zombie(pid):
                    break
                await asyncio.sleep(0.02)


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_last_lines_of_nothing(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none", 3) == []

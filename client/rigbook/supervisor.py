"""The parts of a Rigbook on one machine: each a process of its own, started in order, kept running, ended in order.

A part says "ready" on a pipe that it inherits, and ends by itself when its standard input closes, so that
nothing is left behind when the supervisor is killed. One that ends unasked is started again after a wait
that doubles; one that cannot run as it was started (exit code 2) is not; one that ends again and again is
called what it is, and tried on at the longest wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from rigbook.exitcodes import Exit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Backoff", "Part", "Parts", "State", "last_lines"]

BACKOFF_SECONDS_FIRST: Final = 0.25
BACKOFF_SECONDS_MAX: Final = 15.0
# A part that ran this long has earned the short wait again.
STEADY_SECONDS: Final = 60.0
# This many ends within this time are a crash loop.
LOOP_ENDS: Final = 5
LOOP_SECONDS: Final = 60.0
STOP_SECONDS_MAX: Final = 12.0  # a service gives itself 10
LOG_BYTES_MAX: Final = 16 * 1024 * 1024
LOG_TAIL_BYTES: Final = 8192


class State(enum.StrEnum):
    """What a part is doing, as an operator sees it."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting to restart"
    CRASH_LOOP = "crash loop"
    FAILED = "failed"
    STOPPED = "stopped"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A process to keep running. `command` gets `--ready-fd N --lifeline` appended."""

    name: str
    command: tuple[str, ...]
    log: Path
    environment: dict[str, str] = {}


class Backoff:
    """How long to wait before the next start. Pure: it is told the time."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=LOOP_ENDS)
        self._wait = BACKOFF_SECONDS_FIRST

    @property
    def looping(self) -> bool:
        """True after LOOP_ENDS ends within LOOP_SECONDS."""
        return len(self._ends) == LOOP_ENDS and self._ends[-1] - self._ends[0] <= LOOP_SECONDS

    def ended(self, *, started: float, now: float) -> float:
        """Note an end; the seconds to wait."""
        if now - started >= STEADY_SECONDS:
            self._wait = BACKOFF_SECONDS_FIRST
            self._ends.clear()
        self._ends.append(now)
        wait, self._wait = self._wait, min(self._wait * 2, BACKOFF_SECONDS_MAX)
        return BACKOFF_SECONDS_MAX if self.looping else wait


class _Kept:
    """One part and the task that keeps it running."""

    def __init__(self, part: Part, told: Callable[[str, State, str], None]) -> None:
        self.part = part
        self.state = State.STOPPED
        self.restarts = 0
        self.changed = asyncio.Event()
        self.was_ready = False
        self._told = told
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop_asked = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def start(self) -> None:
        self._stop_asked.clear()
        self._task = asyncio.create_task(self._keep(), name=self.part.name)

    async def stop(self) -> None:
        """Ask it to end, wait, insist."""
        self._stop_asked.set()
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(STOP_SECONDS_MAX):
                    await process.wait()
            except TimeoutError:
                self._move(self.state, f"did not end within {STOP_SECONDS_MAX:g} s, killed")
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._move(State.STOPPED, "")

    async def _keep(self) -> None:
        backoff = Backoff()
        while not self._stop_asked.is_set():
            started = time.monotonic()
            code = await self._once()
            if self._stop_asked.is_set():
                return
            said = f"ended with {_ending(code)}"
            if code == Exit.USAGE:
                self._move(State.FAILED, f"{said}: it cannot run like this; see {self.part.log}")
                return
            wait = backoff.ended(started=started, now=time.monotonic())
            self.restarts += 1
            looping = backoff.looping
            self._move(
                State.CRASH_LOOP if looping else State.WAITING,
                f"{said}, next start in {wait:g} s; see {self.part.log}",
            )
            await asyncio.sleep(wait)

    async def _once(self) -> int:
        """Run the process once; its exit code."""
        self._move(State.STARTING, "")
        _roll(self.part.log)
        reader, writer = os.pipe()
        try:
            with self.part.log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self.part.command,
                    "--ready-fd",
                    str(writer),
                    "--lifeline",
                    stdin=asyncio.subprocess.PIPE,  # the lifeline: closes with us
                    stdout=log,
                    stderr=log,
                    pass_fds=(writer,),
                    start_new_session=True,  # Ctrl-C is for the supervisor, which ends the parts in order
                    env={**os.environ, **self.part.environment},
                )
        except OSError as error:
            os.close(reader)
            self._move(self.state, f"cannot be started: {error}")
            return -1
        finally:
            os.close(writer)
        heard = asyncio.create_task(self._hear(reader))
        code = await self._process.wait()
        heard.cancel()
        await asyncio.gather(heard, return_exceptions=True)
        return code

    async def _hear(self, reader: int) -> None:
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reader, "rb", buffering=0)
        )
        try:
            if await stream.readline() == b"ready\n":
                self.was_ready = True
                self._move(State.READY, f"pid {self.pid}")
        finally:
            transport.close()

    def _move(self, state: State, text: str) -> None:
        self.state = state
        self.changed.set()
        self._told(self.part.name, state, text)


class Parts:
    """Several parts. `told(name, state, text)` hears every change."""

    def __init__(self, told: Callable[[str, State, str], None]) -> None:
        self._told = told
        self._kept: dict[str, _Kept] = {}

    def states(self) -> list[tuple[str, State, int | None, int]]:
        """(name, state, pid, restarts) in the order of starting."""
        return [(name, kept.state, kept.pid, kept.restarts) for name, kept in self._kept.items()]

    def log_of(self, name: str) -> Path:
        return self._kept[name].part.log

    def start(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._kept[part.name] = _Kept(part, self._told)
            self._kept[part.name].start()

    async def ready(self, names: Sequence[str], *, ends_max: int) -> str:
        """Wait until all are ready; "" then, else the name of the first that failed or ended `ends_max` times."""
        waiting = [self._kept[name] for name in names]
        while True:
            for kept in waiting:
                if kept.state is State.FAILED or (not kept.was_ready and kept.restarts >= ends_max):
                    return kept.part.name
            waiting = [kept for kept in waiting if not kept.was_ready]
            if not waiting:
                return ""
            for kept in waiting:
                kept.changed.clear()
            changes = [asyncio.create_task(kept.changed.wait()) for kept in waiting]
            try:
                await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for change in changes:
                    change.cancel()

    async def stop(self, order: Sequence[Sequence[str]]) -> None:
        """End them group after group; within a group at once."""
        for names in order:
            await asyncio.gather(*(self._kept[name].stop() for name in names if name in self._kept))


def last_lines(log: Path, count: int) -> list[str]:
    """The end of a log file; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def _roll(log: Path) -> None:
    """Keep one older file; a log must not fill the disk."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        if log.stat().st_size > LOG_BYTES_MAX:
            log.replace(log.with_name(f"{log.name}.1"))


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"

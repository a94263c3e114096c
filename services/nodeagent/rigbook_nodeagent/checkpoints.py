"""A preemption or a drain asks before it takes: signal, answer, time to save. Only then comes the stop.

Whoever does not answer is not killed (unless the order insists): a training run of hours must not be lost to a
signal that never reached it, as happens where a shell is process 1 and keeps it to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from rigbook_schemas.values import Checkpoint, CheckpointAnswer, Engine, EvictionReason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rigbook_bus.clock import Clock
    from rigbook_schemas.values import Component

    from rigbook_nodeagent.engines.protocol import Engines, Running
    from rigbook_nodeagent.probes import Target

__all__ = ["COOPERATIVE", "Saving", "checkpoint_of", "save"]

COOPERATIVE: Final = frozenset({EvictionReason.PREEMPTION, EvictionReason.DRAIN})
POLL_SECONDS: Final = 0.2
HTTP_TIMEOUT_SECONDS: Final = 2.0
ANSWER_BYTES_MAX: Final = 64
FILE_SLACK_NS: Final = 10**9  # some file systems keep times to the second
DONE: Final = b"done"


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """What came of asking one component."""

    component: str
    answer: CheckpointAnswer
    seconds: float
    text: str

    @property
    def saved(self) -> bool:
        return self.answer is CheckpointAnswer.SAVED


class Told(Protocol):
    """Who is told about an answer as it comes."""

    def __call__(self, saving: Saving) -> Awaitable[None]: ...


def checkpoint_of(component: Component, *, grace_seconds: float) -> Checkpoint:
    """As declared; else it is asked with SIGTERM, and ending within its grace is the answer."""
    if component.checkpoint is not None:
        return component.checkpoint
    return Checkpoint(acknowledge_seconds_max=max(grace_seconds, component.stop_grace_seconds))


async def save(
    engine: Engines,
    running: Running,
    checkpoint: Checkpoint,
    *,
    clock: Clock,
    look: Callable[[], Awaitable[Running | None]],
    target: Callable[[], Awaitable[Target]],
    given_up: Callable[[], bool],
    told: Told,
) -> Saving | None:
    """Ask one component to save, and wait for its answer within the checkpoint's times.

    `look` inspects it; `given_up` says that another order has come, then the answer is None. Raises EngineError.
    """
    began, began_ns = clock.monotonic(), clock.now_ns()
    await engine.signal(running, checkpoint.signal)
    heard = 0.0
    while True:
        now = await look()
        seconds = clock.monotonic() - began
        if now is None or not now.running:
            return await _say(told, running, CheckpointAnswer.SAVED, seconds, "it ended")
        if given_up():
            return None
        answer = await _asked(checkpoint, now, target, began_ns)
        if answer is CheckpointAnswer.SAVED:
            return await _say(told, running, answer, seconds, f"by {checkpoint.acknowledge}")
        if answer is CheckpointAnswer.ACKNOWLEDGED and not heard:
            heard = clock.monotonic()
            await _say(told, running, answer, seconds, f"by {checkpoint.acknowledge}")
        if not heard and seconds >= checkpoint.acknowledge_seconds_max:
            return await _say(
                told, running, CheckpointAnswer.NOT_ACKNOWLEDGED, seconds,
                f"{running.component} did not answer {checkpoint.signal} within "
                f"{checkpoint.acknowledge_seconds_max:g} s ({_expected(checkpoint)})",
            )  # fmt: skip
        if heard and clock.monotonic() - heard >= checkpoint.save_seconds_max:
            return await _say(
                told, running, CheckpointAnswer.NOT_SAVED, seconds,
                f"{running.component} heard {checkpoint.signal} and has not saved within {checkpoint.save_seconds_max:g} s",
            )  # fmt: skip
        await clock.sleep(POLL_SECONDS)


async def _say(told: Told, running: Running, answer: CheckpointAnswer, seconds: float, text: str) -> Saving:
    saving = Saving(component=running.component, answer=answer, seconds=seconds, text=text)
    await told(saving)
    return saving


def _expected(checkpoint: Checkpoint) -> str:
    if checkpoint.acknowledge == "file":
        return f"no file {checkpoint.path}"
    if checkpoint.acknowledge == "http":
        return f"no 200 or 202 from {checkpoint.path} on port {checkpoint.port}"
    return "it did not end; a shell as the first process keeps signals to itself: start the program with exec"


async def _asked(
    checkpoint: Checkpoint, running: Running, target: Callable[[], Awaitable[Target]], since_ns: int
) -> CheckpointAnswer | None:
    """None: no answer yet."""
    if checkpoint.acknowledge == "file":
        return await asyncio.to_thread(file_answer, running, checkpoint.path, since_ns)
    if checkpoint.acknowledge == "http":
        where = await target()
        host, port = where.ports.get(checkpoint.port, (where.host, checkpoint.port))
        return await _http_answer(host, port, checkpoint.path)
    return None


def file_answer(
    running: Running, path: str, since_ns: int, *, proc: Path = Path("/proc")
) -> CheckpointAnswer | None:
    """What the file says, as the component sees it; only its first word is looked at, never a link followed."""
    if not running.pids or not path:
        return None
    for pid in running.pids[:8]:
        root = proc / str(pid) / ("root" if path.startswith("/") else "cwd")
        if running.engine is Engine.PROCESS and path.startswith("/"):
            root = Path("/")
        try:
            handle = os.open(
                root / path.lstrip("/"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError:
            continue
        try:
            if os.fstat(handle).st_mtime_ns < since_ns - FILE_SLACK_NS:
                return None  # of an earlier time
            words = os.read(handle, ANSWER_BYTES_MAX).split()
        except OSError:
            continue
        else:
            return CheckpointAnswer.SAVED if words[:1] == [DONE] else CheckpointAnswer.ACKNOWLEDGED
        finally:
            os.close(handle)
    return None


async def _http_answer(host: str, port: int, path: str) -> CheckpointAnswer | None:
    try:
        async with asyncio.timeout(HTTP_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(
                    f"GET {path or '/'} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
                )
                await writer.drain()
                words = (await reader.readline()).split()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, ValueError):  # TimeoutError is an OSError
        return None
    code = words[1] if len(words) >= 2 else b""
    return {b"200": CheckpointAnswer.SAVED, b"202": CheckpointAnswer.ACKNOWLEDGED}.get(code)

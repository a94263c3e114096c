"""A whole Rigbook on one machine: the bus and its parts, as `rigbook up` runs them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_bus.embedded import EmbeddedServer, EmbeddedServerError

from rigbook.context import Context, process_start, read_context, remove_context, write_context
from rigbook.failures import Failed, WouldConflict
from rigbook.supervisor import Backoff, Part, Parts, State, last_lines

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Cell", "CellOptions"]

# A part that ended this often before it was ever ready will not come up by trying on.
START_ENDS_MAX: Final = 3
LOG_LINES_SHOWN: Final = 12
# A nats-server that met a full disk stores nothing more, and says so only in its own log, until it is started
# again, however much room there is then (2.15.1; tests/e2e/test_disks.py).
DISK_LOOK_SECONDS: Final = 2.0
DISK_SHORT_BYTES: Final = 16 * 1024**2
DISK_ROOM_BYTES: Final = 64 * 1024**2
# Deciders first, so that nothing new is decided while the rest goes; the book last, so that it sees the end.
STOP_ORDER: Final = (("placer", "reaper"), ("agent",), ("ledger",))


class CellOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `up` was asked for. `gpus` is resolved: nvml or sim:...; "" = no agent."""

    data: Path
    logs: Path
    gpus: str
    port: int = 4222
    node: str = ""
    cluster: str = ""  # "" = the data folder's own
    engines: tuple[str, ...] = ("process",)
    labels: dict[str, str] = {}
    heartbeat_seconds: float = 1.0
    log_level: str = "info"


class Cell:
    """The bus and its parts. `told(part, state, text)` hears every change."""

    def __init__(self, options: CellOptions, told: Callable[[str, str, str], None]) -> None:
        self.options = options
        self._told = told
        self._server = EmbeddedServer(options.data / "nats", port=options.port)
        self._parts = Parts(self._tell)
        self._watching: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._bus_restarts = 0
        self._settled = False

    @property
    def url(self) -> str:
        return self._server.url

    def states(self) -> list[tuple[str, str, int | None, int]]:
        """(name, state, pid, restarts), the bus first."""
        bus = ("bus", "ready" if self._server.pid else "away", self._server.pid, self._bus_restarts)
        return [bus, *self._parts.states()]

    async def start(self) -> None:
        """Bring everything up, in order. Raises WouldConflict when one runs there, Failed with the log's end."""
        self._refuse_second()
        self._told("bus", "starting", "")
        try:
            self.options.data.mkdir(parents=True, exist_ok=True)
            await self._server.start()
        except EmbeddedServerError as error:
            raise _bus_failure(error) from error
        except OSError as error:
            raise Failed(
                f"cannot use {self.options.data}", why=str(error), remedy="choose another --data DIR"
            ) from error
        self._told("bus", "ready", f"nats-server {self._server.version}, {self.url}, pid {self._server.pid}")
        self._watching = asyncio.create_task(self._keep_bus())
        self._looking = asyncio.create_task(self._watch_disk())
        await self._start_parts(["ledger"])  # makes the streams that the others read
        await self._start_parts(["placer", "reaper", *(["agent"] if self.options.gpus else [])])
        self._settled = True
        self._write_context()

    async def stop(self) -> None:
        """End everything, in order, the bus last. Idempotent."""
        remove_context(self.options.data) if self._settled else None
        self._settled = False
        await self._parts.stop(STOP_ORDER)
        for task in (self._watching, self._looking):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._server.pid is not None:
            await self._server.stop()
            self._told("bus", "stopped", "")
        else:
            await self._server.kill()  # of one that crashed: gives back the folder's lock

    # -- parts ------------------------------------------------------------------------------------

    async def _start_parts(self, names: list[str]) -> None:
        self._parts.start([self._part(name) for name in names])
        failed = await self._parts.ready(names, ends_max=START_ENDS_MAX)
        if failed:
            log = self._parts.log_of(failed)
            raise Failed(
                f"the {failed} does not come up",
                why="\n".join(last_lines(log, LOG_LINES_SHOWN)) or "it wrote nothing",
                remedy=f"the whole log: {log}",
                code="part_failed",
            )

    def _part(self, name: str) -> Part:
        o = self.options
        words = [sys.executable, "-m", "rigbook"]
        if name == "agent":
            words += [
                "agent",
                "--join",
                self.url,
                "--node",
                o.node,
                "--gpus",
                o.gpus,
                "--heartbeat",
                f"{o.heartbeat_seconds:g}",
            ]
            words += ["--cluster", o.cluster or _own_cluster(o.data)]
            for engine in o.engines:
                words += ["--engine", engine]
            for key, value in o.labels.items():
                words += ["--labels", f"{key}={value}"]
        else:
            words += ["serve", name, "--nats", self.url]
        words += ["--data", str(o.data / name), "--log-form", "json", "--log-level", o.log_level]
        return Part(
            name=name, command=tuple(words), log=o.logs / f"{name}.log", environment=self._environment(name)
        )

    def _environment(self, name: str) -> dict[str, str]:
        """Workloads for simulated cards are programs of ours: `python3` must mean the one that has them."""
        if name != "agent" or not self.options.gpus.startswith("sim:"):
            return {}
        return {"PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}  # noqa: PTH120

    def _tell(self, name: str, state: State, text: str) -> None:
        self._told(name, state, text)
        if self._settled:
            self._write_context()

    async def _watch_disk(self) -> None:
        """Say that the bus' disk is full, and start the bus again when it no longer is."""
        short = False
        while True:
            await asyncio.sleep(DISK_LOOK_SECONDS)
            with contextlib.suppress(OSError):
                disk = os.statvfs(self.options.data)
                free = disk.f_bavail * disk.f_frsize
                if free < DISK_SHORT_BYTES and not short:
                    short = True
                    text = f"{free // 1024**2} MiB left on the disk of {self.options.data}: nothing can be recorded; make room"
                    self._told("bus", "disk full", text)
                elif free >= DISK_ROOM_BYTES and short:
                    short = False
                    self._told("bus", "restarting", "there is room on its disk again")
                    if self._server.pid is not None:
                        os.kill(self._server.pid, signal.SIGTERM)  # what keeps it running starts it again

    async def _keep_bus(self) -> None:
        backoff = Backoff()
        while True:
            started = time.monotonic()
            code = await self._server.wait()
            wait = backoff.ended(started=started, now=time.monotonic())
            self._bus_restarts += 1
            self._told(
                "bus",
                "crash loop" if backoff.looping else "waiting to restart",
                f"ended with {code}, next start in {wait:g} s",
            )
            await asyncio.sleep(wait)
            while True:
                try:
                    await self._server.start()
                except EmbeddedServerError as error:
                    self._told("bus", "waiting to restart", str(error))
                    await asyncio.sleep(backoff.ended(started=time.monotonic(), now=time.monotonic()))
                else:
                    self._told("bus", "ready", f"{self.url}, pid {self._server.pid}")
                    break

    # -- context ----------------------------------------------------------------------------------

    def _refuse_second(self) -> None:
        running = read_context(self.options.data)
        if running is not None and running.alive:
            raise WouldConflict(
                f"a Rigbook runs on {self.options.data} already",
                why=f"pid {running.pid}, bus {running.url}",
                remedy="use it (every command finds it by itself), stop it with Ctrl-C there, or choose another --data DIR",
                code="already_running",
            )

    def _write_context(self) -> None:
        o = self.options
        context = Context(
            url=self.url,
            pid=os.getpid(),
            started_ticks=process_start(os.getpid()) or 0,
            node=o.node if o.gpus else "",
            gpus=o.gpus,
            simulated=o.gpus.startswith("sim:"),
            logs=str(o.logs),
            parts={name: pid for name, _, pid, _ in self.states() if pid is not None},
        )
        with contextlib.suppress(OSError):  # a full disk must not end what runs; the bus says so by itself
            write_context(o.data, context)


def _own_cluster(data: Path) -> str:
    """A name that only this data folder has: two Rigbooks on one machine must not take each other's
    processes for theirs, whose epochs count from 1 in both.
    """
    file = data / "cluster"
    if not file.exists():
        file.write_text(f"up-{secrets.token_hex(4)}\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


def _bus_failure(error: EmbeddedServerError) -> Failed | WouldConflict:
    text = str(error)
    if "in use" in text:
        return WouldConflict(
            "the data folder is in use",
            why=text,
            remedy="stop that one, or choose another --data DIR",
            code="already_running",
        )
    if "cannot listen" in text:
        return WouldConflict(
            "the port is taken",
            why=text,
            remedy="choose another one with --port; 0 takes a free one",
            code="port_taken",
        )
    return Failed(
        "the bus does not come up",
        why=text,
        remedy="`pip install 'rigbook[embedded]'` brings a nats-server",
        code=error.code,
    )

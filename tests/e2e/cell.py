"""A whole cell of real processes: nats-server, ledger, placer, reaper, agent; each may be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rigbook_bus.embedded import EmbeddedServer
from rigbook_bus.jetstream import JetStreamBus
from rigbook_bus.protocol import BusError
from rigbook_bus.runner import random_id
from rigbook_ledger.follower import Follower, LogAbsent, LogDiscontinued
from rigbook_schemas import subjects
from rigbook_schemas.events import DemandRaised, Payload
from rigbook_schemas.queries import Answer, Question
from rigbook_schemas.values import GIB, Component, Owner, Request
from rigbook_schemas.wire import Draft, encode, rfc3339

from tests.e2e.leavings import kill_marked

if TYPE_CHECKING:
    from collections.abc import Callable

    from rigbook_ledger.state import State

__all__ = ["ProcessCell", "draft_of"]

SOON_SECONDS = 60.0


def draft_of(data: Payload, *, now_ns: int, source: str = "client/test", traceparent: str = "") -> Draft:
    return Draft(data=data, id=random_id(), source=source, time=rfc3339(now_ns), traceparent=traceparent)


class ProcessCell:
    """Starts every part as its own process, in a folder of its own.

    `on`: where bus, ledger, placer and reaper keep their data (the control machine's disk); `ledger_on`: where
    the ledger alone does. `urls`: the bus is somebody else's, by part ("" = all others).
    """

    def __init__(
        self,
        folder: Path,
        *,
        gpus: str = "sim:4xRTX4090",
        placers: int = 1,
        log_level: str = "info",
        on: Path | None = None,
        ledger_on: Path | None = None,
        urls: dict[str, str] | None = None,
        replicas: int = 1,
    ) -> None:
        self.folder = folder
        self._on = on or folder
        self._ledger_on = ledger_on or self._on
        self._urls = urls
        self._replicas = replicas
        # Another test's epochs are the same small numbers: nobody's processes must pass for another's.
        self.cluster = f"t-{random_id()[:8]}"
        self.server = EmbeddedServer(self._on / "nats")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._gpus = gpus
        self._placers = placers
        self._log_level = log_level
        self.kills = 0
        self.doubts = 0  # how often the log did not seem to continue

    def _command(self, part: str) -> list[str]:
        rigbook = [sys.executable, "-m", "rigbook"]
        on = self._ledger_on if part.startswith("ledger") else self._on
        on = self.folder if part.startswith("agent") else on
        common = ["--data", str(on / part), "--log-form", "json", "--log-level", self._log_level]
        if part.startswith("agent"):
            node = part.removeprefix("agent-")
            return [*rigbook, "agent", "--join", self.url(part), "--node", node, "--gpus", self._gpus,
                    "--cluster", self.cluster, "--engine", "process", "--heartbeat", "0.5", *common]  # fmt: skip
        return [
            *rigbook,
            "serve",
            part.split("-", maxsplit=1)[0],
            "--nats",
            self.url(part),
            "--instance",
            part,
            *(["--replicas", str(self._replicas)] if part.startswith("ledger") else []),
            *common,
        ]

    def url(self, part: str = "") -> str:
        return self.server.url if self._urls is None else self._urls.get(part, self._urls[""])

    @property
    def parts(self) -> list[str]:
        return ["ledger-1", *(f"placer-{i + 1}" for i in range(self._placers)), "reaper-1", "agent-a"]

    def start_part(self, part: str) -> None:
        with (self.folder / f"{part}.log").open("ab") as log:
            self._processes[part] = subprocess.Popen(
                self._command(part), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    async def open(self) -> None:
        if self._urls is None:
            await self.server.start()
        for part in self.parts:
            self.start_part(part)
        self.bus = await JetStreamBus.connect(self.url(), name="test")
        self.follower = Follower(self.bus)
        async with asyncio.timeout(SOON_SECONDS):
            while True:
                try:
                    await self.follower.open()
                except LogAbsent:
                    await asyncio.sleep(0.05)
                else:
                    return

    @property
    def state(self) -> State:
        return self.follower.state

    async def until(self, what: Callable[[], bool], seconds: float = SOON_SECONDS) -> None:
        """Reads the log until `what()` holds; an AssertionError with what is known otherwise."""
        try:
            async with asyncio.timeout(seconds):
                while not what():
                    try:
                        await self.follower.batch(wait_seconds=0.2)
                    except LogDiscontinued as error:
                        await self._look_again(str(error))
        except TimeoutError:
            phases: dict[str, int] = {}
            for demand in self.state.demands.values():
                phases[demand.phase] = phases.get(demand.phase, 0) + 1
            logs = {p: (self.folder / f"{p}.log").read_text(errors="replace")[-1500:] for p in self.parts}
            raise AssertionError(
                f"it did not come: {phases}, findings {self.state.findings[-5:]}, logs {logs}"
            ) from None

    async def _look_again(self, why: str) -> None:
        """As a service does in safe mode: until the log continues what was read of it, and not otherwise. A member of a
        cluster that was cut off may answer for a moment with the log as it knew it.
        """
        self.doubts += 1
        print(f"the log was doubted: {why}")
        known = self.follower.known
        await self.follower.close()
        while True:
            self.follower = Follower(self.bus, known=known)
            try:
                await self.follower.open()
            except (LogDiscontinued, BusError):
                await asyncio.sleep(0.2)
            else:
                return

    async def begin_anew(self) -> None:
        """Forget what was read: the log was recovered."""
        await self.follower.close()
        self.follower = Follower(self.bus)
        await self.follower.open()

    async def append(self, subject: str, data: Payload, *, now_ns: int, traceparent: str = "") -> int:
        """Until stored: a client, too, tells a fact until it is acknowledged."""
        draft = draft_of(data, now_ns=now_ns, traceparent=traceparent)
        while True:
            try:
                return (await self.bus.append(subject, encode(draft), message_id=draft.id)).seq
            except BusError:
                await asyncio.sleep(0.1)

    async def raise_demand(
        self, name: str, *command: str, now_ns: int, traceparent: str = "", **more: Any
    ) -> int:
        components = more.pop("components", None) or (Component(command=command, stop_grace_seconds=0.5),)
        request = more.pop("resources", None) or Request(memory_bytes=4 * GIB)
        data = DemandRaised(
            demand=name,
            project="nlp",
            owner=Owner(name="ann"),
            resources=request,
            components=components,
            **more,
        )
        return await self.append(subjects.demand("nlp"), data, now_ns=now_ns, traceparent=traceparent)

    async def ask(self, what: str, **question: Any) -> Answer:
        for _ in range(200):
            try:
                body = await self.bus.request(subjects.query(what), msgspec.json.encode(Question(**question)))
            except BusError:
                await asyncio.sleep(0.1)
                continue
            return msgspec.json.decode(body, type=Answer)
        raise AssertionError(f"nobody answers {what}")

    def kill_part(self, part: str) -> None:
        """SIGKILL, and start it again, as a supervisor would."""
        process = self._processes[part]
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.kills += 1
        self.start_part(part)

    async def kill_server(self) -> None:
        await self.server.kill()
        self.kills += 1
        await self.server.start()

    async def power_off(self, parts: tuple[str, ...]) -> None:
        """A machine went dark: the bus and these parts of it at once."""
        await self.server.kill()
        for part in parts:
            process = self._processes[part]
            process.kill()
            process.wait()
        self._dark = parts

    async def power_on(self) -> None:
        await self.server.start()
        for part in self._dark:
            self.start_part(part)

    def ended_parts(self) -> list[str]:
        return [p for p, process in self._processes.items() if process.poll() is not None]

    async def close(self) -> None:
        await self.follower.close()
        await self.bus.close()
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                await asyncio.to_thread(process.wait, 15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._urls is None:
            await self.server.stop()
        kill_marked(f"RIGBOOK_CLUSTER={self.cluster}")

"""A simulated container engine: `Engines` over a machine. It has no memory of its own; the machine has."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rigbook_nodeagent.engines.protocol import Ended, EngineError, Launch, Running, StartRefused
from rigbook_schemas.values import Engine, StopScope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from rigbook_nodeagent.strangers import Container

    from tests.simulation.machine import Machine, Part

__all__ = ["SimEngine"]

INSIST_SECONDS = 5.0
HANG_SECONDS = 10.0  # the shipped engines give up on a call after a time, too
CALL_SECONDS = 0.01


class SimEngine:
    """One agent's connection to the engine."""

    def __init__(self, machine: Machine, kind: Engine, began: Callable[[Launch], None]) -> None:
        self._machine = machine
        self._kind = kind
        self._began = began  # the auditor's: told before anything starts
        self._hinted = asyncio.Event()
        machine.hinted[kind] = self._hinted.set

    @property
    def kind(self) -> Engine:
        return self._kind

    @property
    def facts(self) -> str:
        return "simulated"

    async def open(self) -> None:
        await self._call()

    async def _call(self) -> None:
        await asyncio.sleep(CALL_SECONDS)
        if self._machine.engine_hangs:
            await asyncio.sleep(HANG_SECONDS)
            raise EngineError("no answer from the engine within its time-out")
        if self._machine.engine_away and self._kind is Engine.DOCKER:
            raise EngineError("the engine's socket is not there")

    async def start(self, launch: Launch) -> Running:
        if (launch.epoch, launch.component.name) not in self._machine.parts:
            self._began(launch)
        await self._call()
        for word in launch.component.command:
            if word.startswith("refuse:"):
                self._machine.by_itself.add(launch.epoch)
                raise StartRefused(word.partition(":")[2], "as the command says")
        return self._running(self._machine.start(launch, self._kind))

    async def stop(self, running: Running, *, grace_seconds: float, scope: StopScope) -> None:
        await self._call()
        part = self._machine.parts.get((running.epoch, running.component))
        if part is None:
            return
        everything = scope is StopScope.EVERYTHING
        part.stop_ordered = True
        for kill, seconds in ((False, grace_seconds), (True, INSIST_SECONDS)):
            self._machine.signal(part, kill=kill, everything=everything)
            if await self._gone(part, everything, seconds):
                return
            if self._machine.engine_hangs or (self._machine.engine_away and self._kind is Engine.DOCKER):
                raise EngineError("the engine went away while it stopped a component")
        raise EngineError(f"{running.component} of epoch {running.epoch} does not end after SIGKILL")

    async def _gone(self, part: Part, everything: bool, seconds: float) -> bool:
        """Wait until nothing in scope lives."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            left = [
                pid for pid in self._machine.living(part) if everything or self._machine.procs[pid].grouped
            ]
            if not left and not part.running:
                return True
            wait = until - loop.time()
            if wait <= 0:
                return False
            watcher: asyncio.Future[None] = loop.create_future()
            part.watchers.append(watcher)
            await asyncio.wait((watcher,), timeout=wait)

    async def signal(self, running: Running, name: str) -> None:
        await self._call()
        part = self._machine.parts.get((running.epoch, running.component))
        if part is not None:
            self._machine.signal(part, kill=name == "SIGKILL", everything=False)

    async def execute(self, running: Running, command: tuple[str, ...]) -> int:
        await self._call()
        return 0

    async def inventory(self) -> Sequence[Running]:
        await self._call()
        return [self._running(part) for part in self._machine.parts.values() if part.kind is self._kind]

    async def containers(self) -> Mapping[str, Container]:
        return {}

    async def inspect(self, epoch: int, component: str) -> Running | None:
        await self._call()
        part = self._machine.parts.get((epoch, component))
        return self._running(part) if part is not None and part.kind is self._kind else None

    async def remove(self, running: Running) -> None:
        await self._call()
        part = self._machine.parts.get((running.epoch, running.component))
        if part is None:
            return
        if part.running or self._machine.living(part):
            raise EngineError(f"{running.component} of epoch {running.epoch} still has processes")
        del self._machine.parts[part.key]

    async def ends(self) -> AsyncIterator[Ended]:
        while True:
            hints, self._machine.hints[self._kind] = self._machine.hints[self._kind], []
            for epoch, component, ref in hints:
                yield Ended(epoch=epoch, component=component, ref=ref)
            self._hinted.clear()
            await self._hinted.wait()

    async def logs(self, running: Running, *, follow: bool, lines_max: int) -> AsyncIterator[bytes]:
        await self._call()
        yield b"simulated\n"

    async def close(self) -> None:
        self._machine.hinted.pop(self._kind, None)

    def _running(self, part: Part) -> Running:
        launch = part.launch
        return Running(
            cluster=launch.cluster,
            node=launch.node,
            demand=launch.demand,
            epoch=launch.epoch,
            component=launch.component.name,
            engine=part.kind,
            ref=part.ref,
            running=part.running,
            pids=self._machine.living(part),
            since=part.since,
            cards=launch.cards,
            exit_code=part.exit_code,
            signal=part.signal,
            ended=part.ended,
            stopped_by_us=part.stop_ordered,
        )

"""A whole cell in this process over the in-memory bus, with real processes as workloads, whose log can be lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import rigbook_ledger.service as ledger_service
import rigbook_nodeagent.service as agent_service
import rigbook_placer.service as placer_service
import rigbook_reaper.service as reaper_service
from rigbook.client import Client
from rigbook.failures import NoAnswer
from rigbook.recovery.execute import carry_out
from rigbook.recovery.plan import Plan, plan
from rigbook.recovery.survey import Survey, survey
from rigbook_bus.clock import SystemClock
from rigbook_bus.memory import MemoryBus, MemoryServer
from rigbook_bus.runner import random_id
from rigbook_ledger.audit import audit
from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import State
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas.queries import Question
from rigbook_schemas.values import GIB, Component, Mode, Owner, Request
from rigbook_schemas.wire import decode

from tests.e2e.leavings import kill_marked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["RecoveryCell"]

CLOCK = SystemClock()
SOON_SECONDS = 20.0


class Brisk(SystemClock):
    """Real time, and a wait of seconds for nothing is cut short: safe mode looks again sooner."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.1))


BRISK = Brisk()


class RecoveryCell:
    """Ledger, placer, reaper, agents `a` and `b`: each may be stopped and started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = MemoryServer()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        # Another test's epochs are the same small numbers: nobody's processes must pass for another's.
        self.cluster = f"t-{random_id()[:8]}"

    async def open(self, *agents: str) -> None:
        self.bus = await MemoryBus.connect(self.server, name="test")
        self.client = Client(self.bus, source="operator/test")
        for part in ("ledger", "placer", "reaper", *agents):
            await self.start(part)
        await self.until(lambda s: len(s.nodes) == len(agents))

    async def start(self, part: str) -> None:
        bus = await MemoryBus.connect(self.server, name=part)
        ready = asyncio.Event()
        if part == "ledger":
            body = ledger_service.serve(
                bus,
                ledger_service.Options(data=self.folder / part),
                clock=BRISK,
                new_id=random_id,
                ready=ready,
            )
        elif part.startswith("placer"):
            body = placer_service.serve(
                bus, placer_service.Options(data=self.folder / part), clock=BRISK, new_id=random_id
            )
        elif part == "reaper":
            body = reaper_service.serve(
                bus, reaper_service.Options(data=self.folder / part), clock=BRISK, new_id=random_id
            )
        else:
            options = agent_service.Options(
                node=part,
                data=self.folder / part,
                cluster=self.cluster,
                gpus="sim:2xRTX4090",
                heartbeat_seconds=0.2,
            )
            body = agent_service.serve(bus, options, clock=BRISK, new_id=random_id)
        self.tasks[part] = asyncio.create_task(body, name=part)
        if part == "ledger":
            await asyncio.wait_for(ready.wait(), SOON_SECONDS)

    async def stop(self, part: str) -> None:
        task = self.tasks.pop(part)
        task.cancel()
        _, waiting = await asyncio.wait({task}, timeout=SOON_SECONDS)
        if waiting:
            for one in asyncio.all_tasks():
                one.print_stack()
        assert not waiting, f"{part} does not end"

    async def close(self) -> None:
        """Nothing of it is left, however the test ended."""
        for part in list(self.tasks):
            await self.stop(part)
        kill_marked(f"RIGBOOK_CLUSTER={self.cluster}")
        await self.bus.close()
        self.server.stop()

    # -- the log ----------------------------------------------------------------------------

    def state(self) -> State:
        """The fold of what is on the stream right now."""
        stream = self.server.streams.get(subjects.LEDGER_STREAM)
        state = State()
        for m in stream.records.values() if stream is not None else ():
            state = evolve(state, decode(m.seq, m.subject, m.received_ns, m.body))
        assert audit(state) == []
        return state

    def last_seq(self) -> int:
        return self.server.streams[subjects.LEDGER_STREAM].last_seq

    async def until(self, what: Callable[[State], bool], seconds: float = SOON_SECONDS) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not what(self.state()):
                    for name, task in self.tasks.items():
                        assert not task.done(), f"{name} ended: {task.exception()!r}"
                    await asyncio.sleep(0.05)
        except TimeoutError:
            state = self.state()
            told = {d: (x.phase, x.epoch) for d, x in state.demands.items()}
            raise AssertionError(f"it did not come: {told}, findings {state.findings[-5:]}") from None

    async def demand(self, name: str, *command: str, node: str = "", **more: Any) -> None:
        await self.client.raise_demand(
            e.DemandRaised(
                demand=name, project="nlp", owner=Owner(name="ann"),
                resources=Request(memory_bytes=4 * GIB, mode=Mode.EXCLUSIVE, node=node),
                components=(Component(command=command or ("sleep", "600"), stop_grace_seconds=0.5),), **more,
            )
        )  # fmt: skip

    async def ledger_says(self, safe: bool) -> None:
        async with asyncio.timeout(SOON_SECONDS):
            while True:
                with contextlib.suppress(NoAnswer):  # while it makes its book anew
                    if (await self.client.ask("status", Question())).answer.safe_mode is safe:
                        return
                await asyncio.sleep(0.05)

    async def agents_distrust(self, *agents: str) -> Survey:
        async with asyncio.timeout(SOON_SECONDS):
            while True:
                found = await survey(self.client)
                if set(found.distrusting) >= set(agents):
                    return found
                await asyncio.sleep(0.05)

    # -- the operator -----------------------------------------------------------------------

    async def recover(self, *without: str, without_copy: bool = False) -> Plan:
        found = await survey(self.client)
        intended = plan(
            found, without=frozenset(without), without_copy=without_copy, by="grace", reason="a test"
        )
        assert not intended.refusals, intended.refusals
        await carry_out(
            self.client, found, intended, by="grace", reason="a test", now_ns=time.time_ns, replicas=1,
            told=print,
        )  # fmt: skip
        return intended

"""The programs of a world: the shipped services, each with its own disk, clock and connection, under a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any

import rigbook_ledger.service as ledger_service
import rigbook_nodeagent.service as agent_service
import rigbook_placer.service as placer_service
import rigbook_reaper.service as reaper_service
from rigbook_bus.protocol import BusError
from rigbook_ledger.drift import Tolerance
from rigbook_nodeagent.equipment import Equipment
from rigbook_reaper.judge import Rules
from rigbook_reaper.liveness import Patience
from rigbook_schemas.values import DriftKind, Engine

from tests.simulation.cards import SimAttribution, SimGpus, SimHost, SimWorker
from tests.simulation.disk import Folder, MemoryStore, Shelf, open_inline
from tests.simulation.engine import SimEngine
from tests.simulation.loop import OUTSIDE, Process, SimClock
from tests.simulation.network import SimBus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.simulation.machine import Machine
    from tests.simulation.world import World

__all__ = ["PATIENCE", "Program", "QuietTelemetry"]

RESTART_SECONDS = 1.0
STOP_SECONDS_MAX = 12.0

# Waiting times of the reaper, shortened: the same rules, in minutes instead of hours.
RULES = Rules(
    graces={
        DriftKind.LEFTOVER: 4.0, DriftKind.MISSING: 8.0, DriftKind.SQUATTER: 6.0, DriftKind.WRONG_CARD: 6.0,
        DriftKind.OVERUSE: 8.0,
    },
    eviction_grace_seconds=2.0, reorder_seconds=8.0, reorder_seconds_max=30.0, republish_seconds=20.0,
)  # fmt: skip
TOLERANCE = Tolerance(stop_seconds=8.0, start_seconds=60.0, unreleased_seconds=20.0)
PATIENCE = Patience(
    silence_factor=5.0,
    silence_seconds_min=5.0,
    silence_seconds_max=30.0,
    startup_seconds=6.0,
    window_seconds=30.0,
)


class _Nothing:
    def add(self, *_: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def set(self, *_: object) -> None: ...


_NOTHING = _Nothing()


class QuietTelemetry:
    """Records nothing; hands the trace on."""

    def __getattr__(self, name: str) -> Any:
        return _NOTHING  # any instrument

    @contextlib.contextmanager
    def span(self, name: str, parent: str = "", **attributes: object) -> Iterator[str]:
        yield parent


class Program:
    """A service that its supervisor starts again whenever it ends."""

    def __init__(self, world: World, name: str, *, machine: Machine | None = None) -> None:
        self.name = name
        self.kind = name.partition("-")[0]
        self.machine = machine
        self.disk = Folder(world.root, name)
        self.shelf = Shelf()
        self.runs = 0
        self.process: Process | None = None
        self.bus: SimBus | None = None
        self.task: asyncio.Task[None] | None = None
        self.may_run = True
        self._world = world
        self._rng = random.Random(f"ids {world.plan.seed} {name}")
        wrong = self._rng.choice((0.0, 0.0, 0.0, 0.4, -0.4, 3.0, -3.0))
        self.clock = SimClock(world.loop, wrong_seconds=wrong, began=self._rng.uniform(0, 1000))
        self._keeps_snapshots = self._rng.random() < 0.7
        if machine is not None:
            machine.now = self.clock.text

    @property
    def up(self) -> bool:
        return (
            self.task is not None
            and not self.task.done()
            and self.process is not None
            and not self.process.dead
        )

    def new_id(self) -> str:
        return f"{self._rng.getrandbits(128):032x}"

    # -- life ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.up or not self.may_run:
            return
        self.runs += 1
        data = self.disk.next()
        self.process = Process(self.name, self._world.loop)
        self.bus = SimBus(self._world.server, name=self.name, process=self.process)
        self.task = self.process.spawn(self._main(self.bus, data))
        self.task.add_done_callback(self._ended, context=OUTSIDE)

    async def _main(self, bus: SimBus, data: Path) -> None:
        try:
            await self._serve(bus, data)
        finally:
            await bus.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task is not self.task or self.process is None or self.process.dead:
            return
        error = None if task.cancelled() else task.exception()
        if isinstance(error, BusError):
            self._world.count(f"ended by {type(error).__name__}", fault=False)
        elif error is not None:
            self._world.fail(
                "service_ended", f"{self.name} ended by itself: {type(error).__name__}: {error}", error
            )
        elif not task.cancelled():
            self._world.fail("service_ended", f"{self.name} returned")
        self._later(RESTART_SECONDS)

    def _later(self, seconds: float) -> None:
        self._world.loop.call_later(seconds, self.start, context=OUTSIDE)

    def kill(self, *, arrives: bool) -> None:
        """`kill -9`: between two awaits, with nothing put in order."""
        if not self.up or self.process is None or self.bus is None:
            return
        self.process.dead = True
        self.bus.hang_up(arrives=arrives)
        self.task = None

    def forget(self) -> None:
        """Its data folder is moved away."""
        self.disk.lose()
        self.shelf = Shelf()

    async def stop(self) -> None:
        """SIGTERM: it puts its things in order, and is killed when that takes too long."""
        task = self.task
        if not self.up or task is None:
            return
        if self.process is not None and self.process.stopped:
            self.process.go_on()
        self.may_run, may_run = False, self.may_run
        task.cancel()
        await asyncio.wait((task,), timeout=STOP_SECONDS_MAX)
        self.may_run = may_run
        if not task.done():
            self._world.count("stop took too long", fault=False)
            self.kill(arrives=True)

    # -- what it runs ----------------------------------------------------------------------------------------

    async def _serve(self, bus: SimBus, data: Path) -> None:
        telemetry: Any = QuietTelemetry()
        plan = self._world.plan
        common: dict[str, Any] = {"clock": self.clock, "new_id": self.new_id, "telemetry": telemetry}
        if self.kind == "ledger":
            options = ledger_service.Options(
                data=data, instance=self.name, snapshot_every=plan.snapshot_every
            )
            await ledger_service.serve(bus, options, open_store=self._open_store, **common)
        elif self.kind == "placer":
            placer = placer_service.Options(
                instance=self.name, data=data if self._keeps_snapshots else None, policy=plan.policy, patience_seconds=0.5,
                hopeless_seconds=5.0,
            )  # fmt: skip
            await placer_service.serve(bus, placer, **common)
        elif self.kind == "reaper":
            reaper = reaper_service.Options(
                instance=self.name, data=data if self._keeps_snapshots else None, rules=RULES, tolerance=TOLERANCE,
                patience=PATIENCE,
            )  # fmt: skip
            await reaper_service.serve(bus, reaper, **common)
        else:
            assert self.machine is not None
            agent = agent_service.Options(
                node=self.machine.name, data=data, cluster="sim", heartbeat_seconds=plan.heartbeat_seconds
            )
            await agent_service.serve(bus, agent, equipped=self._equipped, **common)

    async def _open_store(self, path: Path) -> Any:
        if self._world.plan.sqlite and self.name == "ledger-1":
            return await open_inline(path)
        return MemoryStore(self.shelf, path)

    def _equipped(self, options: agent_service.Options) -> Equipment:
        machine = self.machine
        assert machine is not None
        gpus = SimGpus(machine)
        return Equipment(
            gpus=gpus,
            engines={
                kind: SimEngine(machine, kind, self._world.auditor.starts)
                for kind in (Engine.DOCKER, Engine.PROCESS)
            },
            attribution=SimAttribution(machine),
            worker=SimWorker(gpus, machine, self.clock.monotonic),
            host=SimHost(machine),
        )

    # -- what it knows ---------------------------------------------------------------------------------------

    def folded(self) -> Any:
        """The state that this program has folded now; None when it has none."""
        coro: Any = None if self.task is None else self.task.get_coro()
        while coro is not None and getattr(coro, "cr_frame", None) is not None:
            seen = coro.cr_frame.f_locals
            if "book" in seen:
                return seen["book"].state
            follower = getattr(seen.get("self"), "_follower", None)
            if follower is not None:
                return follower.state
            keeping = seen.get("keeping")  # the ledger's body is a task of its own
            coro = keeping.get_coro() if isinstance(keeping, asyncio.Task) else coro.cr_await
        return None

"""One world: built from a plan, run to its end, judged. `run(plan)` gives a `Verdict`."""

from __future__ import annotations

import asyncio
import traceback
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec
from rigbook_ledger.audit import audit
from rigbook_ledger.digest import digest
from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import State
from rigbook_reaper.liveness import silence_allowed
from rigbook_schemas.subjects import LEDGER_STREAM
from rigbook_schemas.wire import decode

from tests.simulation.auditor import Auditor
from tests.simulation.disk import root_folder
from tests.simulation.happenings import Happenings
from tests.simulation.loop import SimClock, SimLoop, Stuck
from tests.simulation.machine import Machine
from tests.simulation.network import SimServer, Weather
from tests.simulation.programs import PATIENCE, Program
from tests.simulation.settled import differing, unsettled

if TYPE_CHECKING:
    from pathlib import Path

    from rigbook_bus.protocol import Message

    from tests.simulation.network import SimBus
    from tests.simulation.plan import Plan

__all__ = ["Failure", "Verdict", "World", "run"]

# Virtual seconds after the last fault within which everything must have come to rest.
SETTLE_SECONDS_MAX = 420.0
# For how long it must stay at rest to count.
REST_SECONDS = 3.0
EMPTY_SECONDS_MAX = 300.0


class Failure(msgspec.Struct, frozen=True):
    """What went wrong first. `code` names the check: a smaller plan fails alike when its code is the same."""

    code: str
    text: str
    at: float = 0.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a world ended."""

    seed: int
    failure: Failure | None
    digest: str
    virtual_seconds: float
    settled_seconds: float
    events: int
    steps: int
    faults: dict[str, int]
    counts: dict[str, int]
    kinds: dict[str, int]
    log: tuple[str, ...] = ()


class _Failed(Exception):
    pass


class World:
    """Everything of one run."""

    def __init__(self, plan: Plan, loop: SimLoop, root: Path) -> None:
        self.plan = plan
        self.loop = loop
        self.root = root
        self.failure: Failure | None = None
        self.faults: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.settled_seconds = 0.0
        self.clock = SimClock(loop)
        self.weather = Weather(plan.seed, latency_seconds=plan.latency_seconds, count=self.count)
        self.server = SimServer(self.clock, self.weather, self._saw)
        self.machines = {
            n.name: Machine(
                n.name, cards=n.cards, memory_gib=n.memory_gib, model=n.model, loop=loop, now=self.clock.text
            )
            for n in plan.nodes
        }
        self.auditor = Auditor(
            machines=self.machines,
            now=loop.time,
            fail=self.fail,
            acked=lambda node, seq: seq in self.server.acked.get(f"agent-{node}", ()),
            on_its_way=lambda: 12.0 if self.weather.was_bad else 1.5 + 4 * plan.latency_seconds,
            silence_seconds=silence_allowed(plan.heartbeat_seconds, PATIENCE),
            window_seconds=PATIENCE.window_seconds,
        )
        self.programs: dict[str, Program] = {}
        for kind, count in (("ledger", plan.ledgers), ("placer", plan.placers), ("reaper", plan.reapers)):
            for number in range(1, count + 1):
                self.programs[f"{kind}-{number}"] = Program(self, f"{kind}-{number}")
        for name, machine in self.machines.items():
            self.programs[f"agent-{name}"] = Program(self, f"agent-{name}", machine=machine)
        self.happenings = Happenings(self)

    def agent(self, node: str) -> Program:
        return self.programs[f"agent-{node}"]

    def count(self, what: str, *, fault: bool = True) -> None:
        counts = self.faults if fault else self.counts
        counts[what] = counts.get(what, 0) + 1

    def fail(self, code: str, text: str, error: BaseException | None = None) -> None:
        """The first failure is the verdict; the world ends."""
        if self.failure is None:
            if error is not None:
                text += "\n" + "".join(traceback.format_exception(error))[-3000:]
            self.failure = Failure(code, text, round(self.loop.time(), 3))
            self.loop.stop()

    def _saw(self, stream: str, message: Message, sender: SimBus | None) -> None:
        if stream == LEDGER_STREAM:
            self.auditor.event(message, sender)
        else:
            self.auditor.heartbeat(message)

    # -- the course of things --------------------------------------------------------------------------------

    async def live(self) -> None:
        for name, program in self.programs.items():
            if program.machine is None:
                self.loop.call_later(program.clock.monotonic() % 1.0, program.start)
            else:
                joins = next(n.joins_at for n in self.plan.nodes if f"agent-{n.name}" == name)
                self.loop.call_later(joins, program.start)
        await self.happenings.play()
        await self.happenings.heal()
        began = self.loop.time()
        left = await self._rest(SETTLE_SECONDS_MAX)
        self.settled_seconds = round(self.loop.time() - began, 3)
        if left:
            self.fail("not_settled", "; ".join(left[:6]))
            return
        if self.plan.empties:
            await self.happenings.withdraw_all()
            left = await self._rest(EMPTY_SECONDS_MAX)
            left = left or [f"epoch {epoch} still holds cards" for epoch in self.auditor.claims]
            if left:
                self.fail("not_emptied", "; ".join(left[:6]))
                return
        if self.plan.restarts:
            await self.happenings.restart_all()
            left = await self._rest(SETTLE_SECONDS_MAX)
            if left:
                self.fail("not_settled", "; ".join(left[:6]))
                return
        self._last_check()

    async def _rest(self, seconds_max: float) -> list[str]:
        """Until nothing is left to be done, for a while; what is left after `seconds_max`."""
        until = self.loop.time() + seconds_max
        rested = 0.0
        while True:
            left = unsettled(self)
            rested = 0.0 if left else rested + 1.0
            if rested > REST_SECONDS:
                return []
            if self.loop.time() > until:
                return left or ["it did not stay at rest"]
            await asyncio.sleep(1.0)

    def _last_check(self) -> None:
        """All who fold the log have the same state as a fresh fold of it, and the book has every event."""
        records = self.server.streams[LEDGER_STREAM].records
        state = State()
        for m in records.values():
            state = evolve(state, decode(m.seq, m.subject, m.received_ns, m.body))
        state.touched.clear()
        for finding in audit(state):
            self.fail("audit", f"{finding.code}: {finding.text}")
        for text in differing(self, digest(state)):
            self.fail("digests_differ", text)

    def verdict(self, *, log: tuple[str, ...] = ()) -> Verdict:
        hasher = blake2b(digest_size=16)
        events = 0
        stream = self.server.streams.get(LEDGER_STREAM)
        for m in stream.records.values() if stream is not None else ():
            hasher.update(b"%d %d %b " % (m.seq, m.received_ns, m.subject.encode()))
            hasher.update(m.body)
            events += 1
        rest = (
            self.loop.steps,
            self.loop.time(),
            sorted(self.faults.items()),
            self.failure and self.failure.code,
        )
        hasher.update(repr(rest).encode())
        return Verdict(
            seed=self.plan.seed,
            failure=self.failure,
            digest=hasher.hexdigest(),
            virtual_seconds=round(self.loop.time(), 3),
            settled_seconds=self.settled_seconds,
            events=events,
            steps=self.loop.steps,
            faults=self.faults,
            counts=self.counts,
            kinds=self.auditor.kinds,
            log=log,
        )


def run(plan: Plan, *, inspect: Any = None) -> Verdict:
    """Run one world to its end. `inspect(world)` is called before it is taken down."""
    with root_folder(f"{plan.seed}") as root:
        loop = SimLoop(plan.seed)
        world: World | None = None
        try:
            with loop.running():
                world = World(plan, loop, root)
            main = loop.create_task(world.live())
            try:
                loop.run_until_complete(main)
            except Stuck as error:
                world.fail("stuck", str(error))
            except RuntimeError:
                if world.failure is None:
                    raise
            if world.failure is None and loop.problems:
                world.fail("callback_failed", loop.problems[0])
            if inspect is not None:
                inspect(world)
            return world.verdict()
        finally:
            loop.end()

"""What happens in a world: each step of a plan carried out, and in the end everything mended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from rigbook.client import Client
from rigbook.failures import RigbookFailure
from rigbook_bus.protocol import BusError
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas.values import (
    GIB,
    Component,
    DriftKind,
    EvictionReason,
    Mode,
    Owner,
    Request,
    Restart,
    StopScope,
    Workload,
)
from rigbook_schemas.wire import Draft, encode

from tests.simulation.loop import Process
from tests.simulation.network import Condition, SimBus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rigbook_bus.memory_stream import MemoryStream
    from rigbook_schemas.events import Payload

    from tests.simulation.plan import Step
    from tests.simulation.world import World

__all__ = ["Happenings"]

WEATHER = ("ack_lost", "request_lost", "ack_slow", "delivery_slow", "delivery_again", "delivery_lost")
RETRY_SECONDS = 0.5
HEALABLE = (
    DriftKind.LEFTOVER, DriftKind.MISSING, DriftKind.SQUATTER, DriftKind.WRONG_CARD, DriftKind.OVERUSE,
)  # fmt: skip


class Happenings:
    """Carries out a plan."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.specs: dict[str, e.DemandRaised] = {}
        self._process = Process("people", world.loop)
        self._bus = SimBus(world.server, name="people", process=self._process)
        self._ids = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._calm = False
        self._right: MemoryStream | None = None  # the ledger stream, while another one is in its place

    def _id(self) -> str:
        self._ids += 1
        return f"people-{self.world.plan.seed}-{self._ids}"

    @property
    def client(self) -> Client:
        return Client(self._bus, source="client/people", now_ns=self.world.clock.now_ns, new_id=self._id)

    # -- the course ------------------------------------------------------------------------------------------

    async def play(self) -> None:
        plan, loop = self.world.plan, self.world.loop
        for number, step in enumerate(plan.steps):
            await asyncio.sleep(max(0.0, step.at - loop.time()))
            if step.is_fault and step.what not in WEATHER:
                self.world.count(step.what)
            act: Callable[[Step], Awaitable[None]] = getattr(
                self, f"_{'weather' if step.what in WEATHER else step.what}"
            )
            self._tasks.append(loop.create_task(self._one(act, step), name=f"step {number} {step.what}"))
        await asyncio.sleep(max(0.0, plan.chaos_seconds - loop.time()))

    async def _one(self, act: Callable[[Step], Awaitable[None]], step: Step) -> None:
        try:
            await act(step)
        except Exception as error:  # noqa: BLE001 - the world is told, and ends
            self.world.fail("world_broken", f"{step}: {error!r}", error)

    async def heal(self) -> None:
        """No more faults: everything is mended, every program runs, the operator lets the reaper heal."""
        world = self.world
        self._calm = True
        world.weather.conditions.clear()
        world.server.accept()
        if not world.server.running:
            world.server.start()
        self._put_back()
        for machine in world.machines.values():
            self._mend(machine)
        for program in world.programs.values():
            program.may_run = True
            program.shelf.full = False
            program.clock.wrong_seconds = max(-1.0, min(1.0, program.clock.wrong_seconds))
            if program.process is not None and program.process.stopped:
                program.process.go_on()
            if program.bus is not None and program.bus.is_cut:
                program.bus.restore()
            if program.process is not None:
                program.process.fuse = 0
            program.start()
        world.auditor.calm_since = world.loop.time()
        for kind in HEALABLE:
            await self._rule("healing", e.HealingSet(kind=kind, on=True, by="operator"))
        for seq in list(world.auditor.state.unknown_open):
            await self._rule("unknown", e.UnknownAccepted(seq=seq, by="operator"))

    def _mend(self, machine: Any) -> None:
        machine.lost.clear()
        machine.vanished.clear()
        machine.unreadable.clear()
        machine.engine_away = machine.engine_hangs = machine.driver_absent = machine.undead = False
        machine.driver_answers()
        for pid in [pid for pid, proc in machine.procs.items() if proc.epoch is None]:
            del machine.procs[pid]
        for proc in machine.orphans():  # by hand: no engine knows them
            del machine.procs[proc.pid]
        for part in list(machine.parts.values()):
            if part.stop_ordered and part.told("undead") is not None:
                machine.signal(part, kill=True, everything=True)

    async def restart_all(self) -> None:
        """An upgrade: every decider is stopped and started, and begins with what it has saved."""
        for program in self.world.programs.values():
            if program.kind != "agent":
                await program.stop()
                program.start()

    async def withdraw_all(self) -> None:
        for name, wish in list(self.world.auditor.wishes.items()):
            if not wish.over and wish.wanted:
                await self._withdraw_of(name, wish.spec.project)

    # -- clients ---------------------------------------------------------------------------------------------

    async def _tell(self, subject: str, data: Payload | bytes) -> None:
        """Until it is stored."""
        identity = self._id()
        body = data if isinstance(data, bytes) else encode(
            Draft(data=data, id=identity, source="client/people", time=self.world.clock.text())
        )  # fmt: skip
        while True:
            try:
                await self._bus.append(subject, body, message_id=identity)
            except BusError:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _rule(self, topic: str, payload: Payload) -> None:
        while True:
            try:
                await self.client.set_policy(topic, payload)
            except RigbookFailure:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _raise(self, step: Step) -> None:
        words = dict(w.partition(":")[::2] for w in step.words)
        does = tuple(
            w for w in step.words
            if w.partition(":")[0] in ("for", "fail", "daemon", "stubborn", "undead", "overuse", "wrongcard", "refuse")
        )  # fmt: skip
        first = Component(
            name="main",
            image="sim" if "docker" in words else "",
            command=("run", *does),
            stop_grace_seconds=1.5,
        )
        parts = [first]
        if "parts" in words:
            calm = tuple(w for w in does if w.startswith(("for:", "fail:")))
            parts.append(
                Component(
                    name="access", image="sim", gpu=False, command=("run", *calm), stop_grace_seconds=0.5
                )
            )
        spec = e.DemandRaised(
            demand=step.who,
            project=words["project"],
            owner=Owner(name="ann"),
            resources=Request(
                memory_bytes=int(step.number) * GIB,
                mode=Mode(words["mode"]),
                nodes=int(words.get("nodes", 1)),
                count=int(words.get("count", 1)),
            ),
            components=tuple(parts),
            workload=Workload.SERVICE if "service" in words else Workload.BATCH,
            priority=int(words["priority"]),
            max_run_seconds=float(words["limit"]) if "limit" in words else None,
            restart=Restart(policy=words.get("restart", "never"), attempts_max=2, backoff_seconds=0.5),
        )
        self.specs[step.who] = spec
        await self._tell(subjects.demand(spec.project), spec)

    async def _raise_again(self, step: Step) -> None:
        """A client that lost its answer, with a new message id: the same demand id a second time."""
        spec = self.specs.get(step.who)
        if spec is not None:
            await self._tell(subjects.demand(spec.project), spec)

    async def _withdraw(self, step: Step) -> None:
        spec = self.specs.get(step.who)
        if spec is not None:
            await self._withdraw_of(step.who, spec.project)

    async def _withdraw_of(self, name: str, project: str) -> None:
        await self._tell(subjects.demand(project), e.DemandWithdrawn(demand=name, project=project, by="ann"))

    async def _withdraw_foreign(self, step: Step) -> None:
        await self._withdraw_of(step.who, "stranger")

    async def _withdraw_unknown(self, step: Step) -> None:
        await self._withdraw_of("nobody", "nlp")

    async def _malformed(self, step: Step) -> None:
        subject, body = (
            ("rig.demand.nlp", b"{"),
            ("rig.run.n0", b'{"id":"x","source":"s","type":"dev.rigbook.started.v1","data":{"demand":1}}'),
            ("rig.release.n0", b"\xff\xfe"),
            ("rig.drift.n0", b'{"id":"y","source":"s","type":"dev.rigbook.bound.v1","data":{}}'),
        )[int(step.number)]
        await self._tell(subject, body)

    async def _alien(self, step: Step) -> None:
        """An event of a kind that a newer version made; the operator accepts it after a while."""
        subject = ("rig.own.policy.future", "rig.evict.n0", "rig.run.n0")[int(step.number)]
        body = msgspec.json.encode(
            {"id": self._id(), "source": "s", "type": "dev.rigbook.future.v9", "data": {}}
        )
        await self._tell(subject, body)
        await asyncio.sleep(step.seconds)
        for seq in list(self.world.auditor.state.unknown_open):
            await self._rule("unknown", e.UnknownAccepted(seq=seq, by="operator"))

    # -- operators -------------------------------------------------------------------------------------------

    async def _cordon(self, step: Step) -> None:
        await self._rule("node", e.NodeCordoned(node=step.who, by="operator", reason="maintenance"))
        await asyncio.sleep(step.seconds)
        await self._rule("node", e.NodeUncordoned(node=step.who, by="operator"))

    async def _quota(self, step: Step) -> None:
        await self._rule(
            "quota", e.QuotaSet(project=step.who, memory_bytes=int(step.number) * GIB, by="operator")
        )

    async def _mode(self, step: Step) -> None:
        mode = None if step.words[0] == "none" else Mode(step.words[0])
        await self._rule("mode", e.ModeSet(card=step.who, mode=mode, by="operator"))

    async def _quarantine(self, step: Step) -> None:
        await self._rule("gpu", e.GpuQuarantined(card=step.who, by="operator", reason="looks odd"))
        await asyncio.sleep(step.seconds)
        await self._rule("gpu", e.GpuRestored(card=step.who, by="operator"))

    async def _heal(self, step: Step) -> None:
        for word in step.words:
            await self._rule("healing", e.HealingSet(kind=DriftKind(word), on=True, by="operator"))
        await asyncio.sleep(step.seconds)
        if not self._calm:
            for word in step.words:
                await self._rule("healing", e.HealingSet(kind=DriftKind(word), on=False, by="operator"))

    async def _evict(self, step: Step) -> None:
        """An operator drains: the demand goes back into the queue, or ends."""
        claims = self.world.auditor.claims
        if not claims:
            return
        epoch = sorted(claims)[int(step.who.removeprefix("d")) % len(claims)]
        claim = claims[epoch]
        other = next((d for d in self.specs if d != claim.demand), "nobody")
        order = e.EvictionOrdered(
            demand=other if step.number == 2 else claim.demand,  # 2: a slip of the hand
            epoch=epoch, nodes=claim.nodes, reason=EvictionReason.DRAIN, by="operator",
            grace_seconds=1.0, requeue=step.number == 1, scope=StopScope.COMPONENTS,
        )  # fmt: skip
        await self._tell(subjects.evict(claim.nodes), order)

    async def _ask(self, step: Step) -> None:
        for what in ("status", "demands", "cards"):
            try:
                await self.client.ask(what)
            except RigbookFailure:
                continue

    # -- faults of the bus -----------------------------------------------------------------------------------

    async def _weather(self, step: Step) -> None:
        condition = Condition(f"{self.world.plan.seed} {step}", step.who, **{step.what: step.number})
        self.world.weather.conditions.append(condition)
        await asyncio.sleep(step.seconds)
        if condition in self.world.weather.conditions:
            self.world.weather.conditions.remove(condition)

    async def _server_away(self, step: Step) -> None:
        self.world.server.stop()
        await asyncio.sleep(step.seconds)
        if not self.world.server.running:
            self.world.server.start()

    async def _disk_full(self, step: Step) -> None:
        self.world.server.refuse()
        await asyncio.sleep(step.seconds)
        self.world.server.accept()

    async def _behind(self, step: Step) -> None:
        """The server comes back without the end of the log; later somebody mounts the right disk."""
        stream = self.world.server.streams.get(subjects.LEDGER_STREAM)
        if stream is not None and self._right is None and stream.last_seq > step.number + 1:
            await self._wrong_log(stream.last_seq - int(step.number), step.seconds)

    async def _empty(self, step: Step) -> None:
        if self._right is None and subjects.LEDGER_STREAM in self.world.server.streams:
            await self._wrong_log(0, step.seconds)

    async def _wrong_log(self, last_seq: int, seconds: float) -> None:
        self.world.auditor.watching = False
        for program in self.world.programs.values():
            if program.up and program.bus is not None:
                program.bus.knows_more = program.bus.read_to > last_seq
        self._right = self.world.server.swap_ledger(last_seq)
        await asyncio.sleep(seconds)
        self._put_back()

    def _put_back(self) -> None:
        if self._right is None:
            return
        right, self._right = self._right, None
        self.world.server.put_back(right)
        self.world.auditor.watching = True
        misled_names, self.world.auditor.misled = self.world.auditor.misled, set()
        for program in self.world.programs.values():
            # Who knew less than the wrong log showed took it for the right one; what an agent told it went away
            # with it. The operator, who put the right one back, starts these anew without what they had read.
            misled = not (program.bus is not None and program.bus.knows_more)
            if program.name in misled_names or (misled and program.kind != "agent"):
                program.kill(arrives=True)
                program.forget()
                program.start()
            if program.bus is not None:
                program.bus.knows_more = False

    # -- faults of programs ----------------------------------------------------------------------------------

    async def _kill(self, step: Step) -> None:
        """At a later step of its own: between any two awaits."""
        program = self.world.programs[step.who]
        process = program.process
        if not program.up or process is None:
            return
        if step.number:
            process.at_fuse = lambda: program.kill(arrives=bool(int(step.number) % 2))
            process.fuse = int(step.number)
            await asyncio.sleep(2.0)
            if program.process is process:
                process.fuse = 0
        program.kill(arrives=bool(int(step.number) % 2))
        await asyncio.sleep(step.seconds)
        program.start()

    async def _agent_killed(self, step: Step) -> None:
        """Its containers run on."""
        await self._kill(msgspec.structs.replace(step, who=f"agent-{step.who}"))

    async def _restart(self, step: Step) -> None:
        program = self.world.programs[step.who]
        await program.stop()
        await asyncio.sleep(step.seconds)
        program.start()

    async def _stale_snapshot(self, step: Step) -> None:
        """An older copy of its data folder comes back (from a backup)."""
        program = self.world.programs[step.who]
        if program.kind == "agent":
            return  # an agent's order book is no cache: that is `reboot`
        await program.stop()
        if not program.disk.exists:
            return
        stale = program.disk.now
        shelf = program.shelf.copy()
        program.start()
        await asyncio.sleep(step.seconds)
        program.kill(arrives=True)
        program.disk.back_to(stale)
        program.shelf = shelf
        program.start()

    async def _pause(self, step: Step) -> None:
        process = self.world.programs[step.who].process
        if process is None or process.dead:
            return
        process.stopped = True
        await asyncio.sleep(step.seconds)
        if process.stopped:
            process.go_on()

    async def _cut(self, step: Step) -> None:
        bus = self.world.programs[step.who].bus
        if bus is None:
            return
        bus.cut()
        await asyncio.sleep(step.seconds)
        bus.restore()

    async def _clock_step(self, step: Step) -> None:
        self.world.programs[step.who].clock.wrong_seconds += step.number

    # -- faults of nodes -------------------------------------------------------------------------------------

    async def _node_silent(self, step: Step) -> None:
        await self._cut(msgspec.structs.replace(step, who=f"agent-{step.who}"))

    async def _all_silent(self, step: Step) -> None:
        buses = [p.bus for p in self.world.programs.values() if p.kind == "agent" and p.bus is not None]
        for bus in buses:
            bus.cut()
        await asyncio.sleep(step.seconds)
        for bus in buses:
            bus.restore()

    async def _reboot(self, step: Step) -> None:
        """A power cut: nothing runs any more, and the end of the order book was never on the disk."""
        program = self.world.agent(step.who)
        machine = self.world.machines[step.who]
        program.may_run = False
        program.kill(arrives=False)
        machine.reboot()
        if step.number == 1 and program.disk.exists:
            book = program.disk.now / "orders.jsonl"
            if book.exists():
                lines = book.read_bytes().splitlines(keepends=True)
                book.write_bytes(b"".join(lines[: max(1, len(lines) * 2 // 3)]))
        elif step.number == 2:
            program.disk.lose()
        await asyncio.sleep(step.seconds)
        program.may_run = True
        program.start()

    def _machine_of(self, card: str) -> Any:
        return self.world.machines[card.split("-")[1]]

    async def _card_lost(self, step: Step) -> None:
        await self._on_card(step, self._machine_of(step.who).lost)

    async def _card_vanished(self, step: Step) -> None:
        await self._on_card(step, self._machine_of(step.who).vanished)

    async def _card_unreadable(self, step: Step) -> None:
        await self._on_card(step, self._machine_of(step.who).unreadable)

    async def _on_card(self, step: Step, cards: set[str]) -> None:
        cards.add(step.who)
        await asyncio.sleep(step.seconds)
        cards.discard(step.who)

    async def _removed_by_hand(self, step: Step) -> None:
        parts = [p for p in self.world.machines[step.who].parts.values() if p.running]
        if parts:
            self.world.machines[step.who].remove_by_hand(parts[0])

    async def _orphaned(self, step: Step) -> None:
        parts = [
            p
            for p in self.world.machines[step.who].parts.values()
            if p.running and p.launch.component.image and p.launch.component.gpu
        ]
        if parts:
            self.world.machines[step.who].orphan(parts[0])

    async def _flag(self, step: Step, name: str) -> None:
        machine = self.world.machines[step.who]
        setattr(machine, name, True)
        await asyncio.sleep(step.seconds)
        setattr(machine, name, False)

    async def _engine_away(self, step: Step) -> None:
        await self._flag(step, "engine_away")

    async def _engine_hangs(self, step: Step) -> None:
        await self._flag(step, "engine_hangs")

    async def _driver_absent(self, step: Step) -> None:
        await self._flag(step, "driver_absent")

    async def _undead(self, step: Step) -> None:
        await self._flag(step, "undead")

    async def _driver_hangs(self, step: Step) -> None:
        machine = self.world.machines[step.who]
        machine.driver_hangs = True
        await asyncio.sleep(step.seconds)
        machine.driver_answers()

    async def _foreign_process(self, step: Step) -> None:
        machine = self._machine_of(step.who)
        proc = machine.spawn({step.who: int(step.number) * GIB})
        await asyncio.sleep(step.seconds)
        machine.procs.pop(proc.pid, None)

    async def _ledger_disk_full(self, step: Step) -> None:
        program = self.world.programs[step.who]
        program.shelf.full = True
        await asyncio.sleep(step.seconds)
        program.shelf.full = False

    def left(self) -> bool:
        """Do happenings go on that were begun?"""
        return any(not task.done() for task in self._tasks)

"""The placer as a service over the in-memory bus, on virtual time.

`World` plays everybody else: clients, operators, an agent that does what it is told. Asserted is what then
stands on the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
import pytest
from rigbook_bus.memory import Faults, MemoryBus, MemoryServer
from rigbook_ledger.audit import audit
from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import Phase, State
from rigbook_ledger.streams import ensure_streams
from rigbook_placer.rules import HELD_AFTER
from rigbook_placer.service import Options, serve
from rigbook_schemas import events as e
from rigbook_schemas import subjects as s
from rigbook_schemas.values import GIB, CardInventory, EvictionReason, Mode, VerdictClass
from rigbook_schemas.wire import Draft, decode, encode, rfc3339

from tests.unit.ledger_story import subject_of
from tests.unit.placer_fleet import Fleet
from tests.unit.virtual_time import VirtualClock, run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable

    from rigbook_schemas.wire import Record

SPECS = Fleet()


class World:
    """A server, placers, and everybody else."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.clock = VirtualClock()
        self.server = MemoryServer(self.clock, faults)
        self.ids = iter(range(10**9))
        self.tasks: list[asyncio.Task[None]] = []
        self.state = State()
        self.log: list[Record] = []
        self.broken: set[str] = set()  # demands that cannot be started
        self.saving_seconds = 1.0  # how long an evicted workload takes to end

    async def begin(self, *nodes: str, cards: int = 2, placers: int = 1) -> World:
        self.bus = await MemoryBus.connect(self.server, name="others")
        await ensure_streams(self.bus)
        for node in nodes:
            inventory = tuple(
                CardInventory(uuid=f"GPU-{node}-{i}", index=i, model="RTX 4090", memory_bytes=24 * GIB)
                for i in range(cards)
            )
            await self.tell(e.NodeJoined(node=node, incarnation="1", engines=("process",), cards=inventory))
        self.tasks.append(asyncio.create_task(self._agents()))
        for number in range(placers):
            bus = await MemoryBus.connect(self.server, name=f"placer-{number}")
            ready = asyncio.Event()
            options = Options(instance=f"placer-{number}", patience_seconds=0.5, hopeless_seconds=2.0)
            self.tasks.append(
                asyncio.create_task(
                    serve(
                        bus, options, clock=self.clock, new_id=lambda: f"{next(self.ids):032x}", ready=ready
                    )
                )
            )
            async with asyncio.timeout(30):
                await ready.wait()
        return self

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        for task in self.tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def tell(self, data: e.Payload, *, cause: str = "", name: str = "") -> int:
        draft = Draft(
            data=data, id=name or f"other-{next(self.ids)}", source="test", time=rfc3339(self.clock.now_ns()),
            causation=cause,
        )  # fmt: skip
        return (await self.bus.append(subject_of(data), encode(draft), message_id=draft.id)).seq

    async def demand(self, name: str, **asked: object) -> None:
        await self.tell(SPECS.spec(name, **asked))  # type: ignore[arg-type]

    async def _agents(self) -> None:
        """Starts what is bound (or not), and ends what is to be stopped."""
        tail = await self.bus.tail(s.LEDGER_STREAM, start_seq=1)
        while True:
            for m in await tail.batch(max_messages=1000, wait_seconds=None):
                record = decode(m.seq, m.subject, m.received_ns, m.body)
                self.log.append(record)
                self.state = evolve(self.state, record)
                data = record.data
                if isinstance(data, e.Bound):
                    for share in data.shares:
                        self.tasks.append(asyncio.create_task(self._start(record, share.node)))
                elif isinstance(data, e.EvictionOrdered):
                    for node in data.nodes:
                        self.tasks.append(asyncio.create_task(self._stop(record, node)))

    async def _start(self, record: Record, node: str) -> None:
        data = record.data
        assert isinstance(data, e.Bound)
        if data.demand not in self.broken:
            await self.tell(e.Started(demand=data.demand, epoch=record.seq, node=node))
            return
        await self.tell(
            e.Exited(
                demand=data.demand,
                epoch=record.seq,
                node=node,
                verdict=VerdictClass.IMAGE_PULL,
                sentence="denied",
            )
        )
        await self.tell(
            e.Released(demand=data.demand, epoch=record.seq, node=node), name=f"released-{record.seq}-{node}"
        )

    async def _stop(self, record: Record, node: str) -> None:
        data = record.data
        assert isinstance(data, e.EvictionOrdered)
        await asyncio.sleep(self.saving_seconds)
        await self.tell(
            e.Released(demand=data.demand, epoch=data.epoch, node=node),
            cause=record.id, name=f"released-{data.epoch}-{node}",
        )  # fmt: skip

    # -- reading --------------------------------------------------------------------------------

    async def until(self, what: Callable[[], bool], seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not what():
                await asyncio.sleep(0.05)

    async def until_phase(self, name: str, phase: Phase, seconds: float = 60.0) -> None:
        await self.until(
            lambda: name in self.state.demands and self.state.demands[name].phase is phase, seconds
        )

    def last(self, kind: type[e.Payload], demand: str) -> Record:
        return [r for r in self.log if isinstance(r.data, kind) and getattr(r.data, "demand", "") == demand][
            -1
        ]

    def cards_of(self, demand: str) -> list[str]:
        binding = self.state.bindings[self.state.demands[demand].epoch]
        return [a.card for share in binding.shares for a in share.allotments]


def test_what_fits_is_bound_and_what_does_not_is_told_why_once() -> None:
    async def main() -> None:
        world = await World().begin("a")
        await world.demand("one")
        await world.demand("two")
        await world.demand("three")
        await world.until_phase("two", Phase.RUNNING)
        await asyncio.sleep(30)
        told = [r for r in world.log if isinstance(r.data, e.Deferred)]
        assert [r.data.demand for r in told] == ["three"]  # type: ignore[union-attr]
        await world.demand("huge", gib=80)
        await world.until_phase("huge", Phase.REFUSED)
        await world.demand("unit", gib=0)
        await world.until_phase("unit", Phase.REFUSED)
        await world.end()

    run_virtual(main())


def test_a_preemption_is_one_chain_and_nothing_slips_in() -> None:
    """raised → eviction.ordered → released → bound, each the cause of the next; others wait meanwhile."""

    async def main() -> None:
        world = await World().begin("a", placers=2)
        world.saving_seconds = 20.0
        await world.demand("victim", count=2, priority=25, preemptible=True)
        await world.until_phase("victim", Phase.RUNNING)
        await asyncio.sleep(400)
        await world.demand("asks", priority=60, preempts=True)
        await world.until_phase("victim", Phase.RELEASING)
        # One card will be free for anybody: the two that come now have the higher priority, and get that one only.
        await world.demand("sneak-1", priority=70)
        await world.demand("sneak-2", priority=70)
        await world.until_phase("asks", Phase.RUNNING)
        await world.until_phase("sneak-1", Phase.RUNNING)
        await asyncio.sleep(5)
        assert world.state.demands["sneak-2"].phase is Phase.WAITING
        assert world.state.demands["victim"].phase is Phase.WAITING
        raised, ordered = world.last(e.DemandRaised, "asks"), world.last(e.EvictionOrdered, "victim")
        released, bound = world.last(e.Released, "victim"), world.last(e.Bound, "asks")
        chain = [ordered.causation, released.causation, bound.causation]
        assert chain == [raised.id, ordered.id, released.id]
        assert ordered.data.reason is EvictionReason.PREEMPTION  # type: ignore[union-attr]
        assert len([r for r in world.log if isinstance(r.data, e.EvictionOrdered)]) == 1
        assert audit(world.state) == []
        assert world.state.findings == []
        await world.end()

    run_virtual(main())


def test_a_demand_whose_starts_fail_lets_others_go_ahead() -> None:
    async def main() -> None:
        world = await World().begin("a", cards=1)
        world.broken.add("broken")
        await world.demand("broken", priority=70)
        await world.until(lambda: world.state.demands["broken"].failures == 3)
        await world.demand("other", priority=25)
        await world.until_phase("other", Phase.RUNNING)
        await world.tell(e.DemandWithdrawn(demand="other", project="nlp"))
        await world.until(lambda: world.state.demands["broken"].failures == HELD_AFTER, 4000)
        await asyncio.sleep(3600)
        assert (
            len([r for r in world.log if isinstance(r.data, e.Bound) and r.data.demand == "broken"])
            == HELD_AFTER
        )
        (reason,) = world.state.demands["broken"].reasons
        assert (reason.code, reason.at) == ("bind_backoff", "")
        await world.end()

    run_virtual(main())


class Late(Faults):
    """What a placer sends and hears takes 20 ms, so that others get in between."""

    def request_seconds(self, client: str, subject: str) -> float | None:
        return 0.02 if client.startswith("placer") else 0.0

    def delivery_seconds(self, client: str, stream: str, seq: int) -> float:
        return 0.02 if client.startswith("placer") else 0.0


@pytest.mark.parametrize("placers", [1, 2])
def test_a_binding_that_races_with_a_switch_of_mode_loses(placers: int) -> None:
    """Demands come while the card is being switched: each is bound before the switch stands, or not on this card."""

    async def main() -> None:
        world = await World(Late()).begin("a", cards=1, placers=placers)
        for number in range(12):
            name = f"d-{number}"
            await world.demand(name, mode=Mode.TIME_SLICE, gib=2)
            await asyncio.sleep(0.006 * number)
            seq = await world.tell(e.ModeSet(card="GPU-a-0", mode=Mode.EXCLUSIVE, draining=True))
            await asyncio.sleep(3)
            late = [r.seq for r in world.log if isinstance(r.data, e.Bound) and r.seq > seq]
            assert late == []
            for binding in list(world.state.bindings.values()):
                await world.tell(
                    e.EvictionOrdered(
                        demand=binding.demand, epoch=binding.epoch, nodes=("a",), reason=EvictionReason.MODE_SWITCH,
                        requeue=True,
                    )
                )  # fmt: skip
            await world.until(lambda: world.state.cards["GPU-a-0"].mode is Mode.EXCLUSIVE)
            assert not world.state.bindings
            await world.tell(e.DemandWithdrawn(demand=name, project="nlp"))
            await world.tell(e.ModeSet(card="GPU-a-0", mode=None))
            await asyncio.sleep(1)
        assert world.state.findings == []
        early = [r for r in world.log if isinstance(r.data, e.Bound)]
        assert 0 < len(early) < 12  # some came before the switch, and some lost
        await world.end()

    run_virtual(main())


def test_plans_and_offers_are_answered() -> None:
    async def main() -> None:
        world = await World().begin("a")
        await world.demand("one", max_run_seconds=600.0)
        await world.until_phase("one", Phase.RUNNING)
        question = msgspec.json.encode({"demand": SPECS.spec("x", count=2)})
        plan = msgspec.json.decode(await world.bus.request(s.query_plan(), question))
        assert plan["bound"] is None
        assert plan["soonest"]["waits_for"] == ["one"]
        assert 500 < plan["soonest"]["seconds"] < 620
        offers = msgspec.json.decode(await world.bus.request(s.query_offers(), b"{}"))
        assert [(o["mode"], o["cards"]) for o in offers["items"]] == [
            ("exclusive", 1),
            ("memory-slice", 1),
            ("time-slice", 1),
        ]
        bad = msgspec.json.decode(await world.bus.request(s.query_plan(), b'{"demand": 3}'))
        assert bad["error"]["code"] == "bad_question"
        await world.end()

    run_virtual(main())


def test_a_large_fleet_is_placed_through_the_index() -> None:
    """More cards than are looked at one by one: the service changes over by itself."""

    async def main() -> None:
        nodes = [f"n{number}" for number in range(80)]
        world = await World().begin(*nodes, cards=8)
        for number in range(100):
            await world.demand(f"d-{number}", gib=20, count=1 + number % 8)
        await world.until(
            lambda: (
                all(d.phase is Phase.RUNNING for d in world.state.demands.values())
                and len(world.state.demands) == 100
            )
        )
        assert audit(world.state) == []
        await world.end()

    run_virtual(main())

"""The reaper as a service over the in-memory bus, on virtual time.

`World` plays everybody else: clients, the placer, agents that beat once a second. Asserted is what then
stands on the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rigbook_bus.memory import Faults, MemoryBus, MemoryServer
from rigbook_bus.protocol import BusError
from rigbook_bus.telemetry import Telemetry
from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import State
from rigbook_ledger.streams import ensure_streams
from rigbook_reaper.judge import Rules
from rigbook_reaper.service import Options, serve
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas import values as v
from rigbook_schemas.values import DriftKind
from rigbook_schemas.wire import Draft, decode, encode, rfc3339

from tests.unit.drift_story import TOLERANCE, process, runs, shows
from tests.unit.ledger_story import (
    bound,
    card,
    epoch_of,
    evicted,
    joined,
    raised,
    released,
    started,
    subject_of,
    withdrawn,
)
from tests.unit.virtual_time import VirtualClock, run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rigbook_schemas.wire import Record

A0, A1 = card("a", 0), card("a", 1)
RULES = Rules(graces=dict.fromkeys(DriftKind, 2.0), eviction_grace_seconds=1.0, reorder_seconds=10.0)
TRACE = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


class World:
    """A server, everybody but the reaper, and the reapers."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.clock = VirtualClock()
        self.server = MemoryServer(self.clock, faults)
        self.ids = iter(range(10**9))
        self.tasks: list[asyncio.Task[None]] = []
        self.shown: dict[str, Callable[[State], dict[str, Any]] | None] = {}
        self.numbers: dict[str, int] = {}
        self.buses: list[MemoryBus] = []

    async def begin(self, *nodes: str) -> World:
        self.bus = await MemoryBus.connect(self.server, name="others")
        await ensure_streams(self.bus)
        for node in nodes:
            await self.tell(joined(node))
            self.shown[node] = lambda _: {}
            self.tasks.append(asyncio.create_task(self._beats(node)))
        return self

    async def reaper(
        self, options: Options | None = None, telemetry: Telemetry | None = None
    ) -> asyncio.Task[None]:
        bus = await MemoryBus.connect(self.server, name=f"reaper-{len(self.buses)}")
        self.buses.append(bus)
        ready = asyncio.Event()
        options = options or Options(rules=RULES, tolerance=TOLERANCE)
        task = asyncio.create_task(
            serve(
                bus,
                options,
                clock=self.clock,
                new_id=lambda: f"{next(self.ids):032x}",
                telemetry=telemetry,
                ready=ready,
            )
        )
        self.tasks.append(task)
        async with asyncio.timeout(30):
            await ready.wait()
        return task

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        for task in self.tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # -- the others -----------------------------------------------------------------------------

    async def tell(self, *steps: Any, traceparent: str = "") -> None:
        for step in steps:
            data = step if isinstance(step, e.Payload) else step(self.state)
            draft = Draft(
                data=data,
                id=f"other-{next(self.ids)}",
                source="test",
                time=rfc3339(self.clock.now_ns()),
                traceparent=traceparent,
            )
            await self.bus.append(subject_of(data), encode(draft), message_id=draft.id)

    async def _beats(self, node: str) -> None:
        while True:
            await asyncio.sleep(1.0)
            shown = self.shown[node]
            if shown is not None:
                with contextlib.suppress(BusError):
                    await self.beat(node, **shown(self.state))

    async def beat(self, node: str, **more: Any) -> None:
        self.numbers[node] = self.numbers.get(node, 0) + 1
        told = e.Heartbeat(
            node=node, incarnation="i-1", number=self.numbers[node], components=(),
            cards=(shows(card(node, 0)), shows(card(node, 1))), engine_position=self.state.position,
        )  # fmt: skip
        draft = Draft(
            data=msgspec.structs.replace(told, **more), id=f"beat-{next(self.ids)}", source=f"nodeagent/{node}",
            time=rfc3339(self.clock.now_ns()),
        )  # fmt: skip
        await self.bus.append(subjects.heartbeat(node), encode(draft), message_id=draft.id)

    # -- what stands on the log -----------------------------------------------------------------

    @property
    def log(self) -> list[Record]:
        stream = self.server.streams.get(subjects.LEDGER_STREAM)
        found, _ = stream.after(0, stream.last_seq, (), 10**6) if stream else ([], 0)
        return [decode(m.seq, m.subject, m.received_ns, m.body) for m in found]

    @property
    def state(self) -> State:
        state = State()
        for record in self.log:
            state = evolve(state, record)
        return state

    @property
    def said(self) -> list[Record]:
        return [r for r in self.log if r.source.startswith("reaper/")]

    def kinds(self) -> list[str]:
        return [r.kind for r in self.said]

    async def until(self, kind: str) -> None:
        async with asyncio.timeout(100):
            while not self.logged(kind):
                await asyncio.sleep(0.5)

    def logged(self, kind: str) -> list[Record]:
        return [r for r in self.said if r.kind == kind]


def leftover(state: State) -> dict[str, Any]:
    """The server part of demand d outlived its stop, until an order with scope everything came."""
    binding = state.bindings.get(epoch_of(state, "d")) if "d" in state.demands else None
    order = binding.eviction if binding else None
    if binding is None or (order is not None and order.scope is v.StopScope.EVERYTHING):
        return {}
    return {"components": (runs(state),), "cards": (shows(A0, process(state)), shows(A1))}


async def stop_app(world: World) -> None:
    world.shown["a"] = leftover
    await world.tell(raised(name="chat"), traceparent=TRACE)
    await world.tell(bound(), started())
    await asyncio.sleep(5)
    await world.tell(withdrawn(), evicted(reason=v.EvictionReason.WITHDRAWN, by="placer", grace_seconds=1.0))


def in_world(faults: Faults | None = None) -> Callable[[Any], Any]:
    def wrap(test: Any) -> Any:
        def run(**fixtures: Any) -> None:
            async def main() -> None:
                world = World(faults)
                try:
                    await test(world, **fixtures)
                finally:
                    await world.end()

            run_virtual(main())

        run.__name__ = test.__name__
        run.__doc__ = test.__doc__
        return run

    return wrap


@in_world()
async def test_case_1_dry_run_then_switched_on_then_healed_and_cleared(world: World) -> None:
    await world.begin("a")
    await world.reaper()
    await stop_app(world)
    await asyncio.sleep(60)
    assert world.kinds() == ["drift.detected"]
    drift = world.said[0].data
    assert isinstance(drift, e.DriftDetected)
    assert not drift.healing
    assert "the record says stopped, the card says no" in drift.sentence

    await world.tell(e.HealingSet(kind=DriftKind.LEFTOVER, on=True, by="op"))
    await asyncio.sleep(1.5)
    assert world.kinds() == ["drift.detected", "drift.detected", "eviction.ordered"]
    await world.tell(released())
    await asyncio.sleep(3)
    assert world.kinds()[3:] == ["drift.cleared"]
    assert world.state.drifts == {}
    assert world.state.findings == []
    order = world.logged("eviction.ordered")[0]
    assert order.causation == world.said[0].id, "the drift is the cause of the order"
    assert order.correlation == "d"
    assert {r.traceparent for r in world.said} == {TRACE}, "one demand is one trace"
    assert len({r.id for r in world.log}) == len(world.log)


@in_world()
async def test_two_reapers_side_by_side_say_everything_once(world: World) -> None:
    await world.begin("a")
    for n in (1, 2):
        await world.reaper(Options(instance=f"reaper-{n}", rules=RULES, tolerance=TOLERANCE))
    await world.tell(e.HealingSet(kind=DriftKind.LEFTOVER, on=True))
    await stop_app(world)
    await world.until("eviction.ordered")
    await world.tell(released())
    await asyncio.sleep(5)
    assert world.kinds() == ["drift.detected", "eviction.ordered", "drift.cleared"]


class LostAcks(Faults):
    """Of the reaper's appends, the first three are stored and their acknowledgement never arrives."""

    def __init__(self) -> None:
        self.left = 3

    def answer_seconds(self, client: str, subject: str) -> float | None:
        if client.startswith("reaper") and subject.startswith(("rig.drift", "rig.evict")) and self.left:
            self.left -= 1
            return None
        return 0.0


@in_world(LostAcks())
async def test_a_lost_acknowledgement_doubles_nothing(world: World) -> None:
    await world.begin("a")
    await world.reaper()
    await world.tell(e.HealingSet(kind=DriftKind.LEFTOVER, on=True))
    await stop_app(world)
    await world.until("eviction.ordered")
    await world.tell(released())
    await asyncio.sleep(20)
    assert world.kinds() == ["drift.detected", "eviction.ordered", "drift.cleared"]


@in_world()
async def test_a_silent_node_is_written_down_and_comes_back_with_its_first_heartbeat(world: World) -> None:
    await world.begin("a", "b", "c")
    await world.reaper()
    await asyncio.sleep(30)
    world.shown["b"] = None
    await asyncio.sleep(14)
    assert world.kinds() == []
    await asyncio.sleep(3)
    assert world.kinds() == ["node.unreachable"]
    told = world.said[0].data
    assert isinstance(told, e.NodeUnreachable)
    assert told.node == "b"
    assert 15 <= told.silent_seconds <= 17
    assert told.last_heard
    await asyncio.sleep(120)
    assert world.kinds() == ["node.unreachable"]
    world.shown["b"] = lambda _: {}
    await asyncio.sleep(2)
    assert world.kinds() == ["node.unreachable", "node.recovered"]
    assert not world.state.nodes["b"].unreachable_ns


@in_world()
async def test_case_8_all_nodes_silent_at_once_is_us(world: World) -> None:
    await world.begin("a", "b", "c", "d", "e")
    await world.reaper()
    await asyncio.sleep(30)
    for node in world.shown:
        world.shown[node] = None
    await asyncio.sleep(120)
    assert world.kinds() == []
    world.shown["a"] = lambda _: {}
    await asyncio.sleep(60)
    assert world.kinds() == [], "4 of 5 are still missing"
    for node in world.shown:
        world.shown[node] = lambda _: {}
    await asyncio.sleep(20)
    world.shown["c"] = None
    await asyncio.sleep(20)
    assert world.kinds() == ["node.unreachable"]


@in_world()
async def test_case_8_nothing_is_healed_during_a_mass_loss(world: World) -> None:
    await world.begin("a", "b", "c", "d")
    await world.reaper()
    await world.tell(e.HealingSet(kind=DriftKind.LEFTOVER, on=True))
    await asyncio.sleep(20)
    for node in ("b", "c", "d"):
        world.shown[node] = None
    await asyncio.sleep(20)
    await stop_app(world)
    await asyncio.sleep(100)
    assert world.kinds() == []


@in_world()
async def test_an_outage_of_the_bus_calls_nobody_silent(world: World) -> None:
    await world.begin("a")
    await world.reaper()
    await asyncio.sleep(20)
    world.server.stop()
    await asyncio.sleep(300)
    world.server.start()
    await asyncio.sleep(60)
    assert world.kinds() == []
    world.shown["a"] = None
    await asyncio.sleep(20)
    assert world.kinds() == ["node.unreachable"], "a fleet of one can be silent"


@in_world()
async def test_only_our_ears_cut_off_calls_nobody_silent(world: World) -> None:
    await world.begin("a")
    await world.reaper()
    await asyncio.sleep(20)
    world.buses[0].cut()
    await asyncio.sleep(300)
    world.buses[0].restore()
    await asyncio.sleep(60)
    assert world.kinds() == []


@in_world()
async def test_malformed_heartbeats_are_counted_and_stop_nothing(world: World) -> None:
    await world.begin("a")
    reader = InMemoryMetricReader()
    meters = MeterProvider(metric_readers=[reader])
    await world.reaper(telemetry=Telemetry("reaper", meters=meters))
    for i, body in enumerate(
        (b"", b"{", b"\xff" * 50, b'{"id":"x","source":"s","type":"dev.rigbook.nonsense.v1"}')
    ):
        await world.bus.append(subjects.heartbeat("a"), body, message_id=f"bad-{i}")
    good = Draft(data=e.Heartbeat(node="b", incarnation="i", number=1), id="x", source="s", time="never")
    await world.bus.append(subjects.heartbeat("a"), encode(good), message_id="liar")
    await world.bus.append(
        subjects.heartbeat("zz"),
        encode(msgspec.structs.replace(good, data=e.Heartbeat(node="zz", incarnation="i", number=1))),
        message_id="stranger",
    )
    await stop_app(world)
    await asyncio.sleep(30)
    assert world.kinds() == ["drift.detected"]
    data = reader.get_metrics_data()
    assert data is not None
    points = {
        metric.name: list(metric.data.data_points)
        for r in data.resource_metrics for s in r.scope_metrics for metric in s.metrics
    }  # fmt: skip
    assert sum(p.value for p in points["rigbook.findings"]) == 5  # type: ignore[union-attr]
    assert {p.attributes["node"] for p in points["rigbook.clock.skew"] if p.attributes} == {"a"}
    meters.shutdown()


@in_world()
async def test_spans_hang_under_the_demands_trace(world: World) -> None:
    spans = InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    await world.begin("a")
    await world.reaper(telemetry=Telemetry("reaper", tracers=tracers))
    await stop_app(world)
    await asyncio.sleep(30)
    (span,) = spans.get_finished_spans()
    assert span.name == "reaper drift.detected"
    assert f"{span.context.trace_id:032x}" == "ab" * 16
    assert span.attributes is not None
    assert dict(span.attributes) == {"node": "a", "demand": "d", "epoch": epoch_of(world.state, "d")}
    assert world.said[0].traceparent.startswith("00-" + "ab" * 16)
    tracers.shutdown()


@in_world()
async def test_an_unknown_kind_that_may_bear_on_ownership_pauses_it_until_accepted(world: World) -> None:
    await world.begin("a")
    await world.reaper()
    body = b'{"specversion":"1.0","id":"u","source":"s","type":"dev.rigbook.bound.v9","time":"2026-11-30T00:00:00Z","data":{}}'
    await world.bus.append("rig.own.bind.a", body, message_id="u")
    await stop_app(world)
    world.shown["b"] = None
    await asyncio.sleep(60)
    assert world.kinds() == []
    (seq,) = world.state.unknown_open
    await world.tell(e.UnknownAccepted(seq=seq, by="op"))
    await asyncio.sleep(10)
    assert world.kinds() == ["drift.detected"]


@pytest.mark.parametrize("harm", ["recreate", "truncate", "remove"])
@pytest.mark.parametrize("with_snapshot", [True, False])
def test_case_31_a_log_that_does_not_continue_stops_all_judging(
    harm: str, with_snapshot: bool, tmp_path: Path
) -> None:
    @in_world()
    async def story(world: World) -> None:
        await world.begin("a", "b", "c")
        await world.reaper(
            Options(rules=RULES, tolerance=TOLERANCE, data=tmp_path if with_snapshot else None)
        )
        await world.tell(e.HealingSet(kind=DriftKind.LEFTOVER, on=True))
        await asyncio.sleep(10)
        if harm == "recreate":
            world.server.recreate(subjects.LEDGER_STREAM)
        elif harm == "remove":
            world.server.remove(subjects.LEDGER_STREAM)
        else:
            world.server.truncate(subjects.LEDGER_STREAM, 2)
        await asyncio.sleep(5)
        if harm != "remove":
            for node in "abc":
                await world.tell(joined(node))
            await world.tell(e.HealingSet(kind=DriftKind.LEFTOVER, on=True))
            await stop_app(world)
            world.shown["b"] = None
            await asyncio.sleep(60)
            assert world.said == []
        assert not world.tasks[-1].done(), "it stays, and says so"

    story()


@in_world()
async def test_case_31_after_a_restart_the_snapshot_remembers(world: World) -> None:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        options = Options(rules=RULES, tolerance=TOLERANCE, data=Path(folder))
        await world.begin("a")
        await stop_app(world)
        task = await world.reaper(options)
        await asyncio.sleep(30)
        assert world.kinds() == ["drift.detected"]
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        again = await world.reaper(options)
        await asyncio.sleep(30)
        assert world.kinds() == ["drift.detected"], "open drifts are on the books"
        await world.tell(released())
        world.shown["a"] = lambda _: {}
        await asyncio.sleep(5)
        assert world.kinds() == ["drift.detected", "drift.cleared"]
        again.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await again


class SlowLedger(Faults):
    """From some point on the ledger reaches the reaper a minute late."""

    after_seq = 10**9

    def delivery_seconds(self, client: str, stream: str, seq: int) -> float:
        late = client.startswith("reaper") and stream == subjects.LEDGER_STREAM and seq > self.after_seq
        return 60.0 if late else 0.0


SLOW = SlowLedger()


@in_world(SLOW)
async def test_nothing_is_told_on_a_book_that_is_not_read_to_its_end(world: World) -> None:
    """The release is on the log, and the reaper does not have it yet: to it, something is missing."""
    await world.begin("a")
    await world.reaper()
    await world.tell(raised(), bound(), started())
    await asyncio.sleep(0.5)
    SLOW.after_seq = world.state.position
    await world.tell(withdrawn(), evicted(), released())
    await asyncio.sleep(30)
    assert world.kinds() == []
    await asyncio.sleep(60)
    assert world.kinds() == []


@in_world()
async def test_short_graces_are_options(world: World) -> None:
    await world.begin("a", "b", "c")
    await world.reaper(Options(grace_seconds=2.0, stop_seconds=0.5, silence_seconds=3.0))
    await stop_app(world)
    await asyncio.sleep(15)
    assert world.kinds() == ["drift.detected"]
    await asyncio.sleep(5)
    world.shown["b"] = None
    await asyncio.sleep(5)
    assert world.kinds() == ["drift.detected", "node.unreachable"]

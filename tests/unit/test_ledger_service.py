"""The ledger service over the in-memory server. Goal: the book is the log, whatever happens around it.

Method: events are told through the bus while the service runs, restarts, loses its file, its stream or
its disk; digests are compared with a fold beside it, and everything else is asked for.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import pytest
import structlog
from msgspec.structs import replace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rigbook_bus.memory import MemoryBus
from rigbook_bus.protocol import BusUnavailable, ConsumerSpec
from rigbook_bus.telemetry import Telemetry
from rigbook_ledger import evolve
from rigbook_ledger.digest import digest
from rigbook_ledger.evolve import fold
from rigbook_ledger.service import FILE, Options, serve
from rigbook_ledger.store import Store, StoreInUse, StoreLost
from rigbook_ledger.streams import agent_consumer
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.subjects import HEARTBEAT_STREAM, LEDGER_STREAM
from rigbook_schemas.wire import decode

from tests.unit import ledger_story as s
from tests.unit.running_ledger import World, ledger, world

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rigbook_ledger.state import State

LIFE = (s.joined(), s.raised(), s.bound(), s.started(), s.exited(), s.released())


async def digest_of(w: World) -> str:
    status = (await w.rows("status", digest=True))[0]
    assert status.audit == ()
    return status.digest


# -- one log, one fold --------------------------------------------------------------------------


async def test_the_digest_is_the_same_live_restarted_rebuilt_and_on_a_replica(tmp_path: Path) -> None:
    async with world() as w:
        async with ledger(w, tmp_path / "1", snapshot_every=4):
            await w.tell(*LIFE)
            assert await digest_of(w) == digest(w.state)
            await w.tell(s.raised("d2"), s.bound("d2"), s.Raw(subject="rig.demand.p", body=b"{"))
            assert await digest_of(w) == digest(w.state)
        # its file went: all is read again from the stream
        (tmp_path / "1" / FILE).unlink()
        async with ledger(w, tmp_path / "1", snapshot_every=4):
            assert await digest_of(w) == digest(w.state)
            # a second one with its own folder; each answers some of the questions
            async with ledger(w, tmp_path / "2", name="ledger-2"):
                await w.tell(s.withdrawn("d2"))
                status = [(await w.rows("status", digest=True))[0] for _ in range(4)]
                assert {one.instance for one in status} == {"ledger-1", "ledger-2"}
                assert {one.digest for one in status} == {digest(w.state)}


async def test_a_restart_takes_the_snapshot_and_the_events_behind_it(tmp_path: Path) -> None:
    # Goal: the crash case. Method: a copy of the file is taken while the service runs, as a kill would leave it.
    async with world() as w:
        async with ledger(w, tmp_path / "1", snapshot_every=4):
            await w.tell(*LIFE)
            await w.rows("events")
            await w.tell(s.raised("d2"))
            await w.rows("events")
            await w.tell(s.bound("d2"))
            await w.rows("events")
            for file in (tmp_path / "1").iterdir():
                (tmp_path / "2").mkdir(exist_ok=True)
                (tmp_path / "2" / file.name).write_bytes(file.read_bytes())
        store = await Store.open(tmp_path / "2" / FILE)
        saved = await store.snapshot()
        assert store.mark is not None
        assert saved is not None
        assert saved[0] < store.mark.position == 8
        await store.close()
        await w.tell(s.started("d2"))
        async with ledger(w, tmp_path / "2"):
            assert await digest_of(w) == digest(w.state)
            assert [row.demand for row in await w.rows("who", since="2020-01-01T00:00:00Z")] == ["d", "d2"]


async def test_a_clean_end_leaves_a_snapshot_of_the_last_position(tmp_path: Path) -> None:
    async with world() as w:
        async with ledger(w, tmp_path):
            await w.tell(*LIFE)
            assert len(await w.rows("demand", id="d")) == 1
        store = await Store.open(tmp_path / FILE)
        assert store.mark is not None
        assert store.mark.position == 6
        saved = await store.snapshot()
        assert saved is not None
        assert saved[0] == 6
        await store.close()


async def test_it_catches_up_then_says_so(tmp_path: Path) -> None:
    async with world() as w:
        await w.tell(*LIFE)
        with structlog.testing.capture_logs() as lines:
            async with ledger(w, tmp_path):
                answer = await w.ask("demands")
                assert answer.caught_up
                assert answer.position == 6
        told = [line for line in lines if line["event"] == "caught up with the log"]
        assert [(line["events"], line["position"]) for line in told] == [(6, 6)]
        assert "seconds" in told[0]
        assert "per_second" in told[0]


async def test_each_step_of_a_demand_is_a_line_with_demand_epoch_and_node(tmp_path: Path) -> None:
    async with world() as w:
        with structlog.testing.capture_logs() as lines:
            async with ledger(w, tmp_path):
                await w.tell(*LIFE)
                await w.rows("events")
        told = [
            (line["before"], line["after"], line["demand"], line["epoch"], line["node"])
            for line in lines
            if line["event"] == "demand"
        ]
        assert told == [
            (None, "waiting", "d", None, None),
            ("waiting", "bound", "d", 3, "a"),
            ("bound", "running", "d", 3, "a"),
            ("running", "ended", "d", 3, "a"),
        ]


async def test_figures_and_spans(tmp_path: Path) -> None:
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    meters = MeterProvider([reader])
    async with world() as w:
        async with ledger(w, tmp_path, telemetry=Telemetry("ledger", tracers=tracers, meters=meters)):
            await w.tell(*LIFE[:3], s.Raw(subject="rig.demand.p", body=b"{"))
            await w.rows("events")
        data = reader.get_metrics_data()
        assert data is not None
        points = {
            metric.name: [(dict(p.attributes), getattr(p, "value", None)) for p in metric.data.data_points]
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }
        assert points["rigbook.events.folded"] == [({}, 4)]
        assert ({"code": "malformed_envelope", "stream": LEDGER_STREAM}, 1) in points["rigbook.findings"]
        assert ({"name": "bindings"}, 1) in points["rigbook.held"]
        assert [span.attributes["kind"] for span in spans.get_finished_spans()] == ["demand.raised", "bound"]
    meters.shutdown()
    tracers.shutdown()


# -- bad input ----------------------------------------------------------------------------------


async def test_what_should_not_be_there_is_a_finding_and_stops_nothing(tmp_path: Path) -> None:
    unknown = (
        b'{"id":"x","source":"s","type":"dev.rigbook.teleported.v1","time":"2026-11-30T00:00:00Z","data":{}}'
    )
    async with world() as w:
        async with ledger(w, tmp_path):
            await w.tell(
                s.joined(),
                s.Raw(subject="rig.demand.p", body=b"\xff\x00 not json"),
                s.Raw(subject="rig.own.bind.a", body=unknown),
                s.Raw(subject="rig.demand.p", body=b'"\\ud800"'),
                s.raised(),
                s.Told(data=e.Released(demand="d", epoch=99, node="a")),
            )
            findings = await w.rows("findings")
            assert [(row.seq, row.code) for row in findings] == [
                (2, "malformed_envelope"),
                (3, "unknown_kind"),
                (4, "malformed_envelope"),
                (6, "release_by_non_holder"),
            ]
            assert {row.stream for row in findings} == {LEDGER_STREAM}
            status = (await w.rows("status"))[0]
            assert (status.findings, status.unknown_events) == (4, 1)
            assert [row.demand for row in await w.rows("demands")] == ["d"]
        async with ledger(w, tmp_path):  # told once, also after a restart
            assert await w.rows("findings") == findings


async def test_a_violated_invariant_is_said_once_and_answers_go_on(tmp_path: Path) -> None:
    # A second exclusive binding of the same card can only come from somebody who did not use the expectation.
    async with world() as w, ledger(w, tmp_path):
        with structlog.testing.capture_logs() as lines:
            await w.tell(s.joined(), s.raised(), s.raised("d2"), s.bound(), s.bound("d2"))
            await w.tell(s.started(), s.started("d2"))
            findings = await w.rows("findings", kinds=["double_binding"])
        assert [row.stream for row in findings] == ["audit"]
        errors = [line for line in lines if line["log_level"] == "error"]
        assert "double_binding" in {line["code"] for line in errors}
        assert len(await w.rows("bindings")) == 2
        answer = await w.ask("status", digest=True)
        assert "double_binding" in str(answer.items[0]["audit"])


async def test_bad_heartbeats_are_findings_of_their_stream(tmp_path: Path) -> None:
    async with world() as w, ledger(w, tmp_path):
        await w.tell(s.joined())
        good = e.Heartbeat(node="a", incarnation="i-1", number=1)
        await w.beat(good, body=b"noise", subject="rig.heartbeat.a")
        for _ in range(20):  # the same fault again is not told again
            await w.beat(good, body=b"noise", subject="rig.heartbeat.a")
        await w.beat(good, subject="rig.heartbeat.b")
        await w.beat(good, time="1999-01-01T00:00:00Z")
        last = await w.beat(good)
        while (await w.rows("status"))[0].heartbeats_read < last:
            await asyncio.sleep(0.01)
        findings = await rows_when(w, 3, "findings")
        assert [(row.stream, row.seq, row.code) for row in findings] == [
            (HEARTBEAT_STREAM, 1, "malformed_envelope"),
            (HEARTBEAT_STREAM, 22, "wrong_subject"),
            (HEARTBEAT_STREAM, 23, "clock_skew"),
        ]
        assert (await w.rows("nodes"))[0].heard_seconds_ago is not None
        assert (await w.rows("status"))[0].findings == 0, "heartbeats are not part of the fold"


async def rows_when(w: World, count: int, what: str) -> list[object]:
    """The rows once there are `count`: findings of heartbeats are written with the next transaction."""
    async with asyncio.timeout(5):
        while len(found := await w.rows(what)) < count:
            await asyncio.sleep(0.01)
    return found


async def test_the_latest_heartbeat_from_before_the_start_is_taken_with_its_age(tmp_path: Path) -> None:
    async with world() as w:
        await w.tell(s.joined())
        for number in range(5):
            w.clock.move(1.0)
            await w.beat(e.Heartbeat(node="a", incarnation="i-1", number=number))
        w.clock.move(30.0)
        async with ledger(w, tmp_path), asyncio.timeout(5):
            while (heard := (await w.rows("nodes"))[0].heard_seconds_ago) is None:
                await asyncio.sleep(0.01)
            assert 29.0 < heard < 40.0


# -- agents' consumers --------------------------------------------------------------------------


def consumer(w: World, node: str) -> ConsumerSpec | None:
    found = w.server.streams[LEDGER_STREAM].consumers.get(f"agent-{node}")
    return None if found is None else found.spec


async def consumer_there(w: World, node: str) -> ConsumerSpec:
    async with asyncio.timeout(5):
        while (found := consumer(w, node)) is None:
            await asyncio.sleep(0.005)
    return found


async def test_a_node_that_joins_gets_its_consumer_from_its_joining_on(tmp_path: Path) -> None:
    async with world() as w, ledger(w, tmp_path):
        await w.tell(s.joined("b"), s.raised(), s.joined("a"))
        assert (await consumer_there(w, "a")).start_seq == 3
        assert (await consumer_there(w, "b")).start_seq == 1
        await w.tell(s.changed("a", [s.inventory("a")]))
        await w.rows("events")
        assert (await consumer_there(w, "a")).start_seq == 3, "the one that is there is left alone"


async def test_a_consumer_that_is_missing_at_the_start_reaches_back_to_the_oldest_live_binding(
    tmp_path: Path,
) -> None:
    async with world() as w:
        await w.tell(
            *LIFE, s.raised("d2"), s.bound("d2"), s.changed("a", [s.inventory("a", 0), s.inventory("a", 1)])
        )
        async with ledger(w, tmp_path):
            assert (await consumer_there(w, "a")).start_seq == 8


async def test_a_consumer_of_before_keeps_its_position(tmp_path: Path) -> None:
    async with world() as w:
        await w.tell(*LIFE)
        await w.client.ensure_consumer(agent_consumer("a", start_seq=1))
        async with ledger(w, tmp_path):
            await w.rows("events")
        assert (await consumer_there(w, "a")).start_seq == 1


async def test_a_consumer_that_cannot_be_made_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world() as w:
        refusals = 2
        made = MemoryBus.ensure_consumer

        async def refuse(self: MemoryBus, spec: ConsumerSpec) -> None:
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise BusUnavailable("away")
            await made(self, spec)

        monkeypatch.setattr(MemoryBus, "ensure_consumer", refuse)
        async with ledger(w, tmp_path):
            await w.tell(s.joined())
            assert (await consumer_there(w, "a")).start_seq == 1
        assert refusals == 0


# -- safe mode ----------------------------------------------------------------------------------


async def safe(w: World) -> str:
    """Why the ledger is in safe mode, as soon as it is."""
    async with asyncio.timeout(5):
        while not (await w.ask("status")).safe_mode:
            await asyncio.sleep(0.01)
    return str((await w.ask("status")).items[0]["safe_mode"])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda w: w.server.recreate(LEDGER_STREAM), "another one than before"),
        (lambda w: w.server.truncate(LEDGER_STREAM, 4), "its end is lost"),
        (lambda w: w.server.remove(LEDGER_STREAM), "does not exist"),
    ],
    ids=["made anew", "lost its end", "gone"],
)
async def test_a_log_that_does_not_continue_is_not_folded_and_questions_are_answered(
    tmp_path: Path, fault: Callable[[World], None], words: str
) -> None:
    async with world() as w:
        async with ledger(w, tmp_path):
            await w.tell(*LIFE)
            before = await w.rows("who", since="2020-01-01T00:00:00Z")
            fault(w)
            assert words in await safe(w)
            answer = await w.ask("demand", id="d")
            assert (answer.position, answer.safe_mode, answer.caught_up) == (6, True, False)
            assert words in answer.notice
            assert await w.rows("who", since="2020-01-01T00:00:00Z") == before
        # and the same from the start: the file is never thrown away by itself
        async with ledger(w, tmp_path):
            assert words in await safe(w)
            assert (await w.ask("demands", phase="all")).items[0]["demand"] == "d"


async def test_a_stream_that_lost_its_end_and_grew_again_is_noticed(tmp_path: Path) -> None:
    # Sequence numbers are used again after bit rot: only the event id at our position tells.
    async with world() as w, ledger(w, tmp_path):
        await w.tell(*LIFE)
        await w.rows("events")
        w.server.stop()
        w.server.streams[LEDGER_STREAM].truncate(4)
        w.server.start()
        for number in range(4):
            await w.client.append("rig.demand.p", b"{}", message_id=f"new-{number}")
        why = await safe(w)
        assert "its end is lost" in why or "we had read 'event-6'" in why


async def test_safe_mode_ends_when_the_stream_is_restored(tmp_path: Path) -> None:
    async with world() as w, ledger(w, tmp_path):
        await w.tell(*LIFE)
        await w.rows("events")
        kept = w.server.streams[LEDGER_STREAM]
        w.server.remove(LEDGER_STREAM)
        await safe(w)
        w.server.stop()
        w.server.streams[LEDGER_STREAM] = kept
        w.server.start()
        await w.tell(s.raised("d2"))
        assert [row.demand for row in await w.rows("demands")] == ["d2"]
        assert not (await w.ask("status")).safe_mode


async def test_a_log_without_its_beginning_is_not_folded(tmp_path: Path) -> None:
    async with world() as w:
        await w.tell(*LIFE)
        stream = w.server.streams[LEDGER_STREAM]
        stream._remove(1)
        async with ledger(w, tmp_path):
            assert "its beginning is lost" in await safe(w)


async def test_an_outage_of_the_bus_is_passed_over(tmp_path: Path) -> None:
    async with world() as w, ledger(w, tmp_path):
        await w.tell(*LIFE[:3])
        await w.rows("events")
        w.server.restart()
        await w.tell(*LIFE[3:])
        assert await digest_of(w) == digest(w.state)


# -- the disk -----------------------------------------------------------------------------------


async def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    # Method: SQLite's own page limit, which gives the error of a full disk.
    opened: list[Store] = []

    async def remember(path: Path) -> Store:
        opened.append(await Store.open(path))
        return opened[-1]

    async with world() as w, ledger(w, tmp_path, open_store=remember):
        await w.tell(*LIFE)
        await w.rows("events")
        await opened[0]._writer.execute_fetchall("PRAGMA max_page_count = 1")  # = as large as it is now
        long = s.raised("d2", purpose="long " * 400, labels={f"k{n}": "v" * 1000 for n in range(100)})
        await w.tell(long)
        async with asyncio.timeout(5):
            while not (answer := await w.ask("demand", id="d2")).notice or not answer.items:
                await asyncio.sleep(0.01)
        assert "full" in answer.notice
        assert answer.items[0]["phase"] == "waiting", "the present is still folded and told"
        assert (await w.ask("events")).position == 6, "the past ends where the disk did"
        await opened[0]._writer.execute_fetchall("PRAGMA max_page_count = 1000000")
        assert len(await w.rows("events")) == 7
        assert not (await w.ask("status")).notice


async def test_a_second_ledger_on_the_same_folder_ends_with_a_clear_error(tmp_path: Path) -> None:
    async with world() as w, ledger(w, tmp_path):
        bus = await MemoryBus.connect(w.server, name="other")
        with pytest.raises(StoreInUse, match="own data folder"):
            await serve(bus, Options(data=tmp_path), clock=w.clock, new_id=lambda: "")
        await bus.close()


async def test_a_file_deleted_while_in_use_ends_the_ledger_with_a_clear_error(tmp_path: Path) -> None:
    async with world() as w:

        async def until_it_ends() -> None:
            async with ledger(w, tmp_path) as service:
                await w.tell(s.joined())
                await w.rows("events")
                (tmp_path / FILE).unlink()
                await w.tell(s.raised())
                await asyncio.wait({service}, timeout=5)

        with pytest.raises(StoreLost, match="start the ledger again"):
            await until_it_ends()
        async with ledger(w, tmp_path):
            assert await digest_of(w) == digest(w.state)


async def test_a_bug_in_the_fold_leaves_nothing_half_folded_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Goal: an assertion stops the service, and the book stands before the event that broke it.
    def broken(state: State, *_: object) -> None:
        state.demands["d"] = replace(state.demands["d"], requeues=99)
        raise AssertionError("a bug")

    async with world() as w:

        async def until_it_ends() -> None:
            async with ledger(w, tmp_path) as service:
                await w.tell(s.joined(), s.raised())
                await w.rows("events")
                monkeypatch.setitem(evolve._APPLY, e.QuotaSet, broken)
                await w.client.append("rig.own.policy.quota", quota(), message_id="quota")
                await asyncio.wait({service}, timeout=5)

        with pytest.raises(AssertionError, match="a bug"):
            await until_it_ends()
        monkeypatch.undo()
        w.state = fold(w.state, [decode(3, "rig.own.policy.quota", w.clock.now_ns(), quota())])
        async with ledger(w, tmp_path):
            assert await digest_of(w) == digest(w.state)


def quota() -> bytes:
    draft = s.Draft(
        data=e.QuotaSet(project="p", memory_bytes=1), id="quota", source="t", time=s.rfc3339(s.START_NS)
    )
    return s.encode(draft)


# -- speed --------------------------------------------------------------------------------------


async def test_speed_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Events per second from the stream into state and file. RIGBOOK_SPEED_EVENTS=100000 for a longer run."""
    count = int(os.environ.get("RIGBOOK_SPEED_EVENTS", "20000"))
    story = s.Story()
    async with world() as w:
        node = s.joined("a", 8)
        steps: list[s.Step] = [node]
        for number in range(count // 5):
            did = f"demand-{number}"
            steps += [s.raised(did), s.bound(did), s.started(did), s.exited(did), s.released(did)]
        for number, step in enumerate(steps):
            data = step(story.state) if callable(step) else step
            draft = s.Draft(data=data, id=f"{number:032x}", source="t", time=s.rfc3339(s.START_NS))
            w.server.append(s.subject_of(data), s.encode(draft), draft.id, None)
            story.tell(step)
        began, cpu = time.perf_counter(), time.process_time()
        async with ledger(w, tmp_path):
            wall, used = time.perf_counter() - began, time.process_time() - cpu
            status = (await w.rows("status"))[0]
            assert status.position == len(steps)
        with capsys.disabled():
            print(
                f"\nledger: {len(steps)} events, {len(steps) / wall:,.0f}/s, {len(steps) / used:,.0f}/s of processor time"
            )
    assert isinstance(node.cards[0], v.CardInventory)

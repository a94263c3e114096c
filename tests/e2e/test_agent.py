"""The node agent with real processes on simulated cards, over the in-memory bus: order in, facts out.

Method: a placer and an agent run as they do in production; the test plays the client, the reaper and the
ledger's part of making the agent's consumer, and reads the log.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import rigbook_ledger.service as ledger_service
import rigbook_nodeagent.service as agent_service
import rigbook_placer.service as placer_service
from rigbook_bus.clock import SystemClock
from rigbook_bus.memory import MemoryBus, MemoryServer
from rigbook_bus.runner import random_id
from rigbook_ledger.audit import audit
from rigbook_ledger.follower import Follower
from rigbook_ledger.state import Phase
from rigbook_ledger.streams import agent_consumer, ensure_streams
from rigbook_nodeagent.engines.procfs import stat_of
from rigbook_nodeagent.equipment import equip
from rigbook_nodeagent.presence import AlreadyServed
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas.values import (
    GIB,
    Component,
    EvictionReason,
    Mode,
    Owner,
    Probe,
    Request,
    Restart,
    StopScope,
    VerdictClass,
    Workload,
)
from rigbook_schemas.wire import Draft, Record, decode, encode, rfc3339

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

CLOCK = SystemClock()
SOON_SECONDS = 15.0
CLUSTER = f"e2e{os.getpid()}"


def runs(pid: int) -> bool:
    """A zombie (the test process is the parent) has ended."""
    stat = stat_of(pid)
    return stat is not None and stat.alive


class Cell:
    """A bus, a placer, and agents that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = MemoryServer()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.records: list[Record] = []
        self.options: dict[str, Any] = {}  # of its agents
        self._raised = 0

    async def open(self) -> None:
        self.bus = await MemoryBus.connect(self.server, name="test")
        await ensure_streams(self.bus)
        self.follower = Follower(self.bus)
        await self.follower.open()
        ledger_bus = await MemoryBus.connect(self.server, name="ledger")
        self.tasks["ledger"] = asyncio.create_task(
            ledger_service.serve(
                ledger_bus, ledger_service.Options(data=self.folder / "ledger"), clock=CLOCK, new_id=random_id
            )
        )
        placer_bus = await MemoryBus.connect(self.server, name="placer")
        self.tasks["placer"] = asyncio.create_task(
            placer_service.serve(placer_bus, placer_service.Options(), clock=CLOCK, new_id=random_id)
        )

    async def agent(self, name: str = "a", *, equipped: Any = equip, **more: Any) -> None:
        await self.bus.ensure_consumer(agent_consumer(name, start_seq=1))
        bus = await MemoryBus.connect(self.server, name=f"agent-{name}")
        ready = asyncio.Event()
        # A cluster of this test session alone: another session on the machine has an agent "a" too.
        given = {
            "gpus": "sim:2xRTX4090",
            "heartbeat_seconds": 0.2,
            "cluster": CLUSTER,
            **self.options,
            **more,
        }
        options = agent_service.Options(node=name, data=self.folder / name, **given)
        task = asyncio.create_task(
            agent_service.serve(bus, options, clock=CLOCK, new_id=random_id, ready=ready, equipped=equipped),
            name=f"agent-{name}",
        )
        self.tasks[name] = task
        waiting = asyncio.create_task(ready.wait())
        done, _ = await asyncio.wait(
            {task, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=SOON_SECONDS
        )
        waiting.cancel()
        if task in done:
            task.result()
        assert ready.is_set() or waiting in done, "the agent did not come up"

    async def kill(self, name: str) -> None:
        """As if the process had died: its coroutines end, what it started lives on."""
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def tell(self, subject: str, data: e.Payload) -> int:
        draft = Draft(data=data, id=random_id(), source="test", time=rfc3339(CLOCK.now_ns()))
        return (await self.bus.append(subject, encode(draft), message_id=draft.id)).seq

    async def raise_demand(self, name: str, *command: str, **more: Any) -> None:
        components = more.pop("components", None) or (Component(command=command, stop_grace_seconds=0.5),)
        await self.tell(
            subjects.demand("nlp"),
            e.DemandRaised(
                demand=name,
                project="nlp",
                owner=Owner(name="ann"),
                resources=Request(memory_bytes=4 * GIB, mode=Mode.EXCLUSIVE),
                components=components,
                **more,
            ),
        )

    async def withdraw(self, name: str) -> None:
        await self.tell(subjects.demand("nlp"), e.DemandWithdrawn(demand=name, project="nlp", by="ann"))

    async def until(self, what: Callable[[], bool]) -> None:
        """Reads the log until `what()` holds."""

        async def read() -> None:
            while not what():
                self.records += await self.follower.batch(wait_seconds=0.2)
                for name, task in self.tasks.items():
                    if task.done():
                        raise AssertionError(f"{name} ended: {task.exception()!r}")

        try:
            await asyncio.wait_for(read(), SOON_SECONDS)
        except TimeoutError:
            story = [f"{r.seq} {r.kind} {r.correlation}" for r in self.records]
            raise AssertionError(
                f"it did not come; the log: {story}, findings: {self.state.findings}"
            ) from None

    @property
    def state(self) -> Any:
        return self.follower.state

    def phase(self, name: str) -> Phase | None:
        demand = self.state.demands.get(name)
        return demand.phase if demand else None

    async def until_phase(self, name: str, phase: Phase) -> None:
        await self.until(lambda: self.phase(name) is phase)

    def kinds(self, name: str) -> list[str]:
        return [r.kind for r in self.records if r.correlation == name]

    def last(self, kind: type[e.Payload], name: str) -> Any:
        return [r.data for r in self.records if isinstance(r.data, kind) and r.correlation == name][-1]

    async def close(self) -> None:
        for name in list(self.tasks):
            await self.kill(name)
        await self.follower.close()
        self.server.stop()


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[Cell]:
    cell = Cell(tmp_path)
    await cell.open()
    await cell.agent()
    try:
        yield cell
        assert audit(cell.state) == []
    finally:
        for demand in list(cell.state.demands.values()):
            if demand.epoch:
                await cell.tell(
                    subjects.evict(("a",)),
                    e.EvictionOrdered(
                        demand=demand.spec.demand,
                        epoch=demand.epoch,
                        nodes=("a",),
                        reason=EvictionReason.OPERATOR,
                        grace_seconds=0.1,
                        scope=StopScope.EVERYTHING,
                    ),
                )
                if "a" in cell.tasks:
                    await cell.until(lambda d=demand: cell.phase(d.spec.demand).terminal)  # type: ignore[misc]
        await cell.close()


async def test_a_batch_runs_to_its_end_and_every_step_is_told(cell: Cell) -> None:
    await cell.raise_demand("one", "true")
    await cell.until_phase("one", Phase.ENDED)
    assert cell.kinds("one") == ["demand.raised", "bound", "started", "exited", "released"]
    assert cell.last(e.Exited, "one").verdict == VerdictClass.COMPLETED
    ids = {r.id: r.kind for r in cell.records}
    caused = {r.kind: ids[r.causation] for r in cell.records if r.correlation == "one" and r.causation}
    assert caused == {"bound": "demand.raised", "started": "bound", "exited": "bound", "released": "bound"}


async def test_an_application_that_fails_says_so(cell: Cell) -> None:
    await cell.raise_demand("one", "sh", "-c", "exit 3")
    await cell.until_phase("one", Phase.ENDED)
    told = cell.last(e.Exited, "one")
    assert (told.verdict, told.ends[0].exit_code) == (VerdictClass.APPLICATION_EXIT, 3)
    assert "exit code 3" in told.sentence


async def test_a_program_that_is_not_there_ends_at_once_and_frees_its_card(cell: Cell) -> None:
    await cell.raise_demand("one", "/no/such/program")
    await cell.until_phase("one", Phase.ENDED)
    assert cell.last(e.Exited, "one").verdict == VerdictClass.START_FAILED
    assert "started" not in cell.kinds("one")


async def test_exit_137_after_our_stop_order_is_not_out_of_memory(cell: Cell) -> None:
    """A program that ignores SIGTERM is killed after the grace: 137, and it was us."""
    await cell.raise_demand(
        "one", "sh", "-c", "trap '' TERM; touch up; while :; do sleep 0.1; done", workload=Workload.SERVICE
    )
    await cell.until_phase("one", Phase.RUNNING)
    up = cell.folder / "a" / "process" / f"{cell.state.demands['one'].epoch}-main" / "files" / "up"
    while not up.exists():
        await asyncio.sleep(0.02)
    await cell.withdraw("one")
    await cell.until_phase("one", Phase.ENDED)
    told = cell.last(e.Exited, "one")
    assert told.verdict == VerdictClass.STOPPED_BY_US
    assert told.ends[0].signal == 9
    assert told.evidence[0].what == "stop order"


async def test_what_is_withdrawn_while_it_waits_never_runs(cell: Cell) -> None:
    await cell.raise_demand("one", "sleep", "60")
    await cell.raise_demand("two", "sleep", "60")
    await cell.until(lambda: cell.phase("two") is Phase.RUNNING)
    await cell.raise_demand("three", "sleep", "60")
    await cell.withdraw("three")
    await cell.until_phase("three", Phase.WITHDRAWN)
    assert "bound" not in cell.kinds("three")


async def test_a_server_that_left_its_group_survives_the_stop_and_holds_the_card(cell: Cell) -> None:
    """The shared app: the access point ends, the server lives on; nothing is released until it is seen gone."""
    hold = (sys.executable, "-m", "rigbook_nodeagent.gpus.hold", "--memory", "4GiB")
    # the agent gives programs no PYTHONPATH of its own: say where the module is
    env = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    await cell.raise_demand(
        "app",
        workload=Workload.SERVICE,
        components=(
            Component(name="server", command=(*hold, "--daemonise"), env=env, stop_grace_seconds=0.5),
            Component(name="access", command=("sleep", "600"), gpu=False, stop_grace_seconds=0.5),
        ),
    )
    await cell.until_phase("app", Phase.RUNNING)
    (epoch,) = cell.state.bindings
    heartbeats = await cell.bus.tail(subjects.HEARTBEAT_STREAM, start_seq=1)

    async def seen(components: set[str]) -> e.Heartbeat:
        """The first heartbeat that shows these components and the card held by this epoch."""
        async with asyncio.timeout(SOON_SECONDS):
            while True:
                for message in await heartbeats.batch(max_messages=1, wait_seconds=None):
                    beat = decode(message.seq, message.subject, message.received_ns, message.body).data
                    assert isinstance(beat, e.Heartbeat)
                    held = any(p.epoch == epoch for c in beat.cards for p in c.processes or ())
                    if held and {c.component for c in beat.components or ()} == components:
                        return beat

    await seen({"server", "access"})
    await cell.withdraw("app")
    await cell.until(lambda: cell.state.bindings[epoch].eviction is not None)
    left = await seen({"server"})
    await heartbeats.close()
    assert [c.running for c in left.components or ()] == [False]
    assert [p.epoch for c in left.cards for p in c.processes or ()] == [epoch]
    assert cell.phase("app") is Phase.RELEASING
    await cell.tell(
        subjects.evict(("a",)),
        e.EvictionOrdered(
            demand="app",
            epoch=epoch,
            nodes=("a",),
            reason=EvictionReason.LEFTOVER,
            by="reaper",
            grace_seconds=0.5,
            scope=StopScope.EVERYTHING,
        ),
    )
    await cell.until_phase("app", Phase.ENDED)
    assert cell.kinds("app")[-2:] == ["exited", "released"]


async def test_the_agent_restarts_and_adopts_what_runs(cell: Cell) -> None:
    await cell.raise_demand("one", "sleep", "600", workload=Workload.SERVICE)
    await cell.until_phase("one", Phase.RUNNING)
    (pid,) = cell.last(e.Started, "one").components[0].pids
    await cell.kill("a")
    assert runs(pid)
    await cell.agent()
    await cell.raise_demand("two", "true")
    await cell.until_phase("two", Phase.ENDED)
    assert runs(pid)
    assert cell.phase("one") is Phase.RUNNING
    assert cell.kinds("one").count("started") == 1
    await cell.withdraw("one")
    await cell.until_phase("one", Phase.ENDED)
    assert not runs(pid)


async def test_what_ended_while_the_agent_was_away_is_told_when_it_is_back(
    cell: Cell, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    await cell.raise_demand("one", "sh", "-c", f"until test -e {go}; do sleep 0.05; done")
    await cell.until_phase("one", Phase.RUNNING)
    (pid,) = cell.last(e.Started, "one").components[0].pids
    await cell.kill("a")
    go.touch()
    while runs(pid):
        await asyncio.sleep(0.02)
    await cell.agent()
    await cell.until_phase("one", Phase.ENDED)
    assert cell.kinds("one").count("started") == 1
    assert cell.kinds("one").count("released") == 1


async def test_an_order_delivered_twice_runs_once(cell: Cell) -> None:
    await cell.raise_demand("one", "sleep", "600", workload=Workload.SERVICE)
    await cell.until_phase("one", Phase.RUNNING)
    await cell.kill("a")
    assert await cell.bus.delete_consumer(subjects.LEDGER_STREAM, subjects.consumer_of_agent("a"))
    await cell.agent()  # its new consumer begins at the first event again
    await cell.raise_demand("two", "true")
    await cell.until_phase("two", Phase.ENDED)
    assert cell.kinds("one").count("started") == 1
    assert cell.state.findings == []


async def test_a_damaged_order_book_line_costs_that_line_only(cell: Cell) -> None:
    await cell.raise_demand("one", "sleep", "600", workload=Workload.SERVICE)
    await cell.until_phase("one", Phase.RUNNING)
    await cell.kill("a")
    with (cell.folder / "a" / "orders.jsonl").open("ab") as book:
        book.write(b'{"closed": 1')
    await cell.agent()
    await cell.withdraw("one")
    await cell.until_phase("one", Phase.ENDED)


async def test_a_second_agent_under_the_same_name_is_refused(cell: Cell, tmp_path: Path) -> None:
    with pytest.raises(AlreadyServed, match="another agent on this machine uses"):
        await cell.agent()
    other = Cell(tmp_path / "elsewhere")
    other.server, other.bus, other.follower = cell.server, cell.bus, cell.follower
    with pytest.raises(AlreadyServed, match="an agent elsewhere sends heartbeats as node 'a'"):
        await other.agent()
    cell.tasks["a"] = next(t for t in asyncio.all_tasks() if t.get_name() == "agent-a" and not t.done())


async def test_a_failed_run_is_started_again_as_often_as_it_may(cell: Cell) -> None:
    await cell.raise_demand(
        "one",
        "sh",
        "-c",
        "exit 1",
        restart=Restart(policy="on-failure", attempts_max=2, backoff_seconds=0.05),
    )
    await cell.until_phase("one", Phase.ENDED)
    assert [r.data.final for r in cell.records if isinstance(r.data, e.Exited)] == [False, False, True]
    assert [r.data.attempt for r in cell.records if isinstance(r.data, e.Started)] == [1, 2, 3]


async def test_a_probe_makes_it_ready(cell: Cell, tmp_path: Path) -> None:
    probe = Probe(kind="exec", command=("test", "-e", str(tmp_path / "up")), every_seconds=0.05)
    await cell.raise_demand(
        "one",
        workload=Workload.SERVICE,
        components=(Component(command=("sleep", "600"), probe=probe, stop_grace_seconds=0.5),),
    )
    await cell.until_phase("one", Phase.STARTING)
    (tmp_path / "up").touch()
    await cell.until_phase("one", Phase.RUNNING)


async def test_a_bus_outage_loses_no_fact(cell: Cell, tmp_path: Path) -> None:
    """The program ends while the bus is away; its end is told when the bus is back."""
    go = tmp_path / "go"
    await cell.raise_demand("one", "sh", "-c", f"until test -e {go}; do sleep 0.05; done")
    await cell.until_phase("one", Phase.RUNNING)
    cell.server.stop()
    go.touch()
    await asyncio.sleep(0.3)
    cell.server.start()
    await cell.until_phase("one", Phase.ENDED)
    assert cell.kinds("one")[-2:] == ["exited", "released"]


async def test_cards_fill_up_and_the_next_binds_by_itself(cell: Cell) -> None:
    for name in ("one", "two", "three"):
        await cell.raise_demand(name, "sleep", "600", workload=Workload.SERVICE)
    await cell.until(lambda: len(cell.state.bindings) == 2 and bool(cell.state.demands["three"].reasons))
    assert cell.kinds("three") == ["demand.raised", "deferred"]
    await cell.withdraw("one")
    await cell.until_phase("three", Phase.RUNNING)


def test_the_shell_is_there() -> None:
    """These tests run `sh`, `sleep` and `true`."""
    assert all(shutil.which(p) for p in ("sh", "sleep", "true"))

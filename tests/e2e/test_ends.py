"""Ends of real processes: memory limits of a real kernel, probes, cooperative evictions, what only a card shows.

Method: the agent of `test_agent`, with real processes in real memory cgroups where the machine gives them.
"""

from __future__ import annotations

import asyncio
import http.server
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from rigbook_ledger.state import Phase
from rigbook_nodeagent.engines.cgroups import Cgroups
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas.values import (
    Checkpoint,
    CheckpointAnswer,
    Component,
    EvictionReason,
    Probe,
    Restart,
    StopScope,
    VerdictClass,
    Workload,
)
from rigbook_schemas.wire import decode

from tests.e2e.test_agent import CLUSTER, Cell, runs
from tests.e2e.test_agent import cell as cell  # noqa: PLC0414 - a fixture

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1024**2
EAT = "import sys; b = [bytearray(b'x') * (1 << 20) for _ in range(int(sys.argv[1]))]; print(len(b))"
PYTHON = sys.executable


@pytest.fixture
def memory_cgroups(tmp_path: Path) -> None:
    found = Cgroups(f"probe-{os.getpid()}")
    limits = found.memory_limits
    found.close()
    if not limits:
        pytest.skip("needs root and a memory cgroup")


def component(*command: str, **more: Any) -> Component:
    return Component(command=command, stop_grace_seconds=0.5, **more)


async def evict(cell: Cell, name: str, reason: EvictionReason, **more: Any) -> None:
    demand = cell.state.demands[name]
    order = e.EvictionOrdered(
        demand=name, epoch=demand.epoch, nodes=("a",), reason=reason, by="test", **{"grace_seconds": 1.0, **more}
    )  # fmt: skip
    await cell.tell(subjects.evict(("a",)), order)


def answers(cell: Cell, name: str) -> list[CheckpointAnswer]:
    return [
        r.data.answer
        for r in cell.records
        if isinstance(r.data, e.EvictionAnswered) and r.data.demand == name
    ]


# -- memory -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("memory_cgroups")
async def test_a_program_that_eats_more_than_its_limit_is_told_with_the_level(cell: Cell) -> None:
    await cell.raise_demand("eater", components=(component(PYTHON, "-c", EAT, "200", memory_bytes=64 * MIB),))
    await cell.until_phase("eater", Phase.ENDED)
    told = cell.last(e.Exited, "eater")
    assert (told.verdict, told.confidence) == (VerdictClass.OOM_CGROUP, "high"), told
    assert "its own limit of 64 MiB" in told.sentence
    (own, *_) = told.boundaries
    assert own.limit_bytes == 64 * MIB
    assert (own.peak_bytes or 0) >= 60 * MIB
    assert own.oom_kills == 1


@pytest.mark.usefixtures("memory_cgroups")
async def test_a_child_that_is_killed_for_memory_is_told_as_a_child(cell: Cell) -> None:
    line = f'{PYTHON} -c "{EAT}" 200; exit 7'
    await cell.raise_demand("parent", components=(component("sh", "-c", line, memory_bytes=64 * MIB),))
    await cell.until_phase("parent", Phase.ENDED)
    told = cell.last(e.Exited, "parent")
    assert (told.verdict, told.confidence) == (VerdictClass.OOM_CGROUP, "medium"), told
    assert told.ends[0].exit_code == 7


@pytest.mark.usefixtures("memory_cgroups")
async def test_a_kill_that_is_not_for_memory_is_not_called_so(cell: Cell) -> None:
    """137 and nothing else: somebody killed it."""
    await cell.raise_demand(
        "victim", components=(component("sh", "-c", "kill -9 $$", memory_bytes=64 * MIB),)
    )
    await cell.until_phase("victim", Phase.ENDED)
    told = cell.last(e.Exited, "victim")
    assert (told.verdict, told.confidence) == (VerdictClass.APPLICATION_EXIT, "low")


async def test_no_memory_on_the_card_is_read_from_the_output(cell: Cell) -> None:
    line = "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has'; exit 1"
    await cell.raise_demand("short", "sh", "-c", line)
    await cell.until_phase("short", Phase.ENDED)
    told = cell.last(e.Exited, "short")
    assert told.verdict == VerdictClass.GPU_ALLOC_RESERVE
    assert "9.0 GiB wanted" in told.sentence


# -- probes -------------------------------------------------------------------------------------------


async def test_a_service_that_is_never_ready_is_ended_and_started_again(cell: Cell) -> None:
    probe = Probe(kind="exec", command=("false",), every_seconds=0.05, startup_seconds_max=0.3)
    await cell.raise_demand(
        "slow", components=(component("sleep", "600", probe=probe),), workload=Workload.SERVICE,
        restart=Restart(policy="on-failure", attempts_max=1, backoff_seconds=0.05),
    )  # fmt: skip
    await cell.until(lambda: cell.kinds("slow").count("started") == 2)
    told = [r.data for r in cell.records if isinstance(r.data, e.Exited)]
    assert [(x.verdict, x.final) for x in told] == [(VerdictClass.PROBE_KILL_STARTUP, False)]
    await cell.withdraw("slow")
    await cell.until_phase("slow", Phase.ENDED)


async def test_liveness_counts_failures_in_a_row_and_a_separate_startup_probe_is_asked_first(
    cell: Cell, tmp_path: Path
) -> None:
    up, well = tmp_path / "up", tmp_path / "well"
    startup = Probe(kind="exec", command=("test", "-e", str(up)), every_seconds=0.05)
    probe = Probe(
        kind="exec", command=("test", "-e", str(well)), every_seconds=0.05, failures_max=3, on_failure="stop"
    )
    await cell.raise_demand(
        "svc",
        components=(component("sleep", "600", probe=probe, startup=startup),),
        workload=Workload.SERVICE,
    )
    await cell.until_phase("svc", Phase.STARTING)
    well.touch()
    up.touch()
    await cell.until_phase("svc", Phase.RUNNING)
    well.unlink()
    await cell.until_phase("svc", Phase.ENDED)
    told = cell.last(e.Exited, "svc")
    assert told.verdict == VerdictClass.PROBE_KILL_LIVENESS
    assert "3 times in a row" in told.sentence
    assert [x.value for x in told.evidence if x.what.startswith("liveness probe")][-1].endswith(
        "(3 in a row)"
    )
    assert "unready" in cell.kinds("svc")


async def test_without_a_restart_policy_a_failed_probe_is_only_told(cell: Cell, tmp_path: Path) -> None:
    well = tmp_path / "well"
    well.touch()
    probe = Probe(kind="exec", command=("test", "-e", str(well)), every_seconds=0.05, failures_max=2)
    await cell.raise_demand(
        "svc", components=(component("sleep", "600", probe=probe),), workload=Workload.SERVICE
    )
    await cell.until_phase("svc", Phase.RUNNING)
    well.unlink()
    await cell.until_phase("svc", Phase.STARTING)
    assert "exited" not in cell.kinds("svc")
    well.touch()
    await cell.until_phase("svc", Phase.RUNNING)


# -- asking before taking -----------------------------------------------------------------------------

SAVES = """
import pathlib, signal, sys, time
def ask(*_):
    pathlib.Path(sys.argv[1]).write_text("heard")
    time.sleep(0.4)
    pathlib.Path(sys.argv[1]).write_text("done")
signal.signal(signal.SIGUSR1, ask)
print("up", flush=True)
pathlib.Path("up").touch()
while True: time.sleep(0.05)
"""


async def until_up(cell: Cell, name: str) -> None:
    epoch = cell.state.demands[name].epoch
    up = cell.folder / "a" / "process" / f"{epoch}-main" / "files" / "up"
    while not up.exists():
        await asyncio.sleep(0.02)


async def test_a_preemption_waits_for_the_checkpoint_and_then_stops(cell: Cell) -> None:
    checkpoint = Checkpoint(signal="SIGUSR1", acknowledge="file", path="saved", acknowledge_seconds_max=5.0)
    await cell.raise_demand(
        "train", components=(component(PYTHON, "-c", SAVES, "saved", checkpoint=checkpoint),)
    )
    await cell.until_phase("train", Phase.RUNNING)
    await until_up(cell, "train")
    await evict(cell, "train", EvictionReason.PREEMPTION)
    await cell.until_phase("train", Phase.ENDED)
    assert answers(cell, "train") == [CheckpointAnswer.ACKNOWLEDGED, CheckpointAnswer.SAVED]
    assert cell.last(e.Exited, "train").verdict == VerdictClass.PREEMPTED


async def test_who_does_not_answer_is_not_killed_and_a_plain_order_still_stops_it(cell: Cell) -> None:
    """Case 34: the shell is process 1 and the signal never reaches the program."""
    deaf = "trap '' TERM; touch up; while :; do sleep 0.1; done"
    checkpoint = Checkpoint(acknowledge_seconds_max=0.3)
    await cell.raise_demand("deaf", components=(component("sh", "-c", deaf, checkpoint=checkpoint),))
    await cell.until_phase("deaf", Phase.RUNNING)
    (pid,) = cell.last(e.Started, "deaf").components[0].pids
    await until_up(cell, "deaf")
    await evict(cell, "deaf", EvictionReason.DRAIN)
    await cell.until(lambda: bool(answers(cell, "deaf")))
    await asyncio.sleep(1.5)
    assert runs(pid), "it was killed without an answer"
    assert answers(cell, "deaf") == [CheckpointAnswer.NOT_ACKNOWLEDGED]
    assert [f.code for f in cell.state.findings] == ["preempt_not_acknowledged"]
    assert cell.phase("deaf") is Phase.RELEASING
    await evict(cell, "deaf", EvictionReason.OPERATOR, grace_seconds=0.2)
    await cell.until_phase("deaf", Phase.ENDED)
    assert cell.last(e.Exited, "deaf").verdict == VerdictClass.STOPPED_BY_US


async def test_an_order_that_insists_kills_what_did_not_answer(cell: Cell) -> None:
    deaf = "trap '' TERM; touch up; while :; do sleep 0.1; done"
    await cell.raise_demand(
        "deaf", components=(component("sh", "-c", deaf, checkpoint=Checkpoint(acknowledge_seconds_max=0.3)),)
    )
    await cell.until_phase("deaf", Phase.RUNNING)
    await until_up(cell, "deaf")
    await evict(cell, "deaf", EvictionReason.PREEMPTION, grace_seconds=0.2, insist=True)
    await cell.until_phase("deaf", Phase.ENDED)
    assert answers(cell, "deaf") == [CheckpointAnswer.NOT_ACKNOWLEDGED]
    assert cell.last(e.Exited, "deaf").verdict == VerdictClass.PREEMPTED


@pytest.fixture
def answering() -> Iterator[tuple[int, list[int]]]:
    """A server whose answers are the status codes in the list, the last one for ever."""
    codes = [202, 202, 200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(codes.pop(0) if len(codes) > 1 else codes[0])
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1], codes
    server.shutdown()
    thread.join()
    server.server_close()


async def test_an_answer_over_http(cell: Cell, answering: tuple[int, list[int]]) -> None:
    port, _ = answering
    checkpoint = Checkpoint(signal="SIGCONT", acknowledge="http", path="/saved", port=port)
    await cell.raise_demand("web", components=(component("sleep", "600", checkpoint=checkpoint),))
    await cell.until_phase("web", Phase.RUNNING)
    await evict(cell, "web", EvictionReason.DRAIN)
    await cell.until_phase("web", Phase.ENDED)
    assert answers(cell, "web") == [CheckpointAnswer.ACKNOWLEDGED, CheckpointAnswer.SAVED]


async def test_a_program_that_ends_on_the_signal_has_saved(cell: Cell) -> None:
    await cell.raise_demand("plain", components=(component("sleep", "600"),))
    await cell.until_phase("plain", Phase.RUNNING)
    await evict(cell, "plain", EvictionReason.PREEMPTION)
    await cell.until_phase("plain", Phase.ENDED)
    assert answers(cell, "plain") == [CheckpointAnswer.SAVED]
    assert cell.last(e.Exited, "plain").verdict == VerdictClass.PREEMPTED


# -- what only a card shows ---------------------------------------------------------------------------


async def test_a_squatter_of_an_ended_epoch_is_ended_by_an_order_for_it(cell: Cell) -> None:
    """A process with our labels that no binding and no book knows of."""
    environment = {
        **os.environ, "RIGBOOK_CLUSTER": CLUSTER, "RIGBOOK_NODE": "a", "RIGBOOK_EPOCH": "1",
        "RIGBOOK_DEMAND": "ghost", "RIGBOOK_COMPONENT": "main",
    }  # fmt: skip
    stray = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
    try:
        order = e.EvictionOrdered(
            demand="ghost", epoch=1, nodes=("a",), reason=EvictionReason.SQUATTER, by="reaper",
            grace_seconds=0.5, scope=StopScope.EVERYTHING,
        )  # fmt: skip
        await cell.tell(subjects.evict(("a",)), order)
        await asyncio.to_thread(stray.wait, 10)
    finally:
        stray.kill()
        stray.wait()


# -- memory that does not come back -------------------------------------------------------------------


async def test_memory_that_does_not_come_back_keeps_the_card_and_is_visible(cell: Cell) -> None:
    """A driver that leaks: the process is gone, half of the card is used. It is not released; it says why."""
    await cell.raise_demand("leaky", "sleep", "600", workload=Workload.SERVICE)
    await cell.until_phase("leaky", Phase.RUNNING)
    started = cell.last(e.Started, "leaky")
    (card,) = started.components[0].gpus
    assert started.baseline[0].card == card
    fault = cell.folder / "a" / "gpus" / card / "fault"
    fault.write_text("residue")
    heartbeats = await cell.bus.tail(subjects.HEARTBEAT_STREAM, start_seq=1)
    await cell.withdraw("leaky")
    told: tuple[Any, ...] = ()
    async with asyncio.timeout(15):
        while not told:
            for message in await heartbeats.batch(max_messages=100, wait_seconds=1.0):
                beat = decode(message.seq, message.subject, message.received_ns, message.body).data
                told = beat.unreleased if isinstance(beat, e.Heartbeat) else ()
    await heartbeats.close()
    assert told[0].why.startswith("vram_not_recovered")
    assert told[0].cards == (card,)
    await cell.until_phase("leaky", Phase.RELEASING)
    fault.unlink()
    await cell.until_phase("leaky", Phase.ENDED)


async def test_an_engine_asks_for_more_than_there_is(cell: Cell) -> None:
    """The simulated card's own words, as the frameworks say them."""
    command = (PYTHON, "-m", "rigbook_nodeagent.gpus.hold", "--memory", "40GiB")
    env = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    await cell.raise_demand("greedy", components=(component(*command, env=env),))
    await cell.until_phase("greedy", Phase.ENDED)
    told = cell.last(e.Exited, "greedy")
    assert told.verdict == VerdictClass.GPU_ALLOC_RESERVE, told
    assert "40.0 GiB wanted" in told.sentence


async def test_a_card_that_falls_off_the_bus_wins_over_the_exit_code(cell: Cell) -> None:
    await cell.raise_demand("hit", "sh", "-c", "sleep 0.6; kill -SEGV $$")
    await cell.until_phase("hit", Phase.RUNNING)
    (card,) = cell.last(e.Started, "hit").components[0].gpus
    (cell.folder / "a" / "gpus" / card / "fault").write_text("lost")
    await cell.until(lambda: "exited" in cell.kinds("hit"))
    told = cell.last(e.Exited, "hit")
    assert told.verdict == VerdictClass.GPU_HARDWARE, told
    assert card in told.sentence
    (cell.folder / "a" / "gpus" / card / "fault").unlink()
    await cell.until_phase("hit", Phase.ENDED)

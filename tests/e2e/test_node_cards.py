"""Cards and starts on a node, with real processes on simulated cards: the start gate, figures filled in at the launch,
a card that is lost, model weights, promises about cards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rigbook_ledger.state import Phase
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas.values import GIB, Component, Mode, Port, Probe, Request, Workload
from rigbook_schemas.wire import decode

from tests.e2e.test_agent import SOON_SECONDS, Cell

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@pytest.fixture
async def bare(tmp_path: Path) -> AsyncIterator[Cell]:
    """No agent yet."""
    cell = Cell(tmp_path)
    await cell.open()
    try:
        yield cell
        for demand in list(cell.state.demands.values()):
            if demand.epoch:
                await cell.withdraw(demand.spec.demand)
                await cell.until_phase(demand.spec.demand, Phase.ENDED)
    finally:
        await cell.close()


async def raise_shared(cell: Cell, name: str, component: Component, *, gib: int = 8, **more: Any) -> None:
    await cell.tell(
        subjects.demand("nlp"),
        e.DemandRaised(
            demand=name, project="nlp", owner=e.Owner(name="ann"), workload=Workload.SERVICE, components=(component,),
            resources=Request(memory_bytes=gib * GIB, mode=Mode.MEMORY_SLICE), **more,
        ),
    )  # fmt: skip


async def heartbeat(cell: Cell, what: Callable[[e.Heartbeat], bool]) -> e.Heartbeat:
    """The first heartbeat from now on of which it holds."""
    import asyncio

    beats = await cell.bus.tail(subjects.HEARTBEAT_STREAM, start_seq=1)
    try:
        async with asyncio.timeout(SOON_SECONDS):
            while True:
                for message in await beats.batch(max_messages=1, wait_seconds=None):
                    data = decode(message.seq, message.subject, message.received_ns, message.body).data
                    assert isinstance(data, e.Heartbeat)
                    if what(data):
                        return data
    finally:
        await beats.close()


def engine(ready: Path, *, began: Path) -> Component:
    """An engine that measures the card at its start, and is ready when the test says so."""
    return Component(
        command=("sh", "-c", f"date +%s%N > {began}; exec sleep 600"),
        probe=Probe(kind="exec", command=("test", "-e", str(ready)), every_seconds=0.1),
        starts_alone=True,
        stop_grace_seconds=0.2,
    )


async def test_case_13_two_engines_do_not_start_at_once_on_one_card(bare: Cell, tmp_path: Path) -> None:
    """The second waits, visibly, until the first is ready; a third that measures nothing does not wait."""
    await bare.agent(gpus="sim:1xRTX4090")
    ready = {name: tmp_path / f"ready-{name}" for name in ("one", "two")}
    began = {name: tmp_path / f"began-{name}" for name in ("one", "two", "plain")}
    await raise_shared(bare, "one", engine(ready["one"], began=began["one"]))
    await bare.until_phase("one", Phase.STARTING)
    await raise_shared(bare, "two", engine(ready["two"], began=began["two"]))
    await bare.until_phase("two", Phase.BOUND)
    beat = await heartbeat(bare, lambda b: bool(b.starting))
    assert [(s.demand, s.step) for s in beat.starting] == [("two", "start_gate")]
    assert beat.starting[0].text == "one starts on the same card, and measures its memory"
    plain = Component(command=("sh", "-c", f"touch {began['plain']}; exec sleep 600"), stop_grace_seconds=0.2)
    await raise_shared(bare, "plain", plain, gib=2)
    await bare.until_phase("plain", Phase.RUNNING)
    assert not began["two"].exists()
    ready["one"].touch()
    await bare.until_phase("one", Phase.RUNNING)
    await bare.until_phase("two", Phase.STARTING)
    ready["two"].touch()
    await bare.until_phase("two", Phase.RUNNING)


async def test_the_gate_opens_when_the_first_one_ends_and_a_stop_ends_the_waiting(
    bare: Cell, tmp_path: Path
) -> None:
    await bare.agent(gpus="sim:1xRTX4090")
    never = tmp_path / "never"
    for name in ("one", "two", "three"):
        await raise_shared(bare, name, engine(never, began=tmp_path / f"began-{name}"), gib=4)
        await bare.until(lambda name=name: bare.phase(name) in (Phase.BOUND, Phase.STARTING))
    await bare.withdraw("two")  # while it waits
    await bare.until_phase("two", Phase.ENDED)
    assert not (tmp_path / "began-two").exists()
    await bare.withdraw("one")
    await bare.until_phase("one", Phase.ENDED)
    await bare.until_phase("three", Phase.STARTING)


async def test_figures_are_filled_in_at_the_launch(bare: Cell, tmp_path: Path) -> None:
    await bare.agent(gpus="sim:1xRTX4090", weights_dir=tmp_path / "w")
    out = tmp_path / "out.json"
    words = '{"share": "{memory_share}", "bytes": {memory_bytes}, "rest": {memory_rest_bytes}, "cards": {gpu_count}}'
    component = Component(
        command=("sh", "-c", f"echo '{words}' > {out}; echo $CACHE >> {out}; exec sleep 600"),
        env={"CACHE": "{weights_dir}/hf"},
        fill=True,
        stop_grace_seconds=0.2,
    )
    await raise_shared(bare, "one", component, gib=6)
    await bare.until_phase("one", Phase.RUNNING)
    await bare.until(lambda: out.exists() and out.read_text().count("\n") == 2)
    figures, cache = out.read_text().splitlines()
    assert json.loads(figures) == {"share": "0.250", "bytes": 6 * GIB, "rest": 18 * GIB, "cards": 1}
    assert cache == f"{tmp_path}/w/hf"
    assert (tmp_path / "w").is_dir(), "what is mounted must be there"


async def test_a_placeholder_that_nothing_knows_is_refused_by_the_placer(bare: Cell) -> None:
    await bare.agent()
    await raise_shared(
        bare, "one", Component(command=("echo", "{memory_shar}"), fill=True, ports=(Port(port=1),))
    )
    await bare.until_phase("one", Phase.REFUSED)
    assert "{memory_shar} is no placeholder" in bare.state.demands["one"].reasons[0].found


async def test_case_24_a_lost_card_is_quarantined_by_its_agent_and_the_other_stays_in_use(bare: Cell) -> None:
    await bare.agent()
    await bare.until(lambda: len(bare.state.cards) == 2)
    first, second = sorted(bare.state.cards.values(), key=lambda c: c.index)
    fault = bare.folder / "a" / "gpus" / first.uuid / "fault"
    fault.write_text("lost")
    await bare.until(lambda: bare.state.cards[first.uuid].quarantined is not None)
    assert bare.state.cards[first.uuid].quarantined == "Xid 79: the GPU has fallen off the bus"
    assert bare.state.cards[second.uuid].quarantined is None
    beat = await heartbeat(bare, lambda b: any(c.lost for c in b.cards))
    assert [c.uuid for c in beat.cards if c.lost] == [first.uuid]
    await bare.raise_demand("one", "sleep", "60")
    await bare.until_phase("one", Phase.RUNNING)
    assert bare.state.cards[second.uuid].holders
    fault.unlink()


async def test_weights_and_promises_are_in_the_inventory(bare: Cell, tmp_path: Path) -> None:
    config = (
        tmp_path
        / "w"
        / "hf"
        / "hub"
        / "models--Qwen--Qwen2.5-7B-Instruct"
        / "snapshots"
        / "1"
        / "config.json"
    )
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    other = tmp_path / "nfs"
    other.mkdir()
    (other / "small.gguf").touch()
    await bare.agent(weights_dir=tmp_path / "w", weights_dirs=(str(other),), exclusive_process=True)
    await bare.until(lambda: "a" in bare.state.nodes)
    assert bare.state.nodes["a"].weights == ("Qwen/Qwen2.5-7B-Instruct", "small.gguf")
    assert {c.enforces for c in bare.state.cards.values()} == {"compute-mode"}


async def test_a_memory_slice_gets_cudas_own_limit_where_its_service_runs(bare: Cell, tmp_path: Path) -> None:
    pipe = tmp_path / "mps"
    pipe.mkdir()
    (pipe / "control").touch()
    await bare.agent(gpus="sim:1xRTX4090", mps=str(pipe))
    out = tmp_path / "out"
    component = Component(
        command=("sh", "-c", f"env | grep CUDA_MPS > {out}.new; mv {out}.new {out}; exec sleep 600"),
        stop_grace_seconds=0.2,
    )
    await raise_shared(bare, "one", component, gib=6)
    await bare.until_phase("one", Phase.RUNNING)
    await bare.until(out.exists)
    assert sorted(out.read_text().split()) == [
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6144M",
        f"CUDA_MPS_PIPE_DIRECTORY={pipe}",
    ]
    assert {c.enforces for c in bare.state.cards.values()} == {"mps"}


async def test_an_exclusive_card_admits_one_process_where_the_operator_wants_it(bare: Cell) -> None:
    """Set before the start; a shared binding that follows finds the card open again before it starts."""
    await bare.agent(gpus="sim:1xRTX4090", exclusive_process=True)
    await bare.raise_demand("one", "sleep", "600")
    await bare.until_phase("one", Phase.RUNNING)
    beat = await heartbeat(bare, lambda b: any(c.compute_mode == "Exclusive_Process" for c in b.cards))
    last = beat.number
    await bare.withdraw("one")
    await bare.until_phase("one", Phase.ENDED)
    await raise_shared(bare, "two", Component(command=("sleep", "600"), stop_grace_seconds=0.2))
    await bare.until_phase("two", Phase.RUNNING)
    await heartbeat(bare, lambda b: b.number > last and all(c.compute_mode == "Default" for c in b.cards))

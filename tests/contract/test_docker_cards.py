"""Cards in containers on a real Docker Engine: whether they get them, what they reach, and what an image needs.

Goal: a node that cannot give cards says so and is left alone by the placer (CASES 33), a container that reaches other
cards than its own is noticed (17), and an image that is too new for the driver is warned of before its start.
"""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from rigbook.inference import preset_of
from rigbook_ledger.state import Phase
from rigbook_nodeagent.attribution import Attribution
from rigbook_nodeagent.engines.container_config import ContainerRules
from rigbook_nodeagent.engines.docker import DockerEngine, _start_refused
from rigbook_nodeagent.engines.docker_client import DockerRefusal
from rigbook_nodeagent.engines.docker_notes import DockerNotes
from rigbook_nodeagent.engines.protocol import StartRefused
from rigbook_nodeagent.equipment import Equipment, open_gpus
from rigbook_nodeagent.injected import injected_of
from rigbook_schemas import events as e
from rigbook_schemas.values import GIB, Component, Engine, Mode, Mount, Port, Request, VerdictClass, Workload

from tests.contract import engine_fixtures as kit
from tests.contract.engine_fixtures import (
    CLUSTER,
    IMAGE,
    busybox_rootfs,
    output_of,
    reap_everything,
    until_ended,
)
from tests.contract.engine_fixtures import dockerd as dockerd  # noqa: PLC0414 - a fixture
from tests.contract.engine_fixtures import dockerd_with_cards as dockerd_with_cards  # noqa: PLC0414 - a fixture
from tests.e2e.test_agent import Cell

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.docker
CARD = kit.CARD


@pytest.fixture
async def opened(tmp_path):
    """Opens engines, and leaves nothing behind."""
    engines: list[DockerEngine] = []

    async def open_(docker, **rules) -> DockerEngine:
        engine = DockerEngine(
            tmp_path / "engine", cluster=CLUSTER, node="node-a", url=docker.url, rules=ContainerRules(**rules)
        )
        await engine.open()
        engines.append(engine)
        return engine

    yield open_
    for engine in engines:
        await reap_everything(engine)
        await engine.close()


async def test_a_daemon_that_cannot_give_cards_is_remembered_until_one_start_works(
    dockerd, dockerd_with_cards, opened, tmp_path
):
    engine = await opened(dockerd)
    with pytest.raises(StartRefused):
        await engine.start(kit.launch("true", image=IMAGE))
    assert "could not select device driver" in engine.notes.no_cards
    assert "nvidia-container-toolkit" in engine.notes.no_cards
    await until_ended(engine, await engine.start(kit.launch("true", image=IMAGE, gpu=False, epoch=101)))
    assert engine.notes.no_cards, "a part without a card proves nothing"
    other = await opened(dockerd_with_cards)
    other.notes.no_cards = engine.notes.no_cards
    await other.start(kit.launch("sleep", "60", image=IMAGE, epoch=102))
    assert other.notes.no_cards == ""


async def test_a_daemon_that_comes_back_may_have_learned_it(dockerd, opened):
    engine = await opened(dockerd)
    engine.notes.no_cards = "could not select device driver"
    await until_ended(engine, await engine.start(kit.launch("true", image=IMAGE, gpu=False)))
    await asyncio.wait_for(anext(engine.ends()), 20)  # its events are heard
    dockerd.stop()
    dockerd.boot()

    async def forgotten() -> bool:
        return engine.notes.no_cards == ""

    await kit.eventually(forgotten, seconds=20)


# -- CUDA -----------------------------------------------------------------------------------------


def image_with(docker, name: str, *env: str) -> str:
    """An image of busybox with these variables."""
    changes = "".join(f"&changes={urllib.parse.quote(f'ENV {one}')}" for one in env)
    status, answer = docker.request(
        "POST", f"/images/create?fromSrc=-&repo={name}&tag=1{changes}", busybox_rootfs(), "application/x-tar"
    )
    assert status == 200, answer
    return f"{name}:1"


async def test_an_image_too_new_for_the_driver_is_warned_of_and_started(dockerd_with_cards, opened):
    image = image_with(dockerd_with_cards, "newer", "CUDA_VERSION=12.4.1")
    engine = await opened(dockerd_with_cards)
    order = msgspec.structs.replace(
        kit.launch("sleep", "60", image=image), cuda_version="11.4", driver_version="470.10"
    )
    running = await engine.start(order)
    assert running.running
    assert running.warning.startswith(
        "the image is built for CUDA 12.4.1, and this node's driver 470.10 runs CUDA up to 11.4"
    )
    fits = msgspec.structs.replace(order, epoch=101, cuda_version="12.4", driver_version="550.1")
    assert (await engine.start(fits)).warning == ""


def test_the_toolkits_own_refusal_is_no_riddle() -> None:
    text = "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4, please update your driver"
    told = _start_refused(
        DockerRefusal(500, text), kit.launch("true", image=IMAGE), "the image needs cuda>=12.4"
    )
    assert (told.code, told.text) == ("driver_too_old", "main: the image needs cuda>=12.4")


# -- what a container reaches ---------------------------------------------------------------------


async def test_case_17_what_a_real_container_reaches(dockerd_with_cards, opened):
    """Devices that every container has, and one that none has, stand for cards."""
    engine = await opened(dockerd_with_cards)
    running = await engine.start(kit.launch("sleep", "60", image=IMAGE))
    nodes = {"GPU-null": "/dev/null", "GPU-zero": "/dev/zero", "GPU-kmsg": "/dev/kmsg"}
    if not Path("/dev/kmsg").exists():
        pytest.skip("no device here that a container lacks")
    pid = running.pids[0]
    assert injected_of(pid, ("GPU-null", "GPU-zero"), nodes) == ("GPU-null", "GPU-zero")
    assert "GPU-kmsg" not in (injected_of(pid, ("GPU-kmsg",), nodes) or ())


# -- the contract ---------------------------------------------------------------------------------


async def test_the_weights_folder_is_mounted_and_nothing_else_of_the_host(dockerd, opened, tmp_path):
    weights = tmp_path / "weights"
    weights.mkdir()
    engine = await opened(dockerd, device_requests=False, mounts_allowed=(str(weights),))
    good = Mount(source=str(weights), target="/models", read_only=False)
    await until_ended(
        engine,
        await engine.start(kit.launch("sh", "-c", "echo 1 > /models/here", image=IMAGE, mounts=(good,))),
    )
    assert (weights / "here").read_text() == "1\n"
    for wrong in (str(tmp_path), f"{weights}/../other", "/"):
        order = kit.launch("true", image=IMAGE, epoch=101, mounts=(Mount(source=wrong, target="/models"),))
        with pytest.raises(StartRefused) as refused:
            await engine.start(order)
        assert refused.value.code == "mount_denied"


async def test_mps_shares_the_hosts_memory_with_parts_that_have_a_card(dockerd, opened, tmp_path):
    pipe = tmp_path / "mps"
    pipe.mkdir()
    engine = await opened(dockerd, device_requests=False, share_ipc=True, shared_folders=(str(pipe),))
    with_card = await engine.start(kit.launch("ls", str(pipe), image=IMAGE, shm_bytes=1024**2))
    without = await engine.start(kit.launch("sleep", "60", image=IMAGE, epoch=101, gpu=False))
    modes = [
        json.loads(dockerd.request("GET", f"/containers/{one.ref}/json")[1])["HostConfig"]["IpcMode"]
        for one in (with_card, without)
    ]
    assert modes == ["host", "private"]
    ended = await until_ended(engine, with_card)
    assert (ended.exit_code, await output_of(engine, ended)) == (0, "")


# -- the node -------------------------------------------------------------------------------------


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[Cell]:
    cell = Cell(tmp_path)
    await cell.open()
    try:
        yield cell
        for demand in list(cell.state.demands.values()):
            if not demand.phase.terminal:
                await cell.withdraw(demand.spec.demand)
                await cell.until_phase(demand.spec.demand, Phase.ENDED)
    finally:
        await cell.close()


def equipped(docker):
    """Simulated cards, and a Docker Engine that is asked for them as for real ones."""

    def equip(options) -> Equipment:
        notes = DockerNotes()
        engine = DockerEngine(
            options.data / "docker", cluster=options.cluster, node=options.node, url=docker.url,
            rules=ContainerRules(device_requests=True), notes=notes,
        )  # fmt: skip
        return Equipment(
            gpus=open_gpus(options), engines={Engine.DOCKER: engine}, docker=notes,
            attribution=Attribution(options.cluster, options.node),
        )  # fmt: skip

    return equip


async def test_case_33_a_node_without_the_toolkit_is_flagged_and_the_demand_goes_elsewhere(
    cell, dockerd, dockerd_with_cards
):
    await cell.agent("a", equipped=equipped(dockerd))
    part = Component(command=("sleep", "600"), image=IMAGE, stop_grace_seconds=0.2)
    await cell.raise_demand("one", components=(part,), workload=Workload.SERVICE)
    await cell.until(lambda: "exited" in cell.kinds("one"))
    told = cell.last(e.Exited, "one")
    assert told.verdict == VerdictClass.RUNTIME_MISSING
    assert "nvidia-container-toolkit" in told.sentence
    await cell.until(lambda: "could not select device driver" in cell.state.nodes["a"].container_gpus)
    await cell.agent("b", equipped=equipped(dockerd_with_cards))
    await cell.until_phase("one", Phase.RUNNING)
    (binding,) = cell.state.bindings.values()
    assert binding.shares[0].node == "b"
    assert cell.state.nodes["b"].container_gpus == ""


ENGINE = f"""
name: stub
image: {IMAGE}
command: [sh, -c, "mkdir -p /models/hf && echo $0 $HF_HOME > /models/hf/told && mkdir /w && touch /w/health && exec httpd -f -p {{port}} -h /w",
          "{{memory_share}} {{model}}"]
port: 8000
health: /health
env: {{HF_HOME: /models/hf}}
shm: 16MiB
startup: 1m
"""


async def test_an_engine_from_its_file_to_its_health_with_the_figures_of_the_card(cell, dockerd, tmp_path):
    """The whole contract on a real Docker Engine: filled-in command, weights folder, published port, probes, shm."""
    file = tmp_path / "stub.yaml"
    file.write_text(ENGINE)
    component = preset_of(str(file)).component(model="Qwen/Qwen2.5-7B-Instruct", port=Port(port=8000))
    weights = tmp_path / "weights"
    await cell.agent(
        "a", engines=("docker",), docker_url=dockerd.url, weights_dir=weights, gpus="sim:1xRTX4090"
    )
    request = Request(memory_bytes=6 * GIB, mode=Mode.MEMORY_SLICE, weights="Qwen/Qwen2.5-7B-Instruct")
    await cell.tell(
        "rig.demand.nlp",
        e.DemandRaised(
            demand="one", project="nlp", owner=e.Owner(name="ann"), workload=Workload.SERVICE, resources=request,
            components=(msgspec.structs.replace(component, stop_grace_seconds=0.2),),
        ),
    )  # fmt: skip
    await cell.until_phase("one", Phase.RUNNING)
    assert "ready" in cell.kinds("one"), "its health said yes"
    assert (weights / "hf" / "told").read_text() == "0.250 Qwen/Qwen2.5-7B-Instruct /models/hf\n"
    (seen,) = cell.last(e.Started, "one").components
    assert seen.ports[0].host_port > 0
    shown = json.loads(dockerd.request("GET", f"/containers/{seen.ref}/json")[1])["HostConfig"]
    assert (shown["ShmSize"], shown["IpcMode"]) == (16 * 1024**2, "private")

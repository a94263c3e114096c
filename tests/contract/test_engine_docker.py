"""The Docker engine on a real Docker Engine: cards, images, foreign containers, failures.

Goal: a container gets the cards of its binding and nothing else, a refusal names its cause, others'
containers are never listed nor touched, and a daemon that is away is unknown. Method: a private dockerd
without a registry and without cards; a second one with a stub of the nvidia hook; a registry of 60 lines.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.server
import json
import socket
import threading

import pytest
from rigbook_nodeagent.engines.container_config import ContainerRules, container_config, container_name
from rigbook_nodeagent.engines.docker import DockerEngine
from rigbook_nodeagent.engines.protocol import EngineError, StartRefused
from rigbook_nodeagent.gpus.simulated import SimulatedGpus
from rigbook_schemas.values import Mount, Port, StopScope

from tests.contract import engine_fixtures as kit
from tests.contract.engine_fixtures import (
    CLUSTER,
    IMAGE,
    busybox_rootfs,
    eventually,
    output_of,
    reap_everything,
    until_ended,
)
from tests.contract.engine_fixtures import dockerd as dockerd  # noqa: PLC0414 - a fixture
from tests.contract.engine_fixtures import dockerd_with_cards as dockerd_with_cards  # noqa: PLC0414 - a fixture

pytestmark = pytest.mark.docker
NO_CARDS = ContainerRules(device_requests=False)
CARDS = ("GPU-aaaaaaaa-0000-0000-0000-000000000003", "GPU-bbbbbbbb-0000-0000-0000-000000000001")


def launch(*command: str, image: str = IMAGE, **fields: object):
    return kit.launch(*command, image=image, **fields)


async def no_sleep(_seconds: float) -> None:
    return


@pytest.fixture
async def opened(tmp_path):
    """Opens engines, and leaves nothing behind."""
    engines: list[DockerEngine] = []

    async def open_(docker, rules=NO_CARDS, **options) -> DockerEngine:
        engine = DockerEngine(
            tmp_path / "engine", cluster=CLUSTER, node="node-a", url=docker.url, rules=rules, **options
        )
        await engine.open()
        engines.append(engine)
        return engine

    yield open_
    for engine in engines:
        await reap_everything(engine)
        await engine.close()


async def test_without_the_nvidia_toolkit_the_start_is_refused_with_the_remedy(dockerd, opened):
    engine = await opened(dockerd, ContainerRules())
    with pytest.raises(
        StartRefused, match=r"could not select device driver .*nvidia-container-toolkit"
    ) as refused:
        await engine.start(launch("true"))
    assert refused.value.code == "runtime_missing"
    assert await engine.inventory() == []
    assert json.loads(dockerd.request("GET", "/containers/json?all=1")[1]) == [], "the created one is left"


async def test_cards_are_requested_by_uuid_and_are_indices_inside(dockerd_with_cards, opened):
    engine = await opened(dockerd_with_cards, ContainerRules())
    order = kit.launch("env", image=IMAGE, cards=CARDS, environment={"CUDA_VISIBLE_DEVICES": ",".join(CARDS)})
    order = type(order)(**{**{f: getattr(order, f) for f in order.__struct_fields__}, "indices": (3, 1)})
    ended = await until_ended(engine, await engine.start(order))
    lines = (await output_of(engine, ended)).splitlines()
    assert f"NVIDIA_VISIBLE_DEVICES={','.join(CARDS)}" in lines
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in lines
    assert "CUDA_VISIBLE_DEVICES=1,0" in lines, "the first card of the binding has the higher PCI address"
    assert ended.cards == CARDS


async def test_a_cpu_only_part_sees_no_card(dockerd_with_cards, opened):
    engine = await opened(dockerd_with_cards, ContainerRules())
    ended = await until_ended(engine, await engine.start(launch("env", gpu=False)))
    lines = (await output_of(engine, ended)).splitlines()
    assert "NVIDIA_VISIBLE_DEVICES=none" in lines
    assert "CUDA_VISIBLE_DEVICES=" in lines
    assert ended.cards == ()


async def test_foreign_containers_are_neither_listed_nor_touched(dockerd, opened):
    engine = await opened(dockerd)
    theirs = {"dev.rigbook.cluster": "other", "dev.rigbook.node": "node-a", "dev.rigbook.epoch": "100"}
    names = {
        "plain": {},
        "theirs": {**theirs, "dev.rigbook.component": "main"},
        container_name(launch("true")): {},
    }
    for name, labels in names.items():
        body = json.dumps({"Image": IMAGE, "Cmd": ["sleep", "300"], "Labels": labels}).encode()
        assert dockerd.request("POST", f"/containers/create?name={name}", body)[0] == 201
        assert dockerd.request("POST", f"/containers/{name}/start")[0] == 204
    try:
        assert await engine.inventory() == []
        assert await engine.inspect(100, "main") is None
        with pytest.raises(StartRefused, match="exists and is not ours"):
            await engine.start(launch("true"))
        running = json.loads(dockerd.request("GET", "/containers/json")[1])
        assert len(running) == 3
    finally:
        for name in names:
            dockerd.request("DELETE", f"/containers/{name}?force=1")


async def test_limits_and_options_are_as_spelled_out(dockerd, opened):
    engine = await opened(dockerd)
    running = await engine.start(
        launch("sleep", "300", memory_bytes=64 * 1024**2, shm_bytes=16 * 1024**2, stop_grace_seconds=3.0)
    )
    shown = json.loads(dockerd.request("GET", f"/containers/{running.ref}/json")[1])
    host = shown["HostConfig"]
    assert host["Init"] is True
    assert host["RestartPolicy"] == {"Name": "no", "MaximumRetryCount": 0}
    assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-size": "10485760", "max-file": "3"}}
    assert (host["Memory"], host["MemorySwap"], host["ShmSize"]) == (64 * 1024**2, 64 * 1024**2, 16 * 1024**2)
    assert (host["Privileged"], host["AutoRemove"]) == (False, False)
    assert shown["Config"]["StopTimeout"] == 3
    labels = shown["Config"]["Labels"]
    assert {key.removeprefix("dev.rigbook."): value for key, value in labels.items()} == {
        "cluster": CLUSTER,
        "node": "node-a",
        "demand": "demand-100",
        "epoch": "100",
        "project": "vision",
        "owner": "wei",
        "gpus": kit.CARD,
        "spec": "",
        "component": "main",
    }


async def test_memory_beyond_the_limit_is_an_oom_kill(dockerd, opened):
    engine = await opened(dockerd)
    greedy = "dd if=/dev/zero of=/dev/null bs=200M count=1"
    running = await engine.start(launch("sh", "-c", greedy, memory_bytes=16 * 1024**2))
    ended = await until_ended(engine, running)
    assert (ended.running, ended.oom_killed) == (False, True)


async def test_ports_are_published_and_a_taken_one_is_refused(dockerd, opened):
    engine = await opened(dockerd)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    running = await engine.start(
        launch("sleep", "300", ports=(Port(port=8000, host_port=free), Port(port=9000)))
    )
    chosen = {port.port: port.host_port for port in running.ports}
    assert chosen[8000] == free
    assert chosen[9000] > 0

    with pytest.raises(StartRefused) as refused:
        await engine.start(launch("sleep", "300", epoch=101, ports=(Port(port=80, host_port=free),)))
    assert refused.value.code == "port_taken"
    assert [one.epoch for one in await engine.inventory()] == [100]


async def test_mounts_obey_the_allow_list(dockerd, opened, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights").write_text("42")
    rules = ContainerRules(device_requests=False, mounts_allowed=(str(tmp_path / "models"),))
    engine = await opened(dockerd, rules)
    allowed = Mount(source=str(tmp_path / "models"), target="/models")
    ended = await until_ended(
        engine,
        await engine.start(launch("sh", "-c", "cat /models/weights; touch /models/x", mounts=(allowed,))),
    )
    assert "42" in await output_of(engine, ended)
    assert not (tmp_path / "models" / "x").exists(), "mounts are read-only unless asked otherwise"
    for source in ("/etc", f"{tmp_path}/models/../secret", f"{tmp_path}/models-not", "relative"):
        with pytest.raises(StartRefused) as refused:
            await engine.start(launch("true", epoch=101, mounts=(Mount(source=source, target="/x"),)))
        assert refused.value.code == "mount_denied"
    missing = Mount(source=f"{tmp_path}/models/missing", target="/x")
    with pytest.raises(StartRefused) as refused:
        await engine.start(launch("true", epoch=101, mounts=(missing,)))
    assert refused.value.code == "mount_denied"


async def test_simulated_cards_reach_a_container_by_environment_and_folder(dockerd, opened, tmp_path):
    gpus = SimulatedGpus("sim:2xT4", tmp_path / "cards")
    gpus.open()
    card = gpus.inventory()[1].uuid
    rules = ContainerRules(device_requests=False, shared_folders=(str(tmp_path / "cards"),))
    engine = await opened(dockerd, rules)
    hold = (
        "echo $CUDA_VISIBLE_DEVICES; ns=$(readlink /proc/self/ns/pid | tr -dc 0-9); "
        'echo 1073741824 > "$RIGBOOK_SIM_DIR/$NVIDIA_VISIBLE_DEVICES/$$-$ns"; sleep 300; true'
    )
    order = launch("sh", "-c", hold, cards=(card,), environment=dict(gpus.environment([card])))
    running = await engine.start(order)

    async def held():
        return gpus.sample()[1].memory_used_bytes == 1024**3

    await eventually(held)
    (process,) = gpus.sample()[1].processes
    assert process.pid in running.pids, "the driver shows the pid as the host numbers it"
    assert await output_of(engine, running) == "0\n"
    await engine.stop(running, grace_seconds=2, scope=StopScope.COMPONENTS)
    assert gpus.sample()[1].memory_used_bytes == 0


async def test_a_container_that_was_only_created_is_no_component(dockerd, opened):
    order = launch("sleep", "300")
    body = json.dumps(container_config(order, NO_CARDS)).encode()

    def create() -> None:
        assert dockerd.request("POST", f"/containers/create?name={container_name(order)}", body)[0] == 201

    create()
    engine = await opened(dockerd)
    assert json.loads(dockerd.request("GET", "/containers/json?all=1")[1]) == []
    create()
    assert await engine.inventory() == []
    running = await engine.start(order)
    assert running.running


async def test_a_container_removed_by_somebody_else_is_gone(dockerd, opened):
    engine = await opened(dockerd)
    running = await engine.start(launch("sleep", "300"))
    hints = engine.ends()
    dockerd.request("DELETE", f"/containers/{running.ref}?force=1")
    hint = await asyncio.wait_for(anext(hints), 20)
    assert hint.ref == running.ref
    assert await engine.inventory() == []
    await engine.stop(running, grace_seconds=1, scope=StopScope.COMPONENTS)
    await engine.remove(running)


async def test_a_paused_container_can_be_stopped(dockerd, opened):
    engine = await opened(dockerd)
    running = await engine.start(launch("sleep", "300"))
    assert dockerd.request("POST", f"/containers/{running.ref}/pause")[0] == 204
    (seen,) = await engine.inventory()
    assert seen.running
    await engine.stop(running, grace_seconds=2, scope=StopScope.COMPONENTS)
    assert not (await engine.inspect(100, "main")).running


async def test_a_daemon_that_is_away_is_unknown_and_comes_back(dockerd, opened):
    engine = await opened(dockerd)
    await engine.start(launch("sleep", "300"))
    dockerd.stop()
    for question in (
        engine.inventory(),
        engine.inspect(100, "main"),
        engine.start(launch("true", epoch=101)),
    ):
        with pytest.raises(EngineError, match="does not answer"):
            await question
    dockerd.boot()
    (ended,) = await engine.inventory()
    assert (ended.running, ended.stopped_by_us) == (False, False)
    assert await asyncio.wait_for(_first(engine), 30)


async def _first(engine) -> bool:
    """Starts components until an end is told: the events are connected again after a pause."""
    hints, epoch = engine.ends(), 200
    while True:
        epoch += 1
        await until_ended(engine, await engine.start(launch("true", epoch=epoch)))
        waiting = asyncio.ensure_future(anext(hints))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        if done and waiting.result().epoch > 200:  # not one from before the daemon went
            return True
        if not done:
            waiting.cancel()
            hints = engine.ends()


async def test_no_daemon_at_all_says_what_to_do(tmp_path):
    engine = DockerEngine(tmp_path, cluster=CLUSTER, node="node-a", url=f"unix://{tmp_path}/nothing.sock")
    with pytest.raises(EngineError, match="systemctl start docker"):
        await engine.open()


# -- images -------------------------------------------------------------------------------------------


class Registry:
    """The few answers of a registry that a pull needs. `failures` requests for manifests fail first."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        layer = busybox_rootfs()
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {"Env": ["PATH=/bin"]},
                "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
            }
        ).encode()
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {"mediaType": CONFIG, "size": len(config), "digest": _digest(config)},
                "layers": [{"mediaType": LAYER, "size": len(layer), "digest": _digest(layer)}],
            }
        ).encode()
        blobs = {_digest(blob): blob for blob in (layer, config)}
        registry = self

        class Answers(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kind, body, status = "application/octet-stream", b"", 200
                name = self.path.rpartition("/")[2]
                if "/manifests/" in self.path and "/model/" in self.path:
                    kind, body = MANIFEST, manifest
                    if registry.failures > 0:
                        registry.failures -= 1
                        status, body = 503, b"{}"
                elif "/blobs/" in self.path:
                    body = blobs[name]
                elif self.path != "/v2/":
                    status, kind = 404, "application/json"
                    body = b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}'
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Docker-Content-Digest", _digest(body))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815 - its name

            def log_message(self, *arguments: object) -> None:
                """Quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.name = f"127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar"


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


@pytest.fixture
def registry():
    registry = Registry()
    yield registry
    registry.close()


async def test_a_missing_image_is_pulled_with_progress_after_failures(dockerd, opened, registry):
    registry.failures = 2
    told: list[str] = []
    engine = await opened(dockerd, on_pull=lambda progress: told.append(progress.text), sleep=no_sleep)
    image = f"{registry.name}/model"
    ended = await until_ended(engine, await engine.start(launch("echo", "pulled", image=image)))
    assert await output_of(engine, ended) == "pulled\n"
    assert any("Pull complete" in text for text in told)
    await engine.remove(ended)
    assert dockerd.request("DELETE", f"/images/{image}:latest?force=1")[0] == 200


async def test_an_image_that_does_not_exist_is_refused_at_once(dockerd, opened, registry):
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    engine = await opened(dockerd, sleep=sleep)
    with pytest.raises(StartRefused, match=r"attempt 1.*manifest unknown") as refused:
        await engine.start(launch("true", image=f"{registry.name}/nothing:1"))
    assert (refused.value.code, slept) == ("image_pull", [])


async def test_a_registry_out_of_reach_is_tried_with_back_off_then_refused(dockerd, opened):
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    engine = await opened(dockerd, sleep=sleep)
    with pytest.raises(StartRefused, match="attempt 4") as refused:
        await engine.start(launch("true", image="127.0.0.1:9/model:1"))
    assert (refused.value.code, slept) == ("image_pull", [1.0, 2.0, 4.0])


async def test_an_image_name_that_is_none_is_refused(dockerd, opened):
    engine = await opened(dockerd, sleep=no_sleep)
    with pytest.raises(StartRefused) as refused:
        await engine.start(launch("true", image="Not A Name"))
    assert refused.value.code == "image_pull"

"""The agent on a real Docker Engine: what ends are called, adoption, fencing, and others' containers.

Goal: nothing is doubled, nothing is orphaned, nothing foreign is touched, whatever is killed or restarted.
Method: the agent of `test_agent`, a private dockerd (one per test where it is restarted), plain API calls for
what others do to our containers.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rigbook_ledger.state import Phase
from rigbook_nodeagent.engines.container_config import ContainerRules
from rigbook_nodeagent.engines.docker import DockerEngine
from rigbook_nodeagent.equipment import Equipment, Options, equip
from rigbook_nodeagent.host import Host
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas.values import (
    GIB,
    Checkpoint,
    CheckpointAnswer,
    Component,
    Engine,
    EvictionReason,
    Probe,
    Restart,
    VerdictClass,
    Workload,
)
from rigbook_schemas.wire import decode

from tests.contract.engine_fixtures import IMAGE, busybox_rootfs
from tests.contract.engine_fixtures import dockerd as dockerd  # noqa: PLC0414 - a fixture
from tests.contract.engine_fixtures import own_dockerd as own_dockerd  # noqa: PLC0414 - a fixture
from tests.e2e.test_agent import Cell

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.contract.engine_fixtures import PrivateDocker

pytestmark = pytest.mark.docker
MIB = 1024**2
OURS = "dev.rigbook.epoch"


def component(*command: str, **more: Any) -> Component:
    return Component(command=command, **{"image": IMAGE, "stop_grace_seconds": 0.5, **more})


def sh(line: str, **more: Any) -> Component:
    return component("sh", "-c", line, **more)


def containers(docker: PrivateDocker, *, running: bool = True) -> dict[str, dict[str, Any]]:
    """By name."""
    listed = json.loads(docker.request("GET", f"/containers/json?all={0 if running else 1}")[1])
    return {entry["Names"][0].lstrip("/"): entry for entry in listed}


def run_beside(
    docker: PrivateDocker, name: str, *command: str, image: str = IMAGE, labels: dict[str, str] | None = None
) -> str:
    """Somebody else's `docker run -d`; the id."""
    body = json.dumps({"Image": image, "Cmd": list(command), "Labels": labels or {}}).encode()
    status, answer = docker.request("POST", f"/containers/create?name={name}", body)
    assert status == 201, answer
    identity = str(json.loads(answer)["Id"])
    assert docker.request("POST", f"/containers/{identity}/start")[0] == 204
    return identity


@pytest.fixture
async def cells(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    opened: list[tuple[Cell, PrivateDocker]] = []

    async def open_(docker: PrivateDocker, *, name: str = "cell", **options: Any) -> Cell:
        cell = Cell(tmp_path / name)
        cell.options = {"engines": ("docker",), "docker_url": docker.url, "cluster": f"{name}x", **options}
        await cell.open()
        await cell.agent()
        opened.append((cell, docker))
        return cell

    yield open_
    for cell, docker in opened:
        await cell.close()
        for entry in containers(docker, running=False).values():
            docker.request("DELETE", f"/containers/{entry['Id']}?force=1")


async def service(cell: Cell, name: str, *command: str, **more: Any) -> str:
    """A service that runs; the id of its container."""
    fields = {
        "workload": Workload.SERVICE,
        "components": (component(*(command or ("sleep", "600"))),),
        **more,
    }
    await cell.raise_demand(name, **fields)
    await cell.until_phase(name, Phase.RUNNING)
    return str(cell.last(e.Started, name).components[0].ref)


async def ends(cell: Cell, name: str) -> None:
    await cell.withdraw(name)
    await cell.until_phase(name, Phase.ENDED)


async def nothing_left(docker: PrivateDocker) -> None:
    """The engine forgets an ended container right after `released`."""
    async with asyncio.timeout(15):
        while containers(docker, running=False):
            await asyncio.sleep(0.05)


def exits(cell: Cell, name: str) -> list[e.Exited]:
    return [r.data for r in cell.records if isinstance(r.data, e.Exited) and r.data.demand == name]


# -- what ends are called -------------------------------------------------------------------------------


async def test_a_tmpfs_counts_against_the_limit(dockerd: PrivateDocker, cells: Any) -> None:
    cell = await cells(dockerd)
    line = "sleep 0.3; exec dd if=/dev/zero of=/dev/shm/x bs=1M count=200"
    await cell.raise_demand("eater", components=(sh(line, memory_bytes=48 * MIB, shm_bytes=256 * MIB),))
    await cell.until_phase("eater", Phase.ENDED)
    (told,) = exits(cell, "eater")
    assert told.verdict == VerdictClass.OOM_CGROUP, told
    assert told.ends[0].exit_code == 137
    assert "48 MiB (container " in told.sentence
    assert [b.limit_bytes for b in told.boundaries if b.name.startswith("container ")] == [48 * MIB]


async def test_a_child_killed_for_memory(dockerd: PrivateDocker, cells: Any) -> None:
    cell = await cells(dockerd)
    line = "sleep 0.3; dd if=/dev/zero of=/dev/shm/x bs=1M count=200; rm /dev/shm/x; exit 7"
    await cell.raise_demand("parent", components=(sh(line, memory_bytes=48 * MIB, shm_bytes=256 * MIB),))
    await cell.until_phase("parent", Phase.ENDED)
    (told,) = exits(cell, "parent")
    assert (told.verdict, told.ends[0].exit_code) == (VerdictClass.OOM_CGROUP, 7), told
    assert told.confidence == "medium"


async def test_the_limit_around_the_container_is_named(dockerd: PrivateDocker, cells: Any) -> None:
    """Case 21: the container may have 200 MiB, the group it is in 40."""
    group = Path("/sys/fs/cgroup/memory") / f"rbt{os.getpid()}"
    if not group.parent.is_dir():
        pytest.skip("needs cgroup v1")
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(40 * MIB))

    def grouped(options: Options) -> Equipment:
        ordinary = equip(options)
        rules = ContainerRules(device_requests=False, cgroup_parent=f"/{group.name}")
        engine = DockerEngine(
            options.data / "docker", cluster=options.cluster, node="a", url=options.docker_url, rules=rules
        )
        return Equipment(
            gpus=ordinary.gpus, engines={Engine.DOCKER: engine}, attribution=ordinary.attribution,
            hierarchy=ordinary.hierarchy, kernel_log=ordinary.kernel_log, docker=ordinary.docker,
        )  # fmt: skip

    try:
        cell = await cells(dockerd)
        await cell.kill("a")
        await cell.agent(equipped=grouped)
        line = "sleep 0.5; exec dd if=/dev/zero of=/dev/shm/x bs=1M count=150"
        await cell.raise_demand("nested", components=(sh(line, memory_bytes=200 * MIB, shm_bytes=256 * MIB),))
        await cell.until_phase("nested", Phase.ENDED)
        (told,) = exits(cell, "nested")
        assert told.verdict == VerdictClass.OOM_CGROUP, told
        assert f"the limit of 40 MiB (group {group.name})" in told.sentence
        await nothing_left(dockerd)
    finally:
        async with asyncio.timeout(10):
            while True:
                try:
                    group.rmdir()
                    break
                except OSError:
                    await asyncio.sleep(0.1)


async def test_out_of_memory_while_the_agent_was_away(dockerd: PrivateDocker, cells: Any) -> None:
    """Docker's own flag is left; which limit it was is known from the container's."""
    cell = await cells(dockerd)
    line = "sleep 1; exec dd if=/dev/zero of=/dev/shm/x bs=1M count=200"
    await cell.raise_demand("eater", components=(sh(line, memory_bytes=48 * MIB, shm_bytes=256 * MIB),))
    await cell.until_phase("eater", Phase.RUNNING)
    await cell.kill("a")
    await asyncio.sleep(2.0)
    await cell.agent()
    await cell.until_phase("eater", Phase.ENDED)
    (told,) = exits(cell, "eater")
    assert told.verdict == VerdictClass.OOM_CGROUP, told
    assert told.confidence == "medium"


@pytest.mark.parametrize(
    ("what", "words"),
    [("DELETE /containers/{}?force=1", "outside of Rigbook|not us who removed"), ("POST /containers/{}/stop?t=0", "outside of Rigbook"),
     ("POST /containers/{}/kill", "SIGKILL through the Docker Engine")],
)  # fmt: skip
async def test_what_others_do_to_our_container_is_no_crash(
    dockerd: PrivateDocker, cells: Any, what: str, words: str
) -> None:
    cell = await cells(dockerd)
    identity = await service(cell, "svc")
    method, _, path = what.partition(" ")
    dockerd.request(method, path.format(identity))
    await cell.until_phase("svc", Phase.ENDED)
    (told,) = exits(cell, "svc")
    assert told.verdict == VerdictClass.EXTERNAL_REMOVAL, told
    assert any(part in told.sentence for part in words.split("|"))


async def test_a_replacement_of_another_image_is_a_redeploy_and_is_taken_as_it_is(
    dockerd: PrivateDocker, cells: Any
) -> None:
    """What an image updater does: the same name and labels, another image, no record of an end."""
    cell = await cells(dockerd)
    before = await service(cell, "svc")
    dockerd.request(
        "POST", "/images/create?fromSrc=-&repo=rigbook-newer&tag=1", busybox_rootfs(), "application/x-tar"
    )
    (name,) = containers(dockerd)
    labels = containers(dockerd)[name]["Labels"]
    await cell.kill("a")  # nobody sees the removal
    dockerd.request("DELETE", f"/containers/{before}?force=1")
    after = run_beside(dockerd, name, "sleep", "600", image="rigbook-newer:1", labels=labels)
    await cell.agent()
    await cell.until(lambda: bool(exits(cell, "svc")) and cell.kinds("svc").count("started") == 2)
    (told,) = exits(cell, "svc")
    assert (told.verdict, told.final) == (VerdictClass.REDEPLOY, False), told
    assert cell.last(e.Started, "svc").components[0].ref == after
    await ends(cell, "svc")
    await nothing_left(dockerd)


async def test_a_stop_is_verified_and_leaves_nothing(dockerd: PrivateDocker, cells: Any) -> None:
    cell = await cells(dockerd)
    await service(
        cell,
        "app",
        components=(
            component("sleep", "600", name="server"),
            sh("trap '' TERM; sleep 600", name="access", role="access"),
        ),
    )
    pids = [pid for c in cell.last(e.Started, "app").components for pid in c.pids]
    assert len(pids) >= 2
    await ends(cell, "app")
    await nothing_left(dockerd)
    (told,) = exits(cell, "app")
    assert told.verdict == VerdictClass.STOPPED_BY_US


# -- adoption and fencing -------------------------------------------------------------------------------


async def test_an_agent_that_was_killed_adopts_its_containers(dockerd: PrivateDocker, cells: Any) -> None:
    cell = await cells(dockerd)
    identity = await service(cell, "one")
    await cell.kill("a")
    await cell.agent()
    await cell.raise_demand("two", components=(component("true"),))
    await cell.until_phase("two", Phase.ENDED)
    assert cell.kinds("one").count("started") == 1
    assert [c["Id"] for c in containers(dockerd).values()] == [identity]
    await ends(cell, "one")


async def test_what_ended_while_the_agent_was_away_keeps_its_exit_code(
    dockerd: PrivateDocker, cells: Any
) -> None:
    cell = await cells(dockerd)
    await cell.raise_demand("one", components=(sh("sleep 1; exit 3"),))
    await cell.until_phase("one", Phase.RUNNING)
    await cell.kill("a")
    await asyncio.sleep(1.5)
    await cell.agent()
    await cell.until_phase("one", Phase.ENDED)
    (told,) = exits(cell, "one")
    assert (told.verdict, told.ends[0].exit_code) == (VerdictClass.APPLICATION_EXIT, 3)


@pytest.mark.slow
async def test_docker_is_restarted_and_takes_our_containers_with_it(own_dockerd: Any, cells: Any) -> None:
    """Without live restore: that end is Docker's, and by policy it runs again, once."""
    docker = own_dockerd()
    cell = await cells(docker)
    restart = Restart(policy="on-failure", backoff_seconds=0.1)
    before = await service(cell, "svc", restart=restart)
    await asyncio.to_thread(docker.stop)
    await asyncio.sleep(1.0)
    assert cell.phase("svc") is Phase.RUNNING, "an engine that is away is unknown, not absent"
    assert not exits(cell, "svc")
    await asyncio.to_thread(docker.boot)
    await cell.until(lambda: cell.kinds("svc").count("started") == 2)
    told = exits(cell, "svc")[0]
    assert [x.sentence for x in exits(cell, "svc")[1:]] == []
    assert (told.verdict, told.final) == (VerdictClass.EXTERNAL_REMOVAL, False), told
    assert "Docker Engine" in told.sentence
    (running,) = containers(docker).values()
    assert running["Id"] != before
    assert len(containers(docker, running=False)) == 1, "nothing doubled, nothing left"
    await ends(cell, "svc")


@pytest.mark.slow
async def test_with_live_restore_a_restart_of_docker_is_not_noticed(own_dockerd: Any, cells: Any) -> None:
    docker = own_dockerd(live_restore=True)
    cell = await cells(docker)
    identity = await service(cell, "svc")
    await asyncio.to_thread(docker.stop)
    await asyncio.sleep(0.5)
    await asyncio.to_thread(docker.boot)
    await cell.raise_demand("two", components=(component("true"),))
    await cell.until_phase("two", Phase.ENDED)
    assert [c["Id"] for c in containers(docker).values()] == [identity]
    assert not exits(cell, "svc")
    assert cell.kinds("svc").count("started") == 1
    await ends(cell, "svc")
    await nothing_left(docker)


class OtherBoot(Host):
    """This machine after a reboot."""

    def boot_id(self) -> str:
        return "another-boot"


def rebooted(options: Options) -> Equipment:
    ordinary = equip(options)
    engine = DockerEngine(
        options.data / "docker", cluster=options.cluster, node=options.node, url=options.docker_url,
        rules=ContainerRules(device_requests=False), booted_ns=time.time_ns(),
    )  # fmt: skip
    return Equipment(
        gpus=ordinary.gpus, engines={Engine.DOCKER: engine}, attribution=ordinary.attribution, host=OtherBoot(),
        hierarchy=ordinary.hierarchy, docker=ordinary.docker,
    )  # fmt: skip


async def test_the_node_is_rebooted(dockerd: PrivateDocker, cells: Any) -> None:
    """The machine goes down with the agent; the containers are found ended, of an earlier boot."""
    cell = await cells(dockerd)
    identity = await service(cell, "once")
    again = await service(cell, "again", restart=Restart(policy="on-failure", backoff_seconds=0.1))
    await cell.kill("a")
    for one in (identity, again):
        dockerd.request("POST", f"/containers/{one}/kill")
    await asyncio.sleep(1.1)  # the boot is known to the second
    await cell.agent(equipped=rebooted)
    await cell.until_phase("once", Phase.ENDED)
    await cell.until(lambda: cell.kinds("again").count("started") == 2)
    assert [x.verdict for x in exits(cell, "once")] == [VerdictClass.NODE_REBOOT]
    assert [(x.verdict, x.final) for x in exits(cell, "again")] == [(VerdictClass.NODE_REBOOT, False)]
    assert len(containers(dockerd)) == 1
    await ends(cell, "again")


async def test_an_old_epoch_is_stopped_when_its_binding_was_released_by_force(
    dockerd: PrivateDocker, cells: Any
) -> None:
    """The node was cut off, the operator released the binding by force; the agent comes back and is told to stop it."""
    cell = await cells(dockerd)
    await service(cell, "old")
    epoch = cell.state.demands["old"].epoch
    await cell.kill("a")
    await cell.withdraw("old")
    forced = e.Released(demand="old", epoch=epoch, node="a", forced=True, by="operator")
    await cell.tell(subjects.release("a"), forced)
    await cell.until_phase("old", Phase.ENDED)
    order = e.EvictionOrdered(
        demand="old", epoch=epoch, nodes=("a",), reason=EvictionReason.FENCED, by="reaper", grace_seconds=0.5
    )
    await cell.tell(subjects.evict(("a",)), order)
    await cell.agent()
    async with asyncio.timeout(15):
        while containers(dockerd):
            await asyncio.sleep(0.1)


async def test_two_clusters_on_one_docker_leave_each_other_alone(dockerd: PrivateDocker, cells: Any) -> None:
    """Case 7: the same node name, the same epochs, one daemon; and a container of nobody's."""
    first, second = await cells(dockerd, name="one"), await cells(dockerd, name="two")
    alien = run_beside(dockerd, "alien", "sleep", "600")
    mine, theirs = await service(first, "svc"), await service(second, "svc")
    assert first.state.demands["svc"].epoch == second.state.demands["svc"].epoch
    assert mine != theirs
    await first.kill("a")
    await first.agent()
    await ends(first, "svc")
    assert {c["Id"] for c in containers(dockerd).values()} == {theirs, alien}
    assert second.phase("svc") is Phase.RUNNING
    await ends(second, "svc")
    assert {c["Id"] for c in containers(dockerd).values()} == {alien}


async def test_foreign_use_is_named_and_subtracted(dockerd: PrivateDocker, cells: Any) -> None:
    """Case 10: somebody else's container holds the card; its compose project is named where the demand waits."""
    compose = {"com.docker.compose.project": "rag", "com.docker.compose.service": "web"}
    alien = run_beside(dockerd, "rag-web-1", "sleep", "600", labels=compose)
    cell = await cells(dockerd, gpus="sim:1xRTX4090")
    pid = json.loads(dockerd.request("GET", f"/containers/{alien}/json")[1])["State"]["Pid"]
    await cell.until(lambda: bool(cell.state.cards))
    (card,) = cell.state.cards
    (cell.folder / "a" / "gpus" / card / str(pid)).write_text(str(21 * GIB))
    heartbeats = await cell.bus.tail(subjects.HEARTBEAT_STREAM, start_seq=1)
    found: list[Any] = []
    async with asyncio.timeout(20):
        while not found:
            for message in await heartbeats.batch(max_messages=100, wait_seconds=1.0):
                beat = decode(message.seq, message.subject, message.received_ns, message.body).data
                assert isinstance(beat, e.Heartbeat)
                found = [p for c in beat.cards for p in c.processes or ()]
    await heartbeats.close()
    assert found[0].belongs == "compose project rag, service web (container rag-web-1)"
    assert (found[0].epoch, found[0].container) == (None, alien)
    await asyncio.sleep(1.0)  # the placer reads the same heartbeats at its own pace
    await cell.raise_demand("mine", components=(component("true"),))
    await cell.until(lambda: bool(cell.state.demands.get("mine") and cell.state.demands["mine"].reasons))
    (reason,) = cell.state.demands["mine"].reasons
    assert "compose project rag" in reason.found
    assert reason.foreign_bytes == 21 * GIB
    dockerd.request("DELETE", f"/containers/{alien}?force=1")
    await cell.until_phase("mine", Phase.ENDED)


# -- probes and checkpoints inside ------------------------------------------------------------------------


async def test_probes_reach_into_the_container(dockerd: PrivateDocker, cells: Any) -> None:
    """HTTP on a port that is not published, and a command that runs inside."""
    cell = await cells(dockerd)
    web = sh(
        "mkdir /www; echo yes > /www/health; touch /tmp/up; exec httpd -f -p 8080 -h /www", name="web",
        probe=Probe(kind="http", path="/health", port=8080, every_seconds=0.1),
        startup=Probe(kind="exec", command=("test", "-e", "/tmp/up"), every_seconds=0.1),
    )  # fmt: skip
    await cell.raise_demand("svc", workload=Workload.SERVICE, components=(web,))
    await cell.until_phase("svc", Phase.RUNNING)
    assert "ready" in cell.kinds("svc")
    await ends(cell, "svc")


async def test_a_checkpoint_is_awaited_in_a_container(dockerd: PrivateDocker, cells: Any) -> None:
    cell = await cells(dockerd)
    line = (
        "trap 'echo heard > /tmp/saved; sleep 0.5; echo done > /tmp/saved' USR1; touch /tmp/up; "
        "while :; do sleep 0.1; done"
    )
    checkpoint = Checkpoint(
        signal="SIGUSR1", acknowledge="file", path="/tmp/saved", acknowledge_seconds_max=10
    )
    startup = Probe(kind="exec", command=("test", "-e", "/tmp/up"), every_seconds=0.1)
    await cell.raise_demand(
        "train", components=(sh(f'exec sh -c "{line}"', checkpoint=checkpoint, startup=startup),)
    )
    await cell.until_phase("train", Phase.RUNNING)
    order = e.EvictionOrdered(
        demand="train", epoch=cell.state.demands["train"].epoch, nodes=("a",), reason=EvictionReason.PREEMPTION,
        by="placer", grace_seconds=0.5,
    )  # fmt: skip
    await cell.tell(subjects.evict(("a",)), order)
    await cell.until_phase("train", Phase.ENDED)
    answers = [r.data.answer for r in cell.records if isinstance(r.data, e.EvictionAnswered)]
    assert answers[-1] is CheckpointAnswer.SAVED
    assert exits(cell, "train")[0].verdict == VerdictClass.PREEMPTED

"""What every engine does, over both of them: plain processes, and containers of a real Docker Engine.

Goal: the agent can treat the two alike. Method: one suite, run against each; what differs has its own file.
"""

from __future__ import annotations

import asyncio

import pytest
from rigbook_nodeagent.engines.container_config import ContainerRules
from rigbook_nodeagent.engines.docker import DockerEngine
from rigbook_nodeagent.engines.process import ProcessEngine
from rigbook_nodeagent.engines.protocol import EngineError
from rigbook_schemas.values import StopScope

from tests.contract import engine_fixtures as kit
from tests.contract.engine_fixtures import (
    CARD,
    CLUSTER,
    IMAGE,
    eventually,
    output_of,
    reap_everything,
    until_ended,
)
from tests.contract.engine_fixtures import dockerd as dockerd  # noqa: PLC0414 - a fixture

RULES = ContainerRules(device_requests=False)


@pytest.fixture(params=["process", pytest.param("docker", marks=pytest.mark.docker)])
def make(request, tmp_path):
    """Makes engines of one kind on one node, as an agent does at each of its starts."""
    if request.param == "process":
        return lambda cluster=CLUSTER, node="node-a": ProcessEngine(
            tmp_path / f"{cluster}-{node}", cluster=cluster, node=node
        )
    url = request.getfixturevalue("dockerd").url
    return lambda cluster=CLUSTER, node="node-a": DockerEngine(
        tmp_path / f"{cluster}-{node}", cluster=cluster, node=node, url=url, rules=RULES
    )


@pytest.fixture
async def engine(make):
    engine = make()
    await engine.open()
    yield engine
    await reap_everything(engine)
    await engine.close()


@pytest.fixture
def launch(request, make):
    docker = "docker" in request.node.name
    return lambda *command, **fields: kit.launch(*command, **({"image": IMAGE} if docker else {}), **fields)


async def test_a_component_runs_and_its_end_is_told_with_exit_code_and_output(engine, launch):
    hints = engine.ends()
    running = await engine.start(launch("sh", "-c", "echo hello; echo oops >&2; exit 7", cards=(CARD,)))
    assert (running.cluster, running.node, running.demand) == (CLUSTER, "node-a", "demand-100")
    assert (running.epoch, running.component, running.cards) == (100, "main", (CARD,))
    hint = await asyncio.wait_for(anext(hints), 20)
    assert (hint.epoch, hint.component, hint.ref) == (100, "main", running.ref)
    (ended,) = await engine.inventory()
    assert (ended.running, ended.exit_code, ended.ref, ended.pids) == (False, 7, running.ref, ())
    assert not ended.stopped_by_us
    assert min(ended.ended, ended.since) > "2020"  # Docker may order the two of a short life wrongly
    assert sorted((await output_of(engine, ended)).split()) == ["hello", "oops"]


async def test_a_running_component_shows_its_processes(engine, launch):
    running = await engine.start(launch("sh", "-c", "sleep 300 & sleep 300; true"))

    async def three():
        return len((await engine.inspect(100, "main")).pids) >= 3

    await eventually(three)
    (seen,) = await engine.inventory()
    assert seen.running
    assert seen.exit_code is None
    assert all(kit.alive(pid) for pid in seen.pids)
    assert seen.ref == running.ref


async def test_the_program_knows_whose_it_is(engine, launch):
    order = launch("env", epoch=7, component="server", env={"A": "1", "RIGBOOK_EPOCH": "8"})
    ended = await until_ended(engine, await engine.start(order))
    assert set((await output_of(engine, ended)).splitlines()) >= {
        "A=1",
        f"RIGBOOK_CLUSTER={CLUSTER}",
        "RIGBOOK_NODE=node-a",
        "RIGBOOK_DEMAND=demand-7",
        "RIGBOOK_EPOCH=7",
        "RIGBOOK_COMPONENT=server",
    }


async def test_starting_twice_is_starting_once(engine, launch):
    first = await engine.start(launch("sleep", "300"))
    second = await engine.start(launch("sleep", "300"))
    assert second.ref == first.ref
    assert len(await engine.inventory()) == 1


async def test_a_stop_is_told_from_an_end_by_itself(engine, launch):
    running = await kit.started_and_up(engine, launch(*kit.UP_AND_SLEEP))
    await engine.stop(running, grace_seconds=20, scope=StopScope.COMPONENTS)
    (ended,) = await engine.inventory()
    assert (ended.running, ended.exit_code, ended.stopped_by_us) == (False, 143, True)


async def test_after_the_grace_it_is_killed(engine, launch):
    deaf = launch("sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.2; done")
    running = await kit.started_and_up(engine, deaf)
    await engine.stop(running, grace_seconds=0.2, scope=StopScope.EVERYTHING)
    (ended,) = await engine.inventory()
    assert (ended.running, ended.exit_code, ended.stopped_by_us, ended.pids) == (False, 137, True, ())


async def test_stopping_twice_and_removing_twice_does_no_harm(engine, launch):
    running = await engine.start(launch("sleep", "300"))
    for _ in range(2):
        await engine.stop(running, grace_seconds=1, scope=StopScope.EVERYTHING)
    for _ in range(2):
        await engine.remove(running)
    await engine.stop(running, grace_seconds=1, scope=StopScope.EVERYTHING)
    assert await engine.inventory() == []
    assert await engine.inspect(100, "main") is None


async def test_the_next_agent_finds_what_runs_and_what_ended(engine, make, launch):
    runs = await engine.start(launch("sleep", "300", epoch=1))
    stopped = await kit.started_and_up(engine, launch(*kit.UP_AND_SLEEP, epoch=2))
    await engine.stop(stopped, grace_seconds=20, scope=StopScope.COMPONENTS)
    await engine.close()
    second = make()
    await second.open()
    found = {one.epoch: one for one in await second.inventory()}
    assert (found[1].running, found[1].ref, found[1].pids != ()) == (True, runs.ref, True)
    assert (found[2].running, found[2].exit_code, found[2].stopped_by_us) == (False, 143, True)
    await second.close()
    await engine.open()


async def test_another_cluster_and_node_see_nothing_of_it(engine, make, launch):
    running = await engine.start(launch("sleep", "300"))
    for cluster, node in ((f"{CLUSTER}-other", "node-a"), (CLUSTER, "node-b")):
        stranger = make(cluster, node)
        await stranger.open()
        assert await stranger.inventory() == []
        assert await stranger.inspect(100, "main") is None
        await stranger.close()
    assert (await engine.inspect(100, "main")).pids == running.pids


async def test_output_can_be_followed_to_the_end(engine, launch):
    running = await engine.start(launch("sh", "-c", "echo one; sleep 0.3; echo two; printf three"))
    lines = [line async for line in engine.logs(running, follow=True, lines_max=10)]
    assert [line.strip() for line in lines] == [b"one", b"two", b"three"]


async def test_a_very_long_line_stays_whole(engine, launch):
    running = await engine.start(launch("sh", "-c", "head -c 50000 /dev/zero | tr '\\0' x; echo; echo end"))
    lines = [line async for line in engine.logs(running, follow=True, lines_max=10)]
    assert lines == [b"x" * 50000 + b"\n", b"end\n"]


async def test_the_last_lines_of_the_output(engine, launch):
    running = await engine.start(launch("seq", "1", "100"))
    ended = await until_ended(engine, running)
    lines = [line async for line in engine.logs(ended, follow=False, lines_max=2)]
    assert lines == [b"99\n", b"100\n"]


async def test_components_of_one_epoch_are_kept_apart(engine, launch):
    server = await engine.start(launch("sleep", "300", component="server"))
    access = await engine.start(launch("sleep", "300", component="access"))
    await engine.stop(access, grace_seconds=2, scope=StopScope.COMPONENTS)
    found = {one.component: one.running for one in await engine.inventory()}
    assert found == {"server": True, "access": False}
    assert server.ref != access.ref


async def test_many_at_once(engine, launch):
    epochs = range(1, 9)
    await asyncio.gather(
        *(engine.start(launch("sh", "-c", f"exit {epoch}", epoch=epoch)) for epoch in epochs)
    )

    async def all_ended():
        return not any(one.running for one in await engine.inventory())

    await eventually(all_ended, seconds=30)
    assert {one.epoch: one.exit_code for one in await engine.inventory()} == {
        epoch: epoch for epoch in epochs
    }


async def test_a_signal_reaches_the_program_and_waits_for_nothing(engine, launch):
    """What a cooperative eviction begins with. A signal of ours is nobody else's kill."""
    line = "trap 'echo asked; exit 5' USR1; echo up; while :; do sleep 0.05; done"
    running = await kit.started_and_up(engine, launch("sh", "-c", line))
    await engine.signal(running, "SIGUSR1")
    ended = await until_ended(engine, running)
    assert (ended.exit_code, ended.stopped_by_us, ended.killed_by_others) == (5, False, "")
    assert "asked" in await output_of(engine, ended)
    await engine.signal(running, "SIGUSR1")  # gone already: no error


async def test_a_command_beside_a_component_has_its_environment(engine, launch):
    running = await kit.started_and_up(engine, launch(*kit.UP_AND_SLEEP, env={"COLOUR": "blue"}))
    assert await engine.execute(running, ("sh", "-c", "test $COLOUR = blue")) == 0
    assert await engine.execute(running, ("sh", "-c", "exit 3")) == 3
    await engine.stop(running, grace_seconds=1, scope=StopScope.COMPONENTS)
    with pytest.raises(EngineError):
        await engine.execute(running, ("true",))


async def test_what_the_engine_knows_of_others_names_them(engine, launch):
    running = await engine.start(launch("sleep", "300"))
    containers = await engine.containers()
    assert (running.ref in containers) == bool(running.image), "a plain process is no container"

"""The process engine on real processes of this machine.

Goal: what runs is found again whatever happens to the agent, a stop reaches what its scope says and
nothing else, and what cannot be known is None. Method: real programs, real signals, real cgroups where the
machine has them, and the same again without cgroups.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rigbook_nodeagent.engines import records
from rigbook_nodeagent.engines.cgroups import Cgroups
from rigbook_nodeagent.engines.pidfds import tells_exit
from rigbook_nodeagent.engines.process import ProcessEngine
from rigbook_nodeagent.engines.procfs import boot_id, stat_of
from rigbook_nodeagent.engines.protocol import EngineError, StartRefused
from rigbook_schemas.values import Mount, StopScope

from tests.contract.engine_fixtures import (
    CLUSTER,
    alive,
    eventually,
    launch,
    output_of,
    reap_everything,
    until_ended,
)

EVERYTHING, COMPONENTS = StopScope.EVERYTHING, StopScope.COMPONENTS
# leaves its process group and its parent, and says who it is; the launcher waits for SIGTERM or ends
DAEMON = "setsid sh -c 'setsid sleep 300 >/dev/null 2>&1 & echo daemon $!' & wait; "


def cgroups(kind: str, tmp_path: Path) -> Cgroups:
    """What the engine would choose here, or none, or v2 where it is mounted next to v1."""
    name = f"rigbook-test-{tmp_path.name}-{os.getpid()}"
    if kind == "own":
        return Cgroups(name)
    mounts = tmp_path / "mountinfo"
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    mounts.write_text("\n".join(line for line in lines if kind == "v2" and " - cgroup2 " in line))
    found = Cgroups(name, mounts=mounts)
    if kind == "v2" and found.kind != "v2":
        pytest.skip(f"needs cgroup v2 that may be written: {found.fact}")
    return found


@pytest.fixture(params=["own", "none", "v2"])
def groups(request, tmp_path):
    return cgroups(request.param, tmp_path)


@pytest.fixture
async def engine(groups, tmp_path):
    engine = ProcessEngine(tmp_path / "engine", cluster=CLUSTER, node="node-a", cgroups=groups)
    await engine.open()
    yield engine
    await reap_everything(engine)
    await engine.close()


async def test_a_program_runs_in_its_own_session_folder_and_cgroup(engine, groups):
    running = await engine.start(launch("sh", "-c", "pwd; exec sleep 300"))
    (pid,) = running.pids
    stat = stat_of(pid)
    assert (stat.session, stat.group) == (pid, pid)
    await eventually(lambda: asyncio.sleep(0, Path(f"/proc/{pid}/comm").read_text() == "sleep\n"))
    assert str(Path(f"/proc/{pid}/cwd").readlink()).endswith("100-main/files")
    if groups.kind:

        async def inside():
            return "rigbook-test-" in Path(f"/proc/{pid}/cgroup").read_text()

        await eventually(inside)
    assert "100-main/files" in await output_of(engine, running)


async def test_the_environment_holds_whose_it_is_and_nothing_of_the_agent(engine, monkeypatch):
    monkeypatch.setenv("NATS_CREDENTIALS", "secret")
    running = await engine.start(
        launch(
            "env",
            env={"MODEL": "a b", "RIGBOOK_EPOCH": "1", "CUDA_VISIBLE_DEVICES": "0"},
            environment={"CUDA_VISIBLE_DEVICES": "GPU-1"},
        )
    )
    await until_ended(engine, running)
    lines = set((await output_of(engine, running)).splitlines())
    assert lines >= {
        "MODEL=a b",
        "CUDA_VISIBLE_DEVICES=GPU-1",
        f"RIGBOOK_CLUSTER={CLUSTER}",
        "RIGBOOK_NODE=node-a",
        "RIGBOOK_DEMAND=demand-100",
        "RIGBOOK_EPOCH=100",
        "RIGBOOK_COMPONENT=main",
    }
    assert not any("secret" in line for line in lines)


async def test_no_shell_looks_at_the_command(engine):
    running = await engine.start(launch("echo", "$HOME", "; rm -rf x", "`id`"))
    await until_ended(engine, running)
    assert await output_of(engine, running) == "$HOME ; rm -rf x `id`\n"


@pytest.mark.parametrize(
    ("order", "code", "text"),
    [
        (launch("no-such-program-here"), "no_such_program", "looked in PATH="),
        (launch("/nowhere/program"), "no_such_program", "'/nowhere/program'"),
        (launch("/etc/passwd"), "no_such_program", "not executable"),
        (launch("a\0b"), "start_failed", "null byte"),
        (launch("true", env={"A=B": "x"}), "start_failed", "illegal environment"),
        (launch(), "no_such_program", "no command"),
        (launch("true", image="busybox"), "start_failed", "image"),
        (launch("true", mounts=(Mount(source="/a", target="/b"),)), "mount_denied", "mounts"),
    ],
)
async def test_what_cannot_start_is_refused_with_the_reason(engine, order, code, text):
    with pytest.raises(StartRefused, match=text) as refused:
        await engine.start(order)
    assert refused.value.code == code
    assert await engine.inventory() == []


async def test_a_text_file_without_interpreter_is_refused(engine, tmp_path):
    script = tmp_path / "script"
    script.write_text("echo hello\n")
    script.chmod(0o755)
    with pytest.raises(StartRefused, match="no #! line"):
        await engine.start(launch(str(script)))


async def test_what_ignores_the_request_is_killed_after_the_grace(engine):
    running = await engine.start(launch("sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done"))
    await eventually(lambda: output_of(engine, running))
    await engine.stop(running, grace_seconds=0.2, scope=COMPONENTS)
    ended = await until_ended(engine, running)
    assert (ended.exit_code, ended.signal, ended.stopped_by_us, ended.pids) == (137, 9, True, ())


async def test_a_daemon_survives_the_stop_of_its_component_and_not_of_everything(engine):
    running = await engine.start(launch("sh", "-c", DAEMON + "sleep 300"))

    async def said():
        return (await output_of(engine, running)).startswith("daemon ")

    await eventually(said)
    daemon = int((await output_of(engine, running)).split()[1])
    assert daemon in (await engine.inspect(100, "main")).pids

    await engine.stop(running, grace_seconds=5, scope=COMPONENTS)
    ended = await until_ended(engine, running)
    assert (ended.running, ended.pids, ended.stopped_by_us) == (False, (daemon,), True)
    assert alive(daemon)
    assert [one.pids for one in await engine.inventory()] == [(daemon,)]
    with pytest.raises(EngineError, match="still has processes"):
        await engine.remove(ended)

    await engine.stop(ended, grace_seconds=5, scope=EVERYTHING)
    assert not alive(daemon)
    assert (await engine.inspect(100, "main")).pids == ()
    await engine.remove(ended)
    assert await engine.inventory() == []


async def test_a_stop_reaches_its_own_component_only(engine):
    other = await engine.start(launch("sleep", "300", component="other"))
    next_epoch = await engine.start(launch("sleep", "300", epoch=101))
    running = await engine.start(launch("sleep", "300"))
    await engine.stop(running, grace_seconds=5, scope=EVERYTHING)
    assert alive(other.pids[0])
    assert alive(next_epoch.pids[0])


async def test_everything_ends_although_it_forks_all_the_time(engine):
    script = 'trap "" TERM; while :; do setsid sleep 300 & sleep 0.01; done'
    running = await engine.start(launch("sh", "-c", script))
    await eventually(lambda: _more_than(engine, 5))
    await engine.stop(running, grace_seconds=0.05, scope=EVERYTHING)
    assert (await engine.inspect(100, "main")).pids == ()


async def _more_than(engine, count):
    return len((await engine.inspect(100, "main")).pids) > count


async def test_another_cluster_and_node_are_left_alone(engine, tmp_path):
    other = ProcessEngine(
        tmp_path / "other", cluster=f"{CLUSTER}-other", node="node-a", cgroups=cgroups("none", tmp_path)
    )
    await other.open()
    theirs = await other.start(launch("sleep", "300", cluster=f"{CLUSTER}-other"))
    assert await engine.inventory() == []
    await engine.stop(theirs, grace_seconds=0.1, scope=EVERYTHING)
    assert alive(theirs.pids[0])
    await reap_everything(other)
    await other.close()


async def test_a_process_of_ours_without_a_record_is_seen_and_can_be_stopped(engine):
    stray = subprocess.Popen(
        ["sleep", "300"],
        env={
            **os.environ,
            "RIGBOOK_CLUSTER": CLUSTER,
            "RIGBOOK_NODE": "node-a",
            "RIGBOOK_EPOCH": "7",
            "RIGBOOK_DEMAND": "old",
            "RIGBOOK_COMPONENT": "server",
        },
    )
    (seen,) = await engine.inventory()
    assert (seen.epoch, seen.component, seen.demand, seen.running) == (7, "server", "old", False)
    assert seen.pids == (stray.pid,)
    await engine.stop(seen, grace_seconds=5, scope=EVERYTHING)
    assert stray.wait() == -signal.SIGTERM


async def test_cgroups_of_forgotten_components_are_swept_at_the_next_start(tmp_path):
    first = cgroups("own", tmp_path)
    if not first.kind:
        pytest.skip(f"needs cgroup v2 or v1 that may be written: {first.fact}")
    (path,) = first.create("99-forgotten", memory_bytes=0)
    engine = ProcessEngine(tmp_path / "engine", cluster=CLUSTER, node="node-a", cgroups=first)
    await engine.open()
    assert not Path(path).exists()
    running = await engine.start(launch("true"))
    await until_ended(engine, running)
    assert Path(path).with_name("100-main").exists()
    await reap_everything(engine)
    await engine.close()
    assert not Path(path).parent.exists()


async def test_a_second_engine_on_the_same_folder_is_refused(engine, tmp_path):
    second = ProcessEngine(tmp_path / "engine", cluster=CLUSTER, node="node-a")
    with pytest.raises(EngineError, match="another agent uses"):
        await second.open()


async def test_an_oom_kill_in_its_own_cgroup_is_told(tmp_path):
    groups = cgroups("own", tmp_path)
    if not groups.memory_limits:
        pytest.skip(f"needs cgroup v2 or v1 with memory limits: {groups.fact}")
    engine = ProcessEngine(tmp_path / "engine", cluster=CLUSTER, node="node-a", cgroups=groups)
    await engine.open()
    greedy = await engine.start(
        launch(sys.executable, "-c", "x = bytearray(200_000_000)", memory_bytes=32 * 1024**2)
    )
    modest = await engine.start(launch("true", component="modest", memory_bytes=32 * 1024**2))
    ended = await until_ended(engine, greedy)
    assert (ended.exit_code, ended.signal, ended.oom_killed) == (137, 9, True)
    assert (await until_ended(engine, modest)).oom_killed is False
    await reap_everything(engine)
    await engine.close()


# -- the agent is killed and started again ------------------------------------------------------------

AGENT = """
import asyncio, json, sys
from pathlib import Path
from rigbook_nodeagent.engines.process import ProcessEngine
from rigbook_nodeagent.engines.procfs import boot_id
from rigbook_nodeagent.engines.cgroups import Cgroups
from tests.contract.engine_fixtures import CLUSTER, launch

async def main():
    none = Cgroups("x", mounts=Path("/dev/null"))
    engine = ProcessEngine(Path(sys.argv[1]), cluster=CLUSTER, node="node-a", cgroups=none)
    await engine.open()
    pids = [(await engine.start(launch(*command, epoch=epoch))).pids for epoch, command in json.loads(sys.argv[2])]
    print(json.dumps(pids), flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


def killed_agent(folder: Path, *commands: tuple[int, list[str]], meanwhile=lambda: None) -> list[int]:
    """An agent that starts these and is killed; returns the pids of what it started."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(folder), json.dumps(commands)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])},
    )
    assert agent.stdout is not None
    with agent.stdout:
        pids = [pid for pids in json.loads(agent.stdout.readline()) for pid in pids]
    meanwhile()
    agent.kill()
    agent.wait()
    return pids


@pytest.fixture
async def adopt(tmp_path):
    """Opens the next engine on the folder of a killed agent."""
    engines: list[ProcessEngine] = []

    async def opened() -> ProcessEngine:
        engine = ProcessEngine(
            tmp_path / "engine", cluster=CLUSTER, node="node-a", cgroups=cgroups("none", tmp_path)
        )
        await engine.open()
        engines.append(engine)
        return engine

    yield opened
    for engine in engines:
        await reap_everything(engine)
        await engine.close()


async def test_what_a_killed_agent_started_is_adopted_and_can_be_stopped(tmp_path, adopt):
    (pid,) = killed_agent(tmp_path / "engine", (100, ["sleep", "300"]))
    engine = await adopt()
    (running,) = await engine.inventory()
    assert (running.running, running.pids, running.epoch, running.demand) == (True, (pid,), 100, "demand-100")
    assert await engine.start(launch("sleep", "300")) == running, "started twice"
    await engine.stop(running, grace_seconds=5, scope=COMPONENTS)
    ended = await until_ended(engine, running)
    assert (ended.stopped_by_us, ended.pids) == (True, ())


async def test_the_end_of_an_adopted_component_is_noticed_at_once(tmp_path, adopt):
    killed_agent(tmp_path / "engine", (100, ["sh", "-c", "sleep 1; exit 7"]))
    engine = await adopt()
    (running,) = await engine.inventory()
    assert running.running
    hints = engine.ends()
    hint = await asyncio.wait_for(anext(hints), 10)
    assert (hint.epoch, hint.component, hint.ref) == (100, "main", running.ref)
    (ended,) = await engine.inventory()
    if tells_exit(os.uname().release):
        # None only where this machine's init takes longer to reap than the engine is patient
        assert ended.exit_code in {7, None}
    else:
        assert ended.exit_code is None
    assert not ended.stopped_by_us


async def test_what_ended_while_nobody_watched_has_no_known_exit_code(tmp_path, adopt):
    (pid,) = killed_agent(tmp_path / "engine", (100, ["sleep", "300"]))
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: asyncio.sleep(0, not alive(pid)))
    engine = await adopt()
    (ended,) = await engine.inventory()
    assert (ended.running, ended.exit_code, ended.signal, ended.ended) == (False, None, None, "")


async def test_an_exit_code_seen_before_the_kill_is_kept(tmp_path, adopt):
    def ended() -> None:
        record = tmp_path / "engine" / "100-main" / "record"
        while b'"ended"' not in record.read_bytes():
            pass

    killed_agent(tmp_path / "engine", (100, ["sh", "-c", "exit 3"]), meanwhile=ended)
    engine = await adopt()
    (found,) = await engine.inventory()
    assert (found.running, found.exit_code) == (False, 3)


async def test_a_program_started_just_before_the_kill_is_found_without_its_record(tmp_path, adopt):
    (pid,) = killed_agent(tmp_path / "engine", (100, ["sleep", "300"]))
    record = tmp_path / "engine" / "100-main" / "record"
    record.write_bytes(record.read_bytes().splitlines()[0] + b'\n{"fact":"spaw')
    engine = await adopt()
    (running,) = await engine.inventory()
    assert (running.running, running.pids) == (True, (pid,))


async def test_a_pid_that_was_used_again_is_not_ours(tmp_path, adopt):
    bystander = subprocess.Popen(["sleep", "300"], start_new_session=True)
    stat = stat_of(bystander.pid)
    for epoch, ticks, boot in ((1, stat.start_ticks - 1, boot_id()), (2, stat.start_ticks, "earlier boot")):
        folder = tmp_path / "engine" / f"{epoch}-main"
        folder.mkdir(parents=True)
        records.append(
            folder / "record",
            records.Intent(demand="d", epoch=epoch, component="main", boot=boot, since=""),
            records.Spawned(pid=bystander.pid, start_ticks=ticks),
        )
    engine = await adopt()
    for running in await engine.inventory():
        assert (running.running, running.pids, running.exit_code) == (False, (), None)
        await engine.stop(running, grace_seconds=0, scope=EVERYTHING)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


async def test_a_component_may_run_again_after_it_was_removed(engine):
    first = await engine.start(launch("echo", "first"))
    await engine.remove(await until_ended(engine, first))
    assert await engine.inspect(100, "main") is None
    second = await engine.start(launch("echo", "second"))
    assert second.ref != first.ref
    await until_ended(engine, second)
    assert await output_of(engine, second) == "first\nsecond\n"


async def test_outputs_of_removed_components_go_after_a_while_and_files_of_programs_stay(tmp_path):
    engine = ProcessEngine(
        tmp_path / "engine",
        cluster=CLUSTER,
        node="node-a",
        cgroups=cgroups("none", tmp_path),
        removed_kept_max=1,
    )
    await engine.open()
    for epoch, command in enumerate((("touch", "result"), ("true",), ("true",)), start=1):
        await engine.remove(await until_ended(engine, await engine.start(launch(*command, epoch=epoch))))
    await engine.close()
    left = sorted(str(path.relative_to(tmp_path / "engine")) for path in (tmp_path / "engine").rglob("*"))
    assert left == [
        ".lock",
        "1-main",
        "1-main/files",
        "1-main/files/result",
        "3-main",
        "3-main/files",
        "3-main/output.log",
        "3-main/record",
    ]


async def test_without_handles_on_processes_ends_are_found_by_looking(tmp_path, monkeypatch):
    """A kernel before 5.3, or no file descriptor left."""
    monkeypatch.setattr("rigbook_nodeagent.engines.process.open_pidfd", lambda _pid: None)
    monkeypatch.setattr("rigbook_nodeagent.engines.process.TEND_SECONDS", 0.02)
    engine = ProcessEngine(
        tmp_path / "engine", cluster=CLUSTER, node="node-a", cgroups=cgroups("none", tmp_path)
    )
    await engine.open()
    hints = engine.ends()
    await engine.start(launch("sh", "-c", "exit 3"))
    hint = await asyncio.wait_for(anext(hints), 10)
    assert (await engine.inspect(hint.epoch, hint.component)).exit_code == 3
    running = await engine.start(launch("sleep", "300", epoch=101))
    await engine.stop(running, grace_seconds=5, scope=COMPONENTS)
    assert (await engine.inspect(101, "main")).exit_code == 143
    await reap_everything(engine)
    await engine.close()


async def test_output_stays_bounded_while_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("rigbook_nodeagent.engines.process.TEND_SECONDS", 0.01)
    engine = ProcessEngine(
        tmp_path / "engine",
        cluster=CLUSTER,
        node="node-a",
        cgroups=cgroups("none", tmp_path),
        log_bytes_max=10_000,
    )
    await engine.open()
    running = await engine.start(
        launch("sh", "-c", "for i in 1 2 3 4 5; do seq 1 2000; sleep 0.1; done; echo end")
    )
    await until_ended(engine, running)
    log = tmp_path / "engine" / "100-main" / "output.log"
    assert log.with_name("output.log.1").stat().st_size == 10_000
    assert log.stat().st_size < 5 * 8_893
    assert (await output_of(engine, running)).endswith("2000\nend\n")
    await reap_everything(engine)
    await engine.close()


async def test_a_full_disk_does_not_keep_a_program_from_being_stopped(engine, monkeypatch):
    running = await engine.start(launch("sleep", "300"))

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(records, "append", full)
        with pytest.raises(EngineError, match="No space left"):
            await engine.start(launch("true", epoch=101))
        await engine.stop(running, grace_seconds=5, scope=EVERYTHING)
    ended = await engine.inspect(100, "main")
    assert (ended.running, ended.exit_code, ended.stopped_by_us) == (False, 143, True)
    assert [one.epoch for one in await engine.inventory()] == [100]

"""The process engine's memory of a component, its output files, and its look at /proc.

Goal: a crash in the middle of a write loses at most the last fact, and no garbage stops the engine.
"""

from __future__ import annotations

import os
import subprocess
import time

import hypothesis.strategies as st
from hypothesis import given, settings
from rigbook_nodeagent.engines import output, records
from rigbook_nodeagent.engines.cgroups import Cgroups, hierarchies, own_paths
from rigbook_nodeagent.engines.pidfds import tells_exit
from rigbook_nodeagent.engines.procfs import ProcessTable, stat_of

INTENT = records.Intent(demand="d", epoch=7, component="main", boot="b", since="2026", cards=("GPU-1",))
FACTS = (
    INTENT,
    records.Spawned(pid=42, start_ticks=4711),
    records.StopOrdered(at="2026"),
    records.EndSeen(at="2026", returncode=-9, oom_killed=True),
    records.Removed(),
)


def test_the_facts_of_a_start_are_folded(tmp_path):
    path = tmp_path / "record"
    assert records.read(path) is None
    for fact in FACTS:
        records.append(path, fact)
    record = records.read(path)
    assert record == records.Record(
        intent=INTENT, spawned=FACTS[1], stop_ordered=FACTS[2], end=FACTS[3], removed=True
    )


def test_a_new_start_forgets_the_one_before(tmp_path):
    records.append(tmp_path / "record", *FACTS, INTENT)
    assert records.read(tmp_path / "record") == records.Record(intent=INTENT)


def test_a_crash_loses_the_torn_fact_only(tmp_path):
    path = tmp_path / "record"
    records.append(path, *FACTS)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        record = records.read(path)
        lines = whole[:size].count(b"\n")
        assert (record is not None) >= (lines >= 1)
        if record is not None:
            assert (record.spawned is not None) >= (lines >= 2)
            assert (record.end is not None) >= (lines >= 4)


@settings(max_examples=200)
@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([b'{"fact":"intent"}', b'{"fact":"spawned","pid":"x"}'])
    )
)
def test_garbage_is_no_record(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("records") / "record"
    path.write_bytes(b"\n".join(lines))
    assert records.read(path) is None


def test_output_that_grows_too_big_keeps_its_end(tmp_path):
    path = tmp_path / "output.log"
    writer = output.open_for_append(path)
    os.write(writer, b"".join(b"%06d\n" % number for number in range(1000)))
    assert not output.trim(path, bytes_max=7000)
    os.write(writer, b"last\n")
    assert output.trim(path, bytes_max=3500)
    assert path.read_bytes() == b""
    os.write(writer, b"more\n")
    os.close(writer)
    lines, position = output.tail(path, 3)
    assert lines == [b"000999\n", b"last\n", b"more\n"]
    assert position == 5
    assert path.with_name("output.log.1").stat().st_size == 3500


def test_the_end_of_an_output_that_is_not_there(tmp_path):
    assert output.tail(tmp_path / "nothing", 5) == ([], 0)
    assert not output.trim(tmp_path / "nothing", bytes_max=1)
    (tmp_path / "some").write_bytes(b"a\nb")
    assert output.tail(tmp_path / "some", 0) == ([], 3)
    assert output.tail(tmp_path / "some", 5)[0] == [b"a\n", b"b"]


async def test_following_survives_a_trim(tmp_path):
    path = tmp_path / "output.log"
    path.write_bytes(b"one\n")
    seen: list[bytes] = []
    steps = iter([lambda: path.write_bytes(b"2\n"), lambda: None])

    def ended() -> bool:
        step = next(steps, None)
        if step is not None:
            step()
        return step is None

    async for line in output.follow(path, 4, ended):
        seen.append(line)
    assert seen == [b"2\n"]


# -- /proc --------------------------------------------------------------------------------------------

CLUSTER = f"c{os.getpid()}"  # another test session has its own
OURS = {
    "RIGBOOK_CLUSTER": CLUSTER,
    "RIGBOOK_NODE": "n",
    "RIGBOOK_EPOCH": "7",
    "RIGBOOK_DEMAND": "d",
    "RIGBOOK_COMPONENT": "main",
}


def test_a_scan_finds_ours_by_environment_only():
    table = ProcessTable(CLUSTER, "n")
    processes = [
        subprocess.Popen(["sleep", "60"], env=environment)
        for environment in (
            OURS,
            {**OURS, "RIGBOOK_CLUSTER": "other"},
            {**OURS, "RIGBOOK_NODE": "nn"},
            {**OURS, "RIGBOOK_EPOCH": "x"},
            {"NOTE": "RIGBOOK_NODE=n"},
            {},
        )
    ]
    try:
        for _ in range(3):
            (found,) = table.scan()
            assert (found.pid, found.epoch, found.component, found.demand) == (
                processes[0].pid,
                7,
                "main",
                "d",
            )
    finally:
        for process in processes:
            process.kill()
    stat = stat_of(processes[0].pid)
    assert stat is not None, "not reaped yet"
    deadline = time.monotonic() + 5
    while stat.alive and time.monotonic() < deadline:
        stat = stat_of(processes[0].pid)
    assert table.scan() == [], "a zombie runs no more"
    for process in processes:
        process.wait()


def test_a_process_that_takes_the_name_of_ours_is_told_from_it(monkeypatch):
    table = ProcessTable(CLUSTER, "n")
    first = subprocess.Popen(["sleep", "60"], env=OURS)
    assert len(table.scan()) == 1
    known = table._ours[str(first.pid)]
    table.learn(known._replace(stat=known.stat._replace(start_ticks=1)))
    assert [one.stat.start_ticks for one in table.scan()] == [stat_of(first.pid).start_ticks]
    first.kill()
    first.wait()


def test_kernels_that_tell_exit_codes_of_others():
    told = {
        release: tells_exit(release)
        for release in ("5.15.0-91-generic", "6.14.2", "6.15.0", "7.0-rc1", "odd")
    }
    assert told == {
        "5.15.0-91-generic": False,
        "6.14.2": False,
        "6.15.0": True,
        "7.0-rc1": True,
        "odd": False,
    }


# -- cgroups, from recorded files ---------------------------------------------------------------------

HYBRID = """\
30 25 0:26 / /sys/fs/cgroup/unified rw shared:5 - cgroup2 cgroup2 rw
31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:6 - cgroup cgroup rw,cpu,cpuacct
32 25 0:28 / /sys/fs/cgroup/memory rw shared:7 - cgroup cgroup rw,memory
33 25 0:29 / /sys/fs/cgroup/freezer rw shared:8 - cgroup cgroup rw,freezer
"""


def test_mounted_hierarchies_and_our_own_place(tmp_path):
    (tmp_path / "mountinfo").write_text(HYBRID)
    found = hierarchies(tmp_path / "mountinfo")
    assert {key: str(path) for key, path in found.items()} == {
        "": "/sys/fs/cgroup/unified",
        "memory": "/sys/fs/cgroup/memory",
        "freezer": "/sys/fs/cgroup/freezer",
    }
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/a\n4:memory:/b:c\n0::/system.slice/rigbook.service\n")
    assert own_paths(tmp_path / "cgroup") == {
        "cpu": "/a",
        "cpuacct": "/a",
        "memory": "/b:c",
        "": "/system.slice/rigbook.service",
    }


def unified(tmp_path, controllers: str) -> Cgroups:
    """A tree of files in the place of a v2 mount."""
    root = tmp_path / "tree"
    (root / "agent").mkdir(parents=True)
    (tmp_path / "mountinfo").write_text(f"30 25 0:26 / {root} rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "cgroup").write_text("0::/agent\n")
    parts = root / "agent" / "rigbook"
    parts.mkdir()
    (parts / "cgroup.subtree_control").write_text(controllers)
    return Cgroups("rigbook", mounts=tmp_path / "mountinfo", own=tmp_path / "cgroup")


def test_v2_limits_and_oom_kills_are_read_where_they_lie(tmp_path):
    groups = unified(tmp_path, "memory pids")
    (tmp_path / "tree" / "agent" / "rigbook" / "cgroup.subtree_control").write_text("memory")
    groups = Cgroups("rigbook", mounts=tmp_path / "mountinfo", own=tmp_path / "cgroup")
    groups.memory_limits = True
    assert groups.kind == "v2"
    (path,) = groups.create("7-main", memory_bytes=1024)
    assert path.endswith("/agent/rigbook/7-main")
    assert (tmp_path / "tree/agent/rigbook/7-main/memory.max").read_text() == "1024"
    assert groups.oom_kills([path]) is None, "no such file is unknown, not none"
    (tmp_path / "tree/agent/rigbook/7-main/memory.events").write_text("low 0\nmax 50\noom 1\noom_kill 1\n")
    assert groups.oom_kills([path]) == 1
    (tmp_path / "tree/agent/rigbook/7-main/cgroup.procs").write_text(f"12\n0\n{os.getpid()}\n")
    assert groups.pids([path]) == [12]


def test_no_cgroups_says_why(tmp_path):
    (tmp_path / "empty").write_text("")
    groups = Cgroups("rigbook", mounts=tmp_path / "empty")
    assert (groups.kind, groups.create("x", memory_bytes=1)) == ("", ())
    assert groups.fact == "no cgroup: no usable hierarchy is mounted"
    assert "No such file" in Cgroups("rigbook", mounts=tmp_path / "missing").fact

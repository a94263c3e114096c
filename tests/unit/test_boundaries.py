"""Memory boundaries: recorded trees of a real v2 kernel, the parsers on garbage, and the ring of readings.

The trees under golden/cgroups were recorded on Linux 6.1 with cgroup v2 (see `kernel` in each), before, during
and after a program ate memory; the kernel's own log lines are with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigbook_nodeagent.boundaries import (
    Hierarchy,
    Place,
    bytes_of,
    keyed,
    level_name,
    levels_of,
    limit_of,
    read_level,
    stalled,
)
from rigbook_nodeagent.circumstances import CardTrouble, Circumstances, MemoryKill
from rigbook_nodeagent.engines.protocol import Running
from rigbook_nodeagent.kernel_log import NO_LOG, KernelLog, record_of
from rigbook_nodeagent.last_words import memory_refusal
from rigbook_nodeagent.readings import POINTS_MAX, Readings, thinned
from rigbook_nodeagent.verdict import verdict
from rigbook_schemas.values import Allotment, CardObservation, Engine, Mode, ProcessObservation, VerdictClass

TREES = Path(__file__).parent / "golden" / "cgroups"
MIB = 1024**2


def tree(name: str) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((TREES / f"{name}.json").read_text())
    return recorded


def lay_out(mount: Path, levels: dict[str, dict[str, str]]) -> None:
    for path, files in levels.items():
        folder = mount / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)


def machine(folder: Path, path: str, *, pid: int = 4242) -> Hierarchy:
    """A /proc that knows one process in `path`, and this hierarchy mounted."""
    mount = folder / "cgroup"
    mount.mkdir(exist_ok=True)
    for name, own in (("self", "/agent.service"), (str(pid), path)):
        (folder / "proc" / name).mkdir(parents=True, exist_ok=True)
        (folder / "proc" / name / "cgroup").write_text(f"0::{own}\n")
    (folder / "proc/self/mountinfo").write_text(f"31 23 0:28 / {mount} rw - cgroup2 cgroup2 rw\n")
    return Hierarchy(proc=folder / "proc")


def running(*, alive: bool = True, **more: Any) -> Running:
    return Running(
        cluster="c", node="a", demand="d", epoch=7, component="main", engine=Engine.DOCKER, ref="3f2a",
        running=alive, pids=(4242,) if alive else (), **more,
    )  # fmt: skip


def story_of(name: str, folder: Path, *, cgroup_gone: bool = False, log: bool = True) -> tuple[Any, Readings]:
    """Play a recorded tree through the readings; the verdict on it."""
    recorded = tree(name)
    own, mount = recorded["paths"][-1], folder / "cgroup"
    hierarchy = machine(folder, own)
    lay_out(mount, recorded["before"])
    readings = Readings(hierarchy, 7, (), at=0.0)
    readings.know([running()])
    lay_out(mount, recorded["before"])
    readings.read(0.0)
    lay_out(mount, recorded["during"])
    readings.read(1.0, "2026-11-30T02:00:01Z")
    if cgroup_gone:
        for file in (mount / own.lstrip("/")).iterdir():
            file.unlink()
        (mount / own.lstrip("/")).rmdir()
        recorded["after"].pop(own)
    lay_out(mount, recorded["after"])
    readings.read(2.0, "2026-11-30T02:00:02Z")
    kills = [record_of(f"6,1,{line[line.index('[') + 1 : line.index(']')].replace('.', '').strip()},-;{line}".encode())
             for line in recorded["log"]] if log else []  # fmt: skip
    code = recorded["exit"]
    end = running(alive=False, exit_code=128 - code if code < 0 else code, signal=-code if code < 0 else None)
    circumstances = Circumstances(
        ended=(end,), levels=readings.changes(), kills=readings.victims(k for k in kills if isinstance(k, MemoryKill)),
        story=readings.story,
    )  # fmt: skip
    return verdict(circumstances), readings


@pytest.mark.parametrize("log", [True, False], ids=["with the kernel's log", "by counters alone"])
@pytest.mark.parametrize(
    ("name", "expected", "words"),
    [
        ("container_limit", VerdictClass.OOM_CGROUP, "its own limit of 40 MiB (container 3f2a91c0ffee)"),
        ("slice_limit", VerdictClass.OOM_CGROUP, "the limit of 40 MiB (slice rig.slice)"),
        ("child_only", VerdictClass.OOM_CGROUP, "40 MiB (container 3f2a91c0ffee)"),
        ("no_trouble", VerdictClass.COMPLETED, "ended with 0"),
    ],
)
def test_recorded_trees(tmp_path: Path, name: str, expected: VerdictClass, words: str, *, log: bool) -> None:
    told, _ = story_of(name, tmp_path, log=log)
    assert told.verdict is expected
    assert words in told.sentence


def test_a_kill_for_the_whole_machine_is_told_by_the_kernel(tmp_path: Path) -> None:
    told, _ = story_of("machine", tmp_path)
    assert (told.verdict, told.confidence) == (VerdictClass.OOM_GLOBAL, "high")


def test_the_containers_cgroup_is_gone_at_its_end_and_the_level_above_still_tells(tmp_path: Path) -> None:
    """Docker removes it with the container: the last reading stands for it, the slice counts what happened below."""
    told, readings = story_of("slice_limit", tmp_path, cgroup_gone=True, log=False)
    assert told.verdict is VerdictClass.OOM_CGROUP
    assert "slice rig.slice" in told.sentence
    own, above = readings.changes()
    assert (own.gone, above.gone) == (True, False)
    assert own.last_bytes, "the last reading is kept"
    assert any("the level is gone" in e.value for e in told.evidence)


def test_a_level_of_our_own_counts_from_zero_and_a_shared_one_from_what_it_had(tmp_path: Path) -> None:
    hierarchy = machine(tmp_path, "/rig.slice/c")
    files = {"memory.current": "100", "memory.max": "200", "memory.events": "max 5\noom 2\noom_kill 3\n"}
    lay_out(tmp_path / "cgroup", {"/rig.slice": files, "/rig.slice/c": files})
    readings = Readings(hierarchy, 7, (), at=0.0)
    readings.know([running(cgroup=str(tmp_path / "cgroup/rig.slice/c"))])
    readings.read(0.0)
    own, above = readings.changes()
    assert (own.kills, above.kills) == (3, 0)
    shared = machine(tmp_path, "/agent.service")
    lay_out(tmp_path / "cgroup", {"/agent.service": files})
    readings = Readings(shared, 7, (), at=0.0)
    readings.know([running()])
    readings.read(0.0)
    assert [change.own for change in readings.changes()] == [False], "it is the agent's, not the component's"


def test_near_the_limit_is_noted_once_and_read_more_often(tmp_path: Path) -> None:
    hierarchy = machine(tmp_path, "/c")
    readings = Readings(hierarchy, 7, (), at=0.0)
    for at, current in enumerate((10, 95, 96, 50, 97)):
        lay_out(tmp_path / "cgroup", {"/c": {"memory.current": str(current), "memory.max": "100"}})
        readings.know([running()])
        readings.read(float(at))
        assert readings.near == (current >= 90)
    assert [e.what for e in readings.story] == ["near the limit"] * 2


def test_v1_is_told_in_the_words_of_v2(tmp_path: Path) -> None:
    files = {
        "memory.usage_in_bytes": "65536000\n", "memory.limit_in_bytes": "67108864\n", "memory.max_usage_in_bytes": "67108864\n",
        "memory.failcnt": "50\n", "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        "memory.stat": "rss 1\ntotal_rss 60000000\ntotal_mapped_file 4096\n",
    }  # fmt: skip
    lay_out(
        tmp_path,
        {
            "/docker/x": files,
            "/docker": {"memory.usage_in_bytes": "1\n", "memory.limit_in_bytes": "9223372036854771712\n"},
        },
    )
    level = read_level(tmp_path, "/docker/x", version=1)
    assert (level.current_bytes, level.limit_bytes, level.limited) == (65536000, 67108864, True)
    assert (level.events, level.rss_bytes, level.mapped_bytes) == ({"max": 50, "oom_kill": 1}, 60000000, 4096)
    above = read_level(tmp_path, "/docker", version=1)
    assert (above.limit_bytes, above.limited) == (None, False)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/docker/" + "3f2a91c0ffee" + "0" * 52, "container 3f2a91c0ffee"),
        ("/system.slice/docker-" + "3f2a91c0ffee" + "0" * 52 + ".scope", "container 3f2a91c0ffee"),
        ("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1b4e28ba_2fa1_11d2_883f_0016d3cca427.slice",
         "pod 1b4e28ba-2fa1-11d2-883f-0016d3cca427"),
        ("/rig.slice", "slice rig.slice"),
        ("/system.slice/rigbook.service", "unit rigbook.service"),
        ("/docker", "all containers of docker"),
        ("/rag", "group rag"),
        ("/", "machine"),
    ],
)  # fmt: skip
def test_levels_have_names(path: str, name: str) -> None:
    assert level_name(path) == name


def test_a_process_that_we_cannot_see_is_unknown_with_the_reason(tmp_path: Path) -> None:
    hierarchy = machine(tmp_path, "/../elsewhere")
    assert "does not see" in hierarchy.place_of(4242).why
    assert "cannot be read" in hierarchy.place_of(1).why
    assert hierarchy.read(Place(0)) == ()
    assert hierarchy.pids(Place(0)) == []
    ended = machine(tmp_path, "/")
    assert "root cgroup" in ended.place_of(4242).why, "what the kernel says of a process that has just ended"
    assert "cannot be read" in Hierarchy(proc=tmp_path / "none").why
    assert Hierarchy.nowhere().machine_kills() is None


# -- garbage in -----------------------------------------------------------------------------------------

GARBAGE = st.one_of(
    st.text(max_size=200), st.sampled_from(["max", "-1", "1e9", "nan", "٣", "9" * 30, "1 2", "\0"])
)


@given(GARBAGE)
def test_parsers_are_total(text: str) -> None:
    number = bytes_of(text)
    assert number is None or 0 <= number < 1 << 63
    limit, limited = limit_of(text)
    assert (limit is None) == (limited is not True)
    assert all(0 <= value < 1 << 63 for value in keyed(text).values())
    assert all(value is None or 0 <= value <= 100 for value in stalled(text))
    assert level_name(text)
    assert len(levels_of(text)) <= 16


@given(
    st.dictionaries(
        st.sampled_from(["current", "max", "events", "events.local", "stat", "peak", "pressure"]),
        st.binary(max_size=80),
    )
)
def test_a_level_of_garbage_is_a_reading(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    mount = tmp_path_factory.mktemp("cgroup")
    for name, content in files.items():
        (mount / f"memory.{name}").write_bytes(content)
    level = read_level(mount, "/", version=2)
    assert (level.current_bytes is None) == bool(level.why)


@given(st.binary(max_size=400))
def test_the_kernels_log_may_hold_anything(raw: bytes) -> None:
    for prefix in (
        b"",
        b"6,1,2,-;",
        b"6,1,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,",
        b"4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79,",
    ):
        record = record_of(prefix + raw)
        assert record is None or record.at >= 0


@given(st.binary(max_size=400))
def test_the_output_of_a_program_may_hold_anything(raw: bytes) -> None:
    assert memory_refusal("main", raw) is None or b"emory" in raw or b"ALLOC" in raw


# -- the kernel's log and a program's last words --------------------------------------------------------


def test_lines_of_the_kernel() -> None:
    kill = record_of(
        b"6,988,4142722157,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
        b"task_memcg=/docker/3f2a,task=python,pid=812,uid=0"
    )
    assert isinstance(kill, MemoryKill)
    assert (kill.everywhere, kill.victim_level, kill.pid, kill.at) == (True, "/docker/3f2a", 812, 4142.722157)
    xid = record_of(
        b"4,1,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    )
    assert isinstance(xid, CardTrouble)
    assert (xid.code, xid.card, xid.at) == ("xid 79", "0000:3b:00", 5.0)


def test_a_log_that_may_not_be_read_is_said_so(tmp_path: Path) -> None:
    log = KernelLog(str(tmp_path / "none"))
    log.open()
    assert "cannot be read" in log.why
    assert log.look() == ()
    quiet = KernelLog(NO_LOG)
    quiet.open()
    assert (quiet.why, quiet.look()) == ("not looked at", ())


@pytest.mark.parametrize(
    ("line", "wanted", "measured"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total", 2 * 1024**3, False),
        ("RuntimeError: CUDA error: out of memory", None, False),
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", None, True),
        ("ValueError: Free memory on device (10.2/23.6 GiB) on startup is less than desired GPU memory utilization (0.9, 21.24 GiB).",
         int(21.24 * 1024**3), True),
        ("ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory", 4096 * MIB, False),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", None, False),
    ],
)  # fmt: skip
def test_words_of_the_frameworks(line: str, wanted: int | None, *, measured: bool) -> None:
    failure = memory_refusal("main", f"token=secret\n{line}\nTraceback\n".encode())
    assert failure is not None
    assert (failure.wanted_bytes, failure.measured) == (wanted, measured)
    assert "secret" not in failure.text


def test_only_the_matched_words_leave_the_output() -> None:
    failure = memory_refusal(
        "main", b"key=sk-123 CUDA out of memory. Tried to allocate 1.50 GiB for user bob"
    )
    assert failure is not None
    assert failure.text == "CUDA out of memory. Tried to allocate 1.50 GiB"


# -- cards, rings, points -------------------------------------------------------------------------------


def test_readings_of_cards_tell_ours_from_the_others_and_see_memory_errors_rise() -> None:
    readings = Readings(
        Hierarchy.nowhere(), 7, (Allotment(card="GPU-1", memory_bytes=10, mode=Mode.EXCLUSIVE),), at=0.0
    )

    def sample(ecc: int, used: int) -> CardObservation:
        processes = (
            ProcessObservation(pid=1, memory_bytes=6, epoch=7),
            ProcessObservation(pid=2, memory_bytes=3),
        )
        return CardObservation(
            uuid="GPU-1",
            memory_used_bytes=used,
            memory_total_bytes=24,
            ecc_uncorrected=ecc,
            processes=processes,
        )

    readings.saw_cards(1.0, [sample(0, 10), CardObservation(uuid="GPU-2")])
    readings.saw_cards(2.0, [sample(1, 12)])
    readings.saw_cards(3.0, [CardObservation(uuid="GPU-1", unknown="the driver hangs")])
    (use,) = readings.uses({})
    assert (use.own_bytes, use.others_bytes, use.total_bytes) == (6, 6, 24)
    assert [t.code for t in readings.troubles] == ["ecc"]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.sampled_from([0.2, 1.0, 7.0]))
def test_points_are_bounded_and_end_with_the_last_value(values: list[int], step: float) -> None:
    every, points = thinned([(number * step, value) for number, value in enumerate(values)])
    assert 1 <= len(points) <= POINTS_MAX
    assert points[-1] == values[-1]
    assert every >= 1.0
    assert all(point == -1 or point in values for point in points)

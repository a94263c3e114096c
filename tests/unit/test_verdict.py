"""Why it ended: from circumstances to a verdict, the first rule that matches. One test per class, then the order."""

from __future__ import annotations

from typing import Any

import pytest
from rigbook_nodeagent.circumstances import (
    CardTrouble,
    CardUse,
    Circumstances,
    HostMemory,
    LevelChange,
    MemoryKill,
    MemoryRefusal,
    ProbeFailure,
)
from rigbook_nodeagent.engines.protocol import Running
from rigbook_nodeagent.restart import seconds_until_again
from rigbook_nodeagent.verdict import EVIDENCE_MAX, Verdict, verdict
from rigbook_schemas.values import GIB, Engine, EvictionReason, Evidence, Restart, VerdictClass

V = VerdictClass
CARD = "GPU-0f4c0d2e"


def ended(component: str = "main", **more: Any) -> Running:
    values: dict[str, Any] = {"exit_code": 0, "ended": "2026-11-30T02:00:00Z", **more}
    return Running(
        cluster="c", node="a", demand="d", epoch=1, component=component, engine=Engine.DOCKER,
        ref="3f2a91c0", running=False, **values,
    )  # fmt: skip


KILLED = ended(exit_code=137)


def say(*components: Running, **more: Any) -> Verdict:
    return verdict(Circumstances(ended=components, **more))


def level(name: str = "container 3f2a", *, own: bool = True, **more: Any) -> LevelChange:
    values: dict[str, Any] = {"limit_bytes": 32 * GIB, "last_bytes": 4 * GIB, **more}
    return LevelChange(component="main", name=name, path=f"/{name}", own=own, **values)


def probe(kind: str = "liveness") -> ProbeFailure:
    return ProbeFailure(
        kind=kind, component="main", failures=3, seconds=300, why="no answer within 5 s", latency_seconds=5.0
    )


def use(**more: Any) -> CardUse:
    values: dict[str, Any] = {
        "card": CARD, "allotted_bytes": 10 * GIB, "total_bytes": 24 * GIB, "own_bytes": 2 * GIB, "others_bytes": GIB,
        **more,
    }  # fmt: skip
    return CardUse(**values)


OOM_TEXT = MemoryRefusal(
    component="main", text="CUDA out of memory. Tried to allocate 2.00 GiB", wanted_bytes=2 * GIB
)

# -- one per class ------------------------------------------------------------------------------------


def test_completed() -> None:
    assert say(ended(), ended("two")).verdict is V.COMPLETED


def test_stopped_by_us_also_when_it_took_a_kill() -> None:
    """Case 20: stop, grace, SIGKILL, 137: our order was there before."""
    told = say(
        ended(exit_code=137, stopped_by_us=True), stop_reason=EvictionReason.WITHDRAWN, stop_by="ann",
        levels=(level(last_bytes=32 * GIB, limit_hits=50),),
    )  # fmt: skip
    assert (told.verdict, told.confidence) == (V.STOPPED_BY_US, "high")
    assert "by ann" in told.sentence
    assert told.evidence[0].what == "stop order"


def test_preempted() -> None:
    assert say(ended(exit_code=143), stop_reason=EvictionReason.PREEMPTION).verdict is V.PREEMPTED


def test_probe_kill_startup() -> None:
    """Case 22: nine minutes of loading, killed at five: the advice is a longer startup window."""
    told = say(KILLED, probe=probe("startup"))
    assert told.verdict is V.PROBE_KILL_STARTUP
    assert "startup_max" in told.sentence


def test_probe_kill_liveness() -> None:
    assert say(KILLED, probe=probe()).verdict is V.PROBE_KILL_LIVENESS


def test_probe_kill_while_the_kernel_reclaimed_says_that_it_was_slow() -> None:
    told = say(
        KILLED,
        probe=probe(),
        levels=(level(last_bytes=31 * GIB + GIB // 2, full_avg10=45.0, limit_hits=900),),
    )
    assert told.verdict is V.PROBE_KILL_LIVENESS
    assert "98% of the limit" in told.sentence
    assert "45 %" in told.sentence


def test_oom_cgroup_by_the_kernels_word() -> None:
    kill = MemoryKill(
        at=9.0, everywhere=False, level="/container 3f2a", victim_level="/container 3f2a", program="python"
    )
    told = say(KILLED, kills=(kill,), levels=(level(last_bytes=32 * GIB),))
    assert (told.verdict, told.confidence) == (V.OOM_CGROUP, "high")
    assert "its own limit of 32.0 GiB (container 3f2a)" in told.sentence


def test_oom_cgroup_by_counters() -> None:
    """Case 21: oom_kill +1, max +50, current at max."""
    told = say(KILLED, levels=(level(last_bytes=32 * GIB, limit_hits=50, ooms=1, ooms_below=1, kills=1),))
    assert (told.verdict, told.confidence) == (V.OOM_CGROUP, "high")


def test_oom_cgroup_at_the_parent_is_named() -> None:
    """Case 21: a container with 32 GiB in a slice with 16."""
    told = say(
        KILLED,
        levels=(
            level(last_bytes=15 * GIB, limit_hits=0, ooms=0, ooms_below=0, kills=1),
            level("slice rig.slice", own=False, limit_bytes=16 * GIB, last_bytes=16 * GIB, limit_hits=70, ooms=1, ooms_below=1, kills=1),
        ),
    )  # fmt: skip
    assert told.verdict is V.OOM_CGROUP
    assert "the limit of 16.0 GiB (slice rig.slice)" in told.sentence


def test_oom_cgroup_of_a_level_that_is_gone() -> None:
    """The container's cgroup went with it; the slice above counts an oom below that was not its own."""
    told = say(
        KILLED,
        levels=(
            level(last_bytes=20 * GIB, limit_hits=0, ooms=0, ooms_below=0, kills=0, gone=True),
            level("slice rig.slice", own=False, limit_bytes=64 * GIB, last_bytes=21 * GIB, limit_hits=0, ooms=0, ooms_below=1, kills=1),
        ),
    )  # fmt: skip
    assert told.verdict is V.OOM_CGROUP
    assert "container 3f2a" in told.sentence


def test_oom_of_a_child_is_told_as_such() -> None:
    told = say(
        ended(exit_code=1, oom_killed=True),
        levels=(level(last_bytes=32 * GIB, limit_hits=9, kills=1, ooms=1),),
    )
    assert (told.verdict, told.confidence) == (V.OOM_CGROUP, "medium")
    assert "a child of component main" in told.sentence


def test_a_child_killed_for_memory_and_a_good_end_is_completed() -> None:
    told = say(ended(oom_killed=True), levels=(level(last_bytes=32 * GIB, kills=1, ooms=1),))
    assert told.verdict is V.COMPLETED
    assert any("oom_kill +1" in e.value for e in told.evidence)


def test_oom_global_by_the_kernels_word() -> None:
    kill = MemoryKill(
        at=9.0, everywhere=True, victim_level="/container 3f2a", text="CONSTRAINT_NONE,global_oom"
    )
    told = say(KILLED, kills=(kill,), levels=(level(kills=1, limit_hits=0, ooms=0),))
    assert (told.verdict, told.confidence) == (V.OOM_GLOBAL, "high")


def test_oom_global_by_counters() -> None:
    """Case 21: its own cgroup far below its limit, and nothing available."""
    host = HostMemory(total_bytes=64 * GIB, available_bytes=20 * GIB, least_available_bytes=GIB // 2)
    told = say(KILLED, levels=(level(kills=1, limit_hits=0, ooms=0),), host=host)
    assert (told.verdict, told.confidence) == (V.OOM_GLOBAL, "medium")


def test_gpu_alloc_race() -> None:
    """Case 13: two engines measured the card at the same time."""
    measured = MemoryRefusal(component="main", text="No available memory for the cache blocks", measured=True)
    told = say(ended(exit_code=1), refusal=measured, cards=(use(starts_beside=("other",)),))
    assert (told.verdict, told.confidence) == (V.GPU_ALLOC_RACE, "high")
    assert "other was starting" in told.sentence


def test_gpu_alloc_reserve() -> None:
    told = say(ended(exit_code=1), refusal=OOM_TEXT, cards=(use(own_bytes=9 * GIB),))
    assert told.verdict is V.GPU_ALLOC_RESERVE
    assert "more than its allotment of 10.0 GiB" in told.sentence


def test_gpu_alloc_real() -> None:
    told = say(ended(exit_code=1), refusal=OOM_TEXT, cards=(use(others_bytes=20 * GIB),))
    assert told.verdict is V.GPU_ALLOC_REAL
    assert "others held 20.0 GiB of 24.0 GiB" in told.sentence


@pytest.mark.parametrize("code", ["xid 79", "xid 48", "ecc", "lost"])
def test_gpu_hardware_wins_over_the_exit_code(code: str) -> None:
    """Case 23: an ECC error surfaces as a segmentation fault."""
    told = say(ended(exit_code=139), troubles=(CardTrouble(at=9.0, card=CARD, code=code),))
    assert told.verdict is V.GPU_HARDWARE
    assert CARD in told.sentence


def test_an_xid_that_programs_cause_is_no_hardware() -> None:
    told = say(
        ended(exit_code=139), troubles=(CardTrouble(at=9.0, card=CARD, code="xid 31", text="MMU fault"),)
    )
    assert told.verdict is V.APPLICATION_EXIT
    assert any(e.what == "xid 31" for e in told.evidence)


def test_runtime_missing() -> None:
    told = say(refused=("runtime_missing", 'could not select device driver "" with capabilities: [[gpu]]'))
    assert told.verdict is V.RUNTIME_MISSING


def test_image_pull() -> None:
    assert say(refused=("image_pull", "manifest unknown")).verdict is V.IMAGE_PULL


def test_start_failed() -> None:
    assert (
        say(refused=("no_such_program", "x"), stop_reason=EvictionReason.OPERATOR).verdict is V.START_FAILED
    )


def test_external_removal() -> None:
    told = say(vanished=("main",))
    assert (told.verdict, told.confidence) == (V.EXTERNAL_REMOVAL, "high")
    assert say(vanished=("main",), watched=False).confidence == "medium"


def test_external_stop() -> None:
    told = say(ended(exit_code=137, killed_by_others="SIGKILL through the Docker Engine"))
    assert told.verdict is V.EXTERNAL_REMOVAL


def test_redeploy() -> None:
    """Case 21: a new container of another image and no exit record is no crash."""
    told = say(ended(exit_code=None, replaced="container a (sha256:1) by b (sha256:2)", image_changed=True))
    assert told.verdict is V.REDEPLOY
    assert "no crash" in told.sentence


def test_replaced_with_the_same_image_is_no_redeploy() -> None:
    assert say(ended(replaced="container a by b")).verdict is V.EXTERNAL_REMOVAL


def test_node_reboot() -> None:
    assert say(ended(exit_code=None, other_boot=True), rebooted=True).verdict is V.NODE_REBOOT


def test_application_exit() -> None:
    told = say(ended(exit_code=3))
    assert (told.verdict, told.confidence) == (V.APPLICATION_EXIT, "high")
    assert "component main ended by itself with exit code 3" in told.sentence
    assert "SIGSEGV" in say(ended(exit_code=None, signal=11)).sentence


def test_unknown() -> None:
    assert say().verdict is V.UNKNOWN
    assert "nobody watched" in say(ended(exit_code=None)).sentence


# -- what it never does, and the order ----------------------------------------------------------------


def test_137_alone_is_never_out_of_memory() -> None:
    told = say(KILLED)
    assert (told.verdict, told.confidence) == (V.APPLICATION_EXIT, "low")
    assert "not taken for out of memory" in told.sentence
    far = say(
        KILLED,
        levels=(level(limit_hits=50, kills=0, ooms=0),),
        host=HostMemory(total_bytes=64, available_bytes=1),
    )
    assert far.verdict is V.APPLICATION_EXIT


def test_the_end_of_what_we_stopped_because_another_ended_is_not_the_story() -> None:
    told = say(ended("access", exit_code=137, stopped_by_us=True), ended("server", exit_code=3))
    assert told.verdict is V.APPLICATION_EXIT
    assert "component server" in told.sentence


def test_an_end_before_the_order_is_told_as_what_it_was() -> None:
    told = say(ended(exit_code=3), stop_reason=EvictionReason.WITHDRAWN, ended_before_stop=True)
    assert told.verdict is V.APPLICATION_EXIT


@pytest.mark.parametrize(
    ("weaker", "expected"),
    [
        ({"stop_reason": EvictionReason.WITHDRAWN}, V.STOPPED_BY_US),
        ({"troubles": (CardTrouble(at=1, card=CARD, code="xid 79"),)}, V.GPU_HARDWARE),
        ({"probe": probe()}, V.PROBE_KILL_LIVENESS),
        ({"rebooted": True}, V.NODE_REBOOT),
        ({"vanished": ("main",)}, V.EXTERNAL_REMOVAL),
        ({"kills": (MemoryKill(at=1, everywhere=True),)}, V.OOM_GLOBAL),
        ({"refusal": OOM_TEXT}, V.GPU_ALLOC_RESERVE),
    ],
)  # fmt: skip
def test_each_rule_gives_way_to_those_above_it(weaker: dict[str, Any], expected: V) -> None:
    """Add the rules from the strongest on: the first one stays the verdict."""
    order = ["stop_reason", "troubles", "probe", "rebooted", "vanished", "kills", "refusal"]
    everything: dict[str, Any] = {
        "stop_reason": EvictionReason.WITHDRAWN, "troubles": (CardTrouble(at=1, card=CARD, code="xid 79"),),
        "probe": probe(), "rebooted": True, "vanished": ("main",), "kills": (MemoryKill(at=1, everywhere=True),),
        "refusal": OOM_TEXT,
    }  # fmt: skip
    (name,) = weaker
    from_here = {key: everything[key] for key in order[order.index(name) :]}
    assert say(ended(exit_code=137), **from_here).verdict is expected


def test_every_verdict_has_a_sentence_a_confidence_and_bounded_evidence() -> None:
    story = tuple(Evidence(what="near the limit", value=str(number)) for number in range(500))
    told = say(ended(exit_code=1), story=story, levels=(level(),) * 16)
    assert told.sentence
    assert told.confidence in ("high", "medium", "low")
    assert len(told.evidence) <= EVIDENCE_MAX
    assert told.evidence[-1].value == "499", "of a long story, the end is kept"


# -- restart by verdict -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kind", "attempt", "expected"),
    [
        ("never", V.APPLICATION_EXIT, 1, None),
        ("on-failure", V.APPLICATION_EXIT, 1, 1.0),
        ("on-failure", V.APPLICATION_EXIT, 3, 4.0),
        ("on-failure", V.APPLICATION_EXIT, 4, None),
        ("on-failure", V.COMPLETED, 1, None),
        ("always", V.COMPLETED, 1, 1.0),
        ("always", V.STOPPED_BY_US, 1, None),
        ("always", V.GPU_HARDWARE, 1, None),
        ("never", V.GPU_ALLOC_RACE, 1, 5.0),
        ("never", V.GPU_ALLOC_RACE, 2, None),
        ("on-failure", V.OOM_CGROUP, 1, 4.0),
        ("on-failure", V.NODE_REBOOT, 1, 1.0),
        ("on-failure", V.PROBE_KILL_LIVENESS, 2, 2.0),
    ],
)
def test_restart_by_verdict(policy: str, kind: V, attempt: int, expected: float | None) -> None:
    assert seconds_until_again(Restart(policy=policy), kind, attempt=attempt) == expected

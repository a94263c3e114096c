"""How an end is shown, and what is said about a demand before it runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigbook.advice import advice
from rigbook.demandfile import read_text
from rigbook.endings import boundary_lines, plotted, timeline
from rigbook_schemas.events import DemandRaised, Exited
from rigbook_schemas.values import (
    GIB,
    Boundary,
    Checkpoint,
    Component,
    ComponentEnd,
    Evidence,
    Owner,
    Request,
    VerdictClass,
)


def exited(*evidence: Evidence) -> Exited:
    return Exited(
        demand="d", epoch=1, node="a", verdict=VerdictClass.OOM_CGROUP, evidence=evidence,
        ends=(ComponentEnd(component="main", exit_code=137, ended="2026-11-30T02:00:05Z"),),
    )  # fmt: skip


def test_evidence_is_one_timeline_and_what_has_no_time_stands_at_the_end() -> None:
    rows = timeline(
        exited(
            Evidence(what="kernel", value="oom-kill"),
            Evidence(what="near the limit", value="31 of 32 GiB", at="2026-11-30T02:00:03Z"),
            Evidence(what="end of main", value="exit code 137", at="2026-11-30T02:00:05Z"),
        ),
        "2026-11-30T02:00:09Z",
    )
    assert [what for _, what, _, _ in rows] == ["near the limit", "kernel", "end of main"]


def test_a_plot_reaches_the_top_at_the_limit_and_marks_what_is_unknown() -> None:
    assert plotted([0, 1, 4 * GIB, 8 * GIB, -1], 8 * GIB) == " ▁▄█·"
    assert plotted([-1, -1], None) == "··"
    assert plotted([], GIB) == ""


@given(st.lists(st.integers(-1, 2**50), max_size=70), st.none() | st.integers(0, 2**50))
def test_a_plot_has_one_character_a_point(points: list[int], limit: int | None) -> None:
    assert len(plotted(points, limit)) == len(points)


def test_boundaries_name_their_figures() -> None:
    lines = boundary_lines(
        [
            Boundary(
                component="main", name="slice rig.slice", limit_bytes=16 * GIB, last_bytes=16 * GIB, peak_bytes=16 * GIB,
                limit_hits=70, oom_kills=1, every_seconds=2.0, points=(GIB, 16 * GIB),
            ),
            Boundary(component="main", name="container x"),
        ]
    )  # fmt: skip
    assert len(lines) == 2
    assert "main at slice rig.slice" in lines[0]
    assert "16.0 GiB of 16.0 GiB, peak 16.0 GiB, limit hit 70, killed 1" in lines[0]
    assert lines[1].endswith("| last 2 s")


def spec(
    *command: str, image: str = "", checkpoint: Checkpoint | None = None, preemptible: bool = False
) -> DemandRaised:
    return DemandRaised(
        demand="d", project="p", owner=Owner(name="ann"), resources=Request(memory_bytes=GIB), preemptible=preemptible,
        components=(Component(command=command, image=image, checkpoint=checkpoint),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("demand", "said"),
    [
        (spec("sh", "-c", "cd /x && python train.py", image="i"), True),
        (spec("/bin/bash", "-lc", "python train.py", image="i"), True),
        (spec("bash", "-e", "-c", "python train.py", preemptible=True), True),
        (spec("sh", "-c", "python train.py", checkpoint=Checkpoint()), True),
        (spec("sh", "-c", "cd /x && exec python train.py", image="i"), False),
        (spec("sh", "-c", "trap 'save' TERM; while :; do :; done", image="i"), False),
        (spec("python", "train.py", image="i"), False),
        (spec("bash", "train.sh", image="i"), False),
        (spec("sh", "-c", "python train.py"), False),
        (spec(image="i"), False),
    ],
)
def test_a_shell_as_the_first_process_is_advised_against(demand: DemandRaised, *, said: bool) -> None:
    """Case 34: the signal of a cooperative eviction never reaches the program."""
    told = advice(demand)
    assert bool(told) == said
    assert all("exec" in line for line in told)


def test_a_demand_file_says_how_it_starts_and_how_it_saves() -> None:
    text = """
name: train
project: nlp
owner: ann
workload: batch
resources: {memory: 8GiB}
command: [python, train.py]
startup: {kind: exec, command: [test, -e, up], every: 10s, startup_max: 20m, on_failure: stop}
checkpoint: {signal: SIGUSR1, acknowledge: file, path: saved, acknowledge_max: 1m, save_max: 30m}
"""
    (filed,) = read_text(text, "t.yaml")
    (component,) = filed.spec.components
    assert component.startup is not None
    assert (component.startup.startup_seconds_max, component.startup.on_failure) == (1200, "stop")
    assert component.checkpoint == Checkpoint(
        signal="SIGUSR1", acknowledge="file", path="saved", acknowledge_seconds_max=60, save_seconds_max=1800
    )

"""Foreign histories: what they say becomes demands, what they do not say is told, and a bad line is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from rigbook_replay.history_import import BadHistory, of_openb, of_philly, of_sacct
from rigbook_replay.lifetimes import Known
from rigbook_schemas.values import GIB, Mode

SECOND_NS = 10**9
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
NODES = [
    "sn,cpu_milli,memory_mib,gpu,model",
    "n0,64000,262144,2,V100M16",
    "n1,64000,262144,0,",
    "n2,1,1,8,G2",
]
SACCT = "JobID|User|Account|State|Submit|Start|End|ReqTRES|AllocTRES|NNodes"
PHILLY = "job_id,user,num_gpu,submit_time,iterations,model_name,duration,job_type"


def test_openb_pods_are_demands_and_its_nodes_the_fleet() -> None:
    past = of_openb(
        "pods",
        [
            PODS,
            "p0,1,1,1,460,V100M16|V100M32,LS,Running,100,700,130",
            "p1,1,1,8,1000,,BE,Running,50,90,60",
            "p2,1,1,0,0,,LS,Running,0,9,0",
            "p3,1,1,1,1000,T4,LS,Failed,10,20,",
        ],
        NODES,
    )
    there = {life.spec.demand: life for life in past.lifetimes}
    assert set(there) == {"p0", "p1", "p3"}
    share = there["p0"]
    assert share.spec.resources.mode is Mode.MEMORY_SLICE
    assert share.spec.resources.memory_bytes == int(16 * GIB * 0.46)
    assert share.spec.resources.model == "V100M"
    assert (share.hold_ns, share.wait_ns(0)) == (570 * SECOND_NS, 30 * SECOND_NS)
    assert there["p1"].spec.resources.count == 8
    assert there["p3"].known is Known.ESTIMATED
    assert there["p3"].gave_up
    assert [one.data.node for one in past.happenings] == ["n0", "n2"]  # type: ignore[attr-defined]
    assert any("1 pods ask for no GPU" in note for note in past.notes)


def test_sacct_lines_are_demands() -> None:
    past = of_sacct(
        "sacct.txt",
        [
            SACCT,
            "101|ada|nlp|COMPLETED|2026-11-01T10:00:00|2026-11-01T10:10:00|2026-11-01T12:10:00|gres/gpu=4|cpu=8,gres/gpu=4,gres/gpu:h100=4,node=1|1",
            "101.batch|||COMPLETED|2026-11-01T10:10:00|2026-11-01T10:10:00|2026-11-01T12:10:00|||1",
            "102_7|bob|nlp|RUNNING|2026-11-01T10:00:00|2026-11-01T11:00:00|Unknown|gres/gpu=16|gres/gpu=16|2",
            "103|bob|cv lab|PENDING|2026-11-01T10:00:00|Unknown|Unknown|gres/gpu=1||1",
            "104|bob|cv|CANCELLED by 0|2026-11-01T10:00:00|None|2026-11-01T10:30:00|gres/gpu=1||1",
            "105|bob|cv|COMPLETED|2026-11-01T10:00:00|2026-11-01T10:00:00|2026-11-01T10:30:00|cpu=1|cpu=1|1",
        ],
    )
    there = {life.spec.demand: life for life in past.lifetimes}
    assert set(there) == {"slurm-101", "slurm-102_7", "slurm-103", "slurm-104"}
    first = there["slurm-101"]
    assert (first.spec.resources.count, first.spec.resources.model) == (4, "h100")
    assert (first.hold_ns, first.wait_ns(0)) == (7200 * SECOND_NS, 600 * SECOND_NS)
    gang = there["slurm-102_7"]
    assert (gang.spec.resources.nodes, gang.spec.resources.count, gang.known) == (2, 8, Known.CENSORED)
    assert there["slurm-103"].spec.project == "cv-lab"
    assert there["slurm-104"].gave_up


def test_philly_in_both_of_its_forms() -> None:
    cut = of_philly("p.csv", f"{PHILLY}\n0,vc_1,16,10,1,resnet,211,strict\n1,vc_1,1,5,1,vgg,20,best")
    assert [life.spec.priority for life in cut.lifetimes] == [25, 50]
    assert (cut.lifetimes[1].spec.resources.nodes, cut.lifetimes[1].hold_ns) == (2, 211 * 60 * SECOND_NS)
    assert not cut.recorded_waits
    entries = [
        {
            "jobid": "application_1", "vc": "6214e9", "user": "ce2", "submitted_time": "2017-10-07 01:00:00",
            "attempts": [
                {"start_time": "2017-10-07 01:10:00", "end_time": "2017-10-07 02:10:00", "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}]},
                {"start_time": "2017-10-07 02:20:00", "end_time": "2017-10-07 02:30:00", "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}]},
            ],
        },
        {"jobid": "application_2", "vc": "6214e9", "submitted_time": "2017-10-07 01:00:00", "attempts": []},
    ]  # fmt: skip
    whole = of_philly("p.json", json.dumps(entries))
    (life,) = whole.lifetimes
    assert (life.hold_ns, life.wait_ns(0)) == (4200 * SECOND_NS, 1200 * SECOND_NS)


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (of_openb, "name,num_gpu\n", "line 1: the head has no column gpu_milli"),
        (of_openb, f"{PODS}\np0,1,1,1,x,,LS,Running,0,1,0\n", "line 2: gpu_milli is 'x'"),
        (of_openb, f"{PODS}\np0,1,1,1,500,,LS,Running,5,1,5\n", "line 2: deletion_time 1 is before"),
        (of_openb, f"{PODS}\np0,1,1\n", "line 2: 3 fields, the head has 11"),
        (of_openb, f"{PODS}\n", "no demand for a GPU"),
        (of_openb, f"{PODS}\np0,1,1,1,500,,LS,R,0,1,0\np0,1,1,1,500,,LS,R,0,1,0\n", "p0 stands there twice"),
        (of_sacct, "JobID|Submit\n", "no column Start, End"),
        (of_sacct, "JobID|Submit|Start|End\n1|2026-11-01T10:00:00||\n", "ask for AllocTRES"),
        (of_sacct, f"{SACCT}\n1|a|b|C|yesterday|||gres/gpu=1||1\n", "line 2: Submit is 'yesterday'"),
        (of_sacct, f"{SACCT}\n1|a|b|C|2026-11-01T10:00:00|2026-11-01T10:00:01|2026-11-01T10:00:00|gres/gpu=1||1\n", "before Start"),
        (of_sacct, f"{SACCT}\n1|a|b|C|2026-11-01T10:00:00|||gres/gpu=1||many\n", "NNodes is 'many'"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(read: Any, text: str, said: str) -> None:
    with pytest.raises(BadHistory, match=said.replace("(", r"\(")):
        read("file", text.splitlines())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"jobid": 1}]', "Expected `str`"), ("[", "truncated"), (f"{PHILLY}\n0,vc,0,1,1,m,1,s\n", "line 2: num_gpu is 0"),
        ('[{"jobid":"a","vc":"v","submitted_time":"soon","attempts":[{"detail":[{"gpus":["g"]}]}]}]', "entry 1"),
    ],
)  # fmt: skip
def test_a_bad_philly_is_named(text: str, said: str) -> None:
    with pytest.raises(BadHistory, match=said):
        of_philly("file", text)


def test_the_command_takes_a_foreign_history(tmp_path: Path) -> None:
    from rigbook.commands.app import app_for
    from rigbook.failures import RigbookFailure
    from typer.testing import CliRunner

    def command(*words: str) -> Any:
        return CliRunner().invoke(app_for(["whatif"]), ["whatif", *words])

    pods, nodes, cut = tmp_path / "pods.csv", tmp_path / "nodes.csv", tmp_path / "philly.csv.gz"
    pods.write_text(f"{PODS}\np0,1,1,1,460,,LS,Running,100,700,130\n")
    nodes.write_text("\n".join(NODES))
    cut.write_bytes(gzip.compress(f"{PHILLY}\n0,vc,8,10,1,m,60,s\n1,vc,8,11,1,m,60,s\n".encode()))
    assert "SIMULATED, CHANGED" in command("--import", f"openb:{pods},{nodes}", "--policy", "spread").output
    alone = command("--import", f"philly:{cut}", "--add-node", "8xH100")
    assert alone.exit_code == 0, alone.output
    assert "RECORDED" not in alone.output
    bare = command("--import", f"philly:{cut}")
    assert isinstance(bare.exception, RigbookFailure)
    assert "--add-node" in bare.exception.remedy

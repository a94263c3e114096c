"""Demands from flags. Goal: `submit` and `deploy` say on the wire what the flags say, or which flag is wrong."""

from __future__ import annotations

import pytest
from rigbook.failures import Invalid, RigbookFailure, Unusable
from rigbook.flags import Flags, demand_of
from rigbook.labels import pairs
from rigbook_schemas.values import GIB, Component, Owner, Port, Request, Restart, Workload


def flags(**changes: object) -> Flags:
    given: dict[str, object] = {
        "workload": Workload.BATCH, "gpu": "24GB", "project": "nlp", "owner": "ada", "command": ("python", "train.py"),
    }  # fmt: skip
    return Flags(**(given | changes))  # type: ignore[arg-type]


def test_submit() -> None:
    spec = demand_of(
        flags(
            gpu="A100:80GB:2",
            env=("A=b=c",),
            require=("disk=nvme",),
            max_run="2h",
            priority="high",
            contact="#nlp",
        )
    )
    assert spec.name == "train"
    assert spec.resources == Request(memory_bytes=80 * GIB, count=2, model="A100", require={"disk": "nvme"})
    assert spec.components == (Component(command=("python", "train.py"), env={"A": "b=c"}),)
    assert (spec.owner, spec.priority, spec.max_run_seconds) == (Owner(name="ada", contact="#nlp"), 75, 7200)


def test_deploy() -> None:
    spec = demand_of(
        flags(
            workload=Workload.SERVICE,
            name="llm",
            command=(),
            image="a/b:1",
            ports=("8000", "80:8080"),
            restart="always",
        )
    )
    assert spec.components == (
        Component(image="a/b:1", ports=(Port(port=8000), Port(port=80, host_port=8080))),
    )
    assert (spec.name, spec.workload, spec.restart) == ("llm", Workload.SERVICE, Restart(policy="always"))


@pytest.mark.parametrize(
    ("command", "image", "name"),
    [
        (("python3.11", "-u", "/srv/run 7/train.py"), "", "python3-11"),
        (("python", "-m", "pkg.mod"), "", "pkg-mod"),
        (("./train.sh", "--x"), "", "train"),
        (("sh", "-c", "echo hello; sleep 1"), "", "sh"),
        ((), "vllm/vllm-openai:v0.9", "vllm-openai"),
        (("---",), "", "batch"),
        (("x" * 90,), "", "x" * 48),
    ],
)
def test_a_name_from_what_runs(command: tuple[str, ...], image: str, name: str) -> None:
    assert demand_of(flags(command=command, image=image)).name == name


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"command": ()}, Unusable, "nothing to run"),
        ({"project": ""}, Unusable, "no project"),
        ({"project": "a b"}, Invalid, "--project"),
        ({"name": "a.b"}, Invalid, "--name"),
        ({"name": "x" * 49}, Invalid, "--name.*at most 48"),
        ({"node": "a/b"}, Invalid, "--node"),
        ({"gpu": "lots"}, Invalid, "--gpu"),
        ({"mode": "shared"}, Invalid, "--mode.*exclusive, memory-slice, time-slice"),
        ({"env": ("A",)}, Invalid, "--env.*NAME=VALUE"),
        ({"env": ("1A=b",)}, Invalid, "--env"),
        ({"require": ("disk",)}, Invalid, "--require"),
        ({"prefer": ("=x",)}, Invalid, "--prefer"),
        ({"ports": ("0",)}, Invalid, "--port"),
        ({"ports": ("80:x",)}, Invalid, "--port"),
        ({"priority": "101"}, Invalid, "--priority"),
        ({"priority": "-1"}, Invalid, "--priority"),
        ({"max_run": "90"}, Invalid, "--max-run.*no unit"),
        ({"max_run": "0s"}, Invalid, "--max-run"),
        ({"restart": "always"}, Invalid, "--restart.*never, on-failure"),
    ],
)
def test_a_wrong_flag_is_named(changes: dict[str, object], kind: type[RigbookFailure], words: str) -> None:
    with pytest.raises(kind, match=words):
        demand_of(flags(**changes))


def test_pairs() -> None:
    assert pairs("--x", ["a=1", "b=x=y", " c =", "a=2"]) == {"a": "2", "b": "x=y", "c": ""}

"""Demand files that are right. Goal: what is written arrives on the wire, in bytes and seconds."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rigbook.demandfile import read_files, read_text
from rigbook_schemas.events import DemandRaised
from rigbook_schemas.values import (
    GIB,
    Component,
    Mode,
    Mount,
    Owner,
    Port,
    Probe,
    Request,
    Restart,
    Role,
    Workload,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
WHOLE = """\
name: chat
project: apps
owner: {name: Ada Okafor, contact: "#apps"}
workload: service
purpose: chat for everybody
resources:
  memory: 24GB
  count: 2
  nodes: 1
  mode: memory-slice
  model: A100
  node: lab-1
  require: {disk: nvme, rack: 7}
  prefer: {zone: b}
components:
  - name: server
    role: server
    image: vllm/vllm-openai:v0.9.1
    command: [--model, some/model, --port, 8000]
    env: {HF_HOME: /models, WORKERS: 4, DEBUG: yes, EMPTY: ''}
    ports: [8000, {port: 9000, host_port: 19000}]
    mounts: [{source: /srv/models, target: /models}]
    probe: {path: /health, port: 8000, every: 5s, timeout: 2s, startup_max: 9m, failures_max: 5}
    memory_limit: 64GiB
    shm: 8GiB
    stop_grace: 30s
  - name: access
    role: access
    gpu: false
    command: python3 -m http.server "8 0"
restart: {policy: on-failure, attempts: 5, backoff: 2s}
priority: high
max_run_time: 2h
preemptible: true
labels: {team: apps}
"""


def one(text: str) -> DemandRaised:
    (filed,) = read_text(text, "f.yaml")
    return filed.spec


def test_every_field_arrives() -> None:
    assert one(WHOLE) == DemandRaised(
        demand="chat",
        name="chat",
        project="apps",
        owner=Owner(name="Ada Okafor", contact="#apps"),
        workload=Workload.SERVICE,
        purpose="chat for everybody",
        resources=Request(
            memory_bytes=24 * GIB, count=2, nodes=1, mode=Mode.MEMORY_SLICE, model="A100", node="lab-1",
            require={"disk": "nvme", "rack": "7"}, prefer={"zone": "b"},
        ),
        components=(
            Component(
                name="server", role=Role.SERVER, image="vllm/vllm-openai:v0.9.1",
                command=("--model", "some/model", "--port", "8000"),
                env={"HF_HOME": "/models", "WORKERS": "4", "DEBUG": "yes", "EMPTY": ""},
                ports=(Port(port=8000), Port(port=9000, host_port=19000)),
                mounts=(Mount(source="/srv/models", target="/models"),),
                probe=Probe(path="/health", port=8000, every_seconds=5, timeout_seconds=2, startup_seconds_max=540, failures_max=5),
                memory_bytes=64 * GIB, shm_bytes=8 * GIB, stop_grace_seconds=30,
            ),
            Component(name="access", role=Role.ACCESS, gpu=False, command=("python3", "-m", "http.server", "8 0")),
        ),
        restart=Restart(policy="on-failure", attempts_max=5, backoff_seconds=2),
        priority=75,
        max_run_seconds=7200,
        preemptible=True,
        labels={"team": "apps"},
    )  # fmt: skip


SMALL = """\
name: train
project: nlp
owner: Ravi
workload: batch
resources: {memory: 512MiB}
command: python train.py
"""


def test_the_smallest_one_has_the_wires_defaults() -> None:
    spec = one(SMALL)
    assert spec.owner == Owner(name="Ravi")
    assert spec.components == (Component(command=("python", "train.py")),)
    assert (spec.priority, spec.max_run_seconds, spec.restart) == (50, None, Restart())
    assert spec.resources == Request(memory_bytes=512 * 1024**2)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("priority: low", 25),
        ("priority: normal", 50),
        ("priority: high", 75),
        ("priority: 0", 0),
        ("priority: 100", 100),
    ],
)
def test_priorities(line: str, expected: int) -> None:
    assert one(SMALL + line + "\n").priority == expected


def test_many_documents_keep_their_order_and_lines() -> None:
    text = f"---\n{SMALL}---\n{SMALL.replace('train', 'other')}---\n"
    filed = read_text(text, "f.yaml")
    assert [(f.spec.name, f.line) for f in filed] == [("train", 2), ("other", 9)]


def test_json_is_yaml_too() -> None:
    body = '{"name": "j", "project": "p", "owner": "o", "workload": "batch", "resources": {"memory": 24}, "command": ["a"]}'
    assert one(body).resources.memory_bytes == 24 * GIB


def test_a_port_of_the_component_is_what_its_probe_asks() -> None:
    spec = one(SMALL + "ports: [8000]\nprobe: {path: /health}\n")
    assert spec.components[0].probe == Probe(path="/health", port=8000)


def test_anchors_work() -> None:
    spec = one(SMALL.replace("command: python train.py", "command: &c [a, b]\nlabels: {x: &v one, y: *v}"))
    assert spec.labels == {"x": "one", "y": "one"}


def test_what_is_read_is_a_valid_event() -> None:
    for text in (WHOLE, SMALL):
        spec = one(text)
        assert msgspec.convert(msgspec.to_builtins(spec), DemandRaised) == spec


def test_the_examples_are_right() -> None:
    filed = read_files([EXAMPLES / name for name in ("chat.yaml", "train.yaml", "embed.yaml", "next.yaml")])
    assert [f.spec.name for f in filed] == ["chat", "train", "embed", "rerank", "next"]
    assert {f.spec.owner.contact != "" for f in filed} == {True}

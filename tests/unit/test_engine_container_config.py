"""What is asked of Docker for a launch, and what an inspection says. Pure.

Goal: a binding's cards and nothing else reach the container, and whatever Docker answers is either one of
ours or rejected, never misread.
"""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import pytest
from hypothesis import given
from rigbook_nodeagent.engines.container_config import (
    ContainerRules,
    container_config,
    container_name,
    image_reference,
    labels_of,
    ours,
    running_of,
)
from rigbook_nodeagent.engines.protocol import StartRefused
from rigbook_schemas.values import Mount, Port

from tests.contract.engine_fixtures import launch

CARDS = ("GPU-2", "GPU-0")


def environment(order, rules=None) -> dict[str, str]:
    return dict(line.split("=", 1) for line in container_config(order, rules or ContainerRules())["Env"])


def test_cards_by_uuid_outside_and_by_rank_inside():
    body = container_config(launch("serve", image="vllm", cards=CARDS), ContainerRules())
    (request,) = body["HostConfig"]["DeviceRequests"]
    assert (request["Driver"], request["DeviceIDs"], request["Count"]) == ("nvidia", list(CARDS), 0)
    inside = environment(
        launch("serve", image="vllm", cards=CARDS, environment={"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-0"})
    )
    assert inside["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert inside["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "NVIDIA_VISIBLE_DEVICES" not in inside, "the device request sets it"


def test_cdi_names_when_the_operator_prefers_them():
    body = container_config(launch("x", image="i", cards=CARDS), ContainerRules(cdi=True))
    (request,) = body["HostConfig"]["DeviceRequests"]
    assert request == {"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-2", "nvidia.com/gpu=GPU-0"]}


def test_a_demand_cannot_widen_what_it_sees():
    order = launch(
        "x",
        image="i",
        env={"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_VISIBLE_DEVICES": "7", "RIGBOOK_EPOCH": "1"},
    )
    inside = environment(order)
    assert inside["CUDA_VISIBLE_DEVICES"] == "0"
    assert "NVIDIA_VISIBLE_DEVICES" not in inside
    assert inside["RIGBOOK_EPOCH"] == "100"
    cpu_only = environment(launch("x", image="i", gpu=False, env={"NVIDIA_VISIBLE_DEVICES": "all"}))
    assert (cpu_only["NVIDIA_VISIBLE_DEVICES"], cpu_only["CUDA_VISIBLE_DEVICES"]) == ("none", "")


def test_a_cpu_only_part_asks_for_no_card_and_has_none_in_its_labels():
    order = launch("x", image="i", gpu=False)
    body = container_config(order, ContainerRules(shared_folders=("/sim",)))
    assert "DeviceRequests" not in body["HostConfig"]
    assert body["HostConfig"]["Mounts"] == []
    assert labels_of(order)["dev.rigbook.gpus"] == ""


def test_ports_and_mounts():
    order = launch(
        "x",
        image="i",
        ports=(Port(port=8000, host_port=80), Port(port=9000)),
        mounts=(Mount(source="/models/llama", target="/m", read_only=False),),
    )
    host = container_config(order, ContainerRules(mounts_allowed=("/models",)))["HostConfig"]
    assert host["PortBindings"] == {
        "8000/tcp": [{"HostIp": "", "HostPort": "80"}],
        "9000/tcp": [{"HostIp": "", "HostPort": ""}],
    }
    assert host["Mounts"] == [{"Type": "bind", "Source": "/models/llama", "Target": "/m", "ReadOnly": False}]


@pytest.mark.parametrize(
    "source", ["/", "/modelsx", "/models/../etc", "models", "/models/a/../../etc/passwd", ""]
)
def test_mounts_outside_the_allow_list_are_denied(source):
    order = launch("x", image="i", mounts=(Mount(source=source, target="/m"),))
    with pytest.raises(StartRefused) as refused:
        container_config(order, ContainerRules(mounts_allowed=("/models",)))
    assert refused.value.code == "mount_denied"


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("vllm/vllm-openai", "vllm/vllm-openai:latest"),
        ("registry:5000/model", "registry:5000/model:latest"),
        ("registry:5000/model:v1", "registry:5000/model:v1"),
        ("model@sha256:abc", "model@sha256:abc"),
    ],
)
def test_an_image_without_tag_is_the_latest_not_all(image, expected):
    assert image_reference(image) == expected


def test_names_tell_components_epochs_nodes_and_clusters_apart():
    orders = [
        launch(),
        launch(component="access"),
        launch(epoch=101),
        launch(node="node-b"),
        launch(cluster="other"),
    ]
    assert len({container_name(order) for order in orders}) == len(orders)


labels = st.dictionaries(
    st.sampled_from(
        ["dev.rigbook.cluster", "dev.rigbook.node", "dev.rigbook.epoch", "dev.rigbook.component", "x"]
    ),
    st.sampled_from(["test", "node-a", "other", "1", "-1", "١", "", "1e3"]),
)


@given(labels)
def test_what_is_ours_can_always_be_read(found):
    if ours(found, cluster="test", node="node-a"):
        shown = {"Id": "abc", "Config": {"Labels": found}, "State": {"Status": "exited", "ExitCode": 1}}
        running = running_of(shown, pids=(), stopped_by_us=False)
        assert (running.cluster, running.node) == ("test", "node-a")


state = st.fixed_dictionaries(
    {},
    optional={
        "Status": st.sampled_from(
            ["created", "running", "paused", "restarting", "removing", "exited", "dead"]
        ),
        "Running": st.booleans(),
        "Restarting": st.booleans(),
        "ExitCode": st.none() | st.integers(-1, 300),
        "OOMKilled": st.none() | st.booleans(),
        "StartedAt": st.sampled_from(["", "0001-01-01T00:00:00Z", "2026-01-01T00:00:00Z"]),
        "FinishedAt": st.sampled_from(["", "0001-01-01T00:00:00Z", "2026-01-01T00:00:00Z"]),
    },
)


@given(state, st.booleans())
def test_a_state_is_running_or_ended_never_both(found, stopped):
    shown = {"Id": "abc", "Config": {"Labels": labels_of(launch())}, "State": found}
    running = running_of(shown, pids=(7,), stopped_by_us=stopped)
    if running.running:
        assert (running.exit_code, running.ended, running.oom_killed) == (None, "", None)
        assert not running.stopped_by_us
    else:
        assert running.pids == ()
        assert running.stopped_by_us == stopped
    assert "0001" not in running.since + running.ended


@given(
    st.dictionaries(
        st.text(max_size=8), st.none() | st.lists(st.dictionaries(st.just("HostPort"), st.text()))
    )
)
def test_published_ports_are_read_or_the_answer_is_refused(ports):
    shown = {
        "Id": "abc",
        "Config": {"Labels": labels_of(launch())},
        "State": {},
        "NetworkSettings": {"Ports": ports},
    }
    with contextlib.suppress(ValueError, KeyError):
        running_of(shown, pids=(), stopped_by_us=False)

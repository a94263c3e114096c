"""Whose a foreign process is: from its cgroup to a name that an operator can ask."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigbook_nodeagent.strangers import BELONGS_LENGTH_MAX, Container, belongs, container_of

ID = "3f2a91c0ffee" + "0" * 52
POD = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"


@pytest.mark.parametrize(
    ("cgroups", "expected"),
    [
        (f"12:memory:/docker/{ID}\n0::/docker/{ID}\n", "container 3f2a91c0ffee"),
        (f"0::/system.slice/docker-{ID}.scope\n", "container 3f2a91c0ffee"),
        (f"0::/system.slice/docker-{ID}.scope/init\n", "container 3f2a91c0ffee"),
        (f"0::/machine.slice/libpod-{ID}.scope\n", "container 3f2a91c0ffee"),
        (f"4:memory:/kubepods/burstable/pod{POD}/{ID}\n", "Kubernetes pod web-7c9"),
        (
            f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD.replace('-', '_')}.slice/cri-containerd-{ID}.scope\n",
            "Kubernetes pod web-7c9",
        ),
        ("4:memory:/slurm/uid_1000/job_812/step_0\n", "Slurm 812 of user id 1000"),
        ("0::/system.slice/slurmstepd.scope/job_77/step_batch\n", "Slurm 77"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", "login session-3 of user id 1000"),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service\n",
            "unit jupyter.service",
        ),
        ("0::/system.slice/ollama.service\n", "unit ollama.service"),
        ("0::/\n", ""),
        ("", ""),
    ],
)
def test_a_cgroup_has_an_owner(cgroups: str, expected: str) -> None:
    assert belongs(cgroups, containers={}, hostname="web-7c9") == expected


def test_the_engine_knows_what_a_container_is_called() -> None:
    text = f"0::/docker/{ID}\n"

    def named(**labels: str) -> str:
        names = {key.replace("__", "."): value for key, value in labels.items()}
        return belongs(text, containers={ID: Container("web-1", names)})

    assert named() == "container web-1"
    compose = {"com.docker.compose.project": "rag", "com.docker.compose.service": "web"}
    assert belongs(text, containers={ID: Container("rag-web-1", compose)}) == (
        "compose project rag, service web (container rag-web-1)"
    )
    pod = {"io.kubernetes.pod.name": "train-0", "io.kubernetes.pod.namespace": "ml"}
    assert belongs(text, containers={ID: Container("k8s_x", pod)}) == "Kubernetes pod ml/train-0"
    other = {"dev.rigbook.cluster": "other", "dev.rigbook.demand": "d-1"}
    assert "Rigbook cluster other, demand d-1" in belongs(text, containers={ID: Container("x", other)})


@given(st.text(max_size=300), st.text(max_size=80))
def test_any_text_gives_a_bounded_answer(cgroups: str, hostname: str) -> None:
    assert len(belongs(cgroups, containers={}, hostname=hostname)) <= BELONGS_LENGTH_MAX
    assert len(container_of(cgroups)) in (0, 64)

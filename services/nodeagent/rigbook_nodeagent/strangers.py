"""Who a foreign process belongs to: from its cgroup to a container, compose project, pod, unit or session. Pure.

The cgroup names the container by id; what the container is called, and which compose project or pod it is of,
is what the Docker Engine says of it (`Container`), where one answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

__all__ = ["BELONGS_LENGTH_MAX", "Container", "belongs", "container_of", "container_text"]

BELONGS_LENGTH_MAX: Final = 160
_CONTAINER: Final = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?:/|$)")
_POD: Final = re.compile(r"/(?:[a-z-]*-)?pod([0-9a-f]{8}[-_][0-9a-f_-]{27})(?:\.slice)?(?:/|$)")
_SLURM: Final = re.compile(r"/slurm[^/]*/(?:uid_(\d{1,10})/)?job_(\d{1,12})(?:/|$)")
_SESSION: Final = re.compile(r"/user-(\d{1,10})\.slice/(?:.*/)?(session-[A-Za-z0-9]{1,20})\.scope")
_UNIT: Final = re.compile(r"/([^/]{1,120}\.(?:service|scope))(?=/|$)")


class Container(msgspec.Struct, frozen=True):
    """A container as its engine names it."""

    name: str
    labels: Mapping[str, str] = {}


def container_of(cgroups: str) -> str:
    """Id of the container whose cgroup this is (text of /proc/<pid>/cgroup); "" when it is of none."""
    for line in cgroups.splitlines():
        found = _CONTAINER.search(line.rpartition(":")[2])
        if found is not None:
            return found[1]
    return ""


def belongs(cgroups: str, *, containers: Mapping[str, Container], hostname: str = "") -> str:
    """In words, the most telling first; "" when its cgroup says nothing. `hostname`: of its environment."""
    paths = [line.rpartition(":")[2] for line in cgroups.splitlines()]
    identity = container_of(cgroups)
    known = containers.get(identity)
    if known is not None:
        return container_text(known)[:BELONGS_LENGTH_MAX]
    for path in paths:
        if found := _POD.search(path):
            pod = hostname or found[1].replace("_", "-")
            return f"Kubernetes pod {pod}"[:BELONGS_LENGTH_MAX]
    if identity:
        return f"container {identity[:12]}"
    for path in paths:
        if found := _SLURM.search(path):
            return f"Slurm {found[2]}{f' of user id {found[1]}' if found[1] else ''}"
        if found := _SESSION.search(path):
            return f"login {found[2]} of user id {found[1]}"
    for path in paths:
        if units := _UNIT.findall(path):
            return f"unit {units[-1]}"[:BELONGS_LENGTH_MAX]
    return ""


def container_text(container: Container) -> str:
    """`compose project rag, service web (container rag-web-1)`, `Kubernetes pod ml/train-0`, or its name."""
    labels = container.labels
    if pod := labels.get("io.kubernetes.pod.name"):
        return f"Kubernetes pod {labels.get('io.kubernetes.pod.namespace', 'default')}/{pod}"
    if project := labels.get("com.docker.compose.project"):
        service = labels.get("com.docker.compose.service", "")
        return f"compose project {project}{f', service {service}' if service else ''} (container {container.name})"
    if cluster := labels.get("dev.rigbook.cluster"):
        demand = labels.get("dev.rigbook.demand", "?")
        return f"Rigbook cluster {cluster}, demand {demand} (container {container.name})"
    return f"container {container.name}"

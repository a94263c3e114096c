"""Whose process is it? From a pid on a card to a binding of ours, or to a stranger with a name.

Ours: a pid that an engine lists, or one that carries our RIGBOOK_* environment (a process that left its
group keeps it). All else is foreign: counted, named, never touched.
"""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from rigbook_nodeagent.engines.procfs import CLUSTER, COMPONENT, DEMAND, EPOCH, NODE, environment_of, stat_of
from rigbook_nodeagent.strangers import belongs, container_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rigbook_schemas.values import CardObservation, ProcessObservation

    from rigbook_nodeagent.engines.protocol import Running
    from rigbook_nodeagent.strangers import Container

__all__ = ["Attribution"]

_PROC: Final = Path("/proc")
COMMAND_LENGTH_MAX: Final = 120
CGROUP_BYTES_MAX: Final = 16 * 1024
HOSTNAME: Final = "HOSTNAME"  # in a pod it is the pod's name


class _Identity(msgspec.Struct, frozen=True):
    start_ticks: int
    epoch: int | None
    demand: str
    component: str
    user: str
    command: str
    cgroups: str  # text of /proc/<pid>/cgroup
    hostname: str


class Attribution:
    """Attributes the processes of card samples. Remembers what it read of a pid while that pid lives."""

    def __init__(self, cluster: str, node: str) -> None:
        self._cluster = cluster
        self._node = node
        self._known: dict[int, _Identity] = {}
        self._containers: Mapping[str, Container] = {}

    def know_containers(self, containers: Mapping[str, Container]) -> None:
        """All containers of this machine, by id; the engine says what they are called."""
        self._containers = containers

    def attribute(
        self, cards: Sequence[CardObservation], running: Iterable[Running]
    ) -> tuple[CardObservation, ...]:
        """The same observations, each process with its binding, user and command filled in."""
        by_pid = {pid: r for r in running for pid in r.pids}
        seen: set[int] = set()
        told: list[CardObservation] = []
        for card in cards:
            if card.processes is None:
                told.append(card)
                continue
            processes = tuple(self._one(p, by_pid) for p in card.processes)
            seen.update(p.pid for p in processes)
            told.append(msgspec.structs.replace(card, processes=processes))
        for pid in self._known.keys() - seen:
            del self._known[pid]
        return tuple(told)

    def _one(self, process: ProcessObservation, by_pid: Mapping[int, Running]) -> ProcessObservation:
        identity = self._identify(process.pid)
        ours = by_pid.get(process.pid)
        foreign = ours is None and identity is not None and identity.epoch is None
        return msgspec.structs.replace(
            process,
            epoch=ours.epoch if ours else identity.epoch if identity else None,
            demand=ours.demand if ours else identity.demand if identity else "",
            component=ours.component if ours else identity.component if identity else "",
            container=ours.ref
            if ours and not ours.ref.startswith("pid:")
            else (container_of(identity.cgroups) if identity else "") or process.container,
            belongs=belongs(identity.cgroups, containers=self._containers, hostname=identity.hostname)
            if foreign and identity is not None
            else "",
            user=identity.user if identity else process.user,
            command=(identity.command if identity else "") or process.command,
        )

    def _identify(self, pid: int) -> _Identity | None:
        """None when the process is gone or may not be read; a reused pid is noticed by its start time."""
        stat = stat_of(pid)
        if stat is None:
            return None
        start = stat.start_ticks
        known = self._known.get(pid)
        if known is not None and known.start_ticks == start:
            return known
        environ = _environ(pid)
        mine = environ.get(CLUSTER) == self._cluster and environ.get(NODE) == self._node
        epoch = environ.get(EPOCH, "") if mine else ""
        identity = _Identity(
            start_ticks=start,
            epoch=int(epoch) if epoch.isdigit() else None,
            demand=environ.get(DEMAND, "") if mine else "",
            component=environ.get(COMPONENT, "") if mine else "",
            user=_user(pid),
            command=_command(pid),
            cgroups=_cgroups(pid),
            hostname=environ.get(HOSTNAME, ""),
        )
        self._known[pid] = identity
        return identity


def _environ(pid: int) -> dict[str, str]:
    try:
        raw = environment_of(pid)
    except OSError:
        return {}
    pairs = (
        item.partition(b"=") for item in raw.split(b"\0") if item.startswith((b"RIGBOOK_", b"HOSTNAME="))
    )
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def _cgroups(pid: int) -> str:
    try:
        with (_PROC / str(pid) / "cgroup").open("rb") as file:
            return file.read(CGROUP_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return ""


def _user(pid: int) -> str:
    try:
        uid = (_PROC / str(pid)).stat().st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _command(pid: int) -> str:
    """Program and sub-command only: arguments may hold secrets, and they would go onto the bus."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    shown = [w.decode(errors="replace") for w in words[:3] if w]
    return " ".join(
        shown[:1]
        + [w for w in shown[1:] if w.startswith("-m") or "/" in w or w.replace(".", "").isidentifier()]
    )[:COMMAND_LENGTH_MAX]

"""What the agent asks of an engine that runs components: start, stop, and what runs.

Implementations: `process` (plain processes, own process group and cgroup where it can) and `docker`
(Docker Engine API). An engine keeps no truth of its own: after a restart `inventory` finds what runs,
by label (containers) or by records checked against /proc (processes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec
from rigbook_schemas.values import Component, Engine, Port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rigbook_schemas.values import StopScope

    from rigbook_nodeagent.strangers import Container

__all__ = ["LABEL_PREFIX", "Ended", "EngineError", "Engines", "Launch", "Running", "StartRefused"]

LABEL_PREFIX = "dev.rigbook."  # cluster, node, demand, epoch, project, owner, gpus, spec, component


class EngineError(Exception):
    """The engine did not answer (socket away, time-out). What runs is unknown, not absent."""

    code = "engine_unavailable"


class StartRefused(Exception):
    """The engine says no to this component; trying the same again will not help.

    `code`: runtime_missing, image_pull, start_failed, mount_denied, port_taken, no_such_program.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine needs to start one component."""

    cluster: str
    node: str
    demand: str
    epoch: int
    project: str
    owner: str
    component: Component
    cards: tuple[str, ...]  # UUIDs, in the order the program shall see them; empty for CPU-only parts
    indices: tuple[int, ...]
    memory_bytes: int  # allotted on each card
    card_memory_bytes: int  # of the smallest card, for engines that want a share
    environment: Mapping[str, str]  # from the Gpus driver, plus RIGBOOK_* of the agent
    traceparent: str = ""
    cuda_version: str = ""  # the newest that the node's driver runs
    driver_version: str = ""


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A component the engine shows, running or ended and not yet removed."""

    cluster: str
    node: str
    demand: str
    epoch: int
    component: str
    engine: Engine
    ref: str  # container id, or `pid:<pid>@<start ticks>`
    running: bool
    pids: tuple[int, ...] = ()  # every process of it that can be found: group, cgroup, environment
    since: str = ""
    cards: tuple[str, ...] = ()
    ports: tuple[Port, ...] = ()  # where the engine published them; the process engine publishes none
    exit_code: int | None = None
    signal: int | None = None
    ended: str = ""
    stopped_by_us: bool = False  # an order to stop was recorded before the end
    oom_killed: bool | None = None
    cgroup: str = ""  # folder of its memory cgroup, where the engine made one
    address: str = ""  # where its own ports can be reached, when it has a network of its own
    image: str = ""  # id of the image it runs
    warning: str = ""  # what may go wrong with it, known before its start
    replaced: str = ""  # this is not what was started for the epoch: somebody put it in its place
    image_changed: bool = False  # and it is of another image
    other_boot: bool = False  # it was started before this machine was last started
    killed_by_others: str = ""  # a stop or kill through the engine that did not come from us


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """Hint that something ended or is in distress; `inventory` is the truth."""

    epoch: int
    component: str
    ref: str


class Engines(Protocol):
    """One engine of one node."""

    @property
    def kind(self) -> Engine: ...

    @property
    def facts(self) -> str:
        """What this machine lets the engine do, in one line for the operator."""
        ...

    async def open(self) -> None:
        """Raises EngineError with the remedy when the engine cannot be used."""
        ...

    async def start(self, launch: Launch) -> Running:
        """Start one component; idempotent by (cluster, node, epoch, component): an existing one is returned.

        Raises StartRefused, EngineError.
        """
        ...

    async def stop(self, running: Running, *, grace_seconds: float, scope: StopScope) -> None:
        """Ask it to end (SIGTERM), wait up to the grace, then insist (SIGKILL). Returns when the engine
        shows it ended, or raises EngineError. With scope `everything` also processes that left the
        component's group (found by cgroup or by RIGBOOK_EPOCH in their environment).
        """
        ...

    async def signal(self, running: Running, name: str) -> None:
        """Send a signal (`SIGUSR1`) to its main process, and wait for nothing. Gone already is no error.

        Raises EngineError.
        """
        ...

    async def execute(self, running: Running, command: tuple[str, ...]) -> int:
        """Run a command beside it, in its own environment; the exit code. Raises EngineError."""
        ...

    async def inventory(self) -> Sequence[Running]:
        """Everything of this cluster and node, running or ended-but-not-removed. Others' are never listed.

        Raises EngineError: unknown, which is not the same as nothing.
        """
        ...

    async def containers(self) -> Mapping[str, Container]:
        """Every running container of the machine by id, also of others: only to be named. Raises EngineError."""
        ...

    async def inspect(self, epoch: int, component: str) -> Running | None:
        """One component as `inventory` would show it; None when there is nothing of it.

        Raises EngineError: unknown, which is not the same as None.
        """
        ...

    async def remove(self, running: Running) -> None:
        """Forget an ended component (after its end was published). Idempotent.

        Raises EngineError while a process of it lives. A container's output goes with it; a process's
        stays readable for a while.
        """
        ...

    def ends(self) -> AsyncIterator[Ended]:
        """Hints, at once when something ends. One reader at a time."""
        ...

    def logs(self, running: Running, *, follow: bool, lines_max: int) -> AsyncIterator[bytes]:
        """The last lines (newline included); with `follow` also later ones, until it has ended."""
        ...

    async def close(self) -> None: ...

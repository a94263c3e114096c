"""One component as a process: what is known of it, the environment it gets, and why it may not start."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from rigbook_schemas.values import Engine

from rigbook_nodeagent.engines import output, records
from rigbook_nodeagent.engines.procfs import CLUSTER, COMPONENT, DEMAND, EPOCH, NODE, Stat, stat_of
from rigbook_nodeagent.engines.protocol import EngineError, Launch, Running, StartRefused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rigbook_nodeagent.engines.cgroups import Cgroups
    from rigbook_nodeagent.engines.procfs import Tagged

__all__ = ["ComponentProcess", "program_environment", "spawn", "stray"]

# What a program may inherit from the agent: where programs and libraries are, who we are, which language.
# Everything else (credentials of the bus among it) stays with the agent.
INHERITED: Final = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
)
PATH_DEFAULT: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SIGNALLED: Final = 128  # a shell's and Docker's way to tell a signal in an exit code


class ComponentProcess:
    """A component that was started, running or ended and not yet removed."""

    __slots__ = (
        "child",
        "end",
        "ended_at",
        "folder",
        "intent",
        "memory_cgroup",
        "other_boot",
        "pidfd",
        "settled",
        "spawned",
        "stat",
        "stop_ordered",
    )

    def __init__(
        self,
        *,
        folder: Path,
        intent: records.Intent,
        spawned: records.Spawned | None,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.folder = folder
        self.intent = intent
        self.spawned = spawned
        self.child = child  # None: adopted, somebody else is its parent
        self.stat: Stat | None = None  # right after its start, when we started it
        self.pidfd: int | None = None
        self.stop_ordered: records.StopOrdered | None = None
        self.ended_at: float | None = None  # monotonic: when its end was noticed
        self.end: records.EndSeen | None = None
        self.settled = asyncio.Event()
        self.other_boot = False
        self.memory_cgroup = ""  # its folder, where one counts its memory

    @classmethod
    def adopted(cls, folder: Path, record: records.Record, *, boot: str) -> ComponentProcess:
        """From its record; of an earlier boot nothing can run, whatever has its pid now."""
        process = cls(
            folder=folder,
            intent=record.intent,
            spawned=record.spawned if record.intent.boot == boot else None,
        )
        process.stop_ordered = record.stop_ordered
        process.end = record.end
        process.other_boot = record.intent.boot != boot
        return process

    @property
    def key(self) -> tuple[int, str]:
        return self.intent.epoch, self.intent.component

    @property
    def pid(self) -> int:
        """Of the main process, 0 when it was never known."""
        return self.spawned.pid if self.spawned else 0

    @property
    def ref(self) -> str:
        return f"pid:{self.pid}@{self.spawned.start_ticks if self.spawned else 0}"

    @property
    def main_runs(self) -> bool:
        """Does the very process that was started live, and not another one with its pid?"""
        if self.end is not None or self.spawned is None:
            return False
        stat = stat_of(self.spawned.pid)
        return stat is not None and stat.alive and stat.start_ticks == self.spawned.start_ticks

    def running(self, *, cluster: str, node: str, pids: Sequence[int]) -> Running:
        returncode = self.end.returncode if self.end else None
        exit_code, number = returncode, None
        if returncode is not None and returncode < 0:
            exit_code, number = SIGNALLED - returncode, -returncode
        return Running(
            cluster=cluster,
            node=node,
            demand=self.intent.demand,
            epoch=self.intent.epoch,
            component=self.intent.component,
            engine=Engine.PROCESS,
            ref=self.ref,
            running=self.end is None,
            pids=tuple(pids),
            since=self.intent.since,
            cards=self.intent.cards,
            exit_code=exit_code,
            signal=number,
            ended=self.end.at if self.end else "",
            stopped_by_us=self.end is not None and self.stop_ordered is not None,
            oom_killed=self.end.oom_killed if self.end else None,
            cgroup=self.memory_cgroup,
            other_boot=self.other_boot,
        )


def stray(found: Sequence[Tagged], *, cluster: str, node: str) -> Running:
    """Processes of ours without a record: nothing to wait for, but there to be seen and stopped."""
    oldest = min(found, key=lambda one: one.stat.start_ticks)
    return Running(
        cluster=cluster,
        node=node,
        demand=oldest.demand,
        epoch=oldest.epoch,
        component=oldest.component,
        engine=Engine.PROCESS,
        ref=f"pid:{oldest.pid}@{oldest.stat.start_ticks}",
        running=False,
        pids=tuple(sorted(one.pid for one in found)),
    )


def spawn(
    launch: Launch,
    folder: Path,
    *,
    cgroups: Cgroups,
    boot: str,
    since: str,
    inherited: Mapping[str, str] | None = None,
) -> ComponentProcess:
    """Start the program, with its record written around it. About 0.5 ms.

    Raises StartRefused, and EngineError for what may work later (folder, memory, number of processes).
    """
    _refuse_unfit(launch)
    component = launch.component
    environment = program_environment(launch, inherited)
    paths: tuple[str, ...] = ()
    try:
        for path in (folder, folder / "files"):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
        paths = cgroups.create(f"{launch.epoch}-{component.name}", memory_bytes=component.memory_bytes)
        intent = records.Intent(
            demand=launch.demand,
            epoch=launch.epoch,
            component=component.name,
            boot=boot,
            since=since,
            cards=launch.cards,
            cgroups=paths,
        )
        records.append(folder / "record", intent)
        log = output.open_for_append(folder / "output.log")
    except OSError as error:
        cgroups.remove(paths)
        raise EngineError(f"cannot prepare {component.name}: {error}") from error
    try:
        with cgroups.inside(paths):
            child = subprocess.Popen(
                component.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder / "files",
                env=environment,
                start_new_session=True,
                close_fds=True,
            )
    except (OSError, ValueError) as error:
        records.append(folder / "record", records.Removed())
        cgroups.remove(paths)
        raise _start_failure(launch, environment, error) from error
    finally:
        os.close(log)
    stat = stat_of(child.pid)  # a zombie has one too, and it stays a zombie until we reap it
    spawned = records.Spawned(pid=child.pid, start_ticks=stat.start_ticks if stat else 0)
    with contextlib.suppress(OSError):  # a full disk: the intent is there, and the environment names it
        records.append(folder / "record", spawned)
    process = ComponentProcess(folder=folder, intent=intent, spawned=spawned, child=child)
    process.stat = stat
    return process


def program_environment(launch: Launch, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the program gets. Later ones win: the agent's own, the component's, the cards', whose it is."""
    if inherited is None:
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    environment = {
        **inherited,
        "PATH": program_path(inherited.get("PATH", PATH_DEFAULT)),
        **launch.component.env,
        **launch.environment,
        CLUSTER: launch.cluster,
        NODE: launch.node,
        DEMAND: launch.demand,
        EPOCH: str(launch.epoch),
        COMPONENT: launch.component.name,
    }
    if launch.traceparent:
        environment["TRACEPARENT"] = launch.traceparent
    return environment


def program_path(given: str) -> str:
    """The agent's own PATH, and where its own programs are at the end: they are found, and shadow nobody's."""
    own = os.path.dirname(sys.executable)  # noqa: PTH120 - on the path of every start
    return given if own in given.split(os.pathsep) else f"{given}{os.pathsep}{own}"


def _refuse_unfit(launch: Launch) -> None:
    """Raises StartRefused for what a plain process cannot have."""
    component = launch.component
    if component.image:
        raise StartRefused(
            "start_failed", f"{component.name} has an image; the process engine runs commands only"
        )
    if not component.command:
        raise StartRefused("no_such_program", f"{component.name} has no command")
    if component.mounts:
        raise StartRefused(
            "mount_denied",
            f"{component.name} asks for mounts; a plain process sees the node's own files, use their paths",
        )


def _start_failure(launch: Launch, environment: Mapping[str, str], error: Exception) -> Exception:
    """What an operator should read when the program could not be started."""
    name, program = launch.component.name, launch.component.command[0]
    number = error.errno if isinstance(error, OSError) else None
    if number in {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}:
        return EngineError(f"cannot start {name}: {error}; the machine is out of processes, memory or files")
    if number in {errno.ENOENT, errno.ENOTDIR}:
        where = "it is a path" if "/" in program else f"looked in PATH={environment.get('PATH', '')}"
        return StartRefused("no_such_program", f"{name}: no program {program!r} ({where})")
    if number == errno.EACCES:
        return StartRefused("no_such_program", f"{name}: {program!r} is not executable by this user")
    if number == errno.ENOEXEC:
        return StartRefused(
            "start_failed", f"{name}: {program!r} is not a program for this machine (no #! line?)"
        )
    return StartRefused("start_failed", f"{name}: {error}")

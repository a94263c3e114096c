"""Components as plain processes: own session, own cgroup where the machine allows, no container.

    <directory>/<epoch>-<component>/record       what must survive a restart of the agent (see `records`)
    <directory>/<epoch>-<component>/output.log   standard output and error, bounded
    <directory>/<epoch>-<component>/files/       its working directory; files in it are never removed by us

Every process carries RIGBOOK_CLUSTER, _NODE, _DEMAND, _EPOCH and _COMPONENT in its environment. By these,
its cgroup and its process group it is found again, also when it has left its parent.

The agent may be killed and started again: the processes live on, and are adopted by record, pid and start
time. The exit code of a component that ended while no agent watched is unknown (None), and stays so. Of
one that was adopted and ended later it is known on Linux 6.15 and newer, else None.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import fcntl
import os
import platform
import signal
import time
from typing import TYPE_CHECKING, Final

import structlog
from rigbook_schemas.values import Engine, StopScope
from rigbook_schemas.wire import rfc3339

from rigbook_nodeagent.engines import output, records
from rigbook_nodeagent.engines.cgroups import Cgroups
from rigbook_nodeagent.engines.component_process import ComponentProcess, spawn, stray
from rigbook_nodeagent.engines.pidfds import exit_returncode, open_pidfd, tells_exit
from rigbook_nodeagent.engines.procfs import (
    ProcessTable,
    Stat,
    Tagged,
    boot_id,
    environment_of,
    send_signal,
    stat_of,
)
from rigbook_nodeagent.engines.protocol import Ended, EngineError, Launch, Running, StartRefused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from rigbook_nodeagent.strangers import Container

__all__ = ["ProcessEngine"]

LOG_BYTES_MAX: Final = 16 * 1024**2  # twice this on disk, with the older half
REMOVED_KEPT_MAX: Final = 256  # outputs of removed components kept for `logs`
HINTS_MAX: Final = 10_000  # hints nobody read; inventory is the truth
TEND_SECONDS: Final = 2.0
REAP_POLL_SECONDS: Final = 0.005
ADOPTED_EXIT_WAIT_SECONDS: Final = 3.0  # for its parent to reap it, which is when the exit code can be read
INSIST_SECONDS: Final = 5.0  # from SIGKILL to giving up: longer means the kernel holds it (state D)
GONE_POLL_SECONDS: Final = 0.01
GONE_POLL_SECONDS_MAX: Final = 0.1

_log = structlog.stdlib.get_logger(__name__)


class ProcessEngine:
    """Process engine of one node. `directory` is its own; a second engine on it is refused.

    `environment` is what programs get of the agent's own (default: PATH, HOME, LANG and such, see
    `component_process`). `cgroups=None` finds out by itself; `now_ns` is the wall clock.
    """

    def __init__(
        self,
        directory: Path,
        *,
        cluster: str,
        node: str,
        environment: Mapping[str, str] | None = None,
        cgroups: Cgroups | None = None,
        log_bytes_max: int = LOG_BYTES_MAX,
        removed_kept_max: int = REMOVED_KEPT_MAX,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._directory = directory.absolute()
        self._cluster = cluster
        self._node = node
        self._environment = environment
        self._cgroups = cgroups
        self._log_bytes_max = log_bytes_max
        self._removed_kept_max = removed_kept_max
        self._now_ns = now_ns
        self._boot = boot_id()
        self._tells_exit = tells_exit(platform.release())
        self._table = ProcessTable(cluster, node)
        self._processes: dict[tuple[int, str], ComponentProcess] = {}
        self._removed: dict[Path, None] = {}  # oldest first
        self._hints: collections.deque[Ended] = collections.deque(maxlen=HINTS_MAX)
        self._hinted = asyncio.Event()
        self._moves: set[asyncio.Task[None]] = set()
        self._tender: asyncio.Task[None] | None = None
        self._lock = -1

    @property
    def kind(self) -> Engine:
        return Engine.PROCESS

    @property
    def facts(self) -> str:
        """What this machine lets us do, in one line."""
        cgroup = self._cgroups.fact if self._cgroups else "not opened"
        exits = "known" if self._tells_exit else "unknown (Linux before 6.15)"
        return f"own session per component; {cgroup}; exit codes after adoption {exits}"

    async def open(self) -> None:
        """Adopt what runs. Raises EngineError when the folder is taken or cannot be used."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise EngineError(
                f"another agent uses {self._directory}: stop it, or give this one its own folder"
            ) from None
        except OSError as error:
            raise EngineError(f"folder of the process engine: {error}") from error
        if self._cgroups is None:
            self._cgroups = Cgroups(f"rigbook-{self._cluster}-{self._node}")
        self._adopt_all()
        self._tender = asyncio.create_task(self._tend(), name="process-engine")

    async def start(self, launch: Launch) -> Running:
        key = (launch.epoch, launch.component.name)
        known = self._processes.get(key)
        if known is not None:
            return self._running(known, [known.pid] if known.main_runs else [])
        process = self._spawn(launch)
        assert self._cgroups is not None
        process.memory_cgroup = self._cgroups.memory_folder(process.intent.cgroups)
        self._removed.pop(process.folder, None)  # started again after its removal
        self._processes[key] = process
        self._watch(process)
        if process.stat is not None:
            self._table.learn(Tagged(process.pid, process.stat, launch.demand, *key))
        return self._running(process, [process.pid])  # it may have ended meanwhile; its end is not seen yet

    async def stop(self, running: Running, *, grace_seconds: float, scope: StopScope) -> None:
        process = self._processes.get(_key(running))
        if process is not None and process.end is None and process.stop_ordered is None:
            process.stop_ordered = records.StopOrdered(at=self._now())
            self._remember(process, process.stop_ordered)
        if self._moves:
            await asyncio.wait(self._moves)  # v2: its processes may still be on the way into the cgroup
        self._signal(running, scope, signal.SIGTERM)
        if await self._gone(running, scope, grace_seconds):
            return
        deadline = time.monotonic() + INSIST_SECONDS
        while time.monotonic() < deadline:  # again and again: it may fork while it is killed
            if scope is StopScope.EVERYTHING and process is not None and self._cgroups is not None:
                self._cgroups.kill(process.intent.cgroups)
            self._signal(running, scope, signal.SIGKILL)
            if await self._gone(running, scope, GONE_POLL_SECONDS_MAX):
                return
        left = self._targets(running, scope)
        raise EngineError(
            f"{running.component} of epoch {running.epoch} does not end after SIGKILL: "
            + ", ".join(f"pid {pid} (state {stat.state})" for pid, stat in left.items())
            + "; state D is held by the kernel or a driver: reboot the node"
        )

    async def signal(self, running: Running, name: str) -> None:
        """To the main process alone: what it started is its own business, as in a container."""
        process = self._processes.get(_key(running))
        if process is None or process.spawned is None or not process.main_runs:
            return
        try:
            send_signal(process.pid, process.spawned.start_ticks, signal.Signals[name])
        except (KeyError, PermissionError) as error:
            raise EngineError(f"no {name} to {running.component}: {error}") from error

    async def execute(self, running: Running, command: tuple[str, ...]) -> int:
        """With the environment of its main process, which has its own PATH and cards in it."""
        process = self._processes.get(_key(running))
        if process is None or not process.main_runs or not command:
            raise EngineError(f"{running.component} of epoch {running.epoch} does not run")
        try:
            raw = environment_of(process.pid)
            pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
            child = await asyncio.create_subprocess_exec(
                *command,
                cwd=process.folder / "files",
                env={os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
        except (OSError, ValueError) as error:
            raise EngineError(f"cannot run {command[0]!r}: {error}") from error
        try:
            return await child.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
            raise

    async def inventory(self) -> Sequence[Running]:
        tagged = self._scan()
        listed = [
            self._running(process, self._found(process, tagged)) for process in self._processes.values()
        ]
        strays: dict[tuple[int, str], list[Tagged]] = {}
        for one in tagged:
            if (one.epoch, one.component) not in self._processes:
                strays.setdefault((one.epoch, one.component), []).append(one)
        listed.extend(stray(found, cluster=self._cluster, node=self._node) for found in strays.values())
        return listed

    async def containers(self) -> Mapping[str, Container]:
        return {}

    async def inspect(self, epoch: int, component: str) -> Running | None:
        process = self._processes.get((epoch, component))
        strays = self._scan((epoch, component))
        if process is not None:
            return self._running(process, self._found(process, strays))
        return stray(strays, cluster=self._cluster, node=self._node) if strays else None

    async def remove(self, running: Running) -> None:
        """Raises EngineError while a process of it lives: forgetting it would hide it."""
        process = self._processes.get(_key(running))
        if process is None:
            return
        # On v1 the cgroup holds all from the first instruction; one that left it by force is found later, as
        # a stray. On v2 something may have been forked before the program was moved into it.
        whole = process.intent.cgroups and self._cgroups is not None and self._cgroups.kind == "v1"
        tagged = () if whole else self._scan(process.key)
        if left := self._found(process, tagged):
            raise EngineError(
                f"{running.component} of epoch {running.epoch} still has processes: {sorted(left)}"
            )
        self._remember(process, records.Removed())
        if self._cgroups is not None:
            self._cgroups.remove(process.intent.cgroups)
        del self._processes[process.key]
        self._retire(process.folder)

    async def ends(self) -> AsyncIterator[Ended]:
        """One reader at a time."""
        while True:
            while self._hints:
                yield self._hints.popleft()
            self._hinted.clear()
            await self._hinted.wait()

    async def logs(self, running: Running, *, follow: bool, lines_max: int) -> AsyncIterator[bytes]:
        key = _key(running)
        path = self._folder(*key) / "output.log"
        lines, position = output.tail(path, lines_max)
        if follow and lines and not lines[-1].endswith(b"\n"):
            position -= len(lines.pop())  # it is being written: told when it is whole
        for line in lines:
            yield line
        if follow:
            process = self._processes.get(key)
            async for line in output.follow(
                path, position, lambda: process is None or process.end is not None
            ):
                yield line

    async def close(self) -> None:
        """Let go. What runs goes on running; the next engine on this folder adopts it."""
        if self._tender is not None:
            self._tender.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tender
            self._tender = None
        if self._moves:
            await asyncio.wait(self._moves)
        _purge(self._too_many())
        for process in self._processes.values():
            self._unwatch(process)
            if process.child is not None and process.child.returncode is None:
                process.child.returncode = 0  # else subprocess warns of a child left running, which is meant
        if self._cgroups is not None:
            self._cgroups.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- starting ---------------------------------------------------------------------------------

    def _spawn(self, launch: Launch) -> ComponentProcess:
        assert self._cgroups is not None, "open() first"
        folder = self._folder(launch.epoch, launch.component.name)
        try:
            process = spawn(
                launch,
                folder,
                cgroups=self._cgroups,
                boot=self._boot,
                since=self._now(),
                inherited=self._environment,
            )
        except (EngineError, StartRefused):
            if folder.exists():
                self._retire(folder)
            raise
        if self._cgroups.kind == "v2":
            move = asyncio.create_task(
                asyncio.to_thread(self._cgroups.adopt, process.intent.cgroups, process.pid)
            )
            self._moves.add(move)
            move.add_done_callback(self._moves.discard)
        if launch.component.memory_bytes and not self._cgroups.memory_limits:
            _log.warning(
                "memory_limit_not_enforced",
                demand=launch.demand,
                epoch=launch.epoch,
                component=launch.component.name,
                why=self._cgroups.fact,
            )
        return process

    def _adopt_all(self) -> None:
        """Read the records; find again what runs, and close what ended while nobody watched."""
        kept: list[tuple[float, Path]] = []
        by_session = {one.pid: one for one in self._scan() if one.pid == one.stat.session}
        for folder in self._directory.iterdir():
            record = records.read(folder / "record")
            if record is None:
                continue
            if record.removed:
                kept.append((folder.stat().st_mtime, folder))
                continue
            if record.spawned is None and record.end is None:
                # Killed between the start of the program and its record: its environment names it.
                record.spawned = next(
                    (
                        records.Spawned(pid=one.pid, start_ticks=one.stat.start_ticks)
                        for one in by_session.values()
                        if (one.epoch, one.component) == (record.intent.epoch, record.intent.component)
                    ),
                    None,
                )
            process = ComponentProcess.adopted(folder, record, boot=self._boot)
            if self._cgroups is not None:
                process.memory_cgroup = self._cgroups.memory_folder(process.intent.cgroups)
            self._processes[process.key] = process
            if process.main_runs:
                self._watch(process)
            elif process.end is None:
                process.end = records.EndSeen(at="", oom_killed=self._oom_killed(process))
                self._remember(process, process.end)
        if self._cgroups is not None:
            self._cgroups.sweep({f"{epoch}-{component}" for epoch, component in self._processes})
        for _, folder in sorted(kept, key=lambda item: item[0]):
            self._retire(folder)

    # -- watching ---------------------------------------------------------------------------------

    def _watch(self, process: ComponentProcess) -> None:
        process.pidfd = open_pidfd(process.pid)
        if process.pidfd is not None:
            asyncio.get_running_loop().add_reader(process.pidfd, self._readable, process)
        # else the tender looks every two seconds

    def _unwatch(self, process: ComponentProcess) -> None:
        if process.pidfd is not None:
            asyncio.get_running_loop().remove_reader(process.pidfd)
            os.close(process.pidfd)
            process.pidfd = None

    def _readable(self, process: ComponentProcess) -> None:
        """The main process has ended. Settle it as soon as its exit code can be told, or never will be."""
        if process.pidfd is not None:
            asyncio.get_running_loop().remove_reader(process.pidfd)
        if process.end is not None or self._lock < 0:
            return
        if process.ended_at is None:
            process.ended_at = time.monotonic()
        if process.child is not None:
            returncode = process.child.poll()
            patient = True
        else:
            returncode = (
                exit_returncode(process.pidfd) if process.pidfd is not None and self._tells_exit else None
            )
            waited = time.monotonic() - process.ended_at
            patient = (
                self._tells_exit
                and process.pidfd is not None
                and process.stop_ordered is None
                and waited < ADOPTED_EXIT_WAIT_SECONDS
            )
        if returncode is None and patient:
            asyncio.get_running_loop().call_later(REAP_POLL_SECONDS, self._readable, process)
            return
        self._unwatch(process)
        process.end = records.EndSeen(
            at=self._now(), returncode=returncode, oom_killed=self._oom_killed(process)
        )
        self._remember(process, process.end)
        process.settled.set()
        self._hints.append(Ended(epoch=process.key[0], component=process.key[1], ref=process.ref))
        self._hinted.set()

    async def _tend(self) -> None:
        """Keep outputs bounded, and look after processes that have no handle."""
        while True:
            await asyncio.sleep(TEND_SECONDS)
            if excess := self._too_many():
                await asyncio.to_thread(_purge, excess)
            for process in list(self._processes.values()):
                if process.end is None and process.pidfd is None and not process.main_runs:
                    self._readable(process)
                path = process.folder / "output.log"
                with contextlib.suppress(OSError):
                    if path.stat().st_size > self._log_bytes_max:
                        await asyncio.to_thread(output.trim, path, bytes_max=self._log_bytes_max)

    # -- finding and stopping ---------------------------------------------------------------------

    def _scan(self, only: tuple[int, str] | None = None) -> list[Tagged]:
        try:
            return self._table.scan(only)
        except OSError as error:
            raise EngineError(f"/proc cannot be read: {error}") from error

    def _found(self, process: ComponentProcess, tagged: Sequence[Tagged]) -> dict[int, Stat]:
        """Every living process of a component: main, cgroup, environment."""
        found = {one.pid: one.stat for one in tagged if (one.epoch, one.component) == process.key}
        pids = [process.pid] if process.main_runs else []
        if self._cgroups is not None:
            pids.extend(self._cgroups.pids(process.intent.cgroups))
        for pid in pids:
            if pid not in found and (stat := stat_of(pid)) is not None and stat.alive:
                found[pid] = stat
        return found

    def _targets(self, running: Running, scope: StopScope) -> dict[int, Stat]:
        """What a stop of this scope reaches now."""
        process = self._processes.get(_key(running))
        tagged = self._scan(_key(running))
        found = {one.pid: one.stat for one in tagged} if process is None else self._found(process, tagged)
        if scope is StopScope.EVERYTHING:
            return found
        group = process.pid if process is not None else 0
        return {pid: stat for pid, stat in found.items() if stat.group == group}

    def _signal(self, running: Running, scope: StopScope, number: int) -> None:
        process = self._processes.get(_key(running))
        group = 0
        try:
            if process is not None and process.main_runs:
                group = process.pid  # at once, so that nothing in it forks away between two signals
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, number)
            for pid, stat in self._targets(running, scope).items():
                if stat.group != group:
                    send_signal(pid, stat.start_ticks, number)
        except PermissionError as error:
            raise EngineError(f"not allowed to signal {running.component}: {error}") from error

    async def _gone(self, running: Running, scope: StopScope, seconds: float) -> bool:
        """Wait until nothing in scope lives and the end of the main process is settled."""
        deadline = time.monotonic() + seconds
        process = self._processes.get(_key(running))
        if process is not None and process.end is None:
            try:
                await asyncio.wait_for(process.settled.wait(), seconds)
            except TimeoutError:
                return False
        pause = GONE_POLL_SECONDS
        while self._targets(running, scope):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * 1.5, GONE_POLL_SECONDS_MAX)
        return True

    # -- bookkeeping ------------------------------------------------------------------------------

    def _running(self, process: ComponentProcess, pids: Iterable[int]) -> Running:
        return process.running(cluster=self._cluster, node=self._node, pids=sorted(pids))

    def _oom_killed(self, process: ComponentProcess) -> bool | None:
        kills = self._cgroups.oom_kills(process.intent.cgroups) if self._cgroups is not None else None
        return None if kills is None else kills > 0

    def _remember(self, process: ComponentProcess, entry: records.Entry) -> None:
        try:
            records.append(process.folder / "record", entry)
        except OSError as error:  # a full disk must not keep us from stopping things
            _log.error("record_not_written", epoch=process.key[0], component=process.key[1], why=str(error))

    def _retire(self, folder: Path) -> None:
        """Keep the output for a while (see `_purge`)."""
        self._removed.pop(folder, None)
        self._removed[folder] = None

    def _too_many(self) -> list[Path]:
        """Take the oldest removed components beyond the limit off the list."""
        excess = list(self._removed)[: max(0, len(self._removed) - self._removed_kept_max)]
        for folder in excess:
            del self._removed[folder]
        return excess

    def _folder(self, epoch: int, component: str) -> Path:
        return self._directory / f"{epoch}-{component}"

    def _now(self) -> str:
        return rfc3339(self._now_ns())


def _purge(folders: Sequence[Path]) -> None:
    """Remove what we wrote; files the program left stay, and so does their folder."""
    for folder in folders:
        with contextlib.suppress(OSError):
            for name in ("record", "output.log", "output.log.1"):
                (folder / name).unlink(missing_ok=True)
            (folder / "files").rmdir()
            folder.rmdir()


def _key(running: Running) -> tuple[int, str]:
    return running.epoch, running.component

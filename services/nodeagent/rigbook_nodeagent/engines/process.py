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
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Final

import structlog

from rigbook_nodeagent.engines import output, records
from rigbook_nodeagent.engines.cgroups import Cgroups
from rigbook_nodeagent.engines.parts import Part, part_environment, start_refusal
from rigbook_nodeagent.engines.pidfds import exit_returncode, open_pidfd, tells_exit
from rigbook_nodeagent.engines.procfs import ProcessTable, Tagged, boot_id, send_signal, stat_of
from rigbook_nodeagent.engines.protocol import Ended, EngineError, Launch, Running, StartRefused
from rigbook_schemas.values import Engine, StopScope
from rigbook_schemas.wire import rfc3339

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

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
    `parts`). `cgroups=None` finds out by itself; `now_ns` is the wall clock.
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
        self._parts: dict[tuple[int, str], Part] = {}
        self._removed: collections.deque[Path] = collections.deque()
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
        part = self._parts.get(key)
        if part is None:
            part = self._spawn(launch)
            self._parts[key] = part
            self._watch(part)
        return self._running(part, [part.pid] if part.main_runs else [])

    async def stop(self, running: Running, *, grace_seconds: float, scope: StopScope) -> None:
        part = self._parts.get((running.epoch, running.component))
        if part is not None and part.end is None and part.stop_ordered is None:
            part.stop_ordered = records.StopOrdered(at=self._now())
            self._remember(part, part.stop_ordered)
        if self._moves:
            await asyncio.wait(self._moves)  # v2: its processes may still be on the way into the cgroup
        self._signal(running, scope, signal.SIGTERM)
        if await self._gone(running, scope, grace_seconds):
            return
        deadline = time.monotonic() + INSIST_SECONDS
        while time.monotonic() < deadline:  # again and again: it may fork while it is killed
            if scope is StopScope.EVERYTHING and part is not None and self._cgroups is not None:
                self._cgroups.kill(part.cgroups)
            self._signal(running, scope, signal.SIGKILL)
            if await self._gone(running, scope, GONE_POLL_SECONDS_MAX):
                return
        left = [(pid, stat.state) for pid in self._targets(running, scope) if (stat := stat_of(pid))]
        raise EngineError(
            f"{running.component} of epoch {running.epoch} does not end after SIGKILL: "
            + ", ".join(f"pid {pid} (state {state})" for pid, state in left)
            + "; state D is held by the kernel or a driver: reboot the node"
        )

    async def inventory(self) -> Sequence[Running]:
        tagged = self._scan()
        listed = [self._running(part, self._pids(part, tagged)) for part in self._parts.values()]
        strays: dict[tuple[int, str], list[Tagged]] = {}
        for one in tagged:
            if (one.epoch, one.component) not in self._parts:
                strays.setdefault((one.epoch, one.component), []).append(one)
        listed.extend(self._stray(found) for found in strays.values())
        return listed

    async def inspect(self, epoch: int, component: str) -> Running | None:
        part = self._parts.get((epoch, component))
        tagged = self._scan()
        if part is not None:
            return self._running(part, self._pids(part, tagged))
        strays = [one for one in tagged if (one.epoch, one.component) == (epoch, component)]
        return self._stray(strays) if strays else None

    async def remove(self, running: Running) -> None:
        """Raises EngineError while a process of it lives: forgetting it would hide it."""
        part = self._parts.get((running.epoch, running.component))
        if part is None:
            return
        if left := self._pids(part, self._scan()):
            raise EngineError(f"{running.component} of epoch {running.epoch} still has processes: {left}")
        self._remember(part, records.Removed())
        if self._cgroups is not None:
            self._cgroups.remove(part.cgroups)
        del self._parts[running.epoch, running.component]
        self._retire(part.folder)

    async def ends(self) -> AsyncIterator[Ended]:
        """One reader at a time."""
        while True:
            while self._hints:
                yield self._hints.popleft()
            self._hinted.clear()
            await self._hinted.wait()

    async def logs(self, running: Running, *, follow: bool, lines_max: int) -> AsyncIterator[bytes]:
        key = (running.epoch, running.component)
        path = self._folder(*key) / "output.log"
        lines, position = output.tail(path, lines_max)
        for line in lines:
            yield line
        if follow:
            part = self._parts.get(key)
            async for line in output.follow(path, position, lambda: part is None or part.end is not None):
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
        for part in self._parts.values():
            self._unwatch(part)
            if part.child is not None and part.child.returncode is None:
                part.child.returncode = 0  # else subprocess warns of a child left running, which is meant
        if self._cgroups is not None:
            self._cgroups.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- starting ---------------------------------------------------------------------------------

    def _spawn(self, launch: Launch) -> Part:
        component = launch.component
        key = (launch.epoch, component.name)
        folder = self._folder(*key)
        environment = part_environment(launch, self._environment)
        start_refusal(launch)
        assert self._cgroups is not None, "open() first"
        cgroups: tuple[str, ...] = ()
        try:
            os.makedirs(folder / "files", exist_ok=True)  # noqa: PTH103 - one call, half the time
            cgroups = self._cgroups.create(
                f"{launch.epoch}-{component.name}", memory_bytes=component.memory_bytes
            )
            intent = records.Intent(
                demand=launch.demand,
                epoch=launch.epoch,
                component=component.name,
                boot=self._boot,
                since=self._now(),
                cards=launch.cards,
                cgroups=cgroups,
            )
            records.append(folder / "record", intent)
            log = output.open_for_append(folder / "output.log")
        except OSError as error:
            self._cgroups.remove(cgroups)
            raise EngineError(f"cannot prepare {component.name}: {error}") from error
        try:
            with self._cgroups.inside(cgroups):
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
            self._cgroups.remove(cgroups)
            self._retire(folder)
            raise start_failure(launch, environment, error) from error
        finally:
            os.close(log)
        stat = stat_of(child.pid)
        spawned = records.Spawned(pid=child.pid, start_ticks=stat.start_ticks if stat else 0)
        part = Part(folder=folder, intent=intent, spawned=spawned, child=child)
        self._remember(part, spawned)
        if self._cgroups.kind == "v2":
            move = asyncio.create_task(asyncio.to_thread(self._cgroups.adopt, cgroups, child.pid))
            self._moves.add(move)
            move.add_done_callback(self._moves.discard)
        if component.memory_bytes and not self._cgroups.memory_limits:
            _log.warning(
                "memory_limit_not_enforced",
                demand=launch.demand,
                epoch=launch.epoch,
                component=component.name,
                why=self._cgroups.fact,
            )
        return part

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
            part = Part.adopted(folder, record, boot=self._boot)
            self._parts[part.intent.epoch, part.intent.component] = part
            if part.main_runs:
                self._watch(part)
            elif part.end is None:
                part.end = records.EndSeen(at="", oom_killed=self._oom_killed(part))
                self._remember(part, part.end)
        for _, folder in sorted(kept, key=lambda item: item[0]):
            self._retire(folder)

    # -- watching ---------------------------------------------------------------------------------

    def _watch(self, part: Part) -> None:
        part.pidfd = open_pidfd(part.pid)
        if part.pidfd is not None:
            asyncio.get_running_loop().add_reader(part.pidfd, self._readable, part)
        # else the tender looks every two seconds

    def _unwatch(self, part: Part) -> None:
        if part.pidfd is not None:
            asyncio.get_running_loop().remove_reader(part.pidfd)
            os.close(part.pidfd)
            part.pidfd = None

    def _readable(self, part: Part) -> None:
        """The main process has ended. Settle it as soon as its exit code can be told, or never will be."""
        if part.pidfd is not None:
            asyncio.get_running_loop().remove_reader(part.pidfd)
        if part.end is not None:
            return
        if part.ended_at is None:
            part.ended_at = time.monotonic()
        if part.child is not None:
            returncode = part.child.poll()
            patient = True
        else:
            returncode = exit_returncode(part.pidfd) if part.pidfd is not None and self._tells_exit else None
            waited = time.monotonic() - part.ended_at
            patient = (
                self._tells_exit
                and part.pidfd is not None
                and part.stop_ordered is None
                and waited < ADOPTED_EXIT_WAIT_SECONDS
            )
        if returncode is None and patient:
            asyncio.get_running_loop().call_later(REAP_POLL_SECONDS, self._readable, part)
            return
        self._unwatch(part)
        part.end = records.EndSeen(at=self._now(), returncode=returncode, oom_killed=self._oom_killed(part))
        self._remember(part, part.end)
        self._hints.append(Ended(epoch=part.intent.epoch, component=part.intent.component, ref=part.ref))
        self._hinted.set()

    async def _tend(self) -> None:
        """Keep outputs bounded, and look after processes that have no handle."""
        while True:
            await asyncio.sleep(TEND_SECONDS)
            for part in list(self._parts.values()):
                if part.end is None and part.pidfd is None and not part.main_runs:
                    self._readable(part)
                path = part.folder / "output.log"
                with contextlib.suppress(OSError):
                    if path.stat().st_size > self._log_bytes_max:
                        await asyncio.to_thread(output.trim, path, bytes_max=self._log_bytes_max)

    # -- finding and stopping ---------------------------------------------------------------------

    def _scan(self) -> list[Tagged]:
        try:
            return self._table.scan()
        except OSError as error:
            raise EngineError(f"/proc cannot be read: {error}") from error

    def _pids(self, part: Part, tagged: Sequence[Tagged]) -> list[int]:
        """Every living process of a component: main, cgroup, environment."""
        key = (part.intent.epoch, part.intent.component)
        found = {one.pid for one in tagged if (one.epoch, one.component) == key}
        if self._cgroups is not None:
            found.update(
                pid
                for pid in self._cgroups.pids(part.cgroups)
                if pid in found or ((stat := stat_of(pid)) is not None and stat.alive)
            )
        if part.main_runs:
            found.add(part.pid)
        return sorted(found)

    def _targets(self, running: Running, scope: StopScope) -> list[int]:
        """Pids that a stop of this scope reaches now."""
        part = self._parts.get((running.epoch, running.component))
        tagged = self._scan()
        if part is None:
            pids = [
                one.pid
                for one in tagged
                if one.epoch == running.epoch and one.component in {running.component, ""}
            ]
        else:
            pids = self._pids(part, tagged)
        if scope is StopScope.EVERYTHING:
            return pids
        group = part.pid if part is not None else 0
        return [pid for pid in pids if (stat := stat_of(pid)) is not None and stat.group == group]

    def _signal(self, running: Running, scope: StopScope, number: int) -> None:
        for pid in self._targets(running, scope):
            stat = stat_of(pid)
            if stat is None:
                continue
            try:
                send_signal(pid, stat.start_ticks, number)
            except PermissionError as error:
                raise EngineError(f"not allowed to signal pid {pid} of {running.component}: {error}") from error

    async def _gone(self, running: Running, scope: StopScope, seconds: float) -> bool:
        """Wait until nothing in scope lives and the main process's end is settled."""
        part = self._parts.get((running.epoch, running.component))
        deadline = time.monotonic() + seconds
        pause = GONE_POLL_SECONDS
        while (part is not None and part.end is None and not part.main_runs) or self._targets(running, scope):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * 1.5, GONE_POLL_SECONDS_MAX)
        return True

"""A cgroup for each component, where the machine lets us have one: nothing can leave it by forking.

v1: the freezer hierarchy (no controller that costs anything; freezing makes a kill complete), and the
    memory hierarchy only for a component with a memory limit. The spawning thread enters the cgroup,
    starts the program and leaves again, so the program is inside from its first instruction.
v2: the program is moved right after its start. The kernel may take 12 ms for the first move after a
    pause, so this happens in a worker thread; what it forked meanwhile is moved after it.
Neither (a container with a read-only /sys/fs/cgroup, or not root): `kind` is empty, `fact` says why, and
processes are found by group and environment only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rigbook_nodeagent.engines.procfs import send_signal, stat_of

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Sequence

__all__ = ["Cgroups", "hierarchies", "own_paths"]

MOUNTS: Final = Path("/proc/self/mountinfo")
OWN: Final = Path("/proc/self/cgroup")
# A thread that moves itself alone takes no lock; by its number it would wait 7 ms for one.
THIS_THREAD: Final = "0"
SWEEPS_MAX: Final = 5  # v2: rounds of moving what was forked while the move took place
THAW_WAIT_SECONDS: Final = 0.2


class Cgroups:
    """Where cgroups of components go. `name` is a folder name; paths are of the mounted hierarchies."""

    def __init__(self, name: str, *, mounts: Path = MOUNTS, own: Path = OWN) -> None:
        self.kind = ""
        self.fact = ""
        self.memory_limits = False
        self._root: Path | None = None
        self._memory_root: Path | None = None
        self._homes: dict[str, Path] = {}  # v1: where our own threads belong, by hierarchy
        try:
            found, ours = hierarchies(mounts), own_paths(own)
        except OSError as error:
            self.fact = f"no cgroup: {error}"
            return
        if "freezer" in found:
            self._choose_v1(found, ours, name)
        elif "" in found:
            self._choose_v2(found[""], ours.get("", "/"), name)
        else:
            self.fact = "no cgroup: no usable hierarchy is mounted"

    def _choose_v1(self, found: dict[str, Path], ours: dict[str, str], name: str) -> None:
        self._homes["freezer"] = _inside(found["freezer"], ours.get("freezer", "/"))
        self._root = self._made(self._homes["freezer"] / name)
        if self._root is None:
            return
        self.kind = "v1"
        if "memory" in found:
            self._homes["memory"] = _inside(found["memory"], ours.get("memory", "/"))
            self._memory_root = self._made(self._homes["memory"] / name)
        self.memory_limits = self._memory_root is not None
        self.fact = f"cgroup v1 at {self._root}, memory limits {'on' if self.memory_limits else 'off'}"

    def _choose_v2(self, mount: Path, own: str, name: str) -> None:
        home = _inside(mount, own)
        self._root = self._made(home / name)
        if self._root is None:
            return
        self.kind = "v2"
        with contextlib.suppress(OSError):  # refused where processes live next to it, or without delegation
            (home / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
        with contextlib.suppress(OSError):
            (self._root / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
        with contextlib.suppress(OSError):
            enabled = (self._root / "cgroup.subtree_control").read_text(encoding="ascii").split()
            self.memory_limits = "memory" in enabled
        self.fact = f"cgroup v2 at {self._root}, memory limits {'on' if self.memory_limits else 'off'}"

    def _made(self, path: Path) -> Path | None:
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            self.fact = f"no cgroup: {error}"
            return None
        return path

    def create(self, name: str, *, memory_bytes: int) -> tuple[str, ...]:
        """Folders of one component's cgroups; empty when there are none. Memory limit 0 = no limit.

        Raises OSError when a limit was asked for that this machine could enforce but did not take.
        """
        if self._root is None:
            return ()
        try:
            path = self._root / name
            path.mkdir(exist_ok=True)
        except OSError as error:
            self.fact = f"no cgroup: {error}"
            return ()
        paths = [str(path)]
        if memory_bytes and self.memory_limits:
            if self._memory_root is not None:
                limited = self._memory_root / name
                limited.mkdir(exist_ok=True)
                (limited / "memory.limit_in_bytes").write_text(str(memory_bytes), encoding="ascii")
                paths.append(str(limited))
            else:
                (path / "memory.max").write_text(str(memory_bytes), encoding="ascii")
        return tuple(paths)

    @contextlib.contextmanager
    def inside(self, paths: Sequence[str]) -> Generator[None]:
        """v1: what this thread starts is born in the cgroups. v2 and none: does nothing (see `adopt`)."""
        if self.kind != "v1" or not paths:
            yield
            return
        try:
            for path in paths:
                _write(f"{path}/tasks", THIS_THREAD)
        except OSError as error:  # started all the same: it is found by group and environment
            self.fact = f"cgroup could not be entered: {error}"
        try:
            yield
        finally:
            for home in list(self._homes.values())[: len(paths)]:
                _write(f"{home}/tasks", THIS_THREAD)

    def adopt(self, paths: Sequence[str], pid: int) -> None:
        """v2: move a process that was just started, and what it forked meanwhile. Blocks for up to 12 ms."""
        if self.kind != "v2" or not paths:
            return
        moved: set[int] = set()
        waiting = [pid]
        for _ in range(SWEEPS_MAX):
            for one in waiting:
                with contextlib.suppress(OSError):  # it ended already
                    _write(f"{paths[0]}/cgroup.procs", str(one))
            moved.update(waiting)
            waiting = [child for one in moved for child in _children(one) if child not in moved]
            if not waiting:
                return

    def pids(self, paths: Sequence[str]) -> list[int]:
        """Living processes inside, ourselves never among them."""
        found: set[int] = set()
        for path in paths[:1]:
            with contextlib.suppress(OSError), open(f"{path}/cgroup.procs", "rb") as file:  # noqa: PTH123
                found.update(int(line) for line in file)
        found.discard(os.getpid())  # v1: while `inside`, one of our threads is listed as us
        found.discard(0)  # of another pid namespace
        return sorted(found)

    def kill(self, paths: Sequence[str]) -> None:
        """SIGKILL to all inside, none of which can fork away meanwhile."""
        if not paths:
            return
        path = Path(paths[0])
        with contextlib.suppress(OSError):
            if self.kind == "v2":
                (path / "cgroup.kill").write_text("1", encoding="ascii")
                return
            if not _holds_us(path):
                (path / "freezer.state").write_text("FROZEN", encoding="ascii")
        try:
            for pid in self.pids(paths):
                stat = stat_of(pid)
                if stat is not None:
                    with contextlib.suppress(PermissionError):
                        send_signal(pid, stat.start_ticks, signal.SIGKILL)
        finally:
            deadline = time.monotonic() + THAW_WAIT_SECONDS
            while self.kind == "v1" and path.exists() and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    (path / "freezer.state").write_text("THAWED", encoding="ascii")
                    break

    def oom_kills(self, paths: Sequence[str]) -> int | None:
        """How often the kernel killed for memory in here; None when no memory cgroup watches."""
        if not self.memory_limits or not paths:
            return None
        name = "memory.events" if self.kind == "v2" else "memory.oom_control"
        try:
            lines = Path(paths[-1], name).read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.isdigit():
                return int(value)
        return None

    def memory_folder(self, paths: Sequence[str]) -> str:
        """The folder that counts this component's memory; "" when none of its own does."""
        if not self.memory_limits or not paths:
            return ""
        if self.kind == "v2":
            return paths[0]
        return paths[1] if len(paths) > 1 else ""

    def remove(self, paths: Sequence[str]) -> bool:
        """Remove the folders; False when something still lives in them."""
        gone = True
        for path in paths:
            try:
                os.rmdir(path)  # noqa: PTH106 - on the path of every component
            except FileNotFoundError:
                continue
            except OSError:
                gone = False
        return gone

    def sweep(self, kept: Collection[str]) -> None:
        """Remove empty cgroups of components that nobody remembers; `kept` are names given to `create`."""
        for root in filter(None, (self._root, self._memory_root)):
            with contextlib.suppress(OSError):
                for folder in [path for path in root.iterdir() if path.is_dir() and path.name not in kept]:
                    self.remove((str(folder),))

    def close(self) -> None:
        """Remove our own folders when they are empty."""
        for root in filter(None, (self._root, self._memory_root)):
            with contextlib.suppress(OSError):
                root.rmdir()


def hierarchies(mounts: Path) -> dict[str, Path]:
    """Controller (or "" for v2) to mount point."""
    found: dict[str, Path] = {}
    for line in mounts.read_text(encoding="utf-8").splitlines():
        left, _, right = line.partition(" - ")
        words = right.split()
        point = Path(left.split()[4])
        if not words:
            continue
        if words[0] == "cgroup2":
            found.setdefault("", point)
        elif words[0] == "cgroup" and len(words) > 2:
            for option in words[2].split(","):
                if option in {"freezer", "memory"}:
                    found.setdefault(option, point)
    return found


def own_paths(own: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in own.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path
    return found


def _inside(mount: Path, own: str) -> Path:
    """Our own cgroup's folder; the mount's root where a container's view does not show it."""
    path = mount / own.lstrip("/")
    return path if path.is_dir() else mount


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(word) for word in text.split()]


def _holds_us(path: Path) -> bool:
    """Freezing a cgroup with one of our own threads in it would stop the agent for ever."""
    own = f"{os.getpid()}\n"
    with (path / "cgroup.procs").open(encoding="ascii") as file:
        return any(line == own for line in file)


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)

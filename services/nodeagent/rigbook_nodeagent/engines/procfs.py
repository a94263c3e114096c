"""Processes of this machine as /proc shows them: identity, descent, and whose they are.

A process is named by pid *and* start time (clock ticks since boot): a pid alone may be used again.
"""
# os.open and os.listdir: these run over a thousand processes a second, and pathlib triples their cost
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CLUSTER",
    "COMPONENT",
    "DEMAND",
    "EPOCH",
    "NODE",
    "ProcessTable",
    "Stat",
    "Tagged",
    "boot_id",
    "boot_ns",
    "environment_of",
    "send_signal",
    "stat_of",
]

CLUSTER: Final = "RIGBOOK_CLUSTER"
NODE: Final = "RIGBOOK_NODE"
DEMAND: Final = "RIGBOOK_DEMAND"
EPOCH: Final = "RIGBOOK_EPOCH"
COMPONENT: Final = "RIGBOOK_COMPONENT"

ENVIRONMENT_BYTES_MAX: Final = 4 * 1024**2  # more than the kernel's usual limit of a quarter of the stack
KTHREADD: Final = 2  # parent of all kernel threads, which have no environment
SCANS_BETWEEN_FULL: Final = 64  # then also processes that were judged "not ours" are read again


class Stat(NamedTuple):
    """The part of /proc/<pid>/stat that matters here."""

    state: str
    parent: int
    group: int
    session: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        """A zombie has ended: it holds nothing but its number."""
        return self.state not in {"Z", "X", "x"}


class Tagged(NamedTuple):
    """A living process that carries our cluster and node in its environment."""

    pid: int
    stat: Stat
    demand: str
    epoch: int
    component: str


def stat_of(pid: int) -> Stat | None:
    """None when there is no such process (or it is not ours to see)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read(1024)
    except OSError:
        return None
    rest = text[text.rfind(b")") + 2 :].split()  # the command in parentheses may hold anything
    if len(rest) < 20:
        return None
    return Stat(rest[0].decode(), int(rest[1]), int(rest[2]), int(rest[3]), int(rest[19]))


def environment_of(pid: int) -> bytes:
    """The raw environment a program was started with; empty for kernel threads, zombies, and in mid-exec.

    Raises OSError when the process is gone or belongs to somebody else.
    """
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read(ENVIRONMENT_BYTES_MAX)


def boot_id() -> str:
    """Identifies this boot of the machine; pids and start times mean nothing across boots."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def boot_ns() -> int:
    """When this machine was started, Unix ns (to the second); 0 = unknown."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            for line in file:
                name, _, value = line.partition(" ")
                if name == "btime" and value.strip().isdigit():
                    return int(value) * 10**9
    except (OSError, ValueError):
        pass
    return 0


def send_signal(pid: int, start_ticks: int, number: int) -> bool:
    """Signal exactly this process, never one that got its number later. False when it is gone.

    Raises PermissionError when it is not ours to signal.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        now = stat_of(pid)  # read while the handle pins the process: same start time, same process
        if now is None or not now.alive or now.start_ticks != start_ticks:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


class ProcessTable:
    """Finds the processes of one cluster and node by their environment, wherever they moved themselves.

    A scan lists /proc and reads only processes that are new since the last one; about 0.2 ms for 100
    processes. That a pid is foreign is kept while it stays listed; ours are looked at each time.
    """

    def __init__(self, cluster: str, node: str) -> None:
        self._wanted = {CLUSTER.encode(): cluster.encode(), NODE.encode(): node.encode()}
        self._mark = f"{NODE}={node}\0".encode()
        self._ours: dict[str, Tagged] = {}  # by the name in /proc, as `_foreign`
        self._foreign: set[str] = set()
        self._scans = 0

    def learn(self, process: Tagged) -> None:
        """One that we started ourselves: no need to read its environment."""
        self._foreign.discard(str(process.pid))
        self._ours[str(process.pid)] = process

    def scan(self, only: tuple[int, str] | None = None) -> list[Tagged]:
        """All living processes of ours, ourselves not among them; or `only` those of (epoch, component).

        The others are then not looked at: the kernel lets a look wait for a program that is being started.
        """
        self._scans += 1
        if not self._scans % SCANS_BETWEEN_FULL:
            self._foreign.clear()
        names = set(os.listdir("/proc"))
        self._foreign &= names
        for gone in self._ours.keys() - names:
            del self._ours[gone]
        found: list[Tagged] = []
        for name in names - self._foreign:
            known = self._ours.get(name)
            if known is not None and only is not None and only != (known.epoch, known.component):
                continue
            now = self._looked_at(name, known)
            if now is not None and only in {None, (now.epoch, now.component)}:
                found.append(now)
        return found

    def _looked_at(self, name: str, known: Tagged | None) -> Tagged | None:
        """The living process of ours with this number; remembers the answer."""
        if not name.isdigit():
            self._foreign.add(name)  # `meminfo` and the like
            return None
        pid = int(name)
        if known is not None:
            stat = stat_of(pid)
            if stat is not None and not stat.alive:
                return None  # a zombie; the name goes when it is reaped
            if stat is not None and stat.start_ticks == known.stat.start_ticks:
                now = self._ours[name] = known._replace(stat=stat)
                return now
            del self._ours[name]
        judged, final = self._judge(pid)
        if judged is not None:
            self._ours[name] = judged
        elif final:
            self._foreign.add(name)
        return judged

    def _judge(self, pid: int) -> tuple[Tagged | None, bool]:
        """(ours or not, may the answer be kept)."""
        try:
            raw = environment_of(pid)
        except PermissionError:
            return None, True
        except ProcessLookupError:
            raw = b""  # what a kernel thread answers on newer kernels
        except OSError:
            return None, False
        if not raw:
            stat = stat_of(pid)
            kernel = stat is not None and KTHREADD in {pid, stat.parent}
            return None, kernel  # else in the middle of an exec: look again next time
        if self._mark not in raw and not raw.endswith(self._mark[:-1]):
            return None, True
        values = _variables(raw)
        stat = stat_of(pid)
        if stat is None or not stat.alive or any(values.get(k) != v for k, v in self._wanted.items()):
            return None, stat is not None
        epoch = values.get(EPOCH.encode(), b"")
        if not epoch.isdigit() or pid == os.getpid():
            return None, True
        return Tagged(
            pid=pid,
            stat=stat,
            demand=values.get(DEMAND.encode(), b"").decode("utf-8", "replace"),
            epoch=int(epoch),
            component=values.get(COMPONENT.encode(), b"").decode("utf-8", "replace"),
        ), True


def _variables(raw: bytes) -> Mapping[bytes, bytes]:
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if entry)
    return {key: value for key, _, value in pairs}

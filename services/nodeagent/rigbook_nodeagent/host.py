"""The host's own figures: memory and pressure. Each may be unknown; unknown is None, never 0."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from rigbook_schemas.values import Pressure

from rigbook_nodeagent.engines.procfs import Stat, boot_id, stat_of

__all__ = ["Host", "cpu_count", "hostname", "memory_total_bytes", "pressure"]

_PROC: Final = Path("/proc")


class Host:
    """This machine. A simulated node passes another one to its agent."""

    def boot_id(self) -> str:
        return boot_id()

    def hostname(self) -> str:
        return hostname()

    def cpu_count(self) -> int:
        return cpu_count()

    def memory_total_bytes(self) -> int | None:
        return memory_total_bytes()

    def pressure(self) -> Pressure:
        return pressure()

    def stat(self, pid: int) -> Stat | None:
        """State and start of a process; None when there is none."""
        return stat_of(pid)


def hostname() -> str:
    """Fit for a subject token."""
    name = socket.gethostname().split(".")[0]
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:63].strip("-_") or "node"


def cpu_count() -> int:
    return len(os.sched_getaffinity(0))


def memory_total_bytes(proc: Path = _PROC) -> int | None:
    return _meminfo(proc).get("MemTotal")


def pressure(proc: Path = _PROC) -> Pressure:
    """Memory and PSI right now."""
    memory = _meminfo(proc)
    some, full = _psi(proc / "pressure/memory")
    cpu, _ = _psi(proc / "pressure/cpu")
    try:
        load1: float | None = float((proc / "loadavg").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        load1 = None
    return Pressure(
        memory_total_bytes=memory.get("MemTotal"),
        memory_available_bytes=memory.get("MemAvailable"),
        memory_some_avg10=some,
        memory_full_avg10=full,
        cpu_some_avg10=cpu,
        load1=load1,
    )


def _meminfo(proc: Path) -> dict[str, int]:
    """Bytes by key."""
    found: dict[str, int] = {}
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[key] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


def _psi(path: Path) -> tuple[float | None, float | None]:
    """avg10 of "some" and "full", percent of time; None where the kernel has no PSI."""
    values: dict[str, float] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None, None
    for line in lines:
        words = line.split()
        for word in words[1:]:
            if word.startswith("avg10="):
                try:
                    values[words[0]] = float(word[6:])
                except ValueError:
                    continue
    return values.get("some"), values.get("full")

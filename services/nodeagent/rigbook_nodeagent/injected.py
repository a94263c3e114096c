"""Which of its cards a container can really reach: by the device nodes it sees, and by its device cgroup.

A device request that was accepted is a promise. Toolkits that fail half-way start the container without its cards,
and a reload of systemd takes them away from one that runs. Where nothing can be looked at (no device nodes on this
machine, cgroup v2's device programs), the answer is None: it cannot be told.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["injected_of"]

_PROC: Final = Path("/proc")
_DEVICES: Final = Path("/sys/fs/cgroup/devices")


def injected_of(
    pid: int, cards: Sequence[str], nodes: Mapping[str, str], *, proc: Path = _PROC, devices: Path = _DEVICES
) -> tuple[str, ...] | None:
    """UUIDs out of `cards` and of all others in `nodes` that the process can reach.

    `nodes`: card to its device node, such as `/dev/nvidia3`. None when it cannot be told for one of `cards`.
    """
    present = {uuid: path for uuid, path in nodes.items() if Path(path).exists()}
    if pid <= 0 or not cards or any(uuid not in present for uuid in cards):
        return None
    root = proc / str(pid) / "root"
    allowed = _allowed(pid, proc, devices)
    try:
        if not (root / "dev").is_dir():
            return None
        return tuple(
            uuid
            for uuid, path in present.items()
            if (number := _number(Path(f"{root}{path}"))) is not None
            and (allowed is None or _allows(allowed, number))
        )
    except OSError:
        return None  # it ended, or is not ours to look into


def _number(path: Path) -> tuple[int, int] | None:
    """(major, minor) of a character device."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return (os.major(found.st_rdev), os.minor(found.st_rdev)) if stat.S_ISCHR(found.st_mode) else None


def _allowed(pid: int, proc: Path, devices: Path) -> list[str] | None:
    """Lines of the device cgroup (v1); None where there is none to read."""
    try:
        for line in (proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if "devices" in controllers.split(","):
                return (devices / path.lstrip("/") / "devices.list").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    return None


def _allows(lines: Sequence[str], number: tuple[int, int]) -> bool:
    """`c 195:* rwm`, `c 195:3 rw`, `a *:* rwm`."""
    for line in lines:
        words = line.split()
        if len(words) != 3 or words[0] not in {"a", "c"} or "r" not in words[2] or "w" not in words[2]:
            continue
        major, _, minor = words[1].partition(":")
        if major in {"*", str(number[0])} and minor in {"*", str(number[1])}:
            return True
    return False

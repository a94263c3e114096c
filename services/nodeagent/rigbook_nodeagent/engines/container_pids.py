"""Processes of a container, as the host numbers them: by its cgroup, from its first process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from rigbook_nodeagent.engines.cgroups import hierarchies, own_paths

__all__ = ["container_pids"]

MOUNTS: Final = Path("/proc/self/mountinfo")
PIDS_MAX: Final = 10_000


def container_pids(first: int) -> tuple[int, ...]:
    """All processes in the cgroup of `first` and below it; just `first` when the cgroup cannot be read.

    0 means that there is no process, or none in our pid namespace.
    """
    if first <= 0:
        return ()
    found = {first}
    with contextlib.suppress(OSError, ValueError):
        mounts, paths = hierarchies(MOUNTS), own_paths(Path(f"/proc/{first}/cgroup"))
        for controller in ("freezer", ""):
            path = paths.get(controller, "/").lstrip("/")
            if controller not in mounts or not path:
                continue  # the root cgroup holds the whole machine
            for folder in (mounts[controller] / path, *(mounts[controller] / path).rglob("*/")):
                found.update(int(line) for line in (folder / "cgroup.procs").read_text("ascii").split())
                if len(found) > PIDS_MAX:
                    break
            break
    found.discard(0)
    return tuple(sorted(found))

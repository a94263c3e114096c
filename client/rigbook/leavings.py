"""Processes of a simulated node that outlived everything: found by the folder of cards in their environment."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Final

__all__ = ["end_leavings", "leavings"]

# Set by the simulated driver for everything that it starts; inherited by whatever a program forks.
VARIABLE: Final = "RIGBOOK_SIM_DIR"


def leavings(data: Path) -> list[int]:
    """Pids whose simulated cards lie under `data`: started for us, however they left their parents."""
    wanted = f"{VARIABLE}={data}".encode()
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's
            entries = (folder / "environ").read_bytes().split(b"\0")
            if any(entry == wanted or entry.startswith(wanted + b"/") for entry in entries):
                found.append(int(folder.name))
    return found


def end_leavings(data: Path) -> int:
    """Kill them; how many there were."""
    pids = [pid for pid in leavings(data) if pid != os.getpid()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)

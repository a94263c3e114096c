"""The running Rigbook of a data folder: `context.json`, so that later commands find it without being told.

Which bus a command talks to, first match: --nats, $RIGBOOK_NATS, the Rigbook that runs on the data
folder (--data, $RIGBOOK_DATA, else the user's), nats://127.0.0.1:4222.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

__all__ = [
    "Context",
    "default_data",
    "find_url",
    "process_start",
    "read_context",
    "remove_context",
    "write_context",
]

FILE: Final = "context.json"
URL_DEFAULT: Final = "nats://127.0.0.1:4222"


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What `rigbook up` tells the commands that come after it."""

    url: str
    pid: int  # of the supervisor
    started_ticks: int  # its start, in clock ticks since boot: with the pid, it names one process
    node: str = ""  # "" = without an agent
    gpus: str = ""
    simulated: bool = False
    logs: str = ""
    parts: dict[str, int] = {}  # name to pid

    @property
    def alive(self) -> bool:
        return process_start(self.pid) == self.started_ticks


def default_data() -> Path:
    """$RIGBOOK_DATA, else the user's data folder for rigbook."""
    named = os.environ.get("RIGBOOK_DATA")
    if named:
        return Path(named)
    from platformdirs import user_data_path

    return user_data_path("rigbook")


def process_start(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None when there is no such process, or it has ended already."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def write_context(data: Path, context: Context) -> None:
    """Replaced whole: a reader sees the old or the new one."""
    fresh = data / f".{FILE}.{os.getpid()}"
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(context), indent=2))
    fresh.replace(data / FILE)


def read_context(data: Path) -> Context | None:
    """None when nothing was started there, or the file is not one of ours."""
    try:
        return msgspec.json.decode((data / FILE).read_bytes(), type=Context)
    except (OSError, msgspec.MsgspecError):
        return None


def remove_context(data: Path) -> None:
    (data / FILE).unlink(missing_ok=True)


def find_url(nats: str | None, data: Path | None) -> str:
    """The bus to talk to."""
    if nats:
        return nats
    named = os.environ.get("RIGBOOK_NATS")
    if named and data is None:
        return named
    context = read_context(data or default_data())
    return context.url if context is not None and context.alive else URL_DEFAULT

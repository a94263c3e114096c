"""Who holds memory of a simulated card: one small file per card and process.

    <directory>/<card uuid>/card            index=, model=, memory_bytes=   written by the driver
    <directory>/<card uuid>/<pid>           bytes=, start_ticks=, command=, utilisation=
    <directory>/<card uuid>/<pid>-<pid namespace>   the same, from inside a container

Any process can hold a card, also one that Rigbook does not know. A first line that is a bare number
means bytes, so a shell needs no program for it:

    echo 21474836480 > "$RIGBOOK_SIM_DIR/$NVIDIA_VISIBLE_DEVICES/$$"

A file counts only while its process lives: the memory comes back by itself when the process ends, as on
a real card. The start time guards against a pid that was used again; a file without `start_ticks`
counts when it is younger than the process.

Only the standard library, and little of it: workloads import this at their start.
"""
# pathlib costs 4 ms at import, and this is on the start path of every simulated workload
# ruff: noqa: PTH105, PTH108, PTH115, PTH116, PTH119, PTH120, PTH123, PTH208

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # without `typing`, which costs 2 ms; type checkers know the name
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "DIRECTORY_VARIABLE",
    "NAMESPACE_VARIABLE",
    "Holding",
    "card_fields",
    "card_names",
    "fields",
    "holdings",
    "own_namespace",
    "process_start",
    "withdraw",
    "write",
]

DIRECTORY_VARIABLE = "RIGBOOK_SIM_DIR"
NAMESPACE_VARIABLE = (
    "RIGBOOK_SIM_PIDNS"  # the driver's pid namespace: tells a program that it is in a container
)
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
WRITTEN_BEFORE_START_SECONDS = 2.0  # clock grain allowed when a file states no start time
FILE_BYTES_MAX = 4096


class Holding:
    """One process holding memory of one card. `pid` is as seen from here, 0 when it cannot be told."""

    __slots__ = ("bytes", "command", "path", "pid", "start_ticks", "utilisation")

    def __init__(
        self, *, pid: int, start_ticks: int, held_bytes: int, command: str, utilisation: float, path: str
    ) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self.bytes = held_bytes
        self.command = command
        self.utilisation = utilisation
        self.path = path


def process_start(pid: int | str) -> int | None:
    """Start time of a living process in clock ticks since boot; None when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read(1024)
    except (OSError, ValueError):
        return None
    rest = text[text.rfind(b")") + 2 :].split()  # the command in parentheses may hold anything
    if len(rest) < 20 or rest[0] in (b"Z", b"X"):
        return None
    return int(rest[19])


def own_namespace() -> str:
    """Number of this process's pid namespace, as text; empty when /proc does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return ""


def fields(path: str) -> dict[str, str] | None:
    """`key=value` lines of a small file; None when it cannot be read. A bare number first means bytes."""
    try:
        with open(path, "rb") as file:
            text = file.read(FILE_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines()):
        key, separator, value = line.partition("=")
        if separator:
            found[key.strip()] = value.strip()
        elif number == 0 and line.strip().isdigit():
            found["bytes"] = line.strip()
    return found


def write(path: str, values: dict[str, str]) -> None:
    """Write a small file whole: a reader sees the old or the new one, never half."""
    new = f"{os.path.dirname(path)}/.{os.path.basename(path)}.{os.getpid()}"
    with open(new, "w", encoding="utf-8") as file:
        file.writelines(f"{key}={value}\n" for key, value in values.items())
    os.replace(new, path)


def withdraw(path: str) -> None:
    """Remove a file that may be gone already."""
    try:
        os.unlink(path)
    except OSError:
        return


def card_fields(directory: str, uuid: str) -> tuple[int, str, int] | None:
    """(index, model, memory in bytes) of a simulated card, as its driver wrote it."""
    found = fields(f"{directory}/{uuid}/card")
    if found is None:
        return None
    try:
        return int(found["index"]), found.get("model", ""), int(found["memory_bytes"])
    except (KeyError, ValueError):
        return None


def card_names(directory: str) -> list[str]:
    """UUIDs of the cards in a directory, in index order."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    cards = [(card[0], name) for name in names if (card := card_fields(directory, name)) is not None]
    return [name for _, name in sorted(cards)]


def holdings(directory: str, uuid: str) -> list[Holding]:
    """Living processes that hold memory of the card. Files of processes that are gone are removed.

    Raises OSError when the card's folder cannot be read: unknown, which is not the same as free.
    """
    folder = f"{directory}/{uuid}"
    found: list[Holding] = []
    for name in os.listdir(folder):
        pid_text, _, namespace = name.partition("-")
        if not pid_text.isdigit() or (namespace and not namespace.isdigit()):
            continue  # `card`, `fault`, a file being written
        path = f"{folder}/{name}"
        pid = int(pid_text)
        if namespace and namespace != own_namespace():
            pid = _pid_from_outside(pid_text, namespace)
        held = _holding(path, pid)
        if held is not None:
            found.append(held)
    found.sort(key=lambda held: held.pid)
    return found


def _holding(path: str, pid: int) -> Holding | None:
    start = process_start(pid) if pid else None
    if start is None:
        withdraw(path)
        return None
    values = fields(path)
    if values is None:
        return None
    try:
        held_bytes = int(values["bytes"])
        stated = int(values.get("start_ticks", "0"))
        utilisation = float(values.get("utilisation", "90"))
    except (KeyError, ValueError):
        return None  # being written by a shell, or not ours
    if stated not in (0, start) or (stated == 0 and not _younger(path, start)):
        withdraw(path)
        return None
    return Holding(
        pid=pid,
        start_ticks=start,
        held_bytes=held_bytes,
        command=values.get("command", ""),
        utilisation=utilisation,
        path=path,
    )


def _younger(path: str, start_ticks: int) -> bool:
    """Was the file written after the process started? By ages, so that a clock step does little harm."""
    try:
        age = time.time() - os.stat(path).st_mtime
    except OSError:
        return False
    return age <= time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / TICKS_PER_SECOND + (
        WRITTEN_BEFORE_START_SECONDS
    )


def _pid_from_outside(inner: str, namespace: str) -> int:
    """Our number for a process that knows itself as `inner` in its own pid namespace; 0 when not found."""
    for pid in _pids():
        try:
            if os.readlink(f"/proc/{pid}/ns/pid").strip("pid:[]") != namespace:
                continue
            with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
                for line in file:
                    if line.startswith("NSpid:") and line.split()[-1] == inner:
                        return int(pid)
        except OSError:
            continue  # it ended meanwhile, or is not ours to read
    return 0


def _pids() -> Iterator[str]:
    return (name for name in os.listdir("/proc") if name.isdigit())

"""Memory boundaries of a component: its own cgroup, every enclosing level, and what each says. v1 and v2.

A component ends for memory at the *first* limit on the way up, which need not be its own: a container with
32 GiB in a slice with 16 GiB dies at the slice. So every level is read, with its limit and its name.

    v2  memory.current  .max    .peak                .events (with all below) and .events.local
    v1  usage_in_bytes  limit_in_bytes  max_usage_in_bytes  failcnt and oom_control (of this level alone)

Both are told in the words of v2: `max` = the limit made the kernel reclaim, `oom` = reclaiming did not help,
`oom_kill` = a process of this level was killed (at whatever limit, also the machine's).

Parsers are total: whatever a file holds, the answer is a number or unknown (None), with the reason.
"""
# plain open: all levels of all components are read once a second
# ruff: noqa: PTH123

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from rigbook_nodeagent.engines.cgroups import hierarchies, own_paths

__all__ = [
    "Hierarchy",
    "LevelReading",
    "Place",
    "bytes_of",
    "keyed",
    "level_name",
    "limit_of",
    "stalled",
]

READ_BYTES_MAX: Final = 64 * 1024
LEVELS_MAX: Final = 16
# Above it a v1 limit means "none": the kernel rounds its largest number down to a page.
NO_LIMIT_BYTES: Final = 1 << 62
_CONTAINER: Final = re.compile(r"(?:^|[-:])([0-9a-f]{64})(?:\.scope)?$")
_POD: Final = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f_-]{27,})(?:\.slice)?$")


class Place(msgspec.Struct, frozen=True):
    """Where a component's memory is charged."""

    version: int  # 1 or 2; 0 = unknown
    mount: Path = Path()
    path: str = ""  # below the mount, begins with /
    why: str = ""  # when unknown
    own: bool = True  # made for it (a container's, or by our engine); False: others may be in it


class LevelReading(msgspec.Struct, frozen=True, kw_only=True):
    """One level at one instant. None = unknown, except `limit_bytes` with `limited` False: no limit."""

    path: str
    name: str
    current_bytes: int | None = None
    limit_bytes: int | None = None
    limited: bool | None = None
    peak_bytes: int | None = None
    events: Mapping[str, int] = {}  # this level and all below (v1: this level alone)
    local: Mapping[str, int] = {}  # this level alone
    rss_bytes: int | None = None
    mapped_bytes: int | None = None
    some_avg10: float | None = None  # percent of time that some process of it waited for memory
    full_avg10: float | None = None
    why: str = ""  # why figures are missing

    @property
    def fullness(self) -> float | None:
        """Share of the limit that is used."""
        if self.current_bytes is None or not self.limit_bytes:
            return None
        return self.current_bytes / self.limit_bytes


class Hierarchy:
    """The memory hierarchy of this machine (or of a recorded tree)."""

    def __init__(self, *, proc: Path = Path("/proc"), mounts: Path | None = None) -> None:
        self._proc = proc
        self.version = 0
        self.mount = Path()
        self.why = ""
        self._round: dict[tuple[str, bool], LevelReading] | None = None  # levels that several share
        try:
            found = hierarchies(mounts or proc / "self/mountinfo")
        except (OSError, ValueError, IndexError) as error:
            self.why = f"mounted cgroups cannot be read: {error}"
            return
        if "memory" in found:
            self.version, self.mount = 1, found["memory"]
        elif "" in found:
            self.version, self.mount = 2, found[""]
        else:
            self.why = "no memory hierarchy is mounted"
            return

    @classmethod
    def nowhere(cls) -> Hierarchy:
        """A machine whose memory cannot be looked into: everything is unknown."""
        return cls(proc=Path("/nonexistent"))

    def begin_round(self) -> None:
        """Until `end_round`, a level that encloses several components is read once."""
        self._round = {}

    def end_round(self) -> None:
        self._round = None

    def pids(self, place: Place) -> list[int]:
        """Processes in this very cgroup; [] when it is gone, or cannot be told."""
        if not place.version:
            return []
        text = _text(f"{place.mount}/{place.path.lstrip('/')}/cgroup.procs") or ""
        return [pid for line in text.split() if (pid := bytes_of(line))]

    def machine_kills(self) -> int | None:
        """Processes killed for memory on this machine since it was started."""
        return keyed(_text(f"{self._proc}/vmstat")).get("oom_kill") if self.version else None

    def _path_of(self, pid: int | str) -> str:
        """The memory cgroup of a process; a reason (without a leading /) when it cannot be told."""
        try:
            paths = own_paths(self._proc / str(pid) / "cgroup")
        except (OSError, ValueError) as error:
            return f"cgroup of process {pid} cannot be read: {error}"
        path = paths.get("memory" if self.version == 1 else "", "")
        if not path.startswith("/") or ".." in path.split("/"):
            return f"process {pid} is in a cgroup that this agent does not see ({path or 'none'})"
        return path

    def place_of(self, pid: int, *, folder: str = "") -> Place:
        """Where the memory of this process is charged; `folder` is its memory cgroup, where that is known."""
        if not self.version:
            return Place(0, why=self.why)
        if folder:
            mount = str(self.mount)
            if folder.startswith(f"{mount}/"):
                return Place(self.version, self.mount, folder[len(mount) :])
            return Place(0, why=f"{folder} is not below {mount}")
        path = self._path_of(pid)
        if not path.startswith("/"):
            return Place(0, why=path)
        if path == "/":  # also what the kernel says of one that has just ended
            return Place(0, why=f"process {pid} is in the root cgroup: no boundary but the machine")
        if not (self.mount / path.lstrip("/")).is_dir():
            return Place(0, why=f"cgroup {path} is not to be seen below {self.mount}")
        return Place(self.version, self.mount, path, own=level_name(path).startswith("container "))

    def read(self, place: Place, *, thorough: bool = True) -> tuple[LevelReading, ...]:
        """All levels from the component's own up to the root of the hierarchy; () when the place is unknown.

        Not `thorough`: only use and events, as often as every second.
        """
        if not place.version:
            return ()
        return tuple(self._level(place, path, thorough) for path in levels_of(place.path))

    def _level(self, place: Place, path: str, thorough: bool) -> LevelReading:  # noqa: FBT001
        if self._round is None:
            return read_level(place.mount, path, version=place.version, thorough=thorough)
        key = (path, thorough)
        if key not in self._round:
            self._round[key] = read_level(place.mount, path, version=place.version, thorough=thorough)
        return self._round[key]


def levels_of(path: str) -> tuple[str, ...]:
    """`/a/b` to (`/a/b`, `/a`). The root has no figures of its own: that is the machine."""
    parts = [part for part in path.split("/") if part][-LEVELS_MAX:]
    return tuple(f"/{'/'.join(parts[:count])}" for count in range(len(parts), 0, -1))


def read_level(mount: Path, path: str, *, version: int, thorough: bool = True) -> LevelReading:
    """One level. A file that is missing or makes no sense leaves its figure unknown."""
    folder = f"{mount}/{path.lstrip('/')}"
    if version == 1:
        return _read_v1(folder, path, thorough)
    return _read_v2(folder, path, thorough)


def _read_v2(folder: str, path: str, thorough: bool) -> LevelReading:  # noqa: FBT001
    current = bytes_of(_text(f"{folder}/memory.current"))
    limit, limited = limit_of(_text(f"{folder}/memory.max"))
    events = keyed(_text(f"{folder}/memory.events"))
    local = keyed(_text(f"{folder}/memory.events.local"))
    why = "" if current is not None else f"no memory.current in {path}"
    if not thorough:
        return LevelReading(
            path=path, name=level_name(path), current_bytes=current, limit_bytes=limit, limited=limited,
            events=events, local=local, why=why,
        )  # fmt: skip
    stat = keyed(_text(f"{folder}/memory.stat"))
    some, full = stalled(_text(f"{folder}/memory.pressure"))
    return LevelReading(
        path=path, name=level_name(path), current_bytes=current, limit_bytes=limit, limited=limited,
        peak_bytes=bytes_of(_text(f"{folder}/memory.peak")), events=events, local=local,
        rss_bytes=stat.get("anon"), mapped_bytes=stat.get("file_mapped"),
        some_avg10=some, full_avg10=full, why=why,
    )  # fmt: skip


def _read_v1(folder: str, path: str, thorough: bool) -> LevelReading:  # noqa: FBT001
    current = bytes_of(_text(f"{folder}/memory.usage_in_bytes"))
    limit, limited = limit_of(_text(f"{folder}/memory.limit_in_bytes"))
    control = keyed(_text(f"{folder}/memory.oom_control"))
    events: dict[str, int] = {}
    if (hits := bytes_of(_text(f"{folder}/memory.failcnt"))) is not None:
        events["max"] = hits
    if "oom_kill" in control:
        events["oom_kill"] = control["oom_kill"]
    why = "" if current is not None else f"no memory.usage_in_bytes in {path}"
    if not thorough:
        return LevelReading(
            path=path, name=level_name(path), current_bytes=current, limit_bytes=limit, limited=limited,
            events=events, local=events, why=why,
        )  # fmt: skip
    stat = keyed(_text(f"{folder}/memory.stat"))
    return LevelReading(
        path=path, name=level_name(path), current_bytes=current, limit_bytes=limit, limited=limited,
        peak_bytes=bytes_of(_text(f"{folder}/memory.max_usage_in_bytes")), events=events, local=events,
        rss_bytes=stat.get("total_rss", stat.get("rss")),
        mapped_bytes=stat.get("total_mapped_file", stat.get("mapped_file")), why=why,
    )  # fmt: skip


# -- parsers ------------------------------------------------------------------------------------------


def bytes_of(text: str | None) -> int | None:
    """A single number of a size that can be; None for all else."""
    if text is None:
        return None
    word = text.strip()
    if not (word.isascii() and word.isdigit()) or len(word) > 20:
        return None
    value = int(word)
    return value if value < 1 << 63 else None


def limit_of(text: str | None) -> tuple[int | None, bool | None]:
    """(bytes, is there a limit). (None, False) = none; (None, None) = unknown."""
    if text is None:
        return None, None
    if text.strip() == "max":
        return None, False
    value = bytes_of(text)
    if value is None:
        return None, None
    return (None, False) if value >= NO_LIMIT_BYTES else (value, True)


def keyed(text: str | None) -> dict[str, int]:
    """Lines of `name number`; others are left out."""
    found: dict[str, int] = {}
    for line in (text or "").splitlines():
        name, _, value = line.partition(" ")
        number = bytes_of(value)
        if name and number is not None:
            found[name] = number
    return found


def stalled(text: str | None) -> tuple[float | None, float | None]:
    """avg10 of `some` and `full` in a pressure file, percent of time; None where there is none."""
    found: dict[str, float] = {}
    for line in (text or "").splitlines():
        kind, _, rest = line.partition(" ")
        for word in rest.split():
            if word.startswith("avg10=") and re.fullmatch(r"\d{1,3}(\.\d{1,6})?", word[6:], re.ASCII):
                value = float(word[6:])
                if value <= 100:
                    found[kind] = value
    return found.get("some"), found.get("full")


def level_name(path: str) -> str:
    """What an operator calls this level: `container 3f2a91c0ffee`, `slice rig.slice`, `group rag`."""
    last = path.rstrip("/").rsplit("/", 1)[-1]
    if found := _CONTAINER.search(last):
        return f"container {found[1][:12]}"
    if found := _POD.search(last):
        return f"pod {found[1].replace('_', '-')}"
    if not last:
        return "machine"
    if last.endswith(".slice"):
        return f"slice {last}"
    if last.endswith(".service"):
        return f"unit {last}"
    if last.endswith(".scope"):
        return f"scope {last}"
    if last in {"docker", "podman", "machine", "lxc"}:
        return f"all containers of {last}"
    return f"group {last}"


def _text(path: str) -> str | None:
    """The file's text; None when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(READ_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return None

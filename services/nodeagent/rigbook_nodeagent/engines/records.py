"""What the process engine remembers of a component across its own restarts: one small file each.

The file is only appended to, one JSON line per fact, so it is whole after a kill -9 in any moment (a torn
last line is ignored). It is not synced: after a power cut the processes are gone too, and the boot id
says so.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.values import FrozenType

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["EndSeen", "Entry", "Intent", "Record", "Removed", "Spawned", "StopOrdered", "append", "read"]

RECORD_BYTES_MAX: Final = 16 * 1024**2  # a component restarted a hundred thousand times


class _Line(msgspec.Struct, metaclass=FrozenType, omit_defaults=True, tag_field="fact"):
    """Root of the facts."""


class Intent(_Line, tag="intent"):
    """Written before the program is started, so that no process of ours is without a record."""

    demand: str
    epoch: int
    component: str
    boot: str
    since: str
    cards: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()


class Spawned(_Line, tag="spawned"):
    pid: int
    start_ticks: int


class StopOrdered(_Line, tag="stop_ordered"):
    """Written before the first signal: what ends afterwards was stopped by us."""

    at: str


class EndSeen(_Line, tag="ended"):
    """`returncode` as subprocess has it (negative = signal); None = nobody watched when it ended."""

    at: str
    returncode: int | None = None
    oom_killed: bool | None = None


class Removed(_Line, tag="removed"):
    """Its end was published; only the output is kept for a while."""


Entry = Intent | Spawned | StopOrdered | EndSeen | Removed


class Record(msgspec.Struct, kw_only=True):
    """The facts of the last start of a component, folded."""

    intent: Intent
    spawned: Spawned | None = None
    stop_ordered: StopOrdered | None = None
    end: EndSeen | None = None
    removed: bool = False


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def append(path: Path, *entries: Entry) -> None:
    """Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, b"".join(_encoder.encode(entry) + b"\n" for entry in entries))
    finally:
        os.close(handle)


def read(path: Path) -> Record | None:
    """None when there is no record, or none of it can be read."""
    try:
        with path.open("rb") as file:
            lines = file.read(RECORD_BYTES_MAX).splitlines()
    except OSError:
        return None
    record: Record | None = None
    for line in lines:
        try:
            entry = _decoder.decode(line)
        except msgspec.DecodeError:
            continue  # torn by a crash
        if isinstance(entry, Intent):
            record = Record(intent=entry)
        elif record is None:
            continue
        elif isinstance(entry, Spawned):
            record.spawned = entry
        elif isinstance(entry, StopOrdered):
            record.stop_ordered = entry
        elif isinstance(entry, EndSeen):
            record.end = entry
        else:
            record.removed = True
    return record

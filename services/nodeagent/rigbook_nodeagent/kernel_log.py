"""What the kernel's log says of memory kills and of cards: /dev/kmsg, where it may be read.

Times are seconds since boot on the kernel's own clock, which is Python's `time.monotonic` on Linux. Of a
memory kill it names the level whose limit was hit (`oom_memcg`), or that it was the machine (`global_oom`).
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
from typing import TYPE_CHECKING, Final

from rigbook_nodeagent.circumstances import CardTrouble, MemoryKill

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["NO_LOG", "KernelLog", "record_of"]

PATH: Final = "/dev/kmsg"
NO_LOG: Final = ""  # a machine whose kernel log is not looked at
RECORD_BYTES_MAX: Final = 8192  # the kernel hands out one record per read, never more than this
KEPT_MAX: Final = 256
READS_MAX: Final = 4096  # of one look: a flood of other messages must not hold the agent

_KILL: Final = re.compile(r"oom-kill:constraint=(CONSTRAINT_[A-Z_]+)(.*)", re.ASCII)
_PAIR: Final = re.compile(r"(oom_memcg|task_memcg|task|pid|uid)=([^,]*)", re.ASCII)
_XID: Final = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{4,20})\): (\d{1,4})(?:, (?:pid='?(\d{1,10}|<unknown>)'?)?)?(.*)",
    re.ASCII,
)


def record_of(raw: bytes) -> MemoryKill | CardTrouble | None:
    """One record of /dev/kmsg (`priority,number,microseconds,flags;text`); None for all that is neither."""
    head, separator, rest = raw.partition(b";")
    fields = head.split(b",")
    if not separator or len(fields) < 3 or not fields[2].isdigit() or len(fields[2]) > 18:
        return None
    at = int(fields[2]) / 1e6
    text = rest.partition(b"\n")[0].decode("utf-8", "replace")
    if found := _KILL.search(text):
        pairs = dict(_PAIR.findall(found[2]))
        everywhere = "global_oom" in found[2] or found[1] != "CONSTRAINT_MEMCG"
        pid = pairs.get("pid", "")
        return MemoryKill(
            at=at,
            everywhere=everywhere,
            level="" if everywhere else pairs.get("oom_memcg", ""),
            victim_level=pairs.get("task_memcg", ""),
            program=pairs.get("task", "")[:64],
            pid=int(pid) if pid.isdigit() and len(pid) < 11 else 0,
            text=_kill_text(found[1], pairs)[:300],
        )
    if found := _XID.search(text):
        return CardTrouble(at=at, card=found[1], code=f"xid {int(found[2])}", text=text[:300])
    return None


def _kill_text(constraint: str, pairs: Mapping[str, str]) -> str:
    """The kernel's line without what nobody needs."""
    where = pairs.get("oom_memcg")
    limit = f"at the limit of {where}" if where else "for the whole machine"
    return f"oom-kill ({constraint}) {limit}: {pairs.get('task', '?')}, pid {pairs.get('pid', '?')}, of {pairs.get('task_memcg', '?')}"


class KernelLog:
    """Follows the kernel's log from now on; keeps the last records that matter. Never blocks."""

    def __init__(self, path: str = PATH) -> None:
        self._path = path
        self._handle = -1
        self.why = "not opened"
        self.lost = 0  # records that were overwritten before we read them
        self._kept: collections.deque[MemoryKill | CardTrouble] = collections.deque(maxlen=KEPT_MAX)

    def open(self) -> None:
        """Never raises: where the log may not be read, `why` says so."""
        if self._path == NO_LOG:
            self.why = "not looked at"
            return
        try:
            self._handle = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._handle, 0, os.SEEK_END)  # what was before is of no interest
        except OSError as error:
            self.close()
            self.why = f"the kernel's log cannot be read: {error}"
        else:
            self.why = ""

    def close(self) -> None:
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = -1

    def look(self) -> Sequence[MemoryKill | CardTrouble]:
        """Read what is new; all that is kept, oldest first."""
        for _ in range(READS_MAX):
            if self._handle < 0:
                break
            try:
                raw = os.read(self._handle, RECORD_BYTES_MAX)
            except BlockingIOError:
                break
            except BrokenPipeError:  # it ran ahead of us
                self.lost += 1
                continue
            except OSError as error:
                self.close()
                self.why = f"the kernel's log broke off: {error}"
                break
            if not raw:
                break
            record = record_of(raw)
            if record is not None:
                self._kept.append(record)
        return tuple(self._kept)

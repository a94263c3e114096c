"""Handles on processes: an end is noticed at once, also of processes that are not our children."""

from __future__ import annotations

import fcntl
import os
import re
import struct
from typing import Final

__all__ = ["exit_returncode", "open_pidfd", "tells_exit"]

# linux/pidfd.h: _IOWR(0xFF, 11, struct pidfd_info), 64 bytes in its first version. The exit status of any
# process whose handle was open when it was reaped: Linux 6.15 and later.
PIDFD_GET_INFO: Final = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
PIDFD_INFO_EXIT: Final = 1 << 3
EXIT_CODE_OFFSET: Final = 60
INFO_BYTES: Final = 64


def open_pidfd(pid: int) -> int | None:
    """None when the process is gone, the kernel is older than 5.3, or no handle is left: then poll."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def exit_returncode(pidfd: int) -> int | None:
    """Exit code of a process that was reaped by somebody else (negative = signal).

    None when the kernel does not tell, or does not tell yet: its parent has not reaped it.
    """
    info = bytearray(INFO_BYTES)
    struct.pack_into("=Q", info, 0, PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except OSError:
        return None
    if not struct.unpack_from("=Q", info, 0)[0] & PIDFD_INFO_EXIT:
        return None
    status: int = struct.unpack_from("=i", info, EXIT_CODE_OFFSET)[0]
    return os.waitstatus_to_exitcode(status)


def tells_exit(release: str) -> bool:
    """Does this kernel (`uname -r`) tell the exit status of a process that is not our child?"""
    found = re.match(r"(\d+)\.(\d+)", release, re.ASCII)
    return found is not None and (int(found[1]), int(found[2])) >= (6, 15)

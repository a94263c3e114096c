"""A disk of the test's own: ext4 on a loop device, whose power can be cut, that can be slow, and that can be full.

The power cut is `ioctl FS_IOC_SHUTDOWN` with NOLOGFLUSH: from that moment the filesystem writes nothing more, not
even its journal, so that after a new mount only what was synced before is there. Needs root and loop devices.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Self

__all__ = ["Disk", "why_no_disk"]

FS_IOC_SHUTDOWN = 0x8004587D
NOLOGFLUSH = 2
BLKIO = Path("/sys/fs/cgroup/blkio")
COMMAND_SECONDS = 20


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


def why_no_disk() -> str:
    """Why no such disk can be made here; "" = it can."""
    if os.geteuid() != 0:
        return "needs root for a loop device"
    missing = [tool for tool in ("losetup", "mkfs.ext4", "mount", "umount") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    try:
        _do("losetup", "-f")
    except OSError as error:
        return f"no loop device to be had: {error}"
    return ""


class Disk:
    """A mounted filesystem at `path`; nothing of it is left when the block ends."""

    def __init__(self, folder: Path, *, mib: int) -> None:
        self._image = folder / "disk.img"
        self.path = folder / "disk"
        self._mib = mib
        self._loop = ""
        self._cgroup: Path | None = None

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True)
        try:
            _do("truncate", "-s", f"{self._mib}M", str(self._image))
            _do("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
            self._loop = _do("losetup", "--show", "-f", str(self._image))
            _do("mount", self._loop, str(self.path))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._cgroup is not None:
            with contextlib.suppress(OSError):
                for pid in (self._cgroup / "cgroup.procs").read_text().split():
                    (BLKIO / "cgroup.procs").write_text(pid)
                self._cgroup.rmdir()
        with contextlib.suppress(OSError):
            _do("umount", str(self.path))
        with contextlib.suppress(OSError):
            _do("umount", "-l", str(self.path))  # somebody is still in there: gone when he is
        if self._loop:
            with contextlib.suppress(OSError):
                _do("losetup", "-d", self._loop)
        self._image.unlink(missing_ok=True)

    def cut_power(self) -> None:
        """From here on nothing reaches the disk any more."""
        root = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(root, FS_IOC_SHUTDOWN, struct.pack("I", NOLOGFLUSH))
        finally:
            os.close(root)

    def restore_power(self) -> None:
        """Mount it again, as after a boot; whoever had files open there must be gone."""
        _do("umount", str(self.path))
        _do("mount", self._loop, str(self.path))

    def fill(self, *, leave_bytes: int) -> Path:
        """Ballast that leaves this much; delete it to make room."""
        ballast = self.path / "ballast"
        free = os.statvfs(self.path).f_bavail * os.statvfs(self.path).f_frsize
        if free > leave_bytes:
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free - leave_bytes)
        return ballast

    def slow_down(self, pid: int, *, writes_per_second: int) -> None:
        """This process' writes are throttled by the kernel (cgroup v1, blkio). Raises OSError where there is none."""
        if self._cgroup is None:
            self._cgroup = BLKIO / f"rigbook-test-{os.getpid()}-{Path(self._loop).name}"
            self._cgroup.mkdir()
        number = Path(self._loop).stat().st_rdev
        device = f"{os.major(number)}:{os.minor(number)}"
        (self._cgroup / "blkio.throttle.write_iops_device").write_text(f"{device} {writes_per_second}")
        (self._cgroup / "cgroup.procs").write_text(str(pid))

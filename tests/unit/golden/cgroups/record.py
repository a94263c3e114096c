"""Records the trees of this folder: to be run as root on a machine (or kernel) with cgroup v2 mounted and no other load.

They were recorded under Debian's user-mode Linux 6.1 with 256 MiB, as its first process:

    linux.uml mem=256M rootfstype=hostfs rootflags=/ rw cgroup_no_v1=all log_buf_len=1M init=SCRIPT

where SCRIPT mounts /proc, /sys and cgroup2 and runs this file. Each line of output is one tree.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")
FILES = ("current", "max", "peak", "events", "events.local", "stat", "pressure")
STAT = ("anon", "file", "file_mapped", "shmem", "kernel")
MIB = 1024**2
CONTAINER = f"docker-3f2a91c0ffee{'0' * 52}.scope"
EAT = "import sys; b = [bytearray(b'x') * (1 << 20) for _ in range(int(sys.argv[1]))]"


def tree(paths: list[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        folder = ROOT / path.lstrip("/")
        texts = {
            f"memory.{name}": (folder / f"memory.{name}").read_text()
            for name in FILES
            if (folder / f"memory.{name}").exists()
        }
        texts["memory.stat"] = "".join(
            line for line in texts["memory.stat"].splitlines(keepends=True) if line.split()[0] in STAT
        )
        found[path] = texts
    return found


def kernel_log() -> list[str]:
    return subprocess.run(["dmesg", "-r"], check=True, capture_output=True, text=True).stdout.splitlines()


def record(about: str, levels: dict[str, int], command: list[str]) -> dict[str, Any]:
    """`levels`: names from the outside inwards, with their limits in bytes (0 = none)."""
    paths: list[str] = []
    for number, (name, limit) in enumerate(levels.items()):
        paths.append(f"{paths[-1] if paths else ''}/{name}")
        folder = ROOT / paths[-1].lstrip("/")
        folder.mkdir(exist_ok=True)
        if limit:
            (folder / "memory.max").write_text(str(limit))
        if number < len(levels) - 1:
            (folder / "cgroup.subtree_control").write_text("+memory")
    inner = ROOT / paths[-1].lstrip("/")
    before, heard = tree(paths), set(kernel_log())
    process = subprocess.Popen(command, preexec_fn=lambda: (inner / "cgroup.procs").write_text("0"))  # noqa: PLW1509
    time.sleep(0.2)
    during = tree(paths)
    code = process.wait()
    after = tree(paths)
    log = [line for line in kernel_log() if line not in heard and "oom-kill:" in line]
    for path in reversed(paths):
        (ROOT / path.lstrip("/")).rmdir()
    return {
        "about": about,
        "exit": code,
        "paths": paths,
        "before": before,
        "during": during,
        "after": after,
        "log": log,
    }


def main() -> None:
    (ROOT / "cgroup.subtree_control").write_text("+memory")
    eat = [sys.executable, "-c", EAT]
    child = ["/bin/sh", "-c", f'{sys.executable} -c "{EAT}" 80; exit 1']
    for case in (
        ("container_limit", {"system.slice": 0, CONTAINER: 40 * MIB}, [*eat, "80"]),
        ("slice_limit", {"rig.slice": 40 * MIB, CONTAINER: 80 * MIB}, [*eat, "120"]),
        ("child_only", {"rig.slice": 0, CONTAINER: 40 * MIB}, child),
        ("no_trouble", {"rig.slice": 0, CONTAINER: 80 * MIB}, [*eat, "10"]),
        ("machine", {"rig.slice": 0, CONTAINER: 900 * MIB}, [*eat, "600"]),
    ):
        print(json.dumps(record(*case)), flush=True)


if __name__ == "__main__":
    main()

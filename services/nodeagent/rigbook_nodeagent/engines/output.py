"""What a component writes to standard output and error: a file that stays bounded.

The program writes to the file itself (in append mode), so nothing stands between it and the disk and an
agent that is gone blocks nobody. When the file passes the limit its end is copied to `<name>.1` and the
file is emptied in place; what is written between these two steps, microseconds, is lost. The size is
looked at every two seconds, so a burst can pass the limit in between.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

__all__ = ["follow", "open_for_append", "tail", "trim"]

BLOCK_BYTES: Final = 64 * 1024
TAIL_BYTES_MAX: Final = 8 * 1024**2  # of a request for the last lines, however many are asked for
FOLLOW_POLL_SECONDS: Final = 0.1


def open_for_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


def trim(path: Path, *, bytes_max: int) -> bool:
    """Move the end of a file that has grown too big to `<name>.1`. True when that was done."""
    try:
        size = path.stat().st_size
        if size <= bytes_max:
            return False
        with path.open("r+b") as file, path.with_name(f"{path.name}.1").open("wb") as older:
            file.seek(size - bytes_max)
            while block := file.read(BLOCK_BYTES):
                older.write(block)
            file.truncate(0)
    except OSError:
        return False
    return True


def tail(path: Path, lines_max: int) -> tuple[list[bytes], int]:
    """The last lines (newline included), and the position in the file after them."""
    older = path.with_name(f"{path.name}.1")
    content, position = _end_of(path, TAIL_BYTES_MAX)
    if content.count(b"\n") < lines_max:
        content = _end_of(older, TAIL_BYTES_MAX - len(content))[0] + content
    lines = content.splitlines(keepends=True)
    return (lines[-lines_max:] if lines_max > 0 else []), position


async def follow(path: Path, position: int, ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Lines written after `position`, until the component has ended and all is read."""
    rest = b""
    while True:
        last_round = ended()  # asked before reading: what it wrote at its end is read too
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < position:
                    position = 0  # trimmed meanwhile
                file.seek(position)
                while block := file.read(BLOCK_BYTES):
                    position += len(block)
                    *lines, rest = (rest + block).split(b"\n")
                    for line in lines:
                        yield line + b"\n"
        except OSError:
            last_round = True
        if last_round:
            break
        await asyncio.sleep(FOLLOW_POLL_SECONDS)
    if rest:
        yield rest


def _end_of(path: Path, bytes_max: int) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - bytes_max))
            content = file.read(bytes_max)
            return content, file.tell()
    except OSError:
        return b"", 0

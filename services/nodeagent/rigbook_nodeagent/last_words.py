"""What a component's last lines of output say about memory on the card. Pure, and total: any bytes will do.

Only the matched words go into the evidence, never the line around them: it may hold anything.
"""

from __future__ import annotations

import re
from typing import Final

from rigbook_nodeagent.circumstances import MemoryRefusal

__all__ = ["LINES_MAX", "memory_refusal"]

LINES_MAX: Final = 400
TEXT_BYTES_MAX: Final = 256 * 1024
TEXT_LENGTH_MAX: Final = 200
_SIZE: Final = r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s?(bytes|[KMGT]i?B)"
# The frameworks' own words. `measured`: an engine measured the card to reserve a share of it.
_FAILURES: Final[tuple[tuple[re.Pattern[str], bool], ...]] = (
    (re.compile(r"No available memory for the cache blocks", re.ASCII), True),
    (
        re.compile(
            rf"Free memory on device [^\n]{{0,80}}? is less than desired GPU memory utilization"
            rf"(?: \([0-9.]+, {_SIZE}\))?",
            re.ASCII,
        ),
        True,
    ),
    (re.compile(r"Error in memory profiling\. Initial free memory", re.ASCII), True),
    (re.compile(rf"CUDA out of memory(?:\. Tried to allocate {_SIZE})?", re.ASCII), False),
    (re.compile(rf"HIP out of memory(?:\. Tried to allocate {_SIZE})?", re.ASCII), False),
    (re.compile(rf"allocating {_SIZE} on device [0-9]+: cudaMalloc failed: out of memory", re.ASCII), False),
    (re.compile(r"cudaMalloc failed: out of memory", re.ASCII), False),
    (re.compile(r"CUDA error: out of memory", re.ASCII), False),
    (re.compile(r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory", re.ASCII), False),
    (re.compile(r"CUBLAS_STATUS_ALLOC_FAILED", re.ASCII), False),
    (re.compile(r"torch\.(?:cuda\.)?OutOfMemoryError", re.ASCII), False),
)
_UNITS: Final = {"b": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def memory_refusal(component: str, output: bytes) -> MemoryRefusal | None:
    """The last allocation failure in the output; None when it tells of none."""
    lines = output[-TEXT_BYTES_MAX:].decode("utf-8", "replace").splitlines()[-LINES_MAX:]
    for line in reversed(lines):
        for pattern, measured in _FAILURES:
            found = pattern.search(line)
            if found is not None:
                return MemoryRefusal(
                    component=component,
                    text=found[0][:TEXT_LENGTH_MAX],
                    wanted_bytes=_bytes(found),
                    measured=measured,
                )
    return None


def _bytes(found: re.Match[str]) -> int | None:
    if found.lastindex is None or found.lastindex < 2 or found[1] is None:
        return None
    return int(float(found[1]) * _UNITS[found[2][0].lower()])

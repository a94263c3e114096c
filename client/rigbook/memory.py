"""Memory as people write it: `24`, `24GB`, `24GiB`, `24576MiB`, and with model and count `A100:80GB:2`.

G, GB and GiB all mean 1024**3 bytes, and so on for the other units, because that is how cards are sold
and named: an "RTX 4090 24GB" has 24 GiB, an "A100 80GB" has 80 GiB. Read as 10**9, `24GB` would ask for
22.4 GiB and leave a hole on the card that nobody meant. A bare number is GiB.

On the wire memory is in bytes; this grammar stands at the edge, for people only.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

import msgspec
from rigbook_schemas.values import MEMORY_BYTES_MAX, MEMORY_BYTES_MIN

__all__ = ["GpuAsk", "MemoryTextError", "parse_gpu", "parse_memory", "parse_size"]

MIB: Final = 1024**2
GIB: Final = 1024**3
UNITS: Final = {
    "": GIB,
    "m": MIB, "mb": MIB, "mib": MIB,
    "g": GIB, "gb": GIB, "gib": GIB,
    "t": 1024 * GIB, "tb": 1024 * GIB, "tib": 1024 * GIB,
}  # fmt: skip
EXPECTED: Final = "expected memory such as 24, 24GB, 24GiB or 24576MiB"
COUNT_MAX: Final = 1024
MODEL_MAX: Final = 128

_SIZE: Final = re.compile(r"\s*(?P<number>[^A-Za-z\s]*)\s*(?P<unit>[A-Za-z]*)\s*")
_NUMBER: Final = re.compile(r"\d{1,18}(\.\d{1,18})?")


class MemoryTextError(ValueError):
    """Not memory as this grammar knows it; the text says what is wrong and what was expected."""

    code = "invalid_memory"


class GpuAsk(msgspec.Struct, frozen=True):
    """What `--gpu` asks: `memory_bytes` on each of `count` cards of a `model` ("" = any)."""

    memory_bytes: int
    count: int = 1
    model: str = ""


def parse_size(text: str) -> int:
    """Bytes of `24`, `24GB`, `24GiB`, `1.5T`, ...; any amount from one byte's worth up. Raises MemoryTextError."""
    found = _SIZE.fullmatch(text)
    if not text.strip() or found is None:
        raise MemoryTextError(f"{_shown(text)} is not memory; {EXPECTED}")
    number, unit = found["number"], found["unit"].lower()
    if not _NUMBER.fullmatch(number):
        if number.startswith("-"):
            raise MemoryTextError(f"{_shown(text)}: memory cannot be negative; {EXPECTED}")
        if "," in number:
            raise MemoryTextError(f"{_shown(text)}: write the decimal point as '.'; {EXPECTED}")
        raise MemoryTextError(f"{_shown(text)} is not memory; {EXPECTED}")
    if unit not in UNITS:
        hint = "; bytes are not written here" if unit in ("b", "byte", "bytes") else ""
        hint = "; that is bits" if unit in ("gbit", "mbit", "gbps") else hint
        raise MemoryTextError(
            f"{_shown(text)}: unknown unit {found['unit']!r}{hint}; use MiB, GiB or TiB (MB, GB and TB mean the same)"
        )
    exact = Fraction(number) * UNITS[unit]
    if exact.denominator != 1:
        raise MemoryTextError(f"{_shown(text)} is no whole number of bytes; use fewer digits, or MiB")
    return int(exact)


def parse_memory(text: str) -> int:
    """Bytes of GPU memory per card, between 16 MiB and 16 TiB. Raises MemoryTextError."""
    size = parse_size(text)
    if size < MEMORY_BYTES_MIN:
        raise MemoryTextError(
            f"{_shown(text)} is {size / MIB:g} MiB; a demand is at least 16 MiB; {EXPECTED}"
        )
    if size > MEMORY_BYTES_MAX:
        raise MemoryTextError(
            f"{_shown(text)} is {size / GIB:.0f} GiB; no card has that (at most 16 TiB); a bare number is GiB: "
            "write MiB if you mean MiB"
        )
    return size


def parse_gpu(text: str) -> GpuAsk:
    """`24GB`, `24GB:2` (two cards), `A100:80GB`, `A100:80GB:2`. Raises MemoryTextError."""
    parts = [part.strip() for part in text.split(":")]
    if len(parts) == 1:
        return GpuAsk(parse_memory(text))
    if len(parts) > 3 or not all(parts):
        raise MemoryTextError(
            f"{_shown(text)}: expected MEMORY, MEMORY:COUNT, MODEL:MEMORY or MODEL:MEMORY:COUNT"
        )
    if len(parts) == 3:
        if _looks_like_size(parts[0]):
            raise MemoryTextError(
                f"{_shown(text)}: {parts[0]!r} stands where the model belongs; expected MODEL:MEMORY:COUNT"
            )
        return GpuAsk(parse_memory(parts[1]), _count(text, parts[2]), _model(text, parts[0]))
    if _looks_like_size(parts[0]):
        return GpuAsk(parse_memory(parts[0]), _count(text, parts[1]))
    return GpuAsk(parse_memory(parts[1]), 1, _model(text, parts[0]))


def _looks_like_size(part: str) -> bool:
    try:
        parse_size(part)
    except MemoryTextError:
        return False
    return True


def _count(text: str, part: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", part) or not 1 <= int(part) <= COUNT_MAX:
        raise MemoryTextError(f"{_shown(text)}: {part!r} is no number of cards (1 to {COUNT_MAX})")
    return int(part)


def _model(text: str, part: str) -> str:
    if len(part) > MODEL_MAX or not part.isprintable():
        raise MemoryTextError(
            f"{_shown(text)}: the model has more than {MODEL_MAX} characters or unprintable ones"
        )
    return part


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")

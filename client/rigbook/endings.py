"""How a workload ended, for a person: the evidence as one timeline, and a small plot of memory against each limit.

Pure: an `exited` event in, rows and lines out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rigbook_schemas.sentences import gib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_schemas.events import Exited
    from rigbook_schemas.values import Boundary

__all__ = ["boundary_lines", "plotted", "timeline"]

_BARS: Final = " ▁▂▃▄▅▆▇█"
_UNKNOWN: Final = "·"
_NAME_WIDTH_MAX: Final = 40


def timeline(exited: Exited, told_at: str) -> list[tuple[str, str, str, str]]:
    """(when, what, value, source), oldest first; what has no time of its own stands at the end's."""
    ended = max((end.ended for end in exited.ends if end.ended), default="") or told_at
    rows = [(item.at or ended, item.what, item.value, item.source) for item in exited.evidence]
    return sorted(rows, key=lambda row: row[0])


def plotted(points: Sequence[int], limit_bytes: int | None) -> str:
    """One character a point: empty is 0, a full block is the limit (or the highest point where there is none)."""
    known = [point for point in points if point >= 0]
    top = limit_bytes or max(known, default=0)
    if not top:
        return _UNKNOWN * len(points)
    height = len(_BARS) - 1
    return "".join(
        _UNKNOWN if point < 0 else _BARS[min(height, max(1 if point else 0, round(point / top * height)))]
        for point in points
    )


def boundary_lines(boundaries: Sequence[Boundary]) -> list[str]:
    """Two lines for each boundary: what it is with its figures, and its plot up to the end."""
    lines: list[str] = []
    for one in boundaries:
        if not one.points:
            continue
        name = f"{one.component} at {one.name}" if one.component else one.name
        limit = f" of {gib(one.limit_bytes)}" if one.limit_bytes is not None else ", no limit"
        counts = "".join(
            f", {word} {number}"
            for word, number in (("limit hit", one.limit_hits), ("killed", one.oom_kills))
            if number
        )
        seconds = one.every_seconds * max(1, len(one.points) - 1)
        lines.append(
            f"{name[:_NAME_WIDTH_MAX]:<{_NAME_WIDTH_MAX}} {gib(one.last_bytes)}{limit}, peak {gib(one.peak_bytes)}{counts}"
        )
        lines.append(f"  |{plotted(one.points, one.limit_bytes)}| last {seconds:.0f} s")
    return lines

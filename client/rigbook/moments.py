"""Moments and durations as people write them: `02:00`, `2026-11-30 02:00`, `2h ago`, `-15m`; `90s`, `1h30m`.

A text without a zone is local time. Where the clock is put back an hour, an hour happens twice; where it
is put forward, one never happens: both are said, with the texts that would be clear, and never guessed.
"""

from __future__ import annotations

import os
import re
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from pathlib import Path
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

__all__ = ["Moment", "MomentError", "ago", "local_zone", "parse_duration", "parse_moment", "rfc3339_of"]

EXPECTED: Final = "expected a moment such as 02:00, '2026-11-30 02:00', '2h ago', -15m, or RFC 3339"
EXPECTED_DURATION: Final = "expected a duration with its unit, such as 90s, 15m, 2h, 1h30m or 7d"
DURATION_SECONDS_MAX: Final = 10 * 366 * 86400
_UNIT_SECONDS: Final = {
    "ms": 0.001,
    "s": 1, "sec": 1, "second": 1, "seconds": 1,
    "m": 60, "min": 60, "minute": 60, "minutes": 60,
    "h": 3600, "hour": 3600, "hours": 3600,
    "d": 86400, "day": 86400, "days": 86400,
    "w": 604800, "week": 604800, "weeks": 604800,
}  # fmt: skip
_PIECE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([A-Za-z]+)\s*")
_CLOCK: Final = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")


class MomentError(ValueError):
    """Not a moment or duration; the text says what was expected."""

    code = "invalid_time"


class Moment(NamedTuple):
    """An instant, and how a text was understood when it left something open ("" = nothing)."""

    at: datetime  # with a zone
    note: str = ""


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `15m`, `2h`, `1h30m`, `7d`, `500ms`. The unit is never left out. Raises MomentError."""
    word = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?", word):
        raise MomentError(f"{_shown(text)} has no unit; {EXPECTED_DURATION}")
    total, at = 0.0, 0
    while at < len(word):
        piece = _PIECE.match(word, at)
        if piece is None or piece[2].lower() not in _UNIT_SECONDS:
            raise MomentError(f"{_shown(text)} is not a duration; {EXPECTED_DURATION}")
        total += float(piece[1]) * _UNIT_SECONDS[piece[2].lower()]
        at = piece.end()
    if not word:
        raise MomentError(f"{_shown(text)} is empty; {EXPECTED_DURATION}")
    if total > DURATION_SECONDS_MAX:
        raise MomentError(f"{_shown(text)} is more than ten years; {EXPECTED_DURATION}")
    return total


def parse_moment(text: str, *, now: datetime, zone: tzinfo) -> Moment:
    """The moment `text` means. `now` has a zone; `zone` is the user's. Raises MomentError.

    A clock time alone is its last occurrence up to now.
    """
    word = text.strip()
    if word.lower() == "now":
        return Moment(now)
    relative = word[1:] if word.startswith("-") else word[:-3] if word.lower().endswith("ago") else word
    if _is_duration(relative) or relative != word:
        return _relative(text, relative, now)
    clock = _CLOCK.fullmatch(word)
    if clock:
        return _last_occurrence(text, clock, now, zone)
    try:
        told = datetime.fromisoformat(word)
    except ValueError:
        raise MomentError(f"{_shown(text)} is not a moment; {EXPECTED}") from None
    if told.tzinfo is not None:
        return Moment(told)
    return Moment(_local(text, told, zone))


def rfc3339_of(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def local_zone() -> tzinfo:
    """The user's zone with its rules, so that a date in another season has that season's offset."""
    named = os.environ.get("TZ", "").lstrip(":")
    try:
        if named and not named.startswith("/"):
            return ZoneInfo(named)
        with Path(named or "/etc/localtime").open("rb") as rules:
            return ZoneInfo.from_file(rules, key="local")
    except (OSError, ValueError, ZoneInfoNotFoundError):
        return datetime.now().astimezone().tzinfo or UTC


def ago(seconds: float) -> str:
    """A span for people: `12s`, `3m10s`, `2h05m`, `4d03h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _is_duration(word: str) -> bool:
    """`10m` alone means 10 minutes ago, as other tools' --since does."""
    return re.fullmatch(r"(\d+(\.\d+)?\s*[A-Za-z]+\s*)+", word) is not None


def _relative(text: str, word: str, now: datetime) -> Moment:
    try:
        # in UTC: within a zone, datetime counts hours on the clock on the wall, and the night of a change is longer
        return Moment((now.astimezone(UTC) - timedelta(seconds=parse_duration(word))).astimezone(now.tzinfo))
    except (MomentError, OverflowError):
        raise MomentError(f"{_shown(text)} is not a moment; {EXPECTED}") from None


def _last_occurrence(text: str, clock: re.Match[str], now: datetime, zone: tzinfo) -> Moment:
    try:
        at = time(int(clock[1]), int(clock[2]), int(clock[3] or 0))
    except ValueError:
        raise MomentError(f"{_shown(text)}: no such time of day; {EXPECTED}") from None
    today = now.astimezone(zone).date()
    moment = _local(text, datetime.combine(today, at), zone)
    if moment.astimezone(UTC) <= now.astimezone(
        UTC
    ):  # datetimes of one zone compare by the clock on the wall
        return Moment(moment, f"{text.strip()} is taken as {_said(moment)}, today")
    before: date = today - timedelta(days=1)
    moment = _local(text, datetime.combine(before, at), zone)
    return Moment(moment, f"{text.strip()} is taken as {_said(moment)}, yesterday: today's is yet to come")


def _local(text: str, naive: datetime, zone: tzinfo) -> datetime:
    first, second = naive.replace(tzinfo=zone, fold=0), naive.replace(tzinfo=zone, fold=1)
    if first.utcoffset() == second.utcoffset():
        return first
    if _exists(first):
        raise MomentError(
            f"{_shown(text)} happened twice, as {_said(first)} and, after the clock was put back, as {_said(second)}; "
            f"write {first.isoformat()} or {second.isoformat()}"
        )
    raise MomentError(
        f"{_shown(text)} never happened: the clock was put forward over it; "
        f"did you mean {_said(first.astimezone(UTC).astimezone(zone))}?"
    )


def _exists(moment: datetime) -> bool:
    return moment.astimezone(UTC).astimezone(moment.tzinfo).replace(fold=0) == moment.replace(fold=0)


def _said(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%S %Z").rstrip()


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")

"""Moments and durations as people write them. Goal: a night of the clock change is never guessed at.

Method: a fixed `now` and a zone with a rule; Berlin puts its clock back on 2026-10-25 and forward on 2026-03-29.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigbook.moments import MomentError, ago, local_zone, parse_duration, parse_moment, rfc3339_of

BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2026, 11, 30, 12, 0, tzinfo=BERLIN)


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("now", "2026-11-30T11:00:00"),
        ("02:00", "2026-11-30T01:00:00"),
        ("11:59:59", "2026-11-30T10:59:59"),
        ("12:01", "2026-11-29T11:01:00"),
        ("2026-11-30 02:00", "2026-11-30T01:00:00"),
        ("2026-11-30", "2026-11-29T23:00:00"),
        ("2026-07-01 02:00", "2026-07-01T00:00:00"),  # summer's offset, though it is winter now
        ("2026-11-30T02:00:00Z", "2026-11-30T02:00:00"),
        ("2026-11-30T02:00:00+05:30", "2026-11-29T20:30:00"),
        ("2h ago", "2026-11-30T09:00:00"),
        ("1h30m ago", "2026-11-30T09:30:00"),
        ("-15m", "2026-11-30T10:45:00"),
        ("10m", "2026-11-30T10:50:00"),
        ("2 days ago", "2026-11-28T11:00:00"),
    ],
)
def test_moments(text: str, utc: str) -> None:
    assert rfc3339_of(parse_moment(text, now=NOW, zone=BERLIN).at) == f"{utc}.000000Z"


def test_a_clock_time_says_which_day_it_means() -> None:
    assert "today" in parse_moment("02:00", now=NOW, zone=BERLIN).note
    assert "yesterday" in parse_moment("23:00", now=NOW, zone=BERLIN).note
    assert parse_moment("2026-11-30 02:00", now=NOW, zone=BERLIN).note == ""


def test_an_hour_that_happened_twice_is_named_not_guessed() -> None:
    with pytest.raises(MomentError, match="happened twice") as caught:
        parse_moment("2026-10-25 02:30", now=NOW, zone=BERLIN)
    for clear in ("2026-10-25T02:30:00+02:00", "2026-10-25T02:30:00+01:00"):
        assert clear in str(caught.value)
        parse_moment(clear, now=NOW, zone=BERLIN)  # what it proposes works


def test_an_hour_that_never_happened_is_named() -> None:
    with pytest.raises(MomentError, match=r"never happened.*03:30"):
        parse_moment("2026-03-29 02:30", now=NOW, zone=BERLIN)


def test_ago_counts_real_hours_over_a_clock_change() -> None:
    morning = datetime(2026, 10, 25, 6, 0, tzinfo=BERLIN)
    at = parse_moment("6h ago", now=morning, zone=BERLIN).at
    assert morning.astimezone(UTC) - at.astimezone(UTC) == timedelta(hours=6)


def test_the_last_occurrence_is_judged_in_real_time() -> None:
    # 02:45 the second time round: 02:50 of today is both before and after it, so it is named
    second = datetime(2026, 10, 25, 2, 45, fold=1, tzinfo=BERLIN)
    with pytest.raises(MomentError, match="happened twice"):
        parse_moment("02:50", now=second, zone=BERLIN)


@pytest.mark.parametrize(
    "text", ["", "yesterday", "25:00", "02:60", "2026-13-01", "2h from now", "-", "ago", "-5", "5"]
)
def test_wrong_moments_say_what_was_expected(text: str) -> None:
    with pytest.raises(MomentError, match="expected a moment"):
        parse_moment(text, now=NOW, zone=BERLIN)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("15m", 900),
        ("2h", 7200),
        ("1h30m", 5400),
        ("7d", 604800),
        ("500ms", 0.5),
        ("5 min", 300),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("90", "has no unit"),
        ("", "is empty"),
        ("2x", "is not a duration"),
        ("h", "is not a duration"),
        ("-2h", "is not a"),
        ("99999d", "ten years"),
    ],
)
def test_wrong_durations_say_why(text: str, words: str) -> None:
    with pytest.raises(MomentError, match=words):
        parse_duration(text)


@given(st.text(max_size=30))
def test_any_text_is_a_moment_or_refused(text: str) -> None:
    for parse in (parse_duration, lambda t: parse_moment(t, now=NOW, zone=BERLIN)):
        with contextlib.suppress(MomentError):
            parse(text)


def test_spans_for_people() -> None:
    assert [ago(s) for s in (-1, 5, 190, 7500, 270000)] == ["0s", "5s", "3m10s", "2h05m", "3d03h"]


def test_the_local_zone_has_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    assert str(local_zone()) == "Europe/Berlin"
    monkeypatch.setenv("TZ", "No/Such")
    assert local_zone() is not None

"""Following output by asking for its end again. Goal: nothing twice, nothing lost while the window still overlaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rigbook.logtext import fresh


def test_growing_and_moving_windows() -> None:
    assert fresh("", "a\n") == "a\n"
    assert fresh("a\n", "a\nb\n") == "b\n"
    assert fresh("a\n", "a\n") == ""
    assert fresh("a\nb\nc\n", "c\nd\n") == "c\nd\n"  # too little in common to be sure: shown again
    long = "".join(f"line {n}\n" for n in range(100))
    assert fresh(long, long[300:] + "new\n") == "new\n"
    assert fresh("old\n" * 10, "other\n") == "other\n"


def test_the_same_line_again_and_again() -> None:
    before = "tick\n" * 100
    assert fresh(before, "tick\n" * 103) == "tick\n" * 3


@given(st.lists(st.text("ab\n", min_size=1, max_size=400), min_size=2, max_size=6))
def test_a_text_that_only_grows_is_shown_once(parts: list[str]) -> None:
    shown, before = "", ""
    for index in range(1, len(parts) + 1):
        after = "".join(parts[:index])
        shown += fresh(before, after)
        before = after
    assert shown == "".join(parts)

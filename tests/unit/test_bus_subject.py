"""Goal: the matching rules of NATS, and that two filters overlap exactly when a subject matches both."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigbook_bus.protocol import BusDenied
from rigbook_bus.subject import check_filter, check_subject, matches, matches_any, overlaps

WORDS = st.sampled_from(["a", "b"])
SUBJECTS = st.lists(WORDS, min_size=1, max_size=4).map(".".join)
FILTERS = st.tuples(st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3), st.booleans()).map(
    lambda made: ".".join([*made[0], ">"] if made[1] else made[0])
)
ALL = [".".join(words) for count in range(1, 6) for words in itertools.product("ab", repeat=count)]


@pytest.mark.parametrize(
    ("subject_filter", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*", "a", False),
        ("*.b", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("a.*.c", "a.b.c", True),
    ],
)
def test_matches(subject_filter, subject, expected):
    assert matches(subject_filter, subject) is expected


def test_no_filter_matches_everything():
    assert matches_any((), "a.b")
    assert not matches_any(("x", "y"), "a")


@given(FILTERS, FILTERS)
def test_filters_overlap_when_some_subject_matches_both(one, two):
    assert overlaps(one, two) == any(matches(one, s) and matches(two, s) for s in ALL)
    assert overlaps(one, two) == overlaps(two, one)


@given(SUBJECTS)
def test_a_subject_is_a_filter_for_itself(subject):
    check_subject(subject)
    check_filter(subject)
    assert matches(subject, subject)


@pytest.mark.parametrize(
    "wrong", ["", ".", "a.", ".a", "a..b", "a b", "a.>.b", "a*", "a.b>", "a\tb", "a\r\nb"]
)
def test_what_is_no_filter(wrong):
    with pytest.raises(BusDenied):
        check_filter(wrong)

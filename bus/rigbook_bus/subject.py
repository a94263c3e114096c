"""Subjects and filters: the NATS matching rules, written once for both implementations."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rigbook_bus.protocol import BusDenied

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check_filter", "check_message_id", "check_subject", "matches", "matches_any", "overlaps"]

# Whitespace would end the protocol line and let a caller inject commands; the server refuses empty tokens.
_TOKEN = re.compile(r"[^\s.*>]+")
# Travels as a header value, which nats-py trims and whose line breaks it turns into spaces: two different
# ids must never become one, so nothing but printable ASCII without blanks is accepted.
_MESSAGE_ID = re.compile(r"[!-~]{1,128}")


def check_subject(subject: str) -> None:
    """Raise BusDenied unless `subject` can be published to: tokens without wildcards or blanks."""
    if not all(_TOKEN.fullmatch(token) for token in subject.split(".")):
        raise BusDenied(f"{subject!r} is no subject to publish on: dot-separated words, no blanks, no * or >")


def check_filter(subject_filter: str) -> None:
    """Raise BusDenied unless `subject_filter` is a subject or a wildcard (`*` one token, `>` the rest)."""
    tokens = subject_filter.split(".")
    for index, word in enumerate(tokens):
        if word == "*" or (word == ">" and index == len(tokens) - 1) or _TOKEN.fullmatch(word):
            continue
        raise BusDenied(f"{subject_filter!r} is no subject filter: words, `*`, or `>` as the last token")


def check_message_id(message_id: str) -> None:
    """Raise BusDenied unless `message_id` survives as a header value unchanged."""
    if not _MESSAGE_ID.fullmatch(message_id):
        raise BusDenied(f"{message_id!r} is no message id: 1 to 128 printable ASCII characters, no blanks")


def matches(subject_filter: str, subject: str) -> bool:
    """Whether `subject` matches `subject_filter`; `>` needs at least one token."""
    if subject_filter == subject:
        return True
    wanted = subject_filter.split(".")
    given = subject.split(".")
    for index, word in enumerate(wanted):
        if index >= len(given):
            return False
        if word == ">":
            return True
        if word not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


def matches_any(filters: Sequence[str], subject: str) -> bool:
    """No filter at all matches everything, as on the server."""
    return not filters or any(matches(one, subject) for one in filters)


def overlaps(left: str, right: str) -> bool:
    """Whether some subject matches both filters (two streams may not share a subject)."""
    a, b = left.split("."), right.split(".")
    for x, y in zip(a, b, strict=False):
        if ">" in (x, y):
            return True
        if "*" not in (x, y) and x != y:
            return False
    return len(a) == len(b)

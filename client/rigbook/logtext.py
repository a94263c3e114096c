"""Following a program's output by asking for its last lines again: what is new in the second answer. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["fresh"]

# Of the text seen last, this much is looked for in the next one.
ANCHOR_CHARACTERS: Final = 256


def fresh(before: str, after: str) -> str:
    """What `after` has beyond `before`, when both are the end of one growing text.

    The window may have moved on: then the end of `before` stands somewhere inside `after`, at the place
    where all of `after` up to there is also how `before` ends. When nothing of it is left, all is new.
    """
    if after.startswith(before):
        return after[len(before) :]
    anchor = before[-ANCHOR_CHARACTERS:]
    at = after.find(anchor)
    while anchor and at >= 0:
        end = at + len(anchor)
        if before.endswith(after[:end]):
            return after[end:]
        at = after.find(anchor, at + 1)
    return after

"""What can go wrong for a user: what happened, why, what next; with a stable code and an exit code.

One root, one leaf per cause that somebody acts on. A failure is printed as three short lines and never
with a traceback; anything else that escapes is a bug of ours, and is shown as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rigbook.exitcodes import Exit

if TYPE_CHECKING:
    from rigbook_bus.protocol import BusError

__all__ = [
    "Failed",
    "Invalid",
    "NoAnswer",
    "NotFound",
    "NotInstalled",
    "RigbookFailure",
    "TimedOut",
    "Unusable",
    "WouldConflict",
    "of_answer",
    "of_bus",
]


class RigbookFailure(Exception):
    """Root. `code` is stable, `what` says what happened, `why` the cause, `remedy` what to do next."""

    code = "failure"
    exit = Exit.BUG

    def __init__(self, what: str, *, why: str = "", remedy: str = "", code: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.remedy = remedy
        if code:
            self.code = code


class Invalid(RigbookFailure):
    """A value that somebody wrote is wrong."""

    code = "invalid"
    exit = Exit.INVALID


class Unusable(RigbookFailure):
    """The command line contradicts itself or lacks something."""

    code = "usage"
    exit = Exit.USAGE


class NoAnswer(RigbookFailure):
    """The bus, or who should answer on it, is away."""

    code = "no_answer"
    exit = Exit.NO_ANSWER


class NotFound(RigbookFailure):
    """Nothing, or more than one thing, has that name."""

    code = "not_found"
    exit = Exit.NOT_FOUND


class WouldConflict(RigbookFailure):
    """Something that is there already is in the way."""

    code = "conflict"
    exit = Exit.CONFLICT


class TimedOut(RigbookFailure):
    """What was waited for did not happen in time."""

    code = "timed_out"
    exit = Exit.TIMEOUT


class NotInstalled(RigbookFailure):
    """A part of Rigbook is not installed here."""

    code = "not_installed"
    exit = Exit.NOT_INSTALLED


class Failed(RigbookFailure):
    """A part or a step of ours failed, and said why."""

    code = "failed"
    exit = Exit.FAILED


_EXIT_OF_ANSWER: Final = {
    "not_found": Exit.NOT_FOUND,
    "ambiguous": Exit.NOT_FOUND,
    "before_record": Exit.NOT_FOUND,
    "bad_question": Exit.INVALID,
    "not_ready": Exit.NO_ANSWER,
}


def of_answer(code: str, text: str, remedy: str) -> RigbookFailure:
    """The failure that an answer of a service tells of."""
    failure = RigbookFailure(text, remedy=remedy, code=code)
    failure.exit = _EXIT_OF_ANSWER.get(code, Exit.NO_ANSWER)
    return failure


def of_bus(error: BusError, doing: str) -> RigbookFailure:
    """The failure behind an error of the bus, while `doing` something."""
    if error.code == "bus_conflict":
        return WouldConflict(
            f"{doing}: the log moved on meanwhile", why=str(error), remedy="try again", code=error.code
        )
    if error.code == "bus_unknown":
        return NoAnswer(
            f"{doing}: no answer; it may or may not have been recorded",
            why=str(error),
            remedy="look with `rigbook ls` or `rigbook events` before you try again",
            code=error.code,
        )
    remedy = "check the credentials and the address" if error.code == "bus_denied" else "run `rigbook doctor`"
    return NoAnswer(f"{doing}: the bus did not do it", why=str(error), remedy=remedy, code=error.code)

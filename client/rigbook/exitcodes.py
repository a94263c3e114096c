"""Exit codes of the `rigbook` command. Stable: scripts may rely on them (docs: client/README.md)."""

from __future__ import annotations

import enum

__all__ = ["Exit"]


class Exit(enum.IntEnum):
    OK = 0
    BUG = 1  # an error of ours: please report it
    USAGE = 2  # the command line is wrong
    NO_ANSWER = 3  # no bus, or nobody on it answers
    NOT_FOUND = 4  # no such demand, card, node; or more than one fits the name
    INVALID = 5  # a demand file, or a value in it, is wrong
    CONFLICT = 6  # in the way: another spec under this name, already running, the log moved on
    REFUSED = 7  # the demand can never be met as it is
    TIMEOUT = 8  # what was waited for did not happen in time
    UNHEALTHY = 9  # `doctor` found something an operator must act on
    WAITS = 10  # `plan`: nothing is wrong, but it would have to wait
    NOT_INSTALLED = 11  # a part of Rigbook is not installed; the text names the extra
    FAILED = 12  # a step of `demo`, or a part of `up`, failed
    INTERRUPTED = 130  # Ctrl-C

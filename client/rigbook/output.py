"""Where a command's words go: tables and lines on standard output, failures on standard error, JSON for programs.

JSON is stable: every field of a row is there, also when it has its default, in the order of its type
(`rigbook_schemas.queries`); new fields may be added, none is renamed or removed.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Console
from rich.text import Text

from rigbook.narrative import printable
from rigbook.tables import fitted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType
    from rigbook_schemas.queries import Answer

    from rigbook.failures import RigbookFailure

__all__ = ["answer_json", "console", "full", "json_line", "print_failure", "say", "show", "warn"]

# In a pipe there is no width to respect; rich would fold at 80 and hide what a search looks for.
PIPE_COLUMNS: Final = 240


def console(*, stderr: bool = False) -> Console:
    """A console that honours NO_COLOR and COLUMNS, and does not fold for a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_COLUMNS
    return Console(file=stream, width=width, highlight=False, soft_wrap=False, emoji=False, markup=False)


def show(renderable: RenderableType) -> None:
    to = console()
    to.print(fitted(renderable, to))


def say(text: str = "", style: str = "") -> None:
    """A line, never folded."""
    console().print(Text(printable(text), style=style), soft_wrap=True)


def warn(text: str) -> None:
    """Something to know that stops nothing: on standard error, so that a program's reader is not disturbed."""
    console(stderr=True).print(Text(f"note: {printable(text)}", style="yellow"), soft_wrap=True)


def full(value: Any) -> Any:
    """`value` as plain JSON values with every field, defaults included."""
    if isinstance(value, msgspec.Struct):
        return {name: full(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): full(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [full(item) for item in value]
    return msgspec.to_builtins(value)


def json_line(value: Any) -> None:
    """One JSON value on standard output, indented for eyes, in one line for a pipe."""
    body = msgspec.json.encode(full(value))
    if sys.stdout.isatty():
        body = msgspec.json.format(body, indent=2)
    sys.stdout.write(body.decode() + "\n")
    sys.stdout.flush()


def answer_json(rows: Iterable[Any], answer: Answer) -> None:
    """The stable form of every list: the items, and what they were true of."""
    json_line(
        {
            "items": list(rows),
            "position": answer.position,
            "position_time": answer.position_time,
            "caught_up": answer.caught_up,
            "safe_mode": answer.safe_mode,
            "notice": answer.notice,
        }
    )


def print_failure(failure: RigbookFailure, *, as_json: bool = False) -> None:
    """What, why, what next; never a traceback."""
    if as_json:
        told = {"code": failure.code, "what": failure.what, "why": failure.why, "remedy": failure.remedy}
        sys.stderr.write(msgspec.json.encode({"error": told}).decode() + "\n")
        return
    to = console(stderr=True)
    to.print(
        Text.assemble(("error", "bold red"), f" [{failure.code}] {printable(failure.what)}"), soft_wrap=True
    )
    for name, text in (("why", failure.why), ("next", failure.remedy)):
        for line in text.splitlines():
            to.print(Text.assemble((f"  {name}: ", "bold"), printable(line)), soft_wrap=True)

"""Options that many commands share, spelled the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["AsJson", "At", "By", "Data", "JournalFile", "Nats", "Project", "Reason", "Watch"]

Nats = Annotated[
    str | None,
    typer.Option(
        "--nats", metavar="URL", help="The bus. Default: $RIGBOOK_NATS, else the one `rigbook up` runs."
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Data folder of the running Rigbook. Default: $RIGBOOK_DATA, else yours.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for programs; its fields are stable.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it, until Ctrl-C.")]
Project = Annotated[
    str,
    typer.Option(
        "--project", "-p", metavar="NAME", envvar="RIGBOOK_PROJECT", help="Who pays: quotas are per project."
    ),
]
By = Annotated[
    str,
    typer.Option(
        "--by", metavar="NAME", envvar="RIGBOOK_OWNER", help="Who does it. Default: your login name."
    ),
]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept for ever.")]
At = Annotated[
    str,
    typer.Option("--at", metavar="MOMENT", help="As it was then: 02:00, '2026-11-30 02:00', '2h ago', -15m."),
]
JournalFile = Annotated[
    Path | None,
    typer.Option("--journal", metavar="FILE", help="Ask an exported journal instead of the bus."),
]

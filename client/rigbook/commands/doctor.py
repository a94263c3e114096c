"""`doctor`: every part looked at, with remedies. Exit code 9 when something needs an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rigbook_schemas.events import UnknownAccepted

from rigbook import tables
from rigbook.checkup import Check, Grade, examine
from rigbook.commands.invoke import connected, me, run
from rigbook.commands.options import AsJson, By, Data, Nats, Reason
from rigbook.context import default_data, find_url, read_context
from rigbook.exitcodes import Exit
from rigbook.failures import RigbookFailure
from rigbook.output import json_line, say, show

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    accept: Annotated[
        int,
        typer.Option(
            "--accept", metavar="SEQ", min=0, help="Let deciders pass by this event of an unknown kind."
        ),
    ] = 0,
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Is everything there, and does it agree? With what to do where not."""
    if accept:
        seq = run(_accept(accept, by or me(), reason, nats, data))
        say(f"event {accept} may be passed by (event {seq})")
        return
    checks = run(_examine(nats, data))
    bad = any(check.grade is Grade.BAD for check in checks)
    if as_json:
        json_line({"healthy": not bad, "checks": checks})
    else:
        table = tables.plain("CHECK", "STATUS", "WHAT", "REMEDY")
        for check in checks:
            table.add_row(
                check.name, tables.status(check.grade), tables.cell(check.text), tables.cell(check.remedy)
            )
        show(table)
    if bad:
        raise typer.Exit(Exit.UNHEALTHY)


async def _examine(nats: str | None, data: Path | None) -> list[Check]:
    url = find_url(nats, data)
    context = read_context(data or default_data())
    try:
        async with connected(nats, data) as client:
            return await examine(client, url, context if context is not None and context.url == url else None)
    except RigbookFailure as failure:
        return [
            Check(name="bus", grade=Grade.BAD, text=f"{failure.what}: {failure.why}", remedy=failure.remedy)
        ]


async def _accept(seq: int, by: str, reason: str, nats: str | None, data: Path | None) -> int:
    async with connected(nats, data) as client:
        return await client.set_policy("unknown", UnknownAccepted(seq=seq, by=by, reason=reason))

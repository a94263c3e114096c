"""`recover`: what was lost, what would be done about it; with --yes it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rigbook.commands.invoke import connected, me, now_ns, run
from rigbook.commands.options import AsJson, By, Data, Nats, Reason
from rigbook.exitcodes import Exit
from rigbook.output import json_line, say
from rigbook.recovery.execute import carry_out
from rigbook.recovery.plan import Plan, plan
from rigbook.recovery.survey import survey
from rigbook.recovery.words import plan_lines, survey_lines

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("recover")(recover)


def recover(
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without this, only the plan is shown.")] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without", metavar="NODE", help="Go on although this node does not report. Repeatable."
        ),
    ] = None,
    without_copy: Annotated[
        bool, typer.Option("--without-copy", help="Go on although no ledger has a second copy.")
    ] = False,
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, max=5, help="Of the streams, when they must be made.")
    ] = 1,
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Go on after the log lost its end or was made anew; a dry run until --yes."""
    run(
        _recover(
            nats, data, yes=yes, without=frozenset(without or ()), without_copy=without_copy,
            replicas=replicas, by=by or me(), reason=reason, as_json=as_json,
        )
    )  # fmt: skip


async def _recover(
    nats: str | None,
    data: Path | None,
    *,
    yes: bool,
    without: frozenset[str],
    without_copy: bool,
    replicas: int,
    by: str,
    reason: str,
    as_json: bool,
) -> None:
    def told(line: str) -> None:
        if not as_json:
            say(line)

    async with connected(nats, data) as client:
        found = await survey(client)
        intended = plan(found, without=without, without_copy=without_copy, by=by, reason=reason)
        for line in (*survey_lines(found, intended.lost), "", *plan_lines(intended)):
            told(line)
        seq = 0
        if intended.how and not intended.refusals and yes:
            told("")
            seq = await carry_out(
                client, found, intended, by=by, reason=reason, now_ns=now_ns, replicas=replicas, told=told
            )
            told(f"the log is recovered (event {seq}): ledger, placer and reaper fold it anew and go on")
    if as_json:
        json_line(_summary(intended, seq))
    if intended.refusals:
        raise typer.Exit(Exit.CONFLICT)
    if intended.how and not yes:
        told("")
        told("nothing was done: this was a dry run. Say --yes to do it")


def _summary(intended: Plan, seq: int) -> dict[str, object]:
    return {
        "how": intended.how,
        "lost": intended.lost,
        "foreign": intended.foreign,
        "appended_again": len(intended.copy),
        "skip_to": intended.skip_to,
        "join": intended.join,
        "said": [{"subject": s.subject, "kind": type(s.data).__name__, "why": s.why} for s in intended.said],
        "adopted": intended.adopted,
        "released": intended.released,
        "silent": intended.silent,
        "unplaced": intended.unplaced,
        "generation": intended.generation,
        "refusals": intended.refusals,
        "done": bool(seq),
        "seq": seq,
    }

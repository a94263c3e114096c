"""`audit`: does ownership hold at every position, do all copies agree, who did what, and what was wasted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rigbook_replay.audit import Claim, Range, audit
from rigbook_schemas.queries import Question
from rigbook_schemas.wire import instant

from rigbook import tables
from rigbook.commands.invoke import connected, run
from rigbook.commands.options import AsJson, Data, JournalFile, Nats
from rigbook.commands.views import moment_option
from rigbook.exitcodes import Exit
from rigbook.failures import RigbookFailure, Unusable
from rigbook.output import json_line, say, show
from rigbook.past import moment_ns, progress, source_of

if TYPE_CHECKING:
    from pathlib import Path

    from rigbook_replay.audit import Report
    from rigbook_replay.hours import Held, Hours, Sum
    from rigbook_replay.source import Source
    from rigbook_schemas.queries import StatusRow

__all__ = ["register"]

_GIB = 1024**3
LINES = 12


def register(app: typer.Typer) -> None:
    app.command("audit")(audit_log)


def audit_log(
    since: Annotated[
        str, typer.Option("--since", metavar="MOMENT", help="From here on: 02:00, '2h ago', 7d.")
    ] = "",
    until: Annotated[str, typer.Option("--until", metavar="MOMENT", help="Up to here.")] = "",
    span: Annotated[
        str,
        typer.Option(
            "--range", metavar="FROM..TO", help="The same in one, such as '2026-11-01..2026-12-01'."
        ),
    ] = "",
    every: Annotated[
        int, typer.Option("--every", metavar="N", min=1, help="Look at the invariants after every N events.")
    ] = 1,
    strict: Annotated[
        bool, typer.Option("--strict", help="Findings on the log count as problems too.")
    ] = False,
    journal: JournalFile = None,
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Invariants at every position, digests, authorship, clocks, GPU-hours and waste. Exit code 9 when something is wrong."""
    if span:
        if since or until or ".." not in span:
            raise Unusable("--range is FROM..TO, and stands instead of --since and --until")
        since, until = (part.strip() for part in span.split("..", maxsplit=1))
    start, note = moment_option("--since", since)
    end, _ = moment_option("--until", until)
    stretch = Range(since_ns=(instant(start) or 0) if start else 0, until_ns=moment_ns(end) or 2**63 - 1)

    async def go() -> tuple[Report, Hours]:
        async with source_of(journal, nats, data) as source:
            claims = await _claims(source, journal, nats, data)
            with progress("auditing") as told:
                return await audit(source, stretch, claims=claims, every=every, told=told)

    report, hours = run(go())
    bad = not report.good or (strict and bool(report.findings))
    if as_json:
        json_line({"good": not bad, **msgspec.structs.asdict(report),
                   "gpu_hours": {"by_project": _plain(hours.by_project), "by_owner": _plain(hours.by_owner),
                                 "by_card": _plain(hours.by_card), "idlest": hours.idlest}})  # fmt: skip
    else:
        if note:
            say(f"({note})", "dim")
        _tell(report, hours, bad=bad)
    if bad:
        raise typer.Exit(Exit.UNHEALTHY)


async def _claims(source: Source, journal: Path | None, nats: str | None, data: Path | None) -> list[Claim]:
    """What others say the log comes to: the journal's own index; the live ledger, when one answers."""
    claims: list[Claim] = []
    if journal is not None:
        from rigbook_replay.source import JournalSource

        assert isinstance(source, JournalSource)
        index = source.journal.index
        if index is not None and index.digest:
            from rigbook_ledger.identity import fold_identity

            digest = index.digest if index.fold == fold_identity() else ""
            claims.append(
                Claim(
                    who="the journal's index",
                    position=index.position,
                    digest=digest,
                    chain=index.ledger_chain,
                )
            )
        if nats is None and data is None:
            return claims
    try:
        async with connected(nats, data) as client:
            rows: list[StatusRow] = await client.rows("status", Question(digest=True))
    except RigbookFailure as failure:
        say(f"the live ledger does not answer, its digest is not compared: {failure.what}", "yellow")
        return claims
    return [
        *claims,
        *(
            Claim(who=f"ledger {row.instance}", position=row.position, digest=row.digest, chain=row.chain)
            for row in rows
        ),
    ]


def _tell(report: Report, hours: Hours, *, bad: bool) -> None:
    say(f"{report.events} events, {report.first_seq} to {report.last_seq}", "bold")
    for text in report.confirmed:
        say(f"  {text}")
    for text in report.problems:
        say(f"bad: {text}", "red")
    if report.problem_count > len(report.problems):
        say(f"bad: and {report.problem_count - len(report.problems)} more", "red")
    for text in report.notes:
        say(f"note: {text}", "yellow")
    for name, counts in (
        ("findings on the log", report.findings), ("evictions by cause", report.evictions),
        ("ends by verdict", report.verdicts), ("drifts", report.drifts),
    ):  # fmt: skip
        if counts:
            say(f"{name}: {', '.join(f'{key} {count}' for key, count in counts.items())}")
    say("\nWHO SAID WHAT", "bold")
    show(tables.facts([(f"  {who}", ", ".join(f"{kind} {n}" for kind, n in kinds.items()))
                       for who, kinds in sorted(report.authors.items())]))  # fmt: skip
    say("\nCLOCKS against the server's (ms)", "bold")
    show(tables.facts([(f"  {who}", f"{skew.least_seconds * 1e3:+.1f} to {skew.most_seconds * 1e3:+.1f} in {skew.events} events")
                       for who, skew in sorted(report.skews.items())[:LINES]]))  # fmt: skip
    for name, lines in (("PROJECT", hours.by_project), ("OWNER", hours.by_owner), ("CARD", hours.by_card)):
        if lines:
            say(f"\nGPU-HOURS by {name.lower()}", "bold")
            show(_table(name, lines))
    wasted = [one for one in hours.idlest if one.wasted_byte_hours > 0][:LINES]
    if wasted:
        say("\nHELD AND HARDLY USED", "bold")
        show(_idle(wasted))
    say("\nsomething is wrong" if bad else "\nnothing contradicts anything", "bold red" if bad else "green")


def _table(name: str, lines: dict[str, Sum]) -> Any:
    table = tables.plain(
        name,
        "BINDINGS",
        "CARD-HOURS",
        "RESERVED GiB·h",
        "USED AT MOST GiB·h",
        "WASTED GiB·h",
        "NOT OBSERVED GiB·h",
    )
    for key, line in sorted(lines.items(), key=lambda item: -item[1].reserved_byte_hours)[:LINES]:
        table.add_row(
            tables.cell(key), str(line.bindings), f"{line.card_hours:.2f}", f"{line.reserved_byte_hours / _GIB:.1f}",
            f"{line.used_byte_hours / _GIB:.1f}", f"{line.wasted_byte_hours / _GIB:.1f}",
            f"{line.unobserved_byte_hours / _GIB:.1f}",
        )  # fmt: skip
    return table


def _idle(held: list[Held]) -> Any:
    table = tables.plain(
        "DEMAND", "PROJECT", "OWNER", "HOURS", "RESERVED GiB", "HIGHEST USE GiB", "WASTED GiB·h"
    )
    for one in held:
        table.add_row(
            tables.cell(one.demand), tables.cell(one.project), tables.cell(one.owner), f"{one.hours:.2f}",
            f"{one.reserved_bytes / _GIB:.1f}", f"{one.peak_bytes / _GIB:.1f}", f"{one.wasted_byte_hours / _GIB:.1f}",
        )  # fmt: skip
    return table


def _plain(lines: dict[str, Sum]) -> dict[str, dict[str, float]]:
    return {
        key: {
            **msgspec.structs.asdict(line),
            "wasted_byte_hours": line.wasted_byte_hours,
            "unobserved_byte_hours": line.unobserved_byte_hours,
        }
        for key, line in lines.items()
    }

"""`replay check` and `drift prove`: recorded decisions decided again, and the three views of a drift side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rigbook_schemas.wire import rfc3339

from rigbook import __version__, tables
from rigbook.commands.invoke import now_ns, run
from rigbook.commands.options import AsJson, Data, JournalFile, Nats
from rigbook.commands.views import row_of
from rigbook.exitcodes import Exit
from rigbook.failures import NotFound
from rigbook.narrative import record_line, short_card
from rigbook.output import console, json_line, say
from rigbook.past import progress, source_of

if TYPE_CHECKING:
    from rigbook_replay.driftproof import DriftProof, Views
    from rigbook_replay.export import Exported
    from rigbook_replay.proof import Answer, ProofOfDecisions

__all__ = ["drift_prove", "register"]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="The recorded past, run again.")
    group.command("check")(replay_check)
    app.add_typer(group, name="replay")


def replay_check(
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Also those that could not be proved, and why.")
    ] = False,
    journal: JournalFile = None,
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Decide every recorded binding again, on the state at its position. Exit code 9 when one comes out different."""
    from rigbook_replay.proof import Outcome, ProofOfDecisions
    from rigbook_replay.retrace import Retrace
    from rigbook_replay.timetravel import undisturbed

    async def go() -> ProofOfDecisions:
        proof = ProofOfDecisions()
        async with source_of(journal, nats, data) as source:
            retrace = Retrace(proof, partial=bool(source.partial))
            with progress("deciding again") as told, undisturbed():
                async for records in source.records(whole=False):
                    retrace.take(records)
                    if told is not None:
                        told(records[-1].seq, source.last_seq)
            retrace.close()
        return proof

    proof = run(go())
    if as_json:
        json_line(
            {
                "good": proof.good,
                "decisions": proof.decisions,
                "counts": proof.counts,
                "doubtful": proof.doubtful,
            }
        )
    else:
        for one in proof.doubtful:
            if one.outcome is not Outcome.DIFFERENT and not everything:
                continue
            say(f"event {one.seq}, demand {one.demand}, by {one.source}: {one.text}",
                "red" if one.outcome is Outcome.DIFFERENT else "yellow")  # fmt: skip
            if one.outcome is Outcome.DIFFERENT:
                say(f"  recorded: {_cards(one.recorded)}")
                say(f"  again:    {_cards(one.again)}")
        counts = ", ".join(f"{count} {outcome}" for outcome, count in proof.counts.items() if count)
        say(f"{proof.decisions} decisions: {counts or 'none'}", "green" if proof.good else "bold red")
    if not proof.good:
        raise typer.Exit(Exit.UNHEALTHY)


def _cards(answer: Answer | None) -> str:
    if answer is None or not answer.cards:
        return answer.why if answer is not None and answer.why else "no cards"
    return ", ".join(f"{short_card(card)} of {node}" for node, card, _ in answer.cards)


def drift_prove(
    drift: Annotated[
        str, typer.Argument(metavar="DRIFT", help="Its id, or the beginning of it (`rigbook drift list`).")
    ],
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write what reproduces it to a journal.")
    ] = None,
    journal: JournalFile = None,
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Desired, bound and observed side by side: where they last agreed, where they first did not, and what came between."""
    from rigbook_replay.driftproof import NoDrift, prove
    from rigbook_replay.export import Wish
    from rigbook_replay.export import export as export_journal

    async def go() -> tuple[DriftProof, Exported | None]:
        async with source_of(journal, nats, data) as source:
            try:
                proof = await prove(source, drift)
            except NoDrift as error:
                raise NotFound(
                    str(error), code=error.code, remedy="`rigbook drift list --all` lists them"
                ) from error
            if export is None:
                return proof, None
            last = proof.cleared or proof.detected
            wish = Wish(nodes=(proof.drift.node,), until_ns=last.received_ns)
            return proof, await export_journal(
                source, export, wish, now_ns=now_ns(), made_by=f"rigbook {__version__}"
            )

    proof, exported = run(go())
    if as_json:
        json_line({"drift": proof.drift, "agreed": proof.agreed, "differed": proof.differed, "told": proof.told,
                   "between": [row_of(record) for record in proof.between], "sentence": proof.sentence,
                   "detected": row_of(proof.detected),
                   "cleared": None if proof.cleared is None else row_of(proof.cleared)})  # fmt: skip
        return
    _tell(proof)
    if exported is not None:
        say(
            f"\n{export}: {exported.index.events} events and {exported.index.heartbeats} heartbeats reproduce it",
            "bold",
        )


def _tell(proof: DriftProof) -> None:
    drift = proof.drift
    say(f"{drift.drift}: {proof.sentence}", "bold")
    columns: tuple[tuple[str, Views | None], ...] = (
        ("LAST AGREED", proof.agreed),
        ("FIRST DIFFERED", proof.differed),
        ("AS DETECTED", proof.told),
    )
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column("", no_wrap=True, width=9)
    for name, _ in columns:
        table.add_column(name, overflow="fold", ratio=1)
    for label, get in _LINES:
        cells = [get(views) if views is not None else "not on the record" for _, views in columns]
        table.add_row(label, *(tables.cell(text) for text in cells))
    console().print(table)
    say("\nBETWEEN", "bold")
    for record in proof.between:
        say(
            f"  {record.seq:>6}  {tables.clock(rfc3339(record.received_ns))[11:]}  {record.kind:<18}  {record_line(record)}"
        )
    if proof.cleared is not None:
        say(f"cleared by event {proof.cleared.seq}: {record_line(proof.cleared)}", "green")
    elif drift.remedy:
        say(f"remedy: {drift.remedy}")


_LINES: tuple[tuple[str, Any], ...] = (
    ("position", lambda v: str(v.position)),
    ("time", lambda v: tables.clock(rfc3339(v.at_ns))),
    ("desired", lambda v: v.desired),
    ("bound", lambda v: v.bound),
    ("observed", lambda v: v.observed),
    ("seen by", lambda v: v.observed_by),
)

"""`drift ...`, `quota ...`: where views differ, what the reaper may heal, what projects may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from rigbook_ledger.sighting import HEALABLE
from rigbook_schemas import events as e
from rigbook_schemas.queries import LIMIT_MAX, Question
from rigbook_schemas.subjects import SubjectError, token
from rigbook_schemas.values import DriftKind

from rigbook import tables
from rigbook.commands.invoke import connected, me, now_ns, run
from rigbook.commands.options import AsJson, By, Data, Nats, Reason
from rigbook.commands.replay import drift_prove
from rigbook.failures import Invalid
from rigbook.memory import MemoryTextError, parse_size
from rigbook.narrative import short_card
from rigbook.output import answer_json, json_line, say, show

if TYPE_CHECKING:
    from rigbook_schemas.queries import DriftRow

__all__ = ["print_evidence", "register"]


def register(app: typer.Typer) -> None:
    drift = typer.Typer(no_args_is_help=True, help="Where desired, bound and observed differ.")
    drift.command("list")(drift_list)
    drift.command("heal")(drift_heal)
    drift.command("prove")(drift_prove)
    app.add_typer(drift, name="drift")
    quota = typer.Typer(no_args_is_help=True, help="How much GPU memory a project may hold.")
    quota.command("list")(quota_list)
    quota.command("set")(quota_set)
    app.add_typer(quota, name="quota")


def drift_list(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Cleared ones too.")] = False,
    node: Annotated[str, typer.Option("--node", metavar="NAME", help="Of this node only.")] = "",
    evidence: Annotated[
        bool, typer.Option("--evidence", "-e", help="With both sides and what was seen.")
    ] = False,
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Differences that were seen more than once and outlasted the grace."""

    async def go() -> None:
        async with connected(nats, data) as client:
            rows, answer = await client.whole(
                "drifts", Question(open_only=not everything, node=node, limit=LIMIT_MAX)
            )
            if as_json:
                answer_json(rows, answer)
            elif evidence:
                for row in rows:
                    print_evidence(row)
            else:
                show(
                    tables.drifts(rows, now_ns())
                    if rows
                    else Text("no drift: desired, bound and observed agree")
                )

    run(go())


def print_evidence(row: DriftRow) -> None:
    """A drift with its three views and what was observed."""
    drift = row.drift
    say(
        f"{drift.kind} on {drift.node}{f', {short_card(drift.card)}' if drift.card else ''}: {drift.sentence}",
        "bold",
    )
    pairs = [
        ("  desired", drift.desired),
        ("  bound", drift.bound),
        ("  observed", drift.observed),
        (
            "  seen",
            f"{drift.sightings} times since {tables.clock(drift.since)}, detected {tables.clock(row.detected)}",
        ),
        ("  healing", "the stop was ordered" if drift.healing else "dry run: nothing was done"),
        ("  remedy", drift.remedy),
        ("  cleared", f"{tables.clock(row.cleared)}: {row.how}" if row.cleared else ""),
    ]
    show(tables.facts([pair for pair in pairs if pair[1]]))
    for item in drift.evidence:
        source = f" ({item.source}{f', {tables.clock(item.at)}' if item.at else ''})" if item.source else ""
        say(f"    {item.what}: {item.value}{source}")


def drift_heal(
    kind: Annotated[DriftKind, typer.Argument(metavar="KIND", help=f"One of {', '.join(DriftKind)}.")],
    on: Annotated[bool | None, typer.Option("--on/--off", help="May the reaper act on it by itself?")] = None,
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Let the reaper heal a kind of drift by itself, or no longer. Off is a dry run: it only tells."""
    if on is None:
        raise typer.BadParameter("say --on or --off")
    if on and kind not in HEALABLE:
        raise Invalid(
            f"{kind}: there is nothing that the reaper could order; it is told, with a remedy for hands "
            f"(can be healed: {', '.join(HEALABLE)})",
            code="not_healable",
        )
    said = e.HealingSet(kind=kind, on=on, by=by or me(), reason=reason)

    async def go() -> int:
        async with connected(nats, data) as client:
            return await client.set_policy("healing", said)

    seq = run(go())
    if as_json:
        json_line({"seq": seq, "kind": kind, "on": on})
    else:
        say(f"{kind}: {'healed by the reaper from now on' if on else 'dry run from now on'} (event {seq})")


def quota_list(as_json: AsJson = False, nats: Nats = None, data: Data = None) -> None:
    """Projects: what they hold, and what they may."""

    async def go() -> None:
        async with connected(nats, data) as client:
            rows, answer = await client.whole("projects")
            if as_json:
                answer_json(rows, answer)
            else:
                show(
                    tables.projects(rows) if rows else Text("no project holds anything, and none has a quota")
                )

    run(go())


def quota_set(
    project: Annotated[str, typer.Argument(metavar="PROJECT")],
    memory: Annotated[
        str, typer.Argument(metavar="MEMORY", help="Of all its bindings together, such as 96GB; or none.")
    ],
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Bound a project. Lowering it evicts nobody; what is over waits its turn to shrink."""
    try:
        bound = None if memory.lower() == "none" else parse_size(memory)
        token(project)
    except (MemoryTextError, SubjectError) as error:
        raise Invalid(str(error), code=error.code) from None
    said = e.QuotaSet(project=project, memory_bytes=bound, by=by or me(), reason=reason)

    async def go() -> int:
        async with connected(nats, data) as client:
            return await client.set_policy(project, said)

    seq = run(go())
    if as_json:
        json_line({"seq": seq, "project": project, "memory_bytes": bound})
    else:
        say(f"{project}: {'no quota' if bound is None else f'at most {memory}'} from now on (event {seq})")

"""`ls`, `who`, `events`: looking, with nothing changed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer
from rich.text import Text
from rigbook_schemas.catalogue import BY_KIND
from rigbook_schemas.events import Payload
from rigbook_schemas.queries import LIMIT_MAX, EventRow, Question
from rigbook_schemas.wire import Malformed, Record, Unknown, rfc3339

from rigbook import tables
from rigbook.commands.invoke import connected, now_ns, run, watch
from rigbook.commands.options import AsJson, At, Data, JournalFile, Nats, Watch
from rigbook.failures import Invalid
from rigbook.lookup import demand_named
from rigbook.moments import MomentError, local_zone, parse_moment, rfc3339_of
from rigbook.narrative import record_line
from rigbook.output import answer_json, json_line, say, show

if TYPE_CHECKING:
    from rich.table import Table
    from rigbook_schemas.queries import DemandRow

    from rigbook.client import Client

__all__ = ["moment_option", "register"]

PHASES: Final = (
    "live",
    "all",
    "waiting",
    "bound",
    "starting",
    "running",
    "releasing",
    "ended",
    "refused",
    "withdrawn",
)
EVENTS_SHOWN: Final = 200
HOLDERS_SHOWN: Final = 8
BEGINNING: Final = "1970-01-01T00:00:00Z"  # "who had it, ever" is asked as a span


def register(app: typer.Typer) -> None:
    app.command("ls")(ls)
    app.command("who")(who)
    app.command("events")(events)


def ls(
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Ended, refused and withdrawn ones too.")
    ] = False,
    project: Annotated[
        str, typer.Option("--project", "-p", metavar="NAME", help="Of this project only.")
    ] = "",
    phase: Annotated[str, typer.Option("--phase", metavar="PHASE", help=f"One of {', '.join(PHASES)}.")] = "",
    watching: Watch = False,
    at: At = "",
    journal: JournalFile = None,
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Demands: who wants what, who has it, and why something waits."""
    if phase and phase not in PHASES:
        raise Invalid(
            f"--phase: {phase!r} is none of them; expected {', '.join(PHASES)}", code="invalid_flag"
        )
    if at or journal is not None:
        from rigbook.commands.history import demands_then

        demands_then(at, journal, nats, data, phase=phase or ("all" if everything else "live"), project=project,
                     as_json=as_json)  # fmt: skip
        return
    question = Question(project=project, phase=phase or ("all" if everything else "live"), limit=LIMIT_MAX)

    async def draw(client: Client) -> Table | Text:
        rows: list[DemandRow] = await client.rows("demands", question)
        return (
            tables.demands(rows, now_ns())
            if rows
            else Text("no demands" + ("" if everything or phase else "; --all shows those of the past"))
        )

    async def go() -> None:
        async with connected(nats, data) as client:
            if as_json:
                answer_json(*await client.whole("demands", question))
            elif watching:
                await watch(lambda: draw(client))
            else:
                show(await draw(client))

    run(go())


def who(
    gpu: Annotated[str, typer.Argument(metavar="GPU", help="UUID or its beginning, or node/index.")],
    at: At = "",
    journal: JournalFile = None,
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Who had a card, when, and what for; without --at, all of the past."""
    moment, note = moment_option("--at", at)
    if journal is not None:
        from rigbook.commands.history import who_then

        who_then(gpu, moment, note, journal, as_json=as_json)
        return

    async def go() -> None:
        async with connected(nats, data) as client:
            # a card that has left its node is named no more, and its past is told all the same
            card = (await client.ask("cards", Question(card=gpu))).rows
            question = Question(card=gpu, at=moment, since="" if moment else BEGINNING, limit=LIMIT_MAX)
            rows, answer = await client.whole("who", question)
            if as_json:
                answer_json(rows, answer)
                return
            when = f" at {tables.clock(moment)}" if moment else ""
            for one in card[:1]:
                say(f"{one.uuid}, GPU {one.index} of node {one.node} ({one.model}){when}", "bold")
            if note:
                say(f"({note})", "dim")
            if rows:
                show(tables.tenures(rows))
            else:
                say("nobody had it then" if moment else "nobody has had it yet")

    run(go())


def events(
    since: Annotated[
        str, typer.Option("--since", metavar="MOMENT", help="From here on: 02:00, '2h ago', -15m.")
    ] = "",
    until: Annotated[str, typer.Option("--until", metavar="MOMENT", help="Up to here.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they come, until Ctrl-C.")] = False,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", metavar="KIND", help="Such as bound; may be repeated.")
    ] = None,
    demand: Annotated[
        str, typer.Option("--demand", metavar="DEMAND", help="Of this demand only: id or name.")
    ] = "",
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="The latest N, without --since.")
    ] = EVENTS_SHOWN,
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """The log itself. With --json one event a line."""
    kinds = tuple(kind or ())
    for name in kinds:
        if name not in BY_KIND:
            raise Invalid(
                f"--kind: {name!r} is none; expected one of {', '.join(BY_KIND)}", code="invalid_flag"
            )
    start, note = moment_option("--since", since)
    end, _ = moment_option("--until", until)

    async def go() -> None:
        async with connected(nats, data) as client:
            wanted = (await demand_named(client, demand)).demand if demand else ""
            last = await client.last_seq()
            rows = await _history(
                client, Question(id=wanted, kinds=kinds, since=start, until=end, limit=LIMIT_MAX), limit
            )
            if note and not as_json:
                say(f"({note})", "dim")
            if as_json:
                for row in rows:
                    json_line(row)
            elif rows or not follow:
                show(tables.events(rows))
            if not follow:
                return
            async for record in client.follow(after_seq=max(last, rows[-1].seq if rows else 0)):
                row = row_of(record)
                if (not kinds or row.kind in kinds) and (not wanted or row.demand == wanted):
                    _print_event(record, row, as_json=as_json)

    run(go())


async def _history(client: Client, question: Question, limit: int) -> list[EventRow]:
    """All of a span or of a demand; else the latest `limit`, oldest first."""
    if question.since or question.until or question.id:
        return await client.rows("events", question)
    latest = msgspec.structs.replace(question, newest_first=True, limit=min(limit, LIMIT_MAX))
    rows: list[EventRow] = []
    while len(rows) < limit:
        page = await client.ask("events", latest)
        rows += page.rows
        if not page.answer.next:
            break
        latest = msgspec.structs.replace(latest, cursor=page.answer.next)
    return rows[:limit][::-1]


def _print_event(record: Record, row: EventRow, *, as_json: bool) -> None:
    if as_json:
        json_line(row)
    else:
        say(
            f"{row.seq}  {tables.clock(row.received)}  {row.kind or '?'}  {row.demand or row.node}  {record_line(record)}"
        )


def row_of(record: Record) -> EventRow:
    """A record read from the log, in the form in which the ledger tells of it."""
    data = record.data
    plain = msgspec.to_builtins(data) if isinstance(data, Payload) else {}
    malformed = ""
    if isinstance(data, Malformed):
        malformed = f"{data.code}: {data.text}"
    elif isinstance(data, Unknown):
        malformed = f"unknown kind {data.type}"
    return EventRow(
        seq=record.seq,
        subject=record.subject,
        received=rfc3339(record.received_ns),
        kind=record.kind,
        id=record.id,
        source=record.source,
        demand=record.correlation or str(plain.get("demand", "")),
        node=str(plain.get("node", "")),
        causation=record.causation,
        traceparent=record.traceparent,
        time=record.time,
        data=plain,
        malformed=malformed,
    )


def moment_option(flag: str, text: str) -> tuple[str, str]:
    """RFC 3339 of a moment given on the command line, and how it was understood. Raises Invalid."""
    if not text:
        return "", ""
    try:
        moment = parse_moment(text, now=datetime.now(UTC), zone=local_zone())
    except MomentError as error:
        raise Invalid(f"{flag}: {error}", code=error.code) from None
    return rfc3339_of(moment.at), moment.note

"""`whatif`: the demands of the past under other rules or on another fleet, side by side."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rich.table import Table
from rigbook_schemas.wire import instant, rfc3339

from rigbook import __version__, tables
from rigbook.commands.invoke import now_ns, run
from rigbook.commands.options import AsJson, Data, Nats
from rigbook.commands.views import moment_option
from rigbook.failures import Invalid, Unusable
from rigbook.memory import MemoryTextError, parse_size
from rigbook.output import json_line, say, show
from rigbook.past import progress, source_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_replay.comparison import Answer, Costs
    from rigbook_replay.fleetplan import NewNode, Plan
    from rigbook_replay.lifetimes import Happening, Past
    from rigbook_schemas.events import DemandRaised

__all__ = ["register"]

# A foreign history larger than this is a mistake, or wants to be cut first.
IMPORT_BYTES_MAX: Final = 1024**3
FORMS: Final = "expected openb:PODS.csv[,NODES.csv], sacct:FILE or philly:FILE"


def register(app: typer.Typer) -> None:
    app.command("whatif")(whatif)


def whatif(
    journal: Annotated[
        str, typer.Option("--journal", metavar="FILE|live", help="An exported journal; `live`: the bus.")
    ] = "live",
    history: Annotated[
        str,
        typer.Option(
            "--import",
            metavar="FORM:FILE",
            help="Ask a foreign history: openb:PODS.csv,NODES.csv, sacct:FILE, philly:FILE.",
        ),
    ] = "",
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME", help="Rank by this policy: pack, spread, ...")
    ] = "",
    quota: Annotated[
        list[str] | None,
        typer.Option(
            "--quota", metavar="PROJECT=MEMORY", help="Such as nlp=96GB or nlp=none. May be repeated."
        ),
    ] = None,
    add_node: Annotated[
        list[str] | None,
        typer.Option(
            "--add-node",
            metavar="SERVER",
            help="4xH100, NAME=4xH100, 10*8xA100, 2xMyCard:48GB. May be repeated.",
        ),
    ] = None,
    remove_node: Annotated[
        list[str] | None,
        typer.Option("--remove-node", metavar="NODE", help="Without this one. May be repeated."),
    ] = None,
    preemption: Annotated[
        bool | None, typer.Option("--preemption/--no-preemption", help="Demands may evict others, or not.")
    ] = None,
    since: Annotated[
        str,
        typer.Option(
            "--since", metavar="MOMENT", help="Measure from here on: 7d, 02:00. Default: the beginning."
        ),
    ] = "",
    idle_watts: Annotated[
        float | None,
        typer.Option("--idle-watts", min=0, help="What a server draws on which nothing is bound."),
    ] = None,
    kwh_price: Annotated[float | None, typer.Option("--kwh-price", min=0, help="Of a kilowatt-hour.")] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="MODEL=AMOUNT",
            help="Of a card for an hour, such as H100=2.50. May be repeated.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also a report that opens offline.")
    ] = None,
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """What would have been: recorded demands under other rules or on another fleet, durations from the record."""
    from rigbook_replay.fleetplan import BadPlan, Plan
    from rigbook_replay.history_import import BadHistory

    plan = Plan(
        policy=policy,
        quotas=dict(_quota(text) for text in quota or ()),
        add=tuple(_node(text) for text in add_node or ()),
        remove=tuple(remove_node or ()),
        preemption=preemption,
    )
    costs = _costs(idle_watts, kwh_price, price or [])
    moment, note = moment_option("--since", since)
    if history and journal != "live":
        raise Unusable("--import and --journal are two pasts; give one of them")
    try:
        if history:
            answer = _of_history(history, plan, costs, moment)
        else:
            file = None if journal == "live" else Path(journal)
            answer = _of_log(file, nats, data, plan, costs, moment)
    except (BadPlan, BadHistory) as error:
        raise Invalid(str(error), code=error.code) from error
    if note:
        answer.notes.append(note)
    if html is not None:
        _write(html, answer)
    if as_json:
        json_line(answer)
        return
    _tell(answer)
    if html is not None:
        say(f"\nreport: {html}")


# -- pasts ----------------------------------------------------------------------------------------


def _of_log(
    file: Path | None, nats: str | None, data: Path | None, plan: Plan, costs: Costs, moment: str
) -> Answer:
    """Reads the log twice: who asked for what and for how long, then the record itself under the meter."""
    from rigbook_ledger.evolve import evolve
    from rigbook_ledger.state import State
    from rigbook_replay.comparison import RecordedRun
    from rigbook_replay.lifetimes import Gathering
    from rigbook_replay.timetravel import undisturbed

    async def read() -> tuple[Past, RecordedRun, int]:
        async with source_of(file, nats, data) as source:
            if source.partial:
                raise Invalid(
                    f"{source.name} is a part of a log ({source.partial})",
                    why="who else asked for the same cards is not in it",
                    remedy="export the whole log, and use --since here",
                )
            gathering = Gathering(source.name)
            with progress("reading demands") as told, undisturbed():
                async for records in source.records():
                    gathering.take(records)
                    if told is not None:
                        told(records[-1].seq, source.last_seq)
            past = gathering.close()
            _not_empty(past)
            since_ns = _since(past, moment)
            recorded = RecordedRun(past, since_ns, costs)
            state = State()
            with progress("measuring the record") as told, undisturbed():
                async for records in source.records():
                    for record in records:
                        recorded.before(record)
                        state = evolve(state, record)
                        recorded.after(state)
                    if told is not None:
                        told(records[-1].seq, source.last_seq)
            return past, recorded, since_ns

    past, recorded, since_ns = run(read())
    return _compared(past, plan, costs, since_ns, fleet=(), recorded=recorded)


def _of_history(text: str, plan: Plan, costs: Costs, moment: str) -> Answer:
    from rigbook_replay.history_import import of_openb, of_philly, of_sacct

    form, _, names = text.partition(":")
    if not names or form not in ("openb", "sacct", "philly"):
        raise Unusable(f"--import {text!r}: {FORMS}")
    if form == "openb":
        pods, _, nodes = names.partition(",")
        past = of_openb(pods, _text(pods).splitlines(), _text(nodes).splitlines() if nodes else None)
    elif form == "sacct":
        past = of_sacct(names, _text(names).splitlines())
    else:
        past = of_philly(names, _text(names))
    fleet: Sequence[NewNode] = ()
    if not past.has_fleet:
        if not plan.add:
            raise Unusable(
                f"{names} says nothing of the servers", remedy="name them, such as --add-node '10*8xH100'"
            )
        # the servers are the question itself, not a change of it
        fleet, plan = plan.add, msgspec.structs.replace(plan, add=())
    return _compared(past, plan, costs, _since(past, moment), fleet=fleet, recorded=None)


def _text(name: str) -> str:
    """A text file, gzipped or not. Raises Invalid."""
    path = Path(name)
    try:
        if path.stat().st_size > IMPORT_BYTES_MAX:
            raise Invalid(f"{name} has more than {IMPORT_BYTES_MAX >> 30} GiB; cut it first", code="file")
        body = path.read_bytes()
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        return body.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise Invalid(f"{name}: {getattr(error, 'strerror', None) or error}", code="file") from error
    except UnicodeDecodeError as error:
        raise Invalid(f"{name} is no text in UTF-8: byte {error.start}", code="file") from error


def _not_empty(past: Past) -> None:
    if not past.lifetimes:
        raise Invalid(f"{past.name} has no demand in it", code="no_demand")


def _since(past: Past, moment: str) -> int:
    since_ns = (instant(moment) or past.from_ns) if moment else past.from_ns
    if since_ns >= past.until_ns:
        raise Invalid(
            f"--since: nothing is on the record after {tables.clock(rfc3339(since_ns))}",
            why=f"it goes from {tables.clock(rfc3339(past.from_ns))} to {tables.clock(rfc3339(past.until_ns))}",
        )
    return max(since_ns, past.from_ns)


def _compared(
    past: Past, plan: Plan, costs: Costs, since_ns: int, *, fleet: Sequence[NewNode], recorded: Any
) -> Answer:
    from rigbook_replay.comparison import compare
    from rigbook_replay.fleetplan import Plan as NoPlan
    from rigbook_replay.fleetplan import happenings_of
    from rigbook_replay.timetravel import undisturbed

    fates: list[list[Happening]] = [happenings_of(past, NoPlan(), fleet=fleet)]
    if plan.changes:
        fates.append(happenings_of(past, plan, fleet=fleet))
    with progress("simulating") as told, undisturbed():
        return compare(
            past, since_ns, fates, costs, changes=plan.changes, recorded=recorded,
            respec=_unranked if plan.policy else None, told=told,
            words=(rfc3339(since_ns), rfc3339(past.until_ns)),
        )  # fmt: skip


def _unranked(spec: DemandRaised) -> DemandRaised:
    """The demand without a policy of its own: the plan names one for all."""
    return msgspec.structs.replace(spec, placement="")


# -- values of options ------------------------------------------------------------------------------


def _quota(text: str) -> tuple[str, int | None]:
    project, _, size = text.partition("=")
    if not project or not size:
        raise Invalid(f"--quota {text!r}: expected PROJECT=MEMORY such as nlp=96GB, or nlp=none")
    if size.strip().lower() == "none":
        return project.strip(), None
    return project.strip(), _size("--quota", text, size)


def _size(flag: str, text: str, size: str) -> int:
    try:
        return parse_size(size)
    except MemoryTextError as error:
        raise Invalid(f"{flag} {text!r}: {error}", code=error.code) from None


def _node(text: str) -> NewNode:
    from rigbook_replay.fleetplan import BadPlan, new_node

    try:
        node, size = new_node(text)
    except BadPlan as error:
        raise Invalid(f"--add-node: {error}", code=error.code) from None
    return msgspec.structs.replace(node, memory_bytes=_size("--add-node", text, size)) if size else node


def _costs(idle_watts: float | None, kwh_price: float | None, prices: Sequence[str]) -> Costs:
    from rigbook_replay.comparison import Costs

    told: list[tuple[str, float]] = []
    for text in prices:
        model, _, amount = text.rpartition("=")
        try:
            value = float(amount)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e9:
            raise Invalid(f"--price {text!r}: expected MODEL=AMOUNT such as H100=2.50, or an amount for all")
        told.append((model.strip(), value))
    if kwh_price is not None and idle_watts is None:
        raise Unusable("--kwh-price needs --idle-watts: how much a server draws that does nothing")
    return Costs(idle_watts=idle_watts, kwh_price=kwh_price, prices=tuple(told))


# -- telling ----------------------------------------------------------------------------------------


def _tell(answer: Answer) -> None:
    from rigbook_replay.report import distance_words, figures, span

    say(f"what if: {'; '.join(answer.changes) or 'nothing is changed'}", "bold")
    say(f"{answer.past}, {tables.clock(answer.since)} to {tables.clock(answer.until)}", "dim")
    say()
    table = _table("", answer)
    for title, cells in figures(answer):
        table.add_row(title, *cells)
    show(table)
    for title, which in (
        ("WAITING BY PRIORITY", "waits_by_priority"),
        ("WAITING BY PROJECT", "waits_by_project"),
    ):
        parts: list[dict[str, Any]] = [getattr(outcome, which) for outcome in answer.outcomes]
        keys = dict.fromkeys(key for part in parts for key in part)
        if len(keys) < 2:
            continue
        table = _table(title, answer)
        for key in list(keys)[:20]:
            table.add_row(
                key,
                *(f"{span(part[key].p50)} / {span(part[key].p95)}" if key in part else "–" for part in parts),
            )
        say()
        show(table)
        if len(keys) > 20:
            say(f"({len(keys) - 20} more; --json has all)", "dim")
    say()
    say(distance_words(answer))
    for note in answer.notes:
        say(f"- {note}", "dim")


def _table(title: str, answer: Answer) -> Table:
    table = tables.plain(title, *(outcome.name.upper() for outcome in answer.outcomes))
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _write(path: Path, answer: Answer) -> None:
    from rigbook_replay.report import page

    try:
        path.write_text(
            page(answer, f"Made by rigbook {__version__} on {rfc3339(now_ns())[:16]}Z"), encoding="utf-8"
        )
    except OSError as error:
        raise Invalid(f"--html {path}: {error.strerror}", code="file") from error

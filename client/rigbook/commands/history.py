"""The past: `ls`, `gpu list`, `node list` and `who` at a moment or from a journal, and `history` with causes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.text import Text
from rigbook_ledger.names import find_demand, unknown_card
from rigbook_replay import views
from rigbook_replay.history import About, History, Subject, Tenure, tenure_rows
from rigbook_replay.retrace import Retrace
from rigbook_replay.timetravel import undisturbed
from rigbook_schemas.sentences import sentence
from rigbook_schemas.wire import rfc3339

from rigbook import tables
from rigbook.commands.invoke import run
from rigbook.commands.options import AsJson, Data, JournalFile, Nats
from rigbook.commands.views import moment_option, row_of
from rigbook.failures import NotFound
from rigbook.moments import ago
from rigbook.narrative import asked, record_line, short_card
from rigbook.output import json_line, say, show
from rigbook.past import moment_ns, past_of, progress, said_plainly, source_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rigbook_ledger.state import State
    from rigbook_replay.timetravel import Arrival
    from rigbook_schemas.wire import Record

__all__ = ["cards_then", "demands_then", "nodes_then", "register", "who_then"]


def register(app: typer.Typer) -> None:
    app.command("history")(history)


# -- at a moment ----------------------------------------------------------------------------------


def demands_then(
    at: str, journal: Path | None, nats: str | None, data: Path | None, *, phase: str, project: str, as_json: bool
) -> None:  # fmt: skip
    there, note = _then(at, journal, nats, data)
    rows = views.demands(there.state, phase=phase, project=project)
    if not _json(rows, there, note, as_json=as_json):
        show(tables.demands(rows, there.at_ns) if rows else Text("no demands"))


def cards_then(
    at: str, journal: Path | None, nats: str | None, data: Path | None, *, node: str, as_json: bool
) -> None:
    there, note = _then(at, journal, nats, data)
    with said_plainly():
        rows = views.cards(there.state, node=node)
    if not _json(rows, there, note, as_json=as_json):
        show(tables.cards(rows) if rows else Text("no node had joined yet"))


def nodes_then(at: str, journal: Path | None, nats: str | None, data: Path | None, *, as_json: bool) -> None:
    there, note = _then(at, journal, nats, data)
    rows = views.nodes(there.state)
    if not _json(rows, there, note, as_json=as_json):
        show(tables.nodes(rows) if rows else Text("no node had joined yet"))


def who_then(gpu: str, moment: str, note: str, journal: Path, *, as_json: bool) -> None:
    """`who --journal`: the tenures of a card out of the journal."""
    state, found = _told_of(About.GPU, gpu, journal, None, None)
    rows = tenure_rows(found, at_ns=moment_ns(moment))
    if as_json:
        json_line({"items": rows, "position": state.position, "notice": note})
        return
    card = state.cards.get(found.subject.name)
    when = f" at {tables.clock(moment)}" if moment else ""
    if card is not None:
        say(f"{card.uuid}, GPU {card.index} of node {card.node} ({card.model}){when}", "bold")
    if note:
        say(f"({note})", "dim")
    if rows:
        show(tables.tenures(rows))
    else:
        say("nobody had it then" if moment else "nobody has had it yet")


def _then(at: str, journal: Path | None, nats: str | None, data: Path | None) -> tuple[Arrival, str]:
    moment, note = moment_option("--at", at)
    there = past_of(moment, journal, nats, data)
    return there, "; ".join(part for part in (note, there.note) if part)


def _json(rows: Sequence[Any], there: Arrival, note: str, *, as_json: bool) -> bool:
    """The stable form; True when it was asked for. Else the heading of the table."""
    state = there.state
    if as_json:
        json_line({"items": list(rows), "at": rfc3339(there.at_ns), "position": state.position,
                   "position_time": rfc3339(state.received_ns), "notice": note})  # fmt: skip
        return True
    say(f"as of {tables.clock(rfc3339(there.at_ns))}, event {state.position}", "bold")
    if note:
        say(f"({note})", "dim")
    return False


# -- history --------------------------------------------------------------------------------------


def history(
    about: Annotated[
        About, typer.Argument(metavar="WHAT", help="gpu, demand, project or node (or everything).")
    ],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="As in other commands; none for everything.")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="The latest N tenures.")] = 20,
    journal: JournalFile = None,
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Who held it, with causes: the demand, the decision and what else would have fitted, the end and its verdict."""
    state, found = _told_of(about, name, journal, nats, data)
    if as_json:
        json_line({"about": found.subject.about, "name": found.subject.name, "position": state.position,
                   "events": [row_of(record) for record in found.events],
                   "tenures": [_plain(one) for one in found.tenures[-limit:]]})  # fmt: skip
        return
    say(f"{found.subject.about} {found.subject.name}".rstrip(), "bold")
    for record in found.events[-limit:]:
        say(f"  {_at(record)}  {record_line(record)}")
    if not found.tenures:
        say("nothing was bound" if about is not About.GPU else "nobody has had it yet")
    for one in found.tenures[-limit:]:
        _tell(one, state)
    if len(found.tenures) > limit:
        say(f"\n({len(found.tenures) - limit} earlier ones; --limit shows more)", "dim")


def _told_of(
    about: About, name: str, journal: Path | None, nats: str | None, data: Path | None
) -> tuple[State, History]:
    """Read the whole log once. What `name` means is found out from the state at its end."""

    async def go() -> tuple[State, History]:
        async with source_of(journal, nats, data) as source:
            subject = Subject(about, name)
            if about in (About.GPU, About.DEMAND):
                from rigbook_replay.timetravel import state_on

                with progress("looking up names") as told:
                    subject = _named(about, name, (await state_on(source, told=told)).state)
            gathered = History(subject)
            retrace = Retrace(gathered, partial=bool(source.partial))
            with progress("reading the log") as told, undisturbed():
                async for records in source.records():
                    retrace.take(records)
                    if told is not None:
                        told(records[-1].seq, source.last_seq)
            state = retrace.close()
            if not gathered.tenures and not gathered.events and about in (About.NODE, About.PROJECT):
                known = sorted(state.nodes if about is About.NODE else state.projects)
                raise NotFound(
                    f"the log knows no {about} {name!r}", why=f"it knows {', '.join(known[:8]) or 'none'}"
                )
            return state, gathered

    return run(go())


def _named(about: About, name: str, state: State) -> Subject:
    if about is About.GPU:
        found = views.cards(state, card=name)
        if not found and not name.startswith(("GPU-", "MIG-")):
            raise unknown_card(state, name)
        return Subject(about, found[0].uuid if found else name)
    demand = find_demand(state, name)
    return Subject(about, demand.spec.demand if demand is not None else name)


def _tell(one: Tenure, state: State) -> None:
    cards = ", ".join(
        f"{short_card(a.card)} ({share.node}/{one.indexes[a.card]})"
        for share in one.shares
        for a in share.allotments
    )
    until = tables.clock(rfc3339(max(one.released_ns.values()))) if one.over else "now"
    say(f"\n{one.demand} on {cards}, epoch {one.epoch}", "bold")
    size = asked(one.memory_bytes, 1, one.mode)
    who = f"{one.owner}{f' <{one.contact}>' if one.contact else ''}"
    say(
        f"  held    {tables.clock(rfc3339(one.bound_ns))} to {until}: {size}, for {one.purpose or 'no purpose given'}"
    )
    again = f", back in the queue {one.requeues} times" if one.requeues else ""
    say(
        f"  asked   {tables.clock(rfc3339(one.raised_ns))} by {who} for project {one.project} (event {one.raised_seq}); "
        f"waited {ago((one.bound_ns - one.raised_ns) / 1e9)}{again}"
    )
    for reason in one.waited_for[:3]:
        say(f"          had to wait: {sentence(reason)}")
    _tell_decision(one)
    for record in one.events:
        say(f"  {_at(record)}  {record_line(record)}")
    if one.over and one.verdict is not None:
        say(f"  end     {one.verdict}{f': {one.sentence}' if one.sentence else ''}")
    elif state.demands.get(one.demand) is not None:
        say(f"  stands  {state.demands[one.demand].phase}")


def _tell_decision(one: Tenure) -> None:
    decision = one.decision
    data: Any = decision.record.data
    more = decision.others_count - len(decision.others)
    others = ", ".join(decision.others) + (f" and {more} more" if more > 0 else "")
    there = "" if decision.exact else " (the state shown is not exactly the one it was decided on)"
    say(
        f"  decided by {decision.record.source} with policy {data.policy} version {data.policy_version} "
        f"on event {decision.position}{there}"
    )
    say(f"          would have fitted as well: {others or 'no other node'}")
    if decision.waiting_count:
        left = decision.waiting_count - len(decision.waiting)
        say(
            f"          still waiting then: {', '.join(decision.waiting)}{f' and {left} more' if left else ''}"
        )


def _at(record: Record) -> str:
    return f"{tables.clock(rfc3339(record.received_ns))[11:]} {record.seq:>6}"


def _plain(one: Tenure) -> dict[str, Any]:
    told = msgspec.structs.asdict(one)
    decision = msgspec.structs.asdict(one.decision)
    decision["event"] = row_of(decision.pop("record"))
    return {
        **told,
        "memory_bytes": one.memory_bytes,
        "raised": rfc3339(one.raised_ns),
        "bound": rfc3339(one.bound_ns),
        "released": {node: rfc3339(ns) for node, ns in one.released_ns.items()},
        "decision": decision,
        "events": [row_of(record) for record in one.events],
    }

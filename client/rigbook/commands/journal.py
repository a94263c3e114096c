"""`journal ...`: the log in one file. Export, verify, show, and bring it onto an empty server."""

from __future__ import annotations

import sys
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rigbook_schemas.wire import instant, rfc3339

from rigbook import __version__, tables
from rigbook.commands.invoke import connected, now_ns, run
from rigbook.commands.options import AsJson, Data, Nats
from rigbook.commands.views import moment_option
from rigbook.exitcodes import Exit
from rigbook.output import json_line, say, show
from rigbook.past import moment_ns, opened, progress, said_plainly, source_of

if TYPE_CHECKING:
    from rigbook_bus.protocol import Message
    from rigbook_replay.export import Exported

__all__ = ["register"]

FilePath = Annotated[Path, typer.Argument(metavar="FILE", help="The journal.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        no_args_is_help=True, help="The log in one file: for keeping, for questions without a bus."
    )
    group.command("export")(journal_export)
    group.command("verify")(journal_verify)
    group.command("info")(journal_info)
    group.command("cat")(journal_cat)
    group.command("import")(journal_import)
    app.add_typer(group, name="journal")


def journal_export(
    file: FilePath,
    since: Annotated[
        str, typer.Option("--since", metavar="MOMENT", help="From here on: 02:00, '2h ago'.")
    ] = "",
    until: Annotated[str, typer.Option("--until", metavar="MOMENT", help="Up to here.")] = "",
    around: Annotated[
        list[str] | None,
        typer.Option("--around", metavar="GPU", help="Only what its node is about. May be repeated."),
    ] = None,
    demand: Annotated[
        list[str] | None,
        typer.Option("--demand", metavar="DEMAND", help="Only this one's story. May be repeated."),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option("--journal", metavar="FILE", help="Take it from a journal instead of the bus."),
    ] = None,
    heartbeats: Annotated[
        bool, typer.Option(help="Keep heartbeats around drifts, as far as the bus still has them.")
    ] = True,
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Write the log to a file; the same command again goes on where it stopped, or adds what came since."""
    from rigbook_ledger.names import find_demand, unknown_card
    from rigbook_replay.export import Wish, export
    from rigbook_replay.timetravel import state_on
    from rigbook_replay.views import Unanswerable, cards

    start, note = moment_option("--since", since)
    end, _ = moment_option("--until", until)

    async def go() -> Exported:
        async with source_of(journal, nats, data) as source:
            uuids: list[str] = []
            ids: list[str] = []
            if around or demand:
                with progress("looking up names") as told:
                    state = (await state_on(source, told=told)).state
                for name in around or ():
                    found = cards(state, card=name)
                    if not found:
                        raise unknown_card(state, name)
                    uuids.append(found[0].uuid)
                for name in demand or ():
                    known = find_demand(state, name)
                    if known is None:
                        raise Unanswerable("not_found", f"no demand has the id or name {name!r}")
                    ids.append(known.spec.demand)
            wish = Wish(
                since_ns=instant(start) if start else None, until_ns=moment_ns(end),
                cards=tuple(uuids), demands=tuple(ids), heartbeats=heartbeats,
            )  # fmt: skip
            with progress("exporting") as told:
                return await export(
                    source, file, wish, now_ns=now_ns(), made_by=f"rigbook {__version__}", told=told
                )

    done = run(go())
    if as_json:
        json_line({"file": str(file), "bytes": done.bytes, "resumed_at": done.resumed_at,
                   "header": done.header, "index": _index_facts(done.index)})  # fmt: skip
        return
    if note:
        say(f"({note})", "dim")
    index = done.index
    went_on = f", going on behind event {done.resumed_at}" if done.resumed_at else ""
    say(f"{file}: {index.events} events up to {index.position}, {done.bytes:,} bytes{went_on}")
    if index.heartbeats:
        say(f"with {index.heartbeats} heartbeats around drifts")
    if done.header.partial:
        say(f"partial: {done.header.partial}; its fold is not the ledger", "yellow")
    if index.digest:
        say(f"digest {index.digest} at {index.position}, chain {index.ledger_chain}")


def journal_verify(file: FilePath, as_json: AsJson = False) -> None:
    """Is it whole, unchanged, in order, and does every event have the right form? Exit code 9 when not."""
    from rigbook_replay.verify import verify

    with opened(file) as journal, progress("verifying") as told:
        found = verify(journal, told=told)
    if as_json:
        json_line({"good": found.good, **msgspec.structs.asdict(found)})
    else:
        say(
            f"{file}: {found.events} events, {found.first_seq} to {found.last_seq}; fingerprint {found.fingerprint}"
        )
        if found.digest:
            say(f"digest {found.digest}, chain {found.ledger_chain}, {found.findings} findings on the log")
        for text in found.problems:
            say(f"bad: {text}", "red")
        for text in found.notes:
            say(f"note: {text}", "yellow")
        say(
            "whole and unchanged" if found.good else "not fit as evidence",
            "green" if found.good else "bold red",
        )
    if not found.good:
        raise typer.Exit(Exit.UNHEALTHY)


def journal_info(file: FilePath, as_json: AsJson = False) -> None:
    """What a journal is of."""
    with opened(file) as journal:
        header, index, blocks = journal.header, journal.index, journal.blocks
        damage = [one.words() for one in journal.damage]
        events, last = journal.events, journal.last_seq
    first_ns, last_ns = (
        min((b.earliest_ns for b in blocks), default=0),
        max((b.latest_ns for b in blocks), default=0),
    )
    if as_json:
        json_line({"header": header, "events": events, "last_seq": last, "finished": index is not None,
                   "first": rfc3339(first_ns), "last": rfc3339(last_ns), "damage": damage,
                   "index": None if index is None else _index_facts(index)})  # fmt: skip
        return
    facts = [
        ("stream", f"{header.stream}, created {tables.clock(rfc3339(header.created_ns))}"),
        ("taken from", header.source), ("exported", tables.clock(header.exported)), ("by", header.made_by),
        ("events", f"{events}, up to {last}"),
        ("from, to", f"{tables.clock(rfc3339(first_ns))}, {tables.clock(rfc3339(last_ns))}" if blocks else ""),
        ("whole", "" if not header.partial else f"no: {header.partial}"),
        ("finished", "" if index is not None else "no: the export was interrupted"),
        ("digest", "" if index is None else index.digest),
        ("damage", "; ".join(damage)),
    ]  # fmt: skip
    show(tables.facts([(name, value) for name, value in facts if value]))


def journal_cat(
    file: FilePath,
    after: Annotated[int, typer.Option("--after", metavar="SEQ", help="Events behind this sequence.")] = 0,
    until: Annotated[int | None, typer.Option("--until", metavar="SEQ", help="Up to this sequence.")] = None,
    heartbeats: Annotated[bool, typer.Option("--heartbeats", help="The kept heartbeats instead.")] = False,
) -> None:
    """Every event as a line of JSON, as it stood on the stream; what is damaged is told on standard error."""
    with opened(file) as journal:
        batches = journal.heartbeats() if heartbeats else journal.messages(after=after, until=until)
        for messages in batches:
            sys.stdout.write("".join(f"{_line(message)}\n" for message in messages))
        damage = list(journal.damage)
    sys.stdout.flush()
    for one in damage:
        sys.stderr.write(f"damaged: {one.words()}\n")
    if damage:
        raise typer.Exit(Exit.UNHEALTHY)


def journal_import(file: FilePath, as_json: AsJson = False, nats: Nats = None, data: Data = None) -> None:
    """Bring a journal onto an empty server: every event gets the sequence it had, or the import says so and ends."""
    from rigbook_replay.imports import Imported, import_journal

    async def go() -> Imported:
        with opened(file) as journal:
            async with connected(nats, data) as client:
                with progress("importing") as told:
                    return await import_journal(journal, client.bus, told=told)

    with said_plainly():
        done = run(go())
    if as_json:
        json_line(done)
        return
    went_on = f" (the first {done.resumed_at} were there)" if done.resumed_at else ""
    say(f"{done.events} events imported{went_on}; each has the sequence it had, the last is {done.last_seq}")
    say(
        "receive times are this server's: questions about moments are answered from the journal itself", "dim"
    )


def _line(message: Message) -> str:
    head: dict[str, Any] = {
        "seq": message.seq,
        "subject": message.subject,
        "received": rfc3339(message.received_ns),
        "received_ns": message.received_ns,
    }
    try:
        msgspec.json.decode(message.body)
        body = {"event": msgspec.Raw(message.body)}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.encode({**head, "base64": b64encode(message.body).decode()}).decode()
    return msgspec.json.encode({**head, **body}).decode().replace("\n", " ")


def _index_facts(index: Any) -> dict[str, Any]:
    return {"events": index.events, "heartbeats": index.heartbeats, "position": index.position,
            "event_id": index.event_id, "fingerprint": index.chain.hex(), "chain": index.ledger_chain,
            "digest": index.digest, "fold": index.fold}  # fmt: skip

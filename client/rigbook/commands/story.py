"""`show`: everything about one demand, as three views side by side and its story."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from rigbook_schemas.events import Exited
from rigbook_schemas.queries import CardRow, DemandRow, DriftRow, EventRow, NodeRow, Question
from rigbook_schemas.sentences import enforcement, gib, sentence
from rigbook_schemas.values import Mode

from rigbook import tables
from rigbook.commands.invoke import connected, now_ns, run
from rigbook.commands.options import AsJson, Data, Nats
from rigbook.endings import boundary_lines, timeline
from rigbook.lookup import demand_named, events_of
from rigbook.narrative import asked, payload_of, printable, short_card
from rigbook.output import json_line, say, show

if TYPE_CHECKING:
    from rigbook.client import Client

__all__ = ["observed_of", "register", "story_of"]

# A demand that was restarted a hundred times is told by its last ends; `events` has them all.
ENDS_SHOWN_MAX = 3
SOURCE_SHOWN_MAX = 60


def register(app: typer.Typer) -> None:
    app.command("show")(show_demand)


def show_demand(
    demand: Annotated[str, typer.Argument(metavar="DEMAND", help="Id or name.")],
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Everything about a demand: desired, bound, observed; drifts; what happened when."""

    async def go() -> dict[str, Any]:
        async with connected(nats, data) as client:
            return await story_of(client, await demand_named(client, demand))

    story = run(go())
    if as_json:
        json_line(story)
        return
    _print(story)


async def story_of(client: Client, row: DemandRow) -> dict[str, Any]:
    """What `show --json` tells: the row, observations, drifts, events."""
    position = (await client.ask("demand", Question(id=row.demand))).answer.position
    nodes: list[NodeRow] = [node for node in await client.rows("nodes") if node.name in row.nodes]
    cards: list[CardRow] = [
        card for card in await client.rows("cards") if card.uuid in row.cards or _runs_on(card, row.demand)
    ]
    drifts: list[DriftRow] = [
        drift
        for drift in await client.rows("drifts", Question(open_only=False))
        if drift.drift.demand == row.demand
    ]
    return {
        "demand": row,
        "observed": observed_of(row, nodes, cards),
        "drifts": drifts,
        "events": await events_of(client, row.demand, position_min=position),
    }


def observed_of(row: DemandRow, nodes: list[NodeRow], cards: list[CardRow]) -> dict[str, Any]:
    """What engines and cards show of the demand right now; None = unknown, which is not nothing."""
    components: list[dict[str, Any]] = []
    answers = True
    for node in nodes:
        if node.components is None:
            answers = False
            continue
        components += [
            {
                "node": node.name,
                "component": c.component,
                "ref": c.ref,
                "running": c.running,
                "pids": list(c.pids),
                "epoch": c.epoch,
                "ports": [{"port": p.port, "host_port": p.host_port} for p in c.ports],
                "warning": c.warning,
            }
            for c in node.components
            if c.demand == row.demand
        ]
    processes: list[dict[str, Any]] = []
    unknown: list[str] = []
    for card in cards:
        if card.observed is None or card.observed.processes is None:
            unknown.append(card.uuid)
            continue
        processes += [
            {
                "node": card.node,
                "card": card.uuid,
                "pid": p.pid,
                "memory_bytes": p.memory_bytes,
                "component": p.component,
                "command": p.command,
            }
            for p in card.observed.processes
            if p.demand == row.demand
        ]
    starting = [
        {"node": node.name, "component": one.component, "step": one.step, "text": one.text, "since": one.since,
         "done_bytes": one.done_bytes, "total_bytes": one.total_bytes}
        for node in nodes
        for one in node.starting
        if one.demand == row.demand
    ]  # fmt: skip
    held: dict[str, int] = {}
    for process in processes:
        held[process["card"]] = held.get(process["card"], 0) + (process["memory_bytes"] or 0)
    memory = [
        {
            "card": card.uuid,
            "reserved_bytes": row.memory_bytes,
            "observed_bytes": None if card.uuid in unknown else held.get(card.uuid, 0),
            "enforces": card.enforces,
        }
        for card in cards
        if card.uuid in row.cards and row.epoch
    ]
    return {
        "components": components if answers else None,
        "processes": processes,
        "unknown_cards": unknown,
        "starting": starting,
        "memory": memory,
    }


def _runs_on(card: CardRow, demand: str) -> bool:
    processes = card.observed.processes if card.observed is not None else None
    return any(process.demand == demand for process in processes or ())


def _print(story: dict[str, Any]) -> None:
    row: DemandRow = story["demand"]
    pairs: list[tuple[str, Any]] = [
        ("demand", row.demand),
        ("name", row.name),
        ("project", row.project),
        ("owner", f"{row.owner} <{row.contact}>" if row.contact else row.owner),
        ("purpose", row.purpose),
        ("workload", f"{row.workload}: {', '.join(row.components)}"),
        ("asked", f"{asked(row.memory_bytes, row.count, row.mode)}, priority {row.priority}"),
        ("raised", f"{tables.clock(row.raised)} ({tables.age(row.raised, now_ns())} ago)"),
        ("status", tables.status(row.phase)),
    ]
    show(tables.facts([(name, value) for name, value in pairs if value or isinstance(value, Text)]))
    say()
    show(
        tables.facts(
            [("DESIRED", _desired(row)), ("BOUND", _bound(row)), ("OBSERVED", _observed(story["observed"]))]
        )
    )
    for line in _more(row, story["observed"]):
        say(f"  {line}")
    for reason in row.reasons:
        say(f"  {sentence(reason)}")
    if row.verdict or row.sentence:
        say(f"verdict: {row.verdict or 'none yet'}{f', {row.sentence}' if row.sentence else ''}")
    _print_ends(story["events"])
    drifts: list[DriftRow] = story["drifts"]
    if drifts:
        say("\nDRIFTS", "bold")
        show(tables.drifts(drifts, now_ns()))
    events: list[EventRow] = story["events"]
    say("\nEVENTS", "bold")
    show(tables.events(events, with_demand=False))


def _print_ends(events: list[EventRow]) -> None:
    """Each end with its evidence in the order of time, and memory against its limits."""
    for event in [one for one in events if one.kind == "exited"][-ENDS_SHOWN_MAX:]:
        exited = payload_of(event)
        if not isinstance(exited, Exited) or not (exited.evidence or exited.boundaries):
            continue
        again = f", attempt {exited.attempt}" if exited.attempt > 1 else ""
        say(f"\nEVIDENCE of {exited.verdict} ({exited.confidence}) on {exited.node}{again}", "bold")
        for when, what, value, source in timeline(exited, event.time):
            say(
                f"  {tables.clock(when)}  {what}: {value}{f'  [{source[:SOURCE_SHOWN_MAX]}]' if source else ''}"
            )
        for line in boundary_lines(exited.boundaries):
            say(f"  {printable(line)}")


def _desired(row: DemandRow) -> str:
    if row.wanted:
        return "running" if row.phase not in ("ended", "refused") else "nothing more"
    when = f" since {tables.clock(row.withdrawn)}" if row.withdrawn else ""
    return f"stopped{when}{f', by {row.withdrawn_by}' if row.withdrawn_by else ''}"


def _bound(row: DemandRow) -> str:
    if not row.epoch:
        return f"no card (was epoch {row.epoch_last})" if row.epoch_last else "no card"
    return f"{', '.join(short_card(card) for card in row.cards)} of {', '.join(row.nodes)}, epoch {row.epoch}"


def _more(row: DemandRow, observed: dict[str, Any]) -> list[str]:
    """What it waits for, where it answers, how much it holds of what it reserved, and what may go wrong."""
    told: list[str] = []
    for one in observed["starting"]:
        total = f" of {gib(one['total_bytes'])}" if one["total_bytes"] else ""
        done = f" ({gib(one['done_bytes'])}{total})" if one["done_bytes"] is not None else ""
        told.append(f"{one['component']} waits: {one['step']}, {one['text']}{done}")
    for c in observed["components"] or ():
        told += [
            f"{c['component']} answers at {c['node']}:{p['host_port']}" for p in c["ports"] if p["host_port"]
        ]
        told += [f"warning: {c['warning']}"] if c["warning"] else []
    for one in observed["memory"]:
        kept = enforcement(Mode(row.mode), one["enforces"])
        used, reserved = one["observed_bytes"], one["reserved_bytes"]
        over = f", {gib(used - reserved)} more than reserved" if used is not None and used > reserved else ""
        told.append(
            f"{short_card(one['card'])}: {gib(reserved)} reserved, {gib(used)} observed{over}; {kept}"
        )
    return told


def _observed(observed: dict[str, Any]) -> str:
    if observed["components"] is None:
        told = "the engine does not answer: unknown"
    else:
        running = [
            f"{c['component']} (pids {', '.join(map(str, c['pids'])) or 'none'})"
            for c in observed["components"]
            if c["running"]
        ]
        left = [
            f"{c['component']}: its launcher is gone, pids {', '.join(map(str, c['pids']))} live on"
            for c in observed["components"]
            if not c["running"] and c["pids"]
        ]
        told = ", ".join(running + left) or "no component runs"
    holding = [
        f"pid {p['pid']} holds {gib(p['memory_bytes'])} of {short_card(p['card'])}"
        for p in observed["processes"]
    ]
    if holding:
        told += "; " + ", ".join(holding)
    if observed["unknown_cards"]:
        told += f"; unknown: {', '.join(short_card(card) for card in observed['unknown_cards'])}"
    return told

"""`explain` and `offers`: why a demand waits, what it waited for before, and what would fit now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text
from rigbook_schemas.events import Bound, Deferred, DemandRaised, Refused
from rigbook_schemas.sentences import gib, sentence
from rigbook_schemas.values import Horizon

from rigbook import tables
from rigbook.commands.invoke import connected, run
from rigbook.commands.options import AsJson, Data, Nats
from rigbook.failures import RigbookFailure
from rigbook.lookup import demand_named, events_of
from rigbook.narrative import event_line, holder_line, payload_of, short_card
from rigbook.output import json_line, say, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_schemas.queries import DemandRow, EventRow, SoonestRow, VictimRow
    from rigbook_schemas.values import Reason

    from rigbook.client import Client, Plan

__all__ = ["register", "show_reasons", "soonest_line", "victim_line"]

HOLDERS_SHOWN: Final = 8
PAST_SHOWN: Final = 12
TOLD_BY: Final = ("deferred", "refused", "bound", "eviction.ordered", "exited")
HORIZONS: Final = {
    Horizon.LATER: "may change",
    Horizon.NEVER_BIG_ENOUGH: "never big enough",
    Horizon.NEVER_HERE: "never here",
}


def register(app: typer.Typer) -> None:
    app.command("explain")(explain)
    app.command("offers")(offers)


def explain(
    demand: Annotated[str, typer.Argument(metavar="DEMAND", help="Id or name.")],
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Why a demand waits, was refused, or ended: now, and what was told before."""

    async def go() -> tuple[DemandRow, list[DemandRow], Plan | None, list[EventRow]]:
        async with connected(nats, data) as client:
            row = await demand_named(client, demand)
            told = await events_of(client, row.demand, kinds=("demand.raised", *TOLD_BY))
            now = await _now(client, row, told)
            reasons = row.reasons if now is None else now.reasons
            names = dict.fromkeys(holder for reason in reasons for holder in reason.holders)
            holders = [await demand_named(client, name) for name in list(names)[:HOLDERS_SHOWN]]
            return row, holders, now, [event for event in told if event.kind in TOLD_BY]

    row, holders, now, past = run(go())
    reasons = row.reasons if now is None else now.reasons
    if as_json:
        json_line(_plain(row, reasons, holders, now, past))
        return
    _print(row, reasons, holders, now, past)


async def _now(client: Client, row: DemandRow, told: Sequence[EventRow]) -> Plan | None:
    """What the placer says of a waiting demand at this moment; None when it says nothing."""
    raised = [payload_of(event) for event in told if event.kind == "demand.raised"]
    spec = raised[0] if raised else None
    if row.phase != "waiting" or not isinstance(spec, DemandRaised):
        return None
    try:
        return await client.plan(spec)
    except RigbookFailure:
        return None  # no placer answers: what it told last stands on the log


def _plain(
    row: DemandRow,
    reasons: Sequence[Reason],
    holders: Sequence[DemandRow],
    now: Plan | None,
    past: Sequence[EventRow],
) -> dict[str, Any]:
    return {
        "demand": row.demand,
        "phase": row.phase,
        "verdict": row.verdict,
        "sentence": row.sentence,
        "reasons": [{"sentence": sentence(reason), "reason": reason} for reason in reasons],
        "holders": [
            {"demand": h.demand, "phase": h.phase, "wanted": h.wanted, "drifts": h.drifts} for h in holders
        ],
        "as_of": row.reasons and "told" if now is None else "now",
        "position": now.position if now is not None else None,
        "fits": now is not None and now.bound is not None,
        "soonest": now.soonest if now is not None else None,
        "evict": now.evict if now is not None else (),
        "past": [
            {
                "seq": event.seq, "received": event.received, "kind": event.kind, "text": event_line(event),
                "reasons": _reasons_of(event),
            }
            for event in past
        ],
    }  # fmt: skip


def _reasons_of(event: EventRow) -> tuple[Reason, ...]:
    payload = payload_of(event)
    if isinstance(payload, Deferred | Refused):
        return payload.reasons
    return payload.notes if isinstance(payload, Bound) else ()


def _print(
    row: DemandRow,
    reasons: Sequence[Reason],
    holders: Sequence[DemandRow],
    now: Plan | None,
    past: Sequence[EventRow],
) -> None:
    say(f"{row.demand} is {row.phase}{'' if row.wanted else ' (desired: stopped)'}", "bold")
    show_reasons(reasons)
    for holder in holders:
        # what a reason said when it was written may have changed since
        say(f"    {holder_line(holder)}", "" if holder.wanted else "yellow")
    if now is not None:
        if now.soonest is not None:
            say(f"  {soonest_line(now.soonest)}")
        for victim in now.evict:
            say(f"  {victim_line(victim)}")
        if now.bound is not None:
            say("  it fits now, and is about to be bound")
    if row.sentence or row.verdict:
        say(f"  {row.verdict}: {row.sentence}" if row.verdict else f"  {row.sentence}")
    if not reasons and row.phase == "waiting" and (now is None or now.bound is None):
        say(
            "  it is next in the queue, or the placer has not looked at it yet (`rigbook doctor` tells whether one runs)"
        )
    if row.phase in ("bound", "starting", "running"):
        say(f"  it has its cards: {', '.join(row.cards)}")
    if row.phase == "releasing":
        say("  its stop was ordered; the cards are free when the node has seen them free, not before")
    for drift in row.drifts:
        say(f"  drift: {drift}; `rigbook drift list --evidence` has what was seen")
    if past:
        say("\nTOLD BEFORE", "bold")
    for event in past[-PAST_SHOWN:]:
        say(f"  {tables.clock(event.received)}  {event_line(event)}")
        for reason in _reasons_of(event)[1:4]:
            say(f"                       {sentence(reason)}", "dim")


def show_reasons(reasons: Sequence[Reason], indent: str = "  ") -> None:
    """By what could be done about them, the nearest miss first; headings only where there are several."""
    kinds = [horizon for horizon in HORIZONS if any(r.horizon is horizon for r in reasons)]
    for horizon in kinds:
        if len(kinds) > 1:
            say(f"{indent}{HORIZONS[horizon]}:", "dim")
        for reason in reasons:
            if reason.horizon is horizon:
                say(f"{indent}{'  ' if len(kinds) > 1 else ''}{sentence(reason)}")


def soonest_line(soonest: SoonestRow) -> str:
    """Which endings would help, and when they are due."""
    cards = ", ".join(short_card(card) for card in soonest.cards)
    where = f"{cards} of {', '.join(soonest.nodes)}"
    if not soonest.waits_for:
        return f"soonest: {where}, which nobody holds"
    names = ", ".join(soonest.waits_for)
    if soonest.seconds is None:
        return f"soonest: {where}, when {names} ends; when that is, nobody knows (no maximum run time)"
    return f"soonest: {where}, when {names} ends, at {tables.clock(soonest.at)} at the latest"


def victim_line(victim: VictimRow) -> str:
    """Who would be evicted for it."""
    return (
        f"would evict {victim.demand} ({victim.owner}, project {victim.project}, priority {victim.priority}) "
        f"from {', '.join(victim.nodes)}: it has run for {victim.run_seconds:.0f} s, is asked to save, and waits again"
    )


def offers(
    project: Annotated[
        str,
        typer.Option("--project", "-p", metavar="NAME", help="What its quota leaves; default: the fleet's."),
    ] = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """What would fit now: by card model and mode the largest demand, and how many of that size."""

    async def go() -> tuple[int, list[Any]]:
        async with connected(nats, data) as client:
            return await client.offers(project)

    position, rows = run(go())
    if as_json:
        json_line({"position": position, "items": rows})
        return
    if not rows:
        show(Text("nothing would fit now; `rigbook gpu list` shows who holds what"))
        return
    table = tables.plain(
        "GPU MODEL", "MODE", "LARGEST", "CARDS WITH THAT", "ON ONE NODE", "FREE IN ALL", "SUCH AS"
    )
    for row in rows:
        table.add_row(
            row.model, row.mode, gib(row.memory_bytes), str(row.cards), str(row.count_max),
            f"{gib(row.free_bytes)} on {row.free_cards} cards", ", ".join(row.nodes[:3]),
        )  # fmt: skip
    show(table)
    say(f"as of position {position}; `rigbook plan -f FILE` tells for a demand of your own", "dim")

"""`stop` and `logs`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rigbook_schemas import subjects

from rigbook.commands.invoke import connected, me, run
from rigbook.commands.options import AsJson, By, Data, Nats, Reason
from rigbook.failures import NotFound, TimedOut, of_answer
from rigbook.logtext import fresh
from rigbook.lookup import demand_named
from rigbook.moments import MomentError, parse_duration
from rigbook.narrative import printable, short_card, standing
from rigbook.output import json_line, say

if TYPE_CHECKING:
    from rigbook_schemas.queries import DemandRow

    from rigbook.client import Client

__all__ = ["register"]

TERMINAL: Final = ("ended", "refused", "withdrawn")
POLL_SECONDS: Final = 0.25
LOG_POLL_SECONDS: Final = 0.5


def register(app: typer.Typer) -> None:
    app.command("stop")(stop)
    app.command("logs")(logs)


def stop(
    demand: Annotated[str, typer.Argument(metavar="DEMAND", help="Id or name.")],
    wait: Annotated[bool, typer.Option("--wait", help="Until its cards were seen free.")] = False,
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="How long to wait.")] = "2m",
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Take a demand back: all its components are stopped. Cards are free when they are seen free."""
    try:
        seconds = parse_duration(timeout)
    except MomentError as error:
        raise typer.BadParameter(f"--timeout: {error}") from None

    async def go() -> DemandRow:
        async with connected(nats, data) as client:
            row = await demand_named(client, demand)
            if row.phase in TERMINAL:
                return row
            seq = 0
            if row.wanted:
                seq = await client.withdraw(row.demand, row.project, by=by or me(), reason=reason)
                if not as_json:
                    say(f"{row.demand}: desired is stopped from now on")
            elif not as_json:
                say(
                    f"{row.demand}: was stopped already, by {row.withdrawn_by or 'somebody'}; it is {row.phase}"
                )
            return (
                await _gone(client, row.demand, seconds, quiet=as_json)
                if wait
                else await demand_named(client, row.demand, position_min=seq)
            )

    row = run(go())
    if as_json:
        json_line(
            {"demand": row.demand, "phase": row.phase, "verdict": row.verdict, "sentence": row.sentence}
        )
    elif row.phase in TERMINAL:
        say(f"{row.demand} is {row.phase}{f': {row.sentence or row.verdict}' if row.verdict else ''}")


async def _gone(client: Client, demand: str, seconds: float, *, quiet: bool) -> DemandRow:
    deadline = time.monotonic() + seconds
    phase = ""
    while True:
        row = await demand_named(client, demand)
        if row.phase != phase and not quiet and row.phase not in TERMINAL:
            say(f"  {row.phase}: {standing(row)}")
        phase = row.phase
        if phase in TERMINAL:
            return row
        if time.monotonic() > deadline:
            held = ", ".join(short_card(card) for card in row.cards)
            raise TimedOut(
                f"{demand} still holds {held or 'its place'} after {seconds:g} s",
                why=standing(row),
                remedy=f"`rigbook show {demand}` has what still runs; `rigbook drift list` whether it is seen as a leftover",
            )
        await asyncio.sleep(POLL_SECONDS)


def logs(
    demand: Annotated[str, typer.Argument(metavar="DEMAND", help="Id or name.")],
    component: Annotated[
        str, typer.Argument(metavar="[COMPONENT]", help="This one only.", show_default=False)
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it ends, or Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=2000, help="The last N of each.")] = 200,
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """What its programs wrote; asked of the agent of its node."""

    async def go() -> None:
        async with connected(nats, data) as client:
            row = await demand_named(client, demand)
            if not row.epoch_last:
                raise NotFound(
                    f"{row.demand} has never run", why=standing(row), remedy=f"`rigbook explain {row.demand}`"
                )
            if component and component not in row.components:
                raise NotFound(
                    f"{row.demand} has no component {component!r}",
                    remedy=f"it has {', '.join(row.components)}",
                )
            await _logs(
                client,
                row,
                [component] if component else list(row.components),
                lines,
                follow=follow,
                as_json=as_json,
            )

    run(go())


async def _logs(
    client: Client, row: DemandRow, components: list[str], lines: int, *, follow: bool, as_json: bool
) -> None:
    seen: dict[tuple[str, str], str] = {}
    node_shown = len(row.nodes) > 1
    while True:
        runs = False
        for node in row.nodes or await _nodes_of(client, row):
            for name in components:
                answer = await _asked(client, node, row, name, lines)
                runs = runs or bool(answer.get("running"))
                for item in answer.get("items", ()):
                    key = (node, str(item["component"]))
                    text = str(item["text"])
                    new = fresh(seen.get(key, ""), text)
                    seen[key] = text
                    _print_log(key, new, prefix=len(components) > 1 or node_shown, as_json=as_json)
        if not follow or not runs:
            return
        await asyncio.sleep(LOG_POLL_SECONDS)


async def _nodes_of(client: Client, row: DemandRow) -> list[str]:
    """An ended demand has no nodes any more: those that its events name."""
    from rigbook.lookup import events_of

    return sorted(
        {
            event.node
            for event in await events_of(client, row.demand)
            if event.node and event.kind == "started"
        }
    )


async def _asked(client: Client, node: str, row: DemandRow, component: str, lines: int) -> dict[str, Any]:
    question = {
        "demand": row.demand,
        "epoch": row.epoch or row.epoch_last,
        "component": component,
        "lines": lines,
    }
    reply = await client.request(
        subjects.agent_query(node, "logs"), msgspec.json.encode(question), f"the agent of node {node}"
    )
    answer: dict[str, Any] = msgspec.json.decode(reply, type=dict[str, Any])
    error = answer.get("error")
    if error:
        raise of_answer(
            str(error.get("code", "not_ready")), str(error.get("text", "")), str(error.get("remedy", ""))
        )
    return answer


def _print_log(key: tuple[str, str], text: str, *, prefix: bool, as_json: bool) -> None:
    node, component = key
    for line in text.splitlines():
        if as_json:
            json_line({"node": node, "component": component, "line": line})
        else:
            say(f"{component} | {printable(line)}" if prefix else printable(line))

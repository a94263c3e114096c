"""`gpu ...`, `node ...`: cards and machines, and the operator's rules for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from rigbook_schemas import events as e
from rigbook_schemas.queries import LIMIT_MAX, Question
from rigbook_schemas.values import Mode

from rigbook import tables
from rigbook.commands.invoke import connected, me, run, watch
from rigbook.commands.options import AsJson, At, By, Data, JournalFile, Nats, Reason, Watch
from rigbook.failures import Invalid, WouldConflict
from rigbook.lookup import card_named, node_named
from rigbook.narrative import short_card
from rigbook.output import answer_json, json_line, say, show

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from rich.table import Table
    from rigbook_schemas.events import Payload
    from rigbook_schemas.queries import CardRow, NodeRow

    from rigbook.client import Client

    # (topic of the subject, the event, what to tell the person)
    Decide = Callable[[Client], Awaitable[tuple[str, Payload, str]]]

__all__ = ["register"]

GpuName = Annotated[str, typer.Argument(metavar="GPU", help="UUID or its beginning, or node/index.")]
NodeName = Annotated[str, typer.Argument(metavar="NODE")]
OnNode = Annotated[str, typer.Option("--node", metavar="NAME", help="Of this node only.")]
NO_NODE = "no node has joined yet; start an agent with `rigbook agent --join URL`"


def register(app: typer.Typer) -> None:
    gpu = typer.Typer(no_args_is_help=True, help="Cards: what they are, who holds them, what they show.")
    gpu.command("list")(gpu_list)
    gpu.command("mode")(gpu_mode)
    gpu.command("quarantine")(gpu_quarantine)
    gpu.command("restore")(gpu_restore)
    app.add_typer(gpu, name="gpu")
    node = typer.Typer(no_args_is_help=True, help="Machines with an agent.")
    node.command("list")(node_list)
    node.command("cordon")(node_cordon)
    node.command("uncordon")(node_uncordon)
    app.add_typer(node, name="node")


def gpu_list(
    node: OnNode = "",
    watching: Watch = False,
    at: At = "",
    journal: JournalFile = None,
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Cards: bound beside observed."""
    if at or journal is not None:
        from rigbook.commands.history import cards_then

        cards_then(at, journal, nats, data, node=node, as_json=as_json)
        return

    async def draw(client: Client) -> Table | Text:
        rows: list[CardRow] = await client.rows("cards", Question(node=node, limit=LIMIT_MAX))
        return tables.cards(rows) if rows else Text(NO_NODE if not node else f"no cards on node {node}")

    async def go() -> None:
        async with connected(nats, data) as client:
            if as_json:
                answer_json(*await client.whole("cards", Question(node=node, limit=LIMIT_MAX)))
            elif watching:
                await watch(lambda: draw(client))
            else:
                show(await draw(client))

    run(go())


def gpu_mode(
    gpu: GpuName,
    mode: Annotated[str, typer.Argument(metavar="MODE", help="exclusive, memory-slice, time-slice, or any.")],
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Pin the mode a card serves; `any` lets the first demand choose again."""
    choices = [*map(str, Mode), "any"]
    if mode not in choices:
        raise Invalid(f"{mode!r} is no mode; expected one of {', '.join(choices)}", code="invalid_flag")
    wanted = None if mode == "any" else Mode(mode)

    async def go(client: Client) -> tuple[str, Payload, str]:
        card = await card_named(client, gpu)
        if wanted is not None and card.holders and card.mode != wanted:
            raise WouldConflict(
                f"{short_card(card.uuid)} serves {card.mode} for {', '.join(card.holders)}",
                why="a card has one mode at a time, and nobody is evicted by a change of mode",
                remedy=f"stop them first: {'; '.join(f'rigbook stop {holder}' for holder in card.holders)}",
                code="mode_conflict",
            )
        said = e.ModeSet(card=card.uuid, mode=wanted, node=card.node, by=by or me(), reason=reason)
        return card.uuid, said, f"{short_card(card.uuid)} serves {mode} from now on"

    _rule(go, as_json=as_json, nats=nats, data=data)


def gpu_quarantine(
    gpu: GpuName,
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """No new bindings on a card; what runs, runs on."""

    async def go(client: Client) -> tuple[str, Payload, str]:
        card = await card_named(client, gpu)
        said = e.GpuQuarantined(card=card.uuid, by=by or me(), reason=reason)
        return card.uuid, said, f"{short_card(card.uuid)} takes no new bindings"

    _rule(go, as_json=as_json, nats=nats, data=data)


def gpu_restore(
    gpu: GpuName,
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Take a card out of quarantine."""

    async def go(client: Client) -> tuple[str, Payload, str]:
        card = await card_named(client, gpu)
        said = e.GpuRestored(card=card.uuid, by=by or me(), reason=reason)
        return card.uuid, said, f"{short_card(card.uuid)} takes bindings again"

    _rule(go, as_json=as_json, nats=nats, data=data)


def node_list(
    watching: Watch = False,
    at: At = "",
    journal: JournalFile = None,
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Machines: their cards, what is free, and when they were heard."""
    if at or journal is not None:
        from rigbook.commands.history import nodes_then

        nodes_then(at, journal, nats, data, as_json=as_json)
        return

    async def draw(client: Client) -> Table | Text:
        rows: list[NodeRow] = await client.rows("nodes")
        return tables.nodes(rows) if rows else Text(NO_NODE)

    async def go() -> None:
        async with connected(nats, data) as client:
            if as_json:
                answer_json(*await client.whole("nodes"))
            elif watching:
                await watch(lambda: draw(client))
            else:
                show(await draw(client))

    run(go())


def node_cordon(
    node: NodeName,
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """No new bindings on a node; what runs, runs on."""

    async def go(client: Client) -> tuple[str, Payload, str]:
        name = (await node_named(client, node)).name
        return name, e.NodeCordoned(node=name, by=by or me(), reason=reason), f"{name} takes no new bindings"

    _rule(go, as_json=as_json, nats=nats, data=data)


def node_uncordon(
    node: NodeName,
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """The node takes bindings again."""

    async def go(client: Client) -> tuple[str, Payload, str]:
        name = (await node_named(client, node)).name
        return name, e.NodeUncordoned(node=name, by=by or me(), reason=reason), f"{name} takes bindings again"

    _rule(go, as_json=as_json, nats=nats, data=data)


def _rule(decide: Decide, *, as_json: bool, nats: str | None, data: Path | None) -> None:
    """Look, decide what to say, say it against the position of all ownership decisions."""

    async def go() -> tuple[int, str]:
        async with connected(nats, data) as client:
            topic, payload, told = await decide(client)
            return await client.set_policy(topic, payload), told

    seq, told = run(go())
    if as_json:
        json_line({"seq": seq, "told": told})
    else:
        say(f"{told} (event {seq})")

"""`gpu ...`, `node ...`: cards and machines, and the operator's rules for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.text import Text
from rigbook_schemas import events as e
from rigbook_schemas.queries import LIMIT_MAX, Question
from rigbook_schemas.values import EvictionReason, Mode

from rigbook import tables
from rigbook.commands.draining import Drain, drain, holders_of, running_seconds
from rigbook.commands.invoke import connected, me, run, watch
from rigbook.commands.options import AsJson, At, By, Data, JournalFile, Nats, Reason, Watch
from rigbook.failures import Invalid, WouldConflict
from rigbook.lookup import card_named, node_named
from rigbook.moments import MomentError, ago, parse_duration
from rigbook.narrative import short_card
from rigbook.output import answer_json, json_line, say, show

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from rich.table import Table
    from rigbook_schemas.events import Payload
    from rigbook_schemas.queries import BindingRow, CardRow, NodeRow

    from rigbook.client import Client

    # (topic of the subject, the event, what to tell the person)
    Decide = Callable[[Client], Awaitable[tuple[str, Payload, str]]]

__all__ = ["register"]

GpuName = Annotated[str, typer.Argument(metavar="GPU", help="UUID or its beginning, or node/index.")]
NodeName = Annotated[str, typer.Argument(metavar="NODE")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
Insist = Annotated[
    bool, typer.Option("--insist", help="Also kill who does not answer when asked to save. Default: never.")
]
Timeout = Annotated[str, typer.Option("--timeout", metavar="TIME", help="How long to wait for it.")]
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
    node.command("drain")(node_drain)
    app.add_typer(node, name="node")


def seconds_of(timeout: str) -> float:
    try:
        return parse_duration(timeout)
    except MomentError as error:
        raise Invalid(f"--timeout: {error}", code=error.code) from None


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
    draining: Annotated[
        bool, typer.Option("--drain", help="Stop who is on it first; shows what that costs, and asks.")
    ] = False,
    yes: Yes = False,
    insist: Insist = False,
    timeout: Timeout = "10m",
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Pin the mode a card serves; `any` lets the first demand choose again.

    Refused while others are bound on it, who are named; with --drain they are stopped first, and wait again.
    """
    choices = [*map(str, Mode), "any"]
    if mode not in choices:
        raise Invalid(f"{mode!r} is no mode; expected one of {', '.join(choices)}", code="invalid_flag")
    wanted = None if mode == "any" else Mode(mode)
    seconds = seconds_of(timeout)

    async def go() -> dict[str, Any]:
        async with connected(nats, data) as client:
            card = await card_named(client, gpu)
            name = short_card(card.uuid)
            said = e.ModeSet(card=card.uuid, mode=wanted, node=card.node, by=by or me(), reason=reason)
            in_the_way = await holders_of(client, card=card.uuid) if _other_mode(card, wanted) else []
            if in_the_way and not draining:
                listed = "; ".join(
                    f"{b.demand} ({b.owner}, {b.mode}, for {ago(running_seconds(b))})" for b in in_the_way
                )
                raise WouldConflict(
                    f"{name} serves {card.mode}: {listed}",
                    why="a card has one mode at a time, and nobody is evicted by a change of mode",
                    remedy=f"`rigbook gpu mode {gpu} {mode} --drain` shows what stopping them costs, and then does it",
                    code="mode_conflict",
                )
            if not in_the_way:
                seq = await client.set_policy(card.uuid, said)
                await _serves(client, card.uuid, wanted, seq)
                return {"seq": seq, "told": f"{name} serves {mode} from now on", "stopped": []}
            how = Drain(
                reason=EvictionReason.MODE_SWITCH, by=by, text=reason, yes=yes, insist=insist, seconds=seconds,
                quiet=as_json,
            )  # fmt: skip

            async def find(position: int) -> list[BindingRow]:
                return await holders_of(client, card=card.uuid, position_min=position)

            async def close() -> int:
                return await client.set_policy(card.uuid, msgspec.structs.replace(said, draining=True))

            done = await drain(client, name, how, find, close)
            await _serves(client, card.uuid, wanted, done["seq"])
            return {**done, "told": f"{name} serves {mode} from now on"}

    _done(run(go()), as_json=as_json)


def _other_mode(card: CardRow, wanted: Mode | None) -> bool:
    return wanted is not None and bool(card.holders) and card.mode != wanted


async def _serves(client: Client, uuid: str, wanted: Mode | None, seq: int) -> None:
    """What the log made of it: a binding may have come first. Raises WouldConflict."""
    rows: list[CardRow] = (await client.ask("cards", Question(card=uuid, position_min=seq))).rows
    for card in rows:
        if _other_mode(card, wanted):
            raise WouldConflict(
                f"{short_card(card.uuid)} still serves {card.mode} for {', '.join(card.holders)}",
                why="they were bound before the rule stood",
                remedy="the same command again, with --drain",
                code="mode_conflict",
            )


def _done(done: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        json_line(done)
    else:
        say(f"{done['told']} (event {done['seq']})")


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


def node_drain(
    node: NodeName,
    yes: Yes = False,
    insist: Insist = False,
    timeout: Timeout = "10m",
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Empty a node: shows who is stopped and what is lost, asks, cordons it, stops them; they wait again."""
    seconds = seconds_of(timeout)

    async def go() -> dict[str, Any]:
        async with connected(nats, data) as client:
            name = (await node_named(client, node)).name
            how = Drain(
                reason=EvictionReason.DRAIN, by=by, text=reason, yes=yes, insist=insist, seconds=seconds,
                quiet=as_json,
            )  # fmt: skip

            async def find(position: int) -> list[BindingRow]:
                return await holders_of(client, node=name, position_min=position)

            async def close() -> int:
                return await client.set_policy(name, e.NodeCordoned(node=name, by=how.by, reason=reason))

            done = await drain(client, f"node {name}", how, find, close)
            return {
                **done,
                "told": f"node {name} is empty, and takes no new bindings until `rigbook node uncordon`",
            }

    _done(run(go()), as_json=as_json)


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

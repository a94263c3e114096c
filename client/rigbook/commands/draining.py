"""Taking cards or nodes out of use: first what it costs, then step by step, to the end.

Nothing new is bound from the first step on: it stands in the order of all ownership decisions, so a binding that
races with it was appended before it (and is stopped with the others) or not at all.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import typer
from rigbook_schemas import events as e
from rigbook_schemas.queries import LIMIT_MAX, BindingRow, Question
from rigbook_schemas.sentences import gib
from rigbook_schemas.values import EvictionReason
from rigbook_schemas.wire import instant

from rigbook import tables
from rigbook.commands.invoke import me, now_ns
from rigbook.failures import TimedOut, WouldConflict
from rigbook.moments import ago
from rigbook.narrative import short_card
from rigbook.output import say, show

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rigbook.client import Client

__all__ = ["Drain", "cost_of", "drain", "holders_of", "running_seconds"]

POLL_SECONDS: Final = 0.25


class Drain:
    """How to do it, as the command line says."""

    def __init__(
        self,
        *,
        reason: EvictionReason,
        by: str,
        text: str,
        yes: bool,
        insist: bool,
        seconds: float,
        quiet: bool,
    ) -> None:
        self.reason = reason
        self.by = by or me()
        self.text = text
        self.yes = yes
        self.insist = insist
        self.seconds = seconds
        self.quiet = quiet

    def say(self, text: str, style: str = "") -> None:
        if not self.quiet:
            say(text, style)


async def holders_of(
    client: Client, *, node: str = "", card: str = "", position_min: int = 0
) -> list[BindingRow]:
    """The bindings on a node or a card."""
    question = Question(node=node, card=card, position_min=position_min, limit=LIMIT_MAX)
    rows: list[BindingRow] = (await client.whole("bindings", question)).rows
    return rows


def running_seconds(row: BindingRow) -> float:
    """How long it has had its cards."""
    bound_ns = instant(row.bound)
    return 0.0 if bound_ns is None else max(0.0, (now_ns() - bound_ns) / 1e9)


def cost_of(rows: Sequence[BindingRow]) -> list[dict[str, Any]]:
    """Who would be stopped, and the run time that is lost where nothing was saved."""
    return [
        {
            "demand": row.demand,
            "project": row.project,
            "owner": row.owner,
            "epoch": row.epoch,
            "phase": row.phase,
            "run_seconds": round(running_seconds(row), 1),
            "memory_bytes": row.memory_bytes,
            "nodes": [share.node for share in row.shares],
            "cards": [a.card for share in row.shares for a in share.allotments],
        }
        for row in rows
    ]


def show_cost(rows: Sequence[BindingRow]) -> None:
    table = tables.plain("DEMAND", "PROJECT", "OWNER", "RUNNING FOR", "HOLDS", "THEN")
    for row in rows:
        cards = ", ".join(short_card(a.card) for share in row.shares for a in share.allotments)
        then = "on its way out already" if row.eviction else "asked to save, stopped, waits again"
        table.add_row(
            row.demand,
            row.project,
            row.owner,
            ago(running_seconds(row)),
            f"{gib(row.memory_bytes)} on {cards}",
            then,
        )
    show(table)
    whole = sum(running_seconds(row) for row in rows)
    say(f"{len(rows)} to be stopped, {ago(whole)} of run time at stake where nothing is saved")


async def drain(
    client: Client,
    what: str,
    how: Drain,
    find: Callable[[int], Awaitable[list[BindingRow]]],
    close: Callable[[], Awaitable[int]],
) -> dict[str, Any]:
    """Show the cost, ask, close for new bindings, stop, and see them gone.

    `find(position_min)`: the bindings; `close()`: appends the rule that lets nothing new in, gives its sequence.
    Raises WouldConflict (nobody said yes), TimedOut.
    """
    rows = await find(0)
    if rows and not how.yes:
        if not how.quiet:
            show_cost(rows)
        if how.quiet or not sys.stdin.isatty():
            raise WouldConflict(
                f"nothing was done to {what}",
                why=f"{len(rows)} would be stopped",
                remedy="add --yes to do it",
            )
        if not typer.confirm("stop them?"):
            raise WouldConflict(f"nothing was done to {what}", why="not confirmed")
    seq = await close()
    how.say(f"{what} takes no new bindings (event {seq})")
    rows = await find(seq)  # what was bound before the rule stood, and after we looked, is among them
    cost = cost_of(rows)
    for row in rows:
        if row.eviction:
            continue
        nodes = tuple(share.node for share in row.shares)
        order = e.EvictionOrdered(
            demand=row.demand,
            epoch=row.epoch,
            nodes=nodes,
            reason=how.reason,
            by=how.by,
            grace_seconds=max((c.stop_grace_seconds for s in row.shares for c in s.components), default=10.0),
            requeue=True,
            text=how.text or f"{what}: {how.reason}",
            insist=how.insist,
        )
        await client.order(nodes, order)
        how.say(f"  {row.demand}: asked to stop; it waits again after that")
    await _gone(what, how, find, rows)
    return {"seq": seq, "stopped": cost}


async def _gone(
    what: str,
    how: Drain,
    find: Callable[[int], Awaitable[list[BindingRow]]],
    rows: Sequence[BindingRow],
) -> None:
    deadline = time.monotonic() + how.seconds
    left = {row.epoch: row.demand for row in rows}
    while left:
        now = {row.epoch: row for row in await find(0)}
        for epoch in [epoch for epoch in left if epoch not in now]:
            how.say(f"  {left.pop(epoch)}: its cards were seen free")
        if left and time.monotonic() > deadline:
            names = ", ".join(left.values())
            raise TimedOut(
                f"{what} is not free of {names} after {how.seconds:g} s",
                why="nothing is killed that has not answered, unless --insist was said; new bindings stay out",
                remedy="`rigbook show` has what each still runs; the same command again goes on from here",
            )
        if left:
            await asyncio.sleep(POLL_SECONDS)

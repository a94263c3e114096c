"""Finding the one thing that a person named, or saying which things the name could mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rigbook_schemas.queries import LIMIT_MAX, CardRow, DemandRow, EventRow, NodeRow, Question

from rigbook.failures import NotFound, RigbookFailure

if TYPE_CHECKING:
    from rigbook.client import Client

__all__ = ["card_named", "demand_named", "events_of", "node_named"]


async def demand_named(client: Client, name: str, *, position_min: int = 0) -> DemandRow:
    """By id, or by name: the live one, else the latest. `position_min`: not older than this. Raises NotFound."""
    rows = (await client.ask("demand", Question(id=name, position_min=position_min))).rows
    if not rows:
        raise NotFound(f"no demand {name!r}", remedy="`rigbook ls --all` lists them, ended ones too")
    row: DemandRow = rows[0]
    return row


async def card_named(client: Client, name: str) -> CardRow:
    """By UUID, by the beginning of one, by `node/index`. Raises NotFound."""
    rows: list[CardRow] = (await client.ask("cards", Question(card=name))).rows
    if len(rows) == 1:
        return rows[0]
    if not rows:
        raise NotFound(f"no card {name!r}", remedy="`rigbook gpu list` lists them")
    raise NotFound(
        f"{name!r} means more than one card",
        why=", ".join(f"{row.node}/{row.index} {row.uuid}" for row in rows[:8]),
        remedy="write more of the UUID, or node/index",
        code="ambiguous",
    )


async def node_named(client: Client, name: str) -> NodeRow:
    """Raises NotFound."""
    rows: list[NodeRow] = [row for row in await client.rows("nodes") if row.name == name]
    if not rows:
        raise NotFound(f"no node {name!r}", remedy="`rigbook node list` lists them")
    return rows[0]


async def events_of(
    client: Client, demand: str, *, position_min: int = 0, kinds: tuple[str, ...] = ()
) -> list[EventRow]:
    """The story of a demand, oldest first.

    The ledger writes the past down a moment after it has folded it: `position_min` waits for that, and a
    ledger that cannot (its disk is full) still tells what it has.
    """
    question = Question(id=demand, kinds=kinds, position_min=position_min, limit=LIMIT_MAX)
    try:
        return await client.rows("events", question)
    except RigbookFailure as failure:
        if failure.code != "not_ready" or not position_min:
            raise
    return await client.rows("events", Question(id=demand, kinds=kinds, limit=LIMIT_MAX))

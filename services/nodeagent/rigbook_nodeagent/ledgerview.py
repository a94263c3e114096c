"""What the ledger still holds for this node, asked for once at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_bus.protocol import BusError
from rigbook_schemas import subjects
from rigbook_schemas.queries import Answer, BindingRow, Question

from rigbook_nodeagent.orders import Order

if TYPE_CHECKING:
    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus

__all__ = ["bindings_of"]

TRIES: Final = 5
RETRY_SECONDS: Final = 0.5


async def bindings_of(bus: Bus, node: str, clock: Clock) -> list[Order]:
    """Live bindings with a share on `node`; empty when no ledger answers (the consumer still brings orders)."""
    found: list[Order] = []
    cursor = ""
    for _ in range(TRIES):
        try:
            body = msgspec.json.encode(Question(node=node, cursor=cursor, limit=1000))
            answer = msgspec.json.decode(await bus.request(subjects.query("bindings"), body), type=Answer)
        except (BusError, msgspec.MsgspecError):
            await clock.sleep(RETRY_SECONDS)
            continue
        if answer.error is not None or not answer.caught_up:
            await clock.sleep(RETRY_SECONDS)
            continue
        for item in answer.items:
            order = _order(msgspec.convert(item, BindingRow), node)
            if order is not None:
                found.append(order)
        cursor = answer.next
        if not cursor:
            return found
    return found


def _order(row: BindingRow, node: str) -> Order | None:
    share = next((s for s in row.shares if s.node == node), None)
    if share is None:
        return None
    return Order(
        epoch=row.epoch,
        demand=row.demand,
        project=row.project,
        event_id="",
        share=share,
        # Whatever ran of it ran under a book that is lost: nothing is begun a second time.
        started=row.phase != "bound",
    )

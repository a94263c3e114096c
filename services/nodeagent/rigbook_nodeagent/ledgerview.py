"""What the ledger still holds for this node, asked for at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_bus.protocol import BusError
from rigbook_schemas import subjects
from rigbook_schemas.queries import Answer, BindingRow, Question
from rigbook_schemas.values import EvictionReason, Owner
from rigbook_schemas.wire import instant

from rigbook_nodeagent.orders import Order, Stop

if TYPE_CHECKING:
    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus

__all__ = ["bindings_of"]

TRIES: Final = 5
RETRY_SECONDS: Final = 0.5


async def bindings_of(
    bus: Bus, node: str, clock: Clock, *, position_min: int = 0, tries: int | None = TRIES
) -> tuple[int, list[Order]] | None:
    """What `node` holds: (how far the ledger had read, its live bindings there).

    None when no ledger that has caught up, and read to `position_min`, answers in `tries` (None: as long as it takes).
    """
    position = -1
    found: list[Order] = []
    cursor = ""
    tried = 0
    while tries is None or tried < tries:
        answer = await _ask(bus, Question(node=node, cursor=cursor, limit=1000, position_min=position_min))
        if answer is None:
            tried += 1
            await clock.sleep(RETRY_SECONDS)
            continue
        position = answer.position if position < 0 else min(position, answer.position)
        for item in answer.items:
            order = _order(msgspec.convert(item, BindingRow), node)
            if order is not None:
                found.append(order)
        cursor = answer.next
        if not cursor:
            return position, found
    return None


async def _ask(bus: Bus, question: Question) -> Answer | None:
    try:
        answer = msgspec.json.decode(
            await bus.request(subjects.query("bindings"), msgspec.json.encode(question)), type=Answer
        )
    except (BusError, msgspec.MsgspecError):
        return None
    return answer if answer.error is None and answer.caught_up and not answer.safe_mode else None


def _order(row: BindingRow, node: str) -> Order | None:
    share = next((s for s in row.shares if s.node == node), None)
    if share is None or node in row.released:
        return None
    stop = None
    if row.eviction:
        # The order to stop it may have been read under a book that is lost; then it will not be sent again.
        reason = EvictionReason(row.eviction)
        stop = Stop(epoch=row.epoch, demand=row.demand, seq=0, event_id="", reason=reason, by="ledger")
    return Order(
        epoch=row.epoch,
        demand=row.demand,
        project=row.project,
        event_id=row.event_id,
        traceparent=row.traceparent,
        bound_ns=instant(row.bound) or 0,
        share=share,
        owner=Owner(name=row.owner) if row.owner else None,
        restart=row.restart,
        workload=row.workload,
        stop=stop,
        # Whatever ran of it ran under a book that is lost: nothing is begun a second time.
        started=node in row.started,
        attempt=row.attempt,
    )

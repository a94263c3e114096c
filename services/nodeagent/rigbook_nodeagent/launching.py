"""From an order and a component to what an engine is asked to launch: the cards, the figures, the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rigbook_schemas.placeholders import Fill, filled
from rigbook_schemas.values import Engine

from rigbook_nodeagent.engines.protocol import Launch, StartRefused
from rigbook_nodeagent.injected import injected_of

if TYPE_CHECKING:
    from rigbook_schemas.values import Component

    from rigbook_nodeagent.cards import Cards
    from rigbook_nodeagent.engines.protocol import Running
    from rigbook_nodeagent.orders import Order
    from rigbook_nodeagent.upkeep import Upkeep

__all__ = ["injection_problem", "launch_of"]


def launch_of(order: Order, component: Component, *, cluster: str, cards: Cards, upkeep: Upkeep) -> Launch:
    """Raises StartRefused for a card that is not here, and a placeholder that cannot be filled in."""
    allotments = order.share.allotments if component.gpu else ()
    uuids = tuple(a.card for a in allotments)
    unfit = [u for u in uuids if cards.index_of(u) < 0]
    if unfit:
        raise StartRefused("start_failed", f"card {unfit[0]} is not on this node now")
    memory_bytes = min((a.memory_bytes for a in allotments), default=0)
    card_memory_bytes = min((cards.memory_of(u) for u in uuids), default=0)
    if component.fill:
        upkeep.weights_dir.mkdir(parents=True, exist_ok=True)  # a mount of what is not there fails
    try:
        component = filled(
            component,
            Fill(
                memory_bytes=memory_bytes,
                card_memory_bytes=card_memory_bytes,
                gpu_count=len(uuids),
                weights_dir=str(upkeep.weights_dir),
            ),
        )
    except ValueError as error:
        raise StartRefused("start_failed", f"{component.name}: {error}") from error
    return Launch(
        cluster=cluster,
        node=order.share.node,
        demand=order.demand,
        epoch=order.epoch,
        project=order.project,
        owner=order.owner.name if order.owner else "",
        component=component,
        cards=uuids,
        indices=tuple(cards.index_of(u) for u in uuids),
        memory_bytes=memory_bytes,
        card_memory_bytes=card_memory_bytes,
        environment={**cards.environment(uuids), **upkeep.environment(allotments)},
        traceparent=order.traceparent,
        cuda_version=cards.facts.cuda_version,
        driver_version=cards.facts.driver_version,
    )


def injection_problem(running: Running, upkeep: Upkeep) -> tuple[str, str] | None:
    """Code and text when a container that has just started cannot reach its cards, or reaches others."""
    if running.engine is not Engine.DOCKER or not running.cards or not running.pids:
        return None
    injected = injected_of(running.pids[0], running.cards, upkeep.device_nodes)
    if injected is None or set(injected) == set(running.cards):
        return None
    return (
        "device_injection_mismatch",
        (
            f"{running.component} was to get {', '.join(running.cards)} and reaches {', '.join(injected) or 'no card'}: "
            "it was stopped before it could run on the wrong devices; look at the container toolkit of this node"
        ),
    )

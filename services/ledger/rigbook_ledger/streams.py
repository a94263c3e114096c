"""The two streams and the agents' consumers, with every option that has a consequence. Made by the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rigbook_bus.protocol import ConsumerSpec, StreamSpec
from rigbook_schemas import subjects

if TYPE_CHECKING:
    from rigbook_bus.protocol import Bus, StreamFacts

__all__ = ["agent_consumer", "ensure_streams", "heartbeat_stream", "ledger_stream"]

# An agent that has not acknowledged an order in this time gets it again.
AGENT_ACK_WAIT_SECONDS: Final = 30.0
# Newest heartbeats kept per node: enough for a reader that restarts, small for the server.
HEARTBEATS_PER_NODE: Final = 120
HEARTBEAT_AGE_SECONDS: Final = 600.0


def ledger_stream(*, replicas: int = 1) -> StreamSpec:
    """All but heartbeats in one stream: one total order, one position. Kept for ever."""
    return StreamSpec(
        name=subjects.LEDGER_STREAM,
        subjects=subjects.LEDGER_SUBJECTS,
        replicas=replicas,
        append_only=True,
        synced=True,
    )


def heartbeat_stream(*, replicas: int = 1) -> StreamSpec:
    """May lose its tail in a power cut, and is short: what a node shows is told again a second later."""
    return StreamSpec(
        name=subjects.HEARTBEAT_STREAM,
        subjects=(subjects.HEARTBEAT_ALL,),
        max_age_seconds=HEARTBEAT_AGE_SECONDS,
        max_per_subject=HEARTBEATS_PER_NODE,
        replicas=replicas,
        append_only=False,
        # A replicated stream cannot be asynchronous (NATS 10052); a cluster syncs in batches.
        synced=replicas > 1,
    )


def agent_consumer(node: str, *, start_seq: int) -> ConsumerSpec:
    """What an agent reads its orders from; it has no right to make one itself."""
    return ConsumerSpec(
        stream=subjects.LEDGER_STREAM,
        name=subjects.consumer_of_agent(node),
        filters=subjects.orders_of(node),
        start_seq=start_seq,
        ack_wait_seconds=AGENT_ACK_WAIT_SECONDS,
    )


async def ensure_streams(bus: Bus, *, replicas: int = 1) -> StreamFacts:
    """Both streams; the answer is the ledger's."""
    await bus.ensure_stream(heartbeat_stream(replicas=replicas))
    return await bus.ensure_stream(ledger_stream(replicas=replicas))

"""The durable consumer from which an agent reads its orders, made when its node joins.

An agent has no right to make one itself: whoever may create a consumer may write anywhere.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog
from rigbook_bus.protocol import BusError

from rigbook_ledger.streams import agent_consumer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus

    from rigbook_ledger.book import Book
    from rigbook_ledger.state import State

__all__ = ["Orders", "orders_begin"]

RETRY_SECONDS_MIN: Final = 0.25
RETRY_SECONDS_MAX: Final = 10.0

_log = structlog.get_logger()


def orders_begin(state: State, node: str) -> int:
    """From which sequence on a node's orders matter: its joining, or its oldest live binding.

    For a node that just joined this is the joining itself. A consumer that was lost is made anew from
    here; one that exists is left alone, with its position.
    """
    live = (binding.epoch for binding in state.bindings.values() if binding.share(node) is not None)
    return min(state.nodes[node].joined_seq, *live, 2**62)


class Orders:
    """Sees to it that each node that joined has its consumer; tries until it does."""

    def __init__(self, bus: Bus, book: Book, *, clock: Clock) -> None:
        self._bus = bus
        self._book = book
        self._clock = clock
        self._missing: dict[str, None] = {}
        self._wanted = asyncio.Event()

    def want(self, nodes: Iterable[str]) -> None:
        """`nodes` joined, or something about them changed: an agent may be waiting for its consumer."""
        self._missing.update(dict.fromkeys(nodes))
        if self._missing:
            self._wanted.set()

    async def make(self) -> None:
        """For ever. A consumer that is there is left alone."""
        pause = RETRY_SECONDS_MIN
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            for node in list(self._missing):
                try:
                    await self._bus.ensure_consumer(
                        agent_consumer(node, start_seq=orders_begin(self._book.state, node))
                    )
                except BusError as error:
                    _log.warning("the agent's consumer cannot be made; trying again", node=node, why=str(error),
                                 after_seconds=pause)  # fmt: skip
                    await self._clock.sleep(pause)
                    pause = min(2 * pause, RETRY_SECONDS_MAX)
                    self._wanted.set()
                    break
                self._missing.pop(node, None)
                pause = RETRY_SECONDS_MIN

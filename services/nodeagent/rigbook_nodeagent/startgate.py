"""The start gate: on a card, one start at a time of what measures the card's memory while it starts. Pure.

Two inference engines that start together on one card each count the other's growing memory as used, and one of them
fails ("No available memory for the cache blocks"). A start holds the gate of all its cards until it is ready, has
ended, or its time is over; others wait in the order they came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_schemas.values import Component

__all__ = ["StartGate", "start_seconds_max"]

# Without a probe nobody says when the start is over.
UNPROBED_SECONDS: Final = 60.0
MARGIN_SECONDS: Final = 30.0


class _Entry(msgspec.Struct):
    epoch: int
    cards: frozenset[str]
    seconds_max: float
    name: str
    nudge: Callable[[], None]
    until: float = 0.0  # monotonic; counts once it is inside


def start_seconds_max(components: Sequence[Component]) -> float:
    """How long a start may hold the gate; 0 when none of its components needs it."""
    times = [
        (c.startup or c.probe).startup_seconds_max + MARGIN_SECONDS  # type: ignore[union-attr]  # one of them is there
        if c.startup is not None or c.probe is not None
        else UNPROBED_SECONDS
        for c in components
        if c.starts_alone and c.gpu
    ]
    return max(times, default=0.0)


class StartGate:
    """The gates of one node's cards. `monotonic` is the clock."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._inside: dict[int, _Entry] = {}
        self._waiting: dict[int, _Entry] = {}

    def enter(
        self, epoch: int, cards: Sequence[str], *, seconds_max: float, name: str, nudge: Callable[[], None]
    ) -> str:
        """Empty when it is inside, else who is before it: ask again after a nudge, or after a while."""
        now = self._monotonic()
        for other in [e for e in self._inside.values() if e.until <= now]:
            self.leave(other.epoch)
        if epoch in self._inside:
            return ""
        mine = self._waiting.setdefault(epoch, _Entry(epoch, frozenset(cards), seconds_max, name, nudge))
        before = [e for e in self._inside.values() if e.cards & mine.cards]
        for other in self._waiting.values():
            if other is mine:
                break
            if other.cards & mine.cards:
                before.append(other)
        if before:
            return before[0].name
        del self._waiting[epoch]
        self._inside[epoch] = msgspec.structs.replace(mine, until=now + seconds_max)
        return ""

    def leave(self, epoch: int) -> None:
        """It is ready, or over, or has given up waiting. Idempotent."""
        gone = self._inside.pop(epoch, None) or self._waiting.pop(epoch, None)
        for other in list(self._waiting.values()) if gone is not None else ():
            other.nudge()

"""One agent per node name. A second one is refused, on this machine by a lock, elsewhere by heartbeats."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Final

from rigbook_bus.protocol import BusError
from rigbook_schemas.events import Heartbeat
from rigbook_schemas.subjects import HEARTBEAT_STREAM, heartbeat
from rigbook_schemas.wire import decode

if TYPE_CHECKING:
    from pathlib import Path

    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus

__all__ = ["AlreadyServed", "Presence"]

# A stranger's heartbeat that moves on within this many of its own intervals is alive.
INTERVALS: Final = 2.5
WAIT_SECONDS_MAX: Final = 10.0


class AlreadyServed(Exception):
    """Another agent serves this node's name: give this one another name, or stop that one."""

    code = "node_already_served"


class Presence:
    """An agent's claim on its node's name."""

    def __init__(self, bus: Bus, node: str, data: Path, clock: Clock) -> None:
        self._bus = bus
        self._node = node
        self._data = data
        self._clock = clock
        self._lock = -1

    async def claim(self, incarnation: str) -> None:
        """Raises AlreadyServed. Takes no time after a restart in the same folder: that was ourselves."""
        self._data.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._data / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = -1
            raise AlreadyServed(
                f"node_already_served: another agent on this machine uses {self._data}; stop it, or give this "
                "one its own --data and --node"
            ) from None
        ours = self._data / "incarnation"
        before = ours.read_text().strip() if ours.exists() else ""
        other = await self._latest()
        if other is not None and other.incarnation not in ("", before):
            await self._refuse_if_alive(other)
        ours.write_text(incarnation)

    def release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def _refuse_if_alive(self, other: Heartbeat) -> None:
        await self._clock.sleep(min(WAIT_SECONDS_MAX, other.every_seconds * INTERVALS))
        later = await self._latest()
        if later is not None and later.incarnation == other.incarnation and later.number > other.number:
            self.release()
            raise AlreadyServed(
                f"node_already_served: an agent elsewhere sends heartbeats as node {self._node!r} "
                f"(incarnation {other.incarnation[:8]}); give this one another --node, or stop that one"
            )

    async def _latest(self) -> Heartbeat | None:
        """The node's last stored heartbeat; None when there is none (or the stream is not there yet)."""
        try:
            message = await self._bus.last(HEARTBEAT_STREAM, heartbeat(self._node))
        except BusError:
            return None
        if message is None:
            return None
        data = decode(message.seq, message.subject, message.received_ns, message.body).data
        return data if isinstance(data, Heartbeat) else None

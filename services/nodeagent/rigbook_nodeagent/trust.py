"""Whether the log is still the one our orders came from. While it is not: what runs, runs on, and nothing else.

An epoch is a sequence of the log. On a log that lost its end, or that was made anew, the same number may come
to mean something else; so an agent that finds another log than it knew takes no order from it, neither to start
nor to stop, and keeps its facts to itself. It still sends heartbeats and answers what it holds itself bound to
(`rig.agent.<node>.orders`). It trusts again when the log is back as it was, or when an operator has recovered it.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from rigbook_bus.protocol import BusDenied, BusError, Link
from rigbook_ledger.continuity import (
    Known,
    LogAbsent,
    LogDiscontinued,
    LogRecovered,
    check_continues,
    ledger_doubts,
)
from rigbook_schemas import events as e

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus
    from rigbook_schemas.wire import Record

__all__ = ["Trust"]

ABSENT_SECONDS: Final = 0.3
AWAY_SECONDS: Final = 0.5
LOOK_AGAIN_SECONDS: Final = 2.0


class Trust:
    """What one agent knows of the log. `keep` must run for `wait` to come back after a doubt."""

    def __init__(
        self,
        bus: Bus,
        path: Path,
        clock: Clock,
        recovered: Callable[[e.LogRecovered, str], Awaitable[None]],
    ) -> None:
        self.why = ""  # why the log is not trusted
        self.known: Known | None = None
        self._bus = bus
        self._path = path
        self._clock = clock
        self._recovered = recovered
        self._saved: Known | None = None
        self._trusted = asyncio.Event()
        self._doubted = asyncio.Event()
        self._may_not_look = False
        self._log = structlog.get_logger()

    def open(self) -> None:
        """Read what was known, and begin in doubt."""
        try:
            self.known = self._saved = msgspec.json.decode(self._path.read_bytes(), type=Known)
        except (FileNotFoundError, msgspec.MsgspecError):
            self.known = None
        self.doubt()
        self._bus.on_link(self._on_link)

    def doubt(self) -> None:
        """Something may have happened to the log: nobody goes on before it was looked at."""
        self._trusted.clear()
        self._doubted.set()

    async def wait(self) -> None:
        """Until the log is trusted."""
        await self._trusted.wait()

    @property
    def sure(self) -> bool:
        return self._trusted.is_set()

    def continues(self, known: Known | None) -> bool:
        """Whether what was read while `known` held is of the log that is trusted now."""
        now = self.known
        return (
            now is not None
            and known is not None
            and ((known.created_ns, known.generation) == (now.created_ns, now.generation))
        )

    def note(self, record: Record) -> None:
        """This was read from the log while it was trusted."""
        known = self.known
        if known is not None and record.seq > known.position and record.id:
            self.known = msgspec.structs.replace(
                known, position=record.seq, event_id=record.id, received_ns=record.received_ns
            )

    def save(self) -> None:
        """As durable as the order book: it survives the agent, not the machine."""
        if self.known is not None and self.known != self._saved:
            fresh = self._path.with_name(self._path.name + ".new")
            fresh.write_bytes(msgspec.json.encode(self.known))
            os.replace(fresh, self._path)  # noqa: PTH105 - the atomicity is the point
            self._saved = self.known

    def _on_link(self, link: Link, _why: str) -> None:
        if link is Link.CONNECTED:
            self.doubt()  # the server may have come back with another log

    async def keep(self) -> None:
        """For ever."""
        while True:
            await self._doubted.wait()
            self._doubted.clear()
            if await self._look():
                self._trusted.set()
                self._say("")
            else:
                self._doubted.set()

    async def _look(self) -> bool:
        try:
            created_ns = await check_continues(self._bus, self.known)
        except LogAbsent:
            await self._clock.sleep(ABSENT_SECONDS)
            return False
        except LogRecovered as error:
            data, record = error.recovery.data, error.recovery
            assert isinstance(data, e.LogRecovered)
            self._log.warning("the log was recovered", why=str(error), generation=data.generation)
            await self._recovered(data, record.id)
            self.known = Known(
                created_ns=error.created_ns,
                position=record.seq,
                event_id=record.id,
                received_ns=record.received_ns,
                generation=data.generation,
            )
            self.save()
            return True
        except LogDiscontinued as error:
            self._say(str(error))
            await self._clock.sleep(LOOK_AGAIN_SECONDS)
            return False
        except BusDenied as error:
            if not self._may_not_look:
                self._may_not_look = True
                self._log.error(
                    "no right to look at the log: a lost one would not be noticed",
                    code=error.code,
                    why=str(error),
                )
            return True
        except BusError:
            await self._clock.sleep(AWAY_SECONDS)
            return False
        doubts = await ledger_doubts(self._bus)
        if doubts:
            # It knows more of the log than we do: what we told a log that lost its end would be lost with it.
            self._say(doubts)
            await self._clock.sleep(LOOK_AGAIN_SECONDS)
            return False
        if self.known is None:
            self.known = Known(created_ns=created_ns)
            self.save()
        return True

    def _say(self, why: str) -> None:
        if why and why != self.why:
            self._log.error(
                "this is not the log that our orders came from: none are taken, what runs, runs on",
                why=why,
                remedy="rigbook doctor",
            )
        elif not why and self.why:
            self._log.info("the log is trusted again")
        self.why = why

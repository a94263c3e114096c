"""Watches the memory of everything that runs here: when to read which boundary, and who was starting where.

Once a second, all of it; every fifth second thoroughly; five times a second what is nearly full; and at once
when an engine hints at trouble. Reading is a handful of small files for each component, in our own thread.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.wire import rfc3339

from rigbook_nodeagent.circumstances import CardTrouble, MemoryKill
from rigbook_nodeagent.readings import Readings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rigbook_bus.clock import Clock
    from rigbook_schemas.values import Allotment, CardInventory, CardObservation

    from rigbook_nodeagent.boundaries import Hierarchy
    from rigbook_nodeagent.engines.protocol import Running
    from rigbook_nodeagent.host import Host
    from rigbook_nodeagent.kernel_log import KernelLog

__all__ = ["Watch"]

READ_SECONDS: Final = 1.0
NEAR_SECONDS: Final = 0.2
THOROUGH_EVERY: Final = 5  # readings
# A start that never becomes ready (no probe) counts as one for this long.
START_SECONDS: Final = 120.0
STARTS_KEPT: Final = 256
TROUBLES_KEPT: Final = 256
# A trouble of a card this long before an end still belongs to it: a program may hang a while.
TROUBLE_SECONDS: Final = 300.0


class _Start(msgspec.Struct):
    epoch: int
    demand: str
    cards: frozenset[str]
    began: float
    over: float | None = None

    def until(self) -> float:
        return self.over if self.over is not None else self.began + START_SECONDS


class Watch:
    """Of one agent."""

    def __init__(self, hierarchy: Hierarchy, kernel_log: KernelLog, host: Host, clock: Clock) -> None:
        self._hierarchy = hierarchy
        self._kernel_log = kernel_log
        self._host = host
        self._clock = clock
        self._open: dict[int, Readings] = {}
        self._starts: collections.deque[_Start] = collections.deque(maxlen=STARTS_KEPT)
        self._troubles: collections.deque[CardTrouble] = collections.deque(maxlen=TROUBLES_KEPT)
        self._buses: dict[str, str] = {}  # PCI bus id to UUID
        self._count = 0

    @property
    def facts(self) -> str:
        """What this machine lets us see, in one line."""
        memory = (
            f"memory cgroup v{self._hierarchy.version}" if self._hierarchy.version else self._hierarchy.why
        )
        return f"{memory}; kernel log {'readable' if not self._kernel_log.why else self._kernel_log.why}"

    def open(self) -> None:
        self._kernel_log.open()

    def close(self) -> None:
        self._kernel_log.close()

    async def run(self) -> None:
        """Until cancelled."""
        due = self._clock.monotonic()
        while True:
            self.look()
            due = max(due + READ_SECONDS, self._clock.monotonic())
            while (left := due - self._clock.monotonic()) > 0:
                await self._clock.sleep(min(left, NEAR_SECONDS) if self._near() else left)
                for readings in self._open.values():
                    if readings.near:
                        readings.read(self._clock.monotonic(), self._wall(), thorough=False)

    def _near(self) -> bool:
        return any(readings.near for readings in self._open.values())

    def look(self) -> None:
        """Read everything now."""
        if not self._open:
            return
        thorough = self._count % THOROUGH_EVERY == 0
        self._count += 1
        at, wall = self._clock.monotonic(), self._wall()
        pressure = self._host.pressure()
        kills = self._hierarchy.machine_kills()
        self._hierarchy.begin_round()
        for readings in self._open.values():
            readings.read(at, wall, thorough=thorough)
            readings.saw_host(
                at, available=pressure.memory_available_bytes, total=pressure.memory_total_bytes,
                full_avg10=pressure.memory_full_avg10, kills=kills,
            )  # fmt: skip
        self._hierarchy.end_round()
        self._hear()

    def saw(self, running: Iterable[Running], sample: Sequence[CardObservation]) -> None:
        """What the heartbeat saw."""
        at = self._clock.monotonic()
        by_epoch: dict[int, list[Running]] = {}
        for one in running:
            by_epoch.setdefault(one.epoch, []).append(one)
        for epoch, readings in self._open.items():
            readings.know(by_epoch.get(epoch, ()))
            readings.saw_cards(at, sample)

    def saw_inventory(self, cards: Iterable[CardInventory]) -> None:
        self._buses = {_bus(card.pci_bus_id): card.uuid for card in cards if card.pci_bus_id}

    # -- one share ----------------------------------------------------------------------------------------

    def begin(self, epoch: int, demand: str, allotments: Sequence[Allotment], *, starting: bool) -> Readings:
        """A new attempt of this epoch; `starting` False: it was found running."""
        at = self._clock.monotonic()
        readings = self._open[epoch] = Readings(
            self._hierarchy, epoch, allotments, at=at, wall_ns=self._clock.now_ns()
        )
        if starting:
            self._starts.append(_Start(epoch, demand, frozenset(a.card for a in allotments), at))
        return readings

    def started(self, epoch: int) -> None:
        """It is ready, or it has ended: its start is over."""
        for start in self._starts:
            if start.epoch == epoch and start.over is None:
                start.over = self._clock.monotonic()

    def end(self, epoch: int, running: Sequence[Running]) -> None:
        """It has ended just now: read what can still be read."""
        readings = self._open.get(epoch)
        if readings is None:
            return
        readings.know(running)
        at, wall = self._clock.monotonic(), self._wall()
        readings.read(at, wall)
        pressure = self._host.pressure()
        readings.saw_host(
            at, available=pressure.memory_available_bytes, total=pressure.memory_total_bytes,
            full_avg10=pressure.memory_full_avg10, kills=self._hierarchy.machine_kills(),
        )  # fmt: skip

    def forget(self, epoch: int) -> None:
        self._open.pop(epoch, None)

    # -- what the verdict asks ----------------------------------------------------------------------------

    def kills_of(self, epoch: int) -> tuple[MemoryKill, ...]:
        readings = self._open.get(epoch)
        kills = [record for record in self._kernel_log.look() if isinstance(record, MemoryKill)]
        return readings.victims(kills) if readings is not None else ()

    def machine_kills(self) -> int | None:
        return self._hierarchy.machine_kills()

    def trouble(self, trouble: CardTrouble) -> None:
        """A card reported an error; by whatever means it became known."""
        self._troubles.append(trouble)

    def troubles_of(self, epoch: int, cards: Iterable[str]) -> tuple[CardTrouble, ...]:
        """On these cards since this attempt began, but not longer ago than TROUBLE_SECONDS."""
        self._hear()
        readings = self._open.get(epoch)
        if readings is None:
            return ()
        mine = frozenset(cards)
        since = max(readings.began, self._clock.monotonic() - TROUBLE_SECONDS)
        return tuple(t for t in (*self._troubles, *readings.troubles) if t.card in mine and t.at >= since)

    def starts_beside(self, epoch: int, cards: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """By card: other demands whose start overlapped with the last start of this epoch."""
        mine = next((s for s in reversed(self._starts) if s.epoch == epoch), None)
        if mine is None:
            return {}
        now = self._clock.monotonic()
        until = min(now, mine.until())
        beside = [
            s
            for s in self._starts
            if s.epoch != epoch and s.began <= until and min(now, s.until()) >= mine.began
        ]
        found = {card: tuple(s.demand for s in beside if card in s.cards) for card in cards}
        return {card: demands for card, demands in found.items() if demands}

    # -- helpers ------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Take what the kernel said of cards."""
        known = {(t.at, t.code, t.text) for t in self._troubles}
        for record in self._kernel_log.look():
            if isinstance(record, CardTrouble) and (record.at, record.code, record.text) not in known:
                uuid = self._buses.get(_bus(record.card), record.card)
                self._troubles.append(msgspec.structs.replace(record, card=uuid))

    def _wall(self) -> str:
        return rfc3339(self._clock.now_ns())


def _bus(text: str) -> str:
    """`0000:3b:00`, `00000000:3B:00.0` and the like, in one form: domain, bus and device."""
    parts = text.lower().partition(".")[0].split(":")
    if len(parts) < 3:
        return text.lower()
    return ":".join((parts[-3].lstrip("0") or "0", parts[-2], parts[-1]))

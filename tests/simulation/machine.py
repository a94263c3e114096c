"""The truth of one node: its cards, and every process on it. Agents come and go; this stays.

What a component does is written in its command, one word each:
`for:S` ends with 0 after S seconds; `fail:S` ends with 1; without either it runs until it is stopped.
`daemon`: its first process ends at once, another one lives on outside of its group and holds the card.
`stubborn`: does not end on SIGTERM, only on SIGKILL. `undead`: not on SIGKILL either, until `undead` is over.
`overuse`: holds more memory than allotted. `wrongcard`: holds memory of a card it was not given.
`refuse:CODE`: the engine refuses to start it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rigbook_schemas.values import GIB, CardInventory, Engine

from tests.simulation.loop import OUTSIDE

if TYPE_CHECKING:
    from collections.abc import Callable

    from rigbook_nodeagent.engines.protocol import Launch

    from tests.simulation.loop import SimLoop

__all__ = ["Machine", "Part", "Proc"]

# Beyond any pid of a real machine: nothing of this may ever be found in the real /proc.
FIRST_PID = 100_000_000


class Proc:
    """A process that may hold memory of cards. `epoch` None = not ours."""

    def __init__(
        self,
        pid: int,
        memory: dict[str, int],
        *,
        epoch: int | None,
        demand: str,
        component: str,
        grouped: bool,
    ) -> None:
        self.pid = pid
        self.memory = memory  # card to bytes
        self.epoch = epoch
        self.demand = demand
        self.component = component
        self.grouped = (
            grouped  # False: it left the component's group, and only a stop of everything reaches it
        )


class Part:
    """A component that was started here and was not removed yet."""

    def __init__(self, launch: Launch, kind: Engine, ref: str, since: str, at: float) -> None:
        self.launch = launch
        self.kind = kind
        self.ref = ref
        self.since = since
        self.at = at  # when it started
        self.running = True
        self.ended = ""
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.stop_ordered = False
        self.pids: list[int] = []
        self.words = launch.component.command
        self.watchers: list[asyncio.Future[None]] = []

    @property
    def key(self) -> tuple[int, str]:
        return self.launch.epoch, self.launch.component.name

    def told(self, word: str) -> str | None:
        """`S` of `for:S`, "" of a bare word; None when it is not said."""
        for one in self.words:
            head, _, rest = one.partition(":")
            if head == word:
                return rest
        return None


class Machine:
    """One node's hardware and what runs on it."""

    def __init__(
        self, name: str, *, cards: int, memory_gib: int, model: str, loop: SimLoop, now: Callable[[], str]
    ) -> None:
        self.name = name
        self.boot = 1
        self.inventory = [
            CardInventory(
                uuid=f"GPU-{name}-{index}", index=index, model=model, memory_bytes=memory_gib * GIB,
                pci_bus_id=f"00000000:{index + 1:02X}:00.0", compute_mode="Default",
            )
            for index in range(cards)
        ]  # fmt: skip
        self.procs: dict[int, Proc] = {}
        self.parts: dict[tuple[int, str], Part] = {}
        self.loop = loop
        self.now = now
        self.hints: dict[Engine, list[tuple[int, str, str]]] = {kind: [] for kind in Engine}
        self.hinted: dict[Engine, Callable[[], None]] = {}
        # faults
        self.lost: set[str] = set()
        self.vanished: set[str] = set()
        self.unreadable: set[str] = set()
        self.driver_hangs = False
        self.driver_absent = False
        self.engine_away = False
        self.engine_hangs = False
        self.undead = False
        self.by_itself: set[int] = set()  # epochs of which something ended that nobody here had stopped
        self._waiting_for_driver: list[Callable[[], None]] = []
        self._next_pid = FIRST_PID

    # -- processes -------------------------------------------------------------------------------------------

    def spawn(
        self,
        memory: dict[str, int],
        *,
        epoch: int | None = None,
        demand: str = "",
        component: str = "",
        grouped: bool = True,
    ) -> Proc:
        self._next_pid += 1
        proc = Proc(self._next_pid, memory, epoch=epoch, demand=demand, component=component, grouped=grouped)
        self.procs[proc.pid] = proc
        return proc

    def alive(self, epoch: int) -> list[Proc]:
        return [proc for proc in self.procs.values() if proc.epoch == epoch]

    def start(self, launch: Launch, kind: Engine) -> Part:
        key = (launch.epoch, launch.component.name)
        known = self.parts.get(key)
        if known is not None:
            return known
        part = Part(
            launch, kind, f"{self.name}-{launch.epoch}-{launch.component.name}", self.now(), self.loop.time()
        )
        self.parts[key] = part
        memory = (
            dict.fromkeys(launch.cards, max(1, launch.memory_bytes * 3 // 4)) if launch.component.gpu else {}
        )
        if part.told("overuse") is not None and memory:
            memory = dict.fromkeys(memory, launch.memory_bytes + 4 * GIB)
        if part.told("wrongcard") is not None and memory:
            other = [c.uuid for c in self.inventory if c.uuid not in memory]
            if other:
                memory[other[0]] = GIB
        daemon = part.told("daemon") is not None
        if daemon:
            self.by_itself.add(launch.epoch)
        proc = self.spawn(
            memory,
            epoch=launch.epoch,
            demand=launch.demand,
            component=launch.component.name,
            grouped=not daemon,
        )
        part.pids.append(proc.pid)
        if daemon:
            self._main_ended(part, 0, None)
        for word, code in (("for", 0), ("fail", 1)):
            seconds = part.told(word)
            if seconds is not None:
                self.loop.call_later(float(seconds), self._done, part, code, context=OUTSIDE)
        return part

    def _done(self, part: Part, code: int) -> None:
        if self.parts.get(part.key) is part:
            self.by_itself.add(part.launch.epoch)
            for pid in part.pids:
                self.procs.pop(pid, None)
            self._main_ended(part, code, None)

    def _main_ended(self, part: Part, code: int | None, signal: int | None) -> None:
        if part.running:
            part.running = False
            part.exit_code, part.signal, part.ended = code, signal, self.now()
        self._tell(part)

    def _tell(self, part: Part) -> None:
        for watcher in part.watchers:
            if not watcher.done():
                watcher.set_result(None)
        part.watchers.clear()
        self.hints[part.kind].append((*part.key, part.ref))
        del self.hints[part.kind][:-1000]
        if part.kind in self.hinted:
            self.hinted[part.kind]()

    def signal(self, part: Part, *, kill: bool, everything: bool) -> None:
        """SIGTERM or SIGKILL to a component's group, or to all of its processes."""
        if (part.told("stubborn") is not None and not kill) or (
            part.told("undead") is not None and self.undead
        ):
            return
        for pid in list(part.pids):
            proc = self.procs.get(pid)
            if proc is not None and (everything or proc.grouped):
                del self.procs[pid]
        if part.running:
            self._main_ended(part, None if kill else 0, 9 if kill else None)
        else:
            self._tell(part)

    def living(self, part: Part) -> tuple[int, ...]:
        return tuple(pid for pid in part.pids if pid in self.procs)

    def remove_by_hand(self, part: Part) -> None:
        """`docker rm -f` by somebody."""
        self.by_itself.add(part.launch.epoch)
        for pid in part.pids:
            self.procs.pop(pid, None)
        self.parts.pop(part.key, None)
        self._tell(part)

    def orphan(self, part: Part) -> None:
        """The engine forgets a container, and its process lives on (a daemon that crashed, a lost state folder)."""
        self.by_itself.add(part.launch.epoch)
        self.parts.pop(part.key, None)
        self._tell(part)

    @property
    def out_of_sight(self) -> set[str]:
        return self.lost | self.vanished

    def orphans(self) -> list[Proc]:
        listed = {pid for part in self.parts.values() for pid in part.pids}
        return [proc for proc in self.procs.values() if proc.epoch is not None and proc.pid not in listed]

    def reboot(self) -> None:
        """Power was cut: nothing runs any more, the engine remembers what it had started."""
        self.boot += 1
        self.procs.clear()
        for part in self.parts.values():
            self.by_itself.add(part.launch.epoch)
            self._main_ended(part, None, None)
        self.driver_hangs = self.engine_hangs = False
        self.vanished.clear()
        self.lost.clear()
        self._waiting_for_driver.clear()

    # -- the driver ------------------------------------------------------------------------------------------

    def ask_driver(self, order: Callable[[], None]) -> None:
        if self.driver_hangs:
            self._waiting_for_driver.append(order)
        else:
            self.loop.call_soon(order, context=OUTSIDE)

    def driver_answers(self) -> None:
        self.driver_hangs = False
        waiting, self._waiting_for_driver = self._waiting_for_driver, []
        for order in waiting:
            self.loop.call_soon(order, context=OUTSIDE)

"""The driver of a simulated machine's cards, and the worker that asks it without a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rigbook_nodeagent.attribution import Attribution
from rigbook_nodeagent.engines.procfs import Stat
from rigbook_nodeagent.gpus.plausible import LastGood
from rigbook_nodeagent.gpus.protocol import DriverFacts, GpusError
from rigbook_nodeagent.gpus.worker import GpuWorker
from rigbook_nodeagent.host import Host
from rigbook_schemas.values import CardInventory, CardObservation, Pressure, ProcessObservation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rigbook_nodeagent.engines.protocol import Running

    from tests.simulation.machine import Machine

__all__ = ["SimAttribution", "SimGpus", "SimHost", "SimWorker"]


class SimGpus:
    """`Gpus` of a simulated machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._good = LastGood()

    @property
    def samples_rejected(self) -> int:
        return self._good.rejected

    def open(self) -> DriverFacts:
        if self._machine.driver_absent:
            return DriverFacts(ok=False, simulated=True, text="no driver")
        return DriverFacts(driver_version=f"boot-{self._machine.boot}", simulated=True)

    def inventory(self) -> Sequence[CardInventory]:
        self._answers()
        m = self._machine
        return [
            msgspec.structs.replace(card, usable=False, why="GPU is lost: Xid 79")
            if card.uuid in m.lost
            else card
            for card in m.inventory
            if card.uuid not in m.vanished
        ]

    def sample(self) -> Sequence[CardObservation]:
        self._answers()
        m = self._machine
        return [self._sample(card) for card in m.inventory if card.uuid not in m.vanished]

    def _sample(self, card: CardInventory) -> CardObservation:
        m, at = self._machine, self._machine.now()
        if card.uuid in m.lost:
            return CardObservation(uuid=card.uuid, as_of=at, unknown="GPU is lost: Xid 79", lost=True)
        if card.uuid in m.unreadable:
            return CardObservation(uuid=card.uuid, as_of=at, unknown="memory: Unknown Error")
        holders = [proc for proc in m.procs.values() if card.uuid in proc.memory]
        used = sum(proc.memory[card.uuid] for proc in holders)
        seen = CardObservation(
            uuid=card.uuid,
            memory_used_bytes=min(used, card.memory_bytes),
            memory_total_bytes=card.memory_bytes,
            processes=tuple(ProcessObservation(pid=p.pid, memory_bytes=p.memory[card.uuid]) for p in holders),
            as_of=at,
        )
        return self._good.judged(seen, total_bytes=card.memory_bytes)

    def _answers(self) -> None:
        if self._machine.driver_absent:
            raise GpusError("the driver does not answer: absent")

    def device_nodes(self) -> Mapping[str, str]:
        return {}

    def limit_processes(self, cards: Mapping[str, bool]) -> Mapping[str, str]:
        return dict.fromkeys(cards, "not on these cards")

    def environment(self, cards: Sequence[str]) -> Mapping[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(cards)}

    def close(self) -> None:
        return


class SimWorker(GpuWorker):
    """The shipped worker with its time-outs and its one call at a time; the thread is the machine's."""

    def __init__(self, gpus: SimGpus, machine: Machine, monotonic: Callable[[], float]) -> None:
        super().__init__(gpus, monotonic=monotonic)
        self._machine = machine

    def _serve(self, order: Callable[[], None]) -> None:
        self._machine.ask_driver(order)


class SimAttribution(Attribution):
    """Whose process is it: asked of the machine instead of /proc."""

    def __init__(self, machine: Machine) -> None:
        super().__init__("sim", machine.name)
        self._machine = machine

    def attribute(
        self, cards: Sequence[CardObservation], running: Iterable[Running]
    ) -> tuple[CardObservation, ...]:
        by_pid = {pid: r for r in running for pid in r.pids}
        return tuple(
            card
            if not card.processes
            else msgspec.structs.replace(
                card, processes=tuple(self._whose(p, by_pid) for p in card.processes)
            )
            for card in cards
        )

    def _whose(self, process: ProcessObservation, by_pid: Mapping[int, Running]) -> ProcessObservation:
        ours = by_pid.get(process.pid)
        if ours is not None:
            return msgspec.structs.replace(
                process, epoch=ours.epoch, demand=ours.demand, component=ours.component, container=ours.ref
            )
        proc = self._machine.procs.get(process.pid)
        if proc is None or proc.epoch is None:
            return process
        return msgspec.structs.replace(
            process, epoch=proc.epoch, demand=proc.demand, component=proc.component
        )


class SimHost(Host):
    """The same on every real machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def boot_id(self) -> str:
        return f"{self._machine.name}-boot-{self._machine.boot}"

    def hostname(self) -> str:
        return self._machine.name

    def cpu_count(self) -> int:
        return 16

    def memory_total_bytes(self) -> int | None:
        return 64 * 1024**3

    def pressure(self) -> Pressure:
        return Pressure()

    def stat(self, pid: int) -> Stat | None:
        return None

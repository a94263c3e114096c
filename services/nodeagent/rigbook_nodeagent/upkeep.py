"""What an agent does for its node beside running workloads.

It takes a card out of service by itself after an error that would hit the next workload too, tells processes that
hang in the kernel, keeps what it can of the promise that a card is one binding's alone, and lists the model weights
on its disk.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from rigbook_bus.protocol import BusConflict, BusError, Expect
from rigbook_schemas import subjects
from rigbook_schemas.events import GpuQuarantined, NodeJoined
from rigbook_schemas.values import Mode
from rigbook_schemas.wire import Draft, encode, rfc3339

from rigbook_nodeagent.equipment import weights_dir_of
from rigbook_nodeagent.gpus.protocol import GpusError
from rigbook_nodeagent.quarantine import Quarantine, quarantines
from rigbook_nodeagent.stuck import Stuck
from rigbook_nodeagent.weights import weights_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus
    from rigbook_schemas.values import Allotment, CardInventory, CardObservation

    from rigbook_nodeagent.cards import Cards
    from rigbook_nodeagent.engines.docker_notes import DockerNotes
    from rigbook_nodeagent.engines.protocol import Running
    from rigbook_nodeagent.equipment import Options
    from rigbook_nodeagent.host import Host
    from rigbook_nodeagent.orders import OrderBook

__all__ = ["Upkeep"]

QUARANTINE_SECONDS: Final = 2.0  # how often errors of cards are looked through
QUARANTINE_TRIES_MAX: Final = 10
SCAN_EVERY: Final = 6  # of the inventories: model weights come by the gigabyte
MIB: Final = 1024**2


class Upkeep:
    """One agent's. `mark` and `saw` are called with each sample, `refresh` with each inventory, `run` for ever."""

    def __init__(
        self,
        bus: Bus,
        options: Options,
        cards: Cards,
        book: OrderBook,
        clock: Clock,
        docker: DockerNotes,
        host: Host,
    ) -> None:
        self._bus = bus
        self._options = options
        self._cards = cards
        self._book = book
        self._clock = clock
        self._docker = docker
        self._stuck = Stuck(clock.monotonic, stat=host.stat)
        self._told: set[tuple[str, str]] = set()  # (card, error) that was quarantined for
        self._due: list[Quarantine] = []
        self._inventories = 0
        self._weights: tuple[str, ...] = ()
        self._modes_failed: dict[str, str] = {}
        self._log = structlog.get_logger().bind(node=options.node)
        self.device_nodes: dict[str, str] = {}  # card to its device node, such as /dev/nvidia3

    # -- what is seen ---------------------------------------------------------------------------

    def mark(
        self, cards: Sequence[CardObservation], running: Iterable[Running]
    ) -> tuple[CardObservation, ...]:
        """The same cards, with how long a process hangs in the kernel."""
        return self._stuck.mark(cards, running)

    def saw(self, cards: Iterable[CardObservation]) -> None:
        self._due = [q for q in quarantines(cards) if (q.card, q.about) not in self._told]

    def completed(self, joined: NodeJoined) -> NodeJoined:
        """The inventory with what is known here."""
        return msgspec.structs.replace(
            joined,
            cards=tuple(msgspec.structs.replace(c, enforces=self.enforces(c)) for c in joined.cards),
            weights=self._weights,
            container_gpus=self._docker.no_cards[:500],
            reboot_needed=self._stuck.reboot_needed[:500],
        )

    async def refresh(self) -> None:
        """With each inventory. Never raises for what cannot be read."""
        if self._inventories % SCAN_EVERY == 0:
            folders = [self.weights_dir, *map(Path, self._options.weights_dirs)]
            self._weights = await asyncio.to_thread(weights_in, folders)
        self._inventories += 1
        self.device_nodes = dict(await self._cards.device_nodes())
        await self.limit_processes()

    # -- promises -------------------------------------------------------------------------------

    @property
    def weights_dir(self) -> Path:
        """Where model weights are kept: mounted into components that ask for it."""
        return weights_dir_of(self._options)

    @property
    def mps(self) -> bool:
        """Does CUDA's multi-process service run, and may it be used?"""
        return bool(self._options.mps) and (Path(self._options.mps) / "control").exists()

    def enforces(self, card: CardInventory) -> str:
        """What keeps a binding within its part of this card; empty = nothing does, it is watched."""
        if card.parent:
            return "mig"
        if self.mps:
            return "mps"
        alone = self._options.exclusive_process and card.uuid not in self._modes_failed
        return "compute-mode" if alone else ""

    def environment(self, allotments: Sequence[Allotment]) -> dict[str, str]:
        """CUDA's own limit for a part of a card, where the multi-process service is there to keep it.

        The device numbers are those that the program sees: its cards in PCI order.
        """
        shared = [a for a in allotments if a.mode is Mode.MEMORY_SLICE]
        if not self.mps or not shared:
            return {}
        inside = sorted(shared, key=lambda a: self._cards.index_of(a.card))
        limits = ",".join(f"{at}={a.memory_bytes // MIB}M" for at, a in enumerate(inside))
        return {
            "CUDA_MPS_PIPE_DIRECTORY": self._options.mps,
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": limits,
        }

    async def limit_processes(self) -> None:
        """One process at a time on cards that are bound exclusively, where the operator wants that."""
        if not self._options.exclusive_process:
            return
        exclusive = {
            a.card
            for order in self._book.open_orders.values()
            for a in order.share.allotments
            if a.mode is Mode.EXCLUSIVE
        }
        wanted = {
            card.uuid: card.uuid in exclusive
            for card in self._cards.inventory
            if card.usable and not card.parent and card.compute_mode in {"", "Default", "Exclusive_Process"}
        }
        try:
            failed = dict(await self._cards.limit_processes(wanted))
        except GpusError as error:
            failed = dict.fromkeys(wanted, str(error))
        if failed and failed != self._modes_failed:
            self._log.warning(
                "compute mode cannot be set; exclusive use is watched, not enforced", why=failed
            )
        self._modes_failed = failed

    # -- quarantine -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Takes cards out of service, for ever."""
        while True:
            await self._clock.sleep(QUARANTINE_SECONDS)
            for due in self._due:
                if (due.card, due.about) not in self._told and await self._quarantine(due):
                    self._told.add((due.card, due.about))

    async def _quarantine(self, due: Quarantine) -> bool:
        """It stands in the order of all ownership decisions, so it is appended against the last of them."""
        draft = Draft(
            data=GpuQuarantined(card=due.card, by=f"nodeagent/{self._options.node}", reason=due.reason),
            id=f"quarantined-{due.card}-{due.about}",
            source=f"nodeagent/{self._options.node}",
            time=rfc3339(self._clock.now_ns()),
        )
        for _ in range(QUARANTINE_TRIES_MAX):
            try:
                last = await self._bus.last(subjects.LEDGER_STREAM, subjects.OWN_ALL)
                expect = Expect(last_seq=last.seq if last else 0, filter=subjects.OWN_ALL)
                await self._bus.append(
                    subjects.policy(self._options.node), encode(draft),
                    message_id=draft.id, expect=expect,
                )  # fmt: skip
            except BusConflict:
                continue
            except BusError as error:
                self._log.warning("a quarantine is not stored yet", card=due.card, code=error.code)
                return False
            self._log.warning("card quarantined", card=due.card, why=due.reason)
            return True
        return False

"""The node's cards as the agent works with them: inventory, samples no older than asked, attribution."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from rigbook_nodeagent.gpus.protocol import DriverFacts, GpusError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rigbook_schemas.values import CardInventory, CardObservation

    from rigbook_nodeagent.gpus.protocol import Gpus
    from rigbook_nodeagent.gpus.worker import GpuWorker

__all__ = ["Cards"]

# A sample that fails is tried again after this time by whoever waits for a fresh one.
RETRY_SECONDS: Final = 1.0


class Cards:
    """One node's cards. Samples are shared: all who wait during one get the next."""

    def __init__(self, gpus: Gpus, worker: GpuWorker) -> None:
        self._gpus = gpus
        self._worker = worker
        self._next: asyncio.Future[Sequence[CardObservation]] | None = None
        self._sampling: asyncio.Task[None] | None = None
        self.facts = DriverFacts(ok=False, text="not asked yet")
        self.inventory: tuple[CardInventory, ...] = ()
        self.latest: Sequence[CardObservation] | None = None  # the last sample that could be taken

    async def refresh(self) -> None:
        """Ask the driver again what there is. Cards that were known stay, as unusable, when it is away."""
        try:
            self.facts = await self._worker.facts()
            if self.facts.ok:
                self.inventory = tuple(await self._worker.inventory())
                return
        except GpusError as error:
            self.facts = msgspec.structs.replace(self.facts, ok=False, text=str(error))
        # The driver is away: what the cards are has not changed, only that they cannot be used.
        self.inventory = tuple(
            msgspec.structs.replace(card, usable=False, why=self.facts.text) for card in self.inventory
        )

    async def sample(self) -> Sequence[CardObservation]:
        """A sample that began after this call. Raises GpusError: unknown, not free."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        wanted = self._next
        if self._sampling is None:
            self._sampling = asyncio.create_task(self._run())
        return await asyncio.shield(wanted)

    def environment(self, cards: Sequence[str]) -> Mapping[str, str]:
        return self._gpus.environment(cards)

    async def device_nodes(self) -> Mapping[str, str]:
        """Cards to the device nodes that a program needs for them, as far as the driver tells."""
        try:
            return await self._worker.device_nodes()
        except GpusError:
            return {}

    async def limit_processes(self, cards: Mapping[str, bool]) -> Mapping[str, str]:
        """As `Gpus.limit_processes`. Raises GpusError."""
        return await self._worker.limit_processes(cards)

    def index_of(self, uuid: str) -> int:
        """-1 when the card is not (or no longer) there."""
        return next((c.index for c in self.inventory if c.uuid == uuid), -1)

    def memory_of(self, uuid: str) -> int:
        return next((c.memory_bytes for c in self.inventory if c.uuid == uuid), 0)

    async def close(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)
        await self._worker.close()

    async def _run(self) -> None:
        try:
            while self._next is not None:
                answer, self._next = self._next, None
                try:
                    sample = await self._worker.sample()
                except GpusError as error:
                    if not answer.cancelled():
                        answer.set_exception(error)
                        answer.exception()  # whoever waits gets it; nobody waiting is no warning
                else:
                    self.latest = sample
                    if not answer.cancelled():
                        answer.set_result(sample)
        finally:
            self._sampling = None

"""What the agent asks of GPUs, whatever the driver: an inventory, and samples.

Implementations: `nvml` (the real driver) and `simulated` (files and pids on this machine).
All calls are synchronous and may hang in the driver: `gpus.worker` runs them in one thread, with a
time-out. Unknown is a value: an unreadable number is None with a reason, never 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rigbook_schemas.values import CardInventory, CardObservation

__all__ = ["DriverFacts", "Gpus", "GpusError"]


class GpusError(Exception):
    """The driver as a whole does not answer: absent, version mismatch, no permission, hang."""

    code = "gpus_unavailable"


class DriverFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The driver of this node."""

    driver_version: str = ""
    cuda_version: str = ""
    ok: bool = True
    text: str = ""  # when not ok: what is wrong and what to do
    simulated: bool = False


class Gpus(Protocol):
    """One node's cards. Not thread-safe: one worker thread owns it."""

    @property
    def samples_rejected(self) -> int:
        """How many readings were beyond belief (more used than the card has) since the start."""
        ...

    def open(self) -> DriverFacts:
        """Load the driver. Never raises for a driver that is absent or broken: `ok` is False then.

        May be called again: a driver that was broken is tried anew, one that works tells its facts.
        """
        ...

    def inventory(self) -> Sequence[CardInventory]:
        """All cards, in PCI order. A card that does not answer is listed with `usable=False` and why.

        Raises GpusError when not even the number of cards can be told.
        """
        ...

    def sample(self) -> Sequence[CardObservation]:
        """What each card shows now; attribution of processes to epochs is the agent's business."""
        ...

    def device_nodes(self) -> Mapping[str, str]:
        """Cards to their device nodes, such as `/dev/nvidia3`; those of which it cannot be told are left out."""
        ...

    def limit_processes(self, cards: Mapping[str, bool]) -> Mapping[str, str]:
        """Let one process at a time onto a card (True), or as many as come (False). Idempotent.

        Why it could not be done, by card. Raises GpusError when the driver is away.
        """
        ...

    def environment(self, cards: Sequence[str]) -> Mapping[str, str]:
        """Variables that make a plain process see just these cards (UUIDs), in this order."""
        ...

    def close(self) -> None: ...

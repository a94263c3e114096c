"""GPU-hours: what was held, by whom, and how much of it was ever used. Sums over a stretch of the log.

Reserved is what the ledger says: bytes of an allotment times the time from `bound` to `released`. Used is
an upper bound: the highest memory that was observed, as if it had been in use all the time. The difference,
reserved less used, is waste at least. What nobody observed (a binding that still runs, an agent that could
not read the driver) is counted as not observed, never as zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas import events as e

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rigbook_ledger.state import Binding, State
    from rigbook_schemas.wire import Record

__all__ = ["Held", "Hours", "Sum"]

_HOUR_NS: Final = 3_600_000_000_000
LISTED_MAX: Final = 20


class Sum(msgspec.Struct, kw_only=True):
    """One line of the report. Byte-hours are bytes times hours."""

    bindings: int = 0
    card_hours: float = 0.0  # a whole card for an hour; of a shared card, the part that was allotted
    reserved_byte_hours: float = 0.0
    observed_byte_hours: float = 0.0  # reserved, of what was observed
    used_byte_hours: float = 0.0  # highest observed use, of the same

    @property
    def wasted_byte_hours(self) -> float:
        """Reserved less the highest use, where use was observed; never below 0 for one binding's overuse."""
        return max(0.0, self.observed_byte_hours - self.used_byte_hours)

    @property
    def unobserved_byte_hours(self) -> float:
        return max(0.0, self.reserved_byte_hours - self.observed_byte_hours)


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A binding's time on one node, and how little of it was used."""

    demand: str
    project: str
    owner: str
    node: str
    epoch: int
    hours: float
    reserved_bytes: int
    peak_bytes: int

    @property
    def wasted_byte_hours(self) -> float:
        return max(0, self.reserved_bytes - self.peak_bytes) * self.hours


class Hours:
    """Told of each event after it was folded (and of releases before); counts what lies in [since, until]."""

    def __init__(self, *, since_ns: int = 0, until_ns: int = 2**63 - 1) -> None:
        self.by_project: dict[str, Sum] = {}
        self.by_owner: dict[str, Sum] = {}
        self.by_card: dict[str, Sum] = {}
        self.idlest: list[Held] = []  # most waste first
        self._since_ns = since_ns
        self._until_ns = until_ns

    def before(self, state: State, record: Record) -> None:
        """A release is seen while its binding is still there."""
        data = record.data
        if not isinstance(data, e.Released):
            return
        binding = state.bindings.get(data.epoch)
        if binding is None or binding.demand != data.demand or data.node in binding.released:
            return
        if binding.share(data.node) is None or record.subject != f"rig.release.{data.node}":
            return
        self._count(state, binding, data.node, record.received_ns, data.usage.memory_peak_bytes)

    def close(self, state: State, now_ns: int) -> None:
        """Count what is still held, up to `now_ns`."""
        for binding in state.bindings.values():
            for share in binding.shares:
                if share.node not in binding.released:
                    self._count(state, binding, share.node, now_ns, None)

    def _count(self, state: State, binding: Binding, node: str, end_ns: int, peak_bytes: int | None) -> None:
        share = binding.share(node)
        assert share is not None
        hours = (min(end_ns, self._until_ns) - max(binding.bound_ns, self._since_ns)) / _HOUR_NS
        if hours <= 0:
            return
        spec = state.demands[binding.demand].spec
        owner = f"{spec.owner.name}{f' <{spec.owner.contact}>' if spec.owner.contact else ''}"
        reserved = sum(a.memory_bytes for a in share.allotments)
        for number, allotment in enumerate(share.allotments):
            card = state.cards[allotment.card]
            part = allotment.memory_bytes / card.memory_bytes if card.memory_bytes else 1.0
            # the peak is told for all cards of the share together; each gets its part
            peak = None if peak_bytes is None else peak_bytes * allotment.memory_bytes / max(1, reserved)
            for line in self._lines(binding.project, owner, f"{card.node}/{card.index} {card.uuid}"):
                line.bindings += number == 0
                line.card_hours += part * hours
                line.reserved_byte_hours += allotment.memory_bytes * hours
                if peak is not None:
                    line.observed_byte_hours += allotment.memory_bytes * hours
                    line.used_byte_hours += min(peak, allotment.memory_bytes) * hours
        if peak_bytes is not None:
            self._note_idle(
                Held(
                    demand=binding.demand, project=binding.project, owner=owner, node=node, epoch=binding.epoch,
                    hours=hours, reserved_bytes=reserved, peak_bytes=peak_bytes,
                )
            )  # fmt: skip

    def _lines(self, project: str, owner: str, card: str) -> Iterator[Sum]:
        for table, key in ((self.by_project, project), (self.by_owner, owner), (self.by_card, card)):
            line = table.get(key)
            if line is None:
                line = table[key] = Sum()
            yield line

    def _note_idle(self, held: Held) -> None:
        if len(self.idlest) == LISTED_MAX and held.wasted_byte_hours <= self.idlest[-1].wasted_byte_hours:
            return
        self.idlest.append(held)
        self.idlest.sort(key=lambda one: -one.wasted_byte_hours)
        del self.idlest[LISTED_MAX:]

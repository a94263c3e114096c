"""The waiting demands in the order they are tried: effective priority, then age; grouped by what they ask.

    effective priority = priority + min(30, minutes waited / 10, rounded down)

so waiting lifts a demand by one point per ten minutes and by thirty at most: after five hours a `low` (25) comes
before a fresh `normal` (50), and never before a fresh `high` (75).

Demands that ask for the same thing fit, or do not, together: a round looks at one per group and not at
all of them, so its cost goes with the number of different requests, not with the length of the queue.
"""

from __future__ import annotations

import heapq
from bisect import insort
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_ledger.state import Phase

from rigbook_placer.feasible import ask_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rigbook_ledger.state import Demand, State

__all__ = [
    "AGE_POINTS_MAX",
    "AGE_SECONDS_PER_POINT",
    "Entry",
    "Group",
    "Waiting",
    "effective_priority",
    "order_of",
]

AGE_SECONDS_PER_POINT: Final = 600
AGE_POINTS_MAX: Final = 30
# The order is made anew this often, since waiting changes it; new demands take their place in it at once.
REFRESH_NS: Final = 30 * 10**9

Key = tuple[int, int, str]  # (-effective priority, sequence of `raised`, demand)
Group = tuple[str, bytes]
Entry = tuple[Key, Group]


def effective_priority(demand: Demand, now_ns: int | None) -> int:
    """The priority, and what waiting has added to it. `now_ns` None = as if it had just come."""
    priority = demand.spec.priority
    if now_ns is None:
        return priority
    waited_seconds = (now_ns - demand.since_ns) // 10**9
    return priority + min(AGE_POINTS_MAX, max(0, waited_seconds) // AGE_SECONDS_PER_POINT)


def order_of(demand: Demand, now_ns: int | None) -> Key:
    """Demands sort by this: the first one is tried first."""
    return (-effective_priority(demand, now_ns), demand.raised_seq, demand.spec.demand)


def _group_of(demand: Demand) -> Group:
    """Demands of one group have one answer, and their order among each other does not change while they wait.

    Quota is the project's: two projects with the same request do not share an answer.
    """
    spec = demand.spec
    own = spec.demand if demand.failures or demand.room else ""
    shape = (
        ask_of(spec), spec.priority, spec.placement, spec.windows, spec.max_run_seconds, spec.preempts,
        demand.requeues > 0, own,
    )  # fmt: skip
    return spec.project, msgspec.msgpack.encode(shape)


class Waiting:
    """An index over `state.waiting`; follow it with `update` after every batch."""

    def __init__(self) -> None:
        self._members: dict[Group, list[tuple[int, str]]] = {}  # heaps of (sequence of waiting, demand)
        self._group_of: dict[str, tuple[Group, int]] = {}  # demand: its group, since which sequence it waits
        self._order: list[tuple[Key, Group]] = []
        self._key_of: dict[Group, Key] = {}  # an entry of `_order` counts only if it is this one
        self._dirty: set[Group] = set()
        self._fresh_ns: int | None = None
        self.arrivals = 0  # counts demands that came

    def __len__(self) -> int:
        return len(self._group_of)

    def update(self, state: State, touched: Iterable[str]) -> None:
        for did in touched:
            demand = state.demands.get(did)
            before = self._group_of.get(did)
            if demand is None or demand.phase is not Phase.WAITING:
                if before is not None:
                    del self._group_of[did]  # its heap entry is skipped when it comes up
                    self._dirty.add(before[0])
                continue
            now = (_group_of(demand), demand.since_seq)
            if now != before:
                if before is not None:
                    self._dirty.add(before[0])
                self._group_of[did] = now
                heapq.heappush(self._members.setdefault(now[0], []), (now[1], did))
                self._dirty.add(now[0])
                self.arrivals += 1

    def heads(self, state: State, now_ns: int | None = None) -> list[Demand]:
        """The first demand of each group, in the order they are to be tried."""
        return [state.demands[key[2]] for key, _ in self.line(state, now_ns)]

    def line(self, state: State, now_ns: int | None = None) -> list[Entry]:
        """The same as entries, which go stale: see `current`."""
        self._sort(state, now_ns)
        return [entry for entry in self._order if self._key_of.get(entry[1]) == entry[0]]

    def current(self, state: State, key: Key, group: Group) -> Demand | None:
        """The demand of an entry, while it still waits as that."""
        known = self._group_of.get(key[2])
        return state.demands[key[2]] if known is not None and known[0] == group else None

    def entry(self, state: State, group: Group) -> Entry | None:
        """Where the first demand of the group stands now."""
        key = self._head(state, group, self._fresh_ns)
        return None if key is None else (key, group)

    def group(self, demand: str) -> Group | None:
        """The group of a waiting demand."""
        known = self._group_of.get(demand)
        return known[0] if known is not None else None

    def members(self, state: State, head: Demand) -> Iterator[Demand]:
        """All demands of the head's group, in no order."""
        mine = self._group_of.get(head.spec.demand)
        for since, did in self._members.get(mine[0], ()) if mine else ():
            if mine is not None and self._group_of.get(did) == (mine[0], since):
                yield state.demands[did]

    def _sort(self, state: State, now_ns: int | None) -> None:
        aged = now_ns is not None and (self._fresh_ns is None or now_ns - self._fresh_ns >= REFRESH_NS)
        if aged or now_ns is None:
            self._fresh_ns = now_ns
            self._dirty.update(self._members)
        if len(self._dirty) * 8 > len(self._members) or len(self._order) > 2 * len(self._members) + 64:
            self._dirty.update(self._members)
            self._order.clear()
            self._key_of.clear()
        whole = not self._order
        for group in self._dirty:
            key = self._head(state, group, now_ns)
            if key is None:
                self._key_of.pop(group, None)
            elif self._key_of.get(group) != key:
                self._key_of[group] = key
                if whole:
                    self._order.append((key, group))
                else:
                    insort(self._order, (key, group))
        if whole:
            self._order.sort()
        self._dirty.clear()

    def _head(self, state: State, group: Group, now_ns: int | None) -> Key | None:
        heap = self._members.get(group)
        if heap is None:
            return None
        while heap:
            since, did = heap[0]
            if self._group_of.get(did) == (group, since):
                return order_of(state.demands[did], now_ns)
            heapq.heappop(heap)
        del self._members[group]
        return None

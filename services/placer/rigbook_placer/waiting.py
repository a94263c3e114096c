"""The waiting demands in the order they are tried: priority, then age; grouped by shape.

Demands that ask for the same thing fit, or do not, together: a round looks at one per group and not at
all of them, so its cost goes with the number of different requests, not with the length of the queue.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import msgspec
from rigbook_ledger.state import Phase

from rigbook_placer.feasible import ask_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rigbook_ledger.state import Demand, State

__all__ = ["Waiting"]

_Key = tuple[int, int, str]  # (-priority, sequence of `raised`, demand)


class Waiting:
    """An index over `state.waiting`; follow it with `update` after every batch."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, bytes], list[_Key]] = {}
        self._group_of: dict[str, tuple[str, bytes]] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    def update(self, state: State, touched: Iterable[str]) -> None:
        for did in touched:
            demand = state.demands.get(did)
            waits = demand is not None and demand.phase is Phase.WAITING
            if waits and did not in self._group_of:
                assert demand is not None
                # Quota is the project's: two projects with the same request do not share an answer.
                group = (demand.spec.project, msgspec.msgpack.encode(ask_of(demand.spec)))
                self._group_of[did] = group
                heapq.heappush(self._groups.setdefault(group, []), _key(demand))
            elif not waits:
                self._group_of.pop(did, None)  # its heap entry is skipped when it comes up

    def heads(self, state: State) -> list[Demand]:
        """The first demand of each group, in the order they are to be tried."""
        heads: list[_Key] = []
        for group in list(self._groups):
            head = self._head(group)
            if head is not None:
                heads.append(head)
        heads.sort()
        return [state.demands[key[2]] for key in heads]

    def members(self, state: State, head: Demand) -> Iterator[Demand]:
        """All demands of the head's group, in no order."""
        group = self._group_of.get(head.spec.demand)
        for key in self._groups.get(group, ()) if group else ():
            if self._group_of.get(key[2]) == group:
                yield state.demands[key[2]]

    def _head(self, group: tuple[str, bytes]) -> _Key | None:
        heap = self._groups[group]
        while heap:
            if self._group_of.get(heap[0][2]) == group:
                return heap[0]
            heapq.heappop(heap)
        del self._groups[group]
        return None


def _key(demand: Demand) -> _Key:
    return (-demand.spec.priority, demand.raised_seq, demand.spec.demand)

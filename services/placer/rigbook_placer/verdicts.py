"""What is told to demands that wait: who is due to hear why, and who has heard it already. Pure.

A reason is worked out when a demand has waited for a moment, and again when it is its group's turn in a round
that looks at a few groups at a time. So the cost of a tick has a bound, whatever the length of the queue, and a
reason that has changed is told within a round.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from rigbook_ledger.state import Phase

from rigbook_placer.place import verdict
from rigbook_placer.rank import POLICIES
from rigbook_placer.reasons import hopeless, invalid, signature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rigbook_ledger.state import Demand, State
    from rigbook_schemas.events import Deferred, Refused
    from rigbook_schemas.values import Reason

    from rigbook_placer.waiting import Group, Waiting

__all__ = ["VERDICTS_PER_TICK", "Verdicts"]

# Deferrals and refusals per tick; the rest follow on the next ones.
VERDICTS_PER_TICK: Final = 200
# Reasons worked out per tick, each for a whole group: for the demands that are due, and for the round.
DUE_PER_TICK: Final = 32
ROUND_PER_TICK: Final = 16
# A word is said again when it was not read back by then.
AGAIN_NS: Final = 2 * 10**9


class Verdicts:
    """Follows one queue. `patience_seconds`: who is bound within it needs no word on why it waits."""

    def __init__(self, patience_seconds: float, hopeless_seconds: float) -> None:
        self._patience_ns = int(patience_seconds * 1e9)
        self._hopeless_ns = int(hopeless_seconds * 1e9)
        self._due: list[tuple[int, str]] = []
        self._due_of: dict[str, int] = {}  # an entry of `_due` counts only if it is this one
        self._known: set[str] = set()
        self._hopeless_since: dict[str, int] = {}
        self._told: dict[Group, frozenset[tuple[str, str, str, tuple[str, ...]]]] = {}
        self._at = 0

    def came(self, state: State, touched: Iterable[str]) -> None:
        """These demands have changed: new ones are told why they wait once the patience is over."""
        for did in touched:
            demand = state.demands.get(did)
            if demand is None or demand.phase is not Phase.WAITING:
                self._known.discard(did)
                self._due_of.pop(did, None)
                self._hopeless_since.pop(did, None)
            elif did not in self._known:
                self._known.add(did)
                bad = invalid(demand.spec, POLICIES) is not None
                self._at_time(did, demand.since_ns + (0 if bad else self._patience_ns))

    def fleet_changed(self) -> None:
        """What could never be placed may have become possible: nobody is refused for the time before."""
        self._hopeless_since.clear()

    def next(
        self,
        state: State,
        waiting: Waiting,
        explain: Callable[[Demand], tuple[Reason, ...]],
        now_ns: int,
    ) -> list[tuple[Demand, Deferred | Refused]]:
        """The words that are due now, a bounded number of them."""
        worked_out: dict[Group, tuple[Reason, ...]] = {}
        self._round(state, waiting, explain, now_ns, worked_out)
        said: list[tuple[Demand, Deferred | Refused]] = []
        budget = DUE_PER_TICK
        while self._due and self._due[0][0] <= now_ns and len(said) < VERDICTS_PER_TICK:
            due_ns, did = self._due[0]
            group = waiting.group(did)
            if self._due_of.get(did) != due_ns or group is None:
                heapq.heappop(self._due)
                continue
            demand = state.demands[did]
            if invalid(demand.spec, POLICIES) is not None:
                reasons = explain(demand)
            else:
                if group not in worked_out:
                    if not budget:
                        break
                    budget -= 1
                    worked_out[group] = explain(demand)
                reasons = worked_out[group]
            heapq.heappop(self._due)
            del self._due_of[did]
            word = self._word(state, demand, reasons, now_ns)
            if word is not None:
                said.append((demand, word))
                self._at_time(did, now_ns + AGAIN_NS)
        return said

    def _word(
        self, state: State, demand: Demand, reasons: tuple[Reason, ...], now_ns: int
    ) -> Deferred | Refused | None:
        did = demand.spec.demand
        if not reasons:
            return None
        if invalid(demand.spec, POLICIES) is not None:
            return verdict(state, demand, reasons, final=True)
        if not hopeless(reasons):
            self._hopeless_since.pop(did, None)
            return verdict(state, demand, reasons, final=False)
        since_ns = self._hopeless_since.setdefault(did, now_ns)
        final = now_ns - since_ns >= self._hopeless_ns
        if not final:
            self._at_time(did, since_ns + self._hopeless_ns)
        return verdict(state, demand, reasons, final=final)

    def _round(
        self,
        state: State,
        waiting: Waiting,
        explain: Callable[[Demand], tuple[Reason, ...]],
        now_ns: int,
        worked_out: dict[Group, tuple[Reason, ...]],
    ) -> None:
        """Look at some groups; when the answer is another one than before, all of its members are due."""
        line = waiting.line(state, now_ns)
        if self._at >= len(line):
            self._at = 0
            present = {group for _, group in line}
            for gone in [group for group in self._told if group not in present]:
                del self._told[gone]
        for key, group in line[self._at : self._at + ROUND_PER_TICK]:
            self._at += 1
            head = state.demands[key[2]]
            if now_ns - head.since_ns < self._patience_ns or invalid(head.spec, POLICIES) is not None:
                continue
            reasons = worked_out[group] = explain(head)
            told = signature(reasons)
            if self._told.get(group) != told:
                self._told[group] = told
                for demand in waiting.members(state, head):
                    if now_ns - demand.since_ns >= self._patience_ns:
                        self._at_time(demand.spec.demand, now_ns)

    def _at_time(self, did: str, due_ns: int) -> None:
        before = self._due_of.get(did)
        if before is None or due_ns < before:
            self._due_of[did] = due_ns
            heapq.heappush(self._due, (due_ns, did))

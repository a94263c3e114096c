"""Whose turn it is: the queue walked in order, small demands passing a blocked one within a bound.

A demand that does not fit blocks nobody at first: those behind it that fit may pass. It is passed at most
`PASSED_MAX` times, and for at most `PASSED_SECONDS_MAX` from its coming; then the cards that it could have soonest
are kept for it, and only a demand that is sure to end before they are due may still use them. So it cannot starve.
A demand that a rule keeps waiting (quota, cap, back-off, window) blocks nobody and has nothing kept.

What did not fit is not tried again until something has changed that could make it fit.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING, Final

import msgspec

from rigbook_placer.feasible import NOTHING_SEEN, Kept, ask_of, asker_of, need_bytes, node_fits
from rigbook_placer.place import place
from rigbook_placer.rank import POLICIES, taste_of
from rigbook_placer.reasons import invalid
from rigbook_placer.rules import rule_says_no
from rigbook_placer.soonest import endings_needed, soonest
from rigbook_placer.waiting import order_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rigbook_ledger.state import Demand, State
    from rigbook_schemas.events import Bound
    from rigbook_schemas.values import Mode

    from rigbook_placer.feasible import Seen
    from rigbook_placer.index import Index
    from rigbook_placer.waiting import Entry, Group, Waiting

__all__ = ["PASSED_MAX", "PASSED_SECONDS_MAX", "Turns"]

PASSED_MAX: Final = 16
PASSED_SECONDS_MAX: Final = 900.0
# Cards are kept for so many blocked demands at once, the first in the order; the others come after them.
KEEPERS_MAX: Final = 4
# Blocked demands at the head of the queue whose passing is counted.
COUNTED_MAX: Final = 32
# A choice of cards to keep is looked over again after this time: another node may have become sooner.
LOOK_AGAIN_NS: Final = 60 * 10**9
# Placements tried in one go, before the log is read again.
TRIES_MAX: Final = 2_000


class _Keeping(msgspec.Struct, frozen=True):
    cards: tuple[str, ...]
    from_ns: int
    chosen_ns: int


class Turns:
    """Follows one queue. Its memory (how often somebody was passed) dies with it; the bound by time does not."""

    def __init__(self, default_policy: str = "pack") -> None:
        self._policy = default_policy
        self._line: list[Entry] = []
        self._at = 0
        self._version: tuple[int, int] | None = None  # what the line was made of; None = begin again
        self._wake_ns: int | None = None  # when a rule about time may say otherwise
        self._unfit: dict[Group, int] = {}  # where it did not fit: count of gains, or position
        self._need: dict[Group, tuple[int, Mode]] = {}  # of groups that did not fit: bytes per card, and mode
        self._began = 0  # count of gains when this walk began
        self._walked = 0  # and when the last one began that came to the end
        self._ahead: dict[str, None] = {}  # blocked demands, in order
        self._passed: dict[str, int] = {}
        self._keeping: dict[str, _Keeping] = {}
        self._looked: set[str] = set()  # blocked demands that cards were looked for, the last time
        self.kept: dict[str, Kept] = {}  # by card
        self.more = False  # it stopped for now, and not at the end of the queue

    @property
    def blocked(self) -> list[str]:
        """The first demands in the queue that do not fit, in order."""
        return list(self._ahead)[:COUNTED_MAX]

    def passed(self, demand: str) -> int:
        """How often others were bound before it while it was blocked."""
        return self._passed.get(demand, 0)

    def again(self) -> None:
        """A rule has changed: look at everybody."""
        self._version = None
        self._unfit.clear()
        self._need.clear()

    def bound(self, state: State, demands: Iterable[str], now_ns: int) -> None:
        """These demands were bound: those that were blocked before them have been passed once more."""
        for did in demands:
            later = state.demands.get(did)
            if later is None:
                continue
            order = order_of(later, now_ns)
            for first in self._ahead:
                if first in state.waiting and order_of(state.demands[first], now_ns) < order:
                    self._passed[first] = self._passed.get(first, 0) + 1

    def next(
        self,
        state: State,
        waiting: Waiting,
        seen: Mapping[str, Seen],
        now_ns: int,
        index: Index | None = None,
    ) -> tuple[Demand, Bound] | None:
        """The next demand in order that can be bound, and how; None when there is none (or `more`)."""
        if self._version != (waiting.arrivals, index.gained if index else state.position) or (
            self._wake_ns is not None and now_ns >= self._wake_ns
        ):
            self._begin(state, waiting, seen, now_ns, index)
        self.more = False
        for _ in range(TRIES_MAX):
            demand = self._step(state, waiting, index)
            if demand is None:
                self._walked = self._began
                self._wake_for_overdue(state, now_ns)
                return None
            spec = demand.spec
            group = self._line[self._at - 1][1]
            rule = rule_says_no(state, spec, now_ns=now_ns, totals=index.totals if index else None)
            if rule is not None:
                if rule.seconds is not None:
                    self._wake(now_ns + int(rule.seconds * 1e9))
                self._forget(group)
                continue
            nowhere = index is not None and self._nowhere(demand, index)
            found = None
            if not nowhere:
                found = place(state, spec, seen, self._policy, now_ns=now_ns, kept=self.kept, shortlist=index)
            if found is not None:
                self._at -= 1  # when it was bound, the next of its group comes here; else it is tried again
                return demand, found
            if not nowhere and (
                invalid(spec, POLICIES) is not None or self._fits(state, demand, now_ns, index)
            ):
                self._forget(group)  # a rule of the whole binding says no: that changes without any card
            else:
                self._block(spec.demand)
                self._unfit[group] = index.gained if index else state.position
                if not demand.room:
                    self._need[group] = (need_bytes(spec.resources), spec.resources.mode)
        self.more = True
        return None

    def _nowhere(self, demand: Demand, index: Index) -> bool:
        """No card at all has as much free; seen without looking at nodes."""
        request = demand.spec.resources
        return not self.kept and not demand.room and need_bytes(request) > index.at_most(request.mode)

    def _fits(self, state: State, demand: Demand, now_ns: int, index: Index | None) -> bool:
        """It was not placed, and yet there are cards for it."""
        spec = demand.spec
        project = state.projects.get(spec.project)
        bounded = project is not None and project.quota_bytes is not None
        if index is None or not (bounded or spec.priority >= state.policy.cap_priority):
            return False
        asker = asker_of(spec, self.kept, now_ns)
        names, _ = index.best(ask_of(spec), taste_of(spec, demand), "pack", asker, spec.resources.nodes)
        return len(names) >= spec.resources.nodes

    def _forget(self, group: Group) -> None:
        """It is tried on every walk: what keeps it waiting is not what cards have free."""
        self._unfit.pop(group, None)
        self._need.pop(group, None)

    def _step(self, state: State, waiting: Waiting, index: Index | None) -> Demand | None:
        """Go on to the next demand that has to be tried."""
        here = index.gained if index else state.position
        line, unfit = self._line, self._unfit
        while self._at < len(line):
            key, group = line[self._at]
            self._at += 1
            demand = waiting.current(state, key, group)
            if demand is None:
                entry = waiting.entry(state, group)
                if entry is not None and entry[0] > key:
                    insort(line, entry, lo=self._at)
                continue
            mark = unfit.get(group)
            if mark is None or not self._still_unfit(demand, mark, here, index):
                return demand
            unfit[group] = here
            self._block(key[2])
        return None

    def _still_unfit(self, demand: Demand, mark: int, here: int, index: Index | None) -> bool:
        if mark == here:
            return True
        if index is None or self.kept or demand.room:
            return False
        return index.too_big(demand.spec.resources, mark) or index.unfit(ask_of(demand.spec), mark)

    def _wake_for_overdue(self, state: State, now_ns: int) -> None:
        """Begin again when a blocked demand has been passed for long enough."""
        for did in self._ahead:
            if did not in self._looked and did in state.waiting:
                due_ns = max(now_ns, state.demands[did].since_ns + int(PASSED_SECONDS_MAX * 1e9))
                self._wake(now_ns if self.passed(did) >= PASSED_MAX else due_ns)

    def _wake(self, due_ns: int) -> None:
        self._wake_ns = due_ns if self._wake_ns is None else min(self._wake_ns, due_ns)

    def _block(self, demand: str) -> None:
        if len(self._ahead) < 2 * COUNTED_MAX:  # put in order, and cut, when the next walk begins
            self._ahead[demand] = None

    # -- from the beginning -----------------------------------------------------------------

    def _begin(
        self, state: State, waiting: Waiting, seen: Mapping[str, Seen], now_ns: int, index: Index | None
    ) -> None:
        for gone in [did for did in self._passed if did not in state.waiting]:
            del self._passed[gone]
        if len(self._unfit) > 2 * len(waiting) + 64:
            self._unfit.clear()
            self._need.clear()
        self._keep(state, seen, now_ns, index)
        self._began = index.gained if index else 0
        line = waiting.line(state, now_ns)
        limit = None
        if index is not None and self._need and not self.kept and self._version is not None:
            limit = index.largest_since(self._walked)
        if limit is not None:  # without those that no card that gained since the last walk has enough for
            line = [entry for entry in line if not self._too_big(entry[1], limit)]
        still = [d for d in self._ahead if limit is not None and self._too_big(waiting.group(d), limit)]
        self._line = line
        self._at = 0
        first = sorted(order_of(state.demands[did], now_ns) for did in still)
        self._ahead = {key[2]: None for key in first[:COUNTED_MAX]}
        self._wake_ns = None
        self._version = (waiting.arrivals, index.gained if index else state.position)

    def _too_big(self, group: Group | None, limit: Mapping[Mode, int]) -> bool:
        known = self._need.get(group) if group is not None else None
        return known is not None and known[0] > limit[known[1]]

    def _overdue(self, demand: Demand, now_ns: int) -> bool:
        return (
            self.passed(demand.spec.demand) >= PASSED_MAX
            or (now_ns - demand.since_ns) / 1e9 >= PASSED_SECONDS_MAX
        )

    def _keep(self, state: State, seen: Mapping[str, Seen], now_ns: int, index: Index | None) -> None:
        """Choose the cards that are kept, for the first blocked demands that were passed enough."""
        names = [did for did in {**self._keeping, **self._ahead} if did in state.waiting]
        firsts = [state.demands[did] for did in names if self._overdue(state.demands[did], now_ns)]
        self._looked = {demand.spec.demand for demand in firsts}
        keeping: dict[str, _Keeping] = {}
        kept: dict[str, Kept] = {}
        for demand in sorted(firsts, key=lambda d: order_of(d, now_ns)):
            did = demand.spec.demand
            if demand.room or rule_says_no(state, demand.spec, now_ns=now_ns) is not None:
                continue
            chosen = self._choice(state, demand, seen, kept, now_ns, index)
            if chosen is None:
                continue
            keeping[did] = chosen
            kept.update({card: Kept(did, chosen.from_ns) for card in chosen.cards})
            if len(keeping) >= KEEPERS_MAX:
                break
        self._keeping = keeping
        if kept != self.kept:
            self.kept = kept
            self._unfit.clear()
            self._need.clear()
            if index is not None:
                index.keep(kept)

    def _choice(
        self,
        state: State,
        demand: Demand,
        seen: Mapping[str, Seen],
        kept: Mapping[str, Kept],
        now_ns: int,
        index: Index | None,
    ) -> _Keeping | None:
        spec = demand.spec
        ask, asker = ask_of(spec), asker_of(spec, kept, now_ns)
        before = self._keeping.get(spec.demand)
        if before is not None and now_ns - before.chosen_ns < LOOK_AGAIN_NS:
            cards = [state.cards.get(uuid) for uuid in before.cards]
            if all(
                card is not None
                and card.uuid not in kept
                and node_fits(state.nodes[card.node], ask)
                and endings_needed(state, card, ask.request, seen.get(card.uuid, NOTHING_SEEN), asker, now_ns)
                is not None
                for card in cards
            ):
                return before
        found = soonest(state, ask, seen, asker, now_ns, among=index.able(ask) if index is not None else None)
        return None if found is None else _Keeping(found.cards, found.at_ns, now_ns)

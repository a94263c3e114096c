"""What if: the demands of a past, placed again under other rules or on another fleet. Pure.

A discrete event simulation that invents nothing of its own: events with virtual times go through the real fold, and
the real queue, filter, ranking, preemption and stop orders decide. It differs from the service in this only: a
decision takes no time, no append is refused, nothing fails, and no card has foreign processes.

    past ──► heap of (moment, what is due) ──► evolve ──► Turns, place, preempt, stops_due ──► evolve ...
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import Phase, State
from rigbook_placer.feasible import ask_of
from rigbook_placer.place import explain, hopeless
from rigbook_placer.preempt import evictions, preempt
from rigbook_placer.rules import closes_ns, opens_ns
from rigbook_placer.stops import stops_due
from rigbook_placer.turns import Turns
from rigbook_placer.waiting import Waiting
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas.catalogue import BY_PAYLOAD
from rigbook_schemas.values import VerdictClass
from rigbook_schemas.wire import Record, rfc3339

from rigbook_replay.lifetimes import Lifetime, Span, counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from rigbook_ledger.state import Binding
    from rigbook_placer.index import Index
    from rigbook_placer.waiting import Group
    from rigbook_schemas.events import Payload

    from rigbook_replay.lifetimes import Happening, Past
    from rigbook_replay.meter import Meter

__all__ = ["Simulation", "simulate"]

# As the placer: what nothing in the fleet could ever hold is refused after this time.
HOPELESS_NS: Final = 10 * 10**9
# A blocked demand that preempts looks again: its victims may have run for their minimum time by now.
PREEMPT_AGAIN_NS: Final = 60 * 10**9
PREEMPTORS_MAX: Final = 8
# From here on the index pays; below, looking at every card is as quick.
INDEX_CARDS_MIN: Final = 128
_MOMENT_NS: Final = 1_000_000

# What is due at one moment: happenings first, then ends, then withdrawals, then demands, then second looks.
_Due: TypeAlias = "tuple[int, int, int, Callable[..., None], Any]"
_HAPPENS, _ENDS, _LEAVES, _COMES, _LOOKS = range(5)


def simulate(
    past: Past, happenings: list[Happening], meter: Meter, *, policy: str = "pack",
    told: Callable[[int, int], None] | None = None,
) -> list[Lifetime]:  # fmt: skip
    """The lifetimes that the demands of the past would have had. `happenings`: what befalls the fleet, in order."""
    return Simulation(past, happenings, meter, policy).run(told)


class Simulation:
    """One run. `policy`: the placer's default where neither demand nor operator names one."""

    def __init__(self, past: Past, happenings: list[Happening], meter: Meter, policy: str) -> None:
        self.state = State()
        self._past = past
        self._meter = meter
        self._now_ns = past.from_ns
        self._due: list[_Due] = []
        self._count = 0
        self._waiting = Waiting()
        self._turns = Turns(policy)
        self._policy = policy
        self._index: Index | None = None
        self._stops: set[int] = set()
        self._lives: dict[str, Lifetime] = {}
        self._left_ns: dict[str, int | None] = {}  # how long it will hold cards yet; None = to the end
        self._fleet = 0  # counts changes of fleet and rules
        self._never: dict[tuple[Group, int], bool] = {}
        self._looks_ns = 0  # when preemption is looked at again
        for one in happenings:
            self._at(one.at_ns, _HAPPENS, self._happen, one)
        for life in past.lifetimes:
            self._at(life.raised_ns, _COMES, self._come, life)

    def run(self, told: Callable[[int, int], None] | None = None) -> list[Lifetime]:
        until_ns = self._past.until_ns
        done = 0
        while self._due and self._due[0][0] <= until_ns:
            now_ns = self._due[0][0]
            self._meter.advance(now_ns)
            self._now_ns = now_ns
            while self._due and self._due[0][0] == now_ns:
                _, kind, _, act, about = heapq.heappop(self._due)
                act(about)
                done += kind == _COMES
            self._decide()
            if told is not None:
                told(done, len(self._past.lifetimes))
        self._now_ns = until_ns
        self._close()
        return list(self._lives.values())

    # -- what befalls it ------------------------------------------------------------------------

    def _at(self, at_ns: int, kind: int, act: Callable[..., None], about: object) -> None:
        self._count += 1
        heapq.heappush(self._due, (at_ns, kind, self._count, act, about))

    def _tell(self, subject: str, data: Payload, kind: str = "") -> int:
        """Append and fold one event; its sequence."""
        seq = self.state.position + 1
        kind = kind or BY_PAYLOAD[type(data)].name
        record = Record(
            seq, subject, self._now_ns, f"whatif-{seq}", kind, "whatif", rfc3339(self._now_ns), data
        )
        self.state = evolve(self.state, record)
        return seq

    def _happen(self, one: Happening) -> None:
        node = getattr(one.data, "node", "")
        of_node = isinstance(one.data, (e.NodeJoined, e.NodeUnreachable, e.NodeRecovered))
        self._tell(subjects.node(node) if of_node else subjects.policy("rule"), one.data, one.kind)
        self._fleet += 1
        self._turns.again()

    def _come(self, life: Lifetime) -> None:
        spec = life.spec
        if spec.demand in self._lives:
            return
        self._lives[spec.demand] = Lifetime(
            spec=spec, raised_ns=life.raised_ns, hold_ns=life.hold_ns, known=life.known
        )
        self._left_ns[spec.demand] = life.hold_ns
        self._tell(subjects.demand(spec.project), spec, "demand.raised")
        self._wait_for_window(spec)
        self._at(self._now_ns + HOPELESS_NS, _LOOKS, self._refuse, spec.demand)
        if life.leaves_ns:
            self._at(max(life.leaves_ns, self._now_ns), _LEAVES, self._leave, life)

    def _wait_for_window(self, spec: e.DemandRaised) -> None:
        opens = opens_ns(spec.windows, self._now_ns) if spec.windows else None
        if opens is not None:
            self._at(opens, _LOOKS, self._look, spec.demand)

    def _look(self, _about: object) -> None:
        self._turns.again()

    def _leave(self, recorded: Lifetime) -> None:
        demand = self.state.demands[recorded.spec.demand]
        if demand.phase.terminal or (recorded.gave_up and demand.phase is not Phase.WAITING):
            return  # who gave up waiting, and here did not have to wait, stays
        if demand.phase is Phase.WAITING:
            life = self._lives[recorded.spec.demand]
            life.gave_up, life.leaves_ns = not life.spans, self._now_ns
        spec = recorded.spec
        self._tell(subjects.demand(spec.project), e.DemandWithdrawn(demand=spec.demand, project=spec.project))

    def _refuse(self, did: str) -> None:
        """It has waited for a while: could it ever be met?"""
        demand = self.state.demands.get(did)
        group = self._waiting.group(did)
        if demand is None or demand.phase is not Phase.WAITING or group is None:
            return
        key = (group, self._fleet)
        if key not in self._never:
            self._never[key] = hopeless(self._explain(demand.spec))
        if self._never[key]:
            reasons = self._explain(demand.spec)
            life = self._lives[did]
            life.refused, life.reason = True, reasons[0].code.value if reasons else ""
            refused = e.Refused(demand=did, project=demand.spec.project, reasons=reasons)
            self._tell(subjects.verdict(demand.spec.project), refused)

    def _explain(self, spec: e.DemandRaised) -> tuple[Any, ...]:
        totals = self._index.totals if self._index is not None else None
        return explain(
            self.state, spec, {}, self._policy, now_ns=self._now_ns, kept=self._turns.kept, totals=totals
        )

    def _end(self, epoch: int) -> None:
        """The binding's time is over: it ends, and its cards are seen free."""
        binding = self.state.bindings.get(epoch)
        if binding is None:
            return
        stopped = binding.eviction is not None
        verdict = VerdictClass.STOPPED_BY_US if stopped else VerdictClass.COMPLETED
        for share in binding.shares:
            over = e.Exited(demand=binding.demand, epoch=epoch, node=share.node, verdict=verdict)
            self._tell(subjects.run(share.node), over)
        for share in binding.shares:
            free = e.Released(demand=binding.demand, epoch=epoch, node=share.node, verdict=verdict)
            self._tell(subjects.release(share.node), free)
        life = self._lives[binding.demand]
        life.spans[-1].end_ns = self._now_ns
        if binding.demand in self.state.waiting:
            left_ns = self._left_ns[binding.demand]
            if left_ns is not None:
                self._left_ns[binding.demand] = max(_MOMENT_NS, left_ns - (self._now_ns - binding.bound_ns))
            life.waits_again = True
            self._wait_for_window(life.spec)

    # -- what is decided ------------------------------------------------------------------------

    def _decide(self) -> None:
        """As the placer's loop: stop orders, then bindings, then room for who may evict; until nothing moves."""
        while True:
            self._follow()
            self._order_stops()
            self._bind_all()
            if not self._make_room():
                return

    def _follow(self) -> None:
        state, touched = self.state, self.state.touched
        self._waiting.update(state, touched.demands)
        for did in touched.demands:
            demand = state.demands.get(did)
            if demand is not None and demand.epoch:
                self._stops.add(demand.epoch)
        if self._index is not None:
            self._index.follow(touched.nodes, touched.cards, touched.bindings)
        elif len(state.cards) >= INDEX_CARDS_MIN:
            self._index = _index(state)
            self._turns.again()
        self._meter.follow(state, touched)
        touched.clear()

    def _order_stops(self) -> None:
        due = list(stops_due(self.state, self._stops, self._now_ns))
        self._stops.clear()
        for order in due:
            self._order(order)
        if due:
            self._follow()

    def _order(self, order: e.EvictionOrdered) -> None:
        binding = self.state.bindings[order.epoch]
        self._tell(subjects.evict(order.nodes), order)
        if counted(order.reason):
            self._lives[binding.demand].evictions.append((self._now_ns, order.reason.value))
        self._at(self._now_ns + self._past.stop_ns, _ENDS, self._end, order.epoch)

    def _bind_all(self) -> None:
        state = self.state
        while True:
            found = self._turns.next(state, self._waiting, {}, self._now_ns, self._index)
            if found is None:
                if self._turns.more:
                    continue
                return
            demand, decision = found
            nodes = tuple(share.node for share in decision.shares)
            epoch = self._tell(subjects.bind(nodes), decision)
            binding = state.bindings[epoch]
            self._begin(binding, nodes)
            self._follow()
            self._turns.bound(state, [demand.spec.demand], self._now_ns)

    def _begin(self, binding: Binding, nodes: tuple[str, ...]) -> None:
        life = self._lives[binding.demand]
        life.spans.append(Span(self._now_ns, nodes=nodes))
        life.waits_again = False
        left_ns = self._left_ns[binding.demand]
        if left_ns is not None:
            self._at(self._now_ns + max(left_ns, 1), _ENDS, self._end, binding.epoch)
        spec = life.spec
        if spec.max_run_seconds is not None:
            due_ns = self._now_ns + int(spec.max_run_seconds * 1e9) + _MOMENT_NS
            self._at(due_ns, _LOOKS, self._stops.add, binding.epoch)
        closes = closes_ns(spec.windows, self._now_ns) if spec.windows else None
        if closes is not None:
            self._at(closes + _MOMENT_NS, _LOOKS, self._stops.add, binding.epoch)

    def _make_room(self) -> bool:
        """Evict for the first blocked demands that may; True when somebody was."""
        state, index = self.state, self._index
        blocked = [state.demands[did] for did in self._turns.blocked if did in state.waiting]
        asking = [demand for demand in blocked if demand.spec.preempts][:PREEMPTORS_MAX]
        if not asking or not state.policy.preemption:
            return False
        for demand in asking:
            found = preempt(
                state, demand.spec, {}, self._now_ns, kept=self._turns.kept,
                totals=index.totals if index else None, among=index.able(ask_of(demand.spec)) if index else None,
            )  # fmt: skip
            if found is not None:
                for order in evictions(demand, found):
                    self._order(order)
                return True
        if self._looks_ns <= self._now_ns:
            self._looks_ns = self._now_ns + PREEMPT_AGAIN_NS
            self._at(self._looks_ns, _LOOKS, _nothing, None)
        return False

    # -- the end --------------------------------------------------------------------------------

    def _close(self) -> None:
        """Why those wait that wait still."""
        told: dict[Group, str] = {}
        for did in self.state.waiting:
            group = self._waiting.group(did)
            assert group is not None
            if group not in told:
                reasons = self._explain(self.state.demands[did].spec)
                told[group] = reasons[0].code.value if reasons else ""
            self._lives[did].reason = told[group]


def _nothing(_about: object) -> None:
    """Only time has passed."""


def _index(state: State) -> Index | None:
    """Same answers, quicker; without numpy there is none."""
    try:
        from rigbook_placer.index import Index
    except ModuleNotFoundError:
        return None
    return Index(state, {})

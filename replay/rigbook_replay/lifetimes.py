"""Lifetimes: each demand of a past as it was raised, waited, held cards and left; and what happened to the fleet.

How long a demand holds its cards comes from the record, whatever the rules are under which it is asked again:

- it ended: the time for which it held them, all its bindings together (work that was evicted goes on where it was);
- it holds them still at the end of the record: *censored*; it holds them to the end, however early it begins;
- it never held any: *estimated*, the median of its project, else of all;
- a service that its owner withdrew leaves at that moment, however late it began.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import State
from rigbook_schemas import events as e
from rigbook_schemas.events import DemandRaised, Payload
from rigbook_schemas.values import EvictionReason, Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rigbook_schemas.wire import Record

__all__ = [
    "Gathering",
    "Happening",
    "Known",
    "Lifetime",
    "Past",
    "Span",
    "counted",
    "estimate",
    "finished_past",
]

# Where a past has not one demand that ended.
HOLD_NS_DEFAULT: Final = 3600 * 10**9
# From a stop order to the cards seen free, where the past has none: the default grace of a component.
STOP_NS_DEFAULT: Final = 10 * 10**9
# Stop orders that only carry out the owner's own wish, or clean up behind an end: nobody was evicted.
_NOT_TAKEN: Final = frozenset(
    {EvictionReason.WITHDRAWN, EvictionReason.LEFTOVER, EvictionReason.FENCED, EvictionReason.MISSING}
)


class Known(enum.StrEnum):
    """How the time that a demand holds its cards is known."""

    RECORDED = "recorded"
    CENSORED = "censored"  # at least up to the end of the record
    ESTIMATED = "estimated"


class Span(msgspec.Struct):
    """One binding's time."""

    bound_ns: int
    end_ns: int = 0  # 0 = it holds them still
    nodes: tuple[str, ...] = ()


class Lifetime(msgspec.Struct, kw_only=True):
    """One demand, in the record or in a simulation."""

    spec: DemandRaised
    raised_ns: int
    spans: list[Span] = []
    hold_ns: int | None = None  # None = to the end of the record
    known: Known = Known.RECORDED
    leaves_ns: int = 0  # the owner takes it back at this moment, 0 = never
    gave_up: bool = False  # it was taken back while it waited
    refused: bool = False
    reason: str = ""  # code of what kept it waiting in the end, or refused it
    evictions: list[tuple[int, str]] = []  # (when, reason)

    @property
    def bound_ns(self) -> int:
        """When it first held cards, 0 = never."""
        return self.spans[0].bound_ns if self.spans else 0

    def wait_ns(self, until_ns: int) -> int:
        """All its waiting, also after evictions, up to its end or to `until_ns`."""
        waited, since = 0, self.raised_ns
        for span in self.spans:
            waited += max(0, span.bound_ns - since)
            since = span.end_ns
            if not since:
                return waited
        if not self.spans or self.waits_again:
            until_ns = min(until_ns, self.leaves_ns or until_ns)
            waited += max(0, until_ns - since)
        return waited

    waits_again: bool = False  # evicted, and back in the queue at the end


class Happening(msgspec.Struct, frozen=True):
    """Something that no placement brings about: a node joined, was cordoned; a rule was set."""

    at_ns: int
    kind: str
    data: Payload


class Past(msgspec.Struct, kw_only=True):
    """What a question is asked about."""

    name: str
    from_ns: int
    until_ns: int
    lifetimes: list[Lifetime]
    happenings: list[Happening]
    stop_ns: int = STOP_NS_DEFAULT  # from a stop order to the cards seen free
    recorded_waits: bool = True  # the past says when demands got their cards
    notes: list[str] = []

    @property
    def has_fleet(self) -> bool:
        return any(isinstance(one.data, e.NodeJoined) for one in self.happenings)

    def count(self, known: Known) -> int:
        return sum(1 for life in self.lifetimes if life.known is known)


class Gathering:
    """Reads a whole log, in sequence, and gives its past."""

    def __init__(self, name: str) -> None:
        self.state = State()
        self._name = name
        self._lives: dict[str, Lifetime] = {}
        self._happenings: list[Happening] = []
        self._from_ns = 0
        self._stops: list[int] = []
        self._ordered: dict[int, int] = {}

    def take(self, records: Iterable[Record]) -> None:
        for record in records:
            before = self.state.bindings.get(getattr(record.data, "epoch", 0) or 0)
            self.state = evolve(self.state, record)
            self._from_ns = self._from_ns or record.received_ns
            self._note(record, had=before is not None)
        self.state.touched.clear()

    def _note(self, record: Record, *, had: bool) -> None:
        data, at_ns, state = record.data, record.received_ns, self.state
        if isinstance(data, (e.NodeJoined, e.NodeUnreachable, e.NodeRecovered)) or (
            record.subject.startswith("rig.own.policy.") and isinstance(data, _RULES)
        ):
            self._happenings.append(Happening(at_ns, record.kind, data))
        elif isinstance(data, e.DemandRaised):
            demand = state.demands.get(data.demand)
            if demand is not None and demand.raised_seq == record.seq:
                self._lives[data.demand] = Lifetime(spec=data, raised_ns=at_ns)
        elif isinstance(data, (e.Bound, e.Adopted)):
            self._bound(record, data)
        elif isinstance(data, e.DemandWithdrawn):
            life = self._lives.get(data.demand)
            if life is not None and not life.leaves_ns:
                life.leaves_ns = at_ns
        elif isinstance(data, e.Refused):
            life = self._lives.get(data.demand)
            if life is not None and not life.spans:
                life.refused = True
                life.reason = data.reasons[0].code.value if data.reasons else ""
        elif isinstance(data, e.EvictionOrdered) and had and data.epoch not in self._ordered:
            self._ordered[data.epoch] = at_ns
            life = self._lives.get(data.demand)
            if life is not None and counted(data.reason):
                life.evictions.append((at_ns, data.reason.value))
        elif isinstance(data, e.Released) and had and data.epoch not in state.bindings:
            self._ended(data, at_ns)

    def _bound(self, record: Record, data: e.Bound | e.Adopted) -> None:
        epoch = record.seq if isinstance(data, e.Bound) else data.epoch
        binding = self.state.bindings.get(epoch)
        if binding is None or binding.event_id != record.id:
            return  # void
        life = self._lives.get(data.demand)
        if life is None and isinstance(data, e.Adopted):
            life = self._lives[data.demand] = Lifetime(spec=data.spec, raised_ns=record.received_ns)
        if life is not None:
            nodes = tuple(share.node for share in data.shares)
            life.spans.append(Span(record.received_ns, nodes=nodes))
            life.refused, life.waits_again = False, False

    def _ended(self, data: e.Released, at_ns: int) -> None:
        ordered_ns = self._ordered.pop(data.epoch, 0)
        if ordered_ns:
            self._stops.append(at_ns - ordered_ns)
        life = self._lives.get(data.demand)
        if life is None or not life.spans:
            return
        life.spans[-1].end_ns = at_ns
        life.waits_again = data.demand in self.state.waiting

    def close(self) -> Past:
        """The past, with the time that each demand holds its cards worked out."""
        past = Past(
            name=self._name,
            from_ns=self._from_ns,
            until_ns=self.state.received_ns,
            lifetimes=list(self._lives.values()),
            happenings=self._happenings,
            stop_ns=_median(self._stops) or STOP_NS_DEFAULT,
        )
        for life in past.lifetimes:
            _judge(life)
        return finished_past(past)


def _judge(life: Lifetime) -> None:
    """How long it holds its cards, from what the record says."""
    if not life.spans:
        life.known = Known.ESTIMATED
        life.gave_up = bool(life.leaves_ns)
    elif not life.spans[-1].end_ns or life.waits_again:
        life.known, life.hold_ns = Known.CENSORED, None
        if life.leaves_ns and life.spec.workload is not Workload.SERVICE:
            life.leaves_ns = 0
    else:
        life.hold_ns = sum(span.end_ns - span.bound_ns for span in life.spans)
        if life.spec.workload is Workload.SERVICE and life.leaves_ns:
            life.hold_ns = None
        else:
            life.leaves_ns = 0  # a batch that its owner stopped: the time it had is its time


def finished_past(past: Past) -> Past:
    """Estimates filled in, and in the notes what is not known for sure."""
    estimate(past.lifetimes)
    censored, estimated = past.count(Known.CENSORED), past.count(Known.ESTIMATED)
    if censored:
        past.notes.append(
            f"{censored} of {len(past.lifetimes)} demands held their cards still at the end of the record (censored): "
            "they hold them to its end in each run, however early they begin"
        )
    if estimated:
        past.notes.append(
            f"{estimated} of {len(past.lifetimes)} demands never held cards: where a run gives them some, they hold them "
            "for the median time of their project"
        )
    return past


def estimate(lifetimes: Sequence[Lifetime]) -> None:
    """The median of the project, else of all, for those that never held cards."""
    by_project: dict[str, list[int]] = {}
    for life in lifetimes:
        if life.known is Known.RECORDED and life.hold_ns is not None:
            by_project.setdefault(life.spec.project, []).append(life.hold_ns)
    everybody = _median([ns for known in by_project.values() for ns in known]) or HOLD_NS_DEFAULT
    medians = {project: _median(known) for project, known in by_project.items()}
    for life in lifetimes:
        if life.known is Known.ESTIMATED:
            life.hold_ns = medians.get(life.spec.project) or everybody


def counted(reason: EvictionReason) -> bool:
    """Somebody's cards were taken, and it was not the owner's own wish."""
    return reason not in _NOT_TAKEN


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2] if values else 0


_RULES: Final = (
    e.QuotaSet, e.ModeSet, e.NodeCordoned, e.NodeUncordoned, e.GpuQuarantined, e.GpuRestored, e.PriorityCapped,
    e.PlacementSet, e.PreemptionSet,
)  # fmt: skip

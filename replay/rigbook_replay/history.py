"""History: who held what, and why each tenure began and ended, out of the log alone.

Each tenure comes with the demand behind it, the decision (position, policy, what else would have fitted,
who waited), and how it ended, as the events themselves: whoever shows it finds the words.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_placer.feasible import ask_of, feasible
from rigbook_schemas import events as e
from rigbook_schemas.queries import TenureRow
from rigbook_schemas.values import NodeShare, Reason, VerdictClass
from rigbook_schemas.wire import Record, rfc3339

from rigbook_replay.retrace import Watcher

if TYPE_CHECKING:
    from rigbook_ledger.state import State

__all__ = ["About", "Decision", "History", "Subject", "Tenure", "tenure_rows"]

# Names of others that are kept with each decision; the rest are counted.
NAMED_MAX: Final = 8


class About(enum.StrEnum):
    GPU = "gpu"
    DEMAND = "demand"
    PROJECT = "project"
    NODE = "node"
    EVERYTHING = "everything"


class Subject(msgspec.Struct, frozen=True):
    """Whose history. `name` is a UUID, an id or a name, as the log has it."""

    about: About
    name: str = ""

    def has(self, demand: str, project: str, shares: tuple[NodeShare, ...]) -> bool:
        match self.about:
            case About.GPU:
                return any(a.card == self.name for share in shares for a in share.allotments)
            case About.NODE:
                return any(share.node == self.name for share in shares)
            case About.PROJECT:
                return project == self.name
            case About.DEMAND:
                return demand == self.name
            case About.EVERYTHING:
                return True


class Decision(msgspec.Struct, kw_only=True):
    """How a binding came about."""

    record: Record  # `bound`
    position: int  # what it was decided on
    exact: bool  # the rest is of the state at that very position
    others: tuple[str, ...] = ()  # other nodes that could have taken it, by the books
    others_count: int = 0
    waiting: tuple[str, ...] = ()  # other demands that waited, in the order they came
    waiting_count: int = 0


class Tenure(msgspec.Struct, kw_only=True):
    """One binding, from the decision to the last release."""

    epoch: int
    demand: str
    name: str
    project: str
    owner: str
    contact: str
    purpose: str
    mode: str
    shares: tuple[NodeShare, ...]
    indexes: dict[str, int]  # card to index
    raised_ns: int
    raised_seq: int
    waited_for: tuple[Reason, ...]  # what kept it waiting last
    requeues: int
    bound_ns: int
    decision: Decision
    events: list[Record] = []  # what happened to it, in order: started, evicted, exited, released, ...
    stopped_ns: int = 0  # since when its desired state is stopped
    released_ns: dict[str, int] = {}  # by node
    forced: bool = False
    verdict: VerdictClass | None = None
    sentence: str = ""
    usage_seconds: float = 0.0
    memory_peak_bytes: int | None = None

    @property
    def memory_bytes(self) -> int:
        return sum(a.memory_bytes for share in self.shares for a in share.allotments)

    @property
    def over(self) -> bool:
        return len(self.released_ns) == len(self.shares)


class History(Watcher):
    """Gathers tenures, and what else the log says of the subject, while a `Retrace` goes by."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.tenures: list[Tenure] = []
        self.events: list[Record] = []  # about the subject itself: quarantines, cordons, quotas, inventories
        self._decisions: dict[int, Decision] = {}  # looked at, and their `bound` not folded yet
        self._live: dict[int, Tenure] = {}
        self._of_demand: dict[str, Tenure] = {}
        self._drifts: dict[str, Tenure | None] = {}
        self._waited_for: tuple[Reason, ...] = ()

    def decision(self, state: State, record: Record, *, exact: bool) -> None:
        data = record.data
        assert isinstance(data, e.Bound)
        if not self.subject.has(data.demand, data.project, data.shares):
            return
        mine = {share.node for share in data.shares}
        demand = state.demands.get(data.demand)
        options: list[str] = []
        if demand is not None:
            options = [
                o.node.name for o in feasible(state, ask_of(demand.spec), {}) if o.node.name not in mine
            ]
        waiting = [name for name in state.waiting if name != data.demand]
        self._decisions[record.seq] = Decision(
            record=record,
            position=data.position,
            exact=exact,
            others=tuple(options[:NAMED_MAX]),
            others_count=len(options),
            waiting=tuple(waiting[:NAMED_MAX]),
            waiting_count=len(waiting),
        )

    def after(self, state: State, record: Record) -> None:
        data = record.data
        if isinstance(data, e.Bound):
            self._begun(state, record)
            return
        if self._is_about_subject(data):
            self.events.append(record)
        tenure = self._live.get(getattr(data, "epoch", 0) or 0)
        if tenure is None and isinstance(data, e.DemandWithdrawn):
            tenure = self._of_demand.get(data.demand)
        if isinstance(data, e.DriftDetected):
            self._drifts[data.drift] = tenure
        elif isinstance(data, e.DriftCleared):
            tenure = self._drifts.pop(data.drift, None)
        if tenure is not None:
            tenure.events.append(record)
            self._note(state, tenure, record)

    def _begun(self, state: State, record: Record) -> None:
        binding = state.bindings.get(record.seq)
        decision = self._decisions.pop(record.seq, None)
        if binding is None or decision is None:
            return  # void, or nothing of ours
        demand = state.demands[binding.demand]
        spec = demand.spec
        tenure = Tenure(
            epoch=binding.epoch,
            demand=spec.demand,
            name=spec.name,
            project=spec.project,
            owner=spec.owner.name,
            contact=spec.owner.contact,
            purpose=spec.purpose,
            mode=binding.mode.value,
            shares=binding.shares,
            indexes={a.card: state.cards[a.card].index for share in binding.shares for a in share.allotments},
            raised_ns=demand.raised_ns,
            raised_seq=demand.raised_seq,
            waited_for=self._waited_for,
            requeues=demand.requeues,
            bound_ns=binding.bound_ns,
            decision=decision,
            stopped_ns=demand.withdrawn_ns or (0 if demand.wanted else binding.bound_ns),
        )
        self.tenures.append(tenure)
        self._live[tenure.epoch] = tenure
        self._of_demand[tenure.demand] = tenure

    def before(self, state: State, record: Record) -> None:
        if isinstance(record.data, e.Bound) and record.seq in self._decisions:
            demand = state.demands.get(record.data.demand)
            self._waited_for = demand.reasons if demand is not None else ()

    def _note(self, state: State, tenure: Tenure, record: Record) -> None:
        data = record.data
        if isinstance(data, e.DemandWithdrawn):
            tenure.stopped_ns = tenure.stopped_ns or record.received_ns
        elif isinstance(data, e.Exited):
            tenure.verdict, tenure.sentence = data.verdict, data.sentence
        elif isinstance(data, e.Released):
            self._released(state, tenure, record, data)

    def _released(self, state: State, tenure: Tenure, record: Record, data: e.Released) -> None:
        binding = state.bindings.get(tenure.epoch)
        if data.node in tenure.released_ns or (binding is not None and data.node not in binding.released):
            return  # by a non-holder: a finding, and no end
        tenure.released_ns[data.node] = record.received_ns
        tenure.forced = tenure.forced or data.forced
        tenure.usage_seconds = max(tenure.usage_seconds, data.usage.seconds)
        if data.usage.memory_peak_bytes is not None:
            tenure.memory_peak_bytes = (tenure.memory_peak_bytes or 0) + data.usage.memory_peak_bytes
        if tenure.verdict is None:
            tenure.verdict = data.verdict
        if tenure.over:
            del self._live[tenure.epoch]
            if self._of_demand.get(tenure.demand) is tenure:
                del self._of_demand[tenure.demand]

    def _is_about_subject(self, data: object) -> bool:
        name = self.subject.name
        match self.subject.about:
            case About.GPU:
                return getattr(data, "card", None) == name
            case About.NODE:
                return (
                    isinstance(
                        data,
                        (e.NodeJoined, e.NodeUnreachable, e.NodeRecovered, e.NodeCordoned, e.NodeUncordoned),
                    )
                    and data.node == name
                )
            case About.PROJECT:
                return isinstance(data, e.QuotaSet) and data.project == name
            case About.DEMAND:
                return (
                    isinstance(data, (e.DemandRaised, e.DemandWithdrawn, e.Deferred, e.Refused))
                    and data.demand == name
                )
            case About.EVERYTHING:
                return False


def tenure_rows(history: History, *, at_ns: int | None = None) -> list[TenureRow]:
    """As the ledger answers `who`: one row per card of each tenure; of a subject that is a card or node, only its own."""
    rows: list[TenureRow] = []
    for one in history.tenures:
        for share in one.shares:
            released_ns = one.released_ns.get(share.node, 0)
            if at_ns is not None and not (one.bound_ns <= at_ns and (not released_ns or released_ns > at_ns)):
                continue
            if history.subject.about is About.NODE and share.node != history.subject.name:
                continue
            for allotment in share.allotments:
                if history.subject.about is About.GPU and allotment.card != history.subject.name:
                    continue
                rows.append(
                    TenureRow(
                        card=allotment.card,
                        node=share.node,
                        index=one.indexes[allotment.card],
                        demand=one.demand,
                        name=one.name,
                        project=one.project,
                        owner=one.owner,
                        contact=one.contact,
                        purpose=one.purpose,
                        mode=one.mode,
                        memory_bytes=allotment.memory_bytes,
                        epoch=one.epoch,
                        bound=rfc3339(one.bound_ns),
                        released=rfc3339(released_ns) if released_ns else "",
                        desired_stopped=rfc3339(one.stopped_ns) if one.stopped_ns else "",
                        verdict=one.verdict.value if released_ns and one.verdict is not None else "",
                        end=one.sentence if released_ns else "",
                        forced=one.forced,
                    )
                )
    return rows

"""Entries: what a stretch of the log adds to the book's tables, gathered while it is folded. Pure.

The fold keeps the present; the tables keep the past: who held which card from when to when, which
drift came and went, what should not have been on the log. Rows are made from what `evolve` really
did (state before, state after), never from what an event merely claims: a void binding leaves no
tenure, a release by a non-holder ends none.

Rows of one kind may be written in any order relative to other kinds: each update names the position
it speaks for, so that a table needs one `executemany` per stretch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from rigbook_schemas import events as e
from rigbook_schemas.catalogue import KINDS
from rigbook_schemas.subjects import LEDGER_STREAM
from rigbook_schemas.wire import Unknown, decode

from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import ENDED_MAX, Binding, Demand, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rigbook_bus.protocol import Message
    from rigbook_schemas.wire import Record

    from rigbook_ledger.state import Finding, State

__all__ = [
    "AUDIT",
    "MALFORMED",
    "UNKNOWN",
    "Entries",
    "Gap",
    "Transition",
    "card_key",
    "demand_key",
    "node_key",
]

Row = tuple[Any, ...]

# What stands in the kind column when there is none; as words, so that one can ask for them.
UNKNOWN: Final = "unknown"
MALFORMED: Final = "malformed"
# Stands where a stream's name would, for findings of the audit.
AUDIT: Final = "audit"
# A name longer than this is nobody's: such an event is found by its sequence only.
NAME_MAX: Final = 128

_encode: Final = msgspec.msgpack.Encoder().encode
# Which of the names an event can be found by are fields of its payload: (demand, node, card).
_SHAPES: Final[dict[type, tuple[bool, ...]]] = {
    kind.payload: tuple(name in kind.payload.__struct_fields__ for name in ("demand", "node", "card"))
    for kind in KINDS
}


class Gap(Exception):
    """The log skips sequences: its beginning or a part of it is lost."""

    code = "log_gap"


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """A demand went from one phase to another: one line of the service's log."""

    seq: int
    kind: str
    demand: str
    before: str  # "" = it was raised
    after: str
    epoch: int
    nodes: tuple[str, ...]
    traceparent: str


def demand_key(demand: str) -> str:
    return "d:" + demand


def node_key(node: str) -> str:
    return "n:" + node


def card_key(card: str) -> str:
    return "c:" + card


class Entries:
    """Rows per table, in memory until one transaction takes them all."""

    def __init__(self, *, raw: bool = True) -> None:
        self._raw = raw  # False: the events themselves are in the book already
        self.base: int | None = None  # position before the first event
        self.count = 0
        self.events: list[Row] = []
        self.mentions: list[Row] = []
        self.demands: dict[str, Row] = {}
        self.tenures: list[Row] = []
        self.stops: list[Row] = []
        self.releases: list[Row] = []
        self.drifts: list[Row] = []
        self.drift_updates: list[Row] = []
        self.drift_ends: list[Row] = []
        self.findings: list[Row] = []

    @property
    def empty(self) -> bool:
        return self.base is None and not self.findings

    def take(
        self, state: State, messages: Sequence[Message], transitions: list[Transition] | None = None
    ) -> State:
        """Fold `messages` and note what they did. Raises Gap before folding past one.

        With `transitions`, every change of a demand's phase is appended to it.
        """
        assert len(messages) < ENDED_MAX, "a demand that ends must still be remembered when its row is made"
        if self.base is None:
            self.base = state.position
        touched = state.touched
        for m in messages:
            if m.seq <= state.position:
                continue
            if m.seq != state.position + 1:
                self._note_demands(state)
                raise Gap(f"event {m.seq} came after {state.position}: the events between are lost")
            record = decode(m.seq, m.subject, m.received_ns, m.body)
            data = record.data
            kind = type(data)
            look = _BEFORE.get(kind)
            seen = look(state, data) if look is not None else None
            did = "" if transitions is None else getattr(data, "demand", "")
            before = state.demands.get(did) if did else None
            found = len(touched.findings)
            state = evolve(state, record)
            note = _AFTER.get(kind)
            if note is not None:
                note(self, state, record, data, seen)
            if len(touched.findings) != found:
                for finding in touched.findings[found:]:
                    self.note_finding(LEDGER_STREAM, finding, m.received_ns)
            if transitions is not None and did:
                _transition(transitions, record, before, state.demands.get(did))
            self._note_event(m, record)
        self._note_demands(state)
        return state

    def _note_demands(self, state: State) -> None:
        for did in state.touched.demands:
            demand = state.demands.get(did)
            if demand is not None:
                spec = demand.spec
                self.demands[did] = (
                    did,
                    demand.raised_seq,
                    spec.name,
                    spec.project,
                    demand.phase.value,
                    _encode(demand),
                )

    def note_finding(self, stream: str, finding: Finding, at_ns: int) -> None:
        self.findings.append(
            (stream, finding.seq, finding.code, finding.text, finding.subject, finding.event_id, at_ns)
        )

    def _note_event(self, m: Message, record: Record) -> None:
        self.count += 1
        data = record.data
        seq = m.seq
        kind = record.kind
        mention = self.mentions.append
        shape = _SHAPES.get(type(data))
        if shape is None:
            kind = UNKNOWN if isinstance(data, Unknown) else MALFORMED
            if record.correlation and len(record.correlation) <= NAME_MAX:
                mention(("d:" + record.correlation, seq))
        else:
            has_demand, has_node, has_card = shape
            known: Any = data
            if has_demand and known.demand:
                mention(("d:" + known.demand, seq))
            if has_node and known.node:
                mention(("n:" + known.node, seq))
            if has_card and known.card:
                mention(("c:" + known.card, seq))
            if kind in ("bound", "adopted"):
                for share in known.shares:
                    mention(("n:" + share.node, seq))
                    for allotment in share.allotments:
                        mention(("c:" + allotment.card, seq))
            elif kind == "eviction.ordered":
                for node in known.nodes:
                    mention(("n:" + node, seq))
        if self._raw:
            self.events.append((seq, m.subject, m.received_ns, kind, m.body))


def _transition(
    transitions: list[Transition], record: Record, before: Demand | None, after: Demand | None
) -> None:
    if after is None or after is before or (before is not None and before.phase is after.phase):
        return
    data = record.data
    node = getattr(data, "node", "")
    nodes = (node,) if node else tuple(share.node for share in getattr(data, "shares", ()))
    transitions.append(
        Transition(
            seq=record.seq,
            kind=record.kind,
            demand=after.spec.demand,
            before="" if before is None else before.phase.value,
            after=after.phase.value,
            epoch=after.epoch or after.epoch_last,
            nodes=nodes,
            traceparent=record.traceparent,
        )
    )


# -- what was, before an event ------------------------------------------------------------------


def _before_release(state: State, data: e.Released) -> tuple[Binding | None, Demand | None]:
    return state.bindings.get(data.epoch), state.demands.get(data.demand)


def _before_withdrawal(state: State, data: e.DemandWithdrawn) -> bool:
    demand = state.demands.get(data.demand)
    return demand is not None and demand.wanted


def _before_drift(state: State, data: e.DriftDetected | e.DriftCleared) -> bool:
    return data.drift in state.drifts


# -- what an event did --------------------------------------------------------------------------


def _bound(entries: Entries, state: State, record: Record, _data: e.Bound, _seen: None) -> None:
    _tenures(entries, state, state.bindings.get(record.seq))


def _adopted(entries: Entries, state: State, record: Record, data: e.Adopted, _seen: None) -> None:
    binding = state.bindings.get(data.epoch)
    if binding is not None and binding.event_id == record.id:
        _tenures(entries, state, binding)


def _tenures(entries: Entries, state: State, binding: Binding | None) -> None:
    if binding is None:
        return  # void
    demand = state.demands[binding.demand]
    spec = demand.spec
    for share in binding.shares:
        for allotment in share.allotments:
            card = state.cards[allotment.card]
            entries.tenures.append((
                binding.epoch, card.uuid, share.node, card.index, spec.demand, spec.name, spec.project,
                spec.owner.name, spec.owner.contact, spec.purpose, binding.mode.value, allotment.memory_bytes,
                binding.bound_ns, demand.withdrawn_ns or (0 if demand.wanted else binding.bound_ns),
            ))  # fmt: skip


def _withdrawn(
    entries: Entries, state: State, record: Record, data: e.DemandWithdrawn, was_wanted: object
) -> None:
    demand = state.demands.get(data.demand)
    if was_wanted and demand is not None and not demand.wanted and demand.epoch:
        entries.stops.append((record.received_ns, demand.epoch))


def _released(
    entries: Entries,
    state: State,
    record: Record,
    data: e.Released,
    seen: tuple[Binding | None, Demand | None],
) -> None:
    binding, demand = seen
    if binding is None or demand is None or state.bindings.get(binding.epoch) is binding:
        return  # by a non-holder: a finding, and nothing else
    verdict = data.verdict if demand.verdict is None else demand.verdict
    entries.releases.append((
        record.received_ns, record.seq, verdict.value, _end_words(state, binding, demand, data), data.forced,
        binding.epoch, data.node,
    ))  # fmt: skip


def _end_words(state: State, binding: Binding, demand: Demand, data: e.Released) -> str:
    said: list[str] = []
    if data.forced:
        said.append(
            f"released by force{f' by {data.by}' if data.by else ''}{f': {data.text}' if data.text else ''}"
        )
    eviction = binding.eviction
    if not demand.wanted:
        said.append(f"withdrawn{f' by {demand.withdrawn_by}' if demand.withdrawn_by else ''}")
    elif eviction is not None:
        said.append(f"evicted ({eviction.reason}){f' by {eviction.by}' if eviction.by else ''}")
    if demand.sentence:
        said.append(demand.sentence)
    elif not said:
        said.append(data.text or str(data.verdict if demand.verdict is None else demand.verdict))
    after = state.demands.get(binding.demand)
    if after is not None and after.phase is Phase.WAITING:
        said.append("back in the queue")
    return "; ".join(said)


def _detected(
    entries: Entries, _state: State, record: Record, data: e.DriftDetected, was_open: object
) -> None:
    body = _encode(data)
    if was_open:  # told again, with more evidence
        entries.drift_updates.append((body, data.drift, record.seq, record.seq))
        return
    entries.drifts.append(
        (record.seq, data.drift, data.node, data.card, data.demand, record.received_ns, body)
    )


def _cleared(entries: Entries, _state: State, record: Record, data: e.DriftCleared, was_open: object) -> None:
    if was_open:
        entries.drift_ends.append((record.seq, record.received_ns, data.how, data.drift, record.seq))


_BEFORE: Final[dict[type, Callable[[State, Any], Any]]] = {
    e.Released: _before_release,
    e.DemandWithdrawn: _before_withdrawal,
    e.DriftDetected: _before_drift,
    e.DriftCleared: _before_drift,
}
_AFTER: Final[dict[type, Callable[[Entries, State, Record, Any, Any], None]]] = {
    e.Bound: _bound,
    e.Adopted: _adopted,
    e.DemandWithdrawn: _withdrawn,
    e.Released: _released,
    e.DriftDetected: _detected,
    e.DriftCleared: _cleared,
}

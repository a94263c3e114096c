"""Proof of a drift: desired, bound and observed side by side where they last agreed and where they first did not.

Desired and bound are the fold at a position. Observed is what a heartbeat showed, when the source still has
heartbeats of that time (a journal keeps those around each drift); without them it is the agent's last word
on the log, and at the detection the evidence that the reaper wrote into the event itself. Each view says
which of these it stems from.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_ledger import evidence as say
from rigbook_ledger.drift import Tolerance, compare
from rigbook_ledger.evolve import evolve
from rigbook_ledger.observed import Beat, observe
from rigbook_ledger.state import Phase, State
from rigbook_schemas import events as e
from rigbook_schemas.wire import Record, decode, instant, rfc3339

from rigbook_replay.source import Window
from rigbook_replay.timetravel import BeforeRecord, state_on

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rigbook_bus.protocol import Message
    from rigbook_ledger.state import Binding
    from rigbook_schemas.events import DriftDetected
    from rigbook_schemas.values import NodeShare

    from rigbook_replay.source import Source

__all__ = ["DriftProof", "NoDrift", "Standing", "Views", "prove"]

_NS: Final = 1_000_000_000
# A drift without an epoch (somebody else's process on a card) is looked for from this long before on.
LOOK_BACK_SECONDS: Final = 600.0
AFTER_SECONDS: Final = 15.0


class NoDrift(LookupError):
    """The log knows no such drift; the text names those it knows."""

    code = "not_found"


class Standing(enum.StrEnum):
    AGREE = "agree"
    PENDING = "pending"  # they differ, and it is work under way that still has time
    DIFFER = "differ"


class Views(msgspec.Struct, frozen=True, kw_only=True):
    """The three views at one moment."""

    position: int  # of the fold behind desired and bound
    at_ns: int
    standing: Standing
    desired: str
    bound: str
    observed: str
    observed_by: str  # where `observed` stems from


class DriftProof(msgspec.Struct, frozen=True, kw_only=True):
    drift: e.DriftDetected  # as it was first told
    detected: Record
    cleared: Record | None
    agreed: Views | None  # the last time they agreed; None = the record does not reach back that far
    differed: Views  # the first time they did not
    told: Views  # as the reaper put it down
    between: tuple[Record, ...]  # what happened on the log from the one to the detection
    sentence: str


async def prove(source: Source, name: str, *, tolerance: Tolerance | None = None) -> DriftProof:
    """`name`: the drift's id or a beginning of it; the latest of that name. Raises NoDrift, CannotFold, BusError."""
    episodes = await _episodes(source)
    found = [one for one in episodes if one[0].drift == name] or [
        one for one in episodes if one[0].drift.startswith(name)
    ]
    if not found or len({one[0].drift for one in found}) > 1:
        known = ", ".join(dict.fromkeys(one[0].drift for one in (found or episodes))) or "none"
        raise NoDrift(f"no one drift is called {name!r}; on the log: {known}")
    drift, detected, cleared = found[-1]
    trail = _Trail(drift, tolerance or Tolerance())
    state = await _state_before(source, drift, detected)
    beats = await source.heartbeats([_window(drift, detected)])
    waiting = _beats(beats)
    beat = next(waiting, None)
    async for records in source.records(after=state.position, until=detected.seq):
        for record in records:
            while beat is not None and beat.received_ns < record.received_ns:
                trail.saw(state, beat)
                beat = next(waiting, None)
            state = evolve(state, record)
            trail.happened(state, record)
    return trail.proof(state, detected, cleared)


async def _episodes(source: Source) -> list[tuple[DriftDetected, Record, Record | None]]:
    """Each time a drift came: the first event that told of it, and the one that cleared it."""
    open_: dict[str, int] = {}
    found: list[tuple[DriftDetected, Record, Record | None]] = []
    async for records in source.records():
        for record in records:
            data = record.data
            if isinstance(data, e.DriftDetected) and data.drift not in open_:
                open_[data.drift] = len(found)
                found.append((data, record, None))
            elif isinstance(data, e.DriftCleared) and data.drift in open_:
                at = open_.pop(data.drift)
                found[at] = (found[at][0], found[at][1], record)
    return found


def _window(drift: DriftDetected, detected: Record) -> Window:
    begin = instant(drift.since) or detected.received_ns
    return Window(
        node=drift.node,
        from_ns=min(begin, detected.received_ns) - int(LOOK_BACK_SECONDS * _NS),
        to_ns=detected.received_ns + int(AFTER_SECONDS * _NS),
    )


async def _state_before(source: Source, drift: DriftDetected, detected: Record) -> State:
    """The fold up to where the story of this drift begins: right before its binding, or some time before."""
    if drift.epoch and drift.epoch < detected.seq:
        start = drift.epoch - 1
    else:
        begin = instant(drift.since) or detected.received_ns
        start = min(await source.seq_at(begin - int(LOOK_BACK_SECONDS * _NS)), detected.seq - 1)
    if start < source.first_seq:
        return State()
    try:
        return (await state_on(source, position=start)).state
    except BeforeRecord:
        return State()


def _beats(messages: Sequence[Message]) -> Iterator[Beat]:
    for message in messages:
        record = decode(message.seq, message.subject, message.received_ns, message.body)
        if isinstance(record.data, e.Heartbeat):
            yield Beat(heartbeat=record.data, received_ns=record.received_ns, sent=record.time)


class _Trail:
    """Follows the three views of one drift."""

    def __init__(self, drift: DriftDetected, tolerance: Tolerance) -> None:
        self._drift = drift
        self._tolerance = tolerance
        self._agreed: Views | None = None
        self._differed: Views | None = None
        self._events: list[Record] = []
        self._word = "nothing was reported yet"  # the agent's last word, and the event it stands in
        self._word_by = "nothing"
        self._runs: bool | None = None

    # -- what happened --------------------------------------------------------------------------

    def happened(self, state: State, record: Record) -> None:
        """An event, folded already."""
        data, drift = record.data, self._drift
        if not self._concerns(data):
            return
        self._events.append(record)
        if (
            isinstance(data, (e.Started, e.Exited, e.Released))
            and data.epoch == drift.epoch
            and data.node == drift.node
        ):
            self._runs = isinstance(data, e.Started)
            told = "runs" if self._runs else "ended" if isinstance(data, e.Exited) else "seen free"
            self._word = f"{told}, the agent said"
            self._word_by = f"event {record.seq} ({record.kind})"
        if drift.epoch and not isinstance(data, (e.DriftDetected, e.DriftCleared)):
            self._note(self._by_events(state, record.received_ns))

    def saw(self, state: State, beat: Beat) -> None:
        """A heartbeat, at the position of the fold."""
        comparison = compare(state, beat, self._tolerance)
        node = state.nodes.get(beat.heartbeat.node)
        if node is None or node.incarnation != beat.heartbeat.incarnation:
            return
        key = self._drift.drift
        seen = next((one for one in comparison.sightings if one.key == key), None)
        standing = (
            Standing.DIFFER if seen else Standing.PENDING if key in comparison.pending else Standing.AGREE
        )
        desired, bound = self._books(state, beat.received_ns)
        self._note(
            Views(
                position=state.position,
                at_ns=beat.received_ns,
                standing=standing,
                desired=seen.desired if seen else desired,
                bound=seen.bound if seen else bound,
                observed=seen.observed if seen else self._observed(beat),
                observed_by=f"heartbeat {beat.heartbeat.number} of node {beat.heartbeat.node}, {rfc3339(beat.received_ns)}",
            )
        )

    def _note(self, views: Views) -> None:
        if views.standing is Standing.AGREE:
            if self._differed is None or views.at_ns > self._differed.at_ns:
                self._agreed, self._differed = views, None
        elif views.standing is Standing.DIFFER and self._differed is None:
            self._differed = views

    def _concerns(self, data: object) -> bool:
        drift = self._drift
        epoch, demand = getattr(data, "epoch", None), getattr(data, "demand", "")
        if drift.demand and demand == drift.demand:
            return True
        if drift.epoch and epoch == drift.epoch:
            return True
        if isinstance(data, (e.NodeJoined, e.NodeUnreachable, e.NodeRecovered)):
            return data.node == drift.node
        if isinstance(data, e.Bound):
            return any(a.card == drift.card for share in data.shares for a in share.allotments)
        return bool(drift.card) and getattr(data, "card", "") == drift.card

    # -- the views ------------------------------------------------------------------------------

    def _by_events(self, state: State, at_ns: int) -> Views:
        """Without a heartbeat: what the agent said last is what is observed."""
        binding, share = self._binding(state)
        demand = state.demands.get(self._drift.demand)
        stopping = demand is not None and (demand.phase is Phase.RELEASING or demand.phase.terminal)
        right = binding is not None and share is not None and self._drift.node not in binding.released
        agree = self._runs is not None and self._runs == right and not (self._runs and stopping)
        desired, bound = self._books(state, at_ns)
        return Views(
            position=state.position,
            at_ns=at_ns,
            standing=Standing.AGREE if agree else Standing.PENDING,
            desired=desired,
            bound=bound,
            observed=self._word,
            observed_by=self._word_by,
        )

    def _binding(self, state: State) -> tuple[Binding | None, NodeShare | None]:
        binding = state.bindings.get(self._drift.epoch or 0)
        return binding, None if binding is None else binding.share(self._drift.node)

    def _books(self, state: State, at_ns: int) -> tuple[str, str]:
        """Desired and bound, in the words that the reaper uses."""
        drift = self._drift
        demand = state.demands.get(drift.demand)
        desired = say.desired(demand, at_ns) if demand is not None else "nothing: no such demand"
        binding, share = self._binding(state)
        if binding is not None and share is not None:
            return desired, say.bound(binding, share, at_ns)
        card = state.cards.get(drift.card)
        holders = state.holders_of(card) if card is not None else []
        if holders and not drift.epoch:
            return desired, f"bound to {', '.join(say.name_of(state.demands[b.demand]) for b in holders)}"
        return desired, say.why_no_right(demand, drift.epoch, at_ns) if drift.epoch else "bound to nobody"

    def _observed(self, beat: Beat) -> str:
        drift = self._drift
        seen = observe(beat, stale_seconds=self._tolerance.stale_seconds)
        if not seen.components_known:
            return "the engine did not answer: unknown"
        if not drift.epoch:
            parts = say.Parts(holds=tuple(seen.foreign.get(drift.card, ())))
            return parts.text(foreign=True) or "no process of somebody else's"
        labels = ((drift.epoch, drift.demand), (drift.epoch, ""))
        parts = say.Parts(
            running=tuple(c for label in labels for c in seen.running.get(label, ())),
            holds=tuple(h for label in labels for h in seen.holds.get(label, ())),
        )
        return f"runs: {parts.text()}" if parts.runs else "nothing of it runs"

    # -- the end --------------------------------------------------------------------------------

    def proof(self, state: State, detected: Record, cleared: Record | None) -> DriftProof:
        drift = self._drift
        told = Views(
            position=state.position,
            at_ns=detected.received_ns,
            standing=Standing.DIFFER,
            desired=drift.desired,
            bound=drift.bound,
            observed=drift.observed,
            observed_by=f"event {detected.seq} ({detected.kind}), {drift.sightings} sightings since {drift.since or 'then'}",
        )
        agreed = self._agreed
        differed = self._differed or told
        return DriftProof(
            drift=drift,
            detected=detected,
            cleared=cleared,
            agreed=agreed,
            differed=differed,
            told=told,
            between=tuple(r for r in self._events if agreed is None or r.seq > agreed.position),
            sentence=drift.sentence,
        )

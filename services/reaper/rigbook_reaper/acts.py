"""The events a reaper appends, made from what was judged. Pure.

Events are named by what they are about, not by chance: two reapers, or one that tries again, publish the
same ids, and the bus keeps one of them. A drift's episode is its key and the instant it was first seen.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_ledger.state import Phase
from rigbook_schemas import subjects
from rigbook_schemas.events import DriftCleared, DriftDetected, EvictionOrdered, Payload, Released
from rigbook_schemas.values import DriftKind, EvictionReason, StopScope, VerdictClass, Workload
from rigbook_schemas.wire import instant, rfc3339

if TYPE_CHECKING:
    from rigbook_ledger.drift import Sighting
    from rigbook_ledger.state import Binding, Demand, State

__all__ = ["KINDS", "Act", "cleared", "detected", "event_id", "eviction", "holds", "release"]

_REASON: Final = {
    DriftKind.LEFTOVER: EvictionReason.LEFTOVER,
    DriftKind.MISSING: EvictionReason.MISSING,
    DriftKind.SQUATTER: EvictionReason.SQUATTER,
    DriftKind.WRONG_CARD: EvictionReason.WRONG_CARD,
    DriftKind.OVERUSE: EvictionReason.OVERUSE,
    DriftKind.CARD_LOST: EvictionReason.CARD_LOST,
    DriftKind.IDLE_HOLDER: EvictionReason.IDLE_HOLDER,
    DriftKind.SUSPECTED_HANG: EvictionReason.SUSPECTED_HANG,
    DriftKind.GPU_LOST_IN_CONTAINER: EvictionReason.GPU_LOST_IN_CONTAINER,
}
KINDS: Final = frozenset(DriftKind)  # what this reaper tells and clears; it heals those with a reason above
# It went wrong by no fault of its own: it runs again where its restart policy allows.
_NO_FAULT: Final = (
    DriftKind.MISSING,
    DriftKind.CARD_LOST,
    DriftKind.SUSPECTED_HANG,
    DriftKind.GPU_LOST_IN_CONTAINER,
)
BY: Final = "reaper"
_TEXT_MAX: Final = 2000
_SECONDS_MAX: Final = 10 * 366 * 86400.0
_COUNT_MAX: Final = 100_000


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """An event to append."""

    key: str  # of the drift it is about
    subject: str
    data: Payload
    id: str
    node: str
    demand: str = ""
    epoch: int | None = None
    causation: str = ""
    traceparent: str = ""


def event_id(*about: object) -> str:
    """An id made of what the event is about: 32 hexadecimal digits."""
    return hashlib.blake2b("\x00".join(map(str, about)).encode(), digest_size=16).hexdigest()


def holds(state: State, epoch: int | None, node: str) -> bool:
    """Does a live binding of this epoch hold cards of the node?"""
    binding = state.bindings.get(epoch or 0)
    return binding is not None and binding.share(node) is not None and node not in binding.released


def detected(
    state: State, sighting: Sighting, *, since: str, sightings: int, healing: bool, again: bool
) -> Act:
    """`again`: the drift is open already, and this tells what has changed."""
    remedy = sighting.remedy
    if healing:
        remedy = (
            f"healing is on for {sighting.kind}: the reaper gives the order; it clears when it is seen gone"
        )
    data = DriftDetected(
        drift=sighting.key,
        kind=sighting.kind,
        node=sighting.node,
        sentence=sighting.sentence[:_TEXT_MAX],
        card=sighting.card,
        demand=sighting.demand,
        epoch=sighting.epoch,
        desired=sighting.desired,
        bound=sighting.bound,
        observed=sighting.observed,
        evidence=sighting.evidence,
        sightings=min(sightings, _COUNT_MAX),
        since=since,
        healing=healing,
        remedy=remedy[:_TEXT_MAX],
    )
    told = ("again", healing, *sorted(e.what for e in sighting.evidence)) if again else ()
    demand = state.demands.get(sighting.demand)
    return Act(
        key=sighting.key,
        subject=subjects.drift(sighting.node),
        data=data,
        id=event_id("drift.detected", sighting.key, since, *told),
        node=sighting.node,
        demand=sighting.demand,
        epoch=sighting.epoch,
        causation=demand.event_id if demand is not None else "",
        traceparent=demand.traceparent if demand is not None else "",
    )


def eviction(
    state: State,
    sighting: Sighting,
    drift: DriftDetected,
    *,
    received_ns: int,
    orders: int,
    grace_seconds: float,
) -> Act:
    """The stop of everything of the epoch, for every node that still holds a part of it."""
    epoch = sighting.epoch
    assert epoch is not None, f"{sighting.key} is healable and names no epoch"
    binding = state.bindings.get(epoch)
    demand_id = binding.demand if binding is not None else sighting.demand
    try:
        subjects.token(demand_id)
    except subjects.SubjectError:
        demand_id = "unknown"  # the label on what runs is no demand of ours; the epoch is what counts
    demand = state.demands.get(demand_id)
    nodes: tuple[str, ...] = (sighting.node,)
    if binding is not None:
        left = tuple(s.node for s in binding.shares if s.node not in binding.released)
        nodes = left if sighting.node in left else (sighting.node, *left)
    data = EvictionOrdered(
        demand=demand_id,
        epoch=epoch,
        nodes=nodes,
        reason=_REASON[sighting.kind],
        by=BY,
        grace_seconds=grace_seconds,
        deadline=rfc3339(received_ns + int(grace_seconds * 1e9)),
        requeue=_requeue(sighting.kind, binding, demand),
        scope=StopScope.EVERYTHING,
        text=sighting.sentence[:_TEXT_MAX],
    )
    # The order before it tells the attempts apart: on the books for a binding, by count for what has none.
    attempt = orders if binding is None or binding.eviction is None else binding.eviction.seq
    about = sighting.node if binding is None else ""
    return Act(
        key=sighting.key,
        subject=subjects.evict(nodes),
        data=data,
        id=event_id("eviction.ordered", epoch, about, drift.since, attempt),
        node=sighting.node,
        demand=demand_id,
        epoch=epoch,
        causation=event_id("drift.detected", sighting.key, drift.since),
        traceparent=demand.traceparent if demand is not None else "",
    )


def release(state: State, sighting: Sighting, drift: DriftDetected, *, times: int) -> Act | None:
    """The node's share is given back by force. None when it is not held (any more)."""
    binding = state.bindings.get(sighting.epoch or 0)
    if binding is None or not holds(state, sighting.epoch, sighting.node):
        return None
    demand = state.demands[binding.demand]
    return Act(
        key=sighting.key,
        subject=subjects.release(sighting.node),
        data=Released(
            demand=binding.demand,
            epoch=binding.epoch,
            node=sighting.node,
            forced=True,
            by=BY,
            verdict=demand.verdict or VerdictClass.UNKNOWN,
            text=f"{times} heartbeats in a row: {sighting.observed}; its memory is back"[:_TEXT_MAX],
        ),
        id=event_id("released", "forced", binding.epoch, sighting.node),
        node=sighting.node,
        demand=binding.demand,
        epoch=binding.epoch,
        causation=event_id("drift.detected", sighting.key, drift.since),
        traceparent=demand.traceparent,
    )


def cleared(state: State, drift: DriftDetected, *, received_ns: int) -> Act:
    """`received_ns` of the heartbeat that settled it."""
    since_ns = instant(drift.since)
    seconds = max(0.0, (received_ns - since_ns) / 1e9) if since_ns is not None else 0.0
    demand = state.demands.get(drift.demand)
    return Act(
        key=drift.drift,
        subject=subjects.drift(drift.node),
        data=DriftCleared(
            drift=drift.drift,
            kind=drift.kind,
            node=drift.node,
            how=_how(state, drift)[:_TEXT_MAX],
            seconds=min(seconds, _SECONDS_MAX),
        ),
        id=event_id("drift.cleared", drift.drift, drift.since),
        node=drift.node,
        demand=drift.demand,
        epoch=drift.epoch,
        causation=event_id("drift.detected", drift.drift, drift.since),
        traceparent=demand.traceparent if demand is not None else "",
    )


def _how(state: State, drift: DriftDetected) -> str:
    held = holds(state, drift.epoch, drift.node)
    books = "its cards are still bound" if held else "its cards are released"
    match drift.kind:
        case DriftKind.MISSING:
            return f"epoch {drift.epoch} is seen to run" if held else "released on the books"
        case DriftKind.OVERUSE:
            return f"its memory on {drift.card} is back within the allotment" if held else books
        case DriftKind.WRONG_CARD:
            return f"nothing of epoch {drift.epoch} is on {drift.card} any more"
        case DriftKind.SQUATTER if drift.epoch is None:
            return f"no foreign process holds memory of {drift.card} while it is bound"
        case DriftKind.LEFTOVER:
            return (
                f"nothing of epoch {drift.epoch} runs on node {drift.node}, and its memory is back; {books}"
            )
        case DriftKind.CARD_LOST:
            return f"{drift.card} answers again, or is nobody's any more; {books}"
        case DriftKind.MODE_MISMATCH:
            return f"{drift.card} is shared as its bindings say, or has none any more"
        case DriftKind.DOUBLE_HOLDER:
            return f"one holder is left of what was held twice on node {drift.node}"
        case DriftKind.VRAM_NOT_RECOVERED:
            return f"the memory of {drift.card} is back, or explained"
        case DriftKind.IDLE_HOLDER:
            return f"its cards are used again; {books}" if held else books
        case DriftKind.SUSPECTED_HANG:
            return f"it is seen to work, or to rest as it may; {books}" if held else books
        case DriftKind.GPU_LOST_IN_CONTAINER:
            return f"its cards can be reached from inside again; {books}" if held else books
        case _:
            return f"nothing of epoch {drift.epoch} runs without a right on node {drift.node} any more"


def _requeue(kind: DriftKind, binding: Binding | None, demand: Demand | None) -> bool:
    """A drained or preempted demand keeps its place; what went missing by no fault of its own runs again."""
    if binding is None or demand is None or not demand.wanted:
        return False
    if binding.eviction is not None:
        return binding.eviction.requeue
    runs_again = demand.spec.workload is Workload.SERVICE or demand.spec.restart.policy != "never"
    return kind in _NO_FAULT and demand.phase is not Phase.RELEASING and runs_again

"""`evolve(state, record) -> state`: the one fold of the log.

Total and deterministic: it reads nothing but its arguments, never raises for what stands on the bus,
and leaves a finding for what should not be there. It takes ownership of `state` (see `state.State`).

What the world can do is a finding. What only a bug of ours could do is asserted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rigbook_schemas import events as e
from rigbook_schemas.wire import TYPE_PREFIX, Malformed, Record, Unknown, instant, rfc3339

from rigbook_ledger import fleet, ownership
from rigbook_ledger.state import CHAIN_RUN, FINDINGS_MAX, State
from rigbook_ledger.steps import find

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["SKEW_SECONDS_MAX", "evolve", "fold"]

# An event whose own time is further than this from the server's receive time leaves a finding.
SKEW_SECONDS_MAX: Final = 600
# A kind we do not know on one of these may change who owns what: a newer author is about.
_DECIDING: Final = ("rig.own.", "rig.evict.", "rig.release.")
_HOUR_NS: Final = 3_600_000_000_000


def evolve(state: State, record: Record) -> State:
    """Apply one record. Records at or below the state's position are ignored: redelivery is a no-op."""
    return fold(state, (record,))


def fold(state: State, records: Iterable[Record]) -> State:
    """Apply records in order. The one loop: what stands in it, stands in the way of every event of every replay."""
    position = state.position
    unchained = state.unchained
    begins_ns, ends_ns, hour = _hour
    last: Record | None = None
    for record in records:
        seq = record.seq
        if seq <= position:
            continue
        data = record.data
        apply = _APPLY[type(data)]
        if apply is not None:
            if not begins_ns <= record.received_ns < ends_ns:
                begins_ns, ends_ns, hour = _turn_to_hour(record.received_ns // _HOUR_NS)
            time = record.time
            if time[:13] != hour or time[-1] != "Z":
                _check_time(state, record)
            apply(state, record, data)
        else:
            _find_no_event(state, record, data)
        if seq != position + 1:
            unchained.append(seq)
        unchained.append(record.id)
        if len(unchained) >= CHAIN_RUN:
            state.link()
        state.position = position = seq
        if record.subject.startswith("rig.own."):
            state.own_position = seq
        last = record
    if last is not None:
        state.event_id = last.id
        state.received_ns = last.received_ns
    return state


def _find_no_event(state: State, record: Record, data: object) -> None:
    """What stands on the log and is no event of the ledger, as far as this version can tell."""
    if isinstance(data, Unknown):
        state.unknown_count += 1
        if (
            record.subject.startswith(_DECIDING)
            and data.type.startswith(TYPE_PREFIX)
            and len(state.unknown_open) < FINDINGS_MAX
        ):
            state.unknown_open[record.seq] = data.type[:200]
        find(
            state,
            record,
            "unknown_kind",
            f"{data.type[:200]!r} is not a kind this version knows; it was skipped",
        )
    elif isinstance(data, Malformed):
        find(state, record, data.code, data.text)
    else:
        find(state, record, "wrong_stream", f"{record.kind} does not belong on the ledger stream")


def _check_time(state: State, record: Record) -> None:
    """Called for a time that is not plainly of the hour in which the server received the event."""
    told = instant(record.time)
    if told is None:
        find(
            state,
            record,
            "invalid_time",
            f"{record.kind}: time {record.time[:64]!r} is not RFC 3339 with a zone",
        )
        return
    skew = (told - record.received_ns) / 1e9
    if abs(skew) > SKEW_SECONDS_MAX:
        side = "ahead of" if skew > 0 else "behind"
        find(
            state,
            record,
            "clock_skew",
            f"{record.kind} from {record.source}: its clock is {abs(skew):.0f} s {side} the server's",
        )


# The hour of the latest event: when it begins and ends (Unix nanoseconds), and how a time within it begins. A
# cache and nothing else: most times are judged by a comparison of texts.
_hour: list[Any] = [0, 0, ""]


def _turn_to_hour(hour: int) -> list[Any]:
    _hour[:] = [hour * _HOUR_NS, (hour + 1) * _HOUR_NS, rfc3339(hour * _HOUR_NS)[:13]]
    return _hour


class _Apply(dict[type, "Callable[..., None] | None"]):
    """By type of the payload; a subclass is folded as what it is a kind of, anything else as nothing."""

    def __missing__(self, kind: type) -> Callable[..., None] | None:
        found = next((self[base] for base in kind.__mro__[1:] if base in self), None)
        self[kind] = found
        return found


_APPLY: Final = _Apply(
    {
        e.DemandRaised: ownership.raised,
        e.DemandWithdrawn: ownership.withdrawn,
        e.Bound: ownership.bound,
        e.Adopted: ownership.adopted,
        e.Deferred: ownership.deferred,
        e.Refused: ownership.refused,
        e.EvictionOrdered: ownership.eviction_ordered,
        e.Started: ownership.started,
        e.Ready: ownership.ready,
        e.Unready: ownership.unready,
        e.Exited: ownership.exited,
        e.EvictionAnswered: ownership.eviction_answered,
        e.Released: ownership.released,
        e.NodeJoined: fleet.joined,
        e.NodeChanged: fleet.joined,
        e.NodeUnreachable: fleet.unreachable,
        e.NodeRecovered: fleet.recovered,
        e.DriftDetected: fleet.drift_detected,
        e.DriftCleared: fleet.drift_cleared,
        e.QuotaSet: fleet.quota_set,
        e.ModeSet: fleet.mode_set,
        e.NodeCordoned: fleet.cordoned,
        e.NodeUncordoned: fleet.uncordoned,
        e.GpuQuarantined: fleet.quarantined,
        e.GpuRestored: fleet.restored,
        e.PriorityCapped: fleet.capped,
        e.HealingSet: fleet.healing_set,
        e.PlacementSet: fleet.placement_set,
        e.PreemptionSet: fleet.preemption_set,
        e.UnknownAccepted: fleet.unknown_accepted,
        e.SequenceSkipped: fleet.sequence_skipped,
        e.LogRecovered: fleet.log_recovered,
    }
)

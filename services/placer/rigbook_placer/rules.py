"""The rules that hold for a demand whatever the cards say: quota, priority cap, back-off, time windows.

Each answers with a reason, or None. All of them are checked before any card is looked at: a demand that a rule
keeps waiting keeps nobody else waiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.values import Horizon, Mode, Reason, ReasonCode
from rigbook_schemas.wire import rfc3339

from rigbook_placer.feasible import need_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rigbook_ledger.state import Card, Demand, State
    from rigbook_schemas.events import DemandRaised
    from rigbook_schemas.values import Window

__all__ = [
    "HELD_AFTER",
    "Totals",
    "backing_off",
    "closes_ns",
    "is_open",
    "opens_ns",
    "over_cap",
    "over_quota",
    "retry_ns",
    "rule_says_no",
    "time_says_no",
    "totals_of",
]

# Back-off after starts that failed: 5 s, doubling, at most 10 min; after this many in a row no more tries
# (about half an hour): somebody has to look.
BACKOFF_SECONDS: Final = 5.0
BACKOFF_SECONDS_MAX: Final = 600.0
HELD_AFTER: Final = 10

_SECOND_NS: Final = 10**9
_MINUTE_NS: Final = 60 * _SECOND_NS
_DAY_MINUTES: Final = 24 * 60


class Totals(msgspec.Struct, frozen=True):
    """Sums over the fleet that the cap needs."""

    fleet_bytes: int  # memory of all cards that are there
    high_bytes: int  # bound by demands at or above the priority that is capped


def totals_of(state: State) -> Totals:
    """By a pass over all cards and bindings; who decides often keeps them up to date instead."""
    cap = state.policy.cap_priority
    return Totals(
        sum(card.memory_bytes for card in state.cards.values() if card.present),
        sum(b.memory_bytes for b in state.bindings.values() if state.demands[b.demand].spec.priority >= cap),
    )


def rule_says_no(
    state: State, spec: DemandRaised, *, now_ns: int | None, totals: Totals | None = None
) -> Reason | None:
    """The first rule that keeps the demand waiting. Without `now_ns` the rules about time are left out."""
    said = time_says_no(state, spec, now_ns) if now_ns is not None else None
    return said or over_quota(state, spec) or over_cap(state, spec, totals)


def time_says_no(state: State, spec: DemandRaised, now_ns: int) -> Reason | None:
    """It is not to be tried now: its starts failed, or it runs at other hours."""
    demand = state.demands.get(spec.demand)
    if demand is not None and demand.failures:
        backing = backing_off(demand, now_ns)
        if backing is not None:
            return backing
    return None if not spec.windows or is_open(spec.windows, now_ns) else _outside(spec.windows, now_ns)


# -- quota and cap ------------------------------------------------------------------------------


def _asked(spec: DemandRaised, chosen: Iterable[Card] | None) -> int:
    """What a binding would be charged with. Before the cards are chosen, the least that it can be."""
    request = spec.resources
    if chosen is not None and request.mode is Mode.EXCLUSIVE:
        return sum(card.memory_bytes for card in chosen)
    return need_bytes(request) * request.count * request.nodes


def over_quota(
    state: State, spec: DemandRaised, chosen: Sequence[Card] | None = None, *, freed_bytes: int = 0
) -> Reason | None:
    """The project's quota says no. `freed_bytes`: what it would have given back by then."""
    project = state.projects.get(spec.project)
    if project is None or project.quota_bytes is None:
        return None
    asked = _asked(spec, chosen)
    used = project.used_bytes - freed_bytes
    if used + asked <= project.quota_bytes:
        return None
    return Reason(
        code=ReasonCode.PROJECT_QUOTA,
        horizon=Horizon.NEVER_BIG_ENOUGH if asked > project.quota_bytes else Horizon.LATER,
        found=spec.project,
        bound_bytes=project.used_bytes,
        free_bytes=max(0, project.quota_bytes - used),
        total_bytes=project.quota_bytes,
        asked_bytes=asked,
        short_bytes=used + asked - project.quota_bytes,
    )


def over_cap(
    state: State, spec: DemandRaised, totals: Totals | None = None, chosen: Sequence[Card] | None = None
) -> Reason | None:
    """High priority holds what it may. One demand of high priority may always be bound, however small the fleet."""
    policy = state.policy
    if policy.cap_share is None or spec.priority < policy.cap_priority:
        return None
    totals = totals or totals_of(state)
    if not totals.high_bytes:
        return None
    asked = _asked(spec, chosen)
    allowed = round(totals.fleet_bytes * policy.cap_share)
    if totals.high_bytes + asked <= allowed:
        return None
    return Reason(
        code=ReasonCode.PRIORITY_CAP,
        found=f"priority {policy.cap_priority} and above",
        bound_bytes=totals.high_bytes,
        free_bytes=max(0, allowed - totals.high_bytes),
        total_bytes=allowed,
        asked_bytes=asked,
        short_bytes=totals.high_bytes + asked - allowed,
    )


# -- back-off -----------------------------------------------------------------------------------


def retry_ns(demand: Demand) -> int | None:
    """When a demand whose starts failed may be tried again; None = not any more."""
    if demand.failures >= HELD_AFTER:
        return None
    seconds = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS * 2 ** (demand.failures - 1))
    return demand.failed_ns + int(seconds * _SECOND_NS)


def backing_off(demand: Demand, now_ns: int) -> Reason | None:
    """Its starts failed, and the next try is later, or never."""
    due_ns = retry_ns(demand) if demand.failures else 0
    if due_ns is not None and now_ns >= due_ns:
        return None
    return Reason(
        code=ReasonCode.BIND_BACKOFF,
        found=demand.failure,
        asked=f"held after {demand.failures} failures"
        if due_ns is None
        else f"after {demand.failures} failures",
        seconds=None if due_ns is None else (due_ns - now_ns) / _SECOND_NS,
        at="" if due_ns is None else rfc3339(due_ns),
    )


# -- time windows -------------------------------------------------------------------------------


def _spans(window: Window, now_ns: int, days: range) -> Iterable[tuple[int, int]]:
    """(opens, closes) of the window on the given days from today, in nanoseconds since 1970."""
    offset_ns = window.utc_offset_minutes * _MINUTE_NS
    today = (now_ns + offset_ns) // (_DAY_MINUTES * _MINUTE_NS)
    start, end = _minutes(window.start), _minutes(window.end)
    if end <= start:
        end += _DAY_MINUTES
    for day in (today + d for d in days):
        if not window.days or (day + 3) % 7 + 1 in window.days:  # 1970-01-01 was a Thursday
            midnight_ns = day * _DAY_MINUTES * _MINUTE_NS - offset_ns
            yield midnight_ns + start * _MINUTE_NS, midnight_ns + end * _MINUTE_NS


def _minutes(text: str) -> int:
    return int(text[:2]) * 60 + int(text[3:])


def closes_ns(windows: Sequence[Window], now_ns: int) -> int | None:
    """When the latest window that is open now closes; None = none is open."""
    ends = [
        closes
        for window in windows
        for opens, closes in _spans(window, now_ns, range(-1, 1))
        if opens <= now_ns < closes
    ]
    return max(ends, default=None)


def is_open(windows: Sequence[Window], now_ns: int) -> bool:
    return closes_ns(windows, now_ns) is not None


def opens_ns(windows: Sequence[Window], now_ns: int) -> int | None:
    """When the next window opens."""
    starts = [opens for window in windows for opens, _ in _spans(window, now_ns, range(9)) if opens > now_ns]
    return min(starts, default=None)


def _outside(windows: Sequence[Window], now_ns: int) -> Reason:
    told = [
        f"{w.start} to {w.end}" + (f" on days {', '.join(map(str, w.days))}" if w.days else "")
        for w in windows[:4]
    ]
    due_ns = opens_ns(windows, now_ns)
    return Reason(
        code=ReasonCode.OUTSIDE_WINDOW,
        asked=" or ".join(told),
        seconds=None if due_ns is None else (due_ns - now_ns) / _SECOND_NS,
        at="" if due_ns is None else rfc3339(due_ns),
    )

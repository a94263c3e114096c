"""`judge(state, watches, seen, now, rules)`: which sightings are drifts, which are over, what to order. Pure.

One sighting is nothing: samples race with orders. A sighting becomes a drift when it was seen in at least
`sightings_min` heartbeats and has lasted for the grace of its kind. It is over when `gone_min` heartbeats
that could have shown it did not. What could not be seen (the engine or a card did not answer) counts for
neither.

The reaper is the dangerous one, so:
- it acts only on what is an open drift *on the books*: first the recorded reason, then the order;
- it is in dry run until the operator switched the kind on (`healing.set`);
- it never touches what is not ours, and never orders anything for what is bound, wanted and in order;
- a `missing` share is released by force only after the agent knows that it must not start it (`fenced`),
  its memory is back, and `sightings_min` heartbeats since then said so;
- with a `hold` (not caught up, safe mode, an unknown kind on the log, mass loss) it forgets what it has
  seen and decides nothing; the same goes for a node that is unreachable on the books.

Events are named by what they are about, not by chance: two reapers, or one that tries again, publish the
same ids, and the bus keeps one of them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace
from rigbook_ledger.state import Phase
from rigbook_schemas import subjects
from rigbook_schemas.events import DriftCleared, DriftDetected, EvictionOrdered, Payload, Released
from rigbook_schemas.values import DriftKind, EvictionReason, StopScope, VerdictClass, Workload
from rigbook_schemas.wire import instant, rfc3339

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rigbook_ledger.drift import Comparison, Sighting
    from rigbook_ledger.state import Binding, Demand, State

__all__ = ["GRACE_SECONDS", "Act", "Judgement", "Rules", "Watch", "appended", "event_id", "judge"]

# How long a difference must last. A leftover blocks others, so it is told soon; what an owner may mend
# himself, or a slow report may explain, has longer.
GRACE_SECONDS: Final = {
    DriftKind.LEFTOVER: 10.0,
    DriftKind.MISSING: 30.0,
    DriftKind.SQUATTER: 30.0,
    DriftKind.WRONG_CARD: 30.0,
    DriftKind.OVERUSE: 60.0,
}
_REASON: Final = {
    DriftKind.LEFTOVER: EvictionReason.LEFTOVER,
    DriftKind.MISSING: EvictionReason.MISSING,
    DriftKind.SQUATTER: EvictionReason.SQUATTER,
    DriftKind.WRONG_CARD: EvictionReason.WRONG_CARD,
    DriftKind.OVERUSE: EvictionReason.OVERUSE,
}
_TEXT_MAX: Final = 2000
_BY: Final = "reaper"


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """When a sighting is a drift, and how healing goes about it. Seconds."""

    sightings_min: int = 2  # never below 2: one sighting is nothing
    gone_min: int = 2
    graces: dict[DriftKind, float] = GRACE_SECONDS
    eviction_grace_seconds: float = 10.0  # in the orders of the reaper
    reorder_seconds: float = 30.0  # an order that did not help is given again after this, then doubled
    reorder_seconds_max: float = 600.0
    republish_seconds: float = 60.0  # an open drift that shows other processes is told again, not more often

    def __post_init__(self) -> None:
        if self.sightings_min < 2 or self.gone_min < 1:
            raise ValueError("sightings_min must be at least 2 and gone_min at least 1")


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """What the reaper remembers of one key between heartbeats. Lost at its restart, and then seen again."""

    node: str
    first_seen: float  # monotonic seconds
    since_ns: int  # the server's clock: receipt of the first heartbeat that showed it
    incarnation: str
    number: int  # of the heartbeat counted last; one heartbeat counts once
    sightings: int = 0
    free: int = 0  # of `missing`: how many in a row allow a release by force
    gone: int = 0
    cards: tuple[str, ...] = ()
    orders: int = 0
    ordered_at: float = 0.0  # monotonic; counts when orders > 0
    published_at: float = 0.0


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


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What to remember, and what to append, in this order."""

    watches: dict[str, Watch]
    detected: tuple[Act, ...] = ()
    evictions: tuple[Act, ...] = ()
    releases: tuple[Act, ...] = ()
    cleared: tuple[Act, ...] = ()

    @property
    def acts(self) -> tuple[Act, ...]:
        return (*self.detected, *self.evictions, *self.releases, *self.cleared)


def judge(
    state: State,
    watches: Mapping[str, Watch],
    seen: Iterable[Comparison],
    now: float,
    rules: Rules,
    *,
    hold: str = "",
) -> Judgement:
    """`seen` has at most one heartbeat per node; `now` is monotonic. Judging it twice counts it once."""
    if hold:
        return Judgement(watches={})
    court = _Court(state, dict(watches), now, rules)
    for comparison in seen:
        court.hear(comparison)
    return Judgement(
        watches=court.watches,
        detected=tuple(court.detected),
        evictions=tuple(court.evictions.values()),
        releases=tuple(court.releases),
        cleared=tuple(court.cleared),
    )


def appended(watches: dict[str, Watch], act: Act, now: float) -> None:
    """Remember that `act` is on the log: orders back off, and a drift is not told again at once."""
    watch = watches.get(act.key)
    if watch is None:
        return
    if isinstance(act.data, EvictionOrdered):
        watches[act.key] = replace(watch, orders=watch.orders + 1, ordered_at=now, free=0)
    elif isinstance(act.data, DriftDetected):
        watches[act.key] = replace(watch, published_at=now)


def event_id(*about: object) -> str:
    """An id made of what the event is about: 32 hexadecimal digits."""
    return hashlib.blake2b("\x00".join(map(str, about)).encode(), digest_size=16).hexdigest()


class _Court:
    """One judgement under way."""

    def __init__(self, state: State, watches: dict[str, Watch], now: float, rules: Rules) -> None:
        self.state = state
        self.watches = watches
        self.now = now
        self.rules = rules
        self.detected: list[Act] = []
        self.evictions: dict[tuple[str, int], Act] = {}  # by node (or "" for a whole binding) and epoch
        self.releases: list[Act] = []
        self.cleared: list[Act] = []
        self.open: dict[str, dict[str, DriftDetected]] = defaultdict(dict)
        for drift in state.drifts.values():
            if drift.kind in _REASON:
                self.open[drift.node][drift.drift] = drift

    def hear(self, shown: Comparison) -> None:
        node = self.state.nodes.get(shown.node)
        mine = [key for key, watch in self.watches.items() if watch.node == shown.node]
        if node is None or node.unreachable_ns or node.incarnation != shown.incarnation:
            for key in mine:
                del self.watches[key]
            return
        here = self.open[shown.node]
        sighted = {sighting.key for sighting in shown.sightings}
        for sighting in shown.sightings:
            watch = self._count(shown, sighting, here.get(sighting.key))
            if watch.sightings >= self.rules.sightings_min and self._lasted(watch, sighting):
                self._drift(shown, sighting, watch, here.get(sighting.key))
        for key in dict.fromkeys((*mine, *here)):
            if key in sighted:
                continue
            if key in shown.pending:
                self._wait(shown, key, here.get(key))
            else:
                self._gone(shown, key, here.get(key))

    # -- remembering ----------------------------------------------------------------------------

    def _count(self, shown: Comparison, sighting: Sighting, drift: DriftDetected | None) -> Watch:
        watch = self.watches.get(sighting.key) or self._new(shown, drift)
        if watch.sightings == 0 or self._is_new(watch, shown):
            allowed = sighting.fenced and sighting.memory_back
            watch = replace(
                watch,
                incarnation=shown.incarnation,
                number=shown.number,
                sightings=watch.sightings + 1,
                free=watch.free + 1 if allowed else 0,
                gone=0,
                cards=sighting.cards,
            )
            self.watches[sighting.key] = watch
        return watch

    def _new(self, shown: Comparison, drift: DriftDetected | None) -> Watch:
        """A drift that is open already was judged by a reaper before us: its order, if any, has just been given."""
        since_ns = instant(drift.since) if drift is not None else None
        ordered = drift is not None and drift.healing and self._was_ordered(drift)
        return Watch(
            node=shown.node,
            first_seen=self.now,
            since_ns=since_ns or shown.received_ns,
            incarnation=shown.incarnation,
            number=shown.number,
            cards=(drift.card,) if drift is not None and drift.card else (),
            orders=1 if ordered else 0,
            ordered_at=self.now,
            published_at=self.now,
        )

    def _was_ordered(self, drift: DriftDetected) -> bool:
        """The books tell for a live binding; for what has none, the drift's own word must do."""
        binding = self.state.bindings.get(drift.epoch or 0)
        return binding is None or (binding.eviction is not None and binding.eviction.by == _BY)

    def _is_new(self, watch: Watch, shown: Comparison) -> bool:
        return watch.incarnation != shown.incarnation or shown.number > watch.number

    def _lasted(self, watch: Watch, sighting: Sighting) -> bool:
        grace = max(self.rules.graces.get(sighting.kind, 60.0), sighting.patience_seconds)
        return self.now - watch.first_seen >= grace

    def _wait(self, shown: Comparison, key: str, drift: DriftDetected | None) -> None:
        """It is there, and has time left: not gone, and nothing to hold against it."""
        if drift is None:
            self.watches.pop(key, None)
        elif key in self.watches:
            self.watches[key] = replace(
                self.watches[key], incarnation=shown.incarnation, number=shown.number, gone=0, free=0
            )

    def _gone(self, shown: Comparison, key: str, drift: DriftDetected | None) -> None:
        watch = self.watches.get(key)
        if not self._could_show(shown, watch, drift):
            return
        if drift is None:
            self.watches.pop(key, None)
            return
        if watch is None:
            watch = replace(self._new(shown, drift), gone=1)
        elif self._is_new(watch, shown) or watch.gone == 0:
            watch = replace(watch, incarnation=shown.incarnation, number=shown.number, gone=watch.gone + 1)
        self.watches[key] = watch
        if watch.gone >= self.rules.gone_min:
            self._clear(shown, drift)

    def _could_show(self, shown: Comparison, watch: Watch | None, drift: DriftDetected | None) -> bool:
        if drift is not None and drift.kind is DriftKind.MISSING and not self._holds(drift.epoch, shown.node):
            return True  # released on the books: whatever runs, it is not missing
        cards = (
            watch.cards if watch is not None else (drift.card,) if drift is not None and drift.card else ()
        )
        return shown.sees(cards)

    def _holds(self, epoch: int | None, node: str) -> bool:
        binding = self.state.bindings.get(epoch or 0)
        return binding is not None and binding.share(node) is not None and node not in binding.released

    # -- deciding -------------------------------------------------------------------------------

    def _drift(
        self, shown: Comparison, sighting: Sighting, watch: Watch, drift: DriftDetected | None
    ) -> None:
        heal = sighting.healable and sighting.kind in self.state.policy.healing
        if drift is None:
            self._tell(sighting, watch, healing=heal)
            return
        changed = {e.what for e in drift.evidence} != {e.what for e in sighting.evidence}
        if (heal and not drift.healing) or (
            changed and self.now - watch.published_at >= self.rules.republish_seconds
        ):
            self._tell(sighting, watch, healing=heal or drift.healing)
        if heal:
            self._heal(shown, sighting, watch)

    def _tell(self, sighting: Sighting, watch: Watch, *, healing: bool) -> None:
        since = rfc3339(watch.since_ns)
        remedy = sighting.remedy
        if healing:
            remedy = (
                f"healing is on for {sighting.kind}: the reaper orders it; it clears when it was seen gone"
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
            sightings=min(watch.sightings, 100_000),
            since=since,
            healing=healing,
            remedy=remedy[:_TEXT_MAX],
        )
        whats = sorted(e.what for e in sighting.evidence)
        demand = self.state.demands.get(sighting.demand)
        again = () if sighting.key not in self.state.drifts else ("again", healing, *whats)
        self.detected.append(
            Act(
                key=sighting.key,
                subject=subjects.drift(sighting.node),
                data=data,
                id=event_id("drift.detected", sighting.key, since, *again),
                node=sighting.node,
                demand=sighting.demand,
                epoch=sighting.epoch,
                causation=demand.event_id if demand is not None else "",
                traceparent=demand.traceparent if demand is not None else "",
            )
        )

    def _heal(self, shown: Comparison, sighting: Sighting, watch: Watch) -> None:
        epoch = sighting.epoch
        assert epoch is not None, f"{sighting.key} is healable and names no epoch"
        binding = self.state.bindings.get(epoch)
        if binding is not None and not self._may_end(sighting, binding):
            return
        if sighting.kind is DriftKind.MISSING:
            if sighting.fenced:
                if watch.free >= self.rules.sightings_min:
                    self._release(sighting, watch)
                return
        elif (
            sighting.kind in (DriftKind.OVERUSE, DriftKind.WRONG_CARD)
            and binding is not None
            and binding.eviction
        ):
            return  # its end is ordered already; if that does not help, it is a leftover
        if watch.orders and self.now - watch.ordered_at < self._back_off(watch.orders):
            return
        self._order(shown, sighting, watch, binding)

    def _may_end(self, sighting: Sighting, binding: Binding) -> bool:
        """Asserted here once more, whatever `compare` says: the alive and desired is only ended by its own fault."""
        demand = self.state.demands[binding.demand]
        if sighting.kind in (DriftKind.LEFTOVER, DriftKind.SQUATTER):
            return demand.phase is Phase.RELEASING
        return binding.demand == sighting.demand

    def _back_off(self, orders: int) -> float:
        return min(self.rules.reorder_seconds * 2.0 ** min(orders - 1, 16), self.rules.reorder_seconds_max)

    def _order(self, shown: Comparison, sighting: Sighting, watch: Watch, binding: Binding | None) -> None:
        demand_id = binding.demand if binding is not None else sighting.demand
        try:
            subjects.token(demand_id)
        except subjects.SubjectError:
            demand_id = "unknown"  # the label on what runs is no demand of ours; the epoch is what counts
        nodes = (sighting.node,)
        if binding is not None:
            left = tuple(s.node for s in binding.shares if s.node not in binding.released)
            nodes = left if sighting.node in left else (sighting.node, *left)
        demand = self.state.demands.get(demand_id)
        grace = self.rules.eviction_grace_seconds
        assert sighting.epoch is not None
        data = EvictionOrdered(
            demand=demand_id,
            epoch=sighting.epoch,
            nodes=nodes,
            reason=_REASON[sighting.kind],
            by=_BY,
            grace_seconds=grace,
            deadline=rfc3339(shown.received_ns + int(grace * 1e9)),
            requeue=_requeue(sighting.kind, binding, demand),
            scope=StopScope.EVERYTHING,
            text=sighting.sentence[:_TEXT_MAX],
        )
        since = rfc3339(watch.since_ns)
        attempt = watch.orders if binding is None or binding.eviction is None else binding.eviction.seq
        about = "" if binding is not None else sighting.node
        self.evictions.setdefault(
            (about, sighting.epoch),
            Act(
                key=sighting.key,
                subject=subjects.evict(nodes),
                data=data,
                id=event_id("eviction.ordered", sighting.epoch, about, since, attempt),
                node=sighting.node,
                demand=demand_id,
                epoch=sighting.epoch,
                causation=event_id("drift.detected", sighting.key, since),
                traceparent=demand.traceparent if demand is not None else "",
            ),
        )

    def _release(self, sighting: Sighting, watch: Watch) -> None:
        assert sighting.epoch is not None
        binding = self.state.bindings.get(sighting.epoch)
        if binding is None or not self._holds(sighting.epoch, sighting.node):
            return
        demand = self.state.demands[binding.demand]
        self.releases.append(
            Act(
                key=sighting.key,
                subject=subjects.release(sighting.node),
                data=Released(
                    demand=binding.demand,
                    epoch=binding.epoch,
                    node=sighting.node,
                    forced=True,
                    by=_BY,
                    verdict=demand.verdict or VerdictClass.UNKNOWN,
                    text=f"{watch.free} heartbeats in a row: {sighting.observed}; its memory is back"[
                        :_TEXT_MAX
                    ],
                ),
                id=event_id("released", "forced", binding.epoch, sighting.node),
                node=sighting.node,
                demand=binding.demand,
                epoch=binding.epoch,
                causation=event_id("drift.detected", sighting.key, rfc3339(watch.since_ns)),
                traceparent=demand.traceparent,
            )
        )

    def _clear(self, shown: Comparison, drift: DriftDetected) -> None:
        since_ns = instant(drift.since)
        seconds = max(0.0, (shown.received_ns - since_ns) / 1e9) if since_ns is not None else 0.0
        demand = self.state.demands.get(drift.demand)
        self.cleared.append(
            Act(
                key=drift.drift,
                subject=subjects.drift(drift.node),
                data=DriftCleared(
                    drift=drift.drift,
                    kind=drift.kind,
                    node=drift.node,
                    how=self._how(drift)[:_TEXT_MAX],
                    seconds=min(seconds, 10 * 366 * 86400.0),
                ),
                id=event_id("drift.cleared", drift.drift, drift.since),
                node=drift.node,
                demand=drift.demand,
                epoch=drift.epoch,
                causation=event_id("drift.detected", drift.drift, drift.since),
                traceparent=demand.traceparent if demand is not None else "",
            )
        )

    def _how(self, drift: DriftDetected) -> str:
        held = self._holds(drift.epoch, drift.node)
        books = "it is released" if not held else "its binding is live"
        match drift.kind:
            case DriftKind.MISSING:
                return "released on the books" if not held else f"epoch {drift.epoch} is seen to run again"
            case DriftKind.OVERUSE:
                return f"its memory on {drift.card} is back within the allotment" if held else books
            case DriftKind.WRONG_CARD:
                return f"nothing of epoch {drift.epoch} is on {drift.card} any more"
            case DriftKind.LEFTOVER if held and self._wanted(drift.epoch):
                return "it is wanted again, and may run"
            case DriftKind.SQUATTER if drift.epoch is None:
                return f"no foreign process holds memory of {drift.card} while it is bound"
            case _:
                return f"nothing of epoch {drift.epoch} runs on node {drift.node}, and its memory is back; {books}"

    def _wanted(self, epoch: int | None) -> bool:
        binding = self.state.bindings.get(epoch or 0)
        return binding is not None and self.state.demands[binding.demand].phase is not Phase.RELEASING


def _requeue(kind: DriftKind, binding: Binding | None, demand: Demand | None) -> bool:
    """A drained or preempted demand keeps its place; what went missing by no fault of its own runs again."""
    if binding is None or demand is None or not demand.wanted:
        return False
    if binding.eviction is not None:
        return binding.eviction.requeue
    runs_again = demand.spec.workload is Workload.SERVICE or demand.spec.restart.policy != "never"
    return kind is DriftKind.MISSING and runs_again

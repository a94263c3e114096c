"""`judge(state, watches, seen, now, rules)`: which sightings are drifts, which are over, what to order. Pure.

One sighting is nothing: samples race with orders. A sighting becomes a drift when it was seen in at least
`sightings_min` heartbeats and has lasted for the grace of its kind. It is over when `gone_min` heartbeats
that could have shown it did not. What could not be seen (the engine or a card did not answer) counts for
neither.

The reaper is the dangerous one, so:
- it acts only on what is an open drift *on the books*: first the recorded reason, then the order;
- it is in dry run until the operator switched the kind on (`healing.set`), or the demand itself agreed;
- where a notice is due, nothing is done before the drift was on the books for that long;
- it never touches what is not ours, and never orders anything for what is bound, wanted and in order;
- a `missing` share is released by force only after the agent knows that it must not start it (`fenced`),
  its memory is back, and `sightings_min` heartbeats since then said so;
- with a `hold` (not caught up, safe mode, an unknown kind on the log, mass loss) it forgets what it has
  seen and decides nothing; the same goes for a node that is unreachable on the books.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace
from rigbook_ledger.state import Phase
from rigbook_schemas.events import DriftCleared, DriftDetected, EvictionOrdered
from rigbook_schemas.values import DriftKind
from rigbook_schemas.wire import instant, rfc3339

from rigbook_reaper import acts
from rigbook_reaper.acts import Act

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rigbook_ledger.drift import Comparison, Sighting
    from rigbook_ledger.state import Binding, State

__all__ = ["GRACE_SECONDS", "Judgement", "Rules", "Watch", "appended", "judge"]

# How long a difference must last. A leftover blocks others, so it is told soon; what an owner may mend
# himself, or a slow report may explain, has longer.
GRACE_SECONDS: Final = {
    DriftKind.LEFTOVER: 10.0,
    DriftKind.MISSING: 30.0,
    DriftKind.SQUATTER: 30.0,
    DriftKind.WRONG_CARD: 30.0,
    DriftKind.OVERUSE: 60.0,
    DriftKind.MODE_MISMATCH: 30.0,
    DriftKind.DOUBLE_HOLDER: 30.0,
    DriftKind.CARD_LOST: 5.0,  # it does not come back by itself, and what is bound to it fails now
    DriftKind.VRAM_NOT_RECOVERED: 60.0,  # a driver takes some seconds to clean up after 80 GiB
    # These have a patience of their own (`Tolerance`): an hour, a quarter of an hour.
    DriftKind.IDLE_HOLDER: 60.0,
    DriftKind.SUSPECTED_HANG: 60.0,
    DriftKind.GPU_LOST_IN_CONTAINER: 30.0,
}
# What happens to a workload while it is wanted and bound: only these end something in its right.
_IN_ITS_RIGHT: Final = (
    DriftKind.OVERUSE,
    DriftKind.WRONG_CARD,
    DriftKind.CARD_LOST,
    DriftKind.IDLE_HOLDER,
    DriftKind.SUSPECTED_HANG,
    DriftKind.GPU_LOST_IN_CONTAINER,
)


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """When a sighting is a drift, and how healing goes about it. Seconds."""

    sightings_min: int = 2  # never below 2: one sighting is nothing
    gone_min: int = 2
    graces: dict[DriftKind, float] = {}  # what is not named here has GRACE_SECONDS
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
    open: bool = False  # was a drift on the books when it was last sighted
    told_at: float = 0.0  # monotonic: since when this reaper knows it to be on the books; counts while `open`
    cards: tuple[str, ...] = ()
    orders: int = 0
    ordered_at: float = 0.0  # monotonic; counts when orders > 0
    published_at: float = 0.0


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
        told_at = watch.told_at if watch.open else now
        watches[act.key] = replace(watch, open=True, told_at=told_at, published_at=now)
    elif isinstance(act.data, DriftCleared):
        del watches[act.key]


class _Court:
    """One judgement under way."""

    def __init__(self, state: State, watches: dict[str, Watch], now: float, rules: Rules) -> None:
        self.state = state
        self.watches = watches
        self.now = now
        self.rules = rules
        self.detected: list[Act] = []
        self.evictions: dict[tuple[str, int], Act] = {}  # by node ("" for a whole binding) and epoch
        self.releases: list[Act] = []
        self.cleared: list[Act] = []
        self.keys: dict[str, list[str]] = defaultdict(list)
        for key, watch in watches.items():
            self.keys[watch.node].append(key)
        self.drifts: dict[str, dict[str, DriftDetected]] = defaultdict(dict)
        for drift in state.drifts.values():
            if drift.kind in acts.KINDS:
                self.drifts[drift.node][drift.drift] = drift

    def hear(self, shown: Comparison) -> None:
        node = self.state.nodes.get(shown.node)
        watched = self.keys.get(shown.node, [])
        if node is None or node.unreachable_ns or node.incarnation != shown.incarnation:
            for key in watched:
                del self.watches[key]
            return
        drifts = self.drifts.get(shown.node, {})
        sighted = {sighting.key for sighting in shown.sightings}
        for sighting in shown.sightings:
            drift = drifts.get(sighting.key)
            watch = self._count(shown, sighting, drift)
            if watch.sightings >= self.rules.sightings_min and self._lasted(watch, sighting):
                self._drift(shown, sighting, watch, drift)
        for key in dict.fromkeys((*watched, *drifts)):
            if key in shown.pending:
                self._wait(shown, key, drifts.get(key))
            elif key not in sighted and key not in shown.unsure:
                self._gone(shown, key, drifts.get(key))

    # -- remembering ----------------------------------------------------------------------------

    def _count(self, shown: Comparison, sighting: Sighting, drift: DriftDetected | None) -> Watch:
        watch = self.watches.get(sighting.key)
        if watch is None or (watch.open and drift is None):  # cleared on the books: a new episode
            watch = self._new(shown, drift)
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
        watch = replace(watch, open=drift is not None)
        self.watches[sighting.key] = watch
        return watch

    def _new(self, shown: Comparison, drift: DriftDetected | None) -> Watch:
        """A drift that is open already was judged by a reaper before us: its order, if any, was just given."""
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
            open=drift is not None,
            told_at=self.now,
        )

    def _was_ordered(self, drift: DriftDetected) -> bool:
        """The books tell for a live binding; for what has none, the drift's own word must do."""
        binding = self.state.bindings.get(drift.epoch or 0)
        return binding is None or (binding.eviction is not None and binding.eviction.by == acts.BY)

    def _is_new(self, watch: Watch, shown: Comparison) -> bool:
        return watch.incarnation != shown.incarnation or shown.number > watch.number

    def _lasted(self, watch: Watch, sighting: Sighting) -> bool:
        grace = self.rules.graces.get(sighting.kind, GRACE_SECONDS[sighting.kind])
        return self.now - watch.first_seen >= max(grace, sighting.patience_seconds)

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
        elif watch.gone == 0 or self._is_new(watch, shown):
            watch = replace(
                watch, incarnation=shown.incarnation, number=shown.number, gone=watch.gone + 1, free=0
            )
        self.watches[key] = watch
        if watch.gone >= self.rules.gone_min:
            self.cleared.append(acts.cleared(self.state, drift, received_ns=shown.received_ns))

    def _could_show(self, shown: Comparison, watch: Watch | None, drift: DriftDetected | None) -> bool:
        """Would this heartbeat have shown it, were it still there?"""
        released = drift is not None and not acts.holds(self.state, drift.epoch, drift.node)
        if released and drift is not None and drift.kind is DriftKind.MISSING:
            return True  # on the books: whatever runs, it is not missing
        if watch is not None:
            return shown.sees(watch.cards)
        return shown.sees((drift.card,) if drift is not None and drift.card else ())

    # -- deciding -------------------------------------------------------------------------------

    def _drift(
        self, shown: Comparison, sighting: Sighting, watch: Watch, drift: DriftDetected | None
    ) -> None:
        allowed = sighting.kind in self.state.policy.healing or self._agreed(sighting, watch)
        # Told first, as something that is not healed yet.
        noticed = not sighting.notice_seconds or (
            drift is not None and self.now - watch.told_at >= sighting.notice_seconds
        )
        heal = sighting.healable and allowed and noticed
        if drift is None:
            self._tell(sighting, watch, since=rfc3339(watch.since_ns), healing=heal, again=False)
            return
        changed = {e.what for e in drift.evidence} != {e.what for e in sighting.evidence}
        late_enough = self.now - watch.published_at >= self.rules.republish_seconds
        if (heal and not drift.healing) or (changed and late_enough):
            self._tell(sighting, watch, since=drift.since, healing=heal or drift.healing, again=True)
        if heal:
            self._heal(shown, sighting, watch, drift)

    def _agreed(self, sighting: Sighting, watch: Watch) -> bool:
        agreed = sighting.agreed_seconds
        return agreed is not None and self.now - watch.first_seen >= agreed

    def _tell(self, sighting: Sighting, watch: Watch, *, since: str, healing: bool, again: bool) -> None:
        self.detected.append(
            acts.detected(
                self.state, sighting, since=since, sightings=watch.sightings, healing=healing, again=again
            )
        )

    def _heal(self, shown: Comparison, sighting: Sighting, watch: Watch, drift: DriftDetected) -> None:
        binding = self.state.bindings.get(sighting.epoch or 0)
        if binding is not None and not self._may_end(sighting, binding):
            return
        if sighting.kind is DriftKind.MISSING and sighting.fenced:
            if watch.free >= self.rules.sightings_min:
                released = acts.release(self.state, sighting, drift, times=watch.free)
                self.releases += [released] if released is not None else []
            return
        if sighting.kind in _IN_ITS_RIGHT and binding is not None and binding.eviction is not None:
            return  # its end is ordered already; if that does not help, it is a leftover
        if watch.orders and self.now - watch.ordered_at < self._back_off(watch.orders):
            return
        order = acts.eviction(
            self.state,
            sighting,
            drift,
            received_ns=shown.received_ns,
            orders=watch.orders,
            grace_seconds=self._grace(sighting, binding),
        )
        # One order per epoch, however many kinds of drift it shows.
        self.evictions.setdefault(("" if binding is not None else sighting.node, sighting.epoch or 0), order)

    def _grace(self, sighting: Sighting, binding: Binding | None) -> float:
        """What is stopped in its right has the time to end that it asked for."""
        grace = self.rules.eviction_grace_seconds
        share = binding.share(sighting.node) if binding is not None else None
        if share is None or sighting.kind not in _IN_ITS_RIGHT:
            return grace
        return max(grace, *(c.stop_grace_seconds for c in share.components), 0.0)

    def _may_end(self, sighting: Sighting, binding: Binding) -> bool:
        """Once more, whatever `compare` says: the alive and wanted is ended for these few reasons only."""
        if sighting.kind in _IN_ITS_RIGHT or sighting.kind is DriftKind.MISSING:
            return binding.demand == sighting.demand
        return self.state.demands[binding.demand].phase is Phase.RELEASING

    def _back_off(self, orders: int) -> float:
        return min(self.rules.reorder_seconds * 2.0 ** min(orders - 1, 16), self.rules.reorder_seconds_max)

"""`rigbook_reaper.judge`: given events and heartbeats, when it judges, then these events and no others."""

from __future__ import annotations

import msgspec
import pytest
from rigbook_ledger.audit import audit
from rigbook_ledger.drift import compare
from rigbook_ledger.state import Phase
from rigbook_reaper.judge import GRACE_SECONDS, Rules
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.values import DriftKind

from tests.unit.drift_story import GIB, QUICK, TOLERANCE, Watchman, foreign, process, runs, shows
from tests.unit.ledger_story import (
    bound,
    card,
    epoch_of,
    evicted,
    exited,
    joined,
    raised,
    released,
    started,
    withdrawn,
)

A0, A1 = card("a", 0), card("a", 1)
RUNNING = (joined(), raised(name="chat"), bound(), started())
STOPPED = (
    *RUNNING,
    withdrawn(),
    evicted(reason=v.EvictionReason.WITHDRAWN, by="placer", grace_seconds=1.0),
    exited(),
)
LOST = (*RUNNING, withdrawn(), evicted(reason=v.EvictionReason.WITHDRAWN, by="placer", grace_seconds=1.0))
ENDED = (*RUNNING, exited(), released())
SLICE = (joined(), raised(), bound(mode=v.Mode.MEMORY_SLICE, memory_bytes=24 * GIB), started())


def held(w: Watchman, memory_bytes: int = 18 * GIB) -> dict[str, object]:
    return {
        "components": (runs(w.state),),
        "cards": (shows(A0, process(w.state, memory_bytes=memory_bytes)), shows(A1)),
    }


def names(said: list[e.Payload]) -> list[str]:
    return [type(payload).__name__ for payload in said]


# -- when it is a drift ---------------------------------------------------------------------------


def test_two_sightings_and_the_grace_make_a_drift() -> None:
    w = Watchman(*STOPPED)
    assert w.sees(**held(w)) == []
    assert w.sees(**held(w)) == []
    said = w.sees(**held(w))
    assert names(said) == ["DriftDetected"]
    drift = said[0]
    assert isinstance(drift, e.DriftDetected)
    assert (drift.kind, drift.demand, drift.card, drift.sightings, drift.healing) == (
        DriftKind.LEFTOVER,
        "d",
        A0,
        3,
        False,
    )
    assert "rigbook drift heal leftover --on" in drift.remedy
    assert w.state.drifts == {drift.drift: drift}


def test_one_sighting_is_nothing_however_long_ago() -> None:
    w = Watchman(*STOPPED)
    w.sees(**held(w))
    w.passes(1000)
    same = w.last
    for _ in range(5):
        assert w.sees(again=same) == [], "the same heartbeat judged again"


def test_an_order_given_in_between_begins_anew() -> None:
    """Somebody orders the stop once more: it has its time again, and then the grace."""
    w = Watchman(*LOST)
    w.passes(20)
    w.sees_for(2, **held(w))
    w.happens(evicted(grace_seconds=10.0))
    assert w.sees_for(13, **held(w)) == []
    assert names(w.sees(**held(w))) == ["DriftDetected"]


def test_two_sightings_within_the_grace_are_nothing() -> None:
    w = Watchman(*STOPPED)
    assert [w.sees(after=0.1, **held(w)) for _ in range(10)] == [[]] * 10


def test_seen_gone_in_between_begins_anew() -> None:
    w = Watchman(*STOPPED)
    w.rules = msgspec.structs.replace(w.rules, graces={DriftKind.LEFTOVER: 3.0})
    w.sees_for(2, **held(w))
    w.sees(cards=(shows(A0, used=40 * GIB), shows(A1)))
    assert w.sees_for(3, **held(w)) == []
    assert names(w.sees(**held(w))) == ["DriftDetected"]


def test_unknown_in_between_counts_for_neither() -> None:
    w = Watchman(*STOPPED)
    w.sees(**held(w))
    w.sees_for(5, engine="away", cards=())
    assert names(w.sees(**held(w))) == ["DriftDetected"]


def test_the_default_graces_are_named_for_every_kind_it_tells() -> None:
    w = Watchman(*STOPPED, rules=Rules())
    assert w.sees_for(10, **held(w)) == []
    assert GRACE_SECONDS[DriftKind.LEFTOVER] == 10.0
    assert names(w.sees(**held(w))) == ["DriftDetected"]


def test_rules_that_would_act_on_one_sighting_are_refused() -> None:
    with pytest.raises(ValueError, match="sightings_min"):
        Rules(sightings_min=1)


def test_a_sightings_own_patience_is_kept() -> None:
    w = Watchman(*RUNNING, exited())
    assert w.sees_for(20) == []
    assert names(w.sees()) == ["DriftDetected"]


# -- dry run, and telling once --------------------------------------------------------------------


def test_in_dry_run_it_tells_once_and_orders_nothing() -> None:
    w = Watchman(*STOPPED)
    w.sees_for(300, **held(w))
    assert w.kinds() == ["DriftDetected"]


def test_figures_that_move_are_not_told_again_other_processes_are_once_a_minute() -> None:
    w = Watchman(*STOPPED)
    for i in range(30):
        w.sees(**held(w, memory_bytes=(18 + i) * GIB))
    assert w.kinds() == ["DriftDetected"]
    for pid in range(100, 130):
        w.sees(components=(runs(w.state),), cards=(shows(A0, process(w.state, pid=pid)), shows(A1)))
    assert w.kinds() == ["DriftDetected"]
    w.sees_for(10, components=(runs(w.state),), cards=(shows(A0, process(w.state, pid=77)), shows(A1)))
    assert w.kinds() == ["DriftDetected", "DriftDetected"]
    (drift,) = w.state.drifts.values()
    assert any("pid 77" in e.what for e in drift.evidence)


def test_a_restarted_reaper_tells_nothing_again() -> None:
    w = Watchman(*STOPPED)
    w.sees_for(3, **held(w))
    w.restarts()
    w.sees_for(20, **held(w))
    assert w.kinds() == ["DriftDetected"]
    w.restarts()
    w.sees_for(2)
    assert w.kinds() == ["DriftDetected", "DriftCleared"]


# -- cleared --------------------------------------------------------------------------------------


def test_two_good_observations_clear_it() -> None:
    w = Watchman(*STOPPED)
    w.sees_for(5, **held(w))
    w.happens(released())
    assert w.sees() == []
    said = w.sees()
    assert names(said) == ["DriftCleared"]
    cleared = said[0]
    assert isinstance(cleared, e.DriftCleared)
    assert "its memory is back; its cards are released" in cleared.how
    assert 5.0 <= cleared.seconds <= 8.0
    assert w.state.drifts == {}


@pytest.mark.parametrize(
    "blind", [{"engine": "away"}, {"cards": (v.CardObservation(uuid=A0), shows(A1))}, {"cards": ()}]
)
def test_what_cannot_be_seen_is_not_gone(blind: dict[str, object]) -> None:
    w = Watchman(*STOPPED)
    w.sees_for(3, **held(w))
    w.sees_for(20, **blind)
    assert w.kinds() == ["DriftDetected"]
    assert w.state.drifts


def test_it_is_told_again_when_it_comes_back_after_the_clearing() -> None:
    w = Watchman(*STOPPED)
    w.sees_for(3, **held(w))
    first = next(iter(w.state.drifts.values()))
    w.sees_for(2)
    w.sees_for(3, **held(w))
    assert w.kinds() == ["DriftDetected", "DriftCleared", "DriftDetected"]
    assert next(iter(w.state.drifts.values())).since != first.since, "another episode, with another event id"


def test_cleared_by_another_reaper_while_we_still_see_it_is_a_new_episode() -> None:
    w = Watchman(*STOPPED)
    w.sees_for(3, **held(w))
    (first,) = w.state.drifts.values()
    w.happens(e.DriftCleared(drift=first.drift, kind=first.kind, node="a"))
    w.sees_for(3, **held(w))
    assert next(iter(w.state.drifts.values())).since != first.since


def test_seen_gone_it_stays_open_until_it_is_released() -> None:
    """Stopped, still bound, nothing seen: the views agree when `released` has come."""
    w = Watchman(*LOST, tolerance=msgspec.structs.replace(TOLERANCE, stop_seconds=0.0))
    w.passes(20)
    w.sees_for(3, **held(w))
    w.happens(evicted(grace_seconds=30.0))
    assert w.sees_for(10) == []
    w.happens(released())
    assert names(w.sees_for(2)) == ["DriftCleared"]


# -- healing --------------------------------------------------------------------------------------


def test_case_1_healed_stop_everything_then_released_then_cleared() -> None:
    w = Watchman(*STOPPED, healing=[DriftKind.LEFTOVER])
    w.sees_for(3, **held(w))
    assert w.kinds() == ["DriftDetected"], "first the recorded reason"
    said = w.sees(**held(w))
    assert names(said) == ["EvictionOrdered"], "then the order"
    order = said[0]
    assert isinstance(order, e.EvictionOrdered)
    assert (order.demand, order.epoch, order.nodes) == ("d", epoch_of(w.state, "d"), ("a",))
    assert (order.reason, order.scope, order.by) == (
        v.EvictionReason.LEFTOVER,
        v.StopScope.EVERYTHING,
        "reaper",
    )
    assert not order.requeue
    w.sees(**held(w))
    w.sees(cards=(shows(A0, used=GIB), shows(A1)))
    w.happens(released())
    w.sees_for(2)
    assert w.kinds() == ["DriftDetected", "EvictionOrdered", "DriftCleared"]
    assert w.state.demands["d"].phase is Phase.ENDED
    assert audit(w.state) == []


def test_switched_on_later_heals_what_is_open() -> None:
    w = Watchman(*STOPPED)
    w.sees_for(10, **held(w))
    w.happens(e.HealingSet(kind=DriftKind.LEFTOVER, on=True))
    said = w.sees(**held(w))
    assert names(said) == ["DriftDetected", "EvictionOrdered"]
    assert next(iter(w.state.drifts.values())).healing


def test_switched_off_again_orders_no_more() -> None:
    w = Watchman(*STOPPED, healing=[DriftKind.LEFTOVER])
    w.sees_for(4, **held(w))
    w.happens(e.HealingSet(kind=DriftKind.LEFTOVER, on=False))
    assert w.sees_for(300, **held(w)) == []


def test_healing_of_one_kind_does_not_heal_another() -> None:
    w = Watchman(*ENDED, healing=[DriftKind.LEFTOVER])
    w.sees_for(60, **held(w))
    assert w.kinds() == ["DriftDetected"]


def test_an_order_that_did_not_help_is_repeated_with_back_off_and_the_drift_stays() -> None:
    w = Watchman(*STOPPED, healing=[DriftKind.LEFTOVER])
    at: list[float] = []
    for _ in range(200):
        if "EvictionOrdered" in names(w.sees(**held(w))):
            at.append(w.now)
    gaps = [b - a for a, b in zip(at, at[1:], strict=False)]
    assert gaps[:4] == pytest.approx([10, 20, 40, 40], abs=2.1)
    assert w.kinds().count("DriftDetected") == 1
    assert "DriftCleared" not in w.kinds()


def test_after_a_restart_the_order_on_the_books_counts() -> None:
    w = Watchman(*STOPPED, healing=[DriftKind.LEFTOVER])
    w.sees_for(4, **held(w))
    w.restarts()
    assert w.sees_for(9, **held(w)) == []
    assert names(w.sees_for(5, **held(w))) == ["EvictionOrdered"]


def test_a_crash_between_the_drift_and_its_order_is_made_good() -> None:
    w = Watchman(*STOPPED, healing=[DriftKind.LEFTOVER])
    w.sees_for(3, **held(w))
    w.restarts()
    assert names(w.sees_for(3, **held(w))) == ["EvictionOrdered"]


def test_two_reapers_decide_the_same_ids() -> None:
    w = Watchman(*STOPPED, healing=[DriftKind.LEFTOVER])
    for _ in range(8):
        w.passes(1)
        shown = compare(w.state, w.beat(**held(w)), w.tolerance)
        one, other = w.judges(shown), w.judges(shown)
        assert [a.id for a in one.acts] == [a.id for a in other.acts]
        w.number -= 1
        w.passes(-1)
        w.sees(**held(w))
    assert len({type(s) for s in w.said}) == 2


def test_a_drained_demand_keeps_its_place_when_its_leftover_is_healed() -> None:
    steps = (*RUNNING, evicted(requeue=True, reason=v.EvictionReason.DRAIN, grace_seconds=1.0), exited())
    w = Watchman(*steps, healing=[DriftKind.LEFTOVER])
    w.sees_for(4, **held(w))
    w.happens(released())
    assert w.state.demands["d"].phase is Phase.WAITING


def test_a_squatter_of_ours_is_ordered_to_stop() -> None:
    w = Watchman(*ENDED, healing=[DriftKind.SQUATTER])
    w.sees_for(4, **held(w))
    assert w.kinds() == ["DriftDetected", "EvictionOrdered"]
    order = w.said[-1]
    assert isinstance(order, e.EvictionOrdered)
    assert (order.epoch, order.nodes, order.reason) == (
        epoch_of(w.state, "d"),
        ("a",),
        v.EvictionReason.SQUATTER,
    )
    w.sees_for(2)
    assert w.kinds()[-1] == "DriftCleared"


def test_a_squatter_with_an_odd_label_is_stopped_by_its_epoch() -> None:
    w = Watchman(*RUNNING, healing=[DriftKind.SQUATTER])
    odd = runs(w.state, demand="../etc", epoch=2, ref="x", pids=(9,))
    w.sees_for(4, components=(runs(w.state), odd), cards=(shows(A0, process(w.state)), shows(A1)))
    order = w.said[-1]
    assert isinstance(order, e.EvictionOrdered)
    assert (order.demand, order.epoch) == ("unknown", 2)
    assert not w.state.findings, "the order is well-formed"
    assert w.state.demands["d"].phase is Phase.RUNNING


def test_a_foreign_process_is_never_touched_with_everything_switched_on() -> None:
    w = Watchman(*RUNNING, healing=list(DriftKind))
    w.sees_for(100, components=(runs(w.state),), cards=(shows(A0, process(w.state), foreign()), shows(A1)))
    assert w.kinds() == ["DriftDetected"]
    assert not next(iter(w.state.drifts.values())).healing


@pytest.mark.parametrize("kind", [DriftKind.OVERUSE, DriftKind.WRONG_CARD])
def test_own_fault_is_ended_only_when_switched_on_and_once(kind: DriftKind) -> None:
    there = {DriftKind.OVERUSE: (30, 0), DriftKind.WRONG_CARD: (0, 10)}[kind]
    for healing in ([], [kind]):
        w = Watchman(*SLICE, healing=healing)
        cards = [
            shows(uuid, *([process(w.state, memory_bytes=size * GIB)] if size else []))
            for uuid, size in zip((A0, A1), there, strict=True)
        ]
        w.sees_for(7, components=(runs(w.state),), cards=tuple(cards))
        assert w.kinds() == ["DriftDetected", *(["EvictionOrdered"] if healing else [])]
        assert (w.state.demands["d"].phase is Phase.RELEASING) is bool(healing)


# -- missing --------------------------------------------------------------------------------------


def test_case_14_closes_the_claim_on_two_sightings_of_a_fenced_share() -> None:
    w = Watchman(*LOST, healing=[DriftKind.MISSING])
    w.passes(20)
    w.sees_for(4)
    assert w.kinds() == ["DriftDetected", "Released"]
    freed = w.said[-1]
    assert isinstance(freed, e.Released)
    assert (freed.forced, freed.by, freed.node) == (True, "reaper", "a")
    assert w.state.demands["d"].phase is Phase.ENDED
    assert w.state.cards[A0].holders == ()
    assert audit(w.state) == []
    w.sees_for(3)
    assert w.kinds()[-1] == "DriftCleared"


def test_missing_in_dry_run_keeps_the_claim() -> None:
    w = Watchman(*LOST)
    w.passes(20)
    w.sees_for(100)
    assert w.kinds() == ["DriftDetected"]
    assert w.state.cards[A0].holders


def test_what_is_wanted_and_missing_is_fenced_before_it_is_released() -> None:
    w = Watchman(*RUNNING, healing=[DriftKind.MISSING])
    w.sees_for(4)
    assert w.kinds() == ["DriftDetected", "EvictionOrdered"]
    order = w.said[-1]
    assert isinstance(order, e.EvictionOrdered)
    assert order.reason is v.EvictionReason.MISSING
    w.engine_position = w.state.bindings[epoch_of(w.state, "d")].eviction.seq - 1  # the agent has not read it
    w.sees_for(9)
    assert "Released" not in w.kinds()
    w.engine_position = None
    w.sees_for(10)
    assert w.kinds()[-1] in {"Released", "DriftCleared"}
    assert audit(w.state) == []


def test_a_service_that_went_missing_runs_again() -> None:
    w = Watchman(
        joined(), raised(workload=v.Workload.SERVICE), bound(), started(), healing=[DriftKind.MISSING]
    )
    w.sees_for(30)
    assert w.state.demands["d"].phase is Phase.WAITING


def test_memory_that_is_not_back_is_not_released() -> None:
    w = Watchman(*LOST, healing=[DriftKind.MISSING])
    w.passes(20)
    w.sees_for(100, cards=(shows(A0, used=30 * GIB), shows(A1)))
    assert [s.kind for s in w.said if isinstance(s, e.DriftDetected)] == [
        DriftKind.MISSING,
        DriftKind.VRAM_NOT_RECOVERED,
    ]
    assert w.kinds() == ["DriftDetected"] * 2


def test_missing_that_runs_again_is_cleared() -> None:
    w = Watchman(*RUNNING)
    w.sees_for(4)
    w.sees_for(2, **held(w))
    assert w.kinds() == ["DriftDetected", "DriftCleared"]
    assert "is seen to run" in w.said[-1].how  # type: ignore[attr-defined]


# -- never ----------------------------------------------------------------------------------------


def test_with_a_hold_nothing_is_judged_and_all_is_forgotten() -> None:
    w = Watchman(*STOPPED, healing=list(DriftKind))
    w.sees_for(2, **held(w))
    assert [w.sees(hold="mass loss", **held(w)) for _ in range(20)] == [[]] * 20
    assert w.sees(**held(w)) == []
    assert w.sees(**held(w)) == []


def test_a_sighting_that_must_not_be_is_not_acted_on() -> None:
    """Whatever `compare` may say one day: what is bound and wanted is no leftover to be ended."""
    w = Watchman(*STOPPED, healing=list(DriftKind))
    seen = w.compares(**held(w))
    other = Watchman(*RUNNING, healing=list(DriftKind))
    for number in range(10):
        other.passes(1)
        verdict = other.judges(msgspec.structs.replace(seen, number=number))
        other.watches = verdict.watches
        for act in verdict.detected:
            other.happens(act.data)
        assert verdict.evictions == ()
    assert other.state.drifts


def test_an_unreachable_node_is_not_judged() -> None:
    w = Watchman(*STOPPED, healing=list(DriftKind))
    w.sees_for(2, **held(w))
    w.happens(e.NodeUnreachable(node="a", silent_seconds=20))
    assert w.sees_for(20, **held(w)) == []
    w.happens(e.NodeRecovered(node="a"))
    assert w.sees_for(2, **held(w)) == [], "it is looked at anew"
    assert names(w.sees(**held(w))) == ["DriftDetected"]


def test_case_9_a_drift_of_a_node_that_came_back_clean_is_cleared() -> None:
    w = Watchman(*STOPPED)
    w.sees_for(3, **held(w))
    w.happens(e.NodeUnreachable(node="a", silent_seconds=20), released(), e.NodeRecovered(node="a"))
    w.sees_for(2)
    assert w.kinds() == ["DriftDetected", "DriftCleared"]


def test_a_second_agent_under_the_same_name_is_not_judged() -> None:
    w = Watchman(*STOPPED, healing=list(DriftKind))
    assert w.sees_for(20, incarnation="i-2", **held(w)) == []


def test_a_gang_is_ordered_whole() -> None:
    gang = (joined("a"), joined("b"), raised(), bound("d", A0, card("b")), started(), started(node="b"))
    w = Watchman(
        *gang, withdrawn(), evicted("d", "a", "b", grace_seconds=1.0), exited(), healing=[DriftKind.LEFTOVER]
    )
    w.sees_for(4, **held(w))
    order = w.said[-1]
    assert isinstance(order, e.EvictionOrdered)
    assert order.nodes == ("a", "b")
    assert not w.state.findings


def test_both_quick_and_default_rules_are_usable() -> None:
    assert QUICK.graces[DriftKind.LEFTOVER] < GRACE_SECONDS[DriftKind.LEFTOVER]

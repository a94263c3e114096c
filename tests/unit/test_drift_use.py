"""How a binding in order uses its cards: given events, when heartbeats show this, then it is told, and stopped only
where the operator's rule or the demand itself says so.
"""

from __future__ import annotations

import msgspec
from rigbook_reaper.judge import Rules
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.values import DriftKind

from tests.unit.drift_story import GIB, TOLERANCE, Watchman, process, runs, shows
from tests.unit.ledger_story import bound, card, epoch_of, joined, raised, ready, started, unready
from tests.unit.test_drift import STOPPED, kinds, one

A0, A1 = card("a", 0), card("a", 1)
ADA = v.Owner(name="ada", contact="ada@example.org")
SOON = msgspec.structs.replace(
    TOLERANCE, idle_seconds=100.0, idle_notice_seconds=30.0, hang_seconds=50.0, unready_seconds=20.0
)
AGAIN = v.Restart(policy="on-failure")


def watchman(*, healing=(), cards=(), **demand: object) -> Watchman:
    told = raised(name="chat", owner=ADA, purpose="demo for the board", **demand)
    return Watchman(
        joined(), told, bound("d", *cards), started(), tolerance=SOON, rules=Rules(), healing=healing
    )


def used(
    w: Watchman, percent: float | None, *, ready: bool | None = None, **more: object
) -> dict[str, object]:
    return {
        "components": (runs(w.state, ready=ready),),
        "cards": (shows(A0, process(w.state), utilisation_percent=percent, **more), shows(A1)),
    }


def orders(w: Watchman) -> list[e.EvictionOrdered]:
    return [s for s in w.said if isinstance(s, e.EvictionOrdered)]


# -- idle_holder ----------------------------------------------------------------------------------


def test_an_idle_holder_is_told_to_its_owner_after_the_patience_and_never_stopped_by_itself() -> None:
    w = watchman()
    assert w.sees_for(100, **used(w, 0)) == []
    (told,) = w.sees(**used(w, 0))
    assert isinstance(told, e.DriftDetected)
    assert told.kind is DriftKind.IDLE_HOLDER
    assert told.sentence == (
        f"chat of ada (ada@example.org), for: demo for the board holds {A0} of node a and uses nothing of it: "
        "at most 5 % for 100 s; is it still needed?"
    )
    assert told.remedy.startswith("ask ada (ada@example.org)")
    w.sees_for(1000, **used(w, 3))
    assert w.kinds() == ["DriftDetected"], "told once, and nothing ordered"


def test_one_use_begins_the_count_anew() -> None:
    w = watchman()
    w.sees_for(90, **used(w, 0))
    w.sees(**used(w, 60))
    assert w.sees_for(90, **used(w, 0)) == []


def test_a_figure_that_is_missing_says_neither() -> None:
    w = watchman()
    w.sees_for(60, **used(w, 0))
    w.sees_for(10, **used(w, None))
    w.sees_for(10, **used(w, 80, unknown="sample rejected"))
    assert w.sees_for(20, **used(w, 0)) == []
    assert [type(s).__name__ for s in w.sees_for(2, **used(w, 0))] == ["DriftDetected"]


def test_it_is_cleared_when_it_works_again() -> None:
    w = watchman()
    w.sees_for(102, **used(w, 0))
    w.sees_for(2, **used(w, 50))
    assert w.kinds() == ["DriftDetected", "DriftCleared"]
    assert w.said[-1].how.startswith("its cards are used again")  # type: ignore[attr-defined]


def test_with_the_operators_rule_it_is_stopped_after_the_notice() -> None:
    w = watchman(healing=[DriftKind.IDLE_HOLDER], restart=AGAIN)
    w.sees_for(102, **used(w, 0))
    assert w.kinds() == ["DriftDetected"]
    assert not w.said[0].healing  # type: ignore[attr-defined]
    w.sees_for(29, **used(w, 0))
    assert orders(w) == []
    w.sees_for(3, **used(w, 0))
    (order,) = orders(w)
    assert (order.reason, order.requeue) == (v.EvictionReason.IDLE_HOLDER, False)


def test_a_demand_that_asked_for_it_is_stopped_after_a_notice_without_any_rule() -> None:
    w = watchman(idle_seconds_max=80.0)
    w.sees_for(51, **used(w, 0))
    assert w.kinds() == [], "the grace of the kind comes first"
    w.sees_for(20, **used(w, 0))
    assert w.kinds() == ["DriftDetected"]
    assert "it asked to be stopped after 80 s of this" in w.said[0].sentence  # type: ignore[attr-defined]
    w.sees_for(30, **used(w, 0))
    assert len(orders(w)) == 1


def test_what_still_starts_is_not_idle() -> None:
    w = Watchman(joined(), raised(probe=True), bound(probes=["a"]), started(), tolerance=SOON, rules=Rules())
    w.sees_for(300, **used(w, 0, ready=None))
    assert w.said == []


def test_a_busy_card_of_two_is_use() -> None:
    w = watchman(cards=(A0, A1))
    busy = shows(A1, utilisation_percent=70.0)
    w.sees_for(
        200,
        components=(runs(w.state),),
        cards=(shows(A0, process(w.state), utilisation_percent=0.0), busy),
    )
    assert w.said == []


def test_what_is_being_stopped_is_not_told_beside_the_stop() -> None:
    w = Watchman(*STOPPED, tolerance=SOON)
    assert kinds(w.compares(**used(w, 0))) == []


def test_a_restarted_reaper_gives_the_notice_its_time_again() -> None:
    w = watchman(healing=[DriftKind.IDLE_HOLDER])
    w.sees_for(125, **used(w, 0))
    w.restarts()
    w.sees_for(100, **used(w, 0))
    assert orders(w) == []
    w.sees_for(5, **used(w, 0))
    assert len(orders(w)) == 1


# -- suspected_hang -------------------------------------------------------------------------------


def test_busy_without_power_is_a_suspicion() -> None:
    """A collective that waits for a lost peer: 99 % and little more than the power at rest."""
    w = watchman()
    spinning = {"power_watts": 95.0, "power_limit_watts": 400.0}
    assert w.sees_for(60, **used(w, 100, **spinning)) == []
    (told,) = w.sees(**used(w, 100, **spinning))
    assert isinstance(told, e.DriftDetected)
    assert told.kind is DriftKind.SUSPECTED_HANG
    assert "it may be waiting for a peer" in told.sentence
    w.sees_for(200, **used(w, 100, **spinning))
    assert orders(w) == []


def test_real_work_or_unknown_power_is_none() -> None:
    w = watchman()
    assert kinds(w.compares(**used(w, 100, power_watts=300.0, power_limit_watts=400.0))) == []
    assert kinds(w.compares(**used(w, 100))) == []
    assert kinds(w.compares(**used(w, 98, power_watts=60.0, power_limit_watts=400.0))) == []


def test_on_a_shared_card_nobody_can_be_told_apart() -> None:
    w = Watchman(
        joined(), raised(), bound(mode=v.Mode.TIME_SLICE, memory_bytes=24 * GIB), started(), tolerance=SOON
    )
    assert kinds(w.compares(**used(w, 100, power_watts=60.0, power_limit_watts=400.0))) == []


def test_a_probe_that_says_no_and_cards_that_do_nothing() -> None:
    w = Watchman(
        joined(), raised(probe=True, restart=AGAIN), bound(probes=["a"]), started(), ready(), unready(),
        tolerance=SOON, rules=Rules(), healing=[DriftKind.SUSPECTED_HANG],
    )  # fmt: skip
    w.sees_for(65, **used(w, 0, ready=False))
    (order,) = orders(w)
    assert (order.reason, order.requeue) == (v.EvictionReason.SUSPECTED_HANG, True)
    drift = next(s for s in w.said if isinstance(s, e.DriftDetected))
    assert "does not answer its probe (server), and its cards on node a do nothing" in drift.sentence


def test_a_process_in_uninterruptible_sleep_is_told_and_no_stop_is_ordered() -> None:
    w = watchman(healing=list(DriftKind))
    stuck = process(w.state, stuck_seconds=300.0)
    shown = {
        "components": (runs(w.state),),
        "cards": (shows(A0, stuck, utilisation_percent=50.0), shows(A1)),
    }
    seen = one(w.compares(**shown))
    assert seen.key == f"suspected_hang.a.{epoch_of(w.state, 'd')}.stuck"
    assert "pid 4242 of chat is in uninterruptible sleep (state D) for 5 min" in seen.sentence
    w.sees_for(100, **shown)
    assert w.kinds() == ["DriftDetected"]


def test_a_short_sleep_is_a_slow_disk() -> None:
    w = watchman()
    stuck = process(w.state, stuck_seconds=60.0)
    assert (
        kinds(
            w.compares(
                components=(runs(w.state),), cards=(shows(A0, stuck, utilisation_percent=50.0), shows(A1))
            )
        )
        == []
    )


# -- gpu_lost_in_container ------------------------------------------------------------------------


def test_case_17_a_container_that_cannot_reach_its_card() -> None:
    w = watchman(healing=[DriftKind.GPU_LOST_IN_CONTAINER], restart=AGAIN)
    inside = runs(w.state, gpus=(A0,), injected=(), engine=v.Engine.DOCKER, ref="0123456789abcdef")
    shown = {
        "components": (inside,),
        "cards": (shows(A0, process(w.state), utilisation_percent=50.0), shows(A1)),
    }
    seen = one(w.compares(**shown))
    assert seen.kind is DriftKind.GPU_LOST_IN_CONTAINER
    assert f"server of chat was given {A0} on node a, and cannot reach {A0} from inside" in seen.sentence
    w.sees_for(35, **shown)
    (order,) = orders(w)
    assert (order.reason, order.requeue) == (v.EvictionReason.GPU_LOST_IN_CONTAINER, True)


def test_what_cannot_be_told_is_no_loss() -> None:
    w = watchman()
    for injected in (None, (A0,)):
        inside = runs(w.state, gpus=(A0,), injected=injected)
        assert (
            kinds(
                w.compares(
                    components=(inside,),
                    cards=(shows(A0, process(w.state), utilisation_percent=50.0), shows(A1)),
                )
            )
            == []
        )


def test_a_card_too_many_inside_is_a_wrong_card() -> None:
    w = watchman()
    inside = runs(w.state, gpus=(A0,), injected=(A0, A1))
    seen = one(
        w.compares(
            components=(inside,),
            cards=(shows(A0, process(w.state), utilisation_percent=50.0), shows(A1)),
        )
    )
    assert (seen.kind, seen.card) == (DriftKind.WRONG_CARD, A1)

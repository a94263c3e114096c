"""The table of `rigbook_ledger.drift`: given events, when a heartbeat shows this, then these sightings."""

from __future__ import annotations

import msgspec
import pytest
from rigbook_ledger.drift import Beat, Comparison, Sighting, Tolerance, compare, drift_key
from rigbook_ledger.state import State
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.values import DriftKind
from rigbook_schemas.wire import rfc3339

from tests.unit.drift_story import GIB, Watchman, foreign, process, runs, shows
from tests.unit.ledger_story import (
    bound,
    card,
    changed,
    epoch_of,
    evicted,
    exited,
    inventory,
    joined,
    raised,
    released,
    started,
    withdrawn,
)

A0, A1 = card("a", 0), card("a", 1)
RUNNING = (joined(), raised(name="chat"), bound(), started())
STOPPED = (*RUNNING, withdrawn(), evicted(reason=v.EvictionReason.WITHDRAWN, by="placer", grace_seconds=1.0))


def one(shown: Comparison) -> Sighting:
    assert len(shown.sightings) == 1, shown.sightings
    return shown.sightings[0]


def kinds(shown: Comparison) -> list[DriftKind]:
    return [s.kind for s in shown.sightings]


def held(w: Watchman, **more: object) -> dict[str, object]:
    """The server part of demand d runs and holds card 0."""
    return {"components": (runs(w.state, **more),), "cards": (shows(A0, process(w.state)), shows(A1))}


# -- in order -------------------------------------------------------------------------------------


def test_what_runs_on_its_card_is_in_order() -> None:
    w = Watchman(*RUNNING)
    shown = w.compares(**held(w))
    assert (shown.sightings, shown.pending) == ((), frozenset())


def test_an_idle_node_is_in_order() -> None:
    shown = Watchman(joined()).compares()
    assert (shown.sightings, shown.pending) == ((), frozenset())
    assert shown.sees((A0, A1))


# -- leftover -------------------------------------------------------------------------------------


def test_case_1_stopped_app_whose_server_holds_the_card() -> None:
    w = Watchman(*STOPPED)
    w.passes(20)
    seen = one(w.compares(**held(w)))
    assert seen.kind is DriftKind.LEFTOVER
    assert seen.key == f"leftover.a.{epoch_of(w.state, 'd')}"
    assert seen.sentence.startswith(
        f"{A0} of node a is held by chat (server part, pid 4242, 18.0 GiB), desired state stopped since "
    )
    assert seen.sentence.endswith("; the record says stopped, the card says no")
    assert seen.desired.startswith("stopped since ")
    assert "exclusive; stop ordered at" in seen.bound
    assert "pid 4242" in seen.observed
    whats = [e.what for e in seen.evidence]
    assert "demand d was withdrawn" in whats
    assert f"pid 4242 (server part) on {A0}" in whats
    assert any(w.startswith("component server of epoch") for w in whats)
    assert all(e.source and e.at for e in seen.evidence)
    assert "rigbook drift heal leftover --on" in seen.remedy
    assert "kill 4242" in seen.remedy


def test_a_container_is_named_with_its_remedy() -> None:
    w = Watchman(*STOPPED)
    w.passes(20)
    docker = {"engine": v.Engine.DOCKER, "ref": "0123456789abcdef"}
    there = process(w.state, container="0123456789abcdef")
    seen = one(w.compares(components=(runs(w.state, **docker),), cards=(shows(A0, there), shows(A1))))
    assert "container 0123456789a…" in seen.sentence
    assert "docker stop" in seen.remedy


def test_a_daemon_whose_first_process_ended_still_runs() -> None:
    w = Watchman(*STOPPED)
    w.passes(20)
    seen = one(w.compares(components=(runs(w.state, running=False, pids=(4242,)),)))
    assert seen.kind is DriftKind.LEFTOVER
    assert "chat still runs on node a (server part, pid 4242)" in seen.sentence


def test_a_stop_has_its_time() -> None:
    """Grace 1 s, and 2 s for the rest: until then it is pending, not a leftover."""
    w = Watchman(*STOPPED)
    key = drift_key(DriftKind.LEFTOVER, "a", epoch_of(w.state, "d"))
    w.passes(1.5)
    shown = w.compares(**held(w))
    assert (shown.sightings, shown.pending) == ((), frozenset({key}))
    assert kinds(w.compares(**held(w))) == [DriftKind.LEFTOVER]


def test_access_points_are_stopped_before_the_server_and_both_have_the_grace() -> None:
    told = bound()
    parts = tuple(v.Component(name=r, role=v.Role(r)) for r in ("access", "server"))
    told = msgspec.structs.replace(told, shares=(msgspec.structs.replace(told.shares[0], components=parts),))
    w = Watchman(joined(), raised(), told, started(), withdrawn(), evicted(grace_seconds=10.0))
    w.passes(20)
    assert kinds(w.compares(**held(w))) == []
    assert kinds(w.compares(**held(w))) == [DriftKind.LEFTOVER]


def test_without_an_order_the_components_stop_times_count_from_the_withdrawal() -> None:
    w = Watchman(*RUNNING, withdrawn())
    w.passes(10.5)
    assert kinds(w.compares(**held(w))) == []
    assert kinds(w.compares(**held(w))) == [DriftKind.LEFTOVER]


def test_after_the_final_exit_what_lives_is_a_leftover_at_once() -> None:
    w = Watchman(*STOPPED, exited())
    assert kinds(w.compares(**held(w))) == [DriftKind.LEFTOVER]


def test_an_order_the_agent_has_not_read_has_longer() -> None:
    w = Watchman(*STOPPED)
    w.tolerance = msgspec.structs.replace(w.tolerance, unread_seconds=40.0)
    w.engine_position = epoch_of(w.state, "d")
    w.passes(20)
    assert kinds(w.compares(**held(w))) == []
    w.passes(30)
    assert kinds(w.compares(**held(w))) == [DriftKind.LEFTOVER]


def test_case_18_late_start_of_a_withdrawn_demand_is_a_leftover_even_without_an_order() -> None:
    w = Watchman(joined(), raised(), bound(), withdrawn(), started())
    w.passes(20)
    assert kinds(w.compares(**held(w))) == [DriftKind.LEFTOVER]


def test_case_6_node_comes_back_with_the_old_container() -> None:
    w = Watchman(
        *RUNNING,
        e.NodeUnreachable(node="a", silent_seconds=20),
        withdrawn(),
        evicted(),
        e.NodeRecovered(node="a"),
    )
    w.passes(60)
    seen = one(w.compares(**held(w)))
    assert seen.kind is DriftKind.LEFTOVER
    assert w.state.cards[A0].holders, "ownership stayed"


def test_a_heartbeat_from_before_the_exit_is_older_than_the_books() -> None:
    w = Watchman(*STOPPED, exited())
    w.wall_ns = w.state.demands["d"].since_ns - 2 * 10**9
    assert kinds(w.compares(**held(w))) == []


def test_the_age_of_a_card_sample_counts() -> None:
    """A fresh heartbeat with a sample from before the order says nothing yet."""
    w = Watchman(*STOPPED, exited())
    old = rfc3339(w.wall_ns - 5 * 10**9)
    shown = w.compares(components=(), cards=(shows(A0, process(w.state), as_of=old), shows(A1)))
    assert kinds(shown) == []
    assert shown.pending


# -- missing --------------------------------------------------------------------------------------


def test_case_14_bound_observed_idle_no_container() -> None:
    w = Watchman(joined(cards=8), raised(), bound("d", *(card("a", i) for i in range(8))), started())
    seen = one(w.compares(cards=tuple(shows(card("a", i)) for i in range(8))))
    assert seen.kind is DriftKind.MISSING
    assert f"{A0}, {A1}, {card('a', 2)} and 5 more of node a are bound to d" in seen.sentence
    assert "observed idle" in seen.sentence
    assert seen.memory_back
    assert not seen.fenced, "nobody told the agent to give it up"


def test_case_2_and_14_ordered_to_stop_and_never_released() -> None:
    w = Watchman(*STOPPED)
    w.passes(20)
    seen = one(w.compares())
    assert seen.kind is DriftKind.MISSING
    assert seen.fenced
    assert seen.memory_back
    assert "was ordered to stop and never released" in seen.sentence


@pytest.mark.parametrize(
    ("position", "rejoined", "later", "fenced"),
    [(99, False, 20, True), (3, False, 200, False), (3, True, 20, False), (3, True, 200, True)],
)
def test_fenced_means_that_the_agent_knows_the_order(
    position: int, rejoined: bool, later: float, fenced: bool
) -> None:
    w = Watchman(*STOPPED, *([joined(incarnation="i-2")] if rejoined else []))
    w.engine_position = position
    w.passes(later)
    assert one(w.compares()).fenced is fenced


def test_not_started_yet_is_not_missing_until_its_patience_is_over() -> None:
    w = Watchman(joined(), raised(), bound())
    assert kinds(w.compares()) == []
    w.passes(100)
    assert "never started" in one(w.compares()).sentence


def test_an_order_not_read_yet_is_not_expected_to_run() -> None:
    w = Watchman(joined(), raised(), bound())
    w.engine_position = epoch_of(w.state, "d") - 1
    w.passes(100)
    assert kinds(w.compares()) == []
    w.passes(10)
    assert "has not read the order" in one(w.compares()).sentence


def test_a_workload_between_two_attempts_is_not_missing() -> None:
    w = Watchman(*RUNNING)
    w.passes(500)
    w.happens(exited(final=False, verdict=v.VerdictClass.APPLICATION_EXIT))
    assert kinds(w.compares()) == []
    w.passes(100)
    assert "did not start again" in one(w.compares()).sentence


def test_ended_and_not_released_has_a_patience_of_its_own() -> None:
    w = Watchman(*RUNNING, exited())
    assert one(w.compares()).patience_seconds == 20.0


def test_memory_that_nothing_explains_is_not_back() -> None:
    w = Watchman(*STOPPED)
    w.passes(20)
    shown = w.compares(cards=(shows(A0, used=30 * GIB), shows(A1)))
    assert kinds(shown) == [DriftKind.MISSING, DriftKind.VRAM_NOT_RECOVERED]
    assert not shown.sightings[0].memory_back


def test_a_heartbeat_from_before_started_is_not_missing() -> None:
    w = Watchman(*RUNNING)
    w.wall_ns = w.state.demands["d"].since_ns - 2 * 10**9
    assert kinds(w.compares()) == []


def test_one_running_component_is_enough() -> None:
    w = Watchman(*RUNNING)
    assert kinds(w.compares(components=(runs(w.state, component="access", pids=()),))) == []


# -- squatter -------------------------------------------------------------------------------------


def test_an_ended_epoch_that_runs_is_a_squatter() -> None:
    w = Watchman(*RUNNING, exited(), released())
    seen = one(w.compares(**held(w)))
    assert seen.kind is DriftKind.SQUATTER
    assert "ended at" in seen.sentence
    assert seen.healable


def test_an_epoch_that_never_was_is_a_squatter() -> None:
    w = Watchman(*RUNNING)
    shown = w.compares(**{**held(w), "components": (runs(w.state), runs(w.state, epoch=1, demand="ghost"))})
    seen = one(shown)
    assert (seen.kind, seen.demand, seen.epoch) == (DriftKind.SQUATTER, "ghost", 1)
    assert "not on the books" in seen.sentence


def test_a_binding_not_folded_yet_is_no_squatter() -> None:
    w = Watchman(joined(), raised())
    later = runs(w.state, epoch=w.state.position + 1)
    shown = w.compares(components=(later,))
    assert (shown.sightings, shown.pending) == ((), frozenset())


def test_labels_of_another_log_are_reported_and_never_healed() -> None:
    """The epoch is live for demand d; something labelled with it says that it is demand x."""
    w = Watchman(*RUNNING)
    alien = runs(w.state, demand="x", epoch=epoch_of(w.state, "d"), ref="other", pids=(5,))
    seen = one(w.compares(components=(runs(w.state), alien)))
    assert seen.kind is DriftKind.SQUATTER
    assert not seen.healable


def test_a_gang_part_that_outlived_its_release_is_not_healed_while_the_rest_lives() -> None:
    gang = (joined("a"), joined("b"), raised(), bound("d", A0, card("b")), started(), started(node="b"))
    w = Watchman(*gang, exited(), released())
    seen = one(w.compares(**held(w)))
    assert seen.kind is DriftKind.SQUATTER
    assert not seen.healable, "an order for this epoch would end what lives on node b"


def test_a_foreign_process_on_a_bound_card_is_reported_never_healed() -> None:
    w = Watchman(*RUNNING)
    shown = w.compares(components=(runs(w.state),), cards=(shows(A0, process(w.state), foreign()), shows(A1)))
    seen = one(shown)
    assert (seen.kind, seen.card, seen.epoch, seen.healable) == (DriftKind.SQUATTER, A0, None, False)
    assert "pid 99, python train.py, user bob, 18.0 GiB" in seen.sentence
    assert "never touched" in seen.sentence


@pytest.mark.parametrize("there", [foreign(GIB // 10), foreign(None)])
def test_a_small_or_unreadable_foreign_process_is_no_news(there: v.ProcessObservation) -> None:
    w = Watchman(*RUNNING)
    assert kinds(w.compares(components=(runs(w.state),), cards=(shows(A0, there), shows(A1)))) == []


def test_case_7_and_10_foreign_use_of_a_free_card_is_not_a_drift() -> None:
    """Another manager's containers carry no labels of ours: external use, which placement subtracts."""
    w = Watchman(*RUNNING)
    assert kinds(w.compares(components=(runs(w.state),), cards=(shows(A0), shows(A1, foreign())))) == []


def test_a_pid_of_one_of_our_components_is_not_foreign() -> None:
    w = Watchman(*RUNNING)
    there = v.ProcessObservation(pid=4242, memory_bytes=GIB)
    assert kinds(w.compares(components=(runs(w.state),), cards=(shows(A0, there), shows(A1)))) == []


# -- wrong card, overuse --------------------------------------------------------------------------


def test_case_4_process_on_another_card_names_both() -> None:
    w = Watchman(*RUNNING, raised("e", name="train"), bound("e", A1), started("e"))
    other = runs(w.state, "e", ref="pid:7@1", pids=(7,))
    shown = w.compares(
        components=(runs(w.state), other),
        cards=(shows(A0), shows(A1, process(w.state), process(w.state, "e", pid=7))),
    )
    assert kinds(shown) == [DriftKind.WRONG_CARD, DriftKind.DOUBLE_HOLDER]
    seen = shown.sightings[0]
    assert seen.card == A1
    assert seen.sentence == (
        f"chat is bound to {A0} of node a, and server part, pid 4242, 18.0 GiB is on {A1}, which is bound to train"
    )


def test_case_17_a_device_that_was_not_allotted() -> None:
    w = Watchman(*RUNNING)
    seen = one(w.compares(components=(runs(w.state, gpus=(A0, A1)),)))
    assert (seen.kind, seen.card) == (DriftKind.WRONG_CARD, A1)
    assert f"its component was given {A1}" in seen.sentence


def test_on_a_wrong_card_while_it_is_being_stopped_is_not_told_beside_the_stop() -> None:
    w = Watchman(*STOPPED)
    shown = w.compares(components=(runs(w.state),), cards=(shows(A0), shows(A1, process(w.state))))
    assert kinds(shown) == []
    assert {key.split(".")[0] for key in shown.pending} == {"leftover", "wrong_card"}


SLICE = (joined(), raised(), bound(mode=v.Mode.MEMORY_SLICE, memory_bytes=24 * GIB), started())


def test_case_12_more_memory_than_allotted() -> None:
    w = Watchman(*SLICE)
    there = (process(w.state, memory_bytes=20 * GIB), process(w.state, memory_bytes=10 * GIB, pid=5))
    seen = one(w.compares(components=(runs(w.state),), cards=(shows(A0, *there), shows(A1))))
    assert seen.kind is DriftKind.OVERUSE
    assert seen.sentence == f"d holds 30.0 GiB of {A0} on node a; 24.0 GiB are allotted to it (6.0 GiB over)"


def test_a_process_listed_twice_counts_once() -> None:
    w = Watchman(*SLICE)
    there = (process(w.state, memory_bytes=20 * GIB), process(w.state, memory_bytes=20 * GIB))
    assert kinds(w.compares(components=(runs(w.state),), cards=(shows(A0, *there), shows(A1)))) == []


def test_within_the_tolerance_is_no_overuse() -> None:
    w = Watchman(*SLICE)
    there = process(w.state, memory_bytes=24 * GIB + GIB // 3)
    assert kinds(w.compares(components=(runs(w.state),), cards=(shows(A0, there), shows(A1)))) == []


def test_an_exclusive_card_may_be_filled() -> None:
    w = Watchman(joined(), raised(), bound(memory_bytes=24 * GIB), started())
    there = process(w.state, memory_bytes=47 * GIB)
    assert kinds(w.compares(components=(runs(w.state),), cards=(shows(A0, there), shows(A1)))) == []


# -- unknown --------------------------------------------------------------------------------------


def test_an_engine_that_does_not_answer_shows_nothing() -> None:
    for steps in (RUNNING, STOPPED, (*RUNNING, exited(), released())):
        w = Watchman(*steps)
        w.passes(500)
        shown = w.compares(engine="docker: socket away", cards=(shows(A0, foreign()), shows(A1)))
        assert kinds(shown) == []
        assert not shown.sees((A0,))


@pytest.mark.parametrize(
    "unreadable",
    [
        v.CardObservation(uuid=A0),
        v.CardObservation(uuid=A0, processes=(), unknown="GPU is lost"),
        v.CardObservation(uuid=A0, processes=(), as_of="2020-01-01T00:00:00Z"),
    ],
)
def test_a_card_that_cannot_be_read_is_not_an_empty_card(unreadable: v.CardObservation) -> None:
    w = Watchman(*STOPPED)
    w.passes(500)
    shown = w.compares(cards=(unreadable, shows(A1)))
    assert kinds(shown) == []
    assert not shown.sees((A0,))
    assert shown.sees((A1,))


def test_a_card_that_left_the_inventory_has_nothing_to_tell() -> None:
    w = Watchman(*STOPPED, changed(cards=[inventory("a", 1)]))
    w.passes(500)
    assert kinds(w.compares(cards=(shows(A1),))) == [DriftKind.MISSING, DriftKind.CARD_LOST]


def test_another_agent_than_the_books_name_shows_nothing() -> None:
    w = Watchman(*STOPPED)
    w.passes(500)
    shown = w.compares(incarnation="i-other", **held(w))
    assert (shown.sightings, shown.cards_known) == ((), frozenset())


def test_an_unknown_node_shows_nothing() -> None:
    w = Watchman(joined())
    assert w.compares(node="z").sightings == ()


def test_absurd_input_is_survived() -> None:
    w = Watchman(*RUNNING, *(raised(f"x{i}") for i in range(3)))
    odd = runs(w.state, demand="ü" * 500, epoch=2, ref="r" * 5000, pids=tuple(range(1000)))
    many = tuple(
        v.ProcessObservation(pid=i, memory_bytes=-5, epoch=3, command="c" * 9000) for i in range(500)
    )
    shown = w.compares(
        components=(runs(w.state), odd), cards=(shows(A0, *many, used=-1), shows(A0), shows("?"))
    )
    for seen in shown.sightings:
        assert len(seen.key) <= 128
        assert seen.key.isascii()
        assert len(seen.evidence) <= 40


def test_an_empty_state_shows_nothing() -> None:
    told = e.Heartbeat(node="a", incarnation="i", number=1)
    assert compare(State(), Beat(heartbeat=told, received_ns=0), Tolerance()).sightings == ()


def test_the_key_does_not_depend_on_figures() -> None:
    w = Watchman(*STOPPED)
    w.passes(20)
    first = one(w.compares(**held(w)))
    second = one(
        w.compares(
            components=(runs(w.state),), cards=(shows(A0, process(w.state, memory_bytes=GIB)), shows(A1))
        )
    )
    assert first.key == second.key
    assert {e.what for e in first.evidence} == {e.what for e in second.evidence}

"""The fold of ownership, branch by branch: given events, when one more, then phases, holders and findings.

Each story's audit must be empty unless the test says what it finds.
"""

from __future__ import annotations

import msgspec
import pytest
from rigbook_ledger.digest import digest
from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import ENDED_MAX, Phase
from rigbook_schemas import events as e
from rigbook_schemas import values as v

from tests.unit.ledger_story import (
    CARD_BYTES,
    Step,
    Story,
    Told,
    bound,
    card,
    epoch_of,
    evicted,
    exited,
    joined,
    raised,
    ready,
    released,
    share,
    started,
    unready,
    withdrawn,
)

HALF = CARD_BYTES // 2


def a_bound_demand(**more: object) -> Story:
    return Story().given(joined("a"), raised("d", **more), bound("d", card("a")))


# -- the way of a demand ------------------------------------------------------------------------


def test_a_demand_waits_is_bound_runs_and_ends_when_it_was_seen_gone() -> None:
    story = Story().given(joined("a")).when(raised("d")).then({"d": Phase.WAITING})
    assert list(story.state.waiting) == ["d"]
    story.when(bound("d", card("a"))).then(
        {"d": Phase.BOUND}, holders={card("a"): ["d"]}, used={"p": (CARD_BYTES, 0)}
    )
    assert not story.state.waiting
    assert story.state.demands["d"].epoch == story.state.position
    story.when(started()).then({"d": Phase.RUNNING})
    story.when(exited()).then({"d": Phase.RUNNING}, holders={card("a"): ["d"]})
    story.when(released(verdict=v.VerdictClass.UNKNOWN)).then(
        {"d": Phase.ENDED}, holders={card("a"): []}, used={"p": (0, 0)}
    )
    demand = story.state.demands["d"]
    assert (demand.epoch, demand.verdict) == (0, v.VerdictClass.COMPLETED)
    assert demand.epoch_last > 0
    assert list(story.state.ended) == ["d"]


def test_with_a_probe_it_is_starting_until_ready_and_again_when_unready() -> None:
    story = Story().given(joined("a"), raised("d", probe=True), bound("d", card("a"), probes=["a"]))
    story.when(started()).then({"d": Phase.STARTING})
    story.when(ready()).then({"d": Phase.RUNNING})
    story.when(ready()).then({"d": Phase.RUNNING})
    story.when(unready()).then({"d": Phase.STARTING})
    story.when(unready()).then({"d": Phase.STARTING})


def test_without_a_probe_ready_and_unready_change_no_phase() -> None:
    story = a_bound_demand().given(started())
    story.when(ready(), unready()).then({"d": Phase.RUNNING})


def test_ready_may_be_told_before_started() -> None:
    story = Story().given(joined("a"), raised("d"), bound("d", card("a"), probes=["a"]))
    story.when(ready()).then({"d": Phase.BOUND})
    story.when(started()).then({"d": Phase.RUNNING})


def test_a_restart_on_the_node_takes_the_phase_back_to_bound() -> None:
    story = Story().given(joined("a"), raised("d"), bound("d", card("a"), probes=["a"]), started(), ready())
    story.when(exited(verdict=v.VerdictClass.APPLICATION_EXIT, final=False)).then(
        {"d": Phase.BOUND}, holders={card("a"): ["d"]}
    )
    story.when(started(attempt=2)).then({"d": Phase.STARTING})
    assert story.state.demands["d"].attempt == 2
    story.when(ready()).then({"d": Phase.RUNNING})


def test_the_verdict_of_the_latest_try_counts() -> None:
    story = a_bound_demand().given(started())
    story.when(
        exited(verdict=v.VerdictClass.APPLICATION_EXIT, final=False),
        started(attempt=2),
        exited(verdict=v.VerdictClass.COMPLETED, attempt=2),
        released(verdict=v.VerdictClass.STOPPED_BY_US),
    ).then({"d": Phase.ENDED})
    assert story.state.demands["d"].verdict is v.VerdictClass.COMPLETED


def test_the_verdict_of_the_release_counts_when_no_exit_was_told() -> None:
    story = a_bound_demand().when(released(verdict=v.VerdictClass.NODE_REBOOT)).then({"d": Phase.ENDED})
    assert story.state.demands["d"].verdict is v.VerdictClass.NODE_REBOOT


# -- gangs --------------------------------------------------------------------------------------


def a_gang(*probes: str) -> Story:
    return Story().given(
        joined("a"), joined("b"), raised("d"), bound("d", card("a"), card("b"), probes=probes)
    )


def test_a_gang_runs_when_every_node_has_started_and_is_ready() -> None:
    story = a_gang("a", "b")
    story.when(started(node="a"), ready(node="a")).then({"d": Phase.BOUND})
    story.when(started(node="b")).then({"d": Phase.STARTING})
    story.when(ready(node="b")).then({"d": Phase.RUNNING})
    story.when(unready(node="a")).then({"d": Phase.STARTING})


def test_only_nodes_whose_part_has_a_probe_must_be_ready() -> None:
    a_gang("a").given(started(node="a"), started(node="b")).when(ready(node="a")).then({"d": Phase.RUNNING})


def test_a_gang_is_freed_node_by_node_and_ends_with_the_last() -> None:
    story = a_gang().given(started(node="a"), started(node="b"))
    story.when(released(node="a")).then(
        {"d": Phase.RUNNING}, holders={card("a"): [], card("b"): ["d"]}, used={"p": (CARD_BYTES, 0)}
    )
    story.when(withdrawn()).then({"d": Phase.RELEASING}, used={"p": (CARD_BYTES, CARD_BYTES)})
    story.when(released(node="b")).then({"d": Phase.ENDED}, used={"p": (0, 0)})


def test_of_a_gang_the_first_bad_end_is_the_story() -> None:
    story = a_gang().given(started(node="a"), started(node="b"))
    story.when(
        exited(node="a", verdict=v.VerdictClass.GPU_HARDWARE),
        exited(node="b", verdict=v.VerdictClass.STOPPED_BY_US),
    ).then()
    assert story.state.demands["d"].verdict is v.VerdictClass.GPU_HARDWARE


def test_of_a_gang_a_bad_end_replaces_a_good_one() -> None:
    story = a_gang().when(
        exited(node="a", verdict=v.VerdictClass.COMPLETED),
        exited(node="b", verdict=v.VerdictClass.OOM_GLOBAL),
    )
    story.then()
    assert story.state.demands["d"].verdict is v.VerdictClass.OOM_GLOBAL


# -- withdrawals and stop orders ------------------------------------------------------------------


def test_withdrawn_while_waiting() -> None:
    story = Story().given(raised("d")).when(withdrawn()).then({"d": Phase.WITHDRAWN})
    demand = story.state.demands["d"]
    assert not demand.wanted
    assert demand.withdrawn_by == "ada"
    assert demand.withdrawn_ns == story.state.received_ns
    assert not story.state.waiting


@pytest.mark.parametrize("so_far", [(), (started(),), (started(), exited())])
def test_withdrawn_while_it_holds_cards_frees_nothing_until_it_was_seen_gone(
    so_far: tuple[Step, ...],
) -> None:
    story = a_bound_demand().given(*so_far)
    story.when(withdrawn()).then(
        {"d": Phase.RELEASING}, holders={card("a"): ["d"]}, used={"p": (CARD_BYTES, CARD_BYTES)}
    )
    story.when(started(attempt=2)).then({"d": Phase.RELEASING})
    story.when(released()).then({"d": Phase.ENDED}, holders={card("a"): []}, used={"p": (0, 0)})


def test_withdrawn_twice_or_after_the_end_is_nothing_new() -> None:
    story = a_bound_demand().given(withdrawn()).when(withdrawn()).then({"d": Phase.RELEASING})
    story.when(released(), withdrawn()).then({"d": Phase.ENDED})
    assert story.state.demands["d"].wanted is False


def test_a_withdrawal_that_races_the_binding_gives_a_real_binding_in_releasing() -> None:
    story = Story().given(joined("a"), raised("d"), withdrawn())
    story.when(bound("d", card("a"))).then(
        {"d": Phase.RELEASING}, holders={card("a"): ["d"]}, used={"p": (CARD_BYTES, CARD_BYTES)}
    )
    assert not story.state.ended
    story.when(started(), released()).then({"d": Phase.ENDED}, holders={card("a"): []}, used={"p": (0, 0)})
    assert list(story.state.ended) == ["d"]


def test_a_refusal_that_races_the_binding_likewise() -> None:
    refusal = e.Refused(demand="d", project="p", reasons=(v.Reason(code=v.ReasonCode.NO_NODES),))
    story = Story().given(joined("a"), raised("d"), refusal)
    story.when(bound("d", card("a"))).then({"d": Phase.RELEASING}, holders={card("a"): ["d"]})
    assert story.state.demands["d"].wanted is False
    story.when(released()).then({"d": Phase.ENDED})


def test_a_stop_order_frees_nothing() -> None:
    story = a_bound_demand().given(started())
    story.when(evicted(scope=v.StopScope.EVERYTHING, by="grace", grace_seconds=30.0)).then(
        {"d": Phase.RELEASING}, holders={card("a"): ["d"]}, used={"p": (CARD_BYTES, CARD_BYTES)}
    )
    eviction = story.state.bindings[epoch_of(story.state, "d")].eviction
    assert eviction is not None
    assert (eviction.scope, eviction.by, eviction.grace_seconds) == (v.StopScope.EVERYTHING, "grace", 30.0)
    story.when(released()).then({"d": Phase.ENDED})


def test_evicted_with_requeue_goes_back_to_waiting_behind_the_others() -> None:
    story = a_bound_demand().given(started(), raised("other"))
    story.when(evicted(requeue=True), exited(verdict=v.VerdictClass.PREEMPTED), released()).then(
        {"d": Phase.WAITING}, holders={card("a"): []}, used={"p": (0, 0)}
    )
    demand = story.state.demands["d"]
    assert (demand.requeues, demand.epoch, demand.verdict, demand.sentence) == (1, 0, None, "")
    assert list(story.state.waiting) == ["other", "d"]
    story.when(bound("d", card("a"))).then({"d": Phase.BOUND})


def test_requeue_is_off_as_soon_as_one_order_or_the_owner_says_so() -> None:
    story = a_bound_demand().when(evicted(requeue=True), evicted(requeue=False), released())
    story.then({"d": Phase.ENDED})
    story = a_bound_demand().when(evicted(requeue=False), evicted(requeue=True), released())
    story.then({"d": Phase.ENDED})
    story = a_bound_demand().when(evicted(requeue=True), withdrawn(), released())
    story.then({"d": Phase.ENDED})


def test_an_order_against_something_without_a_right_changes_nothing() -> None:
    story = a_bound_demand().given(released())
    before = digest_of_ownership(story)
    story.when(evicted()).then({"d": Phase.ENDED})
    assert digest_of_ownership(story) == before


def test_an_order_that_names_another_demands_epoch_changes_nothing() -> None:
    story = a_bound_demand().given(raised("x"))
    story.when(lambda s: e.EvictionOrdered(
        demand="x", epoch=epoch_of(s, "d"), nodes=("a",), reason=v.EvictionReason.OPERATOR,
    )).then({"d": Phase.BOUND, "x": Phase.WAITING}, findings=["wrong_epoch"])  # fmt: skip


def test_an_order_on_a_subject_its_agent_does_not_read_is_a_finding() -> None:
    story = a_bound_demand()
    story.when(Told(data=evicted(), subject="rig.evict.b")).then(
        {"d": Phase.BOUND}, findings=["wrong_subject"]
    )
    story.when(evicted("d", "a", "b")).then({"d": Phase.RELEASING})


# -- verdicts of the placer -----------------------------------------------------------------------


def test_deferred_keeps_the_reasons_and_bound_forgets_them() -> None:
    reason = v.Reason(code=v.ReasonCode.VRAM_SHORT, short_bytes=v.GIB)
    story = Story().given(joined("a"), raised("d"))
    story.when(e.Deferred(demand="d", project="p", reasons=(reason,))).then({"d": Phase.WAITING})
    assert story.state.demands["d"].reasons == (reason,)
    story.when(bound("d", card("a"))).then()
    assert story.state.demands["d"].reasons == ()


def test_refused_is_the_end() -> None:
    reason = v.Reason(code=v.ReasonCode.INVALID_UNIT, asked_bytes=8192)
    story = Story().given(raised("d", resources=v.Request(memory_bytes=8192)))
    story.when(e.Refused(demand="d", project="p", reasons=(reason,))).then({"d": Phase.REFUSED})
    assert story.state.demands["d"].reasons == (reason,)
    assert (list(story.state.waiting), list(story.state.ended)) == ([], ["d"])


def test_verdicts_that_come_too_late_or_for_nobody_change_nothing() -> None:
    reasons = (v.Reason(code=v.ReasonCode.NO_NODES),)
    story = a_bound_demand()
    story.when(
        e.Deferred(demand="d", project="p", reasons=reasons),
        e.Refused(demand="d", project="p", reasons=reasons),
        e.Deferred(demand="nobody", project="p", reasons=reasons),
        e.Refused(demand="nobody", project="p", reasons=reasons),
    ).then({"d": Phase.BOUND})
    assert story.state.demands["d"].reasons == ()


# -- sharing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [v.Mode.MEMORY_SLICE, v.Mode.TIME_SLICE])
def test_a_card_is_shared_and_each_binding_counted_once(mode: v.Mode) -> None:
    story = Story().given(joined("a", cards=1), raised("d"), raised("x"))
    story.when(
        bound("d", card("a"), mode=mode, memory_bytes=HALF),
        bound("x", card("a"), mode=mode, memory_bytes=HALF),
    ).then(holders={card("a"): ["d", "x"]}, used={"p": (CARD_BYTES, 0)})
    assert story.state.cards[card("a")].reserved_bytes == CARD_BYTES
    assert story.state.mode_of(story.state.cards[card("a")]) is mode
    story.when(released("d")).then(holders={card("a"): ["x"]}, used={"p": (HALF, 0)})
    story.when(released("x")).then(holders={card("a"): []}, used={"p": (0, 0)})
    assert story.state.mode_of(story.state.cards[card("a")]) is None


# -- bindings that give no right --------------------------------------------------------------------


def void(data: e.Bound, subject: str = "") -> None:
    story = Story().given(joined("a"), joined("b"), raised("d"), raised("x"), bound("x", card("a", 1)))
    story.when(Told(data=data, subject=subject)).then(
        {"d": Phase.WAITING, "x": Phase.BOUND},
        findings=["void_binding"],
        holders={card("a"): [], card("a", 1): ["x"], card("b"): []},
        used={"p": (CARD_BYTES, 0)},
    )
    assert f"epoch {story.state.position} gives no right" in story.findings[0].text


def test_void_unknown_demand() -> None:
    void(bound("nobody", card("a")))


def test_void_demand_already_bound() -> None:
    void(bound("x", card("a")))


def test_void_unknown_card() -> None:
    void(bound("d", card("a", 7)))


def test_void_card_of_another_node() -> None:
    data = bound("d", card("a"))
    void(msgspec.structs.replace(data, shares=(share("b", card("a")),)))


def test_void_unknown_node() -> None:
    void(bound("d", card("z")))


def test_void_card_named_twice() -> None:
    void(bound("d", card("a"), card("a")))


def test_void_node_with_two_shares() -> None:
    data = bound("d", card("a"))
    void(msgspec.structs.replace(data, shares=(share("a", card("a")), share("a", card("a", 1)))))


def test_void_no_card() -> None:
    void(msgspec.structs.replace(bound("d", card("a")), shares=(share("a"),)))


def test_void_two_modes() -> None:
    one = share("a", card("a"), mode=v.Mode.EXCLUSIVE)
    two = share("b", card("b"), mode=v.Mode.MEMORY_SLICE)
    void(msgspec.structs.replace(bound("d", card("a")), shares=(one, two)))


def test_void_wrong_subject() -> None:
    void(bound("d", card("a")), subject="rig.own.bind.b")
    void(bound("d", card("a")), subject="rig.own.bind._gang")
    void(bound("d", card("a"), card("b")), subject="rig.own.bind.a")


def test_void_wrong_project() -> None:
    void(bound("d", card("a"), project="other"))


# -- bindings that break a rule they could have seen --------------------------------------------------


def test_a_binding_beyond_the_quota_is_real_and_a_finding() -> None:
    story = Story().given(joined("a"), raised("d"), e.QuotaSet(project="p", memory_bytes=HALF))
    story.when(bound("d", card("a"))).then({"d": Phase.BOUND}, findings=["quota_exceeded"])
    assert story.state.projects["p"].over_bytes == HALF


def test_a_binding_on_a_cordoned_node_or_quarantined_card_is_real_and_a_finding() -> None:
    story = Story().given(joined("a"), raised("d"), raised("x"))
    story.given(e.NodeCordoned(node="a"), e.GpuQuarantined(card=card("a", 1), reason="Xid 79"))
    story.when(bound("d", card("a"))).then({"d": Phase.BOUND}, findings=["bound_while_cordoned"])
    story.given(e.NodeUncordoned(node="a"))
    story.when(bound("x", card("a", 1))).then({"x": Phase.BOUND}, findings=["bound_while_quarantined"])


def test_a_double_binding_on_the_log_is_shown_and_not_hidden() -> None:
    story = Story().given(joined("a"), raised("d"), raised("x"), bound("d", card("a")))
    story.when(bound("x", card("a"))).then(
        {"d": Phase.BOUND, "x": Phase.BOUND},
        holders={card("a"): ["d", "x"]},
        audited=["double_binding", "over_allotted"],
    )


# -- who may speak ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (e.Started(demand="d", epoch=999, node="a"), "stale_epoch"),
        (e.Ready(demand="d", epoch=999, node="a"), "stale_epoch"),
        (e.Unready(demand="d", epoch=999, node="a"), "stale_epoch"),
        (e.Exited(demand="d", epoch=999, node="a", verdict=v.VerdictClass.COMPLETED), "stale_epoch"),
        (e.Released(demand="d", epoch=999, node="a"), "release_by_non_holder"),
        (released(node="b"), "release_by_non_holder"),
        (released(demand="x"), "release_by_non_holder"),
        (lambda s: e.Released(demand="x", epoch=epoch_of(s, "d"), node="a"), "release_by_non_holder"),
        (started(node="b"), "stale_epoch"),
        (Told(data=started(), subject="rig.run.b"), "wrong_subject"),
        (Told(data=ready(), subject="rig.run.b"), "wrong_subject"),
        (Told(data=unready(), subject="rig.run.b"), "wrong_subject"),
        (Told(data=exited(), subject="rig.run.b"), "wrong_subject"),
        (Told(data=released(), subject="rig.release.b"), "wrong_subject"),
    ],
)
def test_what_an_agent_says_of_what_it_does_not_hold_changes_nothing(step: Step, code: str) -> None:
    story = a_bound_demand().given(raised("x"), joined("b"))
    before = digest_of_ownership(story)
    story.when(step).then({"d": Phase.BOUND}, findings=[code], holders={card("a"): ["d"]})
    assert digest_of_ownership(story) == before


def test_a_release_is_taken_once() -> None:
    story = a_gang().given(released(node="a"))
    story.when(released(node="a")).then(
        {"d": Phase.BOUND}, findings=["release_by_non_holder"], used={"p": (CARD_BYTES, 0)}
    )


def test_a_started_of_an_old_epoch_does_not_speak_for_the_new_one() -> None:
    story = a_bound_demand()
    old = epoch_of(story.state, "d")
    story.given(evicted(requeue=True), released(), bound("d", card("a")))
    story.when(e.Started(demand="d", epoch=old, node="a")).then({"d": Phase.BOUND}, findings=["stale_epoch"])


# -- clients ----------------------------------------------------------------------------------------


def test_a_demand_id_is_unique_for_ever() -> None:
    story = (
        a_bound_demand()
        .when(raised("d", priority=99))
        .then({"d": Phase.BOUND}, findings=["duplicate_demand"])
    )
    story.when(released(), raised("d")).then({"d": Phase.ENDED}, findings=["duplicate_demand"])
    assert story.state.demands["d"].spec.priority == 50


def test_a_demand_on_another_projects_subject() -> None:
    story = Story().when(Told(data=raised("d"), subject="rig.demand.other")).then(findings=["wrong_subject"])
    assert not story.state.demands


@pytest.mark.parametrize(
    "step", [withdrawn(project="other"), Told(data=withdrawn(), subject="rig.demand.other")]
)
def test_only_its_own_project_withdraws_a_demand(step: e.Payload | Told) -> None:
    Story().given(raised("d")).when(step).then({"d": Phase.WAITING}, findings=["foreign_withdrawal"])


def test_withdrawing_what_was_never_raised() -> None:
    Story().when(withdrawn("nobody")).then(findings=["unknown_demand"])


# -- bounds -----------------------------------------------------------------------------------------


def test_ended_demands_are_forgotten_oldest_first() -> None:
    story = Story()
    for number in range(ENDED_MAX + 3):
        story.tell(raised(f"d{number}"))
        story.tell(withdrawn(f"d{number}"))
    assert len(story.state.ended) == len(story.state.demands) == ENDED_MAX
    assert "d2" not in story.state.demands
    assert "d3" in story.state.demands
    story.then()


def test_redelivery_is_a_no_op() -> None:
    """CASES 30: the same record twice."""
    story = a_bound_demand().given(started())
    before = digest(story.state)
    for record in story.log:
        story.state = evolve(story.state, record)
    assert digest(story.state) == before


def test_the_same_event_stored_twice_changes_nothing_the_second_time() -> None:
    """CASES 30: a retry after the server's window for duplicates; CASES 17: a release told twice."""
    story = Story().given(joined("a"), raised("d"))
    twice = [Told(data=bound("d", card("a")), id="same"), Told(data=bound("d", card("a")), id="same")]
    story.when(*twice).then({"d": Phase.BOUND}, findings=["void_binding"], used={"p": (CARD_BYTES, 0)})
    story.when(released(), released()).then({"d": Phase.ENDED}, findings=["release_by_non_holder"])
    assert story.state.cards[card("a")].reserved_bytes == 0


def test_the_end_counts_and_not_the_way_to_it() -> None:
    """CASES 2: seen gone without any of `exited`, `eviction.ordered` or a withdrawal before."""
    a_bound_demand().when(released(forced=True, by="grace")).then(
        {"d": Phase.ENDED}, holders={card("a"): []}, used={"p": (0, 0)}
    )


def test_what_a_project_uses_is_what_its_live_bindings_hold() -> None:
    """CASES 28: no demand is bound and evicted at once, and no quota is held by what is gone."""
    story = Story().given(joined("a"), raised("d"), raised("x"))
    story.when(
        bound("d", card("a"), mode=v.Mode.MEMORY_SLICE, memory_bytes=HALF),
        bound("x", card("a"), mode=v.Mode.MEMORY_SLICE, memory_bytes=HALF),
    ).then(used={"p": (CARD_BYTES, 0)})
    story.when(evicted("d", requeue=True)).then({"d": Phase.RELEASING}, used={"p": (CARD_BYTES, HALF)})
    story.when(released("d")).then({"d": Phase.WAITING}, used={"p": (HALF, 0)})
    story.when(e.QuotaSet(project="p", memory_bytes=0)).then({"x": Phase.BOUND}, used={"p": (HALF, 0)})
    assert story.state.projects["p"].over_bytes == HALF
    story.when(released("x")).then(used={"p": (0, 0)})
    assert story.state.projects["p"].over_bytes == 0


def digest_of_ownership(story: Story) -> object:
    """What must not change when an event has no effect."""
    s = story.state
    return (dict(s.bindings), dict(s.cards), {k: d.phase for k, d in s.demands.items()}, dict(s.projects))

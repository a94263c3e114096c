"""Preemption: evictions in order to place.

Safety, in words:
- nobody is evicted unless the demand fits afterwards, its quota and the cap included;
- only those that allow it, of strictly lower priority, who have had their cards for the minimum run time;
- no victim could be spared: without any one of them it would not fit;
- a demand that can never fit evicts nobody, nor does one that would fit without;
- a victim never evicts its preemptor; what is freed goes to whom it was freed for;
- the story is one chain: each event names the one that led to it.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rigbook_ledger.audit import audit
from rigbook_ledger.state import Phase
from rigbook_placer.place import explain, place
from rigbook_placer.planned import plan
from rigbook_placer.preempt import Preemption, evictions, preempt
from rigbook_schemas import events as e
from rigbook_schemas import subjects as s
from rigbook_schemas.sentences import sentence
from rigbook_schemas.values import CheckpointAnswer, EvictionReason, Mode, ReasonCode

from tests.unit.placer_fleet import SECOND, Fleet


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.node("a", 2)
    return fleet


def room_for(fleet: Fleet, name: str) -> Preemption | None:
    return preempt(fleet.state, fleet.state.demands[name].spec, {}, fleet.now_ns)


def victims(fleet: Fleet, name: str) -> list[str]:
    found = room_for(fleet, name)
    return [] if found is None else sorted(b.demand for b in found.victims)


def order(fleet: Fleet, name: str) -> None:
    """What the service does: the orders, caused by what is known of the demand."""
    found = room_for(fleet, name)
    assert found is not None
    demand = fleet.state.demands[name]
    for one in evictions(demand, found):
        fleet.tell(s.evict(one.nodes), one, cause=demand.event_id)
    assert audit(fleet.state) == []


def test_both_sides_opt_in(fleet: Fleet) -> None:
    fleet.bind("allows", priority=25, preemptible=True)
    fleet.bind("does-not", priority=25)
    fleet.pass_time(3600)
    fleet.demand("asks", priority=50, preempts=True)
    fleet.demand("does-not-ask", priority=50)
    assert victims(fleet, "asks") == ["allows"]
    assert victims(fleet, "does-not-ask") == []
    fleet.demand("asks-for-two", priority=50, preempts=True, count=2)
    assert victims(fleet, "asks-for-two") == []


def test_the_operator_may_switch_it_off(fleet: Fleet) -> None:
    fleet.bind("one", priority=25, preemptible=True)
    fleet.bind("two", priority=25, preemptible=True)
    fleet.pass_time(3600)
    fleet.demand("asks", preempts=True)
    assert victims(fleet, "asks") != []
    fleet.tell(s.policy("preemption"), e.PreemptionSet(on=False))
    assert victims(fleet, "asks") == []


@pytest.mark.parametrize(("priority", "goes"), [(24, True), (49, True), (50, False), (60, False)])
def test_a_victim_has_a_strictly_lower_priority(fleet: Fleet, priority: int, goes: bool) -> None:
    fleet.bind("victim", count=2, priority=priority, preemptible=True)
    fleet.pass_time(3600)
    fleet.demand("asks", priority=50, preempts=True)
    assert (victims(fleet, "asks") == ["victim"]) is goes


def test_the_minimum_run_time_is_respected(fleet: Fleet) -> None:
    fleet.bind("victim", count=2, priority=25, preemptible=True)
    fleet.demand("asks", preempts=True)
    fleet.pass_time(299)
    assert victims(fleet, "asks") == []
    fleet.pass_time(2)
    assert victims(fleet, "asks") == ["victim"]


def test_the_fewest_then_the_lowest_priority_then_the_youngest_goes() -> None:
    fleet = Fleet()
    fleet.node("a", 1)
    fleet.node("b", 1)
    fleet.node("c", 1)
    fleet.bind("slice-1", node="a", mode=Mode.MEMORY_SLICE, gib=12, priority=10, preemptible=True)
    fleet.bind("slice-2", node="a", mode=Mode.MEMORY_SLICE, gib=12, priority=10, preemptible=True)
    fleet.bind("old", node="b", priority=25, preemptible=True)
    fleet.pass_time(1000)
    fleet.bind("young", node="c", priority=25, preemptible=True)
    fleet.pass_time(1000)
    fleet.demand("asks", preempts=True)
    assert victims(fleet, "asks") == ["young"]
    fleet.demand("small", preempts=True, mode=Mode.MEMORY_SLICE, gib=4)
    assert victims(fleet, "small") == ["slice-2"]


def test_a_demand_that_can_never_fit_evicts_nobody(fleet: Fleet) -> None:
    """It preempted again and again, and never ran."""
    fleet.bind("one", priority=25, preemptible=True)
    fleet.bind("two", priority=25, preemptible=True)
    fleet.pass_time(3600)
    fleet.demand("huge", gib=80, preempts=True)
    fleet.demand("many", count=3, preempts=True)
    fleet.demand("elsewhere", node="zzz", preempts=True)
    for name in ("huge", "many", "elsewhere"):
        assert victims(fleet, name) == []
        assert explain(fleet.state, fleet.state.demands[name].spec, {}) != ()


def test_nobody_is_evicted_for_a_demand_that_its_quota_keeps_waiting(fleet: Fleet) -> None:
    fleet.bind("victim", count=2, priority=25, preemptible=True, project="other")
    fleet.pass_time(3600)
    fleet.tell(s.policy("nlp"), e.QuotaSet(project="nlp", memory_bytes=1))
    fleet.demand("asks", preempts=True)
    assert victims(fleet, "asks") == []


def test_evicting_one_of_its_own_project_counts_for_the_quota(fleet: Fleet) -> None:
    fleet.bind("victim", count=2, priority=25, preemptible=True)
    fleet.pass_time(3600)
    fleet.tell(s.policy("nlp"), e.QuotaSet(project="nlp", memory_bytes=48 * 1024**3))
    fleet.demand("asks", preempts=True)
    assert victims(fleet, "asks") == ["victim"]


def test_what_is_ending_anyway_is_waited_for(fleet: Fleet) -> None:
    fleet.bind("ending", priority=25, preemptible=True)
    fleet.bind("other", priority=25, preemptible=True)
    fleet.pass_time(3600)
    fleet.evict("ending")
    fleet.demand("asks", preempts=True)
    assert victims(fleet, "asks") == []


def test_a_gang_gets_room_on_different_nodes() -> None:
    fleet = Fleet()
    for name in ("a", "b", "c"):
        fleet.node(name, 1)
        fleet.bind(f"on-{name}", node=name, priority=25, preemptible=name != "b")
    fleet.pass_time(3600)
    fleet.demand("gang", nodes=2, preempts=True)
    assert victims(fleet, "gang") == ["on-a", "on-c"]
    fleet.demand("larger", nodes=3, preempts=True)
    assert victims(fleet, "larger") == []


def test_the_whole_chain(fleet: Fleet) -> None:
    """Raised, ordered, released, bound: each names its cause; nothing else slips in; the victim waits again."""
    fleet.bind("victim", count=2, priority=25, preemptible=True)
    fleet.pass_time(3600)
    fleet.demand("asks", priority=50, preempts=True)
    raised = fleet.state.demands["asks"].event_id
    order(fleet, "asks")
    eviction = fleet.state.bindings[fleet.state.demands["victim"].epoch].eviction
    assert eviction is not None
    assert (eviction.reason, eviction.requeue, eviction.room_for) == (EvictionReason.PREEMPTION, True, "asks")
    assert fleet.causes[eviction.event_id] == raised
    assert fleet.state.demands["victim"].phase is Phase.RELEASING
    assert victims(fleet, "asks") == []  # once is enough
    fleet.release("victim", cause=eviction.event_id)
    released = fleet.state.demands["victim"].event_id
    assert fleet.causes[released] == eviction.event_id

    sneak = fleet.demand("sneak", priority=99)
    bound_sneak = place(fleet.state, sneak, {}, now_ns=fleet.now_ns)
    assert bound_sneak is not None
    kept = fleet.state.demands["asks"].room
    assert {a.card for share in bound_sneak.shares for a in share.allotments}.isdisjoint(kept)
    fleet.take(bound_sneak)
    fleet.demand("sneak-2", priority=99)
    assert [r.code for r in explain(fleet.state, fleet.state.demands["sneak-2"].spec, {})] == [
        ReasonCode.PRIORITY_CAP
    ]
    fleet.tell(s.policy("priority"), e.PriorityCapped(priority=75, share=1))
    reasons = explain(fleet.state, fleet.state.demands["sneak-2"].spec, {})
    assert {r.code for r in reasons} == {ReasonCode.HELD_BACK, ReasonCode.EXCLUSIVE_HELD}
    assert any("kept for asks" in sentence(r) for r in reasons)

    asks = fleet.state.demands["asks"]
    assert asks.event_id == released
    bound = place(fleet.state, asks.spec, {}, now_ns=fleet.now_ns)
    assert bound is not None
    assert fleet.take(bound, cause=asks.event_id) == kept
    assert fleet.causes[fleet.state.demands["asks"].event_id] == released
    assert all(not card.held_for for card in fleet.state.cards.values())
    assert fleet.state.demands["victim"].phase is Phase.WAITING
    assert fleet.state.demands["victim"].requeues == 1
    assert fleet.state.findings == []


def test_a_requeued_victim_never_evicts_its_preemptor(fleet: Fleet) -> None:
    fleet.bind("victim", count=2, priority=25, preemptible=True, preempts=True)
    fleet.pass_time(3600)
    fleet.demand("asks", priority=26, preempts=True, preemptible=True, count=2)
    order(fleet, "asks")
    fleet.release("victim")
    bound = place(fleet.state, fleet.state.demands["asks"].spec, {}, now_ns=fleet.now_ns)
    assert bound is not None
    fleet.take(bound)
    fleet.pass_time(7 * 86400)  # ageing raises its place in the queue, and gives no right to evict
    assert victims(fleet, "victim") == []


def test_the_room_is_anybodys_again_when_the_demand_is_withdrawn(fleet: Fleet) -> None:
    fleet.bind("victim", count=2, priority=25, preemptible=True)
    fleet.pass_time(3600)
    fleet.demand("asks", preempts=True)
    order(fleet, "asks")
    assert any(card.held_for for card in fleet.state.cards.values())
    fleet.tell(s.demand("nlp"), e.DemandWithdrawn(demand="asks", project="nlp"))
    assert not any(card.held_for for card in fleet.state.cards.values())
    assert audit(fleet.state) == []


def test_a_victim_that_does_not_answer_keeps_its_cards_and_no_room_is_kept(fleet: Fleet) -> None:
    """Nobody is killed by default; another try finds other victims, or none."""
    fleet.bind("victim", count=2, priority=25, preemptible=True)
    fleet.pass_time(3600)
    fleet.demand("asks", preempts=True)
    order(fleet, "asks")
    epoch = fleet.state.demands["victim"].epoch
    fleet.tell(
        s.run("a"),
        e.EvictionAnswered(
            demand="victim", epoch=epoch, node="a", component="main", answer=CheckpointAnswer.NOT_ACKNOWLEDGED
        ),
    )
    assert not any(card.held_for for card in fleet.state.cards.values())
    assert fleet.state.demands["asks"].room == ()
    assert victims(fleet, "asks") == []
    assert audit(fleet.state) == []


def test_plan_names_whom_it_would_evict_and_what_it_waits_for(fleet: Fleet) -> None:
    fleet.bind("victim", priority=25, preemptible=True, max_run_seconds=7200.0)
    fleet.bind("other", priority=60, max_run_seconds=3700.0)
    fleet.pass_time(3600)
    spec = fleet.spec("asks", preempts=True)
    answer = plan(fleet.state, spec, {}, now_ns=fleet.now_ns)
    assert answer.bound is None
    assert [(v.demand, v.priority, round(v.run_seconds)) for v in answer.evict] == [("victim", 25, 3600)]
    assert answer.soonest is not None
    assert answer.soonest.waits_for == ("other",)
    assert answer.soonest.seconds is not None
    assert 100 <= answer.soonest.seconds <= 120
    assert msgspec.json.decode(msgspec.json.encode(answer))["evict"][0]["demand"] == "victim"


holdings = st.fixed_dictionaries(
    {
        "gib": st.sampled_from([2, 6, 8, 12, 24]),
        "count": st.sampled_from([1, 1, 1, 2]),
        "nodes": st.sampled_from([1, 1, 1, 2]),
        "mode": st.sampled_from([Mode.EXCLUSIVE, Mode.MEMORY_SLICE, Mode.MEMORY_SLICE]),
        "priority": st.sampled_from([10, 25, 40, 50, 60]),
        "preemptible": st.sampled_from([True, True, True, False]),
    }
)


@settings(max_examples=200, deadline=None)
@given(held=st.lists(holdings, min_size=3, max_size=14), ask=holdings, quota=st.sampled_from([0, 0, 0, 48]))
def test_evictions_are_needed_allowed_and_enough(
    held: list[dict[str, object]], ask: dict[str, object], quota: int
) -> None:
    """The safety of this page, for any fleet: enough, allowed, and none too many."""
    fleet = Fleet()
    fleet.node("a", 3)
    fleet.node("b", 2)
    for number, one in enumerate(held):
        fleet.bind(f"h-{number}", **one)
    fleet.pass_time(3600)
    if quota:
        fleet.tell(s.policy("nlp"), e.QuotaSet(project="nlp", memory_bytes=quota * 1024**3))
    spec = fleet.demand("asks", **{**ask, "priority": 60, "preempts": True, "preemptible": False})
    fits = place(fleet.state, spec, {}, now_ns=fleet.now_ns)
    found = room_for(fleet, "asks")
    if fits is not None:
        assert found is None
    if found is None:
        return
    assert found.victims
    for binding in found.victims:
        victim = fleet.state.demands[binding.demand]
        assert victim.spec.preemptible
        assert victim.spec.priority < spec.priority

    def after(gone: list[str]) -> e.Bound | None:
        """Where it would go once these are gone."""
        other = Fleet()
        other.state, other.now_ns = fleet.state.fork(), fleet.now_ns
        for name in gone:
            other.evict(name)
            other.release(name)
        return place(other.state, spec, {}, now_ns=other.now_ns)

    names = [b.demand for b in found.victims]
    assert after(names) is not None
    if spec.resources.nodes == 1:
        for spared in names:
            assert after([name for name in names if name != spared]) is None
    order(fleet, "asks")
    for name in names:
        fleet.release(name)
    bound = place(fleet.state, spec, {}, now_ns=fleet.now_ns + SECOND)
    assert bound is not None
    fleet.take(bound)
    assert fleet.state.findings == []

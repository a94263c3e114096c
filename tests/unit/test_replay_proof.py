"""Proof of decisions: what the placer decided comes out the same again; anything else is told with both answers."""

from __future__ import annotations

import msgspec
import pytest
from rigbook_placer.feasible import Kept, Seen
from rigbook_placer.place import place
from rigbook_replay.proof import Outcome, ProofOfDecisions
from rigbook_replay.retrace import Retrace
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.wire import decode

from tests.unit import ledger_story as s
from tests.unit.journal_story import told

GIB = v.GIB


def decided(demand, policy="pack", seen=None, *, kept=None, change=None, **more):
    """The placer's own decision on the state as it stands; `change` makes it another one."""

    def decide(state):
        bound = place(state, state.demands[demand].spec, seen or {}, policy, kept=kept)
        assert bound is not None
        return msgspec.structs.replace(change(bound) if change else bound, **more)

    return decide


def check(*steps, whole=True):
    _, messages = told(*steps)
    proof = ProofOfDecisions()
    retrace = Retrace(proof, partial=not whole)
    records = [decode(m.seq, m.subject, m.received_ns, m.body) for m in messages]
    for at in range(0, len(records), 4):
        retrace.take(records[at : at + 4])
    retrace.close()
    return proof


def asks(demand, memory_bytes=10 * GIB, **more):
    return s.raised(demand, resources=v.Request(memory_bytes=memory_bytes, **more))


FLEET = (s.joined("a", cards=4, engines=("process",)), s.joined("b", cards=2, engines=("process",)))


@pytest.mark.parametrize("policy", ["pack", "spread"])
def test_every_decision_of_the_placer_comes_out_the_same(policy):
    """Exclusive, shared, several cards, a gang; with events between decision and record."""
    steps = (
        *FLEET,
        asks("one"), decided("one", policy),
        asks("two", mode=v.Mode.MEMORY_SLICE), decided("two", policy),
        asks("three", mode=v.Mode.MEMORY_SLICE), decided("three", policy),
        asks("four", count=2), decided("four", policy),
        s.started("one"), s.exited("one"), s.released("one"),
        asks("five"), decided("five", policy),
    )  # fmt: skip
    proof = check(*steps)
    assert proof.counts[Outcome.SAME] == proof.decisions == 5
    assert proof.good
    assert proof.doubtful == []


def test_a_decision_by_other_means_is_told_with_both_answers():
    def elsewhere(bound):
        return msgspec.structs.replace(bound, shares=(s.share("a", s.card("a", 3)),))

    proof = check(*FLEET, asks("one"), decided("one", change=elsewhere))
    assert not proof.good
    (one,) = proof.doubtful
    assert (one.seq, one.demand, one.outcome) == (4, "one", Outcome.DIFFERENT)
    assert one.recorded.cards[0][:2] == ("a", s.card("a", 3))
    again = place(told(*FLEET, asks("one"))[0].state, asks("one"), {}, "pack")
    assert one.again.cards[0][:2] == (again.shares[0].node, again.shares[0].allotments[0].card)


def test_foreign_use_at_the_time_is_on_the_record():
    """Somebody else's 40 GiB on the card that would have been taken: without it the answer would differ."""
    state = told(*FLEET, asks("one"))[0].state
    first = place(state, asks("one"), {}, "pack").shares[0].allotments[0].card
    seen = {first: Seen(foreign_bytes=40 * GIB, foreign_who="pid 7")}
    proof = check(*FLEET, asks("one"), decided("one", seen=seen))
    assert proof.counts[Outcome.SAME] == 1
    proof = check(
        *FLEET, asks("one"), decided("one", seen=seen, change=lambda b: msgspec.structs.replace(b, seen=()))
    )
    assert proof.counts[Outcome.DIFFERENT] == 1


def test_cards_kept_for_others_are_on_the_record():
    state = told(*FLEET, asks("one"))[0].state
    first = place(state, asks("one"), {}, "pack").shares[0].allotments[0].card
    proof = check(*FLEET, asks("big"), asks("one"), decided("one", kept={first: Kept("big")}))
    assert proof.counts[Outcome.SAME] == 1


def test_another_version_of_the_policy_is_not_held_against_this_one():
    other = decided("two", change=lambda b: msgspec.structs.replace(b, policy="oracle"))
    proof = check(*FLEET, asks("one"), decided("one", policy_version=999), asks("two"), other)
    assert proof.counts[Outcome.OTHER_VERSION] == 2
    assert proof.good


def test_a_position_that_is_not_there_cannot_be_proved():
    proof = check(*FLEET, asks("one"), decided("one", position=77))
    assert proof.counts[Outcome.UNPROVABLE] == 1


def test_what_the_ledger_refused_is_void():
    proof = check(*FLEET, asks("one"), decided("one"), lambda state: s.bound("one", s.card("b")))
    assert proof.counts[Outcome.SAME] == 1
    assert proof.counts[Outcome.VOID] == 1


def test_a_demand_that_came_after_the_decision_makes_it_different():
    steps = (*FLEET, asks("other"), lambda state: asks("one"),
             lambda state: msgspec.structs.replace(place(state, asks("one"), {}, "pack"), position=3))  # fmt: skip
    proof = check(*steps)
    assert proof.counts[Outcome.DIFFERENT] == 1
    assert "not on the log" in proof.doubtful[0].text


def test_events_between_decision_and_record_do_not_count():
    """The node of choice was cordoned between: on the position of the decision it still was the choice."""

    class Taken:
        bound = None

    def take(state):
        Taken.bound = place(state, asks("one"), {}, "pack")
        return e.NodeUnreachable(node=Taken.bound.shares[0].node, silent_seconds=5.0)

    proof = check(*FLEET, asks("one"), take, lambda state: Taken.bound)
    assert proof.counts[Outcome.SAME] == 1

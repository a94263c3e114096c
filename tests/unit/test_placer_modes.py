"""Switching a card's mode, and taking nodes and cards out of use.

Safety, in words:
- a mode is never changed under a binding;
- from the moment a switch is told, the card takes nothing; what was bound before it is a holder like the others;
- the mode changes when the last holder was seen gone, whoever told the switch and whatever became of them.
"""

from __future__ import annotations

import pytest
from rigbook_ledger.audit import audit
from rigbook_placer.place import explain, place
from rigbook_placer.planned import offers
from rigbook_schemas import events as e
from rigbook_schemas import subjects as s
from rigbook_schemas.sentences import sentence
from rigbook_schemas.values import EvictionReason, Mode, ReasonCode

from tests.unit.placer_fleet import Fleet

CARD = "GPU-a-0"


@pytest.fixture
def fleet() -> Fleet:
    """A card in time-slice with two apps on it, as in the field."""
    fleet = Fleet()
    fleet.node("a", 1)
    fleet.bind("app-1", mode=Mode.TIME_SLICE)
    fleet.bind("app-2", mode=Mode.TIME_SLICE)
    return fleet


def switch(fleet: Fleet, mode: Mode | None, *, draining: bool) -> None:
    fleet.tell(s.policy(CARD), e.ModeSet(card=CARD, mode=mode, draining=draining))


def test_without_draining_it_is_refused_and_stays(fleet: Fleet) -> None:
    switch(fleet, Mode.EXCLUSIVE, draining=False)
    assert fleet.state.findings[-1].code == "mode_conflict"
    assert "app-1, app-2" in fleet.state.findings[-1].text
    assert fleet.state.cards[CARD].mode is None


def test_draining_lets_nothing_in_and_switches_when_the_last_one_is_gone(fleet: Fleet) -> None:
    switch(fleet, Mode.EXCLUSIVE, draining=True)
    for mode in Mode:
        fleet.demand(f"new-{mode}", mode=mode)
        spec = fleet.state.demands[f"new-{mode}"].spec
        assert place(fleet.state, spec, {}) is None
        (reason,) = explain(fleet.state, spec, {})
        assert reason.code is ReasonCode.MODE_SWITCHING
        assert "being switched to exclusive" in sentence(reason)
    assert offers(fleet.state, {}) == []
    for name, mode in (("app-1", None), ("app-2", Mode.EXCLUSIVE)):
        fleet.evict(name, reason=EvictionReason.MODE_SWITCH)
        fleet.release(name)
        assert fleet.state.cards[CARD].mode is mode
    assert fleet.state.cards[CARD].switching == ""
    assert place(fleet.state, fleet.state.demands["new-exclusive"].spec, {}) is not None
    assert place(fleet.state, fleet.state.demands["new-time-slice"].spec, {}) is None
    assert fleet.state.findings == []


def test_an_empty_card_is_switched_at_once() -> None:
    fleet = Fleet()
    fleet.node("a", 1)
    switch(fleet, Mode.MEMORY_SLICE, draining=True)
    assert (fleet.state.cards[CARD].mode, fleet.state.cards[CARD].switching) == (Mode.MEMORY_SLICE, "")


def test_a_switch_can_be_taken_back(fleet: Fleet) -> None:
    switch(fleet, Mode.EXCLUSIVE, draining=True)
    switch(fleet, None, draining=False)
    assert fleet.state.cards[CARD].switching == ""
    assert fleet.bind("another", mode=Mode.TIME_SLICE, gib=4) == (CARD,)


def test_a_binding_that_races_with_the_switch_is_on_the_record(fleet: Fleet) -> None:
    """A placer cannot miss the switch: it stands on the subjects that its append expects. If it did all the same,
    the binding is real, leaves a finding, and the mode waits for it."""
    spec = fleet.demand("racing", mode=Mode.TIME_SLICE, gib=4)
    bound = place(fleet.state, spec, {})
    assert bound is not None
    switch(fleet, Mode.EXCLUSIVE, draining=True)
    fleet.take(bound)
    assert fleet.state.findings[-1].code == "bound_while_switching"
    for name in ("app-1", "app-2"):
        fleet.release(name)
    assert fleet.state.cards[CARD].mode is None
    fleet.release("racing")
    assert fleet.state.cards[CARD].mode is Mode.EXCLUSIVE
    assert audit(fleet.state) == []


def test_offers_are_what_would_be_bound_now() -> None:
    fleet = Fleet()
    fleet.node("a", 2)
    fleet.node("b", 1, gib=80, model="A100")
    fleet.node("c", 1, gib=80, model="A100")
    fleet.bind("part", mode=Mode.MEMORY_SLICE, gib=10, node="a")
    fleet.tell(s.policy("c"), e.NodeCordoned(node="c"))
    rows = {
        (o.model, o.mode): (o.memory_bytes // 1024**3, o.cards, o.count_max) for o in offers(fleet.state, {})
    }
    assert rows == {
        ("RTX4090", "exclusive"): (24, 1, 1),
        ("RTX4090", "memory-slice"): (24, 1, 1),
        ("RTX4090", "time-slice"): (24, 1, 1),
        ("A100", "exclusive"): (80, 1, 1),
        ("A100", "memory-slice"): (80, 1, 1),
        ("A100", "time-slice"): (80, 1, 1),
    }
    for row in offers(fleet.state, {}):
        spec = fleet.spec(
            "x", gib=row.memory_bytes / 1024**3, mode=Mode(row.mode), model=row.model, count=row.count_max
        )
        assert place(fleet.state, spec, {}) is not None
        more = fleet.spec("y", gib=row.memory_bytes / 1024**3 + 1, mode=Mode(row.mode), model=row.model)
        assert place(fleet.state, more, {}) is None
    fleet.tell(s.policy("nlp"), e.QuotaSet(project="nlp", memory_bytes=30 * 1024**3))
    mine = {(o.model, o.mode): o.memory_bytes // 1024**3 for o in offers(fleet.state, {}, project="nlp")}
    assert mine == {
        ("RTX4090", "memory-slice"): 20, ("RTX4090", "time-slice"): 20,
        ("A100", "memory-slice"): 20, ("A100", "time-slice"): 20,
    }  # fmt: skip

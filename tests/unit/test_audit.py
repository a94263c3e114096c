"""The audit sees each kind of broken invariant; method: break one thing in a sound state by hand.

That it says nothing of sound states is shown by every story in test_evolve_* and by test_core_machine.
"""

from __future__ import annotations

from msgspec.structs import replace
from rigbook_ledger.audit import audit, audit_touched
from rigbook_ledger.state import Phase
from rigbook_schemas import events as e
from rigbook_schemas import values as v

from tests.unit.ledger_story import (
    CARD_BYTES,
    Story,
    bound,
    card,
    epoch_of,
    evicted,
    joined,
    raised,
    released,
    withdrawn,
)

HALF = CARD_BYTES // 2


def two_on_two() -> Story:
    """d holds both nodes' first card, x half of the second card of node a."""
    return Story().given(
        joined("a"),
        joined("b"),
        raised("d"),
        raised("x"),
        raised("w"),
        bound("d", card("a"), card("b")),
        bound("x", card("a", 1), mode=v.Mode.MEMORY_SLICE, memory_bytes=HALF),
    )


def codes(story: Story) -> list[str]:
    found = audit(story.state)
    assert all(finding.seq == story.state.position for finding in found)
    return sorted({finding.code for finding in found})


def test_a_sound_state_has_no_findings() -> None:
    assert codes(two_on_two()) == []


def test_double_binding() -> None:
    for mode in (v.Mode.EXCLUSIVE, v.Mode.MEMORY_SLICE):
        story = two_on_two().given(bound("w", card("a"), mode=mode, memory_bytes=1))
        assert "double_binding" in codes(story)


def test_over_allotted() -> None:
    story = two_on_two().given(bound("w", card("a", 1), mode=v.Mode.MEMORY_SLICE, memory_bytes=HALF + 1))
    assert codes(story) == ["over_allotted"]


def test_two_modes_on_one_card() -> None:
    story = two_on_two().given(bound("w", card("a", 1), mode=v.Mode.TIME_SLICE, memory_bytes=1))
    assert codes(story) == ["mode_mismatch"]


def test_another_mode_than_the_pinned_one() -> None:
    story = two_on_two().given(e.ModeSet(card=card("b", 1), mode=v.Mode.TIME_SLICE), bound("w", card("b", 1)))
    assert codes(story) == ["mode_mismatch"]


def test_the_books_of_a_card() -> None:
    story = two_on_two()
    story.state.cards[card("a")] = replace(story.state.cards[card("a")], reserved_bytes=1)
    assert codes(story) == ["reserved_wrong"]


def test_a_holder_that_is_not_live() -> None:
    story = two_on_two()
    story.state.cards[card("b", 1)] = replace(story.state.cards[card("b", 1)], holders=(99,))
    assert codes(story) == ["holder_unknown"]


def test_a_gang_that_lost_a_card() -> None:
    story = two_on_two()
    story.state.cards[card("b")] = replace(story.state.cards[card("b")], holders=(), reserved_bytes=0)
    assert codes(story) == ["gang_broken"]
    del story.state.cards[card("b")]
    assert codes(story) == ["gang_broken", "index_wrong"]


def test_a_gang_that_holds_a_card_after_its_release() -> None:
    story = two_on_two()
    epoch = epoch_of(story.state, "d")
    story.state.bindings[epoch] = replace(story.state.bindings[epoch], released=("a",))
    assert codes(story) == ["gang_broken", "quota_wrong"]


def test_a_binding_without_its_demand() -> None:
    story = two_on_two()
    del story.state.demands["x"]
    assert codes(story) == ["binding_without_demand"]


def test_a_binding_whose_demand_points_elsewhere() -> None:
    story = two_on_two()
    story.state.demands["x"] = replace(story.state.demands["x"], epoch=1)
    assert codes(story) == ["binding_without_demand", "demand_without_binding"]


def test_a_demand_that_holds_nothing() -> None:
    story = two_on_two()
    story.state.demands["w"] = replace(story.state.demands["w"], phase=Phase.RUNNING)
    assert codes(story) == ["demand_without_binding", "index_wrong"]


def test_a_demand_that_ended_and_holds() -> None:
    story = two_on_two()
    story.state.demands["x"] = replace(story.state.demands["x"], phase=Phase.ENDED)
    assert codes(story) == ["binding_without_demand", "demand_without_binding", "index_wrong"]


def test_the_books_of_a_project() -> None:
    story = two_on_two()
    story.state.projects["p"] = replace(story.state.projects["p"], used_bytes=1)
    assert codes(story) == ["quota_wrong"]
    story = two_on_two()
    story.state.projects["p"] = replace(story.state.projects["p"], releasing_bytes=1)
    assert codes(story) == ["quota_wrong"]
    story = two_on_two()
    del story.state.projects["p"]
    assert codes(story) == ["quota_wrong"]


def test_indexes() -> None:
    story = two_on_two()
    story.state.waiting.clear()
    assert codes(story) == ["index_wrong"]
    story = two_on_two()
    story.state.waiting["nobody"] = None
    assert codes(story) == ["index_wrong"]
    story = two_on_two()
    story.state.ended["nobody"] = None
    assert codes(story) == ["index_wrong"]
    story = two_on_two()
    story.state.nodes["a"] = replace(story.state.nodes["a"], cards=("GPU-z-0",))
    assert codes(story) == ["index_wrong"]


def test_the_audit_of_what_changed_sees_the_batch_and_only_the_batch() -> None:
    story = two_on_two()
    assert audit_touched(story.state) == []
    story.state.cards[card("a")] = replace(story.state.cards[card("a")], reserved_bytes=1)
    story.state.touched.clear()
    assert audit_touched(story.state) == []
    story.when(bound("w", card("a"), mode=v.Mode.EXCLUSIVE))
    assert {finding.code for finding in audit_touched(story.state)} == {
        "double_binding", "reserved_wrong", "over_allotted",
    }  # fmt: skip


def test_the_audit_of_what_changed_bears_with_what_is_gone() -> None:
    story = two_on_two()
    story.state.touched.demands.add("nobody")
    story.state.touched.cards.add("GPU-z-0")
    story.state.touched.bindings.add(99)
    assert audit_touched(story.state) == []


def test_every_way_to_the_end_leaves_sound_books() -> None:
    two_on_two().when(evicted("d", "a", "b", requeue=True), withdrawn("x"), released("d", "a")).then(
        {"d": Phase.RELEASING, "x": Phase.RELEASING}, used={"p": (CARD_BYTES + HALF, CARD_BYTES + HALF)}
    ).when(released("d", "b"), released("x", "a")).then(
        {"d": Phase.WAITING, "x": Phase.ENDED}, used={"p": (0, 0)}
    )

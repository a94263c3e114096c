"""The fold of a recovered log: bindings of a lost log that keep their right and their epoch."""

from __future__ import annotations

import msgspec
import pytest
from rigbook_ledger.state import Phase
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.wire import instant

from tests.unit.ledger_story import (
    CARD_BYTES,
    Story,
    Told,
    bound,
    card,
    evicted,
    joined,
    raised,
    released,
    share,
    started,
    withdrawn,
)

BOUND = "2026-09-21T14:00:00Z"


def skipped(count: int) -> list[e.SequenceSkipped]:
    return [e.SequenceSkipped(generation=1) for _ in range(count)]


def adopted(demand: str = "d", *cards: str, epoch: int = 2, probe: bool = False, **more: object) -> e.Adopted:
    shares = tuple(share(uuid.split("-")[1], uuid, probe=probe) for uuid in cards or (card("a"),))
    told = e.Adopted(demand=demand, epoch=epoch, spec=raised(demand), shares=shares, bound=BOUND)
    return msgspec.structs.replace(told, **more)


def a_lost_log() -> Story:
    return Story().given(joined("a"), *skipped(3), joined("b"))


def test_a_skipped_sequence_is_nothing_but_its_place_on_the_log() -> None:
    story = Story().when(*skipped(3)).then()
    assert (story.state.position, story.state.own_position) == (3, 3)


def test_a_demand_that_the_log_has_lost_is_adopted_with_its_binding() -> None:
    story = (
        a_lost_log()
        .when(adopted(started=("a", "elsewhere"), ready=("elsewhere",)))
        .then({"d": Phase.RUNNING}, holders={card("a"): ["d"]}, used={"p": (CARD_BYTES, 0)})
    )
    binding = story.state.bindings[2]
    assert (binding.started, binding.ready, binding.policy) == (("a",), (), "adopted")
    assert binding.bound_ns == instant(BOUND)
    demand = story.state.demands["d"]
    assert (demand.epoch, demand.epoch_last, demand.raised_seq) == (2, 2, story.state.position)
    assert not story.state.waiting


@pytest.mark.parametrize(
    ("so_far", "probe", "phase"),
    [
        ({}, False, Phase.BOUND),
        ({"started": ("a",)}, True, Phase.STARTING),
        ({"started": ("a",), "ready": ("a",)}, True, Phase.RUNNING),
        ({"started": ("a",), "wanted": False}, False, Phase.RELEASING),
    ],
)
def test_it_is_where_it_was(so_far: dict[str, object], probe: bool, phase: Phase) -> None:
    story = a_lost_log().when(adopted(probe=probe, **so_far)).then({"d": phase})
    releasing = CARD_BYTES if phase is Phase.RELEASING else 0
    story.then(used={"p": (CARD_BYTES, releasing)})
    story.when(released()).then({"d": Phase.ENDED}, holders={card("a"): []}, used={"p": (0, 0)})


def test_a_gang_is_adopted_whole() -> None:
    story = a_lost_log().when(adopted("d", card("a"), card("b"), started=("a",))).then({"d": Phase.BOUND})
    story.when(started(node="b")).then({"d": Phase.RUNNING})
    story.when(released(node="a")).then(holders={card("a"): [], card("b"): ["d"]})


def test_a_demand_that_the_log_still_knows_is_adopted_from_where_it_stands() -> None:
    story = a_lost_log().given(raised("d"), raised("x"), withdrawn("x"))
    story.when(adopted("d"), adopted("x", card("b"), epoch=3)).then(
        {"d": Phase.BOUND, "x": Phase.RELEASING}, used={"p": (2 * CARD_BYTES, CARD_BYTES)}
    )
    assert story.state.demands["d"].raised_seq < story.state.position - 1
    assert not story.state.waiting
    story.when(released("x", "b")).then({"x": Phase.ENDED})


def test_without_a_time_it_was_bound_now() -> None:
    for time in ("", "yesterday"):
        story = a_lost_log().when(adopted(bound=time)).then({"d": Phase.BOUND})
        assert story.state.bindings[2].bound_ns == story.state.received_ns


def test_orders_and_releases_name_the_old_epoch() -> None:
    story = a_lost_log().when(adopted(started=("a",)), evicted(requeue=True)).then({"d": Phase.RELEASING})
    story.when(released()).then({"d": Phase.WAITING})
    story.when(bound("d", card("b"))).then({"d": Phase.BOUND})


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (adopted(spec=raised("other")), "the demand told of is other"),
        (adopted(epoch=99), "ahead of this event"),
        (adopted("d", card("a", 7)), "is not known"),
        (adopted("d", card("a"), card("a")), "two shares"),
        (adopted(spec=raised("d"), shares=(share("a"),)), "has no card"),
        (Told(data=adopted(), subject="rig.own.bind.b"), "does not belong on"),
        (adopted("held"), "not waiting"),
        (adopted(epoch=7), "is live, of demand held"),
        (adopted("known", epoch=3, spec=raised("known", "q")), "belongs to project p"),
    ],
    ids=lambda told: told if isinstance(told, str) else "",
)
def test_what_cannot_be_adopted_gives_no_right(told: e.Adopted | Told, why: str) -> None:
    story = a_lost_log().given(raised("held"), bound("held", card("b", 1)), raised("known"))
    assert story.state.demands["held"].epoch == 7
    story.when(told).then(
        {"held": Phase.BOUND, "known": Phase.WAITING},
        findings=["void_binding"],
        holders={card("a"): [], card("b", 1): ["held"]},
        used={"p": (CARD_BYTES, 0)},
    )
    assert why in story.findings[0].text
    assert "d" not in story.state.demands


def test_an_adoption_over_a_live_binding_is_seen_by_the_audit() -> None:
    story = a_lost_log().given(raised("x"), bound("x", card("a")))
    story.when(adopted()).then(
        {"d": Phase.BOUND, "x": Phase.BOUND}, audited=["double_binding", "over_allotted"]
    )


def recovered(generation: int) -> e.LogRecovered:
    return e.LogRecovered(
        generation=generation, stream_created="1790000000000000000", how="adopted", by="grace"
    )


def test_each_recovery_is_of_a_newer_generation() -> None:
    story = a_lost_log().when(recovered(1), recovered(3)).then()
    assert story.state.generation == 3
    story.when(recovered(3)).then(findings=["stale_recovery"])
    story.when(recovered(2)).then(findings=["stale_recovery"])
    assert story.state.generation == 3


def test_modes_of_an_adopted_binding_count_as_any_others() -> None:
    part = share("a", card("a"), mode=v.Mode.MEMORY_SLICE, memory_bytes=v.GIB)
    story = a_lost_log().when(adopted(shares=(part,))).then({"d": Phase.BOUND}, used={"p": (v.GIB, 0)})
    assert story.state.mode_of(story.state.cards[card("a")]) is v.Mode.MEMORY_SLICE

"""The fold of the fleet, branch by branch: inventories, silence, drifts, and the operator's rules."""

from __future__ import annotations

import msgspec
import pytest
from rigbook_ledger.state import Phase, Policy
from rigbook_schemas import events as e
from rigbook_schemas import values as v

from tests.unit.ledger_story import (
    CARD_BYTES,
    Step,
    Story,
    Told,
    bound,
    card,
    changed,
    inventory,
    joined,
    raised,
    released,
)

# -- inventories ----------------------------------------------------------------------------------


def test_a_node_joins_with_its_cards() -> None:
    told = joined(
        "a",
        boot_id="boot-1",
        labels={"zone": "east"},
        engines=("process",),
        driver_version="570",
        cuda_version="12.8",
        simulated=True,
        memory_bytes=v.GIB,
        cpus=8,
        agent_version="0.1.0",
        address="10.0.0.7",
    )
    story = Story().when(told).then()
    node = story.state.nodes["a"]
    assert node.cards == (card("a", 0), card("a", 1))
    assert node.joined_seq == story.state.position
    same = {
        name: getattr(told, name)
        for name in told.__struct_fields__
        if hasattr(node, name) and name != "cards"
    }
    assert {name: getattr(node, name) for name in same} == same
    first = story.state.cards[card("a")]
    assert (first.node, first.index, first.model, first.memory_bytes) == ("a", 0, "RTX 4090", CARD_BYTES)


def test_joining_again_keeps_the_books_and_the_rules() -> None:
    story = Story().given(joined("a"), raised("d"), bound("d", card("a")))
    story.given(e.NodeCordoned(node="a", reason="dust"), e.GpuQuarantined(card=card("a", 1), reason="hot"))
    story.given(
        e.ModeSet(card=card("a"), mode=v.Mode.EXCLUSIVE), e.NodeUnreachable(node="a", silent_seconds=60)
    )
    story.when(joined("a", incarnation="i-2")).then({"d": Phase.BOUND}, holders={card("a"): ["d"]})
    node = story.state.nodes["a"]
    assert (node.incarnation, node.cordoned, node.unreachable_ns) == ("i-2", "dust", 0)
    assert story.state.cards[card("a")].reserved_bytes == CARD_BYTES
    assert story.state.cards[card("a")].mode is v.Mode.EXCLUSIVE
    assert story.state.cards[card("a", 1)].quarantined == "hot"


def test_an_inventory_tells_what_a_card_is_now() -> None:
    story = Story().given(joined("a", cards=1))
    told = msgspec.structs.replace(
        inventory("a"), index=3, model="RTX 4090 D", usable=False, why="ECC", parent="GPU-whole"
    )
    story.when(changed("a", [told])).then()
    seen = story.state.cards[card("a")]
    assert (seen.index, seen.model, seen.usable, seen.why, seen.parent) == (
        3, "RTX 4090 D", False, "ECC", "GPU-whole",
    )  # fmt: skip


def test_a_card_that_does_not_answer_keeps_what_it_was_on_the_books() -> None:
    story = Story().given(joined("a", cards=1), raised("d"), bound("d", card("a")))
    lost = msgspec.structs.replace(inventory("a", memory_bytes=0), model="", usable=False, why="lost")
    story.when(changed("a", [lost])).then({"d": Phase.BOUND})
    seen = story.state.cards[card("a")]
    assert (seen.memory_bytes, seen.model, seen.usable) == (CARD_BYTES, "RTX 4090", False)


def test_a_free_card_that_is_gone_is_forgotten() -> None:
    story = Story().given(joined("a")).when(changed("a", [inventory("a", 0)])).then()
    assert list(story.state.cards) == [card("a")]
    assert story.state.nodes["a"].cards == (card("a"),)


def test_a_held_card_that_is_gone_is_forgotten_when_it_was_released() -> None:
    story = Story().given(joined("a"), raised("d"), bound("d", card("a", 1)))
    story.when(changed("a", [inventory("a", 0)])).then(holders={card("a", 1): ["d"]})
    assert not story.state.cards[card("a", 1)].present
    assert story.state.nodes["a"].cards == (card("a", 0), card("a", 1))
    story.when(released()).then({"d": Phase.ENDED})
    assert card("a", 1) not in story.state.cards
    assert story.state.nodes["a"].cards == (card("a", 0),)


@pytest.mark.parametrize(
    ("rule", "undone"),
    [
        (e.GpuQuarantined(card=card("a", 1)), e.GpuRestored(card=card("a", 1))),
        (e.ModeSet(card=card("a", 1), mode=v.Mode.TIME_SLICE), e.ModeSet(card=card("a", 1), mode=None)),
    ],
)
def test_a_card_that_is_gone_and_named_by_a_rule_is_kept_until_the_rule_goes(
    rule: e.Payload, undone: e.Payload
) -> None:
    story = Story().given(joined("a"), rule).when(changed("a", [inventory("a", 0)])).then()
    assert not story.state.cards[card("a", 1)].present
    story.when(undone).then()
    assert card("a", 1) not in story.state.cards
    assert story.state.nodes["a"].cards == (card("a", 0),)


def test_a_card_comes_back() -> None:
    story = Story().given(
        joined("a"), raised("d"), bound("d", card("a", 1)), changed("a", [inventory("a", 0)])
    )
    story.when(joined("a")).then(holders={card("a", 1): ["d"]})
    assert story.state.cards[card("a", 1)].present


def test_a_card_named_twice_counts_once() -> None:
    told = changed("a", [inventory("a"), inventory("a", model="other")])
    story = Story().given(joined("a", cards=0)).when(told).then(findings=["duplicate_card"])
    assert story.state.cards[card("a")].model == "RTX 4090"


@pytest.mark.parametrize("held", [True, False])
def test_a_card_that_two_nodes_claim_stays_where_it_was(held: bool) -> None:
    story = Story().given(joined("a"), raised("d"))
    if held:
        story.given(bound("d", card("a")), changed("a", [inventory("a", 1)]))
    story.when(joined("b", cards=0), changed("b", [inventory("a")])).then(findings=["card_claimed_twice"])
    assert story.state.cards[card("a")].node == "a"
    assert story.state.nodes["b"].cards == ()


def test_a_card_that_was_put_into_another_machine_takes_its_rules_along() -> None:
    story = Story().given(joined("a"), e.GpuQuarantined(card=card("a"), reason="Xid 79"))
    story.given(changed("a", [inventory("a", 1)]), joined("b", cards=0))
    story.when(changed("b", [inventory("a")])).then()
    moved = story.state.cards[card("a")]
    assert (moved.node, moved.present, moved.quarantined) == ("b", True, "Xid 79")
    assert story.state.nodes["a"].cards == (card("a", 1),)
    assert story.state.nodes["b"].cards == (card("a"),)


def test_changed_before_joined_is_a_finding_and_taken_all_the_same() -> None:
    story = Story().when(changed("a", [inventory("a")])).then(findings=["unknown_node"])
    assert card("a") in story.state.cards


def test_a_node_speaks_on_its_own_subject() -> None:
    story = Story().when(Told(data=joined("a"), subject="rig.node.b")).then(findings=["wrong_subject"])
    assert not story.state.nodes


def test_a_smaller_card_than_what_is_bound_on_it_is_seen_by_the_audit() -> None:
    story = Story().given(joined("a", cards=1), raised("d"), bound("d", card("a")))
    story.when(changed("a", [inventory("a", memory_bytes=CARD_BYTES // 2)])).then(audited=["over_allotted"])


# -- silence --------------------------------------------------------------------------------------


def test_unreachable_keeps_ownership_and_recovered_ends_it() -> None:
    story = Story().given(joined("a"), raised("d"), bound("d", card("a")))
    story.when(e.NodeUnreachable(node="a", silent_seconds=20)).then(
        {"d": Phase.BOUND}, holders={card("a"): ["d"]}
    )
    since = story.state.nodes["a"].unreachable_ns
    assert since == story.state.received_ns
    story.when(e.NodeUnreachable(node="a", silent_seconds=40)).then()
    assert story.state.nodes["a"].unreachable_ns == since
    story.when(e.NodeRecovered(node="a"), e.NodeRecovered(node="a")).then({"d": Phase.BOUND})
    assert story.state.nodes["a"].unreachable_ns == 0


# -- drifts ---------------------------------------------------------------------------------------


def test_a_drift_is_open_until_cleared_and_the_latest_telling_counts() -> None:
    def told(sightings: int) -> e.DriftDetected:
        return e.DriftDetected(
            drift="x", kind=v.DriftKind.LEFTOVER, node="a", sentence="still runs", sightings=sightings
        )

    cleared = e.DriftCleared(drift="x", kind=v.DriftKind.LEFTOVER, node="a")
    story = Story().given(joined("a")).when(told(2), told(3)).then()
    assert story.state.drifts["x"].sightings == 3
    story.when(cleared, cleared).then()
    assert not story.state.drifts


# -- rules ----------------------------------------------------------------------------------------


def test_a_quota_may_be_set_lowered_and_taken_away_and_evicts_nobody() -> None:
    story = Story().given(joined("a"), raised("d"), bound("d", card("a")))
    story.when(e.QuotaSet(project="p", memory_bytes=v.GIB)).then({"d": Phase.BOUND})
    assert story.state.projects["p"].over_bytes == CARD_BYTES - v.GIB
    story.when(e.QuotaSet(project="p", memory_bytes=None)).then()
    assert story.state.projects["p"].over_bytes == 0
    story.when(e.QuotaSet(project="new", memory_bytes=0)).then(used={"new": (0, 0)})


def test_a_mode_is_pinned_and_unpinned() -> None:
    story = Story().given(joined("a")).when(e.ModeSet(card=card("a"), mode=v.Mode.TIME_SLICE)).then()
    assert story.state.mode_of(story.state.cards[card("a")]) is v.Mode.TIME_SLICE
    story.when(e.ModeSet(card=card("a"), mode=None)).then()
    assert story.state.mode_of(story.state.cards[card("a")]) is None


def test_a_mode_is_not_pinned_against_what_is_bound() -> None:
    story = Story().given(joined("a"), raised("d"), bound("d", card("a")))
    story.when(e.ModeSet(card=card("a"), mode=v.Mode.EXCLUSIVE)).then()
    story.when(e.ModeSet(card=card("a"), mode=v.Mode.TIME_SLICE)).then(findings=["mode_conflict"])
    assert "d" in story.findings[0].text
    assert story.state.cards[card("a")].mode is v.Mode.EXCLUSIVE
    story.when(e.ModeSet(card=card("a"), mode=None)).then()


def test_cordon_and_quarantine() -> None:
    story = Story().given(joined("a"))
    story.when(e.NodeCordoned(node="a"), e.GpuQuarantined(card=card("a"))).then()
    assert story.state.nodes["a"].cordoned == "no reason given"
    assert story.state.cards[card("a")].quarantined == "no reason given"
    story.when(e.NodeUncordoned(node="a"), e.GpuRestored(card=card("a"))).then()
    assert story.state.nodes["a"].cordoned is None
    assert story.state.cards[card("a")].quarantined is None


def test_the_priority_cap() -> None:
    story = Story().when(e.PriorityCapped(priority=80, share=0.25)).then()
    assert story.state.policy == Policy(cap_priority=80, cap_share=0.25)
    story.when(e.PriorityCapped(priority=80, share=1)).then()
    assert story.state.policy.cap_share is None


def test_healing_is_switched_per_kind() -> None:
    on = [e.HealingSet(kind=kind, on=True) for kind in (v.DriftKind.SQUATTER, v.DriftKind.LEFTOVER)]
    story = Story().when(*on, on[0]).then()
    assert story.state.policy.healing == (v.DriftKind.LEFTOVER, v.DriftKind.SQUATTER)
    story.when(
        e.HealingSet(kind=v.DriftKind.LEFTOVER, on=False), e.HealingSet(kind=v.DriftKind.OVERUSE, on=False)
    )
    story.then()
    assert story.state.policy.healing == (v.DriftKind.SQUATTER,)


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (e.NodeCordoned(node="z"), "unknown_node"),
        (e.NodeUncordoned(node="z"), "unknown_node"),
        (e.NodeUnreachable(node="z", silent_seconds=1), "unknown_node"),
        (e.NodeRecovered(node="z"), "unknown_node"),
        (e.GpuQuarantined(card="GPU-z-0"), "unknown_card"),
        (e.GpuRestored(card="GPU-z-0"), "unknown_card"),
        (e.ModeSet(card="GPU-z-0", mode=None), "unknown_card"),
        (e.UnknownAccepted(seq=7), "nothing_to_accept"),
    ],
)
def test_rules_for_what_is_not_known_are_findings(step: Step, code: str) -> None:
    story = Story().when(step).then(findings=[code])
    assert not story.state.nodes
    assert not story.state.cards

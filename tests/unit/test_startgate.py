"""The start gate: two engines that measure a card at once misjudge each other (CASES 13). No clock, no tasks."""

from __future__ import annotations

from rigbook_nodeagent.startgate import MARGIN_SECONDS, UNPROBED_SECONDS, StartGate, start_seconds_max
from rigbook_schemas.values import Component, Probe


class Gate:
    def __init__(self) -> None:
        self.now = 0.0
        self.gate = StartGate(lambda: self.now)
        self.nudged: list[int] = []

    def enter(self, epoch: int, *cards: str, seconds_max: float = 100.0) -> str:
        return self.gate.enter(
            epoch, cards, seconds_max=seconds_max, name=f"d{epoch}", nudge=lambda: self.nudged.append(epoch)
        )


def test_one_at_a_time_on_a_card_and_the_next_is_told() -> None:
    g = Gate()
    assert g.enter(1, "A") == ""
    assert g.enter(1, "A") == "", "asked again"
    assert g.enter(2, "A") == "d1"
    g.gate.leave(1)
    assert g.nudged == [2]
    assert g.enter(2, "A") == ""


def test_other_cards_do_not_wait() -> None:
    g = Gate()
    assert g.enter(1, "A") == ""
    assert g.enter(2, "B") == ""


def test_in_the_order_they_came_also_over_several_cards() -> None:
    g = Gate()
    assert g.enter(1, "A") == ""
    assert g.enter(2, "A", "B") == "d1"
    assert g.enter(3, "B") == "d2", "else a big one would never get both of its cards"
    g.gate.leave(1)
    assert g.enter(3, "B") == "d2"
    assert g.enter(2, "A", "B") == ""
    assert g.enter(3, "B") == "d2"
    g.gate.leave(2)
    assert g.enter(3, "B") == ""


def test_who_gives_up_waiting_lets_the_others_pass() -> None:
    g = Gate()
    g.enter(1, "A")
    g.enter(2, "A")
    assert g.enter(3, "A") == "d1"
    g.gate.leave(2)
    g.gate.leave(1)
    assert g.enter(3, "A") == ""
    g.gate.leave(99)  # nobody


def test_a_start_that_never_ends_holds_the_gate_for_its_time_only() -> None:
    g = Gate()
    assert g.enter(1, "A", seconds_max=60.0) == ""
    g.now = 59.0
    assert g.enter(2, "A") == "d1"
    g.now = 60.0
    assert g.enter(2, "A") == ""
    assert g.enter(3, "A") == "d2"


def test_how_long_a_start_may_take() -> None:
    alone = Component(starts_alone=True)
    assert start_seconds_max([Component()]) == 0.0
    assert start_seconds_max([Component(starts_alone=True, gpu=False)]) == 0.0
    assert start_seconds_max([alone]) == UNPROBED_SECONDS
    probed = Component(starts_alone=True, probe=Probe(startup_seconds_max=600.0))
    assert start_seconds_max([probed]) == 600.0 + MARGIN_SECONDS
    loads = Component(starts_alone=True, probe=Probe(), startup=Probe(startup_seconds_max=1800.0))
    assert start_seconds_max([alone, loads]) == 1800.0 + MARGIN_SECONDS

"""`rigbook_reaper.liveness`: who is silent, by our own clock; and when it is us."""

from __future__ import annotations

from msgspec.structs import replace
from rigbook_ledger.state import Node
from rigbook_reaper.liveness import Heard, Liveness, Patience, assess, silence_allowed

BEGAN = 500.0


def nodes(*names: str, **unreachable_ns: int) -> dict[str, Node]:
    return {
        name: Node(
            name=name, incarnation="i", boot_id="b", joined_seq=1, unreachable_ns=unreachable_ns.get(name, 0)
        )
        for name in names
    }


def heard(**at: float) -> dict[str, Heard]:
    return {name: Heard(at=t, received_ns=int(t * 1e9)) for name, t in at.items()}


def look(
    fleet: dict[str, Node], ears: dict[str, Heard], now: float, lost: dict[str, float] | None = None
) -> Liveness:
    return assess(fleet, ears, lost or {}, listening_since=BEGAN, now=now, patience=Patience())


def silent(found: Liveness) -> list[str]:
    return [s.node for s in found.silent]


def test_fifteen_seconds_at_one_heartbeat_a_second() -> None:
    fleet, ears = nodes("a", "b"), heard(a=1000, b=1015)
    assert look(fleet, ears, 1015) == Liveness()
    found = look(fleet, ears, 1015.5)
    assert silent(found) == ["a"]
    assert found.silent[0].silent_seconds == 15.5
    assert found.silent[0].last_heard_ns == 1000 * 10**9


def test_the_grace_goes_with_the_interval_within_bounds() -> None:
    patience = Patience()
    assert silence_allowed(1.0, patience) == 15.0
    assert silence_allowed(5.0, patience) == 75.0
    assert silence_allowed(0.0, patience) == 5.0
    assert silence_allowed(1e12, patience) == 300.0


def test_a_slow_node_is_given_its_own_time() -> None:
    ears = heard(a=1000, b=1060)
    ears["a"] = replace(ears["a"], every_seconds=5.0)
    assert silent(look(nodes("a", "b"), ears, 1070)) == []
    assert silent(look(nodes("a", "b"), {**ears, **heard(b=1075)}, 1076)) == ["a"]


def test_after_our_start_nobody_is_silent_before_the_startup_time() -> None:
    fleet = nodes("a", "b", "c")
    ears = heard(b=BEGAN + 14, c=BEGAN + 14)
    assert silent(look(fleet, ears, BEGAN + 15)) == []
    assert silent(look(fleet, ears, BEGAN + 16)) == ["a"]


def test_what_was_heard_before_a_pause_of_ours_does_not_count_against_a_node() -> None:
    fleet, ears = nodes("a", "b"), heard(a=BEGAN - 100, b=BEGAN - 100)
    assert look(fleet, ears, BEGAN + 10) == Liveness()


def test_a_node_on_the_books_as_unreachable_is_not_told_again() -> None:
    assert look(nodes("a", "b", a=1), heard(b=1000), 1001) == Liveness()


def test_case_9_the_first_heartbeat_after_it_recovers() -> None:
    fleet = nodes("a", "b", a=900 * 10**9)
    assert look(fleet, heard(a=899, b=1000), 1000) == Liveness(), (
        "that one was on its way when it was written down"
    )
    found = look(fleet, heard(a=1000, b=1000), 1000)
    assert [(b.node, b.silent_seconds) for b in found.back] == [("a", 100.0)]


def test_case_8_all_nodes_at_once_is_us() -> None:
    fleet = nodes("a", "b", "c", "d", "e")
    found = look(fleet, heard(a=1000, b=1000.3, c=1000.5, d=1000.7, e=1000.9), 1015.2)
    assert found.silent == ()
    assert found.mass_loss == "heartbeats of 5/5 nodes missing: control-plane problem?"


def test_half_the_nodes_may_be_silent_one_more_is_a_mass_loss() -> None:
    fleet = nodes("a", "b", "c", "d")
    assert silent(look(fleet, heard(a=1000, b=1000, c=1015, d=1015), 1016)) == ["a", "b"]
    assert look(fleet, heard(a=1000, b=1000, c=1000, d=1015), 1016).mass_loss


def test_nodes_lost_one_after_the_other_in_one_window_are_a_mass_loss_too() -> None:
    fleet = nodes("a", "b", "c", "d", a=1, b=1)
    ears = heard(c=1000, d=1015)
    assert look(fleet, ears, 1016, lost={"a": 980.0, "b": 990.0}).mass_loss
    assert silent(look(fleet, {**ears, **heard(d=1500)}, 1501, lost={"a": 980.0, "b": 990.0})) == ["c"]


def test_a_fleet_of_one_can_be_silent() -> None:
    assert silent(look(nodes("a"), heard(a=1000), 1016)) == ["a"]


def test_during_a_mass_loss_a_node_may_still_come_back() -> None:
    fleet = nodes("a", "b", "c", a=900 * 10**9)
    found = look(fleet, heard(a=1015, b=1000, c=1000), 1016)
    assert found.mass_loss
    assert [b.node for b in found.back] == ["a"]


def test_an_empty_fleet_is_quiet() -> None:
    assert look({}, {}, 1e6) == Liveness()

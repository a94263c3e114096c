"""How cards stand with their bindings: given events, when a heartbeat shows this, then these drifts, and no order
but for a lost card.
"""

from __future__ import annotations

import pytest
from rigbook_reaper.judge import Rules
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.values import DriftKind

from tests.unit.drift_story import GIB, Watchman, process, runs, shows
from tests.unit.ledger_story import (
    bound,
    card,
    changed,
    epoch_of,
    exited,
    inventory,
    joined,
    raised,
    released,
    started,
)
from tests.unit.test_drift import RUNNING, STOPPED, kinds, one

A0, A1 = card("a", 0), card("a", 1)
SLICE = (joined(), raised(name="chat"), bound(mode=v.Mode.MEMORY_SLICE, memory_bytes=24 * GIB), started())
AGAIN = v.Restart(policy="on-failure")
XID_79 = v.Xid(code=79, at="2026-11-30T02:00:00Z", meaning="GPU has fallen off the bus")
LOST = v.CardObservation(uuid=A0, unknown="GPU is lost", lost=True, xids=(XID_79,))


def held(w: Watchman, **more: object) -> dict[str, object]:
    return {
        "components": (runs(w.state),),
        "cards": (shows(A0, process(w.state), **more), shows(A1)),
    }


# -- card_lost ------------------------------------------------------------------------------------


def test_case_24_a_lost_card_is_told_with_its_xid_and_who_had_it() -> None:
    w = Watchman(*RUNNING)
    seen = one(w.compares(components=(runs(w.state),), cards=(LOST, shows(A1))))
    assert seen.kind is DriftKind.CARD_LOST
    assert seen.sentence == f"{A0} of node a answers nothing more (GPU is lost). It is bound to chat."
    assert f"Xid 79 on {A0}" in [fact.what for fact in seen.evidence]
    assert "nvidia-smi --gpu-reset -i 0" in seen.remedy
    assert "gpu quarantine" in seen.remedy
    assert seen.epoch == epoch_of(w.state, "d")


def test_a_lost_card_that_nobody_has_is_told_too_and_there_is_nothing_to_heal() -> None:
    w = Watchman(joined(), healing=[DriftKind.CARD_LOST])
    w.sees_for(20, cards=(LOST, shows(A1)))
    assert w.kinds() == ["DriftDetected"]
    w.sees_for(3)
    assert w.kinds() == ["DriftDetected", "DriftCleared"]


def test_a_bound_card_that_left_the_inventory_is_lost_and_a_free_one_was_taken_out() -> None:
    w = Watchman(*RUNNING, changed(cards=[]))
    shown = w.compares(components=(runs(w.state),), cards=())
    assert kinds(shown) == [DriftKind.CARD_LOST]
    assert shown.sightings[0].card == A0


def test_healing_a_lost_card_stops_its_binding_and_starts_it_elsewhere() -> None:
    w = Watchman(
        joined(), raised(name="chat", restart=AGAIN), bound(), started(), healing=[DriftKind.CARD_LOST]
    )
    w.sees_for(10, components=(runs(w.state),), cards=(LOST, shows(A1)))
    orders = [s for s in w.said if isinstance(s, e.EvictionOrdered)]
    assert len(orders) == 1, "its end is ordered once; if that does not help it is a leftover"
    assert (orders[0].reason, orders[0].requeue) == (v.EvictionReason.CARD_LOST, True)


def test_the_other_card_of_the_node_is_in_order() -> None:
    w = Watchman(*RUNNING, raised("e"), bound("e", A1), started("e"))
    other = runs(w.state, "e", ref="pid:7@1", pids=(7,))
    shown = w.compares(
        components=(runs(w.state), other), cards=(LOST, shows(A1, process(w.state, "e", pid=7)))
    )
    assert [(s.kind, s.demand) for s in shown.sightings] == [(DriftKind.CARD_LOST, "d")]


# -- mode_mismatch --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("books", "more", "words"),
    [
        (SLICE, {"compute_mode": "Exclusive_Process"}, "only one process gets onto it"),
        (SLICE, {"compute_mode": "Prohibited"}, "nothing can run on it"),
        (RUNNING, {"compute_mode": "Prohibited"}, "nothing can run on it"),
        (RUNNING, {"mig": True}, "split into MIG instances"),
    ],
)
def test_a_card_shared_in_another_way_than_its_bindings_say(books, more, words) -> None:
    w = Watchman(*books)
    seen = one(w.compares(**held(w, **more)))
    assert seen.kind is DriftKind.MODE_MISMATCH
    assert words in seen.sentence
    assert "nvidia-smi -i 0" in seen.remedy
    assert not seen.healable


@pytest.mark.parametrize(
    ("books", "more"),
    [
        (RUNNING, {"compute_mode": "Exclusive_Process"}),
        (SLICE, {"compute_mode": "Default", "mig": False}),
        (SLICE, {}),
        ((joined(),), {"compute_mode": "Prohibited", "mig": True}),
    ],
)
def test_no_mismatch(books, more) -> None:
    w = Watchman(*books)
    shown = w.compares(
        components=(runs(w.state),) if "d" in w.state.demands else (),
        cards=(
            shows(A0, *((process(w.state, memory_bytes=GIB),) if "d" in w.state.demands else ()), **more),
        ),
    )
    assert kinds(shown) == []


def test_an_instance_of_a_split_card_is_a_card_of_its_own() -> None:
    w = Watchman(
        joined(cards=0), changed(cards=[inventory("a", 0, parent="GPU-x")]), raised(), bound(), started()
    )
    assert kinds(w.compares(**held(w, mig=None))) == []


# -- double_holder --------------------------------------------------------------------------------


def test_two_epochs_on_an_exclusive_card() -> None:
    w = Watchman(*RUNNING, exited(), released(), raised("e", name="train"), bound("e"), started("e"))
    old = v.ProcessObservation(pid=7, memory_bytes=4 * GIB, epoch=epoch_of(w.state, "d"), demand="d")
    shown = w.compares(
        components=(runs(w.state, "e"),),
        cards=(shows(A0, process(w.state, "e", memory_bytes=20 * GIB), old), shows(A1)),
    )
    assert kinds(shown) == [DriftKind.SQUATTER, DriftKind.DOUBLE_HOLDER]
    seen = shown.sightings[1]
    assert "is bound to train alone, and 2 hold it" in seen.sentence
    assert "of d, pid 7, 4.0 GiB" in seen.sentence
    assert not seen.healable


def test_two_on_a_shared_card_are_as_it_should_be() -> None:
    books = (
        *SLICE, raised("e"), bound("e", mode=v.Mode.MEMORY_SLICE, memory_bytes=24 * GIB), started("e"),
    )  # fmt: skip
    w = Watchman(*books)
    other = runs(w.state, "e", ref="pid:7@1", pids=(7,))
    shown = w.compares(
        components=(runs(w.state), other),
        cards=(shows(A0, process(w.state), process(w.state, "e", pid=7)), shows(A1)),
    )
    assert kinds(shown) == []


def test_a_component_that_runs_twice() -> None:
    w = Watchman(*RUNNING)
    twin = runs(w.state, ref="pid:9@1", pids=(9,))
    seen = one(w.compares(components=(runs(w.state), twin), cards=(shows(A0, process(w.state)), shows(A1))))
    assert seen.kind is DriftKind.DOUBLE_HOLDER
    assert "the server part of chat runs 2 times on node a" in seen.sentence


# -- vram_not_recovered ---------------------------------------------------------------------------


def test_memory_that_no_process_holds_after_the_end() -> None:
    w = Watchman(*RUNNING, exited())
    shown = w.compares(cards=(shows(A0, used=20 * GIB), shows(A1)))
    seen = next(s for s in shown.sightings if s.kind is DriftKind.VRAM_NOT_RECOVERED)
    assert seen.sentence.startswith(f"20.0 GiB of {A0} of node a are used, and no process holds them: epoch ")
    assert "of chat ended there" in seen.sentence
    assert (seen.demand, seen.healable) == ("d", False)
    assert "reboot" in seen.remedy


def test_on_a_free_card_it_is_told_without_a_name_and_cleared_when_it_is_back() -> None:
    w = Watchman(joined(), rules=Rules())
    assert w.sees_for(60, cards=(shows(A0, used=20 * GIB), shows(A1))) == []
    w.sees_for(1, cards=(shows(A0, used=20 * GIB), shows(A1)))
    assert w.kinds() == ["DriftDetected"]
    w.sees_for(2)
    assert w.kinds() == ["DriftDetected", "DriftCleared"]


@pytest.mark.parametrize(
    "card_shown",
    [
        shows(A0, used=GIB),  # the driver's own
        v.CardObservation(uuid=A0, memory_used_bytes=20 * GIB, processes=None),
        shows(A0, v.ProcessObservation(pid=3, memory_bytes=None), used=20 * GIB),
        shows(A0, used=20 * GIB, mig=True),  # its instances hold it
        shows(A0, used=20 * GIB, unknown="sample rejected"),
    ],
)
def test_what_may_be_explained_is_not_told(card_shown) -> None:
    assert kinds(Watchman(joined()).compares(cards=(card_shown, shows(A1)))) == []


def test_while_something_of_ours_runs_there_the_driver_may_not_list_it() -> None:
    w = Watchman(*RUNNING)
    given = runs(w.state, gpus=(A0,))
    assert kinds(w.compares(components=(given,), cards=(shows(A0, used=20 * GIB), shows(A1)))) == []


def test_a_process_stuck_in_the_kernel_is_named() -> None:
    w = Watchman(*STOPPED, exited())
    stuck = v.ProcessObservation(pid=8, memory_bytes=0, stuck_seconds=400.0)
    shown = w.compares(cards=(shows(A0, stuck, used=20 * GIB), shows(A1)))
    told = [s.sentence for s in shown.sightings if s.kind is DriftKind.VRAM_NOT_RECOVERED]
    assert told[0].endswith("pid 8 is stuck in the kernel")

"""How cards stand with their bindings: given events, when a heartbeat shows this, then these drifts, and no order
but for a lost card.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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


# -- whatever a heartbeat says --------------------------------------------------------------------

NUMBER = st.one_of(st.none(), st.integers(-(2**62), 2**62))
FIGURE = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))
EPOCH = st.sampled_from([None, 0, 1, 3, 5, 10**9])
DEMAND = st.sampled_from(["", "d", "e", "stranger"])
PROCESS = st.builds(
    v.ProcessObservation, pid=st.integers(-1, 5000), memory_bytes=NUMBER, epoch=EPOCH, demand=DEMAND, stuck_seconds=FIGURE
)  # fmt: skip
SHOWN = st.builds(
    v.CardObservation,
    uuid=st.sampled_from([A0, A1, "GPU-unknown"]),
    memory_used_bytes=NUMBER,
    utilisation_percent=FIGURE,
    power_watts=FIGURE,
    power_limit_watts=FIGURE,
    processes=st.one_of(st.none(), st.lists(PROCESS, max_size=4).map(tuple)),
    unknown=st.sampled_from(["", "why"]),
    compute_mode=st.sampled_from(["", "Default", "Prohibited", "Exclusive_Process", "?"]),
    mig=st.sampled_from([None, True, False]),
    lost=st.booleans(),
    xids=st.lists(st.builds(v.Xid, code=st.integers(-1, 10**6), at=st.text(max_size=5)), max_size=3).map(
        tuple
    ),
)
PART = st.builds(
    v.ComponentObservation,
    epoch=st.sampled_from([0, 1, 3, 5, 10**9]),
    demand=DEMAND,
    component=st.sampled_from(["server", "other"]),
    engine=st.sampled_from(v.Engine),
    ref=st.text(max_size=8),
    running=st.booleans(),
    pids=st.lists(st.integers(-1, 5000), max_size=3).map(tuple),
    ready=st.sampled_from([None, True, False]),
    gpus=st.sampled_from([(), (A0,), (A1, "GPU-unknown")]),
    injected=st.sampled_from([None, (), (A0,), ("GPU-unknown",)]),
)
UNRELEASED = st.builds(
    v.Unreleased,
    epoch=st.sampled_from([0, 3, 5]),
    demand=DEMAND,
    why=st.sampled_from(["", "vram_not_recovered: x"]),
    cards=st.sampled_from([(), (A0,)]),
)
STATES = (
    RUNNING,
    STOPPED,
    SLICE,
    (*RUNNING, exited()),
    (*RUNNING, exited(), released()),
    (*RUNNING, changed(cards=[])),
    (*RUNNING, raised("e"), bound("e", A1), started("e")),
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(STATES),
    st.lists(SHOWN, max_size=4),
    st.one_of(st.none(), st.lists(PART, max_size=4)),
    st.lists(UNRELEASED, max_size=2),
)
def test_whatever_a_heartbeat_says_is_compared_and_judged(books, cards, components, unreleased) -> None:
    """Total: no figure of a driver and no label stops the reaper, and what it says can be encoded and folded."""
    w = Watchman(*books, healing=list(DriftKind))
    for _ in range(4):
        w.sees(
            after=5000.0,
            cards=tuple(cards),
            components=None if components is None else tuple(components),
            unreleased=tuple(unreleased),
        )
    assert all(len(s.sentence) <= 2000 for s in w.said if isinstance(s, e.DriftDetected))


def test_the_agents_own_word_on_memory_that_is_not_back() -> None:
    w = Watchman(*RUNNING, exited())
    told = v.Unreleased(
        epoch=epoch_of(w.state, "d"),
        demand="d",
        why=f"vram_not_recovered: 9.0 GiB of {A0} are used",
        cards=(A0,),
    )
    shown = w.compares(cards=(shows(A0, used=9 * GIB), shows(A1)), unreleased=(told,))
    seen = [s for s in shown.sightings if s.kind is DriftKind.VRAM_NOT_RECOVERED]
    assert len(seen) == 1, "the agent knows more than the card, and says it once"
    assert seen[0].sentence.startswith(
        "chat ended on node a, and its memory has not come back: vram_not_recovered"
    )

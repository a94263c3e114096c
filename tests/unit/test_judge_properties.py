"""What the reaper never does, whatever it is shown. Each property in words, over drawn worlds.

Drawn: what is on the books (running, stopped, ended, shared, a gang), what each heartbeat shows (components,
processes, strangers, engine away, cards unreadable, stale heartbeats), pauses, restarts, holds, and agents
that have or have not read their orders; with healing switched on for every kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rigbook_ledger.audit import audit
from rigbook_ledger.drift import compare
from rigbook_ledger.state import Phase
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.values import DriftKind

from tests.unit.drift_story import GIB, Watchman, foreign, process, runs, shows
from tests.unit.ledger_story import bound, card, evicted, exited, joined, raised, released, started, withdrawn

if TYPE_CHECKING:
    from collections.abc import Sequence

A0, A1 = card("a", 0), card("a", 1)
QUICKLY = settings(max_examples=80, deadline=None)

BOOKS: dict[str, tuple[Any, ...]] = {
    "bound": (joined(), raised(), bound()),
    "running": (joined(), raised(), bound(), started()),
    "shared": (joined(), raised(), bound(mode=v.Mode.MEMORY_SLICE, memory_bytes=24 * GIB), started()),
    "stopped": (joined(), raised(), bound(), started(), withdrawn(), evicted(grace_seconds=1.0)),
    "exited": (joined(), raised(), bound(), started(), withdrawn(), evicted(grace_seconds=1.0), exited()),
    "ended": (joined(), raised(), bound(), started(), exited(), released()),
    "gang": (joined("a"), joined("b"), raised(), bound("d", A0, card("b")), started(), started(node="b")),
    "half": (
        *(joined("a"), joined("b"), raised(), bound("d", A0, card("b")), started(), started(node="b")),
        *(exited(), released()),
    ),
}


class Shown:
    """What one heartbeat shows, drawn without knowing the state."""

    def __init__(self, draw: tuple[Any, ...]) -> None:
        self.component, self.process, self.stranger, self.engine, self.cards, self.after, self.read = draw

    def of(self, w: Watchman) -> dict[str, Any]:
        there: list[v.ProcessObservation] = []
        if self.process is not None:
            there.append(process(w.state, memory_bytes=self.process * GIB))
        if self.stranger:
            there.append(foreign())
        cards: dict[str, tuple[v.CardObservation, ...]] = {
            "first": (shows(A0, *there), shows(A1)),
            "other": (shows(A0), shows(A1, *there)),
            "unreadable": (v.CardObservation(uuid=A0, unknown="no answer"), shows(A1)),
            "none": (),
        }
        w.engine_position = None if self.read else 0
        return {
            "engine": "away" if self.engine else "",
            "cards": cards[self.cards],
            **({} if self.engine else {"components": (runs(w.state),) if self.component else ()}),
        }


SHOWN = st.tuples(
    st.booleans(),
    st.sampled_from([None, 10, 30]),
    st.booleans(),
    st.sampled_from([False, False, False, True]),
    st.sampled_from(["first", "first", "other", "unreadable", "none"]),
    st.sampled_from([0.2, 1.0, 1.0, 5.0, 60.0]),
    st.booleans(),
).map(Shown)
WORLDS = st.tuples(st.sampled_from(sorted(BOOKS)), st.lists(SHOWN, min_size=1, max_size=12))


def watchman(books: str) -> Watchman:
    return Watchman(*BOOKS[books], healing=list(DriftKind))


def orders(said: Sequence[e.Payload]) -> list[e.Payload]:
    return [s for s in said if isinstance(s, (e.EvictionOrdered, e.Released))]


@QUICKLY
@given(WORLDS)
def test_never_orders_anything_for_what_is_alive_and_wanted_but_for_its_own_fault(world: Any) -> None:
    w = watchman(world[0])
    for shown in world[1]:
        wanted = {
            b.epoch
            for b in w.state.bindings.values()
            if w.state.demands[b.demand].phase is not Phase.RELEASING
        }
        alive = shown.component or shown.process is not None
        for order in orders(w.sees(after=shown.after, **shown.of(w))):
            if isinstance(order, e.EvictionOrdered) and order.epoch in wanted:
                assert order.reason in {
                    v.EvictionReason.OVERUSE,
                    v.EvictionReason.WRONG_CARD,
                    v.EvictionReason.MISSING,
                }
                assert not (alive and order.reason is v.EvictionReason.MISSING)
            assert not (alive and isinstance(order, e.Released))


@QUICKLY
@given(WORLDS, st.integers(1, 4))
def test_never_acts_on_one_sighting(world: Any, times: int) -> None:
    """The same heartbeat, however often and however late it is judged, orders nothing and tells nothing."""
    w = watchman(world[0])
    w.passes(500)
    w.sees(**world[1][0].of(w))
    for _ in range(times):
        assert w.sees(after=1000, again=w.last) == []


@QUICKLY
@given(
    st.sampled_from(sorted(BOOKS)), st.lists(st.sampled_from([1.0, 60.0, 2000.0]), max_size=12), st.booleans()
)
def test_never_acts_on_unknown(books: str, times: list[float], by_engine: bool) -> None:
    """While the engine is away, or no card can be read, absence is not concluded and nothing new is told."""
    w = watchman(books)
    for after in times:
        blind: dict[str, Any] = {"engine": "away"} if by_engine else {"cards": ()}
        assert w.sees(after=after, **blind) == []


@QUICKLY
@given(WORLDS)
def test_never_orders_before_the_drift_is_on_the_books(world: Any) -> None:
    w = watchman(world[0])
    for shown in world[1]:
        before = {(d.kind.value, d.epoch) for d in w.state.drifts.values()}
        for order in orders(w.sees(after=shown.after, **shown.of(w))):
            assert order.epoch in {epoch for _, epoch in before}  # type: ignore[attr-defined]


@QUICKLY
@given(WORLDS)
def test_never_anything_in_dry_run_but_telling(world: Any) -> None:
    w = Watchman(*BOOKS[world[0]])
    for shown in world[1]:
        w.sees(after=shown.after, **shown.of(w))
    assert not orders(w.said)
    assert not any(d.healing for d in w.state.drifts.values())


@QUICKLY
@given(WORLDS, st.sampled_from(["hold", "unreachable"]))
def test_never_anything_while_held_or_for_an_unreachable_node(world: Any, why: str) -> None:
    w = watchman(world[0])
    if why == "unreachable":
        w.happens(e.NodeUnreachable(node="a", silent_seconds=20))
    for shown in world[1]:
        assert w.sees(after=shown.after, hold="mass loss" if why == "hold" else "", **shown.of(w)) == []


@QUICKLY
@given(WORLDS)
def test_what_it_appends_leaves_no_finding_and_breaks_no_invariant(world: Any) -> None:
    w = watchman(world[0])
    for shown in world[1]:
        w.sees(after=shown.after, **shown.of(w))
        assert w.state.findings == []
        assert audit(w.state) == []


@QUICKLY
@given(WORLDS)
def test_a_drift_is_detected_once_and_cleared_once_per_episode(world: Any) -> None:
    w = Watchman(*BOOKS[world[0]])
    is_open: set[str] = set()
    for shown in world[1]:
        for said in w.sees(after=shown.after, **shown.of(w)):
            if isinstance(said, e.DriftDetected):
                assert said.drift not in is_open or said.evidence, "told again only with other evidence"
                is_open.add(said.drift)
            elif isinstance(said, e.DriftCleared):
                assert said.drift in is_open
                is_open.remove(said.drift)
    assert is_open == set(w.state.drifts)


@QUICKLY
@given(WORLDS, st.integers(0, 11))
def test_a_restart_never_makes_it_act_sooner(world: Any, at: int) -> None:
    w = watchman(world[0])
    for i, shown in enumerate(world[1]):
        said = w.sees(after=shown.after, **shown.of(w))
        if i == at:
            w.restarts()
        elif i == at + 1:
            assert said == [], "the first heartbeat after a restart is one sighting"


@QUICKLY
@given(WORLDS)
def test_comparing_changes_nothing_and_is_the_same_twice(world: Any) -> None:
    w = watchman(world[0])
    for shown in world[1]:
        w.passes(shown.after)
        beat = w.beat(**shown.of(w))
        before = (w.state.position, len(w.state.bindings), dict(w.state.demands))
        assert compare(w.state, beat, w.tolerance) == compare(w.state, beat, w.tolerance)
        assert before == (w.state.position, len(w.state.bindings), dict(w.state.demands))

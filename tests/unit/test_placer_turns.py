"""Whose turn it is: order, ageing, overtaking within a bound, back-off, windows, cap.

Safety, in words:
- a demand that fits is bound in the order of effective priority, then age, unless one before it fits too;
- a blocked demand is passed at most so often, and for so long; after that nothing is bound that would delay it;
- what a rule keeps waiting (quota, cap, back-off, window) keeps nobody else waiting;
- a demand whose starts fail does not win each cycle.

Method: a fleet grown by events, and `Turns` over it with a clock of the test's own; with and without the index.
"""

from __future__ import annotations

import pytest
from rigbook_ledger.state import Phase
from rigbook_placer.index import Index
from rigbook_placer.place import place
from rigbook_placer.rules import HELD_AFTER, is_open, opens_ns, retry_ns
from rigbook_placer.stops import stops_due
from rigbook_placer.turns import PASSED_MAX, PASSED_SECONDS_MAX, Turns
from rigbook_placer.waiting import AGE_POINTS_MAX, Waiting, effective_priority
from rigbook_schemas import events as e
from rigbook_schemas import subjects as s
from rigbook_schemas.sentences import sentence
from rigbook_schemas.values import EvictionReason, Evidence, Mode, ReasonCode, VerdictClass, Window
from rigbook_schemas.wire import instant

from tests.unit.placer_fleet import SECOND, Fleet


class Cell(Fleet):
    """A fleet with its queue; `run` binds what can be bound."""

    def __init__(self, *, indexed: bool = False) -> None:
        super().__init__()
        self.waiting = Waiting()
        self.turns = Turns()
        self.indexed = indexed
        self.index: Index | None = None

    def follow(self) -> None:
        touched = self.state.touched
        self.waiting.update(self.state, touched.demands)
        if self.index is not None:
            self.index.follow(touched.nodes, touched.cards, touched.bindings)
        elif self.indexed:
            self.index = Index(self.state, {})
        touched.clear()

    def run(self, at_most: int = 1000) -> list[str]:
        """The demands bound now, in order."""
        bound: list[str] = []
        self.follow()
        while len(bound) < at_most:
            found = self.turns.next(self.state, self.waiting, {}, self.now_ns, self.index)
            if found is None:
                return bound
            demand, decision = found
            self.take(decision)
            bound.append(demand.spec.demand)
            self.follow()
            self.turns.bound(self.state, [demand.spec.demand], self.now_ns)
        return bound


@pytest.fixture(params=[False, True], ids=["plain", "indexed"])
def cell(request: pytest.FixtureRequest) -> Cell:
    cell = Cell(indexed=request.param)
    cell.node("a", 2)
    cell.follow()
    return cell


# -- order --------------------------------------------------------------------------------------


def test_priority_comes_first_then_age(cell: Cell) -> None:
    for name, priority in (("low", 25), ("normal-1", 50), ("normal-2", 50), ("high", 70)):
        cell.demand(name, priority=priority, mode=Mode.MEMORY_SLICE, gib=4)
    assert cell.run() == ["high", "normal-1", "normal-2", "low"]


def test_waiting_raises_a_demand_slowly_and_up_to_a_bound(cell: Cell) -> None:
    cell.bind("hold-1")
    cell.bind("hold-2")
    cell.demand("old-low", priority=25)
    demand = cell.state.demands["old-low"]
    told = [
        effective_priority(demand, cell.now_ns + minutes * 60 * SECOND) for minutes in (0, 9, 11, 101, 9999)
    ]
    assert told == [25, 25, 26, 35, 25 + AGE_POINTS_MAX]
    cell.pass_time(5 * 3600 + 1)
    cell.demand("fresh-normal", priority=50)
    cell.demand("fresh-high", priority=75)
    assert [d.spec.demand for d in cell_heads(cell)] == ["fresh-high", "old-low", "fresh-normal"]


def cell_heads(cell: Cell) -> list[object]:  # type: ignore[type-arg]
    cell.follow()
    return cell.waiting.heads(cell.state, cell.now_ns)


# -- overtaking ---------------------------------------------------------------------------------


def test_small_ones_pass_a_blocked_big_one_but_not_for_ever(cell: Cell) -> None:
    """Two cards; one is held. `big` needs both. Small ones pass it so often, then the free card is kept for it."""
    cell.bind("holder")
    cell.demand("big", count=2)
    assert cell.run() == []
    passed = 0
    for number in range(3 * PASSED_MAX):
        cell.demand(f"small-{number}", project="p")
        if not cell.run():
            break
        passed += 1
        cell.release(f"small-{number}")
    assert passed == PASSED_MAX
    assert set(cell.turns.kept) == {"GPU-a-0", "GPU-a-1"}
    reasons = place_reasons(cell, f"small-{passed}")
    assert ReasonCode.HELD_BACK in [r.code for r in reasons]
    assert any("kept for big" in sentence(r) for r in reasons)
    cell.release("holder")
    assert cell.run()[0] == "big"


def place_reasons(cell: Cell, name: str) -> tuple[object, ...]:  # type: ignore[type-arg]
    from rigbook_placer.place import explain

    return explain(cell.state, cell.state.demands[name].spec, {}, now_ns=cell.now_ns, kept=cell.turns.kept)


def test_it_is_not_passed_after_a_time_either(cell: Cell) -> None:
    cell.bind("holder")
    cell.demand("big", count=2)
    assert cell.run() == []
    cell.demand("early")
    assert cell.run() == ["early"]
    cell.release("early")
    cell.pass_time(PASSED_SECONDS_MAX + 1)
    cell.demand("late")
    assert cell.run() == []
    cell.release("holder")
    assert cell.run() == ["big"]


def test_what_is_sure_to_end_before_may_still_use_the_kept_card(cell: Cell) -> None:
    cell.bind("holder", max_run_seconds=3600.0)
    cell.demand("big", count=2)
    cell.pass_time(PASSED_SECONDS_MAX + 1)
    assert cell.run() == []
    cell.demand("too-long", max_run_seconds=7200.0)
    cell.demand("no-end")
    cell.demand("short", max_run_seconds=600.0)
    assert cell.run() == ["short"]


def test_cards_are_kept_where_they_are_free_soonest() -> None:
    cell = Cell()
    cell.node("a", 2)
    cell.node("b", 2)
    for name, node, seconds in (("long", "a", 90_000.0), ("soon", "b", 600.0)):
        cell.demand(name, node=node, count=2, max_run_seconds=seconds)
    assert cell.run() == ["long", "soon"]
    cell.demand("big", count=2)
    cell.pass_time(PASSED_SECONDS_MAX + 1)
    assert cell.run() == []
    assert cell.run() == []
    assert set(cell.turns.kept) == {"GPU-b-0", "GPU-b-1"}


def test_what_can_never_fit_keeps_nothing_and_delays_nobody(cell: Cell) -> None:
    cell.demand("huge", gib=500)
    cell.pass_time(PASSED_SECONDS_MAX + 1)
    cell.demand("small")
    assert cell.run() == ["small"]
    assert cell.turns.kept == {}


def test_a_demand_over_its_quota_keeps_nobody_waiting(cell: Cell) -> None:
    cell.tell(s.policy("nlp"), e.QuotaSet(project="nlp", memory_bytes=1))
    cell.demand("over", count=2)
    cell.pass_time(PASSED_SECONDS_MAX + 1)
    cell.demand("other", project="vision")
    assert cell.run() == ["other"]
    assert cell.turns.kept == {}


# -- rules --------------------------------------------------------------------------------------


def test_high_priority_holds_a_third_of_the_fleet_by_default() -> None:
    cell = Cell()
    cell.node("a", 6)
    for number in range(4):
        cell.demand(f"high-{number}", priority=75)
    cell.demand("normal")
    assert cell.run() == ["high-0", "high-1", "normal"]
    (reason,) = place_reasons(cell, "high-2")
    assert reason.code is ReasonCode.PRIORITY_CAP
    assert sentence(reason) == (
        "priority_cap: high priority holds 48.0 GiB of the 48.0 GiB it may, 8.0 GiB asked"
    )
    cell.tell(s.policy("priority"), e.PriorityCapped(priority=75, share=1))
    cell.turns.again()
    assert cell.run() == ["high-2", "high-3"]


def test_one_high_demand_may_always_be_bound(cell: Cell) -> None:
    cell.demand("whole-fleet", priority=90, count=2)
    assert cell.run() == ["whole-fleet"]


def fail_start(cell: Cell, name: str, verdict: VerdictClass = VerdictClass.IMAGE_PULL) -> None:
    epoch = cell.state.demands[name].epoch
    node = cell.state.bindings[epoch].shares[0].node
    cell.tell(
        s.run(node), e.Exited(demand=name, epoch=epoch, node=node, verdict=verdict, sentence="no image")
    )
    cell.release(name)


def test_a_demand_whose_starts_fail_backs_off_and_lets_others_go_ahead() -> None:
    """The image cannot be had: the demand would win every cycle, and nothing would ever run."""
    cell = Cell()
    cell.node("a", 1)
    cell.demand("broken", priority=70)
    tries = 0
    waits: list[float] = []
    for _ in range(HELD_AFTER):
        assert cell.run() == ["broken"]
        tries += 1
        fail_start(cell, "broken")
        demand = cell.state.demands["broken"]
        assert (demand.phase, demand.failures) == (Phase.WAITING, tries)
        assert cell.run() == []
        if tries == 1:
            cell.demand("other")
            assert cell.run() == ["other"]
            cell.release("other")
        due_ns = retry_ns(demand)
        if due_ns is None:
            break
        (reason,) = place_reasons(cell, "broken")
        assert reason.code is ReasonCode.BIND_BACKOFF
        assert "image_pull on a: no image" in sentence(reason)
        waits.append((due_ns - demand.failed_ns) / SECOND)
        cell.now_ns = due_ns + SECOND
    assert tries == HELD_AFTER
    assert waits == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    cell.pass_time(7 * 86400)
    assert cell.run() == []
    (reason,) = place_reasons(cell, "broken")
    assert "held after 10 failures" in sentence(reason)


def test_after_a_failed_start_another_node_is_tried_first() -> None:
    cell = Cell()
    cell.node("a", 1)
    cell.node("b", 1)
    cell.demand("one")
    assert cell.run() == ["one"]
    assert cell.state.bindings[cell.state.demands["one"].epoch].shares[0].node == "a"
    fail_start(cell, "one", VerdictClass.RUNTIME_MISSING)
    cell.pass_time(6)
    assert cell.run() == ["one"]
    binding = cell.state.bindings[cell.state.demands["one"].epoch]
    assert binding.shares[0].node == "b"
    cell.tell(s.run("b"), e.Started(demand="one", epoch=binding.epoch, node="b"))
    demand = cell.state.demands["one"]
    assert (demand.failures, demand.failed_on, demand.failure) == (0, (), "")


def test_a_program_that_is_not_there_ends_at_once(cell: Cell) -> None:
    """Another try cannot help, and who typed it waits for the answer."""
    cell.demand("typo")
    cell.run()
    epoch = cell.state.demands["typo"].epoch
    cell.tell(
        s.run("a"),
        e.Exited(
            demand="typo", epoch=epoch, node="a", verdict=VerdictClass.START_FAILED,
            evidence=(Evidence(what="no_such_program", value="no such program"),),
        ),
    )  # fmt: skip
    cell.release("typo")
    assert cell.state.demands["typo"].phase is Phase.ENDED


NIGHT = Window(start="22:00", end="06:00")
WORKDAYS = Window(start="09:00", end="17:00", days=(1, 2, 3, 4, 5), utc_offset_minutes=60)


@pytest.mark.parametrize(
    ("moment", "window", "is_in", "next_one"),
    [
        ("2026-12-01T21:59:59Z", NIGHT, False, "2026-12-01T22:00:00Z"),
        ("2026-12-01T22:00:00Z", NIGHT, True, "2026-12-02T22:00:00Z"),
        ("2026-12-02T05:59:59Z", NIGHT, True, "2026-12-02T22:00:00Z"),
        ("2026-12-02T06:00:00Z", NIGHT, False, "2026-12-02T22:00:00Z"),
        ("2026-12-04T08:00:00Z", WORKDAYS, True, "2026-12-07T08:00:00Z"),  # a Friday
        ("2026-12-05T10:00:00Z", WORKDAYS, False, "2026-12-07T08:00:00Z"),
        ("2026-12-04T16:00:00Z", WORKDAYS, False, "2026-12-07T08:00:00Z"),
    ],
)
def test_windows(moment: str, window: Window, is_in: bool, next_one: str) -> None:
    now_ns = instant(moment)
    assert now_ns is not None
    assert is_open((window,), now_ns) is is_in
    assert opens_ns((window,), now_ns) == instant(next_one)


def test_a_demand_runs_inside_of_its_windows_only() -> None:
    cell = Cell()
    cell.node("a", 1)
    cell.now_ns = instant("2026-12-01T12:00:00Z") or 0
    cell.demand("nightly", windows=(NIGHT,))
    cell.demand("day")
    assert cell.run() == ["day"]
    cell.release("day")
    assert cell.run() == []
    (reason,) = place_reasons(cell, "nightly")
    assert sentence(reason) == (
        "outside_window: it runs 22:00 to 06:00 only; the next time is 2026-12-01T22:00:00.000000Z"
    )
    cell.now_ns = instant("2026-12-01T22:00:01Z") or 0
    assert cell.run() == ["nightly"]
    epochs = list(cell.state.bindings)
    assert list(stops_due(cell.state, epochs, cell.now_ns)) == []
    (order,) = stops_due(cell.state, epochs, instant("2026-12-02T06:00:01Z") or 0)
    assert (order.reason, order.requeue) == (EvictionReason.WINDOW_CLOSED, True)


# -- asks ---------------------------------------------------------------------------------------


def test_headroom_is_part_of_what_is_bound() -> None:
    cell = Cell()
    cell.node("a", 1)
    cell.demand("with-headroom", gib=10, headroom=1.5, mode=Mode.MEMORY_SLICE)
    cell.demand("too-much", gib=20, headroom=1.5, mode=Mode.MEMORY_SLICE)
    assert cell.run() == ["with-headroom"]
    (binding,) = cell.state.bindings.values()
    assert binding.memory_bytes == 15 * 1024**3


def test_a_node_that_has_the_weights_is_preferred_and_the_other_says_what_it_costs() -> None:
    """Affinity is soft: "node-a has the model but 6 GB short; node-b fits, model not cached (about 9 min)"."""
    cell = Cell()
    cell.node("b", 1)
    cell.node("a", 1, weights=("qwen3-32b",))
    ask = {"weights": "qwen3-32b", "weights_bytes": 54 * 1000**3, "mode": Mode.MEMORY_SLICE, "gib": 12}
    assert cell.bind("first", **ask) == ("GPU-a-0",)
    spec = cell.demand("second", **{**ask, "gib": 18})
    bound = place(cell.state, spec, {})
    assert bound is not None
    assert bound.shares[0].node == "b"
    assert [sentence(note) for note in bound.notes] == [
        "weights_not_cached: node b fits, but has not the weights qwen3-32b (about 9 min to fetch them)",
        "vram_short: GPU 0 of node a has 12.0 GiB free of 24.0 GiB (12.0 GiB bound), 18.0 GiB asked, 6.0 GiB short",
    ]


def test_a_demand_names_its_own_policy_and_the_operator_the_default() -> None:
    cell = Cell()
    cell.node("a", 2)
    cell.node("b", 2)
    cell.bind("one", mode=Mode.MEMORY_SLICE, node="a")
    assert cell.bind("packed", mode=Mode.MEMORY_SLICE) == ("GPU-a-0",)
    assert cell.bind("spread", mode=Mode.MEMORY_SLICE, placement="spread") == ("GPU-b-0",)
    cell.tell(s.policy("placement"), e.PlacementSet(policy="spread"))
    spec = cell.demand("by-default", mode=Mode.MEMORY_SLICE)
    bound = place(cell.state, spec, {})
    assert bound is not None
    assert bound.policy == "spread"
    assert cell.bind("wrong", placement="nonsense") == ()
    assert [r.code for r in cell.reasons("wrong")] == [ReasonCode.INVALID_REQUEST]  # type: ignore[attr-defined]


def test_a_hundred_thousand_waiting_cost_a_round_little() -> None:
    """Demands with the same ask are looked at once."""
    cell = Cell(indexed=True)
    cell.node("a", 2)
    cell.bind("one")
    cell.bind("two")
    spec = cell.spec("x")
    import msgspec

    for number in range(100_000):
        cell.tell(s.demand("nlp"), msgspec.structs.replace(spec, demand=f"d-{number}"))
    assert cell.run() == []
    assert len(cell.waiting) == 100_000
    cell.release("one")
    assert cell.run() == ["d-0"]

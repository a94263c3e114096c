"""Placement as a pure function: who gets which card, who must wait, and why.

Safety, in words:
- an exclusive card is never shared; shared bindings never exceed the card;
- what is placed is placed on cards that say yes; what is not placed has a reason;
- a demand that no fleet could hold is refused, and nothing else is.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rigbook_ledger.audit import audit
from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import Phase, State
from rigbook_placer.feasible import Seen
from rigbook_placer.place import explain, hopeless, place, signature
from rigbook_placer.planned import plan
from rigbook_placer.stops import stops_due
from rigbook_placer.waiting import Waiting
from rigbook_schemas import events as e
from rigbook_schemas import subjects as s
from rigbook_schemas.sentences import sentence
from rigbook_schemas.values import (
    GIB,
    CardInventory,
    Component,
    EvictionReason,
    Horizon,
    Mode,
    Owner,
    ReasonCode,
    Request,
    VerdictClass,
)
from rigbook_schemas.wire import Record, rfc3339

NOW = 1_796_000_000 * 10**9


class Fleet:
    """A state grown by events, as the log would."""

    def __init__(self) -> None:
        self.state = State()

    def tell(self, subject: str, data: e.Payload) -> int:
        seq = self.state.position + 1
        self.state = evolve(
            self.state, Record(seq, subject, NOW + seq, f"id-{seq}", "kind", "test", rfc3339(NOW), data)
        )
        return seq

    def node(self, name: str, cards: int, *, gib: int = 24, model: str = "RTX4090", **more: object) -> None:
        self.tell(
            s.node(name),
            e.NodeJoined(
                node=name,
                incarnation="1",
                engines=("process",),
                cards=tuple(
                    CardInventory(uuid=f"GPU-{name}-{i}", index=i, model=model, memory_bytes=gib * GIB)
                    for i in range(cards)
                ),
                **more,  # type: ignore[arg-type]
            ),
        )

    def demand(
        self, name: str, *, gib: float = 8, project: str = "nlp", priority: int = 50, **request: object
    ) -> e.DemandRaised:
        limit = request.pop("max_run_seconds", None)
        spec = e.DemandRaised(
            demand=name,
            project=project,
            priority=priority,
            owner=Owner(name="ann"),
            resources=Request(memory_bytes=int(gib * GIB), **request),  # type: ignore[arg-type]
            components=(Component(command=("true",)),),
            max_run_seconds=limit,  # type: ignore[arg-type]
        )
        self.tell(s.demand(project), spec)
        return spec

    def bind(
        self, name: str, *, seen: dict[str, Seen] | None = None, policy: str = "pack", **request: object
    ) -> tuple[str, ...]:
        """Raise and place; the cards, or () when it must wait."""
        spec = self.demand(name, **request)  # type: ignore[arg-type]
        bound = place(self.state, spec, seen or {}, policy)
        if bound is None:
            return ()
        self.tell(s.bind(tuple(share.node for share in bound.shares)), bound)
        assert audit(self.state) == []
        return tuple(a.card for share in bound.shares for a in share.allotments)

    def codes(self, name: str, seen: dict[str, Seen] | None = None) -> list[ReasonCode]:
        return [r.code for r in explain(self.state, self.state.demands[name].spec, seen or {})]


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.node("a", 2)
    return fleet


def test_an_exclusive_card_is_not_given_twice(fleet: Fleet) -> None:
    assert fleet.bind("one") == ("GPU-a-0",)
    assert fleet.bind("two") == ("GPU-a-1",)
    assert fleet.bind("three") == ()
    assert fleet.codes("three") == [ReasonCode.EXCLUSIVE_HELD]
    (reason,) = explain(fleet.state, fleet.state.demands["three"].spec, {})
    assert reason.cards == 2
    assert set(reason.holders) == {"one", "two"}


def test_the_reason_names_a_holder_whose_desired_state_is_stopped(fleet: Fleet) -> None:
    """The shared app that is shown as stopped and still holds the card: the waiting demand says so."""
    fleet.bind("app")
    fleet.bind("other")
    fleet.tell(s.demand("nlp"), e.DemandWithdrawn(demand="app", project="nlp"))
    fleet.demand("next")
    (reason,) = explain(fleet.state, fleet.state.demands["next"].spec, {})
    assert reason.holders_stopped == ("app",)
    assert "app (desired state: stopped)" in sentence(reason)


def test_memory_slices_share_a_card_up_to_its_memory(fleet: Fleet) -> None:
    """24 x 2000 MiB asked of 46068 MiB: 23 are placed, one waits with the missing amount."""
    fleet = Fleet()
    fleet.tell(
        s.node("a"),
        e.NodeJoined(
            node="a",
            incarnation="1",
            engines=("process",),
            cards=(CardInventory(uuid="GPU-0", index=0, model="A40", memory_bytes=46068 * 1024**2),),
        ),
    )
    placed = [fleet.bind(f"d-{i}", gib=2000 / 1024, mode=Mode.MEMORY_SLICE) for i in range(24)]
    assert placed == [("GPU-0",)] * 23 + [()]
    (reason,) = explain(fleet.state, fleet.state.demands["d-23"].spec, {})
    assert (reason.code, reason.short_bytes) == (ReasonCode.VRAM_SHORT, 1932 * 1024**2)


def test_pack_fills_the_used_card_and_the_fuller_node_first() -> None:
    fleet = Fleet()
    fleet.node("a", 2)
    fleet.node("b", 2)
    assert fleet.bind("one", node="b", mode=Mode.MEMORY_SLICE) == ("GPU-b-0",)
    assert fleet.bind("two", mode=Mode.MEMORY_SLICE) == ("GPU-b-0",)
    assert fleet.bind("three", gib=20, mode=Mode.MEMORY_SLICE) == ("GPU-b-1",)
    assert fleet.bind("whole") == ("GPU-a-0",)


def test_spread_uses_the_emptiest_node_and_card() -> None:
    fleet = Fleet()
    fleet.node("a", 2)
    fleet.node("b", 2)
    cards = [fleet.bind(f"d-{i}", mode=Mode.MEMORY_SLICE, policy="spread")[0] for i in range(4)]
    assert sorted(cards) == ["GPU-a-0", "GPU-a-1", "GPU-b-0", "GPU-b-1"]


def test_an_exclusive_demand_takes_the_smallest_card_that_fits() -> None:
    fleet = Fleet()
    fleet.node("big", 1, gib=80, model="A100")
    fleet.node("small", 1, gib=24)
    assert fleet.bind("one", gib=20) == ("GPU-small-0",)
    assert fleet.bind("two", gib=20) == ("GPU-big-0",)


def test_modes_do_not_mix_on_a_card(fleet: Fleet) -> None:
    fleet.bind("slice", mode=Mode.MEMORY_SLICE)
    assert fleet.bind("turns", mode=Mode.TIME_SLICE) == ("GPU-a-1",)
    assert fleet.bind("alone") == ()
    assert set(fleet.codes("alone")) == {ReasonCode.GPU_BUSY}
    fleet.tell(s.policy("mode"), e.ModeSet(card="GPU-a-0", mode=Mode.EXCLUSIVE))
    assert fleet.state.findings[-1].code == "mode_conflict"


def test_several_cards_come_from_one_node(fleet: Fleet) -> None:
    fleet.node("b", 4)
    assert len(fleet.bind("four", count=4)) == 4
    assert fleet.bind("three", count=3) == ()
    codes = fleet.codes("three")
    assert ReasonCode.COUNT_SHORT in codes


def test_a_gang_is_whole_or_absent() -> None:
    fleet = Fleet()
    for name in ("a", "b", "c"):
        fleet.node(name, 1)
    assert len(fleet.bind("gang", nodes=2)) == 2
    assert fleet.bind("second", nodes=2) == ()
    assert fleet.state.demands["gang"].phase is Phase.BOUND
    (binding,) = fleet.state.bindings.values()
    assert len(binding.shares) == 2


def test_labels_model_node_and_engine_filter(fleet: Fleet) -> None:
    fleet.node("b", 1, model="A100-80GB", gib=80, labels={"zone": "north"})
    assert fleet.bind("zoned", require={"zone": "north"}) == ("GPU-b-0",)
    fleet.demand("zoned-2", require={"zone": "south"})
    assert ReasonCode.LABEL_MISMATCH in fleet.codes("zoned-2")
    fleet.demand("modelled", model="h100")
    assert set(fleet.codes("modelled")) == {ReasonCode.MODEL_MISMATCH}
    fleet.demand("elsewhere", node="zzz")
    assert fleet.codes("elsewhere") == [ReasonCode.NODE_MISMATCH]
    spec = e.DemandRaised(
        demand="boxed",
        project="nlp",
        owner=Owner(name="ann"),
        resources=Request(memory_bytes=GIB),
        components=(Component(image="vllm"),),
    )
    assert place(fleet.state, spec, {}) is None
    assert {r.code for r in explain(fleet.state, spec, {})} == {ReasonCode.ENGINE_MISSING}


@pytest.mark.parametrize("asked", ["RTX4090", "rtx 4090", "4090", "NVIDIA GeForce RTX 4090", ""])
def test_a_model_is_found_under_the_names_people_use(asked: str) -> None:
    fleet = Fleet()
    fleet.node("a", 1, model="NVIDIA GeForce RTX 4090")
    assert fleet.bind("one", model=asked) == ("GPU-a-0",)


def test_preferred_labels_outrank_packing() -> None:
    fleet = Fleet()
    fleet.node("a", 1)
    fleet.node("b", 1, labels={"disk": "fast"})
    fleet.node("c", 1)
    assert fleet.bind("one", prefer={"disk": "fast"}) == ("GPU-b-0",)
    assert fleet.bind("two", prefer={"disk": "fast"}) != ()


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (e.NodeCordoned(node="a", reason="new driver"), ReasonCode.NODE_CORDONED),
        (e.NodeUnreachable(node="a", silent_seconds=20), ReasonCode.NODE_UNREACHABLE),
        (e.GpuQuarantined(card="GPU-a-0", reason="ECC"), ReasonCode.GPU_QUARANTINED),
    ],
)
def test_what_the_operator_or_the_world_closed_takes_nothing(event: e.Payload, code: ReasonCode) -> None:
    fleet = Fleet()
    fleet.node("a", 1)
    fleet.tell(s.node("a") if isinstance(event, e.NodeUnreachable) else s.policy("x"), event)
    assert fleet.bind("one") == ()
    assert fleet.codes("one") == [code]
    assert not hopeless(explain(fleet.state, fleet.state.demands["one"].spec, {}))


def test_foreign_use_subtracts_and_is_named() -> None:
    """A foreign server holds 78.9 of 79.3 GiB: our 60 GiB go elsewhere, or wait with that very reason."""
    fleet = Fleet()
    fleet.node("a", 2, gib=79, model="A100")
    seen = {"GPU-a-0": Seen(78 * GIB, "pid 4242 (vllm, not managed)")}
    assert fleet.bind("one", gib=60, seen=seen) == ("GPU-a-1",)
    seen["GPU-a-1"] = seen["GPU-a-0"]
    assert fleet.bind("two", gib=60, seen=seen) == ()
    reasons = explain(fleet.state, fleet.state.demands["two"].spec, seen)
    assert [r.code for r in reasons] == [ReasonCode.FOREIGN_USE, ReasonCode.EXCLUSIVE_HELD]
    assert "pid 4242 (vllm, not managed)" in sentence(reasons[0])


def test_an_unknown_sample_is_not_an_empty_card(fleet: Fleet) -> None:
    seen = {"GPU-a-0": Seen(unknown="GPU is lost"), "GPU-a-1": Seen(unknown="GPU is lost")}
    assert fleet.bind("one", seen=seen) == ()
    assert fleet.codes("one", seen) == [ReasonCode.GPU_UNKNOWN]


@pytest.mark.parametrize("memory", [8192, 24, 0, -1, 2**60, 16 * 1024**2 - 1])
def test_a_number_that_cannot_be_bytes_is_refused(fleet: Fleet, memory: int) -> None:
    spec = e.DemandRaised(
        demand="unit",
        project="nlp",
        owner=Owner(name="ann"),
        resources=Request(memory_bytes=memory),
        components=(Component(command=("true",)),),
    )
    answer = plan(fleet.state, spec, {})
    assert answer.refused
    assert [r.code for r in answer.reasons] == [ReasonCode.INVALID_UNIT]


def test_never_big_enough_is_told_apart_from_later(fleet: Fleet) -> None:
    fleet.demand("huge", gib=80)
    reasons = explain(fleet.state, fleet.state.demands["huge"].spec, {})
    assert [(r.code, r.horizon) for r in reasons] == [(ReasonCode.CAPACITY_NEVER, Horizon.NEVER_BIG_ENOUGH)]
    assert hopeless(reasons)
    fleet.bind("one")
    fleet.bind("two")
    fleet.demand("later", gib=20)
    assert not hopeless(explain(fleet.state, fleet.state.demands["later"].spec, {}))


def test_no_node_yet_is_a_reason_to_wait() -> None:
    fleet = Fleet()
    fleet.demand("one")
    assert fleet.codes("one") == [ReasonCode.NO_NODES]
    assert not hopeless(explain(fleet.state, fleet.state.demands["one"].spec, {}))


def test_quota_counts_the_whole_card_of_an_exclusive_binding(fleet: Fleet) -> None:
    fleet.tell(s.policy("quota"), e.QuotaSet(project="nlp", memory_bytes=30 * GIB))
    assert fleet.bind("one", gib=8) == ("GPU-a-0",)
    assert fleet.bind("two", gib=8) == ()
    assert fleet.codes("two") == [ReasonCode.PROJECT_QUOTA]
    assert fleet.bind("other", gib=8, project="vision") == ("GPU-a-1",)


def test_stops_are_due_by_state_and_only_once(fleet: Fleet) -> None:
    """An app that became unwanted without anybody seeing the transition is stopped all the same."""
    fleet.bind("one")
    fleet.tell(s.demand("nlp"), e.DemandWithdrawn(demand="one", project="nlp", by="ann"))
    (order,) = stops_due(fleet.state, list(fleet.state.bindings), NOW)
    assert order.reason is EvictionReason.WITHDRAWN
    fleet.tell(s.evict(order.nodes), order)
    assert list(stops_due(fleet.state, list(fleet.state.bindings), NOW)) == []


def test_a_binding_of_something_already_withdrawn_is_stopped(fleet: Fleet) -> None:
    """The withdrawal came between the placer's read and its append."""
    spec = fleet.demand("one")
    bound = place(fleet.state, spec, {})
    assert bound is not None
    fleet.tell(s.demand("nlp"), e.DemandWithdrawn(demand="one", project="nlp"))
    fleet.tell(s.bind(("a",)), bound)
    assert fleet.state.demands["one"].phase is Phase.RELEASING
    assert audit(fleet.state) == []
    assert [o.reason for o in stops_due(fleet.state, list(fleet.state.bindings), NOW)] == [
        EvictionReason.WITHDRAWN
    ]


def test_the_maximum_run_time_ends_it(fleet: Fleet) -> None:
    fleet.bind("one", max_run_seconds=60.0)
    epochs = list(fleet.state.bindings)
    assert list(stops_due(fleet.state, epochs, NOW + 59 * 10**9)) == []
    (order,) = stops_due(fleet.state, epochs, NOW + 61 * 10**9)
    assert order.reason is EvictionReason.TIME_LIMIT


def test_the_rest_of_a_broken_gang_is_stopped() -> None:
    fleet = Fleet()
    fleet.node("a", 1)
    fleet.node("b", 1)
    fleet.bind("gang", nodes=2)
    (epoch,) = fleet.state.bindings
    fleet.tell(
        s.run("a"), e.Exited(demand="gang", epoch=epoch, node="a", verdict=VerdictClass.APPLICATION_EXIT)
    )
    (order,) = stops_due(fleet.state, [epoch], NOW)
    assert (order.reason, order.nodes) == (EvictionReason.FENCED, ("a", "b"))


def test_the_reason_changes_with_codes_not_with_numbers(fleet: Fleet) -> None:
    fleet.bind("s-1", mode=Mode.MEMORY_SLICE, gib=20, node="a")
    fleet.bind("s-2", mode=Mode.MEMORY_SLICE, gib=20, node="a")
    fleet.demand("wait", mode=Mode.MEMORY_SLICE, gib=10)
    before = explain(fleet.state, fleet.state.demands["wait"].spec, {})
    fleet.bind("s-3", mode=Mode.MEMORY_SLICE, gib=2)
    after = explain(fleet.state, fleet.state.demands["wait"].spec, {})
    assert before != after
    assert signature(before) == signature(after)


def test_waiting_is_tried_by_priority_then_age_and_looked_at_by_shape(fleet: Fleet) -> None:
    waiting = Waiting()
    for i in range(100):
        fleet.demand(f"low-{i}", priority=25)
    fleet.demand("first", gib=4)
    fleet.demand("high", priority=75)
    waiting.update(fleet.state, fleet.state.waiting)
    heads = [d.spec.demand for d in waiting.heads(fleet.state)]
    assert heads == ["high", "first", "low-0"]
    fleet.tell(s.demand("nlp"), e.DemandWithdrawn(demand="high", project="nlp"))
    waiting.update(fleet.state, ["high"])
    assert [d.spec.demand for d in waiting.heads(fleet.state)] == ["first", "low-0"]
    assert len(waiting) == 101


requests = st.fixed_dictionaries(
    {
        "gib": st.sampled_from([1, 3, 8, 12, 24, 40]),
        "count": st.integers(1, 3),
        "nodes": st.integers(1, 2),
        "mode": st.sampled_from(list(Mode)),
        "policy": st.sampled_from(["pack", "spread"]),
    }
)


@settings(max_examples=60, deadline=None)
@given(asks=st.lists(requests, max_size=25), ends=st.lists(st.integers(0, 24), max_size=10))
def test_whatever_is_asked_the_books_stay_right(asks: list[dict[str, object]], ends: list[int]) -> None:
    """`place` answers with a binding that keeps every invariant, or `explain` has a reason."""
    fleet = Fleet()
    fleet.node("a", 3)
    fleet.node("b", 2, gib=40, model="A100")
    for number, ask in enumerate(asks):
        cards = fleet.bind(f"d-{number}", **ask)  # type: ignore[arg-type]
        if not cards:
            assert explain(fleet.state, fleet.state.demands[f"d-{number}"].spec, {})
        if number in ends and cards:
            binding = fleet.state.bindings[fleet.state.demands[f"d-{number}"].epoch]
            for share in binding.shares:
                fleet.tell(
                    s.release(share.node),
                    e.Released(demand=binding.demand, epoch=binding.epoch, node=share.node),
                )
        assert audit(fleet.state) == []
        assert fleet.state.findings == []

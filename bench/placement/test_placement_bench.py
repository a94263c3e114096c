"""Goal: the placement benchmark computes what the paper computes, and our policy's tables say what they claim.

Method: tables against word-for-word loops on seeded random nodes, the method on a fleet small enough to follow by
hand, the index against scoring everything again, and published seeds to two places when TRACES names the traces.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from placement import openb
from placement.fleet import Fleet, IntArray, Node, Placement, Shape, fleet_of
from placement.index import Index
from placement.inflation import fresh_order, inflate
from placement.policies import BestFit, Fgd
from placement.rigbook import Tuning, demand_classes, rigbook_policy, scarcity_prices, waste_tables
from placement.run import OURS, PUBLISHED, policy_of, workload
from placement.typical import TypicalMix, fragment_naive, fragment_tables, fragments, typical_mix

GIB = 1 << 30
SHAPES = (
    Shape(8_000, 16 * GIB, 0, 0),
    Shape(3_152, 6 * GIB, 1, 810),
    Shape(11_908, 40 * GIB, 1, 470),
    Shape(4_000, 24 * GIB, 1, 320),
    Shape(4_000, 24 * GIB, 1, 160, ("T4",)),
    Shape(11_300, 48 * GIB, 1, 1000),
    Shape(18_708, 60 * GIB, 1, 1000, ("G2", "T4")),
    Shape(6_000, 60 * GIB, 2, 1000),
    Shape(64_000, 300 * GIB, 8, 1000),
)
COUNTS = (20, 100, 70, 40, 10, 120, 30, 6, 4)


def mix() -> TypicalMix:
    return typical_mix(
        [shape for shape, count in zip(SHAPES, COUNTS, strict=True) for _ in range(count)], 1.0
    )


def nodes() -> list[Node]:
    return [
        *(Node(f"g{i}", 96_000, 384 * GIB, 8, "G2") for i in range(6)),
        *(Node(f"t{i}", 104_000, 512 * GIB, 2, "T4") for i in range(5)),
        *(Node(f"p{i}", 16_000, 120 * GIB, 2, "P100") for i in range(4)),
    ]


def arrivals(seed: int, size: int) -> list[Shape]:
    weights = np.array(COUNTS) / sum(COUNTS)
    return [SHAPES[int(i)] for i in np.random.default_rng(seed).choice(len(SHAPES), size=size, p=weights)]


def filled(seed: int, size: int) -> Fleet:
    fleet = fleet_of(nodes())
    index = Index(fleet, BestFit())
    for shape in arrivals(seed, size):
        placement = index.best(shape)
        if placement:
            fleet.bind(placement, shape)
    return fleet


def every(fleet: Fleet) -> IntArray:
    return np.arange(fleet.rows, dtype=np.int64)


@pytest.mark.parametrize("seed", range(5))
def test_fragment_tables_equal_the_naive_loop(seed: int) -> None:
    fleet = filled(seed, 70)
    tables = fragment_tables(mix(), fleet.models, fleet.cards_max)
    naive = [
        fragment_naive(
            mix(),
            fleet.models[fleet.model[r]],
            int(fleet.cpu_left[r]),
            fleet.card_left[r, : fleet.cards[r]].tolist(),
        )
        for r in range(fleet.rows)
    ]
    assert fragments(fleet, tables, every(fleet)) == pytest.approx(naive)


@pytest.mark.parametrize("seed", range(3))
def test_fgd_score_is_the_rounded_sigmoid_of_the_naive_difference(seed: int) -> None:
    fleet = filled(seed, 60)
    policy = Fgd(fragment_tables(mix(), fleet.models, fleet.cards_max))
    for shape in SHAPES:
        scores = policy.score(fleet, shape, every(fleet))
        for row in range(fleet.rows):
            model, cpu = fleet.models[fleet.model[row]], int(fleet.cpu_left[row])
            left = fleet.card_left[row, : fleet.cards[row]].tolist()
            options = []
            if (
                cpu >= shape.cpu_milli
                and fleet.memory_left[row] >= shape.memory_bytes
                and shape.accepts(model)
            ):
                whole = [c for c, room in enumerate(left) if room == 1000]
                if shape.shares:
                    options = [[c] for c, room in enumerate(left) if room >= shape.card_milli]
                elif len(whole) >= shape.cards:
                    options = [whole[: shape.cards]]
            gains = []
            for columns in options:
                after = [room - shape.card_milli * (c in columns) for c, room in enumerate(left)]
                gain = fragment_naive(mix(), model, cpu, left) - fragment_naive(
                    mix(), model, cpu - shape.cpu_milli, after
                )
                gains.append(int(round(100 / (1 + np.exp(-gain / 1000)), 9)))
            assert scores.score[0, row] == (max(gains) if gains else -np.inf)


def test_bind_and_unbind_restore_every_array() -> None:
    fleet = filled(1, 40)
    before = {
        name: getattr(fleet, name).copy()
        for name in fleet.__slots__
        if isinstance(getattr(fleet, name), np.ndarray) and name != "changed_at"
    }
    index = Index(fleet, BestFit())
    done = []
    for shape in arrivals(2, 15):
        placement = index.best(shape)
        if placement:
            fleet.bind(placement, shape)
            done.append((placement, shape))
    assert done
    for placement, shape in reversed(done):
        fleet.unbind(placement, shape)
    for name, value in before.items():
        assert np.array_equal(getattr(fleet, name), value), name


@pytest.mark.parametrize(
    ("placement", "shape"),
    [
        (Placement(11, (0,)), Shape(16_001, 0, 1, 500)),
        (Placement(11, ()), Shape(1, 121 * GIB, 0, 0)),
        (Placement(11, (2,)), Shape(1, 0, 1, 500)),
        (Placement(11, (0,)), Shape(1, 0, 2, 1000)),
    ],
)
def test_what_is_not_there_cannot_be_bound(placement: Placement, shape: Shape) -> None:
    fleet = fleet_of(nodes())
    with pytest.raises(ValueError, match=r"cannot move|cards named"):
        fleet.bind(placement, shape)
    assert fleet.idle_milli.sum() == fleet.cards.sum() * 1000
    assert fleet.version == 0


@pytest.mark.parametrize("name", [*PUBLISHED[1:], *OURS])
def test_the_index_answers_like_a_fresh_look_at_every_row(name: str) -> None:
    """After each binding and some releases, the kept scores equal newly computed ones, bit for bit."""
    fleet = fleet_of(nodes())
    policy = policy_of(name, mix(), 0)(fleet)
    index = Index(fleet, policy)
    live = []
    for i, shape in enumerate(arrivals(3, 120)):
        placement = index.best(shape)
        assert placement == Index(fleet, policy).best(shape)
        if placement:
            fleet.bind(placement, shape)
            live.append((placement, shape))
        if i % 5 == 4 and live:
            fleet.unbind(*live.pop(i % len(live)))


@pytest.mark.parametrize("name", [*PUBLISHED, *OURS])
def test_no_policy_refuses_what_fits_or_places_what_does_not(name: str) -> None:
    """A pod is dropped only when no node has CPU, memory, model and cards for it (checked by a plain loop)."""
    fleet = fleet_of(nodes())
    index = Index(fleet, policy_of(name, mix(), 7)(fleet))
    dropped = 0
    for shape in arrivals(4, 160):
        room = any(
            fleet.cpu_left[r] >= shape.cpu_milli
            and fleet.memory_left[r] >= shape.memory_bytes
            and shape.accepts(fleet.models[fleet.model[r]])
            and (fleet.card_left[r] >= max(shape.card_milli, 1)).sum() >= shape.cards
            for r in range(fleet.rows)
        )
        placement = index.best(shape)
        assert (placement is not None) == room
        if placement is None:
            dropped += 1
        else:
            fleet.bind(placement, shape)  # raises when it does not fit
    assert dropped


def test_the_method_on_a_fleet_small_enough_to_follow() -> None:
    """Two cards; 600 + 600 + 500 + 400 + 400 milli arrive: the 500 finds 400 + 400 left and is dropped."""
    tiny = [Node("a", 10_000, GIB, 1, "X"), Node("b", 10_000, GIB, 1, "X")]
    pods = [Shape(1_000, 0, 1, milli) for milli in (600, 600, 500, 400, 400)]
    tables = fragment_tables(typical_mix(pods, 1.0), ("X",), 1)
    course, fleet = inflate(tiny, pods, lambda _: BestFit(), tables, frozenset({60, 125}))
    assert course.accepted.tolist() == [True, True, False, True, True]
    assert course.arrived.tolist() == [30.0, 60.0, 85.0, 105.0, 125.0]
    assert course.allocated.tolist() == [30.0, 60.0, 60.0, 80.0, 100.0]
    # typical: 600 and 400 twice in five, 500 once; 400 + 400 left is usable by the 400s only: 800 x 3/5 of 2000
    assert course.fragmented[1] == pytest.approx(24.0)
    assert course.fragmented[-1] == pytest.approx(0.0)
    assert fleet.idle_milli.sum() == 0
    assert course.at(60) == pytest.approx((60.0, 24.0))
    with pytest.raises(ValueError, match="no arrival near"):
        course.at(99)


def test_typical_mix_keeps_the_most_frequent_and_orders_ties_by_size() -> None:
    small, large, rare = Shape(1, 5, 1, 100), Shape(2, 5, 1, 100), Shape(9, 5, 1, 1000)
    typical = typical_mix([small, large, small, large, rare], 0.8)
    assert [shape.cpu_milli for shape in typical.shapes] == [2, 1]
    assert typical.weights == (0.5, 0.5)
    with pytest.raises(ValueError, match="no shapes"):
        typical_mix([])


def test_future_waste_of_one_card_is_the_expectation_of_random_filling() -> None:
    """Solved by hand: halves and whole cards, equally likely, end chance 0."""
    halves = typical_mix([Shape(1_000, 0, 1, 500), Shape(1_000, 0, 1, 1000)], 1.0)
    waste = waste_tables(halves, ("X",), 1, 4_000, Tuning(end_chance=1e-12, card_end_chance=1e-12))
    assert waste.card[0, [0, 400, 500, 900, 1000]] == pytest.approx([0, 400, 0, 400, 0], abs=1e-6)
    # [cpu, free, room]: no CPU wastes all; with one core a whole pod wastes nothing, a half wastes its other half
    assert waste.node[0, 0, 1, 0] == pytest.approx(1000)
    assert waste.node[0, 1, 1, 0] == pytest.approx(250)
    assert waste.node[0, 2, 1, 0] == pytest.approx(0, abs=1e-6)


def test_scarce_models_cost_more_and_the_floor_protects_whole_nodes() -> None:
    fleet = fleet_of(nodes())
    wanted = [Shape(1_000, 0, 1, 1000), Shape(1_000, 0, 1, 1000, ("P100",))]
    classes = demand_classes(typical_mix(wanted, 1.0), fleet.models, fleet.cards_max, 0.03)
    prices = scarcity_prices(fleet, classes, 100.0)
    by_model = dict(zip(fleet.models, prices[:, 0], strict=True))
    assert by_model["G2"] == by_model["T4"] == pytest.approx(0.5)
    assert by_model["P100"] == pytest.approx(0.5 + 0.5 * 66 / 8)
    assert classes.counts == (0, 2, 4, 8)
    assert np.all(prices[:, 1:] > 0)


def test_a_pod_that_may_run_anywhere_leaves_the_scarce_model_alone() -> None:
    fleet = fleet_of(nodes())
    wanted = [Shape(4_000, 0, 1, 1000), Shape(4_000, 0, 1, 1000, ("P100",))]
    index = Index(fleet, rigbook_policy(typical_mix(wanted, 1.0), fleet))
    placement = index.best(wanted[0])
    assert placement is not None
    assert fleet.models[fleet.model[placement.row]] != "P100"


def test_fresh_orders_follow_the_method_and_the_seed() -> None:
    shapes = [shape for shape in SHAPES for _ in range(5)]
    order, rank = fresh_order(shapes, nodes(), 1001)
    again, _ = fresh_order(shapes, nodes(), 1001)
    assert np.array_equal(order, again)
    assert sorted(order[: len(shapes)].tolist()) == list(range(len(shapes)))
    assert sorted(rank.tolist()) == list(range(len(nodes())))
    total = sum(node.cards for node in nodes()) * 1300
    assert (
        total - 8000
        <= sum(shapes[int(i)].gpu_milli for i in order)
        <= max(total, sum(s.gpu_milli for s in shapes))
    )


@pytest.mark.parametrize("name", PUBLISHED[1:])
def test_a_published_seed_to_two_places(name: str) -> None:
    traces = os.environ.get("TRACES")
    if not traces:
        pytest.skip("TRACES does not name a folder with the openb traces")
    folder = openb.openb_folder(Path(traces))
    load = workload(folder, "default")
    ordered, pods = load.order(42)
    fleet = fleet_of(ordered)
    tables = fragment_tables(load.mix, fleet.models, fleet.cards_max)
    course, _ = inflate(ordered, pods, policy_of(name, load.mix, 42), tables)
    figures = [course.at(100)[0], course.at(130)[0], course.at(100)[1], course.at(130)[1]]
    assert figures == pytest.approx(openb.read_published(folder)["default", name][42], abs=0.0101)


def test_rigbook_is_ahead_of_fgd_on_a_published_seed() -> None:
    traces = os.environ.get("TRACES")
    if not traces:
        pytest.skip("TRACES does not name a folder with the openb traces")
    folder = openb.openb_folder(Path(traces))
    load = workload(folder, "default")
    ordered, pods = load.order(47)
    course, _ = inflate(ordered, pods, policy_of("rigbook", load.mix, 47))
    assert course.at(100)[0] > openb.read_published(folder)["default", "FGD"][47][0] + 0.5

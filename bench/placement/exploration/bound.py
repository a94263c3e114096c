"""How much any policy could allocate: linear programs over node kinds and card patterns. Needs scipy.

    PYTHONPATH=bench python bench/placement/exploration/bound.py TRACES [list ...]

Both are relaxations (fractions of pods; CPU and memory pooled per kind of node; whole-card pods not kept on one
node), so nothing real can be above them.

* `choice`: everything that arrives until 100 % is known beforehand and may be refused at will. Bounds every
  policy, clairvoyant ones included. Mean over the ten published orders.
* `as it comes`: the largest part of the whole list's demand, scaled to the fleet, that fits when every shape is
  served in the proportion it is asked for. A policy that refuses nothing that fits, and sees the shapes in
  proportion, begins to refuse about there. Not meaningful where one card model is over-asked by itself (gpuspec).
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
from placement import openb
from placement.fleet import CARD_MILLI, Node, Shape
from placement.run import workload
from scipy.optimize import linprog  # type: ignore[import-untyped]
from scipy.sparse import coo_matrix  # type: ignore[import-untyped]

Kind = tuple[int, int, int, str]


def patterns(sizes: list[int]) -> list[tuple[int, ...]]:
    """Every way to fill one card with shares that leaves no room for one more."""
    found: list[tuple[int, ...]] = []

    def extend(at: int, left: int, taken: tuple[int, ...]) -> None:
        if at == len(sizes):
            if left < sizes[-1]:
                found.append(taken)
            return
        for number in range(left // sizes[at], -1, -1):
            extend(at + 1, left - number * sizes[at], (*taken, number))

    extend(0, CARD_MILLI, ())
    return found


def bound(nodes: list[Node], wanted: dict[Shape, float], *, choose: bool) -> float:
    """Percent of the fleet's GPUs: the most of `wanted` that fits, or the largest common part of it."""
    kinds: Counter[Kind] = Counter((n.cpu_milli, n.memory_bytes, n.cards, n.model) for n in nodes)
    shapes = [s for s in wanted if any(_takes(kind, s) for kind in kinds)]
    sizes = sorted({s.card_milli for s in shapes if s.shares}, reverse=True)
    ways = patterns(sizes) if sizes else []
    entries: list[tuple[int, int, float]] = []
    limits: list[float] = []
    columns = 1  # column 0 is the common part
    place: dict[tuple[int, Kind], int] = {}
    for i, shape in enumerate(shapes):
        for kind in kinds:
            if _takes(kind, shape):
                place[i, kind] = columns
                columns += 1
    way_at = columns
    columns += len(ways)
    shared_at = {kind: columns + k for k, kind in enumerate(kinds)}
    columns += len(kinds)

    def row(items: list[tuple[int, float]], limit: float) -> None:
        entries.extend((len(limits), column, value) for column, value in items)
        limits.append(limit)

    equal: list[tuple[int, int, float]] = []
    for i, shape in enumerate(shapes):
        here = [(place[i, kind], 1.0) for kind in kinds if (i, kind) in place]
        if choose:
            row(here, wanted[shape])
        else:
            equal.extend((i, column, value) for column, value in [*here, (0, -wanted[shape])])
    for kind, number in kinds.items():
        on = [(place[i, kind], shape) for i, shape in enumerate(shapes) if (i, kind) in place]
        row([(c, s.cpu_milli / 1e3) for c, s in on], kind[0] * number / 1e3)
        row([(c, s.memory_bytes / 2**30) for c, s in on], kind[1] * number / 2**30)
        whole = [(c, float(s.cards)) for c, s in on if s.cards and not s.shares]
        row([*whole, (shared_at[kind], 1.0)], kind[2] * number)
        row([*((c, s.card_milli / CARD_MILLI) for c, s in on if s.shares), (shared_at[kind], -1.0)], 0.0)
    for z, size in enumerate(sizes):
        asked = [(c, 1.0) for (i, _), c in place.items() if shapes[i].shares and shapes[i].card_milli == size]
        row([*asked, *((way_at + w, -float(way[z])) for w, way in enumerate(ways) if way[z])], 0.0)
    row([*((way_at + w, 1.0) for w in range(len(ways))), *((c, -1.0) for c in shared_at.values())], 0.0)
    value = np.zeros(columns)
    if choose:
        for (i, _), column in place.items():
            value[column] = shapes[i].gpu_milli / CARD_MILLI
    else:
        value[0] = sum(wanted[s] * s.gpu_milli for s in shapes) / CARD_MILLI
    r, c, v = zip(*entries, strict=True)
    extra = {}
    if equal:
        er, ec, ev = zip(*equal, strict=True)
        extra = {"A_eq": coo_matrix((ev, (er, ec)), shape=(len(shapes), columns)).tocsr(), "b_eq": np.zeros(len(shapes))}
    answer = linprog(
        -value, A_ub=coo_matrix((v, (r, c)), shape=(len(limits), columns)).tocsr(), b_ub=limits, method="highs", **extra
    )
    if answer.status != 0:
        raise RuntimeError(answer.message)
    return float(-100 * answer.fun / sum(n.cards for n in nodes))


def _takes(kind: Kind, shape: Shape) -> bool:
    return (
        shape.cpu_milli <= kind[0]
        and shape.memory_bytes <= kind[1]
        and shape.cards <= kind[2]
        and shape.accepts(kind[3])
    )


def main() -> None:
    folder = openb.openb_folder(Path(sys.argv[1]))
    print("| list | choice, at 100 % | as it comes |\n|---|---|---|")
    for name in sys.argv[2:] or openb.lists_available(folder):
        load = workload(folder, name)
        capacity = sum(node.cards for node in load.nodes) * CARD_MILLI
        free = []
        for seed in openb.SEEDS:
            _, arrivals = load.order(seed)
            milli = np.cumsum([shape.gpu_milli for shape in arrivals])
            first = arrivals[: int(np.searchsorted(milli, capacity, side="right"))]
            free.append(bound(load.nodes, dict(Counter(first)), choose=True))
        scale = capacity / sum(shape.gpu_milli for shape in load.shapes)
        scaled = {shape: number * scale for shape, number in Counter(load.shapes).items()}
        print(f"| {name} | {np.mean(free):.2f} | {bound(load.nodes, scaled, choose=False):.2f} |", flush=True)


if __name__ == "__main__":
    main()

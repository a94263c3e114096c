"""What is idle when 100 % has arrived, and why.

    PYTHONPATH=bench python bench/placement/exploration/idle.py TRACES [policy] [list] [seed]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from placement import openb
from placement.fleet import CARD_MILLI
from placement.inflation import inflate
from placement.run import policy_of, workload

EDGES = (1, 100, 160, 191, 320, 470, 810, 1000)


def main() -> None:
    folder = openb.openb_folder(Path(sys.argv[1]))
    policy, name, seed = [*sys.argv[2:], *("rigbook", "default", "42")[len(sys.argv) - 2 :]]
    load = workload(folder, name)
    nodes, arrivals = load.order(int(seed))
    capacity = sum(node.cards for node in nodes) * CARD_MILLI
    milli = np.cumsum([shape.gpu_milli for shape in arrivals])
    first = arrivals[: int(np.searchsorted(milli, capacity, side="right"))]
    course, fleet = inflate(nodes, first, policy_of(policy, load.mix, 0))
    begun = course.arrived[np.argmin(course.accepted)]
    print(f"{policy}, {name}, seed {seed}: first refusal at {begun:.2f} % arrived")
    left = fleet.card_left
    points = 100 / capacity
    print("| room on a card | cards | points idle |\n|---|---|---|")
    for low, high in zip(EDGES, EDGES[1:], strict=False):
        some = left[(left >= low) & (left < high)]
        print(f"| {low}-{high - 1} | {some.size} | {some.sum() * points:.2f} |")
    whole = (left == CARD_MILLI).sum()
    print(f"| wholly free | {whole} | {whole * CARD_MILLI * points:.2f} |")
    total_cpu = {model: sum(n.cpu_milli for n in nodes if n.model == model) for model in fleet.models}
    print("| model | cards | points idle | CPU left, % | cards with more than 190 left |\n|---|---|---|---|---|")
    for m, model in enumerate(fleet.models):
        rows = fleet.model == m
        cpu = 100 * fleet.cpu_left[rows].sum() / total_cpu[model]
        more = int((left[rows] > 190).sum())
        idle = fleet.idle_milli[rows].sum() * points
        print(f"| {model} | {fleet.cards[rows].sum()} | {idle:.2f} | {cpu:.0f} | {more} |")


if __name__ == "__main__":
    main()

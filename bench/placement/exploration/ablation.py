"""What each part of `rigbook` is worth: the policy with one part taken away, at 100 % / 130 % arrived.

    PYTHONPATH=bench python bench/placement/exploration/ablation.py TRACES [list ...]

Seeds 42-44. The last two rows change what the policies know: the whole histogram of the list instead of FGD's
typical part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from placement import openb
from placement.fleet import Fleet
from placement.inflation import inflate
from placement.policies import Fgd, Policy
from placement.rigbook import Tuning, rigbook_policy
from placement.run import Workload, workload
from placement.typical import fragment_tables, typical_mix

SEEDS = openb.SEEDS[:3]
USUAL = Tuning()


def variants(load: Workload) -> dict[str, Callable[[Fleet], Policy]]:
    whole = typical_mix(load.shapes, 1.0)

    def tuned(**changes: float) -> Callable[[Fleet], Policy]:
        return lambda fleet: rigbook_policy(load.mix, fleet, replace(USUAL, **changes))

    return {
        "FGD": lambda fleet: Fgd(fragment_tables(load.mix, fleet.models, fleet.cards_max)),
        "rigbook": tuned(),
        "no scarcity by model": tuned(model_price=0.0),
        "no scarcity by count": tuned(count_price=0.0),
        "no count floor": tuned(count_floor=0.0),
        "no scarcity at all": tuned(model_price=0.0, count_price=0.0),
        "one pod ahead only (end chances 1)": tuned(end_chance=1.0, card_end_chance=1.0),
        "no waste of remainders": tuned(card_weight=0.0),
        "FGD, whole histogram": lambda fleet: Fgd(fragment_tables(whole, fleet.models, fleet.cards_max)),
        "rigbook, whole histogram": lambda fleet: rigbook_policy(whole, fleet),
    }


def main() -> None:
    folder = openb.openb_folder(Path(sys.argv[1]))
    names = sys.argv[2:] or ["default", "cpu250", "gpushare60", "gpuspec33", "multigpu30"]
    loads = [workload(folder, name) for name in names]
    print(f"| variant | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for variant in variants(loads[0]):
        cells = []
        for load in loads:
            figures = []
            for seed in SEEDS:
                nodes, arrivals = load.order(seed)
                course, _ = inflate(nodes, arrivals, variants(load)[variant])
                figures.append([course.at(percent)[0] for percent in (100, 130)])
            cells.append(" / ".join(f"{x:.2f}" for x in np.mean(figures, axis=0)))
        print(f"| {variant} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

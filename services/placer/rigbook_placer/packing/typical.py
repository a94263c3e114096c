"""What is typically asked for: the demand mix, and FGD's fragmentation measure as two lookup tables.

Sources: Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient
Descent" (USENIX ATC'23), and the simulator published with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rigbook_placer.packing.fleet import CARD_MILLI, Fleet, FloatArray, IntArray, Shape

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "TYPICAL_SHARE",
    "FragmentTables",
    "TypicalMix",
    "fragment_naive",
    "fragment_tables",
    "fragments",
    "typical_mix",
]

TYPICAL_SHARE = 0.95  # the paper's cut: the most frequent shapes that make up this part of the list


@dataclass(frozen=True, slots=True)
class TypicalMix:
    """Shapes (without memory, as in the paper) and their frequencies, which sum to 1; most frequent first."""

    shapes: tuple[Shape, ...]
    weights: tuple[float, ...]

    def gpu_shapes(self) -> list[tuple[Shape, float]]:
        return [
            (shape, weight) for shape, weight in zip(self.shapes, self.weights, strict=True) if shape.cards
        ]


def typical_mix(shapes: Iterable[Shape], share: float = TYPICAL_SHARE) -> TypicalMix:
    """The most frequent (cpu, milli, cards, models) shapes up to `share` of all, CPU-only ones included.

    Equal counts are ordered by the larger (cpu, milli, cards, models), as the published simulator does.
    """
    counts = Counter((s.cpu_milli, s.card_milli, s.cards, s.models) for s in shapes)
    total = sum(counts.values())
    if total == 0:
        raise ValueError("no shapes to take the typical mix of")
    ranked = sorted(
        counts.items(), key=lambda item: (item[1], *item[0][:3], "|".join(item[0][3])), reverse=True
    )
    kept: list[Shape] = []
    numbers: list[int] = []
    for (cpu_milli, card_milli, cards, models), number in ranked:
        if sum(numbers) >= share * total:
            break
        kept.append(Shape(cpu_milli, 0, cards, card_milli, models))
        numbers.append(number)
    return TypicalMix(tuple(kept), tuple(number / sum(numbers) for number in numbers))


def fragment_naive(mix: TypicalMix, model: str, cpu_left: int, card_left: Iterable[int]) -> float:
    """F(node), word for word: over the typical pods, frequency times the idle milli this pod cannot use here.

    All idle milli when the pod asks for no GPU, or lacks model, CPU or cards; else the milli on cards that
    have less left than it asks.
    """
    left = list(card_left)
    idle = sum(left)
    total = 0.0
    for shape, weight in zip(mix.shapes, mix.weights, strict=True):
        enough = [room for room in left if room >= shape.card_milli]
        usable = (
            shape.cards
            and shape.accepts(model)
            and cpu_left >= shape.cpu_milli
            and len(enough) >= shape.cards
        )
        total += weight * (idle - sum(enough) if usable else idle)
    return total


@dataclass(frozen=True, slots=True)
class FragmentTables:
    """F = idle - sum over cards of `share[model, level, left]` - `whole[model, level, free cards]`.

    `level` is the number of distinct typical CPU requests that the CPU left covers.
    """

    cpu_levels: IntArray
    share: FloatArray  # (models, levels + 1, 1001)
    whole: FloatArray  # (models, levels + 1, cards_max + 1)

    def level(self, cpu_left: IntArray) -> IntArray:
        return np.searchsorted(self.cpu_levels, cpu_left, side="right").astype(np.int64)


def fragment_tables(mix: TypicalMix, models: tuple[str, ...], cards_max: int) -> FragmentTables:
    """The tables of a mix for the card models and the node width of a fleet."""
    asked = mix.gpu_shapes()
    levels = np.array(sorted({shape.cpu_milli for shape, _ in asked}), dtype=np.int64)
    share = np.zeros((len(models), len(levels) + 1, CARD_MILLI + 1))
    whole = np.zeros((len(models), len(levels) + 1, cards_max + 1))
    for shape, weight in asked:
        level = int(np.searchsorted(levels, shape.cpu_milli)) + 1
        for m, model in enumerate(models):
            if not shape.accepts(model):
                continue
            if shape.shares:
                share[m, level:, shape.card_milli :] += weight
            else:
                whole[m, level:, shape.cards :] += weight
    share *= np.arange(CARD_MILLI + 1)
    whole *= np.arange(cards_max + 1) * CARD_MILLI
    return FragmentTables(levels, share, whole)


def fragments(fleet: Fleet, tables: FragmentTables, rows: IntArray) -> FloatArray:
    """F of each row, in milli."""
    model = fleet.model[rows]
    level = tables.level(fleet.cpu_left[rows])
    usable = tables.share[model[:, None], level[:, None], fleet.card_left[rows]].sum(axis=1)
    result: FloatArray = fleet.idle_milli[rows] - usable - tables.whole[model, level, fleet.free_cards[rows]]
    return result

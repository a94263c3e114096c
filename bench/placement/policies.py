"""The published policies besides FGD, and the simple ones, each a pure score of rows: higher is better, -inf is "no".

Scores are those of the simulator published with the FGD paper (ATC'23), whole numbers from 0 to 100; rounding
is part of them, since equal scores go to the earlier row and so fill nodes one after another. FGD itself is the
placer's own (`rigbook_placer.packing.fgd`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rigbook_placer.packing.fgd import (
    CPU_SPEC_MILLI,
    FIRST_FREE,
    GPU_SPEC_MILLI,
    NO_ROOM,
    SCORE_MAX,
    Fgd,
    Policy,
    RowScores,
    one_option,
    tightest,
)
from rigbook_placer.packing.fleet import CARD_MILLI, Fleet, FloatArray, IntArray, Shape, fits

__all__ = [
    "FIRST_FREE", "NO_ROOM", "BestFit", "DotProduct", "Fgd", "GpuClustering", "GpuPacking", "Pack", "Policy", "RandomFit",
    "RowScores", "Spread", "one_option", "tightest",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pack:
    """Fill few servers: used nodes before empty ones, then the least GPU room, then the least CPU."""

    name: str = "pack"
    local: bool = True

    def score(self, fleet: Fleet, shape: Shape, rows: IntArray) -> RowScores:
        used = fleet.idle_milli[rows] < fleet.cards[rows] * CARD_MILLI
        score = used * 1e6 - fleet.idle_milli[rows] - fleet.cpu_left[rows] / (2 * CPU_SPEC_MILLI)
        return one_option(fleet, shape, rows, score)

    def charge(self, fleet: Fleet, shape: Shape) -> FloatArray | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class Spread:
    """The most GPU room first, then the most CPU."""

    name: str = "spread"
    local: bool = True

    def score(self, fleet: Fleet, shape: Shape, rows: IntArray) -> RowScores:
        score = fleet.idle_milli[rows] + fleet.cpu_left[rows] / (2 * CPU_SPEC_MILLI)
        return one_option(fleet, shape, rows, score)

    def charge(self, fleet: Fleet, shape: Shape) -> FloatArray | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class RandomFit:
    """Any fitting node, any fitting card there, from the generator given."""

    draws: np.random.Generator
    name: str = "Random"
    local: bool = False

    def score(self, fleet: Fleet, shape: Shape, rows: IntArray) -> RowScores:
        score = np.where(fits(fleet, shape, rows), self.draws.random(len(rows)), -np.inf)
        card = np.full(len(rows), FIRST_FREE, dtype=np.int64)
        if shape.shares:
            best = int(score.argmax())
            enough = np.flatnonzero(fleet.card_left[rows[best]] >= shape.card_milli)
            if len(enough):
                card[best] = self.draws.choice(enough)
        return RowScores(score[None, :], card[None, :])

    def charge(self, fleet: Fleet, shape: Shape) -> FloatArray | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class DotProduct:
    """int(100 (1 - (cpu_left c / 128000² + gpu_left g / 8000²) / 2)): avoid what looks most like the pod."""

    name: str = "DotProd"
    local: bool = True

    def score(self, fleet: Fleet, shape: Shape, rows: IntArray) -> RowScores:
        cpu = (fleet.cpu_left[rows] / CPU_SPEC_MILLI) * (shape.cpu_milli / CPU_SPEC_MILLI)
        gpu = (fleet.idle_milli[rows] / GPU_SPEC_MILLI) * (shape.gpu_milli / GPU_SPEC_MILLI)
        return one_option(fleet, shape, rows, np.trunc(SCORE_MAX * (1 - (cpu + gpu) / 2)))

    def charge(self, fleet: Fleet, shape: Shape) -> FloatArray | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class GpuClustering:
    """Like to like: nodes that run only pods of this kind, then such among others, then empty, then the rest."""

    name: str = "GpuClustering"
    local: bool = True

    def score(self, fleet: Fleet, shape: Shape, rows: IntArray) -> RowScores:
        if not shape.cards:
            return one_option(fleet, shape, rows, np.zeros(len(rows)))
        present = fleet.kinds[rows] > 0
        same = present[:, 0 if shape.shares else shape.cards]
        kinds = present.sum(axis=1)
        quarter = SCORE_MAX // 4
        base = quarter * (GPU_SPEC_MILLI - fleet.idle_milli[rows]) // GPU_SPEC_MILLI
        step = np.where(same, np.where(kinds == 1, 3, 2), np.where(kinds == 0, 1, 0))
        return one_option(fleet, shape, rows, (base + quarter * step).astype(np.float64))

    def charge(self, fleet: Fleet, shape: Shape) -> FloatArray | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class GpuPacking:
    """A shared card already in use (100 - room / 100), then free cards of a used node, then an unused node."""

    name: str = "GpuPacking"
    local: bool = True

    def score(self, fleet: Fleet, shape: Shape, rows: IntArray) -> RowScores:
        if not shape.cards:
            return one_option(fleet, shape, rows, np.zeros(len(rows)))
        free = fleet.free_cards[rows]
        unused = np.maximum(SCORE_MAX // 3 - free, free)
        opened = np.full(len(rows), max(SCORE_MAX // 2 - shape.cards, SCORE_MAX // 3))
        if shape.shares:
            room = fleet.card_left[rows, tightest(fleet, shape, rows)]
            shared = np.maximum(SCORE_MAX - room * 100 // CARD_MILLI // 10, SCORE_MAX // 2)
            opened = np.where(room == CARD_MILLI, SCORE_MAX // 2 - 1, shared)
        score = np.where(free == fleet.cards[rows], unused, opened)
        return one_option(fleet, shape, rows, score.astype(np.float64))

    def charge(self, fleet: Fleet, shape: Shape) -> FloatArray | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class BestFit:
    """int(100 (1 - (cpu_left - c) / 256000 - (gpu_left - g) / 16000)): the least room left over."""

    name: str = "BestFit"
    local: bool = True

    def score(self, fleet: Fleet, shape: Shape, rows: IntArray) -> RowScores:
        cpu = (fleet.cpu_left[rows] - shape.cpu_milli) / CPU_SPEC_MILLI * 0.5
        gpu = (fleet.idle_milli[rows] - shape.gpu_milli) / GPU_SPEC_MILLI * 0.5
        return one_option(fleet, shape, rows, np.trunc((1.0 - (cpu + gpu)) * SCORE_MAX))

    def charge(self, fleet: Fleet, shape: Shape) -> FloatArray | None:  # noqa: ARG002
        return None

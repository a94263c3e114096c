"""The published policies and the simple ones, each a pure score of rows: higher is better, -inf is "no".

Every policy answers, for some rows, the score of one or more options per row and the card of each option.
Scores are those of the simulator published with the FGD paper (ATC'23), whole numbers from 0 to 100; rounding
is part of them, since equal scores go to the earlier row and so fill nodes one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from .fleet import CARD_MILLI, Fleet, FloatArray, IntArray, Shape, fits
from .typical import FragmentTables, fragments

# The largest node the published scores are normalised by.
CPU_SPEC_MILLI = 128_000
GPU_SPEC_MILLI = 8_000
SCORE_MAX = 100
FIRST_FREE = -1  # card of an option that takes the first wholly free cards
NO_ROOM = np.iinfo(np.int64).max


class RowScores(NamedTuple):
    """`score` and `card`, both (options, rows); a card of `FIRST_FREE` means the first wholly free ones."""

    score: FloatArray
    card: IntArray


class Policy(Protocol):
    """How placements are ranked."""

    @property
    def name(self) -> str: ...

    @property
    def local(self) -> bool:
        """True when a row's score depends on that row only, so that it may be kept until the row changes."""
        ...

    def score(self, fleet: Fleet, shape: Shape, rows: IntArray) -> RowScores: ...

    def charge(self, fleet: Fleet, shape: Shape) -> FloatArray | None:
        """What depends on the whole fleet: to be subtracted, per option and node class; None for nothing."""
        ...


def one_option(fleet: Fleet, shape: Shape, rows: IntArray, score: FloatArray) -> RowScores:
    """Wrap a score per row: unfit rows become -inf, shares go to the tightest card."""
    masked = np.where(fits(fleet, shape, rows), score, -np.inf)
    card = tightest(fleet, shape, rows) if shape.shares else np.full(len(rows), FIRST_FREE, dtype=np.int64)
    return RowScores(masked[None, :], card[None, :])


def tightest(fleet: Fleet, shape: Shape, rows: IntArray) -> IntArray:
    """The card with the least room that is enough, the first of equals; meaningless on rows without one."""
    left = fleet.card_left[rows]
    card: IntArray = np.where(left >= shape.card_milli, left, NO_ROOM).argmin(axis=1)
    return card


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


@dataclass(frozen=True, slots=True)
class Fgd:
    """int(100 sigmoid((F(node) - F(node with the pod)) / 1000)), best card included: least new fragments."""

    tables: FragmentTables
    name: str = "FGD"
    local: bool = True

    def score(self, fleet: Fleet, shape: Shape, rows: IntArray) -> RowScores:
        ok = fits(fleet, shape, rows)
        score = np.full(len(rows), -np.inf)
        card = np.full(len(rows), FIRST_FREE, dtype=np.int64)
        fit = rows[ok]
        if not len(fit):
            return RowScores(score[None, :], card[None, :])
        model = fleet.model[fit]
        level = self.tables.level(fleet.cpu_left[fit] - shape.cpu_milli)
        left = fleet.card_left[fit]
        share = self.tables.share
        usable = share[model[:, None], level[:, None], left]
        after = fleet.idle_milli[fit] - shape.gpu_milli - usable.sum(axis=1)
        free = fleet.free_cards[fit]
        now = fragments(fleet, self.tables, fit)
        if shape.shares:
            enough = left >= shape.card_milli
            opens = left == CARD_MILLI
            rest = share[model[:, None], level[:, None], np.where(enough, left - shape.card_milli, 0)]
            whole = self.tables.whole[model[:, None], level[:, None], free[:, None] - opens]
            by_card = _rounded(now[:, None] - (after[:, None] + usable - rest - whole))
            by_card = np.where(enough, by_card, -np.inf)
            best = by_card.argmax(axis=1)
            card[ok] = best
            score[ok] = by_card[np.arange(len(fit)), best]
        else:
            whole = self.tables.whole[model, level, free - shape.cards]
            after = after + shape.cards * share[model, level, CARD_MILLI] - whole
            score[ok] = _rounded(now - after)
        return RowScores(score[None, :], card[None, :])

    def charge(self, fleet: Fleet, shape: Shape) -> FloatArray | None:  # noqa: ARG002
        return None


def _rounded(gain_milli: FloatArray) -> FloatArray:
    """Whole points of the sigmoid; exact halves of a float's last bit are settled by nine decimals."""
    points = SCORE_MAX / (1.0 + np.exp(-gain_milli / CARD_MILLI))
    result: FloatArray = np.trunc(np.round(points, 9))
    return result

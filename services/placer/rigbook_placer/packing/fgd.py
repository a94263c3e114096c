"""A policy as a pure score of rows (higher is better, -inf is "no"), and the published one: FGD.

Every policy answers, for some rows, the score of one or more options per row and the card of each option.
Scores are those of the simulator published with the FGD paper (ATC'23), whole numbers from 0 to 100; rounding
is part of them, since equal scores go to the earlier row and so fill nodes one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from rigbook_placer.packing.fleet import CARD_MILLI, Fleet, FloatArray, IntArray, Shape, fits
from rigbook_placer.packing.typical import FragmentTables, fragments

__all__ = [
    "CPU_SPEC_MILLI",
    "FIRST_FREE",
    "GPU_SPEC_MILLI",
    "NO_ROOM",
    "SCORE_MAX",
    "Fgd",
    "Policy",
    "RowScores",
    "one_option",
    "tightest",
]

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

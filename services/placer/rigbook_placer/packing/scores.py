"""Scores kept per shape: a decision looks again only at the rows that changed since this shape last asked.

A local policy's score of a row depends on that row alone, so a kept score is exact, never stale. What depends
on the whole fleet (`Policy.charge`) is added at each decision by one gather over the rows.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from rigbook_placer.packing.fgd import FIRST_FREE, Policy, RowScores
from rigbook_placer.packing.fleet import CARD_MILLI, Fleet, FloatArray, IntArray, Placement, Shape

__all__ = [
    "SHAPES_MAX",
    "Scores",
]

SHAPES_MAX = 1024  # kept shapes; the least recently asked goes first. 17 bytes a row and option each.


@dataclass(slots=True)
class _Kept:
    score: FloatArray
    card: IntArray
    seen: int  # the fleet's version at the last look


class Scores:
    """Finds the best placement of a shape in one fleet by one policy. Decides nothing else, changes nothing."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self._fleet = fleet
        self._policy = policy
        self._all = np.arange(fleet.rows, dtype=np.int64)
        self._kept: OrderedDict[Shape, _Kept] = OrderedDict()

    def best(self, shape: Shape) -> Placement | None:
        """The best-scored placement that fits, the earliest row of equals; None when nothing fits."""
        total, card = self.totals(shape)
        option, row = divmod(int(total.argmax()), self._fleet.rows)
        if total[option, row] == -np.inf:
            return None
        return Placement(row, self.cards(shape, row, int(card[option, row])))

    def totals(self, shape: Shape) -> RowScores:
        """Score less charge, and card, of every row; both (options, rows)."""
        score, card = self._scores(shape)
        charge = self._policy.charge(self._fleet, shape)
        total = score if charge is None else score - charge.take(self._fleet.node_class, axis=1)
        return RowScores(total, card)

    def _scores(self, shape: Shape) -> tuple[FloatArray, IntArray]:
        fleet = self._fleet
        if not self._policy.local:
            return self._policy.score(fleet, shape, self._all)
        kept = self._kept.get(shape)
        if kept is None:
            score, card = self._policy.score(fleet, shape, self._all)
            self._kept[shape] = _Kept(score, card, fleet.version)
            if len(self._kept) > SHAPES_MAX:
                self._kept.popitem(last=False)
            return score, card
        self._kept.move_to_end(shape)
        if kept.seen < fleet.version:
            rows = np.flatnonzero(fleet.changed_at > kept.seen)
            score, card = self._policy.score(fleet, shape, rows)
            kept.score[:, rows] = score
            kept.card[:, rows] = card
            kept.seen = fleet.version
        return kept.score, kept.card

    def cards(self, shape: Shape, row: int, card: int) -> tuple[int, ...]:
        if not shape.cards:
            return ()
        if card != FIRST_FREE:
            return (card,)
        free = np.flatnonzero(self._fleet.card_left[row] == CARD_MILLI)
        return tuple(int(column) for column in free[: shape.cards])

"""The fleet as one array per field: one row per node, rows in tie order (the earlier row wins a tie).

Units: CPU in thousandths of a core, memory in bytes, a card's room in thousandths of a card ("milli").
A column that a node does not have counts as a card with nothing left, so no array is ragged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CARD_MILLI",
    "BoolArray",
    "Fleet",
    "FloatArray",
    "IntArray",
    "Node",
    "Placement",
    "Shape",
    "fits",
    "fleet_of",
]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

CARD_MILLI = 1000


@dataclass(frozen=True, slots=True)
class Node:
    """A node as listed: what it has when nothing runs on it."""

    name: str
    cpu_milli: int
    memory_bytes: int
    cards: int
    model: str


@dataclass(frozen=True, slots=True)
class Shape:
    """What one pod asks for; equal requests are equal shapes, so a shape is a key.

    `cards == 0` is a CPU-only pod; `cards == 1` with `card_milli < 1000` shares a card; anything else takes
    `cards` whole, wholly free cards. An empty `models` accepts every card model.
    """

    cpu_milli: int
    memory_bytes: int
    cards: int
    card_milli: int
    models: tuple[str, ...] = ()

    @property
    def gpu_milli(self) -> int:
        """All it asks of GPUs, in milli."""
        return self.cards * self.card_milli

    @property
    def shares(self) -> bool:
        """True when it takes a part of one card."""
        return self.cards == 1 and self.card_milli < CARD_MILLI

    def accepts(self, model: str) -> bool:
        return not self.models or model in self.models


@dataclass(frozen=True, slots=True)
class Placement:
    """A proposal: the row and the cards' columns there (empty for a CPU-only pod)."""

    row: int
    cards: tuple[int, ...]


@dataclass(slots=True)
class Fleet:
    """What is left on every node. Arrays are indexed by row; `(n, w)` arrays by row and card column.

    Only `bind` and `unbind` change it. Each raises `version` and notes it for its row in `changed_at`, so that
    whoever keeps something per row knows what to look at again.
    """

    names: tuple[str, ...]
    models: tuple[str, ...]
    cpu_left: IntArray
    memory_left: IntArray
    card_left: IntArray  # (n, w) milli
    model: IntArray  # index into `models`
    cards: IntArray
    roomiest: IntArray  # the largest card_left of the row
    free_cards: IntArray  # wholly free cards
    idle_milli: IntArray  # sum of card_left
    kinds: IntArray  # (n, w + 1) bindings per kind: column 0 shares, column k whole pods of k cards
    node_class: IntArray  # model * (w + 1) + free_cards: where a price per (model, free cards) is looked up
    free_histogram: IntArray  # (models, w + 1) nodes per model with so many wholly free cards
    idle_by_model: IntArray
    changed_at: IntArray  # the version at which the row last changed
    version: int = 0

    @property
    def rows(self) -> int:
        return len(self.names)

    @property
    def cards_max(self) -> int:
        return int(self.card_left.shape[1])

    def bind(self, placement: Placement, shape: Shape) -> None:
        """Take what `shape` asks for; raises `ValueError` when it is not there."""
        self._move(placement, shape, 1)

    def unbind(self, placement: Placement, shape: Shape) -> None:
        """Give back what `bind` took."""
        self._move(placement, shape, -1)

    def put(self, row: int, left: Sequence[int]) -> None:
        """What is left on the row's cards, whoever took the rest."""
        cards = self.card_left[row]
        cards[: len(left)] = left
        cards[len(left) :] = 0
        idle = int(cards.sum())
        self.idle_by_model[int(self.model[row])] += idle - int(self.idle_milli[row])
        self.idle_milli[row] = idle
        self._count(row)

    def _move(self, placement: Placement, shape: Shape, sign: int) -> None:
        row = placement.row
        columns = list(placement.cards)
        if len(columns) != shape.cards:
            raise ValueError(f"{len(columns)} cards named, {shape.cards} asked")
        cards = self.card_left[row]
        taken = sign * shape.card_milli
        cpu = int(self.cpu_left[row]) - sign * shape.cpu_milli
        memory = int(self.memory_left[row]) - sign * shape.memory_bytes
        if cpu < 0 or memory < 0 or any(not 0 <= cards[c] - taken <= CARD_MILLI for c in columns):
            raise ValueError(f"{self.names[row]} cannot move {shape} by {sign} on cards {columns}")
        for column in columns:
            cards[column] -= taken
        self.cpu_left[row] = cpu
        self.memory_left[row] = memory
        if shape.cards:
            model = int(self.model[row])
            self.kinds[row, 0 if shape.shares else shape.cards] += sign
            self.idle_milli[row] -= sign * shape.gpu_milli
            self.idle_by_model[model] -= sign * shape.gpu_milli
        self._count(row)

    def _count(self, row: int) -> None:
        model = int(self.model[row])
        left = self.card_left[row].tolist()
        self.roomiest[row] = max(left)
        free = left.count(CARD_MILLI)
        before = int(self.free_cards[row])
        if free != before:
            self.free_cards[row] = free
            self.node_class[row] += free - before
            self.free_histogram[model, before] -= 1
            self.free_histogram[model, free] += 1
        self.version += 1
        self.changed_at[row] = self.version


def fleet_of(nodes: Sequence[Node]) -> Fleet:
    """An empty fleet; the given order is the tie order."""
    if not nodes:
        raise ValueError("a fleet needs at least one node")
    models = tuple(sorted({node.model for node in nodes}))
    width = max(node.cards for node in nodes)
    cards = np.array([node.cards for node in nodes], dtype=np.int64)
    model = np.array([models.index(node.model) for node in nodes], dtype=np.int64)
    card_left = np.where(np.arange(width) < cards[:, None], CARD_MILLI, 0).astype(np.int64)
    histogram = np.zeros((len(models), width + 1), dtype=np.int64)
    np.add.at(histogram, (model, cards), 1)
    idle_by_model = np.zeros(len(models), dtype=np.int64)
    np.add.at(idle_by_model, model, cards * CARD_MILLI)
    return Fleet(
        names=tuple(node.name for node in nodes),
        models=models,
        cpu_left=np.array([node.cpu_milli for node in nodes], dtype=np.int64),
        memory_left=np.array([node.memory_bytes for node in nodes], dtype=np.int64),
        card_left=card_left,
        model=model,
        cards=cards,
        roomiest=card_left.max(axis=1),
        free_cards=cards.copy(),
        idle_milli=card_left.sum(axis=1),
        kinds=np.zeros((len(nodes), width + 1), dtype=np.int64),
        node_class=model * (width + 1) + cards,
        free_histogram=histogram,
        idle_by_model=idle_by_model,
        changed_at=np.zeros(len(nodes), dtype=np.int64),
    )


def fits(fleet: Fleet, shape: Shape, rows: IntArray) -> BoolArray:
    """The filter: which of `rows` can take the shape now."""
    ok: BoolArray = (fleet.cpu_left[rows] >= shape.cpu_milli) & (
        fleet.memory_left[rows] >= shape.memory_bytes
    )
    if shape.shares:
        ok &= fleet.roomiest[rows] >= shape.card_milli
    elif shape.cards:
        ok &= fleet.free_cards[rows] >= shape.cards
    if shape.models:
        accepted = np.array([shape.accepts(model) for model in fleet.models])
        ok &= accepted[fleet.model[rows]]
    return ok

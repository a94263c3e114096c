"""The paper's method: pods arrive one by one until 130 % of the GPUs are asked for; what does not fit is dropped.

Figures at N % arrived are means over the arrivals whose arrived share rounds to N, as in the published analysis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .fleet import CARD_MILLI, BoolArray, Fleet, FloatArray, IntArray, Node, Shape, fleet_of
from .index import Index
from .policies import Policy
from .typical import FragmentTables, fragments

INFLATION = 1.3
WATCHED = frozenset({100, 130})  # percent arrived at which figures are compared


@dataclass(frozen=True, slots=True)
class Course:
    """One run, a value per arrival: percent of the fleet's GPUs arrived, used, and fragmented (idle x unusable).

    Fragmentation is NaN where it was not watched.
    """

    arrived: FloatArray
    allocated: FloatArray
    fragmented: FloatArray
    accepted: BoolArray

    def at(self, percent: int) -> tuple[float, float]:
        """(allocation, fragmentation) at so many percent arrived."""
        here = np.round(self.arrived) == percent
        if not here.any():
            raise ValueError(f"no arrival near {percent} %")
        return float(np.round(self.allocated[here], 2).mean()), float(self.fragmented[here].mean())


def ranked(nodes: Sequence[Node], rank: IntArray) -> list[Node]:
    """The nodes in tie order."""
    return [nodes[int(i)] for i in np.argsort(rank, kind="stable")]


def fresh_order(shapes: Sequence[Shape], nodes: Sequence[Node], seed: int) -> tuple[IntArray, IntArray]:
    """An order of our own by the same method: all pods shuffled, then drawn with replacement up to 130 %."""
    draws = np.random.default_rng(seed)
    milli = np.array([shape.gpu_milli for shape in shapes])
    target = INFLATION * CARD_MILLI * sum(node.cards for node in nodes)
    order = draws.permutation(len(shapes))
    mean = max(1.0, float(milli.mean()))
    more = draws.integers(0, len(shapes), size=int(2 * target / mean))
    keep = int(np.searchsorted(milli.sum() + np.cumsum(milli[more]), target))
    return np.concatenate([order, more[:keep]]).astype(np.int64), draws.permutation(len(nodes)).astype(
        np.int64
    )


def inflate(
    nodes: Sequence[Node],
    arrivals: Sequence[Shape],
    policy_of: Callable[[Fleet], Policy],
    tables: FragmentTables | None = None,
    watch: frozenset[int] = WATCHED,
) -> tuple[Course, Fleet]:
    """Run one order through one policy; fragmentation is taken where the arrived percent rounds to `watch`."""
    fleet = fleet_of(nodes)
    index = Index(fleet, policy_of(fleet))
    rows = np.arange(fleet.rows, dtype=np.int64)
    size = len(arrivals)
    asked = np.zeros(size)
    used = np.zeros(size)
    fragmented = np.full(size, np.nan)
    accepted = np.zeros(size, dtype=np.bool_)
    percent = float(fleet.cards.sum()) * CARD_MILLI / 100
    now_asked = now_used = 0
    for i, shape in enumerate(arrivals):
        now_asked += shape.gpu_milli
        placement = index.best(shape)
        if placement is not None:
            fleet.bind(placement, shape)
            accepted[i] = True
            now_used += shape.gpu_milli
        asked[i] = now_asked
        used[i] = now_used
        if tables and round(now_asked / percent) in watch:
            fragmented[i] = fragments(fleet, tables, rows).sum() / percent
    return Course(asked / percent, used / percent, fragmented, accepted), fleet

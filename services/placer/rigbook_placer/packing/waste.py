"""The policy `rigbook`: what a node will waste in the end, plus prices for what the whole fleet runs short of.

Two parts, both from the typical mix that FGD itself uses and nothing else about the future:

1. Future waste. A node with so much CPU, so many free cards and so much room on broken cards is imagined to
   take typical pods at random, whatever fits, until nothing comes any more (each step ends with a small chance
   `end_chance`); what is idle then is its expected waste, computed exactly for all states by dynamic
   programming. The same in one dimension gives the waste of a single card's remainder. A placement costs the
   waste it adds. FGD looks one pod ahead; this looks at the whole filling, so CPU that the remaining cards will
   need, and remainders that nobody asks for, are priced by themselves.
2. Scarcity. For every class of typical demand (a set of card models it may use; how many whole cards at once)
   the fleet has `room` for it and the mix a `part` of it. The potential sum(part x log(room)) is the
   proportionally fair one: taking room away from a class costs part / room, times the idle milli of the fleet.
   So pods that may run anywhere leave rare models alone, and nodes with eight free cards are opened last, only
   as far as the state of the fleet makes that worth it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rigbook_placer.packing.fgd import FIRST_FREE, RowScores
from rigbook_placer.packing.fleet import CARD_MILLI, BoolArray, Fleet, FloatArray, IntArray, Shape, fits

if TYPE_CHECKING:
    from rigbook_placer.packing.typical import TypicalMix

__all__ = [
    "CPU_STEP_MILLI",
    "ROOM_STEPS",
    "ROOM_STEP_MILLI",
    "DemandClasses",
    "Rigbook",
    "Tuning",
    "WasteTables",
    "demand_classes",
    "rigbook_policy",
    "scarcity_prices",
    "waste_tables",
]

# Grid of the waste table; pods are rounded up and nodes down, so it never promises too much.
CPU_STEP_MILLI = 1_000
ROOM_STEP_MILLI = 50  # grid of room on broken cards
ROOM_STEPS = 81  # up to 4 cards' worth of such room is told apart


@dataclass(frozen=True, slots=True)
class Tuning:
    """Chosen on some lists and seeds only, checked on the others: the README names them and says what each is worth."""

    end_chance: float = 0.001  # of a node's filling, per typical pod that arrives anywhere
    card_end_chance: float = 0.006  # the same for a single card's remainder
    card_weight: float = 1.5  # of the remainders' waste against the node's
    model_price: float = 0.7  # of scarcity by card model
    count_price: float = 0.03  # of scarcity by cards wanted at once
    # A part of the demand assumed for every power of two of cards, if the mix has less.
    count_floor: float = 0.05
    price_max: float = 100.0


@dataclass(frozen=True, slots=True)
class WasteTables:
    """Expected waste in milli of a node's state and of a card's remainder, per card model.

    `useful` is what a broken card's remainder will be used for, left - waste, and 0 for a wholly free card: the
    sum over a node's cards is the room its state counts with.
    """

    node: FloatArray  # (models, cpu steps, cards_max + 1, ROOM_STEPS)
    card: FloatArray  # (models, 1001)
    useful: FloatArray  # (models, 1001)


@dataclass(frozen=True, slots=True)
class DemandClasses:
    """Classes of typical demand: which models take it, how many whole cards at once, what part of all milli."""

    models: BoolArray  # (classes, models)
    cards: IntArray  # (classes,) index into `counts`; counts[0] == 0 stands for shares and single cards
    part: FloatArray
    counts: tuple[int, ...]
    hosted: FloatArray  # (counts, free cards) milli that a node with so many free cards holds for a count
    lost: (
        FloatArray  # (cards taken, counts, free cards) how much of that goes; hosted[0] and lost[:, 0] are 0
    )


def waste_tables(
    mix: TypicalMix, models: tuple[str, ...], cards_max: int, cpu_max: int, tuning: Tuning
) -> WasteTables:
    """Solve the filling for each card model; models that accept the same shapes share one solution."""
    steps = cpu_max // CPU_STEP_MILLI + 1
    node = np.zeros((len(models), steps, cards_max + 1, ROOM_STEPS))
    card = np.zeros((len(models), CARD_MILLI + 1))
    solved: dict[tuple[bool, ...], int] = {}
    asked = mix.gpu_shapes()
    for m, model in enumerate(models):
        accepted = tuple(shape.accepts(model) for shape, _ in asked)
        if accepted in solved:
            node[m] = node[solved[accepted]]
            card[m] = card[solved[accepted]]
            continue
        solved[accepted] = m
        offered = [pair for pair, yes in zip(asked, accepted, strict=True) if yes]
        _fill_nodes(offered, node[m], tuning.end_chance)
        _fill_cards(offered, card[m], tuning.card_end_chance)
    useful = np.arange(CARD_MILLI + 1) - card
    useful[:, CARD_MILLI] = 0.0
    return WasteTables(node, card, useful)


def _fill_nodes(offered: list[tuple[Shape, float]], waste: FloatArray, end_chance: float) -> None:
    """waste[cpu, free, room] = (sum of p waste[after] + end idle) / (sum of p + end), over shapes that fit."""
    steps, width, rooms = waste.shape
    unit = CARD_MILLI // ROOM_STEP_MILLI
    offers: defaultdict[tuple[int, int, int], float] = defaultdict(float)
    for shape, weight in offered:
        cpu = -(-shape.cpu_milli // CPU_STEP_MILLI)
        if cpu >= steps:
            continue
        if shape.shares:
            offers[cpu, 0, max(1, round(shape.card_milli / ROOM_STEP_MILLI))] += weight
        else:
            offers[cpu, shape.cards, 0] += weight
    for free in range(width):
        for room in range(rooms):
            total = np.full(steps, end_chance * (free * CARD_MILLI + room * ROOM_STEP_MILLI))
            chance = np.full(steps, end_chance)
            for (cpu, cards, part), weight in offers.items():
                if cards:
                    if free < cards:
                        continue
                    after = waste[: steps - cpu, free - cards, room]
                elif part <= room:
                    after = waste[: steps - cpu, free, room - part]
                elif free:
                    after = waste[: steps - cpu, free - 1, min(rooms - 1, room + unit - part)]
                else:
                    continue
                total[cpu:] += weight * after
                chance[cpu:] += weight
            waste[:, free, room] = total / chance


def _fill_cards(offered: list[tuple[Shape, float]], waste: FloatArray, end_chance: float) -> None:
    """waste[left] likewise; a whole-card pod ends a wholly free card's filling without waste."""
    shares: defaultdict[int, float] = defaultdict(float)
    whole = 0.0
    for shape, weight in offered:
        if shape.shares:
            shares[shape.card_milli] += weight
        else:
            whole += weight * shape.cards
    sizes = np.array(sorted(shares), dtype=np.int64)
    weights = np.array([shares[int(size)] for size in sizes])
    for left in range(1, CARD_MILLI + 1):
        some = sizes <= left
        total = end_chance * left + float((weights[some] * waste[left - sizes[some]]).sum())
        chance = end_chance + float(weights[some].sum()) + (whole if left == CARD_MILLI else 0.0)
        waste[left] = total / chance


def demand_classes(mix: TypicalMix, models: tuple[str, ...], cards_max: int, floor: float) -> DemandClasses:
    """The mix by (models accepted, cards at once), each as its part of the GPU milli asked for.

    A fleet is never taken to be free of big pods just because the mix has none: every power of two of cards
    that a node can hold counts as at least `floor` of the demand.
    """
    parts: defaultdict[tuple[tuple[bool, ...], int], float] = defaultdict(float)
    for shape, weight in mix.gpu_shapes():
        accepted = tuple(shape.accepts(model) for model in models)
        if any(accepted):
            parts[accepted, shape.cards if shape.cards > 1 else 0] += weight * shape.gpu_milli
    total = sum(parts.values()) or 1.0
    shares = {key: part / total for key, part in parts.items()}
    anywhere = (True,) * len(models)
    count = 2
    while count <= cards_max:
        have = sum(part for (_, cards), part in shares.items() if cards == count)
        if have < floor:
            shares[anywhere, count] = shares.get((anywhere, count), 0.0) + floor - have
        count *= 2
    counts = (0, *sorted({cards for _, cards in shares if cards}))
    keys = list(shares)
    free = np.arange(cards_max + 1)
    hosted = np.array(
        [free // count * count * CARD_MILLI if count else 0 * free for count in counts], dtype=np.float64
    )
    return DemandClasses(
        models=np.array([key[0] for key in keys], dtype=np.bool_).reshape(len(keys), len(models)),
        cards=np.array([counts.index(key[1]) for key in keys], dtype=np.int64),
        part=np.array([shares[key] for key in keys]),
        counts=counts,
        hosted=hosted,
        lost=np.array([hosted - hosted[:, np.maximum(free - taken, 0)] for taken in free]),
    )


def scarcity_prices(fleet: Fleet, classes: DemandClasses, price_max: float) -> FloatArray:
    """Price of a milli per (model, count): idle milli of the fleet x sum of part / room over the classes there."""
    room = classes.hosted @ fleet.free_histogram.T  # (counts, models)
    room[0] = fleet.idle_by_model
    of_class = (classes.models * room[classes.cards]).sum(axis=1)
    idle = float(room[0].sum())
    price = np.minimum(price_max, idle * classes.part / np.maximum(of_class, CARD_MILLI))
    prices = np.zeros((len(classes.counts), len(fleet.models)))
    np.add.at(prices, classes.cards, classes.models * price[:, None])
    return prices.T


@dataclass(frozen=True, slots=True)
class Rigbook:
    """Least added waste plus scarcity charge."""

    waste: WasteTables
    classes: DemandClasses
    tuning: Tuning
    name: str = "rigbook"
    local: bool = True

    def score(self, fleet: Fleet, shape: Shape, rows: IntArray) -> RowScores:
        """Minus the waste added. A share has two options: the best broken card, and the first free one."""
        options = 2 if shape.shares else 1
        score = np.full((options, len(rows)), -np.inf)
        card = np.full((options, len(rows)), FIRST_FREE, dtype=np.int64)
        ok = fits(fleet, shape, rows)
        fit = rows[ok]
        if not len(fit):
            return RowScores(score, card)
        model = fleet.model[fit]
        left = fleet.card_left[fit]
        free = fleet.free_cards[fit]
        cpu = fleet.cpu_left[fit]
        after = cpu - shape.cpu_milli
        waste, useful = self.waste.card, self.waste.useful
        useful_by_card = useful[model[:, None], left]
        room = useful_by_card.sum(axis=1)
        now = self._node(model, cpu, free, room)
        if not shape.shares:
            relief = self.tuning.card_weight * shape.cards * waste[model, CARD_MILLI]
            score[0, ok] = now - self._node(model, after, free - shape.cards, room) + relief
            return RowScores(score, card)
        # every broken card with enough room: what the node wastes then, and what the card's remainder does
        rest = left - shape.card_milli
        row, column = np.nonzero((rest >= 0) & (left < CARD_MILLI))
        if len(row):
            its_model = model[row]
            its_rest = rest[row, column]
            its_room = room[row] - useful_by_card[row, column] + useful[its_model, its_rest]
            relief = self.tuning.card_weight * (
                waste[its_model, left[row, column]] - waste[its_model, its_rest]
            )
            gain = np.full(left.shape, -np.inf)
            gain[row, column] = now[row] - self._node(its_model, after[row], free[row], its_room) + relief
            card[0, ok] = gain.argmax(axis=1)
            score[0, ok] = gain.max(axis=1)
        remainder = CARD_MILLI - shape.card_milli
        opened = self._node(model, after, np.maximum(free - 1, 0), room + useful[model, remainder])
        relief = self.tuning.card_weight * (waste[model, CARD_MILLI] - waste[model, remainder])
        score[1, ok] = np.where(free > 0, now - opened + relief, -np.inf)
        return RowScores(score, card)

    def _node(self, model: IntArray, cpu: IntArray, free: IntArray, room: FloatArray) -> FloatArray:
        """Table lookup, linear between the steps of room."""
        table = self.waste.node
        step = np.minimum(cpu // CPU_STEP_MILLI, table.shape[1] - 1)
        at = np.minimum(room / ROOM_STEP_MILLI, ROOM_STEPS - 1)
        low = np.minimum(at.astype(np.int64), ROOM_STEPS - 2)
        part = at - low
        result: FloatArray = (
            table[model, step, free, low] * (1 - part) + table[model, step, free, low + 1] * part
        )
        return result

    def charge(self, fleet: Fleet, shape: Shape) -> FloatArray | None:
        """Per option and node class (model, free cards): the scarcity cost of the room that goes."""
        if not shape.cards:
            return None
        prices = scarcity_prices(fleet, self.classes, self.tuning.price_max)
        taken = self.tuning.model_price * shape.gpu_milli * prices[:, :1]
        whole: FloatArray = taken + self.tuning.count_price * (prices @ self.classes.lost[shape.cards])
        if not shape.shares:
            return whole.reshape(1, -1)
        charge = np.empty((2, whole.size))
        charge[0] = np.repeat(taken, whole.shape[1])
        charge[1] = whole.ravel()
        return charge


def rigbook_policy(mix: TypicalMix, fleet: Fleet, tuning: Tuning | None = None) -> Rigbook:
    """The policy for a fleet and a typical mix; takes a second or so, then decisions are lookups."""
    tuning = tuning or Tuning()
    cpu_max = int(fleet.cpu_left.max())
    return Rigbook(
        waste=waste_tables(mix, fleet.models, fleet.cards_max, cpu_max, tuning),
        classes=demand_classes(mix, fleet.models, fleet.cards_max, tuning.count_floor),
        tuning=tuning,
    )

"""The ledger's cards and demands in the terms of the packing policies: thousandths of cards, typical shapes.

A card that nobody holds has 1000 left; one that is shared has what its books leave, rounded down; one that takes
nothing (held exclusively, unusable, kept for somebody, of another mode) has 0. There is no CPU in a demand here, so
that dimension is empty. What is typical are the last demands that were raised, as of a moment that moves on in steps
of an eighth of the log: so the same log always gives the same tables, and they are seldom made anew.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from rigbook_schemas.values import Mode

from rigbook_placer.feasible import NOTHING_SEEN, model_fits, need_bytes, plain_model
from rigbook_placer.packing.fgd import Fgd, Policy
from rigbook_placer.packing.fleet import CARD_MILLI, Fleet, Node, Shape, fleet_of
from rigbook_placer.packing.scores import Scores
from rigbook_placer.packing.typical import TYPICAL_SHARE, TypicalMix, fragment_tables
from rigbook_placer.packing.waste import Rigbook, Tuning, demand_classes, waste_tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from rigbook_ledger.state import Card, State
    from rigbook_schemas.values import Request

    from rigbook_placer.feasible import Kept, Option, Seen

__all__ = ["Books", "Chosen", "as_of", "mix_of"]

# Demands that the typical mix is taken from: the last ones.
MIX_DEMANDS_MAX: Final = 2_000
# A card with less than this in foreign hands counts as whole: it can still be given exclusively.
FOREIGN_PART_MAX: Final = 0.1
# Scores are compared to this many digits, so that the order of additions does not decide.
DIGITS: Final = 6
# Tables, by what they were made of: seconds of work, so the last few are kept.
TABLES_MAX: Final = 8

_tables: OrderedDict[tuple[object, ...], Policy] = OrderedDict()


class _Asked(NamedTuple):
    """One typical request, with the part of all demands that it is."""

    need_bytes: int
    cards: int
    exclusive: bool
    model: str
    weight: float


class _Kind(NamedTuple):
    """A card model of one size: what a node's cards are."""

    name: str
    model: str
    memory_bytes: int


class Chosen(NamedTuple):
    """A node's score (lowest first) and the cards there."""

    score: tuple[float, ...]
    cards: tuple[str, ...]


def as_of(position: int) -> int:
    """The position that the mix is taken at: an eighth of the log behind, at most."""
    step = 1 << max(0, position.bit_length() - 3)
    return position // step * step


def mix_of(state: State) -> tuple[_Asked, ...]:
    """The most frequent requests among the last demands, up to 95 % of them."""
    until = as_of(state.position)
    raised = sorted((d.raised_seq, d.spec.resources) for d in state.demands.values() if d.raised_seq <= until)
    return _mix([request for _, request in raised[-MIX_DEMANDS_MAX:]])


def _mix(requests: Sequence[Request]) -> tuple[_Asked, ...]:
    counts = Counter(
        (need_bytes(r), r.count, r.mode is Mode.EXCLUSIVE, plain_model(r.model)) for r in requests
    )
    kept: list[tuple[tuple[int, int, bool, str], int]] = []
    for asked, number in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if sum(n for _, n in kept) >= TYPICAL_SHARE * len(requests):
            break
        kept.append((asked, number))
    whole = sum(number for _, number in kept)
    return tuple(_Asked(*asked, number / whole) for asked, number in kept)


def _milli(need: int, memory_bytes: int) -> int:
    return min(CARD_MILLI, max(1, -(-CARD_MILLI * need // memory_bytes)))


def _policy(
    name: str, mix: tuple[_Asked, ...], kinds: tuple[_Kind, ...], cards_max: int, fleet: Fleet
) -> Policy:
    key = (name, mix, kinds, fleet.models, cards_max)
    known = _tables.get(key)
    if known is None:
        known = _tables[key] = _made(name, mix, kinds, cards_max, fleet)
        if len(_tables) > TABLES_MAX:
            _tables.popitem(last=False)
    return known


def _made(
    name: str, mix: tuple[_Asked, ...], kinds: tuple[_Kind, ...], cards_max: int, fleet: Fleet
) -> Policy:
    by_kind: list[tuple[Shape, float]] = []  # a request is another part of each kind of card
    classes: list[tuple[Shape, float]] = []
    for asked in mix:
        fit = [k for k in kinds if model_fits(asked.model, k.model) and asked.need_bytes <= k.memory_bytes]
        millis = [CARD_MILLI if asked.exclusive else _milli(asked.need_bytes, k.memory_bytes) for k in fit]
        if not fit or asked.cards > cards_max:
            continue
        by_kind += [
            (Shape(0, 0, asked.cards, m, (k.name,)), asked.weight) for m, k in zip(millis, fit, strict=True)
        ]
        mean = round(sum(millis) / len(millis))
        classes.append((Shape(0, 0, asked.cards, mean, tuple(k.name for k in fit)), asked.weight))
    if not by_kind:
        classes = by_kind = [(Shape(0, 0, 1, CARD_MILLI), 1.0)]
    typical = TypicalMix(*map(tuple, zip(*by_kind, strict=True)))
    if name == "fgd":
        return Fgd(fragment_tables(typical, fleet.models, cards_max), name="fgd")
    tuning = Tuning()
    return Rigbook(
        waste=waste_tables(typical, fleet.models, cards_max, 0, tuning),
        classes=demand_classes(
            TypicalMix(*map(tuple, zip(*classes, strict=True))), fleet.models, cards_max, tuning.count_floor
        ),
        tuning=tuning,
    )


class Books:
    """One fleet and one policy; `put` follows the state. Made anew when nodes come or their cards change."""

    def __init__(self, policy: str, state: State, seen: Mapping[str, Seen], kept: Mapping[str, Kept]) -> None:
        self._state = state
        self.as_of = as_of(state.position)
        self._seen = seen
        self._kept = kept
        self.row: dict[str, int] = {}
        self.names: list[str] = []
        self._mixed: set[str] = set()  # nodes with cards of several kinds: the plain policies see to them
        self._cards: list[tuple[str, ...]] = []
        nodes: list[Node] = []
        kinds: dict[str, _Kind] = {}
        for node in state.nodes.values():
            cards = tuple(u for u in node.cards if u in state.cards)
            first = state.cards[cards[0]] if cards else None
            kind = _Kind("none", "", 1)
            if first is not None:
                model = plain_model(first.model)
                kind = _Kind(f"{model}/{first.memory_bytes}", model, max(1, first.memory_bytes))
                kinds[kind.name] = kind
            if any(not _alike(first, state.cards[u]) for u in cards):
                self._mixed.add(node.name)
            self.row[node.name] = len(nodes)
            self.names.append(node.name)
            self._cards.append(cards)
            nodes.append(Node(node.name, 0, 0, len(cards), kind.name))
        self.kinds = tuple(sorted(kinds.values()))
        self.empty = not any(node.cards for node in nodes)
        if self.empty:
            return
        # As each mode sees it: a card that is shared in one way has nothing left for another.
        self._fleets = {mode: fleet_of(nodes) for mode in Mode}
        any_fleet = self._fleets[Mode.EXCLUSIVE]
        made = _policy(policy, mix_of(state), self.kinds, any_fleet.cards_max, any_fleet)
        self._scores = {mode: Scores(fleet, made) for mode, fleet in self._fleets.items()}
        for name in self.names:
            self.put(name)

    def put(self, name: str) -> bool:
        """Take over what is left on the node; False when its cards are others now."""
        row = self.row.get(name)
        node = self._state.nodes[name]
        cards = tuple(u for u in node.cards if u in self._state.cards)
        if row is None or cards != self._cards[row]:
            return False
        if self.empty:
            return True
        closed = (
            name in self._mixed
            or not node.driver_ok
            or bool(node.unreachable_ns)
            or node.cordoned is not None
        )
        for mode, fleet in self._fleets.items():
            fleet.put(row, [0 if closed else self._left(self._state.cards[u], mode) for u in cards])
        return True

    def _left(self, card: Card, mode: Mode) -> int:
        seen = self._seen.get(card.uuid, NOTHING_SEEN)
        if (
            not card.present or not card.usable or card.quarantined is not None or card.switching or card.held_for
            or card.uuid in self._kept or seen.unknown or not card.memory_bytes
        ):  # fmt: skip
            return 0
        if card.mode is not None and card.mode is not mode:
            return 0
        if not card.holders:
            if seen.foreign_bytes <= card.memory_bytes * FOREIGN_PART_MAX:
                return CARD_MILLI
        else:
            served = self._state.bindings[card.holders[0]].mode
            if served is Mode.EXCLUSIVE or (mode is not Mode.EXCLUSIVE and served is not mode):
                return 0
        free = card.memory_bytes - card.reserved_bytes - seen.foreign_bytes
        return max(0, min(CARD_MILLI - 1, CARD_MILLI * free // card.memory_bytes))

    # -- asking -----------------------------------------------------------------------------

    def score(self, request: Request, options: Sequence[Option]) -> list[Chosen | None]:
        """Of each option; None where these terms do not reach (the plain policies decide then)."""
        found: list[Chosen | None] = [None] * len(options)
        if self.empty:
            return found
        for kind, shape in self._shapes(request):
            total, card = self._totals(request, shape)
            best = total.argmax(axis=0)
            for at, option in enumerate(options):
                row = self.row.get(option.node.name)
                if row is None or total[best[row], row] == -np.inf:
                    continue
                columns = self._scores[request.mode].cards(shape, row, int(card[best[row], row]))
                cards = tuple(self._cards[row][c] for c in columns)
                allowed = {c.uuid for c in option.cards}
                if all(c in allowed for c in cards):
                    found[at] = Chosen(_score(request, kind, float(total[best[row], row])), cards)
        return found

    def best(
        self, request: Request, allowed: NDArray[np.bool_], missed: NDArray[np.int64] | None, count: int
    ) -> list[tuple[tuple[float, ...], int]]:
        """The `count` best rows of those allowed: (wishes missed, score...) and row, lowest first."""
        found: list[tuple[tuple[float, ...], int]] = []
        if self.empty:
            return found
        for kind, shape in self._shapes(request):
            total, _ = self._totals(request, shape)
            best = np.where(allowed[: len(self.names)], total.max(axis=0), -np.inf)
            rows = np.flatnonzero(best != -np.inf)
            if not len(rows):
                continue
            wishes = np.zeros(len(rows), np.int64) if missed is None else missed[rows]
            values = np.round(-best[rows], DIGITS)
            first = np.lexsort((rows, values, wishes))[:count]
            found += [
                ((int(wishes[i]), *_score(request, kind, -float(values[i]))), int(rows[i])) for i in first
            ]
        return sorted(found)[:count]

    def _shapes(self, request: Request) -> list[tuple[_Kind, Shape]]:
        need = need_bytes(request)
        exclusive = request.mode is Mode.EXCLUSIVE
        return [
            (
                kind,
                Shape(
                    0,
                    0,
                    request.count,
                    CARD_MILLI if exclusive else _milli(need, kind.memory_bytes),
                    (kind.name,),
                ),
            )
            for kind in self.kinds
            if need <= kind.memory_bytes and model_fits(request.model, kind.model)
        ]

    def _totals(self, request: Request, shape: Shape) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        if shape.cards > self._fleets[request.mode].cards_max:
            nothing = np.full((1, len(self.names)), -np.inf)
            return nothing, np.zeros((1, len(self.names)), np.int64)
        total, card = self._scores[request.mode].totals(shape)
        return np.round(total, DIGITS), card


def _alike(one: Card | None, other: Card) -> bool:
    return one is not None and (plain_model(one.model), one.memory_bytes) == (
        plain_model(other.model),
        other.memory_bytes,
    )


def _score(request: Request, kind: _Kind, total: float) -> tuple[float, ...]:
    """Lowest first. Of cards that fit a whole-card demand, the smallest, as everywhere."""
    wasted = kind.memory_bytes * request.count if request.mode is Mode.EXCLUSIVE else 0
    return (0, wasted, round(-total, DIGITS))

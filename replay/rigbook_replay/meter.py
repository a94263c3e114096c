"""The meter: what a fleet was used for over time, by the books. Integrals, and the same in equal pieces for plots.

Everything stands on reservations of the ledger, as placement does:

- utilisation = bound bytes / bytes of all usable cards;
- fragmentation = of the free bytes, the share that a typical demand cannot use: the measure of Weng et al., "Beware of
  Fragmentation" (USENIX ATC'23), with bytes in the place of thousandths of a card. Typical is what this past asked for;
- an idle server is a node on which nothing is bound.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_placer.feasible import need_bytes
from rigbook_schemas.values import Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rigbook_ledger.state import Card, State, Touched
    from rigbook_schemas.events import DemandRaised

__all__ = ["FIELDS", "PIECES", "Meter", "Mix", "Readings", "Shape", "mix_of"]

# Pieces of the window that are kept for plots.
PIECES: Final = 200
# The most frequent shapes up to this share of all demands, as in the paper; and never more than this many.
MIX_SHARE: Final = 0.95
SHAPES_MAX: Final = 24
REMEMBERED_MAX: Final = 50_000
_HOUR_NS: Final = 3_600_000_000_000

FIELDS: Final = (
    "total_bytes", "bound_bytes", "free_bytes", "fragmented_bytes", "cards", "cards_held", "servers", "servers_idle",
    "price", "price_held", "waiting",
)  # fmt: skip
_WAITING: Final = FIELDS.index("waiting")


class Shape(msgspec.Struct, frozen=True, order=True):
    """What is asked of one node."""

    memory_bytes: int
    count: int
    mode: str
    model: str


class Mix(msgspec.Struct, frozen=True):
    """What is typically asked for; the weights sum to 1."""

    shapes: tuple[tuple[Shape, float], ...] = ()


def mix_of(specs: Iterable[DemandRaised]) -> Mix:
    """The most frequent shapes."""
    counts = Counter(
        Shape(need_bytes(s.resources), s.resources.count, s.resources.mode.value, s.resources.model.lower())
        for s in specs
    )
    total = sum(counts.values())
    kept: list[tuple[Shape, int]] = []
    covered = 0
    for shape, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered >= MIX_SHARE * total or len(kept) >= SHAPES_MAX:
            break
        kept.append((shape, count))
        covered += count
    return Mix(tuple((shape, count / covered) for shape, count in kept))


class Readings(msgspec.Struct, frozen=True, kw_only=True):
    """What a meter says in the end. Each piece: (moment in the middle, means of `FIELDS` over it)."""

    hours: float
    means: dict[str, float]
    pieces: tuple[tuple[int, tuple[float, ...]], ...]

    def piece_of(self, field: str) -> list[float]:
        at = FIELDS.index(field)
        return [values[at] for _, values in self.pieces]


class Meter:
    """Call `advance` before the state moves on, and `follow` after it did."""

    def __init__(
        self, mix: Mix, since_ns: int, until_ns: int, price: Callable[[str], float] | None = None
    ) -> None:
        self._mix = mix
        self._since_ns = since_ns
        self._until_ns = max(until_ns, since_ns + 1)
        self._price = price or (lambda _model: 0.0)
        self._now: list[float] = [0.0] * len(FIELDS)
        self._of_node: dict[str, tuple[float, ...]] = {}
        self._node_of: dict[str, str] = {}
        self._at_ns = since_ns
        self._piece_ns = (self._until_ns - since_ns) / PIECES
        self._pieces = [[0.0] * len(FIELDS) for _ in range(PIECES)]
        self._remembered: dict[tuple[object, ...], float] = {}

    def advance(self, now_ns: int) -> None:
        """What is, was so up to now."""
        to_ns = min(now_ns, self._until_ns)
        if to_ns <= self._at_ns:
            return
        at = (self._at_ns - self._since_ns) / self._piece_ns
        end = (to_ns - self._since_ns) / self._piece_ns
        values = self._now
        number = min(int(at), PIECES - 1)
        while True:
            last = end <= number + 1 or number == PIECES - 1
            share = (end if last else number + 1) - at
            piece = self._pieces[number]
            for field, value in enumerate(values):
                if value:
                    piece[field] += value * share
            if last:
                break
            number += 1
            at = float(number)
        self._at_ns = to_ns

    def follow(self, state: State, touched: Touched) -> None:
        """What the latest events changed."""
        nodes = dict.fromkeys(sorted(touched.nodes))
        for uuid in sorted(touched.cards):
            card = state.cards.get(uuid)
            before = self._node_of.get(uuid)
            if card is not None:
                self._node_of[uuid] = card.node
                nodes[card.node] = None
            if before is not None:
                nodes[before] = None
        for name in nodes:
            before_values = self._of_node.get(name)
            values = self._of_node[name] = self._values(state, name)
            for field, value in enumerate(values):
                self._now[field] += value - (before_values[field] if before_values else 0.0)
        self._now[_WAITING] = float(len(state.waiting))

    def readings(self) -> Readings:
        self.advance(self._until_ns)
        sums = [sum(piece[field] for piece in self._pieces) / PIECES for field in range(len(FIELDS))]
        middle = self._piece_ns / 2
        return Readings(
            hours=(self._until_ns - self._since_ns) / _HOUR_NS,
            means=dict(zip(FIELDS, sums, strict=True)),
            pieces=tuple(
                (int(self._since_ns + number * self._piece_ns + middle), tuple(piece))
                for number, piece in enumerate(self._pieces)
            ),
        )

    def _values(self, state: State, name: str) -> tuple[float, ...]:
        node = state.nodes.get(name)
        cards = [state.cards[u] for u in (node.cards if node is not None else ()) if u in state.cards]
        cards = [c for c in cards if c.present and c.usable]
        if not cards:
            return (0.0,) * (len(FIELDS) - 1)
        total = sum(c.memory_bytes for c in cards)
        bound = sum(c.reserved_bytes for c in cards)
        held = [c for c in cards if c.holders]
        return (
            float(total), float(bound), float(total - bound), self._fragmented(state, cards), float(len(cards)),
            float(len(held)), 1.0, 0.0 if held else 1.0, sum(self._price(c.model) for c in cards),
            sum(self._price(c.model) for c in held),
        )  # fmt: skip

    def _fragmented(self, state: State, cards: Sequence[Card]) -> float:
        """Free bytes of the node that the typical demands, weighted, cannot use."""
        shown = tuple((c.memory_bytes - c.reserved_bytes, _serves(state, c), c.model) for c in cards)
        known = self._remembered.get(shown)
        if known is None:
            if len(self._remembered) >= REMEMBERED_MAX:
                self._remembered.clear()
            known = self._remembered[shown] = _fragmented(self._mix, shown)
        return known


def _serves(state: State, card: Card) -> str:
    """The mode it serves; "held" = nobody else gets on it; "" = any."""
    mode = state.mode_of(card)
    if card.holders and mode is Mode.EXCLUSIVE:
        return "held"
    return "" if mode is None else f"{mode.value}{'+' if card.holders else ''}"


def _fragmented(mix: Mix, cards: tuple[tuple[int, str, str], ...]) -> float:
    free = sum(left for left, _, _ in cards)
    wasted = 0.0
    for shape, weight in mix.shapes:
        usable = [
            left
            for left, serves, model in cards
            if left >= shape.memory_bytes
            and serves in ("", shape.mode, f"{shape.mode}+" if shape.mode != Mode.EXCLUSIVE else shape.mode)
            and (not shape.model or shape.model in model.lower())
        ]
        wasted += weight * (free - (sum(usable) if len(usable) >= shape.count else 0))
    return wasted

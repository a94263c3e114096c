"""`feasible`: which nodes and cards could take a demand now. The filter; `rank` scores what is left.

Counts reservations on the ledger, never a sampled "free memory", which is stale, and which an
inference engine's pre-allocation makes a lie. Observed use by processes that are not ours only
subtracts. Every card that says no can say why (`reasons.why_not`), with the same tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_ledger.state import Card, Node
from rigbook_schemas.values import MEMORY_BYTES_MAX, MEMORY_BYTES_MIN, Engine, Mode, Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rigbook_ledger.state import State
    from rigbook_schemas.events import DemandRaised

__all__ = [
    "NOBODY",
    "NOTHING_SEEN",
    "Ask",
    "Asker",
    "Kept",
    "Option",
    "Seen",
    "ask_of",
    "asker_of",
    "feasible",
    "free_bytes",
    "kept_from",
    "model_fits",
    "need_bytes",
    "node_fits",
    "plain_model",
]


class Seen(msgspec.Struct, frozen=True):
    """What a card's latest sample says that the ledger cannot know."""

    foreign_bytes: int = 0  # memory of processes that are not ours
    foreign_who: str = ""
    unknown: str = ""  # why the card's sample cannot be trusted; then it takes nothing


NOTHING_SEEN: Final = Seen()


class Kept(msgspec.Struct, frozen=True):
    """A card kept for a demand that came first and cannot be placed yet."""

    demand: str
    from_ns: int = 0  # when it is expected to be used; what ends before may use it until then. 0 = unknown


class Ask(msgspec.Struct, frozen=True):
    """What a demand needs of a node: demands with equal asks fit, or do not, together."""

    request: Request
    engines: tuple[str, ...]  # that its components need


class Asker(msgspec.Struct, frozen=True):
    """Who asks, as far as it decides about cards that are kept for somebody."""

    demand: str = ""
    ends_ns: int = 0  # when it would have ended at the latest, if bound now; 0 = unknown
    kept: Mapping[str, Kept] = {}


NOBODY: Final = Asker()


def ask_of(spec: DemandRaised) -> Ask:
    """The ask of a demand."""
    engines = {Engine.DOCKER if c.image else Engine.PROCESS for c in spec.components}
    return Ask(spec.resources, tuple(sorted(engines)))


def asker_of(spec: DemandRaised, kept: Mapping[str, Kept], now_ns: int | None) -> Asker:
    """The demand as somebody who asks now."""
    ends_ns = 0
    if kept and now_ns is not None and spec.max_run_seconds is not None:
        grace = max((c.stop_grace_seconds for c in spec.components), default=10.0)
        ends_ns = now_ns + int((spec.max_run_seconds + grace) * 1e9)
    return Asker(spec.demand, ends_ns, kept)


def need_bytes(request: Request) -> int:
    """What is bound on each card: what is asked, times the headroom."""
    if request.headroom == 1:
        return request.memory_bytes
    return math.ceil(request.memory_bytes * request.headroom)


def sensible(request: Request) -> bool:
    """The number can be bytes of a card."""
    return request.memory_bytes >= MEMORY_BYTES_MIN and need_bytes(request) <= MEMORY_BYTES_MAX


class Option(msgspec.Struct, frozen=True):
    """A node that could take the demand, and all of its cards that fit, in index order."""

    node: Node
    cards: tuple[Card, ...]


def feasible(
    state: State,
    ask: Ask,
    seen: Mapping[str, Seen],
    asker: Asker = NOBODY,
    *,
    among: Iterable[str] | None = None,
) -> Iterator[Option]:
    """Nodes with at least `request.count` fitting cards, in the order they joined.

    `among`: look at these nodes only, in this order.
    """
    request = ask.request
    if request.node:
        names: Iterable[str] = (request.node,) if among is None or request.node in among else ()
    else:
        names = state.nodes if among is None else among
    need = need_bytes(request)
    model = plain_model(request.model)
    for name in names:
        node = state.nodes.get(name)
        if node is None or not node_fits(node, ask):
            continue
        fitting = tuple(
            card
            for card in (state.cards[u] for u in node.cards if u in state.cards)
            if _card_fits(state, card, request, need, model, seen, asker)
        )
        if len(fitting) >= request.count:
            yield Option(node, fitting)


def node_fits(node: Node, ask: Ask) -> bool:
    """The same tests as `reasons.node_says_no`, without making a reason."""
    request = ask.request
    if not node.driver_ok or node.unreachable_ns or node.cordoned is not None:
        return False
    if request.node and request.node != node.name:
        return False
    for engine in ask.engines:
        if engine not in node.engines or (node.container_gpus and engine == Engine.DOCKER):
            return False
    return all(node.labels.get(key) == value for key, value in request.require.items())


def model_fits(asked: str, model: str) -> bool:
    """`RTX4090` means "NVIDIA GeForce RTX 4090": spaces, hyphens and case do not count. Empty asks for any."""
    return not asked or plain_model(asked) in plain_model(model)


@cache
def plain_model(name: str) -> str:
    """The name without what people write differently."""
    return name.lower().translate(_SPACERS)


_SPACERS: Final = str.maketrans("", "", " -_")


def free_bytes(card: Card, seen: Seen) -> int:
    """What a shared binding could still get of the card."""
    return card.memory_bytes - card.reserved_bytes - seen.foreign_bytes


def kept_from(card: Card, asker: Asker) -> str:
    """The demand that the card is kept for, when that is another one; "" = free to ask for."""
    if card.held_for and card.held_for != asker.demand:
        return card.held_for
    kept = asker.kept.get(card.uuid)
    if kept is None or kept.demand == asker.demand:
        return ""
    return "" if asker.ends_ns and kept.from_ns and asker.ends_ns <= kept.from_ns else kept.demand


def _card_fits(
    state: State,
    card: Card,
    request: Request,
    need: int,
    model: str,
    all_seen: Mapping[str, Seen],
    asker: Asker,
) -> bool:
    """The same tests as `reasons.card_says_no`, without making a reason: this is the hot path."""
    if not card.present or not card.usable or card.quarantined is not None or card.switching:
        return False
    if model and model not in plain_model(card.model):
        return False
    seen = all_seen.get(card.uuid)
    free = card.memory_bytes - card.reserved_bytes
    if seen is not None:
        if seen.unknown:
            return False
        free -= seen.foreign_bytes
    if free < need:
        return False
    if card.mode is not None and card.mode is not request.mode:
        return False
    if card.holders and (
        request.mode is Mode.EXCLUSIVE or state.bindings[card.holders[0]].mode is not request.mode
    ):
        return False
    return not ((card.held_for or asker.kept) and kept_from(card, asker))

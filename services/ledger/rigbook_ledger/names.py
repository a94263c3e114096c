"""Names people use for demands and cards, resolved. Pure; raises Unanswerable with what would be right.

A demand: its id, a unique beginning of it, or its name (the live one first, else the latest). A card:
its UUID, a unique beginning of it, `node/index`, or `GPU-2` / `2` for index 2 where only one card has it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from rigbook_schemas.queries import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_ledger.state import Card, Demand, State

__all__ = ["Unanswerable", "find_card", "find_demand", "known_node", "unknown_card"]

# A shorter beginning of an id is more likely a name or a typing mistake.
BEGINNING_MIN: Final = 4
CANDIDATES_MAX: Final = 8

_INDEX: Final = re.compile(r"(?:gpu-?)?(\d{1,5})", re.IGNORECASE)


class Unanswerable(Exception):
    """The question has no answer; `failure` says why, with a remedy."""

    def __init__(self, code: str, text: str, remedy: str = "") -> None:
        super().__init__(text)
        self.failure = Failure(code=code, text=text, remedy=remedy)


def known_node(state: State, name: str) -> str:
    """`name`, when such a node has joined ("" = any)."""
    if name and name not in state.nodes:
        known = ", ".join(sorted(state.nodes)[:CANDIDATES_MAX]) or "none"
        raise Unanswerable(
            "not_found", f"node {name!r} has never joined; known nodes: {known}", "see `rigbook node list`"
        )
    return name


def find_demand(state: State, name: str) -> Demand | None:
    """None = the fold does not remember it; the tables may."""
    found = state.find_demand(name)
    if found is not None or len(name) < BEGINNING_MIN:
        return found
    begun = [demand for did, demand in state.demands.items() if did.startswith(name)]
    if len(begun) > 1:
        raise Unanswerable("ambiguous", f"{name!r} begins {len(begun)} demand ids: {_some([d.spec.demand for d in begun])}",
                           "write more of the id")  # fmt: skip
    return begun[0] if begun else None


def find_card(state: State, name: str, node: str = "") -> Card | None:
    """None = the fold knows no such card; the tables may. `node` narrows the choice."""
    exact = state.cards.get(name)
    if exact is not None:
        return exact
    cards = [card for card in state.cards.values() if not node or card.node == node]
    on_node, slash, index = name.rpartition("/")
    if slash:
        known_node(state, on_node)
        number = _INDEX.fullmatch(index)
        found = [card for card in cards if number and card.node == on_node and card.index == int(number[1])]
        if not found:
            has = _some([str(c.index) for c in sorted(cards, key=lambda c: c.index) if c.node == on_node])
            raise Unanswerable("not_found", f"node {on_node} has no card {index}; it has {has or 'none'}")
        return _only(name, found)
    number = _INDEX.fullmatch(name)
    if number:
        found = [card for card in cards if card.index == int(number[1])]
        if found:
            return _only(name, found)
    if len(name) < BEGINNING_MIN:
        return None
    begin = name.lower()
    found = [c for c in cards if c.uuid.lower().startswith((begin, "gpu-" + begin, "mig-" + begin))]
    return _only(name, found) if found else None


def unknown_card(state: State, name: str) -> Unanswerable:
    known = _some(
        [f"{c.node}/{c.index}" for c in sorted(state.cards.values(), key=lambda c: (c.node, c.index))]
    )
    return Unanswerable(
        "not_found", f"no card is called {name!r}; known cards: {known or 'none'}", "see `rigbook gpu list`"
    )


def _only(name: str, cards: list[Card]) -> Card:
    if len(cards) == 1:
        return cards[0]
    # a card that went leaves its index to another one
    present = [card for card in cards if card.present]
    if len(present) == 1:
        return present[0]
    named = _some([f"{c.node}/{c.index} ({c.uuid})" for c in sorted(cards, key=lambda c: (c.node, c.index))])
    raise Unanswerable(
        "ambiguous", f"{name!r} can be {named}", "name the card as node/index, or write more of its UUID"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - CANDIDATES_MAX} more" if len(names) > CANDIDATES_MAX else ""
    return ", ".join(names[:CANDIDATES_MAX]) + more

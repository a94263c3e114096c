"""What `ls`, `gpu list` and `node list` show, as of a state of the past: the same rows as the ledger's answers.

What nodes and cards showed then is not on the ledger: observed columns are empty, and unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rigbook_ledger import present
from rigbook_ledger.names import Unanswerable, find_card, known_node

if TYPE_CHECKING:
    from rigbook_ledger.state import State
    from rigbook_schemas.queries import CardRow, DemandRow, NodeRow

__all__ = ["Unanswerable", "cards", "demands", "nodes"]


def demands(state: State, *, phase: str = "live", project: str = "") -> list[DemandRow]:
    """By the sequence they were raised; `phase` "live", "all" or one. Of ended ones the fold remembers the latest."""
    view = _view(state)
    if phase not in ("all", "ended", "refused", "withdrawn"):
        return [row for _, row in present.demand_rows(view, phase=phase, project=project)]
    chosen = [
        demand
        for demand in state.demands.values()
        if phase in ("all", demand.phase.value) and (not project or demand.spec.project == project)
    ]
    return [
        present.demand_row(
            demand,
            present.places_of(state.bindings.get(demand.epoch)),
            view.drifts_of_demand.get(demand.spec.demand, ()),
        )
        for demand in sorted(chosen, key=lambda d: d.raised_seq)
    ]


def cards(state: State, *, node: str = "", card: str = "") -> list[CardRow]:
    """By node and index. `card`: UUID, its beginning, or node/index. Raises Unanswerable."""
    view = _view(state)
    found = find_card(state, card, node) if card else None
    if card and found is None:
        return []
    rows = present.card_rows(view, node=known_node(state, node), card="" if found is None else found.uuid)
    return [row for _, row in rows]


def nodes(state: State) -> list[NodeRow]:
    """By name."""
    return [row for _, row in present.node_rows(_view(state))]


def _view(state: State) -> present.View:
    return present.View(state, {}, 0.0)

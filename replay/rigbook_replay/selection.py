"""Which events belong to a journal that is not the whole log: about some nodes, or about some demands.

About a node (and so about each of its cards) is what its fold needs: the node's own events, all of every
demand that was ever bound there, and the operator's rules. A gang brings its other nodes along. Then a
fold of the part shows these nodes, cards, demands and bindings as the whole log does; what sums over the
fleet (a project's use) it cannot, and the journal's header says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rigbook_schemas import events as e
from rigbook_schemas.wire import decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_bus.protocol import Message
    from rigbook_schemas.wire import Record

    from rigbook_replay.source import Source

__all__ = ["About", "about", "nodes_of_cards"]


class About:
    """What a partial journal keeps."""

    def __init__(self, *, nodes: set[str], demands: set[str]) -> None:
        self.nodes = nodes
        self.demands = demands
        self._drifts: set[str] = set()

    def keeps(self, message: Message) -> bool:
        """Asked for each message in sequence."""
        return self.keeps_record(decode(message.seq, message.subject, message.received_ns, message.body))

    def keeps_record(self, record: Record) -> bool:
        data = record.data
        if record.subject.startswith("rig.own.policy."):
            return True
        if isinstance(data, (e.NodeJoined, e.NodeUnreachable, e.NodeRecovered)):
            return data.node in self.nodes
        if isinstance(data, e.DriftDetected):
            if data.node in self.nodes or data.demand in self.demands:
                self._drifts.add(data.drift)
            return data.drift in self._drifts
        if isinstance(data, e.DriftCleared):
            return data.drift in self._drifts
        demand = getattr(data, "demand", record.correlation)
        return demand in self.demands


async def about(
    source: Source, *, cards: Sequence[str] = (), nodes: Sequence[str] = (), demands: Sequence[str] = ()
) -> About:
    """One reading of the log: which nodes and demands belong together with these."""
    around = bool(cards or nodes)
    near = set(nodes) | await nodes_of_cards(source, cards)
    together: list[tuple[str, frozenset[str]]] = []  # each binding: demand, its nodes
    async for records in source.records(whole=False):
        together += [
            (r.data.demand, frozenset(share.node for share in r.data.shares))
            for r in records
            if isinstance(r.data, e.Bound)
        ]
    before = -1
    kept = set(demands)
    while before != len(near) + len(kept):
        before = len(near) + len(kept)
        for demand, on in together:
            if demand in kept:
                near |= on
            elif around and near & on:
                kept.add(demand)
    return About(nodes=near, demands=kept)


async def nodes_of_cards(source: Source, cards: Sequence[str]) -> set[str]:
    """Every node whose inventory ever named one of these cards, by UUID."""
    wanted, nodes = set(cards), set[str]()
    if not wanted:
        return nodes
    async for records in source.records(whole=False):
        for record in records:
            data = record.data
            if isinstance(data, e.NodeJoined) and any(card.uuid in wanted for card in data.cards):
                nodes.add(data.node)
    return nodes

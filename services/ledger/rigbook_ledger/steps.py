"""The small steps that every part of the fold is made of: each changes one entry and notes that it did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace
from rigbook_schemas.values import Mode

from rigbook_ledger.state import ENDED_MAX, FINDINGS_MAX, TERMINAL, Finding, Phase, Project

if TYPE_CHECKING:
    from rigbook_schemas.wire import Record

    from rigbook_ledger.state import Binding, Card, Demand, Node, State

__all__ = [
    "charge",
    "drop_room",
    "find",
    "forget_absent",
    "keep_room",
    "leave",
    "made_room",
    "move",
    "put_binding",
    "put_card",
    "put_node",
    "switch_mode",
    "without",
]

# A member of an enum is found through its class slowly (CPython 3.11: 120 ns), and the fold asks often.
_WAITING: Final = Phase.WAITING


def find(state: State, record: Record, code: str, text: str) -> None:
    finding = Finding(
        seq=record.seq, code=code, text=text[:500], subject=record.subject[:200], event_id=record.id[:200]
    )
    state.findings.append(finding)
    if len(state.findings) > FINDINGS_MAX:
        del state.findings[0]
    state.finding_count += 1
    state.touched.findings.append(finding)


def move(state: State, record: Record, demand: Demand, phase: Phase, **changes: object) -> Demand:
    """The demand in another phase; keeps the waiting and ended indexes right."""
    did = demand.spec.demand
    before = demand.phase
    if phase is before:
        moved = replace(demand, event_id=record.id, **changes)
    else:
        if before is _WAITING:
            state.waiting.pop(did, None)
            if demand.room:
                _clear_room(state, demand)
                changes["room"], changes["room_ns"] = (), 0
        elif phase is _WAITING:
            state.waiting[did] = None
        if phase in TERMINAL:
            _retire(state, did)
        moved = replace(
            demand,
            phase=phase,
            since_seq=record.seq,
            since_ns=record.received_ns,
            event_id=record.id,
            **changes,
        )
    state.demands[did] = moved
    state.touched.demands.add(did)
    return moved


def _retire(state: State, demand_id: str) -> None:
    state.ended[demand_id] = None
    while len(state.ended) > ENDED_MAX:
        oldest, _ = state.ended.popitem(last=False)
        state.demands.pop(oldest, None)


def put_binding(state: State, binding: Binding) -> None:
    state.bindings[binding.epoch] = binding
    state.touched.bindings.add(binding.epoch)


def put_card(state: State, card: Card) -> None:
    state.cards[card.uuid] = card
    state.touched.cards.add(card.uuid)


def put_node(state: State, node: Node) -> None:
    state.nodes[node.name] = node
    state.touched.nodes.add(node.name)


def charge(state: State, project: str, used: int, releasing: int) -> Project:
    """Add to what the project uses, and to the part of it that is on its way out."""
    p = state.projects.get(project) or Project()
    p = replace(p, used_bytes=p.used_bytes + used, releasing_bytes=p.releasing_bytes + releasing)
    state.projects[project] = p
    state.touched.projects.add(project)
    return p


def keep_room(state: State, record: Record, demand_id: str, cards: tuple[str, ...]) -> None:
    """Others are evicted for this waiting demand: the cards are kept for it until it has left the queue."""
    demand = state.demands.get(demand_id)
    if demand is None or demand.phase is not _WAITING:
        return
    room = list(demand.room)
    for uuid in cards:
        card = state.cards.get(uuid)
        if card is not None and not card.held_for:
            put_card(state, replace(card, held_for=demand_id))
            room.append(uuid)
    state.demands[demand_id] = replace(
        demand,
        room=tuple(room),
        room_ns=record.received_ns,
        preemptions=demand.preemptions + (0 if demand.room else 1),
    )
    state.touched.demands.add(demand_id)


def made_room(state: State, record: Record, demand_id: str) -> None:
    """A victim is gone: what becomes of the demand now is because of that."""
    demand = state.demands.get(demand_id)
    if demand is not None and demand.room:
        state.demands[demand_id] = replace(demand, event_id=record.id)
        state.touched.demands.add(demand_id)


def drop_room(state: State, demand_id: str) -> None:
    """No cards are kept for the demand any more."""
    demand = state.demands.get(demand_id)
    if demand is not None and demand.room:
        _clear_room(state, demand)
        state.demands[demand_id] = replace(demand, room=(), room_ns=0)
        state.touched.demands.add(demand_id)


def _clear_room(state: State, demand: Demand) -> None:
    for uuid in demand.room:
        card = state.cards.get(uuid)
        if card is not None and card.held_for == demand.spec.demand:
            put_card(state, replace(card, held_for=""))


def switch_mode(state: State, uuid: str) -> None:
    """A card that is being switched serves its new mode as soon as nothing holds it."""
    card = state.cards[uuid]
    if card.switching and not card.holders:
        mode = None if card.switching == "any" else Mode(card.switching)
        put_card(state, replace(card, mode=mode, switching=""))


def leave(state: State, card: Card) -> None:
    """Take a card off the list of the node it was in."""
    node = state.nodes.get(card.node)
    if node is not None and card.uuid in node.cards:
        put_node(state, replace(node, cards=without(node.cards, card.uuid)))


def forget_absent(state: State, uuid: str) -> None:
    """Drop a card that its node no longer has, once nothing holds it and no rule names it."""
    card = state.cards[uuid]
    if card.present or card.holders or card.quarantined is not None or card.mode is not None:
        return
    del state.cards[uuid]
    state.touched.cards.add(uuid)
    leave(state, card)


def without(nodes: tuple[str, ...], node: str) -> tuple[str, ...]:
    return tuple(n for n in nodes if n != node)

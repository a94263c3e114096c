"""The present as rows: what each question about now shows. Pure functions of the state and what was heard.

Each gives (key, row) pairs in the order of the key: a page ends behind a key, and the next one begins
there, whatever came or went in between.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from rigbook_schemas.queries import BindingRow, CardRow, DemandRow, NodeRow, ProjectRow
from rigbook_schemas.values import Mode
from rigbook_schemas.wire import rfc3339

from rigbook_ledger.state import Phase

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from rigbook_schemas.values import CardObservation

    from rigbook_ledger.heard import Heard
    from rigbook_ledger.state import Binding, Card, Demand, Node, State

__all__ = [
    "Key", "View", "binding_rows", "card_rows", "card_status", "demand_row", "demand_rows", "node_rows", "node_status",
    "node_totals", "phase_totals", "project_rows",
]  # fmt: skip

Key = tuple[Any, ...]


class View:
    """The state, what the nodes show, and now: what one answer is made of."""

    def __init__(self, state: State, heard: Mapping[str, Heard], now: float) -> None:
        self.state = state
        self.heard = heard
        self.now = now  # monotonic seconds, the clock of `Heard.at`
        self._pids: dict[str, frozenset[int]] = {}
        self.drifts_of_demand: dict[str, list[str]] = defaultdict(list)
        self.drifts_of_card: dict[str, list[str]] = defaultdict(list)
        for drift in state.drifts.values():
            self.drifts_of_demand[drift.demand].append(drift.drift)
            self.drifts_of_card[drift.card].append(drift.drift)

    def observed(self, card: Card) -> tuple[CardObservation | None, float | None]:
        """What the card shows, and how many seconds ago it was told."""
        heard = self.heard.get(card.node)
        if heard is None:
            return None, None
        for shown in heard.beat.cards:
            if shown.uuid == card.uuid:
                return shown, self.now - heard.at
        return None, self.now - heard.at

    def pids(self, node: str) -> frozenset[int]:
        """Processes that the node's engines name as parts of our workloads."""
        known = self._pids.get(node)
        if known is None:
            heard = self.heard.get(node)
            components = () if heard is None else heard.beat.components or ()
            known = self._pids[node] = frozenset(pid for one in components for pid in one.pids)
        return known


# -- demands and bindings -----------------------------------------------------------------------


def _time(ns: int) -> str:
    return rfc3339(ns) if ns else ""


def demand_row(demand: Demand, places: Sequence[tuple[str, str]], drifts: Sequence[str] = ()) -> DemandRow:
    """`places`: (node, card) of its latest binding."""
    spec = demand.spec
    return DemandRow(
        demand=spec.demand,
        name=spec.name,
        project=spec.project,
        owner=spec.owner.name,
        contact=spec.owner.contact,
        purpose=spec.purpose,
        workload=spec.workload.value,
        priority=spec.priority,
        phase=demand.phase.value,
        wanted=demand.wanted,
        raised=rfc3339(demand.raised_ns),
        since=rfc3339(demand.since_ns),
        memory_bytes=spec.resources.memory_bytes,
        count=spec.resources.count,
        mode=spec.resources.mode.value,
        epoch=demand.epoch,
        epoch_last=demand.epoch_last,
        nodes=tuple(dict.fromkeys(node for node, _ in places)),
        cards=tuple(card for _, card in places),
        verdict="" if demand.verdict is None else demand.verdict.value,
        sentence=demand.sentence,
        reasons=demand.reasons,
        requeues=demand.requeues,
        attempt=demand.attempt,
        withdrawn=_time(demand.withdrawn_ns),
        withdrawn_by=demand.withdrawn_by,
        drifts=tuple(drifts),
        components=tuple(component.name for component in spec.components),
    )


def places_of(binding: Binding | None) -> tuple[tuple[str, str], ...]:
    if binding is None:
        return ()
    return tuple((share.node, allotment.card) for share in binding.shares for allotment in share.allotments)


def demand_rows(
    view: View,
    *,
    name: str = "",
    phase: str = "live",
    project: str = "",
    node: str = "",
    card: str = "",
    after: Key = (),
) -> Iterator[tuple[Key, DemandRow]]:
    """Demands that live, oldest first; `phase` "live" or one that is not terminal. Key: (raised sequence,)."""
    state = view.state
    live = (d for d in state.demands.values() if not d.phase.terminal and (phase in ("live", d.phase.value)))
    for demand in sorted(live, key=lambda d: d.raised_seq):
        key = (demand.raised_seq,)
        if key <= after or (project and demand.spec.project != project):
            continue
        if name and name not in (demand.spec.demand, demand.spec.name):
            continue
        places = places_of(state.bindings.get(demand.epoch))
        if (node and all(n != node for n, _ in places)) or (card and all(c != card for _, c in places)):
            continue
        yield key, demand_row(demand, places, view.drifts_of_demand.get(demand.spec.demand, ()))


def binding_rows(
    view: View, *, project: str = "", node: str = "", card: str = "", demand: str = "", after: Key = ()
) -> Iterator[tuple[Key, BindingRow]]:
    """Live bindings by epoch. Key: (epoch,)."""
    state = view.state
    known = state.nodes.get(node)
    # Agents ask for their own node often: not the whole fleet's bindings for each of them.
    epochs = (
        state.bindings.keys()
        if known is None
        else {e for uuid in known.cards if uuid in state.cards for e in state.cards[uuid].holders}
    )
    for epoch in sorted(epochs):
        binding = state.bindings[epoch]
        places = places_of(binding)
        if (
            (epoch,) <= after
            or (project and binding.project != project)
            or (demand and binding.demand != demand)
        ):
            continue
        if (node and all(n != node for n, _ in places)) or (card and all(c != card for _, c in places)):
            continue
        holder = view.state.demands[binding.demand]
        yield (
            (epoch,),
            BindingRow(
                epoch=epoch,
                demand=binding.demand,
                project=binding.project,
                owner=holder.spec.owner.name,
                mode=binding.mode.value,
                policy=binding.policy,
                bound=rfc3339(binding.bound_ns),
                phase=holder.phase.value,
                memory_bytes=binding.memory_bytes,
                shares=binding.shares,
                eviction="" if binding.eviction is None else binding.eviction.reason.value,
                workload=holder.spec.workload,
                restart=holder.spec.restart,
                attempt=holder.attempt + (1 if holder.verdict is not None and not binding.started else 0),
                started=binding.started,
                released=binding.released,
                event_id=binding.event_id,
                traceparent=holder.traceparent,
            ),
        )


def phase_totals(state: State) -> dict[str, int]:
    """How many demands the fold remembers in each phase."""
    found = Counter(demand.phase for demand in state.demands.values())
    return {phase.value: found[phase] for phase in Phase if found[phase]}


# -- cards and nodes ----------------------------------------------------------------------------


def _status_and_why(card: Card, node: Node | None, mode: Mode | None) -> tuple[str, str]:
    if not card.present:
        return "absent", "its node's inventory no longer names it"
    if not card.usable:
        return "unusable", card.why
    if node is not None and node.unreachable_ns:
        return "unreachable", f"node {node.name} has not been heard of since {rfc3339(node.unreachable_ns)}"
    if card.quarantined is not None:
        return "quarantined", card.quarantined
    kept = f"being switched to {card.switching}" if card.switching else ""
    if card.held_for:
        kept = f"{kept}, kept for {card.held_for}" if kept else f"kept for {card.held_for}"
    if card.holders:
        return ("held" if mode is Mode.EXCLUSIVE else "shared"), kept or card.why
    if node is not None and node.cordoned is not None:
        return "cordoned", node.cordoned
    return "free", kept or card.why


def card_status(state: State, card: Card) -> str:
    """The one word for a card: what keeps it from being used comes before who uses it."""
    return _status_and_why(card, state.nodes.get(card.node), state.mode_of(card))[0]


def foreign_bytes(shown: CardObservation | None, ours: Container[int] = ()) -> int | None:
    """Memory held by processes that are nobody's binding; None = it cannot be known.

    `ours`: process ids that the node's engines name as ours, though the driver shows no label.
    """
    if shown is None or shown.processes is None or shown.unknown:
        return None
    total = 0
    for process in shown.processes:
        if process.epoch is None and process.pid not in ours:
            if process.memory_bytes is None:
                return None
            total += process.memory_bytes
    return total


def _card_row(view: View, card: Card) -> CardRow:
    state = view.state
    node = state.nodes.get(card.node)
    mode = state.mode_of(card)
    shown, age = view.observed(card)
    foreign = foreign_bytes(shown, view.pids(card.node))
    status, why = _status_and_why(card, node, mode)
    held = bool(card.holders) and mode is Mode.EXCLUSIVE
    return CardRow(
        uuid=card.uuid,
        node=card.node,
        index=card.index,
        model=card.model,
        memory_bytes=card.memory_bytes,
        status=status,
        mode="" if mode is None else mode.value,
        mode_pinned=card.mode is not None,
        reserved_bytes=card.reserved_bytes,
        # an exclusive binding has the whole card, however much it asked for
        free_bytes=0 if held else max(0, card.memory_bytes - card.reserved_bytes - (foreign or 0)),
        foreign_bytes=foreign,
        holders=tuple(binding.demand for binding in state.holders_of(card)),
        epochs=card.holders,
        observed=shown,
        observed_age_seconds=None if age is None else round(age, 3),
        why=why,
        simulated=node is not None and node.simulated,
        drifts=tuple(view.drifts_of_card.get(card.uuid, ())),
        enforces=card.enforces,
    )


def card_rows(
    view: View, *, node: str = "", card: str = "", after: Key = ()
) -> Iterator[tuple[Key, CardRow]]:
    """Cards by node and index. Key: (node, index, UUID)."""
    for one in sorted(view.state.cards.values(), key=lambda c: (c.node, c.index, c.uuid)):
        key = (one.node, one.index, one.uuid)
        if key > after and (not node or one.node == node) and (not card or one.uuid == card):
            yield key, _card_row(view, one)


def node_status(node: Node) -> str:
    if node.unreachable_ns:
        return "unreachable"
    if not node.driver_ok:
        return "driver_mismatch"
    return "ready" if node.cordoned is None else "cordoned"


def _node_why(node: Node) -> str:
    if node.unreachable_ns:
        return f"not heard of since {rfc3339(node.unreachable_ns)}"
    if not node.driver_ok:
        return node.driver_text or "the GPU driver does not answer"
    trouble = (
        node.cordoned or "",
        f"reboot needed: {node.reboot_needed}" if node.reboot_needed else "",
        f"containers get no cards: {node.container_gpus}" if node.container_gpus else "",
    )
    return "; ".join(word for word in trouble if word)


def node_totals(state: State) -> dict[str, int]:
    """How many nodes there are of each status."""
    return dict(sorted(Counter(node_status(node) for node in state.nodes.values()).items()))


def node_rows(view: View, *, node: str = "", after: Key = ()) -> Iterator[tuple[Key, NodeRow]]:
    """Nodes by name; memory and free memory are of all cards present. Key: (name,)."""
    state = view.state
    on_node: Counter[str] = Counter()
    for binding in state.bindings.values():
        on_node.update({share.node for share in binding.shares})
    for name in sorted(state.nodes):
        if (name,) <= after or (node and name != node):
            continue
        one = state.nodes[name]
        rows = [
            _card_row(view, state.cards[uuid])
            for uuid in one.cards
            if uuid in state.cards and state.cards[uuid].present
        ]
        heard = view.heard.get(name)
        yield (
            (name,),
            NodeRow(
                name=name,
                status=node_status(one),
                gpu_model=", ".join(dict.fromkeys(row.model for row in rows)),
                gpu_count=len(rows),
                memory_bytes=sum(row.memory_bytes for row in rows),
                free_bytes=sum(row.free_bytes for row in rows),
                bindings=on_node[name],
                simulated=one.simulated,
                labels=one.labels,
                engines=one.engines,
                driver_version=one.driver_version,
                cuda_version=one.cuda_version,
                agent_version=one.agent_version,
                incarnation=one.incarnation,
                boot_id=one.boot_id,
                heard_seconds_ago=None if heard is None else round(view.now - heard.at, 3),
                skew_seconds=None
                if heard is None or heard.skew_seconds is None
                else round(heard.skew_seconds, 6),
                why=_node_why(one),
                pressure=None if heard is None else heard.beat.pressure,
                components=None if heard is None else heard.beat.components,
                starting=() if heard is None else heard.beat.starting,
                weights=one.weights,
            ),
        )


def project_rows(view: View, *, project: str = "", after: Key = ()) -> Iterator[tuple[Key, ProjectRow]]:
    """Projects by name. Key: (name,)."""
    for name in sorted(view.state.projects):
        if (name,) <= after or (project and name != project):
            continue
        one = view.state.projects[name]
        yield (
            (name,),
            ProjectRow(
                project=name,
                used_bytes=one.used_bytes,
                releasing_bytes=one.releasing_bytes,
                quota_bytes=one.quota_bytes,
                over_bytes=one.over_bytes,
            ),
        )

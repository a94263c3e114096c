"""The fold of the fleet: nodes and their cards, what is amiss with them, and the operator's rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace
from rigbook_schemas import events as e

from rigbook_ledger.state import Card, Node, Project
from rigbook_ledger.steps import find, forget_absent, leave, put_card, put_node, switch_mode

if TYPE_CHECKING:
    from rigbook_schemas.wire import Record

    from rigbook_ledger.state import State

__all__ = [
    "capped",
    "cordoned",
    "drift_cleared",
    "drift_detected",
    "healing_set",
    "joined",
    "log_recovered",
    "mode_set",
    "placement_set",
    "preemption_set",
    "quarantined",
    "quota_set",
    "recovered",
    "restored",
    "sequence_skipped",
    "uncordoned",
    "unknown_accepted",
    "unreachable",
]


# -- node agent ---------------------------------------------------------------------------------


def joined(state: State, record: Record, data: e.NodeJoined) -> None:
    if record.subject != f"rig.node.{data.node}":
        find(
            state,
            record,
            "wrong_subject",
            f"{record.kind} of node {data.node} does not belong on {record.subject}",
        )
        return
    before = state.nodes.get(data.node)
    if before is None and isinstance(data, e.NodeChanged):
        find(
            state,
            record,
            "unknown_node",
            f"node {data.node} changed before it joined; its inventory is taken all the same",
        )
    uuids: list[str] = []
    for told in data.cards:
        if told.uuid in uuids:
            find(
                state,
                record,
                "duplicate_card",
                f"node {data.node} names card {told.uuid} twice; the first one counts",
            )
            continue
        card = state.cards.get(told.uuid)
        if card is not None and card.node != data.node:
            if card.holders or card.present:
                find(
                    state,
                    record,
                    "card_claimed_twice",
                    f"card {told.uuid} of node {card.node} is also reported by node {data.node}; it stays where it was",
                )
                continue
            leave(state, card)
            card = replace(card, node=data.node)  # moved over; what the operator said of it stays said
        uuids.append(told.uuid)
        mine = card or Card(
            uuid=told.uuid, node=data.node, index=told.index, model=told.model, memory_bytes=told.memory_bytes
        )
        # A card that does not answer says 0 bytes; what it was stays on the books.
        size = told.memory_bytes or mine.memory_bytes
        put_card(
            state,
            replace(
                mine, index=told.index, model=told.model or mine.model, memory_bytes=size,
                usable=told.usable, why=told.why, present=True, parent=told.parent,
                enforces=told.enforces,
            ),
        )  # fmt: skip
    for uuid in before.cards if before else ():
        if uuid not in uuids and uuid in state.cards and state.cards[uuid].node == data.node:
            put_card(state, replace(state.cards[uuid], present=False))
            forget_absent(state, uuid)
    kept = [
        u
        for u in (before.cards if before else ())
        if u in state.cards and u not in uuids and state.cards[u].node == data.node
    ]
    put_node(
        state,
        Node(
            name=data.node,
            incarnation=data.incarnation,
            boot_id=data.boot_id,
            joined_seq=record.seq,
            cards=(*uuids, *kept),
            labels=data.labels,
            engines=data.engines,
            driver_version=data.driver_version,
            cuda_version=data.cuda_version,
            driver_ok=data.driver_ok,
            driver_text=data.driver_text,
            simulated=data.simulated,
            memory_bytes=data.memory_bytes,
            cpus=data.cpus,
            agent_version=data.agent_version,
            address=data.address,
            cordoned=before.cordoned if before else None,
            unreachable_ns=0,
            weights=data.weights,
            container_gpus=data.container_gpus,
            reboot_needed=data.reboot_needed,
        ),
    )


# -- reaper -------------------------------------------------------------------------------------


def unreachable(state: State, record: Record, data: e.NodeUnreachable) -> None:
    node = _known_node(state, record, data.node)
    if node is not None and not node.unreachable_ns:
        put_node(state, replace(node, unreachable_ns=record.received_ns))


def recovered(state: State, record: Record, data: e.NodeRecovered) -> None:
    node = _known_node(state, record, data.node)
    if node is not None and node.unreachable_ns:
        put_node(state, replace(node, unreachable_ns=0))


def drift_detected(state: State, record: Record, data: e.DriftDetected) -> None:
    state.drifts[data.drift] = data
    state.touched.drifts.add(data.drift)


def drift_cleared(state: State, record: Record, data: e.DriftCleared) -> None:
    if state.drifts.pop(data.drift, None) is not None:
        state.touched.drifts.add(data.drift)


# -- operator -----------------------------------------------------------------------------------


def _known_node(state: State, record: Record, name: str) -> Node | None:
    node = state.nodes.get(name)
    if node is None:
        find(state, record, "unknown_node", f"{record.kind}: node {name} has never joined")
    return node


def _known_card(state: State, record: Record, uuid: str) -> Card | None:
    card = state.cards.get(uuid)
    if card is None:
        find(
            state, record, "unknown_card", f"{record.kind}: card {uuid} is not known; see `rigbook gpu list`"
        )
    return card


def quota_set(state: State, record: Record, data: e.QuotaSet) -> None:
    project = state.projects.get(data.project) or Project()
    state.projects[data.project] = replace(project, quota_bytes=data.memory_bytes)
    state.touched.projects.add(data.project)


def mode_set(state: State, record: Record, data: e.ModeSet) -> None:
    card = _known_card(state, record, data.card)
    if card is None:
        return
    if data.draining:
        put_card(state, replace(card, switching="any" if data.mode is None else data.mode.value))
        switch_mode(state, data.card)
        forget_absent(state, data.card)
        return
    other = [b for b in state.holders_of(card) if data.mode is not None and b.mode is not data.mode]
    if other:
        names = ", ".join(b.demand for b in other)
        find(
            state,
            record,
            "mode_conflict",
            f"card {data.card} cannot serve {data.mode} while it is bound by {names}; it stays as it was",
        )
        return
    put_card(state, replace(card, mode=data.mode, switching=""))
    forget_absent(state, data.card)


def cordoned(state: State, record: Record, data: e.NodeCordoned) -> None:
    node = _known_node(state, record, data.node)
    if node is not None:
        put_node(state, replace(node, cordoned=data.reason or "no reason given"))


def uncordoned(state: State, record: Record, data: e.NodeUncordoned) -> None:
    node = _known_node(state, record, data.node)
    if node is not None:
        put_node(state, replace(node, cordoned=None))


def quarantined(state: State, record: Record, data: e.GpuQuarantined) -> None:
    card = _known_card(state, record, data.card)
    if card is not None:
        put_card(state, replace(card, quarantined=data.reason or "no reason given"))


def restored(state: State, record: Record, data: e.GpuRestored) -> None:
    card = _known_card(state, record, data.card)
    if card is not None:
        put_card(state, replace(card, quarantined=None))
        forget_absent(state, data.card)


def capped(state: State, record: Record, data: e.PriorityCapped) -> None:
    state.policy = replace(
        state.policy, cap_priority=data.priority, cap_share=data.share if data.share < 1 else None
    )


def placement_set(state: State, record: Record, data: e.PlacementSet) -> None:
    state.policy = replace(state.policy, placement=data.policy)


def preemption_set(state: State, record: Record, data: e.PreemptionSet) -> None:
    state.policy = replace(state.policy, preemption=data.on, preemption_run_seconds_min=data.run_seconds_min)


def healing_set(state: State, record: Record, data: e.HealingSet) -> None:
    kinds = set(state.policy.healing)
    kinds = kinds | {data.kind} if data.on else kinds - {data.kind}
    state.policy = replace(state.policy, healing=tuple(sorted(kinds)))


def unknown_accepted(state: State, record: Record, data: e.UnknownAccepted) -> None:
    if state.unknown_open.pop(data.seq, None) is None:
        find(
            state,
            record,
            "nothing_to_accept",
            f"no unknown event at sequence {data.seq} is waiting to be accepted",
        )


def sequence_skipped(state: State, record: Record, data: e.SequenceSkipped) -> None:
    """Its place on the log, and that a recovery is under way: until its end nobody decides."""
    if data.generation > state.generation:
        state.recovering = data.generation


def log_recovered(state: State, record: Record, data: e.LogRecovered) -> None:
    if data.generation <= state.generation:
        find(
            state,
            record,
            "stale_recovery",
            f"recovery {data.generation} after recovery {state.generation}; it changes nothing",
        )
        return
    state.generation, state.recovering = data.generation, 0

"""`evolve(state, record) -> state`: the one fold of the log.

Total and deterministic: it reads nothing but its arguments, never raises for what stands on the bus,
and leaves a finding for what should not be there. It takes ownership of `state` (see `state.State`).

What the world can do is a finding. What only a bug of ours could do is asserted.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace
from rigbook_schemas import events as e
from rigbook_schemas.subjects import GANG
from rigbook_schemas.values import Mode, VerdictClass
from rigbook_schemas.wire import TYPE_PREFIX, Malformed, Record, Unknown, instant, rfc3339

from rigbook_ledger.state import (
    ENDED_MAX,
    FINDINGS_MAX,
    Binding,
    Card,
    Demand,
    Eviction,
    Finding,
    Node,
    Phase,
    Project,
    State,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["SKEW_SECONDS_MAX", "evolve", "fold"]

# An event whose own time is further than this from the server's receive time leaves a finding.
SKEW_SECONDS_MAX: Final = 600
# A kind we do not know on one of these may change who owns what: a newer author is about.
_DECIDING: Final = ("rig.own.", "rig.evict.", "rig.release.")
_HOUR_NS: Final = 3_600_000_000_000


def fold(state: State, records: Iterable[Record]) -> State:
    """`evolve` over many records."""
    for record in records:
        state = evolve(state, record)
    return state


def evolve(state: State, record: Record) -> State:
    """Apply one record. Records at or below the state's position are ignored: redelivery is a no-op."""
    seq = record.seq
    if seq <= state.position:
        return state
    data = record.data
    apply = _APPLY.get(type(data))
    if apply is not None:
        _check_time(state, record)
        apply(state, record, data)
    elif isinstance(data, Unknown):
        state.unknown_count += 1
        if record.subject.startswith(_DECIDING) and data.type.startswith(TYPE_PREFIX) and len(state.unknown_open) < FINDINGS_MAX:
            state.unknown_open[seq] = data.type[:200]
        _find(state, record, "unknown_kind", f"{data.type[:200]!r} is not a kind this version knows; it was skipped")
    elif isinstance(data, Malformed):
        _find(state, record, data.code, data.text)
    else:
        _find(state, record, "wrong_stream", f"{record.kind} does not belong on the ledger stream")
    state.position = seq
    state.event_id = record.id
    state.received_ns = record.received_ns
    state.chain = blake2b(b"%b%d %b" % (state.chain, seq, record.id.encode()), digest_size=16).digest()
    if record.subject.startswith("rig.own."):
        state.own_position = seq
    return state


# -- small steps --------------------------------------------------------------------------------


def _find(state: State, record: Record, code: str, text: str) -> None:
    finding = Finding(seq=record.seq, code=code, text=text[:500], subject=record.subject[:200], event_id=record.id[:200])
    state.findings.append(finding)
    if len(state.findings) > FINDINGS_MAX:
        del state.findings[0]
    state.finding_count += 1
    state.touched.findings.append(finding)


def _check_time(state: State, record: Record) -> None:
    hour = _hour_text(record.received_ns // _HOUR_NS)
    if record.time[:13] == hour:
        return
    told = instant(record.time)
    if told is None:
        _find(state, record, "invalid_time", f"{record.kind}: time {record.time[:64]!r} is not RFC 3339 with a zone")
        return
    skew = (told - record.received_ns) / 1e9
    if abs(skew) > SKEW_SECONDS_MAX:
        side = "ahead of" if skew > 0 else "behind"
        _find(state, record, "clock_skew", f"{record.kind} from {record.source}: its clock is {abs(skew):.0f} s {side} the server's")


_hour_cache: list[tuple[int, str]] = [(-1, "")]


def _hour_text(hour: int) -> str:
    if _hour_cache[0][0] != hour:
        _hour_cache[0] = (hour, rfc3339(hour * _HOUR_NS)[:13])
    return _hour_cache[0][1]


def _move(state: State, record: Record, demand: Demand, phase: Phase, **changes: object) -> Demand:
    """The demand in another phase; keeps the waiting and ended indexes right."""
    did = demand.spec.demand
    if phase is not demand.phase:
        changes.setdefault("since_seq", record.seq)
        changes.setdefault("since_ns", record.received_ns)
        if phase is Phase.WAITING:
            state.waiting[did] = None
        elif demand.phase is Phase.WAITING:
            state.waiting.pop(did, None)
        if phase.terminal:
            _retire(state, did)
    moved: Demand = replace(demand, phase=phase, event_id=record.id, **changes)
    state.demands[did] = moved
    state.touched.demands.add(did)
    return moved


def _retire(state: State, demand_id: str) -> None:
    state.ended[demand_id] = None
    while len(state.ended) > ENDED_MAX:
        oldest = next(iter(state.ended))
        del state.ended[oldest]
        state.demands.pop(oldest, None)


def _put_binding(state: State, binding: Binding) -> None:
    state.bindings[binding.epoch] = binding
    state.touched.bindings.add(binding.epoch)


def _put_card(state: State, card: Card) -> None:
    state.cards[card.uuid] = card
    state.touched.cards.add(card.uuid)


def _put_node(state: State, node: Node) -> None:
    state.nodes[node.name] = node
    state.touched.nodes.add(node.name)


def _charge(state: State, project: str, used: int, releasing: int) -> None:
    p = state.projects.get(project) or Project()
    state.projects[project] = replace(p, used_bytes=p.used_bytes + used, releasing_bytes=p.releasing_bytes + releasing)
    state.touched.projects.add(project)


def _unreleased_bytes(binding: Binding) -> int:
    return sum(
        allotment.memory_bytes
        for share in binding.shares
        if share.node not in binding.released
        for allotment in share.allotments
    )


def _releasing(state: State, record: Record, demand: Demand, binding: Binding, **changes: object) -> None:
    """Desired is stopped (or a stop was ordered): the cards stay held until they are seen free."""
    if demand.phase is not Phase.RELEASING:
        _charge(state, binding.project, 0, _unreleased_bytes(binding))
    _move(state, record, demand, Phase.RELEASING, **changes)


# -- client -------------------------------------------------------------------------------------


def _raised(state: State, record: Record, data: e.DemandRaised) -> None:
    if data.demand in state.demands:
        _find(state, record, "duplicate_demand", f"demand {data.demand} was raised before; ids are unique for ever")
        return
    if record.subject != f"rig.demand.{data.project}":
        _find(state, record, "wrong_subject", f"a demand of project {data.project} does not belong on {record.subject}")
        return
    state.demands[data.demand] = Demand(
        spec=data,
        phase=Phase.WAITING,
        raised_seq=record.seq,
        raised_ns=record.received_ns,
        since_seq=record.seq,
        since_ns=record.received_ns,
        event_id=record.id,
        traceparent=record.traceparent,
    )
    state.waiting[data.demand] = None
    state.touched.demands.add(data.demand)


def _withdrawn(state: State, record: Record, data: e.DemandWithdrawn) -> None:
    demand = state.demands.get(data.demand)
    if demand is None:
        _find(state, record, "unknown_demand", f"demand {data.demand} was withdrawn, and was never raised (or ended long ago)")
        return
    if data.project != demand.spec.project or record.subject != f"rig.demand.{data.project}":
        _find(state, record, "foreign_withdrawal", f"demand {data.demand} belongs to project {demand.spec.project}, not {data.project}")
        return
    if demand.phase.terminal or not demand.wanted:
        return  # a race with its own end, or said twice: nothing to learn
    said: dict[str, object] = {"wanted": False, "withdrawn_ns": record.received_ns, "withdrawn_by": data.by}
    if demand.phase is Phase.WAITING:
        _move(state, record, demand, Phase.WITHDRAWN, **said)
        return
    _releasing(state, record, demand, state.bindings[demand.epoch], **said)


# -- placer -------------------------------------------------------------------------------------


def _bound(state: State, record: Record, data: e.Bound) -> None:
    demand = state.demands.get(data.demand)
    problem = _bound_problem(state, record, data, demand)
    if problem:
        _find(state, record, "void_binding", f"{problem}; epoch {record.seq} gives no right to any card")
        return
    assert demand is not None
    epoch = record.seq
    total = 0
    for share in data.shares:
        for allotment in share.allotments:
            card = state.cards[allotment.card]
            total += allotment.memory_bytes
            _put_card(
                state,
                replace(card, holders=(*card.holders, epoch), reserved_bytes=card.reserved_bytes + allotment.memory_bytes),
            )
    binding = Binding(
        epoch=epoch,
        demand=data.demand,
        project=demand.spec.project,
        mode=data.shares[0].allotments[0].mode,
        shares=data.shares,
        bound_ns=record.received_ns,
        event_id=record.id,
        policy=data.policy,
        memory_bytes=total,
    )
    _put_binding(state, binding)
    _charge(state, binding.project, total, 0)
    held: dict[str, object] = {"epoch": epoch, "epoch_last": epoch, "reasons": (), "attempt": 1}
    if demand.phase is Phase.WITHDRAWN:
        # The withdrawal came between the placer's last read and its append. The agent got the binding
        # and may have started: it is a real binding of something already unwanted.
        state.ended.pop(data.demand, None)
        _releasing(state, record, demand, binding, **held)
        return
    _move(state, record, demand, Phase.BOUND, **held)


def _bound_problem(state: State, record: Record, data: e.Bound, demand: Demand | None) -> str:
    if demand is None:
        return f"demand {data.demand} was never raised"
    if demand.phase not in (Phase.WAITING, Phase.WITHDRAWN):
        return f"demand {data.demand} is {demand.phase}, not waiting"
    nodes = tuple(share.node for share in data.shares)
    if record.subject != f"rig.own.bind.{nodes[0] if len(nodes) == 1 else GANG}":
        return f"a binding on {', '.join(nodes)} does not belong on {record.subject}"
    seen: set[str] = set()
    modes: set[Mode] = set()
    for share in data.shares:
        if not share.allotments:
            return f"the share of node {share.node} has no card"
        for allotment in share.allotments:
            card = state.cards.get(allotment.card)
            if card is None or card.node != share.node:
                return f"card {allotment.card} is not known on node {share.node}"
            if allotment.card in seen:
                return f"card {allotment.card} is named twice"
            seen.add(allotment.card)
            modes.add(allotment.mode)
    return "" if len(modes) == 1 else "one binding cannot have two modes"


def _deferred(state: State, record: Record, data: e.Deferred) -> None:
    demand = state.demands.get(data.demand)
    if demand is not None and demand.phase is Phase.WAITING:
        state.demands[data.demand] = replace(demand, reasons=data.reasons)
        state.touched.demands.add(data.demand)


def _refused(state: State, record: Record, data: e.Refused) -> None:
    demand = state.demands.get(data.demand)
    if demand is not None and demand.phase is Phase.WAITING:
        _move(state, record, demand, Phase.REFUSED, reasons=data.reasons)


def _eviction_ordered(state: State, record: Record, data: e.EvictionOrdered) -> None:
    binding = state.bindings.get(data.epoch)
    if binding is None:
        return  # an order against something that has no (or no longer a) right: the agent obeys it all the same
    before = binding.eviction
    eviction = Eviction(
        event_id=record.id,
        seq=record.seq,
        ordered_ns=record.received_ns,
        reason=data.reason,
        by=data.by,
        scope=data.scope,
        requeue=data.requeue if before is None else before.requeue and data.requeue,
        grace_seconds=data.grace_seconds,
    )
    _put_binding(state, replace(binding, eviction=eviction))
    _releasing(state, record, state.demands[binding.demand], binding)


# -- node agent ---------------------------------------------------------------------------------


def _held(
    state: State, record: Record, data: e.Started | e.Ready | e.Unready | e.Exited | e.Released, family: str
) -> tuple[Binding, Demand] | None:
    """The live binding an agent speaks of; a finding when it has no business to."""
    if record.subject != f"rig.{family}.{data.node}":
        _find(state, record, "wrong_subject", f"{record.kind} of node {data.node} does not belong on {record.subject}")
        return None
    binding = state.bindings.get(data.epoch)
    if binding is None or binding.demand != data.demand or binding.share(data.node) is None or data.node in binding.released:
        code = "release_by_non_holder" if isinstance(data, e.Released) else "stale_epoch"
        _find(state, record, code, f"{record.kind}: node {data.node} holds nothing of demand {data.demand} under epoch {data.epoch}")
        return None
    return binding, state.demands[binding.demand]


def _has_probe(binding: Binding) -> bool:
    return any(c.probe is not None for share in binding.shares for c in share.components)


def _started(state: State, record: Record, data: e.Started) -> None:
    held = _held(state, record, data, "run")
    if held is None:
        return
    binding, demand = held
    if data.node not in binding.started:
        binding = replace(binding, started=(*binding.started, data.node))
        _put_binding(state, binding)
    if demand.phase is Phase.BOUND and len(binding.started) == len(binding.shares):
        _move(state, record, demand, Phase.STARTING if _has_probe(binding) else Phase.RUNNING, attempt=data.attempt)
    else:
        _move(state, record, demand, demand.phase, attempt=data.attempt)


def _ready(state: State, record: Record, data: e.Ready) -> None:
    held = _held(state, record, data, "run")
    if held is None:
        return
    binding, demand = held
    if data.node not in binding.ready:
        binding = replace(binding, ready=(*binding.ready, data.node))
        _put_binding(state, binding)
    if demand.phase is Phase.STARTING and len(binding.ready) == len(binding.shares):
        _move(state, record, demand, Phase.RUNNING)


def _unready(state: State, record: Record, data: e.Unready) -> None:
    held = _held(state, record, data, "run")
    if held is None:
        return
    binding, demand = held
    if data.node in binding.ready:
        _put_binding(state, replace(binding, ready=tuple(n for n in binding.ready if n != data.node)))
    if demand.phase is Phase.RUNNING:
        _move(state, record, demand, Phase.STARTING)


def _exited(state: State, record: Record, data: e.Exited) -> None:
    held = _held(state, record, data, "run")
    if held is None:
        return
    binding, demand = held
    if data.final and data.node not in binding.exited:
        _put_binding(state, replace(binding, exited=(*binding.exited, data.node)))
    # Of a gang, the first bad end is the story; the others follow from it.
    if demand.verdict in (None, VerdictClass.COMPLETED) or len(binding.exited) == 0:
        _move(state, record, demand, demand.phase, verdict=data.verdict, sentence=data.sentence, attempt=data.attempt)


def _released(state: State, record: Record, data: e.Released) -> None:
    held = _held(state, record, data, "release")
    if held is None:
        return
    binding, demand = held
    share = binding.share(data.node)
    assert share is not None
    freed = 0
    for allotment in share.allotments:
        card = state.cards[allotment.card]
        freed += allotment.memory_bytes
        _put_card(
            state,
            replace(
                card,
                holders=tuple(epoch for epoch in card.holders if epoch != binding.epoch),
                reserved_bytes=card.reserved_bytes - allotment.memory_bytes,
            ),
        )
        _forget_absent(state, allotment.card)
    binding = replace(binding, released=(*binding.released, data.node))
    _charge(state, binding.project, -freed, -freed if demand.phase is Phase.RELEASING else 0)
    if len(binding.released) < len(binding.shares):
        _put_binding(state, binding)
        return
    del state.bindings[binding.epoch]
    state.touched.bindings.add(binding.epoch)
    verdict = data.verdict if demand.verdict is None else demand.verdict
    if binding.eviction is not None and binding.eviction.requeue and demand.wanted:
        _move(
            state, record, demand, Phase.WAITING,
            epoch=0, requeues=demand.requeues + 1, verdict=None, sentence="", reasons=(),
        )  # fmt: skip
        return
    _move(state, record, demand, Phase.ENDED, epoch=0, verdict=verdict)


def _joined(state: State, record: Record, data: e.NodeJoined) -> None:
    if record.subject != f"rig.node.{data.node}":
        _find(state, record, "wrong_subject", f"{record.kind} of node {data.node} does not belong on {record.subject}")
        return
    before = state.nodes.get(data.node)
    if before is None and isinstance(data, e.NodeChanged):
        _find(state, record, "unknown_node", f"node {data.node} changed before it joined; its inventory is taken all the same")
    uuids: list[str] = []
    for told in data.cards:
        if told.uuid in uuids:
            _find(state, record, "duplicate_card", f"node {data.node} names card {told.uuid} twice; the first one counts")
            continue
        card = state.cards.get(told.uuid)
        if card is not None and card.node != data.node:
            if card.holders or card.present:
                _find(state, record, "card_claimed_twice", f"card {told.uuid} of node {card.node} is also reported by node {data.node}; it stays where it was")
                continue
            card = None
        uuids.append(told.uuid)
        mine = card or Card(uuid=told.uuid, node=data.node, index=told.index, model=told.model, memory_bytes=told.memory_bytes)
        # A card that does not answer says 0 bytes; what it was stays on the books.
        size = told.memory_bytes or mine.memory_bytes
        _put_card(
            state,
            replace(
                mine, index=told.index, model=told.model or mine.model, memory_bytes=size,
                usable=told.usable, why=told.why, present=True, parent=told.parent,
            ),
        )  # fmt: skip
    for uuid in before.cards if before else ():
        if uuid not in uuids and uuid in state.cards and state.cards[uuid].node == data.node:
            _put_card(state, replace(state.cards[uuid], present=False))
            _forget_absent(state, uuid)
    kept = [u for u in (before.cards if before else ()) if u in state.cards and u not in uuids and state.cards[u].node == data.node]
    _put_node(
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
        ),
    )


def _forget_absent(state: State, uuid: str) -> None:
    """Drop a card that its node no longer has, once nothing holds it and no rule names it."""
    card = state.cards[uuid]
    if card.present or card.holders or card.quarantined is not None or card.mode is not None:
        return
    del state.cards[uuid]
    state.touched.cards.add(uuid)
    node = state.nodes.get(card.node)
    if node is not None and uuid in node.cards:
        _put_node(state, replace(node, cards=tuple(u for u in node.cards if u != uuid)))


# -- reaper -------------------------------------------------------------------------------------


def _unreachable(state: State, record: Record, data: e.NodeUnreachable) -> None:
    node = _known_node(state, record, data.node)
    if node is not None and not node.unreachable_ns:
        _put_node(state, replace(node, unreachable_ns=record.received_ns))


def _recovered(state: State, record: Record, data: e.NodeRecovered) -> None:
    node = _known_node(state, record, data.node)
    if node is not None and node.unreachable_ns:
        _put_node(state, replace(node, unreachable_ns=0))


def _drift_detected(state: State, record: Record, data: e.DriftDetected) -> None:
    state.drifts[data.drift] = data
    state.touched.drifts.add(data.drift)


def _drift_cleared(state: State, record: Record, data: e.DriftCleared) -> None:
    if state.drifts.pop(data.drift, None) is not None:
        state.touched.drifts.add(data.drift)


# -- operator -----------------------------------------------------------------------------------


def _known_node(state: State, record: Record, name: str) -> Node | None:
    node = state.nodes.get(name)
    if node is None:
        _find(state, record, "unknown_node", f"{record.kind}: node {name} has never joined")
    return node


def _known_card(state: State, record: Record, uuid: str) -> Card | None:
    card = state.cards.get(uuid)
    if card is None:
        _find(state, record, "unknown_card", f"{record.kind}: card {uuid} is not known; see `rigbook gpu list`")
    return card


def _quota_set(state: State, record: Record, data: e.QuotaSet) -> None:
    project = state.projects.get(data.project) or Project()
    state.projects[data.project] = replace(project, quota_bytes=data.memory_bytes)
    state.touched.projects.add(data.project)


def _mode_set(state: State, record: Record, data: e.ModeSet) -> None:
    card = _known_card(state, record, data.card)
    if card is None:
        return
    other = [b for b in state.holders_of(card) if data.mode is not None and b.mode is not data.mode]
    if other:
        names = ", ".join(b.demand for b in other)
        _find(state, record, "mode_conflict", f"card {data.card} cannot serve {data.mode} while it is bound by {names}; it stays as it was")
        return
    _put_card(state, replace(card, mode=data.mode))
    _forget_absent(state, data.card)


def _cordoned(state: State, record: Record, data: e.NodeCordoned) -> None:
    node = _known_node(state, record, data.node)
    if node is not None:
        _put_node(state, replace(node, cordoned=data.reason or "no reason given"))


def _uncordoned(state: State, record: Record, data: e.NodeUncordoned) -> None:
    node = _known_node(state, record, data.node)
    if node is not None:
        _put_node(state, replace(node, cordoned=None))


def _quarantined(state: State, record: Record, data: e.GpuQuarantined) -> None:
    card = _known_card(state, record, data.card)
    if card is not None:
        _put_card(state, replace(card, quarantined=data.reason or "no reason given"))


def _restored(state: State, record: Record, data: e.GpuRestored) -> None:
    card = _known_card(state, record, data.card)
    if card is not None:
        _put_card(state, replace(card, quarantined=None))
        _forget_absent(state, data.card)


def _capped(state: State, record: Record, data: e.PriorityCapped) -> None:
    state.policy = replace(state.policy, cap_priority=data.priority, cap_share=data.share if data.share < 1 else None)


def _healing_set(state: State, record: Record, data: e.HealingSet) -> None:
    kinds = set(state.policy.healing)
    kinds = kinds | {data.kind} if data.on else kinds - {data.kind}
    state.policy = replace(state.policy, healing=tuple(sorted(kinds)))


def _unknown_accepted(state: State, record: Record, data: e.UnknownAccepted) -> None:
    if state.unknown_open.pop(data.seq, None) is None:
        _find(state, record, "nothing_to_accept", f"no unknown event at sequence {data.seq} is waiting to be accepted")


_APPLY: Final[dict[type, Callable[..., None]]] = {
    e.DemandRaised: _raised,
    e.DemandWithdrawn: _withdrawn,
    e.Bound: _bound,
    e.Deferred: _deferred,
    e.Refused: _refused,
    e.EvictionOrdered: _eviction_ordered,
    e.Started: _started,
    e.Ready: _ready,
    e.Unready: _unready,
    e.Exited: _exited,
    e.Released: _released,
    e.NodeJoined: _joined,
    e.NodeChanged: _joined,
    e.NodeUnreachable: _unreachable,
    e.NodeRecovered: _recovered,
    e.DriftDetected: _drift_detected,
    e.DriftCleared: _drift_cleared,
    e.QuotaSet: _quota_set,
    e.ModeSet: _mode_set,
    e.NodeCordoned: _cordoned,
    e.NodeUncordoned: _uncordoned,
    e.GpuQuarantined: _quarantined,
    e.GpuRestored: _restored,
    e.PriorityCapped: _capped,
    e.HealingSet: _healing_set,
    e.UnknownAccepted: _unknown_accepted,
}

"""The fold of ownership: a demand is raised, bound, runs, is stopped, and ends when it was seen gone.

Bindings and stop orders are judged here by what the log says, not by who sent them: rights on the bus are
the bus's business, and what has no business on the log leaves a finding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace
from rigbook_schemas import events as e
from rigbook_schemas.subjects import GANG
from rigbook_schemas.values import CheckpointAnswer, EvictionReason, VerdictClass
from rigbook_schemas.wire import instant

from rigbook_ledger.state import Binding, Demand, Eviction, Phase
from rigbook_ledger.steps import (
    charge,
    drop_room,
    find,
    forget_absent,
    keep_room,
    made_room,
    move,
    put_binding,
    put_card,
    switch_mode,
    without,
)

if TYPE_CHECKING:
    from rigbook_schemas.values import Mode
    from rigbook_schemas.wire import Record

    from rigbook_ledger.state import State

__all__ = [
    "adopted",
    "bound",
    "deferred",
    "eviction_answered",
    "eviction_ordered",
    "exited",
    "raised",
    "ready",
    "refused",
    "released",
    "started",
    "unready",
    "withdrawn",
]

# A member of an enum is found through its class slowly (CPython 3.11: 120 ns), and the fold asks often.
_BOUND: Final = Phase.BOUND
_ENDED: Final = Phase.ENDED
_REFUSED: Final = Phase.REFUSED
_RELEASING: Final = Phase.RELEASING
_RUNNING: Final = Phase.RUNNING
_STARTING: Final = Phase.STARTING
_WAITING: Final = Phase.WAITING
_WITHDRAWN: Final = Phase.WITHDRAWN
_COMPLETED: Final = VerdictClass.COMPLETED
# Ends of what never ran: the node could not start it.
_START_FAILURES: Final = frozenset(
    {VerdictClass.START_FAILED, VerdictClass.IMAGE_PULL, VerdictClass.RUNTIME_MISSING}
)
# How many nodes are remembered as those where a demand could not be started.
FAILED_ON_MAX: Final = 16


# -- client -------------------------------------------------------------------------------------


def raised(state: State, record: Record, data: e.DemandRaised) -> None:
    if data.demand in state.demands:
        find(
            state,
            record,
            "duplicate_demand",
            f"demand {data.demand} was raised before; ids are unique for ever",
        )
        return
    if record.subject != f"rig.demand.{data.project}":
        find(
            state,
            record,
            "wrong_subject",
            f"a demand of project {data.project} does not belong on {record.subject}",
        )
        return
    state.demands[data.demand] = Demand(
        spec=data,
        phase=_WAITING,
        raised_seq=record.seq,
        raised_ns=record.received_ns,
        since_seq=record.seq,
        since_ns=record.received_ns,
        event_id=record.id,
        traceparent=record.traceparent,
    )
    state.waiting[data.demand] = None
    state.touched.demands.add(data.demand)


def withdrawn(state: State, record: Record, data: e.DemandWithdrawn) -> None:
    demand = state.demands.get(data.demand)
    if demand is None:
        find(
            state,
            record,
            "unknown_demand",
            f"demand {data.demand} was withdrawn, and was never raised (or ended long ago)",
        )
        return
    if data.project != demand.spec.project or record.subject != f"rig.demand.{data.project}":
        find(
            state,
            record,
            "foreign_withdrawal",
            f"demand {data.demand} belongs to project {demand.spec.project}, not {data.project}",
        )
        return
    if demand.phase.terminal or not demand.wanted:
        return  # a race with its own end, or said twice: nothing to learn
    said: dict[str, object] = {"wanted": False, "withdrawn_ns": record.received_ns, "withdrawn_by": data.by}
    if demand.phase is _WAITING:
        move(state, record, demand, _WITHDRAWN, **said)
        return
    _releasing(state, record, demand, state.bindings[demand.epoch], **said)


# -- placer -------------------------------------------------------------------------------------


def bound(state: State, record: Record, data: e.Bound) -> None:
    demand = state.demands.get(data.demand)
    problem = _bound_problem(state, record, data, demand)
    if problem:
        find(state, record, "void_binding", f"{problem}; epoch {record.seq} gives no right to any card")
        return
    assert demand is not None
    _hold(state, record, demand, data, epoch=record.seq, policy=data.policy, bound_ns=record.received_ns)


def _hold(
    state: State, record: Record, demand: Demand, data: e.Bound | e.Adopted,
    *, epoch: int, policy: str, bound_ns: int,
) -> Binding:  # fmt: skip
    """Reserve the cards, and put the binding beside its demand."""
    total = 0
    for share in data.shares:
        for allotment in share.allotments:
            card = state.cards[allotment.card]
            total += allotment.memory_bytes
            put_card(
                state,
                replace(
                    card,
                    holders=(*card.holders, epoch),
                    reserved_bytes=card.reserved_bytes + allotment.memory_bytes,
                ),
            )
    binding = Binding(
        epoch=epoch,
        demand=data.demand,
        project=demand.spec.project,
        mode=data.shares[0].allotments[0].mode,
        shares=data.shares,
        bound_ns=bound_ns,
        event_id=record.id,
        policy=policy,
        memory_bytes=total,
    )
    put_binding(state, binding)
    charge(state, binding.project, total, 0)
    if isinstance(data, e.Bound):
        _check_rules(state, record, binding)
    if demand.phase is not _WAITING:
        # The withdrawal (or another placer's refusal) came between the placer's last read and its append.
        # The agent got the binding and may have started: it is a real binding of something unwanted.
        state.ended.pop(data.demand, None)
        _releasing(state, record, demand, binding, wanted=False, epoch=epoch, epoch_last=epoch, attempt=1)
        return binding
    move(state, record, demand, _BOUND, epoch=epoch, epoch_last=epoch, attempt=1, reasons=())
    return binding


def adopted(state: State, record: Record, data: e.Adopted) -> None:
    """The operator's word that something of a lost log still runs: its demand and its binding, as they were."""
    demand = state.demands.get(data.demand)
    problem = ""
    if data.spec.demand != data.demand:
        problem = f"the demand told of is {data.spec.demand}, not {data.demand}"
    elif data.epoch >= record.seq:
        problem = f"epoch {data.epoch} lies ahead of this event"
    elif data.epoch in state.bindings:
        problem = f"epoch {data.epoch} is live, of demand {state.bindings[data.epoch].demand}"
    if demand is None and not problem:
        demand = Demand(
            spec=data.spec,
            phase=_WAITING,
            raised_seq=record.seq,
            raised_ns=record.received_ns,
            since_seq=record.seq,
            since_ns=record.received_ns,
            event_id=record.id,
            traceparent=record.traceparent,
        )
        problem = _bound_problem(state, record, data, demand)
        if not problem:
            state.demands[data.demand] = demand
            state.waiting[data.demand] = None
            state.touched.demands.add(data.demand)
    elif not problem:
        problem = _bound_problem(state, record, data, demand)
    if problem or demand is None:
        find(state, record, "void_binding", f"{problem}; epoch {data.epoch} is not adopted")
        return
    bound_ns = instant(data.bound) or record.received_ns
    binding = _hold(state, record, demand, data, epoch=data.epoch, policy="adopted", bound_ns=bound_ns)
    nodes = {share.node for share in data.shares}
    binding = replace(
        binding,
        started=tuple(n for n in data.started if n in nodes),
        ready=tuple(n for n in data.ready if n in nodes),
    )
    if not data.wanted:
        _releasing(state, record, state.demands[data.demand], binding, wanted=False)
    _run_changed(state, record, binding, state.demands[data.demand])


def _check_rules(state: State, record: Record, binding: Binding) -> None:
    """Quota, cordon and quarantine stand on the same subjects as bindings, so a placer cannot miss them."""
    project = state.projects[binding.project]
    if project.over_bytes:
        find(
            state, record, "quota_exceeded",
            f"epoch {binding.epoch}: project {binding.project} holds {project.used_bytes} bytes of its {project.quota_bytes}",
        )  # fmt: skip
    for share in binding.shares:
        node = state.nodes.get(share.node)
        if node is not None and node.cordoned is not None:
            find(
                state,
                record,
                "bound_while_cordoned",
                f"epoch {binding.epoch}: node {share.node} is cordoned ({node.cordoned})",
            )
        for allotment in share.allotments:
            quarantined = state.cards[allotment.card].quarantined
            switching = state.cards[allotment.card].switching
            if switching:
                find(
                    state,
                    record,
                    "bound_while_switching",
                    f"epoch {binding.epoch}: card {allotment.card} is being switched to {switching}",
                )
            if quarantined is not None:
                find(
                    state,
                    record,
                    "bound_while_quarantined",
                    f"epoch {binding.epoch}: card {allotment.card} is quarantined ({quarantined})",
                )


def _bound_problem(state: State, record: Record, data: e.Bound | e.Adopted, demand: Demand | None) -> str:
    if demand is None:
        return f"demand {data.demand} was never raised"
    if demand.phase not in (_WAITING, _WITHDRAWN, _REFUSED):
        return f"demand {data.demand} is {demand.phase}, not waiting"
    project = data.project if isinstance(data, e.Bound) else data.spec.project
    if project != demand.spec.project:
        return f"demand {data.demand} belongs to project {demand.spec.project}, not {project}"
    nodes = [share.node for share in data.shares]
    if len(nodes) > 1 and len(set(nodes)) != len(nodes):
        return f"a node has two shares ({', '.join(nodes)})"
    if record.subject != f"rig.own.bind.{nodes[0] if len(nodes) == 1 else GANG}":
        return f"a binding on {', '.join(nodes)} does not belong on {record.subject}"
    seen: set[str] = set()
    mode: Mode | None = None
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
            if mode is None:
                mode = allotment.mode
            elif mode is not allotment.mode:
                return "one binding cannot have two modes"
    return ""


def deferred(state: State, record: Record, data: e.Deferred) -> None:
    demand = state.demands.get(data.demand)
    if demand is not None and demand.phase is _WAITING:
        state.demands[data.demand] = replace(demand, reasons=data.reasons)
        state.touched.demands.add(data.demand)


def refused(state: State, record: Record, data: e.Refused) -> None:
    demand = state.demands.get(data.demand)
    if demand is not None and demand.phase is _WAITING:
        move(state, record, demand, _REFUSED, reasons=data.reasons)


def eviction_ordered(state: State, record: Record, data: e.EvictionOrdered) -> None:
    binding = state.bindings.get(data.epoch)
    if binding is None:
        return  # an order against something that has no (or no longer a) right: the agent obeys it all the same
    if binding.demand != data.demand:
        find(
            state,
            record,
            "wrong_epoch",
            f"epoch {data.epoch} is of demand {binding.demand}, not {data.demand}; the order changes nothing",
        )
        return
    if record.subject != f"rig.evict.{data.nodes[0] if len(data.nodes) == 1 else GANG}":
        find(
            state,
            record,
            "wrong_subject",
            f"a stop order for {', '.join(data.nodes) or 'no node'} does not belong on {record.subject}",
        )
        return
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
        room_for=data.room_for,
    )
    put_binding(state, replace(binding, eviction=eviction))
    if data.room_for:
        keep_room(state, record, data.room_for, data.room)
    _releasing(state, record, state.demands[binding.demand], binding)


# -- node agent ---------------------------------------------------------------------------------


def _held(
    state: State,
    record: Record,
    data: e.Started | e.Ready | e.Unready | e.Exited | e.EvictionAnswered | e.Released,
    family: str,
) -> tuple[Binding, Demand] | None:
    """The live binding an agent speaks of; a finding when it has no business to."""
    if record.subject != family + data.node:
        find(
            state,
            record,
            "wrong_subject",
            f"{record.kind} of node {data.node} does not belong on {record.subject}",
        )
        return None
    binding = state.bindings.get(data.epoch)
    if (
        binding is None
        or binding.demand != data.demand
        or binding.share(data.node) is None
        or data.node in binding.released
    ):
        code = "release_by_non_holder" if isinstance(data, e.Released) else "stale_epoch"
        find(
            state,
            record,
            code,
            f"{record.kind}: node {data.node} holds nothing of demand {data.demand} under epoch {data.epoch}",
        )
        return None
    return binding, state.demands[binding.demand]


def _running_phase(binding: Binding, phase: Phase) -> Phase:
    """Bound until every share has started, starting until every share with a probe is ready, then running."""
    if phase is _RELEASING:
        return phase
    if len(binding.started) < len(binding.shares):
        return _BOUND
    for share in binding.shares:
        for component in share.components:
            if component.probe is not None or component.startup is not None:
                if share.node not in binding.ready:
                    return _STARTING
                break
    return _RUNNING


def _run_changed(state: State, record: Record, binding: Binding, demand: Demand, **changes: object) -> None:
    put_binding(state, binding)
    phase = _running_phase(binding, demand.phase)
    if changes or phase is not demand.phase:
        move(state, record, demand, phase, **changes)


def started(state: State, record: Record, data: e.Started) -> None:
    held = _held(state, record, data, "rig.run.")
    if held is None:
        return
    binding, demand = held
    if data.node not in binding.started:
        binding = replace(binding, started=(*binding.started, data.node))
    if demand.failures and len(binding.started) == len(binding.shares):
        _run_changed(
            state, record, binding, demand, attempt=data.attempt, failures=0, failed_on=(), failure=""
        )
        return
    _run_changed(state, record, binding, demand, attempt=data.attempt)


def ready(state: State, record: Record, data: e.Ready) -> None:
    held = _held(state, record, data, "rig.run.")
    if held is None:
        return
    binding, demand = held
    if data.node not in binding.ready:
        _run_changed(state, record, replace(binding, ready=(*binding.ready, data.node)), demand)


def unready(state: State, record: Record, data: e.Unready) -> None:
    held = _held(state, record, data, "rig.run.")
    if held is None:
        return
    binding, demand = held
    _run_changed(state, record, replace(binding, ready=without(binding.ready, data.node)), demand)


def exited(state: State, record: Record, data: e.Exited) -> None:
    held = _held(state, record, data, "rig.run.")
    if held is None:
        return
    binding, demand = held
    # Of a gang, the first bad end is the story; the others follow from it.
    told: dict[str, object] = {}
    if demand.verdict is None or demand.verdict is _COMPLETED or not binding.exited:
        told = {"verdict": data.verdict, "sentence": data.sentence, "attempt": data.attempt}
        if data.verdict in _START_FAILURES:
            told["failure"] = _start_failure(data)
    if data.final:
        if data.node not in binding.exited:
            put_binding(state, replace(binding, exited=(*binding.exited, data.node)))
        if told:
            move(state, record, demand, demand.phase, **told)
        return
    # It will be started again: until then nothing runs on this node.
    again = replace(
        binding, started=without(binding.started, data.node), ready=without(binding.ready, data.node)
    )
    _run_changed(state, record, again, demand, **told)


def _start_failure(data: e.Exited) -> str:
    """How it could not be started, when another try may help; "" when none will: the program is not there."""
    if any(evidence.what == "no_such_program" for evidence in data.evidence):
        return ""
    return f"{data.verdict} on {data.node}: {data.sentence}"[:300]


def eviction_answered(state: State, record: Record, data: e.EvictionAnswered) -> None:
    """Frees nothing and stops nothing; that nobody answered is for the operator to see."""
    held = _held(state, record, data, "rig.run.")
    if held is None:
        return
    if data.answer in (CheckpointAnswer.NOT_ACKNOWLEDGED, CheckpointAnswer.NOT_SAVED):
        eviction = held[0].eviction
        if eviction is not None and eviction.room_for:
            drop_room(state, eviction.room_for)
        find(
            state,
            record,
            "preempt_not_acknowledged",
            f"demand {data.demand} on node {data.node}: {data.text}; it was not killed and keeps its cards",
        )


def released(state: State, record: Record, data: e.Released) -> None:
    held = _held(state, record, data, "rig.release.")
    if held is None:
        return
    binding, demand = held
    share = binding.share(data.node)
    assert share is not None
    freed = 0
    for allotment in share.allotments:
        card = state.cards[allotment.card]
        freed += allotment.memory_bytes
        put_card(
            state,
            replace(
                card,
                holders=tuple(epoch for epoch in card.holders if epoch != binding.epoch),
                reserved_bytes=card.reserved_bytes - allotment.memory_bytes,
            ),
        )
        if card.switching:
            switch_mode(state, allotment.card)
        forget_absent(state, allotment.card)
    charge(state, binding.project, -freed, -freed if demand.phase is _RELEASING else 0)
    if len(binding.released) + 1 < len(binding.shares):
        put_binding(state, replace(binding, released=(*binding.released, data.node)))
        return
    del state.bindings[binding.epoch]
    state.touched.bindings.add(binding.epoch)
    if binding.eviction is not None and binding.eviction.room_for:
        made_room(state, record, binding.eviction.room_for)
    verdict = data.verdict if demand.verdict is None else demand.verdict
    if binding.eviction is not None and binding.eviction.requeue and demand.wanted:
        move(
            state, record, demand, _WAITING,
            epoch=0, requeues=demand.requeues + 1, verdict=None, sentence="", reasons=(),
        )  # fmt: skip
        return
    if demand.failure and demand.verdict in _START_FAILURES and demand.wanted and _by_itself(binding):
        # It never ran, through no doing of its owner: it waits again, with a back-off (see `rigbook_placer.rules`).
        nodes = [share.node for share in binding.shares]
        failed_on = (*(n for n in demand.failed_on if n not in nodes), *nodes)[-FAILED_ON_MAX:]
        move(
            state, record, demand, _WAITING, epoch=0, requeues=demand.requeues + 1, verdict=None, sentence="",
            reasons=(), failures=demand.failures + 1, failed_ns=record.received_ns, failed_on=failed_on,
        )  # fmt: skip
        return
    move(state, record, demand, _ENDED, epoch=0, verdict=verdict)


def _by_itself(binding: Binding) -> bool:
    """Nobody ordered its stop, but for the rest of a gang when one part of it had ended."""
    return binding.eviction is None or binding.eviction.reason is EvictionReason.FENCED


def _unreleased_bytes(binding: Binding) -> int:
    return sum(
        allotment.memory_bytes
        for share in binding.shares
        if share.node not in binding.released
        for allotment in share.allotments
    )


def _releasing(state: State, record: Record, demand: Demand, binding: Binding, **changes: object) -> None:
    """Desired is stopped (or a stop was ordered): the cards stay held until they are seen free."""
    if demand.phase is not _RELEASING:
        charge(state, binding.project, 0, _unreleased_bytes(binding))
    move(state, record, demand, _RELEASING, **changes)

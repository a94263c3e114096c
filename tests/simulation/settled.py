"""Liveness: what is still to be done in a world, and whether all views of it agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rigbook_ledger.digest import digest
from rigbook_ledger.state import Phase
from rigbook_placer.place import explain, place, signature
from rigbook_placer.sightings import seen_of
from rigbook_schemas.events import Heartbeat
from rigbook_schemas.subjects import LEDGER_STREAM
from rigbook_schemas.values import ReasonCode, Workload
from rigbook_schemas.wire import decode

if TYPE_CHECKING:
    from rigbook_ledger.state import Demand
    from rigbook_placer.feasible import Seen

    from tests.simulation.world import World

__all__ = ["differing", "unsettled"]


def unsettled(world: World) -> list[str]:
    """What keeps the world from being at rest, in words; empty when it is."""
    state = world.auditor.state
    left: list[str] = []
    if world.happenings.left():
        left.append("clients and operators are not through")
    stream = world.server.streams.get(LEDGER_STREAM)
    if stream is None:
        return ["there is no ledger stream"]
    for name, program in world.programs.items():
        if not program.up:
            left.append(f"{name} is down")
            continue
        if program.kind == "agent":
            continue
        folded = program.folded()
        if folded is None or folded.position != stream.last_seq:
            left.append(f"{name} has read to {folded.position if folded else 0} of {stream.last_seq}")
    seen = _seen(world)
    for did, demand in state.demands.items():
        told = _of_demand(world, did, demand, seen)
        if told:
            left.append(told)
    for drift in state.drifts.values():
        left.append(f"drift {drift.drift}: {drift.sentence}")
    for node in state.nodes.values():
        if node.unreachable_ns:
            left.append(f"node {node.name} is unreachable on the books")
    if state.unknown_open:
        left.append("an unknown event is not accepted")
    return left + _leftovers(world)


def _seen(world: World) -> dict[str, Seen]:
    seen: dict[str, Seen] = {}
    for m in world.server.last_heartbeats().values():
        data = decode(m.seq, m.subject, m.received_ns, m.body).data
        if isinstance(data, Heartbeat):
            seen.update(seen_of(data))
    return seen


def _of_demand(world: World, did: str, demand: Demand, seen: dict[str, Seen]) -> str:
    state = world.auditor.state
    what = f"{did} is {demand.phase}"
    match demand.phase:
        case Phase.WAITING:
            now_ns = world.clock.now_ns()
            told = {r.code for r in demand.reasons}
            if ReasonCode.BEHIND_OTHERS in told and len(state.waiting) > 1:
                return ""  # its turn comes after another one's: whose, the placers decide
            if place(state, demand.spec, seen, world.plan.policy, now_ns=now_ns) is not None:
                return f"{what}, and would fit now"
            reasons = explain(state, demand.spec, seen, world.plan.policy, now_ns=now_ns)
            if not demand.reasons:
                return f"{what}, and nobody says why"
            if signature(reasons) != signature(demand.reasons):
                return (
                    f"{what}: told {sorted(signature(demand.reasons))}, true is {sorted(signature(reasons))}"
                )
        case Phase.BOUND | Phase.STARTING | Phase.RUNNING:
            if demand.phase is not Phase.RUNNING:
                return what
            if demand.spec.workload is not Workload.SERVICE and any(
                w.startswith(("for:", "fail:")) for c in demand.spec.components for w in c.command
            ):
                return what
            return _not_running(world, what, demand)
        case Phase.RELEASING:
            return what
    return ""


def _not_running(world: World, what: str, demand: Demand) -> str:
    """Bound and running on the books: is it, on its cards and on no other?"""
    binding = world.auditor.state.bindings[demand.epoch]
    for share in binding.shares:
        machine = world.machines[share.node]
        alive = machine.alive(binding.epoch)
        components = {proc.component for proc in alive}
        missing = {c.name for c in share.components} - components
        if missing:
            return f"{what}, and {sorted(missing)} of it do not run on {share.node}"
        allotted = {a.card for a in share.allotments}
        held = {card for proc in alive for card in proc.memory}
        if held != allotted:
            return f"{what}, bound to {sorted(allotted)}, and holds {sorted(held)}"
    return ""


def _leftovers(world: World) -> list[str]:
    """Whatever lives on a node and has no right to."""
    left: list[str] = []
    claims = world.auditor.claims
    for name, machine in world.machines.items():
        for proc in machine.procs.values():
            if proc.epoch is None:
                continue
            claim = claims.get(proc.epoch)
            if claim is None or name not in claim.parts or claim.demand != proc.demand:
                left.append(
                    f"pid {proc.pid} of epoch {proc.epoch} ({proc.demand}) lives on {name} without a right"
                )
    return left


def differing(world: World, true: str) -> list[str]:
    """Programs whose folded state is not that of a fresh fold of the log."""
    told: list[str] = []
    for name, program in world.programs.items():
        if program.kind == "agent":
            continue
        state = program.folded()
        if state is None or digest(state) != true:
            told.append(
                f"{name} has {'nothing' if state is None else digest(state)}, a fresh fold gives {true}"
            )
    if digest(world.auditor.state) != true:
        told.append("the auditor's fold differs")
    return told

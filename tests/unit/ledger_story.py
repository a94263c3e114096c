"""Stories over the fold: `Story().given(*events).when(*events).then(...)`.

Every event goes the whole way of a real one: payload, envelope, bytes, record, `evolve`. Sequence and
receive time count up by themselves. Where an event must name the epoch of a binding, the builders below
look it up when the event is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from rigbook_ledger.audit import audit
from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import State
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas import values as v
from rigbook_schemas.wire import Draft, decode, encode, rfc3339

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rigbook_ledger.state import Finding, Phase
    from rigbook_schemas.wire import Record

START_NS = 1_790_000_000 * 10**9
SECOND_NS = 10**9
CARD_BYTES = 48 * v.GIB


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes as they stand on the bus."""

    subject: str
    body: bytes


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """An event told in an unusual way: on another subject, with another id or time."""

    data: e.Payload | Callable[[State], e.Payload]
    subject: str = ""
    id: str = ""
    time: str | None = None
    causation: str = ""


Late = Callable[[State], e.Payload]
Step = e.Payload | Told | Raw | Late


def subject_of(data: e.Payload) -> str:
    """Where an event of this payload belongs."""
    match data:
        case e.DemandRaised() | e.DemandWithdrawn():
            return subjects.demand(data.project)
        case e.Bound() | e.Adopted():
            return subjects.bind(tuple(share.node for share in data.shares))
        case e.Deferred() | e.Refused():
            return subjects.verdict(data.project)
        case e.EvictionOrdered():
            return subjects.evict(data.nodes)
        case e.Started() | e.Ready() | e.Unready() | e.Exited() | e.EvictionAnswered():
            return subjects.run(data.node)
        case e.Released():
            return subjects.release(data.node)
        case e.NodeJoined() | e.NodeUnreachable() | e.NodeRecovered():
            return subjects.node(data.node)
        case e.DriftDetected() | e.DriftCleared():
            return subjects.drift(data.node)
        case e.Heartbeat():
            return subjects.heartbeat(data.node)
        case _:
            return subjects.policy("rule")


class Story:
    """A log that grows, and the state it folds to."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state or State()
        self.log: list[Record] = []
        self._findings_before = self.state.finding_count

    def tell(self, step: Step) -> Record:
        """Append one event and fold it."""
        seq = self.state.position + 1
        received_ns = START_NS + seq * SECOND_NS
        record = written(step, self.state, seq, received_ns)
        self.log.append(record)
        self.state = evolve(self.state, record)
        return record

    def given(self, *steps: Step) -> Story:
        """What happened before; nothing of it is out of order."""
        self.when(*steps)
        assert not self.findings, f"the story begins with findings: {self.findings}"
        self.state.touched.clear()
        return self

    def when(self, *steps: Step) -> Story:
        """What happens now."""
        self._findings_before = self.state.finding_count
        for step in steps:
            self.tell(step)
        return self

    def then(
        self,
        phases: Mapping[str, Phase] | None = None,
        *,
        findings: Sequence[str] = (),
        holders: Mapping[str, Sequence[str]] | None = None,
        used: Mapping[str, tuple[int, int]] | None = None,
        audited: Sequence[str] = (),
    ) -> Story:
        """What must be true afterwards.

        `phases` by demand; `findings` that `when` left, by code; `holders` of cards, by demand; `used` =
        (used, releasing) bytes by project; `audited` = what the audit says, by default nothing.
        """
        assert [finding.code for finding in self.findings] == list(findings), self.findings
        for demand, phase in (phases or {}).items():
            assert self.state.demands[demand].phase is phase, demand
        for card, demands in (holders or {}).items():
            there = self.state.cards.get(card)
            held = [self.state.bindings[epoch].demand for epoch in there.holders] if there else []
            assert held == list(demands), card
        for project, expected in (used or {}).items():
            sums = self.state.projects[project]
            assert (sums.used_bytes, sums.releasing_bytes) == expected, project
        assert [finding.code for finding in audit(self.state)] == list(audited), audit(self.state)
        return self

    @property
    def findings(self) -> list[Finding]:
        """Left since the last `when` began."""
        new = self.state.finding_count - self._findings_before
        return self.state.findings[-new:] if new else []


def written(step: Step, state: State, seq: int, received_ns: int) -> Record:
    """The step as the record that a reader of the stream would get."""
    if isinstance(step, Raw):
        return decode(seq, step.subject, received_ns, step.body)
    told = step if isinstance(step, Told) else Told(data=step)
    data = told.data if isinstance(told.data, e.Payload) else told.data(state)
    time = rfc3339(received_ns) if told.time is None else told.time
    draft = Draft(
        data=data, id=told.id or f"event-{seq}", source="test/story", time=time, causation=told.causation
    )
    return decode(seq, told.subject or subject_of(data), received_ns, encode(draft))


# -- events -------------------------------------------------------------------------------------


def card(node: str, index: int = 0) -> str:
    """UUID of a card of a node."""
    return f"GPU-{node}-{index}"


def inventory(node: str, index: int = 0, memory_bytes: int = CARD_BYTES, **more: object) -> v.CardInventory:
    return msgspec.structs.replace(
        v.CardInventory(uuid=card(node, index), index=index, model="RTX 4090", memory_bytes=memory_bytes),
        **more,
    )


def joined(node: str = "a", cards: int = 2, **more: object) -> e.NodeJoined:
    told = e.NodeJoined(node=node, incarnation="i-1", cards=tuple(inventory(node, i) for i in range(cards)))
    return msgspec.structs.replace(told, **more)


def changed(node: str = "a", cards: Sequence[v.CardInventory] = (), **more: object) -> e.NodeChanged:
    told = e.NodeChanged(node=node, incarnation="i-1", cards=tuple(cards))
    return msgspec.structs.replace(told, **more)


def raised(demand: str = "d", project: str = "p", *, probe: bool = False, **more: object) -> e.DemandRaised:
    component = v.Component(command=("serve",), probe=v.Probe(port=80) if probe else None)
    told = e.DemandRaised(
        demand=demand,
        project=project,
        owner=v.Owner(name="ada"),
        resources=v.Request(memory_bytes=CARD_BYTES),
        components=(component,),
    )
    return msgspec.structs.replace(told, **more)


def withdrawn(demand: str = "d", project: str = "p") -> e.DemandWithdrawn:
    return e.DemandWithdrawn(demand=demand, project=project, by="ada")


def bound(
    demand: str = "d",
    *cards: str,
    project: str = "p",
    mode: v.Mode = v.Mode.EXCLUSIVE,
    memory_bytes: int = CARD_BYTES,
    probes: Sequence[str] = (),
) -> e.Bound:
    """A binding to these cards, one share per node they name; `probes` = the nodes whose part has one."""
    nodes: dict[str, list[str]] = {}
    for uuid in cards or (card("a"),):
        nodes.setdefault(uuid.split("-")[1], []).append(uuid)
    return e.Bound(
        demand=demand,
        project=project,
        shares=tuple(share(node, *uuids, mode=mode, memory_bytes=memory_bytes, probe=node in probes)
                     for node, uuids in nodes.items()),
        policy="pack",
    )  # fmt: skip


def share(
    node: str,
    *cards: str,
    mode: v.Mode = v.Mode.EXCLUSIVE,
    memory_bytes: int = CARD_BYTES,
    probe: bool = False,
) -> v.NodeShare:
    return v.NodeShare(
        node=node,
        allotments=tuple(v.Allotment(card=uuid, memory_bytes=memory_bytes, mode=mode) for uuid in cards),
        components=(v.Component(command=("serve",), probe=v.Probe(port=80) if probe else None),),
    )


def epoch_of(state: State, demand: str) -> int:
    return state.demands[demand].epoch_last


def started(demand: str = "d", node: str = "a", attempt: int = 1) -> Late:
    return lambda s: e.Started(demand=demand, epoch=epoch_of(s, demand), node=node, attempt=attempt)


def ready(demand: str = "d", node: str = "a") -> Late:
    return lambda s: e.Ready(demand=demand, epoch=epoch_of(s, demand), node=node)


def unready(demand: str = "d", node: str = "a") -> Late:
    return lambda s: e.Unready(demand=demand, epoch=epoch_of(s, demand), node=node)


def exited(
    demand: str = "d",
    node: str = "a",
    verdict: v.VerdictClass = v.VerdictClass.COMPLETED,
    *,
    final: bool = True,
    attempt: int = 1,
) -> Late:
    return lambda s: e.Exited(
        demand=demand, epoch=epoch_of(s, demand), node=node, verdict=verdict, final=final, attempt=attempt
    )


def released(demand: str = "d", node: str = "a", **more: object) -> Late:
    return lambda s: msgspec.structs.replace(
        e.Released(demand=demand, epoch=epoch_of(s, demand), node=node), **more
    )


def evicted(demand: str = "d", *nodes: str, requeue: bool = False, **more: object) -> Late:
    def told(state: State) -> e.Payload:
        order = e.EvictionOrdered(
            demand=demand,
            epoch=epoch_of(state, demand),
            nodes=nodes or ("a",),
            reason=v.EvictionReason.OPERATOR,
            requeue=requeue,
        )
        return msgspec.structs.replace(order, **more)

    return told

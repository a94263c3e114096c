"""The state that a fold of the log gives: nodes, cards, demands, bindings, projects, policy.

`State` is owned by whoever folds it: `evolve` changes it in place and returns it, so that a million
events cost a million small updates and not a million copies. All values inside are frozen; `fork`
gives an independent state in time proportional to the number of entries.

The values are plain msgspec structs, not `rigbook_schemas.values.Value`: they are made a million times in
a replay, and a class with a metaclass of our own takes three times as long to call (CPython 3.11). Frozen
values hold no cycles, so the garbage collector need not walk them (`gc=False`).

Memory is bounded by what lives, not by what happened: ended demands are kept up to `ENDED_MAX`.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from hashlib import blake2b
from typing import Final

import msgspec
from rigbook_schemas.events import DemandRaised, DriftDetected
from rigbook_schemas.values import (
    DriftKind,
    EvictionReason,
    Labels,
    Mode,
    NodeShare,
    Reason,
    StopScope,
    VerdictClass,
)

__all__ = [
    "CHAIN_RUN",
    "ENDED_MAX",
    "FINDINGS_MAX",
    "TERMINAL",
    "Binding",
    "Card",
    "Demand",
    "Eviction",
    "Finding",
    "Node",
    "Phase",
    "Policy",
    "Project",
    "State",
    "Touched",
    "restore",
    "snapshot",
]

# How many ended demands the fold remembers (for duplicate ids and late events); older ones are in the store.
ENDED_MAX: Final = 10_000
# How many findings the fold remembers; `finding_count` counts all, the store keeps all.
FINDINGS_MAX: Final = 1_000
# The chain is hashed in runs of this many events: one hash per run instead of one per event.
CHAIN_RUN: Final = 256


class Phase(enum.StrEnum):
    """Where a demand stands. One at a time, so "admitted and evicted" cannot be said."""

    WAITING = "waiting"
    BOUND = "bound"  # cards are given, nothing runs yet
    STARTING = "starting"  # runs, and its probes have not said yes yet
    RUNNING = "running"
    RELEASING = "releasing"  # desired is stopped; holds its cards until they are seen free
    ENDED = "ended"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"  # taken back before it ever got a card

    @property
    def terminal(self) -> bool:
        return self in TERMINAL

    @property
    def holding(self) -> bool:
        return self in _HOLDING


TERMINAL: Final = frozenset({Phase.ENDED, Phase.REFUSED, Phase.WITHDRAWN})
_HOLDING: Final = frozenset({Phase.BOUND, Phase.STARTING, Phase.RUNNING, Phase.RELEASING})


class Demand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A demand and where it stands."""

    spec: DemandRaised
    phase: Phase
    raised_seq: int
    raised_ns: int  # the server's clock
    since_seq: int  # when it came into this phase
    since_ns: int
    event_id: str  # the latest event that moved it: what a reaction names as its cause
    traceparent: str = ""
    wanted: bool = True  # desired: True = running, False = stopped
    withdrawn_ns: int = 0
    withdrawn_by: str = ""
    epoch: int = 0  # its live binding, 0 = none
    epoch_last: int = 0  # its latest binding, live or not
    reasons: tuple[Reason, ...] = ()  # why it waits or was refused
    requeues: int = 0
    verdict: VerdictClass | None = None
    sentence: str = ""
    attempt: int = 1
    failures: int = 0  # starts that failed one after the other, each under a binding of its own
    failed_ns: int = 0  # when the last of them ended
    failed_on: tuple[str, ...] = ()  # nodes where they failed, the latest last
    failure: str = ""  # how the last one failed
    room: tuple[str, ...] = ()  # cards that are kept for it since others were evicted for it
    room_ns: int = 0  # since when
    preemptions: int = 0  # how many times others were evicted for it


class Eviction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The latest stop order for a binding."""

    event_id: str
    seq: int
    ordered_ns: int
    reason: EvictionReason
    by: str
    scope: StopScope
    requeue: bool
    grace_seconds: float
    room_for: str = ""  # the demand that is to have the cards


class Binding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A recorded right to cards, named by its epoch: the stream sequence of `bound`."""

    epoch: int
    demand: str
    project: str
    mode: Mode
    shares: tuple[NodeShare, ...]
    bound_ns: int
    event_id: str
    policy: str
    memory_bytes: int  # of all allotments
    started: tuple[str, ...] = ()  # nodes
    ready: tuple[str, ...] = ()
    exited: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    eviction: Eviction | None = None

    def share(self, node: str) -> NodeShare | None:
        for share in self.shares:
            if share.node == node:
                return share
        return None


class Card(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A GPU, named by its NVML UUID."""

    uuid: str
    node: str
    index: int
    model: str
    memory_bytes: int
    holders: tuple[int, ...] = ()  # epochs, oldest first
    reserved_bytes: int = 0
    mode: Mode | None = None  # pinned by the operator; None = what the first binding asks
    usable: bool = True
    why: str = ""
    present: bool = True  # in the node's latest inventory
    enforces: str = ""  # what keeps a binding within its part: mig, mps, compute-mode; empty = nothing does
    quarantined: str | None = None  # the reason given
    parent: str = ""
    # Takes nothing, and serves this mode once nothing holds it ("any" = not pinned).
    switching: str = ""
    held_for: str = ""  # the waiting demand that others were evicted for


class Node(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A machine with an agent."""

    name: str
    incarnation: str
    boot_id: str
    joined_seq: int
    cards: tuple[str, ...] = ()
    labels: Labels = {}
    engines: tuple[str, ...] = ()
    driver_version: str = ""
    cuda_version: str = ""
    driver_ok: bool = True
    driver_text: str = ""
    simulated: bool = False
    memory_bytes: int = 0
    cpus: int = 0
    agent_version: str = ""
    address: str = ""
    cordoned: str | None = None  # the reason given
    unreachable_ns: int = 0  # since when, 0 = heard
    weights: tuple[str, ...] = ()  # model weights on its disk
    container_gpus: str = ""  # why containers get no cards there; empty = they do
    reboot_needed: str = ""  # why nothing but a reboot helps


class Project(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What a project holds. Counts until the release was observed; lowering a quota evicts nobody."""

    used_bytes: int = 0
    releasing_bytes: int = 0
    quota_bytes: int | None = None

    @property
    def over_bytes(self) -> int:
        return 0 if self.quota_bytes is None else max(0, self.used_bytes - self.quota_bytes)


class Policy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Rules set by the operator, fleet-wide."""

    healing: tuple[DriftKind, ...] = ()  # kinds the reaper may heal by itself
    cap_priority: int = 75
    cap_share: float | None = 1 / 3  # of the fleet's memory; None = no cap
    placement: str = ""  # the policy that ranks; "" = the placer's own default
    preemption: bool = True  # demands that ask for it may evict those that allow it
    preemption_run_seconds_min: float = 300.0  # what a victim has had its cards for at least


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Something on the log that should not be there, or a violated invariant. Never stops the fold."""

    seq: int
    code: str
    text: str
    subject: str = ""
    event_id: str = ""


class Touched:
    """What the events since the last `clear` changed: for the audit and the query tables."""

    __slots__ = ("bindings", "cards", "demands", "drifts", "findings", "nodes", "projects")

    def __init__(self) -> None:
        self.demands: set[str] = set()
        self.bindings: set[int] = set()
        self.cards: set[str] = set()
        self.nodes: set[str] = set()
        self.projects: set[str] = set()
        self.drifts: set[str] = set()
        self.findings: list[Finding] = []

    def clear(self) -> None:
        for name in self.__slots__:
            getattr(self, name).clear()


class State:
    """Everything the log says, as of `position`."""

    __slots__ = (
        "bindings",
        "cards",
        "chained",
        "demands",
        "drifts",
        "ended",
        "event_id",
        "finding_count",
        "findings",
        "generation",
        "nodes",
        "own_position",
        "policy",
        "position",
        "projects",
        "received_ns",
        "recovering",
        "touched",
        "unchained",
        "unknown_count",
        "unknown_open",
        "waiting",
    )

    def __init__(self) -> None:
        self.position = 0  # sequence of the last folded event
        self.own_position = 0  # the same for `rig.own.>`: what an ownership append expects
        self.event_id = ""  # of the event at `position`
        self.received_ns = 0
        self.generation = 0  # of the latest recovery of the log; 0 = it was never lost
        self.recovering = 0  # generation of the one under way: deciders wait for its end
        self.chained = b""  # running hash over whole runs of `CHAIN_RUN` entries
        # Entries since then: an event's id, before it its sequence when it is not the one after the last.
        self.unchained: list[str | int] = []
        self.nodes: dict[str, Node] = {}
        self.cards: dict[str, Card] = {}
        self.demands: dict[str, Demand] = {}
        self.waiting: dict[str, None] = {}  # ids in phase waiting, in the order they came into it
        # Ids in a terminal phase, oldest first. An OrderedDict: to take the oldest of a dict means to walk over
        # all that were taken before.
        self.ended: OrderedDict[str, None] = OrderedDict()
        self.bindings: dict[int, Binding] = {}  # live ones
        self.projects: dict[str, Project] = {}
        self.policy = Policy()
        self.drifts: dict[str, DriftDetected] = {}  # open ones
        self.findings: list[Finding] = []
        self.finding_count = 0
        self.unknown_count = 0  # events of kinds this code does not know
        # Those of them that may bear on ownership and that no operator has accepted: deciders pause.
        self.unknown_open: dict[int, str] = {}
        self.touched = Touched()

    @property
    def chain(self) -> bytes:
        """A running hash over (position, event id): tells two logs apart. 16 bytes; empty before the first event."""
        return _hash(self.chained, self.unchained) if self.unchained else self.chained

    def link(self) -> None:
        """Hash the entries not hashed yet into the chain. Only at the end of a run, or two folds would differ."""
        self.chained = _hash(self.chained, self.unchained)
        self.unchained.clear()

    def fork(self) -> State:
        """An independent state with the same content."""
        other = State()
        for name in self.__slots__:
            mine = getattr(self, name)
            if isinstance(mine, (dict, list)):
                setattr(other, name, mine.copy())
            elif name != "touched":
                setattr(other, name, mine)
        return other

    def holders_of(self, card: Card) -> list[Binding]:
        return [self.bindings[epoch] for epoch in card.holders if epoch in self.bindings]

    def mode_of(self, card: Card) -> Mode | None:
        """The mode the card serves: pinned, or that of its bindings; None = free to choose."""
        if card.mode is not None:
            return card.mode
        for epoch in card.holders:
            return self.bindings[epoch].mode
        return None

    def find_demand(self, name: str) -> Demand | None:
        """By id; or by name, the live one first, else the latest."""
        if name in self.demands:
            return self.demands[name]
        found: Demand | None = None
        for demand in self.demands.values():
            if demand.spec.name == name and (
                found is None
                or (found.phase.terminal and not demand.phase.terminal)
                or (found.phase.terminal == demand.phase.terminal and demand.raised_seq > found.raised_seq)
            ):
                found = demand
        return found


def _hash(before: bytes, entries: list[str | int]) -> bytes:
    return blake2b(before + msgspec.msgpack.encode(entries), digest_size=16).digest()


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    position: int
    own_position: int
    event_id: str
    received_ns: int
    generation: int
    recovering: int
    chained: bytes
    unchained: list[str | int]
    nodes: list[Node]
    cards: list[Card]
    demands: list[Demand]
    waiting: list[str]
    ended: list[str]
    bindings: list[Binding]
    projects: dict[str, Project]
    policy: Policy
    drifts: list[DriftDetected]
    findings: list[Finding]
    finding_count: int
    unknown_count: int
    unknown_open: dict[int, str]


_snapshots: Final = msgspec.msgpack.Decoder(_Snapshot)


def snapshot(state: State) -> bytes:
    """The state as bytes: a deletable cache, with a format that belongs to this code version."""
    return msgspec.msgpack.encode(
        _Snapshot(
            position=state.position,
            own_position=state.own_position,
            event_id=state.event_id,
            received_ns=state.received_ns,
            generation=state.generation,
            recovering=state.recovering,
            chained=state.chained,
            unchained=state.unchained,
            nodes=list(state.nodes.values()),
            cards=list(state.cards.values()),
            demands=list(state.demands.values()),
            waiting=list(state.waiting),
            ended=list(state.ended),
            bindings=list(state.bindings.values()),
            projects=state.projects,
            policy=state.policy,
            drifts=list(state.drifts.values()),
            findings=state.findings,
            finding_count=state.finding_count,
            unknown_count=state.unknown_count,
            unknown_open=state.unknown_open,
        )
    )


def restore(data: bytes) -> State:
    """The state of a snapshot. Raises msgspec.MsgspecError when it is not one of this code version."""
    saved = _snapshots.decode(data)
    state = State()
    state.position, state.own_position = saved.position, saved.own_position
    state.event_id, state.received_ns = saved.event_id, saved.received_ns
    state.generation, state.recovering = saved.generation, saved.recovering
    state.chained, state.unchained = saved.chained, saved.unchained
    state.nodes = {node.name: node for node in saved.nodes}
    state.cards = {card.uuid: card for card in saved.cards}
    state.demands = {demand.spec.demand: demand for demand in saved.demands}
    state.waiting = dict.fromkeys(saved.waiting)
    state.ended = OrderedDict.fromkeys(saved.ended)
    state.bindings = {binding.epoch: binding for binding in saved.bindings}
    state.projects = saved.projects
    state.policy = saved.policy
    state.drifts = {drift.drift: drift for drift in saved.drifts}
    state.findings = saved.findings
    state.finding_count, state.unknown_count = saved.finding_count, saved.unknown_count
    state.unknown_open = saved.unknown_open
    return state

"""Event payloads: the `data` of each CloudEvent. One class per kind, past tense, one author each.

The class docstring's first line is the kind's entry in the AsyncAPI document and the glossary.
A new field needs a default. A changed meaning needs a new version and an upcast (`upcasts.py`).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rigbook_schemas.values import (
    Boundary,
    Bytes,
    CardBaseline,
    CardInventory,
    CardObservation,
    CardSeen,
    CheckpointAnswer,
    Component,
    ComponentEnd,
    ComponentObservation,
    DriftKind,
    EvictionReason,
    Evidence,
    Identity,
    Labels,
    Mode,
    NodeShare,
    Owner,
    Pressure,
    Reason,
    Request,
    Restart,
    Seconds,
    Sequence,
    Small,
    Starting,
    StopScope,
    Text,
    Token,
    Unreleased,
    Usage,
    Value,
    VerdictClass,
    Window,
    Workload,
)

__all__ = [
    "Adopted",
    "Bound",
    "Deferred",
    "DemandRaised",
    "DemandWithdrawn",
    "DriftCleared",
    "DriftDetected",
    "EvictionAnswered",
    "EvictionOrdered",
    "Exited",
    "GpuQuarantined",
    "GpuRestored",
    "HealingSet",
    "Heartbeat",
    "LogRecovered",
    "ModeSet",
    "NodeChanged",
    "NodeCordoned",
    "NodeJoined",
    "NodeRecovered",
    "NodeUncordoned",
    "NodeUnreachable",
    "Payload",
    "PlacementSet",
    "PreemptionSet",
    "PriorityCapped",
    "QuotaSet",
    "Ready",
    "Refused",
    "Released",
    "SequenceSkipped",
    "Started",
    "UnknownAccepted",
    "Unready",
]

Priority = Annotated[int, Meta(ge=0, le=100)]
Position = Sequence


class Payload(Value):
    """Root of all event payloads."""


# -- client -------------------------------------------------------------------------------------


class DemandRaised(Payload):
    """An owner asks for GPU memory, and says what shall run on it."""

    demand: Token  # unique for ever; `name` may be used again
    project: Token
    owner: Owner
    resources: Request
    components: Annotated[tuple[Component, ...], Meta(min_length=1, max_length=64)]
    name: Annotated[str, Meta(max_length=63)] = ""
    workload: Workload = Workload.BATCH
    purpose: Text = ""
    priority: Priority = 50
    max_run_seconds: Seconds | None = None
    restart: Restart = Restart()
    preemptible: bool = False  # may be evicted to place another demand; it is asked to save, and waits again
    labels: Labels = {}
    preempts: bool = False  # may evict preemptible demands of lower priority, if it fits afterwards
    placement: Annotated[str, Meta(max_length=32)] = (
        ""  # policy that ranks for it; "" = the operator's default
    )
    windows: Annotated[
        tuple[Window, ...], Meta(max_length=32)
    ] = ()  # runs only inside of these; () = any time
    # Its cards stood idle for this long: it is stopped, after a notice. None = the owner is told, and it stays.
    idle_seconds_max: Seconds | None = None


class DemandWithdrawn(Payload):
    """The owner no longer wants it: desired is stopped from here on."""

    demand: Token
    project: Token
    by: str = ""
    reason: Text = ""


# -- placer -------------------------------------------------------------------------------------


class Bound(Payload):
    """Cards are given to a demand. The stream sequence of this event is the binding's epoch."""

    demand: Token
    project: Token
    shares: Annotated[tuple[NodeShare, ...], Meta(min_length=1)]
    policy: str
    policy_version: int = 1
    position: Position = 0  # what the decision was based on
    feasible: Small = 0  # how many other choices there were
    owner: Owner | None = None
    restart: Restart = Restart()
    workload: Workload = Workload.BATCH
    notes: tuple[Reason, ...] = ()  # what was preferred and could not be had
    # What the cards showed when it was decided, as far as it bears on the choice; with `position` and `policy`
    # everything that the decision was made of.
    seen: Annotated[tuple[CardSeen, ...], Meta(max_length=256)] = ()


class Deferred(Payload):
    """A demand must wait, and why. Published only when the reasons change."""

    demand: Token
    project: Token
    reasons: tuple[Reason, ...]
    position: Position = 0


class Refused(Payload):
    """A demand can never be met as it is; it will not be tried again."""

    demand: Token
    project: Token
    reasons: tuple[Reason, ...]
    position: Position = 0


class EvictionOrdered(Payload):
    """The only stop order an agent obeys. Frees nothing by itself."""

    demand: Token
    epoch: Position
    nodes: tuple[Token, ...]
    reason: EvictionReason
    by: str = ""
    grace_seconds: Seconds = 10.0
    deadline: str = ""
    requeue: bool = False
    scope: StopScope = StopScope.COMPONENTS
    text: Text = ""
    # A preemption or drain asks first. Without an answer in time nothing is killed, unless this says so.
    insist: bool = False
    # Preemption: who waits for the room, and the cards that are kept for it from here on.
    room_for: str = ""
    room: tuple[Identity, ...] = ()


# -- node agent ---------------------------------------------------------------------------------


class Started(Payload):
    """All components of a binding's share run on the node."""

    demand: Token
    epoch: Position
    node: Token
    components: tuple[ComponentObservation, ...] = ()
    attempt: Small = 1
    baseline: tuple[CardBaseline, ...] = ()  # its cards right before


class Ready(Payload):
    """All probes of the share say yes."""

    demand: Token
    epoch: Position
    node: Token
    seconds: Seconds = 0.0  # from started to ready


class Unready(Payload):
    """A probe says no where it said yes."""

    demand: Token
    epoch: Position
    node: Token
    component: str = ""
    text: Text = ""


class Exited(Payload):
    """A share's components ended. `final` = the agent will not start them again."""

    demand: Token
    epoch: Position
    node: Token
    verdict: VerdictClass
    confidence: str = "high"  # high, medium, low
    sentence: Text = ""
    ends: tuple[ComponentEnd, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    final: bool = True
    attempt: Small = 1
    boundaries: tuple[Boundary, ...] = ()


class EvictionAnswered(Payload):
    """What a component answered when it was asked to save before a preemption or a drain."""

    demand: Token
    epoch: Position
    node: Token
    component: str
    answer: CheckpointAnswer
    seconds: Seconds = 0.0  # since it was asked
    text: Text = ""


class Released(Payload):
    """The node was seen free of the binding: containers, processes and memory are gone. Or it was forced."""

    demand: Token
    epoch: Position
    node: Token
    forced: bool = False
    by: str = ""
    verdict: VerdictClass = VerdictClass.UNKNOWN
    usage: Usage = Usage()
    text: Text = ""


class NodeJoined(Payload):
    """An agent took up service: the node's whole inventory."""

    node: Token
    incarnation: Identity  # one run of the agent
    boot_id: str = ""
    cards: tuple[CardInventory, ...] = ()
    labels: Labels = {}
    engines: tuple[str, ...] = ()
    driver_version: str = ""
    cuda_version: str = ""
    driver_ok: bool = True
    driver_text: Text = ""
    simulated: bool = False
    memory_bytes: Bytes = 0
    cpus: Small = 0
    agent_version: str = ""
    address: str = ""
    weights: tuple[str, ...] = ()  # names of model weights that the node has on its disk
    container_gpus: Text = ""  # why containers get no cards here; empty = they do, or nobody has tried
    reboot_needed: Text = ""  # why nothing but a reboot helps


class NodeChanged(NodeJoined):
    """The inventory is no longer what it was; the whole new one, and what differs."""

    changes: tuple[str, ...] = ()


class Heartbeat(Payload):
    """The node is alive, and this is what its cards and engines show."""

    node: Token
    incarnation: Identity
    number: Sequence  # counts up within an incarnation
    every_seconds: Seconds = 1.0
    boot_id: str = ""
    cards: tuple[CardObservation, ...] = ()
    components: tuple[ComponentObservation, ...] | None = None  # None = the engine does not answer
    unknown: str = ""
    pressure: Pressure = Pressure()
    unreleased: tuple[Unreleased, ...] = ()  # ended, and not seen free yet
    engine_position: Position = 0  # the agent knows every order for its node up to here
    starting: tuple[Starting, ...] = ()  # components that wait for something before they run


# -- reaper -------------------------------------------------------------------------------------


class NodeUnreachable(Payload):
    """Nothing was heard from the node for longer than the grace, by our own clock. Not: it is dead."""

    node: Token
    silent_seconds: Seconds
    last_heard: str = ""


class NodeRecovered(Payload):
    """The node is heard again."""

    node: Token
    silent_seconds: Seconds = 0.0


class DriftDetected(Payload):
    """Desired, bound and observed differ, past the grace and more than once."""

    drift: Identity
    kind: DriftKind
    node: Token
    sentence: Text
    card: str = ""
    demand: str = ""
    epoch: Position | None = None
    desired: str = ""
    bound: str = ""
    observed: str = ""
    evidence: tuple[Evidence, ...] = ()
    sightings: Small = 0
    since: str = ""
    healing: bool = False  # True: the stop was ordered; False: dry run, or nothing to order
    remedy: Text = ""


class DriftCleared(Payload):
    """The views agree again."""

    drift: Identity
    kind: DriftKind
    node: Token
    how: Text = ""
    seconds: Seconds = 0.0


# -- operator -----------------------------------------------------------------------------------


class QuotaSet(Payload):
    """A project may hold at most this much GPU memory."""

    project: Token
    memory_bytes: Bytes | None  # None = no bound
    by: str = ""
    reason: Text = ""


class ModeSet(Payload):
    """A card serves this mode from here on; None = whatever the first binding on it asks.

    `draining`: from here on it takes no binding, and it serves the mode once the last one was released.
    """

    card: Identity
    mode: Mode | None
    draining: bool = False
    node: str = ""
    by: str = ""
    reason: Text = ""


class NodeCordoned(Payload):
    """No new bindings on the node; what runs, runs on."""

    node: Token
    by: str = ""
    reason: Text = ""


class NodeUncordoned(Payload):
    """The node takes bindings again."""

    node: Token
    by: str = ""
    reason: Text = ""


class GpuQuarantined(Payload):
    """No new bindings on the card."""

    card: Identity
    by: str = ""
    reason: Text = ""


class GpuRestored(Payload):
    """The card takes bindings again."""

    card: Identity
    by: str = ""
    reason: Text = ""


class PriorityCapped(Payload):
    """Demands at or above `priority` may hold at most `share` of the fleet's memory."""

    priority: Priority
    share: Annotated[float, Meta(ge=0, le=1)]
    by: str = ""
    reason: Text = ""


class PlacementSet(Payload):
    """The policy that ranks cards where a demand names none."""

    policy: Annotated[str, Meta(min_length=1, max_length=32)]
    by: str = ""
    reason: Text = ""


class PreemptionSet(Payload):
    """Whether demands may evict others at all, and how long a victim must have had its cards."""

    on: bool
    run_seconds_min: Seconds = 300.0
    by: str = ""
    reason: Text = ""


class HealingSet(Payload):
    """The reaper may (or may no longer) heal this kind of drift by itself."""

    kind: DriftKind
    on: bool
    by: str = ""
    reason: Text = ""


class UnknownAccepted(Payload):
    """The operator has read an event of a kind unknown to this version: deciders may pass it by."""

    seq: Position
    by: str = ""
    reason: Text = ""


class Adopted(Payload):
    """A binding of a log that was lost keeps its right and its epoch, because what it names still runs.

    The epoch is the sequence its `bound` had; `sequence.skipped` sees to it that no other event gets it.
    """

    demand: Token
    epoch: Position
    spec: DemandRaised
    shares: Annotated[tuple[NodeShare, ...], Meta(min_length=1)]
    wanted: bool = True  # False: it was being stopped
    started: tuple[Token, ...] = ()  # nodes
    ready: tuple[Token, ...] = ()
    bound: str = ""  # RFC 3339: when it was bound on the lost log
    told_by: tuple[str, ...] = ()  # what says so: `agent a`, `copy`
    by: str = ""
    reason: Text = ""


class SequenceSkipped(Payload):
    """This sequence stood for another event on a log that was lost; it must never become an epoch."""

    generation: Small  # of the recovery that this belongs to
    by: str = ""


class LogRecovered(Payload):
    """The operator takes this stream for the log from here on. Deciders leave safe mode by this alone."""

    generation: Annotated[int, Meta(ge=1, le=100_000)]  # one more than that of any recovery known before
    stream_created: Identity  # which stream: its creation time, Unix nanoseconds in decimal
    how: Annotated[str, Meta(pattern=r"^(restored|adopted)$")]
    before_created: str = ""  # of the stream that was lost, when it was another one
    common_position: Position = 0  # up to here both logs are the same
    lost_position: Position = 0  # last sequence that anybody knew of the lost log
    lost_events: Position = 0
    lost_kinds: dict[str, int] = {}
    adopted: tuple[Position, ...] = ()  # epochs
    released: tuple[Position, ...] = ()  # epochs, by force
    silent: tuple[Token, ...] = ()  # nodes that did not report and were done without
    by: str = ""
    reason: Text = ""

"""Questions to the ledger over NATS request/reply (`rig.query.<what>`), and the shape of its answers.

A question is a JSON object, an answer too: `Answer`, with a page of items and the cursor of the next
page, or with an error that has a stable code and a remedy. An answer says at which position it was
true, and whether the ledger had caught up with the log.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from rigbook_schemas.events import DriftDetected
from rigbook_schemas.values import (
    CardObservation,
    ComponentObservation,
    NodeShare,
    Owner,
    Pressure,
    Reason,
    Restart,
    Starting,
    Value,
    Workload,
)

__all__ = ["QUESTIONS", "Answer", "Failure", "OfferRow", "Question", "SoonestRow", "VictimRow"]

LIMIT_MAX: Final = 1000


class Question(Value):
    """Every question takes these; each kind reads those that mean something to it."""

    id: str = ""  # demand id or name, node name, card UUID / unique prefix / `node/index` / `GPU-2`
    project: str = ""
    node: str = ""
    card: str = ""
    phase: str = ""  # one phase, or "live" (default for demands), or "all"
    at: str = ""  # RFC 3339: the past moment asked for
    since_seq: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # events after this sequence, it not included
    since: str = ""  # RFC 3339, included
    until: str = ""  # RFC 3339, included
    kinds: tuple[str, ...] = ()  # event kinds, also "unknown" and "malformed"; for findings: codes
    open_only: bool = True
    newest_first: bool = False  # for demands (not live), events, drifts, findings, who
    digest: bool = False  # for status: also the digest and a full audit
    # Read your own writes: answer only once this sequence is folded; `not_ready` when that takes too long.
    position_min: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    cursor: str = ""
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = 200


class Failure(Value):
    code: str  # not_found, ambiguous, bad_question, before_record, not_ready
    text: str
    remedy: str = ""


class Answer(Value):
    """`items` are plain JSON objects of the type that QUESTIONS names for the question."""

    position: int = 0
    position_time: str = ""  # the server's receive time of the event at `position`
    caught_up: bool = False
    safe_mode: bool = False
    notice: str = ""  # what the asker should know about the answer, e.g. that the store cannot be written
    items: tuple[dict[str, Any], ...] = ()
    next: str = ""  # cursor, "" = that was all
    error: Failure | None = None


class DemandRow(Value):
    demand: str
    name: str
    project: str
    owner: str
    contact: str
    purpose: str
    workload: str
    priority: int
    phase: str
    wanted: bool
    raised: str
    since: str
    memory_bytes: int  # per card
    count: int
    mode: str
    epoch: int = 0
    epoch_last: int = 0
    nodes: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()
    verdict: str = ""
    sentence: str = ""
    reasons: tuple[Reason, ...] = ()
    requeues: int = 0
    attempt: int = 1
    withdrawn: str = ""
    withdrawn_by: str = ""
    drifts: tuple[str, ...] = ()
    components: tuple[str, ...] = ()


class BindingRow(Value):
    epoch: int
    demand: str
    project: str
    owner: str
    mode: str
    policy: str
    bound: str
    phase: str
    memory_bytes: int
    shares: tuple[NodeShare, ...]
    eviction: str = ""
    # For an agent that has lost its order book: what it would have known.
    workload: Workload = Workload.BATCH
    restart: Restart = Restart()
    attempt: int = 1  # the start that runs, or is to be the next
    started: tuple[str, ...] = ()  # nodes
    released: tuple[str, ...] = ()  # nodes that hold nothing of it any more
    event_id: str = ""  # of `bound`: what follows from it names it as its cause
    traceparent: str = ""  # of the demand: the trace goes on


class CardRow(Value):
    """A card: what it is, who holds it (bound), and what it shows (observed, may be unknown)."""

    uuid: str
    node: str
    index: int
    model: str
    memory_bytes: int
    status: str  # free, shared, held, cordoned, quarantined, unreachable, unusable, absent
    mode: str = ""
    mode_pinned: bool = False
    reserved_bytes: int = 0
    free_bytes: int = 0  # on the books, less foreign use
    foreign_bytes: int | None = None
    holders: tuple[str, ...] = ()  # demands
    epochs: tuple[int, ...] = ()
    observed: CardObservation | None = None
    observed_age_seconds: float | None = None
    why: str = ""
    simulated: bool = False
    drifts: tuple[str, ...] = ()
    enforces: str = ""  # mig, mps, compute-mode; empty = bindings are accounted and watched, not enforced


class NodeRow(Value):
    name: str
    status: str  # ready, cordoned, unreachable, driver_mismatch
    gpu_model: str
    gpu_count: int
    memory_bytes: int  # GPU memory, all cards
    free_bytes: int
    bindings: int
    simulated: bool = False
    labels: dict[str, str] = {}
    engines: tuple[str, ...] = ()
    driver_version: str = ""
    cuda_version: str = ""
    agent_version: str = ""
    incarnation: str = ""
    boot_id: str = ""
    heard_seconds_ago: float | None = None
    skew_seconds: float | None = None
    why: str = ""
    pressure: Pressure | None = None
    components: tuple[ComponentObservation, ...] | None = None
    starting: tuple[Starting, ...] = ()  # components that wait for something before they run
    weights: tuple[str, ...] = ()  # names of model weights on its disk


class ProjectRow(Value):
    project: str
    used_bytes: int
    releasing_bytes: int
    quota_bytes: int | None
    over_bytes: int


class DriftRow(Value):
    drift: DriftDetected
    seq: int
    detected: str
    cleared: str = ""
    how: str = ""


class FindingRow(Value):
    stream: str
    seq: int
    code: str
    text: str
    subject: str = ""
    event_id: str = ""
    at: str = ""


class EventRow(Value):
    seq: int
    subject: str
    received: str
    kind: str
    id: str
    source: str
    demand: str = ""
    node: str = ""
    causation: str = ""
    traceparent: str = ""
    time: str = ""
    data: dict[str, Any] = {}
    malformed: str = ""
    omitted: str = ""  # why `data` is empty: too large for an answer


class TenureRow(Value):
    """One binding's time on one card: the answer to `who`."""

    card: str
    node: str
    index: int | None
    demand: str
    name: str
    project: str
    owner: str
    contact: str
    purpose: str
    mode: str
    memory_bytes: int
    epoch: int
    bound: str
    released: str = ""  # "" = still
    desired_stopped: str = ""  # since when its desired state is stopped
    verdict: str = ""
    end: str = ""  # how it ended, in words
    forced: bool = False


class StatusRow(Value):
    """What `rigbook doctor` needs of the ledger."""

    instance: str
    version: str
    caught_up: bool
    safe_mode: str  # "" = no, else why
    position: int
    stream_last: int | None
    stream_created: str
    digest: str
    chain: str
    findings: int
    unknown_events: int
    demands: dict[str, int]  # by phase
    nodes: dict[str, int]  # by status
    bindings: int
    open_drifts: int
    audit: tuple[str, ...] = ()
    healing: tuple[str, ...] = ()
    heartbeats_read: int = 0
    started: str = ""
    store: str = ""  # why the store cannot be written, "" = it can
    stream_created_ns: str = ""  # Unix nanoseconds in decimal: which stream it knows
    generation: int = 0  # of the latest recovery it has folded
    written: int = 0  # position up to which questions about the past are answered
    placement: str = ""  # policy set by the operator, "" = the placer's own default
    cap_priority: int = 75
    cap_share: float | None = None  # of the fleet's memory, None = no cap
    preemption: bool = True
    preemption_run_seconds_min: float = 0.0


class RawRow(Value):
    """An event as the ledger keeps it: the second copy, byte for byte."""

    seq: int
    subject: str
    received_ns: int
    body: bytes  # zlib; base64 in JSON


class AgentOrder(Value):
    """A binding's share as an agent has it in its order book."""

    epoch: int
    demand: str
    project: str
    share: NodeShare
    owner: Owner | None = None
    restart: Restart = Restart()
    workload: Workload = Workload.BATCH
    bound: str = ""  # RFC 3339
    started: bool = False
    ready: bool = False
    stopping: bool = False


class AgentReport(Value):
    """The answer of `rig.agent.<node>.orders`: what an agent holds itself bound to, and what runs."""

    node: str
    incarnation: str
    distrusts: str = ""  # why it takes no orders from this log, "" = it does
    position: int = 0  # highest sequence it has read
    event_id: str = ""  # of the event there
    generation: int = 0
    orders: tuple[AgentOrder, ...] = ()
    components: tuple[ComponentObservation, ...] | None = None  # None = the engine does not answer
    unknown: str = ""


class VictimRow(Value):
    """A binding that would be evicted to make room: what a preemption costs."""

    demand: str
    project: str
    owner: str
    epoch: int
    priority: int
    nodes: tuple[str, ...]
    run_seconds: float  # since it was bound: what may be lost


class SoonestRow(Value):
    """The cards that a waiting demand could have first, and what has to end before."""

    nodes: tuple[str, ...]
    cards: tuple[str, ...]
    waits_for: tuple[str, ...]  # demands that hold them
    at: str = ""  # RFC 3339: when they have to end at the latest, "" = unknown
    seconds: float | None = None


class OfferRow(Value):
    """What would be bound now on the cards of one model in one mode."""

    model: str
    mode: str
    memory_bytes: int  # per card, the largest that fits
    cards: int  # how many cards have that much
    count_max: int  # how many of them at most on one node
    nodes: tuple[str, ...]  # some of the nodes that have them
    free_cards: int  # cards with anything free in this mode
    free_bytes: int  # on all of them


# What can be asked, and the type of the items.
QUESTIONS: Final[dict[str, type[msgspec.Struct]]] = {
    "status": StatusRow,
    "demands": DemandRow,
    "demand": DemandRow,
    "bindings": BindingRow,
    "cards": CardRow,
    "nodes": NodeRow,
    "projects": ProjectRow,
    "drifts": DriftRow,
    "findings": FindingRow,
    "events": EventRow,
    "who": TenureRow,
    "raw": RawRow,
}

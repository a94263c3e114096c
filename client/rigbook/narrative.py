"""Events, demands and drifts as the lines a person reads. Pure: values in, words out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas import events as e
from rigbook_schemas.catalogue import BY_KIND
from rigbook_schemas.sentences import gib, sentence
from rigbook_schemas.wire import Malformed, Unknown

if TYPE_CHECKING:
    from rigbook_schemas.events import Payload
    from rigbook_schemas.queries import CardRow, DemandRow, EventRow
    from rigbook_schemas.wire import Record

__all__ = [
    "asked",
    "event_line",
    "holder_line",
    "payload_of",
    "printable",
    "record_line",
    "short_card",
    "standing",
    "stranger_line",
    "told",
]

_UUID_SHOWN: Final = 8


def short_card(uuid: str) -> str:
    """`GPU-5f0f2b52` of `GPU-5f0f2b52-2f0c-...`: a prefix that every command takes."""
    kind, dash, rest = uuid.partition("-")
    return f"{kind}-{rest[:_UUID_SHOWN]}" if dash and len(rest) > _UUID_SHOWN else uuid


def printable(text: str) -> str:
    """The text without control characters: what others wrote on the bus must not steer a terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def asked(memory_bytes: int, count: int, mode: str) -> str:
    """`24.0 GiB x 2 exclusive`."""
    return f"{gib(memory_bytes)}{f' x {count}' if count > 1 else ''} {mode}"


def standing(row: DemandRow) -> str:
    """Why a demand is where it is, in one line; "" when there is nothing to say."""
    if row.drifts:
        return f"drift: {', '.join(row.drifts)}"
    if row.phase in ("waiting", "refused") and row.reasons:
        first, *rest = row.reasons
        return sentence(first) + (f" (and {len(rest)} more)" if rest else "")
    if row.phase == "waiting":
        return "in the queue"
    if row.phase == "releasing":
        return "stopped; holds its cards until they are seen free"
    if row.phase == "ended":
        return row.sentence or row.verdict
    return row.sentence if row.attempt > 1 else ""


def holder_line(row: DemandRow) -> str:
    """Who holds what somebody else waits for, and whether he is on his way out."""
    cards = ", ".join(short_card(card) for card in row.cards)
    who = f"{row.owner}{f' <{row.contact}>' if row.contact else ''}"
    if row.wanted:
        return f"{row.demand} ({who}) holds {cards or 'nothing any more'}: {row.phase}{f', {row.purpose}' if row.purpose else ''}"
    still = f"still holds {cards}" if row.phase == "releasing" else f"is {row.phase}"
    when = f" since {row.withdrawn[:19].replace('T', ' ')} UTC" if row.withdrawn else ""
    drift = f"; drift: {', '.join(row.drifts)}" if row.drifts else ""
    return f"{row.demand} ({who}) {still}; its desired state is stopped{when}{drift}"


def stranger_line(row: CardRow) -> str:
    """Who holds memory of a card without being Rigbook's, and how much; "" when nobody does."""
    shown = row.observed
    if not row.foreign_bytes or shown is None:
        return ""
    strangers = [p for p in shown.processes or () if p.epoch is None]
    if not strangers:
        return ""
    most = max(strangers, key=lambda p: p.memory_bytes or 0)
    program = most.command.split(" ")[0].rpartition("/")[2]
    who = most.belongs or (f"user {most.user}" if most.user else "")
    words = ", ".join(word for word in (program, who) if word)
    more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
    return f"others hold {gib(row.foreign_bytes)}: pid {most.pid}{f' ({words})' if words else ''}{more}"


def payload_of(row: EventRow) -> Payload | None:
    """The payload of an event that came as plain values; None when this version cannot read it."""
    kind = BY_KIND.get(row.kind)
    if kind is None:
        return None
    try:
        return msgspec.convert(row.data, kind.payload)
    except msgspec.ValidationError:
        return None


def event_line(row: EventRow) -> str:
    """One event in words."""
    if row.malformed:
        return f"malformed: {row.malformed}"
    payload = payload_of(row)
    return told(payload) if payload is not None else "of a kind or version this command does not know"


def record_line(record: Record) -> str:
    """The same for a record read from the log itself."""
    match record.data:
        case Malformed(code, text):
            return f"{code}: {text}"
        case Unknown(kind):
            return f"unknown kind {kind}"
        case payload:
            return told(payload)


def told(payload: Payload) -> str:  # one branch per kind, nothing else
    """What the event says, in one line."""
    match payload:
        case e.DemandRaised(resources=r):
            parts = ", ".join(component.name for component in payload.components)
            return f"{payload.owner.name} asks for {asked(r.memory_bytes, r.count, r.mode)} to run {parts}"
        case e.DemandWithdrawn():
            return f"{payload.by or 'the owner'} wants it stopped{_because(payload.reason)}"
        case e.Bound():
            cards = [
                f"{short_card(a.card)} of {share.node} ({gib(a.memory_bytes)} {a.mode})"
                for share in payload.shares
                for a in share.allotments
            ]
            return f"bound to {', '.join(cards)} by policy {payload.policy}"
        case e.Deferred(reasons=reasons):
            return "waits: " + ("; ".join(sentence(reason) for reason in reasons[:3]) or "no reason given")
        case e.Refused(reasons=reasons):
            return "refused: " + ("; ".join(sentence(reason) for reason in reasons[:3]) or "no reason given")
        case e.EvictionOrdered():
            return (
                f"{payload.by or 'somebody'} orders the stop of {payload.scope} under epoch {payload.epoch}: "
                f"{payload.reason}{_because(payload.text)}"
            )
        case e.Started():
            return f"runs on {payload.node}: {', '.join(c.component for c in payload.components) or 'all components'}"
        case e.Ready():
            return f"ready on {payload.node} after {payload.seconds:.1f} s"
        case e.Unready():
            return f"not ready any more on {payload.node}{_because(payload.text)}"
        case e.Exited():
            again = "" if payload.final else "; it is started again"
            return f"ended on {payload.node}: {payload.verdict} ({payload.confidence}){_because(payload.sentence)}{again}"
        case e.EvictionAnswered():
            return f"{payload.component} on {payload.node}: {payload.answer.replace('_', ' ')} after {payload.seconds:.1f} s{_because(payload.text)}"
        case e.Released():
            how = f"forced by {payload.by or 'somebody'}" if payload.forced else "seen free"
            return f"released on {payload.node}, {how}, after {payload.usage.seconds:.1f} s{_because(payload.text)}"
        case e.NodeChanged():
            return f"node {payload.node} changed: {'; '.join(payload.changes[:3]) or 'its inventory'}"
        case e.NodeJoined():
            simulated = " simulated" if payload.simulated else ""
            return f"node {payload.node} joined with {len(payload.cards)}{simulated} cards"
        case e.Heartbeat():
            return f"node {payload.node} is alive ({payload.number})"
        case e.NodeUnreachable():
            return f"node {payload.node} was not heard for {payload.silent_seconds:.0f} s"
        case e.NodeRecovered():
            return f"node {payload.node} is heard again after {payload.silent_seconds:.0f} s"
        case e.DriftDetected():
            healing = "the stop was ordered" if payload.healing else "dry run: nothing was done"
            return f"drift {payload.kind}: {payload.sentence} ({healing})"
        case e.DriftCleared():
            return f"drift {payload.kind} cleared after {payload.seconds:.1f} s{_because(payload.how)}"
        case _:
            return _rule(payload)


def _rule(payload: Payload) -> str:
    by = getattr(payload, "by", "") or "an operator"
    because = _because(getattr(payload, "reason", ""))
    match payload:
        case e.QuotaSet():
            bound = "no quota" if payload.memory_bytes is None else f"a quota of {gib(payload.memory_bytes)}"
            return f"{by} gives project {payload.project} {bound}{because}"
        case e.ModeSet():
            mode = payload.mode or "whatever is asked first"
            when = " once it is empty, and lets nothing new onto it" if payload.draining else ""
            return f"{by} sets {short_card(payload.card)} to {mode}{when}{because}"
        case e.NodeCordoned():
            return f"{by} cordons node {payload.node}{because}"
        case e.NodeUncordoned():
            return f"{by} opens node {payload.node} again{because}"
        case e.GpuQuarantined():
            return f"{by} quarantines {short_card(payload.card)}{because}"
        case e.GpuRestored():
            return f"{by} takes {short_card(payload.card)} out of quarantine{because}"
        case e.PriorityCapped():
            return f"{by} caps priority {payload.priority} and above at {payload.share:.0%} of the memory{because}"
        case e.PlacementSet():
            return f"{by} has cards ranked by {payload.policy}{because}"
        case e.PreemptionSet():
            how = (
                f"allows preemption after {payload.run_seconds_min:g} s of run time"
                if payload.on
                else "allows no preemption"
            )
            return f"{by} {how}{because}"
        case e.HealingSet():
            return f"{by} switches healing of {payload.kind} {'on' if payload.on else 'off'}{because}"
        case e.Adopted():
            return f"{by} keeps the binding of {payload.demand} under epoch {payload.epoch}, of a log that was lost{because}"
        case e.SequenceSkipped():
            return f"{by} keeps this sequence from becoming an epoch (recovery {payload.generation})"
        case e.LogRecovered():
            return (
                f"{by} takes this stream for the log from here on ({payload.how}, recovery {payload.generation}): "
                f"{payload.lost_events} events lost, {len(payload.adopted)} bindings kept{because}"
            )
        case e.UnknownAccepted():
            return f"{by} accepts the unknown event {payload.seq}{because}"
        case _:
            return type(payload).__name__


def _because(text: str) -> str:
    return f": {text}" if text else ""

"""What one heartbeat shows of a node, ordered by epoch and card, with what it does *not* show. Pure.

Unknown is a value: a card whose processes could not be read, whose sample is marked or too old, and an
engine that did not answer are listed as not known; nothing is concluded from them.

Clocks: `received_ns` is the server's, the same that stamps the ledger's events, so the two compare.
`sent` and each card's `as_of` are the node's: only their difference is used, as the age of the sample.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec
from rigbook_schemas.events import Heartbeat
from rigbook_schemas.values import ComponentObservation
from rigbook_schemas.wire import instant

if TYPE_CHECKING:
    from rigbook_schemas.values import CardObservation, ProcessObservation

__all__ = ["Beat", "Hold", "Observed", "observe"]


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat as it was received."""

    heartbeat: Heartbeat
    received_ns: int  # the server's clock, Unix ns
    sent: str = ""  # the node's clock, RFC 3339: the event's own time


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a card."""

    card: str
    pid: int
    memory_bytes: int | None  # None = the driver cannot tell
    component: str
    container: str
    user: str
    command: str
    since: str
    as_of: str  # the node's clock
    belongs: str = ""  # a stranger's container, compose project, pod, unit or session


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """One heartbeat, indexed. Labels are (epoch, demand): an epoch alone may stem from another log."""

    components_known: bool
    cards_known: frozenset[str]  # cards whose processes are known
    observed_ns: int  # the server's clock: nothing in here was seen before this
    running: dict[tuple[int, str], list[ComponentObservation]]
    ended: dict[tuple[int, str], list[ComponentObservation]]  # shown by the engine, nothing of it lives
    holds: dict[tuple[int, str], list[Hold]]
    foreign: dict[str, list[Hold]]  # by card: processes without our labels
    unexplained_bytes: dict[str, int | None]  # by card: used memory that no listed process accounts for


def observe(beat: Beat, *, stale_seconds: float) -> Observed:
    """Index the heartbeat. Card samples older than `stale_seconds` when it was sent are not known."""
    heartbeat = beat.heartbeat
    running: dict[tuple[int, str], list[ComponentObservation]] = defaultdict(list)
    ended: dict[tuple[int, str], list[ComponentObservation]] = defaultdict(list)
    by_pid: dict[int, ComponentObservation] = {}
    for component in heartbeat.components or ():
        # Its first process may have ended while others of it live on, as a daemon does: it runs.
        alive = component.running or bool(component.pids)
        (running if alive else ended)[component.epoch, component.demand].append(component)
        by_pid.update(dict.fromkeys(component.pids, component))
    holds: dict[tuple[int, str], list[Hold]] = defaultdict(list)
    foreign: dict[str, list[Hold]] = defaultdict(list)
    unexplained: dict[str, int | None] = {}
    known: set[str] = set()
    oldest_ns = 0
    for card in heartbeat.cards:
        age_ns = _age_ns(beat.sent, card.as_of)
        if card.processes is None or card.unknown or age_ns > stale_seconds * 1e9 or card.uuid in known:
            continue
        known.add(card.uuid)
        oldest_ns = max(oldest_ns, age_ns)
        processes = _once_per_pid(card.processes)
        unexplained[card.uuid] = _unexplained(card, processes)
        for process in processes:
            owner = by_pid.get(process.pid)
            hold = Hold(
                card=card.uuid,
                pid=process.pid,
                memory_bytes=_believable(process.memory_bytes),
                component=process.component or (owner.component if owner else ""),
                container=process.container,
                user=process.user,
                command=process.command,
                since=process.since,
                as_of=card.as_of,
                belongs=process.belongs,
            )
            if process.epoch is not None:
                holds[process.epoch, process.demand].append(hold)
            elif owner is not None:
                holds[owner.epoch, owner.demand].append(hold)
            else:
                foreign[card.uuid].append(hold)
    return Observed(
        components_known=heartbeat.components is not None,
        cards_known=frozenset(known),
        observed_ns=beat.received_ns - oldest_ns,
        running=dict(running),
        ended=dict(ended),
        holds=dict(holds),
        foreign=dict(foreign),
        unexplained_bytes=unexplained,
    )


def _age_ns(sent: str, as_of: str) -> int:
    """Age of a sample when its heartbeat was sent, both on the node's clock; 0 when it does not say."""
    later, earlier = instant(sent), instant(as_of)
    return max(0, later - earlier) if later is not None and earlier is not None else 0


def _once_per_pid(processes: tuple[ProcessObservation, ...]) -> list[ProcessObservation]:
    """A driver may list one process as compute and as graphics; the larger memory figure stands."""
    best: dict[int, ProcessObservation] = {}
    for process in processes:
        before = best.get(process.pid)
        if before is None or (process.memory_bytes or 0) > (before.memory_bytes or 0):
            best[process.pid] = process
    return list(best.values())


def _believable(memory_bytes: int | None) -> int | None:
    """No process holds less than nothing: such a figure is unknown."""
    return None if memory_bytes is None or memory_bytes < 0 else memory_bytes


def _unexplained(card: CardObservation, processes: list[ProcessObservation]) -> int | None:
    """None = a figure is missing, so nothing can be said."""
    if card.memory_used_bytes is None or any(_believable(p.memory_bytes) is None for p in processes):
        return None
    return max(0, card.memory_used_bytes - sum(p.memory_bytes or 0 for p in processes))

"""What `doctor` looks at, and what it makes of it: one line per check, with a remedy where something is wrong."""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_bus.protocol import BusError
from rigbook_schemas import subjects
from rigbook_schemas.events import DemandRaised
from rigbook_schemas.queries import LIMIT_MAX, FindingRow, NodeRow, Question, StatusRow
from rigbook_schemas.values import GIB, Component, Owner, Request

from rigbook import __version__
from rigbook.context import process_start
from rigbook.failures import RigbookFailure
from rigbook.moments import ago
from rigbook.recovery.check import log_findings, mass_loss

if TYPE_CHECKING:
    from rigbook_schemas.queries import DriftRow

    from rigbook.client import Client
    from rigbook.context import Context

__all__ = ["Check", "Grade", "examine"]

# A node that beats once a second and was not heard for this long is worth a look, before the reaper calls it lost.
SILENT_SECONDS: Final = 10.0
PING_SECONDS: Final = 2.0
PINGS_AT_ONCE: Final = 32
SHOWN_MAX: Final = 5


class Grade(enum.StrEnum):
    OK = "ok"
    WARN = "warn"  # worth a look; nothing is refused because of it
    BAD = "bad"  # something does not work; an operator must act


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    grade: Grade
    text: str
    remedy: str = ""


async def examine(client: Client, url: str, context: Context | None) -> list[Check]:
    """Every check that can be made from here; one that fails does not hide the others."""
    checks = [Check(name="bus", grade=Grade.OK, text=f"connected to {url}"), *await _streams(client)]
    status = await _status(client, checks)
    checks += await _log(client)
    checks.append(await _placer(client))
    checks.append(_reaper(context))
    if status is not None:
        checks += await _nodes(client)
        checks += await _drifts(client, status)
        checks += await _findings(client, status)
    return checks


async def _streams(client: Client) -> list[Check]:
    checks: list[Check] = []
    for name in (subjects.LEDGER_STREAM, subjects.HEARTBEAT_STREAM):
        try:
            facts = await client.bus.stream(name)
        except BusError as error:
            checks.append(
                Check(
                    name="stream",
                    grade=Grade.BAD,
                    text=f"{name}: {error}",
                    remedy="is JetStream switched on?",
                )
            )
            continue
        if facts is None:
            checks.append(
                Check(
                    name="stream",
                    grade=Grade.BAD,
                    text=f"{name} does not exist",
                    remedy="start the ledger, which makes it: `rigbook serve ledger`",
                )
            )
            continue
        checks.append(
            Check(
                name="stream",
                grade=Grade.OK,
                text=f"{name}: {facts.messages} messages up to {facts.last_seq}, {facts.bytes / 1024**2:.1f} MiB",
            )
        )
    return checks


async def _status(client: Client, checks: list[Check]) -> StatusRow | None:
    try:
        rows = (await client.ask("status", Question(digest=True))).rows
    except RigbookFailure as failure:
        checks.append(
            Check(
                name="ledger",
                grade=Grade.BAD,
                text=f"does not answer: {failure.why or failure.what}",
                remedy="start it: `rigbook serve ledger`, or `rigbook up`",
            )
        )
        return None
    status: StatusRow = rows[0]
    behind = None if status.stream_last is None else status.stream_last - status.position
    if status.safe_mode:
        text = f"SAFE MODE: {status.safe_mode}"
        checks.append(
            Check(
                name="ledger",
                grade=Grade.BAD,
                text=text,
                remedy="nothing is bound or reaped: see the lines below, and `rigbook recover`",
            )
        )
    elif not status.caught_up:
        checks.append(
            Check(
                name="ledger",
                grade=Grade.WARN,
                text=f"still reading: position {status.position} of {status.stream_last}",
                remedy="wait, and look again",
            )
        )
    else:
        late = f", {behind} behind" if behind else ""
        checks.append(
            Check(
                name="ledger",
                grade=Grade.OK,
                text=f"{status.instance} {status.version}, caught up at position {status.position}{late}, digest {status.digest}",
            )
        )
    if status.store:
        checks.append(
            Check(
                name="store",
                grade=Grade.BAD,
                text=status.store,
                remedy="make room on its disk; the log itself is on the bus",
            )
        )
    if status.audit:
        text = "; ".join(status.audit[:SHOWN_MAX])
        checks.append(
            Check(
                name="audit",
                grade=Grade.BAD,
                text=f"{len(status.audit)} invariants do not hold: {text}",
                remedy="report it with `rigbook events --json`",
            )
        )
    else:
        checks.append(
            Check(name="audit", grade=Grade.OK, text=f"every invariant holds over {status.bindings} bindings")
        )
    if status.version and status.version != __version__:
        checks.append(
            Check(
                name="version",
                grade=Grade.WARN,
                text=f"the ledger is {status.version}, this command {__version__}",
                remedy="upgrade the older one",
            )
        )
    return status


async def _log(client: Client) -> list[Check]:
    try:
        told = await log_findings(client)
    except RigbookFailure as failure:
        return [
            Check(name="log", grade=Grade.WARN, text=f"cannot be looked at: {failure.why or failure.what}")
        ]
    return [
        Check(name=name, grade=Grade.BAD if bad else Grade.OK, text=text, remedy=remedy)
        for name, bad, text, remedy in told
    ]


async def _placer(client: Client) -> Check:
    """A dry run of something small; any answer at all is an answer."""
    probe = DemandRaised(
        demand="doctor", project="doctor", owner=Owner(name="doctor"), resources=Request(memory_bytes=GIB),
        components=(Component(command=("true",)),),
    )  # fmt: skip
    try:
        plan = await client.plan(probe)
    except RigbookFailure as failure:
        return Check(
            name="placer",
            grade=Grade.BAD,
            text=f"does not answer: {failure.why or failure.what}",
            remedy="start it: `rigbook serve placer`, or `rigbook up`",
        )
    return Check(name="placer", grade=Grade.OK, text=f"answers, at position {plan.position}")


def _reaper(context: Context | None) -> Check:
    """It answers no questions; on this machine its process tells, elsewhere nothing does."""
    pid = context.parts.get("reaper") if context is not None and context.alive else None
    if pid is None:
        return Check(
            name="reaper",
            grade=Grade.OK,
            text="not looked at: it answers no questions and does not run under a `rigbook up` here",
        )
    if process_start(pid) is None:
        return Check(
            name="reaper",
            grade=Grade.BAD,
            text=f"its process {pid} is gone",
            remedy=f"see {context.logs if context else 'its log'}",
        )
    return Check(name="reaper", grade=Grade.OK, text=f"runs, pid {pid}")


async def _nodes(client: Client) -> list[Check]:
    rows: list[NodeRow] = await client.rows("nodes")
    if not rows:
        return [
            Check(
                name="nodes",
                grade=Grade.WARN,
                text="no node has joined",
                remedy="`rigbook agent --join URL` on a machine with cards",
            )
        ]
    gate = asyncio.Semaphore(PINGS_AT_ONCE)

    async def look(row: NodeRow) -> Check:
        async with gate:
            return _node(row, answers=await _ping(client, row.name))

    checks = list(await asyncio.gather(*(look(row) for row in rows)))
    why = mass_loss(rows)
    if why:
        remedy = "is the bus reachable from the nodes? the guard ends by itself when they are heard again"
        checks.insert(0, Check(name="mass loss", grade=Grade.BAD, text=why, remedy=remedy))
    return checks


async def _ping(client: Client, node: str) -> bool:
    try:
        await client.bus.request(subjects.agent_query(node, "ping"), b"{}", timeout_seconds=PING_SECONDS)
    except BusError:
        return False
    return True


def _node(row: NodeRow, *, answers: bool) -> Check:
    name = f"node {row.name}"
    heard = "never heard" if row.heard_seconds_ago is None else f"heard {ago(row.heard_seconds_ago)} ago"
    cards = f"{row.gpu_count} {'simulated ' if row.simulated else ''}cards"
    if not answers:
        text = f"its agent does not answer; {heard}"
        return Check(
            name=name,
            grade=Grade.BAD,
            text=text,
            remedy=f"on {row.name}: is `rigbook agent` running, and can it reach the bus?",
        )
    if row.status == "driver_mismatch":
        return Check(
            name=name,
            grade=Grade.BAD,
            text=row.why or "the GPU driver does not answer",
            remedy=f"reboot {row.name}, or reload its driver",
        )
    if row.status == "unreachable" or row.heard_seconds_ago is None or row.heard_seconds_ago > SILENT_SECONDS:
        return Check(
            name=name,
            grade=Grade.WARN,
            text=f"answers, but its heartbeats do not come; {heard}",
            remedy="see the agent's log",
        )
    if row.status != "ready":
        return Check(
            name=name,
            grade=Grade.WARN,
            text=f"{row.status}: {row.why}".rstrip(": "),
            remedy=f"`rigbook node uncordon {row.name}` when it may take bindings again",
        )
    return Check(name=name, grade=Grade.OK, text=f"ready, {cards}, {heard}")


async def _drifts(client: Client, status: StatusRow) -> list[Check]:
    rows: list[DriftRow] = await client.rows("drifts", Question(limit=LIMIT_MAX))
    healed = f"healed by the reaper: {', '.join(status.healing) or 'nothing (dry run)'}"
    if not rows:
        return [Check(name="drift", grade=Grade.OK, text=f"desired, bound and observed agree; {healed}")]
    told = "; ".join(row.drift.sentence for row in rows[:SHOWN_MAX])
    kinds = sorted({str(row.drift.kind) for row in rows if not row.drift.healing})
    remedy = "`rigbook drift list --evidence`" + (
        f"; `rigbook drift heal {kinds[0]} --on` lets the reaper act" if kinds else ""
    )
    return [Check(name="drift", grade=Grade.WARN, text=f"{len(rows)} open: {told}; {healed}", remedy=remedy)]


async def _findings(client: Client, status: StatusRow) -> list[Check]:
    checks: list[Check] = []
    unknown: list[FindingRow] = (
        await client.rows("findings", Question(kinds=("unknown_kind",), limit=LIMIT_MAX))
        if status.unknown_events
        else []
    )
    if unknown:
        seqs = ", ".join(str(row.seq) for row in unknown[-SHOWN_MAX:])
        checks.append(
            Check(name="unknown", grade=Grade.WARN, text=f"{status.unknown_events} events of kinds this version does not know (sequence {seqs})",
                  remedy="upgrade; or, when you have read one and it may be passed by, `rigbook doctor --accept SEQ`")
        )  # fmt: skip
    if not status.findings:
        checks.append(
            Check(name="findings", grade=Grade.OK, text="nothing on the log that should not be there")
        )
        return checks
    latest: list[FindingRow] = (
        await client.ask("findings", Question(newest_first=True, limit=SHOWN_MAX))
    ).rows
    told = "; ".join(f"{row.seq} {row.code}: {row.text}" for row in latest)
    checks.append(
        Check(
            name="findings",
            grade=Grade.WARN,
            text=f"{status.findings} on the log; the latest: {told}",
            remedy="they stop nothing; see who wrote them with `rigbook events`",
        )
    )
    return checks

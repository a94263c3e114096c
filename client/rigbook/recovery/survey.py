"""What is known of a log in trouble: the stream, the ledger's second copy, and what each agent reports."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_bus.protocol import BusError, StreamFacts
from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import State
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas.queries import LIMIT_MAX, AgentReport, Question, RawRow, StatusRow
from rigbook_schemas.wire import Record, decode

from rigbook.failures import NoAnswer, RigbookFailure, of_bus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from rigbook_bus.protocol import Message

    from rigbook.client import Client

__all__ = ["Lost", "Survey", "ask_agents", "survey", "what_was_lost"]

AGENT_SECONDS: Final = 3.0
AGENTS_AT_ONCE: Final = 32
# Heartbeats looked at to find nodes that no log names.
BEATS_MAX: Final = 2_000
READ_SECONDS: Final = 5.0
NAMED_MAX: Final = 20


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the second copy and no longer on the stream."""

    first: int
    last: int
    events: int
    kinds: dict[str, int]
    demands: tuple[str, ...]
    nodes: tuple[str, ...]
    epochs: tuple[int, ...]  # bindings made in there


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """All that could be learned. `before` is the fold of the second copy, `now` that of the stream."""

    facts: StreamFacts | None
    status: StatusRow | None  # the ledger's; None = it does not answer
    common: int  # up to here the stream and the second copy are the same
    copy: tuple[RawRow, ...]  # of the second copy, what is behind `common`
    foreign: int  # events on the stream behind `common`: written after the loss
    before: State | None
    now: State
    agents: dict[str, AgentReport | None]  # by node; None = no answer

    @property
    def safe_mode(self) -> str:
        return self.status.safe_mode if self.status is not None else ""

    @property
    def distrusting(self) -> dict[str, str]:
        return {n: r.distrusts for n, r in self.agents.items() if r is not None and r.distrusts}

    @property
    def troubled(self) -> bool:
        return bool(self.safe_mode or self.distrusting or self.now.recovering)

    @property
    def known_position(self) -> int:
        """The last sequence that anybody who answers knows of."""
        told = [report.position for report in self.agents.values() if report is not None]
        copied = self.status.position if self.status is not None else 0
        return max([copied, self.now.position, *told])

    @property
    def generation(self) -> int:
        """Of the latest recovery that anybody knows of."""
        told = [report.generation for report in self.agents.values() if report is not None]
        status = self.status.generation if self.status is not None else 0
        # One that was begun and not finished is begun again under its own number.
        return max([self.now.generation, self.before.generation if self.before else 0, status, *told])


async def survey(client: Client) -> Survey:
    """Look at everything; takes as long as reading the log does. Raises NoAnswer when the bus is away."""
    try:
        facts = await client.bus.stream(subjects.LEDGER_STREAM)
    except BusError as error:
        raise of_bus(error, "looking at the log") from error
    status = await _status(client)
    last = facts.last_seq if facts is not None else 0
    # A ledger that trusts the log has read it: its copy is the log. In safe mode it stands still.
    copied = status is not None and bool(status.safe_mode)
    common = (
        await _common(client, min(last, status.position), last) if status is not None and copied else last
    )
    copy = tuple([row async for row in _copy(client, common)]) if copied else ()
    if (
        status is not None
        and copied
        and [r.seq for r in copy] != list(range(common + 1, status.position + 1))
    ):
        raise NoAnswer(
            "the second copy could not be read whole",
            why=f"position {status.position}, and the rows from {common + 1} on are {len(copy)}",
            remedy="with several ledgers, stop all but the one that has read furthest, and try again",
            code="copy_incomplete",
        )
    now, before = State(), None
    async for message in _stream(client, last):
        if copied and message.seq == common + 1:
            before = now.fork()
        now = evolve(now, decode(message.seq, message.subject, message.received_ns, message.body))
        now.touched.clear()
    if copied:
        before = before if before is not None else now.fork()
        for row in copy:
            before = evolve(before, decode(row.seq, row.subject, row.received_ns, zlib.decompress(row.body)))
            before.touched.clear()
    nodes = {*now.nodes, *(before.nodes if before is not None else ()), *await _heard(client)}
    return Survey(
        facts=facts,
        status=status,
        common=common,
        copy=copy,
        foreign=last - common,
        before=before,
        now=now,
        agents=await ask_agents(client, nodes),
    )


def what_was_lost(copy: Iterable[RawRow]) -> Lost | None:
    """The events behind the common part, counted; None when there are none."""
    kinds: Counter[str] = Counter()
    demands: dict[str, None] = {}
    nodes: dict[str, None] = {}
    epochs: list[int] = []
    first = last = 0
    for row in copy:
        first, last = first or row.seq, row.seq
        record = decode(row.seq, row.subject, 0, zlib.decompress(row.body))
        kinds[record.kind or "other"] += 1
        demand = getattr(record.data, "demand", "")
        if demand:
            demands[demand] = None
        for node in _nodes_of(record):
            nodes[node] = None
        if isinstance(record.data, e.Bound):
            epochs.append(row.seq)
    if not last:
        return None
    return Lost(
        first=first, last=last, events=sum(kinds.values()), kinds=dict(kinds.most_common()),
        demands=tuple(demands), nodes=tuple(nodes), epochs=tuple(epochs),
    )  # fmt: skip


def _nodes_of(record: Record) -> list[str]:
    node = getattr(record.data, "node", "")
    shares = getattr(record.data, "shares", ())
    return [node] if node else [share.node for share in shares]


async def ask_agents(client: Client, nodes: Iterable[str]) -> dict[str, AgentReport | None]:
    """What each says it must run and does run; None = no answer."""
    gate = asyncio.Semaphore(AGENTS_AT_ONCE)

    async def ask(node: str) -> AgentReport | None:
        async with gate:
            try:
                reply = await client.bus.request(
                    subjects.agent_query(node, "orders"), b"{}", timeout_seconds=AGENT_SECONDS
                )
                return msgspec.json.decode(reply, type=AgentReport)
            except (BusError, msgspec.MsgspecError):
                return None

    names = sorted(nodes)
    return dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))


async def _status(client: Client) -> StatusRow | None:
    try:
        row: StatusRow = (await client.ask("status")).rows[0]
    except RigbookFailure:
        return None
    return row


async def _common(client: Client, high: int, last: int) -> int:
    """The last sequence at which both hold the same event. Each only grows, so they part once."""
    if not last:
        return 0
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        there = await client.bus.message(subjects.LEDGER_STREAM, middle)
        rows: list[RawRow] = (await client.ask("raw", Question(since_seq=middle - 1, limit=1))).rows
        same = bool(rows) and there is not None and rows[0].seq == middle
        if same and there is not None and zlib.decompress(rows[0].body) == there.body:
            low = middle
        else:
            high = middle - 1
    return low


async def _copy(client: Client, after: int) -> AsyncGenerator[RawRow, None]:
    question = Question(since_seq=after, limit=LIMIT_MAX)
    while True:
        page = await client.ask("raw", question)
        for row in page.rows:
            yield row
        if not page.answer.next:
            return
        question = msgspec.structs.replace(question, cursor=page.answer.next)


async def _stream(client: Client, last: int) -> AsyncGenerator[Message, None]:
    if not last:
        return
    tail = await client.bus.tail(subjects.LEDGER_STREAM, start_seq=1)
    try:
        while True:
            messages = await tail.batch(max_messages=2_000, wait_seconds=READ_SECONDS)
            if not messages:
                raise NoAnswer(
                    f"the stream said that it ends at {last}, and its events do not come",
                    remedy="try again",
                    code="stream_unreadable",
                )
            for message in messages:
                if message.seq <= last:
                    yield message
                if message.seq >= last:
                    return
    finally:
        await tail.close()


async def _heard(client: Client) -> set[str]:
    """Nodes with a heartbeat on the stream of heartbeats."""
    try:
        facts = await client.bus.stream(subjects.HEARTBEAT_STREAM)
        if facts is None or not facts.messages:
            return set()
        tail = await client.bus.tail(
            subjects.HEARTBEAT_STREAM, start_seq=max(facts.first_seq, facts.last_seq - BEATS_MAX)
        )
        try:
            found: set[str] = set()
            while messages := await tail.batch(max_messages=BEATS_MAX, wait_seconds=0.3):
                found |= {message.subject.rpartition(".")[2] for message in messages}
                if messages[-1].seq >= facts.last_seq:
                    break
            return found
        finally:
            await tail.close()
    except BusError:
        return set()

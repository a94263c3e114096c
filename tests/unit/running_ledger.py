"""A ledger service running over the in-memory server, with a clock that only the test moves.

Events are told in the words of `ledger_story`; they go through the bus, and the story folds the same
bytes beside the service, so that the test can name epochs and compare digests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import msgspec
from rigbook_bus.memory import MemoryBus
from rigbook_bus.memory_server import MemoryServer
from rigbook_ledger.evolve import evolve
from rigbook_ledger.service import Options, serve
from rigbook_ledger.state import State
from rigbook_ledger.store import Store
from rigbook_ledger.streams import ensure_streams
from rigbook_schemas import subjects
from rigbook_schemas.queries import QUESTIONS, Answer
from rigbook_schemas.wire import Draft, decode, encode, rfc3339

from tests.unit.ledger_story import START_NS, Raw, Told, subject_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from pathlib import Path

    from rigbook_bus.telemetry import Telemetry
    from rigbook_schemas.events import Payload

    from tests.unit.ledger_story import Step


class Hands:
    """A clock whose hands the test moves; a sleep moves them too, and takes a millisecond at most."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now_ns(self) -> int:
        return START_NS + int(self.seconds * 1e9)

    def monotonic(self) -> float:
        return self.seconds

    def move(self, seconds: float) -> None:
        self.seconds += seconds

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.001))


class World:
    """A server, a client on it, and what was told so far."""

    def __init__(self, server: MemoryServer, client: MemoryBus, clock: Hands) -> None:
        self.server = server
        self.client = client
        self.clock = clock
        self.state = State()
        self.number = 0

    async def tell(self, *steps: Step) -> int:
        """Append each event, one second after the other. Returns the last one's sequence."""
        seq = self.state.position
        for step in steps:
            self.clock.move(1.0)
            self.number += 1
            subject, body, mid = self._written(step)
            seq = (await self.client.append(subject, body, message_id=mid)).seq
            self.state = evolve(self.state, decode(seq, subject, self.clock.now_ns(), body))
        return seq

    async def beat(self, data: Payload, subject: str = "", body: bytes = b"", time: str = "") -> int:
        """Append a heartbeat, or any bytes on a heartbeat subject."""
        self.number += 1
        mid = f"beat-{self.number}"
        if not body:
            body = encode(Draft(data=data, id=mid, source="agent", time=time or rfc3339(self.clock.now_ns())))
        return (await self.client.append(subject or subject_of(data), body, message_id=mid)).seq

    def _written(self, step: Step) -> tuple[str, bytes, str]:
        mid = f"event-{self.number}"
        if isinstance(step, Raw):
            return step.subject, step.body, mid
        told = step if isinstance(step, Told) else Told(data=step)
        data = told.data(self.state) if callable(told.data) else told.data
        draft = Draft(
            data=data, id=told.id or mid, source="test", time=told.time or rfc3339(self.clock.now_ns()),
            causation=told.causation,
        )  # fmt: skip
        return told.subject or subject_of(data), encode(draft), draft.id

    async def ask(self, what: str, **question: Any) -> Answer:
        reply = await self.client.request(subjects.query(what), json.dumps(question).encode())
        return msgspec.json.decode(reply, type=Answer)

    async def rows(self, what: str, **question: Any) -> list[Any]:
        """The rows of one page, typed. Waits for everything told so far."""
        question.setdefault("position_min", self.state.position)
        answer = await self.ask(what, **question)
        assert answer.error is None, answer.error
        return [msgspec.convert(item, QUESTIONS[what]) for item in answer.items]

    async def all_pages(self, what: str, **question: Any) -> tuple[list[Any], int]:
        """The rows of all pages, and how many pages there were."""
        found: list[Any] = []
        pages, cursor = 0, ""
        while True:
            answer = await self.ask(what, cursor=cursor, **question)
            assert answer.error is None, answer.error
            found += [msgspec.convert(item, QUESTIONS[what]) for item in answer.items]
            pages, cursor = pages + 1, answer.next
            if not cursor:
                return found, pages

    async def failure(self, what: str, **question: Any) -> tuple[str, str]:
        """(code, text) of the refusal."""
        answer = await self.ask(what, **question)
        assert answer.error is not None, answer
        assert not answer.items
        return answer.error.code, answer.error.text


@contextlib.asynccontextmanager
async def world() -> AsyncGenerator[World]:
    clock = Hands()
    server = MemoryServer(clock)
    client = await MemoryBus.connect(server, name="client")
    try:
        await ensure_streams(client)
        yield World(server, client, clock)
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def ledger(
    world: World,
    data: Path,
    *,
    name: str = "ledger-1",
    telemetry: Telemetry | None = None,
    snapshot_every: int = 20_000,
    open_store: Callable[[Path], Awaitable[Store]] = Store.open,
) -> AsyncGenerator[asyncio.Task[None]]:
    """The service, from its first honest answer until it is cancelled."""
    bus = await MemoryBus.connect(world.server, name=name)
    ready = asyncio.Event()
    options = Options(data=data, instance=name, snapshot_every=snapshot_every)
    task = asyncio.create_task(
        serve(
            bus,
            options,
            clock=world.clock,
            new_id=lambda: "",
            telemetry=telemetry,
            ready=ready,
            open_store=open_store,
        )
    )
    waiting = asyncio.create_task(ready.wait())
    try:
        async with asyncio.timeout(10):
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        yield task
    finally:
        waiting.cancel()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=10)
        assert done, "the service did not end"
        await bus.close()
    if not task.cancelled():
        await task  # it ended by itself: the test must know why

"""The small client: raise and withdraw demands, ask the ledger, follow the log. Needs msgspec and nats-py only.

    async with await Client.connect("nats://127.0.0.1:4222") as rigbook:
        await rigbook.raise_demand(demand)
        for row in await rigbook.rows("demands"):
            print(row.name, row.phase)

Time and ids are parameters, so that a test owns them.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec
from rigbook_bus.protocol import BusConflict, BusError, Expect
from rigbook_schemas import subjects
from rigbook_schemas.events import Bound, DemandWithdrawn
from rigbook_schemas.queries import LIMIT_MAX, QUESTIONS, Answer, OfferRow, Question, SoonestRow, VictimRow
from rigbook_schemas.values import Horizon, Reason
from rigbook_schemas.wire import Draft, decode, encode, rfc3339

from rigbook.failures import Invalid, NoAnswer, WouldConflict, of_answer, of_bus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from rigbook_bus.protocol import Bus, Delivery
    from rigbook_schemas.events import DemandRaised, Payload
    from rigbook_schemas.wire import Record

__all__ = ["Client", "Page", "Plan"]

# Tries of an operator's event against a log that moves: each loser re-reads, so somebody always wins.
POLICY_TRIES_MAX: Final = 20
FOLLOW_BATCH_MAX: Final = 500
CONNECT_SECONDS: Final = 5.0


class Page(NamedTuple):
    """One page of an answer: typed rows, and the answer they came in."""

    rows: list[Any]
    answer: Answer


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The placer's answer to a dry run, true at `position` and no longer."""

    position: int = 0
    bound: Bound | None = None
    reasons: tuple[Reason, ...] = ()
    refused: bool = False
    evict: tuple[VictimRow, ...] = ()  # who would be evicted to make room
    soonest: SoonestRow | None = None  # what has to end so that it fits without that
    error: dict[str, str] | None = None

    @property
    def never(self) -> bool:
        """No card of the known fleet could ever hold it, even when empty."""
        return self.refused or (
            self.bound is None
            and bool(self.reasons)
            and all(r.horizon is not Horizon.LATER for r in self.reasons)
        )


class _Offers(msgspec.Struct, frozen=True, kw_only=True):
    position: int = 0
    items: list[OfferRow] = []
    error: dict[str, str] | None = None


def random_id() -> str:
    """32 hexadecimal digits; 128 random bits."""
    return secrets.token_hex(16)


class Client:
    """One client of the bus. `source` names it in its events, as in `client/ada@host`."""

    def __init__(
        self,
        bus: Bus,
        *,
        source: str = "client/python",
        now_ns: Callable[[], int] = time.time_ns,
        new_id: Callable[[], str] = random_id,
    ) -> None:
        self.bus = bus
        self.source = source
        self._now_ns = now_ns
        self._new_id = new_id

    @classmethod
    async def connect(
        cls,
        url: str = "nats://127.0.0.1:4222",
        *,
        source: str = "client/python",
        credentials: str | Path | None = None,
        wait_seconds: float | None = None,
    ) -> Client:
        """Raises NoAnswer when no bus answers there, or it refuses us."""
        from rigbook_bus.jetstream import JetStreamBus

        try:
            bus = await JetStreamBus.connect(
                url,
                name=source.replace("/", "-"),
                credentials=credentials,
                wait_seconds=wait_seconds or CONNECT_SECONDS,
            )
        except BusError as error:
            raise NoAnswer(
                f"no bus at {_without_secret(url)}",
                why=_without_secret(str(error)),
                remedy="start one with `rigbook up`, or name yours with --nats URL or $RIGBOOK_NATS",
                code=error.code,
            ) from error
        return cls(bus, source=source)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self.bus.close()

    # -- saying -----------------------------------------------------------------------------------

    async def raise_demand(self, demand: DemandRaised) -> int:
        """Put the demand on the log; the sequence it got. Its id must be new. Raises Invalid, NoAnswer."""
        return await self._append(subjects.demand, demand.project, demand, "raising the demand")

    async def withdraw(self, demand: str, project: str, *, by: str = "", reason: str = "") -> int:
        """Desired is stopped from here on. The cards are free when they are *seen* free, which comes later."""
        said = DemandWithdrawn(demand=demand, project=project, by=by, reason=reason)
        return await self._append(subjects.demand, project, said, "withdrawing the demand")

    async def set_policy(self, topic: str, payload: Payload) -> int:
        """An operator's rule. It stands in the order of all ownership decisions, so it is appended against
        the last of them, and decided again when another one came first. Raises WouldConflict, NoAnswer.
        """
        subject = subjects.policy(topic)
        draft = self._draft(payload)
        body = encode(draft)
        for _ in range(POLICY_TRIES_MAX):
            try:
                last = await self.bus.last(subjects.LEDGER_STREAM, subjects.OWN_ALL)
                expect = Expect(last_seq=last.seq if last else 0, filter=subjects.OWN_ALL)
                appended = await self.bus.append(subject, body, message_id=draft.id, expect=expect)
            except BusConflict:
                continue
            except BusError as error:
                raise of_bus(error, "setting the rule") from error
            return appended.seq
        raise WouldConflict(
            f"setting the rule: {POLICY_TRIES_MAX} other decisions came first, one after the other",
            remedy="try again when less is going on",
        )

    async def order(self, nodes: Sequence[str], payload: Payload) -> int:
        """An operator's stop order to the agents of `nodes`."""
        try:
            draft = self._draft(payload)
            appended = await self.bus.append(subjects.evict(tuple(nodes)), encode(draft), message_id=draft.id)
        except BusError as error:
            raise of_bus(error, "ordering the stop") from error
        return appended.seq

    # -- asking -----------------------------------------------------------------------------------

    async def ask(self, what: str, question: Question | None = None) -> Page:
        """One page of the ledger's answer, as typed rows (`rigbook_schemas.queries.QUESTIONS`)."""
        body = msgspec.json.encode(question or Question())
        reply = await self.request(subjects.query(what), body, "the ledger")
        try:
            answer = msgspec.json.decode(reply, type=Answer)
            rows: list[Any] = (
                [] if answer.error else [msgspec.convert(item, QUESTIONS[what]) for item in answer.items]
            )
        except msgspec.MsgspecError as error:
            raise NoAnswer(
                f"the ledger's answer to {what!r} cannot be read",
                why=str(error),
                remedy="do the ledger and this command have the same version? see `rigbook doctor`",
                code="bad_answer",
            ) from error
        if answer.error is not None:
            raise of_answer(answer.error.code, answer.error.text, answer.error.remedy)
        return Page(rows, answer)

    async def whole(self, what: str, question: Question | None = None) -> Page:
        """All pages as one; what it was true of is the first page's."""
        asked = question or Question(limit=LIMIT_MAX)
        first = page = await self.ask(what, asked)
        rows = list(first.rows)
        while page.answer.next:
            page = await self.ask(what, msgspec.structs.replace(asked, cursor=page.answer.next))
            rows += page.rows
        return Page(rows, first.answer)

    async def rows(self, what: str, question: Question | None = None) -> list[Any]:
        """All rows of all pages."""
        return (await self.whole(what, question)).rows

    async def plan(self, demand: DemandRaised) -> Plan:
        """Where the demand would go now, or why not; nothing is recorded."""
        body = msgspec.json.encode({"demand": demand})
        reply = await self.request(subjects.query_plan(), body, "the placer")
        try:
            plan = msgspec.json.decode(reply, type=Plan)
        except msgspec.MsgspecError as error:
            raise NoAnswer("the placer's answer cannot be read", why=str(error), code="bad_answer") from error
        if plan.error is not None:
            raise of_answer(
                plan.error.get("code", "not_ready"), plan.error.get("text", ""), "try again in a moment"
            )
        return plan

    async def offers(self, project: str = "") -> tuple[int, list[OfferRow]]:
        """What would be bound now, by card model and mode, and the position at which that was true."""
        body = msgspec.json.encode({"project": project})
        reply = await self.request(subjects.query_offers(), body, "the placer")
        try:
            answer = msgspec.json.decode(reply, type=_Offers)
        except msgspec.MsgspecError as error:
            raise NoAnswer("the placer's answer cannot be read", why=str(error), code="bad_answer") from error
        if answer.error is not None:
            raise of_answer(
                answer.error.get("code", "not_ready"), answer.error.get("text", ""), "try again in a moment"
            )
        return answer.position, answer.items

    async def request(self, subject: str, body: bytes, who: str, *, timeout_seconds: float = 5.0) -> bytes:
        """A request that tells a person who it was that did not answer. Raises NoAnswer."""
        try:
            return await self.bus.request(subject, body, timeout_seconds=timeout_seconds)
        except BusError as error:
            raise NoAnswer(
                f"{who} does not answer",
                why=str(error),
                remedy="is it running? `rigbook doctor` looks at every part",
                code=error.code,
            ) from error

    # -- following --------------------------------------------------------------------------------

    async def last_seq(self) -> int:
        """Sequence of the last event on the log. Raises NoAnswer when there is no log yet."""
        try:
            facts = await self.bus.stream(subjects.LEDGER_STREAM)
        except BusError as error:
            raise of_bus(error, "looking at the log") from error
        if facts is None:
            raise NoAnswer(
                f"there is no stream {subjects.LEDGER_STREAM} on this bus",
                why="the ledger makes it when it first starts",
                remedy="start the ledger, or check the address of the bus",
                code="no_ledger",
            )
        return facts.last_seq

    async def follow(
        self, *, after_seq: int, filters: Sequence[str] = (), wait_seconds: float | None = None
    ) -> AsyncGenerator[Record, None]:
        """Every event after `after_seq`, in order, as it comes; ends after `wait_seconds` of silence (None = never)."""
        tail = await self._tail(after_seq, filters)
        try:
            while True:
                try:
                    messages = await tail.batch(max_messages=FOLLOW_BATCH_MAX, wait_seconds=wait_seconds)
                except BusError as error:
                    raise of_bus(error, "following the log") from error
                if not messages:
                    return
                for message in messages:
                    yield decode(message.seq, message.subject, message.received_ns, message.body)
        finally:
            await tail.close()

    async def follow_durable(
        self, consumer: str, *, stream: str = subjects.LEDGER_STREAM
    ) -> AsyncGenerator[Record, None]:
        """The same from a durable consumer that was made for this client: its position is kept on the server.

        An event is acknowledged when the next one is asked for, so one that was not dealt with comes again.
        """
        try:
            reader = await self.bus.reader(stream, consumer)
        except BusError as error:
            raise of_bus(error, f"binding to consumer {consumer}") from error
        pending: deque[Delivery] = deque()
        try:
            while True:
                pending.extend(await reader.batch(max_messages=FOLLOW_BATCH_MAX, wait_seconds=30.0))
                while pending:
                    message = pending[0].message
                    yield decode(message.seq, message.subject, message.received_ns, message.body)
                    await pending[0].ack()
                    pending.popleft()
        except BusError as error:
            raise of_bus(error, "following the log") from error
        finally:
            with contextlib.suppress(BusError):  # else they come again after the consumer's ack wait
                for delivery in pending:
                    await delivery.nak()
            await reader.close()

    # -- inside -----------------------------------------------------------------------------------

    async def _tail(self, after_seq: int, filters: Sequence[str]) -> Any:
        try:
            return await self.bus.tail(subjects.LEDGER_STREAM, start_seq=after_seq + 1, filters=filters)
        except BusError as error:
            raise of_bus(error, "following the log") from error

    def _draft(self, payload: Payload) -> Draft:
        return Draft(data=payload, id=self._new_id(), source=self.source, time=rfc3339(self._now_ns()))

    async def _append(self, subject: Callable[[str], str], name: str, payload: Payload, doing: str) -> int:
        draft = self._draft(payload)
        try:
            where, body = subject(name), encode(draft)
        except ValueError as error:  # a name that cannot stand in a subject, or too large an event
            raise Invalid(f"{doing}: {error}", code=str(error).split(":", maxsplit=1)[0]) from error
        try:
            return (await self.bus.append(where, body, message_id=draft.id)).seq
        except BusError as error:
            raise of_bus(error, doing) from error


def _without_secret(url: str) -> str:
    """The address without user, password or token."""
    head, slashes, rest = url.rpartition("://")
    before, at, host = rest.rpartition("@")
    return f"{head}{slashes}***@{host}" if at and before else url

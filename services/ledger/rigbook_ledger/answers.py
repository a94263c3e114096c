"""Answers to `rig.query.*`: a question in, a page of rows out, or a failure with a code and a remedy.

Nothing that is asked can end the service or leave the asker without a word. Instances of the ledger
share the questions (one queue group), so each answer says how far its ledger had read.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import sqlite3
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import structlog
from rigbook_bus.protocol import BusError, Link
from rigbook_schemas.catalogue import BY_KIND
from rigbook_schemas.queries import QUESTIONS, Failure, Question, StatusRow
from rigbook_schemas.subjects import LEDGER_STREAM, query
from rigbook_schemas.wire import instant, rfc3339

from rigbook_ledger import present
from rigbook_ledger.audit import audit
from rigbook_ledger.continuity import recovery_under_way
from rigbook_ledger.digest import digest
from rigbook_ledger.entries import MALFORMED, UNKNOWN
from rigbook_ledger.history import History
from rigbook_ledger.names import Unanswerable, find_card, find_demand, known_node, unknown_card
from rigbook_ledger.state import Phase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus

    from rigbook_ledger.book import Book
    from rigbook_ledger.bookkeeper import Bookkeeper
    from rigbook_ledger.heartbeat import Heartbeats
    from rigbook_ledger.present import Key

__all__ = ["QUEUE", "Answers"]

QUEUE: Final = "ledger"
# The server takes 1 MiB per message; a page ends before its rows fill that.
PAGE_BYTES_MAX: Final = 900 * 1024
# How long a question with `position_min` may wait; shorter than askers do.
POSITION_SECONDS_MAX: Final = 2.0
RETRY_SECONDS: Final = 1.0
# A moment further ahead than this is a slip of the pen, not a clock that differs.
AHEAD_SECONDS_MAX: Final = 60.0

Rows: TypeAlias = "Iterable[tuple[Key, msgspec.Struct | None]]"

_log = structlog.get_logger()
_questions: Final = msgspec.json.Decoder(Question)
_encode: Final = msgspec.json.Encoder().encode


class _Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`queries.Answer` with rows that are encoded already, so that a page can be cut by its bytes."""

    position: int = 0
    position_time: str = ""
    caught_up: bool = False
    safe_mode: bool = False
    notice: str = ""
    items: list[msgspec.Raw] = []
    next: str = ""
    error: Failure | None = None


class Answers:
    """Serves the questions of one ledger."""

    def __init__(
        self, bus: Bus, book: Book, keeper: Bookkeeper, heartbeats: Heartbeats, *, instance: str, clock: Clock
    ) -> None:
        self.open = asyncio.Event()
        self._bus = bus
        self._book = book
        self._keeper = keeper
        self._heartbeats = heartbeats
        self._history = History(book.store)
        self._instance = instance
        self._clock = clock
        self._started = rfc3339(clock.now_ns())
        # the present is answered from the state, the past (True) from what is committed
        self._kinds: dict[str, tuple[bool, Callable[[Question], Awaitable[Rows]]]] = {
            "status": (False, self._status),
            "demands": (False, self._demands),
            "demand": (False, self._demand),
            "bindings": (False, self._bindings),
            "cards": (False, self._cards),
            "nodes": (False, self._nodes),
            "projects": (False, self._projects),
            "drifts": (True, self._drifts),
            "findings": (True, self._findings),
            "events": (True, self._events),
            "who": (True, self._who),
            "raw": (True, self._raw),
        }
        assert self._kinds.keys() == QUESTIONS.keys(), "every question has an answer"

    async def serve(self) -> None:
        """Until cancelled."""
        while True:
            try:
                stop = await self._bus.serve(query("*"), self.answer, queue=QUEUE)
                break
            except BusError as error:
                _log.warning("questions are not answered yet", why=str(error))
                await self._clock.sleep(RETRY_SECONDS)
        self.open.set()
        try:
            await asyncio.Event().wait()
        finally:
            await stop()

    async def answer(self, subject: str, body: bytes) -> bytes:
        """The reply to one request. Never raises for what was asked."""
        answer = _Answer()
        try:
            await self._fill(answer, subject.rpartition(".")[2], body)
        except Unanswerable as error:
            answer.error = error.failure
        except sqlite3.Error as error:
            text = f"the store cannot be read: {error}"
            answer.error = Failure(
                code="not_ready",
                text=text,
                remedy="see the ledger's log; what is asked of the present is still answered",
            )
            _log.error("a question could not be answered", subject=subject, why=text)
        return _encode(answer)

    async def _fill(self, answer: _Answer, what: str, body: bytes) -> None:
        book, keeper = self._book, self._keeper
        kind = self._kinds.get(what)
        if kind is None:
            raise Unanswerable(
                "bad_question", f"{query(what)}: no such question; there are {', '.join(self._kinds)}"
            )
        question = _question(body)
        past = kind[0] or (what == "demands" and not _living(question.phase))
        if question.position_min and not await book.reached(
            question.position_min, written=past, timeout_seconds=POSITION_SECONDS_MAX
        ):
            here = book.written if past else book.state.position
            raise Unanswerable("not_ready", f"position_min: the ledger has read to {here}, not yet to {question.position_min}",
                               "ask again")  # fmt: skip
        state = book.state
        answer.position = book.written if past else state.position
        mark = book.store.mark
        answer.position_time = _time((0 if mark is None else mark.received_ns) if past else state.received_ns)
        answer.caught_up = keeper.caught_up and self._bus.link is Link.CONNECTED
        answer.safe_mode = bool(self._safe_mode)
        answer.notice = "; ".join(text for text in (self._safe_mode, book.trouble) if text)
        _page(answer, await kind[1](question), question.limit)

    @property
    def _safe_mode(self) -> str:
        return self._keeper.safe_mode or recovery_under_way(self._book.state)

    # -- the present ----------------------------------------------------------------------------

    def _view(self) -> present.View:
        return present.View(self._book.state, self._heartbeats.latest, self._clock.monotonic())

    async def _demands(self, q: Question) -> Rows:
        node, card = known_node(self._book.state, q.node), await self._card(q.card, q.node)
        if _living(q.phase):
            return present.demand_rows(
                self._view(),
                name=q.id,
                phase=q.phase or "live",
                project=q.project,
                node=node,
                card=card,
                after=_after(q, tuple[int]),
            )
        return await self._history.demands(
            demand="" if not q.id else await self._demand_id(q.id), phase=q.phase, project=q.project, node=node, card=card,
            after=_after(q, tuple[int, str]), newest_first=q.newest_first, limit=q.limit + 1,
        )  # fmt: skip

    async def _demand(self, q: Question) -> Rows:
        if not q.id:
            raise Unanswerable("bad_question", "id: which demand? its id, the beginning of it, or its name")
        state = self._book.state
        found = find_demand(state, q.id)
        places: Sequence[tuple[str, str]] = ()
        if found is None:
            await self._written(state.position)
            return await self._history.demands(demand=await self._demand_id(q.id), limit=1)
        if found.epoch:
            places = present.places_of(state.bindings[found.epoch])
        elif found.epoch_last:
            await self._written(found.since_seq)
            places = (await self._history.places((found.epoch_last,))).get(found.epoch_last, ())
        drifts = self._view().drifts_of_demand.get(found.spec.demand, ())
        return [((), present.demand_row(found, places, drifts))]

    async def _bindings(self, q: Question) -> Rows:
        return present.binding_rows(
            self._view(), project=q.project, node=known_node(self._book.state, q.node), card=await self._card(q.card, q.node),
            demand=await self._demand_id(q.id), after=_after(q, tuple[int]),
        )  # fmt: skip

    async def _cards(self, q: Question) -> Rows:
        node = known_node(self._book.state, q.node)
        return present.card_rows(
            self._view(),
            node=node,
            card=await self._card(q.id or q.card, node),
            after=_after(q, tuple[str, int, str]),
        )

    async def _nodes(self, q: Question) -> Rows:
        return present.node_rows(
            self._view(), node=known_node(self._book.state, q.id or q.node), after=_after(q, tuple[str])
        )

    async def _projects(self, q: Question) -> Rows:
        return present.project_rows(self._view(), project=q.id or q.project, after=_after(q, tuple[str]))

    async def _status(self, q: Question) -> Rows:
        state, book, keeper = self._book.state, self._book, self._keeper
        stream_last: int | None = None
        try:
            facts = await self._bus.stream(LEDGER_STREAM)
            stream_last = None if facts is None else facts.last_seq
        except BusError:
            pass  # unknown is a value
        row = StatusRow(
            instance=self._instance,
            version=_version(),
            caught_up=keeper.caught_up and self._bus.link is Link.CONNECTED,
            safe_mode=self._safe_mode,
            position=state.position,
            stream_last=stream_last,
            stream_created=_time(book.stream_created_ns),
            digest=digest(state) if q.digest else "",
            chain=state.chain.hex(),
            findings=state.finding_count,
            unknown_events=state.unknown_count,
            demands=present.phase_totals(state),
            nodes=present.node_totals(state),
            bindings=len(state.bindings),
            open_drifts=len(state.drifts),
            audit=tuple(f"{finding.code}: {finding.text}" for finding in audit(state)) if q.digest else (),
            healing=tuple(kind.value for kind in state.policy.healing),
            heartbeats_read=self._heartbeats.read,
            started=self._started,
            store=book.trouble,
            written=book.written,
            placement=state.policy.placement,
            cap_priority=state.policy.cap_priority,
            cap_share=state.policy.cap_share,
            preemption=state.policy.preemption,
            preemption_run_seconds_min=state.policy.preemption_run_seconds_min,
            stream_created_ns=str(book.stream_created_ns),
            generation=state.generation,
        )
        return [((), row)]

    # -- the past -------------------------------------------------------------------------------

    async def _drifts(self, q: Question) -> Rows:
        return await self._history.drifts(
            drift=q.id, node=known_node(self._book.state, q.node), card=await self._card(q.card, q.node),
            open_only=q.open_only, since_ns=_moment(q.since, "since"), until_ns=_moment(q.until, "until"),
            after=_after(q, tuple[int]), newest_first=q.newest_first, limit=q.limit + 1,
        )  # fmt: skip

    async def _findings(self, q: Question) -> Rows:
        return await self._history.findings(
            codes=q.kinds, since_seq=q.since_seq, since_ns=_moment(q.since, "since"), until_ns=_moment(q.until, "until"),
            after=_after(q, tuple[int]), newest_first=q.newest_first, limit=q.limit + 1,
        )  # fmt: skip

    async def _events(self, q: Question) -> Rows:
        unknown = [kind for kind in q.kinds if kind not in BY_KIND and kind not in (UNKNOWN, MALFORMED)]
        if unknown:
            known = ", ".join((*BY_KIND, UNKNOWN, MALFORMED))
            raise Unanswerable(
                "bad_question", f"kinds: {unknown[0]!r} is not an event kind; there are {known}"
            )
        return await self._history.events(
            position=self._book.written, since_seq=q.since_seq, since_ns=_moment(q.since, "since"),
            until_ns=_moment(q.until, "until"), kinds=q.kinds, demand=await self._demand_id(q.id),
            node=known_node(self._book.state, q.node), card=await self._card(q.card, q.node), project=q.project,
            after=_after(q, tuple[int]), newest_first=q.newest_first, limit=q.limit + 1,
        )  # fmt: skip

    async def _raw(self, q: Question) -> Rows:
        return await self._history.raw(
            position=self._book.written, since_seq=q.since_seq, after=_after(q, tuple[int]), limit=q.limit + 1
        )

    async def _who(self, q: Question) -> Rows:
        at_ns = _moment(q.at, "at")
        if at_ns is not None:
            if at_ns > self._clock.now_ns() + AHEAD_SECONDS_MAX * 1e9:
                raise Unanswerable(
                    "bad_question", f"at: {q.at} lies ahead; who will hold a card is not on the record"
                )
            begins = await self._history.begins_ns()
            if begins is None or at_ns < begins:
                told = "is empty" if begins is None else f"begins at {rfc3339(begins)}"
                raise Unanswerable("before_record", f"at: the record {told}, {q.at} is before that")
        return await self._history.tenures(
            card=await self._card(q.id or q.card, q.node), node=known_node(self._book.state, q.node), project=q.project,
            at_ns=at_ns, since_ns=_moment(q.since, "since"), until_ns=_moment(q.until, "until"),
            after=_after(q, tuple[int, str]), newest_first=q.newest_first, limit=q.limit + 1,
        )  # fmt: skip

    async def _written(self, position: int) -> None:
        """Wait for the tables, which follow the state a moment later; not when their disk is in trouble."""
        if not self._book.trouble:
            await self._book.reached(position, written=True, timeout_seconds=POSITION_SECONDS_MAX)

    # -- names ----------------------------------------------------------------------------------

    async def _card(self, name: str, node: str) -> str:
        """UUID of the card that `name` means, "" = any."""
        if not name:
            return ""
        found = find_card(self._book.state, name, node)
        if found is not None:
            return found.uuid
        past = await self._history.known_card(name)
        if past is None:
            raise unknown_card(self._book.state, name)
        return past

    async def _demand_id(self, name: str) -> str:
        """Id of the demand that `name` means, "" = any."""
        if not name:
            return ""
        found = find_demand(self._book.state, name)
        if found is not None:
            return found.spec.demand
        past = await self._history.find_demand(name)
        if past is None:
            raise Unanswerable(
                "not_found", f"no demand has the id or name {name!r}", "see `rigbook ls --all`"
            )
        return past


def _page(answer: _Answer, rows: Rows, limit: int) -> None:
    """Fill the answer up to `limit` rows, or to what one message takes; a row that is None stands for "and more"."""
    size = 0
    last: Key = ()
    for key, row in rows:
        item = b"" if row is None else _encode(row)
        if row is None or len(answer.items) == limit or (answer.items and size + len(item) > PAGE_BYTES_MAX):
            answer.next = _encode(last).decode()
            return
        last = key
        if len(item) > PAGE_BYTES_MAX:
            told = f"the row at {_encode(key).decode()} is left out: {len(item)} bytes are too many for an answer"
            answer.notice = "; ".join(text for text in (answer.notice, told) if text)
            continue
        size += len(item)
        answer.items.append(msgspec.Raw(item))


# -- reading a question -------------------------------------------------------------------------


def _question(body: bytes) -> Question:
    try:
        question = _questions.decode(body or b"{}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unanswerable(
            "bad_question", str(error), "a question is a JSON object, see rigbook_schemas.queries.Question"
        ) from None
    phases = ("", "live", "all", *(phase.value for phase in Phase))
    if question.phase not in phases:
        raise Unanswerable("bad_question", f"phase: {question.phase!r} is none of {', '.join(phases[1:])}")
    return question


def _living(phase: str) -> bool:
    """Whether the state alone can answer: ended demands are in the tables."""
    return phase in ("", "live") or (phase != "all" and not Phase(phase).terminal)


def _moment(text: str, field: str) -> int | None:
    if not text:
        return None
    moment = instant(text)
    if moment is None:
        raise Unanswerable("bad_question", f"{field}: {text[:64]!r} is not an RFC 3339 time with a zone, "
                           "e.g. 2026-11-30T02:00:00Z")  # fmt: skip
    return min(max(moment, 0), 2**63 - 1)  # what a table can hold; nothing is recorded beyond


def _after(question: Question, shape: Any) -> Key:
    """The key behind which the page begins."""
    if not question.cursor:
        return ()
    try:
        key: Key = msgspec.json.decode(question.cursor, type=shape)
    except (msgspec.MsgspecError, UnicodeError):
        raise Unanswerable(
            "bad_question", "cursor: not one of this question's; take `next` of the page before"
        ) from None
    return key


def _time(ns: int) -> str:
    return rfc3339(ns) if ns else ""


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("rigbook")
    except importlib.metadata.PackageNotFoundError:
        return "0"

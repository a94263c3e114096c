"""The placer as a service: read a batch, fold it, decide, append against the position, read it back.

Conflict, time-out and "duplicate" all mean the same: nothing is known from the answer. Read on, fold,
decide again. The state moves only by events read back from the log, never from an own acknowledgement.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from rigbook_bus.protocol import BusConflict, BusDenied, BusError, BusUnavailable, BusUnknown, Expect
from rigbook_bus.telemetry import Telemetry
from rigbook_ledger.continuity import Known, LogAbsent, LogDiscontinued, ledger_doubts, recovery_under_way
from rigbook_ledger.follower import Follower, SnapshotFile
from rigbook_schemas import subjects
from rigbook_schemas.events import Bound, Deferred, Heartbeat, Payload, Refused
from rigbook_schemas.wire import Draft, decode, encode, rfc3339

from rigbook_placer.feasible import NOTHING_SEEN, Seen, ask_of
from rigbook_placer.place import explain
from rigbook_placer.preempt import evictions, preempt
from rigbook_placer.replies import Standing, offers_reply, plan_reply
from rigbook_placer.sightings import seen_of
from rigbook_placer.stops import stops_due, timed
from rigbook_placer.turns import Turns
from rigbook_placer.verdicts import Verdicts
from rigbook_placer.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus, Tail
    from rigbook_ledger.state import Demand
    from rigbook_schemas.events import EvictionOrdered
    from rigbook_schemas.values import Reason
    from rigbook_schemas.wire import Record

    from rigbook_placer.index import Index

__all__ = ["Options", "Placer", "serve"]

# How often time-driven things are looked at: deferrals, time limits, refusals.
TICK_SECONDS: Final = 0.5
# A demand that is bound within this time needs no word on why it waits.
PATIENCE_SECONDS: Final = 1.0
# A demand that nothing in the known fleet could ever hold is refused after this time, not before: at a
# start the node that could may not have joined yet.
HOPELESS_SECONDS: Final = 10.0
# How often the ledger is asked whether it trusts the log: it may know of a loss that a young placer cannot see.
WORD_EVERY_SECONDS: Final = 5.0
# From this many cards times waiting demands on the index is used; below, looking at all cards for all of them is
# as quick, and numpy is not loaded.
INDEX_LOOKS_MIN: Final = 4096
# Nodes looked at to say why a demand waits, of a fleet with an index: the likeliest ones.
EXPLAINED_NODES_MAX: Final = 24
# Blocked demands looked at for preemption in one go, each at most once in this time.
PREEMPTORS_MAX: Final = 8
PREEMPT_AGAIN_SECONDS: Final = 1.0
# An order that was not read back by then is sent again, under the same id.
ORDER_AGAIN_SECONDS: Final = 5.0
# After an append without an answer: how long to read on before deciding again.
READ_ON_SECONDS: Final = 1.0
# How long bindings and stop orders may wait for the acknowledgement of verdicts: one that is lost never comes.
VERDICTS_SECONDS_MAX: Final = 5.0


_RULES: Final = "rig.own.policy."


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a placer."""

    instance: str = "placer-1"
    data: Path | None = None  # where the snapshot lives; None = fold the whole log at each start
    policy: str = "pack"
    patience_seconds: float = PATIENCE_SECONDS
    hopeless_seconds: float = HOPELESS_SECONDS


class Placer:
    """One placer. Several may run side by side: the bus decides between them."""

    def __init__(
        self,
        bus: Bus,
        options: Options,
        *,
        clock: Clock,
        new_id: Callable[[], str],
        telemetry: Telemetry | None = None,
        known: Known | None = None,
    ) -> None:
        self._bus = bus
        self._options = options
        self._clock = clock
        self._new_id = new_id
        self._telemetry = telemetry or Telemetry("placer")
        self._log = structlog.get_logger().bind(instance=options.instance)
        snapshots = SnapshotFile(options.data / f"{options.instance}.snapshot") if options.data else None
        self._follower = Follower(bus, snapshots=snapshots, known=known)
        self._waiting = Waiting()
        self._seen: dict[str, Seen] = {}
        self._stops: set[int] = set()  # epochs whose stop may be due
        self._limited: set[int] = set()  # epochs with a maximum run time
        self._ordered: dict[int, float] = {}  # stop orders sent and not yet read back: epoch to when
        self._next_tick = 0.0
        self._paused = ""
        self._doubts = ""  # the ledger's, about the log
        self._turns = Turns(options.policy)
        self._verdicts = Verdicts(options.patience_seconds, options.hopeless_seconds)
        self._index: Index | None = None
        self._preempted: dict[str, float] = {}  # demands that room was looked for: when

    @property
    def caught_up(self) -> bool:
        return self._follower.caught_up

    @property
    def known(self) -> Known | None:
        """Of which log how much was read: what the next placer of this process must find again."""
        return self._follower.known

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Until cancelled. Raises LogDiscontinued when the log does not continue what was known."""
        await self._follower.open()
        heartbeats = await self._bus.tail(subjects.HEARTBEAT_STREAM, start_seq=await self._first_heartbeat())
        listening = asyncio.create_task(self._listen(heartbeats))
        self._doubts = await ledger_doubts(self._bus)
        doubting = asyncio.create_task(self._watch_doubts())
        stop_plans = await self._bus.serve(subjects.query_plan(), self._plan, queue="placer")
        stop_offers = await self._bus.serve(subjects.query_offers(), self._offers, queue="placer")
        told = False
        try:
            self._index_all()
            while True:
                await self._read(0.0 if self._turns.more else TICK_SECONDS)
                if not self.caught_up:
                    continue
                if not told:
                    told = True
                    self._log.info(
                        "caught up", position=self._follower.state.position, waiting=len(self._waiting)
                    )
                    if ready is not None:
                        ready.set()
                if not self._may_decide():
                    continue
                await self._order_stops()
                await self._bind_all()
                await self._make_room()
                await self._tick()
        finally:
            for helper in (listening, doubting):
                helper.cancel()
            await asyncio.gather(listening, doubting, return_exceptions=True)
            await stop_plans()
            await stop_offers()
            await heartbeats.close()
            await self._follower.close()

    # -- reading ----------------------------------------------------------------------------

    def _index_all(self) -> None:
        state = self._follower.state
        self._waiting.update(state, state.waiting)
        self._verdicts.came(state, state.waiting)
        self._note_bindings(state.bindings)

    def _note_bindings(self, epochs: Iterable[int]) -> None:
        state = self._follower.state
        for epoch in epochs:
            binding = state.bindings.get(epoch)
            if binding is None:
                self._limited.discard(epoch)
                self._ordered.pop(epoch, None)
                continue
            self._stops.add(epoch)
            if timed(state.demands[binding.demand]):
                self._limited.add(epoch)

    async def _read(self, wait_seconds: float) -> bool:
        """Read and fold a batch; True when something came."""
        records = await self._follower.batch(wait_seconds=wait_seconds)
        if not records:
            return False
        state = self._follower.state
        touched = state.touched
        self._telemetry.folded.add(len(records))
        self._waiting.update(state, touched.demands)
        self._verdicts.came(state, touched.demands)
        self._note_bindings(touched.bindings)
        for did in touched.demands:
            demand = state.demands.get(did)
            if demand is not None and demand.epoch:
                self._stops.add(demand.epoch)
        if touched.nodes or touched.cards:
            self._verdicts.fleet_changed()
        self._follow_fleet(records)
        touched.clear()
        return True

    def _follow_fleet(self, records: Iterable[Record]) -> None:
        state = self._follower.state
        touched = state.touched
        if self._index is not None:
            self._index.follow(touched.nodes, touched.cards, touched.bindings)
        elif len(state.cards) * (8 + len(self._waiting)) >= INDEX_LOOKS_MIN and self.caught_up:
            from rigbook_placer.index import Index

            self._index = Index(state, self._seen)
            self._turns.again()
        bound = [r.data.demand for r in records if isinstance(r.data, Bound)]
        self._turns.bound(state, bound, self._clock.now_ns())
        if any(r.subject.startswith(_RULES) for r in records):
            self._turns.again()

    async def _first_heartbeat(self) -> int:
        facts = await self._bus.stream(subjects.HEARTBEAT_STREAM)
        return 1 if facts is None else max(facts.first_seq, facts.last_seq - 1000, 1)

    async def _listen(self, heartbeats: Tail) -> None:
        while True:
            try:
                messages = await heartbeats.batch(max_messages=1000, wait_seconds=None)
            except BusError as error:
                # What cards show is unknown then; reservations still count, and the ledger still arbitrates.
                self._log.warning("heartbeats cannot be read", code=error.code, why=str(error))
                await self._clock.sleep(1.0)
                continue
            for message in messages:
                data = decode(message.seq, message.subject, message.received_ns, message.body).data
                if isinstance(data, Heartbeat):
                    self._look(data)

    def _look(self, heartbeat: Heartbeat) -> None:
        said = seen_of(heartbeat)
        changed: list[str] = []
        for card in heartbeat.cards:
            before, now = self._seen.get(card.uuid, NOTHING_SEEN), said.get(card.uuid, NOTHING_SEEN)
            if before == now:
                continue
            if now is NOTHING_SEEN:
                del self._seen[card.uuid]
            else:
                self._seen[card.uuid] = now
            changed.append(card.uuid)
        if changed and self._index is not None:
            self._index.look(changed)
        elif changed:
            self._turns.again()

    async def _watch_doubts(self) -> None:
        while True:
            await self._clock.sleep(WORD_EVERY_SECONDS)
            self._doubts = await ledger_doubts(self._bus)

    def _may_decide(self) -> bool:
        unknown = self._follower.state.unknown_open
        why = self._doubts or recovery_under_way(self._follower.state)
        if unknown and not why:
            seq, kind = next(iter(unknown.items()))
            why = f"event {seq} is of a kind unknown to this version ({kind}); upgrade, or `rigbook doctor --accept {seq}`"
        if why != self._paused:
            self._paused = why
            if why:
                self._log.error("deciding is paused", why=why)
            else:
                self._log.info("deciding again")
        return not why

    # -- deciding ---------------------------------------------------------------------------

    async def _bind_all(self) -> None:
        """Bind what fits, in order, until nothing more does."""
        while True:
            found = self._turns.next(
                self._follower.state, self._waiting, self._seen, self._clock.now_ns(), self._index
            )
            if found is None:
                return
            await self._append_bound(*found)
            if not self._may_decide():
                return

    async def _make_room(self) -> None:
        """Evict for the first blocked demands that may, where it would fit then."""
        state = self._follower.state
        now = self._clock.monotonic()
        looked = 0
        for did in self._turns.blocked:
            demand = state.demands.get(did)
            if demand is None or not demand.spec.preempts or looked >= PREEMPTORS_MAX:
                continue
            if now - self._preempted.get(did, -1e9) < PREEMPT_AGAIN_SECONDS:
                continue
            looked += 1
            if len(self._preempted) > 1000:
                self._preempted.clear()
            self._preempted[did] = now
            index = self._index
            found = preempt(
                state, demand.spec, self._seen, self._clock.now_ns(), kept=self._turns.kept,
                totals=index.totals if index else None,
                among=index.able(ask_of(demand.spec)) if index else None,
            )  # fmt: skip
            if found is None:
                continue
            self._log.info(
                "making room", demand=did, victims=[b.demand for b in found.victims], cards=found.cards
            )
            for order in evictions(demand, found):
                await self._send_order(order, cause=demand.event_id)
            return  # what is true of the next one is decided on what was read back

    async def _append_bound(self, demand: Demand, decision: Bound) -> None:
        state = self._follower.state
        nodes = tuple(share.node for share in decision.shares)
        expect = Expect(last_seq=state.own_position, filter=subjects.OWN_ALL)
        outcome = "bound"
        seq = 0
        try:
            seq = await self._append(subjects.bind(nodes), decision, demand, expect=expect, at=self._new_id())
        except BusConflict:
            outcome = "conflict"
        except BusUnknown:
            outcome = "unknown"
        except BusUnavailable:
            outcome = "away"
            await self._clock.sleep(0.2)
        except BusDenied as error:
            outcome = "denied"
            self._log.error(
                "the bus refuses a binding", demand=demand.spec.demand, code=error.code, why=str(error)
            )
            await self._clock.sleep(1.0)
        self._telemetry.appends.add(1, {"kind": "bound", "outcome": outcome})
        if outcome == "bound":
            self._log.info(
                "bound", demand=demand.spec.demand, epoch=seq, node=",".join(nodes), policy=decision.policy,
                cards=[a.card for s in decision.shares for a in s.allotments],
            )  # fmt: skip
            while state.position < seq:  # read the own event back; a lost tail raises LogDiscontinued
                if not await self._read(READ_ON_SECONDS):
                    self._log.warning("waiting to read back", epoch=seq, position=state.position)
            return
        self._log.info("decided anew", demand=demand.spec.demand, why=outcome, position=state.position)
        # Something stands on the log that we have not read (or may not: then time must pass, not a loop spin).
        await self._read(READ_ON_SECONDS)

    async def _append(
        self,
        subject: str,
        data: Payload,
        demand: Demand | None,
        *,
        at: str,
        expect: Expect | None = None,
        cause: str = "",
    ) -> int:
        parent = demand.traceparent if demand else ""
        kind = type(data).__name__.lower()
        attributes = {"demand": demand.spec.demand} if demand else {}
        with self._telemetry.span(f"placer.{kind}", parent, **attributes) as traceparent:
            draft = Draft(
                data=data,
                id=at,
                source=f"placer/{self._options.instance}",
                time=rfc3339(self._clock.now_ns()),
                causation=cause or (demand.event_id if demand else ""),
                traceparent=traceparent,
            )
            await self._follower.assure()
            appended = await self._bus.append(subject, encode(draft), message_id=draft.id, expect=expect)
        return appended.seq

    async def _order_stops(self) -> None:
        state = self._follower.state
        now = self._clock.monotonic()
        due = list(stops_due(state, self._stops, self._clock.now_ns()))
        self._stops.clear()
        for order in due:
            # Two placers, and a second look before the first order was read back, publish the same id once.
            if now - self._ordered.get(order.epoch, -1e9) < ORDER_AGAIN_SECONDS:
                self._stops.add(order.epoch)
                continue
            self._stops.add(order.epoch)  # until it was read back
            await self._send_order(order)

    async def _send_order(self, order: EvictionOrdered, *, cause: str = "") -> None:
        """Append a stop order and read it back."""
        state = self._follower.state
        demand = state.demands[order.demand]
        name = f"evict-{order.epoch}-{order.reason}"
        # `cause`: whom the room is for. Else it is what became of the demand itself.
        try:
            seq = await self._append(subjects.evict(order.nodes), order, demand, at=name, cause=cause)
        except BusError as error:
            self._log.warning(
                "stop order not sent, will be", demand=order.demand, epoch=order.epoch, code=error.code
            )
            return
        self._ordered[order.epoch] = self._clock.monotonic()
        self._log.info(
            "stop ordered", demand=order.demand, epoch=order.epoch, node=",".join(order.nodes),
            reason=order.reason, room_for=order.room_for,
        )  # fmt: skip
        while self._follower.state.position < seq and await self._read(READ_ON_SECONDS):
            pass

    async def _tick(self) -> None:
        now = self._clock.monotonic()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_SECONDS
        self._follower.remember()
        self._stops |= self._limited
        now_ns = self._clock.now_ns()
        said = self._verdicts.next(
            self._follower.state, self._waiting, lambda demand: self._explained(demand, now_ns), now_ns
        )
        await self._publish_verdicts(said)

    def _explained(self, demand: Demand, now_ns: int) -> tuple[Reason, ...]:
        index = self._index
        # Where no node could ever hold it the whole fleet is asked why; that is seldom, and then it is refused.
        likely = index.able(ask_of(demand.spec), EXPLAINED_NODES_MAX) if index is not None else []
        return explain(
            self._follower.state, demand.spec, self._seen, self._options.policy, now_ns=now_ns,
            kept=self._turns.kept, totals=index.totals if index else None, among=likely or None,
        )  # fmt: skip

    async def _publish_verdicts(self, said: list[tuple[Demand, Deferred | Refused]]) -> None:
        messages: list[tuple[str, bytes, str]] = []
        for demand, word in said:
            draft = Draft(
                data=word,
                # One id per demand, reason and place on the log: two placers say it once.
                id=f"{type(word).__name__.lower()}-{demand.spec.demand}-{word.position}",
                source=f"placer/{self._options.instance}",
                time=rfc3339(self._clock.now_ns()),
                causation=demand.event_id,
                traceparent=demand.traceparent,
            )
            messages.append((subjects.verdict(demand.spec.project), encode(draft), draft.id))
        if not messages:
            return
        await self._follower.assure()
        answers = await self._bus.append_many(messages, timeout_seconds=VERDICTS_SECONDS_MAX)
        failed = [a for a in answers if isinstance(a, BusError)]
        if failed:
            self._log.warning("verdicts not sent, will be", count=len(failed), code=failed[0].code)
        last = max((a.seq for a in answers if not isinstance(a, BusError)), default=0)
        while self._follower.state.position < last and await self._read(READ_ON_SECONDS):
            pass

    # -- answering --------------------------------------------------------------------------

    async def _plan(self, _subject: str, body: bytes) -> bytes:
        return plan_reply(body, self._standing())

    async def _offers(self, _subject: str, body: bytes) -> bytes:
        return offers_reply(body, self._standing())

    def _standing(self) -> Standing | None:
        """What questions are answered from; None while the log is still being read."""
        if not self.caught_up:
            return None
        return Standing(
            self._follower.state, self._seen, self._turns.kept, self._options.policy, self._clock.now_ns(),
            self._index,
        )  # fmt: skip


async def serve(
    bus: Bus,
    options: Options,
    *,
    clock: Clock,
    new_id: Callable[[], str],
    telemetry: Telemetry | None = None,
    ready: asyncio.Event | None = None,
) -> None:
    """Run a placer until cancelled. A log that does not continue stops all deciding (safe mode)."""
    log = structlog.get_logger().bind(instance=options.instance)
    known: Known | None = None
    told = ""
    while True:
        placer = Placer(bus, options, clock=clock, new_id=new_id, telemetry=telemetry, known=known)
        try:
            await placer.run(ready)
        except LogAbsent as error:
            log.info("waiting for the log", code=error.code, why=str(error))
            await clock.sleep(0.3)
        except LogDiscontinued as error:
            if str(error) != told:
                log.error(  # noqa: TRY400 - the cause is the world, not a bug
                    "safe mode: nothing is bound", code=error.code, why=str(error), remedy="rigbook doctor"
                )
            told = str(error)
            await clock.sleep(5.0)
        except BusError as error:
            log.warning("the bus is away", code=error.code, why=str(error))
            await clock.sleep(1.0)
        known = placer.known

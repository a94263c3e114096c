"""The reaper as a service: hear heartbeats, fold the ledger, compare, judge, append, read back.

Each decision is made on a ledger read to its end. Conflict, time-out and "duplicate" mean that nothing is
known: read on, decide again; ids name what an event is about, so nothing is on the log twice for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from rigbook_bus.protocol import BusError, BusUnavailable, Link
from rigbook_bus.telemetry import Telemetry
from rigbook_ledger.continuity import Known, LogDiscontinued, ledger_doubts, recovery_under_way
from rigbook_ledger.drift import Beat, Comparison, Tolerance, compare
from rigbook_ledger.follower import Follower, SnapshotFile
from rigbook_schemas import subjects
from rigbook_schemas.catalogue import BY_PAYLOAD
from rigbook_schemas.events import DriftCleared, DriftDetected, Heartbeat, NodeRecovered, NodeUnreachable
from rigbook_schemas.wire import Draft, Malformed, Unknown, decode, encode, instant, rfc3339

from rigbook_reaper.acts import KINDS, Act, event_id
from rigbook_reaper.judge import Rules, Watch, appended, judge
from rigbook_reaper.liveness import Heard, Liveness, Patience, assess

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus, Message, Tail

__all__ = ["Options", "Reaper", "serve"]

BEATS_MAX: Final = 2000  # heartbeats per batch
# Judging, appending and reading back, at most this often on the same heartbeats; the next ones go on.
PASSES_MAX: Final = 4
READ_BACK_SECONDS: Final = 2.0
AWAY_SECONDS: Final = 1.0
SAFE_MODE_SECONDS: Final = 5.0
WORD_EVERY_SECONDS: Final = 5.0  # how often the ledger is asked whether it trusts the log
COMPLAINTS_KEPT: Final = 1000  # subjects whose bad messages were logged: once each


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a reaper. Seconds."""

    instance: str = "reaper-1"
    data: Path | None = None  # where the snapshot lives; None = fold the whole log at each start
    tick_seconds: float = 1.0  # silence is judged at least this often
    rules: Rules = Rules()
    tolerance: Tolerance = Tolerance()
    patience: Patience = Patience()
    # Short words for what an operator (or a demo) turns: they win over the structs above.
    grace_seconds: float | None = None  # of every kind of drift
    stop_seconds: float | None = None  # `Tolerance.stop_seconds`
    silence_seconds: float | None = None  # whatever a node's heartbeat interval

    def settled(self) -> Options:
        """With the short words put where they belong."""
        rules, tolerance, patience = self.rules, self.tolerance, self.patience
        if self.grace_seconds is not None:
            rules = msgspec.structs.replace(rules, graces=dict.fromkeys(KINDS, self.grace_seconds))
        if self.stop_seconds is not None:
            tolerance = msgspec.structs.replace(tolerance, stop_seconds=self.stop_seconds)
        if self.silence_seconds is not None:
            patience = msgspec.structs.replace(
                patience, silence_seconds_min=self.silence_seconds, silence_seconds_max=self.silence_seconds
            )
        return msgspec.structs.replace(self, rules=rules, tolerance=tolerance, patience=patience)


class Reaper:
    """One reaper. A second one beside it does no harm and no good."""

    def __init__(
        self,
        bus: Bus,
        options: Options,
        *,
        clock: Clock,
        telemetry: Telemetry,
        known: Known | None = None,
    ) -> None:
        self._bus = bus
        self._options = options
        self._clock = clock
        self._telemetry = telemetry
        self._log = structlog.get_logger().bind(instance=options.instance)
        snapshots = SnapshotFile(options.data / f"{options.instance}.snapshot") if options.data else None
        self._follower = Follower(bus, snapshots=snapshots, known=known)
        self._doubts = ""  # the ledger's, about the log
        self._next_word = 0.0
        self._watches: dict[str, Watch] = {}
        self._heard: dict[str, Heard] = {}
        self._numbers: dict[
            str, tuple[str, int]
        ] = {}  # by node: incarnation and number of the last heartbeat
        self._lost: dict[str, float] = {}
        self._listening_since = 0.0
        self._last_tick = 0.0
        self._held = ""
        self._mass_loss = ""
        self._complained: set[str] = set()

    @property
    def known(self) -> Known | None:
        """Of which log how much was read: what the next reaper of this process must find again."""
        return self._follower.known

    async def run(self, ready: asyncio.Event | None) -> None:
        """Until cancelled. Raises LogDiscontinued, BusError."""
        await self._follower.open()
        # Old heartbeats are no evidence of now.
        heartbeats = await self._bus.stream(subjects.HEARTBEAT_STREAM)
        beats = await self._bus.tail(
            subjects.HEARTBEAT_STREAM, start_seq=heartbeats.last_seq + 1 if heartbeats else 1
        )
        self._listening_since = self._last_tick = self._clock.monotonic()
        try:
            await self._read_to_end()
            # Who fell silent before we began may have done so a moment ago: part of a mass loss, until the window
            # has passed.
            now = self._clock.monotonic()
            self._lost = {n.name: now for n in self._follower.state.nodes.values() if n.unreachable_ns}
            self._log.info("caught up", position=self._follower.state.position)
            if ready is not None:
                ready.set()
            while True:
                await self._step(beats)
                self._follower.remember()
        finally:
            await beats.close()
            await self._follower.close()

    async def _step(self, beats: Tail) -> None:
        messages = await beats.batch(max_messages=BEATS_MAX, wait_seconds=self._options.tick_seconds)
        rounds = self._hear(messages)
        await self._fold(0.0)
        now = self._clock.monotonic()
        paused = (
            now - self._last_tick > self._options.patience.silence_seconds_min + self._options.tick_seconds
        )
        if paused or self._bus.link is not Link.CONNECTED:
            self._listening_since = now  # what we could not hear says nothing
        self._last_tick = now
        if now >= self._next_word:
            self._next_word = now + WORD_EVERY_SECONDS
            self._doubts = await ledger_doubts(self._bus)
        try:
            await self._judge_silence()
            for one_per_node in rounds or [[]]:
                await self._judge_drift(one_per_node)
        except BusUnavailable:
            await self._clock.sleep(AWAY_SECONDS)
        except BusError as error:
            self._log.warning("nothing is known of an append; reading on", code=error.code, why=str(error))

    # -- reading --------------------------------------------------------------------------------

    async def _fold(self, wait_seconds: float) -> int:
        records = await self._follower.batch(wait_seconds=wait_seconds)
        self._telemetry.folded.add(len(records))
        self._follower.state.touched.clear()
        return len(records)

    async def _read_to_end(self) -> bool:
        """Fold all that is on the log now; False when it did not come in time."""
        facts = await self._bus.stream(subjects.LEDGER_STREAM)
        if facts is None:
            raise LogDiscontinued(f"stream {subjects.LEDGER_STREAM} is gone")
        while self._follower.state.position < facts.last_seq:
            if not await self._fold(READ_BACK_SECONDS):
                self._log.warning(
                    "the ledger lags", position=self._follower.state.position, last=facts.last_seq
                )
                return False
        return True

    def _hear(self, messages: Sequence[Message]) -> list[list[Beat]]:
        """Note who was heard; the heartbeats in rounds of at most one per node, oldest first."""
        now = self._clock.monotonic()
        by_node: dict[str, list[Beat]] = {}
        for message in messages:
            record = decode(message.seq, message.subject, message.received_ns, message.body)
            data = record.data
            if not isinstance(data, Heartbeat) or message.subject != f"rig.heartbeat.{data.node}":
                code = (
                    data.code
                    if isinstance(data, Malformed)
                    else "unknown_kind"
                    if isinstance(data, Unknown)
                    else "wrong_subject"
                )
                self._complain(message, code, data.text if isinstance(data, Malformed) else "not a heartbeat")
                continue
            last = self._numbers.get(data.node)
            if last is not None and last[0] == data.incarnation and data.number <= last[1]:
                continue  # delivered again, or late
            self._numbers[data.node] = (data.incarnation, data.number)
            self._heard[data.node] = Heard(
                at=now, received_ns=record.received_ns, every_seconds=data.every_seconds
            )
            by_node.setdefault(data.node, []).append(
                Beat(heartbeat=data, received_ns=record.received_ns, sent=record.time)
            )
            self._note_skew(data.node, record.time, record.received_ns)
        longest = max(map(len, by_node.values()), default=0)
        return [[beats[i] for beats in by_node.values() if i < len(beats)] for i in range(longest)]

    def _complain(self, message: Message, code: str, why: str) -> None:
        self._telemetry.findings.add(1, {"code": code})
        if message.subject not in self._complained and len(self._complained) < COMPLAINTS_KEPT:
            self._complained.add(message.subject)
            self._log.warning(
                "a heartbeat is skipped", subject=message.subject, seq=message.seq, code=code, why=why
            )

    def _note_skew(self, node: str, told: str, received_ns: int) -> None:
        """The node's clock against the server's: a metric, never a reason. Delivery takes part of it."""
        told_ns = instant(told)
        if told_ns is not None:
            self._telemetry.skew.set((told_ns - received_ns) / 1e9, {"node": node})

    # -- silence --------------------------------------------------------------------------------

    async def _judge_silence(self) -> None:
        if self._bus.link is not Link.CONNECTED or self._must_hold():
            return
        found = self._assess()
        if not (found.silent or found.back) or not await self._read_to_end():
            return
        found = self._assess()
        now, nodes = self._clock.monotonic(), self._follower.state.nodes
        for silent in found.silent:
            if await self._heard_by_the_bus(silent.node):
                continue
            heard_ns = silent.last_heard_ns
            lost = NodeUnreachable(
                node=silent.node,
                silent_seconds=silent.silent_seconds,
                last_heard=rfc3339(heard_ns) if heard_ns else "",
            )
            await self._append(_of_node(lost, nodes[silent.node].joined_seq, heard_ns))
            self._lost[silent.node] = now
            self._log.warning(
                "node unreachable", node=silent.node, silent_seconds=round(silent.silent_seconds, 1)
            )
        for back in found.back:
            recovered = NodeRecovered(node=back.node, silent_seconds=back.silent_seconds)
            await self._append(_of_node(recovered, nodes[back.node].unreachable_ns))
            self._lost.pop(back.node, None)
            self._log.info("node recovered", node=back.node, silent_seconds=round(back.silent_seconds, 1))
        await self._read_to_end()

    def _assess(self) -> Liveness:
        found = assess(
            self._follower.state.nodes,
            self._heard,
            self._lost,
            listening_since=self._listening_since,
            now=self._clock.monotonic(),
            patience=self._options.patience,
        )
        if bool(found.mass_loss) != bool(self._mass_loss):
            self._telemetry.gauge.add(1 if found.mass_loss else -1, {"name": "mass_loss"})
            if found.mass_loss:
                self._log.error("nobody is called unreachable, nothing is healed", why=found.mass_loss)
            else:
                self._log.info("heartbeats are back")
        self._mass_loss = found.mass_loss
        return found

    async def _heard_by_the_bus(self, node: str) -> bool:
        """Does the bus hold a heartbeat of it that has not reached us? Then it is us who is deaf."""
        message = await self._bus.last(subjects.HEARTBEAT_STREAM, subjects.heartbeat(node))
        latest = self._heard.get(node)
        if message is None:
            return False
        if latest is None:
            return (
                self._clock.now_ns() - message.received_ns
            ) / 1e9 < self._options.patience.silence_seconds_min
        return message.received_ns > latest.received_ns

    # -- drift ----------------------------------------------------------------------------------

    def _must_hold(self) -> str:
        unknown = self._follower.state.unknown_open
        why = self._doubts or recovery_under_way(self._follower.state)
        if why:
            pass  # it may know of a loss that we cannot see
        elif not self._follower.caught_up:
            why = "the log is not read to its end"
        elif unknown:
            seq, kind = next(iter(unknown.items()))
            why = f"event {seq} is of a kind unknown to this version ({kind}); upgrade, or `rigbook doctor --accept {seq}`"
        if why != self._held:
            self._held = why
            if why:
                self._log.error("judging is paused", why=why)
            else:
                self._log.info("judging again")
        return why

    async def _judge_drift(self, beats: Sequence[Beat]) -> None:
        for _ in range(PASSES_MAX):
            state = self._follower.state
            now = self._clock.monotonic()
            seen: list[Comparison] = [compare(state, beat, self._options.tolerance) for beat in beats]
            hold = self._must_hold() or self._mass_loss
            verdict = judge(state, self._watches, seen, now, self._options.rules, hold=hold)
            self._watches = verdict.watches
            if not verdict.acts:
                return
            position = state.position
            if not await self._read_to_end():
                return  # behind: nothing is decided on a book that is not whole
            if self._follower.state.position != position:
                continue
            for act in verdict.acts:
                new = await self._append(act)
                appended(self._watches, act, now)
                if new:
                    self._tell(act)
            await self._read_to_end()

    async def _append(self, act: Act) -> bool:
        """False when it stood there already. Raises BusError: what then stands there is unknown until read."""
        kind = BY_PAYLOAD[type(act.data)].name
        outcome = "stored"
        attributes: dict[str, str | int] = {"node": act.node}
        attributes |= {"demand": act.demand} if act.demand else {}
        attributes |= {"epoch": act.epoch} if act.epoch is not None else {}
        try:
            with self._telemetry.span(f"reaper {kind}", act.traceparent, **attributes) as traceparent:
                draft = Draft(
                    data=act.data,
                    id=act.id,
                    source=f"reaper/{self._options.instance}",
                    time=rfc3339(self._clock.now_ns()),
                    correlation=act.demand,
                    causation=act.causation,
                    traceparent=traceparent,
                )
                await self._follower.assure()
                done = await self._bus.append(act.subject, encode(draft), message_id=draft.id)
                outcome = "duplicate" if done.duplicate else "stored"
                return not done.duplicate
        except BusError as error:
            outcome = error.code
            self._log.warning(
                "not appended; decided again later", kind=kind, code=error.code, why=str(error),
                demand=act.demand, epoch=act.epoch, node=act.node,
            )  # fmt: skip
            raise
        finally:
            self._telemetry.appends.add(1, {"kind": kind, "outcome": outcome})

    def _tell(self, act: Act) -> None:
        log = self._log.bind(demand=act.demand, epoch=act.epoch, node=act.node, drift=act.key)
        data = act.data
        if isinstance(data, DriftDetected):
            log.warning("drift", kind=data.kind, sentence=data.sentence, healing=data.healing)
        elif isinstance(data, DriftCleared):
            log.info("drift cleared", kind=data.kind, how=data.how, seconds=round(data.seconds, 1))
        else:
            log.warning("healing", kind=BY_PAYLOAD[type(act.data)].name, text=getattr(data, "text", ""))


def _of_node(data: NodeUnreachable | NodeRecovered, *episode: int) -> Act:
    kind = BY_PAYLOAD[type(data)].name
    return Act(
        key="",
        subject=subjects.node(data.node),
        data=data,
        id=event_id(kind, data.node, *episode),
        node=data.node,
    )


async def serve(
    bus: Bus,
    options: Options,
    *,
    clock: Clock,
    new_id: Callable[[], str],
    telemetry: Telemetry | None = None,
    ready: asyncio.Event | None = None,
) -> None:
    """Run a reaper until cancelled. A log that does not continue stops all judging (safe mode)."""
    options = options.settled()
    if not options.instance:
        options = msgspec.structs.replace(options, instance=f"reaper-{new_id()[:8]}")
    log = structlog.get_logger().bind(instance=options.instance)
    known: Known | None = None
    told = ""
    while True:
        reaper = Reaper(
            bus,
            options,
            clock=clock,
            telemetry=telemetry or Telemetry("reaper"),
            known=known,
        )
        try:
            await reaper.run(ready)
        except LogDiscontinued as error:
            if str(error) != told:
                log.error(  # noqa: TRY400 - the cause is the world, not a bug
                    "safe mode: nothing is judged, nothing is healed",
                    code=error.code,
                    why=str(error),
                    remedy="rigbook doctor",
                )
            told = str(error)
            await clock.sleep(SAFE_MODE_SECONDS)
        except BusError as error:
            log.warning("the bus is away", code=error.code, why=str(error))
            await clock.sleep(AWAY_SECONDS)
        known = reaper.known

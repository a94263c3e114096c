"""A nats-server in this process: connections, core subjects, streams, and the faults a simulation injects.

Deterministic: no randomness, no thread, no real time. Time comes from a `Clock` and from the timers of the running
loop, either of which may be virtual. Every exchange passes the loop at least once on its way to the server and once
on its way back, in order per connection as on a TCP line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from rigbook_bus.clock import Clock, SystemClock
from rigbook_bus.jetstream_api import ApiError, differences, refusal, stream_config
from rigbook_bus.memory_stream import MemoryConsumer, MemoryStream, Pull
from rigbook_bus.protocol import Appended, BusDenied, BusError, ConsumerSpec, Expect, StreamFacts, StreamSpec
from rigbook_bus.subject import matches, overlaps

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Faults", "Line", "MemoryServer", "Peer", "Subscriber"]


class Faults:
    """No fault. A simulation passes a subclass that draws from its seed."""

    def request_seconds(self, client: str, subject: str) -> float | None:
        """How long a message needs to the server; None = it is lost on the way."""
        del client, subject
        return 0.0

    def answer_seconds(self, client: str, subject: str) -> float | None:
        """How long an answer (an append's acknowledgement too) needs back; None = it is lost on the way."""
        del client, subject
        return 0.0

    def delivery_seconds(self, client: str, stream: str, seq: int) -> float:
        """How long a stored message needs to a tail or a reader (order per connection is kept)."""
        del client, stream, seq
        return 0.0

    def delivery_copies(self, client: str, stream: str, seq: int) -> int:
        """How often a durable consumer's message arrives; 0 = lost, it comes again after the ack time-out."""
        del client, stream, seq
        return 1


class Line:
    """One direction of a connection: things arrive in the order in which they were sent, or not at all."""

    def __init__(self) -> None:
        self._items: deque[Callable[[], None]] = deque()
        self._last_due = 0.0
        self._generation = 0

    def send(self, arrive: Callable[[], None], seconds: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        due = max(now + seconds, self._last_due)
        self._items.append(arrive)
        if due <= now:
            loop.call_soon(self._arrived, self._generation)
        else:
            self._last_due = due
            loop.call_at(due, self._arrived, self._generation)

    def cut(self) -> None:
        self._generation += 1
        self._items.clear()
        self._last_due = 0.0

    def _arrived(self, generation: int) -> None:
        # The head, whichever timer fired: a loop that shuffles its ready queue must not reorder a TCP line.
        if generation == self._generation and self._items:
            self._items.popleft()()


class Peer(Protocol):
    """A connection as the server sees it."""

    name: str
    is_cut: bool
    """Cut by itself, apart from the server's own state."""
    down: Line

    def lose(self, why: str) -> None: ...
    def regain(self) -> None: ...
    def stored(self, stream: str, seq: int, subject: str) -> None: ...


class Subscriber(Protocol):
    subject: str
    queue: str
    peer: Peer

    def arrive(self, subject: str, body: bytes, answer: Callable[[bytes, str], None] | None) -> None:
        """Called at the client's end of the line. `answer(body, error)` goes back to whoever asked."""
        ...


class MemoryServer:
    """All state of the server. `MemoryBus.connect(server, name=...)` makes a connection."""

    def __init__(self, clock: Clock | None = None, faults: Faults | None = None) -> None:
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.faults = faults if faults is not None else Faults()
        self.streams: dict[str, MemoryStream] = {}
        self.running = True
        self.refusal = ""
        """When set, every append to any stream is denied with this text (disk full)."""
        self._peers: list[Peer] = []
        self._subscribers: list[Subscriber] = []
        self._turn: dict[str, int] = {}
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._stream_of: dict[str, str] = {}
        self._epoch = 0

    # ---- faults --------------------------------------------------------------------------------------------

    def stop(self, why: str = "the server ended") -> None:
        """Every connection breaks; streams and durable consumers stay (they are on the disk)."""
        self.running = False
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for stream in self.streams.values():
            for consumer in stream.consumers.values():
                consumer.forget_pulls()
        for peer in tuple(self._peers):
            peer.lose(why)

    def start(self) -> None:
        """Take connections again: those that were not cut by themselves come back."""
        self.running = True
        for peer in tuple(self._peers):
            if not peer.is_cut:
                peer.regain()

    def restart(self) -> None:
        self.stop()
        self.start()

    def truncate(self, stream: str, last_seq: int) -> None:
        """Come back without the end of a stream (bit rot and a crash): `created` is unchanged."""
        self._while_down(lambda: self.streams[stream].truncate(last_seq))

    def recreate(self, stream: str) -> None:
        """Come back with the stream empty and created anew; its consumers are gone."""

        def make() -> None:
            self.streams[stream] = MemoryStream(self.streams[stream].spec, self._created_ns())

        self._while_down(make)

    def remove(self, stream: str) -> None:
        """Come back without the stream."""
        self._while_down(lambda: self.streams.pop(stream, None))

    def refuse(self, why: str = "no space left on device") -> None:
        """Deny every append until `accept`: the disk is full."""
        self.refusal = why

    def accept(self) -> None:
        self.refusal = ""

    def _while_down(self, change: Callable[[], object]) -> None:
        was_running = self.running
        if was_running:
            self.stop()
        change()
        self._stream_of.clear()
        if was_running:
            self.start()

    # ---- connections ---------------------------------------------------------------------------------------

    def admit(self, peer: Peer) -> None:
        self._peers.append(peer)

    def dismiss(self, peer: Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
        self._subscribers = [one for one in self._subscribers if one.peer is not peer]

    # ---- streams -------------------------------------------------------------------------------------------

    def ensure_stream(self, spec: StreamSpec) -> StreamFacts:
        found = self.streams.get(spec.name)
        if found is not None:
            if wrong := differences(stream_config(spec), stream_config(found.spec)):
                raise BusDenied(f"stream {spec.name} is there with other settings: {'; '.join(wrong)}")
            return found.facts(self.clock.monotonic())
        for other in self.streams.values():
            if any(overlaps(a, b) for a in spec.subjects for b in other.spec.subjects):
                raise refusal(
                    ApiError(400, 10065, "subjects overlap with an existing stream"), f"stream {spec.name}"
                )
        if 0 < spec.max_age_seconds < spec.duplicate_window_seconds:
            raise refusal(
                ApiError(500, 10052, "duplicates window can not be larger then max age"),
                f"stream {spec.name}",
            )
        self._stream_of.clear()
        made = self.streams[spec.name] = MemoryStream(spec, self._created_ns())
        return made.facts(self.clock.monotonic())

    def _created_ns(self) -> int:
        # Two streams made within one tick of a virtual clock must still be told apart.
        self._epoch += 1
        return self.clock.now_ns() + self._epoch

    def stream(self, name: str, what: str) -> MemoryStream:
        found = self.streams.get(name)
        if found is None:
            raise refusal(ApiError(404, 10059, "stream not found"), what)
        return found

    def stream_for(self, subject: str) -> MemoryStream | None:
        name = self._stream_of.get(subject)
        if name is None:
            name = next(
                (
                    name
                    for name, one in self.streams.items()
                    if any(matches(f, subject) for f in one.spec.subjects)
                ),
                "",
            )
            self._stream_of[subject] = name
        return self.streams.get(name)

    def append(self, subject: str, body: bytes, message_id: str, expect: Expect | None) -> Appended:
        self._deliver(subject, body, None)
        stream = self.stream_for(subject)
        if stream is None:
            raise BusDenied(
                f"no stream takes {subject}; create the stream first (start the ledger service, or `rigbook up`)"
            )
        appended = stream.append(
            subject,
            body,
            message_id=message_id,
            expect=expect,
            now=self.clock.monotonic(),
            now_ns=self.clock.now_ns(),
            refused=self.refusal,
        )
        if not appended.duplicate:
            for peer in tuple(self._peers):
                peer.stored(stream.spec.name, appended.seq, subject)
            for name, consumer in tuple(stream.consumers.items()):
                if consumer.is_asked and stream.wanted(consumer.spec.filters, subject):
                    self.dispatch(stream.spec.name, name)
        return appended

    # ---- consumers -----------------------------------------------------------------------------------------

    def ensure_consumer(self, spec: ConsumerSpec) -> None:
        stream = self.stream(spec.stream, f"consumer {spec.name} of stream {spec.stream}")
        if spec.name not in stream.consumers:
            stream.consumers[spec.name] = MemoryConsumer(spec, stream)

    def consumer(self, stream: str, name: str) -> MemoryConsumer:
        found = self.streams.get(stream)
        if found is None or name not in found.consumers:
            raise absent(stream, name)
        return found.consumers[name]

    def delete_consumer(self, stream: str, name: str) -> bool:
        found = self.stream(stream, f"consumer {name} of stream {stream}").consumers.pop(name, None)
        if found is None:
            return False
        found.drop_pulls(absent(stream, name))
        return True

    def pull(self, stream: str, name: str, pull: Pull) -> None:
        self.consumer(stream, name).pull(pull)
        self.dispatch(stream, name)

    def withdraw(self, stream: str, name: str, pull: Pull) -> None:
        found = self.streams.get(stream)
        if found is not None and name in found.consumers:
            found.consumers[name].withdraw(pull)

    def settle(self, stream: str, name: str, seq: int, delay_seconds: float | None) -> None:
        """An ack (None) or a nak with its delay."""
        found = self.streams.get(stream)
        consumer = found.consumers.get(name) if found is not None else None
        if consumer is None:
            return
        if delay_seconds is None:
            consumer.ack(seq)
        else:
            consumer.nak(seq, delay_seconds, self.clock.monotonic())
        self.dispatch(stream, name)

    def dispatch(self, stream: str, name: str) -> None:
        """Deliver what is due, and come back by a timer for what will be."""
        found = self.streams.get(stream)
        consumer = found.consumers.get(name) if found is not None else None
        timer = self._timers.pop((stream, name), None)
        if timer is not None:
            timer.cancel()
        if consumer is None or not self.running:
            return
        now = self.clock.monotonic()
        due = consumer.dispatch(now)
        if due is not None:
            self._timers[stream, name] = asyncio.get_running_loop().call_later(
                max(0.0, due - now), self.dispatch, stream, name
            )

    # ---- core subjects -------------------------------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)

    def publish(self, subject: str, body: bytes) -> None:
        """Without an answer; stored as well when a stream takes the subject, as on the real server."""
        if self.stream_for(subject) is None:
            self._deliver(subject, body, None)
            return
        try:
            self.append(subject, body, "", None)
        except BusError:
            return  # nobody asked

    def request(self, subject: str, body: bytes, answer: Callable[[bytes, str], None]) -> bool:
        """False when nobody serves the subject. A stream that takes it answers with its acknowledgement."""
        served = self._deliver(subject, body, answer)
        stream = self.stream_for(subject)
        if stream is None:
            return served
        try:
            seq = self.append(subject, body, "", None).seq
            answer(msgspec.json.encode({"stream": stream.spec.name, "seq": seq}), "")
        except BusError as error:
            answer(msgspec.json.encode({"error": {"code": 503, "err_code": error.nats_code}}), "")
        return True

    def _deliver(self, subject: str, body: bytes, answer: Callable[[bytes, str], None] | None) -> bool:
        groups: dict[str, list[Subscriber]] = {}
        chosen: list[Subscriber] = []
        for subscriber in self._subscribers:
            if not matches(subscriber.subject, subject):
                continue
            if subscriber.queue:
                groups.setdefault(subscriber.queue, []).append(subscriber)
            else:
                chosen.append(subscriber)
        for queue, members in groups.items():
            self._turn[queue] = self._turn.get(queue, -1) + 1
            chosen.append(members[self._turn[queue] % len(members)])
        for subscriber in chosen:
            seconds = self.faults.request_seconds(subscriber.peer.name, subject)
            if seconds is not None:
                subscriber.peer.down.send(partial(subscriber.arrive, subject, body, answer), seconds)
        return bool(chosen)


def absent(stream: str, name: str) -> BusDenied:
    return BusDenied(
        f"stream {stream} has no consumer {name}; a service makes it "
        "(an agent's appears when the ledger has folded its node.joined)"
    )

"""An ordered read of a stream that survives every reconnect: an ephemeral pull consumer, re-made when in doubt.

Pulling in large batches onto an own inbox is as fast as a push consumer (bench/bus_read.py) and bounds memory by
itself: what was not asked for cannot arrive. Any doubt (a gap, a missed heartbeat, a reconnect, a consumer that went)
has one cure: check that the stream is still the one we know, make a new consumer behind the last delivered message.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from rigbook_bus import jetstream_api as api
from rigbook_bus.connection import header_of, status_of
from rigbook_bus.protocol import BusError, BusUnavailable, Link, Message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_bus.connection import Connection, Subscription

__all__ = ["JetStreamTail"]

log = logging.getLogger("rigbook_bus")

PULL_MESSAGES = 5_000  # largest batches read fastest
PULL_BYTES = 8 * 1024 * 1024
PULL_EXPIRES_SECONDS = 30.0
# Asked for plus not yet taken: the memory bound of a tail (with PULL_BYTES per pull in flight).
AHEAD_MESSAGES_MAX = 2 * PULL_MESSAGES
AHEAD_BYTES_MAX = 4 * PULL_BYTES
HEARTBEAT_SECONDS = 0.5
SILENT_SECONDS_MAX = (
    1.75  # three heartbeats and some patience; the server's default leaves a reader blind for 16 s
)
RETRY_SECONDS_MIN = 0.02
RETRY_SECONDS_MAX = 1.0
# The server forgets our consumer after this long without a pull: a reader that was slow makes a new one.
INACTIVE_SECONDS = 60


class JetStreamTail:
    """Every matching message once, in sequence. One reader at a time."""

    def __init__(
        self, connection: Connection, stream: str, *, start_seq: int, filters: Sequence[str]
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._filters = list(filters)
        self._buffer: deque[Message] = deque()
        self._buffered_bytes = 0
        self._last_seq = max(1, start_seq) - 1  # of what went into the buffer
        self._created_ns = 0
        self._first_seq = 1
        self._strict = False
        # of the consumer in use
        self._consumer = ""
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._consumer_seq = 0
        self._asked = 0
        self._heard = 0.0
        self._doubt = ""  # why the consumer must be re-made; empty = none
        # between parser, keeper and reader
        self._wake = asyncio.Event()
        self._arrived = asyncio.Event()
        self._failure: BusError | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._forget_link = connection.on_link(self._on_link)

    async def start(self) -> None:
        """Begin. Raises BusDenied (no such stream, no right), BusUnavailable (away, or the stream ends too early)."""
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise
        self._keeper = asyncio.create_task(self._keep(), name=f"tail {self._stream}")

    async def batch(self, *, max_messages: int, wait_seconds: float | None) -> Sequence[Message]:
        if not self._buffer and self._failure is None:
            self._arrived.clear()
            try:
                async with asyncio.timeout(wait_seconds):
                    await self._arrived.wait()
            except TimeoutError:
                return ()
        if not self._buffer:
            if self._failure is not None:
                raise self._failure
            return ()
        if max_messages >= len(self._buffer):
            taken = list(self._buffer)
            self._buffer.clear()
            self._buffered_bytes = 0
        else:
            taken = [self._buffer.popleft() for _ in range(max_messages)]
            self._buffered_bytes -= sum(len(message.body) for message in taken)
        if self._asked < PULL_MESSAGES:
            self._wake.set()
        return taken

    async def close(self) -> None:
        """End it; the server's consumer is deleted when there is a connection, else it expires."""
        self._forget_link()
        if self._failure is None:
            self._failure = BusUnavailable(f"the tail of {self._stream} is closed")
        self._arrived.set()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._drop_consumer()

    # ---- from the parser: no awaiting, no raising ----------------------------------------------------------

    def _take(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        self._heard = asyncio.get_running_loop().time()
        if not reply.startswith(b"$JS.ACK."):
            self._take_status(headers)
            return
        if self._doubt:
            return
        # $JS.ACK.stream.consumer.tries.stream_seq.consumer_seq.time.pending, or with domain and account before.
        parts = reply.split(b".")
        at = 5 if len(parts) == 9 else 7
        seq = int(parts[at])
        self._asked -= 1
        if int(parts[at + 1]) != self._consumer_seq + 1:
            self._suspect(f"message {self._consumer_seq + 1} of the consumer was lost")
            return
        if self._strict and seq != self._last_seq + 1 and not self._begins_at(seq):
            self._suspect(f"sequence {self._last_seq + 1} was skipped")
            return
        self._consumer_seq += 1
        if seq <= self._last_seq:
            return
        self._last_seq = seq
        self._buffer.append(Message(seq, subject.decode(), int(parts[at + 2]), body))
        self._buffered_bytes += len(body)
        self._arrived.set()
        if self._asked == PULL_MESSAGES // 2:
            self._wake.set()

    def _begins_at(self, seq: int) -> bool:
        """A stream may have lost its head to its limits; never its middle."""
        return self._consumer_seq == 0 and seq == self._first_seq > self._last_seq

    def _take_status(self, headers: bytes | None) -> None:
        status = status_of(headers)
        if status == 100:  # heartbeat
            return
        if status in (404, 408) or (status == 409 and headers is not None and b"MaxBytes" in headers):
            # the pull has ended; what it did not bring is no longer on its way
            self._asked = max(0, self._asked - int(header_of(headers or b"", b"Nats-Pending-Messages") or 0))
            self._wake.set()
            return
        self._suspect((headers or b"")[9:60].partition(b"\r")[0].decode(errors="replace") or "unknown status")

    def _suspect(self, why: str) -> None:
        self._doubt = self._doubt or why
        self._wake.set()

    def _on_link(self, link: Link, why: str) -> None:
        if link is Link.CLOSED:
            self._fail(BusUnavailable(f"the connection is closed for good: {why}"))
        self._suspect(f"bus {link.value}")

    def _fail(self, error: BusError) -> None:
        if self._failure is None:
            self._failure = error
        self._arrived.set()

    # ---- the keeper ----------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Ask for more while there is room, and re-make the consumer when in doubt."""
        retry_seconds = RETRY_SECONDS_MIN
        while not self._is_over():
            try:
                if self._doubt:
                    if self._connection.link is not Link.CONNECTED:
                        await self._woken(None)
                        continue
                    log.info("tail of %s: %s; going on behind %d", self._stream, self._doubt, self._last_seq)
                    await self._open()
                await self._pull()
                retry_seconds = RETRY_SECONDS_MIN
            except BusUnavailable as error:
                if self._is_over():
                    return
                log.info("tail of %s: %s", self._stream, error)
                self._suspect("not re-made yet")
                await asyncio.sleep(retry_seconds)
                retry_seconds = min(RETRY_SECONDS_MAX, retry_seconds * 2)
                continue
            except BusError as error:
                self._fail(error)
                return
            await self._woken(HEARTBEAT_SECONDS)
            if self._asked > 0 and asyncio.get_running_loop().time() - self._heard > SILENT_SECONDS_MAX:
                self._suspect("the server fell silent")

    def _is_over(self) -> bool:
        return self._failure is not None

    async def _woken(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _pull(self) -> None:
        while (
            not self._doubt
            and self._asked <= PULL_MESSAGES // 2
            and len(self._buffer) + self._asked + PULL_MESSAGES <= AHEAD_MESSAGES_MAX + PULL_MESSAGES // 2
            and self._buffered_bytes < AHEAD_BYTES_MAX
        ):
            question = {
                "batch": PULL_MESSAGES,
                "max_bytes": PULL_BYTES,
                "expires": round(PULL_EXPIRES_SECONDS * api.NS),
                "idle_heartbeat": round(HEARTBEAT_SECONDS * api.NS),
            }
            if self._asked == 0:
                self._heard = asyncio.get_running_loop().time()
            self._asked += PULL_MESSAGES
            await self._connection.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}",
                msgspec.json.encode(question),
                reply=self._inbox,
            )

    async def _open(self) -> None:
        """Check that the stream is the one we know; make a consumer behind the last message we have."""
        await self._drop_consumer()
        self._doubt = ""
        await self._check_stream()
        name = self._connection.new_inbox().rpartition(".")[2]
        self._inbox = self._connection.new_inbox()
        self._subscription = await self._connection.subscribe(self._inbox, self._take)
        self._consumer_seq = 0
        self._asked = 0
        answer = await api.create_consumer(
            self._connection,
            self._stream,
            {
                "name": name,
                "deliver_policy": "by_start_sequence",
                "opt_start_seq": self._last_seq + 1,
                "ack_policy": "none",
                "replay_policy": "instant",
                "filter_subjects": self._filters,
                "inactive_threshold": INACTIVE_SECONDS * api.NS,
                "mem_storage": True,
                "num_replicas": 1,
                "max_waiting": 8,
            },
        )
        if answer.error is not None:
            raise api.refusal(answer.error, f"reading stream {self._stream}")
        self._consumer = name

    async def _check_stream(self) -> None:
        answer = await api.call(self._connection, f"$JS.API.STREAM.INFO.{self._stream}", {}, api.StreamAnswer)
        begun = self._created_ns != 0
        if answer.error is not None:
            if begun and answer.error.err_code == api.STREAM_NOT_FOUND:
                raise self._lost(f"stream {self._stream} is gone")
            raise api.refusal(answer.error, f"reading stream {self._stream}")
        facts = api.facts_of(self._stream, answer)
        if begun and facts.created_ns != self._created_ns:
            raise self._lost(
                f"stream {self._stream} is not the one this reader began on: it was created anew"
            )
        if facts.last_seq < self._last_seq:
            raise self._lost(
                f"stream {self._stream} ends at {facts.last_seq}, this reader has had {self._last_seq}: its end is lost"
            )
        self._created_ns = facts.created_ns
        self._first_seq = facts.first_seq
        # In a stream that never drops from its middle, sequences have no gaps: a gap is damage.
        config = answer.config
        self._strict = (
            not self._filters
            and bool(config.get("deny_delete"))
            and config.get("max_msgs_per_subject", -1) <= 0
        )

    def _lost(self, what: str) -> BusUnavailable:
        error = BusUnavailable(f"{what}; check every belief that was read from it (`rigbook doctor`)")
        self._fail(error)
        return error

    async def _drop_consumer(self) -> None:
        if self._subscription is not None:
            await self._connection.unsubscribe(self._subscription)
            self._subscription = None
        if self._consumer and self._connection.link is Link.CONNECTED:
            try:
                await self._connection.publish(
                    f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._consumer}", b""
                )
            except BusError:
                log.debug("tail of %s: its old consumer will expire by itself", self._stream)
        self._consumer = ""

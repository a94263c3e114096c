"""A stream and its durable consumers in memory: the rules of nats-server 2.15 without network, disk or time of its own.

Every rule here was read off a real server; the contract suite holds the two against each other.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from rigbook_bus.jetstream_api import ApiError, refusal
from rigbook_bus.protocol import Appended, BusDenied, ConsumerSpec, Expect, Message, StreamFacts, StreamSpec
from rigbook_bus.subject import matches, matches_any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["MemoryConsumer", "MemoryStream", "Pull"]

# filestore.go, fileStoreMsgSize: length, sequence, time, subject length, checksum; with headers one length more.
RECORD_BYTES = 30
RECORD_HEADER_BYTES = 4
HEADER_LINE_BYTES = len("NATS/1.0\r\n\r\n")
MATCHES_KEPT_MAX = 100_000


class MemoryStream:
    """The log of one stream. Sequences start at 1 and are never used twice, except after `truncate` (as in life)."""

    def __init__(self, spec: StreamSpec, created_ns: int) -> None:
        self.spec = spec
        self.created_ns = created_ns
        self.last_seq = 0
        self.bytes = 0
        self.records: dict[int, Message] = {}
        self.consumers: dict[str, MemoryConsumer] = {}
        self._sizes: dict[int, int] = {}
        self._stored_at: dict[int, float] = {}
        self._ids: dict[str, tuple[int, float]] = {}
        self._seqs_of: dict[str, deque[int]] = {}  # per subject, for `max_per_subject` and `last`
        self._last_of: dict[str, int] = {}  # per filter that was ever asked for
        self._matches: dict[tuple[str, str], bool] = {}

    @property
    def first_seq(self) -> int:
        return next(iter(self.records), self.last_seq + 1)

    def facts(self, now: float) -> StreamFacts:
        self.expire(now)
        return StreamFacts(
            name=self.spec.name,
            created_ns=self.created_ns,
            first_seq=self.first_seq,
            last_seq=self.last_seq,
            messages=len(self.records),
            bytes=self.bytes,
        )

    def append(
        self,
        subject: str,
        body: bytes,
        *,
        message_id: str,
        expect: Expect | None,
        now: float,
        now_ns: int,
        refused: str = "",
    ) -> Appended:
        """Expectation first, de-duplication second, limits last; raises BusConflict or BusDenied."""
        self.expire(now)
        if expect is not None and (last := self.last_seq_of(expect.filter)) != expect.last_seq:
            raise refusal(ApiError(400, 10071, f"wrong last sequence: {last}"), subject)
        if message_id and (known := self._ids.get(message_id)) is not None:
            return Appended(seq=known[0], duplicate=True)
        size = _record_bytes(subject, body, message_id, expect)
        if refused:
            raise refusal(ApiError(503, 10077, refused), subject)
        if 0 < self.spec.max_bytes < self.bytes + size:
            raise refusal(ApiError(503, 10077, "maximum bytes exceeded"), subject)
        seq = self.last_seq = self.last_seq + 1
        self.records[seq] = Message(seq, subject, now_ns, body)
        self._sizes[seq] = size
        self.bytes += size
        self._stored_at[seq] = now
        if message_id:
            self._ids[message_id] = (seq, now)
        self._index(seq, subject)
        if self.spec.max_per_subject > 0:
            mine = self._seqs_of[subject]
            while len(mine) > self.spec.max_per_subject:
                self._remove(mine[0])
        return Appended(seq=seq, duplicate=False)

    def last_seq_of(self, subject_filter: str) -> int:
        """The last sequence of a matching subject, 0 = none."""
        known = self._last_of.get(subject_filter)
        if known is None:
            known = max(
                (
                    seqs[-1]
                    for subject, seqs in self._seqs_of.items()
                    if seqs and matches(subject_filter, subject)
                ),
                default=0,
            )
            self._last_of[subject_filter] = known
        return known

    def after(self, seq: int, up_to: int, filters: Sequence[str], most: int) -> tuple[list[Message], int]:
        """At most `most` matching messages behind `seq`, and the sequence up to which was looked."""
        found: list[Message] = []
        for at in range(max(seq + 1, self.first_seq), up_to + 1):
            if len(found) >= most:
                return found, at - 1
            message = self.records.get(at)
            if message is not None and (not filters or self.wanted(filters, message.subject)):
                found.append(message)
        return found, up_to

    def wanted(self, filters: Sequence[str], subject: str) -> bool:
        """`matches_any`, remembered: a simulation asks the same few questions millions of times."""
        if not filters:
            return True
        key = ("\n".join(filters), subject)
        known = self._matches.get(key)
        if known is None:
            if len(self._matches) >= MATCHES_KEPT_MAX:
                self._matches.clear()
            known = self._matches[key] = matches_any(filters, subject)
        return known

    def expire(self, now: float) -> None:
        """Forget message ids past the duplicate window and messages past `max_age`."""
        window = self.spec.duplicate_window_seconds
        while self._ids:
            oldest = next(iter(self._ids))
            if now - self._ids[oldest][1] < window:
                break
            del self._ids[oldest]
        if self.spec.max_age_seconds > 0:
            while self.records and now - self._stored_at[self.first_seq] >= self.spec.max_age_seconds:
                self._remove(self.first_seq)

    def truncate(self, last_seq: int) -> None:
        """Lose the end, as a damaged block does: nothing is logged, sequences will be used again."""
        for seq in [seq for seq in self.records if seq > last_seq]:
            del self.records[seq], self._stored_at[seq]
            self.bytes -= self._sizes.pop(seq)
        self.last_seq = min(self.last_seq, last_seq)
        # the server rebuilds its memory of ids from what it finds on the disk
        self._ids = {key: value for key, value in self._ids.items() if value[0] <= last_seq}
        self._seqs_of.clear()
        self._last_of.clear()
        for seq, message in self.records.items():
            self._index(seq, message.subject)
        for consumer in self.consumers.values():
            consumer.truncate(self.last_seq)

    def _index(self, seq: int, subject: str) -> None:
        self._seqs_of.setdefault(subject, deque()).append(seq)
        for subject_filter in self._last_of:
            if self.wanted((subject_filter,), subject):
                self._last_of[subject_filter] = seq

    def _remove(self, seq: int) -> None:
        message = self.records.pop(seq)
        del self._stored_at[seq]
        self.bytes -= self._sizes.pop(seq)
        self._seqs_of[message.subject].remove(seq)
        self._last_of.clear()


def _record_bytes(subject: str, body: bytes, message_id: str, expect: Expect | None) -> int:
    size = RECORD_BYTES + len(subject.encode()) + len(body)
    headers: list[str] = []
    if message_id:
        headers.append(f"Nats-Msg-Id: {message_id}\r\n")
    if expect is not None:
        headers.append(f"Nats-Expected-Last-Subject-Sequence: {expect.last_seq}\r\n")
        if expect.filter != subject:
            headers.append(f"Nats-Expected-Last-Subject-Sequence-Subject: {expect.filter}\r\n")
    if headers:
        size += RECORD_HEADER_BYTES + HEADER_LINE_BYTES + sum(len(header) for header in headers)
    return size


class Pull:
    """One open question for messages. `take` gets (message, tries), `lost` is told why none will come."""

    __slots__ = ("expires_at", "left", "lost", "take")

    def __init__(
        self,
        take: Callable[[Message, int], None],
        lost: Callable[[BusDenied], None],
        *,
        left: int,
        expires_at: float,
    ) -> None:
        self.take = take
        self.lost = lost
        self.left = left
        self.expires_at = expires_at


class _Unacked(msgspec.Struct):
    tries: int
    due: float  # monotonic: when it comes again


class MemoryConsumer:
    """The state of a durable pull consumer: it outlives its readers and their connections."""

    def __init__(self, spec: ConsumerSpec, stream: MemoryStream) -> None:
        self.spec = spec
        self._stream = stream
        self._next_seq = max(1, spec.start_seq)
        self._unacked: dict[int, _Unacked] = {}
        self._again: deque[int] = deque()  # due, in the order in which they became due
        self._waiting: deque[Pull] = deque()

    @property
    def is_asked(self) -> bool:
        """Whether a reader waits: without one there is nothing to hand out."""
        return bool(self._waiting)

    def pull(self, pull: Pull) -> None:
        self._waiting.append(pull)

    def withdraw(self, pull: Pull) -> None:
        if pull in self._waiting:
            self._waiting.remove(pull)

    def ack(self, seq: int) -> None:
        """Acknowledge; a late ack of an earlier delivery counts as well."""
        self._unacked.pop(seq, None)

    def nak(self, seq: int, delay_seconds: float, now: float) -> None:
        unacked = self._unacked.get(seq)
        if unacked is None:
            return
        unacked.due = now + max(0.0, delay_seconds)
        if delay_seconds <= 0 and seq not in self._again:
            self._again.append(seq)

    def dispatch(self, now: float) -> float | None:
        """Hand out what can be handed out; returns when (monotonic) there may be more to do by itself."""
        for seq in sorted(seq for seq, unacked in self._unacked.items() if unacked.due <= now):
            if seq not in self._again:
                self._again.append(seq)
        while self._waiting:
            pull = self._waiting[0]
            if pull.left <= 0 or pull.expires_at <= now:
                self._waiting.popleft()
                continue
            found = self._next(now)
            if found is None:
                break
            message, tries = found
            pull.left -= 1
            pull.take(message, tries)
        # Without a reader nobody gains from waking up: the next pull comes here anyway.
        return min((one.due for one in self._unacked.values()), default=None) if self._waiting else None

    def truncate(self, last_seq: int) -> None:
        self._next_seq = min(self._next_seq, last_seq + 1)
        self._unacked = {seq: one for seq, one in self._unacked.items() if seq <= last_seq}
        self._again = deque(seq for seq in self._again if seq <= last_seq)

    def forget_pulls(self) -> None:
        """The server ended: questions do not outlive it, unacknowledged messages do."""
        self._waiting.clear()

    def drop_pulls(self, why: BusDenied) -> None:
        waiting, self._waiting = self._waiting, deque()
        for pull in waiting:
            pull.lost(why)

    def _next(self, now: float) -> tuple[Message, int] | None:
        for message, tries in self._due():
            self._unacked[message.seq] = _Unacked(tries, now + self.spec.ack_wait_seconds)
            return message, tries
        if len(self._unacked) >= self.spec.max_ack_pending > 0:
            return None
        found, looked = self._stream.after(self._next_seq - 1, self._stream.last_seq, self.spec.filters, 1)
        self._next_seq = looked + 1 if not found else found[0].seq + 1
        if not found:
            return None
        self._unacked[found[0].seq] = _Unacked(1, now + self.spec.ack_wait_seconds)
        return found[0], 1

    def _due(self) -> Iterator[tuple[Message, int]]:
        while self._again:
            seq = self._again.popleft()
            unacked = self._unacked.get(seq)
            message = self._stream.records.get(seq)
            if unacked is None:
                continue
            if message is None or 0 < self.spec.max_deliver <= unacked.tries:
                del self._unacked[seq]  # nothing more will be tried; it stays in the stream
                continue
            yield message, unacked.tries + 1

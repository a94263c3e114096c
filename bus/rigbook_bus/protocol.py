"""The bus as every service sees it: append, tail, work, ask.

Two implementations answer alike and pass one contract suite: `rigbook_bus.jetstream` (a real
nats-server) and `rigbook_bus.memory` (a whole in-process server for tests and simulation).

The bus knows no GPU and no event kind: a message is a subject and bytes.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

__all__ = [
    "READER_WAIT_SECONDS_MIN",
    "Appended",
    "Bus",
    "BusConflict",
    "BusDenied",
    "BusError",
    "BusUnavailable",
    "BusUnknown",
    "ConsumerSpec",
    "Delivery",
    "Expect",
    "Link",
    "Message",
    "Reader",
    "StreamFacts",
    "StreamSpec",
    "Tail",
]

# A reader asks the server at each `batch`; below this no answer could arrive, and a poll with 0 would see nothing.
READER_WAIT_SECONDS_MIN = 0.01


class BusError(Exception):
    """The bus could not do what was asked. `code` is stable; the text says what to do next.

    `nats_code` is the server's own error code (`err_code` of the JetStream API), 0 when it gave none.
    """

    code = "bus_error"

    def __init__(self, text: str = "", *, nats_code: int = 0) -> None:
        super().__init__(text)
        self.nats_code = nats_code


class BusConflict(BusError):
    """The log has moved past the expected position (NATS 10071, or 10164 for a concurrent loser).

    Nothing is known from this answer about an earlier try: read on, fold, decide again.
    """

    code = "bus_conflict"


class BusUnknown(BusError):
    """No answer: the message may or may not be on the log. Read on before deciding again."""

    code = "bus_unknown"


class BusUnavailable(BusError):
    """Not connected. Nothing was sent; safe to try again after the reconnect."""

    code = "bus_unavailable"


class BusDenied(BusError):
    """The server's answer is no, and will stay no (rights, missing stream, message too large)."""

    code = "bus_denied"


class Expect(msgspec.Struct, frozen=True):
    """Append only if the last message matching `filter` still has sequence `last_seq` (0 = none).

    Safe only while *every* writer of those subjects uses the same `filter` string: with different
    filters a three-node cluster stores both of two concurrent messages. Hence one constant
    (`rigbook_schemas.subjects.OWN_ALL`) and one append function.
    """

    last_seq: int
    filter: str


class Appended(msgspec.Struct, frozen=True):
    """The server's acknowledgement. Never fold from it: state moves only by what was read back."""

    seq: int
    duplicate: bool


class Message(msgspec.Struct, frozen=True, gc=False):
    """One stored message as read from a stream. `received_ns` is the server's clock, Unix ns."""

    seq: int
    subject: str
    received_ns: int
    body: bytes


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as Rigbook wants it. Every option with a consequence is spelled out."""

    name: str
    subjects: tuple[str, ...]
    max_age_seconds: float = 0.0  # 0 = for ever
    max_bytes: int = -1  # -1 = no bound; reached = new messages are refused, never old ones dropped
    max_per_subject: int = -1
    replicas: int = 1
    append_only: bool = True  # deny delete, purge and rollup
    synced: bool = True  # False: `persist_mode: async`, for data that may be lost in a power cut
    duplicate_window_seconds: float = 120.0


class StreamFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says of a stream: enough to notice that it is not the one we knew."""

    name: str
    created_ns: int
    first_seq: int  # 1 past last_seq when empty
    last_seq: int
    messages: int
    bytes: int


class ConsumerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A durable pull consumer. Pre-created by a service; its reader needs no right to create one."""

    stream: str
    name: str
    filters: tuple[str, ...] = ()
    start_seq: int = 1
    ack_wait_seconds: float = 30.0
    max_deliver: int = -1
    max_ack_pending: int = 1000


class Tail(Protocol):
    """An ordered read of a stream: every matching message once, in sequence, gaps never hidden."""

    async def batch(self, *, max_messages: int, wait_seconds: float | None) -> Sequence[Message]:
        """Up to `max_messages` that are there; waits for the first one at most `wait_seconds`.

        Empty when nothing came in time. None = wait for ever. Survives reconnects by itself; raises
        `BusUnavailable` only when the stream is gone, or is not the one the tail began on (created
        anew, or its end fell behind what was already delivered): the reader must then re-check
        everything it believes.
        """
        ...

    async def close(self) -> None: ...


class Delivery(Protocol):
    """One message of a durable consumer; comes again until acknowledged."""

    @property
    def message(self) -> Message: ...
    @property
    def delivered(self) -> int:
        """1 on the first try."""
        ...

    async def ack(self) -> None:
        """Raises BusUnavailable when it could not be sent: the message will come again."""
        ...

    async def nak(self, delay_seconds: float = 0.0) -> None: ...


class Reader(Protocol):
    """The reading side of a durable pull consumer."""

    async def batch(self, *, max_messages: int, wait_seconds: float) -> Sequence[Delivery]:
        """Ask for up to `max_messages`, wait for the first one at most `wait_seconds` (10 ms at least).

        Empty when nothing came in time. Raises BusUnavailable when the time is over and we are away, BusDenied
        when the consumer is gone.
        """
        ...

    async def close(self) -> None: ...


class Link(enum.Enum):
    """The connection as an operator sees it."""

    CONNECTED = "connected"
    AWAY = "away"
    CLOSED = "closed"


class Bus(Protocol):
    """Everything a Rigbook process may ask of the bus."""

    @property
    def link(self) -> Link: ...

    def on_link(self, told: Callable[[Link, str], None]) -> None:
        """Call `told(link, why)` on every change, so that an outage is visible."""
        ...

    async def append(
        self,
        subject: str,
        body: bytes,
        *,
        message_id: str,
        expect: Expect | None = None,
        timeout_seconds: float = 5.0,
    ) -> Appended:
        """Store one message and wait for the acknowledgement.

        Order of checks, as on the real server: expectation first, de-duplication second
        (by `message_id` per stream, whatever the content).

        Raises: BusConflict, BusUnknown (time-out), BusUnavailable, BusDenied.
        """
        ...

    async def append_many(
        self, messages: Sequence[tuple[str, bytes, str]], *, timeout_seconds: float = 30.0
    ) -> list[Appended | BusError]:
        """Store (subject, body, message_id) messages without an expectation, pipelined, in order of sending.

        Every acknowledgement is waited for; the answer has one entry per message, in order.
        """
        ...

    async def publish(self, subject: str, body: bytes) -> None:
        """Core NATS publish, no storage (used for hints only, never for facts)."""
        ...

    async def ensure_stream(self, spec: StreamSpec) -> StreamFacts:
        """Create the stream, or check that the one there has the same spec (BusDenied names the difference)."""
        ...

    async def stream(self, name: str) -> StreamFacts | None:
        """None = the server says there is no such stream. Raises when the server does not answer."""
        ...

    async def message(self, stream: str, seq: int) -> Message | None:
        """The stored message at `seq`, None when there is none."""
        ...

    async def last(self, stream: str, subject_filter: str) -> Message | None:
        """The last stored message whose subject matches, None when there is none."""
        ...

    async def tail(self, stream: str, *, start_seq: int = 1, filters: Sequence[str] = ()) -> Tail: ...

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        """Create the durable pull consumer or leave the one there alone (its position is kept)."""
        ...

    async def delete_consumer(self, stream: str, name: str) -> bool: ...

    async def reader(self, stream: str, name: str) -> Reader:
        """Bind to an existing durable pull consumer. Raises BusDenied when it does not exist."""
        ...

    async def request(self, subject: str, body: bytes, *, timeout_seconds: float = 5.0) -> bytes:
        """Raises BusUnknown on time-out, BusUnavailable when nobody serves the subject or we are away."""
        ...

    async def serve(
        self, subject: str, answer: Callable[[str, bytes], Awaitable[bytes]], *, queue: str = ""
    ) -> Callable[[], Awaitable[None]]:
        """Answer requests on `subject` (wildcards allowed); returns the coroutine function that stops it."""
        ...

    def listen(self, subject: str) -> AsyncGenerator[tuple[str, bytes], None]:
        """Core NATS subscription, for hints; may lose messages. `aclose()` ends it.

        Interest begins at the first `anext`, and hints are dropped, oldest first, when nobody reads them.
        """
        ...

    async def close(self) -> None: ...

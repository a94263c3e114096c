"""The JetStream API as JSON: what we ask, what comes back, and what each refusal means for an operator.

Codes and texts are those of nats-server 2.15 (`server/errors.json`).
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rigbook_bus.protocol import (
    BusConflict,
    BusDenied,
    BusError,
    BusUnavailable,
    BusUnknown,
    ConsumerSpec,
    Message,
    StreamFacts,
    StreamSpec,
)

if TYPE_CHECKING:
    from rigbook_bus.connection import Connection

__all__ = [
    "Answer",
    "ConsumerAnswer",
    "DeleteAnswer",
    "MessageAnswer",
    "PubAck",
    "StreamAnswer",
    "StreamNames",
    "call",
    "consumer_config",
    "create_consumer",
    "differences",
    "facts_of",
    "message_of",
    "read_answer",
    "refusal",
    "stream_config",
]

NS = 1_000_000_000
CALL_SECONDS = 5.0
NO_RESPONDERS = 503

STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
CONSUMER_EXISTS = 10148
CONSUMER_NAME_IN_USE = 10013
NO_MESSAGE = 10037
STREAM_NAME_IN_USE = 10058
# Wrong last sequence; and, on a cluster, lost against a concurrent message of the same filter.
CONFLICTS = frozenset({10071, 10164})
# The server's own words for "not now": cluster without a leader or without quorum, JetStream still starting.
NOT_NOW = frozenset({10004, 10005, 10007, 10008, 10009, 10041})

REMEDIES = {
    10023: "the server is out of memory or files; free some, then try again",
    10039: "JetStream is not enabled for this account; start the nats-server with `jetstream {}`",
    10047: "the disk or the server's max_file_store is full; make room or raise it",
    10052: "make the duplicate window at most as long as max_age",
    10054: "send less, or raise the stream's max_msg_size",
    10057: "the stream is append-only, by design",
    10058: "another program made this stream with other settings",
    10059: "create the stream first (start the ledger service, or `rigbook up`)",
    10065: "another stream stores these subjects already",
    10076: "the server is not running JetStream; look into its log",
    10077: "the stream has reached its limit or the disk is full; raise max_bytes or make room, nothing was dropped",
    10110: "the stream is append-only, by design",
}


class ApiError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class PubAck(msgspec.Struct, frozen=True):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: ApiError | None = None


class StreamState(msgspec.Struct, frozen=True):
    messages: int = 0
    bytes: int = 0
    first_seq: int = 0
    last_seq: int = 0


class StreamAnswer(msgspec.Struct, frozen=True):
    config: dict[str, Any] = {}
    created: str = ""
    state: StreamState = StreamState()
    error: ApiError | None = None


class StreamNames(msgspec.Struct, frozen=True):
    streams: list[str] | None = None
    error: ApiError | None = None


class StoredMessage(msgspec.Struct, frozen=True):
    subject: str
    seq: int
    time: str
    data: str = ""


class MessageAnswer(msgspec.Struct, frozen=True):
    message: StoredMessage | None = None
    error: ApiError | None = None


class ConsumerAnswer(msgspec.Struct, frozen=True):
    name: str = ""
    error: ApiError | None = None


class DeleteAnswer(msgspec.Struct, frozen=True):
    success: bool = False
    error: ApiError | None = None


T = TypeVar("T")
Answer = TypeVar("Answer", StreamAnswer, MessageAnswer, ConsumerAnswer, DeleteAnswer, StreamNames)


async def call(connection: Connection, subject: str, question: object, shape: type[Answer]) -> Answer:
    """One call of the JetStream API; an `error` in the answer is the caller's business, except "not now".

    All our calls may be repeated without harm, so "no answer" is BusUnavailable here.
    Raises: BusUnavailable (away, no answer, no leader), BusDenied (rights, unreadable answer).
    """
    try:
        reply = await connection.call(subject, msgspec.json.encode(question), timeout_seconds=CALL_SECONDS)
    except BusUnknown as error:
        raise BusUnavailable(str(error)) from error
    if reply.status == NO_RESPONDERS:
        raise BusUnavailable(f"JetStream does not answer {subject}; is it enabled, and has it a leader?")
    answer = read_answer(reply.body, shape, subject)
    if answer.error is not None and answer.error.err_code in NOT_NOW:
        raise refusal(answer.error, subject)
    return answer


async def create_consumer(connection: Connection, stream: str, config: dict[str, Any]) -> ConsumerAnswer:
    """Create a consumer (never update one). A single filter goes into the subject too: the server insists."""
    subject = f"$JS.API.CONSUMER.CREATE.{stream}.{config['name']}"
    config = dict(config)
    filters = config.pop("filter_subjects", [])
    if len(filters) == 1:
        config["filter_subject"] = filters[0]
        subject += f".{filters[0]}"
    elif filters:
        config["filter_subjects"] = filters
    question = {"stream_name": stream, "config": config, "action": "create"}
    return await call(connection, subject, question, ConsumerAnswer)


def read_answer(body: bytes, shape: type[T], subject: str) -> T:
    """Decode an answer; what cannot be read is a denial that shows the first bytes."""
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.MsgspecError as error:
        raise BusDenied(f"{subject} answered what is no JetStream answer: {body[:80]!r} ({error})") from error


def refusal(error: ApiError, what: str) -> BusError:
    """The exception for an error answer: conflict, not now, or no (with the code and what to do)."""
    text = f"{what}: {error.description or 'refused'} (NATS {error.err_code})"
    if error.err_code in CONFLICTS:
        return BusConflict(text, nats_code=error.err_code)
    if error.err_code in NOT_NOW:
        return BusUnavailable(f"{text}; nothing was stored, try again", nats_code=error.err_code)
    remedy = REMEDIES.get(error.err_code)
    return BusDenied(f"{text}; {remedy}" if remedy else text, nats_code=error.err_code)


def nanoseconds(text: str) -> int:
    """RFC 3339 with up to nine decimals (Go's) to Unix nanoseconds; `datetime` alone would cut to microseconds."""
    head, _, rest = text.partition(".")
    digits = rest.rstrip("Z")[:9] if rest.endswith("Z") else ""
    whole = datetime.fromisoformat(head.rstrip("Z")).replace(tzinfo=UTC)
    return int(whole.timestamp()) * NS + int(digits.ljust(9, "0") or "0")


def facts_of(name: str, answer: StreamAnswer) -> StreamFacts:
    state = answer.state
    return StreamFacts(
        name=name,
        created_ns=nanoseconds(answer.created),
        # The server says 0 for a stream that never held a message and last + 1 for one that is empty again.
        first_seq=state.first_seq if state.messages else state.last_seq + 1,
        last_seq=state.last_seq,
        messages=state.messages,
        bytes=state.bytes,
    )


def message_of(stored: StoredMessage) -> Message:
    return Message(
        seq=stored.seq,
        subject=stored.subject,
        received_ns=nanoseconds(stored.time),
        body=base64.b64decode(stored.data),
    )


def stream_config(spec: StreamSpec) -> dict[str, Any]:
    """Every option with a consequence, spelled out: a server default that changes must change nothing here."""
    config: dict[str, Any] = {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": "limits",
        "storage": "file",
        "num_replicas": spec.replicas,
        "discard": "new",
        "max_consumers": -1,
        "max_msgs": -1,
        "max_bytes": spec.max_bytes if spec.max_bytes > 0 else -1,
        "max_age": round(spec.max_age_seconds * NS),
        "max_msgs_per_subject": spec.max_per_subject if spec.max_per_subject > 0 else -1,
        "max_msg_size": -1,
        "duplicate_window": round(spec.duplicate_window_seconds * NS),
        "deny_delete": spec.append_only,
        "deny_purge": spec.append_only,
        "allow_rollup_hdrs": False,
        # A read from a follower may be behind: every read is asked of the leader.
        "allow_direct": False,
        "compression": "none",
    }
    if not spec.synced:
        config["persist_mode"] = "async"
    return config


def differences(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What differs between two stream configurations, in words."""
    return [
        f"{key} is {found.get(key)!r}, wanted {wanted.get(key)!r}"
        for key in (*wanted, *(("persist_mode",) if "persist_mode" not in wanted else ()))
        if (
            sorted(found.get(key) or ()) != sorted(wanted[key])
            if key == "subjects"
            else found.get(key) != wanted.get(key)
        )
    ]


def consumer_config(spec: ConsumerSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "durable_name": spec.name,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": max(1, spec.start_seq),
        "ack_policy": "explicit",
        "ack_wait": round(spec.ack_wait_seconds * NS),
        "max_deliver": spec.max_deliver if spec.max_deliver > 0 else -1,
        "max_ack_pending": spec.max_ack_pending,
        "filter_subjects": list(spec.filters),
        "replay_policy": "instant",
        "max_waiting": 512,
        "num_replicas": 0,  # as the stream
    }

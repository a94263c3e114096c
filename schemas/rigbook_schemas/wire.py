"""Envelopes: CloudEvents 1.0 structured JSON out, records in.

Decoding takes two steps, envelope first, then payload by (kind, version), and is total: whatever
stands on the bus becomes a `Record`, whose `data` is the payload, or `Unknown`, or `Malformed` with
the parser's words. A malformed message never stops a reader.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from rigbook_schemas.catalogue import BY_KIND, BY_PAYLOAD, Kind
from rigbook_schemas.events import Payload
from rigbook_schemas.upcasts import NoUpcast, upcast

__all__ = ["Draft", "Malformed", "Record", "Unknown", "decode", "encode", "instant", "rfc3339"]

TYPE_PREFIX: Final = "dev.rigbook."
# JetStream's default limit for one message; checked before sending, so that the error is ours and clear.
BODY_BYTES_MAX: Final = 1024 * 1024
# Bounded, since int() of a text of thousands of digits raises.
_VERSION: Final = re.compile(r"[1-9][0-9]{0,8}")


class Malformed(msgspec.Struct, frozen=True):
    """The body is not an event of ours: where and why, in the parser's words."""

    code: str  # malformed_envelope, malformed_data, wrong_subject
    text: str


class Unknown(msgspec.Struct, frozen=True):
    """A kind or version this code does not know. Readers skip and count it; deciders stop."""

    type: str


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """An event about to be published. Everything nondeterministic is given by the caller."""

    data: Payload
    id: str
    source: str  # "placer/placer-1"
    time: str  # RFC 3339, UTC
    correlation: str = ""  # the demand; by default the payload's
    causation: str = ""  # id of the event that led to this one
    traceparent: str = ""

    @property
    def kind(self) -> Kind:
        return BY_PAYLOAD[type(self.data)]


class Record(msgspec.Struct, frozen=True, gc=False):
    """One message of a stream, decoded as far as it goes."""

    seq: int
    subject: str  # NATS subject
    received_ns: int  # the server's clock
    id: str
    kind: str  # "" when malformed
    source: str
    time: str
    data: Payload | Unknown | Malformed
    correlation: str = ""
    causation: str = ""
    traceparent: str = ""


class _Out(msgspec.Struct, frozen=True, omit_defaults=True):
    specversion: str
    id: str
    source: str
    type: str
    time: str
    subject: str
    datacontenttype: str
    data: Payload
    correlationid: str = ""
    causationid: str = ""
    traceparent: str = ""


class _In(msgspec.Struct, frozen=True, gc=False):
    id: Annotated[str, Meta(min_length=1, max_length=256)]
    source: str
    type: str
    specversion: Literal["1.0"] = "1.0"
    time: str = ""
    data: msgspec.Raw = msgspec.Raw(b"null")
    correlationid: str = ""
    causationid: str = ""
    traceparent: str = ""


# What an upcast step may meet in data that was never right.
_BAD_OLD_DATA: Final = (
    msgspec.MsgspecError,
    RecursionError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
)
_encoder: Final = msgspec.json.Encoder()
_envelopes: Final = msgspec.json.Decoder(_In)
_payloads: Final = {kind.type: (kind, msgspec.json.Decoder(kind.payload)) for kind in BY_KIND.values()}
_plain: Final = msgspec.json.Decoder(dict[str, Any])


def encode(draft: Draft) -> bytes:
    """The message body. Raises ValueError when it is larger than the server takes."""
    kind = draft.kind
    data = draft.data
    body = _encoder.encode(
        _Out(
            specversion="1.0",
            id=draft.id,
            source=draft.source,
            type=kind.type,
            time=draft.time,
            subject=str(getattr(data, kind.about)),
            datacontenttype="application/json",
            data=data,
            correlationid=draft.correlation or getattr(data, "demand", ""),
            causationid=draft.causation,
            traceparent=draft.traceparent,
        )
    )
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(
            f"event_too_large: {kind.name} has {len(body)} bytes, the bus takes {BODY_BYTES_MAX}; "
            "shorten env, command or purpose"
        )
    return body


def decode(seq: int, subject: str, received_ns: int, body: bytes) -> Record:
    """Never raises for bad input."""
    try:
        env = _envelopes.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _malformed(seq, subject, received_ns, "malformed_envelope", str(error))
    known = _payloads.get(env.type)
    if known is None:
        data = _other_version(env)
        if isinstance(data, (Unknown, Malformed)):
            return _record(seq, subject, received_ns, env, "", data)
        kind = BY_PAYLOAD[type(data)]
    else:
        kind, decoder = known
        try:
            data = decoder.decode(env.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return _record(
                seq, subject, received_ns, env, "", Malformed("malformed_data", f"{kind.name}: {error}")
            )
    if not (subject.startswith(kind.subject) and subject[len(kind.subject) : len(kind.subject) + 1] == "."):
        text = f"{kind.name} belongs on {kind.subject}.<name>, not on {subject}"
        return _record(seq, subject, received_ns, env, "", Malformed("wrong_subject", text))
    return _record(seq, subject, received_ns, env, kind.name, data)


def rfc3339(unix_ns: int) -> str:
    """UTC with microseconds, e.g. 2026-11-30T20:25:18.000123Z."""
    seconds, rest = divmod(unix_ns, 1_000_000_000)
    return f"{_second(seconds)}.{rest // 1000:06d}Z"


@lru_cache(maxsize=64)  # instants come in bunches: most are of the same second
def _second(unix_seconds: int) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def instant(text: str) -> int | None:
    """Unix nanoseconds of an RFC 3339 text; None when it is not one."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        return None
    try:
        return int(moment.timestamp() * 1_000_000) * 1000
    except (OverflowError, ValueError):
        return None


def _record(
    seq: int, subject: str, received_ns: int, env: _In, kind: str, data: Payload | Unknown | Malformed
) -> Record:
    return Record(
        seq, subject, received_ns, env.id, kind, env.source, env.time, data,
        env.correlationid, env.causationid, env.traceparent,
    )  # fmt: skip


def _malformed(seq: int, subject: str, received_ns: int, code: str, text: str) -> Record:
    return Record(seq, subject, received_ns, "", "", "", "", Malformed(code, text))


def _other_version(env: _In) -> Payload | Unknown | Malformed:
    """An older version of a known kind goes through the upcasts; anything else is unknown."""
    name, _, number = env.type.removeprefix(TYPE_PREFIX).rpartition(".v")
    kind = BY_KIND.get(name)
    if kind is None or not env.type.startswith(TYPE_PREFIX) or not _VERSION.fullmatch(number):
        return Unknown(env.type)
    version = int(number)
    if version >= kind.version:
        return Unknown(env.type)
    try:
        data = upcast(name, version, kind.version, _plain.decode(env.data))
        return msgspec.convert(data, kind.payload)
    except NoUpcast:
        return Unknown(env.type)
    except _BAD_OLD_DATA as error:
        return Malformed("malformed_data", f"{env.type}: {type(error).__name__}: {error}")

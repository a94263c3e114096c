"""Blocks: some hundred messages of a stream as columns. Messages in, the very same bytes out again.

An event as our own code writes it is taken apart: subject, type and source are few and stand in a table;
ids, times and the like are columns; payloads stay JSON, those of one kind in one array, so that they are
decoded in one go. Everything else (another author's spacing, unknown kinds, what is no event at all) is
kept as it came. Which of the two an event is, is found by putting it together again and comparing: what
comes out of a journal is what stood on the stream, byte for byte.
"""

from __future__ import annotations

import functools
import sys
from array import array
from collections import Counter
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rigbook_bus.protocol import Message
from rigbook_schemas.catalogue import BY_KIND
from rigbook_schemas.wire import TYPE_PREFIX, Malformed, Record, Unknown, decode

from rigbook_replay.trusted import trusted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rigbook_schemas.catalogue import Kind

__all__ = [
    "BLOCK_MAX",
    "CONTRADICTIONS",
    "MESSAGES_MAX",
    "RAW_BYTES_MAX",
    "messages_of",
    "pack_blocks",
    "records_of",
]

# A frame holds several blocks: many messages compress better together, and few at a time stay in the
# processor's cache while they are decoded, folded and dropped (measured: twice as fast on a busy machine).
MESSAGES_MAX: Final = 2000
RAW_BYTES_MAX: Final = 1024**2
BLOCK_MAX: Final = 200

# Stands in the column of routes for a message that is kept as it came.
_AS_IT_CAME: Final = 0xFFFF
# What a block may raise that has a right checksum and was not made by `pack_block`.
CONTRADICTIONS: Final = (msgspec.MsgspecError, ValueError, LookupError, StopIteration, OverflowError)


Route = tuple[str, str, str]  # (NATS subject, CloudEvents type, source)


class Block(msgspec.Struct, array_like=True, frozen=True):
    """Columns are packed each by itself: who folds does not unpack what only `cat` shows.

    Of the messages kept as they came, the columns hold nothing but sequence, time and route.
    """

    seqs: bytes  # int64, the first one whole, then differences
    received: bytes  # int64 nanoseconds, likewise
    route_of: bytes  # uint16 per message, into the frame's routes
    ids: bytes
    times: bytes
    traces: bytes
    correlations: bytes
    causations: bytes
    abouts: bytes  # CloudEvents `subject`
    groups: list[tuple[str, bytes]]  # (type, JSON array of payloads, in the order of the messages)
    lengths: bytes  # uint32 per payload, group by group
    as_they_came: list[tuple[str, bytes]]  # (NATS subject, body)


class _Body(msgspec.Struct, array_like=True, frozen=True):
    routes: list[Route]
    blocks: list[msgspec.Raw]


class _Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """The envelope as `rigbook_schemas.wire.encode` writes it, the payload untouched."""

    specversion: str
    id: str
    source: str
    type: str
    time: str
    subject: str
    datacontenttype: str
    data: msgspec.Raw
    correlationid: str = ""
    causationid: str = ""
    traceparent: str = ""


_envelopes: Final = msgspec.json.Decoder(_Envelope)
_json: Final = msgspec.json.Encoder().encode
_pack: Final = msgspec.msgpack.Encoder().encode
_blocks: Final = msgspec.msgpack.Decoder(Block)
_bodies: Final = msgspec.msgpack.Decoder(_Body)
_texts: Final = msgspec.msgpack.Decoder(list[str])


def pack_blocks(messages: Sequence[Message]) -> bytes:
    """The body of a frame. `messages` are in sequence."""
    routes: dict[Route, int] = {}
    blocks = [_block(messages[at : at + BLOCK_MAX], routes) for at in range(0, len(messages), BLOCK_MAX)]
    return _pack((list(routes), blocks))


def records_of(raw: bytes, *, trust: bool, whole: bool = True) -> Iterator[list[Record]]:
    """The records of a frame's body, in sequence, block by block.

    `trust`: the same types have checked these payloads before. `whole` False leaves out what a fold does
    not read (correlation and causation). Raises one of CONTRADICTIONS.
    """
    body = _bodies.decode(raw)
    routes = _Routes(body.routes)
    for packed in body.blocks:
        block = _blocks.decode(packed)
        if trust and routes.fitting:
            yield _records(block, routes, whole=whole)
        else:
            yield [decode(m.seq, m.subject, m.received_ns, m.body) for m in _messages(block, body.routes)]


def messages_of(raw: bytes) -> Iterator[list[Message]]:
    """The messages of a frame's body as they stood on the stream, block by block. Raises one of CONTRADICTIONS."""
    body = _bodies.decode(raw)
    for packed in body.blocks:
        yield _messages(_blocks.decode(packed), body.routes)


class _Routes:
    """The frame's routes as columns."""

    def __init__(self, routes: Sequence[Route]) -> None:
        kinds = {type_: _kind(type_) for _, type_, _ in routes}
        # False: a type that this code does not have, or that belongs elsewhere; then it is looked at one by one
        self.fitting = all(_belongs(kinds[type_], subject) for subject, type_, _ in routes)
        self.types = [type_ for _, type_, _ in routes]
        self.subject_of = [subject for subject, _, _ in routes].__getitem__
        self.kind_of = [kind.name if (kind := kinds[type_]) else "" for type_ in self.types].__getitem__
        self.source_of = [source for _, _, source in routes].__getitem__


def _records(block: Block, routes: _Routes, *, whole: bool) -> list[Record]:
    route_of, seqs, received = _numbers("H", block.route_of), _sums(block.seqs), _sums(block.received)
    came: list[Record] = []
    if block.as_they_came:
        others = [at for at, route in enumerate(route_of) if route == _AS_IT_CAME]
        came = [
            decode(seqs[at], subject, received[at], body)
            for at, (subject, body) in zip(others, block.as_they_came, strict=True)
        ]
        kept = [at for at, route in enumerate(route_of) if route != _AS_IT_CAME]
        route_of, seqs, received = ([column[at] for at in kept] for column in (route_of, seqs, received))
    next_of = {type_: iter(_decoder(type_).decode(joined)).__next__ for type_, joined in block.groups}
    types = routes.types
    records = list(
        map(
            Record,
            seqs,
            map(routes.subject_of, route_of),
            received,
            _texts.decode(block.ids),
            map(routes.kind_of, route_of),
            map(routes.source_of, route_of),
            _texts.decode(block.times),
            [next_of[types[route]]() for route in route_of],
            _texts.decode(block.correlations) if whole else repeat(""),
            _texts.decode(block.causations) if whole else repeat(""),
            _texts.decode(block.traces),
        )
    )
    if len(records) != len(route_of):
        raise ValueError("a column of the block is shorter than the others")
    return sorted((*records, *came), key=lambda record: record.seq) if came else records


def _messages(block: Block, routes: Sequence[Route]) -> list[Message]:
    route_of = _numbers("H", block.route_of)
    lengths = iter(_numbers("I", block.lengths))
    counts = Counter(routes[route][1] for route in route_of if route != _AS_IT_CAME)
    payloads: dict[str, Iterator[bytes]] = {}
    for type_, joined in block.groups:
        at, found = 1, []
        for _ in range(counts[type_]):
            size = next(lengths)
            found.append(joined[at : at + size])
            at += size + 1
        payloads[type_] = iter(found)
    texts = (block.ids, block.times, block.traces, block.correlations, block.causations, block.abouts)
    columns = zip(*(_texts.decode(column) for column in texts), strict=True)
    came = iter(block.as_they_came)
    messages: list[Message] = []
    for seq, received_ns, route in zip(_sums(block.seqs), _sums(block.received), route_of, strict=True):
        if route == _AS_IT_CAME:
            subject, body = next(came)
        else:
            subject, type_, source = routes[route]
            body = _put_together(type_, source, next(payloads[type_]), *next(columns))
        messages.append(Message(seq, subject, received_ns, body))
    return messages


def _block(messages: Sequence[Message], routes: dict[Route, int]) -> Block:
    route_of: list[int] = []
    columns: tuple[list[str], ...] = ([], [], [], [], [], [])
    groups: dict[str, list[bytes]] = {}
    as_they_came: list[tuple[str, bytes]] = []
    for m in messages:
        env = _taken_apart(m)
        route = (m.subject, env.type, env.source) if env is not None else ("", "", "")
        if env is None or (len(routes) >= _AS_IT_CAME and route not in routes):
            route_of.append(_AS_IT_CAME)
            as_they_came.append((m.subject, m.body))
            continue
        route_of.append(routes.setdefault(route, len(routes)))
        row = (env.id, env.time, env.traceparent, env.correlationid, env.causationid, env.subject)
        for column, text in zip(columns, row, strict=True):
            column.append(text)
        groups.setdefault(env.type, []).append(bytes(env.data))
    ids, times, traces, correlations, causations, abouts = (_pack(column) for column in columns)
    return Block(
        seqs=_differences([m.seq for m in messages]),
        received=_differences([m.received_ns for m in messages]),
        route_of=_column("H", route_of),
        ids=ids,
        times=times,
        traces=traces,
        correlations=correlations,
        causations=causations,
        abouts=abouts,
        groups=[(type_, b"[" + b",".join(payloads) + b"]") for type_, payloads in groups.items()],
        lengths=_column("I", [len(one) for payloads in groups.values() for one in payloads]),
        as_they_came=as_they_came,
    )


# -- one event ----------------------------------------------------------------------------------


def _taken_apart(m: Message) -> _Envelope | None:
    """None when the event would not come out as it is, or is not what it should be."""
    record = decode(m.seq, m.subject, m.received_ns, m.body)
    if isinstance(record.data, (Malformed, Unknown)):
        return None
    try:
        env = _envelopes.decode(m.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    same = _put_together(env.type, env.source, bytes(env.data), env.id, env.time, env.traceparent,
                         env.correlationid, env.causationid, env.subject)  # fmt: skip
    # a type of an older version was brought up to date when it was decoded: only the slow way does that
    return env if same == m.body and env.type == BY_KIND[record.kind].type else None


def _put_together(
    kind: str, source: str, payload: bytes, id_: str, time: str, trace: str, correlation: str, causation: str, about: str
) -> bytes:  # fmt: skip
    return _json(
        _Envelope("1.0", id_, source, kind, time, about, "application/json", msgspec.Raw(payload),
                  correlation, causation, trace)
    )  # fmt: skip


def _kind(type_: str) -> Kind | None:
    """The kind of this exact type; None when this code knows it only in another version, or not at all."""
    kind = BY_KIND.get(type_.removeprefix(TYPE_PREFIX).rpartition(".v")[0])
    return kind if kind is not None and kind.type == type_ else None


def _belongs(kind: Kind | None, subject: str) -> bool:
    return kind is not None and subject.startswith(kind.subject + ".")


@functools.cache
def _decoder(type_: str) -> msgspec.json.Decoder[Any]:
    kind = _kind(type_)
    assert kind is not None
    return msgspec.json.Decoder(list[trusted(kind.name)])  # type: ignore[misc]


# -- columns of numbers -------------------------------------------------------------------------


def _differences(values: Sequence[int]) -> bytes:
    before: Iterable[int] = chain((0,), values)
    return _column("q", [value - last for value, last in zip(values, before, strict=False)])


def _sums(column: bytes) -> list[int]:
    return list(accumulate(_numbers("q", column)))


def _numbers(code: str, column: bytes) -> list[int]:
    """Little-endian whatever the machine. Raises ValueError when the column is cut short."""
    numbers = array(code, column)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def _column(code: str, values: Iterable[int]) -> bytes:
    numbers = array(code, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()

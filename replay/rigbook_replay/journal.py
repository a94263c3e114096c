"""The journal: a ledger stream in one file, read without a bus, a GPU or a server.

    with Journal.open(path) as journal:
        journal.header.created_ns          # which stream it is of
        for records in journal.records():  # in sequence, some hundred at a time
            ...
        journal.damage                     # what could not be read, and where

Layout: a header frame, blocks of events, blocks of heartbeats, an index, and a trailer that says where
the index begins. A file without an index is an export that was interrupted: it is read by its frames, and
a further export goes on behind the last whole one. A damaged frame costs its own block and nothing else.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
from rigbook_schemas.subjects import LEDGER_STREAM

from rigbook_replay.block import CONTRADICTIONS, messages_of, records_of
from rigbook_replay.frame import (
    HEAD_BYTES,
    MARK,
    NO_CHAIN,
    Contents,
    Damaged,
    Frame,
    link,
    search,
    unpack_body,
    unpack_head,
)
from rigbook_replay.trusted import schema_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType
    from typing import BinaryIO

    from rigbook_bus.protocol import Message
    from rigbook_schemas.wire import Record


__all__ = ["FORMAT", "TRAILER", "Damage", "Header", "Index", "Journal", "NotAJournal", "trailer"]

FORMAT: Final = 1
# Ends a finished file: where the index frame begins, and a checksum of that number.
TRAILER: Final = struct.Struct("<8sQI")
_TRAILER_MARK: Final = b"RIGJEND\n"
_SEARCH_BYTES: Final = 1024**2


class NotAJournal(Exception):
    """The file is no journal of Rigbook, or of a format this version does not read."""

    code = "not_a_journal"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal is of. Stands at the beginning of the file as JSON."""

    format: int = FORMAT
    stream: str = LEDGER_STREAM
    created_ns: int  # with the name, the identity of the stream
    first_seq: int = 1  # the first sequence that was asked for
    # "" = every event from the first one on: its fold is the ledger. Else what was left out, in words.
    partial: str = ""
    since: str = ""
    until: str = ""
    about: tuple[str, ...] = ()  # what it was filtered by: cards, nodes, demands
    source: str = ""  # the bus or file it was taken from
    exported: str = ""  # when the export began, RFC 3339
    made_by: str = ""  # version of Rigbook
    schema: str = ""  # `trusted.schema_identity` of the code that checked the events


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything is, and what the log had come to at its last event."""

    frames: list[Frame]
    events: int
    heartbeats: int
    position: int  # last sequence
    event_id: str = ""
    chain: bytes = b""  # of the frames before the index: the fingerprint of the file
    ledger_chain: str = ""  # `State.chain` at `position`, hexadecimal; "" when the journal is partial
    digest: str = ""  # of the state there, by the fold `fold`
    fold: str = ""


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the file that cannot be read, and what it held as far as that is known."""

    offset: int
    end: int
    text: str
    first_seq: int = 0  # 0 = not known
    last_seq: int = 0
    heartbeats: bool = False

    def words(self) -> str:
        kind = "heartbeats" if self.heartbeats else "events"
        lost = f", {kind} {self.first_seq} to {self.last_seq} lost" if self.first_seq else ""
        return f"bytes {self.offset} to {self.end}: {self.text}{lost}"


class Journal:
    """A journal open for reading. `damage` grows while it is read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.damage: list[Damage] = []
        self.index: Index | None = None
        self._file = file
        self._size = file.seek(0, 2)
        head, body = self._frame_at(0)
        if head.contents != Contents.HEADER:
            raise NotAJournal(f"{path} does not begin with the header of a journal")
        try:
            self.header = msgspec.json.decode(body, type=Header)
        except msgspec.MsgspecError as error:
            raise NotAJournal(f"{path}: its header cannot be read: {error}") from error
        if self.header.format != FORMAT:
            raise NotAJournal(f"{path} has format {self.header.format}, this version reads format {FORMAT}")
        self.identity = link(NO_CHAIN, self._read(0, head.end)).hex()
        self.frames = [head, *(self._indexed() or self._scanned(head.end))]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises NotAJournal, OSError."""
        file = path.open("rb")
        try:
            return cls(path, file)
        except Damaged as error:
            file.close()
            raise NotAJournal(f"{path} is no journal: {error}") from error
        except BaseException:
            file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    # -- what is in it --------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """False: the export was interrupted; what is there is right, and there may be more on the bus."""
        return self.index is not None

    @property
    def blocks(self) -> list[Frame]:
        """The blocks of events, in sequence."""
        return [frame for frame in self.frames if frame.contents == Contents.EVENTS]

    @property
    def events(self) -> int:
        return sum(frame.count for frame in self.blocks)

    @property
    def last_seq(self) -> int:
        return max((frame.last_seq for frame in self.blocks), default=0)

    @property
    def checked(self) -> bool:
        """The code that checked the events is this code: their payloads need no second look."""
        return self.header.schema == schema_identity()

    def records(
        self, *, after: int = 0, until: int | None = None, whole: bool = True, trust: bool = True
    ) -> Iterator[list[Record]]:
        """Events with `after` < sequence <= `until`, some hundred at a time. `whole`, `trust`: see `block.records_of`."""
        trust = trust and self.checked

        def decoded(raw: bytes) -> Iterator[list[Record]]:
            return records_of(raw, trust=trust, whole=whole)

        yield from self._through(Contents.EVENTS, decoded, after, until)

    def messages(self, *, after: int = 0, until: int | None = None) -> Iterator[list[Message]]:
        """The same as they stood on the stream, byte for byte."""
        yield from self._through(Contents.EVENTS, messages_of, after, until)

    def heartbeats(self) -> Iterator[list[Message]]:
        """What the journal keeps of the heartbeat stream, in sequence."""
        yield from self._through(Contents.HEARTBEATS, messages_of, 0, None)

    def event_id(self, seq: int) -> str | None:
        """Id of the event at `seq`; None when it is not in the journal."""
        for records in self.records(after=seq - 1, until=seq, whole=False):
            return records[0].id
        return None

    def _through(
        self, contents: int, decoded: Callable[[bytes], Iterator[list[Any]]], after: int, until: int | None
    ) -> Iterator[list[Any]]:
        for frame in self.frames:
            if frame.contents != contents or frame.last_seq <= after:
                continue
            if until is not None and frame.first_seq > until:
                continue
            try:
                for block in decoded(self._frame_at(frame.offset, frame)[1]):
                    found = block
                    if found[0].seq <= after or (until is not None and found[-1].seq > until):
                        last = frame.last_seq if until is None else until
                        found = [one for one in found if after < one.seq <= last]
                    if found:
                        yield found
            except Damaged as error:
                self._note(frame, str(error))
            except CONTRADICTIONS as error:
                self._note(frame, f"its columns do not fit together: {error}")

    def _note(self, frame: Frame, text: str) -> None:
        damage = Damage(
            offset=frame.offset, end=frame.end, text=text, first_seq=frame.first_seq, last_seq=frame.last_seq,
            heartbeats=frame.contents == Contents.HEARTBEATS,
        )  # fmt: skip
        if damage not in self.damage:
            self.damage.append(damage)

    # -- frames ---------------------------------------------------------------------------------

    def stored(self, frame: Frame) -> bytes:
        """Head and body as they stand in the file."""
        return self._read(frame.offset, frame.end - frame.offset)

    def _read(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size)

    def _frame_at(self, offset: int, known: Frame | None = None) -> tuple[Frame, bytes]:
        """Raises Damaged; also when the frame is not the one the index tells of."""
        data = self._read(offset, HEAD_BYTES if known is None else known.end - offset)
        frame = unpack_head(data, offset)
        if known is not None and frame != known:
            raise Damaged(f"the frame at byte {offset} is not the one that the index names")
        body = self._file.read(frame.body_bytes) if known is None else data[HEAD_BYTES:]
        return frame, unpack_body(frame, body)

    def _indexed(self) -> list[Frame] | None:
        """The frames that the index at the end names; None when there is no (whole) index."""
        if self._size < TRAILER.size:
            return None
        mark, offset, crc = TRAILER.unpack(self._read(self._size - TRAILER.size, TRAILER.size))
        if mark != _TRAILER_MARK or zlib.crc32(offset.to_bytes(8, "little")) != crc:
            return None
        try:
            frame, body = self._frame_at(offset)
            if frame.contents != Contents.INDEX:
                return None
            self.index = msgspec.msgpack.decode(body, type=Index)
        except (Damaged, msgspec.MsgspecError):
            return None
        return self.index.frames

    def _scanned(self, offset: int) -> list[Frame]:
        """The frames, found one after the other; over damage, by searching for the next mark."""
        frames: list[Frame] = []
        while offset < self._size:
            try:
                frame = self._whole_head(offset)
            except Damaged as error:
                there = self._next_frame(offset + 1)
                self._note_gap(offset, there, frames[-1].last_seq if frames else 0, str(error))
                if there is None:
                    break
                frame = there
            if frame.contents in (Contents.EVENTS, Contents.HEARTBEATS):
                frames.append(frame)
            elif frame.contents == Contents.INDEX:
                break  # what comes is the trailer, or the rest of it
            offset = frame.end
        return frames

    def _note_gap(self, offset: int, there: Frame | None, before: int, text: str) -> None:
        """Between the event `before` and the next frame that was found, something is lost."""
        known = there is not None and there.contents == Contents.EVENTS and there.first_seq > before + 1
        self.damage.append(
            Damage(
                offset=offset,
                end=there.offset if there else self._size,
                text=text,
                first_seq=before + 1 if known else 0,
                last_seq=there.first_seq - 1 if there is not None and known else 0,
            )
        )

    def _whole_head(self, offset: int) -> Frame:
        """Raises Damaged, also when the body goes on behind the end of the file."""
        frame = unpack_head(self._read(offset, HEAD_BYTES), offset)
        if frame.end > self._size:
            raise Damaged("the file ends within this frame: the export was interrupted here")
        return frame

    def _next_frame(self, offset: int) -> Frame | None:
        """The first frame with a sound head at or behind `offset`."""
        while offset < self._size:
            data = self._read(offset, _SEARCH_BYTES)
            at = search(data)
            if at < 0:
                offset += max(1, len(data) - len(MARK) + 1)
                continue
            offset += at
            try:
                return self._whole_head(offset)
            except Damaged:
                offset += 1
        return None


def trailer(index_offset: int) -> bytes:
    """The last bytes of a finished journal."""
    return TRAILER.pack(_TRAILER_MARK, index_offset, zlib.crc32(index_offset.to_bytes(8, "little")))

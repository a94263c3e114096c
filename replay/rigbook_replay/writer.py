"""Writing a journal: blocks as they fill, an index at the end; what was interrupted is taken up again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

import msgspec

from rigbook_replay.block import MESSAGES_MAX, RAW_BYTES_MAX, pack_blocks
from rigbook_replay.frame import NO_CHAIN, Contents, Frame, link, pack, unpack_head
from rigbook_replay.journal import TRAILER, Header, Index, Journal, trailer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import BinaryIO

    from rigbook_bus.protocol import Message

__all__ = ["CannotResume", "JournalWriter"]


class CannotResume(Exception):
    """The file there cannot be continued; the text says why and what to do."""

    code = "cannot_resume"


class JournalWriter:
    """One journal being written. `close` without `finish` leaves a file that a later export continues."""

    def __init__(self, path: Path, file: BinaryIO, header: Header, frames: list[Frame], chain: bytes) -> None:
        self.header = header
        self._path = path
        self._file = file
        self._frames = frames
        self._chain = chain
        self._offset = file.tell()
        self._waiting: list[Message] = []
        self._waiting_bytes = 0
        self.events = sum(f.count for f in frames if f.contents == Contents.EVENTS)
        self.last_seq = max((f.last_seq for f in frames if f.contents == Contents.EVENTS), default=0)
        self.last_heartbeat = max(
            (f.last_seq for f in frames if f.contents == Contents.HEARTBEATS), default=0
        )

    @classmethod
    def create(cls, path: Path, header: Header) -> Self:
        """A new file. Raises FileExistsError, OSError."""
        file = path.open("xb")
        frame = pack(Contents.HEADER, msgspec.json.encode(header), number=0, chain=NO_CHAIN)
        file.write(frame)
        return cls(path, file, header, [unpack_head(frame, 0)], link(NO_CHAIN, frame))

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Go on behind the last whole frame; what an interruption left half written is cut off.

        Raises CannotResume when the file is damaged before its end, NotAJournal, OSError.
        """
        with Journal.open(path) as journal:
            end = journal.frames[-1].end
            inner = [one for one in journal.damage if one.offset < end]
            if inner:
                raise CannotResume(f"{path} is damaged ({inner[0].words()}); export into a new file")
            chain = NO_CHAIN
            for frame in journal.frames:
                if frame.chain != chain:
                    raise CannotResume(
                        f"{path}: the hash chain breaks at frame {frame.number}; export into a new file"
                    )
                chain = link(chain, journal.stored(frame))
            header, frames = journal.header, journal.frames
        file = path.open("r+b")
        file.truncate(end)
        file.seek(end)
        return cls(path, file, header, frames, chain)

    @property
    def bytes_written(self) -> int:
        return self._offset

    def add(self, messages: Sequence[Message]) -> None:
        """Events of the ledger stream, in sequence."""
        for message in messages:
            assert message.seq > self.last_seq, f"event {message.seq} after {self.last_seq}"
            self.last_seq = message.seq
            self.events += 1
            self._waiting.append(message)
            self._waiting_bytes += len(message.body)
            if len(self._waiting) >= MESSAGES_MAX or self._waiting_bytes >= RAW_BYTES_MAX:
                self._flush()

    def add_heartbeats(self, messages: Sequence[Message]) -> None:
        """Messages of the heartbeat stream, in sequence; those that are in the file already are left out."""
        fresh = [message for message in messages if message.seq > self.last_heartbeat]
        self._flush()
        for at in range(0, len(fresh), MESSAGES_MAX):
            self._block(Contents.HEARTBEATS, fresh[at : at + MESSAGES_MAX])
        if fresh:
            self.last_heartbeat = fresh[-1].seq

    def finish(
        self, *, event_id: str = "", ledger_chain: str = "", digest: str = "", fold: str = ""
    ) -> Index:
        """Write what is left and the index, and see the file on the disk."""
        self._flush()
        index = Index(
            frames=self._frames[1:],
            events=self.events,
            heartbeats=sum(f.count for f in self._frames if f.contents == Contents.HEARTBEATS),
            position=self.last_seq,
            event_id=event_id,
            chain=self._chain,
            ledger_chain=ledger_chain,
            digest=digest,
            fold=fold,
        )
        at = self._offset
        self._write(
            pack(Contents.INDEX, msgspec.msgpack.encode(index), number=len(self._frames), chain=self._chain)
        )
        self._file.write(trailer(at))
        self._offset += TRAILER.size
        self.close()
        return index

    def close(self) -> None:
        """Write what is left; without an index. A file without any event is taken away again."""
        if self._file.closed:
            return
        self._flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if not self.events:
            self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._waiting:
            self._block(Contents.EVENTS, self._waiting)
            self._waiting = []
            self._waiting_bytes = 0

    def _block(self, contents: int, messages: Sequence[Message]) -> None:
        frame = pack(
            contents,
            pack_blocks(messages),
            number=len(self._frames),
            chain=self._chain,
            count=len(messages),
            first_seq=messages[0].seq,
            last_seq=messages[-1].seq,
            earliest_ns=min(m.received_ns for m in messages),
            latest_ns=max(m.received_ns for m in messages),
        )
        self._frames.append(unpack_head(frame, self._offset))
        self._write(frame)

    def _write(self, frame: bytes) -> None:
        self._file.write(frame)
        self._offset += len(frame)
        self._chain = link(self._chain, frame)

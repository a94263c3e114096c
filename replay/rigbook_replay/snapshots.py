"""Snapshots of the fold beside a journal: what makes a question about any moment quick."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_ledger.identity import fold_identity
from rigbook_ledger.state import restore, snapshot

from rigbook_replay.frame import HEAD_BYTES, NO_CHAIN, Contents, Damaged, pack, unpack_body, unpack_head

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from rigbook_ledger.state import State

    from rigbook_replay.frame import Frame
    from rigbook_replay.journal import Journal

__all__ = ["SNAPSHOT_EVERY", "Snapshots"]

# Events between two snapshots: what has to be folded at most for any moment. Each takes about a megabyte (ten
# thousand ended demands are remembered), half of what its events take in the journal.
SNAPSHOT_EVERY: Final = 25_000


class Snapshots:
    """Snapshots of the fold, beside the journal. Only of this code's fold and this journal; others are put aside.

    A place that cannot be written to costs time, not answers.
    """

    def __init__(self, journal: Journal, *, every: int = SNAPSHOT_EVERY, path: Path | None = None) -> None:
        self._journal = journal
        self._every = every
        self._path = path or journal.path.with_name(journal.path.name + ".snapshots")
        self._mine = f"{journal.identity} {fold_identity()}\n".encode()
        self._frames: list[Frame] = []
        self._latest_ns = 0  # the latest receive time up to the last event passed
        self._usable = True
        self._load()

    def nearest(self, *, at_ns: int | None, position: int | None) -> State | None:
        """The last snapshot that is not after the moment or position."""
        for frame in reversed(self._frames):
            if (position is not None and frame.last_seq > position) or (
                at_ns is not None and frame.latest_ns > at_ns
            ):
                continue
            state = self._restored(frame)
            if state is not None:
                self._latest_ns = frame.latest_ns
                return state
        return None

    def passed(self, state: State) -> None:
        """The fold came by here: keep a snapshot when the last one is far enough back."""
        kept = self._frames[-1].last_seq if self._frames else 0
        if not self._usable or state.position - kept < self._every or self._journal.header.partial:
            return
        blocks = [frame for frame in self._journal.blocks if frame.first_seq <= state.position]
        frame = pack(
            Contents.SNAPSHOT,
            snapshot(state),
            number=len(self._frames),
            chain=NO_CHAIN,
            count=1,
            first_seq=state.position,
            last_seq=state.position,
            earliest_ns=state.received_ns,
            latest_ns=max(block.latest_ns for block in blocks),
        )
        try:
            with self._path.open("ab") as file:
                if not file.tell():
                    file.write(self._mine)
                at = file.tell()
                file.write(frame)
        except OSError:
            self._usable = False
            return
        self._frames.append(unpack_head(frame, at))

    def _load(self) -> None:
        try:
            with self._path.open("rb") as file:
                if file.readline(len(self._mine) + 1) == self._mine:
                    self._frames = list(_frames_of(file, len(self._mine)))
                else:
                    self._drop()
        except FileNotFoundError:
            pass
        except (OSError, Damaged):
            self._drop()

    def _drop(self) -> None:
        """What cannot be used is made anew."""
        self._frames.clear()
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            self._usable = False

    def _restored(self, frame: Frame) -> State | None:
        try:
            with self._path.open("rb") as file:
                file.seek(frame.offset + HEAD_BYTES)
                state = restore(unpack_body(frame, file.read(frame.body_bytes)))
        except (OSError, Damaged, msgspec.MsgspecError):
            return None
        # the journal itself has the last word on whether this is a snapshot of it
        return state if self._journal.event_id(state.position) == state.event_id else None


def _frames_of(file: BinaryIO, offset: int) -> Iterator[Frame]:
    """Raises Damaged; a snapshot that was cut short is one."""
    size = file.seek(0, 2)
    while offset < size:
        file.seek(offset)
        frame = unpack_head(file.read(HEAD_BYTES), offset)
        if frame.end > size:
            raise Damaged("cut short")
        yield frame
        offset = frame.end

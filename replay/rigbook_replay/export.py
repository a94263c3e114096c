"""Export: a stream (or a part of it) into a journal file. Interrupted, it goes on where it stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_ledger.digest import digest
from rigbook_ledger.evolve import evolve
from rigbook_ledger.identity import fold_identity
from rigbook_ledger.state import State
from rigbook_schemas.events import DriftDetected
from rigbook_schemas.wire import decode, rfc3339

from rigbook_replay.journal import Header, Index, Journal
from rigbook_replay.selection import about
from rigbook_replay.source import Window
from rigbook_replay.timetravel import BeforeRecord, CannotFold, fold_journal
from rigbook_replay.trusted import schema_identity
from rigbook_replay.writer import CannotResume, JournalWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rigbook_bus.protocol import Message

    from rigbook_replay.selection import About
    from rigbook_replay.source import Source

__all__ = ["Exported", "NothingToExport", "Wish", "export"]

_NS: Final = 1_000_000_000
# Heartbeats around a drift that go into the journal, when the stream still has them: what was seen before
# it was a drift, and the sightings that made it one.
BEFORE_DRIFT_SECONDS: Final = 60.0
AFTER_DRIFT_SECONDS: Final = 15.0


class NothingToExport(Exception):
    """No event fits what was asked for."""

    code = "nothing_to_export"


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What shall be in the journal. Everything, when nothing is said."""

    since_ns: int | None = None
    until_ns: int | None = None
    cards: tuple[str, ...] = ()  # UUIDs: everything around their nodes
    nodes: tuple[str, ...] = ()  # the same by name
    demands: tuple[str, ...] = ()  # ids
    heartbeats: bool = True

    @property
    def filtered(self) -> bool:
        return bool(self.cards or self.nodes or self.demands)


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    index: Index
    header: Header
    resumed_at: int = 0  # sequence behind which an earlier export was continued
    bytes: int = 0


async def export(
    source: Source,
    path: Path,
    wish: Wish,
    *,
    now_ns: int,
    made_by: str = "",
    told: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the journal; a file that is there already is continued when it is of the same stream and wish.

    `told(position, last)` hears of the progress. Raises CannotResume, NothingToExport, NoLedger, BusError,
    OSError. Whatever ends it early (also a cancellation), the file holds what was read so far.
    """
    first = 1 if wish.since_ns is None else await source.seq_at(wish.since_ns - 1) + 1
    last = source.last_seq if wish.until_ns is None else await source.seq_at(wish.until_ns)
    if last < first:
        raise NothingToExport("there is no event in that stretch of the log")
    part = (
        await about(source, cards=wish.cards, nodes=wish.nodes, demands=wish.demands)
        if wish.filtered
        else None
    )
    header = Header(
        created_ns=source.created_ns,
        first_seq=first,
        partial=_partial(source, wish, first),
        since="" if wish.since_ns is None else rfc3339(wish.since_ns),
        until="" if wish.until_ns is None else rfc3339(wish.until_ns),
        about=(*wish.cards, *wish.nodes, *wish.demands),
        source=source.name,
        exported=rfc3339(now_ns),
        made_by=made_by,
        schema=schema_identity(),
    )
    writer, state = await _begin(source, path, header)
    resumed_at = writer.last_seq
    recording = _Recording(writer, state, part)
    try:
        async for batch in source.messages(after=max(resumed_at, first - 1), until=last):
            recording.take(batch)
            if told is not None:
                told(batch[-1].seq, last)
        if wish.heartbeats:
            writer.add_heartbeats(await source.heartbeats(recording.windows))
    except BaseException:
        writer.close()
        raise
    if not writer.events:
        writer.close()
        raise NothingToExport("no event fits what was asked for")
    index = recording.finish()
    return Exported(index=index, header=writer.header, resumed_at=resumed_at, bytes=writer.bytes_written)


async def _begin(source: Source, path: Path, header: Header) -> tuple[JournalWriter, State | None]:
    """A writer, and the state behind what is written; None for a journal that no ledger folds from."""
    if not path.exists():  # noqa: ASYNC240 - one look before anything runs
        return JournalWriter.create(path, header), None if header.partial else State()
    writer = JournalWriter.resume(path)
    try:
        await _check_continues(source, path, writer, header)
    except BaseException:
        writer.close()
        raise
    if header.partial:
        return writer, None
    if not writer.events:
        return writer, State()
    with Journal.open(path) as journal:
        try:
            return writer, fold_journal(journal)
        except (CannotFold, BeforeRecord) as error:
            writer.close()
            raise CannotResume(f"{error}; export into a new file") from error


async def _check_continues(source: Source, path: Path, writer: JournalWriter, header: Header) -> None:
    had = writer.header
    same = ("stream", "created_ns", "first_seq", "partial", "about")
    for name in same:
        if getattr(had, name) != getattr(header, name):
            raise CannotResume(
                f"{path} holds another journal ({name}: {getattr(had, name)!r}, asked {getattr(header, name)!r}); "
                "name a new file"
            )
    if header.about and writer.events:
        raise CannotResume(f"{path} is there already; a part of a log is exported in one go: name a new file")
    if not writer.last_seq:
        return
    mine = [
        m async for batch in source.messages(after=writer.last_seq - 1, until=writer.last_seq) for m in batch
    ]
    with Journal.open(path) as journal:
        kept = [m for batch in journal.messages(after=writer.last_seq - 1) for m in batch]
    if mine != kept:
        raise CannotResume(
            f"{path}: its event {writer.last_seq} is not the one on {source.name}; name a new file"
        )


def _partial(source: Source, wish: Wish, first: int) -> str:
    said = [source.partial] if source.partial else []
    if first > 1:
        said.append(f"it begins at event {first}")
    if wish.cards or wish.nodes:
        named = ", ".join(
            (*(f"the node of {card}" for card in wish.cards), *(f"node {node}" for node in wish.nodes))
        )
        said.append(f"only what {named} is about, and the operator's rules")
    if wish.demands:
        said.append(f"only demand {', '.join(wish.demands)}, its nodes, and the operator's rules")
    return "; ".join(said)


class _Recording:
    """Writes batches, folds along when that makes sense, and notes where heartbeats will be wanted."""

    def __init__(self, writer: JournalWriter, state: State | None, part: About | None) -> None:
        self.windows: list[Window] = []
        self._writer = writer
        self._state = state
        self._part = part

    def take(self, batch: Sequence[Message]) -> None:
        kept: list[Message] = []
        state = self._state
        for message in batch:
            record = decode(message.seq, message.subject, message.received_ns, message.body)
            if self._part is not None and not self._part.keeps_record(record):
                continue
            kept.append(message)
            if isinstance(record.data, DriftDetected):
                self.windows.append(
                    Window(
                        node=record.data.node,
                        from_ns=record.received_ns - int(BEFORE_DRIFT_SECONDS * _NS),
                        to_ns=record.received_ns + int(AFTER_DRIFT_SECONDS * _NS),
                    )
                )
            if state is not None:
                state = evolve(state, record)
        if state is not None:
            state.touched.clear()
        self._writer.add(kept)

    def finish(self) -> Index:
        state = self._state
        if state is None:
            return self._writer.finish()
        return self._writer.finish(
            event_id=state.event_id,
            ledger_chain=state.chain.hex(),
            digest=digest(state),
            fold=fold_identity(),
        )

"""Import: a journal onto an empty server, in order, so that every event has the sequence it had.

Epochs are sequences: an event elsewhere would name other bindings. So the target must be empty (or hold the
beginning of this very journal, from an import that was interrupted), and the journal must begin at event 1
and have no gap. What cannot be kept are the receive times: they are the new server's. Positions, ids,
bodies and the ledger's chain come out equal; a digest, which counts times, does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_bus.protocol import BusError
from rigbook_ledger.streams import ensure_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rigbook_bus.protocol import Bus, Message

    from rigbook_replay.journal import Journal

__all__ = ["CannotImport", "Imported", "import_journal"]

BATCH: Final = 1000


class CannotImport(Exception):
    """The journal does not go onto this server as it is; the text says why."""

    code = "cannot_import"


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    events: int
    resumed_at: int  # what was there before
    last_seq: int


async def import_journal(
    journal: Journal, bus: Bus, *, told: Callable[[int, int], None] | None = None
) -> Imported:
    """Raises CannotImport, also when a sequence comes out different; BusError."""
    if journal.header.partial:
        raise CannotImport(
            f"the journal is partial ({journal.header.partial}): its events would get other sequences"
        )
    facts = await ensure_streams(bus)
    there = facts.last_seq
    if there:
        await _check_same(journal, bus, facts.name, there)
    done = there
    last = journal.last_seq
    for batch in journal.messages(after=there):
        for at in range(0, len(batch), BATCH):
            piece = batch[at : at + BATCH]
            if piece[0].seq != done + 1:
                raise CannotImport(_gap(journal, done, piece[0].seq))
            await _append(bus, piece)
            done = piece[-1].seq
            if told is not None:
                told(done, last)
    if done < last:
        raise CannotImport(_gap(journal, done, last + 1))
    return Imported(events=done - there, resumed_at=there, last_seq=done)


async def _append(bus: Bus, messages: Sequence[Message]) -> None:
    # An id of our own making: an event's own id may have been used twice, and must not be dropped for it.
    answers = await bus.append_many([(m.subject, m.body, f"import-{m.seq}") for m in messages])
    for message, answer in zip(messages, answers, strict=True):
        if isinstance(answer, BusError):
            raise CannotImport(
                f"event {message.seq} was not taken: {answer}; run it again to go on"
            ) from answer
        if answer.seq != message.seq:
            raise CannotImport(
                f"event {message.seq} got sequence {answer.seq}: somebody else writes to this stream; "
                "import into a server of its own"
            )


async def _check_same(journal: Journal, bus: Bus, stream: str, last: int) -> None:
    there = await bus.message(stream, last)
    mine = next((batch[0] for batch in journal.messages(after=last - 1, until=last)), None)
    if there is None or mine is None or (there.subject, there.body) != (mine.subject, mine.body):
        raise CannotImport(
            f"the stream {stream} holds {last} events already, and they are not the beginning of this journal; "
            "import into an empty server"
        )


def _gap(journal: Journal, before: int, after: int) -> str:
    damaged = "; ".join(one.words() for one in journal.damage)
    return f"events {before + 1} to {after - 1} are not in the journal{f' ({damaged})' if damaged else ''}"

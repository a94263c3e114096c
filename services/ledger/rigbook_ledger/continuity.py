"""Is this still the log that we knew? Asked at every start and after every reconnect, by everybody who decides.

A log continues what we knew when the stream was created at the same moment, does not end before our
position, and holds there the same event, received at the same moment. The last part tells a log that was
put back from one that was written anew from the second copy: that one becomes the log only when the
operator says so.

Anything else is `LogDiscontinued`: safe mode. Two things end it. Either the log is back as it was, or
an operator recovered it: then a `log.recovered` stands on it that names this very stream and is newer
than any recovery we knew (`LogRecovered`), and what we knew has to be folded anew from the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_bus.protocol import BusError
from rigbook_schemas import events as e
from rigbook_schemas.queries import Answer
from rigbook_schemas.subjects import LEDGER_STREAM, RECOVERY, policy, query
from rigbook_schemas.wire import decode

if TYPE_CHECKING:
    from rigbook_bus.protocol import Bus, Message, StreamFacts
    from rigbook_schemas.wire import Record

    from rigbook_ledger.state import State

__all__ = [
    "Known",
    "LogAbsent",
    "LogDiscontinued",
    "LogRecovered",
    "check_continues",
    "known_of",
    "latest_recovery",
    "ledger_doubts",
    "recovery_under_way",
]

# A decider that gets no word from a ledger in this time decides by what it sees itself.
WORD_SECONDS: Final = 2.0


class LogDiscontinued(Exception):
    """The log does not continue what we knew: it was made anew, lost its end, or holds other events."""

    code = "log_discontinued"


class LogAbsent(LogDiscontinued):
    """There is no ledger stream, and we never knew one: the ledger has not made it yet."""

    code = "log_absent"


class LogRecovered(LogDiscontinued):
    """It does not, and an operator has said that it is the log: forget what was known, fold it anew."""

    code = "log_recovered"

    def __init__(self, text: str, recovery: Record, created_ns: int) -> None:
        super().__init__(text)
        self.recovery = recovery
        self.created_ns = created_ns


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of which log: enough to tell whether a stream continues it."""

    created_ns: int  # of the stream
    position: int = 0
    event_id: str = ""  # of the event at `position`
    received_ns: int = 0  # likewise; 0 = not known
    generation: int = 0  # of the latest recovery that was folded


def known_of(created_ns: int, state: State) -> Known:
    return Known(
        created_ns=created_ns,
        position=state.position,
        event_id=state.event_id,
        received_ns=state.received_ns,
        generation=state.generation,
    )


async def check_continues(bus: Bus, known: Known | None) -> int:
    """The stream's creation time. `known` None = nothing yet.

    Raises LogDiscontinued, LogRecovered, LogAbsent, BusError.
    """
    facts = await bus.stream(LEDGER_STREAM)
    if facts is None and known is None:
        raise LogAbsent(
            f"stream {LEDGER_STREAM} does not exist yet; a ledger makes it (`rigbook serve ledger`)"
        )
    if facts is None:
        raise LogDiscontinued(
            f"stream {LEDGER_STREAM} does not exist; is this the right server and data folder?"
        )
    if known is None:
        return facts.created_ns
    there = (
        await bus.message(LEDGER_STREAM, known.position)
        if facts.created_ns == known.created_ns and 0 < known.position <= facts.last_seq
        else None
    )
    why = _difference(known, facts, there)
    if not why:
        return facts.created_ns
    recovery = await latest_recovery(bus, facts)
    if recovery is not None and _generation(recovery) > known.generation:
        raise LogRecovered(f"{why}; recovered by {recovery.source}", recovery, facts.created_ns)
    raise LogDiscontinued(why)


def _difference(known: Known, facts: StreamFacts, there: Message | None) -> str:
    if facts.created_ns != known.created_ns:
        return f"stream {LEDGER_STREAM} is another one than before (creation time changed)"
    if facts.last_seq < known.position:
        return f"stream {LEDGER_STREAM} ends at {facts.last_seq}, we had read to {known.position}: its end is lost"
    if not known.position:
        return ""
    found = "" if there is None else decode(there.seq, there.subject, there.received_ns, there.body).id
    if there is None or found != known.event_id:
        return f"event {known.position} of {LEDGER_STREAM} is {found or 'gone'!r}, we had read {known.event_id!r}"
    if known.received_ns and there.received_ns != known.received_ns:
        return (
            f"event {known.position} of {LEDGER_STREAM} was written anew since we read it, "
            "and no operator has said that the log is whole"
        )
    return ""


async def latest_recovery(bus: Bus, facts: StreamFacts) -> Record | None:
    """The last word of an operator on this very stream; None when there is none. Raises BusError."""
    message = await bus.last(LEDGER_STREAM, policy(RECOVERY))
    if message is None:
        return None
    record = decode(message.seq, message.subject, message.received_ns, message.body)
    data = record.data
    if isinstance(data, e.LogRecovered) and data.stream_created == str(facts.created_ns):
        return record
    return None  # another stream's, or a recovery under way that is not finished


def _generation(recovery: Record) -> int:
    assert isinstance(recovery.data, e.LogRecovered)
    return recovery.data.generation


def recovery_under_way(state: State) -> str:
    """Why nobody decides now; "" when no recovery has begun that is not finished."""
    if not state.recovering:
        return ""
    return f"recovery {state.recovering} of the log has begun and is not finished: `rigbook recover`"


async def ledger_doubts(bus: Bus) -> str:
    """Why the ledger is in safe mode; "" when it is not, or nobody answers.

    The ledger knows most of the log, and keeps it over every restart: a decider that has just begun, or had
    read less than was lost, sees nothing wrong by itself.
    """
    try:
        body = await bus.request(query("status"), b"{}", timeout_seconds=WORD_SECONDS)
        answer = msgspec.json.decode(body, type=Answer)
    except (BusError, msgspec.MsgspecError):
        return ""
    return f"the ledger is in safe mode: {answer.notice}" if answer.safe_mode else ""

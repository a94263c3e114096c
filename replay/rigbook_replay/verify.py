"""Verification: is a journal what was exported, is it whole, and does its log hold what a log may?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_ledger.audit import audit
from rigbook_ledger.digest import digest
from rigbook_ledger.evolve import fold
from rigbook_ledger.identity import fold_identity
from rigbook_ledger.state import State
from rigbook_schemas.wire import Malformed, Unknown

from rigbook_replay.frame import NO_CHAIN, link
from rigbook_replay.timetravel import undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rigbook_schemas.wire import Record

    from rigbook_replay.journal import Journal

__all__ = ["Verified", "verify"]

# Of each kind of trouble this many are listed, the rest counted.
LISTED_MAX: Final = 20


class Verified(msgspec.Struct, kw_only=True):
    """What was found. `problems` make the journal unfit as evidence; `notes` are worth knowing."""

    events: int = 0
    heartbeats: int = 0
    first_seq: int = 0
    last_seq: int = 0
    malformed: int = 0
    unknown: int = 0
    findings: int = 0
    digest: str = ""
    ledger_chain: str = ""
    fingerprint: str = ""  # the hash chain over all frames
    problems: list[str] = []
    notes: list[str] = []

    @property
    def good(self) -> bool:
        return not self.problems


def verify(journal: Journal, *, told: Callable[[int, int], None] | None = None) -> Verified:
    """Read everything: checksums, the hash chain, order, gaps, schema of each event, the fold and its audit."""
    found = Verified()
    found.fingerprint = _check_chain(journal, found)
    state = State()
    whole = not journal.header.partial
    last_ns, steps_back = 0, 0
    with undisturbed():
        for records in journal.records(trust=False):
            _check_order(records, found, whole=whole)
            for record in records:
                if record.received_ns < last_ns:
                    steps_back += 1
                last_ns = record.received_ns
                found.malformed += isinstance(record.data, Malformed)
                found.unknown += isinstance(record.data, Unknown)
            if whole:
                state = fold(state, records)
                state.touched.clear()
            if told is not None:
                told(records[-1].seq, journal.last_seq)
        found.heartbeats = sum(len(batch) for batch in journal.heartbeats())
    _say(found, journal, steps_back)
    if whole and not journal.damage:
        _check_fold(found, journal, state)
    return found


def _check_chain(journal: Journal, found: Verified) -> str:
    chain = NO_CHAIN
    broken = False
    for number, frame in enumerate(journal.frames):
        if not broken and (frame.chain != chain or frame.number != number):
            broken = True
            _list(found.problems, f"the hash chain breaks at frame {number} (byte {frame.offset}): "
                                  "a frame before it was changed, added or taken out")  # fmt: skip
        chain = link(frame.chain if broken else chain, journal.stored(frame))
    if journal.index is not None and not broken and journal.index.chain != chain:
        found.problems.append(
            "the hash chain does not end where the index says: the last frames were changed"
        )
    return chain.hex()


def _check_order(records: Sequence[Record], found: Verified, *, whole: bool) -> None:
    expected = found.last_seq + 1
    for record in records:
        if record.seq < expected:
            _list(found.problems, f"event {record.seq} comes after event {expected - 1}")
        elif record.seq > expected and whole:
            _list(found.problems, f"events {expected} to {record.seq - 1} are missing")
        expected = record.seq + 1
        found.events += 1
    if not found.first_seq:
        found.first_seq = records[0].seq
    found.last_seq = records[-1].seq


def _say(found: Verified, journal: Journal, steps_back: int) -> None:
    for damage in journal.damage:
        _list(found.problems, damage.words())
    if not journal.finished:
        found.notes.append(
            "there is no index: the export was interrupted, or the end is lost; `journal export` to the same file goes on"
        )
    if journal.header.partial:
        found.notes.append(f"a partial journal, its fold is not the ledger: {journal.header.partial}")
    if steps_back:
        found.notes.append(f"the server's clock was put back {steps_back} times")
    if found.malformed or found.unknown:
        found.notes.append(
            f"{found.malformed} malformed messages, {found.unknown} events of kinds unknown to this version"
        )
    if journal.index is not None and journal.index.events != found.events and not journal.damage:
        found.problems.append(f"the index tells of {journal.index.events} events, there are {found.events}")


def _check_fold(found: Verified, journal: Journal, state: State) -> None:
    found.digest, found.ledger_chain, found.findings = digest(state), state.chain.hex(), state.finding_count
    for finding in audit(state):
        _list(found.problems, f"audit: {finding.code}: {finding.text}")
    index = journal.index
    if index is None or not index.fold:
        return
    if index.fold != fold_identity():
        found.notes.append("the index's digest was made by another version of the fold, and is not compared")
    elif (index.digest, index.ledger_chain) != (found.digest, found.ledger_chain):
        found.problems.append(f"the fold gives digest {found.digest}, the index says {index.digest}")


def _list(to: list[str], text: str) -> None:
    if len(to) < LISTED_MAX:
        to.append(text)
    elif len(to) == LISTED_MAX:
        to.append("and more")

"""The audit of a stretch of the log: does ownership hold at every position, and who did what.

    report = await audit(source, Range(since_ns=...), claims=[Claim(...)])
    report.problems    # empty = nothing contradicts anything

Four kinds of trouble make a problem: an invariant that does not hold at some position, a digest or chain
that somebody claims and the fold does not give, an event whose source is not of the kind's author, and a
log with holes. Findings (what the fold met and did not let change anything) are counted beside them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_ledger.audit import audit as whole_audit
from rigbook_ledger.audit import audit_touched
from rigbook_ledger.digest import digest
from rigbook_ledger.evolve import SKEW_SECONDS_MAX, evolve
from rigbook_ledger.state import State
from rigbook_schemas import events as e
from rigbook_schemas.catalogue import BY_KIND, Author
from rigbook_schemas.wire import instant

from rigbook_replay.hours import Hours
from rigbook_replay.timetravel import CannotFold, undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rigbook_schemas.wire import Record

    from rigbook_replay.source import Source

__all__ = ["Claim", "Range", "Report", "Skew", "audit"]

# Of each kind of trouble this many are listed, the rest counted.
LISTED_MAX: Final = 50
# What `source` begins with, by author. A source is what the writer says of itself; that only the right ones
# can write to a subject is the bus's business (rights), and the bus does not keep who did. A client calls
# itself what it likes.
_SOURCES: Final = {
    Author.PLACER: ("placer",),
    Author.NODEAGENT: ("nodeagent", "agent"),
    Author.REAPER: ("reaper",),
    Author.OPERATOR: ("client", "operator", "gateway"),
}


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """The stretch that is looked at; what is before it is folded all the same."""

    since_ns: int = 0
    until_ns: int = 2**63 - 1

    def has(self, record: Record) -> bool:
        return self.since_ns <= record.received_ns <= self.until_ns


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody says that the state at a position has this digest (and the log this chain)."""

    who: str
    position: int
    digest: str = ""
    chain: str = ""


class Skew(msgspec.Struct, kw_only=True):
    """How a source's own clock stood to the server's, in seconds; negative = behind."""

    events: int = 0
    least_seconds: float = 0.0
    most_seconds: float = 0.0


class Report(msgspec.Struct, kw_only=True):
    first_seq: int = 0
    last_seq: int = 0
    events: int = 0
    problems: list[str] = []
    problem_count: int = 0
    notes: list[str] = []
    confirmed: list[str] = []  # claims that the fold bears out
    digest: str = ""
    chain: str = ""
    findings: dict[str, int] = {}
    kinds: dict[str, int] = {}
    authors: dict[str, dict[str, int]] = {}  # first part of the source, then kind
    skews: dict[str, Skew] = {}
    evictions: dict[str, int] = {}  # by cause
    verdicts: dict[str, int] = {}  # how workloads ended
    drifts: dict[str, int] = {}

    @property
    def good(self) -> bool:
        return not self.problem_count

    def problem(self, text: str) -> None:
        self.problem_count += 1
        if len(self.problems) < LISTED_MAX:
            self.problems.append(text)


async def audit(
    source: Source,
    stretch: Range | None = None,
    *,
    claims: Sequence[Claim] = (),
    every: int = 1,
    told: Callable[[int, int], None] | None = None,
) -> tuple[Report, Hours]:
    """Read the log once. `every`: events between two looks at the invariants; 1 = at every position.

    Raises NoLedger, BusError. Holes in the log are a problem in the report.
    """
    looking = _Looking(stretch or Range(), claims, every=every, partial=bool(source.partial))
    if source.partial:
        looking.report.notes.append(f"partial, so sums over the fleet are of the part only: {source.partial}")
    with undisturbed():
        async for records in source.records():
            try:
                looking.take(records)
            except CannotFold as error:
                looking.report.problem(str(error))
                break
            if told is not None:
                told(records[-1].seq, source.last_seq)
    return looking.close(), looking.hours


class _Looking:
    """One pass over the log."""

    def __init__(self, stretch: Range, claims: Sequence[Claim], *, every: int, partial: bool) -> None:
        self.report = Report()
        self.hours = Hours(since_ns=stretch.since_ns, until_ns=stretch.until_ns)
        self._stretch = stretch
        self._claims: dict[int, list[Claim]] = {}
        for claim in claims:
            self._claims.setdefault(claim.position, []).append(claim)
        self._every = max(1, every)
        self._since_look = 0
        self._partial = partial
        self._state = State()
        self._said: set[tuple[str, str]] = set()
        self._findings: Counter[str] = Counter()

    def take(self, records: Sequence[Record]) -> None:
        for record in records:
            state = self._state
            if record.seq != state.position + 1 and state.position and not self._partial:
                raise CannotFold(f"events {state.position + 1} to {record.seq - 1} are not in the record")
            if not state.position and record.seq != 1 and not self._partial:
                raise CannotFold(f"events 1 to {record.seq - 1} are not in the record")
            self.hours.before(state, record)
            self._state = evolve(state, record)
            if self._stretch.has(record):
                self._look(record)
            else:
                self._state.touched.clear()
            if record.seq in self._claims:
                self._hold_against(record.seq)

    def _look(self, record: Record) -> None:
        report, touched = self.report, self._state.touched
        report.first_seq = report.first_seq or record.seq
        report.last_seq = record.seq
        report.events += 1
        self._count(record)
        for finding in touched.findings:
            self._findings[finding.code] += 1
        touched.findings.clear()
        self._since_look += 1
        if self._since_look >= self._every:
            self._since_look = 0
            for violation in audit_touched(self._state):
                self._violated(violation.code, violation.text)
            touched.clear()

    def _violated(self, code: str, text: str) -> None:
        if (code, text) not in self._said:
            self._said.add((code, text))
            self.report.problem(f"at event {self._state.position}: {code}: {text}")

    def _count(self, record: Record) -> None:
        report, data = self.report, record.data
        kind = record.kind or "no event"
        report.kinds[kind] = report.kinds.get(kind, 0) + 1
        writer = record.source.partition("/")[0] or "unnamed"
        of_writer = report.authors.setdefault(writer, {})
        of_writer[kind] = of_writer.get(kind, 0) + 1
        known = BY_KIND.get(record.kind)
        if known is not None and isinstance(data, e.Payload):
            self._check_author(record, known.authors)
            self._skew(record)
        if isinstance(data, e.EvictionOrdered):
            report.evictions[data.reason] = report.evictions.get(data.reason, 0) + 1
        elif isinstance(data, e.Exited):
            report.verdicts[data.verdict] = report.verdicts.get(data.verdict, 0) + 1
        elif isinstance(data, e.DriftDetected):
            report.drifts[data.kind] = report.drifts.get(data.kind, 0) + 1

    def _check_author(self, record: Record, authors: Sequence[Author]) -> None:
        writer, _, name = record.source.partition("/")
        if Author.CLIENT in authors:
            return
        if all(writer not in _SOURCES[author] for author in authors):
            whose = " or ".join(authors)
            self.report.problem(
                f"event {record.seq}: {record.kind} is the {whose}'s to say, and {record.source!r} said it"
            )
        elif writer in _SOURCES[Author.NODEAGENT]:
            node = getattr(record.data, "node", name)
            if name and node != name:
                self.report.problem(
                    f"event {record.seq}: {record.kind} of node {node} was said by {record.source!r}"
                )

    def _skew(self, record: Record) -> None:
        at_ns = instant(record.time)
        if at_ns is None:
            return
        seconds = (at_ns - record.received_ns) / 1e9
        skew = self.report.skews.get(record.source)
        if skew is None:
            skew = self.report.skews[record.source] = Skew(least_seconds=seconds, most_seconds=seconds)
        skew.events += 1
        skew.least_seconds = min(skew.least_seconds, seconds)
        skew.most_seconds = max(skew.most_seconds, seconds)

    def _hold_against(self, position: int) -> None:
        state = self._state
        for claim in self._claims.pop(position, ()):
            mine, chain = digest(state), state.chain.hex()
            if claim.chain and claim.chain != chain:
                self.report.problem(
                    f"{claim.who} has another log at {position}: chain {claim.chain}, here {chain}"
                )
            elif claim.digest and claim.digest != mine:
                self.report.problem(
                    f"{claim.who} has digest {claim.digest} at {position}, the fold gives {mine}"
                )
            else:
                self.report.confirmed.append(f"{claim.who} agrees at {position}: digest {mine}")

    def close(self) -> Report:
        report, state = self.report, self._state
        for violation in [*audit_touched(state), *(whole_audit(state) if not self._partial else ())]:
            self._violated(violation.code, violation.text)
        for claims in self._claims.values():
            report.notes += [
                f"{claim.who} stands at {claim.position}, which is not in this record" for claim in claims
            ]
        if state.position and not self._partial:
            report.digest, report.chain = digest(state), state.chain.hex()
        report.findings = dict(self._findings.most_common())
        end_ns = min(self._stretch.until_ns, state.received_ns)
        self.hours.close(state, end_ns)
        for name, skew in sorted(report.skews.items()):
            worst = max(-skew.least_seconds, skew.most_seconds)
            if worst > SKEW_SECONDS_MAX:
                report.notes.append(f"the clock of {name} was up to {worst:.0f} s off")
        return report

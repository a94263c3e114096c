"""Proof of decisions: each recorded binding decided again, on the state at its position, and compared.

A `bound` says what it was made of: the position, the policy and its version, and what the cards showed
beyond the ledger (`seen`). With these the placer is a pure function; the same code must give the same cards.
A difference is told with both answers. It means that the record was not made by this placer, that the
policy changed without a new version, or that something bears on decisions that is not on the record.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_placer.feasible import Kept, Seen
from rigbook_placer.place import POLICY_VERSION, SEEN_MAX, place
from rigbook_placer.rank import POLICIES
from rigbook_schemas.events import Bound
from rigbook_schemas.wire import instant

from rigbook_replay.retrace import Watcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_ledger.state import State
    from rigbook_schemas.values import NodeShare
    from rigbook_schemas.wire import Record

__all__ = ["Answer", "Checked", "Outcome", "ProofOfDecisions"]

# Decisions that differ are listed up to this many; all are counted.
LISTED_MAX: Final = 1000
UNTRUSTED: Final = "its sample was not to be trusted"


class Outcome(enum.StrEnum):
    SAME = "same"
    DIFFERENT = "different"
    OTHER_VERSION = "other_version"  # made by a version of the policy that this code does not have
    UNPROVABLE = "unprovable"  # the record does not hold what the decision was made of
    VOID = "void"  # it gave no right to any card; the ledger refused it


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Cards by node; empty = the demand would have had to wait."""

    cards: tuple[tuple[str, str, int], ...] = ()  # (node, card, bytes)
    why: str = ""


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """One decision that could not be confirmed."""

    seq: int
    demand: str
    position: int
    policy: str
    policy_version: int
    source: str
    outcome: Outcome
    recorded: Answer
    again: Answer | None = None
    text: str = ""


class ProofOfDecisions(Watcher):
    """Looks at every decision while a `Retrace` goes by."""

    def __init__(self) -> None:
        self.counts: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self.doubtful: list[Checked] = []
        self._pending: dict[int, Checked | None] = {}  # looked at, and their `bound` not folded yet

    @property
    def good(self) -> bool:
        """No decision came out different."""
        return not self.counts[Outcome.DIFFERENT]

    @property
    def decisions(self) -> int:
        return sum(self.counts.values())

    def decision(self, state: State, record: Record, *, exact: bool) -> None:
        self._pending[record.seq] = _check(state, record, exact=exact)

    def after(self, state: State, record: Record) -> None:
        if record.seq not in self._pending:
            return
        checked = self._pending.pop(record.seq)
        if record.seq not in state.bindings and (checked is None or checked.outcome is not Outcome.SAME):
            # what the ledger itself did not accept is a finding there; nothing follows from how it came about
            self.counts[Outcome.VOID] += 1
            return
        self.counts[Outcome.SAME if checked is None else checked.outcome] += 1
        if checked is not None and len(self.doubtful) < LISTED_MAX:
            self.doubtful.append(checked)


def _check(state: State, record: Record, *, exact: bool) -> Checked | None:
    """None = the same cards again."""
    data = record.data
    assert isinstance(data, Bound)
    recorded = Answer(cards=_cards(data.shares))
    demand = state.demands.get(data.demand)

    def told(outcome: Outcome, text: str, again: Answer | None = None) -> Checked:
        return Checked(
            seq=record.seq, demand=data.demand, position=data.position, policy=data.policy,
            policy_version=data.policy_version, source=record.source, outcome=outcome, recorded=recorded,
            again=again, text=text,
        )  # fmt: skip

    if data.policy not in POLICIES or data.policy_version != POLICY_VERSION:
        return told(
            Outcome.OTHER_VERSION,
            f"made with policy {data.policy} version {data.policy_version}; this code has {', '.join(POLICIES)} "
            f"version {POLICY_VERSION}",
        )
    if not exact:
        return told(
            Outcome.UNPROVABLE,
            f"event {record.seq} names position {data.position}, which is not at hand there",
        )
    if demand is None:
        return told(Outcome.DIFFERENT, f"demand {data.demand} was not on the log at position {data.position}")
    if len(data.seen) >= SEEN_MAX:
        return told(
            Outcome.UNPROVABLE,
            f"more than {SEEN_MAX} cards showed foreign use; the record names the first ones only",
        )
    seen = {
        card.card: Seen(foreign_bytes=card.foreign_bytes, unknown=UNTRUSTED if card.unknown else "")
        for card in data.seen
        if card.foreign_bytes or card.unknown
    }
    kept = {card.card: Kept(card.kept_for, card.kept_from_ns) for card in data.seen if card.kept_for}
    # The rules about time look at the clock of the placer, which stamps what it appends.
    decided = place(state, demand.spec, seen, data.policy, now_ns=instant(record.time), kept=kept)
    again = (
        Answer(why="it would have had to wait") if decided is None else Answer(cards=_cards(decided.shares))
    )
    if again.cards == recorded.cards:
        return None
    return told(
        Outcome.DIFFERENT, "the same decision made again gives other cards" if decided else again.why, again
    )


def _cards(shares: Sequence[NodeShare]) -> tuple[tuple[str, str, int], ...]:
    return tuple((share.node, a.card, a.memory_bytes) for share in shares for a in share.allotments)

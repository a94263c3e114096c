"""A difference seen once (`Sighting`), a heartbeat held against the books (`Comparison`), and from when on a
difference is one (`Tolerance`). Pure.
"""

from __future__ import annotations

from typing import Final

import msgspec
from rigbook_schemas.values import GIB, DriftKind, Evidence

from rigbook_ledger import evidence as say

__all__ = ["HEALABLE", "KINDS", "Comparison", "Sighting", "Tolerance", "drift_key"]

KINDS: Final = tuple(DriftKind)
# Kinds about which the reaper can do something; the others need hands.
HEALABLE: Final = (
    DriftKind.LEFTOVER,
    DriftKind.MISSING,
    DriftKind.SQUATTER,
    DriftKind.WRONG_CARD,
    DriftKind.OVERUSE,
    DriftKind.CARD_LOST,
    DriftKind.IDLE_HOLDER,
    DriftKind.SUSPECTED_HANG,
    DriftKind.GPU_LOST_IN_CONTAINER,
)
MIB: Final = 1024**2


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """From when on, and from how much on, a difference is one. Seconds and bytes."""

    stop_seconds: float = 5.0  # added to an order's grace: the kill, the driver's clean-up, the report
    unread_seconds: float = 30.0  # for an order the agent has not read: the time its consumer waits to resend
    start_seconds: float = 1800.0  # from bound to started: a large image over a slow line
    unreleased_seconds: float = 60.0  # from the final `exited` to `released`
    refence_seconds: float = 60.0  # an agent that joined after an order has been sent it again by then
    stale_seconds: float = 30.0  # a card sample older than this is unknown
    # Driver context and allocator rounding: 2 % and 512 MiB over the allotment are normal.
    overuse_bytes: int = 512 * MIB
    overuse_share: float = 0.02
    foreign_bytes: int = 256 * MIB  # a desktop or a monitor on a bound card is no news below this
    residue_bytes: int = GIB  # used memory that no process explains (driver, ECC, page retirement)
    # An idle card shows 0 %; a monitor that looks at it now and then makes it 1 or 2.
    idle_percent: float = 5.0
    idle_seconds: float = 3600.0  # a model that answers once an hour is in use
    idle_notice_seconds: float = 600.0  # from telling the owner to a stop, where one is allowed
    # A collective that waits for a peer spins: the card shows 100 % and draws little more than at rest.
    hang_percent: float = 99.0
    hang_power_share: float = 0.3  # of the card's power limit; real work at 99 % draws more
    hang_seconds: float = 900.0
    unready_seconds: float = 300.0  # its probe says no, and its cards do nothing
    stuck_seconds: float = 120.0  # in uninterruptible sleep; slow disks and dumps take less


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """One difference in one heartbeat, with both sides and the evidence. Becomes a drift when it lasts."""

    key: str  # the drift's identity: kind, node, and the epoch and card it is about
    kind: DriftKind
    node: str
    sentence: str
    desired: str
    bound: str
    observed: str
    remedy: str
    card: str = ""
    cards: tuple[str, ...] = ()  # cards that must be known before it can be called gone
    demand: str = ""
    epoch: int | None = None
    evidence: tuple[Evidence, ...] = ()
    patience_seconds: float = 0.0  # it must last at least this long, whatever the grace of its kind
    healable: bool = True  # False: the reaper may only report it
    fenced: bool = False  # the agent knows the stop order for this epoch, and cannot start it again
    memory_back: bool = False  # the cards show no memory that no process explains
    # Nothing is healed before it was on the books for this long: its owner may object.
    notice_seconds: float = 0.0
    # The demand itself says that it may be stopped after this long, whatever the operator switched on.
    agreed_seconds: float | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One heartbeat held against the books."""

    node: str
    incarnation: str
    number: int
    received_ns: int
    sightings: tuple[Sighting, ...] = ()
    pending: frozenset[str] = frozenset()  # keys of what is there, and has time left
    unsure: frozenset[str] = frozenset()  # keys of which this heartbeat says neither yes nor no
    components_known: bool = False
    cards_known: frozenset[str] = frozenset()
    cards: frozenset[str] = frozenset()  # the node's inventory

    def sees(self, cards: tuple[str, ...]) -> bool:
        """Would something on these cards (none named: on any card of the node) have been seen?"""
        wanted = self.cards.intersection(cards) if cards else self.cards
        return self.components_known and wanted <= self.cards_known


def drift_key(kind: DriftKind, node: str, *about: object) -> str:
    """Identity of a drift, equal for each sighting of the same thing by whichever reaper."""
    return say.bounded_id(".".join((kind, node, *map(str, about))))

"""Which cards the agent takes out of service by itself, and why. Pure.

By an Xid that says that what runs next would fail as well, and by a card that has no spare row left. Each error once:
an operator who has looked and restored the card is not overruled by the same error again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rigbook_nodeagent.gpus.xids import ends_card

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rigbook_schemas.values import CardObservation

__all__ = ["Quarantine", "quarantines"]


class Quarantine(NamedTuple):
    """A card, and the error that it is for."""

    card: str
    about: str  # the same error has the same name
    reason: str


def quarantines(cards: Iterable[CardObservation]) -> list[Quarantine]:
    """At most one of each card: the latest error of it."""
    found: list[Quarantine] = []
    for card in cards:
        bad = [xid for xid in card.xids if ends_card(xid.code)]
        if bad:
            last = bad[-1]
            found.append(
                Quarantine(card.uuid, f"xid-{last.code}-{last.at}", f"Xid {last.code}: {last.meaning}")
            )
        elif card.remap_failed:
            found.append(
                Quarantine(card.uuid, "remap-failed", "its memory has no spare rows left: replace the card")
            )
    return found

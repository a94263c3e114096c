"""What heartbeats say of cards, as placement may use it: foreign memory, and samples not to be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rigbook_placer.feasible import Seen

if TYPE_CHECKING:
    from rigbook_schemas.events import Heartbeat
    from rigbook_schemas.values import CardObservation

__all__ = ["seen_of"]

# Less than this in foreign hands is a driver's or a desktop's own share, not somebody's work.
FOREIGN_BYTES_MIN: Final = 64 * 1024**2


def seen_of(heartbeat: Heartbeat) -> dict[str, Seen]:
    """Card UUID to what its sample says. Cards with nothing to say are left out."""
    seen: dict[str, Seen] = {}
    for card in heartbeat.cards:
        said = _seen(card)
        if said is not None:
            seen[card.uuid] = said
    return seen


def _seen(card: CardObservation) -> Seen | None:
    if card.unknown and card.memory_used_bytes is None:
        return Seen(unknown=card.unknown[:200])
    foreign = [p for p in card.processes or () if p.epoch is None]
    held = sum(p.memory_bytes or 0 for p in foreign)
    if held < FOREIGN_BYTES_MIN:
        return None
    most = max(foreign, key=lambda p: p.memory_bytes or 0)
    of = most.belongs or (f"user {most.user}" if most.user else "")
    who = f"pid {most.pid} ({most.command.split(' ')[0] or 'unknown program'}{f', {of}' if of else ''}, not managed)"
    return Seen(
        foreign_bytes=held, foreign_who=who if len(foreign) == 1 else f"{who} and {len(foreign) - 1} more"
    )

"""Is a share seen free? No process of it on any card, and the cards' memory back to what it was before. Pure.

Memory is judged only where the driver tells enough: every process on the card with its figure, and what was
there before the start. Else the word of the engine and of the process lists has to do; nothing is held for ever
because a driver is silent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rigbook_schemas.sentences import gib
from rigbook_schemas.values import CardBaseline, Mode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from rigbook_schemas.values import Allotment, CardObservation

__all__ = ["baseline_of", "still_held", "unexplained"]

# Contexts, page retirement and rounding come and go. The reaper's `Tolerance.residue_bytes` is the same.
RESIDUE_BYTES_MAX: Final = 1024**3


def unexplained(card: CardObservation) -> int | None:
    """Used memory that no listed process holds; None = it cannot be told."""
    if card.unknown or card.memory_used_bytes is None or card.processes is None:
        return None
    figures = {p.pid: p.memory_bytes for p in card.processes}
    if any(figure is None or figure < 0 for figure in figures.values()):
        return None
    return max(0, card.memory_used_bytes - sum(figure or 0 for figure in figures.values()))


def baseline_of(
    sample: Iterable[CardObservation], allotments: Iterable[Allotment]
) -> tuple[CardBaseline, ...]:
    """The cards of a share as they are now."""
    cards = frozenset(a.card for a in allotments)
    return tuple(
        CardBaseline(
            card=shown.uuid, memory_used_bytes=shown.memory_used_bytes, unexplained_bytes=unexplained(shown)
        )
        for shown in sample
        if shown.uuid in cards
    )


def still_held(
    sample: Iterable[CardObservation],
    *,
    epoch: int,
    allotments: Iterable[Allotment],
    baseline: Mapping[str, CardBaseline],
    unusable: Collection[str] = (),
) -> list[str]:
    """Why it is not free yet, one line each; [] when it is. `sample` is attributed; `unusable` cards are out of service."""
    modes = {a.card: a.mode for a in allotments}
    sample = tuple(sample)
    shown = {card.uuid for card in sample}
    held = [f"{uuid} is not shown" for uuid in modes if uuid not in shown and uuid not in unusable]
    for card in sample:
        mine = [p.pid for p in card.processes or () if p.epoch == epoch]
        held += [f"pid {pid} on {card.uuid}" for pid in mine]
        if card.unknown and card.processes is None and card.uuid in modes and card.uuid not in unusable:
            # Unknown is not free. A card that is lost takes no binding anyway: there the engine's word has to do.
            held.append(f"{card.uuid} cannot be read: {card.unknown}")
        before = baseline.get(card.uuid)
        if mine or card.uuid not in modes or before is None or before.unexplained_bytes is None:
            continue
        now = unexplained(card)
        if now is None or (modes[card.uuid] is not Mode.EXCLUSIVE and not card.processes):
            continue  # a driver that lists nobody cannot tell our memory from the others'
        if now > before.unexplained_bytes + RESIDUE_BYTES_MAX:
            held.append(
                f"vram_not_recovered: {gib(now)} of {card.uuid} are used and no process holds them; "
                f"{gib(before.unexplained_bytes)} were before the start"
            )
    return held

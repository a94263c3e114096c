"""Seen free or not: no process of the epoch on any card, and the memory back to what it was before."""

from __future__ import annotations

from typing import Any

import pytest
from rigbook_nodeagent.release import baseline_of, still_held
from rigbook_schemas.values import GIB, Allotment, CardObservation, Mode, ProcessObservation


def allotted(mode: Mode = Mode.EXCLUSIVE) -> tuple[Allotment, ...]:
    return (Allotment(card="GPU-1", memory_bytes=8 * GIB, mode=mode),)


def card(used: int | None, *processes: ProcessObservation, **more: Any) -> CardObservation:
    return CardObservation(
        uuid="GPU-1", memory_used_bytes=used, memory_total_bytes=24 * GIB, **{"processes": processes, **more}
    )


def holds(pid: int, memory: int | None, epoch: int | None = None) -> ProcessObservation:
    return ProcessObservation(pid=pid, memory_bytes=memory, epoch=epoch)


BEFORE = card(GIB, holds(5, GIB // 2))


@pytest.mark.parametrize(
    ("now", "mode", "held"),
    [
        (card(GIB, holds(5, GIB // 2)), Mode.EXCLUSIVE, ""),
        (card(9 * GIB, holds(5, GIB // 2), holds(7, 8 * GIB, epoch=7)), Mode.EXCLUSIVE, "pid 7 on GPU-1"),
        (card(9 * GIB, holds(5, GIB // 2)), Mode.EXCLUSIVE, "vram_not_recovered: 8.5 GiB"),
        (card(9 * GIB), Mode.EXCLUSIVE, "vram_not_recovered: 9.0 GiB"),
        (card(9 * GIB, holds(6, 8 * GIB)), Mode.EXCLUSIVE, ""),  # somebody else's: not ours to wait for
        (card(2 * GIB, holds(5, GIB // 2)), Mode.EXCLUSIVE, ""),  # within what comes and goes
        (card(9 * GIB, holds(5, None)), Mode.EXCLUSIVE, ""),  # a figure is missing: nothing can be said
        (card(None, holds(5, GIB)), Mode.EXCLUSIVE, ""),
        (card(9 * GIB), Mode.MEMORY_SLICE, ""),  # a driver that lists nobody: it may be the others'
        (card(9 * GIB, holds(5, GIB)), Mode.MEMORY_SLICE, "vram_not_recovered"),
        (CardObservation(uuid="GPU-2", processes=()), Mode.EXCLUSIVE, "GPU-1 is not shown"),
        (CardObservation(uuid="GPU-1", unknown="Unknown Error"), Mode.EXCLUSIVE, "GPU-1 cannot be read"),
    ],
)
def test_held(now: CardObservation, mode: Mode, held: str) -> None:
    before = {b.card: b for b in baseline_of([BEFORE], allotted(mode))}
    found = still_held([now], epoch=7, allotments=allotted(mode), baseline=before)
    assert len(found) == bool(held), found
    assert held in "".join(found)


def test_without_a_baseline_the_processes_have_to_do() -> None:
    """An agent that was restarted does not know what was there before."""
    now = card(9 * GIB, holds(5, GIB // 2))
    assert still_held([now], epoch=7, allotments=allotted(), baseline={}) == []
    unknown = CardObservation(uuid="GPU-1", unknown="the driver hangs")
    before = {b.card: b for b in baseline_of([unknown], allotted())}
    assert still_held([now], epoch=7, allotments=allotted(), baseline=before) == []

"""Processes in uninterruptible sleep (state D): no signal ends them, and what they hold stays held.

A process is in that state for milliseconds on every disk access. One that stays there on a GPU node mostly hangs in
the driver, and then only a reboot helps; so it is told with how long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from rigbook_nodeagent.engines.procfs import stat_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rigbook_schemas.values import CardObservation, ProcessObservation

    from rigbook_nodeagent.engines.procfs import Stat
    from rigbook_nodeagent.engines.protocol import Running

__all__ = ["Stuck"]

# Shorter is a slow disk; the reaper's `Tolerance.stuck_seconds` is the same.
REBOOT_SECONDS: Final = 120.0


class Stuck:
    """Remembers since when each process has been seen in no other state. `monotonic` is the clock."""

    def __init__(
        self, monotonic: Callable[[], float], *, stat: Callable[[int], Stat | None] = stat_of
    ) -> None:
        self._monotonic = monotonic
        self._stat = stat
        self._since: dict[tuple[int, int], float] = {}  # by (pid, start): since when
        self.reboot_needed = ""

    def mark(
        self, cards: Sequence[CardObservation], running: Iterable[Running]
    ) -> tuple[CardObservation, ...]:
        """The same cards, each process that is stuck with for how long. Ours are looked at without a card, too."""
        now = self._monotonic()
        states: dict[int, float | None] = {}
        before, self._since = self._since, {}

        def seconds(pid: int) -> float | None:
            if pid not in states:
                stat = self._stat(pid) if pid > 0 else None
                if stat is None or stat.state != "D":
                    states[pid] = None
                else:
                    key = (pid, stat.start_ticks)
                    self._since[key] = before.get(key, now)
                    states[pid] = now - self._since[key]
            return states[pid]

        def one(process: ProcessObservation) -> ProcessObservation:
            stuck = seconds(process.pid)
            return process if stuck is None else msgspec.structs.replace(process, stuck_seconds=stuck)

        told = tuple(
            card
            if not card.processes
            else msgspec.structs.replace(card, processes=tuple(one(p) for p in card.processes))
            for card in cards
        )
        holds = {p.pid: (card.uuid, p.command) for card in told for p in card.processes or ()}
        ours = {pid for r in running for pid in r.pids}
        for pid in ours:
            seconds(pid)
        long = sorted(pid for pid in ours | holds.keys() if (states.get(pid) or 0.0) >= REBOOT_SECONDS)
        self.reboot_needed = "; ".join(
            f"pid {pid} ({holds[pid][1] or 'unknown program'}) hangs in the kernel (state D) and holds {holds[pid][0]}"
            if pid in holds
            else f"pid {pid} of ours hangs in the kernel (state D)"
            for pid in long[:8]
        )
        return told

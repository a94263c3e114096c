"""The name under which an agent's workloads are its cluster's: two clusters on one machine leave each other alone.

Where the operator gives none, it is made from the log that the agent first joined (the moment its stream was
created) and kept in the agent's folder: a recovered log is another stream, and what runs must stay ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rigbook_bus.protocol import BusError
from rigbook_schemas.subjects import LEDGER_STREAM, token

if TYPE_CHECKING:
    from pathlib import Path

    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus

__all__ = ["cluster_of"]

FILE: Final = "cluster"
RETRY_SECONDS: Final = 0.3
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


async def cluster_of(bus: Bus, data: Path, clock: Clock, *, given: str = "") -> str:
    """As given, or as this folder has it, or of the log; waits until there is one. Raises ValueError."""
    if given:
        return token(given)
    file = data / FILE
    if file.exists():
        return token(file.read_text(encoding="ascii").strip())
    while True:
        try:
            facts = await bus.stream(LEDGER_STREAM)
        except BusError:
            facts = None
        if facts is None:
            await clock.sleep(RETRY_SECONDS)
            continue
        name = f"c{_base36(facts.created_ns // 1_000_000)}"
        fresh = file.with_suffix(".new")
        fresh.write_text(f"{name}\n", encoding="ascii")
        fresh.replace(file)
        return name


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits or "0"

"""Samples that are beyond belief: rejected, counted, and the last good one shown with its age."""

from __future__ import annotations

import msgspec
from rigbook_schemas.values import GIB, MEMORY_BYTES_MAX, CardObservation

__all__ = ["LastGood", "complaint"]

UTILISATION_PERCENT_MAX = 100.0
TEMPERATURE_CELSIUS_MAX = 200.0
POWER_WATTS_MAX = 10_000.0


def complaint(observation: CardObservation, *, total_bytes: int) -> str:
    """What is wrong with the memory figures; empty when they can be true.

    `total_bytes` is what the inventory says the card has, 0 when unknown.
    """
    used, total = observation.memory_used_bytes, observation.memory_total_bytes
    limit = total if total is not None else total_bytes
    if total is not None and not 0 < total <= MEMORY_BYTES_MAX:
        return f"the driver shows {total} bytes in total"
    if used is not None and (used < 0 or (limit and used > limit)):
        return f"the driver shows {used / GIB:.1f} GiB used of {limit / GIB:.1f}"
    return ""


class LastGood:
    """Keeps the last believable sample of each card."""

    def __init__(self) -> None:
        self._good: dict[str, CardObservation] = {}
        self.rejected = 0

    def judged(self, observation: CardObservation, *, total_bytes: int = 0) -> CardObservation:
        """The sample itself, with absurd secondary figures unknown; or the last good one, saying so.

        The replacement keeps the `as_of` of the moment it was taken; `unknown` tells why it is shown. Its
        processes are those of now: a pid that has ended may be somebody else's. Without a good one before,
        memory is unknown.
        """
        wrong = complaint(observation, total_bytes=total_bytes)
        if not wrong:
            sane = _without_absurd(observation)
            if sane.memory_used_bytes is not None and not sane.unknown:
                self._good[sane.uuid] = sane
            return sane
        self.rejected += 1
        last = self._good.get(observation.uuid)
        if last is None:
            return msgspec.structs.replace(
                _without_absurd(observation),
                memory_used_bytes=None,
                memory_total_bytes=None,
                unknown=f"sample rejected: {wrong}",
            )
        return msgspec.structs.replace(
            last,
            processes=observation.processes,
            unknown=f"sample of {observation.as_of} rejected: {wrong}; this one is of {last.as_of}",
        )


def _without_absurd(observation: CardObservation) -> CardObservation:
    return msgspec.structs.replace(
        observation,
        utilisation_percent=_within(observation.utilisation_percent, UTILISATION_PERCENT_MAX),
        temperature_celsius=_within(observation.temperature_celsius, TEMPERATURE_CELSIUS_MAX),
        power_watts=_within(observation.power_watts, POWER_WATTS_MAX),
        fan_percent=_within(observation.fan_percent, 200.0),  # some fans report more than 100
    )


def _within(value: float | None, maximum: float) -> float | None:
    return value if value is not None and 0 <= value <= maximum else None

"""Gathers the circumstances of an end, so that `verdict` has nothing left to ask."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from rigbook_nodeagent.circumstances import Circumstances
from rigbook_nodeagent.engines.protocol import EngineError
from rigbook_nodeagent.last_words import LINES_MAX, memory_refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rigbook_schemas.values import Engine

    from rigbook_nodeagent.circumstances import MemoryRefusal, ProbeFailure
    from rigbook_nodeagent.engines.protocol import Engines, Running
    from rigbook_nodeagent.orders import Order
    from rigbook_nodeagent.readings import Readings
    from rigbook_nodeagent.watch import Watch

__all__ = ["circumstances_of"]

LAST_WORDS_SECONDS_MAX: Final = 5.0
# How a container or process ends when the machine goes down under it.
_SHUT_DOWN: Final = frozenset({None, 137, 143, 255})


async def circumstances_of(
    order: Order,
    ended: Sequence[Running],
    *,
    engines: Mapping[Engine, Engines],
    watch: Watch,
    readings: Readings,
    refused: tuple[str, str] | None,
    probe: ProbeFailure | None,
    over_before_stop: bool,
    seen: Mapping[str, Running],
    adopted: bool,
    attempt: int,
) -> Circumstances:
    """`seen`: each component as it was last seen running by this agent; `adopted`: it ran before we came."""
    stop = order.stop
    cards = tuple(a.card for a in order.share.allotments)
    expected = [c.name for c in order.share.components] if adopted else list(seen)
    found = {r.component for r in ended}
    bad = [r for r in ended if r.exit_code != 0 or r.signal]
    by_itself = refused is None and (stop is None or over_before_stop) and probe is None
    return Circumstances(
        ended=tuple(ended),
        refused=refused,
        stop_reason=stop.reason if stop is not None else None,
        stop_by=stop.by if stop is not None else "",
        stop_seq=stop.seq if stop is not None else 0,
        ended_before_stop=over_before_stop,
        rebooted=any(r.other_boot and r.exit_code in _SHUT_DOWN for r in ended),
        probe=probe,
        levels=readings.changes(),
        host=readings.host(kills=watch.machine_kills()),
        kills=watch.kills_of(order.epoch),
        troubles=watch.troubles_of(order.epoch, cards),
        vanished=tuple(name for name in expected if name not in found) if refused is None else (),
        watched=bool(seen),
        refusal=await _last_words(bad, engines) if by_itself else None,
        cards=readings.uses(dict(watch.starts_beside(order.epoch, cards))),
        story=readings.story,
        attempt=attempt,
    )


async def _last_words(bad: Sequence[Running], engines: Mapping[Engine, Engines]) -> MemoryRefusal | None:
    """What those that ended badly said last about memory of a card."""
    for component in bad:
        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS_MAX):
                lines = [
                    line
                    async for line in engines[component.engine].logs(
                        component, follow=False, lines_max=LINES_MAX
                    )
                ]
        except (EngineError, TimeoutError):
            continue  # without its words, the other evidence has to do
        failure = memory_refusal(component.component, b"".join(lines))
        if failure is not None:
            return failure
    return None

"""The probes of one share: startup until the first yes, then liveness; and when they make us end it.

Each component is asked by itself, so a slow answer of one delays no other. What is published is of the whole:
`ready` once all say yes, `unready` when one says no after that.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from rigbook_nodeagent.circumstances import ProbeFailure
from rigbook_nodeagent.probes import probe_once

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rigbook_bus.clock import Clock
    from rigbook_schemas.values import Component, Probe, Restart

    from rigbook_nodeagent.probes import Target

__all__ = ["Probed", "Probing", "ends_it"]

# Until it is ready somebody waits for it: look more often than the probe says, then settle.
EAGER_SECONDS: Final = 1.0
PAUSE_SECONDS_MIN: Final = 0.05


class Probed(Protocol):
    """What probing asks of the workload, and tells it."""

    async def target(self, component: Component) -> Target:
        """Where the component is to be asked."""
        ...

    async def became_ready(self, seconds: float) -> None: ...

    async def became_unready(self, component: str, why: str) -> None: ...

    def noted(self, what: str, value: str) -> None: ...

    def failed(self, failure: ProbeFailure) -> None:
        """It must be ended."""
        ...


def ends_it(probe: Probe, restart: Restart, *, attempt: int) -> bool:
    """Does a failure of this probe end the component?"""
    if probe.on_failure == "stop":
        return True
    if probe.on_failure == "report":
        return False
    return restart.policy != "never" and attempt <= restart.attempts_max


class Probing:
    """Of one attempt."""

    def __init__(
        self,
        probed: Probed,
        components: Sequence[Component],
        *,
        restart: Restart,
        attempt: int,
        clock: Clock,
        ask: Callable[[Probe, Target], Awaitable[str]] = probe_once,
    ) -> None:
        self._probed = probed
        self._components = [c for c in components if c.probe is not None or c.startup is not None]
        self._restart = restart
        self._attempt = attempt
        self._clock = clock
        self._ask = ask
        self._ready: dict[str, bool] = {c.name: False for c in self._components}
        self._told = False  # what was published last
        self.latencies: dict[str, float] = {}  # seconds of the last answer, by component
        self.slowest: dict[str, float] = {}
        self._began = clock.monotonic()

    async def run(self) -> None:
        """Until cancelled, or until one of them has to be ended."""
        asking = [asyncio.ensure_future(self._one(c)) for c in self._components]
        try:
            await asyncio.gather(*asking)
        finally:
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _one(self, component: Component) -> None:
        if not await self._startup(component) or component.probe is None:
            return
        probe = component.probe
        failures, last_yes = 0, self._clock.monotonic()
        while True:
            await self._clock.sleep(max(PAUSE_SECONDS_MIN, probe.every_seconds))
            why = await self._once(component, probe)
            if not why:
                failures, last_yes = 0, self._clock.monotonic()
                await self._say(component, yes=True)
                continue
            failures += 1
            self._probed.noted(f"liveness probe of {component.name}", f"{why} ({failures} in a row)")
            if failures < probe.failures_max:
                continue
            await self._say(component, yes=False, why=why)
            if ends_it(probe, self._restart, attempt=self._attempt):
                self._probed.failed(
                    ProbeFailure(
                        kind="liveness", component=component.name, failures=failures, why=why,
                        seconds=self._clock.monotonic() - last_yes,
                        latency_seconds=self.latencies.get(component.name),
                    )
                )  # fmt: skip
                return

    async def _startup(self, component: Component) -> bool:
        """True once it said yes for the first time."""
        probe = component.startup or component.probe
        assert probe is not None
        every = (
            probe.every_seconds if component.startup is not None else min(probe.every_seconds, EAGER_SECONDS)
        )
        failures, told = 0, False
        while True:
            why = await self._once(component, probe)
            if not why:
                await self._say(component, yes=True)
                return True
            failures += 1
            seconds = self._clock.monotonic() - self._began
            if seconds >= probe.startup_seconds_max and not told:
                told = True
                self._probed.noted(f"startup probe of {component.name}", f"{why} after {seconds:.0f} s")
                await self._probed.became_unready(component.name, f"not ready within {seconds:.0f} s: {why}")
                if ends_it(probe, self._restart, attempt=self._attempt):
                    self._probed.failed(
                        ProbeFailure(
                            kind="startup", component=component.name, failures=failures, why=why, seconds=seconds,
                            latency_seconds=self.latencies.get(component.name),
                        )
                    )  # fmt: skip
                    return False
            await self._clock.sleep(max(PAUSE_SECONDS_MIN, every))

    async def _once(self, component: Component, probe: Probe) -> str:
        target = await self._probed.target(component)
        began = self._clock.monotonic()
        why = target.unknown or await self._ask(probe, target)
        seconds = self._clock.monotonic() - began
        self.latencies[component.name] = seconds
        self.slowest[component.name] = max(seconds, self.slowest.get(component.name, 0.0))
        return why

    async def _say(self, component: Component, *, yes: bool, why: str = "") -> None:
        self._ready[component.name] = yes
        now = all(self._ready.values())
        if now and not self._told:
            self._told = True
            await self._probed.became_ready(self._clock.monotonic() - self._began)
        elif not now and self._told:
            self._told = False
            await self._probed.became_unready(component.name, why)

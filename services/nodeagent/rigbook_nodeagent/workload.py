"""One binding's share on this node, from its order to the observed end.

    ordered -> components started -> `started` -> (probes) -> ended or stopped -> `exited`
            -> processes gone and cards free, as *seen* -> `released` -> forgotten

All components start together and are stopped together. A stop order frees nothing: `released` is
published only after the engine shows no process of this epoch and no card does either. A stop order
with scope `components` reaches each component's own group; what left it is reported, and stays, until
an order with scope `everything` comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, Protocol

import structlog
from rigbook_schemas import subjects
from rigbook_schemas.events import Exited, Ready, Released, Started, Unready
from rigbook_schemas.values import (
    ComponentEnd,
    ComponentObservation,
    Engine,
    StopScope,
    Usage,
)
from rigbook_schemas.values import (
    Workload as WorkloadKind,
)

from rigbook_nodeagent.engines.protocol import EngineError, Launch, Running, StartRefused
from rigbook_nodeagent.gpus.protocol import GpusError
from rigbook_nodeagent.probes import probe_once
from rigbook_nodeagent.verdict import Verdict, verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rigbook_bus.clock import Clock
    from rigbook_schemas.events import Payload
    from rigbook_schemas.values import CardObservation, Component

    from rigbook_nodeagent.cards import Cards
    from rigbook_nodeagent.engines.protocol import Engines
    from rigbook_nodeagent.orders import Order, OrderBook

__all__ = ["Surroundings", "WorkloadRun", "observation"]

# With no hint from the engine, look again this often: hints may be lost, the inventory is the truth.
LOOK_SECONDS: Final = 2.0
# While an end is being verified, look this often.
VERIFY_SECONDS: Final = 0.5
ENGINE_RETRY_SECONDS: Final = 1.0


class Surroundings(Protocol):
    """What a workload needs of its agent."""

    cluster: str
    node: str
    clock: Clock
    cards: Cards
    engines: Mapping[Engine, Engines]
    book: OrderBook
    may_start: asyncio.Event  # set after the first full inventory of this agent's run

    async def publish(
        self, subject: str, data: Payload, *, message_id: str, order: Order, cause: str = ""
    ) -> None:
        """Until acknowledged; survives any outage of the bus."""
        ...

    def attribute(
        self, sample: Sequence[CardObservation], running: Sequence[Running]
    ) -> tuple[CardObservation, ...]: ...

    def peak_of(self, epoch: int) -> int | None:
        """Highest GPU memory seen of this epoch, bytes; None when never sampled."""
        ...


def observation(running: Running) -> ComponentObservation:
    """What goes onto the bus of a component."""
    return ComponentObservation(
        epoch=running.epoch,
        demand=running.demand,
        component=running.component,
        engine=running.engine,
        ref=running.ref,
        running=running.running,
        pids=running.pids[:64],
        since=running.since,
        gpus=running.cards,
    )


class WorkloadRun:
    """Drives one epoch. `run` ends when the binding is released."""

    def __init__(self, surroundings: Surroundings, order: Order) -> None:
        self._s = surroundings
        self._epoch = order.epoch
        self._order = order
        self._changed = asyncio.Event()
        self._attempt = 1
        self._stopped_scope: StopScope | None = None
        self._log = structlog.get_logger().bind(
            demand=order.demand, epoch=order.epoch, node=surroundings.node
        )
        self.ready: bool | None = None

    def nudge(self) -> None:
        """Something about this epoch may have changed: an end, a new order."""
        self._changed.set()

    @property
    def _now(self) -> Order:
        """The order as the book has it now (a stop order may have come)."""
        self._order = self._s.book.open_orders.get(self._epoch, self._order)
        return self._order

    async def run(self) -> None:
        """Until released. Cancelling it leaves everything running: the next agent adopts it."""
        while True:
            refused = await self._begin()
            probing = (
                asyncio.create_task(self._probe()) if refused is None and self._now.stop is None else None
            )
            try:
                await self._until_over(refused)
            finally:
                if probing is not None:
                    probing.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await probing
            ended = await self._until_gone()
            said = verdict(ended, stop=self._now.stop, refused=refused)
            again = self._again(said, refused)
            exited = asyncio.create_task(self._exited(said, ended, final=not again))
            if again:
                await exited
                await self._forget(ended)
                await self._back_off()
                self._attempt += 1
                continue
            try:
                await self._until_cards_free()
            finally:
                await exited
            await self._released(said)
            await self._forget(ended)
            self._s.book.close_order(self._epoch)
            self._s.book.flush()
            return

    # -- start ------------------------------------------------------------------------------

    async def _begin(self) -> tuple[str, str] | None:
        """Start what is not there yet; None, or why the engine refuses (code, text)."""
        await self._s.may_start.wait()
        order = self._now
        if order.started and self._attempt == 1:
            self._log.info("adopted")
            return None
        if order.stop is not None:
            return None  # stopped before it began
        running: list[Running] = []
        for component in order.share.components:
            if self._now.stop is not None:
                return None
            started = await self._start(component)
            if isinstance(started, tuple):
                self._log.warning("start refused", component=component.name, code=started[0], why=started[1])
                await self._stop_all(running, StopScope.COMPONENTS, component.stop_grace_seconds)
                return started
            running.append(started)
        self._s.book.mark_started(self._epoch)
        data = Started(
            demand=order.demand,
            epoch=self._epoch,
            node=self._s.node,
            components=tuple(observation(r) for r in running),
            attempt=self._attempt,
        )
        await self._publish(
            subjects.run(self._s.node), data, f"started-{self._epoch}-{self._s.node}-{self._attempt}"
        )
        self._log.info("started", attempt=self._attempt, components=len(running))
        return None

    async def _start(self, component: Component) -> Running | tuple[str, str]:
        order = self._now
        kind = Engine.DOCKER if component.image else Engine.PROCESS
        if kind not in self._s.engines:
            return (
                "start_failed",
                f"node {self._s.node} has no {kind} engine, component {component.name} needs it",
            )
        uuids = tuple(a.card for a in order.share.allotments) if component.gpu else ()
        unfit = [u for u in uuids if self._s.cards.index_of(u) < 0]
        if unfit:
            return ("start_failed", f"card {unfit[0]} is not on this node now")
        launch = Launch(
            cluster=self._s.cluster,
            node=self._s.node,
            demand=order.demand,
            epoch=self._epoch,
            project=order.project,
            owner=order.owner.name if order.owner else "",
            component=component,
            cards=uuids,
            indices=tuple(self._s.cards.index_of(u) for u in uuids),
            memory_bytes=min((a.memory_bytes for a in order.share.allotments), default=0),
            card_memory_bytes=min((self._s.cards.memory_of(u) for u in uuids), default=0),
            environment=self._s.cards.environment(uuids),
            traceparent=order.traceparent,
        )
        while True:
            try:
                # asked for each time: one that could not be opened may have been meanwhile
                return await self._s.engines[kind].start(launch)
            except StartRefused as refused:
                return (refused.code, refused.text)
            except EngineError as error:
                self._log.warning(
                    "the engine does not answer; will try again", component=component.name, why=str(error)
                )
                await self._wait(ENGINE_RETRY_SECONDS)
                if self._now.stop is not None:
                    return ("start_failed", f"the engine did not answer before the stop order came: {error}")

    async def _probe(self) -> None:
        """`ready` once all probes said yes, `unready` when one says no after that."""
        order = self._now
        probed = [c for c in order.share.components if c.probe is not None]
        began = self._s.clock.monotonic()
        failures = 0
        while probed:
            why = ""
            for component in probed:
                assert component.probe is not None
                why = await probe_once(
                    component.probe, environment={**self._s.cards.environment(()), **component.env}
                )
                if why:
                    why = f"{component.name}: {why}"
                    break
            failures = failures + 1 if why else 0
            if not why and not self.ready:
                self.ready = True
                data = Ready(
                    demand=order.demand,
                    epoch=self._epoch,
                    node=self._s.node,
                    seconds=self._s.clock.monotonic() - began,
                )
                await self._publish(
                    subjects.run(self._s.node),
                    data,
                    f"ready-{self._epoch}-{self._s.node}-{self._s.clock.now_ns()}",
                )
            elif self.ready and failures >= max(c.probe.failures_max for c in probed if c.probe):
                self.ready = False
                unready = Unready(demand=order.demand, epoch=self._epoch, node=self._s.node, text=why)
                await self._publish(
                    subjects.run(self._s.node),
                    unready,
                    f"unready-{self._epoch}-{self._s.node}-{self._s.clock.now_ns()}",
                )
            every = min(c.probe.every_seconds for c in probed if c.probe)
            # Until it is ready somebody waits for it: look more often, then settle.
            await self._s.clock.sleep(max(0.05, every if self.ready else min(every, 1.0)))

    # -- the end ----------------------------------------------------------------------------

    async def _until_over(self, refused: tuple[str, str] | None) -> None:
        """Returns when the workload has ended by itself or a stop order is there."""
        if refused is not None:
            return
        while self._now.stop is None:
            found = await self._look()
            if found is not None and self._over(found):
                return
            await self._wait(LOOK_SECONDS)

    def _over(self, found: Sequence[Running]) -> bool:
        """A batch is over when everything ended, or something ended badly; a service when anything ended.

        A component whose first process ended while others of its epoch live on (a daemon) has not ended.
        """
        alive = {r.component for r in found if r.running or r.pids}
        ended = [r for r in found if r.component not in alive]
        gone = [c.name for c in self._now.share.components if c.name not in alive]
        if not alive:
            return True
        if self._now.workload is WorkloadKind.SERVICE:
            return bool(gone)
        return any(r.exit_code != 0 for r in ended) or len(gone) > len(ended)

    async def _until_gone(self) -> list[Running]:
        """Stop what still runs; returns the ends once the engine shows that nothing of this epoch lives."""
        grace = max((c.stop_grace_seconds for c in self._now.share.components), default=10.0)
        last: list[Running] = []
        told = False
        while True:
            found = await self._look()
            if found is None:
                await self._wait(ENGINE_RETRY_SECONDS)
                continue
            last = found
            alive = [r for r in found if r.running or r.pids]
            if not alive:
                return last
            stop = self._now.stop
            scope = stop.scope if stop is not None else StopScope.COMPONENTS
            if scope is not self._stopped_scope or any(r.running for r in alive):
                self._log.info("stopping", scope=scope, reason=stop.reason if stop else "a part of it ended")
                await self._stop_all(alive, scope, stop.grace_seconds if stop else grace)
                self._stopped_scope = scope
                continue
            if not told:
                told = True
                self._log.warning(
                    "stopped, and processes of it live on outside of its group",
                    pids=[p for r in alive for p in r.pids][:16],
                )
            await self._wait(VERIFY_SECONDS)

    async def _stop_all(self, running: Sequence[Running], scope: StopScope, grace_seconds: float) -> None:
        """Access points first (nobody is let in any more), then the rest, each kind side by side."""
        order = {c.name: (0 if c.role == "access" else 1) for c in self._now.share.components}
        for rank in (0, 1):
            batch = [r for r in running if order.get(r.component, 1) == rank]
            results = await asyncio.gather(
                *(self._s.engines[r.engine].stop(r, grace_seconds=grace_seconds, scope=scope) for r in batch),
                return_exceptions=True,
            )
            for r, result in zip(batch, results, strict=True):
                if isinstance(result, EngineError):
                    self._log.warning("stop failed; will try again", component=r.component, why=str(result))
                    await self._wait(ENGINE_RETRY_SECONDS)
                elif isinstance(result, BaseException):
                    raise result

    async def _look(self) -> list[Running] | None:
        """What the engines show of this epoch; None = unknown."""
        found: list[Running] = []
        try:
            for component in self._now.share.components:
                engine = self._s.engines.get(Engine.DOCKER if component.image else Engine.PROCESS)
                running = await engine.inspect(self._epoch, component.name) if engine is not None else None
                if running is not None:
                    found.append(running)
        except EngineError as error:
            self._log.warning("the engine does not answer; what runs is unknown", why=str(error))
            return None
        return found

    async def _until_cards_free(self) -> None:
        """Returns once a sample taken from now on shows no process of this epoch on any card."""
        told = False
        while True:
            try:
                sample = self._s.attribute(await self._s.cards.sample(), ())
            except GpusError as error:
                why = f"cards cannot be read: {error}"
            else:
                # A driver that lists no processes at all (some integrated devices) cannot keep a card for
                # ever: there the engine's word that every process is gone has to do.
                held = [
                    f"pid {p.pid} on {c.uuid}"
                    for c in sample
                    for p in c.processes or ()
                    if p.epoch == self._epoch
                ]
                why = ", ".join(held)
            if not why:
                return
            if not told:
                told = True
                self._log.warning("ended, and its cards are not seen free yet", why=why)
            await self._wait(VERIFY_SECONDS)

    # -- telling ----------------------------------------------------------------------------

    def _again(self, said: Verdict, refused: tuple[str, str] | None) -> bool:
        order = self._now
        if order.stop is not None or refused is not None or self._attempt > order.restart.attempts_max:
            return False
        good = said.verdict == "completed"
        return order.restart.policy == "always" or (order.restart.policy == "on-failure" and not good)

    async def _back_off(self) -> None:
        """Doubling, at most a minute; a stop order ends it."""
        seconds = min(60.0, self._now.restart.backoff_seconds * 2 ** (self._attempt - 1))
        until = self._s.clock.monotonic() + seconds
        while self._now.stop is None and (left := until - self._s.clock.monotonic()) > 0:
            await self._wait(left)

    async def _exited(self, said: Verdict, ended: Sequence[Running], *, final: bool) -> None:
        order = self._now
        data = Exited(
            demand=order.demand,
            epoch=self._epoch,
            node=self._s.node,
            verdict=said.verdict,
            confidence=said.confidence,
            sentence=said.sentence,
            ends=tuple(
                ComponentEnd(component=r.component, exit_code=r.exit_code, signal=r.signal, ended=r.ended)
                for r in ended
            ),
            evidence=said.evidence,
            final=final,
            attempt=self._attempt,
        )
        cause = order.stop.event_id if order.stop else order.event_id
        await self._publish(
            subjects.run(self._s.node),
            data,
            f"exited-{self._epoch}-{self._s.node}-{self._attempt}",
            cause=cause,
        )
        self._log.info(
            "exited", verdict=said.verdict, confidence=said.confidence, why=said.sentence, final=final
        )

    async def _released(self, said: Verdict) -> None:
        order = self._now
        data = Released(
            demand=order.demand,
            epoch=self._epoch,
            node=self._s.node,
            verdict=said.verdict,
            usage=Usage(
                seconds=max(0.0, (self._s.clock.now_ns() - order.bound_ns) / 1e9) if order.bound_ns else 0.0,
                memory_peak_bytes=self._s.peak_of(self._epoch),
            ),
        )
        await self._publish(subjects.release(self._s.node), data, f"released-{self._epoch}-{self._s.node}")
        self._log.info("released")

    async def _forget(self, ended: Sequence[Running]) -> None:
        for running in ended:
            try:
                await self._s.engines[running.engine].remove(running)
            except EngineError as error:
                self._log.warning(
                    "the engine keeps an ended component", component=running.component, why=str(error)
                )

    async def _publish(self, subject: str, data: Payload, message_id: str, *, cause: str = "") -> None:
        await self._s.publish(subject, data, message_id=message_id, order=self._order, cause=cause)

    async def _wait(self, seconds: float) -> None:
        """Until something changed, at most `seconds`."""
        waiter = asyncio.ensure_future(self._changed.wait())
        sleeper = asyncio.ensure_future(self._s.clock.sleep(seconds))
        try:
            await asyncio.wait({waiter, sleeper}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
            sleeper.cancel()
            self._changed.clear()

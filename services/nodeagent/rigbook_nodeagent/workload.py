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
    Starting,
    StopScope,
    Unreleased,
    Usage,
)
from rigbook_schemas.values import (
    Workload as WorkloadKind,
)
from rigbook_schemas.wire import rfc3339

from rigbook_nodeagent.asking import Asking
from rigbook_nodeagent.checkpoints import COOPERATIVE
from rigbook_nodeagent.ending import circumstances_of
from rigbook_nodeagent.engines.container_config import image_reference
from rigbook_nodeagent.engines.protocol import EngineError, Running, StartRefused
from rigbook_nodeagent.gpus.protocol import GpusError
from rigbook_nodeagent.launching import injection_problem, launch_of
from rigbook_nodeagent.probes import Target
from rigbook_nodeagent.probing import Probing
from rigbook_nodeagent.release import baseline_of, still_held
from rigbook_nodeagent.restart import seconds_until_again
from rigbook_nodeagent.startgate import StartGate, start_seconds_max
from rigbook_nodeagent.strays import end_strays, strays_of
from rigbook_nodeagent.verdict import Verdict, verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rigbook_bus.clock import Clock
    from rigbook_schemas.events import Payload
    from rigbook_schemas.values import CardObservation, Component

    from rigbook_nodeagent.cards import Cards
    from rigbook_nodeagent.circumstances import ProbeFailure
    from rigbook_nodeagent.engines.docker_client import PullProgress
    from rigbook_nodeagent.engines.protocol import Engines
    from rigbook_nodeagent.orders import Order, OrderBook
    from rigbook_nodeagent.readings import Readings
    from rigbook_nodeagent.upkeep import Upkeep
    from rigbook_nodeagent.watch import Watch

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
    watch: Watch
    gate: StartGate
    upkeep: Upkeep
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
        ports=running.ports,
        warning=running.warning,
    )


class WorkloadRun:
    """Drives one epoch. `run` ends when the binding is released."""

    def __init__(self, surroundings: Surroundings, order: Order) -> None:
        self._s = surroundings
        self._epoch = order.epoch
        self._order = order
        self._changed = asyncio.Event()
        self._attempt = order.attempt
        self._stopped_scope: StopScope | None = None
        self._log = structlog.get_logger().bind(
            demand=order.demand, epoch=order.epoch, node=surroundings.node
        )
        self.ready: bool | None = None
        self.unreleased: Unreleased | None = None  # it ended, and is not seen free: why
        self.starting: Starting | None = None  # what it waits for before it runs
        self._begun: Component | None = None  # its engine was asked to start this one
        self.probing: Probing | None = None
        self._readings: Readings
        self._seen: dict[str, Running] = {}  # components as last seen running
        self._adopted = False
        self._probe_failure: ProbeFailure | None = None
        self._replaced = False  # somebody put another container in the place of ours
        self._over_before_stop = False
        self._asking = Asking(surroundings, order.epoch, self)

    def nudge(self) -> None:
        """Something about this epoch may have changed: an end, a new order."""
        self._changed.set()

    @property
    def _now(self) -> Order:
        """The order as the book has it now (a stop order may have come)."""
        self._order = self._s.book.open_orders.get(self._epoch, self._order)
        return self._order

    @property
    def order(self) -> Order:
        return self._now

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
            self._s.gate.leave(self._epoch)
            ended = await self._until_gone() if not self._replaced else (await self._look() or [])
            self._s.watch.end(self._epoch, ended)
            await self._look_at_cards(ended)
            self._note_probes()
            self._s.watch.started(self._epoch)
            said = verdict(
                await circumstances_of(
                    self._now, ended, engines=self._s.engines, watch=self._s.watch, readings=self._readings,
                    refused=refused, probe=self._probe_failure, over_before_stop=self._over_before_stop,
                    seen=self._seen, adopted=self._adopted, attempt=self._attempt,
                )
            )  # fmt: skip
            again = self._again(said)
            exited = asyncio.create_task(self._exited(said, ended, final=again is None))
            if again is not None:
                await exited
                if not self._replaced:
                    await self._forget(ended)
                    await self._back_off(again)
                self._attempt += 1
                self._s.book.mark_attempt(self._epoch, self._attempt)
                continue
            try:
                await self._until_cards_free()
            finally:
                await exited
            await self._released(said)
            await self._forget(ended)
            self._s.watch.forget(self._epoch)
            self._s.book.close_order(self._epoch)
            self._s.book.flush()
            return

    # -- start ------------------------------------------------------------------------------

    async def _begin(self) -> tuple[str, str] | None:
        """Start what is not there yet; None, or why the engine refuses (code, text)."""
        await self._s.may_start.wait()
        order = self._now
        self._adopted = order.started
        await self._enter_gate()
        order = self._now
        self._seen, self._probe_failure, self._replaced, self._over_before_stop = {}, None, False, False
        self._readings = self._s.watch.begin(
            self._epoch, order.demand, order.share.allotments, starting=not self._adopted
        )
        if self._adopted:
            self._readings.baseline = order.baseline
            self._log.info("adopted")
            return None
        self._readings.baseline = baseline_of(self._s.cards.latest or (), order.share.allotments)
        if order.stop is not None:
            return None  # stopped before it began
        await self._s.upkeep.limit_processes()
        running: list[Running] = []
        for component in order.share.components:
            if self._now.stop is not None:
                return None
            self._begun = component
            started = await self._start(component)
            self._begun = None
            if isinstance(started, tuple):
                self._log.warning("start refused", component=component.name, code=started[0], why=started[1])
                await self._stop_all(running, StopScope.COMPONENTS, component.stop_grace_seconds)
                return started
            problem = injection_problem(started, self._s.upkeep)
            if problem is not None:
                self._log.error("the container has not its cards", component=component.name, why=problem[1])
                await self._stop_all([*running, started], StopScope.COMPONENTS, 0.0)
                return problem
            running.append(started)
            self._see([started])
        self._readings.read(self._s.clock.monotonic(), thorough=False)
        self._s.book.mark_started(self._epoch, self._readings.baseline)
        data = Started(
            demand=order.demand,
            epoch=self._epoch,
            node=self._s.node,
            components=tuple(observation(r) for r in running),
            attempt=self._attempt,
            baseline=self._readings.baseline,
        )
        await self._publish(
            subjects.run(self._s.node), data, f"started-{self._epoch}-{self._s.node}-{self._attempt}"
        )
        self._log.info("started", attempt=self._attempt, components=len(running))
        return None

    def waits_for(self, pulls: Mapping[str, PullProgress]) -> list[Starting]:
        """What its components wait for before they run, for people to see."""
        if self.starting is not None:
            return [self.starting]
        if self._begun is None:
            return []
        pull = pulls.get(image_reference(self._begun.image)) if self._begun.image else None
        return [
            Starting(
                epoch=self._epoch, demand=self._order.demand, component=self._begun.name, step="image_pull",
                text=f"{pull.image}: {pull.text}"[:300], done_bytes=pull.done_bytes, total_bytes=pull.total_bytes or None,
            )
        ] if pull is not None else []  # fmt: skip

    async def _enter_gate(self) -> None:
        """Until no other start on the same cards would be disturbed, or a stop order is there."""
        components, cards = self._now.share.components, tuple(a.card for a in self._now.share.allotments)
        seconds_max = start_seconds_max(components)
        since = rfc3339(self._s.clock.now_ns())
        while seconds_max and self._now.stop is None:
            before = self._s.gate.enter(
                self._epoch, cards, seconds_max=seconds_max, name=self._order.demand, nudge=self.nudge
            )
            if not before:
                break
            if self._adopted:  # it runs already, and waits for nobody
                self._s.gate.leave(self._epoch)
                break
            if self.starting is None:
                self._log.info("waits at the start gate", before=before)
            self.starting = Starting(
                epoch=self._epoch, demand=self._order.demand, component=components[0].name, step="start_gate",
                text=f"{before} starts on the same card, and measures its memory", since=since,
            )  # fmt: skip
            await self._wait(LOOK_SECONDS)
        self.starting = None
        if self._now.stop is not None:
            self._s.gate.leave(self._epoch)

    async def _start(self, component: Component) -> Running | tuple[str, str]:
        order = self._now
        kind = Engine.DOCKER if component.image else Engine.PROCESS
        if kind not in self._s.engines:
            return (
                "start_failed",
                f"node {self._s.node} has no {kind} engine, component {component.name} needs it",
            )
        try:
            launch = launch_of(
                order, component, cluster=self._s.cluster, cards=self._s.cards, upkeep=self._s.upkeep
            )
        except StartRefused as refused:
            return (refused.code, refused.text)
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

    def _see(self, found: Sequence[Running]) -> None:
        self._seen.update({r.component: r for r in found if r.running})
        self._readings.know(found)

    # -- probes -----------------------------------------------------------------------------

    async def _probe(self) -> None:
        order = self._now
        self.probing = Probing(
            self, order.share.components, restart=order.restart, attempt=self._attempt, clock=self._s.clock
        )
        await self.probing.run()

    async def target(self, component: Component) -> Target:
        engine = self._s.engines[Engine.DOCKER if component.image else Engine.PROCESS]
        running = self._seen.get(component.name)
        if running is None:
            try:
                running = await engine.inspect(self._epoch, component.name)
            except EngineError as error:
                return Target(unknown=str(error))
            if running is None or not running.running:
                return Target(unknown="it does not run")
            self._see([running])
        there = running
        published = {p.port: ("127.0.0.1", p.host_port) for p in running.ports if p.host_port}
        return Target(
            ports=published,
            host=running.address or "127.0.0.1",
            execute=lambda command: engine.execute(there, command),
        )

    async def became_ready(self, seconds: float) -> None:
        order = self._order
        self.ready = True
        self._s.gate.leave(self._epoch)
        self._s.watch.started(self._epoch)
        data = Ready(demand=order.demand, epoch=self._epoch, node=self._s.node, seconds=seconds)
        await self._publish(
            subjects.run(self._s.node), data, f"ready-{self._epoch}-{self._s.node}-{self._s.clock.now_ns()}"
        )

    async def became_unready(self, component: str, why: str) -> None:
        order = self._order
        self.ready = False
        data = Unready(
            demand=order.demand, epoch=self._epoch, node=self._s.node, component=component,
            text=f"{component}: {why}"[:2000],
        )  # fmt: skip
        await self._publish(
            subjects.run(self._s.node), data, f"unready-{self._epoch}-{self._s.node}-{self._s.clock.now_ns()}"
        )

    def noted(self, what: str, value: str) -> None:
        self._readings.note(what, value, source="probe", at=rfc3339(self._s.clock.now_ns()))

    def failed(self, failure: ProbeFailure) -> None:
        self._log.warning("a probe failed; stopping", component=failure.component, why=failure.why)
        self._probe_failure = failure
        self.nudge()

    # -- the end ----------------------------------------------------------------------------

    async def _until_over(self, refused: tuple[str, str] | None) -> None:
        """Returns when the workload has ended by itself or a stop order is there."""
        if refused is not None:
            return
        while self._now.stop is None and self._probe_failure is None:
            found = await self._look()
            if found is not None:
                self._see(found)
                self._readings.read(
                    self._s.clock.monotonic(), rfc3339(self._s.clock.now_ns()), thorough=False
                )
                self._replaced = any(r.replaced and r.running for r in found)
                if self._replaced:
                    return
                if self._over(found):
                    self._over_before_stop = True
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
            if (
                stop is not None
                and stop.reason in COOPERATIVE
                and not await self._asking.may_stop(stop, alive)
            ):
                await self._wait(LOOK_SECONDS)
                continue
            # Without an order it is our own decision (a part of it ended): nobody would order the rest of it.
            scope = stop.scope if stop is not None else StopScope.EVERYTHING
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

    def _note_probes(self) -> None:
        for name, slowest in (self.probing.slowest if self.probing is not None else {}).items():
            last = self.probing.latencies.get(name, 0.0) if self.probing is not None else 0.0
            self.noted(f"probe of {name}", f"its last answer took {last:.2f} s, the slowest {slowest:.2f} s")

    async def _look_at_cards(self, ended: Sequence[Running]) -> None:
        """After a bad end nobody ordered: an error of a card may be its reason, and be told only now."""
        if self._now.stop is not None or not any(r.exit_code != 0 or r.signal for r in ended):
            return
        try:
            sample = self._s.attribute(await self._s.cards.sample(), ended)
        except GpusError as error:
            self._readings.note("cards", f"cannot be read: {error}", source="driver")
        else:
            self._readings.saw_cards(self._s.clock.monotonic(), sample)

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
        """Returns once a sample taken from now on shows no process of this epoch on any card, and their memory back."""
        told = False
        since = rfc3339(self._s.clock.now_ns())
        while True:
            try:
                sample = self._s.attribute(await self._s.cards.sample(), ())
            except GpusError as error:
                why = f"cards cannot be read: {error}"
            else:
                why = ", ".join(
                    [f"pid {pid} in its cgroup" for pid in self._readings.living()]
                    + still_held(
                        sample,
                        epoch=self._epoch,
                        allotments=self._order.share.allotments,
                        baseline={b.card: b for b in self._readings.baseline},
                        unusable={a.card for a in self._order.share.allotments}
                        - {c.uuid for c in self._s.cards.inventory if c.usable},
                    )
                )
                await self._end_strays(sample)
            if not why:
                self.unreleased = None
                return
            self.unreleased = Unreleased(
                epoch=self._epoch, demand=self._order.demand, why=why[:500], since=since,
                cards=tuple(a.card for a in self._order.share.allotments),
            )  # fmt: skip
            if not told:
                told = True
                self._log.warning("ended, and its cards are not seen free yet", why=why)
            await self._wait(VERIFY_SECONDS)

    async def _end_strays(self, sample: Sequence[CardObservation]) -> None:
        """What no engine lists and a card shows under this epoch: ended, where the order reaches everything."""
        stop = self._now.stop
        if stop is None or stop.scope is not StopScope.EVERYTHING:
            return
        if strays := strays_of(sample, epoch=self._epoch, demand=self._order.demand):
            self._log.warning("stopping what only a card shows", pids=sorted(strays))
            try:
                await end_strays(strays, grace_seconds=stop.grace_seconds, clock=self._s.clock)
            except EngineError as error:
                self._log.warning("stop failed; will try again", why=str(error))

    # -- telling ----------------------------------------------------------------------------

    def _again(self, said: Verdict) -> float | None:
        """Seconds until it is started again; None = it is not."""
        order = self._now
        if order.stop is not None:
            return None
        if self._replaced:
            return 0.0  # what stands in its place is taken as it is
        return seconds_until_again(order.restart, said.verdict, attempt=self._attempt)

    async def _back_off(self, seconds: float) -> None:
        """A stop order ends it."""
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
            boundaries=self._readings.boundaries(),
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
        cause = order.stop.event_id if order.stop else ""
        message_id = f"released-{self._epoch}-{self._s.node}"
        await self._publish(subjects.release(self._s.node), data, message_id, cause=cause)
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

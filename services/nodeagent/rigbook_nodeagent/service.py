"""The node agent as a service: join, obey orders, run workloads, tell what is seen."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import structlog
from rigbook_bus.protocol import BusDenied, BusError, BusUnavailable
from rigbook_bus.telemetry import Telemetry
from rigbook_schemas import subjects
from rigbook_schemas.events import Heartbeat, LogRecovered, NodeJoined, Payload
from rigbook_schemas.queries import AgentOrder, AgentReport
from rigbook_schemas.values import CardObservation, Engine
from rigbook_schemas.wire import Draft, Malformed, decode, encode, rfc3339

from rigbook_nodeagent.cards import Cards
from rigbook_nodeagent.cluster import cluster_of
from rigbook_nodeagent.engines.protocol import EngineError, Engines, Running
from rigbook_nodeagent.engines.unopened import Unopened
from rigbook_nodeagent.equipment import Equipment, Options, equip, open_engines, open_gpus
from rigbook_nodeagent.gpus.protocol import GpusError
from rigbook_nodeagent.injected import injected_of
from rigbook_nodeagent.inventory import changed
from rigbook_nodeagent.ledgerview import bindings_of
from rigbook_nodeagent.orders import Order, OrderBook, Stop
from rigbook_nodeagent.presence import AlreadyServed, Presence
from rigbook_nodeagent.startgate import StartGate
from rigbook_nodeagent.strays import stop_without_right
from rigbook_nodeagent.trust import Trust
from rigbook_nodeagent.upkeep import Upkeep
from rigbook_nodeagent.watch import Watch
from rigbook_nodeagent.workload import WorkloadRun, observation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from rigbook_bus.clock import Clock
    from rigbook_bus.protocol import Bus, Delivery, Reader

    from rigbook_nodeagent.strangers import Container

__all__ = ["Agent", "AlreadyServed", "Options", "open_engines", "open_gpus", "serve"]

VERSION: Final = "0.1.0"
# The inventory changes rarely; asking the driver costs more than a sample.
INVENTORY_SECONDS: Final = 10.0
# How long a heartbeat waits for an engine's word; well below the silence that makes a node unreachable.
INVENTORY_SECONDS_MAX: Final = 2.0
ORDERS_MAX: Final = 256
# After orders were read, the ledger is asked once in this time whether the book is complete.
RECONCILE_SECONDS: Final = 2.0
# An engine that could not be opened at the start is tried again this often.
ENGINE_RETRY_SECONDS: Final = 5.0
# Waiting times between tries while the bus is away, seconds; the last one stays.
RETRY_SECONDS: Final = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)
LOG_LINES_MAX: Final = 2_000
LOG_BYTES_MAX: Final = 512 * 1024

T = TypeVar("T")


class Agent:
    """One node's agent: the composition root, and what its workloads see of it (`Surroundings`)."""

    def __init__(
        self,
        bus: Bus,
        options: Options,
        *,
        clock: Clock,
        new_id: Callable[[], str],
        equipment: Equipment,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._bus = bus
        self._options = options
        self._telemetry = telemetry or Telemetry("nodeagent")
        self._log = structlog.get_logger().bind(node=options.node)
        self._incarnation = new_id()
        self._attribution = equipment.attribution
        self._host = equipment.host
        self._runs: dict[int, WorkloadRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._peaks: dict[int, int] = {}
        self._beats = 0
        self._joined: NodeJoined | None = None
        self._presence = Presence(bus, options.node, options.data, clock)
        self.cluster = options.cluster
        self.node = options.node
        self.clock = clock
        self.cards = Cards(equipment.gpus, equipment.worker)
        self.engines: Mapping[Engine, Engines] = dict(equipment.engines)
        self.book = OrderBook(options.node, options.data / "orders.jsonl")
        self.gate = StartGate(clock.monotonic)
        self._docker = equipment.docker
        self.upkeep = Upkeep(bus, options, self.cards, self.book, clock, equipment.docker, equipment.host)
        self.watch = Watch(equipment.hierarchy, equipment.kernel_log, equipment.host, clock)
        self.may_start = asyncio.Event()
        self._read_orders = asyncio.Event()
        self.trust = Trust(bus, options.data / "log.json", clock, self._recovered)

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Until cancelled. Raises AlreadyServed when another agent serves this node's name."""
        await self._presence.claim(self._incarnation)
        self.book.open(self._host.boot_id())
        self.trust.open()
        stop_serving: Callable[[], Awaitable[None]] | None = None
        try:
            closed = await self._open_engines()
            await self.cards.refresh()
            await self.upkeep.refresh()
            await self._name_strangers()
            stop_serving = await self._bus.serve(subjects.agent_query(self.node, "*"), self._answer)
            # Also while the log is not trusted: what runs here is what a recovery begins with.
            self.watch.open()
            self.watch.saw_inventory(self.cards.inventory)
            self._log.info("memory boundaries", facts=self.watch.facts)
            for body in (
                self.trust.keep(),
                self._beat(),
                self.watch.run(),
                self.upkeep.run(),
                *(self._open_later(e) for e in closed),
            ):
                self._spawn(body)
            joined_seq = await self._either(self._join())
            self.may_start.set()  # never before the first full inventory of this run
            self._spawn(self._watch_inventory())
            if not self.book.trusted:
                await self._either(self._begin_book(joined_seq))
            reader = await self._either(self._reader())
            for epoch in list(self.book.open_orders):
                self._launch(epoch)
            for body in (self._obey(reader), self._reconcile()):
                self._spawn(body)
            if ready is not None:
                ready.set()
            try:
                await self._failed
            finally:
                await reader.close()
        finally:
            if stop_serving is not None:
                await stop_serving()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for engine in self.engines.values():
                await engine.close()
            await self.cards.close()
            self.watch.close()
            self.book.close()
            self._presence.release()

    # -- start ------------------------------------------------------------------------------

    async def _either(self, body: Coroutine[Any, Any, T]) -> T:
        """The answer of `body`, unless something else of ours fails first."""
        task = asyncio.ensure_future(body)
        await asyncio.wait((task, self._failed), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            self._failed.result()
        return await task

    async def _open_engines(self) -> list[Engines]:
        """Those that could not be opened: until they are, what they run is unknown, not absent."""
        engines: dict[Engine, Engines] = {}
        closed: list[Engines] = []
        for kind, engine in self.engines.items():
            try:
                await engine.open()
            except EngineError as error:
                self._log.error("engine cannot be used; will try again", engine=kind, why=str(error))
                closed.append(engine)
                engines[kind] = Unopened(kind, str(error))
            else:
                self._heard(kind, engine)
                engines[kind] = engine
        self.engines = engines
        return closed

    async def _open_later(self, engine: Engines) -> None:
        while True:
            await self.clock.sleep(ENGINE_RETRY_SECONDS)
            try:
                await engine.open()
            except EngineError:
                continue
            self._heard(engine.kind, engine)
            self.engines = {**self.engines, engine.kind: engine}
            for run in self._runs.values():
                run.nudge()
            return

    def _heard(self, kind: Engine, engine: Engines) -> None:
        self._log.info("engine open", engine=kind, facts=engine.facts)
        self._spawn(self._hear(engine))

    def _inventory(self) -> NodeJoined:
        facts = self.cards.facts
        joined = NodeJoined(
            node=self.node,
            incarnation=self._incarnation,
            boot_id=self._host.boot_id(),
            cards=self.cards.inventory,
            labels=self._options.labels,
            engines=tuple(sorted(k for k, e in self.engines.items() if not isinstance(e, Unopened))),
            driver_version=facts.driver_version,
            cuda_version=facts.cuda_version,
            driver_ok=facts.ok,
            driver_text=facts.text[:500],
            simulated=facts.simulated,
            memory_bytes=self._host.memory_total_bytes() or 0,
            cpus=self._host.cpu_count(),
            agent_version=VERSION,
            address=self._host.hostname(),
        )
        return self.upkeep.completed(joined)

    async def _join(self) -> int:
        """The sequence of our `node.joined`."""
        await self.trust.wait()
        await self.cards.refresh()
        self._joined = self._inventory()
        if not self.cards.facts.ok:
            self._log.error(
                "the GPU driver does not answer; the node takes no bindings", why=self.cards.facts.text
            )
        seq = await self._tell_node(self._joined, f"joined-{self.node}-{self._incarnation}")
        self._log.info("joined", cards=len(self._joined.cards), simulated=self._joined.simulated)
        return seq

    async def _reader(self) -> Reader:
        """The ledger makes our consumer when it folds `node.joined`; until then we ask again."""
        name = subjects.consumer_of_agent(self.node)
        tries = 0
        while True:
            try:
                return await self._bus.reader(subjects.LEDGER_STREAM, name)
            except BusError as error:
                tries += 1
                if tries in (20, 200):
                    self._log.warning(
                        "waiting for the ledger to make our consumer",
                        consumer=name,
                        code=error.code,
                        why=str(error),
                    )
                await self.clock.sleep(RETRY_SECONDS[min(tries // 4, 3)])

    async def _begin_book(self, joined_seq: int) -> None:
        """The order book is new, or from before a power cut: the ledger says what is open and what is over.

        Without it, an order that is delivered again after its binding was released would be begun again.
        """
        self._log.warning("the order book is new or of another boot; asking the ledger what this node holds")
        held = await bindings_of(self._bus, self.node, self.clock, position_min=joined_seq, tries=None)
        assert held is not None
        self.book.begin_anew(*held, boot=self._host.boot_id())

    async def _reconcile(self) -> None:
        """At the start, and whenever orders were read: is what the ledger holds for us in the book?

        The consumer brings orders fast, and not always in order: one whose delivery was lost comes again after
        newer ones. `engine_position` tells others how far the book is complete.
        """
        while True:
            self._read_orders.clear()
            await self.trust.wait()
            held = await bindings_of(self._bus, self.node, self.clock, position_min=self.book.position)
            if held is None or not self.trust.sure:
                await self.clock.sleep(RECONCILE_SECONDS)
                continue
            await self._reached(held[0])
            for new in self.book.reconcile(*held):
                self._log.warning("an order was missing from the book", demand=new.demand, epoch=new.epoch)
                self._act_on(new)
            await self._read_orders.wait()
            await self.clock.sleep(RECONCILE_SECONDS)

    async def _reached(self, position: int) -> None:
        """The book is complete up to `position`: note what stands there, to know this log again."""
        try:
            m = await self._bus.message(subjects.LEDGER_STREAM, position)
        except BusError:
            return
        if m is not None:
            self.trust.note(decode(m.seq, m.subject, m.received_ns, m.body))
            self.trust.save()

    # -- trust ------------------------------------------------------------------------------

    async def _recovered(self, data: LogRecovered, event_id: str) -> None:
        """An operator recovered the log. What it knows nothing of is stopped before any new order is taken."""
        self.may_start.set()  # for the stops: the inventory was read before the log was looked at
        for stop in self.book.fence(data.lost_position, event_id):
            self._log.warning(
                "the recovered log does not know it; stopping", demand=stop.demand, epoch=stop.epoch
            )
            self._launch(stop.epoch)
            self._runs[stop.epoch].nudge()
        while any(order.orphan for order in self.book.open_orders.values()):
            await self.clock.sleep(RECONCILE_SECONDS / 4)

    async def _report(self) -> AgentReport:
        running, unknown = await self._engine_inventory()
        known = self.trust.known
        return AgentReport(
            node=self.node,
            incarnation=self._incarnation,
            distrusts=self.trust.why,
            position=max(known.position if known is not None else 0, self.book.position, self.book.known_to),
            event_id=known.event_id if known is not None else "",
            generation=known.generation if known is not None else 0,
            orders=tuple(self._order_row(order) for order in self.book.open_orders.values()),
            components=None if unknown else tuple(map(observation, running)),
            unknown=unknown,
        )

    def _order_row(self, order: Order) -> AgentOrder:
        run = self._runs.get(order.epoch)
        return AgentOrder(
            epoch=order.epoch, demand=order.demand, project=order.project, share=order.share, owner=order.owner,
            restart=order.restart, workload=order.workload, started=order.started,
            bound=rfc3339(order.bound_ns) if order.bound_ns else "",
            ready=run is not None and bool(run.ready), stopping=order.stop is not None,
        )  # fmt: skip

    async def _join_again(self) -> bytes:
        """Asked by a recovery: tell the inventory to a log that is not trusted yet."""
        self._joined = self._inventory()
        draft = self._draft(self._joined, f"joined-{self.node}-{self._incarnation}-{self.clock.now_ns()}")
        try:
            done = await self._bus.append(subjects.node(self.node), encode(draft), message_id=draft.id)
        except BusError as error:
            return msgspec.json.encode({"error": {"code": error.code, "text": str(error)}})
        return msgspec.json.encode({"seq": done.seq})

    # -- orders -----------------------------------------------------------------------------

    async def _obey(self, reader: Reader) -> None:
        while True:
            try:
                await self.trust.wait()
                known = self.trust.known
                deliveries = await reader.batch(max_messages=ORDERS_MAX, wait_seconds=5.0)
                await self.trust.wait()
                if known != self.trust.known and not self.trust.continues(known):
                    for delivery in deliveries:  # maybe of a log that is no longer the one: once more
                        await delivery.nak()
                    continue
                await self._take(deliveries)
            except BusDenied as error:
                self._log.error("our consumer is gone; joining again", code=error.code, why=str(error))
                self.trust.doubt()
                await self.clock.sleep(1.0)
                assert self._joined is not None
                await self._tell_node(
                    self._joined, f"joined-{self.node}-{self._incarnation}-{self.clock.now_ns()}"
                )
                await reader.close()
                reader = await self._reader()
            except BusError as error:
                self._log.warning(
                    "orders cannot be read; what runs, runs on", code=error.code, why=str(error)
                )
                await self.clock.sleep(1.0)

    async def _take(self, deliveries: Sequence[Delivery]) -> None:
        """Write the book, act, acknowledge last."""
        new: list[Order | Stop] = []
        for delivery in deliveries:
            m = delivery.message
            record = decode(m.seq, m.subject, m.received_ns, m.body)
            if isinstance(record.data, Malformed):
                # The ledger records the finding with its sequence; here it is no order.
                self._log.warning("not an order", seq=m.seq, code=record.data.code, why=record.data.text)
            taken = self.book.take(record)
            self.trust.note(record)
            if taken is not None:
                new.append(taken)
        self.book.flush()
        self.trust.save()
        for order in new:
            self._act_on(order)
        if deliveries:
            self._read_orders.set()
        for delivery in deliveries:
            await delivery.ack()

    def _act_on(self, order: Order | Stop) -> None:
        if isinstance(order, Order):
            self._launch(order.epoch)
        elif order.epoch in self._runs:
            self._runs[order.epoch].nudge()
        else:
            self._spawn(self._stop_unknown(order))

    def _launch(self, epoch: int) -> None:
        if epoch not in self._runs:
            self._runs[epoch] = WorkloadRun(self, self.book.open_orders[epoch])
            self._spawn(self._run_one(epoch))

    async def _run_one(self, epoch: int) -> None:
        try:
            await self._runs[epoch].run()
        finally:
            self._runs.pop(epoch, None)
            self._peaks.pop(epoch, None)

    async def _stop_unknown(self, stop: Stop) -> None:
        """A stop order for an epoch that is not in the book: something of ours runs without a right."""
        await stop_without_right(
            stop,
            engines=lambda: tuple(self.engines.values()),
            sample=self._attributed,
            clock=self.clock,
            log=self._log,
        )

    async def _attributed(self) -> Sequence[CardObservation]:
        return self.attribute(await self.cards.sample(), ())

    # -- what is seen -----------------------------------------------------------------------

    async def _hear(self, engine: Engines) -> None:
        async for ended in engine.ends():
            run = self._runs.get(ended.epoch)
            if run is not None:
                run.nudge()

    async def _beat(self) -> None:
        every = self._options.heartbeat_seconds
        due = self.clock.monotonic()
        while True:
            await self._heartbeat()
            due = max(due + every, self.clock.monotonic())  # late beats are not made up for
            await self.clock.sleep(max(0.0, due - self.clock.monotonic()))

    async def _heartbeat(self) -> None:
        running, unknown = await self._engine_inventory()
        cards = await self._card_sample(running)
        self.watch.saw(running, cards)
        self.upkeep.saw(cards)
        self._beats += 1
        data = Heartbeat(
            node=self.node,
            incarnation=self._incarnation,
            number=self._beats,
            every_seconds=self._options.heartbeat_seconds,
            boot_id=self._joined.boot_id if self._joined else "",
            cards=cards,
            components=None
            if unknown
            else tuple(self._observation(r) for r in running if r.running or r.pids),
            unknown=unknown,
            pressure=self._host.pressure(),
            unreleased=tuple(run.unreleased for run in self._runs.values() if run.unreleased is not None),
            engine_position=self.book.known_to,
            starting=tuple(one for run in self._runs.values() for one in run.waits_for(self._docker.pulls)),
        )
        draft = self._draft(data, f"{self._incarnation}-{self._beats}")
        try:
            await self._bus.append(
                subjects.heartbeat(self.node), encode(draft), message_id=draft.id, timeout_seconds=2.0
            )
            self._telemetry.appends.add(1, {"kind": "heartbeat", "outcome": "stored"})
        except BusError as error:
            # Not retried: the next one says more. Silence is what the reaper looks for.
            self._telemetry.appends.add(1, {"kind": "heartbeat", "outcome": error.code})
            self._log.warning("heartbeat not stored", code=error.code)

    def _observation(self, running: Running) -> Any:
        run = self._runs.get(running.epoch)
        seen = observation(running)
        if run is not None and run.probing is not None:
            seconds = run.probing.latencies.get(running.component)
            seen = msgspec.structs.replace(seen, probe_seconds=seconds)
        if running.engine is Engine.DOCKER and running.running and running.cards and running.pids:
            injected = injected_of(running.pids[0], running.cards, self.upkeep.device_nodes)
            seen = msgspec.structs.replace(seen, injected=injected)
        return (
            msgspec.structs.replace(seen, ready=run.ready)
            if run is not None and run.ready is not None
            else seen
        )

    async def _engine_inventory(self) -> tuple[list[Running], str]:
        """(everything of ours, "") or (what could be read, why the rest is unknown)."""
        running: list[Running] = []
        for kind, engine in self.engines.items():
            try:
                # A heartbeat does not wait for an engine that hangs: the node is alive, what runs is unknown.
                async with asyncio.timeout(INVENTORY_SECONDS_MAX):
                    running.extend(await engine.inventory())
            except EngineError as error:
                self._telemetry.unknowns.add(1, {"source": kind})
                return running, f"{kind}: {error}"
            except TimeoutError:
                self._telemetry.unknowns.add(1, {"source": kind})
                return running, f"{kind}: no answer within {INVENTORY_SECONDS_MAX:g} s"
        return running, ""

    async def _card_sample(self, running: Sequence[Running]) -> tuple[CardObservation, ...]:
        try:
            cards = self.upkeep.mark(self.attribute(await self.cards.sample(), running), running)
        except GpusError as error:
            self._telemetry.unknowns.add(1, {"source": "cards"})
            return tuple(CardObservation(uuid=c.uuid, unknown=str(error)[:300]) for c in self.cards.inventory)
        totals: dict[int, int] = {}
        for card in cards:
            for process in card.processes or ():
                if process.epoch is not None:
                    totals[process.epoch] = totals.get(process.epoch, 0) + (process.memory_bytes or 0)
        for epoch, total in totals.items():
            if epoch in self._runs:
                self._peaks[epoch] = max(self._peaks.get(epoch, 0), total)
        return cards

    async def _name_strangers(self) -> None:
        """What the containers of others are called, for who reads that they hold a card."""
        found: dict[str, Container] = {}
        for engine in self.engines.values():
            with contextlib.suppress(EngineError):  # without it, they go by their id
                found.update(await engine.containers())
        self._attribution.know_containers(found)

    async def _watch_inventory(self) -> None:
        while True:
            await self.clock.sleep(INVENTORY_SECONDS)
            await self.cards.refresh()
            await self.upkeep.refresh()
            self.watch.saw_inventory(self.cards.inventory)
            await self._name_strangers()
            assert self._joined is not None
            now = self._inventory()
            event = changed(self._joined, now)
            if event is not None:
                self._log.warning("the inventory changed", changes=event.changes)
                await self._tell_node(event, f"changed-{self.node}-{self._incarnation}-{self.clock.now_ns()}")
                self._joined = now

    # -- telling ----------------------------------------------------------------------------

    async def _tell_node(self, data: NodeJoined, message_id: str) -> int:
        return await self._until_stored(subjects.node(self.node), self._draft(data, message_id))

    async def publish(
        self, subject: str, data: Payload, *, message_id: str, order: Order, cause: str = ""
    ) -> None:
        if order.orphan:
            return  # no log knows it: there is nobody to tell
        kind = type(data).__name__.lower()
        with self._telemetry.span(
            f"nodeagent.{kind}",
            order.traceparent,
            demand=order.demand,
            epoch=order.epoch,
        ) as traceparent:
            draft = self._draft(data, message_id, cause=cause or order.event_id, traceparent=traceparent)
            await self._until_stored(subject, draft)

    def _draft(self, data: Payload, message_id: str, *, cause: str = "", traceparent: str = "") -> Draft:
        return Draft(
            data=data,
            id=message_id,
            source=f"nodeagent/{self.node}",
            time=rfc3339(self.clock.now_ns()),
            causation=cause,
            traceparent=traceparent,
        )

    async def _until_stored(self, subject: str, draft: Draft) -> int:
        """A fact is told until it is stored; its sequence. The same id again is stored once, or folded to nothing."""
        body = encode(draft)
        tries = 0
        while True:
            await self.trust.wait()  # a fact about an epoch belongs on the log that the epoch is of
            try:
                appended = await self._bus.append(subject, body, message_id=draft.id)
            except BusError as error:
                self._telemetry.appends.add(1, {"kind": draft.kind.name, "outcome": error.code})
                if tries == 0 or not isinstance(error, BusUnavailable):
                    self._log.warning("not stored yet", kind=draft.kind.name, code=error.code, why=str(error))
                await self.clock.sleep(RETRY_SECONDS[min(tries, len(RETRY_SECONDS) - 1)])
                tries += 1
            else:
                self._telemetry.appends.add(1, {"kind": draft.kind.name, "outcome": "stored"})
                return appended.seq

    def attribute(
        self, sample: Sequence[CardObservation], running: Sequence[Running]
    ) -> tuple[CardObservation, ...]:
        return self._attribution.attribute(sample, running)

    def peak_of(self, epoch: int) -> int | None:
        return self._peaks.get(epoch)

    # -- questions --------------------------------------------------------------------------

    async def _answer(self, subject: str, body: bytes) -> bytes:
        """`rig.agent.<node>.logs`: {"demand", "epoch", "component", "lines"} to {"items": [{component, text}]}."""
        try:
            asked = msgspec.json.decode(body or b"{}", type=_LogsQuestion)
        except msgspec.MsgspecError as error:
            return msgspec.json.encode({"error": {"code": "bad_question", "text": str(error)}})
        if subject.endswith(".orders"):
            return msgspec.json.encode(await self._report())
        if subject.endswith(".join"):
            return await self._join_again()
        if not subject.endswith(".logs"):
            return msgspec.json.encode(
                {"node": self.node, "incarnation": self._incarnation, "version": VERSION}
            )
        items: list[dict[str, str]] = []
        size = 0
        for engine in self.engines.values():
            for running in await self._listed(engine, asked):
                lines = [
                    line
                    async for line in engine.logs(
                        running, follow=False, lines_max=min(asked.lines, LOG_LINES_MAX)
                    )
                ]
                text = b"".join(lines)[-max(0, LOG_BYTES_MAX - size) :].decode(errors="replace")
                size += len(text)
                items.append({"component": running.component, "text": text})
        return msgspec.json.encode({"items": items, "running": asked.epoch in self._runs})

    async def _listed(self, engine: Engines, asked: _LogsQuestion) -> list[Running]:
        try:
            listed = [r for r in await engine.inventory() if r.epoch == asked.epoch]
        except EngineError:
            return []
        if not listed and asked.component:
            # Ended and removed: engines keep the output of the latest ones for a while.
            listed = [
                Running(
                    cluster=self.cluster, node=self.node, demand=asked.demand, epoch=asked.epoch,
                    component=asked.component, engine=engine.kind, ref="", running=False,
                )
            ]  # fmt: skip
        return [r for r in listed if asked.component in ("", r.component)]

    # -- tasks ------------------------------------------------------------------------------

    def _spawn(self, body: Any) -> None:
        task = asyncio.ensure_future(body)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)  # a bug of ours: stop, be restarted, adopt


class _LogsQuestion(msgspec.Struct, frozen=True):
    demand: str = ""
    epoch: int = 0
    component: str = ""
    lines: int = 200


async def serve(
    bus: Bus,
    options: Options,
    *,
    clock: Clock,
    new_id: Callable[[], str],
    telemetry: Telemetry | None = None,
    ready: asyncio.Event | None = None,
    equipped: Callable[[Options], Equipment] = equip,
) -> None:
    """Run an agent until cancelled. Raises AlreadyServed, ValueError (options)."""
    subjects.token(options.node)
    options.data.mkdir(parents=True, exist_ok=True)
    cluster = await cluster_of(bus, options.data, clock, given=options.cluster)
    options = msgspec.structs.replace(options, cluster=cluster)
    agent = Agent(
        bus,
        options,
        clock=clock,
        new_id=new_id,
        equipment=equipped(options),
        telemetry=telemetry,
    )
    await agent.run(ready)

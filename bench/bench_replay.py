"""What replay costs: fold a journal, fold from the bus, ask for a moment of the past.

    python bench/bench_replay.py [--events 1000000] [--bus-events 200000] [--at-events N] [--rounds 3] [--json]

The log is that of a busy fleet: 40 nodes with 8 cards, demands that are raised, bound, started, ended and
released, a tenth of them stopped by their owners; every event goes through `encode`, with random ids, a
trace and a cause, 700 bytes of JSON each on average. Figures are medians over rounds, by the wall clock and
by our own processor time: the machine may have other work.

1. journal: unpack, decode and `evolve` the whole file on one core; the digest is compared with that of the
   writer's own fold.
2. bus: a nats-server on this machine; a bare nats-py callback that counts messages, and our tail that decodes
   and folds them, in the same run, one after the other. Aim: at most 1.5 times as long.
3. moment: `--at` for random moments, each with a journal opened anew, from snapshots. Aim: below 1 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from nats.aio.client import Client as NatsClient
from nats.js.api import ConsumerConfig, DeliverPolicy
from rigbook_bus.embedded import EmbeddedServer
from rigbook_bus.jetstream import JetStreamBus
from rigbook_bus.protocol import BusError, Message
from rigbook_ledger.digest import digest
from rigbook_ledger.evolve import evolve, fold
from rigbook_ledger.identity import fold_identity
from rigbook_ledger.state import State
from rigbook_ledger.streams import ledger_stream
from rigbook_replay.journal import Header, Journal
from rigbook_replay.snapshots import Snapshots
from rigbook_replay.source import BusSource
from rigbook_replay.timetravel import fold_journal, state_at, undisturbed
from rigbook_replay.trusted import schema_identity
from rigbook_replay.writer import JournalWriter
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas import values as v
from rigbook_schemas.subjects import LEDGER_STREAM
from rigbook_schemas.wire import Draft, decode, encode, rfc3339

START_NS = 1_790_000_000 * 10**9
NODES, CARDS = 40, 8
BACKLOG = 50
PROJECTS = ("nlp", "vision", "speech", "rec", "infra")


class Fleet:
    """Writes a log as a busy fleet would. Same seed, same log."""

    def __init__(self, seed: int = 1, *, start_ns: int = START_NS, step_ns: int = 40_000_000) -> None:
        self.random = random.Random(seed)
        self.seq, self.now_ns = 0, start_ns
        self._step_ns = step_ns  # between two events, at most
        self.free: list[tuple[str, str]] = []

    def _id(self, bits: int = 128) -> str:
        return f"{self.random.getrandbits(bits):0{bits // 4}x}"

    def _told(
        self, subject: str, data: e.Payload, source: str, cause: str = "", trace: str = ""
    ) -> tuple[str, Message]:
        self.seq += 1
        self.now_ns += self.random.randrange(self._step_ns // 40, self._step_ns)
        id_ = self._id()
        draft = Draft(
            data=data, id=id_, source=source, time=rfc3339(self.now_ns - self.random.randrange(300_000, 3_000_000)),
            causation=cause, traceparent=trace,
        )  # fmt: skip
        return id_, Message(self.seq, subject, self.now_ns, encode(draft))

    def log(self, events: int) -> Iterator[Message]:
        for number in range(NODES):
            yield self._joined(f"rack{number // 10}-gpu{number:02d}")
        self.random.shuffle(self.free)
        waiting: list[tuple[e.DemandRaised, str, str]] = []
        live: list[tuple[e.DemandRaised, int, str, str, str, str]] = []
        raised = 0
        while self.seq < events:
            while len(waiting) < BACKLOG and self.seq < events:
                raised += 1
                data, trace = self._demand(raised)
                id_, message = self._told(
                    subjects.demand(data.project), data, f"client/{data.owner.name}@login1", trace=trace
                )
                waiting.append((data, id_, trace))
                yield message
            while waiting and self.free and self.seq < events:
                data, cause, trace = waiting.pop(0)
                node, card = self.free.pop()
                id_, message = self._bound(data, node, card, cause, trace)
                yield message
                epoch = message.seq
                cause, message = self._started(data, epoch, node, card, id_, trace)
                yield message
                live.append((data, epoch, node, card, cause, trace))
            for _ in range(min(len(live), 20)):
                if self.seq < events:
                    yield from self._ended(*live.pop(self.random.randrange(len(live))))

    def _joined(self, node: str) -> Message:
        cards = tuple(
            v.CardInventory(
                uuid=f"GPU-{self._id(32)}-{self._id(16)}-{self._id(16)}-{self._id(16)}-{self._id(48)}", index=index,
                model="NVIDIA A800-SXM4-80GB", memory_bytes=80 * v.GIB, pci_bus_id=f"00000000:{16 * index + 1:02X}:00.0",
            )
            for index in range(CARDS)
        )  # fmt: skip
        self.free += [(node, card.uuid) for card in cards]
        told = e.NodeJoined(
            node=node, incarnation=self._id(), boot_id=self._id(), cards=cards, engines=("process", "docker"),
            driver_version="550.54.15", cuda_version="12.4", memory_bytes=1024 * v.GIB, cpus=128, agent_version="0.1.0",
        )  # fmt: skip
        return self._told(subjects.node(node), told, f"nodeagent/{node}")[1]

    def _demand(self, number: int) -> tuple[e.DemandRaised, str]:
        project, who = self.random.choice(PROJECTS), f"user{number % 23}"
        component = v.Component(
            command=(
                "python",
                "train.py",
                "--config",
                f"configs/{project}/run{number % 97}.yaml",
                "--seed",
                str(number),
            ),
            env={"WANDB_PROJECT": project, "OMP_NUM_THREADS": "8"},
        )
        data = e.DemandRaised(
            demand=f"train-{project}-{number:07d}", project=project, owner=v.Owner(name=who, contact=f"{who}@example.org"),
            resources=v.Request(memory_bytes=40 * v.GIB), components=(component,), name=f"run{number % 97}",
            purpose="fine-tune of the week", priority=self.random.choice((25, 50, 75)),
        )  # fmt: skip
        return data, f"00-{self._id()}-{self._id(64)}-01"

    def _bound(self, d: e.DemandRaised, node: str, card: str, cause: str, trace: str) -> tuple[str, Message]:
        allotment = v.Allotment(card=card, memory_bytes=80 * v.GIB, mode=v.Mode.EXCLUSIVE)
        bound = e.Bound(
            demand=d.demand, project=d.project, policy="pack", position=self.seq, feasible=len(self.free), owner=d.owner,
            shares=(v.NodeShare(node=node, allotments=(allotment,), components=d.components),),
        )  # fmt: skip
        return self._told(subjects.bind((node,)), bound, "placer/placer-1", cause, trace)

    def _started(
        self, d: e.DemandRaised, epoch: int, node: str, card: str, cause: str, trace: str
    ) -> tuple[str, Message]:
        pid = self.random.randrange(1000, 99_999)
        seen = v.ComponentObservation(
            epoch=epoch, demand=d.demand, component="main", engine=v.Engine.PROCESS, running=True, pids=(pid,),
            ref=f"pid:{pid}@{self.random.randrange(10**8)}", since=rfc3339(self.now_ns), gpus=(card,),
        )  # fmt: skip
        started = e.Started(demand=d.demand, epoch=epoch, node=node, components=(seen,))
        return self._told(subjects.run(node), started, f"nodeagent/{node}", cause, trace)

    def _ended(
        self, d: e.DemandRaised, epoch: int, node: str, card: str, cause: str, trace: str
    ) -> Iterator[Message]:
        verdict = v.VerdictClass.COMPLETED
        if self.random.random() < 0.1:
            verdict = v.VerdictClass.STOPPED_BY_US
            stop = e.DemandWithdrawn(demand=d.demand, project=d.project, by=d.owner.name)
            cause, message = self._told(
                subjects.demand(d.project), stop, f"client/{d.owner.name}@login1", "", trace
            )
            yield message
            order = e.EvictionOrdered(
                demand=d.demand, epoch=epoch, nodes=(node,), reason=v.EvictionReason.WITHDRAWN, by="placer",
                text=f"withdrawn by {d.owner.name}",
            )  # fmt: skip
            cause, message = self._told(subjects.evict((node,)), order, "placer/placer-1", cause, trace)
            yield message
        at = rfc3339(self.now_ns)
        exited = e.Exited(
            demand=d.demand, epoch=epoch, node=node, verdict=verdict, sentence="main ended by itself with exit code 0",
            ends=(v.ComponentEnd(component="main", exit_code=0, ended=at),),
            evidence=(v.Evidence(what="exit code", value="0", source="wait status", at=at),),
        )  # fmt: skip
        cause, message = self._told(subjects.run(node), exited, f"nodeagent/{node}", cause, trace)
        yield message
        usage = v.Usage(seconds=1234.5, memory_peak_bytes=39 * v.GIB)
        released = e.Released(demand=d.demand, epoch=epoch, node=node, verdict=verdict, usage=usage)
        yield self._told(subjects.release(node), released, f"nodeagent/{node}", cause, trace)[1]
        self.free.append((node, card))


class Figures:
    def __init__(self) -> None:
        self.rows: dict[str, float] = {}

    def note(self, what: str, value: float, unit: str, aim: str = "") -> None:
        self.rows[f"{what}, {unit}"] = round(value, 4)
        shown = f"{value:12,.0f}" if value >= 100 else f"{value:12.3f}"
        print(f"  {what:66} {shown} {unit}{f'   (aim: {aim})' if aim else ''}", flush=True)


def write(path: Path, events: int, *, fold: bool) -> str:
    """The journal of a log; returns the digest of the writer's own fold ("" without)."""
    writer = JournalWriter.create(path, Header(created_ns=START_NS, schema=schema_identity(), source="bench"))
    state = State()
    batch: list[Message] = []
    for message in Fleet().log(events):
        batch.append(message)
        if len(batch) == 2000:
            writer.add(batch)
            batch = []
        if fold:
            state = evolve(state, decode(message.seq, message.subject, message.received_ns, message.body))
            if not message.seq % 2000:
                state.touched.clear()
    writer.add(batch)
    if not fold:
        writer.finish()
        return ""
    writer.finish(
        event_id=state.event_id, ledger_chain=state.chain.hex(), digest=digest(state), fold=fold_identity()
    )
    return digest(state)


def journal(folder: Path, events: int, rounds: int, figures: Figures) -> None:
    path = folder / "log.journal"
    begun = time.perf_counter()
    expected = write(path, events, fold=True)
    figures.note("journal: made, packed and folded once", events / (time.perf_counter() - begun), "events/s")
    figures.note("journal: size", path.stat().st_size / events, "bytes/event")
    decoded, wall, processor, whole = [], [], [], []
    for _ in range(rounds):
        with Journal.open(path) as there, undisturbed():
            begun = time.process_time()
            for _records in there.records(whole=False):
                pass
            decoded.append(events / (time.process_time() - begun))
        with Journal.open(path) as there:
            begun, processor_begun = time.perf_counter(), time.process_time()
            state = fold_journal(there)
            wall.append(events / (time.perf_counter() - begun))
            processor.append(events / (time.process_time() - processor_begun))
        assert digest(state) == expected, "the journal folds to another digest"
        assert not state.finding_count
        whole.append(len(state.demands))
    figures.note("journal: decode alone, by processor time", statistics.median(decoded), "events/s")
    figures.note("journal: decode and fold, by the wall clock", statistics.median(wall), "events/s")
    figures.note(
        "journal: decode and fold, by processor time", statistics.median(processor), "events/s", "300,000"
    )
    figures.note("journal: the same, best round", max(processor), "events/s")
    figures.note(
        "journal: memory of the process, highest",
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "MiB",
    )


async def bare_callback(url: str, events: int) -> float:
    """Seconds that nats-py takes to call a callback for every message of the stream."""
    nats = NatsClient()
    await nats.connect(url)
    js = nats.jetstream()
    done = asyncio.Event()
    seen = 0

    async def count(_message: object) -> None:
        nonlocal seen
        seen += 1
        if seen == events:
            done.set()

    begun = time.perf_counter()
    subscription = await js.subscribe(
        "", stream=LEDGER_STREAM, cb=count, ordered_consumer=True, pending_msgs_limit=-1, pending_bytes_limit=-1,
        config=ConsumerConfig(deliver_policy=DeliverPolicy.ALL, idle_heartbeat=5.0),
    )  # fmt: skip
    await asyncio.wait_for(done.wait(), 60)
    took = time.perf_counter() - begun
    await subscription.unsubscribe()
    await nats.close()
    return took


async def folding(bus: JetStreamBus, events: int) -> float:
    """Seconds that our tail takes, with every event decoded and folded."""
    begun = time.perf_counter()
    source = await BusSource.of(bus, "bench")
    state = State()
    with undisturbed():
        async for records in source.records(whole=False):
            state = fold(state, records)
            state.touched.clear()
    assert state.position == events
    assert not state.finding_count
    return time.perf_counter() - begun


async def store(there: JetStreamBus, batch: list[tuple[str, bytes, str]]) -> None:
    refused = [answer for answer in await there.append_many(batch) if isinstance(answer, BusError)]
    assert not refused, f"{len(refused)} events were not stored: {refused[0]}"


async def bus(folder: Path, events: int, rounds: int, figures: Figures) -> None:
    async with EmbeddedServer(folder / "nats") as server:
        there = await JetStreamBus.connect(server.url, name="bench")
        # reading is measured: a disk that syncs every message would only make the filling long
        await there.ensure_stream(msgspec.structs.replace(ledger_stream(), synced=False, append_only=False))
        batch: list[tuple[str, bytes, str]] = []
        # the server stamps what it receives: the events' own times must not be far from now
        for message in Fleet(start_ns=time.time_ns(), step_ns=40_000).log(events):
            batch.append((message.subject, message.body, f"m{message.seq}"))
            if len(batch) == 5000:
                await store(there, batch)
                batch = []
        await store(there, batch)
        facts = await there.stream(LEDGER_STREAM)
        assert facts is not None
        events = facts.last_seq
        bare, ours = [], []
        for _ in range(rounds):
            bare.append(await bare_callback(server.url, events))
            ours.append(await folding(there, events))
        await there.close()
    figures.note("bus: bare nats-py callback", events / statistics.median(bare), "events/s")
    figures.note("bus: our tail, decoded and folded", events / statistics.median(ours), "events/s")
    ratio = statistics.median(b / a for a, b in zip(bare, ours, strict=True))
    figures.note("bus: ours against the bare callback, in time", ratio, "times", "1.5 at most")


def moments(folder: Path, events: int, figures: Figures, asked: int = 20) -> None:
    path = folder / "log.journal"
    with Journal.open(path) as there:
        if there.events != events:
            there.close()
            path.unlink()
            print(f"  (writing a journal of {events:,} events)", flush=True)
            write(path, events, fold=False)
    begun = time.perf_counter()
    with Journal.open(path) as there:
        state_at(there, snapshots=Snapshots(there))
        first_ns, last_ns = there.blocks[0].earliest_ns, there.blocks[-1].latest_ns
    figures.note(
        f"moment: first question to {events:,} events (makes the snapshots)", time.perf_counter() - begun, "s"
    )
    beside = path.with_name(path.name + ".snapshots")
    if beside.exists():
        figures.note("moment: size of the snapshots", beside.stat().st_size / 1024**2, "MiB")
    chance = random.Random(3)
    took = []
    for _ in range(asked):
        at_ns = chance.randrange(first_ns, last_ns)
        begun = time.perf_counter()
        with Journal.open(path) as there:
            arrival = state_at(there, at_ns=at_ns, snapshots=Snapshots(there))
        took.append(time.perf_counter() - begun)
        assert arrival.state.received_ns <= at_ns
    figures.note(f"moment: any later question, median of {asked}", statistics.median(took), "s", "1 at most")
    figures.note("moment: the slowest of them", max(took), "s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--bus-events", type=int, default=200_000, help="0 = leave the bus out")
    parser.add_argument("--at-events", type=int, default=0, help="default: as many as --events")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object at the end")
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {sys.executable}"
    )
    figures = Figures()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        journal(folder, options.events, options.rounds, figures)
        if options.bus_events:
            asyncio.run(bus(folder, options.bus_events, options.rounds, figures))
        moments(folder, options.at_events or options.events, figures)
    if options.json:
        print(json.dumps(figures.rows, indent=2))


if __name__ == "__main__":
    main()

"""A scripted run of a small fleet over three days, as a journal: `python -m tests.unit.fleet_run FILE`.

Six servers of three kinds, two projects with a quota, batches and services, shared and whole cards, gangs, demands that
preempt and such that may be preempted, night windows, a cordon and a node that falls silent. One seed, one journal.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rigbook_bus.protocol import Message
from rigbook_replay.journal import Header
from rigbook_replay.lifetimes import Happening, Lifetime, Past
from rigbook_replay.meter import Meter, Mix
from rigbook_replay.trusted import schema_identity
from rigbook_replay.whatif import Simulation
from rigbook_replay.writer import JournalWriter
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.wire import Draft, encode, rfc3339

if TYPE_CHECKING:
    from rigbook_schemas.events import Payload

START_NS = 1_790_000_000 * 10**9
HOUR_NS = 3600 * 10**9
DAYS = 3
DEMANDS = 420
SERVERS = (
    ("a", 8, "NVIDIA A100-SXM4-80GB", 80), ("b", 8, "NVIDIA A100-SXM4-80GB", 80),
    ("c", 4, "NVIDIA GeForce RTX 4090", 24), ("d", 4, "NVIDIA GeForce RTX 4090", 24),
    ("e", 2, "NVIDIA L40S", 48), ("f", 2, "NVIDIA L40S", 48),
)  # fmt: skip


class Recorded(Simulation):
    """Keeps what it tells, as it would stand on the stream."""

    messages: list[Message]

    def _tell(self, subject: str, data: Payload, kind: str = "") -> int:
        seq = self.state.position + 1
        draft = Draft(data=data, id=f"run-{seq}", source="test/fleet", time=rfc3339(self._now_ns))
        self.messages.append(Message(seq, subject, self._now_ns, encode(draft)))
        return super()._tell(subject, data, kind)


def fleet() -> list[Happening]:
    told: list[tuple[int, str, Payload]] = []
    for name, count, model, gib in SERVERS:
        cards = tuple(
            v.CardInventory(uuid=f"GPU-{name}-{i}", index=i, model=model, memory_bytes=gib * v.GIB)
            for i in range(count)
        )
        joined = e.NodeJoined(node=name, incarnation="i-1", cards=cards, engines=("process",), simulated=True)
        told.append((0, "node.joined", joined))
    told += [
        (0, "quota.set", e.QuotaSet(project="vision", memory_bytes=640 * v.GIB)),
        (0, "priority.capped", e.PriorityCapped(priority=75, share=0.5)),
        (20, "node.cordoned", e.NodeCordoned(node="d", reason="new fan")),
        (26, "node.uncordoned", e.NodeUncordoned(node="d")),
        (40, "node.unreachable", e.NodeUnreachable(node="f", silent_seconds=30.0)),
        (41, "node.recovered", e.NodeRecovered(node="f", silent_seconds=3600.0)),
        (48, "quota.set", e.QuotaSet(project="vision", memory_bytes=800 * v.GIB)),
    ]
    return [Happening(START_NS + hour * HOUR_NS, kind, data) for hour, kind, data in told]


def demands(seed: int = 7) -> list[Lifetime]:
    dice = random.Random(seed)
    lives: list[Lifetime] = []
    for number in range(DEMANDS):
        at_ns = START_NS + int(dice.random() * (DAYS * 24 - 1) * HOUR_NS)
        shape = dice.choices(
            ["slice", "small", "card", "two", "four", "eight", "gang"], [30, 14, 30, 12, 8, 4, 2]
        )[0]
        request = {
            "slice": v.Request(memory_bytes=dice.choice([4, 6, 8, 12, 20]) * v.GIB, mode=v.Mode.MEMORY_SLICE),
            "small": v.Request(memory_bytes=20 * v.GIB, model="4090"),
            "card": v.Request(memory_bytes=dice.choice([20, 40, 70]) * v.GIB),
            "two": v.Request(memory_bytes=40 * v.GIB, count=2),
            "four": v.Request(memory_bytes=60 * v.GIB, count=4, model="A100"),
            "eight": v.Request(memory_bytes=70 * v.GIB, count=8, model="A100"),
            "gang": v.Request(memory_bytes=60 * v.GIB, count=2, nodes=2, model="A100"),
        }[shape]
        service = shape == "slice" and dice.random() < 0.3
        priority = dice.choices([25, 50, 80], [35, 55, 10])[0]
        hold_ns = int(dice.lognormvariate(0.3, 1.1) * HOUR_NS)
        windows = (v.Window(start="20:00", end="06:00"),) if dice.random() < 0.04 else ()
        spec = e.DemandRaised(
            demand=f"d{number}", project=dice.choice(["nlp", "nlp", "vision", "speech"]), owner=v.Owner(name="ada"),
            resources=request, components=(v.Component(command=("work",)),), priority=priority, windows=windows,
            workload=v.Workload.SERVICE if service else v.Workload.BATCH,
            preemptible=priority == 25, preempts=priority == 80,
            max_run_seconds=hold_ns / 1e9 * 1.5 if dice.random() < 0.3 else None,
        )  # fmt: skip
        life = Lifetime(spec=spec, raised_ns=at_ns, hold_ns=None if service else hold_ns)
        if service:
            life.leaves_ns = at_ns + 4 * hold_ns
        lives.append(life)
    return sorted(lives, key=lambda life: life.raised_ns)


def messages() -> list[Message]:
    """The whole log of the run."""
    until_ns = START_NS + DAYS * 24 * HOUR_NS
    past = Past(name="fleet", from_ns=START_NS, until_ns=until_ns, lifetimes=demands(), happenings=fleet())
    run = Recorded(past, past.happenings, Meter(Mix(), START_NS, until_ns), "pack")
    run.messages = []
    run.run()
    return run.messages


def write(path: Path) -> None:
    path.unlink(missing_ok=True)
    writer = JournalWriter.create(path, Header(created_ns=START_NS - 1, schema=schema_identity()))
    writer.add(messages())
    writer.finish()


if __name__ == "__main__":
    write(Path(sys.argv[1]))

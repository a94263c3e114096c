"""Heartbeats for stories: what a node shows, beside what `ledger_story` puts on the books.

`Watchman` is a reaper without a bus: it hears heartbeats at chosen times, judges, and folds what it
decided, as the log would give it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rigbook_ledger.drift import Beat, Comparison, Tolerance, compare
from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import State, restore, snapshot
from rigbook_reaper.judge import Judgement, Rules, Watch, appended, judge
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.wire import rfc3339

from tests.unit.ledger_story import SECOND_NS, Story, Told, epoch_of, written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.unit.ledger_story import Step

GIB = v.GIB
QUICK = Rules(
    graces=dict.fromkeys(v.DriftKind, 2.0),
    eviction_grace_seconds=1.0,
    reorder_seconds=10.0,
    reorder_seconds_max=40.0,
)
TOLERANCE = Tolerance(stop_seconds=2.0, unread_seconds=5.0, start_seconds=100.0, unreleased_seconds=20.0)


def runs(
    state: State, demand: str = "d", component: str = "server", **more: object
) -> v.ComponentObservation:
    seen = v.ComponentObservation(
        epoch=epoch_of(state, demand) if demand in state.demands else 0,
        demand=demand,
        component=component,
        engine=v.Engine.PROCESS,
        ref="pid:4242@77",
        running=True,
        pids=(4242,),
    )
    return msgspec.structs.replace(seen, **more)


def process(
    state: State, demand: str = "d", memory_bytes: int | None = 18 * GIB, pid: int = 4242, **more: object
) -> v.ProcessObservation:
    seen = v.ProcessObservation(
        pid=pid,
        memory_bytes=memory_bytes,
        epoch=epoch_of(state, demand) if demand in state.demands else None,
        demand=demand,
        component="server",
    )
    return msgspec.structs.replace(seen, **more)


def foreign(memory_bytes: int | None = 18 * GIB, pid: int = 99) -> v.ProcessObservation:
    return v.ProcessObservation(pid=pid, memory_bytes=memory_bytes, user="bob", command="python train.py")


def shows(
    uuid: str, *processes: v.ProcessObservation, used: int | None = None, **more: object
) -> v.CardObservation:
    """A card with these processes and nothing else; `used` when the driver says another sum."""
    if used is None:
        used = sum(p.memory_bytes or 0 for p in processes)
    seen = v.CardObservation(
        uuid=uuid, memory_used_bytes=used, memory_total_bytes=48 * GIB, processes=tuple(processes)
    )
    return msgspec.structs.replace(seen, **more)


class Watchman:
    """Hears, compares, judges, and folds its own decisions."""

    def __init__(
        self,
        *steps: Step,
        rules: Rules = QUICK,
        tolerance: Tolerance = TOLERANCE,
        healing: Sequence[v.DriftKind] = (),
    ) -> None:
        self.story = Story().given(*steps)
        self.rules, self.tolerance = rules, tolerance
        self.watches: dict[str, Watch] = {}
        self.now = 1000.0  # monotonic
        self.wall_ns = self.state.received_ns
        self.number = 0
        self.engine_position: int | None = None  # None = the agent has read everything
        self.said: list[e.Payload] = []
        self.happens(*(e.HealingSet(kind=kind, on=True) for kind in healing))

    @property
    def state(self) -> State:
        return self.story.state

    def happens(self, *steps: Step, after: float = 0.1) -> None:
        """Others put this on the log."""
        for step in steps:
            self.passes(after)
            record = written(step, self.state, self.state.position + 1, self.wall_ns)
            self.story.state = evolve(self.state, record)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.wall_ns += int(seconds * SECOND_NS)

    def beat(self, *, node: str = "a", engine: str = "", **shown: object) -> Beat:
        """A heartbeat now. By default the engine runs nothing and both cards of the node are empty."""
        self.number += 1
        position = self.state.position if self.engine_position is None else self.engine_position
        told = e.Heartbeat(
            node=node,
            incarnation=self.state.nodes[node].incarnation if node in self.state.nodes else "i-1",
            number=self.number,
            components=() if not engine else None,
            unknown=engine,
            cards=(shows(f"GPU-{node}-0"), shows(f"GPU-{node}-1")),
            engine_position=position,
        )
        return Beat(
            heartbeat=msgspec.structs.replace(told, **shown),
            received_ns=self.wall_ns,
            sent=rfc3339(self.wall_ns),
        )

    def compares(self, **shown: object) -> Comparison:
        self.passes(1.0)
        return compare(self.state, self.beat(**shown), self.tolerance)

    def sees(
        self, *, after: float = 1.0, hold: str = "", again: Beat | None = None, **shown: object
    ) -> list[e.Payload]:
        """One heartbeat, `after` seconds later: what the reaper appends for it, already folded."""
        self.passes(after)
        beat = again or self.beat(**shown)
        self.last = beat
        verdict = self.judges(compare(self.state, beat, self.tolerance), hold=hold)
        self.watches = verdict.watches
        for act in verdict.acts:
            step = Told(data=act.data, subject=act.subject, id=act.id)
            record = written(step, self.state, self.state.position + 1, self.wall_ns)
            self.story.state = evolve(self.state, record)
            appended(self.watches, act, self.now)
        said = [act.data for act in verdict.acts]
        self.said += said
        return said

    def judges(self, *seen: Comparison, hold: str = "") -> Judgement:
        return judge(self.state, self.watches, seen, self.now, self.rules, hold=hold)

    def sees_for(self, seconds: int, **shown: object) -> list[e.Payload]:
        """The same heartbeat each second."""
        return [said for _ in range(seconds) for said in self.sees(**shown)]

    def restarts(self) -> None:
        """The reaper dies; the log and a snapshot of it stay."""
        self.watches = {}
        self.story.state = restore(snapshot(self.state))

    def kinds(self) -> list[str]:
        return [type(said).__name__ for said in self.said]

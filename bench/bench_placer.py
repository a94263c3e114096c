"""The placer's decisions per second by fleet size, and the queue with 100,000 demands waiting.

    make bench-placer            # or: python bench/bench_placer.py [--cards 100,1000] [--seconds 2]

A decision is what the service does for one demand: take the next of the queue, choose cards, fold the binding
that comes back, bring the index up to date. Fleets are nodes of 8 cards (24, 40 and 80 GiB), filled to 85 % of
their cards' memory by a mix of exclusive demands of 1 to 8 cards and memory slices; then one is released and one
is bound, again and again. No bus, no disk. Figures hold for the machine they are measured on.
"""

from __future__ import annotations

import argparse
import random
import resource
import time

from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import State
from rigbook_placer.feasible import ask_of
from rigbook_placer.index import Index
from rigbook_placer.place import explain
from rigbook_placer.turns import Turns
from rigbook_placer.verdicts import Verdicts
from rigbook_placer.waiting import Waiting
from rigbook_schemas import events as e
from rigbook_schemas import subjects as s
from rigbook_schemas.values import GIB, CardInventory, Component, Mode, Owner, Request
from rigbook_schemas.wire import Record, rfc3339

NOW = 1_796_000_000 * 10**9
KINDS = (("RTX 4090", 24), ("A100 40GB", 40), ("A100 80GB", 80))
PARTS = (Component(command=("serve",)),)
OWNER = Owner(name="bench")


class Cell:
    """A fleet, its queue and its placer, without a bus."""

    def __init__(self, cards: int, policy: str) -> None:
        self.state = State()
        self.rng = random.Random(7)
        self.time = rfc3339(NOW)
        for number in range(max(1, cards // 8)):
            model, gib = KINDS[number % 3]
            inventory = tuple(
                CardInventory(uuid=f"GPU-{number}-{i}", index=i, model=model, memory_bytes=gib * GIB)
                for i in range(min(8, cards))
            )
            name = f"n{number}"
            self.tell(
                s.node(name), e.NodeJoined(node=name, incarnation="1", engines=("process",), cards=inventory)
            )
        self.state.touched.clear()
        self.index = Index(self.state, {})
        self.waiting = Waiting()
        self.turns = Turns(policy)
        self.number = 0
        self.held: list[str] = []

    def tell(self, subject: str, data: e.Payload) -> None:
        seq = self.state.position + 1
        self.state = evolve(self.state, Record(seq, subject, NOW, f"e{seq}", "", "bench", self.time, data))

    def follow(self) -> None:
        touched = self.state.touched
        self.waiting.update(self.state, touched.demands)
        self.index.follow(touched.nodes, touched.cards, touched.bindings)
        touched.clear()

    def raise_one(self, request: Request, priority: int = 50) -> str:
        self.number += 1
        did = f"d{self.number}"
        self.tell(
            s.demand("p"),
            e.DemandRaised(
                demand=did, project="p", owner=OWNER, resources=request, components=PARTS, priority=priority
            ),
        )
        return did

    def any_request(self) -> Request:
        roll = self.rng.random()
        if roll < 0.6:
            return Request(memory_bytes=self.rng.choice((4, 8, 12, 20)) * GIB, mode=Mode.MEMORY_SLICE)
        return Request(
            memory_bytes=self.rng.choice((20, 36, 70)) * GIB, count=self.rng.choice((1, 1, 1, 2, 4, 8))
        )

    def bind_next(self) -> bool:
        found = self.turns.next(self.state, self.waiting, {}, NOW, self.index)
        if found is None:
            return False
        demand, bound = found
        self.tell(s.bind(tuple(share.node for share in bound.shares)), bound)
        self.turns.bound(self.state, [demand.spec.demand], NOW)
        self.held.append(demand.spec.demand)
        self.follow()
        return True

    def release_one(self) -> None:
        at = self.rng.randrange(len(self.held))
        self.held[at], self.held[-1] = self.held[-1], self.held[at]
        did = self.held.pop()
        epoch = self.state.demands[did].epoch
        for share in self.state.bindings[epoch].shares:
            self.tell(s.release(share.node), e.Released(demand=did, epoch=epoch, node=share.node))

    def fill(self, part: float) -> None:
        total = sum(card.memory_bytes for card in self.state.cards.values())
        while True:
            used = self.state.projects["p"].used_bytes if "p" in self.state.projects else 0
            if used >= part * total:
                return
            before = len(self.held)
            for _ in range(64):
                self.raise_one(self.any_request())
            self.follow()
            while self.bind_next():
                pass
            for did in list(self.state.waiting):
                self.tell(s.demand("p"), e.DemandWithdrawn(demand=did, project="p"))
            self.follow()
            if len(self.held) == before:
                return


def decisions(cards: int, policy: str, seconds: float) -> tuple[int, float, float, float]:
    """(decisions, seconds, p50 and p99 of choosing in ms) at 85 %."""
    cell = Cell(cards, policy)
    cell.fill(0.85)
    took: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        cell.release_one()
        cell.raise_one(cell.any_request())
        cell.follow()
        one = time.perf_counter()
        found = cell.bind_next()
        took.append(time.perf_counter() - one)
        if not found:
            for did in list(cell.state.waiting):
                cell.tell(s.demand("p"), e.DemandWithdrawn(demand=did, project="p"))
            cell.follow()
        if not cell.held:
            break
    whole = time.perf_counter() - began
    took.sort()
    return len(took), whole, took[len(took) // 2] * 1e3, took[len(took) * 99 // 100] * 1e3


def queue(cards: int, waiting: int, *, shapes: int) -> dict[str, float]:
    """A full fleet with `waiting` demands that do not fit, of so many different requests."""
    cell = Cell(cards, "pack")
    cell.fill(1.0)
    while cell.raise_one(Request(memory_bytes=20 * GIB)) and (cell.follow(), cell.bind_next())[1]:
        pass
    began = time.perf_counter()
    for number in range(waiting):
        # from one byte more than 20 GiB on: every shape is another request
        cell.raise_one(
            Request(memory_bytes=20 * GIB + number % shapes, mode=Mode.EXCLUSIVE), priority=number % 100
        )
    raised = time.perf_counter() - began
    began = time.perf_counter()
    cell.follow()
    indexed = time.perf_counter() - began
    began = time.perf_counter()
    while cell.bind_next() or cell.turns.more:
        pass
    first = time.perf_counter() - began
    rounds: list[float] = []
    for _ in range(5):
        cell.release_one()
        cell.follow()
        began = time.perf_counter()
        bound = 0
        while cell.bind_next() or cell.turns.more:
            bound += 1
        rounds.append((time.perf_counter() - began) / max(1, bound + 1))
    verdicts = Verdicts(0.0, 10.0)
    verdicts.came(cell.state, cell.state.waiting)
    now = NOW + 10**9

    def why(demand: object) -> object:
        spec = demand.spec  # type: ignore[attr-defined]
        return explain(
            cell.state,
            spec,
            {},
            now_ns=now,
            totals=cell.index.totals,
            among=cell.index.able(ask_of(spec), 24),
        )

    began = time.perf_counter()
    said = len(verdicts.next(cell.state, cell.waiting, why, now))  # type: ignore[arg-type]
    tick = time.perf_counter() - began
    return {
        "raise and fold, s": raised, "index the queue, s": indexed, "first round, s": first,
        "after a release, per binding, ms": sorted(rounds)[2] * 1e3, "a tick of reasons, ms": tick * 1e3,
        "words in it": said, "peak memory, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cards", default="100,1000,10000,100000")
    parser.add_argument("--policies", default="pack")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--waiting", type=int, default=100_000)
    chosen = parser.parse_args()
    for policy in chosen.policies.split(","):
        for cards in map(int, chosen.cards.split(",")):
            number, seconds, p50, p99 = decisions(cards, policy, chosen.seconds)
            print(
                f"{policy:9} {cards:7} cards: {number / seconds:8.0f} decisions/s with the fold of their events; "
                f"one takes {p50:6.3f} ms (p50), {p99:6.3f} (p99)",
                flush=True,
            )
    if chosen.waiting:
        for shapes in (10, chosen.waiting):
            told = queue(1000, chosen.waiting, shapes=shapes)
            print(f"{chosen.waiting} waiting on 1000 full cards, {shapes} different requests:")
            for what, figure in told.items():
                print(f"    {what}: {figure:.2f}", flush=True)


if __name__ == "__main__":
    main()

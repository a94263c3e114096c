"""What a world is made of, and what will happen in it: everything is drawn from the seed before it begins.

A step is one happening at one instant: a client's word, an operator's rule, or a fault. Steps are
independent, so that a failing plan can be made smaller by leaving some out.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAULTS", "WORDS", "NodePlan", "Plan", "Step", "draw"]


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`what` happens at `at` (virtual seconds); for `seconds`, when it is something that lasts."""

    at: float
    what: str
    who: str = ""  # program, node, card or demand
    seconds: float = 0.0
    number: float = 0.0
    words: tuple[str, ...] = ()

    @property
    def is_fault(self) -> bool:
        return self.what in FAULTS

    def __str__(self) -> str:
        told = f"{self.at:7.2f} {self.what}"
        told += f" {self.who}" if self.who else ""
        told += f" for {self.seconds:.1f} s" if self.seconds else ""
        told += f" {self.number:g}" if self.number else ""
        return told + (f" [{' '.join(self.words)}]" if self.words else "")


class NodePlan(msgspec.Struct, frozen=True):
    name: str
    cards: int
    memory_gib: int
    model: str
    joins_at: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One world."""

    seed: int
    nodes: tuple[NodePlan, ...]
    placers: int
    ledgers: int
    reapers: int
    policy: str
    latency_seconds: float
    heartbeat_seconds: float
    snapshot_every: int
    sqlite: bool  # one ledger with its real file
    chaos_seconds: float
    restarts: bool  # in the end every decider is started again from what it saved
    empties: bool  # in the end everything is withdrawn, and all cards must come back
    steps: tuple[Step, ...]

    def keep(self, numbers: tuple[int, ...]) -> Plan:
        return msgspec.structs.replace(self, steps=tuple(self.steps[n] for n in numbers))


def draw(seed: int) -> Plan:
    """The plan of a seed. The same on every machine and under every hash seed."""
    rng = random.Random(f"plan {seed}")
    size = rng.choice((1, 1, 1, 2, 2, 3))
    nodes = tuple(
        NodePlan(
            f"n{i}",
            rng.randint(1, 3),
            rng.choice((24, 24, 48, 80)),
            rng.choice(("NVIDIA GeForce RTX 4090", "NVIDIA A100")),
            round(rng.uniform(0, 4), 2),
        )
        for i in range(rng.randint(1, 1 + size))
    )
    chaos_seconds = round(rng.uniform(15, 25 + 20 * size), 1)
    world = _World(rng, nodes, chaos_seconds)
    plan = Plan(
        seed=seed,
        nodes=nodes,
        placers=rng.choice((1, 2, 2, 3)),
        ledgers=rng.choice((1, 2)),
        reapers=rng.choice((1, 1, 2)),
        policy=rng.choice(("pack", "pack", "spread")),
        latency_seconds=rng.choice((0.0, 0.002, 0.02, 0.2)),
        heartbeat_seconds=rng.choice((1.0, 1.0, 2.0)),
        snapshot_every=rng.choice((5, 50, 20_000)),
        sqlite=rng.random() < 0.05,
        chaos_seconds=chaos_seconds,
        restarts=rng.random() < 0.3,
        empties=rng.random() < 0.3,
        steps=(),
    )
    programs = [f"placer-{i + 1}" for i in range(plan.placers)]
    programs += [f"ledger-{i + 1}" for i in range(plan.ledgers)]
    programs += [f"reaper-{i + 1}" for i in range(plan.reapers)]
    programs += [f"agent-{n.name}" for n in nodes]
    world.programs = programs
    steps: list[Step] = []
    for _ in range(rng.randint(3, 5 + 5 * size)):
        world.demand(steps)
    for _ in range(rng.randint(0, 4)):
        steps.append(rng.choice(_OPERATOR)(world))
    # A swarm: each world knows only some of the faults, so that each kind is also seen without the others.
    known = [one for one in _FAULTS if rng.random() < 0.35] or [rng.choice(_FAULTS)]
    for _ in range(rng.choice((0, 1, 2, 3, 4, 6, 8, 12))):
        steps.append(rng.choice(known)(world))
    steps.sort(key=lambda s: s.at)
    return msgspec.structs.replace(plan, steps=tuple(steps))


class _World:
    def __init__(self, rng: random.Random, nodes: tuple[NodePlan, ...], chaos_seconds: float) -> None:
        self.rng = rng
        self.nodes = nodes
        self.chaos_seconds = chaos_seconds
        self.programs: list[str] = []
        self._demands = 0

    def when(self) -> float:
        return round(self.rng.uniform(2.0, self.chaos_seconds), 2)

    def node(self) -> str:
        return self.rng.choice(self.nodes).name

    def card(self) -> str:
        node = self.rng.choice(self.nodes)
        return f"GPU-{node.name}-{self.rng.randrange(node.cards)}"

    def long(self, least: float = 1.0, most: float = 20.0) -> float:
        return round(self.rng.uniform(least, most), 1)

    def step(self, what: str, **more: Any) -> Step:
        return Step(at=self.when(), what=what, **more)

    # -- clients ---------------------------------------------------------------------------------------------

    def demand(self, steps: list[Step]) -> None:
        rng = self.rng
        self._demands += 1
        name = f"d{self._demands}"
        at = round(rng.uniform(1.0, self.chaos_seconds * 0.8), 2)
        words: list[str] = []
        life = rng.random()
        if life < 0.45:
            words.append(f"for:{self.long(0.5, 15)}")
        elif life < 0.55:
            words.append(f"fail:{self.long(0.5, 8)}")
        else:
            words.append("service")
        odd = rng.random()
        if odd < 0.05:
            words.append("daemon")
        elif odd < 0.10:
            words.append("stubborn")
        elif odd < 0.14:
            words.append("undead")
        elif odd < 0.17:
            words.append("overuse")
        elif odd < 0.20:
            words.append("wrongcard")
        elif odd < 0.24:
            words.append("refuse:image_pull")
        mode = rng.choice(("exclusive", "exclusive", "memory-slice", "time-slice"))
        words.append(f"mode:{mode}")
        if rng.random() < 0.2 and len(self.nodes) > 1:
            words.append("nodes:2")
        if rng.random() < 0.2:
            words.append("count:2")
        if rng.random() < 0.25:
            words.append("parts:2")
        if rng.random() < 0.4:
            words.append("docker")
        if rng.random() < 0.2:
            words.append(rng.choice(("restart:always", "restart:on-failure")))
        if rng.random() < 0.08:
            words.append(f"limit:{self.long(4, 20)}")
        words.append(f"priority:{rng.choice((25, 50, 50, 75))}")
        words.append(f"project:{rng.choice(('nlp', 'vision'))}")
        gib = rng.choice((2, 6, 10, 20, 24, 40)) if rng.random() > 0.03 else rng.choice((0, 500))
        steps.append(Step(at=at, what="raise", who=name, number=gib, words=tuple(words)))
        if ("service" in words and rng.random() < 0.6) or rng.random() < 0.15:
            steps.append(Step(at=round(at + rng.expovariate(1 / 12), 2), what="withdraw", who=name))
        if rng.random() < 0.08:
            steps.append(Step(at=round(at + self.long(0.1, 10), 2), what="raise_again", who=name))
        if rng.random() < 0.05:
            steps.append(Step(at=round(at + self.long(0, 10), 2), what="withdraw_foreign", who=name))


_OPERATOR: Final[tuple[Callable[[_World], Step], ...]] = (
    lambda w: w.step("cordon", who=w.node(), seconds=w.long(5, 60)),
    lambda w: w.step(
        "quota", who=w.rng.choice(("nlp", "vision")), number=w.rng.choice((0, 20, 50, 100, 200))
    ),
    lambda w: w.step(
        "mode", who=w.card(), words=(w.rng.choice(("exclusive", "memory-slice", "time-slice", "none")),)
    ),
    lambda w: w.step("quarantine", who=w.card(), seconds=w.long(5, 60)),
    lambda w: w.step("heal", words=w.rng.choice(_KINDS), seconds=w.long(5, 60)),
    lambda w: w.step("evict", who=f"d{w.rng.randint(1, 6)}", number=w.rng.randint(0, 2)),
    lambda w: w.step("malformed", number=w.rng.randint(0, 3)),
    lambda w: w.step("alien", number=w.rng.randint(0, 2), seconds=w.long(1, 15)),
    lambda w: w.step("withdraw_unknown"),
    lambda w: w.step("ask"),
)
_KINDS: Final = (
    ("leftover",),
    ("missing",),
    ("squatter",),
    ("overuse", "wrong_card"),
    ("leftover", "missing", "squatter"),
)

_FAULTS: Final[tuple[Callable[[_World], Step], ...]] = (
    lambda w: w.step(
        "ack_lost",
        who=w.rng.choice(("", "placer", "agent", "reaper")),
        seconds=w.long(),
        number=w.rng.choice((0.1, 0.5)),
    ),
    lambda w: w.step("request_lost", who=w.rng.choice(("", "placer", "agent")), seconds=w.long(), number=0.2),
    lambda w: w.step("ack_slow", who=w.rng.choice(("", "placer", "agent")), seconds=w.long(), number=0.2),
    lambda w: w.step(
        "delivery_slow",
        who=w.rng.choice(("", "placer", "agent", "reaper", "ledger")),
        seconds=w.long(),
        number=0.2,
    ),
    lambda w: w.step("delivery_again", who="agent", seconds=w.long(), number=0.5),
    lambda w: w.step("delivery_lost", who="agent", seconds=w.long(), number=0.3),
    lambda w: w.step(
        "kill", who=w.rng.choice(w.programs), seconds=w.long(0.1, 10), number=w.rng.randint(0, 40)
    ),
    lambda w: w.step(
        "kill", who=w.rng.choice(w.programs), seconds=w.long(0.1, 10), number=w.rng.randint(0, 400)
    ),
    lambda w: w.step("restart", who=w.rng.choice(w.programs), seconds=w.long(0.1, 5)),
    lambda w: w.step("stale_snapshot", who=w.rng.choice(w.programs), seconds=w.long(0.1, 5)),
    lambda w: w.step("pause", who=w.rng.choice(w.programs), seconds=w.long(0.5, 25)),
    lambda w: w.step("cut", who=w.rng.choice(w.programs), seconds=w.long()),
    lambda w: w.step("server_away", seconds=w.long(0.2, 15)),
    lambda w: w.step("behind", seconds=w.long(2, 12), number=w.rng.randint(1, 30)),
    lambda w: w.step("empty", seconds=w.long(2, 12)),
    lambda w: w.step(
        "clock_step",
        who=w.rng.choice(w.programs),
        number=w.rng.choice((-3600.0, -30.0, -2.0, 5.0, 90.0, 7200.0)),
    ),
    lambda w: w.step("node_silent", who=w.node(), seconds=w.long(3, 30)),
    lambda w: w.step("all_silent", seconds=w.long(3, 30)),
    lambda w: w.step("agent_killed", who=w.node(), seconds=w.long(0.1, 20), number=w.rng.randint(0, 100)),
    lambda w: w.step("agent_killed", who=w.node(), seconds=w.long(0.1, 5), number=w.rng.randint(0, 30)),
    lambda w: w.step("reboot", who=w.node(), seconds=w.long(1, 15), number=w.rng.randint(0, 2)),
    lambda w: w.step("card_lost", who=w.card(), seconds=w.long(2, 30)),
    lambda w: w.step("card_vanished", who=w.card(), seconds=w.long(2, 30)),
    lambda w: w.step("card_unreadable", who=w.card(), seconds=w.long(2, 30)),
    lambda w: w.step("removed_by_hand", who=w.node()),
    lambda w: w.step("orphaned", who=w.node()),
    lambda w: w.step("engine_away", who=w.node(), seconds=w.long(1, 25)),
    lambda w: w.step("engine_hangs", who=w.node(), seconds=w.long(1, 25)),
    lambda w: w.step("driver_hangs", who=w.node(), seconds=w.long(1, 25)),
    lambda w: w.step("driver_absent", who=w.node(), seconds=w.long(1, 25)),
    lambda w: w.step(
        "foreign_process", who=w.card(), seconds=w.long(2, 30), number=w.rng.choice((1, 10, 30))
    ),
    lambda w: w.step("undead", who=w.node(), seconds=w.long(5, 40)),
    lambda w: w.step("disk_full", seconds=w.long(1, 10)),
    lambda w: w.step("ledger_disk_full", who="ledger-1", seconds=w.long(1, 20)),
)
FAULTS: Final = frozenset({
    "ack_lost", "request_lost", "ack_slow", "delivery_slow", "delivery_again", "delivery_lost", "kill", "restart",
    "stale_snapshot", "pause", "cut", "server_away", "behind", "empty", "clock_step", "node_silent", "all_silent",
    "agent_killed", "reboot", "card_lost", "card_vanished", "card_unreadable", "removed_by_hand", "orphaned", "engine_away",
    "engine_hangs", "driver_hangs", "driver_absent", "foreign_process", "undead", "disk_full", "ledger_disk_full",
})  # fmt: skip
WORDS: Final = frozenset({
    "raise", "withdraw", "raise_again", "withdraw_foreign", "withdraw_unknown", "cordon", "quota", "mode",
    "quarantine", "heal", "evict", "malformed", "alien", "ask",
})  # fmt: skip

"""Running many worlds: in parallel, with a progress line, and with what to do when one fails.

python -m tests.simulation --seed 42            one world
python -m tests.simulation --seeds 0:2000       many; stops at the first that fails
python -m tests.simulation --seed 42 --shrink   and leave out what the failure does not need
python -m tests.simulation --seed 42 --keep 0,3 only these steps of its plan
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tests.simulation import quiet
from tests.simulation.plan import draw
from tests.simulation.world import Verdict, run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["SEEDS_FILE", "Tally", "kept_seeds", "main", "run_seed", "worlds"]

# Seeds that failed once: they always run.
SEEDS_FILE = Path(__file__).with_name("seeds.txt")
GARBAGE_EVERY = 20  # worlds


def kept_seeds() -> list[int]:
    lines = (line.partition("#")[0].strip() for line in SEEDS_FILE.read_text().splitlines())
    return [int(line) for line in lines if line]


def run_seed(seed: int, keep: tuple[int, ...] | None = None) -> Verdict:
    plan = draw(seed)
    return run(plan if keep is None else plan.keep(keep))


_done = 0


def _begin() -> None:
    """In each process of the pool."""
    quiet.hush()
    sys.unraisablehook = lambda _: None
    gc.disable()


def _one(seed: int) -> Verdict:
    global _done  # noqa: PLW0603 - of this process
    _done += 1
    if _done % GARBAGE_EVERY == 0:
        gc.collect()
    return run_seed(seed)


def worlds(seeds: Sequence[int], *, processes: int) -> Iterator[Verdict]:
    """The verdicts, as they come."""
    if processes == 0:  # in this very process
        _begin()
        try:
            for seed in seeds:
                yield _one(seed)
        finally:
            gc.enable()
        return
    with multiprocessing.get_context("spawn").Pool(processes, initializer=_begin) as pool:
        yield from pool.imap_unordered(_one, seeds, chunksize=4)


class Tally:
    """What many worlds were made of."""

    def __init__(self) -> None:
        self.worlds = 0
        self.events = 0
        self.steps = 0
        self.virtual_seconds = 0.0
        self.faults: dict[str, int] = {}
        self.kinds: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.failed: list[Verdict] = []
        self._began = time.perf_counter()

    def add(self, verdict: Verdict) -> None:
        self.worlds += 1
        self.events += verdict.events
        self.steps += verdict.steps
        self.virtual_seconds += verdict.virtual_seconds
        for mine, theirs in (
            (self.faults, verdict.faults),
            (self.kinds, verdict.kinds),
            (self.counts, verdict.counts),
        ):
            for key, number in theirs.items():
                mine[key] = mine.get(key, 0) + number
        if verdict.failure is not None:
            self.failed.append(verdict)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def line(self) -> str:
        return (
            f"{self.worlds} worlds, {self.worlds / self.seconds:.1f} per second, {len(self.failed)} failed, "
            f"{sum(self.faults.values())} faults, {self.events} events, {self.virtual_seconds / 3600:.1f} virtual hours"
        )

    def table(self) -> str:
        rows = sorted(self.faults.items(), key=lambda item: -item[1])
        return "\n".join(f"  {name:18} {number}" for name, number in rows)


def main(arguments: Iterable[str] | None = None) -> int:
    """Exit code 1 when a world failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seed", type=int, help="one world")
    parser.add_argument("--seeds", default="", help="FIRST:END, or a number of worlds from 0")
    parser.add_argument(
        "--keep", default="", help="numbers of the plan's steps that are kept, as 0,3,4; - for none"
    )
    parser.add_argument("--plan", action="store_true", help="print the plan")
    parser.add_argument("--log", action="store_true", help="print the log of the world at its end")
    parser.add_argument("--story", action="store_true", help="print what the services log, with virtual time")
    parser.add_argument("--shrink", action="store_true", help="look for the smallest plan that fails alike")
    parser.add_argument(
        "--no-shrink", action="store_true", help="do not shrink the first failure of many worlds"
    )
    parser.add_argument("--go-on", action="store_true", help="do not stop at the first failure")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="0 = in this one")
    parser.add_argument("--json", action="store_true", help="print the tally as JSON at the end")
    asked = parser.parse_args(None if arguments is None else list(arguments))
    if asked.seeds:
        return _many(asked)
    return _single(asked)


def _single(asked: Any) -> int:
    from tests.simulation.shrink import explain_failure, shrink

    seed = asked.seed if asked.seed is not None else 0
    plan = draw(seed)
    keep: tuple[int, ...] | None = None
    if asked.keep:
        keep = () if asked.keep == "-" else tuple(int(n) for n in asked.keep.split(","))
    if asked.plan:
        for number, step in enumerate(plan.steps):
            print(f"{number:3} {'*' if keep is None or number in keep else ' '} {step}")
    _begin()
    if asked.story:
        quiet.show(_now, print)
    verdict = run(plan if keep is None else plan.keep(keep), inspect=_print_log if asked.log else None)
    print(
        f"seed {seed}: {verdict.virtual_seconds} virtual seconds, {verdict.events} events, {verdict.steps} steps, "
        f"digest {verdict.digest}"
    )
    if verdict.failure is None:
        print("passed")
        return 0
    quiet.hush()
    if asked.shrink:
        keep, verdict = shrink(seed, verdict.failure, keep=keep, say=print)
    print(explain_failure(seed, verdict, keep))
    return 1


def _now() -> float:
    import asyncio

    loop = asyncio._get_running_loop()
    return loop.time() if loop is not None else 0.0


def _print_log(world: Any) -> None:
    from rigbook_schemas.subjects import LEDGER_STREAM
    from rigbook_schemas.wire import decode

    from tests.simulation.loop import START_NS

    for m in world.server.streams[LEDGER_STREAM].records.values():
        r = decode(m.seq, m.subject, m.received_ns, m.body)
        about = " ".join(
            f"{name}={getattr(r.data, name)}"
            for name in ("node", "epoch", "reason", "final", "verdict")
            if hasattr(r.data, name)
        )
        print(
            f"{m.seq:4} {(m.received_ns - START_NS) / 1e9:8.3f} {r.kind or r.data:18} {r.source:16} {r.correlation:4} {about}"
        )


def _many(asked: Any) -> int:
    from tests.simulation.shrink import explain_failure, shrink

    first, _, end = asked.seeds.rpartition(":")
    seeds = range(int(first or 0), int(end))
    tally = Tally()
    shown = 0.0
    for verdict in worlds(seeds, processes=asked.processes):
        tally.add(verdict)
        if verdict.failure is not None:
            print(
                f"\nseed {verdict.seed} failed: {verdict.failure.code}: {verdict.failure.text[:300]}",
                flush=True,
            )
            if not asked.go_on:
                break
        if tally.seconds - shown > (1.0 if sys.stdout.isatty() else 15.0):
            shown = tally.seconds
            print(f"\r{tally.line()}", end="" if sys.stdout.isatty() else "\n", flush=True)
    print(f"\n{tally.line()}\n{tally.table()}")
    if asked.json:
        told = {
            "worlds": tally.worlds,
            "seconds": tally.seconds,
            "faults": tally.faults,
            "kinds": tally.kinds,
        }
        print(msgspec.json.encode(told).decode())
    if not tally.failed:
        return 0
    if asked.go_on:
        codes: dict[str, list[int]] = {}
        for one in tally.failed:
            assert one.failure is not None
            codes.setdefault(one.failure.code, []).append(one.seed)
        for code, failed in sorted(codes.items()):
            print(f"{code}: {len(failed)} worlds, seeds {failed[:12]}")
        return 1
    worst = tally.failed[0]
    _begin()
    keep: tuple[int, ...] | None = None
    if not asked.no_shrink:
        assert worst.failure is not None
        keep, worst = shrink(worst.seed, worst.failure, say=print)
    print(explain_failure(worst.seed, worst, keep))
    return 1

"""Runs policies on the openb trace; prints the table beside the published figures, the throughput, the plot."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import numpy as np

from . import openb
from .fleet import CARD_MILLI, Fleet, Node, Placement, Shape, fleet_of
from .index import Index
from .inflation import Course, fresh_order, inflate, ranked
from .policies import BestFit, DotProduct, Fgd, GpuClustering, GpuPacking, Pack, Policy, RandomFit, Spread
from .rigbook import rigbook_policy
from .typical import TypicalMix, fragment_tables, typical_mix

PUBLISHED = ("Random", "DotProd", "GpuClustering", "GpuPacking", "BestFit", "FGD")
OURS = ("pack", "spread", "rigbook")
PERCENTS = (100, 130)
FRESH_SEED = 1000  # seeds from here on are orders of our own, not of the paper
WARM_FILL = 0.85  # throughput is measured from this fill on


def policy_of(name: str, mix: TypicalMix, seed: int) -> Callable[[Fleet], Policy]:
    """How to make the named policy for a fleet."""
    makers: dict[str, Callable[[Fleet], Policy]] = {
        "Random": lambda _: RandomFit(np.random.default_rng(seed)),
        "DotProd": lambda _: DotProduct(),
        "GpuClustering": lambda _: GpuClustering(),
        "GpuPacking": lambda _: GpuPacking(),
        "BestFit": lambda _: BestFit(),
        "FGD": lambda fleet: Fgd(fragment_tables(mix, fleet.models, fleet.cards_max)),
        "pack": lambda _: Pack(),
        "spread": lambda _: Spread(),
        "rigbook": lambda fleet: rigbook_policy(mix, fleet),
    }
    if name not in makers:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(makers)}")
    return makers[name]


@dataclass(frozen=True, slots=True)
class Workload:
    """One pod list on the trace's nodes, with the policies' typical mix."""

    folder: Path
    name: str
    nodes: list[Node]
    shapes: list[Shape]
    mix: TypicalMix

    def order(self, seed: int) -> tuple[list[Node], list[Shape]]:
        """(nodes in tie order, pods in arrival order): the paper's order, or one of our own from FRESH_SEED on."""
        pods, rank = (
            openb.read_arrival(self.folder, self.name, seed)
            if seed < FRESH_SEED
            else fresh_order(self.shapes, self.nodes, seed)
        )
        return ranked(self.nodes, rank), [self.shapes[int(i)] for i in pods]


def workload(folder: Path, name: str) -> Workload:
    shapes = openb.read_pods(folder, name)
    return Workload(folder, name, openb.read_nodes(folder), shapes, typical_mix(shapes))


@dataclass(frozen=True, slots=True)
class Result:
    """Means over the seeds of one (list, policy): ours, and the published ones where there are any."""

    workload: str
    policy: str
    seeds: int
    figures: tuple[float, ...]
    published: tuple[float, ...] | None
    by_seed: tuple[tuple[float, ...], ...]


def run(
    load: Workload, policy: str, seeds: Sequence[int], progress: Callable[[str], None]
) -> tuple[Result, Course]:
    """All seeds of one policy on one list; the course returned is the first seed's."""
    figures = []
    first: Course | None = None
    for done, seed in enumerate(seeds, start=1):
        progress(f"{load.name} {policy} seed {seed} ({done}/{len(seeds)})")
        nodes, arrivals = load.order(seed)
        tables = fragment_tables(load.mix, fleet_of(nodes).models, max(node.cards for node in nodes))
        course, _ = inflate(nodes, arrivals, policy_of(policy, load.mix, seed), tables)
        first = first or course
        (alloc100, frag100), (alloc130, frag130) = (course.at(percent) for percent in PERCENTS)
        figures.append((alloc100, alloc130, frag100, frag130))
    assert first is not None
    known = openb.read_published(load.folder).get((load.name, policy), {})
    wanted = [known[seed] for seed in seeds if seed in known]
    return (
        Result(
            load.name,
            policy,
            len(seeds),
            tuple(float(x) for x in np.mean(figures, axis=0)),
            tuple(float(x) for x in np.mean(wanted, axis=0)) if len(wanted) == len(seeds) else None,
            tuple(figures),
        ),
        first,
    )


def table(results: Sequence[Result]) -> Iterator[str]:
    """The Markdown table, ours beside the published."""
    yield "| list | policy | at 100 % | published | at 130 % | published | fragmented at 100 % | published |"
    yield "|---|---|---|---|---|---|---|---|"
    for result in results:
        ours = [f"{x:.2f}" for x in result.figures]
        theirs = [f"{x:.2f}" for x in result.published] if result.published else ["-"] * 4
        cells = [ours[0], theirs[0], ours[1], theirs[1], ours[2], theirs[2]]
        yield f"| {result.workload} | {result.policy} | {' | '.join(cells)} |"


def throughput(
    load: Workload, policies: Sequence[str], copies: Sequence[int], seconds: float
) -> Iterator[str]:
    """Decisions per second (score, choose, bind) on the trace's fleet copied `n` times.

    The fleet is filled by best fit and then kept between 85 % and full by ending the oldest bindings, so that
    releases disturb the kept scores as bindings do; their cost is counted too. Times are CPU time of this process.
    """
    yield "| cards | policy | ready in s | decisions/s | p50 µs | p99 µs | placed |"
    yield "|---|---|---|---|---|---|---|"
    ordered, arrivals = load.order(openb.SEEDS[0])
    for times in copies:
        nodes = [replace(node, name=f"{node.name}-{i}") for i in range(times) for node in ordered]
        for name in policies:
            started = time.perf_counter()
            fleet = fleet_of(nodes)
            index = Index(fleet, policy_of(name, load.mix, 0)(fleet))
            ready = time.perf_counter() - started
            live = _fill(fleet, cycle(arrivals))
            floor = (1 - WARM_FILL) * CARD_MILLI * float(fleet.cards.sum())
            for shape in set(arrivals):
                index.best(shape)
            took: list[float] = []
            placed = 0
            began = time.process_time()
            for shape in cycle(arrivals):
                start = time.process_time()
                placement = index.best(shape)
                if placement is None:
                    while fleet.idle_by_model.sum() < floor:
                        fleet.unbind(*live.popleft())
                else:
                    fleet.bind(placement, shape)
                    live.append((placement, shape))
                    placed += 1
                took.append(time.process_time() - start)
                if start - began > seconds:
                    break
            micros = np.array(took) * 1e6
            p50, p99 = np.percentile(micros, [50, 99])
            yield (
                f"| {int(fleet.cards.sum()):,} | {name} | {ready:.2f} | {1e6 / micros.mean():,.0f} "
                f"| {p50:.0f} | {p99:.0f} | {100 * placed / len(took):.0f} % |"
            )


def _fill(fleet: Fleet, arrivals: Iterator[Shape]) -> deque[tuple[Placement, Shape]]:
    """Fill to `WARM_FILL` by best fit; the bindings, oldest first."""
    index = Index(fleet, BestFit())
    live: deque[tuple[Placement, Shape]] = deque()
    full = (1 - WARM_FILL) * CARD_MILLI * float(fleet.cards.sum())
    for shape in arrivals:
        placement = index.best(shape)
        if placement:
            fleet.bind(placement, shape)
            live.append((placement, shape))
        if fleet.idle_by_model.sum() <= full:
            break
    return live


def plot(courses: dict[str, Course], name: str, path: Path) -> None:
    """Allocation against arrival, one line a policy."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for policy, course in courses.items():
        axes.plot(course.arrived, course.allocated, label=policy, linewidth=2 if policy == "rigbook" else 1)
    axes.plot([80, 100], [80, 100], color="grey", linestyle=":", label="all accepted")
    axes.set(
        xlim=(80, 130),
        ylim=(80, 100),
        xlabel="GPUs asked for so far, % of the fleet",
        ylabel="GPUs allocated, %",
    )
    axes.set_title(f"openb, list {name}: allocation against arrival")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="placement", description=__doc__)
    parser.add_argument(
        "traces", nargs="?", type=Path, default=os.environ.get("TRACES"), help="folder with openb files"
    )
    parser.add_argument(
        "--lists", type=_names, default=["default"], help="comma-separated pod lists, or `all`"
    )
    parser.add_argument(
        "--policies", type=_names, default=[*PUBLISHED, *OURS], help="comma-separated policies"
    )
    parser.add_argument(
        "--seeds", type=int, default=len(openb.SEEDS), help="how many of the ten published orders"
    )
    parser.add_argument("--fresh", type=int, default=0, metavar="N", help="use N orders of our own instead")
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="draw allocation against arrival (first list)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every seed's figures")
    parser.add_argument("--throughput", action="store_true", help="measure decisions per second instead")
    parser.add_argument(
        "--copies", type=_names, default=["1", "16"], help="fleet sizes for --throughput, as copies"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="for each throughput measurement")
    options = parser.parse_args(argv)
    if options.traces is None:
        parser.error("name the folder with the traces (or set TRACES)")
    try:
        folder = openb.openb_folder(Path(options.traces))
    except FileNotFoundError as error:
        parser.error(str(error))
    if options.throughput:
        for line in throughput(
            workload(folder, "default"), options.policies, [int(n) for n in options.copies], options.seconds
        ):
            print(line, flush=True)
        return 0
    lists = openb.lists_available(folder) if options.lists == ["all"] else options.lists
    seeds = [FRESH_SEED + i for i in range(options.fresh)] or list(openb.SEEDS[: options.seeds])
    results = []
    for name in lists:
        load = workload(folder, name)
        courses = {}
        for policy in options.policies:
            result, courses[policy] = run(load, policy, seeds, _progress)
            results.append(result)
            _progress("")
            if len(lists) > 1:
                print(list(table([result]))[-1], flush=True)
        if options.plot and name == lists[0]:
            plot(courses, name, options.plot)
    print("\n".join(table(results)))
    if options.json:
        rows = [
            {"list": r.workload, "policy": r.policy, "figures": r.figures, "by_seed": r.by_seed}
            for r in results
        ]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0

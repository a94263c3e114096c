"""Making a failing plan smaller: leave out steps as long as the world still fails in the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.plan import draw
from tests.simulation.world import Failure, Verdict, run

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["explain_failure", "shrink"]

RUNS_MAX = 400


def shrink(
    seed: int,
    failure: Failure,
    *,
    keep: tuple[int, ...] | None = None,
    say: Callable[[str], object] = lambda _: None,
    runs_max: int = RUNS_MAX,
) -> tuple[tuple[int, ...], Verdict]:
    """The numbers of the steps that are needed, and how the world with only these ends.

    Halves, then quarters, then single steps (ddmin): each round drops a stretch if the rest fails alike.
    """
    plan = draw(seed)
    kept = tuple(range(len(plan.steps))) if keep is None else keep
    runs = 1
    last = run(plan.keep(kept))
    assert last.failure is not None, "the world does not fail again"
    assert last.failure.code == failure.code, f"it fails in another way now: {last.failure.code}"
    size = max(1, len(kept) // 2)
    while runs < runs_max:
        at, dropped = 0, False
        while at < len(kept) and runs < runs_max:
            fewer = kept[:at] + kept[at + size :]
            runs += 1
            verdict = run(plan.keep(fewer))
            if verdict.failure is not None and verdict.failure.code == failure.code:
                kept, last, dropped = fewer, verdict, True
            else:
                at += size
        if size == 1 and not dropped:
            break
        size = max(1, size // 2)
    say(f"{len(kept)} of {len(plan.steps)} steps are enough, found in {runs} runs")
    return kept, last


def explain_failure(seed: int, verdict: Verdict, keep: tuple[int, ...] | None) -> str:
    """What failed, by which plan, and the one command that shows it again."""
    assert verdict.failure is not None
    plan = draw(seed)
    steps = [f"  {n:3} {s}" for n, s in enumerate(plan.steps) if keep is None or n in keep]
    nodes = ", ".join(f"{n.name} ({n.cards} x {n.memory_gib} GiB)" for n in plan.nodes)
    only = "" if keep is None else f" --keep {','.join(map(str, keep)) or '-'}"
    return "\n".join((
        f"FAILED at {verdict.failure.at} virtual seconds: {verdict.failure.code}",
        f"  {verdict.failure.text}",
        f"the world: {nodes}; {plan.ledgers} ledgers, {plan.placers} placers, {plan.reapers} reapers; plan:",
        *steps,
        f"again: python -m tests.simulation --seed {seed}{only}",
    ))  # fmt: skip

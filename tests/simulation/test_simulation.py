"""Worlds: the whole system on a virtual clock, under faults, held against an auditor. See docs/reliability.md.

RIGBOOK_WORLDS says how many; by default 2,000 on CI and 150 elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.mutant_list import MUTANTS
from tests.simulation.plan import FAULTS, WORDS, draw
from tests.simulation.planting import planted_source
from tests.simulation.shrink import explain_failure, shrink
from tests.simulation.soak import Tally, kept_seeds, worlds
from tests.simulation.world import Failure, Verdict

# `RIGBOOK_WORLDS=2000` (or `make soak`) for more; these are the ones known to pass on every push.
WORLDS = int(os.environ.get("RIGBOOK_WORLDS") or 150)
PROCESSES = os.cpu_count() or 1


def told(verdict: Verdict) -> str:
    """What a failing world leaves behind: its smallest plan, and the command."""
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(verdict.seed), "--shrink"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], timeout=300
    )
    return f"{verdict.failure}\n{done.stdout}{done.stderr[-2000:]}"


def all_pass(seeds: list[int]) -> Tally:
    tally = Tally()
    for verdict in worlds(seeds, processes=PROCESSES):
        tally.add(verdict)
        if verdict.failure is not None:
            pytest.fail(told(verdict), pytrace=False)
    print(f"\n{tally.line()}\n{tally.table()}")
    return tally


@pytest.mark.slow
def test_worlds_that_failed_once_pass() -> None:
    all_pass(kept_seeds())


@pytest.mark.slow
def test_worlds_pass() -> None:
    """Safety at every event, liveness after the last fault, equal digests at the end."""
    tally = all_pass(list(range(WORLDS)))
    if WORLDS >= 1000:
        assert tally.faults.keys() >= FAULTS, "a kind of fault that never happened is not tested"


DIGESTS = """
import sys
from tests.simulation import quiet
from tests.simulation.soak import run_seed
quiet.hush()
sys.unraisablehook = lambda _: None
for seed in (0, 1, 2, 7, 11, 40, 51, 63):
    print(seed, run_seed(seed).digest)
"""


def test_one_seed_is_one_run_whatever_the_hash_seed() -> None:
    def digests(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS], env=environment, capture_output=True, text=True, check=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        return done.stdout

    first = digests("0")
    assert len(first.splitlines()) == 8
    assert digests("1") == first
    assert digests("4242") == first


def test_a_plan_is_drawn_from_its_seed_alone() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    steps = [step for seed in range(300) for step in draw(seed).steps]
    assert {step.what for step in steps} == FAULTS | WORDS


def test_a_failing_plan_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of many steps are needed together: exactly these are left."""
    plan = draw(11)
    needed = {2, 5, len(plan.steps) - 1}
    wanted = {plan.steps[n] for n in needed}
    runs = 0

    def run(smaller: object) -> Verdict:
        nonlocal runs
        runs += 1
        fails = wanted <= set(smaller.steps)  # type: ignore[attr-defined]
        failure = Failure("planted", "as told") if fails else None
        return Verdict(
            seed=11, failure=failure, digest="", virtual_seconds=0, settled_seconds=0, events=0, steps=0, faults={},
            counts={}, kinds={},
        )  # fmt: skip

    monkeypatch.setattr("tests.simulation.shrink.run", run)
    keep, verdict = shrink(11, Failure("planted", ""))
    assert set(keep) == needed
    assert runs < 120
    command = explain_failure(11, verdict, keep).splitlines()[-1]
    assert (
        command == f"again: python -m tests.simulation --seed 11 --keep {','.join(map(str, sorted(needed)))}"
    )


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_known_mistake_still_fits_into_the_code(mutant: object) -> None:
    """The text that a mutant changes must be there: else the mutation check would check nothing."""
    import importlib.util

    for module in mutant.modules:  # type: ignore[attr-defined]
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        compile(planted_source(mutant, module, Path(spec.origin).read_text()), module, "exec")  # type: ignore[arg-type]


# Caught within a few worlds each: a quick look that the net is still one. All of them: `make mutants`.
QUICK = ("no-expectation", "own-ack", "release-on-order", "gang-half-released")


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_known_mistake_is_caught(name: str) -> None:
    from tests.simulation.mutants import check

    caught = check(next(m for m in MUTANTS if m.name == name), worlds=60, processes=PROCESSES)
    assert caught.by.startswith("simulation: ")

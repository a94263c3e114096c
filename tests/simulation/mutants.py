"""The mutation check: every known mistake is planted, and the net must catch it.

    python -m tests.simulation.mutants              all, with a table
    python -m tests.simulation.mutants own-ack ...  some

For each mutant worlds are run until one fails; when none does, the unit tests named beside it are asked.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from tests.simulation.mutant_list import MUTANTS, Mutant

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["check", "main"]

WORLDS = 400


class Caught:
    def __init__(self, mutant: Mutant, by: str, worlds: int, seconds: float) -> None:
        self.mutant = mutant
        self.by = by  # "" = by nothing
        self.worlds = worlds
        self.seconds = seconds

    @property
    def row(self) -> str:
        where = self.by or "**nothing**"
        worlds = str(self.worlds) if self.worlds else "-"
        return f"| `{self.mutant.name}` | {self.mutant.mistake} | {where} | {worlds} |"


def check(mutant: Mutant, *, worlds: int = WORLDS, processes: int = 2, first: int = 0) -> Caught:
    """Plant one, and see who notices."""
    environment = {**os.environ, "RIGBOOK_MUTANT": mutant.name}
    began = time.perf_counter()
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.simulation", "--seeds", f"{first}:{first + worlds}", "--no-shrink",
            "--processes", str(processes),
        ],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    known = [line for line in done.stdout.splitlines() if line.startswith("again: ")]
    if known:  # does it fail without the mistake, too?
        seed = known[-1].split("--seed ")[1].split()[0]
        clean = {key: value for key, value in os.environ.items() if key != "RIGBOOK_MUTANT"}
        again = subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seed", seed],
            env=clean,
            capture_output=True,
            text=True,
            check=False,
        )
        if again.returncode:
            raise RuntimeError(f"seed {seed} fails without any mutant: {again.stdout[-2000:]}")
    told = [line for line in done.stdout.splitlines() if line.startswith("seed ") and " failed: " in line]
    if told:
        code = told[0].partition(" failed: ")[2].partition(":")[0]
        count = next((line for line in done.stdout.splitlines() if " worlds, " in line), "0 worlds")
        last = [line for line in done.stdout.splitlines() if " worlds, " in line]
        count = (last or [count])[-1].split(" worlds")[0].strip()
        return Caught(mutant, f"simulation: {code}", int(count), time.perf_counter() - began)
    if done.returncode:
        raise RuntimeError(f"{mutant.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    for path in mutant.tests:
        tested = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tests.simulation", "-x", "-q", "--no-header", path],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if tested.returncode == 1:
            return Caught(mutant, f"unit: {path.rpartition('/')[2]}", 0, time.perf_counter() - began)
        if tested.returncode:
            raise RuntimeError(f"{mutant.name}: {tested.stdout[-2000:]}{tested.stderr[-2000:]}")
    return Caught(mutant, "", 0, time.perf_counter() - began)


def main(arguments: Iterable[str] | None = None) -> int:
    """Exit code 1 when a mutant lives."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.mutants", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--worlds", type=int, default=WORLDS, help="at most so many for each")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(None if arguments is None else list(arguments))
    chosen = [m for m in MUTANTS if not asked.names or m.name in asked.names]
    found: list[Caught] = []
    for mutant in chosen:
        found.append(check(mutant, worlds=asked.worlds, processes=asked.processes))
        print(
            f"{mutant.name:20} {found[-1].by or 'LIVES':45} {found[-1].worlds:4} worlds {found[-1].seconds:6.1f} s",
            flush=True,
        )
    living = [one.mutant.name for one in found if not one.by]
    print("\n| mutant | the mistake | caught by | after worlds |\n|---|---|---|---|")
    for one in found:
        print(one.row)
    print(
        f"\n{len(found) - len(living)} of {len(found)} caught{'; living: ' + ', '.join(living) if living else ''}"
    )
    return 1 if living else 0


if __name__ == "__main__":
    sys.exit(main())

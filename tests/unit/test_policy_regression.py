"""Recorded journals must not come out worse under the policies of today.

Each journal is simulated again under each policy; fragmentation, evictions and waiting must not be worse than in the
expectation beside it. A change that makes them worse on purpose updates the expectation in the same change, with the
reason: `python -m tests.unit.test_policy_regression "the reason"`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rigbook_placer.rank import POLICIES
from rigbook_replay.comparison import Costs, compare
from rigbook_replay.fleetplan import Plan, happenings_of
from rigbook_replay.journal import Journal
from rigbook_replay.lifetimes import Gathering

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "policy"
# One made by `tests.unit.fleet_run`; and the demo's, once it is there.
JOURNALS = [*sorted(GOLDEN.glob("*.journal")), *sorted((ROOT / "examples").glob("*.journal"))]
# What may differ without a meaning: rounding of shares and seconds.
SLACK = {"fragmentation": 0.0005, "evictions": 0, "wait_mean": 1.0, "wait_p95": 1.0, "not_bound": 0}


def figures(journal: Path) -> dict[str, dict[str, float]]:
    """By policy."""
    gathering = Gathering(journal.name)
    with Journal.open(journal) as there:
        for records in there.records():
            gathering.take(records)
        assert not there.damage
    past = gathering.close()
    told: dict[str, dict[str, float]] = {}
    for policy in POLICIES:
        fates = [happenings_of(past, Plan(policy=policy))]
        answer = compare(past, past.from_ns, fates, Costs(), changes=[], recorded=None, words=("", ""))
        outcome = answer.outcomes[-1]
        assert outcome.waits is not None
        told[policy] = {
            "fragmentation": round(outcome.fragmentation or 0.0, 5),
            "evictions": outcome.evictions,
            "wait_mean": round(outcome.waits.mean, 1),
            "wait_p95": round(outcome.waits.p95, 1),
            "not_bound": outcome.demands - outcome.bound,
        }
    return told


def expected_file(journal: Path) -> Path:
    return GOLDEN / f"{journal.stem}.expected.json"


def worse(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{policy}: {name} was {was}, is {now[policy][name]}"
        for policy, known in before.items()
        for name, was in known.items()
        if now[policy][name] > was + SLACK[name]
    ]


@pytest.mark.parametrize("journal", JOURNALS, ids=lambda path: path.stem)
def test_no_policy_has_become_worse(journal: Path) -> None:
    file = expected_file(journal)
    assert file.is_file(), 'write it: python -m tests.unit.test_policy_regression "first expectation"'
    expected = json.loads(file.read_text())
    now = figures(journal)
    assert set(now) <= set(expected["policies"]), (
        'a new policy needs its expectation: python -m tests.unit.test_policy_regression "new policy NAME"'
    )
    found = worse(expected["policies"], now)
    assert not found, "\n".join(
        ["worse than expected; if it is meant, update the expectation with the reason:", *found]
    )
    assert expected["reasons"], "each expectation says why it is what it is"


def test_worse_is_told_and_better_is_not() -> None:
    same = {"pack": dict.fromkeys(SLACK, 10.0)}
    assert not worse(same, same)
    assert not worse(same, {"pack": dict.fromkeys(SLACK, 9.0)})
    assert len(worse(same, {"pack": dict.fromkeys(SLACK, 12.0)})) == len(SLACK)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].strip():
        sys.exit('say why: python -m tests.unit.test_policy_regression "the reason"')
    for path in JOURNALS:
        out = expected_file(path)
        reasons = json.loads(out.read_text())["reasons"] if out.is_file() else []
        now = figures(path)
        if not reasons or json.loads(out.read_text())["policies"] != now:
            told = {"reasons": [*reasons, sys.argv[1]], "policies": now}
            out.write_text(json.dumps(told, indent=2) + "\n")

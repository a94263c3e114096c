"""Every golden journal of every earlier version is read byte for byte, and folds to its recorded digest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rigbook_replay.journal import Journal
from rigbook_replay.verify import verify

from tests.unit.golden_journals import DIGESTS, FOLDER, facts

GOLDEN = sorted(FOLDER.glob("*.journal"))
EXAMPLE = Path(__file__).parents[2] / "examples" / "demo.journal"


def test_each_golden_journal_has_its_facts_and_none_is_lost():
    assert {path.name for path in GOLDEN} == set(json.loads(DIGESTS.read_text()))
    assert GOLDEN


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_golden_journal_is_read_and_folded_as_ever(path):
    """When the fold changed on purpose: update its digest in digests.json, with the reason in CHANGELOG.md."""
    assert facts(path) == json.loads(DIGESTS.read_text())[path.name]


@pytest.mark.parametrize("path", [*GOLDEN, EXAMPLE], ids=lambda path: path.stem)
def test_a_golden_journal_is_whole_and_unchanged(path):
    with Journal.open(path) as journal:
        found = verify(journal)
    assert not [problem for problem in found.problems if not problem.startswith("audit: ")]

"""Proof of a drift: where the views last agreed, where they first did not, and a journal that shows it again.

Method: a real reaper's judgement over a story (`drift_story`); log and heartbeats go into a journal.
"""

from __future__ import annotations

import pytest
from rigbook_bus.protocol import Message
from rigbook_replay.driftproof import NoDrift, Standing, prove
from rigbook_replay.export import Wish, export
from rigbook_replay.journal import Header, Journal
from rigbook_replay.source import JournalSource
from rigbook_replay.trusted import schema_identity
from rigbook_replay.writer import JournalWriter
from rigbook_schemas import values as v
from rigbook_schemas.wire import Draft, decode, encode

from tests.unit import ledger_story as s
from tests.unit.drift_story import TOLERANCE, Watchman, foreign, process, runs, shows

CARD = s.card("a")


class Filmed(Watchman):
    """A watchman whose log and heartbeats are kept as the bus would keep them."""

    def __init__(self, *steps, **options):
        self.beats = []
        super().__init__(*steps, **options)

    def beat(self, **shown):
        beat = super().beat(**shown)
        body = encode(
            Draft(data=beat.heartbeat, id=f"beat-{self.number}", source="nodeagent/a", time=beat.sent)
        )
        self.beats.append(Message(self.number, "rig.heartbeat.a", beat.received_ns, body))
        return beat


@pytest.fixture
def filmed(monkeypatch):
    """Every event that is folded, as a message."""
    log = []

    def kept(seq, subject, received_ns, body):
        log.append(Message(seq, subject, received_ns, body))
        return decode(seq, subject, received_ns, body)

    monkeypatch.setattr(s, "decode", kept)
    return log


def journal_of(path, log, beats):
    made = JournalWriter.create(path, Header(created_ns=1, schema=schema_identity()))
    made.add(log)
    made.add_heartbeats(beats)
    made.finish()
    return Journal.open(path)


def stopped_app_whose_server_lives_on():
    """Runs; is withdrawn and stopped; the server holds the card all the same; the reaper tells of it."""
    there = Filmed(s.joined("a"), s.raised("d"), s.bound("d", CARD), s.started("d"))
    showing = {
        "components": (runs(there.state),),
        "cards": (shows(CARD, process(there.state)), shows(s.card("a", 1))),
    }
    there.sees_for(3, **showing)
    there.happens(s.withdrawn("d"), s.evicted("d", reason=v.EvictionReason.WITHDRAWN, grace_seconds=1.0))
    there.sees_for(12, **showing)
    assert "DriftDetected" in there.kinds()
    return there


async def test_a_leftover_agreed_while_it_was_wanted_and_differed_after_the_grace(tmp_path, filmed):
    there = stopped_app_whose_server_lives_on()
    with journal_of(tmp_path / "x.journal", filmed, there.beats) as journal:
        proof = await prove(JournalSource(journal), "leftover", tolerance=TOLERANCE)
    assert proof.drift.kind is v.DriftKind.LEFTOVER
    assert proof.agreed.standing is Standing.AGREE
    assert proof.agreed.position == 4
    assert proof.agreed.desired.startswith("running")
    assert "heartbeat 3" in proof.agreed.observed_by
    assert proof.differed.standing is Standing.DIFFER
    assert proof.differed.position == 6
    assert proof.differed.desired.startswith("stopped")
    assert "18.0 GiB" in proof.differed.observed
    assert "heartbeat" in proof.differed.observed_by
    assert proof.agreed.at_ns < proof.differed.at_ns < proof.told.at_ns
    assert [r.kind for r in proof.between] == ["demand.withdrawn", "eviction.ordered", "drift.detected"]
    assert proof.cleared is None
    assert proof.sentence == proof.drift.sentence


async def test_the_exported_proof_gives_the_same_proof(tmp_path, filmed):
    there = stopped_app_whose_server_lives_on()
    with journal_of(tmp_path / "whole.journal", filmed, there.beats) as journal:
        source = JournalSource(journal)
        proof = await prove(source, "leftover.a.3", tolerance=TOLERANCE)
        wish = Wish(nodes=("a",), until_ns=proof.detected.received_ns)
        await export(source, tmp_path / "part.journal", wish, now_ns=1)
    with Journal.open(tmp_path / "part.journal") as part:
        assert await prove(JournalSource(part), "leftover.a.3", tolerance=TOLERANCE) == proof


async def test_without_heartbeats_the_agents_word_and_the_reapers_evidence_are_what_was_observed(
    tmp_path, filmed
):
    stopped_app_whose_server_lives_on()
    with journal_of(tmp_path / "x.journal", filmed, []) as journal:
        proof = await prove(JournalSource(journal), "leftover", tolerance=TOLERANCE)
    assert proof.agreed.position == 4
    assert proof.agreed.observed_by == "event 4 (started)"
    assert proof.differed == proof.told
    assert "sightings" in proof.told.observed_by
    assert proof.told.observed == proof.drift.observed


async def test_somebody_elses_process_on_a_bound_card(tmp_path, filmed):
    there = Filmed(s.joined("a"), s.raised("d"), s.bound("d", CARD), s.started("d"))
    mine = process(there.state)
    there.sees_for(3, components=(runs(there.state),), cards=(shows(CARD, mine), shows(s.card("a", 1))))
    there.sees_for(
        8, components=(runs(there.state),), cards=(shows(CARD, mine, foreign()), shows(s.card("a", 1)))
    )
    with journal_of(tmp_path / "x.journal", filmed, there.beats) as journal:
        proof = await prove(JournalSource(journal), "squatter", tolerance=TOLERANCE)
    assert proof.agreed.observed == "no process of somebody else's"
    assert "pid 99" in proof.differed.observed
    assert proof.agreed.at_ns < proof.differed.at_ns


async def test_no_such_drift_names_those_that_are(tmp_path, filmed):
    there = stopped_app_whose_server_lives_on()
    with (
        journal_of(tmp_path / "x.journal", filmed, there.beats) as journal,
        pytest.raises(NoDrift, match=r"leftover\.a\.3"),
    ):
        await prove(JournalSource(journal), "missing")

"""The audit: quiet over what is right; loud, with the position, over what is not."""

from __future__ import annotations

import pytest
from rigbook_ledger.digest import digest
from rigbook_replay.audit import Claim, Range, audit
from rigbook_replay.journal import Header, Journal
from rigbook_replay.source import JournalSource
from rigbook_replay.trusted import schema_identity
from rigbook_replay.writer import JournalWriter
from rigbook_schemas import events as e
from rigbook_schemas import values as v

from tests.unit import ledger_story as s
from tests.unit.journal_story import SECOND_NS, told
from tests.unit.ledger_story import CARD_BYTES, START_NS

HOUR = 3600


@pytest.fixture
def audited(tmp_path):
    """Audit a story; `keep` leaves out some of its messages, `slow` puts an hour between events."""

    async def go(*steps, keep=lambda m: True, source="", **options):
        story, messages = told(*steps)
        if source:
            messages = [type(m)(m.seq, m.subject, m.received_ns, m.body.replace(b'"source":"test/story"', f'"source":"{source}"'.encode()))
                        for m in messages]  # fmt: skip
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.journal"
        made = JournalWriter.create(path, Header(created_ns=1, schema=schema_identity()))
        made.add([m for m in messages if keep(m)])
        made.finish()
        with Journal.open(path) as journal:
            report, hours = await audit(JournalSource(journal), **options)
        return report, hours, story

    return go


CLIENT_ONLY = (s.raised("d"), s.withdrawn("d"))


async def test_a_clean_log_of_clients_gives_no_problem(audited):
    report, _, story = await audited(*CLIENT_ONLY)
    assert report.good
    assert (report.events, report.first_seq, report.last_seq) == (2, 1, 2)
    assert report.digest == digest(story.state)
    assert report.kinds == {"demand.raised": 1, "demand.withdrawn": 1}


async def test_who_has_no_business_saying_it_is_named(audited):
    report, _, _ = await audited(s.joined("a"), s.raised("d"), s.bound("d"), source="placer/1")
    assert [text.split(":")[0] for text in report.problems] == ["event 1"]
    assert "nodeagent's to say" in report.problems[0]
    report, _, _ = await audited(s.joined("a"), source="nodeagent/b")
    assert "node a was said by 'nodeagent/b'" in report.problems[0]
    report, _, _ = await audited(s.joined("a"), source="nodeagent/a")
    assert report.good


async def test_a_violated_invariant_is_told_with_the_position_where_it_began(audited):
    """Two exclusive bindings on one card, as no placer of ours could have appended them; the first ends later."""
    steps = (
        s.joined("a"),
        s.raised("x"),
        s.raised("y"),
        s.bound("x"),
        s.bound("y"),
        s.started("x"),
        s.exited("x"),
        s.released("x"),
    )
    report, _, _ = await audited(*steps)
    assert any(text.startswith("at event 5: double_binding") for text in report.problems)
    assert not any(text.startswith("at event 8: double_binding") for text in report.problems)
    later, _, _ = await audited(*steps, stretch=Range(since_ns=START_NS + 9 * SECOND_NS))
    assert not any("double_binding" in text for text in later.problems)


async def test_a_claimed_digest_or_chain_is_held_against_the_fold(audited):
    _, _, story = await audited(*CLIENT_ONLY)
    right = Claim(who="ledger-1", position=2, digest=digest(story.state), chain=story.state.chain.hex())
    report, _, _ = await audited(*CLIENT_ONLY, claims=[right])
    assert report.good
    assert "ledger-1 agrees at 2" in report.confirmed[0]
    wrong = [Claim(who="ledger-2", position=2, digest="00"), Claim(who="ledger-3", position=1, chain="00"),
             Claim(who="ledger-4", position=9, digest="00")]  # fmt: skip
    report, _, _ = await audited(*CLIENT_ONLY, claims=wrong)
    assert [text.split()[0] for text in report.problems] == ["ledger-3", "ledger-2"]
    assert any("ledger-4 stands at 9" in text for text in report.notes)


async def test_a_hole_in_the_log_is_a_problem(audited):
    report, _, _ = await audited(*CLIENT_ONLY, s.raised("x"), keep=lambda m: m.seq != 2)
    assert report.problems == ["events 2 to 2 are not in the record"]


async def test_a_clock_that_is_off_is_noted(audited):
    report, _, _ = await audited(s.Told(data=s.raised("d"), time="2026-09-21T10:00:00Z"))
    assert "clock of test/story" in report.notes[0]
    assert report.findings == {"clock_skew": 1}


async def test_gpu_hours_reserved_used_and_wasted(audited):
    """A whole card from event 3 to 6 (three seconds) with a quarter of it ever used; another one still held."""
    usage = v.Usage(seconds=3.0, memory_peak_bytes=CARD_BYTES // 4)
    steps = (
        s.joined("a"), s.raised("x"), s.bound("x"), s.started("x"), s.exited("x"), s.released("x", usage=usage),
        s.raised("y"), s.bound("y", s.card("a", 1)), s.started("y"),
    )  # fmt: skip
    report, hours, _ = await audited(*steps)
    line = hours.by_project["p"]
    assert line.bindings == 2
    assert line.card_hours == pytest.approx((3 + 1) / HOUR)
    assert line.reserved_byte_hours == pytest.approx(4 * CARD_BYTES / HOUR)
    assert line.used_byte_hours == pytest.approx(3 * CARD_BYTES / 4 / HOUR)
    assert line.wasted_byte_hours == pytest.approx(3 * CARD_BYTES * 3 / 4 / HOUR)
    assert line.unobserved_byte_hours == pytest.approx(CARD_BYTES / HOUR)
    assert set(hours.by_card) == {f"a/0 {s.card('a')}", f"a/1 {s.card('a', 1)}"}
    assert [one.demand for one in hours.idlest] == ["x"]
    assert report.verdicts == {"completed": 1}
    clipped = (await audited(*steps, stretch=Range(until_ns=START_NS + 5 * SECOND_NS)))[1]
    assert clipped.by_project["p"].card_hours == pytest.approx(2 / HOUR)


async def test_evictions_are_counted_by_cause(audited):
    report, _, _ = await audited(s.joined("a"), s.raised("d"), s.bound("d"), s.evicted("d"),
                                 e.EvictionOrdered(demand="d", epoch=3, nodes=("a",), reason=v.EvictionReason.DRAIN))  # fmt: skip
    assert report.evictions == {"operator": 1, "drain": 1}

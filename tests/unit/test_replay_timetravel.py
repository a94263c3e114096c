"""Any moment of the past: the state there is the fold up to there, with and without snapshots, and never guessed."""

from __future__ import annotations

import pytest
from rigbook_ledger.digest import digest
from rigbook_ledger.evolve import fold
from rigbook_ledger.state import State
from rigbook_replay import snapshots, writer
from rigbook_replay.journal import Journal
from rigbook_replay.snapshots import Snapshots
from rigbook_replay.timetravel import BeforeRecord, CannotFold, fold_journal, state_at
from rigbook_schemas.wire import decode

from tests.unit.journal_story import SECOND_NS, lives, told, write_journal
from tests.unit.ledger_story import START_NS


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(writer, "MESSAGES_MAX", 10)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.journal"


def digests(messages):
    """After each event, the digest; index 0 = before the first one."""
    found, state = [""], State()
    for m in messages:
        state = fold(state, [decode(m.seq, m.subject, m.received_ns, m.body)])
        found.append(digest(state))
    return found


def test_the_state_at_every_moment_is_the_fold_up_to_it(path):
    """Event n comes n seconds after the start: ask at each second, and half a second before and after."""
    story, messages = told(*lives(8))
    write_journal(path, messages, story)
    expected = digests(messages)
    with Journal.open(path) as journal:
        for kept in (None, Snapshots(journal, every=7)):
            for seq in range(1, len(messages) + 1):
                for shift in (0, SECOND_NS // 2):
                    there = state_at(journal, at_ns=START_NS + seq * SECOND_NS + shift, snapshots=kept)
                    assert digest(there.state) == expected[seq]
                    assert there.next_seq == (seq + 1 if seq < len(messages) else None)
                    assert not there.note
                assert digest(state_at(journal, position=seq, snapshots=kept).state) == expected[seq]
        assert digest(fold_journal(journal)) == digest(story.state)
        with pytest.raises(BeforeRecord):
            state_at(journal, at_ns=START_NS)


def test_snapshots_lie_beside_the_journal_and_shorten_the_way(path, monkeypatch):
    """The second question folds no more than the events since the last snapshot."""
    story, messages = told(*lives(8))
    write_journal(path, messages, story)
    with Journal.open(path) as journal:
        state_at(journal, snapshots=Snapshots(journal, every=10))
    with Journal.open(path) as journal:
        read = []
        records = journal.records

        def counted(**options):
            for batch in records(**options):
                read.extend(record.seq for record in batch)
                yield batch

        monkeypatch.setattr(journal, "records", counted)
        there = state_at(journal, position=35, snapshots=Snapshots(journal, every=10))
        assert min(read) == 30  # looked up to see that the snapshot is of this journal
        assert len(read) == 6
        assert digest(there.state) == digests(messages)[35]


def test_snapshots_of_another_fold_or_journal_are_made_anew(path, monkeypatch):
    story, messages = told(*lives(8))
    write_journal(path, messages, story)
    beside = path.with_name("x.journal.snapshots")
    with Journal.open(path) as journal:
        state_at(journal, snapshots=Snapshots(journal, every=10))
        size = beside.stat().st_size
        monkeypatch.setattr(snapshots, "fold_identity", lambda: "another")
        assert Snapshots(journal, every=10).nearest(at_ns=None, position=40) is None
        monkeypatch.undo()
        assert not beside.exists()
        monkeypatch.setattr(writer, "MESSAGES_MAX", 10)
        kept = Snapshots(journal, every=10)
        state_at(journal, snapshots=kept)
        assert beside.stat().st_size == size
        beside.write_bytes(beside.read_bytes()[:-5])
        assert Snapshots(journal, every=10).nearest(at_ns=None, position=40) is None


def test_a_snapshot_that_is_not_of_this_log_is_not_believed(path, tmp_path):
    """Same journal by its header, other events in it (it was cut, and exported again from a restored stream)."""
    story, messages = told(*lives(8))
    write_journal(path, messages, story)
    with Journal.open(path) as journal:
        state_at(journal, snapshots=Snapshots(journal, every=10))
        header = journal.header
    path.unlink()
    made = writer.JournalWriter.create(path, header)
    made.add(messages[:12])
    made.add(
        [
            type(m)(m.seq, m.subject, m.received_ns, m.body.replace(b'"event-', b'"other-'))
            for m in messages
            if m.seq > 12
        ]
    )
    made.finish()
    with Journal.open(path) as journal:
        with_cache = state_at(journal, snapshots=Snapshots(journal, every=10))
        assert digest(with_cache.state) == digest(state_at(journal).state)


def test_a_place_that_cannot_be_written_costs_time_not_answers(path, tmp_path):
    story, messages = told(*lives(8))
    write_journal(path, messages, story)
    with Journal.open(path) as journal:
        nowhere = Snapshots(journal, every=10, path=tmp_path / "gone" / "x.snapshots")
        assert digest(state_at(journal, snapshots=nowhere).state) == digest(story.state)


def test_over_a_gap_nothing_is_told_and_up_to_it_everything(path):
    story, messages = told(*lives(8))
    write_journal(path, messages, story)
    with Journal.open(path) as journal:
        third = journal.blocks[2]
    data = bytearray(path.read_bytes())
    data[third.end - 1] ^= 1
    path.write_bytes(bytes(data))
    with Journal.open(path) as journal:
        assert digest(state_at(journal, position=20).state) == digests(messages)[20]
        with pytest.raises(CannotFold, match="events 21 to 30 are not in the record"):
            state_at(journal, position=35)


def test_damage_at_the_very_end_is_not_taken_for_the_end(path):
    story, messages = told(*lives(7), *lives(1)[1:4])
    write_journal(path, messages, story)
    with Journal.open(path) as journal:
        last = journal.blocks[-1]
    data = bytearray(path.read_bytes())
    data[last.end - 1] ^= 1
    path.write_bytes(bytes(data))
    with Journal.open(path) as journal, pytest.raises(CannotFold, match="wrong checksum"):
        fold_journal(journal)


def test_a_clock_that_was_put_back_is_said(path):
    """Events 21 and on carry the times of 11 and on again: the log's order decides, and the answer says so."""
    story, messages = told(*lives(8))
    back = [
        m if m.seq <= 20 else type(m)(m.seq, m.subject, m.received_ns - 10 * SECOND_NS, m.body)
        for m in messages
    ]
    write_journal(path, back, story)
    with Journal.open(path) as journal:
        there = state_at(journal, at_ns=START_NS + 15 * SECOND_NS)
    assert there.state.position == 15
    assert "put back" in there.note


def test_an_unfinished_journal_says_that_there_may_be_more(path):
    story, messages = told(*lives(2))
    made = writer.JournalWriter.create(path, writer.Header(created_ns=1))
    made.add(messages)
    made.close()
    with Journal.open(path) as journal:
        there = state_at(journal, at_ns=START_NS + 10**12)
        assert digest(there.state) == digest(story.state)
        assert "interrupted" in there.note

"""The journal file: what goes in comes out, byte for byte; damage costs its own block and is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rigbook_bus.protocol import Message
from rigbook_ledger.digest import digest
from rigbook_ledger.evolve import fold
from rigbook_ledger.state import State
from rigbook_replay import writer
from rigbook_replay.block import messages_of, pack_blocks, records_of
from rigbook_replay.journal import Header, Journal, NotAJournal
from rigbook_replay.trusted import schema_identity, trusted, untrusted
from rigbook_replay.verify import verify
from rigbook_replay.writer import CannotResume, JournalWriter
from rigbook_schemas.catalogue import BY_KIND
from rigbook_schemas.wire import Draft, decode, encode

from tests.unit import ledger_story as s
from tests.unit.journal_story import CREATED_NS, lives, told, write_journal

ODD = (
    s.Raw(subject="rig.demand.p", body=b"no json"),
    s.Raw(subject="rig.own.bind.a", body=b""),
    s.Raw(subject="rig.demand.p", body=b'{"id":"x","source":"s","type":"dev.rigbook.later.v1","specversion":"1.0"}'),
    s.Raw(subject="rig.demand.p", body=b'{ "specversion": "1.0", "id": "spaced", "source": "nats", "type": '
          b'"dev.rigbook.demand.withdrawn.v1", "time": "2026-09-21T14:13:24Z", "data": {"demand": "d", "project": "p"} }'),
    s.Raw(subject="rig.demand.p", body='{"id":"ü€","source":"","type":"dev.rigbook.bound.v1"}'.encode()),
)  # fmt: skip


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(writer, "MESSAGES_MAX", 10)


def messages_back(messages):
    return [m for block in messages_of(pack_blocks(messages)) for m in block]


def records_back(messages, **options):
    return [r for block in records_of(pack_blocks(messages), **options) for r in block]


def read(path, **options):
    with Journal.open(path) as journal:
        found = [record for records in journal.records(**options) for record in records]
        return found, journal.damage


# -- blocks -------------------------------------------------------------------------------------


def test_a_block_gives_back_every_message_byte_for_byte():
    """Events of our own writing go into columns, all others stay as they came; both come back the same."""
    _, messages = told(*lives(3), *ODD, s.raised("last"))
    assert messages_back(messages) == messages
    records = records_back(messages, trust=True)
    in_columns = [r for r in records if type(r.data).__module__ == "rigbook_replay.trusted"]
    assert len(in_columns) == len(messages) - len(ODD)


@pytest.mark.parametrize("trust", [True, False])
def test_a_blocks_records_are_those_of_the_wire(trust):
    _, messages = told(*lives(3), *ODD, s.raised("last", probe=True), s.withdrawn("last"))
    records = records_back(messages, trust=trust)
    expected = [decode(m.seq, m.subject, m.received_ns, m.body) for m in messages]
    assert [msgspec.structs.replace(r, data=untrusted(r.data)) for r in records] == expected


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent / "golden" / "events").glob("*.json")), ids=lambda p: p.stem
)
def test_every_golden_event_survives_the_columns(path):
    """As it stands in its file (kept as it came), and as our code writes it (in columns, without checks)."""
    kind = BY_KIND[path.stem.rpartition(".v")[0]]
    pretty = Message(7, f"{kind.subject}.x", 5, path.read_bytes())
    record = decode(pretty.seq, pretty.subject, pretty.received_ns, pretty.body)
    ours = Message(8, f"{kind.subject}.x", 6, encode(Draft(
        data=record.data, id=record.id, source=record.source, time=record.time, correlation=record.correlation,
        causation=record.causation, traceparent=record.traceparent,
    )))  # fmt: skip
    assert messages_back([pretty, ours]) == [pretty, ours]
    one, two = records_back([pretty, ours], trust=True)
    assert one == record
    assert type(two.data) is trusted(kind.name)
    assert untrusted(two.data) == record.data
    assert msgspec.json.encode(two.data) == msgspec.json.encode(record.data)


def test_a_fold_of_columns_is_the_fold_of_the_wire():
    story, messages = told(*lives(30), *ODD)
    records = records_back(messages, trust=True, whole=False)
    assert digest(fold(State(), records)) == digest(story.state)


def test_what_another_version_checked_is_checked_again(tmp_path):
    """A journal of other types goes the slow and careful way, with the same result."""
    story, messages = told(*lives(3))
    made = JournalWriter.create(tmp_path / "x.journal", Header(created_ns=1, schema="another"))
    made.add(messages)
    made.finish()
    with Journal.open(tmp_path / "x.journal") as journal:
        assert not journal.checked
        records = [r for batch in journal.records() for r in batch]
        assert type(records[1].data).__module__ == "rigbook_schemas.events"
        assert digest(fold(State(), records)) == digest(story.state)


# -- files --------------------------------------------------------------------------------------


def test_a_journal_is_read_as_it_was_written(tmp_path, small_blocks):
    story, messages = told(*lives(9))
    index = write_journal(tmp_path / "x.journal", messages, story)
    with Journal.open(tmp_path / "x.journal") as journal:
        assert journal.finished
        assert journal.header.created_ns == CREATED_NS
        assert (journal.events, journal.last_seq, len(journal.blocks)) == (46, 46, 5)
        assert [m for batch in journal.messages() for m in batch] == messages
        assert [m for batch in journal.messages(after=13, until=31) for m in batch] == messages[13:31]
        assert journal.event_id(17) == "event-17"
        assert journal.event_id(47) is None
        assert journal.index == index
        assert verify(journal).good
    assert index.digest == digest(story.state)


def test_a_file_that_is_no_journal_says_so(tmp_path):
    for content in (b"", b"SQLite format 3\0" + bytes(200), b"\x93RIGJ\r\n\x1a" + bytes(300)):
        path = tmp_path / "x"
        path.write_bytes(content)
        with pytest.raises(NotAJournal, match="x is no journal"):
            Journal.open(path)


def test_an_interrupted_export_is_readable_and_goes_on_behind_the_last_whole_block(tmp_path, small_blocks):
    """Cut the file at every byte of its last block: what is before stays, and the rest is appended again."""
    story, messages = told(*lives(5))
    path = tmp_path / "x.journal"
    half = JournalWriter.create(path, Header(created_ns=CREATED_NS, schema=schema_identity()))
    half.add(messages[:20])
    half.close()
    whole = path.read_bytes()
    with Journal.open(path) as journal:
        second = journal.blocks[1].offset
        assert not journal.finished
    for cut in range(second, len(whole) + 1, 7):
        path.write_bytes(whole[:cut])
        found, damage = read(path)
        assert [r.seq for r in found] == list(range(1, 11 if cut < len(whole) else 21))
        assert bool(damage) == (second < cut < len(whole))
        on = JournalWriter.resume(path)
        on.add(messages[on.last_seq :])
        on.finish()
        with Journal.open(path) as journal:
            assert [m for batch in journal.messages() for m in batch] == messages
            result = verify(journal)
            assert result.good, result.problems
            assert result.digest == digest(story.state)


def test_a_finished_journal_grows_by_a_further_export(tmp_path, small_blocks):
    story, messages = told(*lives(9))
    path = tmp_path / "x.journal"
    write_journal(path, messages[:25])
    on = JournalWriter.resume(path)
    assert on.last_seq == 25
    on.add(messages[25:])
    on.finish()
    with Journal.open(path) as journal:
        assert verify(journal).digest == digest(story.state)


def test_damage_is_named_and_what_is_before_and_after_it_is_there(tmp_path, small_blocks):
    """Flip each byte of one block in turn, with and without the index: its ten events are lost, no other."""
    _, messages = told(*lives(9))
    path = tmp_path / "x.journal"
    write_journal(path, messages)
    whole = path.read_bytes()
    with Journal.open(path) as journal:
        third = journal.blocks[2]
        end = journal.frames[-1].end
    for data in (whole, whole[:end]):
        for at in range(third.offset, third.end, 11):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
            found, damage = read(path)
            assert [r.seq for r in found] == [*range(1, 21), *range(31, 47)]
            assert [(d.first_seq, d.last_seq) for d in damage] == [(21, 30)]
            assert damage[0].offset == third.offset
            with Journal.open(path) as journal:
                result = verify(journal)
            assert any("21 to 30" in text for text in result.problems), result.problems


def test_a_damaged_journal_is_not_continued(tmp_path, small_blocks):
    _, messages = told(*lives(9))
    path = tmp_path / "x.journal"
    write_journal(path, messages)
    with Journal.open(path) as journal:
        at = journal.blocks[2].end - 3
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CannotResume, match="new file"):
        JournalWriter.resume(path)


def test_a_block_taken_out_or_changed_breaks_the_chain(tmp_path, small_blocks):
    """Somebody who makes all checksums right again still cannot make the chain right."""
    _, messages = told(*lives(9))
    path = tmp_path / "x.journal"
    write_journal(path, messages)
    with Journal.open(path) as journal:
        first, second, third = journal.blocks[:3]
        end = journal.frames[-1].end
    data = path.read_bytes()
    path.write_bytes(data[: second.offset] + data[second.end : end])
    with Journal.open(path) as journal:
        result = verify(journal)
    assert any("hash chain breaks" in text for text in result.problems)
    assert any("11 to 20 are missing" in text for text in result.problems)

    other = Message(
        5, messages[4].subject, messages[4].received_ns, messages[4].body.replace(b"test", b"tost")
    )
    forged = writer.pack(
        first.contents, pack_blocks([*messages[:4], other, *messages[5:10]]), number=first.number, chain=first.chain,
        count=10, first_seq=1, last_seq=10, earliest_ns=first.earliest_ns, latest_ns=first.latest_ns,
    )  # fmt: skip
    path.write_bytes(data[: first.offset] + forged + data[first.end : end])
    with Journal.open(path) as journal:
        assert any("hash chain breaks" in text for text in verify(journal).problems)
    assert third.number == 3


def test_a_gap_in_the_log_is_a_problem_and_not_in_a_partial_journal(tmp_path):
    _, messages = told(*lives(2))
    write_journal(tmp_path / "a", [*messages[:3], *messages[5:]])
    write_journal(tmp_path / "b", messages[3:], partial="it begins at event 4", first_seq=4)
    with Journal.open(tmp_path / "a") as journal:
        assert verify(journal).problems[0] == "events 4 to 5 are missing"
    with Journal.open(tmp_path / "b") as journal:
        result = verify(journal)
        assert result.good
        assert "partial" in result.notes[0]

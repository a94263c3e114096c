"""A log leaves a bus as a journal and goes onto another bus: same events, same order, same sequences.

Method: the same story on the in-memory server and on a real nats-server; an export is interrupted by
cancelling it, an import by a bus that goes away.
"""

from __future__ import annotations

import asyncio

import pytest
from rigbook_ledger.digest import digest
from rigbook_ledger.evolve import fold
from rigbook_ledger.state import State
from rigbook_ledger.streams import ensure_streams
from rigbook_replay import writer
from rigbook_replay.export import NothingToExport, Wish, export
from rigbook_replay.imports import CannotImport, import_journal
from rigbook_replay.journal import Journal
from rigbook_replay.source import BusSource, JournalSource, NoLedger
from rigbook_replay.timetravel import fold_journal
from rigbook_replay.verify import verify
from rigbook_replay.writer import CannotResume
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.subjects import LEDGER_STREAM
from rigbook_schemas.wire import Draft, decode, encode

from tests.unit import ledger_story as s
from tests.unit.journal_story import lives, told


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(writer, "MESSAGES_MAX", 10)


async def filled(world, *steps, name="filler"):
    """A bus that holds the story; returns it with what a plain read of the stream gives."""
    bus = await world.connect(name)
    await ensure_streams(bus)
    await add(bus, *steps)
    return bus


async def add(bus, *steps):
    _, messages = told(*steps)
    for m in messages:
        await bus.append(m.subject, m.body, message_id=f"told-{m.seq}-{len(steps)}")


async def stream_of(bus):
    source = await BusSource.of(bus, "test")
    return [m async for batch in source.messages() for m in batch]


def state_of(messages):
    return fold(State(), [decode(m.seq, m.subject, m.received_ns, m.body) for m in messages])


async def exported(bus, path, wish=None, **options):
    return await export(await BusSource.of(bus, "test"), path, wish or Wish(), now_ns=1, **options)


def content(path):
    with Journal.open(path) as journal:
        found = verify(journal)
        assert found.good, found.problems
        return [m for batch in journal.messages() for m in batch]


async def test_a_journal_holds_the_stream_and_folds_to_the_same_digest(world, tmp_path):
    odd = s.Raw(subject="rig.demand.p", body=b"\xff no event")
    bus = await filled(world, *lives(6), odd)
    path = tmp_path / "x.journal"
    steps = []
    out = await exported(bus, path, told=lambda position, last: steps.append((position, last)))
    there = await stream_of(bus)
    assert content(path) == there
    assert out.index.digest == digest(state_of(there))
    assert steps[-1] == (32, 32)
    with Journal.open(path) as journal:
        assert journal.header.created_ns == (await bus.stream(LEDGER_STREAM)).created_ns
        assert digest(fold_journal(journal)) == out.index.digest


async def test_a_later_export_adds_what_came_since(world, tmp_path):
    bus = await filled(world, *lives(3))
    path = tmp_path / "x.journal"
    await exported(bus, path)
    await add(bus, s.raised("later"))
    out = await exported(bus, path)
    assert out.resumed_at == 16
    there = await stream_of(bus)
    assert content(path) == there
    assert out.index.digest == digest(state_of(there))
    out = await exported(bus, path)  # nothing new: still whole
    assert content(path) == there


async def test_an_interrupted_export_keeps_what_it_read_and_goes_on(world, tmp_path):
    bus = await filled(world, *lives(6))
    path = tmp_path / "x.journal"

    def stop(position, last):
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await exported(bus, path, told=stop)
    with Journal.open(path) as journal:
        assert not journal.finished
        assert journal.events == 31  # one batch from the bus had all of it
    out = await exported(bus, path)
    assert out.resumed_at == 31
    assert content(path) == await stream_of(bus)


async def test_a_file_of_another_stream_is_not_continued(world, tmp_path):
    bus = await filled(world, *lives(2))
    path = tmp_path / "x.journal"
    await exported(bus, path)
    with pytest.raises(CannotResume, match="another journal"):
        await exported(bus, path, Wish(since_ns=(await stream_of(bus))[3].received_ns))
    _, messages = told(*lives(2))
    path.unlink()
    with Journal.open(_other(tmp_path, messages)) as other:
        await export(JournalSource(other), path, Wish(), now_ns=1)
    with pytest.raises(CannotResume, match="created_ns"):
        await exported(bus, path)


def _other(tmp_path, messages):
    made = writer.JournalWriter.create(tmp_path / "other.journal", writer.Header(created_ns=1))
    made.add(messages)
    made.finish()
    return tmp_path / "other.journal"


async def test_a_stretch_of_time_is_partial_unless_it_begins_at_the_beginning(world, tmp_path):
    bus = await filled(world, *lives(4))
    there = await stream_of(bus)
    middle = there[10].received_ns
    await exported(bus, tmp_path / "until", Wish(until_ns=middle))
    assert content(tmp_path / "until") == [m for m in there if m.received_ns <= middle]
    await exported(bus, tmp_path / "since", Wish(since_ns=middle))
    assert content(tmp_path / "since") == [m for m in there if m.received_ns >= middle]
    with Journal.open(tmp_path / "until") as journal:
        assert not journal.header.partial
    with Journal.open(tmp_path / "since") as journal:
        assert "begins at event" in journal.header.partial
    with pytest.raises(NothingToExport):
        await exported(bus, tmp_path / "never", Wish(until_ns=5))
    assert not (tmp_path / "never").exists()


TWO_NODES = (
    s.joined("a"), s.joined("b"), s.joined("c"),
    s.raised("here"), s.raised("there"), s.raised("gang"), s.raised("far"),
    s.bound("here", s.card("a")), s.bound("there", s.card("b")),
    s.bound("gang", s.card("a", 1), s.card("b", 1)), s.bound("far", s.card("c")),
    e.QuotaSet(project="p", memory_bytes=10 * s.CARD_BYTES), s.started("here"), s.started("there", "b"),
    s.started("far", "c"), s.exited("here"), s.released("here"),
)  # fmt: skip


async def test_what_is_around_a_card_folds_to_the_same_node_cards_and_demands(world, tmp_path):
    """The card of node a; a gang ties node b to it; node c and its demand stay out."""
    bus = await filled(world, *TWO_NODES)
    path = tmp_path / "x.journal"
    await exported(bus, path, Wish(cards=(s.card("a"),)))
    whole = state_of(await stream_of(bus))
    with Journal.open(path) as journal:
        assert "only what the node of GPU-a-0" in journal.header.partial
        part = fold_journal(journal)
    assert set(part.nodes) == {"a", "b"}
    assert set(part.demands) == {"here", "there", "gang"}
    for name in part.demands:
        assert part.demands[name].phase is whole.demands[name].phase
        assert part.demands[name].epoch == whole.demands[name].epoch
    for name in part.cards:
        assert part.cards[name] == whole.cards[name]
    assert set(part.bindings) == {b.epoch for b in whole.bindings.values() if b.demand != "far"}


async def test_a_demand_comes_with_its_nodes_and_nobody_elses(world, tmp_path):
    bus = await filled(world, *TWO_NODES)
    path = tmp_path / "x.journal"
    await exported(bus, path, Wish(demands=("there",)))
    with Journal.open(path) as journal:
        part = fold_journal(journal)
    assert set(part.nodes) == {"b"}
    assert set(part.demands) == {"there"}
    with pytest.raises(CannotResume, match="in one go"):
        await exported(bus, path, Wish(demands=("there",)))


async def test_heartbeats_around_a_drift_come_along(world, tmp_path):
    drift = e.DriftDetected(drift="leftover.a.1", kind=v.DriftKind.LEFTOVER, node="a", sentence="x")
    bus = await filled(world, s.joined("a"), s.joined("b"), drift)
    for number, node in enumerate("aab"):
        beat = e.Heartbeat(node=node, incarnation="i-1", number=number)
        body = encode(Draft(data=beat, id=f"h{number}", source="agent", time="2026-01-01T00:00:00Z"))
        await bus.append(f"rig.heartbeat.{node}", body, message_id=f"h{number}")
    path = tmp_path / "x.journal"
    out = await exported(bus, path)
    assert out.index.heartbeats == 2
    with Journal.open(path) as journal:
        beats = [m for batch in journal.heartbeats() for m in batch]
        assert [m.subject for m in beats] == ["rig.heartbeat.a"] * 2
        assert verify(journal).good


async def test_no_stream_no_journal(world, tmp_path):
    bus = await world.connect()
    with pytest.raises(NoLedger):
        await exported(bus, tmp_path / "x")


# -- import -------------------------------------------------------------------------------------


@pytest.fixture
def journal_of(tmp_path):
    opened = []

    def made(*steps):
        _, messages = told(*steps)
        opened.append(Journal.open(_other(tmp_path, messages)))
        return opened[-1], messages

    yield made
    for journal in opened:
        journal.close()


async def test_an_import_gives_every_event_its_sequence(world, journal_of):
    """Ids that were used twice, and messages that are no events, keep their places."""
    twice = s.Told(data=s.raised("x"), id="event-2")
    journal, messages = journal_of(*lives(4), twice, s.Raw(subject="rig.run.a", body=b""))
    bus = await world.connect()
    result = await import_journal(journal, bus)
    assert (result.events, result.resumed_at, result.last_seq) == (23, 0, 23)
    there = await stream_of(bus)
    assert [(m.seq, m.subject, m.body) for m in there] == [(m.seq, m.subject, m.body) for m in messages]
    assert state_of(there).chain == fold_journal(journal).chain
    assert (await import_journal(journal, bus)).events == 0


async def test_an_interrupted_import_goes_on(world, journal_of):
    journal, messages = journal_of(*lives(4))
    bus = await world.connect()
    await ensure_streams(bus)
    await bus.append_many([(m.subject, m.body, f"import-{m.seq}") for m in messages[:9]])
    result = await import_journal(journal, bus)
    assert (result.events, result.resumed_at) == (12, 9)
    assert [m.body for m in await stream_of(bus)] == [m.body for m in messages]


async def test_an_import_refuses_what_could_not_come_out_equal(world, journal_of, tmp_path):
    journal, messages = journal_of(*lives(4))
    bus = await filled(world, s.raised("mine"))
    with pytest.raises(CannotImport, match="empty server"):
        await import_journal(journal, bus)
    made = writer.JournalWriter.create(tmp_path / "part", writer.Header(created_ns=1, partial="some of it"))
    made.add(messages[3:])
    made.finish()
    with Journal.open(tmp_path / "part") as part, pytest.raises(CannotImport, match="partial"):
        await import_journal(part, bus)


async def test_an_import_stops_at_damage(world, journal_of, tmp_path):
    journal, _ = journal_of(*lives(4))
    third = journal.blocks[1]
    data = bytearray((tmp_path / "other.journal").read_bytes())
    data[third.end - 1] ^= 1
    (tmp_path / "other.journal").write_bytes(bytes(data))
    bus = await world.connect()
    with (
        Journal.open(tmp_path / "other.journal") as damaged,
        pytest.raises(CannotImport, match="events 11 to 20 are not in the journal"),
    ):
        await import_journal(damaged, bus)
    assert (await bus.stream(LEDGER_STREAM)).last_seq == 10

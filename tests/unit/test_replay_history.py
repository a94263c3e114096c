"""History: tenures and their causes are those that the story told, and the fold agrees."""

from __future__ import annotations

from rigbook_replay.history import About, History, Subject, tenure_rows
from rigbook_replay.retrace import Retrace
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.wire import decode

from tests.unit import ledger_story as s
from tests.unit.journal_story import SECOND_NS, told
from tests.unit.ledger_story import START_NS


def history(about, name, *steps):
    _, messages = told(*steps)
    found = History(Subject(about, name))
    retrace = Retrace(found)
    records = [decode(m.seq, m.subject, m.received_ns, m.body) for m in messages]
    for at in range(0, len(records), 3):  # in pieces, as blocks come
        retrace.take(records[at : at + 3])
    retrace.close()
    return found


def at_position(demand, position, *cards, **more):
    return lambda state: s.msgspec.structs.replace(s.bound(demand, *cards, **more), position=position)


ENGINES = ("process",)
STORY = (
    s.joined("a", engines=ENGINES), s.joined("b", engines=ENGINES),  # 1, 2
    s.raised("first"),
    at_position("first", 3, s.card("a")),  # 4
    s.raised("second"), s.raised("third"),
    e.Deferred(demand="second", project="p", reasons=(v.Reason(code=v.ReasonCode.EXCLUSIVE_HELD, node="a"),)),
    s.started("first"),  # 8
    s.withdrawn("first"), s.evicted("first"), s.exited("first", verdict=v.VerdictClass.STOPPED_BY_US),
    s.released("first", usage=v.Usage(seconds=8.0, memory_peak_bytes=5)),  # 12
    at_position("second", 12, s.card("a"), s.card("b")),  # 13
    e.GpuQuarantined(card=s.card("a"), by="eve", reason="fan"),
)  # fmt: skip


def test_a_card_was_held_by_two_one_after_the_other():
    found = history(About.GPU, s.card("a"), *STORY)
    one, two = found.tenures
    assert (one.demand, one.epoch, two.demand, two.epoch) == ("first", 4, "second", 13)
    assert one.bound_ns == START_NS + 4 * SECOND_NS
    assert one.released_ns == {"a": START_NS + 12 * SECOND_NS}
    assert one.over
    assert not two.over
    assert (one.verdict, one.usage_seconds, one.memory_peak_bytes) == (v.VerdictClass.STOPPED_BY_US, 8.0, 5)
    assert [r.kind for r in one.events] == [
        "started",
        "demand.withdrawn",
        "eviction.ordered",
        "exited",
        "released",
    ]
    assert [r.kind for r in found.events] == ["gpu.quarantined"]


def test_each_decision_says_what_else_would_have_fitted_and_who_waited():
    one, two = history(About.GPU, s.card("a"), *STORY).tenures
    assert (one.decision.position, one.decision.exact) == (3, True)
    assert one.decision.others == ("b",)
    assert one.decision.waiting == ()
    assert two.decision.waiting == ("third",)
    assert [reason.code for reason in two.waited_for] == [v.ReasonCode.EXCLUSIVE_HELD]


def test_a_decision_is_looked_at_where_it_was_taken_and_not_where_it_was_recorded():
    """Between the decision (3) and its record (5) a node left: it counted when it was decided."""
    steps = (s.joined("a", engines=ENGINES), s.joined("b", engines=ENGINES), s.raised("d"), e.NodeUnreachable(node="b", silent_seconds=9.0),
             at_position("d", 3, s.card("a")))  # fmt: skip
    (one,) = history(About.DEMAND, "d", *steps).tenures
    assert one.decision.exact
    assert one.decision.others == ("b",)


def test_the_rows_are_those_of_who(tmp_path):
    rows = tenure_rows(history(About.GPU, s.card("a"), *STORY))
    assert [(r.demand, r.card, r.epoch, bool(r.released), r.verdict) for r in rows] == [
        ("first", s.card("a"), 4, True, "stopped_by_us"), ("second", s.card("a"), 13, False, ""),
    ]  # fmt: skip
    at = START_NS + 11 * SECOND_NS
    assert [r.demand for r in tenure_rows(history(About.GPU, s.card("a"), *STORY), at_ns=at)] == ["first"]
    assert tenure_rows(history(About.GPU, s.card("a"), *STORY), at_ns=START_NS + 12 * SECOND_NS + 1) == []
    everything = tenure_rows(history(About.EVERYTHING, "", *STORY))
    assert [(r.demand, r.card) for r in everything] == [
        ("first", s.card("a")), ("second", s.card("a")), ("second", s.card("b"))
    ]  # fmt: skip


def test_by_demand_by_node_and_by_project():
    assert [one.epoch for one in history(About.DEMAND, "second", *STORY).tenures] == [13]
    assert [r.kind for r in history(About.DEMAND, "second", *STORY).events] == ["demand.raised", "deferred"]
    assert [one.epoch for one in history(About.NODE, "b", *STORY).tenures] == [13]
    assert [one.epoch for one in history(About.PROJECT, "p", *STORY).tenures] == [4, 13]
    assert history(About.PROJECT, "q", *STORY).tenures == []


def test_void_bindings_and_releases_by_others_leave_no_tenure():
    steps = (
        s.joined("a"), s.raised("d"), s.bound("d", s.card("a")), s.bound("d", s.card("a")),
        s.bound("nobody", s.card("a", 1)), lambda state: e.Released(demand="d", epoch=99, node="a"),
    )  # fmt: skip
    found = history(About.NODE, "a", *steps)
    assert [(one.demand, one.over) for one in found.tenures] == [("d", False)]


def test_a_drift_belongs_to_the_tenure_it_is_about():
    steps = (
        s.joined("a"), s.raised("d"), s.bound("d", s.card("a")), s.started("d"),
        lambda state: e.DriftDetected(drift="x", kind=v.DriftKind.OVERUSE, node="a", sentence="!", card=s.card("a"),
                                      demand="d", epoch=s.epoch_of(state, "d")),
        e.DriftCleared(drift="x", kind=v.DriftKind.OVERUSE, node="a"),
    )  # fmt: skip
    (one,) = history(About.GPU, s.card("a"), *steps).tenures
    assert [r.kind for r in one.events] == ["started", "drift.detected", "drift.cleared"]

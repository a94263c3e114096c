"""What should not stand on the log: each leaves one finding with its sequence, and changes nothing else.

CASES 3 (MiB where bytes are meant) belongs here as far as the fold goes: the number is kept as it is, and
it is the placer that refuses it, with a reason.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from rigbook_ledger.digest import digest
from rigbook_ledger.evolve import SKEW_SECONDS_MAX, evolve, fold
from rigbook_ledger.state import FINDINGS_MAX, Phase, State
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.catalogue import KINDS
from rigbook_schemas.wire import Malformed, Record, Unknown, decode, rfc3339

from tests.unit.ledger_story import (
    SECOND_NS,
    START_NS,
    Raw,
    Story,
    Told,
    bound,
    card,
    joined,
    raised,
    started,
)

SUBJECTS = sorted({kind.subject for kind in KINDS if kind.subject != "rig.heartbeat"})


def message(kind: str, data: dict[str, Any], **envelope: object) -> bytes:
    """What a program with a NATS connection and no types of ours would send."""
    told = {
        "specversion": "1.0", "id": "x", "source": "somebody", "type": f"dev.rigbook.{kind}.v1",
        "time": rfc3339(START_NS + SECOND_NS), "data": data,
    }  # fmt: skip
    return json.dumps(
        {name: value for name, value in (told | envelope).items() if value is not None}
    ).encode()


DEMAND: dict[str, Any] = {
    "demand": "d", "project": "p", "owner": {"name": "ada"},
    "resources": {"memory_bytes": 24 * v.GIB}, "components": [{"command": ["train"]}],
}  # fmt: skip


def content(state: State) -> tuple[object, ...]:
    """The state without what every record moves."""
    return (
        state.nodes, state.cards, state.demands, state.waiting, state.ended, state.bindings,
        state.projects, state.policy, state.drifts, state.unknown_open,
    )  # fmt: skip


@pytest.mark.parametrize("family", SUBJECTS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe\x00",
        b'{"specversion":"1.0"',
        b"[" * 50_000,
        b'{"id":' * 10_000,
        message("demand.raised", DEMAND, id=None),
        message("demand.raised", DEMAND, id=""),
        message("demand.raised", DEMAND, id="x" * 257),
        message("demand.raised", DEMAND, id=7),
        message("demand.raised", DEMAND, source=None),
        message("demand.raised", DEMAND, type=None),
        message("demand.raised", DEMAND, specversion="0.3"),
        message("demand.raised", DEMAND, id="\ud800"),
    ],
)
def test_a_malformed_envelope_on_any_subject(family: str, body: bytes) -> None:
    story = Story().given(joined("a"), raised("d"), bound("d", card("a")))
    before = content(story.state.fork())
    story.when(Raw(subject=f"{family}.a", body=body)).then(
        {"d": Phase.BOUND}, findings=["malformed_envelope"]
    )
    assert content(story.state) == before
    finding = story.findings[0]
    assert (finding.seq, finding.subject) == (story.state.position, f"{family}.a")
    assert finding.text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "data", [None, [], "text", {}, {"demand": 7, "node": [], "card": None, "project": {}}]
)
def test_malformed_data_of_any_kind(kind: Any, data: Any) -> None:
    story = Story().given(joined("a"))
    story.when(Raw(subject=f"{kind.subject}.a", body=message(kind.name, data))).then(
        findings=["malformed_data"]
    )
    assert kind.name in story.findings[0].text


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.name != "quota.set"], ids=lambda kind: kind.name
)
def test_a_kind_on_a_subject_of_another_family(kind: Any) -> None:
    other = "rig.verdict.a" if kind.subject != "rig.verdict" else "rig.demand.a"
    data = {"project": "p", "memory_bytes": 1}
    record = decode(1, other, START_NS, message("quota.set", data))
    assert isinstance(record.data, Malformed)
    assert record.data.code == "wrong_subject"
    assert "rig.own.policy" in record.data.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"resources": {"memory_bytes": 2**63}},
        {"resources": {"memory_bytes": 10**400}},
        {"resources": {"memory_bytes": -(2**63)}},
        {"resources": {"memory_bytes": 24.5}},
        {"resources": {"memory_bytes": "24GiB"}},
        {"resources": {"memory_bytes": None}},
        {"resources": {"memory_bytes": v.GIB, "count": 0}},
        {"resources": {"memory_bytes": v.GIB, "count": -1}},
        {"resources": {"memory_bytes": v.GIB, "count": 10**9}},
        {"resources": {"memory_bytes": v.GIB, "nodes": 0}},
        {"resources": {"memory_bytes": v.GIB, "mode": "sometimes"}},
        {"priority": 101},
        {"priority": -1},
        {"max_run_seconds": -1},
        {"max_run_seconds": 1e300},
        {"demand": "with.dots"},
        {"demand": "with space"},
        {"demand": ""},
        {"demand": "x" * 64},
        {"project": "*"},
        {"project": ">"},
        {"components": []},
        {"components": [{"name": "../../etc"}]},
        {"components": [{"ports": [{"port": 70_000}]}]},
        {"components": [{"memory_bytes": -1}]},
        {"owner": {"name": ""}},
        {"workload": "job"},
    ],
    ids=str,
)
def test_numbers_and_names_out_of_range(wrong: dict[str, Any]) -> None:
    story = Story().when(Raw(subject="rig.demand.p", body=message("demand.raised", DEMAND | wrong)))
    story.then(findings=["malformed_data"])
    assert not story.state.demands


@pytest.mark.parametrize("memory_bytes", [0, -1, 8192, 24 * 1024, 2**62])
def test_memory_in_the_wrong_unit_waits_for_the_placer_to_refuse_it(memory_bytes: int) -> None:
    """CASES 3."""
    body = message("demand.raised", DEMAND | {"resources": {"memory_bytes": memory_bytes}})
    story = Story().when(Raw(subject="rig.demand.p", body=body)).then({"d": Phase.WAITING})
    reason = v.Reason(code=v.ReasonCode.INVALID_UNIT, asked_bytes=memory_bytes)
    story.when(e.Refused(demand="d", project="p", reasons=(reason,))).then({"d": Phase.REFUSED})


@pytest.mark.parametrize("memory_bytes", [-1, 2**61])
def test_a_binding_of_an_impossible_size_is_malformed(memory_bytes: int) -> None:
    share = {
        "node": "a",
        "allotments": [{"card": card("a"), "memory_bytes": memory_bytes, "mode": "exclusive"}],
        "components": [],
    }
    data = {"demand": "d", "project": "p", "shares": [share], "policy": "pack"}
    story = Story().given(joined("a"), raised("d"))
    story.when(Raw(subject="rig.own.bind.a", body=message("bound", data))).then(
        {"d": Phase.WAITING}, findings=["malformed_data"], holders={card("a"): []}
    )


# -- kinds this version does not know -----------------------------------------------------------------

NEWER = ["dev.rigbook.lent.v1", "dev.rigbook.bound.v2", "dev.rigbook.bound.v" + "9" * 5000]
STRANGE = [
    "com.example.other",
    "dev.rigbook.bound.v0",
    "dev.rigbook.bound.v²",
    "dev.rigbook.bound",
    "bound.v1",
    "",
]


@pytest.mark.parametrize("type_", NEWER + STRANGE, ids=lambda text: text[:30])
def test_an_unknown_kind_is_skipped_and_counted(type_: str) -> None:
    story = Story().when(Raw(subject="rig.demand.p", body=message("", {}, type=type_)))
    story.then(findings=["unknown_kind"])
    assert story.state.unknown_count == 1
    assert not story.state.unknown_open


@pytest.mark.parametrize("subject", ["rig.own.bind.a", "rig.own.policy.x", "rig.evict.a", "rig.release.a"])
@pytest.mark.parametrize("type_", NEWER, ids=lambda text: text[:30])
def test_where_ownership_is_decided_an_unknown_kind_stays_open_until_accepted(
    subject: str, type_: str
) -> None:
    story = (
        Story().when(Raw(subject=subject, body=message("", {}, type=type_))).then(findings=["unknown_kind"])
    )
    seq = story.state.position
    assert story.state.unknown_open == {seq: type_[:200]}
    story.when(e.UnknownAccepted(seq=seq, by="grace")).then()
    assert not story.state.unknown_open
    story.when(e.UnknownAccepted(seq=seq)).then(findings=["nothing_to_accept"])


def test_what_is_not_of_ours_pauses_nobody() -> None:
    story = Story().when(Raw(subject="rig.evict.a", body=message("", {}, type="com.example.other")))
    story.then(findings=["unknown_kind"])
    assert not story.state.unknown_open


def test_the_open_ones_are_bounded() -> None:
    story = Story()
    for _ in range(FINDINGS_MAX + 2):
        story.tell(Raw(subject="rig.own.bind.a", body=message("", {}, type="dev.rigbook.lent.v1")))
    assert len(story.state.unknown_open) == FINDINGS_MAX
    assert story.state.unknown_count == FINDINGS_MAX + 2


# -- time ---------------------------------------------------------------------------------------------


def test_small_skew_is_no_finding() -> None:
    received = START_NS + SECOND_NS
    for seconds in (-SKEW_SECONDS_MAX, -1, 1, SKEW_SECONDS_MAX):
        Story().when(Told(data=raised(), time=rfc3339(received + seconds * SECOND_NS))).then(
            {"d": Phase.WAITING}
        )


@pytest.mark.parametrize(
    ("time", "code"),
    [
        ("2099-01-01T00:00:00Z", "clock_skew"),
        ("9999-12-31T23:59:59Z", "clock_skew"),
        ("1970-01-01T00:00:00Z", "clock_skew"),
        ("0001-01-01T00:00:00+14:00", "clock_skew"),
        (rfc3339(START_NS).replace("Z", "+05:00"), "clock_skew"),
        ("", "invalid_time"),
        ("yesterday", "invalid_time"),
        ("2026-09-21T14:13:20", "invalid_time"),
        ("2026-13-41T99:99:99Z", "invalid_time"),
        ("1790000000", "invalid_time"),
        ("x" * 100_000, "invalid_time"),
    ],
    ids=lambda text: text[:30],
)
def test_a_future_ancient_or_unreadable_time_is_a_finding_and_the_event_counts(time: str, code: str) -> None:
    story = Story().when(Told(data=raised(), time=time)).then({"d": Phase.WAITING}, findings=[code])
    assert story.state.demands["d"].raised_ns == START_NS + SECOND_NS
    assert len(story.findings[0].text) <= 500


# -- findings and position ------------------------------------------------------------------------------


def test_findings_are_remembered_up_to_a_bound_and_counted_all() -> None:
    story = Story()
    for _ in range(FINDINGS_MAX + 5):
        story.tell(Raw(subject="rig.demand.p", body=b"no"))
    assert story.state.finding_count == FINDINGS_MAX + 5
    assert [finding.seq for finding in story.state.findings] == list(range(6, FINDINGS_MAX + 6))
    assert len(story.state.touched.findings) == FINDINGS_MAX + 5


def test_a_heartbeat_does_not_belong_on_the_ledger_stream() -> None:
    beat = e.Heartbeat(node="a", incarnation="i", number=1)
    Story().when(beat).then(findings=["wrong_stream"])


def test_every_record_moves_the_position_and_the_chain() -> None:
    story = Story()
    chains = set()
    for step in (
        joined("a"),
        raised("d"),
        Raw(subject="rig.own.bind.a", body=b""),
        bound("d", card("a")),
        started(),
    ):
        record = story.tell(step)
        assert story.state.position == record.seq
        assert story.state.event_id == record.id
        assert story.state.received_ns == record.received_ns
        chains.add(story.state.chain)
    assert len(chains) == 5
    assert story.state.own_position == 4


def test_the_chain_tells_two_logs_apart() -> None:
    def chain_of(*ids: str) -> bytes:
        records = [Record(n, "rig.demand.p", 0, i, "", "", "", Unknown("x")) for n, i in enumerate(ids, 1)]
        return fold(State(), records).chain

    assert chain_of("a", "b") == chain_of("a", "b")
    assert len({chain_of("a", "b"), chain_of("b", "a"), chain_of("ab"), chain_of("a", "c")}) == 4


def test_records_at_or_below_the_position_are_ignored() -> None:
    story = Story().given(joined("a"), raised("d"))
    before = digest(story.state)
    for seq in (1, 2):
        record = decode(seq, "rig.demand.p", START_NS, message("demand.raised", DEMAND | {"demand": "late"}))
        story.state = evolve(story.state, record)
    assert digest(story.state) == before

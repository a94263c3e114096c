"""Envelopes: what goes out comes back, whatever comes in becomes a record, old versions go through upcasts."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings
from rigbook_schemas import events as e
from rigbook_schemas import upcasts, wire
from rigbook_schemas import values as v
from rigbook_schemas.catalogue import BY_KIND, KINDS, Author, Kind
from rigbook_schemas.wire import (
    BODY_BYTES_MAX,
    Draft,
    Malformed,
    Record,
    Unknown,
    decode,
    encode,
    instant,
    rfc3339,
)

from tests.unit.ledger_story import raised, subject_of

GOLDEN = Path(__file__).parent / "golden" / "events"
MESSAGES = [path.read_bytes() for path in sorted(GOLDEN.glob("*.json"))]
FAMILIES = sorted({kind.subject for kind in KINDS})


def draft(data: e.Payload, **more: object) -> Draft:
    return msgspec.structs.replace(
        Draft(data=data, id="i-1", source="test/1", time="2026-11-30T20:25:18Z"), **more
    )


# -- what goes out comes back -------------------------------------------------------------------------


def test_every_field_of_the_envelope_comes_back() -> None:
    told = draft(raised(), correlation="c", causation="cause", traceparent="00-aa-bb-01")
    record = decode(7, "rig.demand.p", 99, encode(told))
    assert record == Record(
        seq=7, subject="rig.demand.p", received_ns=99, id="i-1", kind="demand.raised", source="test/1",
        time="2026-11-30T20:25:18Z", data=told.data, correlation="c", causation="cause", traceparent="00-aa-bb-01",
    )  # fmt: skip


def test_the_demand_is_the_correlation_unless_another_is_given() -> None:
    assert decode(1, "rig.demand.p", 0, encode(draft(raised("d")))).correlation == "d"
    assert decode(1, "rig.node.a", 0, encode(draft(e.NodeRecovered(node="a")))).correlation == ""


def test_the_cloudevents_subject_is_what_the_event_is_about() -> None:
    assert json.loads(encode(draft(e.UnknownAccepted(seq=7))))["subject"] == "7"
    assert (
        json.loads(encode(draft(e.HealingSet(kind=v.DriftKind.LEFTOVER, on=True))))["subject"] == "leftover"
    )


def test_unknown_fields_are_ignored() -> None:
    body = json.loads(encode(draft(raised())))
    body["dataschema"] = "urn:x"
    body["data"]["invented_later"] = {"a": [1]}
    body["data"]["resources"]["invented_later"] = True
    assert decode(1, "rig.demand.p", 0, json.dumps(body).encode()).data == raised()


def test_an_event_larger_than_the_bus_takes_is_refused_before_it_is_sent() -> None:
    big = raised(components=(v.Component(env={"X": "x" * BODY_BYTES_MAX}),))
    with pytest.raises(ValueError, match=r"event_too_large: demand\.raised has"):
        encode(draft(big))


# -- whatever comes in becomes a record -----------------------------------------------------------------


def decoded(subject: str, body: bytes) -> Record:
    record = decode(1, subject, 0, body)
    assert (record.seq, record.subject, record.received_ns) == (1, subject, 0)
    assert (record.kind in BY_KIND) == isinstance(record.data, e.Payload)
    if isinstance(record.data, Malformed):
        assert record.data.code in {"malformed_envelope", "malformed_data", "wrong_subject"}
        assert record.data.text
    record.id.encode()  # the fold hashes it
    return record


subject_texts = st.one_of(st.sampled_from([f"{family}.a" for family in FAMILIES]), st.text(max_size=20))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(subject_texts, st.binary(max_size=300))
def test_any_bytes(subject: str, body: bytes) -> None:
    decoded(subject, body)


@settings(max_examples=200, deadline=None)
@given(subject_texts, json_values)
def test_any_json(subject: str, value: object) -> None:
    decoded(subject, json.dumps(value).encode())


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([f"{family}.a" for family in FAMILIES]),
    st.sampled_from([kind.type for kind in KINDS] + ["dev.rigbook.bound.v7", "dev.rigbook.bound.v-1", "x"])
    | st.text(),
    json_values,
    st.dictionaries(
        st.sampled_from(["id", "time", "specversion", "source", "traceparent"]), json_values, max_size=2
    ),
)
def test_any_data_in_a_sound_envelope(subject: str, type_: str, data: object, odd: dict[str, object]) -> None:
    body = {"specversion": "1.0", "id": "i", "source": "s", "type": type_, "data": data} | odd
    decoded(subject, json.dumps(body).encode())


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(MESSAGES), st.data())
def test_any_event_with_one_value_replaced(message: bytes, data: st.DataObject) -> None:
    body: Any = json.loads(message)
    place, key = body, "data"
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(json_values)
    decoded(
        f"{BY_KIND[body['type'].removeprefix('dev.rigbook.').removesuffix('.v1')].subject}.a",
        json.dumps(body).encode(),
    )


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(MESSAGES), st.integers(0, 5000), st.integers(0, 255))
def test_any_event_with_one_byte_flipped_or_cut_off(message: bytes, at: int, byte: int) -> None:
    at %= len(message)
    decoded("rig.demand.a", message[:at] + bytes([byte]) + message[at + 1 :])
    decoded("rig.demand.a", message[:at])


def test_depth_is_the_senders_problem() -> None:
    deep = (
        b'{"specversion":"1.0","id":"i","source":"s","type":"dev.rigbook.quota.set.v1","data":{"x":'
        + b"[" * 10**6
    )
    assert isinstance(decoded("rig.own.policy.a", deep).data, Malformed)


# -- old versions -----------------------------------------------------------------------------------------


def test_upcasts_are_applied_one_version_after_the_other() -> None:
    steps = {("k", 1): lambda d: d | {"one": True}, ("k", 2): lambda d: d | {"two": d["one"]}}
    assert upcasts.upcast("k", 1, 3, {}, steps) == {"one": True, "two": True}
    assert upcasts.upcast("k", 3, 3, {"as": "is"}, steps) == {"as": "is"}
    with pytest.raises(upcasts.NoUpcast, match="no upcast from k v3 to v4"):
        upcasts.upcast("k", 1, 4, {}, steps)


@pytest.fixture
def second_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `quota.set` were at version 2, and version 1 had told GiB."""
    kind = Kind("quota.set", e.QuotaSet, (Author.OPERATOR,), "rig.own.policy", "project", version=2)
    decoder = wire._payloads["dev.rigbook.quota.set.v1"][1]
    monkeypatch.delitem(wire._payloads, "dev.rigbook.quota.set.v1")
    monkeypatch.setitem(wire._payloads, kind.type, (kind, decoder))
    monkeypatch.setitem(BY_KIND, "quota.set", kind)
    monkeypatch.setitem(
        upcasts.UPCASTS,
        ("quota.set", 1),
        lambda d: {"project": d["project"], "memory_bytes": int(d["gib"]) * v.GIB},
    )


def old(version: int | str, data: object) -> Record:
    body = {
        "specversion": "1.0",
        "id": "i",
        "source": "s",
        "type": f"dev.rigbook.quota.set.v{version}",
        "data": data,
    }
    return decode(1, "rig.own.policy.p", 0, json.dumps(body).encode())


@pytest.mark.usefixtures("second_version")
def test_an_old_version_is_brought_to_the_current_one_when_read() -> None:
    record = old(1, {"project": "p", "gib": 3})
    assert record.data == e.QuotaSet(project="p", memory_bytes=3 * v.GIB)
    assert record.kind == "quota.set"


@pytest.mark.usefixtures("second_version")
@pytest.mark.parametrize(
    "data", [{"project": "p"}, {"project": "p", "gib": "x"}, {"project": 7, "gib": 1}, [], None, 7]
)
def test_bad_data_of_an_old_version_is_malformed(data: object) -> None:
    record = old(1, data)
    assert isinstance(record.data, Malformed)
    assert record.data.code == "malformed_data"


@pytest.mark.usefixtures("second_version")
@pytest.mark.parametrize("version", [0, 3, "", "x", "1.0", "-1", "9" * 5000])
def test_a_version_that_is_not_known_is_unknown(version: int | str) -> None:
    assert isinstance(old(version, {"project": "p", "gib": 3}).data, Unknown)


def test_every_step_in_upcasts_is_of_a_known_kind_and_below_its_version() -> None:
    for kind, version in upcasts.UPCASTS:
        assert version < BY_KIND[kind].version
    for kind in KINDS:
        for version in range(1, kind.version):
            assert (kind.name, version) in upcasts.UPCASTS


# -- instants ---------------------------------------------------------------------------------------------


@given(st.integers(0, 4_000_000_000 * 10**6))
def test_instants_go_there_and_back_in_microseconds(microseconds: int) -> None:
    text = rfc3339(microseconds * 1000)
    assert text.endswith("Z")
    told = instant(text)
    assert told is not None
    assert abs(told - microseconds * 1000) <= 1000


def test_instants_of_other_zones() -> None:
    assert instant("2026-11-30T20:00:00+02:00") == instant("2026-11-30T18:00:00Z")
    assert instant("2026-11-30T18:00:00Z") == int(datetime(2026, 11, 30, 18, tzinfo=UTC).timestamp()) * 10**9


@pytest.mark.parametrize(
    "text", ["", "now", "2026-11-30", "2026-11-30T20:00:00", "2026-02-30T00:00:00Z", "\ud800"]
)
def test_what_is_no_instant(text: str) -> None:
    assert instant(text) is None


# -- the catalogue ----------------------------------------------------------------------------------------


def test_kinds_are_named_once_and_their_payloads_know_what_they_are_about() -> None:
    assert len({kind.name for kind in KINDS}) == len({kind.payload for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        assert kind.about in kind.payload.__struct_fields__
        assert kind.authors
        assert kind.summary.endswith((".", "!"))
    told = {getattr(e, name) for name in e.__all__} - {e.Payload}
    assert {kind.payload for kind in KINDS} == told


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_every_golden_event_belongs_on_the_subject_of_its_family(path: Path) -> None:
    kind = BY_KIND[path.stem.rpartition(".v")[0]]
    record = decode(1, f"{kind.subject}.x", 0, path.read_bytes())
    assert isinstance(record.data, e.Payload)
    assert subject_of(record.data).startswith(kind.subject + ".")

"""What commands print. Goal: JSON is stable, tables have the columns people know, and nothing steers a terminal.

Method: the JSON of each row is compared with the list of fields recorded here: a field may be
added, none may go or change its name.
"""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from rigbook import tables
from rigbook.failures import Invalid, of_answer
from rigbook.narrative import event_line, holder_line, printable, short_card, standing, told
from rigbook.output import answer_json, full, json_line, print_failure
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.catalogue import KINDS
from rigbook_schemas.queries import (
    QUESTIONS,
    Answer,
    CardRow,
    DemandRow,
    DriftRow,
    EventRow,
    NodeRow,
    ProjectRow,
    TenureRow,
)
from rigbook_schemas.values import GIB

NOW_NS = 1_796_000_000 * 10**9
UUID = "GPU-5f0f2b52-2f0c-5c0a-9d0e-7a1f5d1c9a10"

FIELDS = {
    "demands": "demand name project owner contact purpose workload priority phase wanted raised since memory_bytes count "
    "mode epoch epoch_last nodes cards verdict sentence reasons requeues attempt withdrawn withdrawn_by drifts components",
    "bindings": "epoch demand project owner mode policy bound phase memory_bytes shares eviction",
    "cards": "uuid node index model memory_bytes status mode mode_pinned reserved_bytes free_bytes foreign_bytes holders "
    "epochs observed observed_age_seconds why simulated drifts",
    "nodes": "name status gpu_model gpu_count memory_bytes free_bytes bindings simulated labels engines driver_version "
    "cuda_version agent_version incarnation boot_id heard_seconds_ago skew_seconds why pressure components",
    "projects": "project used_bytes releasing_bytes quota_bytes over_bytes",
    "drifts": "drift seq detected cleared how",
    "findings": "stream seq code text subject event_id at",
    "events": "seq subject received kind id source demand node causation traceparent time data malformed omitted",
    "who": "card node index demand name project owner contact purpose mode memory_bytes epoch bound released "
    "desired_stopped verdict end forced",
}


def demand_row(**more: object) -> DemandRow:
    given: dict[str, object] = {
        "demand": "chat-1", "name": "chat", "project": "apps", "owner": "Ada", "contact": "a@b", "purpose": "talk",
        "workload": "service", "priority": 50, "phase": "running", "wanted": True, "raised": "2026-11-30T20:00:00Z",
        "since": "2026-11-30T20:00:00Z", "memory_bytes": 24 * GIB, "count": 2, "mode": "exclusive",
        "nodes": ("lab",), "cards": (UUID,),
    }  # fmt: skip
    return DemandRow(**(given | more))  # type: ignore[arg-type]


def text_of(renderable: object, width: int = 200) -> str:
    to = Console(file=io.StringIO(), width=width, color_system=None)
    to.print(renderable)
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


# -- JSON -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", FIELDS)
def test_the_fields_of_rows_only_grow(what: str) -> None:
    recorded = FIELDS[what].split()
    assert [field for field in QUESTIONS[what].__struct_fields__ if field in recorded] == recorded


def test_defaults_are_written_out() -> None:
    plain = full(demand_row())
    assert set(FIELDS["demands"].split()) <= set(plain)
    assert (plain["epoch"], plain["reasons"], plain["withdrawn"]) == (0, [], "")


def test_a_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    row = ProjectRow(project="p", used_bytes=1, releasing_bytes=0, quota_bytes=None, over_bytes=0)
    answer_json([row], Answer(position=7, position_time="t", caught_up=True))
    assert json.loads(capsys.readouterr().out) == {
        "items": [
            {"project": "p", "used_bytes": 1, "releasing_bytes": 0, "quota_bytes": None, "over_bytes": 0}
        ],
        "position": 7,
        "position_time": "t",
        "caught_up": True,
        "safe_mode": False,
        "notice": "",
    }


def test_json_in_a_pipe_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    json_line({"a": v.Mode.EXCLUSIVE, "b": (1, None), "c": v.Owner(name="x")})
    assert capsys.readouterr().out == '{"a":"exclusive","b":[1,null],"c":{"name":"x","contact":""}}\n'


def test_failures(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Invalid("it is wrong", why="one\ntwo", remedy="mend it", code="some_code")
    print_failure(failure)
    assert (
        capsys.readouterr().err == "error [some_code] it is wrong\n  why: one\n  why: two\n  next: mend it\n"
    )
    print_failure(failure, as_json=True)
    assert json.loads(capsys.readouterr().err) == {
        "error": {"code": "some_code", "what": "it is wrong", "why": "one\ntwo", "remedy": "mend it"}
    }
    assert of_answer("ambiguous", "x", "y").exit == 4


# -- tables -----------------------------------------------------------------------------------------


def test_nodes_have_the_columns_people_know() -> None:
    row = NodeRow(
        name="lab", status="ready", gpu_model="RTX 4090", gpu_count=4, memory_bytes=96 * GIB, free_bytes=72 * GIB,
        bindings=1, simulated=True, heard_seconds_ago=0.4,
    )  # fmt: skip
    head, line = text_of(tables.nodes([row])).splitlines()
    for column in ("NODE NAME", "GPU MODEL", "GPU COUNT", "VRAM FREE", "STATUS"):
        assert column in head
    assert "RTX 4090 (simulated)" in line
    assert "72.0 GiB" in line


def test_an_unknown_reading_is_not_zero() -> None:
    known = CardRow(uuid=UUID, node="lab", index=0, model="m", memory_bytes=24 * GIB, status="free", free_bytes=24 * GIB,
                    observed=v.CardObservation(uuid=UUID, memory_used_bytes=0))  # fmt: skip
    unknown = CardRow(uuid=UUID, node="lab", index=1, model="m", memory_bytes=24 * GIB, status="free",
                      observed=v.CardObservation(uuid=UUID, unknown="driver hangs"))  # fmt: skip
    _, first, second = text_of(tables.cards([known, unknown])).splitlines()
    assert "0.0 GiB" in first
    assert " ? " in second


def test_a_narrow_terminal_loses_no_words() -> None:
    reason = v.Reason(code=v.ReasonCode.VRAM_SHORT, node="lab", index=1, free_bytes=30 * GIB, total_bytes=48 * GIB,
                      bound_bytes=18 * GIB, asked_bytes=82 * GIB, short_bytes=52 * GIB)  # fmt: skip
    wide = text_of(tables.demands([demand_row(phase="waiting", reasons=(reason,))], NOW_NS), 400)
    assert "vram_short: GPU 1 of node lab has 30.0 GiB free of 48.0 GiB" in wide
    for width in (60, 80, 120):
        to = Console(file=io.StringIO(), width=width, color_system=None)
        table = tables.fitted(tables.demands([demand_row(phase="waiting", reasons=(reason,))], NOW_NS), to)
        narrow = text_of(table, width)
        assert "…" not in narrow
        letters = "".join(char for char in narrow if char.isalnum())
        for word in ("waiting", "exclusive", "5f0f2b52", "Ada"):
            assert sum(letters.count(char) for char in word) >= len(word)
        assert all(len(line) <= width for line in narrow.splitlines())
    assert "chat-1" in text_of(tables.fitted(tables.demands([demand_row()], NOW_NS), Console(width=100)), 100)


def test_models_without_the_makers_words() -> None:
    assert tables.model("NVIDIA GeForce RTX 4090", simulated=True) == "RTX 4090 (simulated)"
    assert tables.model("NVIDIA A100-SXM4-80GB", simulated=False) == "A100-SXM4-80GB"


def test_tables_of_everything() -> None:
    drift = e.DriftDetected(
        drift="x", kind=v.DriftKind.LEFTOVER, node="lab", sentence="it lives on", card=UUID
    )
    tenure = TenureRow(card=UUID, node="lab", index=0, demand="chat-1", name="chat", project="apps", owner="Ada", contact="",
                       purpose="", mode="exclusive", memory_bytes=24 * GIB, epoch=3, bound="2026-11-30T20:00:00Z")  # fmt: skip
    project = ProjectRow(project="p", used_bytes=2 * GIB, releasing_bytes=0, quota_bytes=GIB, over_bytes=GIB)
    assert "open (dry run)" in text_of(
        tables.drifts([DriftRow(drift=drift, seq=1, detected="2026-11-30T20:00:00Z")], NOW_NS)
    )
    assert "still" in text_of(tables.tenures([tenure]))
    assert "1.0 GiB" in text_of(tables.projects([project]))


def test_what_others_wrote_does_not_steer_the_terminal() -> None:
    evil = demand_row(owner="\x1b[2J\x1b]0;pwned\x07", sentence="a\rb", phase="ended")
    shown = text_of(tables.demands([evil], NOW_NS))
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert printable("plain – ü\n\t") == "plain – ü\n\t"


# -- words ------------------------------------------------------------------------------------------


def test_every_kind_has_a_line() -> None:
    for kind in KINDS:
        body = _least(kind.payload)
        line = told(body)
        assert line
        assert line != type(body).__name__, f"{kind.name} has no words in narrative.told"


def _least(payload: type[e.Payload]) -> e.Payload:
    share = v.NodeShare(
        node="a", allotments=(v.Allotment(card=UUID, memory_bytes=GIB, mode=v.Mode.EXCLUSIVE),), components=()
    )
    some: dict[str, object] = {
        "demand": "d", "project": "p", "owner": v.Owner(name="o"), "resources": v.Request(memory_bytes=GIB), "components": (),
        "shares": (share,), "policy": "pack", "reasons": (), "epoch": 1, "nodes": ("a",), "reason": v.EvictionReason.LEFTOVER,
        "node": "a", "verdict": v.VerdictClass.COMPLETED, "incarnation": "i", "number": 1, "silent_seconds": 3.0, "drift": "x",
        "kind": v.DriftKind.LEFTOVER, "sentence": "s", "memory_bytes": None, "card": UUID, "mode": None, "priority": 75,
        "share": 0.3, "on": True, "seq": 4, "generation": 1, "stream_created": "1", "how": "restored",
        "component": "main", "answer": v.CheckpointAnswer.SAVED,
        "spec": e.DemandRaised(demand="d", project="p", owner=v.Owner(name="o"), resources=v.Request(memory_bytes=GIB), components=()),
    }  # fmt: skip
    from msgspec import NODEFAULT
    from msgspec.structs import fields

    needed = [f.name for f in fields(payload) if f.default is NODEFAULT and f.default_factory is NODEFAULT]
    return payload(**{name: some[name] for name in needed})


def test_lines_of_events_that_cannot_be_read() -> None:
    row = EventRow(
        seq=1,
        subject="rig.demand.p",
        received="",
        kind="",
        id="",
        source="",
        malformed="malformed_envelope: x",
    )
    assert event_line(row) == "malformed: malformed_envelope: x"
    assert "does not know" in event_line(
        EventRow(seq=1, subject="", received="", kind="bound", id="", source="", data={})
    )


def test_standings() -> None:
    assert standing(demand_row()) == ""
    assert standing(demand_row(phase="waiting")) == "in the queue"
    assert "until they are seen free" in standing(demand_row(phase="releasing"))
    assert standing(demand_row(phase="ended", verdict="completed")) == "completed"
    assert standing(demand_row(drifts=("leftover.lab.3",))) == "drift: leftover.lab.3"


def test_holders_and_short_names() -> None:
    stopped = demand_row(
        wanted=False, phase="releasing", withdrawn="2026-11-30T20:00:00.123Z", drifts=("leftover.lab.3",)
    )
    line = holder_line(stopped)
    assert "still holds GPU-5f0f2b52" in line
    assert "desired state is stopped since 2026-11-30 20:00:00 UTC" in line
    assert "leftover.lab.3" in line
    assert short_card("GPU-a-0") == "GPU-a-0"
    assert short_card("MIG-5f0f2b52-2f0c") == "MIG-5f0f2b52"

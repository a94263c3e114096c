"""The commands on the journal of the demo: each of the documented ones, without any bus."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from rigbook.commands.app import app_for
from rigbook.exitcodes import Exit
from rigbook.failures import RigbookFailure
from typer.testing import CliRunner

DEMO = Path(__file__).parents[2] / "examples" / "demo.journal"


@pytest.fixture
def demo(tmp_path):
    """A copy: questions leave snapshots beside a journal."""
    return Path(shutil.copy(DEMO, tmp_path / "demo.journal"))


def rigbook(*words):
    """(exit code, output); a failure's own code when it is one of ours."""
    result = CliRunner().invoke(app_for([str(word) for word in words]), [str(word) for word in words])
    if isinstance(result.exception, RigbookFailure):
        return result.exception.exit, f"{result.exception.code}: {result.exception.what}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def told(*words):
    code, output = rigbook(*words)
    assert code == 0, output
    return output


def json_of(*words):
    return json.loads(told(*words, "--json"))


def test_verify_info_and_cat(demo):
    assert "whole and unchanged" in told("journal", "verify", demo)
    assert json_of("journal", "info", demo)["finished"]
    lines = told("journal", "cat", demo).splitlines()
    events = json_of("journal", "info", demo)["events"]
    assert [json.loads(line)["seq"] for line in lines] == list(range(1, events + 1))
    assert json.loads(lines[0])["event"]["type"] == "dev.rigbook.node.joined.v1"
    some = told("journal", "cat", demo, "--after", "3", "--until", "5").splitlines()
    assert [json.loads(line)["seq"] for line in some] == [4, 5]
    assert "heartbeat" in told("journal", "cat", demo, "--heartbeats").splitlines()[0]


def test_a_changed_file_is_not_fit_and_the_exit_code_says_so(demo):
    data = bytearray(demo.read_bytes())
    data[len(data) // 2] ^= 1
    demo.write_bytes(bytes(data))
    code, output = rigbook("journal", "verify", demo)
    assert code == Exit.UNHEALTHY
    assert "not fit as evidence" in output


def test_what_is_no_journal_is_said_plainly(tmp_path):
    (tmp_path / "x").write_text("hello")
    code, text = rigbook("ls", "--journal", tmp_path / "x")
    assert code == Exit.INVALID
    assert text.startswith("not_a_journal")
    assert rigbook("ls", "--journal", tmp_path / "gone")[0] == Exit.INVALID


def test_who_had_the_card_then(demo):
    rows = json_of("who", "demo/0", "--journal", demo)["items"]
    assert [row["name"] for row in rows] == ["chat", "next"]
    between = rows[0]["released"]
    then = json_of("who", "demo/0", "--at", rows[0]["bound"], "--journal", demo)["items"]
    assert [row["name"] for row in then] == ["chat"]
    later = json_of("who", "demo/0", "--at", between, "--journal", demo)["items"]
    assert "chat" not in [row["name"] for row in later]
    assert "chat" in told("who", "demo/0", "--journal", demo)


def test_the_lists_as_they_were_then(demo):
    bound = json_of("who", "demo/0", "--journal", demo)["items"][0]["bound"]
    now = json_of("ls", "--journal", demo)
    assert {row["name"]: row["phase"] for row in now["items"]}["next"] == "running"
    then = json_of("ls", "--at", bound, "--journal", demo)
    assert {row["name"]: row["phase"] for row in then["items"]}["chat"] == "bound"
    assert then["position"] < now["position"]
    cards = json_of("gpu", "list", "--at", bound, "--journal", demo)["items"]
    assert [row["status"] for row in cards if row["index"] == 0] == ["held"]
    assert [row["name"] for row in json_of("node", "list", "--journal", demo)["items"]] == ["demo"]
    assert "as of" in told("gpu", "list", "--journal", demo)
    code, text = rigbook("ls", "--at", "2001-01-01T00:00:00Z", "--journal", demo)
    assert (code, text.partition(":")[0]) == (Exit.NOT_FOUND, "before_record")


def test_history_with_causes(demo):
    story = json_of("history", "gpu", "demo/0", "--journal", demo)
    first, second = story["tenures"]
    assert (first["name"], second["name"]) == ("chat", "next")
    assert first["verdict"] == "stopped_by_us"
    assert second["waited_for"]
    assert first["decision"]["exact"]
    text = told("history", "demand", "next", "--journal", demo)
    assert "decided by placer/placer-1 with policy" in text
    assert "had to wait" in text
    for about, name in (("node", "demo"), ("project", "apps"), ("everything", "")):
        assert "epoch" in told("history", about, name, "--journal", demo)
    assert rigbook("history", "node", "nowhere", "--journal", demo)[0] == Exit.NOT_FOUND


def test_the_drift_is_proved_and_its_export_proves_it_again(demo, tmp_path):
    part = tmp_path / "drift.journal"
    proof = json_of("drift", "prove", "leftover", "--journal", demo)
    assert proof["agreed"]["desired"].startswith("running")
    assert proof["differed"]["desired"].startswith("stopped")
    assert [one["kind"] for one in proof["between"]][:2] == ["demand.withdrawn", "eviction.ordered"]
    text = told("drift", "prove", "leftover", "--journal", demo, "--export", part)
    assert "LAST AGREED" in text
    again = json_of("drift", "prove", "leftover", "--journal", part)
    assert {key: again[key] for key in ("agreed", "differed", "told", "sentence")} == {
        key: proof[key] for key in ("agreed", "differed", "told", "sentence")
    }
    assert rigbook("drift", "prove", "nothing", "--journal", demo)[0] == Exit.NOT_FOUND


def test_decisions_and_audit(demo):
    checked = json_of("replay", "check", "--journal", demo)
    assert checked["good"]
    assert checked["decisions"] == 5
    report = json_of("audit", "--journal", demo)
    assert report["good"], report["problems"]
    assert report["events"] == json_of("journal", "info", demo)["events"]
    assert report["gpu_hours"]["by_project"]["apps"]["bindings"] == 1
    assert "nothing contradicts anything" in told("audit", "--journal", demo)
    code, _ = rigbook("audit", "--range", "now", "--journal", demo)
    assert code == Exit.USAGE


def test_a_part_of_a_journal_is_exported_from_it(demo, tmp_path):
    part = tmp_path / "part.journal"
    told("journal", "export", part, "--demand", "chat", "--journal", demo)
    told("journal", "verify", part)
    kinds = {
        json.loads(line)["event"]["data"].get("demand", "")
        for line in told("journal", "cat", part).splitlines()
    }
    assert {name.split("-")[0] for name in kinds if name} == {"chat"}
    code, text = rigbook("journal", "export", part, "--demand", "next", "--journal", demo)
    assert (code, text.partition(":")[0]) == (Exit.CONFLICT, "cannot_resume")

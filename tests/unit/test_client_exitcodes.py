"""Exit codes and the first line of help. Goal: what scripts rely on does not move.

Method: the command line in this process, on nothing but its arguments and a port where nobody listens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rigbook import entry
from rigbook.exitcodes import Exit

NOBODY = "nats://127.0.0.1:9"


def rigbook(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rigbook", *words])
    return int(entry.main())


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RIGBOOK_NATS", "RIGBOOK_PROJECT", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RIGBOOK_DATA", str(tmp_path))


def test_the_codes_are_what_they_were() -> None:
    assert {code.name: int(code) for code in Exit} == {
        "OK": 0, "BUG": 1, "USAGE": 2, "NO_ANSWER": 3, "NOT_FOUND": 4, "INVALID": 5, "CONFLICT": 6, "REFUSED": 7,
        "TIMEOUT": 8, "UNHEALTHY": 9, "WAITS": 10, "NOT_INSTALLED": 11, "FAILED": 12, "INTERRUPTED": 130,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--version"], Exit.OK),
        (["--help"], Exit.OK),
        (["schema", "--kind", "bound"], Exit.OK),
        (["nonsense"], Exit.USAGE),
        (["ls", "--nonsense"], Exit.USAGE),
        (["submit", "--gpu", "24GB"], Exit.USAGE),
        (["submit", "--gpu", "24GB", "--project", "", "--", "x"], Exit.USAGE),
        (["submit", "--gpu", "24XB", "--project", "p", "--", "x"], Exit.INVALID),
        (["apply", "-f", "/no/such/file.yaml"], Exit.INVALID),
        (["who", "GPU-1", "--at", "sometime"], Exit.INVALID),
        (["events", "--kind", "nope"], Exit.INVALID),
        (["ls", "--phase", "nope"], Exit.INVALID),
        (["gpu", "mode", "GPU-1", "shared"], Exit.INVALID),
        (["quota", "set", "p", "lots"], Exit.INVALID),
        (["schema", "--kind", "nope"], Exit.INVALID),
        (["drift", "heal", "leftover"], Exit.USAGE),
        (["drift", "heal", "nope", "--on"], Exit.USAGE),
        (["up", "--gpus", "sim:1xNOPE"], Exit.INVALID),
        (["up", "--gpus", "whatever"], Exit.INVALID),
        (["up", "--port", "70000"], Exit.USAGE),
        (["agent", "--engine", "podman", "--gpus", "sim:1xT4"], Exit.INVALID),
        (["agent", "--labels", "x", "--gpus", "sim:1xT4"], Exit.INVALID),
    ],
)
def test_wrong_words(
    monkeypatch: pytest.MonkeyPatch, words: list[str], code: Exit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rigbook(monkeypatch, *words) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    if code is not Exit.OK:
        assert said.err


@pytest.mark.parametrize(
    "words", [["ls"], ["gpu", "list"], ["who", "GPU-1"], ["stop", "x"], ["drift", "list"], ["events"]]
)
def test_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rigbook.client.CONNECT_SECONDS", 0.3)
    assert rigbook(monkeypatch, *words, "--nats", NOBODY) == Exit.NO_ANSWER
    said = capsys.readouterr().err
    assert "error [bus_unavailable] no bus at nats://127.0.0.1:9" in said
    assert "next: start one with `rigbook up`" in said


def test_failures_are_json_when_json_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rigbook(monkeypatch, "who", "GPU-1", "--at", "sometime", "--json") == Exit.INVALID
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "invalid_time"


def test_doctor_without_a_bus_is_unhealthy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rigbook.client.CONNECT_SECONDS", 0.3)
    assert rigbook(monkeypatch, "doctor", "--nats", NOBODY, "--json") == Exit.UNHEALTHY
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is False
    assert told["checks"][0]["name"] == "bus"
    assert told["checks"][0]["remedy"]


def test_all_problems_of_a_file_on_the_screen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(
        "name: a b\nproject: p\nowner: o\nworkload: batch\nresources: {memory: 1XB}\ncommand: x\n"
    )
    assert rigbook(monkeypatch, "apply", "-f", str(file)) == Exit.INVALID
    said = capsys.readouterr().err
    assert f"{file}:1:7: name:" in said
    assert f"{file}:5:21: resources.memory:" in said


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "rigbook.commands.app", raising=False)
    assert rigbook(monkeypatch, "ls") == Exit.NOT_INSTALLED
    assert "pip install 'rigbook[cli]'" in capsys.readouterr().err

"""Demand files that are wrong. Goal: each says line, column, field and what was expected; nothing is taken silently.

Method: a right file with one thing wrong, and exactly one problem expected; then all at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigbook.demandfile import DemandFileError, Problem, read_files, read_text

if TYPE_CHECKING:
    from pathlib import Path

RIGHT = """\
name: chat
project: apps
owner: {name: Ada}
workload: service
resources:
  memory: 24GB
  count: 1
components:
  - name: server
    role: server
    command: serve
  - name: access
    role: access
    gpu: false
    command: proxy
priority: normal
"""
SINGLE = """\
name: train
project: nlp
owner: Ravi
workload: batch
resources: {memory: 24GB}
command: python train.py
"""


def problems(text: str) -> list[Problem]:
    with pytest.raises(DemandFileError) as caught:
        read_text(text, "f.yaml")
    assert caught.value.code == "invalid_demand_file"
    return caught.value.problems


# (what is replaced, by what, line, column, field, a part of the text, a part of what was expected)
WRONG = [
    ("name: chat\n", "", 1, 1, "name", "is missing", "a field 'name'"),
    ("project: apps\n", "", 1, 1, "project", "is missing", "a field 'project'"),
    ("owner: {name: Ada}\n", "", 1, 1, "owner", "is missing", "a field 'owner'"),
    ("workload: service\n", "", 1, 1, "workload", "is missing", "a field 'workload'"),
    ("  memory: 24GB\n", "", 6, 3, "resources.memory", "is missing", "a field 'memory'"),
    ("name: chat", "name: 7", 1, 7, "name", "'7' is a number in YAML", 'in quotes: "7"'),
    ("name: chat", "name: my app", 1, 7, "name", "'my app' cannot be a name", "letters, digits"),
    ("name: chat", f"name: {'x' * 49}", 1, 7, "name", "cannot be a name", "1 to 48"),
    ("name: chat", "name: _gang", 1, 7, "name", "cannot be a name", "beginning with a letter"),
    ("name: chat", "name:", 1, 1, "name", "has no value", "leave the line out"),
    ("name: chat", "name: ''", 1, 7, "name", "is empty", "a name"),
    ("name: chat", "name: [a]", 1, 7, "name", "is a list", "a single value"),
    ("owner: {name: Ada}", "owner: {nmae: Ada, name: B}", 3, 9, "owner.nmae", "unknown field", "did you mean 'name'"),
    ("owner: {name: Ada}", "owner: {contact: a@b}", 3, 8, "owner.name", "is missing", "a field 'name'"),
    ("workload: service", "workload: servce", 4, 11, "workload", "'servce'", "did you mean 'service'"),
    ("workload: service", "workload: job", 4, 11, "workload", "'job'", "service, batch"),
    ("  memory: 24GB", "  memory: 24XB", 6, 11, "resources.memory", "unknown unit 'XB'", "24GB"),
    ("  memory: 24GB", "  memory: 24576", 6, 11, "resources.memory", "no card has that", "24GB"),
    ("  memory: 24GB", "  memory: -1", 6, 11, "resources.memory", "negative", "24GB"),
    ("  memory: 24GB", "  memory: 8MiB", 6, 11, "resources.memory", "at least 16 MiB", "24GB"),
    ("  count: 1", "  count: 0", 7, 10, "resources.count", "0 is out of range", "1 to 1024"),
    ("  count: 1", "  count: two", 7, 10, "resources.count", "not a whole number", "1 to 1024"),
    ("  count: 1", "  count: 1.5", 7, 10, "resources.count", "not a whole number", "1 to 1024"),
    ("  count: 1", "  gpus: 1", 7, 3, "resources.gpus", "unknown field", "did you mean 'count'"),
    ("  count: 1", "  modle: A100", 7, 3, "resources.modle", "unknown field", "did you mean 'model'"),
    ("  count: 1", "  mode: shared", 7, 9, "resources.mode", "'shared'", "exclusive, memory-slice, time-slice"),
    ("  count: 1", "  node: my node", 7, 9, "resources.node", "cannot be a name", "letters"),
    ("  count: 1", "  require: [a]", 7, 12, "resources.require", "is a list", "NAME: value"),
    ("  count: 1", "  require: {a b: c}", 7, 13, "resources.require.a b", "cannot be a name", "a name like"),
    ("  count: 1", "  count: 1\n  count: 2", 8, 3, "resources.count", "a second time", "once"),
    ("resources:\n  memory: 24GB\n  count: 1\n", "resources: 24GB\n", 5, 12, "resources", "is a text", "fields: memory"),
    ("    role: server\n", "    role: sever\n", 10, 11, "components[0].role", "'sever'", "did you mean 'server'"),
    ("  - name: access", "  - name: server", 12, 11, "components[1].name", "a second component", "its own"),
    ("    command: serve\n", "    comand: serve\n    command: x\n", 11, 5, "components[0].comand", "unknown field", "did you mean 'command'"),
    ("    command: serve\n", "", 9, 5, "components[0].command", "nothing to run", "'command' or 'image'"),
    ("    command: serve\n", '    command: a "b\n', 11, 14, "components[0].command", "no closing quotation", "balanced"),
    ("    command: serve\n", "    command: a | b\n", 11, 14, "components[0].command", "'|' needs a shell", "sh, -c"),
    ("    command: serve\n", "    command: []\n", 11, 14, "components[0].command", "has 0 elements", "words"),
    ("    command: serve\n", "    command: ['']\n    image: a b\n", 12, 12, "components[0].image", "has a blank", "vllm"),
    ("    gpu: false", "    gpu: no", 14, 10, "components[1].gpu", "'no' is neither", "true or false"),
    ("    role: server", "    gpu: false", 9, 3, "components", "no component uses the GPU", "without"),
    ("priority: normal", "priority: 101", 16, 11, "priority", "'101' is no priority", "0 to 100"),
    ("priority: normal", "priority: urgent", 16, 11, "priority", "'urgent' is no priority", "low, normal, high"),
    ("priority: normal", "max_run_time: 90", 16, 15, "max_run_time", "has no unit", "90s, 15m"),
    ("priority: normal", "max_run_time: 0s", 16, 15, "max_run_time", "no time at all", "90s"),
    ("priority: normal", "timeout: 2h", 16, 1, "timeout", "unknown field", "did you mean 'max_run_time'"),
    ("priority: normal", "restart: sometimes", 16, 10, "restart", "'sometimes'", "never, on-failure, always"),
    ("priority: normal", "restart: {attempts: 2}", 16, 10, "restart.policy", "is missing", "a field 'policy'"),
    ("priority: normal", "restart: {policy: never, attempts: -1}", 16, 36, "restart.attempts", "out of range", "0 to"),
    ("priority: normal", "preemptible: perhaps", 16, 14, "preemptible", "neither", "true or false"),
    ("priority: normal", "command: x", 16, 10, "command", "stands beside 'components'", "inside"),
    ("priority: normal", "labels: {a: [b]}", 16, 13, "labels.a", "is a list", "a single value"),
    ("priority: normal", "labels: {a: }", 16, 12, "labels.a", "has no value", "''"),
    ("priority: normal", "purpose: 12", 16, 10, "purpose", "is a number in YAML", "in quotes"),
    ("priority: normal", "? [a]\n: b", 16, 3, "", "cannot be the name of a field", "a word"),
    ("priority: normal", "name: again", 16, 1, "name", "a second time", "once"),
    ("priority: normal", "<<: {purpose: x}", 16, 1, "<<", "unknown field '<<'", "one of"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line", "column", "field", "text", "expected"), WRONG)
def test_one_thing_wrong(
    old: str, new: str, line: int, column: int, field: str, text: str, expected: str
) -> None:
    assert RIGHT.count(old) == 1
    found = problems(RIGHT.replace(old, new))
    assert [(p.line, p.column, p.field) for p in found] == [(line, column, field)], [str(p) for p in found]
    assert text in found[0].text
    assert expected in found[0].expected


# what is appended to a single program, and the same
WRONG_PROGRAM = [
    ("env: {1A: b}", 7, 7, "env.1A", "cannot be a name", "a name like"),
    ("env: [a]", 7, 6, "env", "is a list", "NAME: value"),
    ("ports: 8000", 7, 8, "ports", "is a number", "a list of ports"),
    ("ports: [0]", 7, 9, "ports[0]", "out of range", "1 to 65535"),
    ("ports: ['8000:80']", 7, 9, "ports[0]", "not a whole number", "1 to 65535"),
    ("ports: [80, 80]", 7, 8, "ports", "named twice", "once"),
    ("ports: [{port: 80, hostport: 1}]", 7, 20, "ports[0].hostport", "unknown field", "did you mean 'host_port'"),
    ("mounts: [{source: a, target: /b}]", 7, 19, "mounts[0].source", "not absolute", "begins with /"),
    ("mounts: [/a]", 7, 10, "mounts[0]", "is a text", "fields: source, target"),
    ("probe: {path: /h}", 7, 8, "probe", "no port to ask", "a field 'port'"),
    ("probe: {port: 1, path: h}", 7, 24, "probe.path", "not absolute", "begins with /"),
    ("probe: {kind: exec}", 7, 8, "probe", "no command to run", "a field 'command'"),
    ("probe: {kind: ping, port: 1}", 7, 15, "probe.kind", "'ping'", "http, tcp, exec"),
    ("probe: {port: 1, every: 5}", 7, 25, "probe.every", "has no unit", "90s"),
    ("gpu: false", 7, 6, "gpu", "does not use the GPU", "at least one"),
    ("memory_limit: lots", 7, 15, "memory_limit", "is not memory", "16GiB"),
    ("shm: -1GB", 7, 6, "shm", "negative", "16GiB"),
    ("restart: always", 7, 10, "restart", "never be done", "on-failure"),
    ("stop_grace: soon", 7, 13, "stop_grace", "not a duration", "90s"),
    ("image: !!python/object:os.system x", 7, 8, "image", "has the tag", "without a tag"),
]  # fmt: skip


@pytest.mark.parametrize(("line_text", "line", "column", "field", "text", "expected"), WRONG_PROGRAM)
def test_one_thing_wrong_in_a_program(
    line_text: str, line: int, column: int, field: str, text: str, expected: str
) -> None:
    found = problems(f"{SINGLE}{line_text}\n")
    assert [(p.line, p.column, p.field) for p in found] == [(line, column, field)], [str(p) for p in found]
    assert text in found[0].text
    assert expected in found[0].expected


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("", 1, 1, "there is no demand"),
        ("---\n---\n", 1, 1, "there is no demand"),
        ("just words\n", 1, 1, "is a text"),
        ("- a\n", 1, 1, "is a list"),
        ("a: [1\nb: 2\n", 2, 2, "is not YAML"),
        ("a: b: c\n", 1, 5, "is not YAML"),
        ("name: x\n\tproject: y\n", 2, 1, "is not YAML"),
        ("name: *nobody\n", 1, 7, "is not YAML"),
        ("name: a\x07b\n", 1, 8, "a character that YAML does not allow"),
    ],
)
def test_what_is_no_demand_at_all(text: str, line: int, column: int, words: str) -> None:
    first = problems(text)[0]
    assert (first.line, first.column) == (line, column)
    assert words in first.text


def test_all_problems_of_all_files_at_once(tmp_path: Path) -> None:
    one, two, three = tmp_path / "1.yaml", tmp_path / "2.yaml", tmp_path / "none.yaml"
    one.write_text(RIGHT.replace("24GB", "24XB").replace("count: 1", "count: 0").replace("normal", "urgent"))
    two.write_text(f"{SINGLE}---\n{SINGLE.replace('batch', 'job').replace('train', 'b', 1)}")
    with pytest.raises(DemandFileError) as caught:
        read_files([one, two, three])
    assert [(p.file, p.line) for p in caught.value.problems] == [
        (str(one), 6), (str(one), 7), (str(one), 16), (str(two), 11), (str(three), 1),
    ]  # fmt: skip
    assert "no such file" in caught.value.why


def test_a_name_twice_in_a_project(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(f"{SINGLE}---\n{SINGLE}")
    with pytest.raises(DemandFileError, match="1 problem") as caught:
        read_files([file])
    assert "stands in" in caught.value.problems[0].text
    file.write_text(f"{SINGLE}---\n{SINGLE.replace('nlp', 'vision')}")
    assert len(read_files([file])) == 2


def test_files_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(b"name: a\nproject: \xff\xfe\n")
    with pytest.raises(DemandFileError) as caught:
        read_files([file])
    assert (caught.value.problems[0].line, caught.value.problems[0].column) == (2, 10)
    file.write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(DemandFileError, match="1 problem"):
        read_files([file])
    with pytest.raises(DemandFileError) as caught:
        read_files([tmp_path])
    assert "directory" in caught.value.why


def test_a_cycle_and_a_bomb_end() -> None:
    problems("name: &a [*a]\n")
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{c}: &{c} [{','.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefg", "bcdefgh", strict=False)
    )
    assert problems(bomb)
    problems("[" * 3000)


def places(text: str) -> list[tuple[int, int]]:
    try:
        read_text(text, "f.yaml")
    except DemandFileError as error:
        return [(p.line, p.column) for p in error.problems]
    return [(1, 1)]  # it was right


@given(st.text(max_size=200))
def test_any_text_is_a_demand_or_refused(text: str) -> None:
    assert all(line >= 1 and column >= 1 for line, column in places(text))
    assert places(text)


@given(st.lists(st.sampled_from(RIGHT.splitlines()), max_size=20))
def test_any_order_of_lines_is_a_demand_or_refused(lines: list[str]) -> None:
    assert places("\n".join(lines))

"""Demand files and their documents: texts in, demands out, or every problem of every file at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import yaml
from rigbook_schemas.events import DemandRaised

from rigbook.demandfile.demand import read_demand
from rigbook.demandfile.fields import Field, Reading
from rigbook.demandfile.problem import Problem
from rigbook.failures import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DemandFileError", "FiledDemand", "read_files", "read_text"]

FILE_BYTES_MAX: Final = 1024 * 1024
DOCUMENTS_MAX: Final = 1000


class DemandFileError(Invalid):
    """One or more demand files are wrong; `problems` has them all, in the order of the lines."""

    code = "invalid_demand_file"

    def __init__(self, problems: list[Problem]) -> None:
        many = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        super().__init__(
            f"{many} in {', '.join(dict.fromkeys(problem.file for problem in problems))}",
            why="\n".join(str(problem) for problem in problems),
            remedy="correct the file; nothing was sent",
        )
        self.problems = problems


class FiledDemand(msgspec.Struct, frozen=True):
    """A demand as a file has it. `spec.demand` is still the name: who sends it gives the id."""

    spec: DemandRaised
    file: str
    line: int


def read_files(paths: Iterable[str | Path]) -> list[FiledDemand]:
    """The demands of all files, in order. Raises DemandFileError with every problem of every file."""
    filed: list[FiledDemand] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            filed += read_text(_content(Path(path)), str(path))
        except DemandFileError as error:
            problems += error.problems
    seen: dict[tuple[str, str], FiledDemand] = {}
    for one in filed:
        other = seen.setdefault((one.spec.project, one.spec.name), one)
        if other is not one:
            text = f"{one.spec.name!r} stands in {other.file}, line {other.line}, already"
            problems.append(Problem(one.file, one.line, 1, "name", text, "each name once in a project"))
    if problems:
        raise DemandFileError(problems)
    return filed


def read_text(text: str, file: str) -> list[FiledDemand]:
    """The demands of one text. `file` is what problems call it. Raises DemandFileError."""
    reading = Reading(file)
    filed: list[FiledDemand] = []
    for node in _documents(text, file):
        before = len(reading.problems)
        spec = read_demand(reading, Field(node, ""))
        line = node.start_mark.line + 1
        if len(reading.problems) == before:
            problem = _last_check(spec, file, line)
            if problem is not None:
                reading.problems.append(problem)
        filed.append(FiledDemand(spec, file, line))
    if not filed:
        raise DemandFileError([Problem(file, 1, 1, "", "there is no demand in it", "a YAML document")])
    if reading.problems:
        raise DemandFileError(sorted(reading.problems))
    return filed


def _content(path: Path) -> str:
    name = str(path)
    try:
        with path.open("rb") as file:
            body = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DemandFileError([Problem(name, 1, 1, "", f"cannot be read: {reason}", "a YAML file")]) from None
    if len(body) > FILE_BYTES_MAX:
        raise DemandFileError([Problem(name, 1, 1, "", "is larger than 1 MiB", "a demand file")])
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        column = error.start - body.rfind(b"\n", 0, error.start)
        raise DemandFileError(
            [Problem(name, line, column, "", "is not UTF-8 text", "a YAML file in UTF-8")]
        ) from None


def _documents(text: str, file: str) -> list[yaml.Node]:
    nodes: list[yaml.Node] = []
    try:
        for node in yaml.compose_all(text, Loader=yaml.SafeLoader):
            # `---` before the first or after the last document makes an empty one
            if node.tag != "tag:yaml.org,2002:null" or node.value:
                nodes.append(node)
            if len(nodes) > DOCUMENTS_MAX:
                where = node.start_mark.line + 1
                raise DemandFileError(
                    [Problem(file, where, 1, "", f"more than {DOCUMENTS_MAX} documents", "fewer")]
                )
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise DemandFileError(
            [
                Problem(
                    file,
                    line,
                    column,
                    "",
                    f"a character that YAML does not allow: {error.character!r}",
                    "text",
                )
            ]
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise DemandFileError([Problem(file, line, column, "", f"is not YAML: {said}", "YAML")]) from None
    except RecursionError:
        raise DemandFileError([Problem(file, 1, 1, "", "is nested too deeply", "a demand file")]) from None
    return nodes


def _last_check(spec: DemandRaised, file: str, line: int) -> Problem | None:
    """What the wire demands and this reader did not: better said here than by the ledger, later."""
    try:
        msgspec.convert(msgspec.to_builtins(spec), DemandRaised)
    except msgspec.ValidationError as error:
        return Problem(
            file, line, 1, "", f"would not be a valid event: {error}", "see the schema of demand.raised"
        )
    return None

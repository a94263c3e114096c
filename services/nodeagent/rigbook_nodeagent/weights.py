"""Which model weights are on this node's disk, by the names that demands use.

Known layouts, below each folder that the options name:
- the Hugging Face hub: `models--Qwen--Qwen2.5-7B-Instruct` with a snapshot, in the folder, in `hub` or in `hf/hub`;
- ollama: `manifests/registry.ollama.ai/library/qwen2.5/7b`, in the folder, in `models` or in `ollama`;
- plain: `Qwen/Qwen2.5-7B-Instruct/config.json`, and `some-model.gguf`.

A name is not a promise that every file is whole: it makes a node preferred, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["weights_in"]

# Names go into every inventory event of the node.
NAMES_MAX: Final = 500
NAME_LENGTH_MAX: Final = 256
ENTRIES_MAX: Final = 5_000  # of one folder: a data set put there by mistake must not hold the agent up
PREFIX: Final = "models--"
REGISTRY: Final = "registry.ollama.ai"
ENDINGS: Final = (".safetensors", ".bin", ".gguf", ".pt")


def weights_in(folders: Iterable[Path]) -> tuple[str, ...]:
    """Sorted, each once. A folder that is not there or not readable has none."""
    found: set[str] = set()
    for folder in folders:
        for hub in (folder, folder / "hub", folder / "hf" / "hub"):
            found |= set(_hub(hub))
        for models in (folder, folder / "models", folder / "ollama", folder / "ollama" / "models"):
            found |= set(_ollama(models / "manifests" / REGISTRY))
        found |= set(_plain(folder))
    return tuple(sorted(name for name in found if 0 < len(name) <= NAME_LENGTH_MAX and name.isprintable()))[
        :NAMES_MAX
    ]


def _entries(folder: Path) -> list[Path]:
    try:
        found = []
        for entry in folder.iterdir():
            found.append(entry)
            if len(found) >= ENTRIES_MAX:
                break
    except OSError:
        return []
    return sorted(found)


def _hub(hub: Path) -> Iterator[str]:
    for entry in _entries(hub):
        if entry.name.startswith(PREFIX) and any(_entries(s) for s in _entries(entry / "snapshots")):
            yield entry.name.removeprefix(PREFIX).replace("--", "/")


def _ollama(registry: Path) -> Iterator[str]:
    for space in _entries(registry):
        for model in _entries(space):
            for tag in _entries(model):
                name = f"{model.name}:{tag.name}"
                yield name if space.name == "library" else f"{space.name}/{name}"


def _plain(folder: Path) -> Iterator[str]:
    for entry in _entries(folder):
        if entry.suffix == ".gguf" and entry.is_file():
            yield entry.name
        elif entry.is_dir() and not entry.name.startswith((".", PREFIX)):
            if _is_model(entry):
                yield entry.name
            else:
                yield from (
                    f"{entry.name}/{inner.name}"
                    for inner in _entries(entry)
                    if (inner.is_dir() and _is_model(inner)) or (inner.suffix == ".gguf" and inner.is_file())
                )


def _is_model(folder: Path) -> bool:
    names = [entry.name for entry in _entries(folder)]
    return "config.json" in names and any(name.endswith(ENDINGS) for name in names)

"""Planting a known mistake: one module of ours is compiled from changed source. Nothing is written to the disk."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.simulation.mutant_list import MUTANTS, Mutant

if TYPE_CHECKING:
    from types import CodeType, ModuleType

__all__ = ["Unplantable", "plant", "planted_source"]


class Unplantable(Exception):
    """The code has changed, and the mistake no longer fits into it: adapt the mutant."""


def planted_source(mutant: Mutant, module: str, source: str) -> str:
    """Raises Unplantable unless each piece of text stands in the module's source exactly once."""
    for name, old, new in mutant.changes:
        if name != module:
            continue
        if source.count(old) != 1:
            raise Unplantable(f"{mutant.name}: {old!r} stands {source.count(old)} times in {module}")
        source = source.replace(old, new)
    return source


class _Loader(importlib.machinery.SourceFileLoader):
    mutant: Mutant

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text(encoding="utf-8")
        return compile(planted_source(self.mutant, self.name, source), self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname not in self._mutant.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        loader = _Loader(fullname, spec.origin)
        loader.mutant = self._mutant
        spec.loader = loader
        return spec


def plant(name: str) -> None:
    """From here on its modules have the mistake. They must not have been imported before."""
    mutant = next(m for m in MUTANTS if m.name == name)
    assert mutant.modules.isdisjoint(sys.modules), f"one of {sorted(mutant.modules)} is imported already"
    sys.meta_path.insert(0, _Finder(mutant))

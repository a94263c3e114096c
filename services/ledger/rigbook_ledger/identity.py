"""Which fold made a snapshot: a hash over the code that folds.

A snapshot is a cache of a fold. One made by other code may differ from what this code would fold, and
two replicas would then disagree at the same position. A version number would be forgotten one day.
"""

from __future__ import annotations

import functools
import sys
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from rigbook_ledger import entries

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["fold_identity"]

_OURS: Final = "rigbook_"


@functools.cache
def fold_identity() -> str:
    """16 hexadecimal digits; another value for any change in `entries`, `evolve` or what they stand on."""
    hasher = blake2b(digest_size=8)
    for module in sorted(_modules(entries), key=lambda one: one.__name__):
        assert module.__file__ is not None, "the package's files are needed to tell folds apart"
        hasher.update(module.__name__.encode())
        hasher.update(Path(module.__file__).read_bytes())
    return hasher.hexdigest()


def _modules(root: ModuleType) -> Iterator[ModuleType]:
    """`root` and all modules of ours that it takes names from, however far."""
    seen: set[str] = set()
    todo = [root.__name__]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        module = sys.modules[name]
        yield module
        for value in vars(module).values():
            source = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(source, str) and source.startswith(_OURS):
                todo.append(source)

"""Old versions of a kind, brought to the current one when read. Pure; one step per version.

An upcast takes the `data` object as plain JSON values and gives the next version's. Golden files of
every version are kept for ever (`tests/unit/golden`), and each must still decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["UPCASTS", "NoUpcast", "upcast"]


class NoUpcast(LookupError):
    """A step from an old version to the next is missing: to this code the version is unknown."""


Data = dict[str, Any]

# (kind, version) -> what makes version + 1 of it. Nothing has changed its meaning yet.
UPCASTS: Final[dict[tuple[str, int], Callable[[Data], Data]]] = {}


def upcast(
    kind: str,
    version: int,
    current: int,
    data: Data,
    steps: Mapping[tuple[str, int], Callable[[Data], Data]] = UPCASTS,
) -> Data:
    """`data` of `version` brought to `current`. Raises NoUpcast, and whatever a step raises on bad data."""
    for v in range(version, current):
        step = steps.get((kind, v))
        if step is None:
            raise NoUpcast(f"no upcast from {kind} v{v} to v{v + 1}")
        data = step(data)
    return data

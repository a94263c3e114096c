"""Placeholders in a component: figures that are known only where it is launched. Pure.

A component with `fill` may write these into its command, its env's values and the sources of its mounts. The agent
fills them in at each launch, from the allotment and the cards it really got; `apply` and `plan` check the names.

| placeholder | what it becomes |
|---|---|
| `{memory_share}` | allotment / card, never so much that the driver's own part is missing; rounded down to 3 digits |
| `{memory_share_static}` | nine tenths of it: for engines whose flag leaves out activations |
| `{memory_bytes}` | the allotment on each card, bytes |
| `{memory_mib}` | the same in MiB |
| `{memory_rest_bytes}` | what of the smallest card is not allotted, bytes |
| `{gpu_count}` | cards on this node |
| `{port}` | the component's first port |
| `{weights_dir}` | the node's folder of model weights |
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from rigbook_schemas.values import Component

__all__ = ["NAMES", "WEIGHTS_DIR", "Fill", "filled", "memory_share", "problems", "rounded_down"]

NAMES: Final = (
    "memory_share",
    "memory_share_static",
    "memory_bytes",
    "memory_mib",
    "memory_rest_bytes",
    "gpu_count",
    "port",
    "weights_dir",
)
WEIGHTS_DIR: Final = "{weights_dir}"
# What a driver and a CUDA context take of a card before anybody can allocate: an engine that asks for all of the
# card fails at its start.
CARD_RESERVE_BYTES: Final = 640 * 1024**2
STATIC: Final = 0.9
_WORD: Final = re.compile(r"\{([a-z][a-z_]*)\}")  # JSON in an argument looks otherwise


class Fill(msgspec.Struct, frozen=True, kw_only=True):
    """What a launch knows."""

    memory_bytes: int  # allotted on each card
    card_memory_bytes: int  # of the smallest card; 0 = it has none
    gpu_count: int = 0
    weights_dir: str = ""

    def values(self, component: Component) -> dict[str, str]:
        """By name; what is not known here is left out."""
        known = {"gpu_count": str(self.gpu_count)}
        if self.card_memory_bytes > 0:
            share = memory_share(self.memory_bytes, self.card_memory_bytes)
            known |= {
                "memory_share": rounded_down(share),
                "memory_share_static": rounded_down(share * STATIC),
                "memory_bytes": str(self.memory_bytes),
                "memory_mib": str(self.memory_bytes // 1024**2),
                "memory_rest_bytes": str(max(0, self.card_memory_bytes - self.memory_bytes)),
            }
        if component.ports:
            known["port"] = str(component.ports[0].port)
        if self.weights_dir:
            known["weights_dir"] = self.weights_dir
        return known


def memory_share(memory_bytes: int, card_memory_bytes: int) -> float:
    """The part of a card that an engine may call its own."""
    most = max(card_memory_bytes - CARD_RESERVE_BYTES, card_memory_bytes // 2)
    return min(memory_bytes, most) / card_memory_bytes


def rounded_down(share: float) -> str:
    """Three digits, and never up: a rounding must not take from a neighbour."""
    return f"{int(share * 1000 + 1e-9) / 1000:.3f}"


def problems(component: Component) -> list[str]:
    """What is wrong with its placeholders, one sentence each; [] for one without `fill`."""
    if not component.fill:
        return []
    told: list[str] = []
    for where, text in _texts(component):
        for word in dict.fromkeys(_WORD.findall(text)):
            if word not in NAMES:
                told.append(f"{where}: {{{word}}} is no placeholder; known are {', '.join(NAMES)}")
            elif word == "port" and not component.ports:
                told.append(f"{where}: {{port}} and no port is named")
            elif word.startswith("memory") and not component.gpu:
                told.append(f"{where}: {{{word}}} in a component without a card")
    return told


def filled(component: Component, fill: Fill) -> Component:
    """The component as it is launched. Raises ValueError for a placeholder that nothing here can fill."""
    if not component.fill:
        return component
    values = fill.values(component)

    def put(text: str) -> str:
        def one(found: re.Match[str]) -> str:
            word = found[1]
            if word not in values:
                raise ValueError(
                    f"{{{word}}} cannot be filled in here"
                    if word in NAMES
                    else f"{{{word}}} is no placeholder"
                )
            return values[word]

        return _WORD.sub(one, text)

    return msgspec.structs.replace(
        component,
        command=tuple(put(word) for word in component.command),
        env={name: put(value) for name, value in component.env.items()},
        mounts=tuple(msgspec.structs.replace(mount, source=put(mount.source)) for mount in component.mounts),
    )


def _texts(component: Component) -> list[tuple[str, str]]:
    return [
        *((f"command[{at}]", word) for at, word in enumerate(component.command)),
        *((f"env.{name}", value) for name, value in component.env.items()),
        *((f"mounts[{at}].source", mount.source) for at, mount in enumerate(component.mounts)),
    ]

"""What a component will be run with, for people and for `--json`: the figures filled in where a card is known. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rigbook_schemas.placeholders import Fill, filled
from rigbook_schemas.sentences import gib
from rigbook_schemas.values import Component

if TYPE_CHECKING:
    from rigbook_schemas.values import Probe

__all__ = ["Contract", "contract_of"]

NODES_FOLDER = "<the node's weights folder>"


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """One component as it would be launched. `filled`: with the figures of the card it would get."""

    component: Component
    filled: bool
    memory: str  # the figures, in words

    def lines(self) -> list[tuple[str, str]]:
        """(what, value), for a table."""
        c = self.component
        told = [
            ("component", f"{c.name}: {f'container of {c.image}' if c.image else 'process'}"),
            ("command", " ".join(_quoted(word) for word in c.command) or "the image's own"),
            ("memory", self.memory),
            ("env", " ".join(f"{name}={value}" for name, value in c.env.items())),
            (
                "mounts",
                ", ".join(
                    f"{m.source} -> {m.target} ({'read only' if m.read_only else 'read and write'})"
                    for m in c.mounts
                ),
            ),
            (
                "ports",
                ", ".join(
                    f"{p.port} as {f'port {p.host_port}' if p.host_port else 'a port of the node choosing'} of the node"
                    for p in c.ports
                ),
            ),
            ("startup", _probe(c.startup or c.probe, startup=True)),
            ("health", _probe(c.probe, startup=False)),
            ("shm", gib(c.shm_bytes) if c.shm_bytes else ""),
            ("start", "alone on its cards, until it is ready or has failed" if c.starts_alone else ""),
            ("stop", f"SIGTERM, {c.stop_grace_seconds:g} s, SIGKILL"),
        ]
        return [(what, value) for what, value in told if value]


def contract_of(
    component: Component,
    *,
    memory_bytes: int,
    card_memory_bytes: int | None,
    gpu_count: int,
    assumed: bool = False,
) -> Contract:
    """`card_memory_bytes` is None when no card is known yet: the placeholders stay as they are. `assumed`: it is
    that of a card which might be given.
    """
    if not component.gpu:
        return Contract(component=component, filled=True, memory="no card")
    if card_memory_bytes is None:
        waits = "; {memory_...} is filled in on the node, from the card it gets" if component.fill else ""
        return Contract(component=component, filled=False, memory=f"{gib(memory_bytes)} on each card{waits}")
    fill = Fill(
        memory_bytes=memory_bytes,
        card_memory_bytes=card_memory_bytes,
        gpu_count=gpu_count,
        weights_dir=NODES_FOLDER,
    )
    values = fill.values(component)
    words = f"{gib(memory_bytes)} of {gib(card_memory_bytes)} on each card"
    used = [
        name for name in values if name.startswith("memory") and component.fill and _uses(component, name)
    ]
    if used:
        words += ": " + ", ".join(f"{name} {values[name]}" for name in used)
    if assumed:
        words = f"{words}, if it gets a card of that size; made anew on the node"
    return Contract(component=filled(component, fill), filled=not assumed, memory=words)


def _uses(component: Component, name: str) -> bool:
    word = f"{{{name}}}"
    return any(word in text for text in (*component.command, *component.env.values()))


def _probe(probe: Probe | None, *, startup: bool) -> str:
    if probe is None:
        return ""
    how = (
        f"`{' '.join(probe.command)}`"
        if probe.kind == "exec"
        else f"{'GET ' + probe.path if probe.kind == 'http' else 'connect'} on port {probe.port}"
    )
    if startup:
        return f"{how}, ready within {probe.startup_seconds_max / 60:.0f} min"
    return f"{how}, every {probe.every_seconds:g} s, {probe.failures_max} failures in a row"


def _quoted(word: str) -> str:
    return word if word and not any(char.isspace() or char in "\"'\\" for char in word) else repr(word)

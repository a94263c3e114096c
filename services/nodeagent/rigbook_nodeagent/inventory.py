"""The node's inventory as events: `node.joined` at the start of an agent, `node.changed` with what differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rigbook_schemas.events import NodeChanged, NodeJoined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_schemas.values import CardInventory

__all__ = ["changed", "differences"]


def differences(before: NodeJoined, after: NodeJoined) -> tuple[str, ...]:
    """What is not as it was, one sentence each; empty when nothing."""
    told = [
        f"{name}: {getattr(before, name) or 'none'} -> {getattr(after, name) or 'none'}"
        for name in (
            "boot_id",
            "driver_version",
            "cuda_version",
            "driver_ok",
            "driver_text",
            "engines",
            "labels",
            "memory_bytes",
            "weights",
            "container_gpus",
            "reboot_needed",
        )
        if getattr(before, name) != getattr(after, name)
    ]
    return (*told, *_card_differences(before.cards, after.cards))


def _card_differences(before: Sequence[CardInventory], after: Sequence[CardInventory]) -> list[str]:
    old, new = {c.uuid: c for c in before}, {c.uuid: c for c in after}
    told = [f"card {uuid} is gone" for uuid in old.keys() - new.keys()]
    told += [f"card {uuid} is new" for uuid in new.keys() - old.keys()]
    for uuid in old.keys() & new.keys():
        a, b = old[uuid], new[uuid]
        if a != b:
            fields = [f for f in a.__struct_fields__ if getattr(a, f) != getattr(b, f)]
            told.append(
                f"card {uuid}: " + ", ".join(f"{f} {getattr(a, f)!r} -> {getattr(b, f)!r}" for f in fields)
            )
    return sorted(told)


def changed(before: NodeJoined, after: NodeJoined) -> NodeChanged | None:
    """The event to publish, None when the inventory is what it was."""
    told = differences(before, after)
    if not told:
        return None
    fields = {f: getattr(after, f) for f in NodeJoined.__struct_fields__}
    return NodeChanged(**fields, changes=tuple(t[:300] for t in told[:32]))

"""Which cards a program sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["visible_environment"]


def visible_environment(cards: Sequence[str]) -> dict[str, str]:
    """What makes CUDA see just these cards (UUIDs), in this order; none at all when there is none.

    For plain processes. A container gets its cards by device request and sees plain indices instead.
    """
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(cards),
        "NVIDIA_VISIBLE_DEVICES": ",".join(cards) or "none",
    }

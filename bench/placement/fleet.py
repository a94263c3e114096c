"""The fleet as arrays: the placer's own (`rigbook_placer.packing.fleet`)."""

from rigbook_placer.packing.fleet import (
    CARD_MILLI,
    BoolArray,
    Fleet,
    FloatArray,
    IntArray,
    Node,
    Placement,
    Shape,
    fits,
    fleet_of,
)

__all__ = [
    "CARD_MILLI",
    "BoolArray",
    "Fleet",
    "FloatArray",
    "IntArray",
    "Node",
    "Placement",
    "Shape",
    "fits",
    "fleet_of",
]

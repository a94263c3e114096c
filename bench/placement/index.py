"""Scores kept per shape: the placer's own (`rigbook_placer.packing.scores`)."""

from rigbook_placer.packing.scores import SHAPES_MAX
from rigbook_placer.packing.scores import Scores as Index

__all__ = ["SHAPES_MAX", "Index"]

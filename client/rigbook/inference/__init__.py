"""Inference engines as data: what to run for `deploy --model M --engine E`, and how its memory flag is made."""

from __future__ import annotations

from rigbook.inference.contract import contract_of
from rigbook.inference.presets import Preset, known_engines, preset_of

__all__ = ["Preset", "contract_of", "known_engines", "preset_of"]

"""What is typically asked for: the placer's own (`rigbook_placer.packing.typical`)."""

from rigbook_placer.packing.typical import (
    TYPICAL_SHARE,
    FragmentTables,
    TypicalMix,
    fragment_naive,
    fragment_tables,
    fragments,
    typical_mix,
)

__all__ = [
    "TYPICAL_SHARE",
    "FragmentTables",
    "TypicalMix",
    "fragment_naive",
    "fragment_tables",
    "fragments",
    "typical_mix",
]

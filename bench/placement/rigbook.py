"""The policy `rigbook`: the placer's own (`rigbook_placer.packing.waste`)."""

from rigbook_placer.packing.waste import (
    CPU_STEP_MILLI,
    ROOM_STEP_MILLI,
    ROOM_STEPS,
    DemandClasses,
    Rigbook,
    Tuning,
    WasteTables,
    demand_classes,
    rigbook_policy,
    scarcity_prices,
    waste_tables,
)

__all__ = [
    "CPU_STEP_MILLI",
    "ROOM_STEPS",
    "ROOM_STEP_MILLI",
    "DemandClasses",
    "Rigbook",
    "Tuning",
    "WasteTables",
    "demand_classes",
    "rigbook_policy",
    "scarcity_prices",
    "waste_tables",
]

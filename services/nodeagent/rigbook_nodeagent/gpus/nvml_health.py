"""A card's health beside its memory: what changes seldom, and is asked for as seldom.

Each figure by itself: a card that has not got it, or a driver that does not tell, leaves it None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import pynvml

if TYPE_CHECKING:
    from collections.abc import Callable

    from rigbook_schemas.values import CardObservation

__all__ = ["Health", "health_of", "throttles_of"]

COMPUTE_MODES: Final = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")
# nvmlClocksEventReasons; idle and the clocks that somebody set are no trouble.
THROTTLES: Final = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
WATTS_MAX: Final = 10_000.0


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """As the fields of the same names in CardObservation."""

    power_limit_watts: float | None = None
    compute_mode: str = ""
    mig: bool | None = None
    ecc_corrected: int | None = None
    pages_retired: int | None = None
    rows_remapped: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None

    def put_into(self, observation: CardObservation) -> CardObservation:
        return msgspec.structs.replace(observation, **msgspec.structs.asdict(self))


def health_of(handle: Any, optional: Callable[..., Any], *, mode: int | None, mig: bool | None) -> Health:
    """`optional(function, *arguments)` is None for what cannot be told, and raises NVMLError of a lost card."""
    milliwatts = optional(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    watts = None if milliwatts is None else milliwatts / 1000
    rows = optional(pynvml.nvmlDeviceGetRemappedRows, handle)
    retired, pending = None, None
    if rows is None:  # Ampere and later remap rows; before it, pages were retired
        retired, pending = _retired(handle, optional)
    return Health(
        power_limit_watts=watts if watts is not None and 0 < watts <= WATTS_MAX else None,
        compute_mode=COMPUTE_MODES[mode] if mode is not None and 0 <= mode < len(COMPUTE_MODES) else "",
        mig=mig,
        ecc_corrected=optional(
            pynvml.nvmlDeviceGetTotalEccErrors,
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        pages_retired=retired,
        rows_remapped=None if rows is None else int(rows[0]) + int(rows[1]),
        remap_pending=pending if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
    )


def throttles_of(handle: Any, optional: Callable[..., Any]) -> tuple[str, ...] | None:
    """Why it runs slower than it could; the older name of the call answers where the newer is missing."""
    bits = optional(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if bits is None:
        bits = optional(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    if bits is None:
        return None
    return tuple(name for bit, name in THROTTLES.items() if int(bits) & bit)


def _retired(handle: Any, optional: Callable[..., Any]) -> tuple[int | None, bool | None]:
    counts = [
        optional(pynvml.nvmlDeviceGetRetiredPages, handle, cause)
        for cause in (
            pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
            pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
        )
    ]
    if any(pages is None for pages in counts):
        return None, None
    pending = optional(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    return sum(len(pages) for pages in counts), None if pending is None else bool(pending)

"""NVML calls that exist in several versions: the newest that this driver has, tried once per call kind.

pynvml raises `NVMLError_FunctionNotFound` for a symbol that the driver's library lacks. Everything here
returns plain numbers, in bytes; what the driver cannot tell is None.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pynvml

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Memory", "NvmlCalls", "ProcessMemory", "error_code", "is_error"]

NOT_AVAILABLE: Final = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
PID_MAX: Final = 4_194_304  # the kernel's limit; more is garbage from a struct of another version
PROCESSES_MAX: Final = 4096  # on one card; beyond it the driver tells nonsense

# The driver's library is older than the function or the struct that was asked for.
OLDER: Final = (
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_DEPRECATED,
)


class Memory(NamedTuple):
    """Bytes. `used` is as nvidia-smi prints it: without what the driver reserves, where it tells that."""

    total: int
    used: int


class ProcessMemory(NamedTuple):
    """`pid` is 0 when the driver's answer cannot be a process of ours (other pid namespace, garbage)."""

    pid: int
    memory_bytes: int | None


class _ProcessV1(ctypes.Structure):
    """nvmlProcessInfo_v1_t, of drivers before 455."""

    _fields_ = (("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong))


def error_code(error: pynvml.NVMLError) -> int:
    """NVML's number for it; pynvml sets it where type checkers do not look."""
    return int(getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN))


def is_error(error: pynvml.NVMLError, *codes: int) -> bool:
    """Is it one of these NVML errors?"""
    return error_code(error) in codes


class NvmlCalls:
    """Remembers which versions this driver lacks, so that each is tried once only."""

    def __init__(self) -> None:
        self._lacking: set[str] = set()

    def memory(self, handle: Any) -> Memory:
        """Raises NVMLError."""

        def newer() -> Memory:
            found = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            return Memory(int(found.total), int(found.used))

        def older() -> Memory:
            found = pynvml.nvmlDeviceGetMemoryInfo(handle)
            return Memory(int(found.total), int(found.used))

        found: Memory = self._newest(("memory_v2", newer), ("memory_v1", older))
        return found

    def processes(self, handle: Any) -> list[ProcessMemory]:
        """All processes with memory on the card, by compute, graphics and MPS together.

        Raises NVMLError when not even the compute processes can be told.
        """
        found: dict[int, int | None] = {}
        unplaced: list[ProcessMemory] = []
        for kind in ("Compute", "Graphics", "MPSCompute"):
            try:
                listed = self._listed(handle, kind)
            except pynvml.NVMLError:
                if kind == "Compute":
                    raise
                continue  # no graphics or MPS on this card or driver
            for pid, memory_bytes in listed:
                if not 0 < pid <= PID_MAX:
                    unplaced.append(ProcessMemory(0, memory_bytes))
                elif found.get(pid) is None or (memory_bytes or 0) > (found[pid] or 0):
                    found[pid] = memory_bytes  # in two lists it is the same memory
        return [ProcessMemory(pid, found[pid]) for pid in sorted(found)] + unplaced

    def _listed(self, handle: Any, kind: str) -> list[tuple[int, int | None]]:
        name = f"nvmlDeviceGet{kind}RunningProcesses"

        def versioned(version: str) -> Callable[[], list[tuple[int, int | None]]]:
            def call() -> list[tuple[int, int | None]]:
                function = getattr(pynvml, f"{name}_{version}", None)
                if function is None:
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
                return [(int(one.pid), one.usedGpuMemory) for one in function(handle)]

            return call

        found: list[tuple[int, int | None]] = self._newest(
            (f"{kind}_v3", versioned("v3")),
            (f"{kind}_v2", versioned("v2")),
            (f"{kind}_v1", lambda: _processes_v1(handle, name)),
        )
        return found

    def _newest(self, *versions: tuple[str, Callable[[], Any]]) -> Any:
        last: pynvml.NVMLError | None = None
        for name, call in versions:
            if name in self._lacking:
                continue
            try:
                return call()
            except pynvml.NVMLError as error:
                if not is_error(error, *OLDER):
                    raise
                self._lacking.add(name)
                last = error
        raise last or pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def _processes_v1(handle: Any, name: str) -> Sequence[tuple[int, int | None]]:
    """Pynvml has no call for the first version."""
    symbol = getattr(pynvml, "_nvmlGetFunctionPointer")  # noqa: B009 - its own way to reach one
    function = symbol(name)
    count = ctypes.c_uint(0)
    result = function(handle, ctypes.byref(count), None)
    if result == pynvml.NVML_SUCCESS:
        return []
    if result != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
        raise pynvml.NVMLError(result)
    count.value = min(count.value * 2 + 5, PROCESSES_MAX)  # some may start in between
    table = (_ProcessV1 * count.value)()
    result = function(handle, ctypes.byref(count), table)
    if result != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(result)
    return [
        (one.pid, None if one.usedGpuMemory == NOT_AVAILABLE else one.usedGpuMemory)
        for one in table[: count.value]
    ]

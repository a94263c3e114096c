"""Real cards, through NVML (`pynvml`).

A card is its UUID; its index is for display. Each card is read by itself: one that is lost, or that may
not be read, leaves the others as they are. A number that cannot be read is None, with the reason.

Unified memory (GB10, Jetson): NVML has no memory of the card's own to tell, so the capacity is a share of
the host's RAM, on devices known to be integrated only. The same answer from any other card is unknown, and
the card is not usable.

MIG: a card in MIG mode is listed as not usable, its instances as cards of their own with `parent` set, and
index 100 * (index of the card + 1) + number of the instance.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pynvml
from rigbook_schemas.values import CardInventory, CardObservation, ProcessObservation
from rigbook_schemas.wire import rfc3339

from rigbook_nodeagent.gpus import xids
from rigbook_nodeagent.gpus.nvml_calls import Memory, NvmlCalls, error_code, is_error
from rigbook_nodeagent.gpus.nvml_events import NvmlEvents
from rigbook_nodeagent.gpus.nvml_health import COMPUTE_MODES, Health, health_of, throttles_of
from rigbook_nodeagent.gpus.plausible import LastGood
from rigbook_nodeagent.gpus.protocol import DriverFacts, GpusError
from rigbook_nodeagent.gpus.visibility import visible_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["UNIFIED_MODELS", "NvmlGpus"]

UNIFIED_SHARE: Final = 0.75  # of the host's RAM: the system and the CPU side of the workload need the rest
# Devices without memory of their own, by a part of their name.
UNIFIED_MODELS: Final = ("GB10", "Orin", "Thor", "Xavier", "Tegra", "Jetson")
UNKNOWN_MODEL: Final = "unknown model"
PROHIBITED: Final = 2
MIG_INSTANCES_MAX: Final = 100
# A card of which Xid 79 was heard counts as lost for this long, whatever it still answers: what is read from it may
# be a shadow. A card that was reset answers again afterwards.
FALLEN_SECONDS: Final = 600.0

REMEDIES: Final = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not here: install the NVIDIA driver, or use "
    "simulated cards (--gpus sim:4xRTX4090)",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the kernel module is not loaded: `modprobe nvidia`, and see `dmesg`",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "Driver/library version mismatch: the driver was upgraded while "
    "the old one is loaded. Running work is left alone; drain the node and reboot it",
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not use /dev/nvidia*: run the agent as root or in their group",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the driver is too old for this agent",
}
# The driver as a whole has gone; one card's trouble is none of these.
DRIVER_GONE: Final = (
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
)
# The card answers this to everything until it is reset or the node reboots.
CARD_GONE: Final = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A card as last enumerated; without a handle when it is lost."""

    card: CardInventory
    handle: Any
    health: Health = Health()
    lost: bool = False
    minor: int | None = None  # of its device node; a MIG instance has others


class NvmlGpus:
    """NVML driver. `unified_share` of the host's RAM is what an integrated device may use.

    `host_memory_bytes` and `now_ns` (wall clock) are parameters for tests.
    """

    def __init__(
        self,
        *,
        unified_share: float = UNIFIED_SHARE,
        unified_models: Sequence[str] = UNIFIED_MODELS,
        host_memory_bytes: Callable[[], int | None] | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._unified_share = unified_share
        self._unified_models = tuple(name.lower() for name in unified_models)
        self._host_memory_bytes = host_memory_bytes or _host_memory_bytes
        self._now_ns = now_ns
        self._opened = False
        self._calls = NvmlCalls()
        self._last_good = LastGood()
        self._seen: dict[str, _Seen] = {}
        self._events = NvmlEvents(now_ns)
        self._reset_ns: dict[str, int] = {}  # when a lost card answered again

    @property
    def samples_rejected(self) -> int:
        return self._last_good.rejected

    def open(self) -> DriverFacts:
        try:
            if not self._opened:
                pynvml.nvmlInit()
                self._opened = True
                self._calls = NvmlCalls()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self._forget_driver()
            return DriverFacts(ok=False, text=_told(error))
        version = self._optional(pynvml.nvmlSystemGetDriverVersion)
        cuda = self._optional(pynvml.nvmlSystemGetCudaDriverVersion)
        return DriverFacts(
            driver_version=str(version or ""),
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            text="" if count else "the driver works and sees no card",
        )

    def inventory(self) -> Sequence[CardInventory]:
        seen: dict[str, _Seen] = {}
        failing: dict[int, str] = {}
        for index in range(self._count()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                identity = str(pynvml.nvmlDeviceGetUUID(handle))
            except pynvml.NVMLError as error:
                self._raise_if_gone(error)
                failing[index] = str(error)
                continue
            for one in self._card(handle, index, identity):
                seen[one.card.uuid] = one
        for one in self._lost(seen, failing):
            seen[one.card.uuid] = one
        self._seen = seen
        cards = [one.card for one in seen.values()]
        return sorted(cards, key=lambda card: (card.pci_bus_id or "~", card.parent != "", card.index))

    def sample(self) -> Sequence[CardObservation]:
        if not self._seen:
            self.inventory()
        elif not self._opened:
            raise GpusError("the driver is not open")
        self._events.hear()
        return [self._sampled(one) for one in self._seen.values()]

    def device_nodes(self) -> Mapping[str, str]:
        return {uuid: f"/dev/nvidia{one.minor}" for uuid, one in self._seen.items() if one.minor is not None}

    def limit_processes(self, cards: Mapping[str, bool]) -> Mapping[str, str]:
        failed: dict[str, str] = {}
        for uuid, alone in cards.items():
            one = self._seen.get(uuid)
            if one is None or one.handle is None or one.card.parent:
                failed[uuid] = (
                    "the card does not answer" if one is None or not one.card.parent else "a MIG instance"
                )
                continue
            wanted = pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS if alone else pynvml.NVML_COMPUTEMODE_DEFAULT
            try:
                if int(pynvml.nvmlDeviceGetComputeMode(one.handle)) != wanted:
                    pynvml.nvmlDeviceSetComputeMode(one.handle, wanted)
            except pynvml.NVMLError as error:
                self._raise_if_gone(error)
                failed[uuid] = f"compute mode: {error}"
        return failed

    def environment(self, cards: Sequence[str]) -> Mapping[str, str]:
        return visible_environment(cards)

    def close(self) -> None:
        self._forget_driver()

    # -- inventory --------------------------------------------------------------------------------

    def _count(self) -> int:
        if not self._opened:
            raise GpusError("the driver is not open")
        try:
            return int(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            self._raise_if_gone(error)
            raise GpusError(_told(error)) from error

    def _card(self, handle: Any, index: int, identity: str) -> list[_Seen]:
        """The card, and its MIG instances."""
        try:
            return self._described(handle, index, identity)
        except pynvml.NVMLError as error:  # it is lost, and can still be named
            known = self._seen.get(identity)
            card = known.card if known else _nameless(identity, index)
            return [_Seen(card=_unusable(card, str(error)), handle=None, lost=True)]

    def _described(self, handle: Any, index: int, identity: str) -> list[_Seen]:
        """Raises NVMLError when the card is lost."""
        model = str(self._optional(pynvml.nvmlDeviceGetName, handle) or UNKNOWN_MODEL)
        pci = self._optional(pynvml.nvmlDeviceGetPciInfo, handle)
        mode = self._optional(pynvml.nvmlDeviceGetComputeMode, handle)
        memory_bytes, why = self._capacity(handle, model)
        mig = self._optional(pynvml.nvmlDeviceGetMigMode, handle)
        instances = self._instances(handle, index, identity, pci) if mig and mig[0] else []
        self._events.listen(handle, identity)
        before = self._seen.get(identity)
        if before is not None and before.lost and before.handle is None:
            self._reset_ns[identity] = self._now_ns()  # it was gone, and answers again
        fallen = self._fell_off(identity)
        if fallen:
            why = f"Xid {xids.FALLEN_OFF}: {xids.meaning(xids.FALLEN_OFF)}: reset the card or reboot the node"
        elif mig and mig[0]:
            why = f"in MIG mode with {len(instances)} instances, which are cards of their own"
        elif mode == PROHIBITED:
            why = why or "compute mode is Prohibited: `nvidia-smi -c DEFAULT`"
        card = CardInventory(
            uuid=identity,
            index=index,
            model=model,
            memory_bytes=memory_bytes or 0,
            pci_bus_id=_bus_id(pci),
            unified_memory=self._is_unified(model),
            usable=not why,
            why=why,
            compute_mode=COMPUTE_MODES[mode] if mode in range(len(COMPUTE_MODES)) else "",
        )
        health = health_of(handle, self._optional, mode=mode, mig=None if mig is None else bool(mig[0]))
        minor = self._optional(pynvml.nvmlDeviceGetMinorNumber, handle)
        return [_Seen(card=card, handle=handle, health=health, lost=fallen, minor=minor), *instances]

    def _fell_off(self, identity: str) -> bool:
        """Was Xid 79 heard of it, and was it not seen lost and back since?"""
        heard_ns = self._events.last_ns(identity, xids.FALLEN_OFF)
        if not heard_ns or heard_ns <= self._reset_ns.get(identity, 0):
            return False
        return self._now_ns() - heard_ns < FALLEN_SECONDS * 1e9

    def _instances(self, handle: Any, index: int, parent: str, pci: Any) -> list[_Seen]:
        found: list[_Seen] = []
        count = self._optional(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
        for number in range(min(count, MIG_INSTANCES_MAX)):
            try:
                instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                identity = str(pynvml.nvmlDeviceGetUUID(instance))
            except pynvml.NVMLError as error:
                self._raise_if_gone(error)
                continue  # that place is empty
            model = str(self._optional(pynvml.nvmlDeviceGetName, instance) or "MIG instance")
            memory_bytes, why = self._capacity(instance, "")
            card = CardInventory(
                uuid=identity,
                index=100 * (index + 1) + number,
                model=model,
                memory_bytes=memory_bytes or 0,
                pci_bus_id=_bus_id(pci),
                usable=not why,
                why=why,
                parent=parent,
            )
            found.append(_Seen(card=card, handle=instance))
        return found

    def _capacity(self, handle: Any, model: str) -> tuple[int | None, str]:
        """(bytes, why it is not usable)."""
        if self._is_unified(model):
            host = self._host_memory_bytes()
            return (int(host * self._unified_share), "") if host else (None, "the host's RAM is unknown")
        try:
            memory = self._calls.memory(handle)
        except pynvml.NVMLError as error:
            self._raise_if_lost(error)
            return None, f"memory is unknown: {error}"
        return (
            (memory.total, "") if memory.total > 0 else (None, "memory is unknown: the driver shows 0 bytes")
        )

    def _lost(self, seen: Mapping[str, _Seen], failing: Mapping[int, str]) -> list[_Seen]:
        """Cards that cannot be named any more: by what is known of them from before, else by their index.

        A card that is not there and leaves no failing index was taken out, and is forgotten.
        """
        known = {
            one.card.index: one.card
            for identity, one in self._seen.items()
            if identity not in seen and not one.card.parent
        }
        lost = [
            _unusable(known.get(index) or _nameless(f"unreadable-{index}", index), why)
            for index, why in failing.items()
        ]
        parents = {card.uuid: card.why for card in lost}
        instances = [
            msgspec.structs.replace(one.card, usable=False, why=parents[one.card.parent])
            for one in self._seen.values()
            if one.card.parent in parents
        ]
        return [_Seen(card=card, handle=None, lost=True) for card in (*lost, *instances)]

    def _is_unified(self, model: str) -> bool:
        return any(name in model.lower() for name in self._unified_models)

    # -- samples ----------------------------------------------------------------------------------

    def _sampled(self, one: _Seen) -> CardObservation:
        as_of = rfc3339(self._now_ns())
        uuid = one.card.uuid
        heard = self._events.of(one.card.parent or uuid)
        if one.handle is None:
            return CardObservation(uuid=uuid, as_of=as_of, unknown=one.card.why, lost=one.lost, xids=heard)
        if self._fell_off(one.card.parent or uuid):
            why = f"Xid {xids.FALLEN_OFF}: {xids.meaning(xids.FALLEN_OFF)}"
            return CardObservation(uuid=uuid, as_of=as_of, unknown=why, lost=True, xids=heard)
        try:
            observation = self._read(one, as_of)
        except pynvml.NVMLError as error:
            self._raise_if_gone(error)
            gone = is_error(error, *CARD_GONE)
            return CardObservation(uuid=uuid, as_of=as_of, unknown=str(error), lost=gone, xids=heard)
        observation = msgspec.structs.replace(one.health.put_into(observation), xids=heard)
        return self._last_good.judged(observation, total_bytes=one.card.memory_bytes)

    def _read(self, one: _Seen, as_of: str) -> CardObservation:
        """Raises NVMLError when the card is lost."""
        handle, card, unknown = one.handle, one.card, ""
        processes: tuple[ProcessObservation, ...] | None = None
        try:
            processes = tuple(
                ProcessObservation(pid=found.pid, memory_bytes=found.memory_bytes)
                for found in self._calls.processes(handle)
            )
        except pynvml.NVMLError as error:
            self._raise_if_lost(error)
            unknown = f"processes: {error}"
        memory: Memory | None = None
        if card.unified_memory:
            memory = _sum_of(processes, card.memory_bytes)
            unknown = unknown or (
                "" if memory else "memory: shared with the host, and a process's part is unknown"
            )
        else:
            try:
                memory = self._calls.memory(handle)
            except pynvml.NVMLError as error:
                self._raise_if_lost(error)
                unknown = f"memory: {error}"
        utilisation = self._optional(pynvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = self._optional(pynvml.nvmlDeviceGetPowerUsage, handle)
        return CardObservation(
            uuid=card.uuid,
            memory_used_bytes=memory.used if memory else None,
            memory_total_bytes=memory.total if memory else None,
            utilisation_percent=None if utilisation is None else float(utilisation.gpu),
            temperature_celsius=self._number(
                pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
            ),
            power_watts=None if milliwatts is None else milliwatts / 1000,
            fan_percent=self._number(pynvml.nvmlDeviceGetFanSpeed, handle),
            ecc_uncorrected=self._optional(
                pynvml.nvmlDeviceGetTotalEccErrors,
                handle,
                pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                pynvml.NVML_VOLATILE_ECC,  # since the driver was loaded
            ),
            processes=processes,
            as_of=as_of,
            unknown=unknown,
            throttles=throttles_of(handle, self._optional),
        )

    def _number(self, function: Callable[..., Any], *arguments: Any) -> float | None:
        value = self._optional(function, *arguments)
        return None if value is None else float(value)

    def _optional(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the card may not have (a fan, ECC) or the driver not tell: None. A lost card raises."""
        try:
            return function(*arguments)
        except pynvml.NVMLError as error:
            self._raise_if_lost(error)
            return None
        except UnicodeDecodeError:
            return None  # a name that is not text

    def _raise_if_lost(self, error: pynvml.NVMLError) -> None:
        self._raise_if_gone(error)
        if is_error(error, *CARD_GONE):
            raise error

    def _raise_if_gone(self, error: pynvml.NVMLError) -> None:
        if is_error(error, *DRIVER_GONE):
            self._forget_driver()
            raise GpusError(_told(error)) from error

    def _forget_driver(self) -> None:
        """So that the next `open` starts from the beginning. Handles are worth nothing afterwards."""
        self._events.forget()
        if self._opened:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
        self._opened = False


def _nameless(identity: str, index: int) -> CardInventory:
    return CardInventory(uuid=identity, index=index, model=UNKNOWN_MODEL, memory_bytes=0)


def _unusable(card: CardInventory, why: str) -> CardInventory:
    return msgspec.structs.replace(card, usable=False, why=f"{why}: reset the card or reboot the node")


def _told(error: pynvml.NVMLError) -> str:
    remedy = REMEDIES.get(error_code(error))
    return f"{error}: {remedy}" if remedy else f"NVML: {error}"


def _bus_id(pci: Any) -> str:
    """`00000000:3B:00.0`; empty when the driver does not tell."""
    if pci is None:
        return ""
    raw = pci.busId
    return (raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)).upper()


def _sum_of(processes: Sequence[ProcessObservation] | None, total_bytes: int) -> Memory | None:
    """Use of a card that shares the host's RAM: what its processes hold."""
    if processes is None:
        return None
    held = [one.memory_bytes for one in processes]
    known = [one for one in held if one is not None]
    return Memory(total_bytes, sum(known)) if len(known) == len(held) else None


def _host_memory_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None

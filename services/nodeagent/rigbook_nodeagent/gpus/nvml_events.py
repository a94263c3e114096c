"""Xid errors as the driver reports them, through NVML's event set.

The set is asked without waiting whenever cards are sampled, in the same thread: an event waits in the driver until
then. A driver or card without events (older ones, some virtual ones) is heard of nothing, and all else goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import pynvml
from rigbook_schemas.values import Xid
from rigbook_schemas.wire import rfc3339

from rigbook_nodeagent.gpus import xids
from rigbook_nodeagent.gpus.nvml_calls import is_error

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NvmlEvents"]

WAIT_MILLISECONDS: Final = 1  # the least that every driver takes for "do not wait"
EVENTS_MAX: Final = 64  # in one go: a card in a storm of errors must not hold up the samples of the others
KEPT: Final = 8  # of each card
KEPT_SECONDS: Final = 3600.0


class NvmlEvents:
    """Hears the Xids of the cards it was told to `listen` to. `now_ns` is the wall clock."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._set: Any = None
        self._unsupported = False
        self._cards: dict[int, str] = {}  # by the handle's address: a lost card cannot be asked for its name
        self._heard: dict[str, deque[tuple[int, Xid]]] = {}

    def listen(self, handle: Any, uuid: str) -> None:
        """Once for each handle; again costs nothing."""
        address = _address(handle)
        if self._unsupported or self._cards.get(address) == uuid:
            return
        try:
            if self._set is None:
                self._set = pynvml.nvmlEventSetCreate()
            supported = int(pynvml.nvmlDeviceGetSupportedEventTypes(handle))
            wanted = supported & (
                pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
            )
            if wanted:
                pynvml.nvmlDeviceRegisterEvents(handle, wanted, self._set)
        except pynvml.NVMLError as error:
            if self._set is None or is_error(error, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                self._unsupported = True
            return
        self._cards[address] = uuid

    def hear(self) -> None:
        """Take what has happened since. Never raises, never waits."""
        for _ in range(EVENTS_MAX if self._set is not None and self._cards else 0):
            try:
                event = pynvml.nvmlEventSetWait(self._set, WAIT_MILLISECONDS)
            except (
                pynvml.NVMLError
            ):  # the time-out, which is the usual answer; or a lost card, told elsewhere
                return
            uuid = self._cards.get(_address(event.device), "")
            if uuid:
                self._take(uuid, int(event.eventType), int(event.eventData))

    def of(self, uuid: str) -> tuple[Xid, ...]:
        """The latest of a card, oldest first."""
        since = self._now_ns() - int(KEPT_SECONDS * 1e9)
        return tuple(xid for at_ns, xid in self._heard.get(uuid, ()) if at_ns >= since)

    def last_ns(self, uuid: str, code: int) -> int:
        """When this code was heard last of the card; 0 = not lately."""
        return max((at_ns for at_ns, xid in self._heard.get(uuid, ()) if xid.code == code), default=0)

    def forget(self) -> None:
        """The driver is closed: handles and the set are worth nothing. What was heard stays."""
        if self._set is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._set)
        self._set = None
        self._cards.clear()
        self._unsupported = False

    def _take(self, uuid: str, kind: int, number: int) -> None:
        code = number if kind == pynvml.nvmlEventTypeXidCriticalError else 48
        at_ns = self._now_ns()
        told = Xid(code=code, at=rfc3339(at_ns), meaning=xids.meaning(code))
        self._heard.setdefault(uuid, deque(maxlen=KEPT)).append((at_ns, told))


def _address(handle: Any) -> int:
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)

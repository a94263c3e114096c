"""All that is known of a workload's end, as `verdict` reads it. Values only; None is unknown, never 0."""

from __future__ import annotations

import msgspec
from rigbook_schemas.values import EvictionReason, Evidence

from rigbook_nodeagent.engines.protocol import Running

__all__ = [
    "CardTrouble",
    "CardUse",
    "Circumstances",
    "HostMemory",
    "LevelChange",
    "MemoryKill",
    "MemoryRefusal",
    "ProbeFailure",
]


class MemoryKill(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel killed a process for memory, in the kernel's own words."""

    at: float  # seconds on the monotonic clock
    everywhere: bool  # the machine had no memory left, whatever the cgroups say
    level: str = ""  # path of the cgroup whose limit was hit; "" for the machine
    victim_level: str = ""  # path of the cgroup the victim was in
    program: str = ""
    pid: int = 0
    text: str = ""


class CardTrouble(msgspec.Struct, frozen=True, kw_only=True):
    """A card reported an error."""

    at: float  # seconds on the monotonic clock
    card: str  # UUID, or the PCI bus id where nothing better is known
    code: str  # `xid 79`, `ecc`, `lost`
    text: str = ""


class LevelChange(msgspec.Struct, frozen=True, kw_only=True):
    """What happened at one memory boundary between the start of a component and its end."""

    component: str
    name: str
    path: str
    own: bool = False  # the innermost level of this component
    limit_bytes: int | None = None
    last_bytes: int | None = None
    peak_bytes: int | None = None
    # Since the start. `ooms` and `limit_hits` are of this level alone; `kills` and `ooms_below` with all below it.
    limit_hits: int | None = None
    ooms: int | None = None
    ooms_below: int | None = None
    kills: int | None = None
    gone: bool = False  # it was removed before the end could be read: figures are the last ones seen
    full_avg10: float | None = None

    @property
    def fullness(self) -> float:
        """Highest share of the limit that was seen; 0 without a limit."""
        if not self.limit_bytes:
            return 0.0
        return max(self.last_bytes or 0, self.peak_bytes or 0) / self.limit_bytes


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's memory at the end, and the least that was seen shortly before."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    least_available_bytes: int | None = None
    full_avg10: float | None = None
    kills: int | None = None  # of the whole machine, since the start


class ProbeFailure(msgspec.Struct, frozen=True, kw_only=True):
    """We ended it because a probe said no. Recorded before the first signal."""

    kind: str  # startup, liveness
    component: str
    failures: int
    seconds: float  # startup: since the start; liveness: since the last yes
    why: str = ""
    latency_seconds: float | None = None  # of the last answer


class MemoryRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """Words in a component's output that say: no memory on the card."""

    component: str
    text: str
    wanted_bytes: int | None = None
    measured: bool = False  # it was measuring the card in order to reserve a share of it


class CardUse(msgspec.Struct, frozen=True, kw_only=True):
    """One card of the binding, as last seen before the end."""

    card: str
    allotted_bytes: int = 0
    total_bytes: int | None = None
    own_bytes: int | None = None  # highest that this epoch held
    others_bytes: int | None = None  # highest that all others held
    starts_beside: tuple[str, ...] = ()  # demands of ours whose start on this card overlapped with ours


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """One end of one share."""

    ended: tuple[Running, ...] = ()
    refused: tuple[str, str] | None = None  # the engine did not start it: (code, text)
    stop_reason: EvictionReason | None = None
    stop_by: str = ""
    stop_seq: int = 0
    ended_before_stop: bool = False  # it was over before the stop order was known
    rebooted: bool = False  # the machine was started anew since the workload was
    probe: ProbeFailure | None = None
    levels: tuple[LevelChange, ...] = ()  # of each component, from its own level outwards
    host: HostMemory = HostMemory()
    kills: tuple[MemoryKill, ...] = ()  # whose victim was ours
    troubles: tuple[CardTrouble, ...] = ()  # on our cards
    vanished: tuple[str, ...] = ()  # components that ran and are not to be found any more
    watched: bool = True  # an agent was there when it ended
    refusal: MemoryRefusal | None = None
    cards: tuple[CardUse, ...] = ()
    attempt: int = 1  # how often it was started, this one included
    story: tuple[Evidence, ...] = ()  # what was noted while it ran, oldest first

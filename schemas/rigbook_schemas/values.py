"""Values: the nouns that events are made of. Frozen, keyword-only, validated when decoded.

Units: memory in bytes, durations in seconds, instants as RFC 3339 text (`time` is data; order is the
stream sequence). A card is named by its NVML UUID; its index is for display.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Final, dataclass_transform

import msgspec
from msgspec import Meta

__all__ = [
    "GIB",
    "MEMORY_BYTES_MAX",
    "MEMORY_BYTES_MIN",
    "PRIORITIES",
    "Allotment",
    "Boundary",
    "CardBaseline",
    "CardInventory",
    "CardObservation",
    "CardSeen",
    "Checkpoint",
    "CheckpointAnswer",
    "Component",
    "ComponentEnd",
    "ComponentObservation",
    "DriftKind",
    "Engine",
    "EvictionReason",
    "Evidence",
    "FrozenType",
    "Horizon",
    "Mode",
    "NodeShare",
    "Owner",
    "Pressure",
    "Probe",
    "ProcessObservation",
    "Reason",
    "ReasonCode",
    "Request",
    "Restart",
    "Starting",
    "StopScope",
    "Unreleased",
    "Usage",
    "Value",
    "VerdictClass",
    "Window",
    "Workload",
    "Xid",
]

MIB: Final = 1024**2
GIB: Final = 1024**3
# Below this a "memory in bytes" is almost surely MiB or GiB written without the unit (Olares #3588).
MEMORY_BYTES_MIN: Final = 16 * MIB
# No card comes near this; above it a number is a unit mistake the other way round.
MEMORY_BYTES_MAX: Final = 16 * 1024 * GIB

# Priority is a number from 0 to 100; these are the names people use for it.
PRIORITIES: Final = {"low": 25, "normal": 50, "high": 75}

# What may stand as one token of a NATS subject, and in a file name, and in a label.
Token = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]
Identity = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
Text = Annotated[str, Meta(max_length=2000)]
Bytes = Annotated[int, Meta(ge=0, le=2**60)]
Seconds = Annotated[float, Meta(ge=0, le=10 * 366 * 86400)]
Sequence = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Small = Annotated[int, Meta(ge=0, le=100_000)]
Labels = dict[str, str]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class FrozenType(msgspec.StructMeta):
    """Structs of this type are frozen and keyword-only, and so is every subclass.

    msgspec hands `frozen` down to subclasses but not `kw_only`, and type checkers see neither. Frozen values
    hold no cycles: the garbage collector need not walk them, which halves the time of decoding many.
    """

    def __new__(
        cls, name: str, bases: tuple[type, ...], members: dict[str, Any], **config: Any
    ) -> FrozenType:
        config.setdefault("frozen", True)
        config.setdefault("kw_only", True)
        config.setdefault("gc", False)
        return super().__new__(cls, name, bases, members, **config)


class Value(msgspec.Struct, metaclass=FrozenType, omit_defaults=True):
    """Root of all values and payloads. Unknown fields are ignored: a newer author may add some."""


class Mode(enum.StrEnum):
    """How a card is shared. A card serves one mode at a time."""

    EXCLUSIVE = "exclusive"  # one binding has the card to itself
    MEMORY_SLICE = "memory-slice"  # several bindings, each with its own part of the memory
    TIME_SLICE = "time-slice"  # several bindings take turns; each sees the whole card


class Workload(enum.StrEnum):
    SERVICE = "service"  # runs until somebody stops it
    BATCH = "batch"  # runs until it is done


class Engine(enum.StrEnum):
    """Who runs the components on the node."""

    PROCESS = "process"
    DOCKER = "docker"


class Role(enum.StrEnum):
    """Part a component plays in a shared app: stopping the access point must not leave the server."""

    MAIN = "main"
    SERVER = "server"
    ACCESS = "access"


class Owner(Value):
    """Who answers for the demand."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    contact: Annotated[str, Meta(max_length=256)] = ""  # how to reach them: mail, chat handle


class Request(Value):
    """What is asked of the cards: `count` cards on one node, `memory_bytes` on each."""

    memory_bytes: Annotated[int, Meta(ge=-(2**62), le=2**62)]  # range judged by `feasible`, with a reason
    count: Annotated[int, Meta(ge=1, le=1024)] = 1
    nodes: Annotated[int, Meta(ge=1, le=1024)] = 1  # gang: this many nodes, `count` cards on each
    mode: Mode = Mode.EXCLUSIVE
    model: Annotated[str, Meta(max_length=128)] = ""  # substring of the card's model, case-insensitive
    node: str = ""  # one node by name
    require: Labels = {}
    prefer: Labels = {}
    headroom: Annotated[float, Meta(ge=1, le=4)] = (
        1.0  # what is bound on each card is `memory_bytes` times this
    )
    weights: Annotated[str, Meta(max_length=256)] = (
        ""  # model weights it loads: a node that has them is preferred
    )
    weights_bytes: Bytes = 0  # their size, for the expected time to fetch them; 0 = about `memory_bytes`


class Window(Value):
    """A span of the day in which a demand may run. Over midnight when `end` is not after `start`."""

    start: Annotated[str, Meta(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$")]
    end: Annotated[str, Meta(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$")]
    days: tuple[
        Annotated[int, Meta(ge=1, le=7)], ...
    ] = ()  # of the start: 1 = Monday ... 7; empty = every day
    utc_offset_minutes: Annotated[int, Meta(ge=-840, le=840)] = 0  # of the clock that the times are of


class Probe(Value):
    """How to tell that a component is ready, and then that it still lives.

    Until the first yes it is a *startup* probe: failures count for nothing before `startup_seconds_max`.
    After it, a *liveness* probe: `failures_max` in a row make it unready.
    """

    kind: Annotated[str, Meta(pattern=r"^(http|tcp|exec)$")] = "http"
    path: str = "/"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    command: tuple[str, ...] = ()
    every_seconds: Seconds = 10.0
    timeout_seconds: Seconds = 5.0
    startup_seconds_max: Seconds = 600.0
    failures_max: Annotated[int, Meta(ge=1, le=1000)] = 3
    # `restart`: a failed probe ends the component where the demand's restart policy starts it again (else it
    # is only told). `report`: it is only told. `stop`: it ends the workload in any case.
    on_failure: Annotated[str, Meta(pattern=r"^(restart|report|stop)$")] = "restart"


class Checkpoint(Value):
    """How a component is asked to save its work before a preemption or a drain, and how it answers.

    `exit`: it saves and ends. `file`: a file at `path` (as the component sees it), newer than the signal, says
    that the signal was heard, and `done` as its first word that all is saved. `http`: GET `path` on `port` says
    202 while it saves and 200 when all is saved.
    """

    signal: Annotated[str, Meta(pattern=r"^SIG[A-Z0-9+-]{2,12}$")] = "SIGTERM"
    acknowledge: Annotated[str, Meta(pattern=r"^(exit|file|http)$")] = "exit"
    path: str = ""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    acknowledge_seconds_max: Seconds = 30.0  # from the signal to the first answer
    save_seconds_max: Seconds = 600.0  # from the first answer to the end of saving


class Port(Value):
    """A port of the component, published on the node."""

    port: Annotated[int, Meta(ge=1, le=65535)]
    host_port: Annotated[int, Meta(ge=0, le=65535)] = 0  # 0 = the node chooses


class Mount(Value):
    source: str
    target: str
    read_only: bool = True


class Component(Value):
    """One program of a workload. All of them start together and are stopped together."""

    name: Token = "main"
    role: Role = Role.MAIN
    command: tuple[str, ...] = ()
    image: str = ""  # with an image the Docker engine runs it, without one the process engine
    env: dict[str, str] = {}
    ports: tuple[Port, ...] = ()
    mounts: tuple[Mount, ...] = ()
    probe: Probe | None = None
    gpu: bool = True  # False: a CPU-only part, which sees no card
    memory_bytes: Bytes = 0  # host memory limit, 0 = none
    shm_bytes: Bytes = 0
    stop_grace_seconds: Seconds = 10.0
    startup: Probe | None = (
        None  # asked instead of `probe` until its first yes, with its own pace and patience
    )
    checkpoint: Checkpoint | None = None
    # It measures the free memory of its cards at its start, as inference engines do: on a card, one such start
    # at a time, until it is ready or has failed.
    starts_alone: bool = False
    # The agent fills in `{memory_share}` and the like in command, env and mount sources (`placeholders.py`).
    fill: bool = False


class Restart(Value):
    """What the agent does when a workload ends by itself."""

    policy: Annotated[str, Meta(pattern=r"^(never|on-failure|always)$")] = "never"
    attempts_max: Small = 3
    backoff_seconds: Seconds = 1.0


class Allotment(Value):
    """One card's part of a binding."""

    card: Identity
    memory_bytes: Bytes
    mode: Mode


class NodeShare(Value):
    """One node's part of a binding: the cards, and what must run there."""

    node: Token
    allotments: tuple[Allotment, ...]
    components: tuple[Component, ...]


class CardInventory(Value):
    """What a card is. Changes only when hardware, driver or partitioning changes."""

    uuid: Identity
    index: Small
    model: str
    memory_bytes: Bytes
    pci_bus_id: str = ""
    unified_memory: bool = False  # memory is a share of the host's RAM
    usable: bool = True  # False: seen, but not fit to be placed on; `why` says so
    why: str = ""
    compute_mode: str = ""
    parent: str = ""  # MIG: UUID of the physical card
    # What keeps a binding within its allotment: `mig` (the hardware), `mps` (CUDA's own limit), `compute-mode`
    # (one process at a time); empty = it is accounted and watched, not enforced.
    enforces: str = ""


class ProcessObservation(Value):
    """A process that holds memory of a card, as the driver shows it."""

    pid: int
    memory_bytes: int | None = None  # None = the driver cannot tell
    epoch: int | None = None  # ours, by label or environment; None = foreign
    demand: str = ""
    component: str = ""
    container: str = ""
    user: str = ""
    command: str = ""
    since: str = ""
    belongs: str = ""  # foreign: the container, compose project, pod, unit or session that it is part of
    # For how long it has been in uninterruptible sleep (state D): no signal ends it. None = it is not.
    stuck_seconds: float | None = None


class Xid(Value):
    """An error that the GPU driver reported of a card, by NVIDIA's number."""

    code: int
    at: str = ""  # when it was heard, on the node's clock
    meaning: str = ""


class CardObservation(Value):
    """What a card shows right now. None = unknown, which is never the same as 0."""

    uuid: Identity
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilisation_percent: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    fan_percent: float | None = None
    ecc_uncorrected: int | None = None
    processes: tuple[ProcessObservation, ...] | None = None
    as_of: str = ""
    unknown: str = ""  # why the sample is not to be trusted
    power_limit_watts: float | None = None
    compute_mode: str = ""
    mig: bool | None = None  # split into instances, which are cards of their own
    lost: bool = False  # it answers nothing more until a reset or a reboot
    ecc_corrected: int | None = None  # since the driver was loaded
    pages_retired: int | None = None  # older cards: for ever; by double and single bit errors
    rows_remapped: int | None = None  # newer cards: for ever
    remap_pending: bool | None = None  # a page or row is to be taken out of use: at the next reset
    remap_failed: bool | None = None  # no spare row is left: replace the card
    throttles: tuple[str, ...] | None = None  # why it runs slower than it could now
    xids: tuple[Xid, ...] = ()  # the latest ones heard, oldest first


class ComponentObservation(Value):
    """A component as its engine shows it."""

    epoch: int
    demand: str
    component: str
    engine: Engine
    ref: str  # container id, or `pid:<pid>@<start>`
    running: bool
    pids: tuple[int, ...] = ()
    since: str = ""
    ready: bool | None = None
    gpus: tuple[str, ...] = ()  # UUIDs it was given
    probe_seconds: float | None = None  # how long its last probe took
    injected: tuple[str, ...] | None = None  # UUIDs that it can really reach; None = cannot be told
    ports: tuple[Port, ...] = ()  # where they were published
    warning: str = ""  # what may go wrong with it, known before its start


class Starting(Value):
    """A component that is on its way: what it waits for before it runs."""

    epoch: int
    demand: str
    component: str
    step: Annotated[str, Meta(max_length=32)]  # image_pull, start_gate, engine_away
    text: str = ""
    since: str = ""
    done_bytes: int | None = None
    total_bytes: int | None = None


class Pressure(Value):
    """The host's memory and the kernel's own pressure figures (PSI), percent of time stalled."""

    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    memory_some_avg10: float | None = None
    memory_full_avg10: float | None = None
    cpu_some_avg10: float | None = None
    load1: float | None = None


class VerdictClass(enum.StrEnum):
    """Why a workload ended, first match in a documented order. Exit 137 alone is never an OOM."""

    COMPLETED = "completed"
    STOPPED_BY_US = "stopped_by_us"
    PREEMPTED = "preempted"
    PROBE_KILL_STARTUP = "probe_kill(startup)"
    PROBE_KILL_LIVENESS = "probe_kill(liveness)"
    OOM_CGROUP = "oom_cgroup"
    OOM_GLOBAL = "oom_global"
    GPU_ALLOC_RACE = "gpu_alloc(race)"
    GPU_ALLOC_RESERVE = "gpu_alloc(reserve)"
    GPU_ALLOC_REAL = "gpu_alloc(real)"
    GPU_HARDWARE = "gpu_hardware"
    RUNTIME_MISSING = "runtime_missing"
    IMAGE_PULL = "image_pull"
    START_FAILED = "start_failed"
    EXTERNAL_REMOVAL = "external_removal"
    REDEPLOY = "redeploy"
    NODE_REBOOT = "node_reboot"
    APPLICATION_EXIT = "application_exit"
    UNKNOWN = "unknown"


class Evidence(Value):
    """One observed fact, with where it was read and when."""

    what: str
    value: str
    source: str = ""
    at: str = ""


class ComponentEnd(Value):
    component: str
    exit_code: int | None = None  # None = the engine could not tell
    signal: int | None = None
    ended: str = ""


class CardBaseline(Value):
    """A card right before a binding's components were started on it: what must be back after their end."""

    card: Identity
    memory_used_bytes: int | None = None  # None = unknown
    unexplained_bytes: int | None = None  # used, and held by no listed process


class Unreleased(Value):
    """A binding that ended on its node and is not seen free: a process of it, or its memory, is still there."""

    epoch: int
    demand: str
    why: str
    since: str = ""
    cards: tuple[str, ...] = ()


class Boundary(Value):
    """One memory boundary of a component up to its end: a cgroup level, the machine, or a card."""

    component: str
    name: str  # `container 3f2a91c0`, `slice rig.slice`, `machine`, `card GPU-...`
    path: str = ""  # of the cgroup
    limit_bytes: int | None = None  # None = no limit, or unknown
    last_bytes: int | None = None
    peak_bytes: int | None = None
    limit_hits: int | None = None  # how often the limit made the kernel reclaim, since the start
    oom_kills: int | None = None  # since the start
    every_seconds: Seconds = 1.0  # between two points
    points: tuple[int, ...] = ()  # bytes, oldest first, the last one is the newest; -1 = unknown


class CheckpointAnswer(enum.StrEnum):
    """What became of the request to save before a preemption or a drain."""

    ACKNOWLEDGED = "acknowledged"  # the component has heard it, and saves
    SAVED = "saved"
    NOT_ACKNOWLEDGED = "not_acknowledged"
    NOT_SAVED = "not_saved"  # it was heard, and the time for saving is over


class Usage(Value):
    """What a binding cost on one node, for the books."""

    seconds: float = 0.0
    memory_peak_bytes: int | None = None  # highest observed GPU memory, all cards together
    energy_joules: float | None = None


class CardSeen(Value):
    """What a decision knew of a card beyond the ledger: so that the decision can be made again."""

    card: Identity
    foreign_bytes: Bytes = 0  # memory held by processes that are not ours
    unknown: bool = False  # its sample was not to be trusted
    kept_for: str = ""  # a demand that came first, and that it was kept for
    kept_from_ns: Annotated[int, Meta(ge=0, le=2**63 - 1)] = (
        0  # when that one is expected to use it; 0 = unknown
    )


class Horizon(enum.StrEnum):
    """When a refused card could become a yes."""

    NEVER_HERE = "never_here"  # wrong model, label or node
    NEVER_BIG_ENOUGH = "never_big_enough"  # even empty it is too small
    LATER = "later"  # busy, cordoned, full: may change


class ReasonCode(enum.StrEnum):
    INVALID_UNIT = "invalid_unit"
    INVALID_REQUEST = "invalid_request"
    NO_NODES = "no_nodes"
    CAPACITY_NEVER = "capacity_never"
    COUNT_SHORT = "count_short"
    GPU_BUSY = "gpu_busy"
    VRAM_SHORT = "vram_short"
    MODE_CONFLICT = "mode_conflict"
    EXCLUSIVE_HELD = "exclusive_held"
    PROJECT_QUOTA = "project_quota"
    PRIORITY_CAP = "priority_cap"
    NODE_CORDONED = "node_cordoned"
    NODE_UNREACHABLE = "node_unreachable"
    NODE_MISMATCH = "node_mismatch"
    DRIVER_MISMATCH = "driver_mismatch"
    ENGINE_MISSING = "engine_missing"
    GPU_QUARANTINED = "gpu_quarantined"
    GPU_UNKNOWN = "gpu_unknown"
    LABEL_MISMATCH = "label_mismatch"
    MODEL_MISMATCH = "model_mismatch"
    FOREIGN_USE = "foreign_use"
    START_GATE = "start_gate"
    BIND_BACKOFF = "bind_backoff"
    SAFE_MODE = "safe_mode"
    BEHIND_OTHERS = "behind_others"
    HELD_BACK = "held_back"
    MODE_SWITCHING = "mode_switching"
    OUTSIDE_WINDOW = "outside_window"
    WEIGHTS_NOT_CACHED = "weights_not_cached"


class Reason(Value):
    """Why a card (or a node, or the whole fleet) says no: a code and numbers, never prose.

    `rigbook_schemas.sentences.sentence` turns it into the line a person reads.
    """

    code: ReasonCode
    horizon: Horizon = Horizon.LATER
    node: str = ""
    card: str = ""
    index: int | None = None
    model: str = ""
    asked_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    bound_bytes: int | None = None
    foreign_bytes: int | None = None
    short_bytes: int | None = None
    asked: str = ""  # the other side of a mismatch: label, model, mode, node
    found: str = ""
    holders: tuple[str, ...] = ()  # demands that hold what is missing
    holders_stopped: tuple[str, ...] = ()  # those of them whose desired state is already stopped
    cards: int = 1  # how many cards give this same answer
    seconds: float | None = None  # how long it is expected to take; None = unknown
    at: str = ""  # RFC 3339: when it ends, opens, or is tried again


class EvictionReason(enum.StrEnum):
    WITHDRAWN = "withdrawn"  # desired is stopped
    LEFTOVER = "leftover"  # it was stopped, and something still runs
    SQUATTER = "squatter"
    WRONG_CARD = "wrong_card"
    OVERUSE = "overuse"
    PREEMPTION = "preemption"
    DRAIN = "drain"
    MODE_SWITCH = "mode_switch"
    TIME_LIMIT = "time_limit"
    WINDOW_CLOSED = "window_closed"
    FENCED = "fenced"
    OPERATOR = "operator"
    MISSING = "missing"
    CARD_LOST = "card_lost"
    IDLE_HOLDER = "idle_holder"
    SUSPECTED_HANG = "suspected_hang"
    GPU_LOST_IN_CONTAINER = "gpu_lost_in_container"


class StopScope(enum.StrEnum):
    """How far a stop order reaches."""

    COMPONENTS = "components"  # each component's own process group or container
    EVERYTHING = "everything"  # every process observed with this epoch, whatever group it is in


class DriftKind(enum.StrEnum):
    """How desired, bound and observed can differ, past the grace."""

    LEFTOVER = "leftover"
    MISSING = "missing"
    SQUATTER = "squatter"
    WRONG_CARD = "wrong_card"
    OVERUSE = "overuse"
    MODE_MISMATCH = "mode_mismatch"
    DOUBLE_HOLDER = "double_holder"
    CARD_LOST = "card_lost"
    VRAM_NOT_RECOVERED = "vram_not_recovered"
    IDLE_HOLDER = "idle_holder"
    SUSPECTED_HANG = "suspected_hang"
    GPU_LOST_IN_CONTAINER = "gpu_lost_in_container"

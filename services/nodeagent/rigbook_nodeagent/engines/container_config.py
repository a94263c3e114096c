"""From a launch to the body of a container creation, and from an inspection back to what runs. Pure.

Every option with a consequence is spelled out, also where it is Docker's default: a daemon's own defaults
(`daemon.json`) must not change what a binding means.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rigbook_schemas.values import Component, Engine, Mount, Port

from rigbook_nodeagent.engines.procfs import CLUSTER, COMPONENT, DEMAND, EPOCH, NODE
from rigbook_nodeagent.engines.protocol import LABEL_PREFIX, Launch, Running, StartRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ContainerRules",
    "container_config",
    "container_name",
    "image_reference",
    "labels_of",
    "ours",
    "running_of",
]

NEVER: Final = "0001-01-01T00:00:00Z"  # Docker's word for "not yet"
CARD_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")


class ContainerRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator of the node allows and prefers."""

    device_requests: bool = True  # False: simulated cards, given by environment and a shared folder
    cdi: bool = False  # ask for cards by CDI name instead of the nvidia runtime (Docker 25 and later)
    mounts_allowed: tuple[str, ...] = ()  # folders of the host that may be mounted, with all below them
    shared_folders: tuple[str, ...] = ()  # mounted read-write at their own path: the simulated cards
    log_bytes_max: int = 10 * 1024**2  # of each of `log_files_max` files
    log_files_max: int = 3
    cgroup_parent: str = ""
    share_ipc: bool = False  # CUDA's multi-process service needs the host's shared memory


def container_name(launch: Launch) -> str:
    """The same for the same component of the same epoch, so that a second start finds the first."""
    return f"rigbook-{launch.cluster}-{launch.node}-{launch.epoch}-{launch.component.name}"


def labels_of(launch: Launch, *, spec: str = "") -> dict[str, str]:
    cards = launch.cards if launch.component.gpu else ()
    values = {
        "cluster": launch.cluster,
        "node": launch.node,
        "demand": launch.demand,
        "epoch": str(launch.epoch),
        "project": launch.project,
        "owner": launch.owner,
        "gpus": ",".join(cards),
        "spec": spec,
        "component": launch.component.name,
    }
    return {f"{LABEL_PREFIX}{key}": value for key, value in values.items()}


def ours(labels: Mapping[str, str], *, cluster: str, node: str) -> bool:
    """Never anything of another cluster or node, nor of somebody who has no labels."""
    return (
        labels.get(f"{LABEL_PREFIX}cluster") == cluster
        and labels.get(f"{LABEL_PREFIX}node") == node
        and labels.get(f"{LABEL_PREFIX}epoch", "").isdigit()
        and bool(labels.get(f"{LABEL_PREFIX}component"))
    )


def image_reference(image: str) -> str:
    """With a tag or digest: a reference without one would pull every tag there is."""
    last = image.rsplit("/", 1)[-1]
    return image if ":" in last or "@" in last else f"{image}:latest"


def container_config(launch: Launch, rules: ContainerRules, *, spec: str = "") -> dict[str, Any]:
    """Body of POST /containers/create.

    Raises StartRefused for a mount outside the allow-list.
    """
    component = launch.component
    body: dict[str, Any] = {
        "Image": image_reference(component.image),
        "Env": [f"{key}={value}" for key, value in _environment(launch, rules).items()],
        "Labels": labels_of(launch, spec=spec),
        "Tty": False,
        "OpenStdin": False,
        "AttachStdin": False,
        "AttachStdout": False,
        "AttachStderr": False,
        "StopSignal": "SIGTERM",
        "StopTimeout": max(0, round(component.stop_grace_seconds)),
        "ExposedPorts": {f"{port.port}/tcp": {} for port in component.ports},
        "HostConfig": _host_config(component, launch, rules),
    }
    if component.command:
        body["Cmd"] = list(component.command)  # the image's entry point stays
    return body


def _host_config(component: Component, launch: Launch, rules: ContainerRules) -> dict[str, Any]:
    host: dict[str, Any] = {
        "Init": True,  # a shell as pid 1 ignores SIGTERM, and zombies would pile up
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},  # restarts are ours, by verdict
        "AutoRemove": False,  # how it ended must stay to be read
        "Privileged": False,
        "PublishAllPorts": False,
        "PidMode": "",
        "IpcMode": "host" if rules.share_ipc and component.gpu and launch.cards else "private",
        "LogConfig": {
            "Type": "json-file",
            "Config": {"max-size": str(rules.log_bytes_max), "max-file": str(rules.log_files_max)},
        },
        "Mounts": [_mount(mount, rules) for mount in component.mounts]
        + [
            {"Type": "bind", "Source": folder, "Target": folder, "ReadOnly": False}
            for folder in rules.shared_folders
            if component.gpu and launch.cards
        ],
        "PortBindings": {
            f"{port.port}/tcp": [{"HostIp": "", "HostPort": str(port.host_port or "")}]
            for port in component.ports
        },
    }
    if component.memory_bytes:
        host["Memory"] = component.memory_bytes
        host["MemorySwap"] = component.memory_bytes  # memory and swap together: no swap
    if component.shm_bytes and host["IpcMode"] == "private":
        host["ShmSize"] = component.shm_bytes
    if rules.cgroup_parent:
        host["CgroupParent"] = rules.cgroup_parent
    if component.gpu and launch.cards and rules.device_requests:
        host["DeviceRequests"] = [_device_request(launch.cards, rules)]
    return host


def _device_request(cards: tuple[str, ...], rules: ContainerRules) -> dict[str, Any]:
    if rules.cdi:
        return {"Driver": "cdi", "DeviceIDs": [f"nvidia.com/gpu={card}" for card in cards]}
    return {
        "Driver": "nvidia",
        "Count": 0,  # by name, not by number
        "DeviceIDs": list(cards),
        "Capabilities": [["gpu", "compute", "utility"]],
        "Options": {},
    }


def _environment(launch: Launch, rules: ContainerRules) -> dict[str, str]:
    """Later ones win: the component's, the cards', whose it is."""
    given = {key: value for key, value in launch.environment.items() if key not in CARD_VARIABLES}
    environment = {**launch.component.env, **given}
    if launch.component.gpu and launch.cards:
        # The runtime shows just these cards, in PCI order; so inside they are 0, 1, ... by rank.
        ranks = sorted(range(len(launch.cards)), key=lambda place: launch.indices[place])
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(ranks.index(at)) for at in range(len(ranks)))
        environment.pop(
            "NVIDIA_VISIBLE_DEVICES", None
        )  # from the device request, never from the image's `all`
        if not rules.device_requests:
            environment["NVIDIA_VISIBLE_DEVICES"] = ",".join(launch.cards[place] for place in ranks)
    else:
        # An image may say `all`, which the runtime takes as a wish; a CPU-only part sees no card.
        environment["NVIDIA_VISIBLE_DEVICES"] = "none"
        environment["CUDA_VISIBLE_DEVICES"] = ""
    environment |= {
        CLUSTER: launch.cluster,
        NODE: launch.node,
        DEMAND: launch.demand,
        EPOCH: str(launch.epoch),
        COMPONENT: launch.component.name,
    }
    if launch.traceparent:
        environment["TRACEPARENT"] = launch.traceparent
    return environment


def _mount(mount: Mount, rules: ContainerRules) -> dict[str, Any]:
    source = posixpath.normpath(mount.source)
    allowed = any(
        source == folder or source.startswith(f"{folder.rstrip('/')}/") for folder in rules.mounts_allowed
    )
    if not source.startswith("/") or not mount.target.startswith("/"):
        raise StartRefused(
            "mount_denied", f"mount {mount.source} -> {mount.target}: both must be absolute paths"
        )
    if not allowed:
        raise StartRefused(
            "mount_denied",
            f"{source} may not be mounted on this node; allowed: {', '.join(rules.mounts_allowed) or 'nothing'}",
        )
    return {"Type": "bind", "Source": source, "Target": mount.target, "ReadOnly": mount.read_only}


def running_of(shown: Mapping[str, Any], *, pids: tuple[int, ...], stopped_by_us: bool) -> Running:
    """From GET /containers/{id}/json. Raises KeyError or ValueError when it is not one of ours."""
    labels: Mapping[str, str] = shown["Config"]["Labels"]
    state: Mapping[str, Any] = shown["State"]
    runs = bool(state.get("Running")) or bool(state.get("Restarting"))
    started = str(state.get("StartedAt", ""))
    finished = str(state.get("FinishedAt", ""))
    gpus = labels.get(f"{LABEL_PREFIX}gpus", "")
    return Running(
        cluster=labels[f"{LABEL_PREFIX}cluster"],
        node=labels[f"{LABEL_PREFIX}node"],
        demand=labels.get(f"{LABEL_PREFIX}demand", ""),
        epoch=int(labels[f"{LABEL_PREFIX}epoch"]),
        component=labels[f"{LABEL_PREFIX}component"],
        engine=Engine.DOCKER,
        ref=str(shown["Id"]),
        running=runs,
        pids=pids if runs else (),
        since="" if started == NEVER else started,
        cards=tuple(gpus.split(",")) if gpus else (),
        exit_code=None if runs else state.get("ExitCode"),
        signal=None,  # Docker tells 128 + n, which a program may also return by itself
        ended="" if runs or finished == NEVER else finished,
        stopped_by_us=stopped_by_us and not runs,
        ports=_ports(shown),
        oom_killed=None if runs else state.get("OOMKilled"),
        image=str(shown.get("Image", "")),
        address=_address(shown) if runs else "",
    )


def _address(shown: Mapping[str, Any]) -> str:
    settings: Mapping[str, Any] = shown.get("NetworkSettings") or {}
    networks: Mapping[str, Any] = settings.get("Networks") or {}
    found = [
        settings.get("IPAddress"),
        *(n.get("IPAddress") for n in networks.values() if isinstance(n, dict)),
    ]
    return next((str(address) for address in found if address), "")


def _ports(shown: Mapping[str, Any]) -> tuple[Port, ...]:
    """Where ports were published; Docker tells IPv4 and IPv6 apart, we do not."""
    published: Mapping[str, Any] = (shown.get("NetworkSettings") or {}).get("Ports") or {}
    return tuple(
        Port(port=int(name.partition("/")[0]), host_port=int(bindings[0]["HostPort"]))
        for name, bindings in sorted(published.items())
        if bindings and name.endswith("/tcp")
    )

"""What a node is equipped with, by its options: its cards and their driver's thread, its engines, its host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.values import Engine

from rigbook_nodeagent.attribution import Attribution
from rigbook_nodeagent.boundaries import Hierarchy
from rigbook_nodeagent.engines.docker_notes import DockerNotes
from rigbook_nodeagent.gpus.worker import GpuWorker
from rigbook_nodeagent.host import Host
from rigbook_nodeagent.kernel_log import NO_LOG, KernelLog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rigbook_nodeagent.engines.protocol import Engines
    from rigbook_nodeagent.gpus.protocol import Gpus

__all__ = [
    "HEARTBEAT_SECONDS",
    "Equipment",
    "Options",
    "equip",
    "open_engines",
    "open_gpus",
    "weights_dir_of",
]

HEARTBEAT_SECONDS: Final = 1.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to run an agent. `gpus`: "nvml", or "sim:4xRTX4090" and the like."""

    node: str
    data: Path
    cluster: str = ""  # "" = one that only this log has (see `cluster`)
    gpus: str = "nvml"
    engines: tuple[str, ...] = ("process",)
    labels: dict[str, str] = {}
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    docker_url: str = ""
    mounts_allowed: tuple[str, ...] = ()
    weights_dir: Path | None = None  # where components keep model weights; None = `weights` in `data`
    weights_dirs: tuple[str, ...] = ()  # more folders that are looked through for weights
    mps: str = ""  # pipe folder of CUDA's multi-process service, for memory slices; empty = not used
    exclusive_process: bool = False  # compute mode Exclusive_Process on cards that are bound exclusively


def open_gpus(options: Options) -> Gpus:
    """The driver named by the options. Raises ValueError for a wrong simulation spec."""
    if options.gpus.startswith("sim:"):
        from rigbook_nodeagent.gpus.simulated import SimulatedGpus

        return SimulatedGpus(options.gpus, options.data / "gpus", node=options.node)
    if options.gpus != "nvml":
        raise ValueError(f"gpus {options.gpus!r}: expected nvml, or a simulation such as sim:4xRTX4090")
    from rigbook_nodeagent.gpus.nvml import NvmlGpus

    return NvmlGpus()


def weights_dir_of(options: Options) -> Path:
    """Where components of this node keep model weights."""
    return (options.weights_dir or options.data / "weights").absolute()


def open_engines(options: Options, docker: DockerNotes | None = None) -> dict[Engine, Engines]:
    """The engines named by the options, not yet opened. Raises ValueError for an unknown one."""
    made: dict[Engine, Engines] = {}
    for name in options.engines:
        if name == Engine.PROCESS:
            from rigbook_nodeagent.engines.process import ProcessEngine

            made[Engine.PROCESS] = ProcessEngine(
                options.data / "process", cluster=options.cluster, node=options.node
            )
        elif name == Engine.DOCKER:
            from rigbook_nodeagent.engines.container_config import ContainerRules
            from rigbook_nodeagent.engines.docker import SOCKET, DockerEngine

            simulated = options.gpus.startswith("sim:")
            made[Engine.DOCKER] = DockerEngine(
                options.data / "docker",
                cluster=options.cluster,
                node=options.node,
                url=options.docker_url or SOCKET,
                rules=ContainerRules(
                    device_requests=not simulated,
                    mounts_allowed=(*options.mounts_allowed, str(weights_dir_of(options))),
                    shared_folders=(
                        *((str((options.data / "gpus").absolute()),) if simulated else ()),
                        *((options.mps,) if options.mps else ()),
                    ),
                    share_ipc=bool(options.mps),
                ),
                notes=docker,
            )
        else:
            raise ValueError(f"engine {name!r}: expected process or docker")
    return made


class Equipment:
    """All that an agent touches of its machine. A simulation builds another one."""

    def __init__(
        self,
        *,
        gpus: Gpus,
        engines: Mapping[Engine, Engines],
        attribution: Attribution,
        worker: GpuWorker | None = None,
        host: Host | None = None,
        hierarchy: Hierarchy | None = None,
        kernel_log: KernelLog | None = None,
        docker: DockerNotes | None = None,
    ) -> None:
        self.gpus = gpus
        self.engines = engines
        self.attribution = attribution
        self.docker = docker if docker is not None else DockerNotes()
        self.worker = worker if worker is not None else GpuWorker(gpus)
        self.host = host if host is not None else Host()
        self.hierarchy = hierarchy if hierarchy is not None else Hierarchy.nowhere()
        self.kernel_log = kernel_log if kernel_log is not None else KernelLog(NO_LOG)


def equip(options: Options) -> Equipment:
    """This machine, as the options name its parts. Raises ValueError for a wrong option."""
    docker = DockerNotes()
    return Equipment(
        gpus=open_gpus(options),
        engines=open_engines(options, docker),
        docker=docker,
        attribution=Attribution(options.cluster, options.node),
        hierarchy=Hierarchy(),
        kernel_log=KernelLog(),
    )

"""Components as containers, through the Docker Engine API.

Docker is asked, never believed to be us: a container is ours by its labels (cluster and node), and all
others are not even listed. The container's name is made of cluster, node, epoch and component, so a second
start of the same finds the first. What cannot be kept in a label (that we ordered the stop) is a file in
`directory`, named after the container.

Every failure to get an answer is EngineError: what runs is then unknown, not absent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from typing import TYPE_CHECKING, Any, Final

import aiodocker
import aiohttp
import msgspec
import structlog
from rigbook_schemas.values import Engine

from rigbook_nodeagent.engines.container_config import (
    ContainerRules,
    container_config,
    container_name,
    image_reference,
    ours,
    running_of,
)
from rigbook_nodeagent.engines.container_pids import container_pids
from rigbook_nodeagent.engines.container_story import ContainerStory
from rigbook_nodeagent.engines.cuda import cuda_warning
from rigbook_nodeagent.engines.docker_client import (
    SENSELESS,
    DockerClient,
    DockerRefusal,
    PullProgress,
    senseless,
)
from rigbook_nodeagent.engines.docker_notes import DockerNotes
from rigbook_nodeagent.engines.procfs import boot_ns
from rigbook_nodeagent.engines.protocol import LABEL_PREFIX, Ended, EngineError, Launch, Running, StartRefused
from rigbook_nodeagent.strangers import Container

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
    from pathlib import Path

    from rigbook_schemas.values import StopScope

__all__ = ["DockerEngine", "PullProgress"]

SOCKET: Final = "unix:///var/run/docker.sock"
INSIST_SECONDS: Final = 15.0  # on top of the grace, for Docker to kill and clean up
EVENTS_BACKOFF_SECONDS: Final = 0.2
EVENTS_BACKOFF_SECONDS_MAX: Final = 10.0
HINTS_MAX: Final = 10_000
INSPECTION_SECONDS_MAX: Final = 30.0  # an inspection is asked anew then, even without an event
EXECUTION_POLL_SECONDS: Final = 0.05
# The daemon keeps a few hundred events: what happened shortly before we came is asked for too.
EVENTS_BEFORE_SECONDS: Final = 600.0
LOG_LINES_MAX: Final = 100_000
PORT_TAKEN: Final = ("port is already allocated", "address already in use")
NO_RUNTIME: Final = ("could not select device driver", "unknown runtime", "CDI device injection failed")
# A daemon that is going down refuses in many words; none of them is about the component.
GOING_DOWN: Final = (
    "failed to update store",
    "shutting down",
    "context canceled",
    "transport is closing",
    "connection error: desc",
    "ttrpc: closed",
    "containerd.sock",
)
NO_PROGRAM: Final = (
    "executable file not found",
    "no such file or directory: unknown",
    "permission denied: unknown",
)
UNSATISFIED: Final = "requirement error: unsatisfied condition"  # the container toolkit's own check
RUNTIME_REMEDY: Final = (
    "install nvidia-container-toolkit on this node, run `nvidia-ctk runtime configure --runtime=docker` "
    "and restart Docker"
)

_log = structlog.stdlib.get_logger(__name__)


class DockerEngine:
    """Docker engine of one node.

    `url` is the Engine's socket. `directory` keeps our own notes (stop orders). `on_pull` is told about
    pulls as they go. `sleep` waits between attempts.
    """

    def __init__(
        self,
        directory: Path,
        *,
        cluster: str,
        node: str,
        url: str = SOCKET,
        rules: ContainerRules | None = None,
        on_pull: Callable[[PullProgress], None] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        booted_ns: int | None = None,
        notes: DockerNotes | None = None,
    ) -> None:
        self.notes = notes if notes is not None else DockerNotes()
        self._story = ContainerStory(
            directory.absolute(), boot_ns=boot_ns() if booted_ns is None else booted_ns
        )
        self._made_ns = time.time_ns()
        self._since = f"{time.time() - EVENTS_BEFORE_SECONDS:.9f}"  # events from here on
        self._cluster = cluster
        self._node = node
        self._wanted = [f"{LABEL_PREFIX}cluster={cluster}", f"{LABEL_PREFIX}node={node}"]
        self._rules = rules or ContainerRules()
        self._on_pull = on_pull or self.notes.pulled
        self._sleep = sleep
        self._client = DockerClient(url)
        self._facts = "not opened"
        self._shown: dict[
            str, tuple[str, float, dict[str, Any]]
        ] = {}  # id: state, when (monotonic), inspection
        self._hints: asyncio.Queue[Ended] = asyncio.Queue(HINTS_MAX)
        self._listener: asyncio.Task[None] | None = None

    @property
    def kind(self) -> Engine:
        return Engine.DOCKER

    @property
    def facts(self) -> str:
        return self._facts

    async def open(self) -> None:
        try:
            self._story.open()
        except OSError as error:
            raise EngineError(f"folder of the Docker engine: {error}") from error
        self._client.open()
        try:
            info = await self._client.demand(self._client.api.system.info(), "describe itself")
        except EngineError as error:
            await self.close()
            raise EngineError(
                f"{error}. Is Docker running (`systemctl start docker`), and may this user use "
                f"{self._client.url} (group docker)?"
            ) from error
        runtimes = set(info.get("Runtimes") or {})
        self._facts = (
            f"Docker {info.get('ServerVersion', '?')}, cgroup v{info.get('CgroupVersion', '?')} "
            f"({info.get('CgroupDriver', '?')}), live restore {'on' if info.get('LiveRestoreEnabled') else 'off'}, "
            f"nvidia runtime {'configured' if 'nvidia' in runtimes else 'not listed'}"
        )
        await self._discard_unstarted()
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen(), name="docker-events")

    async def start(self, launch: Launch) -> Running:
        if not launch.component.image:
            raise StartRefused("start_failed", f"{launch.component.name} has no image")
        body = container_config(launch, self._rules)
        name = container_name(launch)
        existing = await self._existing(name, launch)
        if existing is not None and existing["State"]["Status"] != "created":
            self._story.started(name, existing)  # also when somebody else put it there: it is taken as it is
            return self._running(existing)
        if existing is None:
            await self._client.have_image(
                image_reference(launch.component.image), on_pull=self._on_pull, sleep=self._sleep
            )
            identity = await self._create(name, body, launch)
        else:
            identity = str(existing["Id"])  # an agent was killed between create and start
        warning = await self._cuda_warning(launch)
        if warning:
            _log.warning("cuda_mismatch", image=launch.component.image, why=warning)
        try:
            await self._client.ask(self._client.api.containers.container(identity).start())
        except DockerRefusal as refusal:
            await self._discard(identity)
            _raise_if_going_down(refusal)
            refused = _start_refused(refusal, launch, warning)
            self.notes.refused(refused.code, refused.text)
            raise refused from refusal
        if launch.cards and launch.component.gpu and self._rules.device_requests:
            self.notes.started()
        shown = await self._show(identity)
        if shown is None:
            raise EngineError(f"container {name} vanished right after its start: removed by somebody else")
        self._story.started(name, shown)
        running = self._running(shown)
        return msgspec.structs.replace(running, warning=warning) if warning else running

    async def _cuda_warning(self, launch: Launch) -> str:
        """Nothing is held up by it: the toolkit, or the program itself, has the last word."""
        if not launch.cards or not launch.component.gpu or not launch.cuda_version:
            return ""
        try:
            image = await self._client.ask(
                self._client.api.images.inspect(image_reference(launch.component.image))
            )
        except (DockerRefusal, EngineError):
            return ""
        return cuda_warning(
            (image.get("Config") or {}).get("Env") or (),
            cuda_version=launch.cuda_version,
            driver_version=launch.driver_version,
        )

    async def signal(self, running: Running, name: str) -> None:
        with contextlib.suppress(ValueError):
            self._story.signalled(running.ref, signal.Signals[name])
        container = self._client.api.containers.container(running.ref)
        try:
            await self._client.ask(container.kill(signal=name))
        except DockerRefusal as refusal:
            if refusal.status not in {404, 409}:  # gone, or not running
                raise EngineError(f"no {name} to container {running.ref[:12]}: {refusal.text}") from refusal

    async def stop(self, running: Running, *, grace_seconds: float, scope: StopScope) -> None:
        """A container ends with all its processes, so the scope makes no difference here."""
        del scope
        shown = await self._show(running.ref)
        if shown is None:
            return
        if shown["State"].get("Running"):
            self._story.stop_ordered(running.ref)
        container = self._client.api.containers.container(running.ref)
        if shown["State"].get("Paused"):
            with contextlib.suppress(DockerRefusal):  # a frozen process hears no signal
                await self._client.ask(container.unpause())
        with contextlib.suppress(DockerRefusal):  # ended (304) or gone (404) meanwhile: looked at below
            await self._client.ask(
                container.stop(t=max(0, round(grace_seconds))), seconds=grace_seconds + INSIST_SECONDS
            )
        self._shown.pop(running.ref, None)
        after = await self._show(running.ref)
        if after is not None and after["State"].get("Running"):
            raise EngineError(
                f"container {running.ref[:12]} of {running.component} still runs after SIGKILL: "
                "held by the kernel or a driver (state D)? then reboot the node"
            )

    async def execute(self, running: Running, command: tuple[str, ...]) -> int:
        container = self._client.api.containers.container(running.ref)
        try:
            execution = await self._client.ask(container.exec(list(command), stdout=False, stderr=False))
            await self._client.ask(execution.start(detach=True))
            shown = await self._client.ask(execution.inspect())
            while shown.get("Running"):
                await asyncio.sleep(EXECUTION_POLL_SECONDS)
                shown = await self._client.ask(execution.inspect())
        except DockerRefusal as refusal:
            raise EngineError(f"no command in container {running.ref[:12]}: {refusal.text}") from refusal
        code = shown.get("ExitCode")
        return code if isinstance(code, int) else -1

    async def inventory(self) -> Sequence[Running]:
        listed = await self._list()
        found: list[Running] = []
        ids: set[str] = set()
        with self._making_sense():  # one answer that makes none: what runs is unknown
            for container in listed:
                identity, state = str(container["Id"]), str(container["State"])
                ids.add(identity)
                shown = self._remembered(identity, state) or await self._show(identity)
                if shown is not None and self._listed(shown):
                    found.append(self._running(shown))
        for identity in self._shown.keys() - ids:
            del self._shown[identity]
        return found

    async def containers(self) -> dict[str, Container]:
        """Every running container of the machine by id, also those of others: only to be named. Raises EngineError."""
        listed = await self._client.demand(self._client.api.containers.list(all=False), "list containers")
        found: dict[str, Container] = {}
        with self._making_sense():
            for container in listed:
                names, labels = container["Names"] or [""], container["Labels"] or {}
                texts = {str(key): str(value) for key, value in labels.items()}
                found[str(container["Id"])] = Container(str(names[0]).lstrip("/"), texts)
        return found

    async def inspect(self, epoch: int, component: str) -> Running | None:
        shown = await self._show(f"rigbook-{self._cluster}-{self._node}-{epoch}-{component}")
        with self._making_sense():
            return self._running(shown) if shown is not None and self._listed(shown) else None

    async def remove(self, running: Running) -> None:
        shown = await self._show(running.ref)
        if shown is not None:
            if not ours(shown["Config"]["Labels"], cluster=self._cluster, node=self._node):
                raise EngineError(f"container {running.ref[:12]} is not ours")
            if shown["State"].get("Running"):
                raise EngineError(f"container {running.ref[:12]} of {running.component} still runs")
            try:
                await self._client.ask(self._client.api.containers.container(running.ref).delete(v=True))
            except DockerRefusal as refusal:
                if refusal.status not in {404, 409}:  # gone, or being removed
                    raise EngineError(
                        f"container {running.ref[:12]} cannot be removed: {refusal.text}"
                    ) from refusal
        self._shown.pop(running.ref, None)
        self._story.removed(self._name(running), running.ref)

    async def ends(self) -> AsyncIterator[Ended]:
        while True:
            yield await self._hints.get()

    async def logs(self, running: Running, *, follow: bool, lines_max: int) -> AsyncIterator[bytes]:
        tail = max(0, min(lines_max, LOG_LINES_MAX))
        async for line in self._client.output(running.ref, follow=follow, lines_max=tail):
            yield line

    async def close(self) -> None:
        """Let go; containers go on running."""
        if self._listener is not None:
            self._listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listener
            self._listener = None
        await self._client.close()

    # -- starting ---------------------------------------------------------------------------------

    async def _existing(self, name: str, launch: Launch) -> dict[str, Any] | None:
        shown = await self._show(name)
        if shown is None:
            return None
        labels = shown["Config"]["Labels"] or {}
        if (
            not ours(labels, cluster=self._cluster, node=self._node)
            or labels[f"{LABEL_PREFIX}epoch"] != str(launch.epoch)
            or labels[f"{LABEL_PREFIX}component"] != launch.component.name
        ):
            raise StartRefused("start_failed", f"a container named {name} exists and is not ours; remove it")
        return shown

    async def _create(self, name: str, body: dict[str, Any], launch: Launch) -> str:
        try:
            container = await self._client.ask(self._client.api.containers.create(body, name=name))
        except DockerRefusal as refusal:
            existing = await self._existing(name, launch) if refusal.status == 409 else None
            if existing is not None:
                return str(existing["Id"])  # somebody else was faster: an older request of ours
            _raise_if_going_down(refusal)
            raise _start_refused(refusal, launch) from refusal
        return str(container.id)

    async def _discard(self, identity: str) -> None:
        with contextlib.suppress(DockerRefusal, EngineError):
            await self._client.ask(self._client.api.containers.container(identity).delete(force=True, v=True))

    async def _discard_unstarted(self) -> None:
        """An agent was killed between creating and starting: nothing of these ever ran."""
        for container in await self._list():
            if container["State"] == "created":
                await self._discard(str(container["Id"]))

    # -- asking -----------------------------------------------------------------------------------

    async def _list(self) -> Sequence[Any]:
        listed: Sequence[Any] = await self._client.demand(
            self._client.api.containers.list(all=True, filters=json.dumps({"label": self._wanted})),
            "list containers",
        )
        return listed

    def _listed(self, shown: Mapping[str, Any]) -> bool:
        """Ours, and it has run: one that was only created is nobody's end and no reason to wait."""
        labels: Mapping[str, str] = shown["Config"]["Labels"] or {}
        return ours(labels, cluster=self._cluster, node=self._node) and shown["State"]["Status"] != "created"

    async def _show(self, identity: str) -> dict[str, Any] | None:
        shown = await self._client.show(identity)
        if shown is not None:
            with self._making_sense():
                self._shown[str(shown["Id"])] = (str(shown["State"]["Status"]), time.monotonic(), shown)
        return shown

    def _remembered(self, identity: str, state: str) -> dict[str, Any] | None:
        """The last inspection, while the list shows the same state and no event said otherwise."""
        known = self._shown.get(identity)
        if known is None or known[0] != state or time.monotonic() - known[1] > INSPECTION_SECONDS_MAX:
            return None
        return known[2]

    def _running(self, shown: Mapping[str, Any]) -> Running:
        state = shown["State"]
        identity = str(shown["Id"])
        running = running_of(
            shown,
            pids=container_pids(int(state.get("Pid") or 0)) if state.get("Running") else (),
            stopped_by_us=self._story.stopped_by_us(identity),
        )
        replaced, image_changed = self._story.replaced(self._name(running), shown)
        return msgspec.structs.replace(
            running,
            replaced=replaced,
            image_changed=image_changed,
            other_boot=self._story.other_boot(running.since),
            killed_by_others="" if running.running else self._story.killed_by_others(identity, running.ended),
        )

    @contextlib.contextmanager
    def _making_sense(self) -> Generator[None]:
        """Whatever Docker answers, the agent lives: an answer that cannot be read is no answer."""
        try:
            yield
        except SENSELESS as error:
            self._shown.clear()  # nothing of it is remembered
            raise senseless(error) from error

    def _name(self, running: Running) -> str:
        return f"rigbook-{self._cluster}-{self._node}-{running.epoch}-{running.component}"

    async def _listen(self) -> None:
        """Turn Docker's events into hints; connect again for as long as it takes."""
        backoff = EVENTS_BACKOFF_SECONDS
        filters = json.dumps({"type": ["container"], "label": self._wanted})
        while True:
            events: Any = self._client.api.events
            subscriber = events.subscribe(create_task=False)
            stream = asyncio.create_task(events.run(filters=filters, since=self._since))
            try:
                while (event := await subscriber.get()) is not None:
                    backoff = EVENTS_BACKOFF_SECONDS
                    try:
                        self._story.heard(event)
                        self._take(event)
                    except SENSELESS as error:  # a hint; the inventory is the truth
                        _log.warning("docker_event_makes_no_sense", why=f"{type(error).__name__}: {error}")
                await stream
            except (aiodocker.DockerError, aiohttp.ClientError, OSError, ValueError) as error:
                _log.warning("docker_events_away", why=str(error), again_seconds=backoff)
                self._story.away(time.time_ns())
            finally:
                stream.cancel()
                await asyncio.gather(stream, return_exceptions=True)
            self._shown.clear()  # whatever happened meanwhile was not seen
            self.notes.returned()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, EVENTS_BACKOFF_SECONDS_MAX)

    def _take(self, event: Mapping[str, Any]) -> None:
        actor = event.get("Actor") or {}
        identity = str(actor.get("ID", ""))
        self._shown.pop(identity, None)
        if isinstance(when := event.get("timeNano"), int):
            self._since = f"{when // 10**9}.{when % 10**9 + 1:09d}"
        if isinstance(when, int) and when < self._made_ns:
            return  # for the story; a hint would come too late
        attributes = actor.get("Attributes") or {}
        if event.get("Action") not in {"die", "destroy", "oom"} or not ours(
            attributes, cluster=self._cluster, node=self._node
        ):
            return
        with contextlib.suppress(asyncio.QueueFull):  # a hint; the inventory is the truth
            self._hints.put_nowait(
                Ended(
                    epoch=int(attributes[f"{LABEL_PREFIX}epoch"]),
                    component=attributes[f"{LABEL_PREFIX}component"],
                    ref=identity,
                )
            )


def _raise_if_going_down(refusal: DockerRefusal) -> None:
    if refusal.status >= 500 and any(words in refusal.text for words in GOING_DOWN):
        raise EngineError(f"the Docker Engine is going down: {refusal.text}") from refusal


def _start_refused(refusal: DockerRefusal, launch: Launch, warning: str = "") -> StartRefused:
    name, text = launch.component.name, refusal.text
    if UNSATISFIED in text:
        return StartRefused("driver_too_old", f"{name}: {warning or text}")
    if any(words in text for words in NO_RUNTIME):
        return StartRefused("runtime_missing", f"{text}: {RUNTIME_REMEDY}")
    if any(words in text for words in PORT_TAKEN):
        return StartRefused("port_taken", f"{name}: {text}")
    if any(words in text for words in NO_PROGRAM):
        return StartRefused("no_such_program", f"{name}: {text}")
    if "bind source path" in text or "invalid mount config" in text:
        return StartRefused("mount_denied", f"{name}: {text}")
    return StartRefused("start_failed", f"{name}: {text}")

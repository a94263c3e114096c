"""What the engine tests share: launches, waiting for what is seen, and a private Docker Engine."""

from __future__ import annotations

import asyncio
import http.client
import io
import itertools
import json
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rigbook_nodeagent.engines.protocol import Launch
from rigbook_schemas.values import Component, StopScope

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rigbook_nodeagent.engines.protocol import Engines, Running

# Of this test session alone: another session on the machine has processes of its own, found by this name.
CLUSTER = os.environ.setdefault("RIGBOOK_TEST_CLUSTER", f"test{os.getpid()}")
CARD = "GPU-0f4c0d2e-1111-5222-8333-444455556666"
PATIENCE_SECONDS = 10.0


def launch(
    *command: str,
    epoch: int = 100,
    component: str = "main",
    cluster: str = CLUSTER,
    node: str = "node-a",
    cards: tuple[str, ...] = (CARD,),
    environment: dict[str, str] | None = None,
    **fields: object,
) -> Launch:
    return Launch(
        cluster=cluster,
        node=node,
        demand=f"demand-{epoch}",
        epoch=epoch,
        project="vision",
        owner="wei",
        component=Component(name=component, command=command, **fields),  # type: ignore[arg-type]
        cards=cards,
        indices=tuple(range(len(cards))),
        memory_bytes=8 * 1024**3,
        card_memory_bytes=24 * 1024**3,
        environment=environment or {},
    )


async def eventually(question: Callable[[], Awaitable[object]], *, seconds: float = PATIENCE_SECONDS) -> None:
    """Ask until the answer is true; the engine tests look at real processes, which take their time."""
    deadline = time.monotonic() + seconds
    while not await question():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def until_ended(engine: Engines, running: Running) -> Running:
    """The component as inspected after its end."""
    seen: list[Running] = []

    async def ended() -> bool:
        now = await engine.inspect(running.epoch, running.component)
        assert now is not None
        seen.append(now)
        return not now.running

    await eventually(ended)
    return seen[-1]


async def started_and_up(engine: Engines, order: Launch) -> Running:
    """Start a program that says `up`, and wait for it: a signal before that may find nobody to hear it."""
    running = await engine.start(order)

    async def up() -> bool:
        return "up" in await output_of(engine, running)

    await eventually(up)
    return running


UP_AND_SLEEP = ("sh", "-c", "echo up; exec sleep 300")


def alive(pid: int) -> bool:
    """Does it run? A zombie does not."""
    try:
        state = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()[0]
        )
    except OSError:
        return False
    return state not in "ZX"


async def output_of(engine: Engines, running: Running) -> str:
    return b"".join([line async for line in engine.logs(running, follow=False, lines_max=1000)]).decode()


async def reap_everything(engine: Engines) -> None:
    """Leave nothing behind, whatever a test did."""
    for running in await engine.inventory():
        await engine.stop(running, grace_seconds=0, scope=StopScope.EVERYTHING)
        await engine.remove(running)


def as_root() -> bool:
    return os.geteuid() == 0


# -- a private Docker Engine --------------------------------------------------------------------------

IMAGE = "rigbook-test:busybox"
DAEMON_START_SECONDS = 30.0
NVIDIA_HOOK = "nvidia-container-runtime-hook"


class PrivateDocker:
    """A dockerd of our own: its own data, socket, bridge and no registry within reach.

    With `cards=True` a stub of the nvidia hook is on its PATH: device requests are accepted then, and what
    was asked for can be read inside, without a card.
    """

    def __init__(self, folder: Path, *, cards: bool, number: int, live_restore: bool = False) -> None:
        self.folder = folder
        self._live_restore = live_restore
        self.url = f"unix://{folder}/docker.sock"
        self._bridge = f"rbt{os.getpid() % 100000}{number}"
        self._subnet = f"10.{200 + number}.{os.getpid() % 250}.1/24"
        self._path = os.environ["PATH"] + ":/usr/sbin:/sbin"
        if cards:
            hooks = folder / "hooks"
            hooks.mkdir()
            (hooks / NVIDIA_HOOK).write_text("#!/bin/sh\ncat >/dev/null\n")
            (hooks / NVIDIA_HOOK).chmod(0o755)
            self._path = f"{hooks}:{self._path}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        for words in (
            ("link", "add", "name", self._bridge, "type", "bridge"),
            ("addr", "add", self._subnet, "dev", self._bridge),
            ("link", "set", self._bridge, "up"),
        ):
            subprocess.run(["ip", *words], check=True, capture_output=True, env={"PATH": self._path})
        self.boot()
        self._import_image()

    def boot(self) -> None:
        """Start the daemon (again, after a `stop`): the data folder stays."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "dockerd",
                    f"--data-root={self.folder}/data",
                    f"--exec-root={self.folder}/exec",
                    f"--pidfile={self.folder}/pid",
                    f"--host={self.url}",
                    f"--bridge={self._bridge}",
                    "--userland-proxy=false",
                    *(["--live-restore"] if self._live_restore else []),
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": self._path},
            )
        deadline = time.monotonic() + DAEMON_START_SECONDS
        while True:
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            try:
                if self.request("GET", "/_ping")[0] == 200:
                    return
            except OSError:
                time.sleep(0.05)

    def stop(self) -> None:
        """End the daemon; containers end with it, unless it restores them live."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=60)
            self._process = None

    def destroy(self) -> None:
        if self._process is not None:
            for container in json.loads(self.request("GET", "/containers/json?all=1")[1]):
                self.request("DELETE", f"/containers/{container['Id']}?force=1")
        self.stop()
        subprocess.run(
            ["ip", "link", "del", self._bridge], check=False, capture_output=True, env={"PATH": self._path}
        )
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]

    def request(
        self, method: str, path: str, body: bytes = b"", kind: str = "application/json"
    ) -> tuple[int, bytes]:
        """The plain API, so that what the engine did is seen by other means."""
        connection = http.client.HTTPConnection("localhost", timeout=60)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(60)
        try:
            connection.sock.connect(self.url.removeprefix("unix://"))
            connection.request(method, path, body or None, {"Content-Type": kind} if body else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _import_image(self) -> None:
        repository, _, tag = IMAGE.partition(":")
        path = f"/images/create?fromSrc=-&repo={repository}&tag={tag}"
        status, answer = self.request("POST", path, busybox_rootfs(), "application/x-tar")
        assert status == 200, answer


def busybox_rootfs() -> bytes:
    """A root file system of one static program and its many names, as tar."""
    program = Path("/usr/bin/busybox" if Path("/usr/bin/busybox").exists() else "/bin/busybox")
    names = subprocess.run([program, "--list"], check=True, capture_output=True, text=True).stdout.split()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder in ("bin", "tmp", "etc", "proc", "sys", "dev"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        tar.add(program.resolve(), arcname="bin/busybox")
        for name in names:
            if name != "busybox":
                entry = tarfile.TarInfo(f"bin/{name}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "/bin/busybox"
                tar.addfile(entry)
    return buffer.getvalue()


def _new_docker(request: pytest.FixtureRequest, **options: Any) -> PrivateDocker:
    lacking = [
        name
        for name in ("dockerd", "ip")
        if not shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    ]
    if lacking or not as_root():
        pytest.skip(f"needs Docker Engine and root (lacking: {', '.join(lacking) or 'root'})")
    folder = Path(tempfile.mkdtemp(prefix="rbt-", dir="/tmp"))  # a socket's path is 107 characters at most
    docker = PrivateDocker(folder, **options)
    request.addfinalizer(docker.destroy)
    docker.start()
    return docker


def _private_docker(request: pytest.FixtureRequest, *, cards: bool) -> PrivateDocker:
    """One per session, also when several test files import the fixture."""
    known = request.config.stash.setdefault(_DOCKERS, {})
    if cards not in known:
        known[cards] = _new_docker(request, cards=cards, number=int(cards))
        request.addfinalizer(lambda: known.pop(cards))
    return known[cards]


_DOCKERS: pytest.StashKey[dict[bool, PrivateDocker]] = pytest.StashKey()


@pytest.fixture(scope="session")
def dockerd(request: pytest.FixtureRequest) -> PrivateDocker:
    """A Docker Engine without any runtime for cards."""
    return _private_docker(request, cards=False)


@pytest.fixture(scope="session")
def dockerd_with_cards(request: pytest.FixtureRequest) -> PrivateDocker:
    """A Docker Engine that accepts device requests."""
    return _private_docker(request, cards=True)


@pytest.fixture
def own_dockerd(request: pytest.FixtureRequest) -> Callable[..., PrivateDocker]:
    """Makes a Docker Engine of one test alone, which may end and restart it."""
    numbers = itertools.count(10)
    return lambda *, live_restore=False: _new_docker(
        request, cards=False, number=next(numbers), live_restore=live_restore
    )

"""Two worlds with one face: the in-memory server, and a real nats-server in a folder of its own."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rigbook_bus.embedded import EmbeddedServer
from rigbook_bus.jetstream import JetStreamBus
from rigbook_bus.memory import MemoryBus, MemoryServer
from rigbook_bus.protocol import Bus, BusUnavailable, Link, StreamSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# Bound of any wait for something that is expected to happen; never waited out by a passing test.
SOON_SECONDS = 10.0


class MemoryWorld:
    real = False

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.buses: list[Bus] = []

    async def connect(self, name: str = "test") -> MemoryBus:
        bus = await MemoryBus.connect(self.server, name=name)
        self.buses.append(bus)
        return bus

    async def stop(self) -> None:
        self.server.stop()

    async def kill(self) -> None:
        self.server.stop("killed")

    async def start(self) -> None:
        self.server.start()

    async def recreate(self, spec: StreamSpec) -> None:
        self.server.recreate(spec.name)

    async def remove(self, spec: StreamSpec) -> None:
        self.server.remove(spec.name)

    async def come_back_without_the_end(self, spec: StreamSpec, last_seq: int) -> None:
        self.server.truncate(spec.name, last_seq)

    async def close(self) -> None:
        for bus in self.buses:
            await bus.close()
        self.server.stop()


class NatsWorld:
    real = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = EmbeddedServer(folder / "nats")
        self.buses: list[Bus] = []

    async def connect(self, name: str = "test") -> JetStreamBus:
        bus = await JetStreamBus.connect(self.server.url, name=name)
        self.buses.append(bus)
        return bus

    async def stop(self) -> None:
        await self.server.stop()

    async def kill(self) -> None:
        await self.server.kill()

    async def start(self) -> None:
        await self.server.start()

    async def _admin(self, subject: str) -> None:
        bus = await JetStreamBus.connect(self.server.url, name="admin")
        assert b"error" not in await bus.request(subject, b"")
        await bus.close()

    async def recreate(self, spec: StreamSpec) -> None:
        await self._admin(f"$JS.API.STREAM.DELETE.{spec.name}")
        bus = await JetStreamBus.connect(self.server.url, name="admin")
        await bus.ensure_stream(spec)
        await bus.close()

    async def remove(self, spec: StreamSpec) -> None:
        await self._admin(f"$JS.API.STREAM.DELETE.{spec.name}")

    async def come_back_without_the_end(self, spec: StreamSpec, last_seq: int) -> None:
        """The folder as it was at `last_seq` (see `keep_folder`): a restored backup, or a damaged block."""
        await self.stop()
        for store in (self.server.folder / "jetstream", self.folder / "kept"):
            assert store.exists()
        shutil.rmtree(self.server.folder / "jetstream")
        shutil.copytree(self.folder / "kept", self.server.folder / "jetstream")
        await self.start()

    async def keep_folder(self) -> None:
        await self.stop()
        shutil.copytree(self.server.folder / "jetstream", self.folder / "kept")
        await self.start()

    async def close(self) -> None:
        for bus in self.buses:
            await bus.close()
        await self.server.stop()


World = MemoryWorld | NatsWorld


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.nats)])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    made: World
    if request.param == "memory":
        made = MemoryWorld()
    else:
        made = NatsWorld(tmp_path)
        await made.start()
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsWorld]:
    """For what only a real server has: rights, files, a process."""
    made = NatsWorld(tmp_path)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


class LinkWatch:
    """Every change of a bus's link, and a way to wait for one."""

    def __init__(self, bus: Bus) -> None:
        self.seen: list[tuple[Link, str]] = []
        self._changed = asyncio.Event()
        self._bus = bus
        bus.on_link(self._told)

    def _told(self, link: Link, why: str) -> None:
        self.seen.append((link, why))
        self._changed.set()

    async def until(self, link: Link) -> None:
        async with asyncio.timeout(SOON_SECONDS):
            while self._bus.link is not link:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def watch() -> type[LinkWatch]:
    return LinkWatch


class Patience:
    """Retries what an outage may interrupt, without waiting on the clock."""

    @staticmethod
    async def stored(bus: Bus, subject: str, body: bytes, message_id: str) -> int:
        async with asyncio.timeout(SOON_SECONDS):
            while True:
                try:
                    return (await bus.append(subject, body, message_id=message_id)).seq
                except BusUnavailable:
                    await asyncio.sleep(0.005)


@pytest.fixture
def patience() -> type[Patience]:
    return Patience

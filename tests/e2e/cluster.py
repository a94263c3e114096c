"""A NATS cluster of three on three machines of a `Network`."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rigbook_bus.embedded import find_binary
from rigbook_bus.jetstream import JetStreamBus
from rigbook_bus.protocol import BusError
from rigbook_schemas.subjects import LEDGER_STREAM

if TYPE_CHECKING:
    from tests.e2e.network import Network

__all__ = ["Cluster"]

PORT = 4222
ROUTES = 6222
READY_SECONDS = 40.0


class Cluster:
    """Servers 1 to 3. Clients keep to the server they were told of: nothing is advertised."""

    def __init__(self, folder: Path, network: Network) -> None:
        self._folder = folder
        self._network = network
        self._servers: dict[int, subprocess.Popen[bytes]] = {}

    def url(self, n: int) -> str:
        return f"nats://{self._network.address(n)}:{PORT}"

    def start(self, n: int) -> None:
        folder = self._folder / f"nats-{n}"
        folder.mkdir(exist_ok=True)
        routes = ", ".join(f'"nats://{self._network.address(m)}:{ROUTES}"' for m in self._network.machines)
        config = folder / "nats.conf"
        config.write_text(
            f"""
server_name: "s{n}"
host: "{self._network.address(n)}"
port: {PORT}
log_file: "{folder}/nats.log"
ping_interval: "2s"
jetstream {{ store_dir: "{folder}/js", sync_interval: always }}
cluster {{
  name: "rigbook"
  host: "{self._network.address(n)}"
  port: {ROUTES}
  routes: [{routes}]
  no_advertise: true
  ping_interval: "2s"
}}
"""
        )
        self._servers[n] = subprocess.Popen(
            [*self._network.inside(n), str(find_binary()), "-c", str(config)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
        )  # fmt: skip

    async def open(self) -> None:
        for n in self._network.machines:
            self.start(n)
        await self.ready(1)

    async def ready(self, n: int) -> None:
        """JetStream answers through this server."""
        async with asyncio.timeout(READY_SECONDS):
            while True:
                try:
                    bus = await JetStreamBus.connect(self.url(n), name="ready", wait_seconds=5)
                except BusError:
                    await asyncio.sleep(0.1)
                    continue
                try:
                    await bus.stream("NONE")
                except BusError:
                    await asyncio.sleep(0.2)
                else:
                    return
                finally:
                    await bus.close()

    def kill(self, n: int) -> None:
        self._servers[n].send_signal(signal.SIGKILL)
        self._servers[n].wait()

    async def leader(self, bus: JetStreamBus) -> int:
        """Number of the server that leads the ledger stream."""
        answer: dict[str, Any] = msgspec.json.decode(
            await bus.request(f"$JS.API.STREAM.INFO.{LEDGER_STREAM}", b"{}")
        )
        return int(str(answer["cluster"]["leader"]).removeprefix("s"))

    def close(self) -> None:
        for server in self._servers.values():
            if server.poll() is None:
                server.kill()
            server.wait()

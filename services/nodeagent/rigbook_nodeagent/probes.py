"""Probes: does a component answer yet? One try per call; how often and how long is the workload's business."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rigbook_schemas.values import Probe

__all__ = ["probe_once"]


async def probe_once(probe: Probe, *, environment: Mapping[str, str], host: str = "127.0.0.1") -> str:
    """Empty when the probe says yes, else why it does not. Never takes longer than its time-out."""
    try:
        async with asyncio.timeout(probe.timeout_seconds):
            if probe.kind == "exec":
                return await _exec(probe, environment)
            return await _connect(probe, host)
    except TimeoutError:
        return f"no answer within {probe.timeout_seconds:g} s"
    except OSError as error:
        return str(error)


async def _connect(probe: Probe, host: str) -> str:
    reader, writer = await asyncio.open_connection(host, probe.port)
    try:
        if probe.kind == "tcp":
            return ""
        writer.write(f"GET {probe.path} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        line = (await reader.readline()).decode(errors="replace").split()
        if len(line) >= 2 and line[1].isdigit() and 200 <= int(line[1]) < 400:
            return ""
        return f"HTTP {line[1]}" if len(line) >= 2 else "not an HTTP answer"
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _exec(probe: Probe, environment: Mapping[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *probe.command,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    return "" if code == 0 else f"exit code {code}"

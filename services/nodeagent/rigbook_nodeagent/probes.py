"""Probes: does a component answer yet? One try per call; how often and what follows is `probing`'s business."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from rigbook_nodeagent.engines.protocol import EngineError

if TYPE_CHECKING:
    from rigbook_schemas.values import Probe

__all__ = ["Target", "probe_once"]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where a component is asked. `ports`: its own ports to (host, port) where they can be reached."""

    ports: Mapping[int, tuple[str, int]] = {}
    host: str = "127.0.0.1"  # for ports that are not in `ports`
    # Runs a command inside of it and gives the exit code. Raises EngineError.
    execute: Callable[[tuple[str, ...]], Awaitable[int]] | None = None
    unknown: str = ""  # why it cannot be asked now


async def probe_once(probe: Probe, target: Target) -> str:
    """Empty when the probe says yes, else why it does not. Never takes longer than its time-out."""
    try:
        async with asyncio.timeout(probe.timeout_seconds):
            if probe.kind == "exec":
                return await _exec(probe, target)
            return await _connect(probe, *target.ports.get(probe.port, (target.host, probe.port)))
    except TimeoutError:
        return f"no answer within {probe.timeout_seconds:g} s"
    except EngineError as error:
        return str(error)[:300]
    except (OSError, ValueError) as error:  # ValueError: a line without end, a command with a zero in it
        return str(error)[:300] or type(error).__name__


async def _connect(probe: Probe, host: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if probe.kind == "tcp":
            return ""
        writer.write(f"GET {probe.path} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        line = (await reader.readline()).decode(errors="replace").split()
        if len(line) >= 2 and line[1].isdigit() and 200 <= int(line[1]) < 400:
            return ""
        return f"HTTP {line[1][:20]}" if len(line) >= 2 else "not an HTTP answer"
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _exec(probe: Probe, target: Target) -> str:
    if target.execute is None:
        return "nothing to run a command in"
    code = await target.execute(probe.command)
    return "" if code == 0 else f"exit code {code}"

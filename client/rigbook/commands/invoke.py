"""From a command to its coroutine: the connection, Ctrl-C, and time."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import socket
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

import typer

from rigbook.client import Client
from rigbook.context import find_url
from rigbook.exitcodes import Exit

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
    from pathlib import Path

    from rich.console import RenderableType

__all__ = ["connected", "me", "now_ns", "run", "watch"]

WATCH_SECONDS: Final = 1.0

_Result = TypeVar("_Result")


def run(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a command's coroutine; Ctrl-C ends it quietly with its exit code."""
    try:
        return asyncio.run(main)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None


def me() -> str:
    """Who gives this command: $RIGBOOK_OWNER, else the login name."""
    named = os.environ.get("RIGBOOK_OWNER")
    if named:
        return named
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a passwd entry
        return "unknown"


def now_ns() -> int:
    return time.time_ns()


@contextlib.asynccontextmanager
async def connected(nats: str | None, data: Path | None) -> AsyncGenerator[Client]:
    """A client of the bus that the options mean. Raises NoAnswer."""
    client = await Client.connect(find_url(nats, data), source=f"client/{me()}@{socket.gethostname()}")
    try:
        yield client
    finally:
        await client.close()


async def watch(draw: Callable[[], Awaitable[RenderableType]]) -> None:
    """Draw again every second, in place on a terminal, one below the other elsewhere; until Ctrl-C."""
    from rich.live import Live

    from rigbook.output import console
    from rigbook.tables import fitted

    to = console()
    if not to.is_terminal:
        while True:
            to.print(fitted(await draw(), to))
            to.print()
            await asyncio.sleep(WATCH_SECONDS)
    with Live(fitted(await draw(), to), console=to, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            live.update(fitted(await draw(), to), refresh=True)
            await asyncio.sleep(WATCH_SECONDS)

"""`up`: the whole of Rigbook on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer
from rigbook_bus.protocol import BusError

from rigbook import tables
from rigbook.client import Client
from rigbook.commands.invoke import run
from rigbook.context import default_data
from rigbook.exitcodes import Exit
from rigbook.failures import Invalid, RigbookFailure
from rigbook.hardware import cards_of, default_engines, default_node
from rigbook.labels import pairs
from rigbook.output import say, show

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("up")(up)


def up(
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Default: $RIGBOOK_DATA, else yours.")
    ] = None,
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus",
            metavar="SPEC",
            help="auto (NVML if it has cards, else simulated), nvml, or sim:4xRTX4090.",
        ),
    ] = "auto",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Of the bus, on loopback; 0 takes a free one.")
    ] = 4222,
    no_agent: Annotated[bool, typer.Option("--no-agent", help="Without this machine's cards.")] = False,
    node: Annotated[
        str, typer.Option("--node", metavar="NAME", help="Name of this machine. Default: its host name.")
    ] = "",
    labels: Annotated[list[str] | None, typer.Option("--labels", "-l", metavar="NAME=VALUE,...")] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", metavar="ENGINE", help="process or docker; may be repeated."),
    ] = None,
    heartbeat: Annotated[float, typer.Option("--heartbeat", min=0.05, metavar="SECONDS")] = 1.0,
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", metavar="DIR", help="Default: logs in the data folder.")
    ] = None,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
) -> None:
    """Bus, ledger, placer, reaper and an agent in one process tree; Ctrl-C ends all of it."""
    from rigbook.cell import CellOptions

    where = (data or default_data()).absolute()
    spec, told = ("", "no agent") if no_agent else cards_of(gpus)
    for one in engine or ():
        if one not in ("process", "docker"):
            raise Invalid(f"--engine: {one!r} is none; expected process or docker", code="invalid_flag")
    options = CellOptions(
        data=where,
        logs=(log_dir or where / "logs").absolute(),
        gpus=spec,
        port=port,
        node=node or default_node(),
        engines=tuple(engine or default_engines()),
        labels=pairs("--labels", [pair for text in labels or () for pair in text.split(",") if pair]),
        heartbeat_seconds=heartbeat,
        log_level=log_level,
    )
    say(f"data {where}")
    say(f"node {options.node}: {told}; engines: {', '.join(options.engines)}" if spec else told)
    raise typer.Exit(run(_up(options)))


async def _up(options: object) -> int:
    from rigbook.cell import Cell, CellOptions

    assert isinstance(options, CellOptions)
    asked = asyncio.Event()
    signals: list[str] = []

    def ask(name: str) -> None:
        if asked.is_set():
            say(f"{name} again: still ending in order; kill -9 would leave the bus behind", "yellow")
        signals.append(name)
        asked.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ask, number.name)
    cell = Cell(options, _tell)
    try:
        starting = asyncio.create_task(cell.start())
        stop = asyncio.create_task(asked.wait())
        await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return Exit.OK
        stop.cancel()
        starting.result()
        _overview(cell.states(), cell.url)
        await asked.wait()
        await _say_what_stays(cell.url)
        return Exit.OK
    finally:
        if any(pid for _, _, pid, _ in cell.states()):
            say(f"{f'{signals[0]}: ' if signals else ''}ending in order")
        await cell.stop()


def _tell(part: str, state: str, text: str) -> None:
    if state == "starting":
        return
    line = f"{part:<7} {state}{f': {text}' if text else ''}"
    say(line, {"ready": "green", "stopped": "dim"}.get(state, "yellow"))


def _overview(states: list[tuple[str, str, int | None, int]], url: str) -> None:
    table = tables.plain("PART", "STATUS", "PID", "RESTARTS")
    for name, state, pid, restarts in states:
        table.add_row(name, tables.status(state), str(pid or "-"), str(restarts))
    say()
    show(table)
    say(
        f"\nthe bus is {url}; in another terminal: rigbook gpu list, rigbook apply -f FILE, rigbook ls. Ctrl-C ends it."
    )


async def _say_what_stays(url: str) -> None:
    """Workloads outlive the control part: a restart of it must not cost anybody's run."""
    try:
        async with (
            asyncio.timeout(1.0),
            await Client.connect(url, source="client/up", wait_seconds=1.0) as client,
        ):
            rows = (await client.ask("status")).rows
    except (RigbookFailure, BusError, TimeoutError):
        return
    bindings = rows[0].bindings if rows else 0
    if bindings:
        say(
            f"{bindings} {'binding runs' if bindings == 1 else 'bindings run'} on, and {'is' if bindings == 1 else 'are'} adopted at the next start on this data folder"
        )

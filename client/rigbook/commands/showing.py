"""`demo`: the whole of Rigbook on this machine, with simulated cards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the data folder, for a look at logs and log.")
    ] = False,
    examples: Annotated[
        Path | None, typer.Option("--examples", metavar="DIR", help="Folder with the demand files.")
    ] = None,
    gpus: Annotated[str, typer.Option("--gpus", metavar="SPEC", help="Simulated cards.")] = "sim:4xRTX4090",
    journal: Annotated[
        Path | None, typer.Option("--journal", metavar="FILE", help="Keep the log of it as a journal.")
    ] = None,
) -> None:
    """A leftover seen and healed, in under a minute, without a GPU: everything shown is read back from the system."""
    from rigbook.demo import run_demo

    raise typer.Exit(run_demo(keep=keep, examples=examples, gpus=gpus, journal=journal))

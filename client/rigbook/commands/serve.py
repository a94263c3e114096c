"""`serve ...` and `agent`: one service each, in the foreground."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rigbook.context import default_data, find_url
from rigbook.failures import Invalid
from rigbook.hardware import cards_of, default_engines, default_node
from rigbook.labels import pairs
from rigbook.serving import Start, run_part

__all__ = ["register"]

Url = Annotated[str | None, typer.Option("--nats", metavar="URL", help="The bus.")]
DataDir = Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Where it keeps its own files.")]
Instance = Annotated[
    str, typer.Option("--instance", metavar="NAME", help="Its name, when several run side by side.")
]
Credentials = Annotated[
    str,
    typer.Option("--credentials", metavar="FILE", envvar="RIGBOOK_CREDENTIALS", help="A NATS .creds file."),
]
Replicas = Annotated[
    int,
    typer.Option(
        "--replicas",
        envvar="RIGBOOK_REPLICAS",
        min=1,
        max=5,
        help="Of the streams, for the ledger, which makes them: 3 on a cluster.",
    ),
]
ReadyFd = Annotated[int, typer.Option("--ready-fd", hidden=True)]
Lifeline = Annotated[bool, typer.Option("--lifeline", hidden=True)]
LogForm = Annotated[str, typer.Option("--log-form", help="json, console, or auto.")]
LogLevel = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]


def register(app: typer.Typer) -> None:
    serve = typer.Typer(
        no_args_is_help=True, help="Run one service in the foreground (as `up` and compose do)."
    )
    for name, words in (
        ("ledger", "Keeps the book: folds the log, answers questions, makes the streams."),
        ("placer", "Gives cards to demands."),
        ("reaper", "Watches for drift; heals what it may."),
    ):
        serve.command(name, help=words)(_command(name))
    app.add_typer(serve, name="serve")
    app.command("agent")(agent)


def _command(name: str) -> Callable[..., None]:
    def command(
        nats: Url = None,
        data: DataDir = None,
        instance: Instance = "",
        credentials: Credentials = "",
        replicas: Replicas = 1,
        log_form: LogForm = "auto",
        log_level: LogLevel = "info",
        ready_fd: ReadyFd = -1,
        lifeline: Lifeline = False,
    ) -> None:
        options = {
            "data": data or default_data() / name,
            "instance": instance or f"{name}-1",
            "replicas": replicas,
        }
        start = Start(
            service=name, url=find_url(nats, None), options=options, credentials=credentials,
            ready_fd=ready_fd, lifeline=lifeline, log_form=log_form, log_level=log_level,
        )  # fmt: skip
        raise typer.Exit(run_part(start))

    return command


def agent(
    join: Annotated[
        str | None, typer.Option("--join", "--nats", metavar="URL", help="The bus to join.")
    ] = None,
    node: Annotated[
        str, typer.Option("--node", metavar="NAME", help="Name of this machine. Default: its host name.")
    ] = "",
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="SPEC", help="auto, nvml, or sim:4xRTX4090 and the like.")
    ] = "auto",
    labels: Annotated[
        list[str] | None,
        typer.Option("--labels", "-l", metavar="NAME=VALUE,...", help="For --require and --prefer."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", metavar="ENGINE", help="process or docker; may be repeated."),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="NAME",
            help="Others' workloads are never touched. Default: a name that only this log has.",
        ),
    ] = "",
    weights: Annotated[
        list[Path] | None,
        typer.Option(
            "--weights",
            metavar="DIR",
            help="Folder of model weights; the first one is given to components. Default: in the data folder.",
        ),
    ] = None,
    mount: Annotated[
        list[str] | None, typer.Option("--mount", metavar="DIR", help="Folder that containers may mount.")
    ] = None,
    docker: Annotated[str, typer.Option("--docker", metavar="URL", help="Docker's socket.")] = "",
    mps: Annotated[
        str, typer.Option("--mps", metavar="DIR", help="Pipe folder of CUDA MPS: it keeps memory slices.")
    ] = "",
    exclusive_process: Annotated[
        bool,
        typer.Option("--exclusive-process", help="One process at a time on exclusive cards (compute mode)."),
    ] = False,
    heartbeat: Annotated[float, typer.Option("--heartbeat", min=0.05, metavar="SECONDS")] = 1.0,
    data: DataDir = None,
    credentials: Credentials = "",
    log_form: LogForm = "auto",
    log_level: LogLevel = "info",
    ready_fd: ReadyFd = -1,
    lifeline: Lifeline = False,
) -> None:
    """Put this machine's cards into the book, and run what is bound to them."""
    spec, told = cards_of(gpus)
    engines = tuple(engine or default_engines())
    for name in engines:
        if name not in ("process", "docker"):
            raise Invalid(f"--engine: {name!r} is none; expected process or docker", code="invalid_flag")
    name = node or default_node()
    if not lifeline:
        typer.echo(f"node {name}: {told}; engines: {', '.join(engines)}", err=True)
    options = {
        "node": name,
        "cluster": cluster,
        "data": data or default_data() / f"agent-{name}",
        "gpus": spec,
        "engines": engines,
        "labels": pairs("--labels", [pair for text in labels or () for pair in text.split(",") if pair]),
        "heartbeat_seconds": heartbeat,
        "weights_dir": weights[0].absolute() if weights else None,
        "weights_dirs": tuple(str(folder.absolute()) for folder in (weights or ())[1:]),
        "mounts_allowed": tuple(mount or ()),
        "docker_url": docker,
        "mps": mps,
        "exclusive_process": exclusive_process,
    }
    start = Start(
        service="agent", url=find_url(join, None), options=options, credentials=credentials,
        ready_fd=ready_fd, lifeline=lifeline, log_form=log_form, log_level=log_level,
    )  # fmt: skip
    raise typer.Exit(run_part(start))

"""`apply`, `submit`: asking for GPUs. The options that asking has are here, too."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated

import typer
from rigbook_schemas.values import Workload

from rigbook import tables
from rigbook.advice import advice
from rigbook.applying import Outcome, apply_all, identified
from rigbook.commands.invoke import connected, me, run
from rigbook.commands.options import AsJson, By, Data, Nats, Project
from rigbook.demandfile import read_files
from rigbook.flags import Flags, demand_of
from rigbook.narrative import asked
from rigbook.output import json_line, say, show, warn

if TYPE_CHECKING:
    from pathlib import Path

    from rigbook_schemas.events import DemandRaised

    from rigbook.applying import Applied

__all__ = [
    "Contact",
    "Env",
    "Files",
    "Gpu",
    "Image",
    "Mode",
    "Node",
    "Placement",
    "Preemptible",
    "Preempts",
    "Prefer",
    "Priority",
    "Purpose",
    "Require",
    "apply_now",
    "register",
]

Files = Annotated[
    list[str], typer.Option("--file", "-f", metavar="FILE", help="A demand file; may be given again.")
]
Gpu = Annotated[
    str,
    typer.Option(
        "--gpu", metavar="ASK", help="24GB, 24GB:2 (two cards), A100:80GB:2. G, GB and GiB are GiB."
    ),
]
Mode = Annotated[str, typer.Option("--mode", help="exclusive, memory-slice or time-slice.")]
Env = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="Variable; may be repeated.")
]
Require = Annotated[
    list[str] | None, typer.Option("--require", metavar="NAME=VALUE", help="Label a node must have.")
]
Prefer = Annotated[
    list[str] | None, typer.Option("--prefer", metavar="NAME=VALUE", help="Label a node should have.")
]
Node = Annotated[str, typer.Option("--node", metavar="NAME", help="This node and no other.")]
Image = Annotated[
    str, typer.Option("--image", metavar="IMAGE", help="Container image; without one it is a plain process.")
]
Priority = Annotated[str, typer.Option("--priority", help="0 to 100, or low, normal, high.")]
MaxRun = Annotated[
    str, typer.Option("--max-run", metavar="TIME", help="Stopped after this time, such as 2h.")
]
Preemptible = Annotated[
    bool,
    typer.Option("--preemptible", help="May be evicted for others; it is asked to save, and waits again."),
]
Preempts = Annotated[
    bool, typer.Option("--preempts", help="May evict preemptible ones of lower priority, if it fits then.")
]
Placement = Annotated[
    str, typer.Option("--placement", metavar="POLICY", help="How cards are ranked for it: pack, spread, ...")
]
Purpose = Annotated[
    str, typer.Option("--purpose", metavar="TEXT", help="What it is for; others will read it.")
]
Contact = Annotated[
    str, typer.Option("--contact", metavar="TEXT", envvar="RIGBOOK_CONTACT", help="How to reach the owner.")
]
Words = Annotated[
    list[str] | None, typer.Argument(metavar="[--] COMMAND...", help="What runs.", show_default=False)
]


def register(app: typer.Typer) -> None:
    own_words = {"allow_interspersed_args": False, "ignore_unknown_options": False}
    app.command("apply")(apply)
    app.command("submit", context_settings=own_words)(submit)


def apply(
    file: Files,
    replace: Annotated[
        bool, typer.Option("--replace", help="Stop the live one under this name, raise this one.")
    ] = False,
    by: By = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Raise the demands of files. The same spec again changes nothing."""
    specs = [filed.spec for filed in read_files(file)]
    apply_now(specs, replace=replace, by=by or me(), as_json=as_json, nats=nats, data=data)


def submit(
    gpu: Gpu,
    project: Project = "default",
    command: Words = None,
    name: Annotated[
        str, typer.Option("--name", "-n", metavar="NAME", help="Default: from the command.")
    ] = "",
    image: Image = "",
    mode: Mode = "exclusive",
    node: Node = "",
    require: Require = None,
    prefer: Prefer = None,
    env: Env = None,
    priority: Priority = "normal",
    max_run: MaxRun = "",
    preemptible: Preemptible = False,
    preempts: Preempts = False,
    placement: Placement = "",
    restart: Annotated[str, typer.Option("--restart", help="never or on-failure.")] = "never",
    purpose: Purpose = "",
    contact: Contact = "",
    by: By = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Run a command once, on GPUs of its own: rigbook submit --gpu 24GB --project nlp -- python train.py"""
    flags = Flags(
        workload=Workload.BATCH, gpu=gpu, project=project, owner=by or me(), contact=contact, name=name,
        command=tuple(command or ()), image=image, mode=mode, node=node, require=tuple(require or ()),
        prefer=tuple(prefer or ()), env=tuple(env or ()), priority=priority, max_run=max_run, restart=restart,
        purpose=purpose, preemptible=preemptible, preempts=preempts, placement=placement,
    )  # fmt: skip
    spec = identified(demand_of(flags), secrets.token_hex(8))

    async def go() -> int:
        async with connected(nats, data) as client:
            return await client.raise_demand(spec)

    seq = run(go())
    for line in advice(spec):
        warn(line)
    if as_json:
        json_line({"demand": spec.demand, "seq": seq})
        return
    say(
        f"{spec.demand} raised: {asked(spec.resources.memory_bytes, spec.resources.count, spec.resources.mode)}"
    )
    say(
        f"  rigbook show {spec.demand}     rigbook logs -f {spec.demand}     rigbook stop {spec.demand}",
        "dim",
    )


def apply_now(
    specs: list[DemandRaised], *, replace: bool, by: str, as_json: bool, nats: str | None, data: Path | None
) -> None:
    async def go() -> list[Applied]:
        async with connected(nats, data) as client:
            return await apply_all(client, specs, by=by, replace=replace, new_id=lambda: secrets.token_hex(8))

    applied = run(go())
    for spec in specs:
        for line in advice(spec):
            warn(f"{spec.name}: {line}")
    if as_json:
        json_line({"items": applied})
        return
    table = tables.plain("NAME", "PROJECT", "DEMAND", "RESULT")
    for one in applied:
        after = (
            f" (was {one.replaced}: {'; '.join(one.differences)})" if one.outcome is Outcome.REPLACED else ""
        )
        table.add_row(one.name, one.project, one.demand, one.outcome + after)
    show(table)

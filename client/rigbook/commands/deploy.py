"""`deploy`, `plan`: a service that runs until somebody stops it, and what would become of a demand."""

from __future__ import annotations

import re
import secrets
import shlex
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rigbook_schemas.queries import CardRow
from rigbook_schemas.sentences import enforcement, gib, sentence
from rigbook_schemas.values import Workload

from rigbook import tables
from rigbook.applying import identified
from rigbook.commands.demands import (
    Contact,
    Env,
    Gpu,
    Image,
    Mode,
    Node,
    Prefer,
    Priority,
    Purpose,
    Require,
    apply_now,
)
from rigbook.commands.invoke import connected, me, run
from rigbook.commands.options import AsJson, By, Data, Nats, Project
from rigbook.commands.why import show_reasons, soonest_line, victim_line
from rigbook.demandfile import read_files
from rigbook.demandfile.demand import NAME_MAX
from rigbook.exitcodes import Exit
from rigbook.failures import Unusable
from rigbook.flags import Flags, demand_of, env_of, port_of
from rigbook.inference import contract_of, known_engines, preset_of
from rigbook.narrative import asked, short_card
from rigbook.output import json_line, say, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_schemas.events import DemandRaised
    from rigbook_schemas.values import Component

    from rigbook.client import Plan
    from rigbook.inference.contract import Contract

__all__ = ["register"]

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Model to serve, such as Qwen/Qwen2.5-7B-Instruct; a node that has it is preferred.",
    ),
]
EngineName = Annotated[
    str,
    typer.Option("--engine", metavar="ENGINE", help=f"{', '.join(known_engines())}, or a file of your own."),
]
Args = Annotated[
    str,
    typer.Option(
        "--args", metavar="LINE", help="More arguments for the engine, such as '--max-model-len 8192'."
    ),
]
Health = Annotated[str, typer.Option("--health", metavar="PATH", help="Where the engine says that it lives.")]
Ports = Annotated[
    list[str] | None,
    typer.Option(
        "--port",
        metavar="PORT[:PORT_ON_NODE]",
        help="Published port. With --engine a port alone is the node's port, too.",
    ),
]
IdleMax = Annotated[
    str, typer.Option("--idle-max", metavar="TIME", help="Stopped, after a notice, once idle for this long.")
]
Headroom = Annotated[
    str,
    typer.Option("--headroom", metavar="FACTOR", help="Reserve this many times what is asked, such as 1.2."),
]
Restart = Annotated[str, typer.Option("--restart", help="never, on-failure or always.")]
_UNNAMED: Final = "service"


def register(app: typer.Typer) -> None:
    app.command("deploy")(deploy)
    app.command("plan")(plan)


def deploy(
    gpu: Gpu,
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Name of the service. Default: from the model.")
    ] = "",
    project: Project = "default",
    model: Model = "",
    engine: EngineName = "",
    args: Args = "",
    health: Health = "",
    image: Image = "",
    command: Annotated[
        str, typer.Option("--command", metavar="LINE", help="Command line; no shell reads it.")
    ] = "",
    port: Ports = None,
    mode: Mode = "exclusive",
    node: Node = "",
    require: Require = None,
    prefer: Prefer = None,
    env: Env = None,
    priority: Priority = "normal",
    headroom: Headroom = "",
    restart: Restart = "on-failure",
    idle_max: IdleMax = "",
    purpose: Purpose = "",
    contact: Contact = "",
    by: By = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Stop the live one under this name, raise this one.")
    ] = False,
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Run a service until somebody stops it. The same again changes nothing.

    rigbook deploy --model Qwen/Qwen2.5-7B-Instruct --engine vllm --gpu 24GB --port 8000 --priority high
    """
    component = _component(
        engine, model=model, args=args, health=health, image=image, command=command, port=port, env=env
    )
    if component is None and not name:
        raise Unusable(
            "the service has no name", remedy="rigbook deploy NAME ..., or give --model and --engine"
        )
    flags = Flags(
        workload=Workload.SERVICE, gpu=gpu, project=project, owner=by or me(), contact=contact,
        name=name or name_of(model), command=_words("--command", command), image=image, ports=tuple(port or ()),
        mode=mode, node=node, require=tuple(require or ()), prefer=tuple(prefer or ()), env=tuple(env or ()),
        priority=priority, restart=restart, purpose=purpose, component=component, headroom=headroom,
        weights=model if component is not None and component.mounts else "", idle_max=idle_max,
    )  # fmt: skip
    apply_now([demand_of(flags)], replace=replace, by=by or me(), as_json=as_json, nats=nats, data=data)


def plan(
    file: Annotated[
        list[str] | None,
        typer.Option("--file", "-f", metavar="FILE", help="A demand file; may be given again."),
    ] = None,
    gpu: Annotated[str, typer.Option("--gpu", metavar="ASK", help="As for deploy.")] = "",
    model: Model = "",
    engine: EngineName = "",
    args: Args = "",
    health: Health = "",
    image: Image = "",
    port: Ports = None,
    mode: Mode = "exclusive",
    node: Node = "",
    env: Env = None,
    priority: Priority = "normal",
    headroom: Headroom = "",
    project: Project = "default",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Where the demands of files (or of an engine) would go, and with what; nothing is recorded.

    Exit code: 0 all fit now, 10 some would wait, 7 some can never be met.
    """
    specs = [filed.spec for filed in read_files(file)] if file else []
    if engine:
        component = _component(
            engine, model=model, args=args, health=health, image=image, command="", port=port, env=env
        )
        flags = Flags(
            workload=Workload.SERVICE, gpu=gpu, project=project, owner=me(), name=name_of(model), mode=mode,
            node=node, priority=priority, component=component, headroom=headroom,
            weights=model if component is not None and component.mounts else "",
        )  # fmt: skip
        specs.append(demand_of(flags))
    if not specs:
        raise Unusable("nothing to plan", remedy="rigbook plan -f FILE, or --model M --engine E --gpu 24GB")
    specs = [identified(spec, secrets.token_hex(8)) for spec in specs]

    async def go() -> tuple[list[Plan], list[CardRow]]:
        async with connected(nats, data) as client:
            plans = [await client.plan(spec) for spec in specs]
            return plans, list(await client.rows("cards"))

    plans, cards = run(go())
    known = {card.uuid: card for card in cards}
    if as_json:
        json_line({"items": [_plain(spec, answer, known) for spec, answer in zip(specs, plans, strict=True)]})
    else:
        for spec, answer in zip(specs, plans, strict=True):
            _show_plan(spec, answer, known)
    if any(answer.never for answer in plans):
        raise typer.Exit(Exit.REFUSED)
    if any(answer.bound is None for answer in plans):
        raise typer.Exit(Exit.WAITS)


def name_of(model: str) -> str:
    """`qwen2-5-7b-instruct` of `Qwen/Qwen2.5-7B-Instruct`."""
    plain = re.sub(r"[^a-z0-9_-]+", "-", model.rsplit("/", 1)[-1].lower()).strip("-_")
    return plain[:NAME_MAX].rstrip("-_") or _UNNAMED


def _component(
    engine: str,
    *,
    model: str,
    args: str,
    health: str,
    image: str,
    command: str,
    port: Sequence[str] | None,
    env: Sequence[str] | None,
) -> Component | None:
    """By the engine's preset; None when none is named."""
    if not engine:
        if model or args or health:
            raise Unusable("--model, --args and --health are an engine's", remedy="name it with --engine")
        return None
    preset = preset_of(engine)
    words = _words("--command", command)
    if words:
        if preset.command:
            raise Unusable(f"engine {preset.name} has a command of its own", remedy="add to it with --args")
        preset = msgspec.structs.replace(preset, command=words)
    ports = [port_of(text) for text in port or ()]
    if len(ports) > 1:
        raise Unusable("an engine has one port", remedy="give --port once")
    # `--port 8000`: reachable as port 8000 of the node, as people expect of a service.
    first = ports[0] if ports else None
    if first is not None and ":" not in (port or ("",))[0]:
        first = msgspec.structs.replace(first, host_port=first.port)
    return preset.component(
        model=model,
        port=first,
        image=image,
        args=_words("--args", args),
        env=env_of(env or ()),
        health=health,
    )


def _words(flag: str, line: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(line))
    except ValueError as error:
        raise Unusable(f"{flag}: {error}".lower(), remedy="balance the quotes") from None


# -- what would become of it ----------------------------------------------------------------------


def _contracts(spec: DemandRaised, answer: Plan, cards: dict[str, CardRow]) -> list[Contract]:
    """Each component as the first share would launch it."""
    share = answer.bound.shares[0] if answer.bound is not None else None
    allotments = share.allotments if share is not None else ()
    sizes = [cards[a.card].memory_bytes for a in allotments if a.card in cards]
    known = bool(sizes) and len(sizes) == len(allotments)
    if not known:  # the smallest that could take it
        asked_bytes = spec.resources.memory_bytes
        sizes = [c.memory_bytes for c in cards.values() if c.memory_bytes >= asked_bytes]
    return [
        contract_of(
            component,
            memory_bytes=min((a.memory_bytes for a in allotments), default=spec.resources.memory_bytes),
            card_memory_bytes=min(sizes, default=None),
            assumed=not known,
            gpu_count=len(allotments) or spec.resources.count,
        )
        for component in spec.components
    ]


def _plain(spec: DemandRaised, answer: Plan, cards: dict[str, CardRow]) -> dict[str, Any]:
    bound = answer.bound
    return {
        "name": spec.name,
        "position": answer.position,
        "fits": bound is not None,
        "never": answer.never,
        "shares": [{"node": share.node, "allotments": share.allotments} for share in bound.shares]
        if bound
        else [],
        "reasons": answer.reasons,
        "notes": bound.notes if bound else (),
        "evict": answer.evict,
        "soonest": answer.soonest,
        "contract": _contracts(spec, answer, cards),
    }


def _show_plan(spec: DemandRaised, answer: Plan, cards: dict[str, CardRow]) -> None:
    r = spec.resources
    say(f"{spec.name}: {asked(r.memory_bytes, r.count, r.mode)}, as of position {answer.position}", "bold")
    if answer.bound is not None:
        for share in answer.bound.shares:
            for allotment in share.allotments:
                card = cards.get(allotment.card)
                kept = f"; {enforcement(allotment.mode, card.enforces)}" if card is not None else ""
                say(
                    f"  would go to {short_card(allotment.card)} of node {share.node}, "
                    f"{gib(allotment.memory_bytes)} {allotment.mode}{kept}"
                )
        for note in answer.bound.notes:
            say(f"    {sentence(note)}")
    else:
        say("  can never be met as it is:" if answer.never else "  would wait:")
        show_reasons(answer.reasons, indent="    ")
        if not answer.reasons:
            say("    the placer gave no reason")
        for victim in answer.evict:
            say(f"    {victim_line(victim)}")
        if answer.soonest is not None:
            say(f"    {soonest_line(answer.soonest)}")
    for contract in _contracts(spec, answer, cards):
        show(tables.facts([(f"  {what}", value) for what, value in contract.lines()]))

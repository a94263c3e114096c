"""Demands from the flags of `submit` and `deploy`. Pure: the flags in, a demand out, or which flag is wrong."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.events import DemandRaised
from rigbook_schemas.subjects import SubjectError, token
from rigbook_schemas.values import PRIORITIES, Component, Mode, Owner, Port, Request, Restart, Workload

from rigbook.demandfile.demand import NAME_MAX
from rigbook.failures import Invalid, Unusable
from rigbook.labels import pairs
from rigbook.memory import MemoryTextError, parse_gpu
from rigbook.moments import MomentError, parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Flags", "demand_of", "env_of", "port_of"]

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Flags(msgspec.Struct, frozen=True, kw_only=True):
    """What stood on the command line, as texts."""

    workload: Workload
    gpu: str
    project: str
    owner: str
    command: tuple[str, ...] = ()
    image: str = ""
    name: str = ""
    contact: str = ""
    purpose: str = ""
    mode: str = "exclusive"
    node: str = ""
    require: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    priority: str = "normal"
    max_run: str = ""
    restart: str = "never"
    headroom: str = ""
    weights: str = ""  # model weights that it loads: a node that has them is preferred
    idle_max: str = ""
    preemptible: bool = False
    preempts: bool = False
    placement: str = ""
    component: Component | None = None  # ready made, by an engine's preset


def demand_of(flags: Flags) -> DemandRaised:
    """The demand, its id still the name. Raises Invalid, Unusable."""
    if not flags.command and not flags.image and flags.component is None:
        raise Unusable("nothing to run", remedy="give a command behind --, or an --image")
    if not flags.project:
        raise Unusable("no project", remedy="give --project NAME, or set $RIGBOOK_PROJECT")
    name = flags.name or _name_of(flags)
    for flag, value in (("--name", name), ("--project", flags.project), ("--node", flags.node)):
        _check_name(flag, value)
    if len(name) > NAME_MAX:
        raise _invalid("--name", f"{name!r} has {len(name)} characters", f"at most {NAME_MAX}")
    try:
        gpu = parse_gpu(flags.gpu)
    except MemoryTextError as error:
        raise Invalid(f"--gpu: {error}", code=error.code) from None
    return DemandRaised(
        demand=name,
        name=name,
        project=flags.project,
        owner=Owner(name=flags.owner, contact=flags.contact),
        purpose=flags.purpose,
        workload=flags.workload,
        resources=Request(
            memory_bytes=gpu.memory_bytes,
            count=gpu.count,
            model=gpu.model,
            mode=_mode(flags.mode),
            node=flags.node,
            require=pairs("--require", flags.require),
            prefer=pairs("--prefer", flags.prefer),
            headroom=_headroom(flags.headroom),
            weights=flags.weights,
        ),
        components=(
            flags.component
            or Component(
                command=flags.command,
                image=flags.image,
                env=env_of(flags.env),
                ports=tuple(port_of(text) for text in flags.ports),
            ),
        ),
        priority=_priority(flags.priority),
        max_run_seconds=_duration("--max-run", flags.max_run),
        idle_seconds_max=_duration("--idle-max", flags.idle_max),
        restart=Restart(policy=_restart(flags)),
        preemptible=flags.preemptible,
        preempts=flags.preempts,
        placement=flags.placement,
    )


def _name_of(flags: Flags) -> str:
    """From what runs: `train` of `python train.py`, `vllm-openai` of an image."""
    words = [
        PurePosixPath(word).name
        for word in flags.command
        if word[:1] != "-" and not any(map(str.isspace, word))
    ]
    if words and re.fullmatch(r"(python|pypy|perl|ruby|node|bash|sh)[0-9.]*", words[0]):
        words = words[1:] or words  # `sh -c "..."` stays `sh`
    word = words[0] if words else PurePosixPath(flags.image).name.split(":")[0]
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", word.removesuffix(".py").removesuffix(".sh")).strip("-_")
    return plain[:NAME_MAX] or str(flags.workload)


def _invalid(flag: str, what: str, expected: str) -> Invalid:
    return Invalid(f"{flag}: {what}; expected {expected}", code="invalid_flag")


def _check_name(flag: str, value: str) -> None:
    try:
        if value:
            token(value)
    except SubjectError as error:
        raise Invalid(f"{flag}: {str(error).partition(': ')[2]}", code=error.code) from None


def _mode(text: str) -> Mode:
    try:
        return Mode(text)
    except ValueError:
        raise _invalid("--mode", f"{text!r} is no mode", ", ".join(Mode)) from None


def env_of(texts: Sequence[str]) -> dict[str, str]:
    """Variables of `--env NAME=VALUE`. Raises Invalid."""
    found = pairs("--env", texts)
    for key in found:
        if not _VARIABLE.fullmatch(key):
            raise _invalid("--env", f"{key!r} is no name of a variable", "letters, digits and '_'")
    return found


def port_of(text: str) -> Port:
    """`8000` or `8000:80`. Raises Invalid."""
    inner, colon, outer = text.partition(":")
    if (
        not inner.isdigit()
        or (colon and not outer.isdigit())
        or not 1 <= int(inner) <= 65535
        or int(outer or 0) > 65535
    ):
        raise _invalid("--port", f"{text!r} is no port", "PORT, or PORT:PORT_ON_THE_NODE (1 to 65535)")
    return Port(port=int(inner), host_port=int(outer or 0))


def _priority(text: str) -> int:
    if text in PRIORITIES:
        return PRIORITIES[text]
    if text.isascii() and text.isdigit() and int(text) <= 100:
        return int(text)
    raise _invalid("--priority", f"{text!r} is no priority", f"0 to 100, or {', '.join(PRIORITIES)}")


def _headroom(text: str) -> float:
    if not text:
        return 1.0
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= 4:
        raise _invalid("--headroom", f"{text!r} is no factor", "a number from 1 to 4, such as 1.2")
    return factor


def _duration(flag: str, text: str) -> float | None:
    if not text:
        return None
    try:
        seconds = parse_duration(text)
    except MomentError as error:
        raise Invalid(f"{flag}: {error}", code=error.code) from None
    if seconds <= 0:
        raise _invalid(flag, f"{text!r} is no time at all", "more than 0")
    return seconds


def _restart(flags: Flags) -> str:
    choices = (
        ("never", "on-failure") if flags.workload is Workload.BATCH else ("never", "on-failure", "always")
    )
    if flags.restart not in choices:
        raise _invalid("--restart", f"{flags.restart!r} is none of them", ", ".join(choices))
    return flags.restart

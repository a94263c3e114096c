"""The fields of a demand, and what must hold between them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import yaml
from rigbook_schemas.events import DemandRaised
from rigbook_schemas.placeholders import NAMES, WEIGHTS_DIR, problems
from rigbook_schemas.values import (
    PRIORITIES,
    Checkpoint,
    Component,
    Mode,
    Mount,
    Owner,
    Port,
    Probe,
    Request,
    Restart,
    Role,
    Window,
    Workload,
)

if TYPE_CHECKING:
    from rigbook.demandfile.fields import Field, Reading

__all__ = ["NAME_MAX", "read_demand"]

# A demand's id is its name and a few characters more, and must stay one token.
NAME_MAX: Final = 48
PROGRAM: Final[tuple[str, ...]] = (
    "command", "image", "env", "ports", "mounts", "probe", "gpu", "memory_limit", "shm", "stop_grace", "fill",
    "starts_alone", "startup", "checkpoint",
)  # fmt: skip
DEMAND: Final = (
    "name", "project", "owner", "workload", "purpose", "resources", "components", *PROGRAM,
    "restart", "priority", "max_run_time", "preemptible", "preempts", "placement",
    "windows", "labels", "idle_max",
)  # fmt: skip
RESOURCES: Final = (
    "memory", "count", "mode", "model", "node", "nodes", "require", "prefer", "headroom", "weights", "weights_size",
)  # fmt: skip
WINDOW: Final = ("start", "end", "days", "utc_offset_minutes")
DAYS: Final = {day: n for n, day in enumerate(("mon", "tue", "wed", "thu", "fri", "sat", "sun"), start=1)}
COMPONENT: Final = ("name", "role", *PROGRAM)
PROBE: Final = (
    "kind",
    "path",
    "port",
    "command",
    "every",
    "timeout",
    "startup_max",
    "failures_max",
    "on_failure",
)
CHECKPOINT: Final = ("signal", "acknowledge", "path", "port", "acknowledge_max", "save_max")
# What a program may be asked with; SIGKILL and SIGSTOP ask nobody.
SIGNALS: Final = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGCONT")
LABEL_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"
CLOCK: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]"
VARIABLE_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]{0,127}"


def read_demand(reading: Reading, document: Field) -> DemandRaised:
    """The demand of one document; its id is still the name. Problems are noted in `reading`."""
    fields = reading.mapping(document, DEMAND, required=("name", "project", "owner", "workload", "resources"))
    workload = reading.choice(fields["workload"], Workload) if "workload" in fields else Workload.BATCH
    components = _components(reading, document, fields)
    restart = _restart(reading, fields["restart"]) if "restart" in fields else Restart()
    if workload is Workload.BATCH and restart.policy == "always":
        reading.wrong(
            fields["restart"], "'always' on a batch, which would never be done", "never or on-failure"
        )
    name = reading.name(fields["name"], at_most=NAME_MAX) if "name" in fields else "unnamed"
    return DemandRaised(
        demand=name,
        name=name,
        project=reading.name(fields["project"]) if "project" in fields else "unknown",
        owner=_owner(reading, fields["owner"]) if "owner" in fields else Owner(name="unknown"),
        workload=workload,
        purpose=reading.text(fields["purpose"]) if "purpose" in fields else "",
        resources=_resources(reading, fields["resources"])
        if "resources" in fields
        else Request(memory_bytes=0),
        components=components,
        restart=restart,
        priority=_priority(reading, fields["priority"]) if "priority" in fields else PRIORITIES["normal"],
        max_run_seconds=_run_time(reading, fields["max_run_time"]) if "max_run_time" in fields else None,
        idle_seconds_max=_run_time(reading, fields["idle_max"]) if "idle_max" in fields else None,
        preemptible=reading.boolean(fields["preemptible"]) if "preemptible" in fields else False,
        preempts=reading.boolean(fields["preempts"]) if "preempts" in fields else False,
        placement=reading.text(fields["placement"], at_most=32, what="the name of a policy")
        if "placement" in fields
        else "",
        windows=tuple(
            _window(reading, item) for item in reading.items(fields["windows"], what="windows", at_most=32)
        )
        if "windows" in fields
        else (),
        labels=reading.texts(fields["labels"], name_pattern=LABEL_NAME) if "labels" in fields else {},
    )


def _owner(reading: Reading, field: Field) -> Owner:
    if isinstance(field.node, yaml.ScalarNode):
        return Owner(name=reading.text(field, at_most=128, what="a name, or name and contact"))
    fields = reading.mapping(field, ("name", "contact"), required=("name",))
    return Owner(
        name=reading.text(fields["name"], at_most=128) if "name" in fields else "unknown",
        contact=reading.text(fields["contact"], at_most=256) if "contact" in fields else "",
    )


def _resources(reading: Reading, field: Field) -> Request:
    fields = reading.mapping(field, RESOURCES, required=("memory",))
    return Request(
        memory_bytes=reading.memory(fields["memory"]) if "memory" in fields else 0,
        count=reading.integer(fields["count"], 1, 1024) if "count" in fields else 1,
        nodes=reading.integer(fields["nodes"], 1, 1024) if "nodes" in fields else 1,
        mode=reading.choice(fields["mode"], Mode) if "mode" in fields else Mode.EXCLUSIVE,
        model=reading.text(fields["model"], at_most=128, what="part of a card's model")
        if "model" in fields
        else "",
        node=reading.name(fields["node"]) if "node" in fields else "",
        require=reading.texts(fields["require"], name_pattern=LABEL_NAME) if "require" in fields else {},
        prefer=reading.texts(fields["prefer"], name_pattern=LABEL_NAME) if "prefer" in fields else {},
        headroom=_headroom(reading, fields["headroom"]) if "headroom" in fields else 1.0,
        weights=reading.text(fields["weights"], at_most=256, what="the name of model weights")
        if "weights" in fields
        else "",
        weights_bytes=reading.size(fields["weights_size"]) if "weights_size" in fields else 0,
    )


def _headroom(reading: Reading, field: Field) -> float:
    value = reading.raw(field)
    if re.fullmatch(r"[1-4](\.[0-9]{1,4})?", value) and float(value) <= 4:
        return float(value)
    reading.wrong(field, f"{value!r} is no headroom", "a factor from 1 to 4, such as 1.2")
    return 1.0


def _window(reading: Reading, field: Field) -> Window:
    """`22:00-06:00`, or the same as fields, with days."""
    if isinstance(field.node, yaml.ScalarNode):
        times = reading.raw(field).split("-")
        if len(times) == 2 and all(re.fullmatch(CLOCK, time) for time in times):
            return Window(start=times[0], end=times[1])
        reading.wrong(field, "is no window", 'a text such as "22:00-06:00", or fields start, end, days')
        return Window(start="00:00", end="00:01")
    fields = reading.mapping(field, WINDOW, required=("start", "end"))
    times = [reading.raw(fields[name]) if name in fields else "00:00" for name in ("start", "end")]
    for name, time in zip(("start", "end"), times, strict=True):
        if name in fields and not re.fullmatch(CLOCK, time):
            reading.wrong(fields[name], f"{time!r} is no time of day", '"22:00", in quotes')
    good = all(re.fullmatch(CLOCK, time) for time in times)
    days = [
        reading.word(item, tuple(DAYS)) for item in reading.items(fields["days"], what="days", at_most=7)
    ] if "days" in fields else []  # fmt: skip
    offset = 0
    if "utc_offset_minutes" in fields:
        offset = reading.integer(fields["utc_offset_minutes"], -840, 840)
    return Window(
        start=times[0] if good else "00:00",
        end=times[1] if good else "00:01",
        days=tuple(DAYS[day] for day in days if day in DAYS),
        utc_offset_minutes=offset,
    )


def _components(reading: Reading, document: Field, fields: dict[str, Field]) -> tuple[Component, ...]:
    own = [name for name in PROGRAM if name in fields]
    if "components" not in fields:
        return (_program(reading, document, fields, name="main", role=Role.MAIN),)
    for name in own:
        reading.wrong(fields[name], "stands beside 'components'", "it inside of one of the components")
    components: list[Component] = []
    names: set[str] = set()
    items = reading.items(fields["components"], what="components")
    for item in items:
        inner = reading.mapping(item, COMPONENT, required=("name",))
        name = reading.name(inner["name"]) if "name" in inner else "unnamed"
        if name in names and "name" in inner:
            reading.wrong(inner["name"], f"a second component {name!r}", "a name of its own for each")
        names.add(name)
        role = reading.choice(inner["role"], Role) if "role" in inner else Role.MAIN
        components.append(_program(reading, item, inner, name=name, role=role))
    if components and not any(component.gpu for component in components):
        reading.wrong(fields["components"], "no component uses the GPU", "one without `gpu: false`")
    return tuple(components)


def _program(reading: Reading, whole: Field, fields: dict[str, Field], *, name: str, role: Role) -> Component:
    command = reading.command(fields["command"]) if "command" in fields else ()
    image = reading.text(fields["image"], at_most=512, what="an image") if "image" in fields else ""
    if "command" not in fields and "image" not in fields and isinstance(whole.node, yaml.MappingNode):
        path = f"{whole.path}.command" if whole.path else "command"
        reading.wrong(whole, "nothing to run", "a field 'command' or 'image' here", path=path)
    if any(char.isspace() for char in image):
        reading.wrong(
            fields["image"], f"{image!r} has a blank in it", "an image such as vllm/vllm-openai:v0.9.1"
        )
    ports = (
        tuple(_port(reading, item) for item in reading.items(fields["ports"], what="ports"))
        if "ports" in fields
        else ()
    )
    if len({port.port for port in ports}) < len(ports):
        reading.wrong(fields["ports"], "a port is named twice", "each port once")
    gpu = reading.boolean(fields["gpu"]) if "gpu" in fields else True
    if not gpu and "components" not in fields and not whole.path:
        reading.wrong(
            fields["gpu"], "the only program does not use the GPU", "a demand with at least one that does"
        )
    made = Component(
        name=name,
        role=role,
        command=command,
        image=image,
        env=reading.texts(fields["env"], name_pattern=VARIABLE_NAME) if "env" in fields else {},
        ports=ports,
        mounts=tuple(_mount(reading, item) for item in reading.items(fields["mounts"], what="mounts"))
        if "mounts" in fields
        else (),
        probe=_probe(reading, fields["probe"], ports) if "probe" in fields else None,
        gpu=gpu,
        memory_bytes=reading.size(fields["memory_limit"]) if "memory_limit" in fields else 0,
        shm_bytes=reading.size(fields["shm"]) if "shm" in fields else 0,
        stop_grace_seconds=reading.seconds(fields["stop_grace"]) if "stop_grace" in fields else 10.0,
        starts_alone=reading.boolean(fields["starts_alone"]) if "starts_alone" in fields else False,
        startup=_probe(reading, fields["startup"], ports) if "startup" in fields else None,
        checkpoint=_checkpoint(reading, fields["checkpoint"], ports) if "checkpoint" in fields else None,
        fill=reading.boolean(fields["fill"]) if "fill" in fields else False,
    )
    for wrong in problems(made):
        reading.wrong(fields["fill"], wrong.partition("; known")[0], f"one of {', '.join(NAMES)}")
    return made


def _port(reading: Reading, field: Field) -> Port:
    if isinstance(field.node, yaml.ScalarNode):
        return Port(port=reading.integer(field, 1, 65535))
    fields = reading.mapping(field, ("port", "host_port"), required=("port",))
    return Port(
        port=reading.integer(fields["port"], 1, 65535) if "port" in fields else 1,
        host_port=reading.integer(fields["host_port"], 0, 65535) if "host_port" in fields else 0,
    )


def _mount(reading: Reading, field: Field) -> Mount:
    fields = reading.mapping(field, ("source", "target", "read_only"), required=("source", "target"))
    paths: dict[str, str] = {}
    for name in ("source", "target"):
        paths[name] = reading.text(fields[name], what="an absolute path") if name in fields else "/"
        inside = name == "source" and paths[name].startswith(
            WEIGHTS_DIR
        )  # where the node keeps model weights
        if paths[name] and not paths[name].startswith("/") and not inside:
            reading.wrong(fields[name], f"{paths[name]!r} is not absolute", "a path that begins with /")
    read_only = reading.boolean(fields["read_only"]) if "read_only" in fields else True
    return Mount(source=paths["source"], target=paths["target"], read_only=read_only)


def _probe(reading: Reading, field: Field, ports: tuple[Port, ...]) -> Probe:
    fields = reading.mapping(field, PROBE)
    kind = reading.word(fields["kind"], ("http", "tcp", "exec")) if "kind" in fields else "http"
    port = reading.integer(fields["port"], 1, 65535) if "port" in fields else 0
    if not port and len(ports) == 1:
        port = ports[0].port
    if kind in ("http", "tcp") and not port and "port" not in fields:
        reading.wrong(field, "no port to ask", f"a field 'port' here (or one entry in 'ports') for {kind}")
    if kind == "exec" and "command" not in fields:
        reading.wrong(field, "no command to run", "a field 'command' here for exec")
    path = reading.text(fields["path"], what="a path") if "path" in fields else "/"
    if path and not path.startswith("/"):
        reading.wrong(fields["path"], f"{path!r} is not absolute", "a path that begins with /")
    return Probe(
        kind=kind or "http",
        path=path,
        port=port,
        command=reading.command(fields["command"]) if "command" in fields else (),
        every_seconds=reading.seconds(fields["every"]) if "every" in fields else 10.0,
        timeout_seconds=reading.seconds(fields["timeout"]) if "timeout" in fields else 5.0,
        startup_seconds_max=reading.seconds(fields["startup_max"]) if "startup_max" in fields else 600.0,
        failures_max=reading.integer(fields["failures_max"], 1, 1000) if "failures_max" in fields else 3,
        on_failure=(reading.word(fields["on_failure"], ("restart", "report", "stop")) or "restart")
        if "on_failure" in fields
        else "restart",
    )


def _checkpoint(reading: Reading, field: Field, ports: tuple[Port, ...]) -> Checkpoint:
    fields = reading.mapping(field, CHECKPOINT)
    acknowledge = (
        reading.word(fields["acknowledge"], ("exit", "file", "http")) if "acknowledge" in fields else "exit"
    )
    sent = reading.text(fields["signal"], at_most=16) if "signal" in fields else "SIGTERM"
    if sent not in SIGNALS:
        reading.wrong(fields["signal"], f"{sent!r} is no signal to ask with", ", ".join(SIGNALS))
        sent = "SIGTERM"
    port = reading.integer(fields["port"], 1, 65535) if "port" in fields else 0
    if not port and len(ports) == 1:
        port = ports[0].port
    if acknowledge == "http" and not port:
        reading.wrong(field, "no port to ask", "a field 'port' here (or one entry in 'ports') for http")
    path = reading.text(fields["path"], at_most=512, what="a path") if "path" in fields else ""
    if acknowledge == "file" and not path:
        reading.wrong(field, "no file to look for", "a field 'path' here for file")
    return Checkpoint(
        signal=sent,
        acknowledge=acknowledge or "exit",
        path=path or ("/" if acknowledge == "http" else ""),
        port=port,
        acknowledge_seconds_max=reading.seconds(fields["acknowledge_max"])
        if "acknowledge_max" in fields
        else 30.0,
        save_seconds_max=reading.seconds(fields["save_max"]) if "save_max" in fields else 600.0,
    )


def _restart(reading: Reading, field: Field) -> Restart:
    policies = ("never", "on-failure", "always")
    if isinstance(field.node, yaml.ScalarNode):
        return Restart(policy=reading.word(field, policies) or "never")
    fields = reading.mapping(field, ("policy", "attempts", "backoff"), required=("policy",))
    return Restart(
        policy=(reading.word(fields["policy"], policies) or "never") if "policy" in fields else "never",
        attempts_max=reading.integer(fields["attempts"], 0, 100_000) if "attempts" in fields else 3,
        backoff_seconds=reading.seconds(fields["backoff"]) if "backoff" in fields else 1.0,
    )


def _priority(reading: Reading, field: Field) -> int:
    value = reading.raw(field)
    if value in PRIORITIES:
        return PRIORITIES[value]
    if value.isascii() and value.isdigit() and int(value) <= 100:
        return int(value)
    reading.wrong(field, f"{value!r} is no priority", f"0 to 100, or {', '.join(PRIORITIES)}")
    return PRIORITIES["normal"]


def _run_time(reading: Reading, field: Field) -> float:
    before = len(reading.problems)
    seconds = reading.seconds(field)
    if seconds <= 0 and len(reading.problems) == before:
        reading.wrong(field, "no time at all", "a duration such as 90s, 15m, 2h or 1h30m")
    return seconds

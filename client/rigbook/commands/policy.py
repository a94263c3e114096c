"""`policy ...`: the rules that placement follows. Each is an event with who said it, and why."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer
from rigbook_schemas import events as e

from rigbook import tables
from rigbook.commands.invoke import connected, me, run
from rigbook.commands.options import AsJson, By, Data, Nats, Reason
from rigbook.failures import Invalid
from rigbook.moments import MomentError, parse_duration
from rigbook.output import json_line, say, show

if TYPE_CHECKING:
    from pathlib import Path

    from rigbook_schemas.events import Payload
    from rigbook_schemas.queries import StatusRow

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    policy = typer.Typer(no_args_is_help=True, help="The rules that placement follows.")
    policy.command("show")(show_policy)
    policy.command("placement")(placement)
    policy.command("cap")(cap)
    policy.command("preemption")(preemption)
    app.add_typer(policy, name="policy")


def show_policy(as_json: AsJson = False, nats: Nats = None, data: Data = None) -> None:
    """What holds now."""

    async def go() -> StatusRow:
        async with connected(nats, data) as client:
            rows: list[StatusRow] = await client.rows("status")
            return rows[0]

    row = run(go())
    if as_json:
        json_line(
            {
                "placement": row.placement,
                "cap_priority": row.cap_priority,
                "cap_share": row.cap_share,
                "preemption": row.preemption,
                "preemption_run_seconds_min": row.preemption_run_seconds_min,
            }
        )
        return
    capped = (
        "no cap"
        if row.cap_share is None
        else f"priority {row.cap_priority} and above holds at most {row.cap_share:.0%} of the fleet's memory"
    )
    after = f"allowed, after {row.preemption_run_seconds_min:g} s of run time"
    show(
        tables.facts(
            [
                ("placement", row.placement or "the placer's own default"),
                ("cap", capped),
                ("preemption", after if row.preemption else "off"),
            ]
        )
    )


def placement(
    name: Annotated[
        str, typer.Argument(metavar="POLICY", help="pack, spread, best-fit, ... Demands may name another.")
    ],
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """How cards are ranked where a demand does not say."""
    from rigbook_placer.rank import POLICIES

    if name not in POLICIES:
        raise Invalid(f"{name!r} is no policy; expected one of {', '.join(POLICIES)}", code="invalid_flag")
    said = e.PlacementSet(policy=name, by=by or me(), reason=reason)
    _say("placement", said, f"cards are ranked by {name} from now on", as_json=as_json, nats=nats, data=data)


def cap(
    share: Annotated[
        str, typer.Argument(metavar="SHARE", help="Of the fleet's memory: 33%, 1/3, 0.33; or none.")
    ],
    priority: Annotated[int, typer.Option("--priority", min=0, max=100, help="From this priority on.")] = 75,
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """How much of the fleet high priority may hold. One demand may always be bound."""
    part = 1.0 if share.lower() == "none" else _share(share)
    said = e.PriorityCapped(priority=priority, share=part, by=by or me(), reason=reason)
    told = "no cap" if part >= 1 else f"priority {priority} and above holds at most {part:.1%}"
    _say("priority", said, f"{told} from now on", as_json=as_json, nats=nats, data=data)


def _share(text: str) -> float:
    fraction = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    percent = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)%", text)
    plain = re.fullmatch(r"[01]?\.\d{1,9}|[01]", text)
    value = -1.0
    if fraction and int(fraction[2]):
        value = int(fraction[1]) / int(fraction[2])
    elif percent:
        value = float(percent[1]) / 100
    elif plain:
        value = float(text)
    if not 0 <= value <= 1:
        raise Invalid(f"{text!r} is no share; expected 33%, 1/3, 0.33 or none", code="invalid_flag")
    return value


def preemption(
    on: Annotated[
        bool | None, typer.Option("--on/--off", help="May demands that say so evict those that allow it?")
    ] = None,
    min_run: Annotated[
        str, typer.Option("--min-run", metavar="TIME", help="A victim has had its cards for this long.")
    ] = "5m",
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
    nats: Nats = None,
    data: Data = None,
) -> None:
    """Whether demands may evict others at all. Both sides opt in by themselves."""
    if on is None:
        raise typer.BadParameter("say --on or --off")
    try:
        seconds = parse_duration(min_run)
    except MomentError as error:
        raise Invalid(f"--min-run: {error}", code=error.code) from None
    said = e.PreemptionSet(on=on, run_seconds_min=seconds, by=by or me(), reason=reason)
    told = f"preemption {f'after {min_run} of run time' if on else 'off'} from now on"
    _say("preemption", said, told, as_json=as_json, nats=nats, data=data)


def _say(topic: str, said: Payload, told: str, *, as_json: bool, nats: str | None, data: Path | None) -> None:
    async def go() -> int:
        async with connected(nats, data) as client:
            return await client.set_policy(topic, said)

    seq = run(go())
    if as_json:
        json_line({"seq": seq, "told": told})
    else:
        say(f"{told} (event {seq})")

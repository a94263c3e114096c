"""Applying demands: what is there already under that name, what differs, what to send. Pure but for `apply_all`.

A name is one thing in a project: while its demand is live and wanted, the same spec again changes nothing,
and another spec is refused until somebody says `--replace`. A demand that was stopped and is still on its
way out does not count: the new one queues behind it.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rigbook_schemas.events import DemandRaised
from rigbook_schemas.queries import DemandRow, Question

from rigbook.failures import NoAnswer, WouldConflict
from rigbook.lookup import events_of
from rigbook.narrative import payload_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rigbook.client import Client

__all__ = ["Applied", "Outcome", "apply_all", "differences", "identified"]

ID_DIGITS: Final = 6
DIFFERENCES_SHOWN_MAX: Final = 12
SHOWN_MAX: Final = 80


class Outcome(enum.StrEnum):
    RAISED = "raised"
    UNCHANGED = "unchanged"
    REPLACED = "replaced"


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one demand."""

    name: str
    project: str
    demand: str  # id
    outcome: Outcome
    seq: int = 0  # of the event that raised it; 0 when unchanged
    replaced: str = ""  # id of the one before
    differences: tuple[str, ...] = ()


def identified(spec: DemandRaised, digits: str) -> DemandRaised:
    """The demand with an id of its own: its name, so that people recognise it, and random digits."""
    return msgspec.structs.replace(spec, demand=f"{spec.name}-{digits[:ID_DIGITS]}")


def differences(before: DemandRaised, after: DemandRaised) -> list[str]:
    """`resources.count: 1 -> 2` for every field that differs; ids are not compared."""
    return _differ(_plain(before), _plain(after), "")


async def apply_all(
    client: Client, specs: Sequence[DemandRaised], *, by: str, replace: bool, new_id: Callable[[], str]
) -> list[Applied]:
    """Raise what is new. All are looked at before the first is sent. Raises WouldConflict, NoAnswer."""
    live, position = await _live(client, {spec.project for spec in specs})
    steps: list[tuple[DemandRaised, DemandRow | None, list[str]]] = []
    conflicts: list[str] = []
    for spec in specs:
        row = live.get((spec.project, spec.name))
        different = differences(await _spec_of(client, row, position), spec) if row is not None else []
        if different and not replace:
            assert row is not None
            conflicts.append(
                f"{spec.name} ({row.demand}, {row.phase}): {'; '.join(different[:DIFFERENCES_SHOWN_MAX])}"
            )
        steps.append((spec, row, different))
    if conflicts:
        raise WouldConflict(
            "another spec is live under this name; nothing was sent",
            why="\n".join(conflicts),
            remedy="stop it first (`rigbook stop NAME`), or apply with --replace, which stops it and raises the new one",
            code="spec_differs",
        )
    return [await _apply(client, step, by=by, new_id=new_id) for step in steps]


async def _apply(
    client: Client,
    step: tuple[DemandRaised, DemandRow | None, list[str]],
    *,
    by: str,
    new_id: Callable[[], str],
) -> Applied:
    spec, row, different = step
    if row is not None and not different:
        return Applied(name=spec.name, project=spec.project, demand=row.demand, outcome=Outcome.UNCHANGED)
    if row is not None:
        await client.withdraw(row.demand, row.project, by=by, reason="replaced by another spec")
    fresh = identified(spec, new_id())
    seq = await client.raise_demand(fresh)
    return Applied(
        name=spec.name,
        project=spec.project,
        demand=fresh.demand,
        outcome=Outcome.RAISED if row is None else Outcome.REPLACED,
        seq=seq,
        replaced=row.demand if row is not None else "",
        differences=tuple(different),
    )


async def _live(client: Client, projects: set[str]) -> tuple[dict[tuple[str, str], DemandRow], int]:
    """Live and wanted demands by (project, name), and the position at which they were."""
    found: dict[tuple[str, str], DemandRow] = {}
    position = await client.last_seq()  # not older than what the same person said just before
    for project in sorted(projects):
        for row in await client.rows(
            "demands", Question(project=project, phase="live", position_min=position)
        ):
            if row.wanted and row.name:
                found[row.project, row.name] = row
    return found, position


async def _spec_of(client: Client, row: DemandRow, position: int) -> DemandRaised:
    """The spec as it was raised, from the log."""
    for event in await events_of(client, row.demand, position_min=position, kinds=("demand.raised",)):
        payload = payload_of(event)
        if isinstance(payload, DemandRaised) and payload.demand == row.demand:
            return payload
    raise NoAnswer(
        f"the ledger knows {row.demand}, and not the event that raised it",
        remedy="run `rigbook doctor`; `rigbook stop` works all the same",
        code="event_missing",
    )


def _plain(spec: DemandRaised) -> dict[str, Any]:
    values = msgspec.to_builtins(_full(spec))
    del values["demand"]
    return dict(values)


def _full(value: Any) -> Any:
    """With defaults: one side may have written what the other left out."""
    if isinstance(value, msgspec.Struct):
        return {name: _full(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: _full(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_full(item) for item in value]
    return value


def _differ(before: Any, after: Any, path: str) -> list[str]:
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        found: list[str] = []
        for key in dict.fromkeys((*before, *after)):
            found += _differ(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
        return found
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [
            line
            for index, (old, new) in enumerate(zip(before, after, strict=True))
            for line in _differ(old, new, f"{path}[{index}]")
        ]
    if ".env." in path:  # a value may be a secret
        return [f"{path}: differs"]
    return [f"{path}: {_shown(before)} -> {_shown(after)}"]


def _shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "..."

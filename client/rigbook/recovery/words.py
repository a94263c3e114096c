"""A survey and a plan as the lines an operator reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rigbook_schemas.subjects import LEDGER_STREAM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_schemas.queries import AgentReport

    from rigbook.recovery.plan import Plan
    from rigbook.recovery.survey import Lost, Survey

__all__ = ["agent_words", "lost_words", "plan_lines", "survey_lines"]

NAMED_MAX: Final = 10


def survey_lines(found: Survey, lost: Lost | None) -> list[str]:
    if found.facts is None:
        lines = [f"stream   {LEDGER_STREAM} does not exist"]
    else:
        lines = [f"stream   {LEDGER_STREAM} ends at {found.facts.last_seq}"]
    if found.status is None:
        lines.append("ledger   does not answer")
    else:
        why = f"SAFE MODE: {found.safe_mode}" if found.safe_mode else "trusts this log"
        lines.append(f"ledger   has read to {found.status.position}; {why}")
        lines.append(f"         stream and second copy are the same up to {found.common}")
    if lost is not None:
        lines += [f"lost     {line}" for line in lost_words(lost)]
    if found.foreign and found.troubled and found.status is not None:
        lines.append(f"since    {found.foreign} events were written on this stream after the loss")
    lines += [f"agent    {node}: {agent_words(report)}" for node, report in found.agents.items()]
    return lines


def lost_words(lost: Lost) -> list[str]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in lost.kinds.items())
    lines = [f"{lost.events} events, {lost.first} to {lost.last}: {kinds}"]
    for what, names in (
        ("demands", lost.demands),
        ("nodes", lost.nodes),
        ("bindings (epochs)", [str(epoch) for epoch in lost.epochs]),
    ):
        if names:
            lines.append(f"{what}: {_some(names)}")
    return lines


def agent_words(report: AgentReport | None) -> str:
    if report is None:
        return "no answer; what it runs is unknown"
    running: dict[int, list[str]] = {}
    for component in report.components or ():
        if component.running or component.pids:
            running.setdefault(component.epoch, []).append(component.component)
    told = ", ".join(f"epoch {epoch} ({'+'.join(names)})" for epoch, names in sorted(running.items()))
    if report.components is None:
        told = f"unknown ({report.unknown})"
    ordered = ", ".join(f"{o.epoch} of {o.demand}" for o in report.orders[:NAMED_MAX])
    trust = f"distrusts this log: {report.distrusts}" if report.distrusts else "trusts this log"
    return (
        f"has read to {report.position}; runs {told or 'nothing'}; its orders: {ordered or 'none'}; {trust}"
    )


def plan_lines(intended: Plan) -> list[str]:
    if not intended.how:
        return ["plan     nothing is wrong with the log: there is nothing to recover"]
    if intended.how == "restored":
        lines = [
            "plan     nobody wrote on the stream since: it is RESTORED from the second copy",
            f"         {len(intended.copy)} events are appended again; each gets its old sequence",
        ]
    else:
        lines = [
            "plan     the stream is GONE ON WITH; what was lost cannot get its old sequences back",
        ]
    if intended.skip_to:
        lines.append(f"         sequences up to {intended.skip_to} are skipped: no epoch is used twice")
    if intended.join:
        lines.append(f"         agents tell their inventory: {_some(intended.join)}")
    lines += [f"         {said.why}" for said in intended.said]
    lines += [f"         NOT adopted: {line}" for line in intended.unplaced]
    if intended.silent:
        lines.append(f"         done without: {_some(intended.silent)}")
    lines.append(f"         log.recovered, generation {intended.generation}: everybody decides again")
    lines += [f"refused  {line}" for line in intended.refusals]
    return lines


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more

"""What `doctor` says of a log in trouble, and of a fleet that has fallen silent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rigbook_reaper.liveness import Patience, silence_allowed

from rigbook.recovery.plan import plan
from rigbook.recovery.survey import ask_agents, survey
from rigbook.recovery.words import agent_words, lost_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_schemas.queries import NodeRow, StatusRow

    from rigbook.client import Client

__all__ = ["log_findings", "mass_loss"]


async def log_findings(client: Client) -> list[tuple[str, bool, str, str]]:
    """(name, is it bad, text, remedy); empty when ledger and agents trust the log."""
    # A survey reads the whole log: only when somebody says that something is wrong.
    status: StatusRow = (await client.ask("status")).rows[0]
    nodes: list[NodeRow] = await client.rows("nodes")
    reports = (await ask_agents(client, [row.name for row in nodes])).values()
    if not status.safe_mode and not any(report is not None and report.distrusts for report in reports):
        return []
    found = await survey(client)
    if not found.troubled:
        return []
    intended = plan(found, without=frozenset(), without_copy=False, by="", reason="")
    told: list[tuple[str, bool, str, str]] = []
    if intended.lost is not None:
        told += [("log lost", True, line, "") for line in lost_words(intended.lost)]
    if found.foreign and found.safe_mode:
        told.append(("log", True, f"{found.foreign} events were written on it after the loss", ""))
    if found.now.recovering:
        told.append(
            (
                "log",
                True,
                f"recovery {found.now.recovering} has begun and is not finished",
                "`rigbook recover`",
            )
        )
    for node, report in found.agents.items():
        bad = report is None or bool(report.distrusts)
        told.append(
            (f"agent {node}", bad, agent_words(report), "" if report else f"start the agent of {node}")
        )
    words = {
        "restored": "restored whole from the second copy",
        "adopted": "gone on with; what runs is adopted",
    }
    text = f"the log can be {words[intended.how]}"
    if intended.refusals:
        text = "; ".join(intended.refusals)
    told.append(("recovery", True, text, "`rigbook recover` shows the plan, `rigbook recover --yes` does it"))
    return told


def mass_loss(rows: Sequence[NodeRow], patience: Patience | None = None) -> str:
    """Why the reaper calls nobody unreachable now, as far as the ledger's ears tell; "" = it may."""
    patience = patience or Patience()
    expected = [row for row in rows if row.status != "unreachable"]
    allowed = silence_allowed(1.0, patience)
    silent = [
        row.name for row in expected if row.heard_seconds_ago is None or row.heard_seconds_ago > allowed / 2
    ]
    if len(silent) < patience.mass_nodes_min or len(silent) <= len(expected) * patience.mass_share:
        return ""
    return (
        f"heartbeats of {len(silent)}/{len(expected)} nodes missing: control-plane problem? "
        f"Nobody is called unreachable, nothing is healed ({', '.join(silent[:5])})"
    )

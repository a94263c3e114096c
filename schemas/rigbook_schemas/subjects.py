"""Every NATS subject and stream name of Rigbook, in one place.

No demand ids in subjects: server memory grows by about 220 bytes with each distinct subject.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = [
    "GANG",
    "HEARTBEAT_ALL",
    "HEARTBEAT_STREAM",
    "LEDGER_STREAM",
    "LEDGER_SUBJECTS",
    "OWN_ALL",
    "RECOVERY",
    "SubjectError",
    "agent_query",
    "bind",
    "consumer_of_agent",
    "demand",
    "drift",
    "evict",
    "heartbeat",
    "node",
    "orders_of",
    "policy",
    "query",
    "query_offers",
    "query_plan",
    "release",
    "run",
    "token",
    "verdict",
]

ROOT: Final = "rig"
LEDGER_STREAM: Final = "RIG_LEDGER"
HEARTBEAT_STREAM: Final = "RIG_HEARTBEAT"

# The one filter string of every ownership append (see `rigbook_bus.protocol.Expect`).
OWN_ALL: Final = "rig.own.>"
HEARTBEAT_ALL: Final = "rig.heartbeat.*"
LEDGER_SUBJECTS: Final = (
    "rig.demand.*",
    OWN_ALL,
    "rig.verdict.*",
    "rig.evict.*",
    "rig.run.*",
    "rig.release.*",
    "rig.node.*",
    "rig.drift.*",
)
# The topic of a recovery: `log.recovered` and `sequence.skipped`.
RECOVERY: Final = "recovery"
# Stands where a node's name would, when an event concerns several nodes.
GANG: Final = "_gang"

_TOKEN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


class SubjectError(ValueError):
    """A name cannot stand in a subject: use 1 to 63 letters, digits, `-` or `_`, beginning with a letter or digit."""

    code = "invalid_name"


def token(name: str) -> str:
    """`name`, when it can be one token of a subject; raises SubjectError otherwise."""
    if name != GANG and not _TOKEN.fullmatch(name):
        raise SubjectError(
            f"invalid_name: {name!r} cannot stand in a subject: use 1 to 63 letters, digits, '-' or '_', "
            "beginning with a letter or a digit"
        )
    return name


def demand(project: str) -> str:
    return f"rig.demand.{token(project)}"


def bind(nodes: tuple[str, ...]) -> str:
    return f"rig.own.bind.{_one_or_gang(nodes)}"


def policy(topic: str) -> str:
    return f"rig.own.policy.{token(topic)}"


def verdict(project: str) -> str:
    return f"rig.verdict.{token(project)}"


def evict(nodes: tuple[str, ...]) -> str:
    return f"rig.evict.{_one_or_gang(nodes)}"


def run(node_name: str) -> str:
    return f"rig.run.{token(node_name)}"


def release(node_name: str) -> str:
    return f"rig.release.{token(node_name)}"


def node(node_name: str) -> str:
    return f"rig.node.{token(node_name)}"


def drift(node_name: str) -> str:
    return f"rig.drift.{token(node_name)}"


def heartbeat(node_name: str) -> str:
    return f"rig.heartbeat.{token(node_name)}"


def query(what: str) -> str:
    """Request/reply, answered by the ledger."""
    return f"rig.query.{what}"


def query_plan() -> str:
    """Request/reply, answered by a placer: a dry run."""
    return "rig.plan.demand"


def query_offers() -> str:
    """Request/reply, answered by a placer: the largest demands that would be bound now."""
    return "rig.plan.offers"


def agent_query(node_name: str, what: str) -> str:
    """Request/reply, answered by the agent of that node (logs, ping)."""
    return f"rig.agent.{token(node_name)}.{what}"


def orders_of(node_name: str) -> tuple[str, ...]:
    """What an agent reads: bindings and stop orders for its node, alone or in a gang."""
    return (
        f"rig.own.bind.{token(node_name)}",
        f"rig.own.bind.{GANG}",
        f"rig.evict.{node_name}",
        f"rig.evict.{GANG}",
    )


def consumer_of_agent(node_name: str) -> str:
    """Name of the durable consumer that the ledger makes for an agent when it folds `node.joined`."""
    return f"agent-{token(node_name)}"


def _one_or_gang(nodes: tuple[str, ...]) -> str:
    return token(nodes[0]) if len(nodes) == 1 else GANG

"""Which nodes are silent, judged by when *we* heard them on our own monotonic clock. Pure.

Silent is not dead: ownership stays, and what a node runs, runs on. A node is unreachable when it was silent
for `silence_factor` of its own heartbeat intervals, within bounds; it is back with the first heartbeat that
was received after that was written down.

We are the first suspect. Nobody is called silent before `startup_seconds` after we began to listen (or
began again: a restart, a reconnect, a pause of our own process). And when more than half of the nodes that
should be there fall silent in one window, nobody is: heartbeats of all nodes missing at once are a fault of
the bus, the network or this process, not of the nodes (CASES 8). A fleet of one cannot be told apart that
way; there the service asks the bus for the node's last heartbeat before it believes its own ears.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rigbook_ledger.state import Node

__all__ = ["Back", "Heard", "Liveness", "Patience", "Silent", "assess", "silence_allowed"]

# What is assumed of a node that we have not heard yet.
_EVERY_SECONDS: float = 1.0


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long a silence may be. Seconds, on our clock."""

    silence_factor: float = 15.0  # of the node's heartbeat interval: 15 s at one a second
    silence_seconds_min: float = 5.0
    silence_seconds_max: float = 300.0  # whatever interval a node claims
    startup_seconds: float = 15.0
    # Silences that begin within this time are one happening; at least two nodes, or it says nothing.
    window_seconds: float = 60.0
    mass_nodes_min: int = 2
    mass_share: float = 0.5  # more than this share of the nodes


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """The latest heartbeat of a node."""

    at: float  # monotonic seconds, ours
    received_ns: int  # the server's clock
    every_seconds: float = _EVERY_SECONDS


class Silent(msgspec.Struct, frozen=True, kw_only=True):
    """A node to be written down as unreachable."""

    node: str
    silent_seconds: float
    last_heard_ns: int  # the server's clock, 0 = not since we began to listen


class Back(msgspec.Struct, frozen=True, kw_only=True):
    """A node to be written down as recovered."""

    node: str
    silent_seconds: float  # from when it was written down as unreachable
    received_ns: int


class Liveness(msgspec.Struct, frozen=True, kw_only=True):
    """What to write down. With `mass_loss` nothing is silent, and nobody may act on what nodes show."""

    silent: tuple[Silent, ...] = ()
    back: tuple[Back, ...] = ()
    mass_loss: str = ""


def silence_allowed(every_seconds: float, patience: Patience) -> float:
    """Seconds of silence that mean nothing."""
    wanted = every_seconds * patience.silence_factor
    return min(max(wanted, patience.silence_seconds_min), patience.silence_seconds_max)


def assess(
    nodes: Mapping[str, Node],
    heard: Mapping[str, Heard],
    lost: Mapping[str, float],
    *,
    listening_since: float,
    now: float,
    patience: Patience,
) -> Liveness:
    """`lost`: nodes that we called silent ourselves, and when. All instants monotonic, ours."""
    silent: list[Silent] = []
    back: list[Back] = []
    expected = missing = 0
    for node in nodes.values():
        latest = heard.get(node.name)
        if node.unreachable_ns:
            if latest is not None and latest.received_ns > node.unreachable_ns:
                seconds = (latest.received_ns - node.unreachable_ns) / 1e9
                back.append(Back(node=node.name, silent_seconds=seconds, received_ns=latest.received_ns))
            elif now - lost.get(node.name, -1e18) < patience.window_seconds:
                expected += 1
                missing += 1
            continue
        expected += 1
        allowed = silence_allowed(latest.every_seconds if latest is not None else _EVERY_SECONDS, patience)
        since = listening_since
        if latest is not None and latest.at > listening_since:
            since = latest.at
        else:
            allowed = max(allowed, patience.startup_seconds)
        seconds = now - since
        # Nodes cut off at one moment cross the line one after the other: those half-way there count too.
        if seconds > allowed / 2:
            missing += 1
        if seconds > allowed:
            told_ns = latest.received_ns if latest is not None else 0
            silent.append(Silent(node=node.name, silent_seconds=seconds, last_heard_ns=told_ns))
    if silent and missing >= patience.mass_nodes_min and missing > expected * patience.mass_share:
        return Liveness(
            back=tuple(back),
            mass_loss=f"heartbeats of {missing}/{expected} nodes missing: control-plane problem?",
        )
    return Liveness(silent=tuple(silent), back=tuple(back))

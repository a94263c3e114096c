"""Every event kind: its payload, version, author and subject. The one list that all others come from."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from rigbook_schemas import events as e

__all__ = ["BY_KIND", "BY_PAYLOAD", "KINDS", "Author", "Kind"]


class Author(enum.StrEnum):
    """The only party that can know the fact. Bus permissions enforce it."""

    CLIENT = "client"
    PLACER = "placer"
    NODEAGENT = "nodeagent"
    REAPER = "reaper"
    OPERATOR = "operator"


class Kind(msgspec.Struct, frozen=True):
    """One event kind at its current version."""

    name: str
    payload: type[e.Payload]
    authors: tuple[Author, ...]
    subject: str  # the family; the last token is a project, a node or a topic
    about: str  # the payload field that goes into the CloudEvents `subject`
    version: int = 1

    @property
    def type(self) -> str:
        """CloudEvents `type`."""
        return f"dev.rigbook.{self.name}.v{self.version}"

    @property
    def summary(self) -> str:
        return (self.payload.__doc__ or "").strip().splitlines()[0]


_C, _P, _N, _R, _O = Author.CLIENT, Author.PLACER, Author.NODEAGENT, Author.REAPER, Author.OPERATOR

KINDS: Final[tuple[Kind, ...]] = (
    Kind("demand.raised", e.DemandRaised, (_C,), "rig.demand", "demand"),
    Kind("demand.withdrawn", e.DemandWithdrawn, (_C,), "rig.demand", "demand"),
    Kind("bound", e.Bound, (_P,), "rig.own.bind", "demand"),
    Kind("deferred", e.Deferred, (_P,), "rig.verdict", "demand"),
    Kind("refused", e.Refused, (_P,), "rig.verdict", "demand"),
    Kind("eviction.ordered", e.EvictionOrdered, (_P, _R, _O), "rig.evict", "demand"),
    Kind("started", e.Started, (_N,), "rig.run", "demand"),
    Kind("ready", e.Ready, (_N,), "rig.run", "demand"),
    Kind("unready", e.Unready, (_N,), "rig.run", "demand"),
    Kind("exited", e.Exited, (_N,), "rig.run", "demand"),
    Kind("eviction.answered", e.EvictionAnswered, (_N,), "rig.run", "demand"),
    Kind("released", e.Released, (_N, _O, _R), "rig.release", "demand"),
    Kind("node.joined", e.NodeJoined, (_N,), "rig.node", "node"),
    Kind("node.changed", e.NodeChanged, (_N,), "rig.node", "node"),
    Kind("node.unreachable", e.NodeUnreachable, (_R,), "rig.node", "node"),
    Kind("node.recovered", e.NodeRecovered, (_R,), "rig.node", "node"),
    Kind("drift.detected", e.DriftDetected, (_R,), "rig.drift", "drift"),
    Kind("drift.cleared", e.DriftCleared, (_R,), "rig.drift", "drift"),
    Kind("heartbeat", e.Heartbeat, (_N,), "rig.heartbeat", "node"),
    Kind("quota.set", e.QuotaSet, (_O,), "rig.own.policy", "project"),
    Kind("mode.set", e.ModeSet, (_O,), "rig.own.policy", "card"),
    Kind("node.cordoned", e.NodeCordoned, (_O,), "rig.own.policy", "node"),
    Kind("node.uncordoned", e.NodeUncordoned, (_O,), "rig.own.policy", "node"),
    Kind("gpu.quarantined", e.GpuQuarantined, (_O, _N), "rig.own.policy", "card"),
    Kind("gpu.restored", e.GpuRestored, (_O,), "rig.own.policy", "card"),
    Kind("priority.capped", e.PriorityCapped, (_O,), "rig.own.policy", "priority"),
    Kind("placement.set", e.PlacementSet, (_O,), "rig.own.policy", "policy"),
    Kind("preemption.set", e.PreemptionSet, (_O,), "rig.own.policy", "on"),
    Kind("healing.set", e.HealingSet, (_O,), "rig.own.policy", "kind"),
    Kind("unknown.accepted", e.UnknownAccepted, (_O,), "rig.own.policy", "seq"),
    Kind("adopted", e.Adopted, (_O,), "rig.own.bind", "demand"),
    Kind("sequence.skipped", e.SequenceSkipped, (_O,), "rig.own.policy", "generation"),
    Kind("log.recovered", e.LogRecovered, (_O,), "rig.own.policy", "generation"),
)

BY_KIND: Final[dict[str, Kind]] = {kind.name: kind for kind in KINDS}
BY_PAYLOAD: Final[dict[type[e.Payload], Kind]] = {kind.payload: kind for kind in KINDS}

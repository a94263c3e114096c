"""The plan: which rules and which fleet a past is asked about instead of its own.

The changes hold from the beginning of the past: a rule of the record that the plan replaces is left out of it, a
node that the plan takes away never joined, a new node was there from the first moment.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_placer.rank import POLICIES
from rigbook_schemas import events as e
from rigbook_schemas.values import MEMORY_BYTES_MAX, MEMORY_BYTES_MIN, CardInventory, Engine

from rigbook_replay.lifetimes import Happening

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_replay.lifetimes import Past

__all__ = ["BadPlan", "NewNode", "Plan", "happenings_of", "new_node"]

NODES_MAX: Final = 10_000
CARDS_MAX: Final = 128
_NODE: Final = re.compile(
    r"(?:(?P<name>[A-Za-z0-9][A-Za-z0-9_-]{0,40})=)?(?:(?P<nodes>\d{1,5})\*)?(?P<cards>\d{1,3})x(?P<model>[^:=*]+)"
    r"(?::(?P<memory>[^:]+))?"
)
EXPECTED: Final = "expected CARDSxMODEL such as 4xH100, NAME=4xH100, 10*8xA100 (ten servers) or 2xMyCard:48GB"


class BadPlan(ValueError):
    """The plan asks for what is not there, or says the same twice."""

    code = "bad_plan"


class NewNode(msgspec.Struct, frozen=True):
    """Servers to be added, all alike."""

    name: str
    nodes: int
    cards: int
    model: str
    memory_bytes: int = 0  # 0 = as other cards of this model


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Differences from the record; the default is none."""

    policy: str = ""
    quotas: dict[str, int | None] = {}
    add: tuple[NewNode, ...] = ()
    remove: tuple[str, ...] = ()
    preemption: bool | None = None
    cap_share: float | None = None

    @property
    def changes(self) -> list[str]:
        """In words."""
        said = [f"policy {self.policy}"] if self.policy else []
        for project, limit in self.quotas.items():
            said.append(f"quota {project} {'none' if limit is None else f'{limit / 1024**3:g} GiB'}")
        said += [f"with {n.nodes} more of {n.cards}x{n.model}" for n in self.add]
        said += [f"without node {name}" for name in self.remove]
        if self.preemption is not None:
            said.append(f"preemption {'on' if self.preemption else 'off'}")
        if self.cap_share is not None:
            said.append(f"high priority at most {self.cap_share:.0%}")
        return said


def new_node(text: str, memory_bytes: int = 0) -> tuple[NewNode, str]:
    """The servers, and the text of the card's memory, which the caller reads ("" = not given). Raises BadPlan."""
    found = _NODE.fullmatch(text.strip())
    if found is None:
        raise BadPlan(f"{text!r} is no server; {EXPECTED}")
    nodes, cards = int(found["nodes"] or 1), int(found["cards"])
    if not 1 <= nodes <= NODES_MAX or not 1 <= cards <= CARDS_MAX:
        raise BadPlan(f"{text!r}: 1 to {NODES_MAX} servers with 1 to {CARDS_MAX} cards; {EXPECTED}")
    node = NewNode(found["name"] or "", nodes, cards, found["model"].strip(), memory_bytes)
    return node, found["memory"] or ""


def happenings_of(past: Past, plan: Plan, *, fleet: Sequence[NewNode] = ()) -> list[Happening]:
    """What befalls the fleet under the plan, in order. `fleet`: servers of a past that names none. Raises BadPlan."""
    _check(past, plan)
    gone = set(plan.remove)
    cards_gone = {
        card.uuid
        for one in past.happenings
        if isinstance(one.data, e.NodeJoined) and one.data.node in gone
        for card in one.data.cards
    }
    kept = [one for one in past.happenings if not _left_out(one.data, plan, gone, cards_gone)]
    started = [Happening(past.from_ns, "node.joined", data) for data in _joined(past, fleet, "server")]
    started += [Happening(past.from_ns, "node.joined", data) for data in _joined(past, plan.add, "new")]
    rules: list[tuple[str, e.Payload]] = []
    if plan.policy:
        rules.append(("placement.set", e.PlacementSet(policy=plan.policy)))
    rules += [
        ("quota.set", e.QuotaSet(project=project, memory_bytes=limit))
        for project, limit in plan.quotas.items()
    ]
    if plan.preemption is not None:
        rules.append(("preemption.set", e.PreemptionSet(on=plan.preemption)))
    if plan.cap_share is not None:
        rules.append(("priority.capped", e.PriorityCapped(priority=75, share=plan.cap_share)))
    return [*(Happening(past.from_ns, kind, data) for kind, data in rules), *started, *kept]


def _check(past: Past, plan: Plan) -> None:
    if plan.policy and plan.policy not in POLICIES:
        raise BadPlan(f"no policy is called {plan.policy!r}; there are {', '.join(POLICIES)}")
    known = {one.data.node for one in past.happenings if isinstance(one.data, e.NodeJoined)}
    for name in plan.remove:
        if name not in known:
            raise BadPlan(f"no node {name!r} in this past; it knows {', '.join(sorted(known)[:8]) or 'none'}")
    for node in plan.add:
        if node.name and node.name in known:
            raise BadPlan(f"node {node.name!r} is in this past already; give the new one another name")


def _left_out(data: e.Payload, plan: Plan, gone: set[str], cards_gone: set[str]) -> bool:
    if isinstance(data, e.QuotaSet):
        return data.project in plan.quotas
    if isinstance(data, e.PlacementSet):
        return bool(plan.policy)
    if isinstance(data, e.PreemptionSet):
        return plan.preemption is not None
    if isinstance(data, e.PriorityCapped):
        return plan.cap_share is not None
    if isinstance(data, (e.ModeSet, e.GpuQuarantined, e.GpuRestored)):
        return data.card in cards_gone
    return getattr(data, "node", "") in gone


def _joined(past: Past, servers: Sequence[NewNode], prefix: str) -> list[e.NodeJoined]:
    """The servers as they would join. Engines as the past asks for them: both."""
    told: list[e.NodeJoined] = []
    for number, one in enumerate(servers, 1):
        model, memory_bytes = _card(past, one)
        for copy in range(1, one.nodes + 1):
            name = one.name or f"{prefix}-{number}"
            name = f"{name}-{copy}" if one.nodes > 1 else name
            cards = tuple(
                CardInventory(uuid=f"GPU-{name}-{i}", index=i, model=model, memory_bytes=memory_bytes)
                for i in range(one.cards)
            )
            told.append(
                e.NodeJoined(
                    node=name, incarnation="whatif", cards=cards, simulated=True,
                    engines=(Engine.PROCESS.value, Engine.DOCKER.value),
                )
            )  # fmt: skip
    names = [data.node for data in told]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(names) < 2000 else []
    if twice:
        raise BadPlan(f"two new servers are called {twice[0]!r}")
    return told


def _card(past: Past, one: NewNode) -> tuple[str, int]:
    """Model and memory: as written, as the past's own fleet has it, or as the model is known."""
    if one.memory_bytes:
        if not MEMORY_BYTES_MIN <= one.memory_bytes <= MEMORY_BYTES_MAX:
            raise BadPlan(f"{one.model}: {one.memory_bytes} bytes is no memory of a card")
        return one.model, one.memory_bytes
    asked = one.model.lower().replace(" ", "")
    for happening in past.happenings:
        if isinstance(happening.data, e.NodeJoined):
            for card in happening.data.cards:
                if asked in card.model.lower().replace(" ", "") and card.memory_bytes:
                    return card.model, card.memory_bytes
    from rigbook_nodeagent.gpus.simulated import card_models

    try:
        known = card_models(f"sim:1x{one.model}")[0]
    except ValueError as error:
        raise BadPlan(
            f"the memory of {one.model!r} is not known ({error}); write it: 4x{one.model}:48GB"
        ) from None
    return known.name, known.memory_bytes

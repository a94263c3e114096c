"""A fleet grown by events, as the log would, for the tests of the placer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rigbook_ledger.audit import audit
from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import State
from rigbook_placer.place import explain, place
from rigbook_schemas import events as e
from rigbook_schemas import subjects as s
from rigbook_schemas.values import GIB, CardInventory, Component, EvictionReason, Owner, Request
from rigbook_schemas.wire import Record, rfc3339

if TYPE_CHECKING:
    from rigbook_placer.feasible import Seen
    from rigbook_schemas.values import ReasonCode

NOW = 1_796_000_000 * 10**9
SECOND = 10**9
# Fields of `DemandRaised`; everything else that `demand` takes is of its request.
OF_DEMAND = (
    "max_run_seconds", "preemptible", "preempts", "placement", "windows", "workload", "restart", "components",
)  # fmt: skip


class Fleet:
    """The state, and short ways to tell it things. `now_ns` is what the server's clock says."""

    def __init__(self) -> None:
        self.state = State()
        self.now_ns = NOW
        self.causes: dict[str, str] = {}  # event id: causation

    def tell(self, subject: str, data: e.Payload, *, cause: str = "") -> int:
        seq = self.state.position + 1
        record = Record(
            seq,
            subject,
            self.now_ns + seq,
            f"id-{seq}",
            "kind",
            "test",
            rfc3339(self.now_ns),
            data,
            causation=cause,
        )
        self.causes[record.id] = cause
        self.state = evolve(self.state, record)
        return seq

    def node(self, name: str, cards: int, *, gib: int = 24, model: str = "RTX4090", **more: object) -> None:
        self.tell(
            s.node(name),
            e.NodeJoined(
                node=name,
                incarnation="1",
                engines=("process",),
                cards=tuple(
                    CardInventory(uuid=f"GPU-{name}-{i}", index=i, model=model, memory_bytes=gib * GIB)
                    for i in range(cards)
                ),
                **more,  # type: ignore[arg-type]
            ),
        )

    def spec(
        self, name: str, *, gib: float = 8, project: str = "nlp", priority: int = 50, **more: object
    ) -> e.DemandRaised:
        own = {field: more.pop(field) for field in OF_DEMAND if field in more}
        own.setdefault("components", (Component(command=("true",)),))
        return e.DemandRaised(
            demand=name,
            project=project,
            priority=priority,
            owner=Owner(name="ann"),
            resources=Request(memory_bytes=int(gib * GIB), **more),  # type: ignore[arg-type]
            **own,  # type: ignore[arg-type]
        )

    def demand(self, name: str, **asked: object) -> e.DemandRaised:
        spec = self.spec(name, **asked)  # type: ignore[arg-type]
        self.tell(s.demand(spec.project), spec)
        return spec

    def take(self, bound: e.Bound, *, cause: str = "") -> tuple[str, ...]:
        """Append a binding; its cards."""
        self.tell(s.bind(tuple(share.node for share in bound.shares)), bound, cause=cause)
        assert audit(self.state) == []
        return tuple(a.card for share in bound.shares for a in share.allotments)

    def bind(
        self, name: str, *, seen: dict[str, Seen] | None = None, policy: str = "pack", **asked: object
    ) -> tuple[str, ...]:
        """Raise and place; the cards, or () when it must wait."""
        spec = self.demand(name, **asked)
        bound = place(self.state, spec, seen or {}, policy, now_ns=self.now_ns)
        return () if bound is None else self.take(bound)

    def codes(self, name: str, seen: dict[str, Seen] | None = None) -> list[ReasonCode]:
        return [r.code for r in self.reasons(name, seen)]

    def reasons(self, name: str, seen: dict[str, Seen] | None = None) -> tuple[object, ...]:  # type: ignore[type-arg]
        return explain(self.state, self.state.demands[name].spec, seen or {}, now_ns=self.now_ns)

    def pass_time(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)

    def evict(
        self, name: str, *, requeue: bool = True, reason: EvictionReason = EvictionReason.DRAIN
    ) -> None:
        epoch = self.state.demands[name].epoch
        nodes = tuple(share.node for share in self.state.bindings[epoch].shares)
        self.tell(
            s.evict(nodes),
            e.EvictionOrdered(demand=name, epoch=epoch, nodes=nodes, reason=reason, requeue=requeue),
        )

    def release(self, name: str, *, cause: str = "") -> None:
        """All nodes were seen free of it."""
        epoch = self.state.demands[name].epoch
        for share in self.state.bindings[epoch].shares:
            self.tell(
                s.release(share.node), e.Released(demand=name, epoch=epoch, node=share.node), cause=cause
            )
        assert audit(self.state) == []

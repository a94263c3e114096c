"""How to go on with a log that was lost. Pure: a survey in, what to append out.

One way, with two ends:

1. Nobody wrote on the stream since the loss: what the second copy has beyond it is appended again, byte for
   byte, and each event gets its old sequence (`restored`). Else the stream is gone on with (`adopted`).
2. Sequences that anybody knew of the lost log and that are not used yet are skipped, so that an epoch
   never means two things.
3. What is true and not on the log is told again: the operator's rules, demands that were raised, bindings
   of what runs (`adopted`, under their old epochs), and the end of what ended.
4. `log.recovered`, last: from there on everybody decides again. A recovery that broke off is begun anew.

Unknown is not absent: a binding on a node that did not report is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_ledger.state import Phase
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas.events import Payload
from rigbook_schemas.queries import RawRow
from rigbook_schemas.values import Owner, Request
from rigbook_schemas.wire import rfc3339

from rigbook.recovery.survey import Lost, what_was_lost

if TYPE_CHECKING:
    from rigbook_ledger.state import Binding, State
    from rigbook_schemas.queries import AgentOrder
    from rigbook_schemas.values import NodeShare

    from rigbook.recovery.survey import Survey

__all__ = ["Plan", "Said", "plan"]

SKIPPED_MAX: Final = 1_000_000


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """One event to append, and why, in words for the operator."""

    subject: str
    data: Payload
    why: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a recovery would do. With `refusals` nothing is done."""

    how: str  # restored, adopted; "" = nothing is wrong
    lost: Lost | None = None
    foreign: int = 0
    copy: tuple[RawRow, ...] = ()  # appended again
    skip_to: int = 0  # the next sequence is beyond this
    join: tuple[str, ...] = ()  # agents that are asked to tell their inventory
    said: tuple[Said, ...] = ()
    silent: tuple[str, ...] = ()  # nodes that are done without
    unplaced: tuple[str, ...] = ()  # what runs and cannot be adopted
    generation: int = 1
    adopted: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    refusals: tuple[str, ...] = ()


def plan(found: Survey, *, without: frozenset[str], without_copy: bool, by: str, reason: str) -> Plan:
    """`without`: nodes that need not report. `without_copy`: go on although no ledger answers."""
    if not found.troubled:
        return Plan(how="")
    lost = what_was_lost(found.copy)
    whole = found.foreign == 0
    refusals = _refusals(found, without=without, without_copy=without_copy)
    end = found.known_position
    last = found.facts.last_seq if found.facts is not None else 0
    begin = found.before if whole and found.before is not None else found.now
    if end - max(last, begin.position) > SKIPPED_MAX:
        refusals.append(
            f"{end - last} sequences would have to be skipped; at most {SKIPPED_MAX} are: see docs/recovery.md"
        )
    story = _Story(found, begin, by=by, reason=reason)
    story.tell(whole=whole)
    return Plan(
        how="restored" if whole else "adopted",
        lost=lost,
        foreign=found.foreign,
        copy=found.copy if whole else (),
        skip_to=end if end > max(last, begin.position) else 0,
        join=tuple(
            n
            for n, report in found.agents.items()
            if report is not None and report.distrusts and not (whole and n in begin.nodes)
        ),
        said=tuple(story.said),
        silent=tuple(n for n, report in found.agents.items() if report is None),
        unplaced=tuple(story.unplaced),
        generation=found.generation + 1,
        adopted=tuple(story.adopted),
        released=tuple(story.released),
        refusals=tuple(refusals),
    )


def _refusals(found: Survey, *, without: frozenset[str], without_copy: bool) -> list[str]:
    told: list[str] = []
    if found.status is None and not without_copy:
        told.append(
            "no ledger answers: its file may hold what the stream lost. Start it, or, when the file is gone "
            "too, say --without-copy"
        )
    for node, report in found.agents.items():
        if report is None and node not in without:
            told.append(
                f"node {node} does not report what it runs. Start its agent, or say --without {node}: what it "
                "runs then has no right when it comes back, unless the second copy knows it"
            )
    if found.status is not None and not found.safe_mode and found.distrusting:
        told.append(
            "the ledger trusts this log and agents do not: it began with it. Say --without-copy to go on with it"
        )
        if without_copy:
            told.pop()
    return told


class _Story:
    """What must be told so that the log says what is."""

    def __init__(self, found: Survey, begin: State, *, by: str, reason: str) -> None:
        self.found = found
        self.now = begin
        self.by = by
        self.reason = reason
        self.said: list[Said] = []
        self.adopted: list[int] = []
        self.released: list[int] = []
        self.unplaced: list[str] = []

    def tell(self, *, whole: bool) -> None:
        before = self.found.before
        if before is not None and not whole:
            self._rules(before)
        self._bindings(before)
        if not whole:
            self._ended(before)
        if before is not None and not whole:
            self._demands(before)

    def _say(self, subject: str, data: Payload, why: str) -> None:
        self.said.append(Said(subject=subject, data=data, why=why))

    # -- what runs ------------------------------------------------------------------------------

    def _bindings(self, before: State | None) -> None:
        orders: dict[int, list[tuple[str, AgentOrder]]] = {}
        for node, report in self.found.agents.items():
            for order in report.orders if report is not None else ():
                orders.setdefault(order.epoch, []).append((node, order))
        for epoch, told in sorted(orders.items()):
            there = self.now.bindings.get(epoch)
            if there is not None and there.demand == told[0][1].demand:
                continue
            self._adopt(epoch, told, before.bindings.get(epoch) if before is not None else None, before)
        for epoch, binding in sorted(before.bindings.items()) if before is not None else ():
            if epoch in self.now.bindings or epoch in orders:
                continue
            silent = [s.node for s in binding.shares if self.found.agents.get(s.node) is None]
            if silent:  # unknown is not absent
                self._adopt(epoch, [], binding, before)

    def _adopt(
        self, epoch: int, told: list[tuple[str, AgentOrder]], known: Binding | None, before: State | None
    ) -> None:
        shares: tuple[NodeShare, ...] = known.shares if known is not None else tuple(o.share for _, o in told)
        demand = known.demand if known is not None else told[0][1].demand
        old = before.demands.get(demand) if before is not None else None
        now = self.now.demands.get(demand)
        spec = now.spec if now is not None else old.spec if old is not None else _spec_of(told[0][1])
        wanted = not any(o.stopping for _, o in told) and (old is None or old.wanted)
        bound = (told[0][1].bound if told else "") or (rfc3339(known.bound_ns) if known is not None else "")
        reported = {node for node, _ in told}
        of_copy = [n for n in (known.started if known is not None else ()) if n not in reported]
        data = e.Adopted(
            demand=demand,
            epoch=epoch,
            spec=spec,
            shares=shares,
            wanted=wanted,
            started=(*(n for n, o in told if o.started), *of_copy),
            ready=(
                *(n for n, o in told if o.ready),
                *(n for n in (known.ready if known is not None else ()) if n not in reported),
            ),
            bound=bound,
            told_by=(*(f"agent {n}" for n in reported), *(("copy",) if known is not None else ())),
            by=self.by,
            reason=self.reason,
        )
        unknown = [
            s.node
            for s in shares
            if s.node not in reported
            and any(a.card not in self.now.cards for a in s.allotments)
            and self.found.agents.get(s.node) is None
        ]
        where = ", ".join(s.node for s in shares)
        if unknown:
            self.unplaced.append(
                f"epoch {epoch} of demand {demand} on {where}: the cards of {', '.join(unknown)} are not known on this log"
            )
            return
        if now is not None and now.phase not in (Phase.WAITING, Phase.WITHDRAWN, Phase.REFUSED):
            self.unplaced.append(
                f"epoch {epoch} of demand {demand} on {where}: this log says that the demand is {now.phase}"
            )
            return
        self.adopted.append(epoch)
        self._say(
            subjects.bind(tuple(s.node for s in shares)),
            data,
            f"epoch {epoch} of demand {demand} on {where} keeps its right ({', '.join(data.told_by)})",
        )

    def _ended(self, before: State | None) -> None:
        """Bindings of this log that ended in the part that was lost."""
        for epoch, binding in sorted(self.now.bindings.items()):
            if before is not None and epoch in before.bindings:
                continue
            for share in binding.shares:
                report = self.found.agents.get(share.node)
                if share.node in binding.released or report is None or report.position < epoch:
                    continue
                if any(order.epoch == epoch for order in report.orders):
                    continue
                text = "it ended in the part of the log that was lost"
                self.released.append(epoch)
                self._say(
                    subjects.release(share.node),
                    e.Released(
                        demand=binding.demand,
                        epoch=epoch,
                        node=share.node,
                        forced=True,
                        by=self.by,
                        text=text,
                    ),
                    f"epoch {epoch} of demand {binding.demand} on {share.node} is released: {text}",
                )

    # -- what was said --------------------------------------------------------------------------

    def _demands(self, before: State) -> None:
        adopted = {said.data.demand for said in self.said if isinstance(said.data, e.Adopted)}
        for did, old in before.demands.items():
            if did in adopted:
                continue
            now = self.now.demands.get(did)
            gone = old.phase.terminal or not old.wanted
            if now is None and not gone:
                self._say(
                    subjects.demand(old.spec.project),
                    old.spec,
                    f"demand {did} ({old.spec.name or 'no name'}) is raised again",
                )
            elif now is not None and now.wanted and not now.phase.terminal and gone:
                if now.phase is not Phase.WAITING and old.phase.terminal:
                    continue  # its binding is released instead
                why = f"it was {old.phase} in the part of the log that was lost"
                self._say(
                    subjects.demand(now.spec.project),
                    e.DemandWithdrawn(demand=did, project=now.spec.project, by=self.by, reason=why),
                    f"demand {did} is withdrawn: {why}",
                )

    def _rules(self, before: State) -> None:
        now, by, reason = self.now, self.by, self.reason
        for project, old in before.projects.items():
            mine = now.projects.get(project)
            if old.quota_bytes != (mine.quota_bytes if mine is not None else None):
                self._rule(
                    "quota", e.QuotaSet(project=project, memory_bytes=old.quota_bytes, by=by, reason=reason)
                )
        for name, node in before.nodes.items():
            there = now.nodes.get(name)
            if there is None and self.found.agents.get(name) is None:
                continue  # it is not on this log, and does not join it now
            if node.cordoned == (there.cordoned if there is not None else None):
                continue
            if node.cordoned is not None:
                self._rule("node", e.NodeCordoned(node=name, by=by, reason=node.cordoned))
            else:
                self._rule("node", e.NodeUncordoned(node=name, by=by, reason=reason))
        for uuid, card in before.cards.items():
            found = now.cards.get(uuid)
            if found is None and self.found.agents.get(card.node) is None:
                continue
            if card.quarantined != (found.quarantined if found is not None else None):
                self._rule(
                    "gpu",
                    e.GpuQuarantined(card=uuid, by=by, reason=card.quarantined)
                    if card.quarantined is not None
                    else e.GpuRestored(card=uuid, by=by, reason=reason),
                )
            if card.mode is not (found.mode if found is not None else None):
                self._rule("gpu", e.ModeSet(card=uuid, mode=card.mode, node=card.node, by=by, reason=reason))
        if (before.policy.cap_priority, before.policy.cap_share) != (
            now.policy.cap_priority,
            now.policy.cap_share,
        ):
            share = before.policy.cap_share if before.policy.cap_share is not None else 1.0
            self._rule(
                "priority",
                e.PriorityCapped(priority=before.policy.cap_priority, share=share, by=by, reason=reason),
            )
        for kind in sorted({*before.policy.healing} ^ {*now.policy.healing}):
            on = kind in before.policy.healing
            self._rule("healing", e.HealingSet(kind=kind, on=on, by=by, reason=reason))

    def _rule(self, topic: str, data: Payload) -> None:
        kind = type(data).__name__
        about = next(
            str(getattr(data, f)) for f in ("project", "node", "card", "kind", "priority") if hasattr(data, f)
        )
        self._say(subjects.policy(topic), data, f"{kind} of {about} is said again")


def _spec_of(order: AgentOrder) -> e.DemandRaised:
    """A demand that no log knows any more, from what its agent was told."""
    allotments = order.share.allotments
    return e.DemandRaised(
        demand=order.demand,
        project=order.project,
        owner=order.owner or Owner(name="unknown"),
        resources=Request(
            memory_bytes=min((a.memory_bytes for a in allotments), default=0),
            count=max(1, len(allotments)),
            mode=allotments[0].mode if allotments else Request(memory_bytes=0).mode,
        ),
        components=order.share.components,
        workload=order.workload,
        restart=order.restart,
        purpose="told by its agent after the log was lost",
    )

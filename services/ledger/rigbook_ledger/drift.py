"""`compare(state, beat)`: desired, bound and observed of one node, side by side, and where they differ.

Three views, never two: an app whose server outlived its stop has a row in the ledger *and* a busy card,
so ledger against card looks consistent; what is wrong is that desired is stopped.

| desired | bound here | observed | it is |
|---|---|---|---|
| running | live | runs on its cards, within its allotment | in order |
| running | live | a process (or a device given) on another card | `wrong_card` |
| running | live, shared card | its processes hold more than the allotment | `overuse` |
| running or stopped | live | nothing runs, no process of it on any card | `missing` |
| stopped | live | runs, or holds card memory, after the stop had its time | `leftover` |
| any | ended, void or unknown epoch | runs with our labels, or holds card memory | `squatter` |
| any | live | a process without our labels holds memory of the card | `squatter`, never touched |
| any | any | the engine or the driver does not answer | nothing: unknown is not absent |

How a card stands with its bindings (`mode_mismatch`, `double_holder`, `card_lost`, `vram_not_recovered`) is in
`drift_cards`; how a binding in order uses its cards (`idle_holder`, `suspected_hang`, `gpu_lost_in_container`)
in `drift_use`.

Whose word is it? Each row also has a time before which it is no difference but work under way: it is then
`pending`, which keeps an open drift open and counts for nothing else.

- `leftover`: the order's grace (twice, where access points are stopped before a server) and `stop_seconds`
  must have passed since the order, or the components' own stop times since the withdrawal when nobody ordered
  it; at once after the agent's final `exited`. An order that the agent has not read (`engine_position`) has
  at least `unread_seconds`.
- `missing`: the share had `started` before this was observed; or has `exited` for `unreleased_seconds`; or is
  bound for `start_seconds` and not started (images are pulled in that time); or was ordered to stop, as above.
- An epoch beyond `state.position` is a binding that we have not folded yet: nothing.
- What was observed before the latest event about the same binding is older than the books: pending.

Pure: no clock is read; instants come from events and from the heartbeat's receipt, both the server's clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.values import DriftKind, Mode, Role

from rigbook_ledger import drift_cards, drift_use
from rigbook_ledger import evidence as say
from rigbook_ledger.observed import Beat, Observed, observe
from rigbook_ledger.sighting import KINDS, Comparison, Sighting, Tolerance, drift_key
from rigbook_ledger.state import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rigbook_schemas.values import NodeShare

    from rigbook_ledger.observed import Hold
    from rigbook_ledger.state import Binding, Demand, State

__all__ = ["KINDS", "Beat", "Comparison", "Sighting", "Tolerance", "compare", "drift_key"]

_NS: Final = 1_000_000_000


def compare(state: State, beat: Beat, tolerance: Tolerance | None = None) -> Comparison:
    """Total: a heartbeat of an unknown node, or of another agent than the books name, shows nothing."""
    told = beat.heartbeat
    node = state.nodes.get(told.node)
    empty = Comparison(
        node=told.node, incarnation=told.incarnation, number=told.number, received_ns=beat.received_ns
    )
    if node is None or node.incarnation != told.incarnation:
        return empty
    rows = _Rows(state, beat, tolerance or Tolerance())
    return msgspec.structs.replace(
        empty,
        sightings=tuple(rows.sightings),
        pending=frozenset(rows.pending - {s.key for s in rows.sightings}),
        unsure=frozenset(rows.unsure),
        components_known=rows.seen.components_known,
        cards_known=rows.seen.cards_known,
        cards=frozenset(u for u in node.cards if (card := state.cards.get(u)) is not None and card.present),
    )


class _Rows:
    """Walks the table for one node; fills `sightings` and `pending`."""

    def __init__(self, state: State, beat: Beat, tolerance: Tolerance) -> None:
        self.state = state
        self.beat = beat
        self.node = beat.heartbeat.node
        self.tolerance = tolerance
        self.seen: Observed = observe(beat, stale_seconds=tolerance.stale_seconds)
        self.sightings: list[Sighting] = []
        self.pending: set[str] = set()
        self.unsure: set[str] = set()
        live = {
            epoch: state.bindings[epoch]
            for uuid in state.nodes[self.node].cards
            if uuid in state.cards
            for epoch in state.cards[uuid].holders
            if epoch in state.bindings and self.node not in state.bindings[epoch].released
        }
        for binding in live.values():
            self._bound(binding)
        for label in sorted({*self.seen.running, *self.seen.holds}):
            epoch, demand = label
            if epoch not in live or demand not in ("", live[epoch].demand):
                self._stray(epoch, demand)
        for uuid, holds in self.seen.foreign.items():
            self._foreign(uuid, holds)
        self.sightings += drift_cards.compare_cards(state, beat, self.seen, self.tolerance)

    def _see(self, sighting: Sighting, *, due: bool) -> None:
        if due:
            self.sightings.append(sighting)
        else:
            self.pending.add(sighting.key)

    # -- bound here -----------------------------------------------------------------------------

    def _bound(self, binding: Binding) -> None:
        share = binding.share(self.node)
        if share is None:
            return
        demand = self.state.demands[binding.demand]
        mine = self._mine(binding)
        stopped = demand.phase is Phase.RELEASING
        latest_ns = max(
            demand.since_ns, binding.bound_ns, binding.eviction.ordered_ns if binding.eviction else 0
        )
        # What was observed before the latest event about this binding is older than the books.
        fresh = self.seen.observed_ns > latest_ns
        if mine.runs:
            if stopped:
                self._see(
                    self._leftover(binding, share, demand, mine),
                    due=fresh and self._had_its_time(binding, demand),
                )
            for sighting in (*self._wrong_card(binding, share, mine), *self._overuse(binding, share, mine)):
                self._see(sighting, due=fresh and not stopped)
            if fresh and not stopped:
                use = drift_use.compare_use(self.state, self.beat, binding, mine, self.tolerance)
                self.sightings += use.sightings
                self.unsure |= use.unsure
        elif self._all_known(share):
            sighting, due = self._missing(binding, share, demand, mine)
            self._see(sighting, due=fresh and due)
            if stopped and not (fresh and due):  # seen gone, and `released` is still to come
                self.pending.add(drift_key(DriftKind.LEFTOVER, self.node, binding.epoch))

    def _mine(self, binding: Binding) -> say.Parts:
        seen, labels = self.seen, ((binding.epoch, binding.demand), (binding.epoch, ""))
        return say.Parts(
            running=tuple(c for label in labels for c in seen.running.get(label, ())),
            ended=tuple(c for label in labels for c in seen.ended.get(label, ())),
            holds=tuple(h for label in labels for h in seen.holds.get(label, ())),
        )

    def _all_known(self, share: NodeShare) -> bool:
        """Can absence be concluded here? Cards that left the inventory have nothing to tell."""
        wanted = {a.card for a in share.allotments if self.state.cards[a.card].present}
        return self.seen.components_known and wanted <= self.seen.cards_known

    def _had_its_time(self, binding: Binding, demand: Demand) -> bool:
        """Has the order to stop (or the withdrawal, when none was ordered) had the time it may take?"""
        if self.node in binding.exited:
            return True
        share = binding.share(self.node)
        components = share.components if share is not None else ()
        since_ns = demand.withdrawn_ns or binding.bound_ns
        allowed_seconds = max((c.stop_grace_seconds for c in components), default=0.0)
        if binding.eviction is not None:
            since_ns, allowed_seconds = binding.eviction.ordered_ns, binding.eviction.grace_seconds
        # Access points are stopped first, then the rest: each of the two has the grace.
        allowed_seconds *= max(1, len({c.role is Role.ACCESS for c in components}))
        if binding.eviction is not None and binding.eviction.seq > self.beat.heartbeat.engine_position:
            allowed_seconds = max(allowed_seconds, self.tolerance.unread_seconds)
        return self.beat.received_ns >= since_ns + (allowed_seconds + self.tolerance.stop_seconds) * _NS

    def _fenced(self, binding: Binding) -> bool:
        """The agent has read the order to stop, so it will not start this epoch (again)."""
        order = binding.eviction
        if order is None:
            return False
        if order.seq <= self.beat.heartbeat.engine_position:
            return True
        # It joined after the order: what it had not acknowledged was sent to it again since.
        joined_later = self.state.nodes[self.node].joined_seq > order.seq
        return (
            joined_later and self.beat.received_ns >= order.ordered_ns + self.tolerance.refence_seconds * _NS
        )

    def _leftover(self, binding: Binding, share: NodeShare, demand: Demand, mine: say.Parts) -> Sighting:
        cards = tuple(dict.fromkeys(h.card for h in mine.holds))
        name = say.name_of(demand)
        since = say.clock(demand.withdrawn_ns or demand.since_ns, self.beat.received_ns)
        if cards:
            where = (
                f"{say.cards(cards)} of node {self.node} {'is' if len(cards) == 1 else 'are'} held by {name}"
            )
            end = "the record says stopped, the card says no"
        else:
            where = f"{name} still runs on node {self.node}"
            end = "the record says stopped, the engine says no"
        return Sighting(
            key=drift_key(DriftKind.LEFTOVER, self.node, binding.epoch),
            kind=DriftKind.LEFTOVER,
            node=self.node,
            card=cards[0] if cards else share.allotments[0].card,
            cards=tuple(dict.fromkeys((*cards, *(a.card for a in share.allotments)))),
            demand=binding.demand,
            epoch=binding.epoch,
            sentence=f"{where} ({mine.text()}), desired state stopped since {since}; {end}",
            desired=say.desired(demand, self.beat.received_ns),
            bound=say.bound(binding, share, self.beat.received_ns),
            observed=f"{mine.text()} on node {self.node}",
            evidence=(*say.book_evidence(self.state, binding, demand), *mine.evidence(self.beat)),
            remedy=say.remedy_stop(binding.epoch, cards, mine),
        )

    def _missing(
        self, binding: Binding, share: NodeShare, demand: Demand, mine: say.Parts
    ) -> tuple[Sighting, bool]:
        tolerance, patience_seconds = self.tolerance, 0.0
        if demand.phase is Phase.RELEASING:
            due, story = self._had_its_time(binding, demand), "was ordered to stop and never released"
        elif self.node in binding.exited:
            due, story, patience_seconds = True, "ended and was never released", tolerance.unreleased_seconds
        elif self.node in binding.started:
            due, story = True, "had started, and no end of it was reported"
        else:
            read = binding.epoch <= self.beat.heartbeat.engine_position
            wait_seconds = tolerance.start_seconds + (0.0 if read else tolerance.unread_seconds)
            # A workload that ended and is to start again came back to `bound` then.
            since_ns = max(binding.bound_ns, demand.since_ns)
            due = self.beat.received_ns >= since_ns + wait_seconds * _NS
            story = "never started" if demand.verdict is None else "ended, and did not start again"
            story += "" if read else "; the agent has not read the order to start it"
        cards = tuple(a.card for a in share.allotments)
        name, since = say.name_of(demand), say.clock(binding.bound_ns, self.beat.received_ns)
        back = [self.seen.unexplained_bytes.get(card) for card in cards if self.state.cards[card].present]
        sighting = Sighting(
            key=drift_key(DriftKind.MISSING, self.node, binding.epoch),
            kind=DriftKind.MISSING,
            node=self.node,
            card=cards[0],
            cards=cards,
            demand=binding.demand,
            epoch=binding.epoch,
            sentence=(
                f"{say.cards(cards)} of node {self.node} {'is' if len(cards) == 1 else 'are'} bound to {name} since "
                f"{since}; observed idle: no component of it runs, and no process of it is on a card; it {story}"
            ),
            desired=say.desired(demand, self.beat.received_ns),
            bound=say.bound(binding, share, self.beat.received_ns),
            observed=f"nothing of epoch {binding.epoch} runs on node {self.node}, and none of its cards shows a process of it",
            evidence=(
                *say.book_evidence(self.state, binding, demand),
                *mine.evidence(self.beat),
                *say.idle_evidence(self.beat, cards),
            ),
            remedy=say.remedy_release(binding.epoch, cards),
            patience_seconds=patience_seconds,
            fenced=self._fenced(binding),
            memory_back=all(b is not None and b <= tolerance.residue_bytes for b in back),
        )
        return sighting, due

    def _wrong_card(self, binding: Binding, share: NodeShare, mine: say.Parts) -> Iterator[Sighting]:
        allotted = tuple(a.card for a in share.allotments)
        given = {
            uuid for component in mine.running for uuid in (*component.gpus, *(component.injected or ()))
        }
        for card in dict.fromkeys((*(h.card for h in mine.holds), *sorted(given))):
            if card in allotted:
                continue
            there = say.Parts(holds=tuple(h for h in mine.holds if h.card == card), running=mine.running)
            demand = self.state.demands[binding.demand]
            how = f"{there.text()} is on" if there.holds else "its component was given"
            others = self._holders(card, except_epoch=binding.epoch)
            yield Sighting(
                key=drift_key(DriftKind.WRONG_CARD, self.node, binding.epoch, card),
                kind=DriftKind.WRONG_CARD,
                node=self.node,
                card=card,
                cards=(card,),
                demand=binding.demand,
                epoch=binding.epoch,
                sentence=(
                    f"{say.name_of(demand)} is bound to {say.cards(allotted)} of node {self.node}, and {how} {card}"
                    f"{f', which is bound to {others}' if others else ''}"
                ),
                desired=say.desired(demand, self.beat.received_ns),
                bound=say.bound(binding, share, self.beat.received_ns),
                observed=f"{there.text()} on {card}",
                evidence=(*say.book_evidence(self.state, binding, demand), *there.evidence(self.beat)),
                remedy=say.remedy_order(DriftKind.WRONG_CARD, binding.demand, binding.epoch),
            )

    def _overuse(self, binding: Binding, share: NodeShare, mine: say.Parts) -> Iterator[Sighting]:
        """Known figures only: their sum is a lower bound. An exclusive card is the holder's to fill."""
        for allotment in share.allotments:
            if allotment.mode is Mode.EXCLUSIVE:
                continue
            there = say.Parts(holds=tuple(h for h in mine.holds if h.card == allotment.card))
            used = sum(h.memory_bytes or 0 for h in there.holds)
            slack = max(
                self.tolerance.overuse_bytes, int(allotment.memory_bytes * self.tolerance.overuse_share)
            )
            if used <= allotment.memory_bytes + slack:
                continue
            demand = self.state.demands[binding.demand]
            over = say.gib(used - allotment.memory_bytes)
            yield Sighting(
                key=drift_key(DriftKind.OVERUSE, self.node, binding.epoch, allotment.card),
                kind=DriftKind.OVERUSE,
                node=self.node,
                card=allotment.card,
                cards=(allotment.card,),
                demand=binding.demand,
                epoch=binding.epoch,
                sentence=(
                    f"{say.name_of(demand)} holds {say.gib(used)} of {allotment.card} on node {self.node}; "
                    f"{say.gib(allotment.memory_bytes)} are allotted to it ({over} over)"
                ),
                desired=say.desired(demand, self.beat.received_ns),
                bound=say.bound(binding, share, self.beat.received_ns),
                observed=f"{there.text()}: {say.gib(used)} on {allotment.card}",
                evidence=(*say.book_evidence(self.state, binding, demand), *there.evidence(self.beat)),
                remedy=say.remedy_order(DriftKind.OVERUSE, binding.demand, binding.epoch),
            )

    # -- not bound here -------------------------------------------------------------------------

    def _stray(self, epoch: int, told_demand: str) -> None:
        """Runs with our labels, and no live binding gives it a right to this node."""
        state = self.state
        if epoch > state.position:
            return  # its `bound` has not been folded yet
        label = (epoch, told_demand)
        parts = say.Parts(
            running=tuple(self.seen.running.get(label, ())), holds=tuple(self.seen.holds.get(label, ()))
        )
        elsewhere = state.bindings.get(epoch)
        demand = state.demands.get(elsewhere.demand if elsewhere and not told_demand else told_demand)
        about: tuple[object, ...] = (epoch,)
        if elsewhere is not None and told_demand not in {"", elsewhere.demand}:
            # The epoch is live, for another demand: these labels stem from another log (or are forged).
            why, about, healable = f"epoch {epoch} belongs to {elsewhere.demand}", (epoch, told_demand), False
        elif elsewhere is not None:
            # A part of a gang is gone from this node and lives elsewhere: a stop order would name the living too.
            stopped = state.demands[elsewhere.demand].phase is Phase.RELEASING
            why, healable = f"epoch {epoch} was released on this node", stopped
        else:
            why, healable = say.why_no_right(demand, epoch, self.beat.received_ns), True
        since_ns = demand.since_ns if demand is not None and demand.epoch_last == epoch else 0
        cards = tuple(dict.fromkeys(h.card for h in parts.holds))
        name = (
            say.name_of(demand)
            if demand is not None
            else told_demand[:63] or f"something labelled epoch {epoch}"
        )
        place = f"{say.cards(cards)} of node {self.node}" if cards else f"node {self.node}"
        self._see(
            Sighting(
                key=drift_key(DriftKind.SQUATTER, self.node, *about),
                kind=DriftKind.SQUATTER,
                node=self.node,
                card=cards[0] if cards else "",
                cards=cards,
                demand=demand.spec.demand if demand is not None else told_demand[:63],
                epoch=epoch,
                sentence=f"{name} ({parts.text()}) runs on {place} without a right to it: {why}",
                desired=say.desired(demand, self.beat.received_ns)
                if demand is not None
                else "unknown demand",
                bound=f"no live binding here: {why}",
                observed=f"{parts.text()} on {place}",
                evidence=parts.evidence(self.beat),
                remedy=say.remedy_squatter(epoch, parts, healable=healable),
                healable=healable,
            ),
            due=self.seen.components_known and self.seen.observed_ns > since_ns,
        )

    def _foreign(self, uuid: str, holds: list[Hold]) -> None:
        holders = self._holders(uuid)
        parts = say.Parts(
            holds=tuple(
                h
                for h in holds
                if h.memory_bytes is not None and h.memory_bytes >= self.tolerance.foreign_bytes
            )
        )
        if not holders or not parts.holds:
            return
        latest_ns = max(b.bound_ns for b in self.state.holders_of(self.state.cards[uuid]))
        self._see(
            Sighting(
                key=drift_key(DriftKind.SQUATTER, self.node, uuid),
                kind=DriftKind.SQUATTER,
                node=self.node,
                card=uuid,
                cards=(uuid,),
                sentence=(
                    f"{uuid} of node {self.node} is bound to {holders}, and {parts.text(foreign=True)} holds memory of it: "
                    "not one of ours, never touched"
                ),
                desired="not ours: nothing is desired of it",
                bound=f"bound to {holders}",
                observed=f"{parts.text(foreign=True)} on {uuid}",
                evidence=parts.evidence(self.beat),
                remedy="Rigbook never ends what is not its own: ask its user, or move the binding to another card",
                healable=False,
            ),
            # Without the engine's word the agent may not have been able to tell that it is one of ours.
            due=self.seen.components_known and self.seen.observed_ns > latest_ns,
        )

    def _holders(self, uuid: str, *, except_epoch: int = 0) -> str:
        card = self.state.cards.get(uuid)
        bindings = [b for b in self.state.holders_of(card) if b.epoch != except_epoch] if card else []
        return ", ".join(say.name_of(self.state.demands[b.demand]) for b in bindings)

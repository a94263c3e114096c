"""How the cards of one node stand with their bindings: lost, shared in another way, held twice, not given back.

| bound | observed | it is |
|---|---|---|
| any | the card answers nothing more, or is gone from the inventory while bound | `card_lost` |
| shared | one process at a time (compute mode), or none | `mode_mismatch` |
| as a whole | split into MIG instances | `mode_mismatch` |
| exclusive | processes of two bindings hold its memory | `double_holder` |
| any | a component of an epoch runs twice | `double_holder` |
| nothing runs there | memory is used, and no process holds it | `vram_not_recovered` |

None of these but `card_lost` can be healed by a stop order. Pure.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from rigbook_schemas.values import DriftKind, Evidence, Mode

from rigbook_ledger import evidence as say
from rigbook_ledger.sighting import Sighting, Tolerance, drift_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rigbook_schemas.values import CardObservation

    from rigbook_ledger.observed import Beat, Observed
    from rigbook_ledger.state import Binding, Card, State

__all__ = ["compare_cards"]

# NVML's compute modes in which no second process gets onto the card.
ONE_PROCESS: Final = ("Exclusive_Thread", "Exclusive_Process")
PROHIBITED: Final = "Prohibited"
AGENTS_WORD: Final = "vram_not_recovered"


def compare_cards(state: State, beat: Beat, seen: Observed, tolerance: Tolerance) -> Iterator[Sighting]:
    """Each difference of a card with its bindings, as this heartbeat shows it."""
    node = state.nodes[beat.heartbeat.node]
    shown = {card.uuid: card for card in beat.heartbeat.cards}
    for uuid in node.cards:
        card = state.cards.get(uuid)
        if card is None or card.node != node.name:
            continue
        one = _OneCard(state, beat, seen, tolerance, card, shown.get(uuid))
        yield from one.lost()
        yield from one.mode()
        yield from one.twice()
        yield from one.residue()
    yield from _unreleased(state, beat)
    yield from _doubled_components(state, beat, seen)


class _OneCard:
    """One card, its bindings, and what it shows."""

    def __init__(
        self,
        state: State,
        beat: Beat,
        seen: Observed,
        tolerance: Tolerance,
        card: Card,
        shown: CardObservation | None,
    ) -> None:
        self.state, self.beat, self.seen, self.tolerance = state, beat, seen, tolerance
        self.card, self.shown = card, shown
        self.node = beat.heartbeat.node
        self.bindings = [b for b in state.holders_of(card) if self.node not in b.released]
        self.names = ", ".join(say.name_of(state.demands[b.demand]) for b in self.bindings)
        self.bound = f"bound to {self.names}" if self.bindings else "bound to nobody"
        self.latest_ns = max((b.bound_ns for b in self.bindings), default=0)

    def _sighting(
        self, kind: DriftKind, sentence: str, observed: str, remedy: str, *evidence: Evidence,
        binding: Binding | None = None, healable: bool = False, desired: str = "",
    ) -> Sighting:  # fmt: skip
        about = (self.card.uuid,) if binding is None else (binding.epoch, self.card.uuid)
        return Sighting(
            key=drift_key(kind, self.node, *about),
            kind=kind,
            node=self.node,
            card=self.card.uuid,
            cards=(self.card.uuid,),
            demand=binding.demand if binding else "",
            epoch=binding.epoch if binding else None,
            sentence=sentence,
            desired=desired
            or ", ".join(
                say.desired(self.state.demands[b.demand], self.beat.received_ns) for b in self.bindings[:3]
            )
            or "nothing is desired of it",
            bound=self.bound,
            observed=observed,
            evidence=evidence,
            remedy=remedy,
            healable=healable,
        )

    def _fact(self, what: str, value: str) -> Evidence:
        at = self.shown.as_of if self.shown is not None else ""
        return Evidence(
            what=what, value=value, source=f"GPU driver of node {self.node}", at=at or self.beat.sent
        )

    # -- card_lost ------------------------------------------------------------------------------

    def lost(self) -> Iterator[Sighting]:
        card, shown = self.card, self.shown
        if card.present and (shown is None or not shown.lost):
            return
        if not card.present and not self.bindings:
            return  # taken out, and nobody's
        how = "is gone from the node's inventory"
        facts: list[Evidence] = []
        if shown is not None and shown.lost:
            how = f"answers nothing more ({shown.unknown or 'GPU is lost'})"
            facts = [
                self._fact(f"Xid {x.code} on {card.uuid}", f"{x.meaning}, {x.at}") for x in shown.xids[-8:]
            ]
        facts.insert(0, self._fact(f"{card.uuid} {how.partition(' (')[0]}", how))
        quarantine = (
            "it is quarantined" if card.quarantined is not None else f"`rigbook gpu quarantine {card.uuid}`"
        )
        remedy = (
            f"reset it when nothing runs on it (`nvidia-smi --gpu-reset -i {card.index}`), else drain and reboot the "
            f"node; {quarantine}; other cards of the node stay in use"
        )
        held = f" It is bound to {self.names}." if self.bindings else ""
        sentence = f"{card.uuid} of node {self.node} {how}.{held}"
        if not self.bindings:
            yield self._sighting(DriftKind.CARD_LOST, sentence, how, remedy, *facts)
        for binding in self.bindings:
            yield self._sighting(
                DriftKind.CARD_LOST, sentence, how,
                f"{say.remedy_order(DriftKind.CARD_LOST, binding.demand, binding.epoch)}, and it starts elsewhere "
                f"where its restart policy allows; {remedy}",
                *facts, binding=binding, healable=binding.eviction is None,
            )  # fmt: skip

    # -- mode_mismatch --------------------------------------------------------------------------

    def mode(self) -> Iterator[Sighting]:
        shown = self.shown
        if not self.bindings or shown is None or shown.lost or self.seen.observed_ns <= self.latest_ns:
            return
        serves, index = self.bindings[0].mode, self.card.index
        problem, remedy = "", ""
        if shown.compute_mode == PROHIBITED:
            problem = f"its compute mode is {PROHIBITED}: nothing can run on it"
            remedy = f"`nvidia-smi -i {index} -c DEFAULT`"
        elif (
            serves is not Mode.EXCLUSIVE and shown.compute_mode in ONE_PROCESS and self.card.enforces != "mps"
        ):  # CUDA's multi-process service is that one process
            problem = f"its compute mode is {shown.compute_mode}: only one process gets onto it"
            remedy = f"`nvidia-smi -i {index} -c DEFAULT`; or drain it and `rigbook gpu mode {self.card.uuid} exclusive`"
        elif shown.mig and not self.card.parent:
            problem = "it is split into MIG instances, and cannot be used as a whole"
            remedy = (
                f"stop what is bound to it and `nvidia-smi -i {index} -mig 0`, or bind its instances instead"
            )
        if problem:
            yield self._sighting(
                DriftKind.MODE_MISMATCH,
                f"{self.card.uuid} of node {self.node} serves {serves} to {self.names}, and {problem}",
                problem, remedy,
                self._fact(
                    f"mode of {self.card.uuid}",
                    f"compute mode {shown.compute_mode or 'unknown'}, MIG {'on' if shown.mig else 'off or unknown'}",
                ),
                desired=f"{serves}",
            )  # fmt: skip

    # -- double_holder --------------------------------------------------------------------------

    def twice(self) -> Iterator[Sighting]:
        if (
            not any(b.mode is Mode.EXCLUSIVE for b in self.bindings)
            or self.seen.observed_ns <= self.latest_ns
        ):
            return
        held = {
            label: [h for h in holds if h.card == self.card.uuid] for label, holds in self.seen.holds.items()
        }
        # The same epoch with and without its demand's name is one holder.
        epochs: dict[int, list[str]] = {}
        for (epoch, demand), holds in sorted(held.items()):
            if holds:
                epochs.setdefault(epoch, []).extend(
                    f"epoch {epoch}{f' of {demand}' if demand else ''}, pid {h.pid}, "
                    f"{say.gib(h.memory_bytes) if h.memory_bytes is not None else 'memory unknown'}"
                    for h in holds
                )
        if len(epochs) < 2:
            return
        told = [lines[0] for lines in epochs.values()]
        yield self._sighting(
            DriftKind.DOUBLE_HOLDER,
            f"{self.card.uuid} of node {self.node} is bound to {self.names} alone, and {len(epochs)} hold it: {'; '.join(told)}",
            "; ".join(told),
            "the one without the right is a leftover, a squatter or on a wrong card, and is told as such: heal that kind",
            *(self._fact(f"epoch {epoch} holds {self.card.uuid}", "; ".join(lines[:8]))
              for epoch, lines in list(epochs.items())[:8]),
        )  # fmt: skip

    # -- vram_not_recovered ---------------------------------------------------------------------

    def residue(self) -> Iterator[Sighting]:
        """Processes that the driver does not list (other pid namespaces, MPS) are there while we run something."""
        shown, uuid = self.shown, self.card.uuid
        left = self.seen.unexplained_bytes.get(uuid)
        if (
            shown is None or not self.seen.components_known or left is None or left <= self.tolerance.residue_bytes
            or uuid not in self.seen.cards_known
        ):  # fmt: skip
            return
        if shown.mig and not self.card.parent:
            return  # its instances hold it
        given = {u for components in self.seen.running.values() for c in components for u in c.gpus}
        if uuid in given or any(h.card == uuid for holds in self.seen.holds.values() for h in holds):
            return
        if any(u.epoch in self.card.holders for u in self.beat.heartbeat.unreleased):
            return  # the agent knows more, and says it
        last = next((b for b in self.bindings if self.node in b.exited or b.eviction is not None), None)
        who = (
            f"epoch {last.epoch} of {say.name_of(self.state.demands[last.demand])} ended there"
            if last is not None
            else "nothing of ours runs there"
        )
        stuck = [p for p in shown.processes or () if p.stuck_seconds is not None]
        why = f"; pid {stuck[0].pid} is stuck in the kernel" if stuck else ""
        yield self._sighting(
            DriftKind.VRAM_NOT_RECOVERED,
            f"{say.gib(left)} of {uuid} of node {self.node} are used, and no process holds them: {who}{why}",
            f"{say.gib(left)} used that no process explains",
            f"look for what keeps the device open (`fuser -v /dev/nvidia{self.card.index}`, zombies, state D); with nothing on "
            f"it `nvidia-smi --gpu-reset -i {self.card.index}`, else reboot the node",
            self._fact(
                f"memory of {uuid}", f"{shown.memory_used_bytes} bytes used, {len(shown.processes or ())} processes listed"
            ),
            binding=last,
        )  # fmt: skip


def _unreleased(state: State, beat: Beat) -> Iterator[Sighting]:
    """Its agent waits for the memory of a binding that ended: it knows what was there before the start."""
    node = beat.heartbeat.node
    for told in beat.heartbeat.unreleased:
        binding = state.bindings.get(told.epoch)
        if binding is None or binding.demand != told.demand or AGENTS_WORD not in told.why:
            continue
        share = binding.share(node)
        if share is None or node in binding.released:
            continue
        cards, demand = told.cards or tuple(a.card for a in share.allotments), state.demands[binding.demand]
        yield Sighting(
            key=drift_key(DriftKind.VRAM_NOT_RECOVERED, node, binding.epoch, cards[0]),
            kind=DriftKind.VRAM_NOT_RECOVERED,
            node=node,
            card=cards[0],
            cards=cards,
            demand=binding.demand,
            epoch=binding.epoch,
            sentence=f"{say.name_of(demand)} ended on node {node}, and its memory has not come back: {told.why}",
            desired=say.desired(demand, beat.received_ns),
            bound=say.bound(binding, share, beat.received_ns),
            observed=told.why,
            evidence=(
                *say.book_evidence(state, binding, demand),
                Evidence(what=f"epoch {binding.epoch} is not released", value=told.why,
                         source=f"agent of node {node}", at=told.since),
            ),
            remedy="look for what keeps the device open (zombies, state D); with nothing on the card reset it, else reboot "
            "the node",
            healable=False,
        )  # fmt: skip


def _doubled_components(state: State, beat: Beat, seen: Observed) -> Iterator[Sighting]:
    """One component of one epoch, and two containers (or processes) that say they are it."""
    node = beat.heartbeat.node
    counted = Counter(
        (c.epoch, c.demand, c.component, c.engine) for shown in seen.running.values() for c in shown
    )
    for (epoch, demand, component, engine), count in sorted(counted.items()):
        binding = state.bindings.get(epoch)
        if count < 2 or binding is None or binding.demand != demand:
            continue
        parts = say.Parts(
            running=tuple(c for c in seen.running.get((epoch, demand), ()) if c.component == component)
        )
        yield Sighting(
            key=drift_key(DriftKind.DOUBLE_HOLDER, node, epoch, component),
            kind=DriftKind.DOUBLE_HOLDER,
            node=node,
            demand=demand,
            epoch=epoch,
            sentence=f"the {component} part of {say.name_of(state.demands[demand])} runs {count} times on node {node}: {parts.text()}",
            desired="one of each component",
            bound=f"epoch {epoch}",
            observed=f"{count} of {component} in the {engine} engine: {parts.text()}",
            evidence=parts.evidence(beat),
            remedy=f"end the ones that the agent did not start, by hand on the node; or `rigbook stop {demand}`, which ends all",
            healable=False,
        )

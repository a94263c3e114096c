"""How a binding that is in order uses its cards: not at all, without progress, or not even able to. Pure.

| desired | observed | it is |
|---|---|---|
| running | its cards do nothing (`idle_percent`) for `idle_seconds` | `idle_holder` |
| running | its probe says no again, and its cards do nothing | `suspected_hang` |
| running | busy at 99 % and hardly drawing power, on exclusive cards | `suspected_hang` |
| running | a process of it is in uninterruptible sleep | `suspected_hang`, no stop would help |
| running | a component cannot reach a card it was given | `gpu_lost_in_container` |

A card shows use for all who share it: an idle card is idle for each of them, a busy one says nothing of any one.
A suspicion is told, and heals nothing unless the operator switched it on. An idle holder is told to its owner
first; a stop follows only where the demand (`idle_seconds_max`) or the operator's rule says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rigbook_schemas.values import DriftKind, Evidence, Mode
from rigbook_schemas.wire import rfc3339

from rigbook_ledger import evidence as say
from rigbook_ledger.sighting import Sighting, Tolerance, drift_key
from rigbook_ledger.state import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rigbook_schemas.values import CardObservation, ComponentObservation

    from rigbook_ledger.observed import Beat
    from rigbook_ledger.state import Binding, State

__all__ = ["Use", "compare_use"]

SPAN_MINUTES = 60.0


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What one heartbeat says of it; `unsure`: keys of which it says neither yes nor no."""

    sightings: tuple[Sighting, ...] = ()
    unsure: frozenset[str] = frozenset()


def compare_use(state: State, beat: Beat, binding: Binding, mine: say.Parts, tolerance: Tolerance) -> Use:
    """Of a binding that is wanted and runs; `mine` are its parts as observed here."""
    one = _OneBinding(state, beat, binding, mine, tolerance)
    found = [*one.idle(), *one.hang(), *one.stuck(), *one.lost_inside()]
    return Use(sightings=tuple(found), unsure=frozenset(one.unsure - {s.key for s in found}))


class _OneBinding:
    def __init__(
        self, state: State, beat: Beat, binding: Binding, mine: say.Parts, tolerance: Tolerance
    ) -> None:
        self.state, self.beat, self.binding, self.mine, self.tolerance = state, beat, binding, mine, tolerance
        self.node = beat.heartbeat.node
        self.demand = state.demands[binding.demand]
        share = binding.share(self.node)
        assert share is not None, f"epoch {binding.epoch} has no share on {self.node}"
        self.share = share
        self.cards = tuple(a.card for a in share.allotments)
        shown = {c.uuid: c for c in beat.heartbeat.cards}
        self.shown: list[CardObservation] = [shown[u] for u in self.cards if u in shown]
        self.name = say.name_of(self.demand)
        self.unsure: set[str] = set()

    def _known(self, *fields: str) -> bool:
        """Is each of these figures there, of every card?"""
        return len(self.shown) == len(self.cards) and all(
            not card.unknown and getattr(card, field) is not None for card in self.shown for field in fields
        )

    def _most(self) -> float:
        return max((card.utilisation_percent or 0.0 for card in self.shown), default=0.0)

    def _least(self) -> float:
        return min((card.utilisation_percent or 0.0 for card in self.shown), default=0.0)

    def _facts(self) -> tuple[Evidence, ...]:
        """Figures stand in the value, so that a moving one is no news."""
        return tuple(
            Evidence(
                what=f"use of {card.uuid}",
                value=", ".join(
                    word
                    for word in (
                        f"{card.utilisation_percent:.0f} %" if card.utilisation_percent is not None else "",
                        f"{card.power_watts:.0f} W" if card.power_watts is not None else "",
                        f"of {card.power_limit_watts:.0f} W" if card.power_limit_watts is not None else "",
                        f"{say.gib(card.memory_used_bytes)} used"
                        if card.memory_used_bytes is not None
                        else "",
                    )
                    if word
                ),
                source=f"GPU driver of node {self.node}",
                at=card.as_of or rfc3339(self.beat.received_ns),
            )
            for card in self.shown[:16]
        )

    def _sighting(self, kind: DriftKind, sentence: str, observed: str, **more: object) -> Sighting:
        made = Sighting(
            key=drift_key(kind, self.node, self.binding.epoch),
            kind=kind,
            node=self.node,
            card=self.cards[0],
            cards=self.cards,
            demand=self.binding.demand,
            epoch=self.binding.epoch,
            sentence=sentence,
            desired=say.desired(self.demand, self.beat.received_ns),
            bound=say.bound(self.binding, self.share, self.beat.received_ns),
            observed=observed,
            evidence=(*say.book_evidence(self.state, self.binding, self.demand), *self._facts()),
            remedy=say.remedy_order(kind, self.binding.demand, self.binding.epoch),
        )
        return msgspec.structs.replace(made, **more)

    # -- idle_holder ----------------------------------------------------------------------------

    def idle(self) -> Iterator[Sighting]:
        key = drift_key(DriftKind.IDLE_HOLDER, self.node, self.binding.epoch)
        if self.demand.phase is not Phase.RUNNING:
            return
        if not self._known("utilisation_percent"):
            self.unsure.add(key)
            return
        if self._most() > self.tolerance.idle_percent:
            return
        spec, patience = self.demand.spec, self.tolerance.idle_seconds
        agreed = spec.idle_seconds_max
        if agreed is not None:
            patience = min(patience, max(0.0, agreed - self.tolerance.idle_notice_seconds))
        contact = f" ({spec.owner.contact})" if spec.owner.contact else ""
        purpose = f", for: {spec.purpose}" if spec.purpose else ""
        end = (
            f"it asked to be stopped after {_span(agreed)} of this"
            if agreed is not None
            else "is it still needed?"
        )
        yield self._sighting(
            DriftKind.IDLE_HOLDER,
            f"{self.name} of {spec.owner.name}{contact}{purpose} holds {say.cards(self.cards)} of node {self.node} and "
            f"uses nothing of it: at most {self.tolerance.idle_percent:g} % for {_span(patience)}; {end}",
            f"at most {self._most():.0f} % use of {say.cards(self.cards)}",
            patience_seconds=patience,
            notice_seconds=self.tolerance.idle_notice_seconds,
            agreed_seconds=agreed,
            remedy=f"ask {spec.owner.name}{contact}; {say.remedy_order(DriftKind.IDLE_HOLDER, self.binding.demand, self.binding.epoch)}",
        )  # fmt: skip

    # -- suspected_hang -------------------------------------------------------------------------

    def hang(self) -> Iterator[Sighting]:
        key = drift_key(DriftKind.SUSPECTED_HANG, self.node, self.binding.epoch)
        if not self._known("utilisation_percent"):
            self.unsure.add(key)
            return
        silent = [c.component for c in self.mine.running if c.ready is False]
        # Before its first yes it is starting, and loads weights: the startup probe's business.
        if silent and self.node in self.binding.started and self.demand.phase is not Phase.BOUND:
            if self._most() <= self.tolerance.idle_percent:
                yield self._sighting(
                    DriftKind.SUSPECTED_HANG,
                    f"{self.name} does not answer its probe ({', '.join(silent[:3])}), and its cards on node {self.node} do nothing",
                    f"not ready, {self._most():.0f} % use",
                    patience_seconds=self.tolerance.unready_seconds,
                )
            return
        if self.binding.mode is not Mode.EXCLUSIVE or self._least() < self.tolerance.hang_percent:
            return
        if not self._known("power_watts", "power_limit_watts"):
            return
        drawn = max((c.power_watts or 0.0) / max(c.power_limit_watts or 1.0, 1.0) for c in self.shown)
        if drawn <= self.tolerance.hang_power_share:
            yield self._sighting(
                DriftKind.SUSPECTED_HANG,
                f"{self.name} keeps {say.cards(self.cards)} of node {self.node} at {self._least():.0f} % and at most "
                f"{100 * self.tolerance.hang_power_share:.0f} % of their power for {_span(self.tolerance.hang_seconds)}: "
                "it may be waiting for a peer that will not come",
                f"{self._least():.0f} % use, {100 * drawn:.0f} % of the power limit",
                patience_seconds=self.tolerance.hang_seconds,
            )

    def stuck(self) -> Iterator[Sighting]:
        """Its own key: it is another thing, with another end."""
        pids = {pid for component in self.mine.running for pid in component.pids}
        found = {
            process.pid: process.stuck_seconds
            for card in self.beat.heartbeat.cards
            for process in card.processes or ()
            if process.stuck_seconds is not None and (process.epoch == self.binding.epoch or process.pid in pids)
        }  # fmt: skip
        long = {pid: seconds for pid, seconds in found.items() if seconds >= self.tolerance.stuck_seconds}
        if not long:
            return
        pid, seconds = max(long.items(), key=lambda item: item[1])
        yield self._sighting(
            DriftKind.SUSPECTED_HANG,
            f"pid {pid} of {self.name} is in uninterruptible sleep (state D) for {_span(seconds)} on node {self.node}: "
            "no signal ends it, and its cards stay held",
            f"{len(long)} processes in state D",
            key=drift_key(DriftKind.SUSPECTED_HANG, self.node, self.binding.epoch, "stuck"),
            healable=False,
            remedy=f"look at `dmesg` and /proc/{pid}/stack on the node; what hangs in the GPU driver ends with a reboot only",
        )

    # -- gpu_lost_in_container ------------------------------------------------------------------

    def lost_inside(self) -> Iterator[Sighting]:
        for component in self.mine.running:
            away = _away(component)
            if not away:
                continue
            yield self._sighting(
                DriftKind.GPU_LOST_IN_CONTAINER,
                f"{component.component} of {self.name} was given {say.cards(component.gpus)} on node {self.node}, and "
                f"cannot reach {say.cards(away)} from inside: what it does on them fails or runs on the CPU",
                f"{component.component} reaches {say.cards(component.injected or ()) or 'no card'}",
                key=drift_key(
                    DriftKind.GPU_LOST_IN_CONTAINER, self.node, self.binding.epoch, component.component
                ),
                card=away[0],
                cards=(),
                remedy=(
                    "a reload of systemd or a restart of the container runtime takes devices away: start it anew "
                    f"({say.remedy_order(DriftKind.GPU_LOST_IN_CONTAINER, self.binding.demand, self.binding.epoch)})"
                ),
            )


def _away(component: ComponentObservation) -> tuple[str, ...]:
    if component.injected is None:
        return ()
    return tuple(uuid for uuid in component.gpus if uuid not in component.injected)


def _span(seconds: float) -> str:
    if seconds < 2 * SPAN_MINUTES:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"

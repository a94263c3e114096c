"""`audit(state) -> findings`: the invariants of ownership, checked in production after every batch.

1. No overlap with an exclusive binding.
2. Memory of shared bindings on a card is at most the card's.
3. The mode of each binding is the mode its card serves.
4. A gang is whole: a binding holds all the cards it names until their release was seen.
5. Each live binding has a demand that points back to it, and known cards.
6. What a project uses is the sum of its live bindings, each counted once.
7. A demand is in one phase, and the indexes say the same.
8. A card is kept for a waiting demand only, and that demand knows it.

An empty answer is the rule. A finding here means that the log itself is wrong, or that we are.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rigbook_schemas.values import Mode

from rigbook_ledger.state import Finding, Phase, Project, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rigbook_ledger.state import Card

__all__ = ["audit", "audit_touched"]


def audit(state: State) -> list[Finding]:
    """Every invariant over the whole state."""
    return [
        *_cards(state, state.cards),
        *_bindings(state, state.bindings),
        *_demands(state, state.demands),
        *_projects(state, state.projects),
        *_indexes(state),
    ]


def audit_touched(state: State) -> list[Finding]:
    """The same for what changed since `state.touched` was cleared; cost goes with the batch, not the fleet.

    Project sums need a pass over all bindings and are left to `audit`.
    """
    touched = state.touched
    return [
        *_cards(state, touched.cards),
        *_bindings(state, touched.bindings),
        *_demands(state, touched.demands),
    ]


def _finding(state: State, code: str, text: str) -> Finding:
    return Finding(seq=state.position, code=code, text=text)


def _cards(state: State, uuids: Iterable[str]) -> Iterator[Finding]:
    for uuid in uuids:
        card = state.cards.get(uuid)
        if card is not None:
            yield from _card(state, card)


def _card(state: State, card: Card) -> Iterator[Finding]:
    bindings = state.holders_of(card)
    if len(bindings) != len(card.holders):
        gone = [epoch for epoch in card.holders if epoch not in state.bindings]
        yield _finding(
            state, "holder_unknown", f"card {card.uuid} is held by epochs {gone} that are not live"
        )
    if len(bindings) > 1 and any(b.mode is Mode.EXCLUSIVE for b in bindings):
        who = ", ".join(f"{b.demand} (epoch {b.epoch}, {b.mode})" for b in bindings)
        yield _finding(state, "double_binding", f"card {card.uuid} is bound exclusively and to others: {who}")
    modes = {b.mode for b in bindings} | ({card.mode} if card.mode is not None else set())
    if bindings and len(modes) > 1:
        yield _finding(state, "mode_mismatch", f"card {card.uuid} serves {sorted(modes)} at once")
    reserved = sum(
        allotment.memory_bytes
        for b in bindings
        for share in b.shares
        for allotment in share.allotments
        if allotment.card == card.uuid
    )
    if reserved != card.reserved_bytes:
        yield _finding(
            state,
            "reserved_wrong",
            f"card {card.uuid}: {card.reserved_bytes} bytes on the books, {reserved} in its bindings",
        )
    if card.held_for:
        demand = state.demands.get(card.held_for)
        if demand is None or demand.phase is not Phase.WAITING or card.uuid not in demand.room:
            yield _finding(
                state, "room_wrong",
                f"card {card.uuid} is kept for {card.held_for}, which is {demand.phase if demand else 'unknown'}",
            )  # fmt: skip
    if reserved > card.memory_bytes:
        yield _finding(
            state, "over_allotted", f"card {card.uuid}: {reserved} bytes bound of {card.memory_bytes}"
        )


def _bindings(state: State, epochs: Iterable[int]) -> Iterator[Finding]:
    for epoch in epochs:
        binding = state.bindings.get(epoch)
        if binding is None:
            continue
        demand = state.demands.get(binding.demand)
        if demand is None or demand.epoch != epoch or not demand.phase.holding:
            yield _finding(
                state,
                "binding_without_demand",
                f"epoch {epoch} is live, its demand {binding.demand} is {demand.phase if demand else 'unknown'}",
            )
        for share in binding.shares:
            for allotment in share.allotments:
                card = state.cards.get(allotment.card)
                holds = card is not None and epoch in card.holders
                if holds == (share.node in binding.released):
                    yield _finding(
                        state,
                        "gang_broken",
                        f"epoch {epoch} {'still' if holds else 'no longer'} holds card {allotment.card} of node {share.node}",
                    )


def _demands(state: State, ids: Iterable[str]) -> Iterator[Finding]:
    for did in ids:
        demand = state.demands.get(did)
        if demand is None:
            continue
        if demand.phase.holding != (demand.epoch in state.bindings):
            yield _finding(
                state, "demand_without_binding", f"demand {did} is {demand.phase} with epoch {demand.epoch}"
            )
        if (did in state.waiting) != (demand.phase is Phase.WAITING) or (
            did in state.ended
        ) != demand.phase.terminal:
            yield _finding(
                state, "index_wrong", f"demand {did} is {demand.phase}, and the indexes say otherwise"
            )


def _projects(state: State, names: Iterable[str]) -> Iterator[Finding]:
    used: dict[str, int] = defaultdict(int)
    releasing: dict[str, int] = defaultdict(int)
    for binding in state.bindings.values():
        held = sum(
            a.memory_bytes for s in binding.shares if s.node not in binding.released for a in s.allotments
        )
        used[binding.project] += held
        demand = state.demands.get(binding.demand)
        if demand is not None and demand.phase is Phase.RELEASING:
            releasing[binding.project] += held
    for name in {*names, *used}:
        project = state.projects.get(name) or Project()
        if (project.used_bytes, project.releasing_bytes) != (used[name], releasing[name]):
            yield _finding(
                state, "quota_wrong",
                f"project {name}: used {project.used_bytes} (releasing {project.releasing_bytes}) on the books, "
                f"{used[name]} ({releasing[name]}) in its bindings",
            )  # fmt: skip


def _indexes(state: State) -> Iterator[Finding]:
    for did in (*state.waiting, *state.ended):
        if did not in state.demands:
            yield _finding(state, "index_wrong", f"demand {did} is in an index and not among the demands")
    for node in state.nodes.values():
        for uuid in node.cards:
            if uuid not in state.cards:
                yield _finding(
                    state, "index_wrong", f"node {node.name} names card {uuid}, which is not known"
                )

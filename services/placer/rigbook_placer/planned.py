"""The dry run: where a demand would go, whom it would evict, what it waits for. And what would fit now. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rigbook_schemas.events import Bound
from rigbook_schemas.queries import OfferRow, SoonestRow, VictimRow
from rigbook_schemas.values import Mode, Reason
from rigbook_schemas.wire import rfc3339

from rigbook_placer.feasible import NOBODY, NOTHING_SEEN, ask_of, asker_of, kept_from
from rigbook_placer.place import explain, place
from rigbook_placer.preempt import preempt
from rigbook_placer.rank import POLICIES
from rigbook_placer.reasons import hopeless, invalid
from rigbook_placer.soonest import soonest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rigbook_ledger.state import State
    from rigbook_schemas.events import DemandRaised

    from rigbook_placer.feasible import Asker, Kept, Seen
    from rigbook_placer.place import Shortlist

__all__ = ["Plan", "offers", "plan"]


class Plan(msgspec.Struct, frozen=True):
    """The answer to a dry run, true at `position` and no longer."""

    position: int
    bound: Bound | None
    reasons: tuple[Reason, ...]
    refused: bool = False
    evict: tuple[VictimRow, ...] = ()  # who would be evicted to make room
    soonest: SoonestRow | None = None  # the endings that would make room without evicting anybody


def plan(
    state: State,
    spec: DemandRaised,
    seen: Mapping[str, Seen],
    policy: str = "pack",
    *,
    now_ns: int | None = None,
    kept: Mapping[str, Kept] | None = None,
    shortlist: Shortlist | None = None,
) -> Plan:
    """Dry run on the current position. Without `now_ns` nothing that depends on time is told."""
    bound = place(state, spec, seen, policy, now_ns=now_ns, kept=kept, shortlist=shortlist)
    if bound is not None:
        return Plan(state.position, bound, ())
    totals = shortlist.totals if shortlist is not None else None
    # Where no node could ever hold it, all of them are asked why.
    among = (shortlist.able(ask_of(spec)) or None) if shortlist is not None else None
    reasons = explain(state, spec, seen, policy, now_ns=now_ns, kept=kept, totals=totals, among=among)
    refused = invalid(spec, POLICIES) is not None or hopeless(reasons)
    if refused or now_ns is None:
        return Plan(state.position, None, reasons, refused)
    found = preempt(state, spec, seen, now_ns, kept=kept, totals=totals, among=among)
    wait = soonest(state, ask_of(spec), seen, asker_of(spec, kept or {}, now_ns), now_ns, among=among)
    evict = tuple(
        VictimRow(
            demand=b.demand,
            project=b.project,
            owner=state.demands[b.demand].spec.owner.name,
            epoch=b.epoch,
            priority=state.demands[b.demand].spec.priority,
            nodes=tuple(share.node for share in b.shares),
            run_seconds=round((now_ns - b.bound_ns) / 1e9, 1),
        )
        for b in (found.victims if found is not None else ())
    )
    told = None
    if wait is not None:
        told = SoonestRow(
            nodes=wait.nodes,
            cards=wait.cards,
            waits_for=wait.waits_for,
            at=rfc3339(wait.at_ns) if wait.at_ns else "",
            seconds=round((wait.at_ns - now_ns) / 1e9, 1) if wait.at_ns else None,
        )
    return Plan(state.position, None, reasons, refused, evict, told)


def offers(
    state: State, seen: Mapping[str, Seen], kept: Mapping[str, Kept] | None = None, *, project: str = ""
) -> list[OfferRow]:
    """Per card model and mode, the largest demand that would be bound now, and how many of that size.

    A project's quota bounds what is offered to it. Largest first within a model.
    """
    limit: int | None = None
    known = state.projects.get(project) if project else None
    if known is not None and known.quota_bytes is not None:
        limit = max(0, known.quota_bytes - known.used_bytes)
    asker = msgspec.structs.replace(NOBODY, kept=kept or {})
    free: dict[tuple[str, Mode], dict[str, list[int]]] = {}
    for node in state.nodes.values():
        if not node.driver_ok or node.unreachable_ns or node.cordoned is not None:
            continue
        for uuid in node.cards:
            for model, mode, room in _card_offers(state, uuid, seen, asker, limit):
                free.setdefault((model, mode), {}).setdefault(node.name, []).append(room)
    rows = [_offer(model, mode, rooms) for (model, mode), rooms in free.items()]
    return sorted(rows, key=lambda row: (row.model, row.mode))


def _card_offers(
    state: State, uuid: str, seen: Mapping[str, Seen], asker: Asker, limit: int | None
) -> list[tuple[str, Mode, int]]:
    card = state.cards.get(uuid)
    if card is None or not card.present or not card.usable or card.quarantined is not None or card.switching:
        return []
    shown = seen.get(uuid, NOTHING_SEEN)
    room = card.memory_bytes - card.reserved_bytes - shown.foreign_bytes
    if shown.unknown or room <= 0 or kept_from(card, asker):
        return []
    serves = state.mode_of(card)
    modes = list(Mode) if serves is None else [serves]
    if card.holders and Mode.EXCLUSIVE in modes:
        modes.remove(Mode.EXCLUSIVE)
    told: list[tuple[str, Mode, int]] = []
    for mode in modes:
        if limit is not None and (card.memory_bytes if mode is Mode.EXCLUSIVE else 1) > limit:
            continue
        bounded = room if limit is None or mode is Mode.EXCLUSIVE else min(room, limit)
        told.append((card.model, mode, bounded))
    return told


def _offer(model: str, mode: Mode, rooms: Mapping[str, list[int]]) -> OfferRow:
    largest = max(max(on_node) for on_node in rooms.values())
    of_that = {node: sum(1 for room in on_node if room >= largest) for node, on_node in rooms.items()}
    return OfferRow(
        model=model,
        mode=mode.value,
        memory_bytes=largest,
        cards=sum(of_that.values()),
        count_max=max(of_that.values()),
        nodes=tuple(node for node, count in of_that.items() if count)[:8],
        free_cards=sum(len(on_node) for on_node in rooms.values()),
        free_bytes=sum(sum(on_node) for on_node in rooms.values()),
    )

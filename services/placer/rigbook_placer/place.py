"""`place`: a waiting demand, the state, and what is seen, to a binding, a deferral or a refusal. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.events import Bound, Deferred, EvictionOrdered, Refused
from rigbook_schemas.values import Allotment, EvictionReason, Horizon, Mode, NodeShare, Reason, ReasonCode

from rigbook_placer.feasible import Seen, ask_of, feasible, invalid, why_not
from rigbook_placer.rank import POLICIES, Ranked, rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rigbook_ledger.state import Demand, State
    from rigbook_schemas.events import DemandRaised

__all__ = ["POLICY_VERSION", "Plan", "explain", "place", "plan", "signature", "stops_due"]

# Goes into every `bound`, so that a replay knows which rules decided.
POLICY_VERSION: Final = 1


class Plan(msgspec.Struct, frozen=True):
    """The answer to a dry run."""

    position: int
    bound: Bound | None
    reasons: tuple[Reason, ...]
    refused: bool = False


def place(state: State, spec: DemandRaised, seen: Mapping[str, Seen], policy: str = "pack") -> Bound | None:
    """The binding that the demand would get now, or None. Decided on `state.position`."""
    request = spec.resources
    if invalid(spec) is not None or over_quota(state, spec) is not None:
        return None
    options = list(feasible(state, ask_of(spec), seen))
    if len(options) < request.nodes:
        return None
    chosen = rank(state, request, options, seen, POLICIES[policy])[: request.nodes]
    if over_quota(state, spec, chosen) is not None:
        return None
    return Bound(
        demand=spec.demand,
        project=spec.project,
        shares=tuple(_share(spec, ranked) for ranked in chosen),
        policy=policy,
        policy_version=POLICY_VERSION,
        position=state.position,
        feasible=min(len(options) - len(chosen), 100_000),
        owner=spec.owner,
        restart=spec.restart,
        workload=spec.workload,
    )


def _share(spec: DemandRaised, ranked: Ranked) -> NodeShare:
    request = spec.resources
    return NodeShare(
        node=ranked.option.node.name,
        allotments=tuple(
            Allotment(
                card=card.uuid,
                # Nobody else can use what an exclusive binding leaves: the whole card is on its books.
                memory_bytes=card.memory_bytes if request.mode is Mode.EXCLUSIVE else request.memory_bytes,
                mode=request.mode,
            )
            for card in ranked.cards
        ),
        components=spec.components,
    )


def over_quota(state: State, spec: DemandRaised, chosen: list[Ranked] | None = None) -> Reason | None:
    """The project's quota says no. Before the cards are chosen the least that can be charged counts."""
    project = state.projects.get(spec.project)
    if project is None or project.quota_bytes is None:
        return None
    request = spec.resources
    asked = request.memory_bytes * request.count * request.nodes
    if chosen is not None and request.mode is Mode.EXCLUSIVE:
        asked = sum(card.memory_bytes for ranked in chosen for card in ranked.cards)
    if project.used_bytes + asked <= project.quota_bytes:
        return None
    return Reason(
        code=ReasonCode.PROJECT_QUOTA,
        horizon=Horizon.NEVER_BIG_ENOUGH if asked > project.quota_bytes else Horizon.LATER,
        found=spec.project,
        bound_bytes=project.used_bytes,
        total_bytes=project.quota_bytes,
        asked_bytes=asked,
        short_bytes=project.used_bytes + asked - project.quota_bytes,
    )


def explain(
    state: State, spec: DemandRaised, seen: Mapping[str, Seen], policy: str = "pack"
) -> tuple[Reason, ...]:
    """Why `place` says None, nearest miss first; empty when it would not."""
    bad = invalid(spec)
    if bad is not None:
        return (bad,)
    quota = over_quota(state, spec)
    if quota is not None:
        return (quota,)
    reasons = why_not(state, ask_of(spec), seen)
    if reasons:
        return tuple(reasons)
    chosen = rank(state, spec.resources, list(feasible(state, ask_of(spec), seen)), seen, POLICIES[policy])
    quota = over_quota(state, spec, chosen[: spec.resources.nodes])
    return (quota,) if quota is not None else ()


def hopeless(reasons: tuple[Reason, ...]) -> bool:
    """No release, uncordon or return of a known node would help: only another fleet would."""
    return bool(reasons) and all(r.horizon is not Horizon.LATER for r in reasons)


def plan(state: State, spec: DemandRaised, seen: Mapping[str, Seen], policy: str = "pack") -> Plan:
    """Dry run on the current position."""
    bound = place(state, spec, seen, policy)
    if bound is not None:
        return Plan(state.position, bound, ())
    reasons = explain(state, spec, seen, policy)
    return Plan(state.position, None, reasons, refused=invalid(spec) is not None or hopeless(reasons))


def signature(reasons: tuple[Reason, ...]) -> frozenset[tuple[str, str, str, tuple[str, ...]]]:
    """What makes a reason a different one: codes, and holders that should have let go.

    Numbers move with every binding elsewhere; they do not count.
    """
    return frozenset((r.code, r.horizon, r.node, r.holders_stopped) for r in reasons)


def verdict(
    state: State, demand: Demand, reasons: tuple[Reason, ...], *, final: bool
) -> Deferred | Refused | None:
    """What to tell about a demand that cannot be placed: nothing, when it was told already."""
    spec = demand.spec
    if final:
        return Refused(demand=spec.demand, project=spec.project, reasons=reasons, position=state.position)
    if signature(reasons) == signature(demand.reasons):
        return None
    return Deferred(demand=spec.demand, project=spec.project, reasons=reasons, position=state.position)


def stops_due(
    state: State, epochs: Iterator[int] | list[int] | set[int], now_ns: int
) -> Iterator[EvictionOrdered]:
    """Stop orders that the state calls for and that nobody has given: judged by state, not by transition.

    A withdrawal whose event was missed, or that came before the binding, is still a demand that is not
    wanted and holds cards.
    """
    for epoch in sorted(epochs):
        binding = state.bindings.get(epoch)
        if binding is None or binding.eviction is not None:
            continue
        demand = state.demands[binding.demand]
        spec = demand.spec
        reason: EvictionReason | None = None
        text = ""
        if not demand.wanted:
            reason = EvictionReason.WITHDRAWN
            text = f"withdrawn by {demand.withdrawn_by}" if demand.withdrawn_by else "withdrawn"
        elif spec.max_run_seconds is not None and now_ns - binding.bound_ns > spec.max_run_seconds * 1e9:
            reason, text = EvictionReason.TIME_LIMIT, f"ran for its maximum of {spec.max_run_seconds:.0f} s"
        elif binding.exited and len(binding.exited) < len(binding.shares):
            reason, text = (
                EvictionReason.FENCED,
                f"its part on node {binding.exited[0]} ended; a gang is whole or not at all",
            )
        if reason is not None:
            yield EvictionOrdered(
                demand=binding.demand,
                epoch=epoch,
                nodes=tuple(s.node for s in binding.shares),
                reason=reason,
                by="placer",
                grace_seconds=max(
                    (c.stop_grace_seconds for s in binding.shares for c in s.components), default=10.0
                ),
                text=text,
            )

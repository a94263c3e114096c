"""Stop orders that the state calls for and that nobody has given: judged by state, not by transition. Pure.

A withdrawal whose event was missed, or that came before the binding, is still a demand that is not
wanted and holds cards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rigbook_schemas.events import EvictionOrdered
from rigbook_schemas.values import EvictionReason

from rigbook_placer.rules import is_open

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rigbook_ledger.state import Binding, Demand, State

__all__ = ["stops_due", "timed"]


def timed(demand: Demand) -> bool:
    """Its binding may have to be stopped at some time, without any event."""
    return demand.spec.max_run_seconds is not None or bool(demand.spec.windows)


def stops_due(state: State, epochs: Iterable[int], now_ns: int) -> Iterator[EvictionOrdered]:
    """The orders for these bindings, by epoch."""
    for epoch in sorted(epochs):
        binding = state.bindings.get(epoch)
        if binding is None or binding.eviction is not None:
            continue
        said = _stop(binding, state.demands[binding.demand], now_ns)
        if said is None:
            continue
        reason, text, requeue = said
        yield EvictionOrdered(
            demand=binding.demand,
            epoch=epoch,
            nodes=tuple(s.node for s in binding.shares),
            reason=reason,
            by="placer",
            grace_seconds=max(
                (c.stop_grace_seconds for s in binding.shares for c in s.components), default=10.0
            ),
            requeue=requeue,
            text=text,
        )


def _stop(binding: Binding, demand: Demand, now_ns: int) -> tuple[EvictionReason, str, bool] | None:
    """(why, in words, does it wait again), or None = it may run on."""
    spec = demand.spec
    if not demand.wanted:
        by = f"withdrawn by {demand.withdrawn_by}" if demand.withdrawn_by else "withdrawn"
        return EvictionReason.WITHDRAWN, by, False
    if spec.max_run_seconds is not None and now_ns - binding.bound_ns > spec.max_run_seconds * 1e9:
        return EvictionReason.TIME_LIMIT, f"ran for its maximum of {spec.max_run_seconds:.0f} s", False
    if spec.windows and not is_open(spec.windows, now_ns):
        return EvictionReason.WINDOW_CLOSED, "its time window has closed; it waits for the next one", True
    if binding.exited and len(binding.exited) < len(binding.shares):
        text = f"its part on node {binding.exited[0]} ended; a gang is whole or not at all"
        return EvictionReason.FENCED, text, False
    return None

"""What a drift says and shows: the sentences an operator reads, and the facts behind them. Pure.

Each fact is an `Evidence`: what, its value, the source it was read from, and the instant. Figures stand in
`value`, so that the set of `what` changes only when other things are seen, not when a figure moves.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.sentences import gib
from rigbook_schemas.values import ComponentObservation, Evidence
from rigbook_schemas.wire import rfc3339

from rigbook_ledger.observed import Beat, Hold
from rigbook_ledger.state import Binding, Demand, Phase

if TYPE_CHECKING:
    from rigbook_schemas.values import NodeShare

    from rigbook_ledger.state import State

__all__ = [
    "Parts",
    "book_evidence",
    "bound",
    "bounded_id",
    "cards",
    "clock",
    "desired",
    "gib",
    "idle_evidence",
    "name_of",
    "remedy_order",
    "remedy_release",
    "remedy_squatter",
    "remedy_stop",
    "why_no_right",
]

# Facts of one drift that go onto the log; a fork bomb must not make the event too large to send.
EVIDENCE_MAX: Final = 32
# Cards and processes named in one sentence.
NAMED_MAX: Final = 3
TEXT_MAX: Final = 200
ID_MAX: Final = 128
_DAY_NS: Final = 86_400_000_000_000


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The observed parts of one thing: components that the engine shows, processes that the cards show."""

    running: tuple[ComponentObservation, ...] = ()
    ended: tuple[ComponentObservation, ...] = ()
    holds: tuple[Hold, ...] = ()

    @property
    def runs(self) -> bool:
        return bool(self.running or self.holds)

    def text(self, *, foreign: bool = False) -> str:
        """`server part, pid 4242, 18.0 GiB and 2 more processes`; nothing that cannot be shown to run."""
        if self.holds:
            first = max(self.holds, key=lambda h: (h.memory_bytes or 0, -h.pid))
            words = [f"{first.component} part"] if first.component else []
            words.append(f"pid {first.pid}")
            if foreign and first.command:
                words.append(_clip(first.command, 80))
            if foreign and first.user:
                words.append(f"user {first.user}")
            if foreign and first.belongs:
                words.append(_clip(first.belongs, 120))
            elif first.container:
                words.append(f"container {_clip(first.container, 12)}")
            words.append(gib(first.memory_bytes) if first.memory_bytes is not None else "memory unknown")
            more = len({h.pid for h in self.holds}) - 1
            return ", ".join(words) + (f" and {more} more process{'es' if more > 1 else ''}" if more else "")
        named = [f"{c.component} part, {_ref(c)}" for c in self.running[:NAMED_MAX]]
        more = len(self.running) - len(named)
        return "; ".join(named) + (f" and {more} more" if more > 0 else "")

    def evidence(self, beat: Beat) -> tuple[Evidence, ...]:
        """Each process with its memory, then each component with its container, as observed."""
        node, at = beat.heartbeat.node, beat.sent or rfc3339(beat.received_ns)
        facts = [
            Evidence(
                what=_clip(
                    f"pid {h.pid}{f' ({h.component} part)' if h.component else ''} on {h.card}", TEXT_MAX
                ),
                value=_clip(
                    ", ".join(
                        word
                        for word in (
                            "memory unknown"
                            if h.memory_bytes is None
                            else f"{h.memory_bytes} bytes ({gib(h.memory_bytes)})",
                            f"container {h.container}" if h.container else "",
                            f"user {h.user}" if h.user else "",
                            f"since {h.since}" if h.since else "",
                            h.command,
                        )
                        if word
                    ),
                    2 * TEXT_MAX,
                ),
                source=f"GPU driver of node {node}",
                at=h.as_of or at,
            )
            for h in self.holds
        ]
        facts += [
            Evidence(
                what=_clip(f"component {c.component} of epoch {c.epoch}: {c.ref}", TEXT_MAX),
                value=_clip(_component(c), 2 * TEXT_MAX),
                source=f"{c.engine} engine of node {node}",
                at=at,
            )
            for c in (*self.running, *self.ended)
        ]
        if len(facts) > EVIDENCE_MAX:
            left_out = Evidence(
                what="more of the same", value=f"{len(facts) - EVIDENCE_MAX + 1} facts left out"
            )
            facts = [*facts[: EVIDENCE_MAX - 1], left_out]
        return tuple(facts)


def _component(seen: ComponentObservation) -> str:
    words = ["runs" if seen.running else "its first process ended, others live" if seen.pids else "ended"]
    if seen.pids:
        words.append(f"pids {', '.join(map(str, seen.pids[:8]))}{' ...' if len(seen.pids) > 8 else ''}")
    if seen.gpus:
        words.append(f"was given {', '.join(seen.gpus[:8])}")
    if seen.since:
        words.append(f"since {seen.since}")
    return ", ".join(words)


def _ref(seen: ComponentObservation) -> str:
    if seen.ref.startswith("pid:"):
        return f"pid {seen.pids[0]}" if seen.pids else seen.ref.split("@")[0].replace(":", " ")
    return f"container {_clip(seen.ref, 12)}"


# -- the books ------------------------------------------------------------------------------------


def name_of(demand: Demand) -> str:
    """The name people gave it, else its id."""
    return demand.spec.name or demand.spec.demand


def cards(uuids: tuple[str, ...]) -> str:
    """UUIDs for a sentence: the first few, and how many more."""
    named = ", ".join(uuids[:NAMED_MAX])
    return named + (f" and {len(uuids) - NAMED_MAX} more" if len(uuids) > NAMED_MAX else "")


def clock(unix_ns: int, now_ns: int) -> str:
    """`02:13:05 UTC`, with the day in front when that is not within the day before `now_ns`."""
    text = rfc3339(unix_ns)
    day = "" if 0 <= now_ns - unix_ns < _DAY_NS else f"{text[:10]} "
    return f"{day}{text[11:19]} UTC"


def desired(demand: Demand, now_ns: int) -> str:
    """The first view, in words."""
    if demand.phase is Phase.RELEASING or demand.phase.terminal:
        since = clock(demand.withdrawn_ns or demand.since_ns, now_ns)
        by = f" by {demand.withdrawn_by}" if demand.withdrawn_by else ""
        how = f"withdrawn{by}" if demand.withdrawn_ns else demand.phase.value
        return f"stopped since {since} ({how})"
    if demand.phase is Phase.WAITING:
        return f"running, and waiting for cards since {clock(demand.since_ns, now_ns)}"
    return f"running since {clock(demand.raised_ns, now_ns)}"


def bound(binding: Binding, share: NodeShare, now_ns: int) -> str:
    """The second view, in words."""
    parts = ", ".join(f"{gib(a.memory_bytes)} of {a.card}" for a in share.allotments[:NAMED_MAX])
    more = len(share.allotments) - NAMED_MAX
    text = f"epoch {binding.epoch} since {clock(binding.bound_ns, now_ns)}: {parts}"
    text += f" and {more} more, {binding.mode}" if more > 0 else f", {binding.mode}"
    order = binding.eviction
    if order is not None:
        text += f"; stop ordered at {clock(order.ordered_ns, now_ns)} ({order.reason}, by {order.by or 'unknown'})"
    return text


def why_no_right(demand: Demand | None, epoch: int, now_ns: int) -> str:
    """What became of an epoch that no live binding has."""
    if demand is None:
        return f"epoch {epoch} is not on the books"
    if demand.epoch_last == epoch:
        return f"epoch {epoch} ended at {clock(demand.since_ns, now_ns)}"
    if demand.epoch_last > epoch:
        return f"epoch {epoch} was followed by epoch {demand.epoch_last}"
    return f"epoch {epoch} never was a valid binding of {name_of(demand)}"


def book_evidence(state: State, binding: Binding, demand: Demand) -> tuple[Evidence, ...]:
    """What the ledger says, with where."""
    source = f"ledger at position {state.position}"
    facts = [
        Evidence(
            what=f"epoch {binding.epoch} is bound to demand {binding.demand}",
            value=f"project {binding.project}, {demand.phase}, started on {', '.join(binding.started) or 'no node'}",
            source=source,
            at=rfc3339(binding.bound_ns),
        )
    ]
    if demand.withdrawn_ns:
        facts.append(
            Evidence(
                what=f"demand {binding.demand} was withdrawn",
                value=_clip(f"by {demand.withdrawn_by or 'its owner'}", TEXT_MAX),
                source=source,
                at=rfc3339(demand.withdrawn_ns),
            )
        )
    order = binding.eviction
    if order is not None:
        facts.append(
            Evidence(
                what=f"the stop of epoch {binding.epoch} was ordered",
                value=f"{order.reason}, {order.scope}, grace {order.grace_seconds:.1f} s, sequence {order.seq}",
                source=source,
                at=rfc3339(order.ordered_ns),
            )
        )
    return tuple(facts)


def idle_evidence(beat: Beat, uuids: tuple[str, ...]) -> tuple[Evidence, ...]:
    """What the cards show where nothing of the binding is."""
    facts = [
        Evidence(
            what=f"{card.uuid} shows no process of it",
            value=f"{gib(card.memory_used_bytes)} used, {len(card.processes or ())} other processes",
            source=f"GPU driver of node {beat.heartbeat.node}",
            at=card.as_of or rfc3339(beat.received_ns),
        )
        for card in beat.heartbeat.cards
        if card.uuid in uuids and card.processes is not None
    ]
    return tuple(facts[: EVIDENCE_MAX // 2])


# -- remedies -------------------------------------------------------------------------------------


def remedy_stop(epoch: int, uuids: tuple[str, ...], parts: Parts) -> str:
    freed = f" and {cards(uuids)} is released once seen free" if uuids else ""
    return (
        f"`rigbook drift heal leftover --on`: the stop of everything of epoch {epoch} is ordered{freed}; "
        f"or by hand on the node: {_by_hand(parts)}"
    )


def remedy_release(epoch: int, uuids: tuple[str, ...]) -> str:
    return (
        f"`rigbook drift heal missing --on`: the agent is told to give epoch {epoch} up, and {cards(uuids)} is released "
        "by force when it says twice more that nothing runs; or `rigbook stop` the demand"
    )


def remedy_order(kind: str, demand: str, epoch: int) -> str:
    return (
        f"`rigbook stop {demand}`; or `rigbook drift heal {kind} --on`: the stop of epoch {epoch} is ordered"
    )


def remedy_squatter(epoch: int, parts: Parts, *, healable: bool) -> str:
    if not healable:
        return f"a stop order for epoch {epoch} would reach what is alive and wanted; by hand on the node: {_by_hand(parts)}"
    return (
        f"`rigbook drift heal squatter --on`: the stop of everything of epoch {epoch} on this node is ordered; "
        f"or by hand on the node: {_by_hand(parts)}"
    )


def _by_hand(parts: Parts) -> str:
    containers = dict.fromkeys(
        [h.container for h in parts.holds if h.container]
        + [c.ref for c in parts.running if not c.ref.startswith("pid:")]
    )
    if containers:
        return "docker stop " + " ".join(_clip(c, 12) for c in list(containers)[:8])
    pids = dict.fromkeys([h.pid for h in parts.holds] + [pid for c in parts.running for pid in c.pids])
    return "kill " + " ".join(map(str, list(pids)[:8])) if pids else "end its processes"


# -- bounds ---------------------------------------------------------------------------------------


def bounded_id(text: str) -> str:
    """`text` as an identity of at most 128 printable characters; a long or odd one ends in its hash."""
    plain = "".join(c if "!" <= c <= "~" else "_" for c in text)
    if plain == text and len(text) <= ID_MAX:
        return text
    return f"{plain[: ID_MAX - 33]}.{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _clip(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "…"

"""The auditor: who owns what, modelled from the event kinds alone, and held against everything that happens.

It shares no code and no shapes with `evolve`: plain dictionaries, one per card and one per demand, moved by
what the events mean. After each event of the log it is compared with the fold, and what only a mistake can
bring about is a failure of the world:

- two owners of an exclusive card, more memory than the card has, a mode the card does not serve, a quota
  exceeded by a new binding, a binding on a cordoned node or a quarantined card, a gang in parts;
- `released` while a process of the epoch lives, or a start of what was released or ordered to stop;
- a stop or a forced release of what is alive and wanted; `node.unreachable` of a node that was heard, or in a
  mass loss; anything decided by a process that knows more of the log than the log that is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from rigbook_ledger.audit import audit_touched
from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import Phase, State
from rigbook_schemas import events as e
from rigbook_schemas.values import DriftKind, Mode
from rigbook_schemas.wire import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rigbook_bus.protocol import Message
    from rigbook_nodeagent.engines.protocol import Launch
    from rigbook_schemas.wire import Record

    from tests.simulation.machine import Machine
    from tests.simulation.network import SimBus

__all__ = ["Auditor", "Claim", "Wish"]

# What the fold may find in a world whose clients and clocks misbehave and whose agents tell twice. Any other
# finding is a mistake of ours.
FINDINGS_ALLOWED = frozenset({
    "unknown_demand", "foreign_withdrawal", "duplicate_demand", "unknown_kind", "clock_skew", "invalid_time",
    "mode_conflict", "malformed_envelope", "malformed_data", "wrong_subject", "nothing_to_accept",
    "stale_epoch", "release_by_non_holder", "unknown_card", "wrong_epoch", "preempt_not_acknowledged",
})  # fmt: skip
STARTS_FAILED = frozenset({"start_failed", "image_pull", "runtime_missing"})
# How long something must have been so that whoever judged by the latest heartbeats can be blamed.
KNOWN_SECONDS = 8.0
# With nothing amiss, a placer orders the stop of what was withdrawn long before this.
CALM_SECONDS = 15.0
# No silence shorter than this means anything, whatever a node's interval (`programs.PATIENCE`).
SILENCE_SECONDS_MIN = 5.0


class Wish:
    """A demand, as a client sees it."""

    def __init__(self, spec: e.DemandRaised) -> None:
        self.spec = spec
        self.wanted = True
        self.unwanted_at = 0.0
        self.epoch = 0
        self.verdict = ""  # how its last end was told
        self.again = False  # that end was a failed start, which another try may mend
        self.over = ""  # why it will never be bound (again)


class Claim:
    """Cards given to a demand."""

    def __init__(
        self, demand: str, project: str, mode: str, parts: dict[str, dict[str, int]], at: float
    ) -> None:
        self.demand = demand
        self.project = project
        self.mode = mode
        self.parts = parts  # node to card to bytes, of what is not given back yet
        self.nodes = tuple(parts)
        self.at = at
        self.stopped = False
        self.stop_seqs: dict[str, int] = {}  # node to the first stop order for it
        self.requeue: bool | None = None
        self.reason = ""  # of the latest order to stop it
        self.exited: set[str] = set()
        self.words: frozenset[str] = frozenset()


class Auditor:
    """Told of every event that is stored, of every start of a component, and of the faults that matter."""

    def __init__(
        self,
        *,
        machines: Mapping[str, Machine],
        now: Callable[[], float],
        fail: Callable[[str, str], None],
        acked: Callable[[str, int], bool],
        on_its_way: Callable[[], float],
        silence_seconds: float,
        window_seconds: float,
    ) -> None:
        self._machines = machines
        self._now = now
        self._fail = fail
        self._acked = acked
        self._on_its_way = on_its_way  # seconds that an answer and an append may take now
        self._silence = silence_seconds
        self._window = window_seconds
        self.begin()

    def begin(self) -> None:
        """A log from its start."""
        self.state = State()  # the fold that the model is held against
        self.wishes: dict[str, Wish] = {}
        self.claims: dict[int, Claim] = {}
        self.on_card: dict[str, dict[int, int]] = {}  # card to epoch to bytes
        self.cards: dict[str, dict[str, Any]] = {}
        self.cordoned: set[str] = set()
        self.unreachable: dict[str, float] = {}
        self.quota: dict[str, int | None] = {}
        self.heard: dict[str, float] = {}  # node to when the server stored its last heartbeat
        self.beats: dict[str, list[float]] = {}  # node to when its latest heartbeats were stored
        self.given_back: dict[tuple[int, str], bool] = {}  # (epoch, node) to whether by force, or unseen
        self.begun: set[tuple[int, str]] = (
            set()
        )  # (epoch, node) told to run, and not told to be started again
        self.void: set[int] = set()
        self.kinds: dict[str, int] = {}
        self.misled: set[str] = set()  # who told something to the wrong log
        self.calm_since: float | None = None  # since when there are no more faults
        self.watching = True  # False while the log that is there is not the right one

    # -- the log ---------------------------------------------------------------------------------------------

    def heartbeat(self, message: Message) -> None:
        node = message.subject.rpartition(".")[2]
        self.heard[node] = self._now()
        beats = self.beats.setdefault(node, [])
        beats.append(self._now())
        del beats[:-10]

    def event(self, message: Message, sender: SimBus | None) -> None:
        record = decode(message.seq, message.subject, message.received_ns, message.body)
        self.kinds[record.kind or "?"] = self.kinds.get(record.kind or "?", 0) + 1
        if sender is not None and sender.knows_more and self._decides(record, sender):
            self._fail(
                "acted_in_safe_mode",
                f"{sender.name} appended {record.kind} at {record.seq}; it has read to {sender.read_to}, and the log's "
                "end is lost",
            )
        if not self.watching:
            if sender is not None:
                self.misled.add(sender.name)
            return
        follow = _FOLLOW.get(type(record.data))
        if follow is not None:
            follow(self, record, record.data)
        findings = self.state.finding_count
        self.state = evolve(self.state, record)
        self._compare(record)
        for finding in self.state.touched.findings:
            people = record.source == "client/people" and finding.code == "unknown_node"
            vanished = finding.code == "void_binding" and record.seq in self.void
            if finding.code not in FINDINGS_ALLOWED and not people and not vanished:
                self._fail("finding", f"{finding.code} at {finding.seq}: {finding.text}")
        for violated in audit_touched(self.state):
            self._fail("audit", f"{violated.code} at {violated.seq}: {violated.text}")
        assert self.state.finding_count >= findings
        self.state.touched.clear()

    def _decides(self, record: Record, sender: SimBus) -> bool:
        """Is this an event about ownership by one who decides? What an agent saw is a fact in any log."""
        data = record.data
        if isinstance(data, (e.Bound, e.EvictionOrdered, e.DriftDetected, e.DriftCleared, e.NodeUnreachable)):
            return sender.name.startswith(("placer", "reaper"))
        return isinstance(data, e.Released) and data.forced and sender.name.startswith("reaper")

    def _compare(self, record: Record) -> None:
        state, touched = self.state, self.state.touched
        where = f"after {record.kind} at {record.seq}"
        for uuid in touched.cards:
            folded = state.cards.get(uuid)
            mine = self.on_card.get(uuid, {})
            theirs = () if folded is None else folded.holders
            if sorted(mine) != sorted(theirs):
                self._fail(
                    "model_differs", f"{where}: card {uuid} is held by {sorted(mine)}, the fold says {theirs}"
                )
            elif folded is not None and folded.reserved_bytes != sum(mine.values()):
                self._fail(
                    "model_differs",
                    f"{where}: card {uuid} has {sum(mine.values())} bytes given, the fold says {folded.reserved_bytes}",
                )
        for epoch in touched.bindings:
            if (epoch in self.claims) != (epoch in state.bindings):
                self._fail("model_differs", f"{where}: epoch {epoch} is live here: {epoch in self.claims}")
        for did in touched.demands:
            demand, wish = state.demands.get(did), self.wishes.get(did)
            if demand is None or wish is None:
                self._fail("model_differs", f"{where}: demand {did} is known to one side only")
                continue
            over = bool(wish.over)
            if demand.epoch != wish.epoch or demand.phase.terminal != over or demand.wanted != wish.wanted:
                self._fail(
                    "model_differs",
                    f"{where}: demand {did} is {demand.phase} with epoch {demand.epoch}, wanted {demand.wanted}; here epoch "
                    f"{wish.epoch}, wanted {wish.wanted}, over {wish.over!r}",
                )
                continue
            stopping = bool(wish.epoch) and (self.claims[wish.epoch].stopped or not wish.wanted)
            if stopping != (demand.phase is Phase.RELEASING):
                self._fail(
                    "model_differs",
                    f"{where}: demand {did} is {demand.phase}; here it is to be stopped: {stopping}",
                )
        for name in touched.projects:
            used = sum(
                size
                for c in self.claims.values()
                if c.project == name
                for cards in c.parts.values()
                for size in cards.values()
            )
            if state.projects[name].used_bytes != used:
                self._fail(
                    "model_differs",
                    f"{where}: project {name} uses {used}, the fold says {state.projects[name].used_bytes}",
                )

    # -- clients ---------------------------------------------------------------------------------------------

    def _raised(self, record: Record, data: e.DemandRaised) -> None:
        if data.demand not in self.wishes and record.subject == f"rig.demand.{data.project}":
            self.wishes[data.demand] = Wish(data)

    def _withdrawn(self, record: Record, data: e.DemandWithdrawn) -> None:
        wish = self.wishes.get(data.demand)
        if wish is None or wish.over or wish.spec.project != data.project or not wish.wanted:
            return
        if record.subject != f"rig.demand.{data.project}":
            return
        wish.wanted = False
        wish.unwanted_at = self._now()
        if not wish.epoch:
            wish.over = "withdrawn"

    # -- placers ---------------------------------------------------------------------------------------------

    def _refused(self, record: Record, data: e.Refused) -> None:
        wish = self.wishes.get(data.demand)
        if wish is not None and not wish.epoch and not wish.over:
            wish.over = "refused"

    def _bound(self, record: Record, data: e.Bound) -> None:
        wish = self.wishes.get(data.demand)
        epoch = record.seq
        why = ""
        if wish is None:
            why = "nobody asked for it"
        elif wish.epoch:
            why = f"it holds epoch {wish.epoch} already"
        elif wish.over not in ("", "withdrawn", "refused"):
            why = f"it is over: {wish.over}"
        for share in data.shares:
            for a in share.allotments:
                if self.cards.get(a.card, {}).get("node") != share.node:
                    why = why or f"card {a.card} is not on node {share.node}"
        if why:
            self.void.add(epoch)
            if "is not on node" not in why:  # a card may go between the placer's look and its append
                self._fail("void_binding", f"epoch {epoch} of {data.demand}: {why}")
            return
        assert wish is not None
        parts = {s.node: {a.card: a.memory_bytes for a in s.allotments} for s in data.shares}
        claim = Claim(data.demand, data.project, data.shares[0].allotments[0].mode, parts, self._now())
        claim.words = frozenset(
            w.partition(":")[0] for s in data.shares for c in s.components for w in c.command
        )
        self._check_binding(epoch, claim, wish)
        self.claims[epoch] = claim
        for cards in parts.values():
            for card, size in cards.items():
                self.on_card.setdefault(card, {})[epoch] = size
        wish.epoch = epoch
        if wish.over:  # it was withdrawn or refused in between: bound all the same, and to be stopped
            wish.over, wish.wanted = "", False
            claim.stopped = True

    def _check_binding(self, epoch: int, claim: Claim, wish: Wish) -> None:
        asked = wish.spec.resources
        what = f"epoch {epoch} of {claim.demand}"
        if len(claim.parts) != asked.nodes or any(
            len(cards) != asked.count for cards in claim.parts.values()
        ):
            self._fail(
                "gang_in_parts",
                f"{what}: {asked.nodes} nodes with {asked.count} cards were asked for, it got {claim.parts}",
            )
        if claim.mode != asked.mode:
            self._fail("wrong_mode", f"{what}: {asked.mode} was asked for, it got {claim.mode}")
        for node, cards in claim.parts.items():
            if node in self.cordoned:
                self._fail("bound_while_cordoned", f"{what}: node {node} is cordoned")
            for card, size in cards.items():
                known = self.cards[card]
                others = self.on_card.get(card, {})
                if size < asked.memory_bytes:
                    self._fail(
                        "too_little", f"{what}: {size} bytes of {card}, {asked.memory_bytes} were asked for"
                    )
                if others and (
                    claim.mode == Mode.EXCLUSIVE or any(self.claims[o].mode == Mode.EXCLUSIVE for o in others)
                ):
                    self._fail("double_binding", f"{what}: card {card} is held by {sorted(others)}")
                if any(self.claims[o].mode != claim.mode for o in others) or known["mode"] not in (
                    None,
                    claim.mode,
                ):
                    self._fail("wrong_mode", f"{what}: card {card} does not serve {claim.mode}")
                if sum(others.values()) + size > known["memory"]:
                    self._fail(
                        "over_allotted",
                        f"{what}: {sum(others.values()) + size} bytes of {card}, it has {known['memory']}",
                    )
                if known["quarantined"]:
                    self._fail("bound_while_quarantined", f"{what}: card {card} is quarantined")
        quota = self.quota.get(claim.project)
        used = sum(
            n
            for c in self.claims.values()
            if c.project == claim.project
            for p in c.parts.values()
            for n in p.values()
        )
        new = sum(n for cards in claim.parts.values() for n in cards.values())
        if quota is not None and used + new > quota:
            self._fail(
                "quota_exceeded", f"{what}: project {claim.project} would hold {used + new} of {quota}"
            )

    # -- stops -----------------------------------------------------------------------------------------------

    def _evicted(self, record: Record, data: e.EvictionOrdered) -> None:
        claim = self.claims.get(data.epoch)
        if record.source.startswith("reaper/"):
            self._check_reaper(record, data.epoch, data.nodes, str(data.reason))
        if claim is None or claim.demand != data.demand:
            return
        wish = self.wishes[claim.demand]
        if record.source.startswith("placer/") and wish.wanted and data.reason == "withdrawn":
            self._fail(
                "stopped_the_wanted",
                f"{record.source} ordered the stop of epoch {data.epoch} at {record.seq}: it is wanted",
            )
        for node in data.nodes:
            claim.stop_seqs.setdefault(node, record.seq)
        claim.stopped = True
        claim.reason = data.reason
        claim.requeue = data.requeue if claim.requeue is None else claim.requeue and data.requeue

    def _check_reaper(self, record: Record, epoch: int, nodes: tuple[str, ...], reason: str) -> None:
        what = f"{record.source} at {record.seq}: {record.kind} of epoch {epoch} on {', '.join(nodes)} ({reason})"
        lost = self.mass_loss()
        if lost:
            self._fail("reaped_in_mass_loss", f"{what}: {lost}")
        claim = self.claims.get(epoch)
        if claim is None:
            return
        wish = self.wishes[claim.demand]
        if not wish.wanted or claim.stopped:
            calm = 0.0 if self.calm_since is None else self._now() - max(self.calm_since, wish.unwanted_at)
            if not claim.stop_seqs and calm > CALM_SECONDS:
                self._fail(
                    "left_to_the_reaper",
                    f"{what}: withdrawn {calm:.0f} s ago, and no placer ordered its stop",
                )
            return  # its end is desired already
        if reason in (DriftKind.OVERUSE, DriftKind.WRONG_CARD):
            if {"overuse", "wrongcard"}.isdisjoint(claim.words):
                self._fail("reaped_the_wanted", f"{what}: it does nothing wrong")
        elif reason == DriftKind.MISSING:
            for node in nodes[:1]:
                machine = self._machines[node]
                since = [
                    part.at for part in machine.parts.values() if part.launch.epoch == epoch and part.running
                ]
                # one part of it that ended is enough to end the share; all of it, and for long, is alive
                told = [c for c in machine.parts.values() if c.launch.epoch == epoch]
                if since and len(since) == len(told) and self._now() - max(since) > KNOWN_SECONDS:
                    self._fail("reaped_the_living", f"{what}: it runs on {node} since {max(since):.1f}")
        else:
            self._fail("reaped_the_wanted", f"{what}: it is bound, wanted and was not ordered to stop")

    def _started(self, record: Record, data: e.Started) -> None:
        self.begun.add((data.epoch, data.node))

    def _exited(self, record: Record, data: e.Exited) -> None:
        begun = (data.epoch, data.node) in self.begun
        if not data.final:
            self.begun.discard((data.epoch, data.node))
        claim = self.claims.get(data.epoch)
        if claim is None or claim.demand != data.demand or data.node not in self._machines:
            return
        if data.node in claim.parts and record.subject == f"rig.run.{data.node}":
            wish = self.wishes[claim.demand]
            if wish.verdict in ("", "completed") or not claim.exited:
                wish.verdict = data.verdict
                wish.again = data.verdict in STARTS_FAILED and all(
                    x.what != "no_such_program" for x in data.evidence
                )
            if data.final:
                claim.exited.add(data.node)
        if claim.stopped or not self.wishes[claim.demand].wanted or not begun:
            return
        if data.epoch not in self._machines[data.node].by_itself:
            self._fail(
                "stopped_the_wanted",
                f"{record.source} at {record.seq}: nothing of epoch {data.epoch} had ended on {data.node} by itself",
            )

    def _released(self, record: Record, data: e.Released) -> None:
        claim = self.claims.get(data.epoch)
        mine = claim is not None and claim.demand == data.demand and data.node in claim.parts
        machine = self._machines.get(data.node)
        living = [] if machine is None else machine.alive(data.epoch)
        # Of a card that is lost or gone nobody can tell what holds it, and it takes no binding: there the engine's
        # word has to do.
        alive = living
        hidden = machine.out_of_sight if machine is not None else set()
        living = [p for p in alive if p.memory.keys().isdisjoint(hidden)]
        what = f"{record.source} at {record.seq}: epoch {data.epoch} on {data.node}"
        if data.forced:
            if record.source.startswith("reaper/"):
                lost = self.mass_loss()
                if lost:
                    self._fail("reaped_in_mass_loss", f"{what} is released: {lost}")
                old = [p for p in self._machines[data.node].parts.values() if p.launch.epoch == data.epoch]
                if mine and living and old and self._now() - min(p.at for p in old) > KNOWN_SECONDS:
                    self._fail(
                        "released_the_living",
                        f"{what} is released by force, and pids {[p.pid for p in living]} live",
                    )
        elif mine and living:
            self._fail(
                "released_the_living", f"{what} is called free, and pids {[p.pid for p in living]} live"
            )
        if claim is None or not mine or record.subject != f"rig.release.{data.node}":
            return
        for card in claim.parts.pop(data.node):
            del self.on_card[card][data.epoch]
        self._forget_absent()
        self.given_back[data.epoch, data.node] = data.forced or len(alive) > len(living)
        if claim.parts:
            return
        del self.claims[data.epoch]
        wish = self.wishes[claim.demand]
        wish.epoch = 0
        by_itself = claim.requeue is None or claim.reason == "fenced"
        if wish.wanted and (claim.requeue or (by_itself and wish.again)):
            wish.verdict, wish.again = "", False
        else:
            wish.over = "ended"

    # -- the fleet -------------------------------------------------------------------------------------------

    def _joined(self, record: Record, data: e.NodeJoined) -> None:
        if record.subject != f"rig.node.{data.node}":
            return
        for known in self.cards.values():
            if known["node"] == data.node:
                known["present"] = False
        for card in data.cards:
            known = self.cards.setdefault(
                card.uuid,
                {"node": data.node, "memory": card.memory_bytes, "mode": None, "quarantined": False},
            )
            known["present"] = True
            known["memory"] = card.memory_bytes or known["memory"]
        self._forget_absent()
        self.unreachable.pop(data.node, None)

    def _forget_absent(self) -> None:
        for uuid, known in list(self.cards.items()):
            if not (known["present"] or self.on_card.get(uuid) or known["quarantined"] or known["mode"]):
                del self.cards[uuid]

    def _unreachable(self, record: Record, data: e.NodeUnreachable) -> None:
        # A heartbeat that came while the event was on its way could not be known.
        ages = [self._now() - at for at in self.beats.get(data.node, ())]
        known = [age for age in ages if self._on_its_way() <= age < SILENCE_SECONDS_MIN]
        if known:
            self._fail(
                "called_the_heard_silent",
                f"{record.source} at {record.seq}: {data.node} was heard {min(known):.1f} s ago",
            )
        lost = self.mass_loss()
        if lost:
            self._fail("unreachable_in_mass_loss", f"{record.source} at {record.seq}: {data.node}; {lost}")
        self.unreachable.setdefault(data.node, self._now())

    def _recovered(self, record: Record, data: e.NodeRecovered) -> None:
        self.unreachable.pop(data.node, None)

    def mass_loss(self) -> str:
        """More than half of the nodes fell silent, and for so long that nobody can have missed it."""
        now = self._now()
        nodes = {known["node"] for known in self.cards.values()}
        expected = [
            n for n in nodes if n not in self.unreachable or now - self.unreachable[n] < self._window / 2
        ]
        silent = [n for n in expected if now - self.heard.get(n, now) > self._silence + 4.0]
        if len(silent) >= 2 and len(silent) > len(expected) / 2:
            return f"{len(silent)} of {len(expected)} nodes are silent: {sorted(silent)}"
        return ""

    def _quota(self, record: Record, data: e.QuotaSet) -> None:
        self.quota[data.project] = data.memory_bytes

    def _mode(self, record: Record, data: e.ModeSet) -> None:
        holders = self.on_card.get(data.card, {})
        if data.card in self.cards and (
            data.mode is None or all(self.claims[o].mode == data.mode for o in holders)
        ):
            self.cards[data.card]["mode"] = data.mode
            self._forget_absent()

    def _cordon(self, record: Record, data: e.NodeCordoned) -> None:
        if any(known["node"] == data.node for known in self.cards.values()):
            self.cordoned.add(data.node)

    def _uncordon(self, record: Record, data: e.NodeUncordoned) -> None:
        self.cordoned.discard(data.node)

    def _quarantine(self, record: Record, data: e.GpuQuarantined) -> None:
        if data.card in self.cards:
            self.cards[data.card]["quarantined"] = True

    def _restore(self, record: Record, data: e.GpuRestored) -> None:
        if data.card in self.cards:
            self.cards[data.card]["quarantined"] = False
            self._forget_absent()

    # -- the nodes -------------------------------------------------------------------------------------------

    def starts(self, launch: Launch) -> None:
        """An agent starts a component: has the log given the right, and not taken it back?"""
        if not self.watching:
            return
        epoch, node = launch.epoch, launch.node
        what = f"node {node} starts {launch.component.name} of epoch {epoch} ({launch.demand})"
        if (epoch, node) in self.given_back:
            self._fail("started_the_ended", f"{what}: it was released there")
            return
        if (epoch, node) in self.begun:
            self._fail(
                "begun_again", f"{what}: it was told to run there, and not that it is to be started again"
            )
        claim = self.claims.get(epoch)
        if claim is None or node not in claim.parts or claim.demand != launch.demand:
            if epoch not in self.void:
                self._fail("started_without_right", f"{what}: no such binding")
            return
        stop = claim.stop_seqs.get(node)
        if stop is not None and self._acked(node, stop):
            self._fail(
                "started_the_stopped", f"{what}: its agent has acknowledged the order {stop} to stop it"
            )
        if not launch.component.gpu:
            return
        if set(launch.cards) != set(claim.parts[node]):
            self._fail("wrong_cards", f"{what} on {launch.cards}, it holds {sorted(claim.parts[node])}")
        if claim.mode == Mode.EXCLUSIVE:
            for proc in self._machines[node].procs.values():
                ended = (
                    proc.epoch is not None
                    and proc.epoch != epoch
                    and self.given_back.get((proc.epoch, node)) is False
                )
                if ended and not set(proc.memory).isdisjoint(launch.cards):
                    self._fail(
                        "card_not_free", f"{what}: pid {proc.pid} of epoch {proc.epoch} still holds the card"
                    )

    def phases(self) -> dict[str, int]:
        told: dict[str, int] = {}
        for demand in self.state.demands.values():
            told[demand.phase.value] = told.get(demand.phase.value, 0) + 1
        return told

    def holding(self) -> list[str]:
        return [
            d.spec.demand
            for d in self.state.demands.values()
            if d.phase in (Phase.BOUND, Phase.STARTING, Phase.RUNNING)
        ]


_FOLLOW: dict[type[msgspec.Struct], Callable[[Auditor, Record, Any], None]] = {
    e.DemandRaised: Auditor._raised,
    e.DemandWithdrawn: Auditor._withdrawn,
    e.Refused: Auditor._refused,
    e.Bound: Auditor._bound,
    e.EvictionOrdered: Auditor._evicted,
    e.Started: Auditor._started,
    e.Exited: Auditor._exited,
    e.Released: Auditor._released,
    e.NodeJoined: Auditor._joined,
    e.NodeChanged: Auditor._joined,
    e.NodeUnreachable: Auditor._unreachable,
    e.NodeRecovered: Auditor._recovered,
    e.QuotaSet: Auditor._quota,
    e.ModeSet: Auditor._mode,
    e.NodeCordoned: Auditor._cordon,
    e.NodeUncordoned: Auditor._uncordon,
    e.GpuQuarantined: Auditor._quarantine,
    e.GpuRestored: Auditor._restore,
}

"""The core under random histories.

Method: a hypothesis state machine writes a log of valid and invalid events, all of them through
`encode` and `decode`. Bindings that the machine means to be good are legal ones, as a placer would make
them; bad ones must give no right to anything. After every step:

1. `audit(state) == []`, and so is the audit of what changed;
2. a fold of the whole log from nothing has the same digest as the live state;
3. so has the state restored from a snapshot, and a fork;
4. folding the log again onto the live state changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis.strategies as st
import msgspec
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rigbook_ledger.audit import audit, audit_touched
from rigbook_ledger.digest import digest
from rigbook_ledger.evolve import evolve, fold
from rigbook_ledger.state import State, restore, snapshot
from rigbook_schemas import events as e
from rigbook_schemas import values as v

from tests.unit.ledger_story import (
    CARD_BYTES,
    Raw,
    Step,
    Story,
    Told,
    bound,
    card,
    changed,
    inventory,
    joined,
    raised,
    share,
)

if TYPE_CHECKING:
    from rigbook_ledger.state import Card

NODES = ("a", "b", "c")
CARDS = tuple(card(node, index) for node in NODES for index in range(3))
PROJECTS = ("p", "q")
QUARTER = CARD_BYTES // 4

nodes = st.sampled_from(NODES)
cards = st.sampled_from(CARDS)
projects = st.sampled_from(PROJECTS)
verdicts = st.sampled_from(list(v.VerdictClass))
# Present and well, present and mute (no memory told), or not there.
inventories = st.lists(
    st.tuples(st.integers(0, 2), st.booleans()), max_size=3, unique_by=lambda told: told[0]
)


def seen(node: str, told: list[tuple[int, bool]]) -> tuple[v.CardInventory, ...]:
    return tuple(
        msgspec.structs.replace(
            inventory(node, index, memory_bytes=CARD_BYTES if well else 0),
            usable=well,
            why="" if well else "mute",
        )
        for index, well in told
    )


class Core(RuleBasedStateMachine):
    """One log, written by a careless world."""

    def __init__(self) -> None:
        super().__init__()
        self.story = Story()
        self.raised = 0

    @property
    def state(self) -> State:
        return self.story.state

    def tell(self, step: Step) -> None:
        self.story.tell(step)

    def any_demand(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from([*self.state.demands, "nobody"]))

    def holder(self, data: st.DataObject) -> tuple[int, str, str]:
        """(epoch, demand, node) of somebody who holds cards."""
        epoch = data.draw(st.sampled_from([*self.state.bindings]))
        binding = self.state.bindings[epoch]
        left = [s.node for s in binding.shares if s.node not in binding.released]
        return epoch, binding.demand, data.draw(st.sampled_from(left))

    def nobody(self, data: st.DataObject) -> tuple[int, str, str]:
        """The same of somebody who holds nothing, or not there."""
        epoch = data.draw(st.sampled_from([*self.state.bindings, 0, 1, 2**62]))
        demand = self.any_demand(data)
        binding = self.state.bindings.get(epoch)
        if binding is None or binding.demand != demand:
            return epoch, demand, data.draw(nodes)
        return epoch, demand, "z"

    # -- the fleet ------------------------------------------------------------------------------

    @initialize()
    def first_nodes(self) -> None:
        for node in NODES:
            self.tell(joined(node, cards=3))

    @rule(node=nodes, told=inventories, how=st.sampled_from(["join", "change", "claim"]), claimed=cards)
    def tell_an_inventory(self, node: str, told: list[tuple[int, bool]], how: str, claimed: str) -> None:
        match how:
            case "join":
                self.tell(msgspec.structs.replace(joined(node, incarnation="again"), cards=seen(node, told)))
            case "change":
                self.tell(changed(node, seen(node, told)))
            case _:
                self.tell(
                    changed(node, [*seen(node, told), inventory(claimed.split("-")[1], int(claimed[-1]))])
                )

    @rule(node=nodes, heard=st.booleans())
    def silence(self, node: str, heard: bool) -> None:
        self.tell(e.NodeRecovered(node=node) if heard else e.NodeUnreachable(node=node, silent_seconds=20))

    @rule(
        node=nodes,
        card=cards,
        project=projects,
        which=st.integers(0, 8),
        memory=st.integers(0, 2 * CARD_BYTES),
    )
    def set_a_rule(self, node: str, card: str, project: str, which: int, memory: int) -> None:
        modes = list(v.Mode)
        self.tell(
            (
                e.NodeCordoned(node=node),
                e.NodeUncordoned(node=node),
                e.GpuQuarantined(card=card),
                e.GpuRestored(card=card),
                e.ModeSet(card=card, mode=None),
                e.ModeSet(card=card, mode=modes[memory % 3]),
                e.QuotaSet(project=project, memory_bytes=memory),
                e.PriorityCapped(priority=memory % 101, share=(memory % 3) / 2),
                e.HealingSet(kind=list(v.DriftKind)[memory % 5], on=bool(memory % 2)),
            )[which]
        )

    @rule(node=nodes, drift=st.sampled_from("xyz"), cleared=st.booleans())
    def drift(self, node: str, drift: str, cleared: bool) -> None:
        kind = v.DriftKind.MISSING
        self.tell(
            e.DriftCleared(drift=drift, kind=kind, node=node)
            if cleared
            else e.DriftDetected(drift=drift, kind=kind, node=node, sentence="gone")
        )

    # -- clients --------------------------------------------------------------------------------

    @rule(project=projects, probe=st.booleans(), memory=st.integers(-(2**62), 2**62))
    def raise_a_demand(self, project: str, *, probe: bool, memory: int) -> None:
        self.raised += 1
        resources = v.Request(memory_bytes=memory)
        self.tell(raised(f"d{self.raised}", project, probe=probe, resources=resources))

    @rule(data=st.data(), project=projects)
    def raise_again(self, data: st.DataObject, project: str) -> None:
        demand = self.any_demand(data)
        if demand != "nobody":
            self.tell(raised(demand, project))

    @precondition(lambda self: self.state.demands)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        demand = data.draw(st.sampled_from([*self.state.demands.values()]))
        self.tell(e.DemandWithdrawn(demand=demand.spec.demand, project=demand.spec.project))

    @rule(data=st.data(), project=projects)
    def withdraw_wrongly(self, data: st.DataObject, project: str) -> None:
        demand = self.any_demand(data)
        if demand == "nobody" or self.state.demands[demand].spec.project != project:
            self.tell(e.DemandWithdrawn(demand=demand, project=project))

    # -- placers --------------------------------------------------------------------------------

    def room(self, there: Card, mode: v.Mode) -> int:
        """Bytes of the card that a careful placer may still give away in this mode."""
        served = self.state.mode_of(there)
        if not there.present or served not in (None, mode) or (there.holders and mode is v.Mode.EXCLUSIVE):
            return 0
        return there.memory_bytes - there.reserved_bytes

    @precondition(lambda self: self.state.waiting)
    @rule(data=st.data(), mode=st.sampled_from(v.Mode), count=st.integers(1, 4), quarters=st.integers(1, 4))
    def bind(self, data: st.DataObject, mode: v.Mode, count: int, quarters: int) -> None:
        self.bind_one_of(data, [*self.state.waiting], mode, count, quarters)

    @rule(data=st.data(), project=projects, mode=st.sampled_from(v.Mode), quarters=st.integers(1, 4))
    def raise_and_bind(self, data: st.DataObject, project: str, mode: v.Mode, quarters: int) -> None:
        self.raise_a_demand(project, probe=False, memory=v.GIB)
        self.bind_one_of(data, [f"d{self.raised}"], mode, 3, quarters)

    @precondition(lambda self: self.state.ended)
    @rule(data=st.data(), mode=st.sampled_from(v.Mode), count=st.integers(1, 4), quarters=st.integers(1, 4))
    def bind_too_late(self, data: st.DataObject, mode: v.Mode, count: int, quarters: int) -> None:
        """What races a withdrawal or a refusal; of an ended demand it gives no right."""
        self.bind_one_of(data, [*self.state.ended], mode, count, quarters)

    @rule(data=st.data(), mode=st.sampled_from(v.Mode), count=st.integers(1, 3), quarters=st.integers(1, 4))
    def adopt(self, data: st.DataObject, mode: v.Mode, count: int, quarters: int) -> None:
        """What the operator says of a lost log."""
        self.raised += 1
        demands = [f"d{self.raised}", *self.state.waiting, *self.state.ended]
        self.bind_one_of(data, demands, mode, count, quarters, adopt=True)

    @rule(generation=st.integers(1, 5), skip=st.booleans())
    def recover(self, generation: int, skip: bool) -> None:
        self.tell(
            e.SequenceSkipped(generation=generation)
            if skip
            else e.LogRecovered(generation=generation, stream_created="1", how="adopted")
        )

    def bind_one_of(
        self,
        data: st.DataObject,
        demands: list[str],
        mode: v.Mode,
        count: int,
        quarters: int,
        adopt: bool = False,
    ) -> None:
        """As a careful placer would: no audit may find fault with it."""
        demand = data.draw(st.sampled_from(demands))
        memory = quarters * QUARTER
        fitting = [uuid for uuid, there in self.state.cards.items() if self.room(there, mode) >= memory]
        if not fitting:
            return
        chosen = data.draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=count, unique=True))
        homes: dict[str, list[str]] = {}
        for uuid in chosen:
            homes.setdefault(self.state.cards[uuid].node, []).append(uuid)
        shares = tuple(
            share(node, *uuids, mode=mode, memory_bytes=memory, probe=quarters % 2 == 0)
            for node, uuids in homes.items()
        )
        if adopt:
            epoch = data.draw(st.integers(1, self.state.position))
            if epoch in self.state.bindings:
                return
            spec = self.state.demands[demand].spec if demand in self.state.demands else raised(demand)
            wanted = data.draw(st.booleans())
            on = tuple(s.node for s in shares)
            told = e.Adopted(demand=demand, epoch=epoch, spec=spec, shares=shares, started=on, wanted=wanted)
            self.tell(told)
        else:
            project = self.state.demands[demand].spec.project
            self.tell(e.Bound(demand=demand, project=project, shares=shares, policy="pack"))

    @rule(data=st.data(), how=st.integers(0, 7), card_=cards, node=nodes)
    def bind_badly(self, data: st.DataObject, how: int, card_: str, node: str) -> None:
        demand = self.any_demand(data)
        project = self.state.demands[demand].spec.project if demand != "nobody" else "p"
        good = bound(demand, card_, project=project)
        before = dict(self.state.bindings)
        two = (share(node, card(node), mode=v.Mode.TIME_SLICE), share(node, card(node, 1)))
        self.tell(
            (
                bound("nobody", card_),
                bound(demand, "GPU-z-9", project=project),
                bound(demand, card_, project="other"),
                Told(data=good, subject="rig.own.bind.elsewhere"),
                bound(demand, card_, card_, project=project),
                msgspec.structs.replace(good, shares=(share(card_.split("-")[1]),)),
                msgspec.structs.replace(good, shares=two),
                msgspec.structs.replace(good, shares=(*good.shares, *good.shares)),
            )[how]
        )
        assert self.state.bindings == before
        assert self.state.findings[-1].code == "void_binding"

    @rule(data=st.data(), refused=st.booleans(), project=projects)
    def put_off(self, data: st.DataObject, refused: bool, project: str) -> None:
        reasons = (v.Reason(code=v.ReasonCode.NO_NODES),)
        kind = e.Refused if refused else e.Deferred
        self.tell(kind(demand=self.any_demand(data), project=project, reasons=reasons))

    @precondition(lambda self: self.state.bindings)
    @rule(data=st.data(), requeue=st.booleans())
    def order_a_stop(self, data: st.DataObject, requeue: bool) -> None:
        epoch, demand, _ = self.holder(data)
        named = tuple(s.node for s in self.state.bindings[epoch].shares)
        reason = v.EvictionReason.DRAIN
        self.tell(e.EvictionOrdered(demand=demand, epoch=epoch, nodes=named, reason=reason, requeue=requeue))

    @rule(data=st.data())
    def order_a_stop_of_nothing(self, data: st.DataObject) -> None:
        epoch, demand, node = self.nobody(data)
        reason = v.EvictionReason.DRAIN
        self.tell(e.EvictionOrdered(demand=demand, epoch=epoch, nodes=(node,), reason=reason))

    # -- agents ---------------------------------------------------------------------------------

    @precondition(lambda self: self.state.bindings)
    @rule(data=st.data(), which=st.sampled_from("srux"), verdict=verdicts, final=st.booleans())
    def run(self, data: st.DataObject, which: str, verdict: v.VerdictClass, final: bool) -> None:
        epoch, demand, node = self.holder(data)
        match which:
            case "s":
                self.tell(e.Started(demand=demand, epoch=epoch, node=node))
            case "r":
                self.tell(e.Ready(demand=demand, epoch=epoch, node=node))
            case "u":
                self.tell(e.Unready(demand=demand, epoch=epoch, node=node))
            case _:
                self.tell(e.Exited(demand=demand, epoch=epoch, node=node, verdict=verdict, final=final))

    @precondition(lambda self: self.state.bindings)
    @rule(data=st.data(), are_ready=st.booleans())
    def start_everywhere(self, data: st.DataObject, are_ready: bool) -> None:
        epoch, demand, _ = self.holder(data)
        binding = self.state.bindings[epoch]
        left = [s.node for s in binding.shares if s.node not in binding.released]
        for node in left:
            self.tell(e.Started(demand=demand, epoch=epoch, node=node))
            if are_ready:
                self.tell(e.Ready(demand=demand, epoch=epoch, node=node))

    @precondition(lambda self: self.state.bindings)
    @rule(data=st.data(), verdict=verdicts, everywhere=st.booleans())
    def release(self, data: st.DataObject, verdict: v.VerdictClass, everywhere: bool) -> None:
        epoch, demand, node = self.holder(data)
        binding = self.state.bindings[epoch]
        left = [s.node for s in binding.shares if s.node not in binding.released]
        for one in left if everywhere else [node]:
            self.tell(e.Released(demand=demand, epoch=epoch, node=one, verdict=verdict))

    @rule(data=st.data(), verdict=verdicts, release=st.booleans())
    def speak_of_what_one_does_not_hold(
        self, data: st.DataObject, verdict: v.VerdictClass, release: bool
    ) -> None:
        epoch, demand, node = self.nobody(data)
        before = dict(self.state.bindings)
        if release:
            self.tell(e.Released(demand=demand, epoch=epoch, node=node, verdict=verdict))
        else:
            self.tell(e.Exited(demand=demand, epoch=epoch, node=node, verdict=verdict))
        assert self.state.bindings == before

    # -- noise ----------------------------------------------------------------------------------

    @rule(
        subject=st.sampled_from(
            ["rig.demand.p", "rig.own.bind.a", "rig.evict.a", "rig.release.b", "rig.run.c", "x"]
        ),
        body=st.one_of(
            st.binary(max_size=40),
            st.sampled_from(
                [
                    b"{}",
                    b'{"specversion":"1.0","id":"i","source":"s","type":"dev.rigbook.bound.v1","data":{}}',
                    b'{"specversion":"1.0","id":"i","source":"s","type":"dev.rigbook.bound.v9","data":{}}',
                    b'{"specversion":"1.0","id":"i","source":"s","type":"org.else","data":{}}',
                ]
            ),
        ),
    )
    def noise(self, subject: str, body: bytes) -> None:
        self.tell(Raw(subject=subject, body=body))

    @precondition(lambda self: self.state.unknown_open)
    @rule()
    def accept_the_unknown(self) -> None:
        self.tell(e.UnknownAccepted(seq=next(iter(self.state.unknown_open))))

    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.story.log))
        self.story.state = evolve(self.state, record)

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def the_audit_is_silent(self) -> None:
        assert audit_touched(self.state) == []
        assert audit(self.state) == []
        self.state.touched.clear()

    @invariant()
    def live_equals_replayed(self) -> None:
        live = digest(self.state)
        replayed = fold(State(), self.story.log)
        assert digest(replayed) == live
        assert replayed.findings == self.state.findings
        back = restore(snapshot(self.state))
        assert digest(back) == live
        assert list(back.nodes) == list(self.state.nodes)
        assert back.findings == self.state.findings
        assert digest(self.state.fork()) == live
        assert digest(fold(self.state, self.story.log)) == live

    @invariant()
    def a_fork_is_independent(self) -> None:
        live = digest(self.state)
        fork = Story(self.state.fork())
        fork.when(
            joined("f"), raised("fork"), bound("fork", card("f")), e.QuotaSet(project="p", memory_bytes=1)
        )
        assert digest(self.state) == live
        assert digest(fork.state) != live


Core.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestCore = Core.TestCase

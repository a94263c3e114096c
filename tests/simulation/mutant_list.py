"""Known mistakes. Each is one that somebody could make, or has made; the net must catch every one.

`changes` are (module, text in it, what stands there instead). A text must stand there exactly once, so that a
mutant that no longer fits is noticed and adapted, not silently lost.
"""

from __future__ import annotations

import msgspec

__all__ = ["MUTANTS", "Mutant"]


class Mutant(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    mistake: str
    changes: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...] = ()  # of the unit tier; asked when the simulation does not catch it

    @property
    def modules(self) -> frozenset[str]:
        return frozenset(module for module, _, _ in self.changes)


def _m(
    name: str,
    mistake: str,
    module: str,
    *changes: tuple[str, str] | tuple[str, str, str],
    tests: tuple[str, ...] = (),
) -> Mutant:
    """`module` is that of the changes which name none."""
    full = tuple(change if len(change) == 3 else (module, *change) for change in changes)
    return Mutant(name=name, mistake=mistake, changes=full, tests=tests)


MUTANTS: tuple[Mutant, ...] = (
    # -- the append rule -------------------------------------------------------------------------------------
    _m(
        "no-expectation",
        "a binding is appended without the position it was decided on",
        "rigbook_placer.service",
        ("expect = Expect(last_seq=state.own_position, filter=subjects.OWN_ALL)", "expect = None"),
    ),
    _m(
        "own-ack",
        "the position moves by the own acknowledgement, not by what is read back",
        "rigbook_placer.service",
        (
            "            while state.position < seq:  # read",
            "            state.own_position = seq\n            while False:  # read",
        ),
    ),
    _m(
        "wrong-position",
        "the position of the whole log is expected, where that of the decisions is meant",
        "rigbook_placer.service",
        ("Expect(last_seq=state.own_position,", "Expect(last_seq=state.position,"),
    ),
    # -- placement -------------------------------------------------------------------------------------------
    _m(
        "observed-free",
        "what a card shows as free is counted, not what is reserved on it",
        "rigbook_placer.feasible",
        (
            "    free = card.memory_bytes - card.reserved_bytes\n    if seen is not None:",
            "    free = card.memory_bytes\n    if seen is not None:",
        ),
    ),
    _m(
        "shares-exclusive",
        "a card with a binding is given to another exclusive one",
        "rigbook_placer.feasible",
        (
            "        request.mode is Mode.EXCLUSIVE or state.bindings[card.holders[0]].mode is not request.mode\n    ):\n        return False",
            "        False\n    ):\n        return False",
        ),
    ),
    _m(
        "forgets-mode",
        "the mode that the operator gave a card is not looked at",
        "rigbook_placer.feasible",
        ("    if card.mode is not None and card.mode is not request.mode:\n        return False", "    pass"),
    ),
    _m(
        "forgets-cordon",
        "a cordoned node takes bindings",
        "rigbook_placer.feasible",
        (
            "    if not node.driver_ok or node.unreachable_ns or node.cordoned is not None:",
            "    if not node.driver_ok or node.unreachable_ns:",
        ),
        (
            "rigbook_placer.arrays",
            "node.driver_ok and not node.unreachable_ns and node.cordoned is None",
            "node.driver_ok and not node.unreachable_ns",
        ),
    ),
    _m(
        "forgets-quarantine",
        "a quarantined card takes bindings",
        "rigbook_placer.feasible",
        (
            "    if not card.present or not card.usable or card.quarantined is not None or card.switching:",
            "    if not card.present or not card.usable or card.switching:",
        ),
        ("rigbook_placer.arrays", "            and card.quarantined is None\n", ""),
    ),
    _m(
        "forgets-quota",
        "a project's quota is not looked at",
        "rigbook_placer.rules",
        ("    if used + asked <= project.quota_bytes:", "    if True:"),
    ),
    _m(
        "half-a-gang",
        "a gang is bound to the nodes there are",
        "rigbook_placer.place",
        (
            "    if len(options) < request.nodes:\n        return None",
            "    if not options:\n        return None",
        ),
    ),
    _m(
        "never-told-again",
        "why something waits is told once, and not again when the reason changes",
        "rigbook_placer.place",
        ("    if signature(reasons) == signature(demand.reasons):", "    if demand.reasons:"),
    ),
    _m(
        "withdrawal-missed",
        "a withdrawn demand that holds cards is not stopped",
        "rigbook_placer.stops",
        ("    if not demand.wanted:", "    if False:"),
        tests=("tests/unit/test_placer.py",),
    ),
    # -- the fold --------------------------------------------------------------------------------------------
    _m(
        "redelivery-counts",
        "a record that was folded already is folded again",
        "rigbook_ledger.evolve",
        ("        if seq <= position:\n            continue\n", ""),
        tests=("tests/unit/test_evolve_ownership.py", "tests/unit/test_core_machine.py"),
    ),
    _m(
        "epoch-unchecked",
        "a release of another demand's epoch counts",
        "rigbook_ledger.ownership",
        ("        or binding.demand != data.demand\n        or binding.share", "        or binding.share"),
        tests=("tests/unit/test_evolve_ownership.py",),
    ),
    _m(
        "released-twice",
        "a node gives its share back twice",
        "rigbook_ledger.ownership",
        ("        or data.node in binding.released\n", ""),
        tests=("tests/unit/test_evolve_ownership.py",),
    ),
    _m(
        "stop-of-another",
        "a stop order for another demand's epoch counts",
        "rigbook_ledger.ownership",
        (
            '    if binding.demand != data.demand:\n        find(\n            state,\n            record,\n            "wrong_epoch"',
            '    if False:\n        find(\n            state,\n            record,\n            "wrong_epoch"',
        ),
        tests=("tests/unit/test_evolve_ownership.py",),
    ),
    _m(
        "gang-half-released",
        "a gang is over when its first node has released",
        "rigbook_ledger.ownership",
        ("    if len(binding.released) + 1 < len(binding.shares):", "    if False:"),
    ),
    _m(
        "stop-frees",
        "the quota is given back with the stop order, not with the release",
        "rigbook_ledger.ownership",
        (
            "        charge(state, binding.project, 0, _unreleased_bytes(binding))",
            "        charge(state, binding.project, -_unreleased_bytes(binding), 0)",
        ),
    ),
    _m(
        "withdrawn-wins",
        "a binding that raced with the withdrawal is void, while its agent starts it",
        "rigbook_ledger.ownership",
        (
            "    if demand.phase not in (_WAITING, _WITHDRAWN, _REFUSED):",
            "    if demand.phase is not _WAITING:",
        ),
    ),
    _m(
        "foreign-withdrawal",
        "anybody may withdraw anybody's demand",
        "rigbook_ledger.ownership",
        (
            '    if data.project != demand.spec.project or record.subject != f"rig.demand.{data.project}":\n        find(\n            state,\n            record,\n            "foreign_withdrawal"',
            '    if False:\n        find(\n            state,\n            record,\n            "foreign_withdrawal"',
        ),
    ),
    _m(
        "cordon-lost",
        "a node that joins again is no longer cordoned",
        "rigbook_ledger.fleet",
        ("cordoned=before.cordoned if before else None", "cordoned=None"),
    ),
    _m(
        "card-forgotten",
        "a card that leaves the inventory is forgotten, whoever holds it",
        "rigbook_ledger.steps",
        (
            "    if card.present or card.holders or card.quarantined is not None or card.mode is not None:",
            "    if card.present:",
        ),
    ),
    _m(
        "snapshot-half",
        "a snapshot does not keep the position of the last decision",
        "rigbook_ledger.state",
        (
            "    state.position, state.own_position = saved.position, saved.own_position",
            "    state.position, state.own_position = saved.position, 0",
        ),
    ),
    # -- continuity ------------------------------------------------------------------------------------------
    _m(
        "blind-start",
        "a log is taken for the one that was known without a look",
        "rigbook_ledger.continuity",
        ("    why = _difference(known, facts, there)\n", '    why = ""\n'),
    ),
    _m(
        "blind-reconnect",
        "after a reconnect it is not looked whether the log is still the same",
        "rigbook_ledger.follower",
        (
            "        if self._reconnected:\n            self._reconnected = False",
            "        if False:\n            self._reconnected = False",
        ),
        tests=("tests/simulation/test_continuity.py",),
    ),
    # -- the agent -------------------------------------------------------------------------------------------
    _m(
        "release-on-order",
        "a stop order counts as the end",
        "rigbook_nodeagent.workload",
        (
            "            if not alive:\n                return last",
            "            if not alive or self._now.stop is not None:\n                return last",
        ),
    ),
    _m(
        "cards-unlooked",
        "a share is released when the engine says so, without a look at the cards",
        "rigbook_nodeagent.workload",
        ("                await self._until_cards_free()\n", "                pass\n"),
    ),
    _m(
        "absent-is-ended",
        "an engine that does not answer counts as nothing running",
        "rigbook_nodeagent.workload",
        (
            "            if found is not None:\n                self._see(found)",
            "            found = found or []\n            if True:\n                self._see(found)",
        ),
    ),
    _m(
        "begun-twice",
        "after a restart, what had started and ended is begun again",
        "rigbook_nodeagent.orders",
        ("order, started=True, baseline=line.baseline", "order, baseline=line.baseline"),
    ),
    _m(
        "early-stop-lost",
        "a stop order that comes before its binding is thrown away",
        "rigbook_nodeagent.orders",
        ("                self._early[stop.epoch] = stop\n", "                pass\n"),
        tests=("tests/unit/test_orders.py",),
    ),
    _m(
        "closed-forgotten",
        "an order that was carried out is taken again when it is delivered again",
        "rigbook_nodeagent.orders",
        (
            "        return epoch in self.open_orders or epoch in self._closed or epoch <= self.floor",
            "        return epoch in self.open_orders",
        ),
    ),
    _m(
        "half-a-stop",
        "a stop of everything stops only each component's own group",
        "rigbook_nodeagent.workload",
        (
            "            scope = stop.scope if stop is not None else StopScope.EVERYTHING",
            "            scope = StopScope.COMPONENTS",
        ),
    ),
    _m(
        "attempts-forgotten",
        "the count of attempts begins anew with the agent",
        "rigbook_nodeagent.workload",
        ("        self._attempt = order.attempt\n", "        self._attempt = 1\n"),
    ),
    # -- the reaper ------------------------------------------------------------------------------------------
    _m(
        "one-sighting",
        "one sighting is enough to act",
        "rigbook_reaper.judge",
        (
            "            if watch.sightings >= self.rules.sightings_min and self._lasted(watch, sighting):",
            "            if watch.sightings >= 1:",
        ),
        tests=("tests/unit/test_judge.py", "tests/unit/test_judge_properties.py"),
    ),
    _m(
        "unknown-is-absent",
        "an engine or card that does not answer shows nothing, so nothing runs",
        "rigbook_ledger.drift",
        (
            "        return self.seen.components_known and wanted <= self.seen.cards_known\n\n    def _had",
            "        return True\n\n    def _had",
        ),
    ),
    _m(
        "unfenced-release",
        "a share is released by force before its agent knows that it must not start it",
        "rigbook_reaper.judge",
        (
            "        if sighting.kind is DriftKind.MISSING and sighting.fenced:\n            if watch.free >= self.rules.sightings_min:",
            "        if sighting.kind is DriftKind.MISSING:\n            if True:",
        ),
    ),
    _m(
        "mass-loss-ignored",
        "when most nodes fall silent at once, they are all called unreachable",
        "rigbook_reaper.liveness",
        (
            "    if silent and missing >= patience.mass_nodes_min and missing > expected * patience.mass_share:",
            "    if False:",
        ),
    ),
    _m(
        "never-cleared",
        "a drift that is over stays on the books",
        "rigbook_reaper.judge",
        ("        if watch.gone >= self.rules.gone_min:", "        if False:"),
    ),
    _m(
        "deaf-is-dead",
        "a node is called unreachable without asking the bus for its last heartbeat",
        "rigbook_reaper.service",
        ("            if await self._heard_by_the_bus(silent.node):\n                continue\n", ""),
        tests=("tests/unit/test_reaper_service.py",),
    ),
    _m(
        "heals-the-wanted",
        "a stop is ordered for whatever runs, wanted or not",
        "rigbook_ledger.drift",
        (
            "        stopped = demand.phase is Phase.RELEASING\n        latest_ns",
            "        stopped = True\n        latest_ns",
        ),
    ),
    _m(
        "dry-run-acts",
        "the reaper heals what the operator has not switched on",
        "rigbook_reaper.judge",
        (
            "        heal = sighting.healable and allowed and noticed",
            "        heal = sighting.healable and noticed",
        ),
        tests=("tests/unit/test_judge.py",),
    ),
)

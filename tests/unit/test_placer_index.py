"""The index gives the answer that looking at the whole fleet gives.

Safety, in words:
- whatever happens to a fleet, in whatever order, the index chooses the cards that the plain way chooses;
- what is not placed has a reason, and what is placed has none;
- what it says does not fit does not fit; what it has not looked at again had no reason to fit.

Method: random fleets, random events; after each, several asks are placed both ways.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from rigbook_placer.feasible import Kept, Seen, ask_of, feasible
from rigbook_placer.index import Index
from rigbook_placer.place import explain, place
from rigbook_placer.rules import totals_of
from rigbook_schemas import events as e
from rigbook_schemas import subjects as s
from rigbook_schemas.values import GIB, Mode

from tests.unit.placer_fleet import Fleet

asks = st.fixed_dictionaries(
    {
        "gib": st.sampled_from([1, 3, 8, 12, 24, 40, 80]),
        "count": st.sampled_from([1, 1, 1, 2, 3]),
        "nodes": st.sampled_from([1, 1, 1, 2]),
        "mode": st.sampled_from(list(Mode)),
        "model": st.sampled_from(["", "", "RTX", "a100"]),
        "headroom": st.sampled_from([1.0, 1.0, 1.25]),
        "prefer": st.sampled_from([{}, {"disk": "fast"}]),
        "require": st.sampled_from([{}, {}, {"disk": "fast"}]),
        "weights": st.sampled_from(["", "", "qwen"]),
        "placement": st.sampled_from(["", "pack", "spread", "best-fit", "fgd", "rigbook"]),
        "priority": st.sampled_from([25, 50, 80]),
    }
)
happenings = st.one_of(
    st.tuples(st.just("bind"), asks),
    st.tuples(st.just("release"), st.integers(0, 30)),
    st.tuples(st.just("cordon"), st.integers(0, 25)),
    st.tuples(st.just("uncordon"), st.integers(0, 25)),
    st.tuples(st.just("quarantine"), st.integers(0, 60)),
    st.tuples(st.just("pin"), st.integers(0, 60)),
    st.tuples(st.just("see"), st.integers(0, 60)),
    st.tuples(st.just("keep"), st.integers(0, 60)),
    st.tuples(st.just("join"), st.integers(0, 25)),
)
MODELS = [("RTX4090", 24), ("NVIDIA A100", 40), ("NVIDIA A100", 80)]


class Both:
    """A fleet, and an index that follows it."""

    def __init__(self, nodes: list[tuple[int, int]]) -> None:
        self.fleet = Fleet()
        for number, (cards, kind) in enumerate(nodes):
            self.join(number, cards, kind)
        self.fleet.state.touched.clear()
        self.seen: dict[str, Seen] = {}
        self.kept: dict[str, Kept] = {}
        self.index = Index(self.fleet.state, self.seen)
        self.asked = 0

    def join(self, number: int, cards: int, kind: int) -> None:
        model, gib = MODELS[kind % len(MODELS)]
        labels = {"disk": "fast"} if number % 3 == 0 else {}
        weights = ("qwen",) if number % 4 == 1 else ()
        self.fleet.node(f"n{number}", cards, gib=gib, model=model, labels=labels, weights=weights)

    def card(self, number: int) -> str:
        return list(self.fleet.state.cards)[number % len(self.fleet.state.cards)]

    def name(self, number: int) -> str:
        return list(self.fleet.state.nodes)[number % len(self.fleet.state.nodes)]

    def happen(self, what: str, how: object) -> None:
        fleet = self.fleet
        if what == "bind":
            assert isinstance(how, dict)
            self.place(how)
        elif what == "release":
            assert isinstance(how, int)
            held = [d for d, demand in fleet.state.demands.items() if demand.epoch]
            if held:
                fleet.release(held[how % len(held)])
        elif what in ("cordon", "uncordon"):
            assert isinstance(how, int)
            node = self.name(how)
            told = e.NodeCordoned(node=node) if what == "cordon" else e.NodeUncordoned(node=node)
            fleet.tell(s.policy("n"), told)
        elif what == "quarantine":
            assert isinstance(how, int)
            card = self.card(how)
            done = fleet.state.cards[card].quarantined is not None
            fleet.tell(s.policy("c"), e.GpuRestored(card=card) if done else e.GpuQuarantined(card=card))
        elif what == "pin":
            assert isinstance(how, int)
            mode = [None, *Mode][how % 4]
            fleet.tell(s.policy("c"), e.ModeSet(card=self.card(how), mode=mode, draining=how % 5 == 0))
        elif what == "see":
            assert isinstance(how, int)
            card = self.card(how)
            if card in self.seen:
                del self.seen[card]
            else:
                self.seen[card] = Seen(how % 3 * 10 * GIB, unknown="lost" if how % 7 == 0 else "")
            self.index.look([card])
        elif what == "keep":
            assert isinstance(how, int)
            self.kept = {} if how % 3 == 0 else {self.card(how): Kept("d-1"), self.card(how + 1): Kept("x")}
            self.index.keep(self.kept)
        else:
            assert isinstance(how, int)
            self.join(how, how % 4 + 1, how)
        touched = fleet.state.touched
        self.index.follow(touched.nodes, touched.cards, touched.bindings)
        touched.clear()

    def place(self, ask: dict[str, object]) -> None:
        """Both ways; then it is bound, if it fits."""
        self.asked += 1
        fleet = self.fleet
        spec = fleet.demand(f"d-{self.asked}", **ask)
        plain = place(fleet.state, spec, self.seen, kept=self.kept, now_ns=fleet.now_ns)
        indexed = place(
            fleet.state, spec, self.seen, kept=self.kept, now_ns=fleet.now_ns, shortlist=self.index
        )
        assert indexed == plain
        why = explain(fleet.state, spec, self.seen, kept=self.kept, now_ns=fleet.now_ns)
        assert bool(why) == (plain is None)
        assert self.index.totals == totals_of(fleet.state)
        if plain is not None:
            fleet.take(plain)


@settings(max_examples=150, deadline=None)
@given(
    nodes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=24),
    story=st.lists(happenings, max_size=40),
)
def test_the_index_chooses_what_the_plain_way_chooses(
    nodes: list[tuple[int, int]], story: list[tuple[str, object]]
) -> None:
    both = Both(nodes)
    for what, how in story:
        both.happen(what, how)


@settings(max_examples=100, deadline=None)
@given(
    nodes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=24),
    ask=asks,
    before=st.lists(happenings, max_size=20),
    after=st.lists(happenings, max_size=8),
)
def test_what_is_told_to_be_unfit_still_does_not_fit(
    nodes: list[tuple[int, int]],
    ask: dict[str, object],
    before: list[tuple[str, object]],
    after: list[tuple[str, object]],
) -> None:
    both = Both(nodes)
    for what, how in before:
        both.happen(what, how)
    spec = both.fleet.spec("asked", **ask)  # type: ignore[arg-type]
    mine = ask_of(spec)

    def fits() -> bool:
        kept = both.index._everybody
        return len(list(feasible(both.fleet.state, mine, both.seen, kept))) >= spec.resources.nodes

    if fits():
        return
    mark = both.index.gained
    for what, how in after:
        both.happen(what, how)
        if both.index.unfit(mine, mark):
            assert not fits()


def test_a_large_fleet_is_scored_all_at_once_and_equally() -> None:
    """More nodes than are looked at one by one: the arrays' own scores, several cards per node."""
    both = Both([(1 + number % 8, number) for number in range(120)])
    asks_made = 0
    for mode in Mode:
        for count in (1, 2, 3):
            for gib in (2, 10, 24, 40):
                for placement in ("pack", "spread", "best-fit", "fgd", "rigbook"):
                    for nodes in (1, 3):
                        ask: dict[str, object] = {
                            "gib": gib, "count": count, "mode": mode, "placement": placement, "nodes": nodes,
                            "prefer": {"disk": "fast"} if gib == 10 else {}, "model": "a100" if gib == 40 else "",
                        }  # fmt: skip
                        both.happen("bind", ask)
                        asks_made += 1
                        if asks_made % 7 == 0:
                            both.happen("release", asks_made)
                        if asks_made % 11 == 0:
                            both.happen("see", asks_made)
    assert len(both.fleet.state.bindings) > 60

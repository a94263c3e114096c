"""The answer to a what-if: each run in the same figures, and how far the simulator itself is from the record."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from rigbook_replay.meter import Meter, mix_of
from rigbook_replay.whatif import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rigbook_ledger.state import State
    from rigbook_schemas.events import DemandRaised
    from rigbook_schemas.wire import Record

    from rigbook_replay.lifetimes import Happening, Lifetime, Past
    from rigbook_replay.meter import Readings

__all__ = ["Answer", "Costs", "Distance", "Outcome", "RecordedRun", "Waits", "compare"]

_SECOND_NS: Final = 10**9
_LEVELS: Final = ((75, "high (75-100)"), (50, "normal (50-74)"), (0, "low (0-49)"))


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What idleness and cards cost, as far as it was told."""

    idle_watts: float | None = None  # that a server draws on which nothing is bound
    kwh_price: float | None = None
    prices: tuple[tuple[str, float], ...] = ()  # (part of a card's model, per card and hour); first match

    def of_model(self, model: str) -> float:
        return next((price for part, price in self.prices if part.lower() in model.lower()), 0.0)


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """Waiting times in seconds. Of who waits still, the time so far: at least that."""

    demands: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    max: float = 0.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run in figures, all of the window. None = this past does not tell."""

    name: str
    demands: int  # raised in the window
    bound: int  # that got cards
    waiting: int  # still, at the end
    gave_up: int
    refused: int  # that nothing in this fleet could ever hold
    waits: Waits | None
    waits_by_project: dict[str, Waits]
    waits_by_priority: dict[str, Waits]
    utilisation: float | None  # bound bytes / all bytes
    cards_held: float | None  # cards on which something is bound / all cards
    fragmentation: float | None  # of the free bytes, what a typical demand cannot use
    evictions: int
    evictions_by_reason: dict[str, int]
    reasons_waiting: dict[str, int]  # code of what kept it waiting at the end
    reasons_refused: dict[str, int]
    idle_server_hours: float | None
    idle_energy_kwh: float | None = None
    idle_energy_money: float | None = None
    money: float | None = None  # all cards, for the window
    money_idle: float | None = None  # of it, cards on which nothing was bound
    series: dict[str, list[float]] = {}  # `at` (Unix seconds), `utilisation`, `fragmentation`, `waiting`


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """How far the simulation under the recorded rules is from what was recorded: the error of the method."""

    demands: int  # that got cards in both
    wait_p50: float  # seconds by which the first waits differ
    wait_p95: float
    same_node: float | None  # share of them that got the same node first; None = the past names no nodes
    utilisation: float  # difference, as a share
    only_recorded: int  # got cards in the record and not in the simulation
    only_simulated: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one question. The stable JSON."""

    past: str
    since: str
    until: str
    changes: list[str]
    outcomes: list[
        Outcome
    ]  # recorded (where the past tells), simulated under its rules, simulated under the plan
    distance: Distance | None
    notes: list[str]


class RecordedRun:
    """The record itself under the meter: fold it with `before` and `after` around each event."""

    def __init__(self, past: Past, since_ns: int, costs: Costs) -> None:
        self.meter = _meter(past, since_ns, costs)

    def before(self, record: Record) -> None:
        self.meter.advance(record.received_ns)

    def after(self, state: State) -> None:
        self.meter.follow(state, state.touched)
        state.touched.clear()


def compare(
    past: Past,
    since_ns: int,
    happenings: Sequence[list[Happening]],
    costs: Costs,
    *,
    changes: list[str],
    recorded: RecordedRun | None,
    words: tuple[str, str],
    respec: Callable[[DemandRaised], DemandRaised] | None = None,
    told: Callable[[int, int], None] | None = None,
) -> Answer:
    """`happenings`: under the recorded rules, and under the plan (left out when nothing is changed).

    `words`: the window, RFC 3339. `respec`: a demand as the plan wants it.
    """
    outcomes: list[Outcome] = []
    if recorded is not None or past.recorded_waits:
        readings = recorded.meter.readings() if recorded is not None else None
        outcomes.append(_outcome("recorded", past, past.lifetimes, since_ns, readings, costs))
    runs: list[list[Lifetime]] = []
    for number, fate in enumerate(happenings):
        meter = _meter(past, since_ns, costs)
        asked = past
        if number and respec is not None:
            lives = [msgspec.structs.replace(life, spec=respec(life.spec)) for life in past.lifetimes]
            asked = msgspec.structs.replace(past, lifetimes=lives)
        runs.append(simulate(asked, fate, meter, told=told))
        name = "simulated, changed" if number else "simulated, same rules"
        outcomes.append(_outcome(name, past, runs[-1], since_ns, meter.readings(), costs))
    distance = None
    if outcomes[0].name == "recorded":
        distance = _distance(past, runs[0], since_ns, outcomes[0], outcomes[1])
    return Answer(
        past=past.name, since=words[0], until=words[1], changes=changes, outcomes=outcomes, distance=distance,
        notes=past.notes,
    )  # fmt: skip


def _meter(past: Past, since_ns: int, costs: Costs) -> Meter:
    price = costs.of_model if costs.prices else None
    return Meter(mix_of(life.spec for life in past.lifetimes), since_ns, past.until_ns, price)


def _outcome(
    name: str, past: Past, lives: Sequence[Lifetime], since_ns: int, readings: Readings | None, costs: Costs
) -> Outcome:
    mine = [life for life in lives if life.raised_ns >= since_ns]
    taken = Counter(why for life in lives for at, why in life.evictions if at >= since_ns)
    left = [life for life in mine if _waits_still(life)]
    judged = [life for life in mine if not life.refused]
    known = name != "recorded" or past.recorded_waits
    by_project: dict[str, list[Lifetime]] = {}
    by_priority: dict[str, list[Lifetime]] = {}
    for life in judged:
        by_project.setdefault(life.spec.project, []).append(life)
        level = next(word for least, word in _LEVELS if life.spec.priority >= least)
        by_priority.setdefault(level, []).append(life)
    waits = {p: _waits(past, some) for p, some in sorted(by_project.items())} if known else {}
    levels = (
        {word: _waits(past, by_priority[word]) for _, word in _LEVELS if word in by_priority} if known else {}
    )
    figures = readings.means if readings is not None else None
    hours = readings.hours if readings is not None else 0.0
    idle_hours = figures["servers_idle"] * hours if figures else None
    energy = (
        idle_hours * costs.idle_watts / 1000
        if idle_hours is not None and costs.idle_watts is not None
        else None
    )
    return Outcome(
        name=name,
        demands=len(mine),
        bound=sum(1 for life in mine if life.spans),
        waiting=len(left),
        gave_up=sum(1 for life in mine if life.gave_up and not life.refused),
        refused=sum(1 for life in mine if life.refused),
        waits=_waits(past, judged) if known else None,
        waits_by_project=waits,
        waits_by_priority=levels,
        utilisation=_ratio(figures, "bound_bytes", "total_bytes"),
        cards_held=_ratio(figures, "cards_held", "cards"),
        fragmentation=_ratio(figures, "fragmented_bytes", "free_bytes"),
        evictions=sum(taken.values()),
        evictions_by_reason=dict(sorted(taken.items())),
        reasons_waiting=dict(Counter(life.reason for life in left if life.reason)),
        reasons_refused=dict(Counter(life.reason for life in mine if life.refused and life.reason)),
        idle_server_hours=idle_hours,
        idle_energy_kwh=energy,
        idle_energy_money=energy * costs.kwh_price if energy is not None and costs.kwh_price is not None else None,
        money=figures["price"] * hours if figures and costs.prices else None,
        money_idle=(figures["price"] - figures["price_held"]) * hours if figures and costs.prices else None,
        series=_series(readings) if readings is not None else {},
    )  # fmt: skip


def _waits_still(life: Lifetime) -> bool:
    return not life.refused and not life.gave_up and (not life.spans or life.waits_again)


def _waits(past: Past, lives: Sequence[Lifetime]) -> Waits:
    seconds = sorted(life.wait_ns(past.until_ns) / _SECOND_NS for life in lives)
    if not seconds:
        return Waits()
    return Waits(
        demands=len(seconds), mean=sum(seconds) / len(seconds), p50=_quantile(seconds, 0.5),
        p95=_quantile(seconds, 0.95), max=seconds[-1],
    )  # fmt: skip


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def _ratio(figures: dict[str, float] | None, part: str, whole: str) -> float | None:
    if figures is None or not figures[whole]:
        return None
    return figures[part] / figures[whole]


def _series(readings: Readings) -> dict[str, list[float]]:
    def share(part: str, whole: str) -> list[float]:
        pairs = zip(readings.piece_of(part), readings.piece_of(whole), strict=True)
        return [round(a / b, 4) if b else 0.0 for a, b in pairs]

    return {
        "at": [at // _SECOND_NS for at, _ in readings.pieces],
        "utilisation": share("bound_bytes", "total_bytes"),
        "fragmentation": share("fragmented_bytes", "free_bytes"),
        "waiting": [round(value, 2) for value in readings.piece_of("waiting")],
    }


def _distance(
    past: Past, simulated: Sequence[Lifetime], since_ns: int, first: Outcome, second: Outcome
) -> Distance:
    recorded = {life.spec.demand: life for life in past.lifetimes if life.raised_ns >= since_ns}
    pairs = [(recorded[s.spec.demand], s) for s in simulated if s.spec.demand in recorded]
    both = [(r, s) for r, s in pairs if r.spans and s.spans]
    apart = sorted(abs(r.bound_ns - s.bound_ns) / _SECOND_NS for r, s in both)
    named = any(r.spans[0].nodes for r, _ in both)
    same = sum(1 for r, s in both if set(r.spans[0].nodes) == set(s.spans[0].nodes))
    return Distance(
        demands=len(both),
        wait_p50=_quantile(apart, 0.5) if apart else 0.0,
        wait_p95=_quantile(apart, 0.95) if apart else 0.0,
        same_node=same / len(both) if named else None,
        utilisation=(second.utilisation or 0.0) - first.utilisation if first.utilisation is not None else 0.0,
        only_recorded=sum(1 for r, s in pairs if r.spans and not s.spans),
        only_simulated=sum(1 for r, s in pairs if s.spans and not r.spans),
    )

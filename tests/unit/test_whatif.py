"""What-if: a simulation that follows the record exactly where nothing is changed, and the rules where something is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rigbook_ledger.audit import audit
from rigbook_replay.comparison import Answer, Costs, RecordedRun, compare
from rigbook_replay.fleetplan import BadPlan, Plan, happenings_of, new_node
from rigbook_replay.journal import Journal
from rigbook_replay.lifetimes import Gathering, Known, Lifetime, Past
from rigbook_replay.meter import PIECES, Meter, Mix, mix_of
from rigbook_replay.report import page
from rigbook_replay.whatif import Simulation, simulate
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.wire import decode
from typer.testing import CliRunner

from tests.unit import fleet_run
from tests.unit import ledger_story as s
from tests.unit.journal_story import told, write_journal

HOUR_NS = 3600 * 10**9
T0 = s.START_NS
JOURNAL = Path(__file__).parent / "golden" / "policy" / "fleet.journal"


def lives(*items: tuple[str, float, float | None], **more: object) -> list[Lifetime]:
    """(name, hour of coming, hours of holding)."""
    return [
        Lifetime(
            spec=s.raised(name, **more),
            raised_ns=T0 + int(at * HOUR_NS),
            hold_ns=None if hold is None else int(hold * HOUR_NS),
        )
        for name, at, hold in items
    ]


def past_of(
    lifetimes: list[Lifetime], *, hours: float = 24, nodes: tuple[str, ...] = ("a",), cards: int = 1
) -> Past:
    joined = [s.joined(node, cards=cards, engines=("process",)) for node in nodes]
    past = Past(
        name="test", from_ns=T0, until_ns=T0 + int(hours * HOUR_NS), lifetimes=lifetimes, happenings=[]
    )
    from rigbook_replay.lifetimes import Happening

    past.happenings = [Happening(T0, "node.joined", data) for data in joined]
    return past


def ran(past: Past, plan: Plan | None = None) -> dict[str, Lifetime]:
    meter = Meter(mix_of(life.spec for life in past.lifetimes), past.from_ns, past.until_ns)
    return {life.spec.demand: life for life in simulate(past, happenings_of(past, plan or Plan()), meter)}


def waited_hours(past: Past, plan: Plan | None = None) -> dict[str, float]:
    return {name: life.wait_ns(past.until_ns) / HOUR_NS for name, life in ran(past, plan).items()}


def answer_of(path: Path, plan: Plan, **costs: Any) -> Any:
    with Journal.open(path) as journal:
        records = [record for batch in journal.records() for record in batch]
    gathering = Gathering("journal")
    gathering.take(records)
    past = gathering.close()
    run = RecordedRun(past, past.from_ns, Costs(**costs))
    from rigbook_ledger.evolve import evolve
    from rigbook_ledger.state import State

    state = State()
    for record in records:
        run.before(record)
        state = evolve(state, record)
        run.after(state)
    fates = [happenings_of(past, Plan()), happenings_of(past, plan)]
    return compare(
        past, past.from_ns, fates, Costs(**costs), changes=plan.changes, recorded=run, words=("a", "b")
    )


# -- the simulation ---------------------------------------------------------------------------------


def test_one_card_is_a_queue() -> None:
    """Three demands for one card: each waits for those before it. Method: by hand."""
    past = past_of(lives(("one", 0, 2), ("two", 1, 2), ("three", 1.5, 1)))
    assert waited_hours(past) == {"one": 0, "two": 1, "three": 2.5}


def test_another_node_ends_the_waiting_and_one_less_makes_it() -> None:
    past = past_of(lives(("one", 0, 2), ("two", 1, 2)), nodes=("a", "b"))
    assert waited_hours(past) == {"one": 0, "two": 0}
    assert waited_hours(past, Plan(remove=("b",))) == {"one": 0, "two": 1}
    again = Plan(remove=("b",), add=(new_node("big=2xRTX 4090")[0],))
    assert waited_hours(past, again) == {"one": 0, "two": 0}
    assert ran(past, again)["two"].spans[0].nodes in (("big",), ("a",))


def test_a_quota_makes_its_project_wait_and_nobody_else() -> None:
    past = past_of([*lives(("one", 0, 2), ("two", 0.5, 1)), *lives(("other", 0.5, 1), project="q")], cards=4)
    limited = waited_hours(past, Plan(quotas={"p": s.CARD_BYTES}))
    assert limited == {"one": 0, "two": 1.5, "other": 0}


def test_a_quota_of_the_record_gives_way_to_the_one_of_the_plan() -> None:
    from rigbook_replay.lifetimes import Happening

    past = past_of(lives(("one", 0, 2), ("two", 0.5, 1)), cards=4)
    past.happenings.append(Happening(T0, "quota.set", e.QuotaSet(project="p", memory_bytes=s.CARD_BYTES)))
    assert waited_hours(past)["two"] == 1.5
    assert waited_hours(past, Plan(quotas={"p": None}))["two"] == 0


def test_who_is_preempted_goes_on_where_it_was() -> None:
    """Goal: evicted at 1 h of its 3 h, bound again when the other ends at 2 h; it ends after 2 more hours."""
    low = lives(("low", 0, 3), preemptible=True, priority=25)
    high = lives(("high", 1, 1), preempts=True, priority=80)
    past = past_of([*low, *high])
    past.stop_ns = 60 * 10**9
    there = ran(past)
    first, second = there["low"].spans
    assert there["low"].evictions == [(T0 + HOUR_NS, "preemption")]
    assert first.end_ns == there["high"].bound_ns == T0 + HOUR_NS + past.stop_ns
    held_ns = first.end_ns - first.bound_ns + second.end_ns - second.bound_ns
    assert held_ns == 3 * HOUR_NS
    assert not ran(past, Plan(preemption=False))["low"].evictions


def test_what_the_fleet_can_never_hold_is_refused_and_keeps_nobody_waiting() -> None:
    big = lives(("big", 0, 1), resources=v.Request(memory_bytes=s.CARD_BYTES, count=4))
    there = ran(past_of([*big, *lives(("one", 0, 1))]))
    assert there["big"].refused
    assert there["big"].reason == "count_short"
    assert there["one"].wait_ns(0) == 0


def test_who_holds_cards_at_the_end_of_the_record_holds_them_to_the_end() -> None:
    past = past_of(lives(("still", 0, None), ("after", 1, 1)), hours=5)
    there = ran(past)
    assert not there["still"].spans[0].end_ns
    assert there["after"].reason == "exclusive_held"
    assert waited_hours(past)["after"] == 4


def test_a_service_leaves_when_its_owner_took_it_back_however_late_it_began() -> None:
    service = lives(("svc", 0.5, None), workload=v.Workload.SERVICE)
    service[0].leaves_ns = T0 + 3 * HOUR_NS
    past = past_of([*lives(("one", 0, 2)), *service])
    span = ran(past)["svc"].spans[0]
    assert (span.bound_ns, span.end_ns) == (T0 + 2 * HOUR_NS, T0 + 3 * HOUR_NS + past.stop_ns)


def test_the_ledger_finds_nothing_amiss_and_two_runs_are_one() -> None:
    """Goal: the simulation obeys every invariant of the ledger. Method: audit after each moment of a whole run."""
    past = past_of([], nodes=())
    past.lifetimes, past.happenings = fleet_run.demands()[:150], fleet_run.fleet()
    past.from_ns, past.until_ns = fleet_run.START_NS, fleet_run.START_NS + 40 * HOUR_NS

    class Audited(Simulation):
        def _decide(self) -> None:
            super()._decide()
            assert not audit(self.state)

    def run() -> tuple[bytes, int]:
        one = Audited(past, past.happenings, Meter(Mix(), past.from_ns, past.until_ns), "pack")
        one.run()
        assert not one.state.finding_count, one.state.findings
        return one.state.chain, one.state.position

    assert run() == run()


# -- the record -------------------------------------------------------------------------------------


def test_how_long_each_demand_holds_is_taken_from_the_record(tmp_path: Path) -> None:
    story, messages = told(
        s.joined(cards=4),
        s.raised("done"), s.bound("done", s.card("a", 0)), s.exited("done"), s.released("done"),
        s.raised("still"), s.bound("still", s.card("a", 1)),
        s.raised("never", project="q"),
        s.raised("gone"), s.withdrawn("gone"),
    )  # fmt: skip
    write_journal(tmp_path / "j", messages, story)
    gathering = Gathering("j")
    gathering.take([decode(m.seq, m.subject, m.received_ns, m.body) for m in messages])
    past = gathering.close()
    there = {life.spec.demand: life for life in past.lifetimes}
    assert (there["done"].known, there["done"].hold_ns) == (Known.RECORDED, 2 * 10**9)
    assert (there["still"].known, there["still"].hold_ns) == (Known.CENSORED, None)
    assert (there["never"].known, there["never"].hold_ns) == (Known.ESTIMATED, 2 * 10**9)
    assert there["gone"].gave_up
    assert len(past.notes) == 2


@pytest.fixture(scope="module")
def answer() -> Answer:
    return answer_of(JOURNAL, Plan(policy="spread"), idle_watts=300.0, kwh_price=0.5, prices=(("", 2.0),))


def test_where_nothing_is_changed_the_simulator_gives_the_record(answer: Any) -> None:
    recorded, same, changed = answer.outcomes
    assert answer.distance.wait_p95 < 60
    assert answer.distance.same_node > 0.9
    assert recorded.utilisation == pytest.approx(same.utilisation, abs=0.01)
    assert recorded.fragmentation == pytest.approx(same.fragmentation, abs=0.02)
    assert changed.idle_server_hours < same.idle_server_hours
    assert same.idle_energy_kwh == pytest.approx(same.idle_server_hours * 0.3)
    assert same.idle_energy_money == pytest.approx(same.idle_energy_kwh * 0.5)
    assert same.money == pytest.approx(28 * 2.0 * 72, rel=0.01)
    assert 0 < same.money_idle < same.money


# -- the meter --------------------------------------------------------------------------------------


def test_the_meter_integrates_by_hand() -> None:
    """One of two cards is held for 6 of 24 hours: an eighth of the memory. Fragmentation: who asks for two gets none."""
    past = past_of(lives(("one", 0, 6)), cards=2)
    meter = Meter(
        mix_of([s.raised("x", resources=v.Request(memory_bytes=s.CARD_BYTES, count=2))]), T0, past.until_ns
    )
    simulate(past, happenings_of(past, Plan()), meter)
    means = meter.readings().means
    assert means["bound_bytes"] / means["total_bytes"] == pytest.approx(1 / 8)
    assert means["servers_idle"] == pytest.approx(18 / 24)
    assert means["fragmented_bytes"] / s.CARD_BYTES == pytest.approx(6 / 24)
    assert sum(meter.readings().piece_of("cards_held")) / PIECES == pytest.approx(1 / 4)


# -- the plan ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "word"),
    [("H100", "expected"), ("0xH100", "1 to"), ("4xH100:", "expected"), ("a b=4xH100", "expected")],
)
def test_a_server_that_is_none_is_told_so(text: str, word: str) -> None:
    with pytest.raises(BadPlan, match=word):
        new_node(text)


def test_a_plan_about_what_is_not_there_is_refused() -> None:
    past = past_of([])
    for plan, word in (
        (Plan(policy="best"), "pack"), (Plan(remove=("z",)), "no node 'z'"),
        (Plan(add=(new_node("a=1xH100")[0],)), "already"), (Plan(add=(new_node("1xNoSuchCard")[0],)), "not known"),
    ):  # fmt: skip
        with pytest.raises(BadPlan, match=word):
            happenings_of(past, plan)


# -- the command ------------------------------------------------------------------------------------


def command(*words: str) -> Any:
    from rigbook.commands.app import app_for

    return CliRunner().invoke(app_for(["whatif"]), ["whatif", *words])


def test_the_command_tells_it_as_json_and_page(tmp_path: Path) -> None:
    """(As a table: see the imports.)"""
    out = tmp_path / "report.html"
    words = ["--journal", str(JOURNAL), "--policy", "spread", "--quota", "nlp=96GB", "--add-node", "4xH100"]
    result = command(*words, "--remove-node", "f", "--json", "--html", str(out))
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert [o["name"] for o in answer["outcomes"]] == [
        "recorded",
        "simulated, same rules",
        "simulated, changed",
    ]
    assert {"waits_by_project", "utilisation", "fragmentation", "evictions", "idle_energy_kwh"} <= set(
        answer["outcomes"][0]
    )
    assert "censored" in answer["notes"][0]
    told_page = out.read_text()
    assert told_page.count("<polyline") == 9
    for part in ("http", "<script", "@import", "url(", "src=", "$"):
        assert part not in told_page, part


def test_names_in_the_page_are_text(answer: Answer) -> None:
    hostile = page(msgspec.structs.replace(answer, past="<script>$x</script>"), "now")
    assert "<script" not in hostile


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--import", "csv:x"], 2), (["--import", "sacct:x", "--journal", "y"], 2), (["--quota", "nlp"], 5),
        (["--journal", str(JOURNAL), "--policy", "best"], 5), (["--kwh-price", "1"], 2), (["--price", "x=y"], 5),
        (["--journal", str(JOURNAL), "--since", "1s ago"], 5), (["--journal", "/nowhere"], 5),
    ],
)  # fmt: skip
def test_a_wrong_word_has_a_plain_answer(words: list[str], code: int) -> None:
    from rigbook.failures import RigbookFailure

    result = command(*words)
    assert isinstance(result.exception, RigbookFailure), result.output
    assert result.exception.exit == code

"""The Python client over the in-memory bus and a real ledger.

Goal: it says and asks what it should, and every failure tells what, why and what next.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import msgspec
import pytest
from rigbook.applying import Outcome, apply_all, differences, identified
from rigbook.client import Client, Plan
from rigbook.exitcodes import Exit
from rigbook.failures import Invalid, NoAnswer, RigbookFailure, WouldConflict
from rigbook.lookup import card_named, demand_named, events_of, node_named
from rigbook_bus.memory import MemoryBus
from rigbook_bus.memory_server import MemoryServer
from rigbook_ledger.streams import agent_consumer
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.queries import Question
from rigbook_schemas.subjects import LEDGER_STREAM, query_plan

from tests.unit import ledger_story as s
from tests.unit.running_ledger import World, ledger, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[tuple[World, Client]]:
    async with world() as w, ledger(w, tmp_path):
        bus = await MemoryBus.connect(w.server, name="client-under-test")
        numbers = itertools.count(1)
        client = Client(
            bus, source="client/test", now_ns=w.clock.now_ns, new_id=lambda: f"{next(numbers):032x}"
        )
        yield w, client
        await client.close()


def spec(name: str = "chat", **more: object) -> e.DemandRaised:
    return s.raised(name, name=name, **more)


async def test_raise_ask_withdraw(here: tuple[World, Client]) -> None:
    w, client = here
    seq = await client.raise_demand(spec())
    row = await demand_named(client, "chat", position_min=seq)
    assert (row.demand, row.phase, row.wanted) == ("chat", "waiting", True)
    seq = await client.withdraw("chat", "p", by="ada", reason="enough")
    assert (await demand_named(client, "chat", position_min=seq)).phase == "withdrawn"
    events = await events_of(client, "chat", position_min=seq)
    assert [event.kind for event in events] == ["demand.raised", "demand.withdrawn"]
    assert {event.source for event in events} == {"client/test"}
    del w


async def test_pages_are_one_answer(here: tuple[World, Client]) -> None:
    w, client = here
    last = await w.tell(*[s.raised(f"d{n}", name=f"d{n}") for n in range(25)])
    rows, answer = await client.whole("demands", Question(limit=10, position_min=last))
    assert [row.demand for row in rows] == [f"d{n}" for n in range(25)]
    assert answer.position == last


async def test_names_that_mean_nothing_or_too_much(here: tuple[World, Client]) -> None:
    w, client = here
    await w.tell(s.joined("a"), s.joined("b"))
    for ask, code in (
        (demand_named(client, "nobody"), "not_found"),
        (card_named(client, "GPU-9"), "not_found"),
        (card_named(client, "0"), "ambiguous"),
        (node_named(client, "c"), "not_found"),
    ):
        with pytest.raises(RigbookFailure) as caught:
            await ask
        assert (caught.value.code, caught.value.exit) == (code, Exit.NOT_FOUND)
        assert caught.value.remedy
    assert (await card_named(client, "a/1")).uuid == s.card("a", 1)
    assert (await node_named(client, "b")).name == "b"


async def test_a_bad_question_is_a_failure_with_its_code(here: tuple[World, Client]) -> None:
    _, client = here
    with pytest.raises(RigbookFailure) as caught:
        await client.ask("events", Question(kinds=("nope",)))
    assert (caught.value.code, caught.value.exit) == ("bad_question", Exit.INVALID)


async def test_nobody_answers() -> None:
    bus = await MemoryBus.connect(MemoryServer(), name="alone")
    client = Client(bus)
    for ask in (client.ask("demands"), client.plan(spec()), client.last_seq(), client.raise_demand(spec())):
        with pytest.raises(NoAnswer) as caught:
            await ask
        assert caught.value.remedy
        assert caught.value.exit is Exit.NO_ANSWER
    await client.close()


async def test_wrong_names_never_reach_the_bus(here: tuple[World, Client]) -> None:
    _, client = here
    with pytest.raises(Invalid) as caught:
        await client.raise_demand(spec(project="a.b"))
    assert caught.value.code == "invalid_name"
    with pytest.raises(Invalid) as caught:
        await client.raise_demand(spec(components=(v.Component(command=("x" * 2_000_000,)),)))
    assert caught.value.code == "event_too_large"


# -- rules ------------------------------------------------------------------------------------------


async def test_a_rule_is_set_against_the_position_of_all_ownership(here: tuple[World, Client]) -> None:
    # Goal: two operators at once, each rule once. Method: both read the same position; the loser reads again.
    w, client = here
    await w.tell(s.joined("a"))
    rules = [e.QuotaSet(project=f"p{n}", memory_bytes=n * v.GIB, by="op") for n in range(8)]
    seqs = await asyncio.gather(*(client.set_policy(rule.project, rule) for rule in rules))
    assert len(set(seqs)) == 8
    rows = await client.rows("projects", Question(position_min=max(seqs)))
    assert {row.project: row.quota_bytes for row in rows} == {f"p{n}": n * v.GIB for n in range(8)}


async def test_a_rule_between_read_and_append_is_noticed(here: tuple[World, Client]) -> None:
    w, client = here
    await w.tell(s.joined("a"))
    original = client.bus.last
    tries = 0

    async def slow(stream: str, subject_filter: str) -> object:
        nonlocal tries
        tries += 1
        found = await original(stream, subject_filter)
        if tries == 1:
            await w.tell(e.QuotaSet(project="other", memory_bytes=None))
        return found

    client.bus.last = slow  # type: ignore[method-assign,assignment]
    await client.set_policy("a", e.NodeCordoned(node="a", by="op"))
    assert tries == 2
    assert (await node_named(client, "a")).status == "cordoned"


# -- applying ---------------------------------------------------------------------------------------


async def test_apply_is_idempotent_by_name(here: tuple[World, Client]) -> None:
    _, client = here
    ids = (f"{n:032d}"[::-1] for n in itertools.count(1))

    async def apply(one: e.DemandRaised, *, replace: bool = False) -> object:
        (done,) = await apply_all(client, [one], by="ada", replace=replace, new_id=lambda: next(ids))
        return done

    first = await apply(spec())
    assert (first.outcome, first.demand) == (Outcome.RAISED, "chat-100000")
    assert (await apply(spec())).outcome is Outcome.UNCHANGED
    other = spec(purpose="something else", resources=v.Request(memory_bytes=v.GIB, count=2))
    with pytest.raises(WouldConflict) as caught:
        await apply(other)
    assert caught.value.exit is Exit.CONFLICT
    assert "resources.count: 1 -> 2" in caught.value.why
    assert "--replace" in caught.value.remedy
    replaced = await apply(other, replace=True)
    assert (replaced.outcome, replaced.replaced) == (Outcome.REPLACED, "chat-100000")
    rows = await client.rows("demands", Question(phase="all", position_min=replaced.seq))
    assert {row.demand: row.phase for row in rows} == {"chat-100000": "withdrawn", replaced.demand: "waiting"}
    # a name belongs to its project
    assert (await apply(spec(project="q"))).outcome is Outcome.RAISED


async def test_one_conflict_and_nothing_is_sent(here: tuple[World, Client]) -> None:
    w, client = here
    await client.raise_demand(spec())
    with pytest.raises(WouldConflict):
        await apply_all(
            client, [spec("new"), spec(purpose="x")], by="a", replace=False, new_id=lambda: "0" * 32
        )
    assert await client.last_seq() == 1
    del w


def test_differences_are_named_and_secrets_are_not() -> None:
    before = spec(components=(v.Component(command=("a",), env={"TOKEN": "old-secret"}),))
    after = spec(components=(v.Component(command=("a", "b"), env={"TOKEN": "new-secret"}),))
    told = differences(before, after)
    assert told == [
        "components[0].command: ['a'] -> ['a', 'b']",
        "components[0].env.TOKEN: differs",
    ]
    assert differences(before, identified(before, "abcdef123")) == []


# -- following and planning -------------------------------------------------------------------------


async def test_follow_tells_every_event_in_order(here: tuple[World, Client]) -> None:
    w, client = here
    await w.tell(s.joined("a"))
    seen: list[str] = []

    async def follow() -> None:
        async for record in client.follow(after_seq=1, wait_seconds=1.0):
            seen.append(record.kind)
            if len(seen) == 3:
                return

    following = asyncio.create_task(follow())
    await w.tell(s.raised(), s.bound(), s.started())
    await asyncio.wait_for(following, 5)
    assert seen == ["demand.raised", "bound", "started"]


async def test_a_durable_position_is_kept_and_what_was_not_dealt_with_comes_again(
    here: tuple[World, Client],
) -> None:
    w, client = here
    await client.bus.ensure_consumer(msgspec.structs.replace(agent_consumer("x", start_seq=1), filters=()))
    await w.tell(s.joined("a"), s.raised(), s.bound())
    name = agent_consumer("x", start_seq=1).name
    first = client.follow_durable(name)
    assert [(await anext(first)).seq, (await anext(first)).seq] == [1, 2]
    await first.aclose()  # 1 was acknowledged when 2 was asked for; 2 was not
    second = client.follow_durable(name)
    async with asyncio.timeout(5):
        assert {(await anext(second)).seq, (await anext(second)).seq} == {2, 3}
    await second.aclose()
    with pytest.raises(NoAnswer):
        await anext(client.follow_durable("nobody"))


async def test_plans(here: tuple[World, Client]) -> None:
    w, client = here
    never = v.Reason(code=v.ReasonCode.CAPACITY_NEVER, horizon=v.Horizon.NEVER_BIG_ENOUGH)
    later = v.Reason(code=v.ReasonCode.EXCLUSIVE_HELD)
    answers = [
        Plan(position=7, reasons=(never,), refused=True),
        Plan(position=7, reasons=(later, never)),
        Plan(error={"code": "not_ready", "text": "still reading"}),
    ]
    stop = await w.client.serve(query_plan(), lambda *_: _said(msgspec.json.encode(answers.pop(0))))
    assert (await client.plan(spec())).never
    assert not (await client.plan(spec())).never
    with pytest.raises(RigbookFailure) as caught:
        await client.plan(spec())
    assert caught.value.code == "not_ready"
    await stop()


async def _said(body: bytes) -> bytes:
    return body


async def test_the_log_is_named_when_it_is_not_there(here: tuple[World, Client]) -> None:
    _, client = here
    assert await client.last_seq() == 0
    assert (await client.bus.stream(LEDGER_STREAM)) is not None


def test_an_address_never_shows_its_password() -> None:
    from rigbook.client import _without_secret

    assert _without_secret("nats://ada:secret@host:4222") == "nats://***@host:4222"
    assert _without_secret("nats://host:4222") == "nats://host:4222"

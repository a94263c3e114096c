"""What the ledger answers. Goal: every question of `queries.py`, in the words people use, with a page that holds still.

Method: a running ledger over the in-memory server; stories are told, then asked for as the command does.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
import pytest
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.queries import QUESTIONS

from tests.unit import ledger_story as s
from tests.unit.running_ledger import ledger, world

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests.unit.running_ledger import World

GIB = v.GIB
ALL = "2020-01-01T00:00:00Z"


@contextlib.asynccontextmanager
async def desk(tmp_path: Path) -> AsyncGenerator[World]:
    async with world() as w, ledger(w, tmp_path):
        yield w


def at(w: World) -> str:
    """This moment, as people write it."""
    return s.rfc3339(w.clock.now_ns())


async def heard(w: World, *cards: v.CardObservation, **more: object) -> None:
    """The heartbeat of node a, and the moment until it is taken."""
    before = (await w.rows("status"))[0].heartbeats_read
    beat = e.Heartbeat(node="a", incarnation="i-1", number=1, cards=cards)
    await w.beat(msgspec.structs.replace(beat, **more))
    async with asyncio.timeout(5):
        while (await w.rows("status"))[0].heartbeats_read == before:
            await asyncio.sleep(0.005)


# -- the present --------------------------------------------------------------------------------


async def test_every_question_is_answered_when_nothing_is_known(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        for what in QUESTIONS:
            answer = await w.ask(what, **({"id": "x"} if what == "demand" else {}))
            if what == "demand":
                assert answer.error is not None
                assert answer.error.code == "not_found"
            else:
                assert answer.error is None
                assert len(answer.items) == (1 if what == "status" else 0)


async def test_demands_live_by_phase_and_all(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        reason = v.Reason(code=v.ReasonCode.GPU_BUSY, node="a", index=0)
        await w.tell(
            s.joined(), s.joined("b"),
            s.raised("d1", name="chat", purpose="demo"), s.bound("d1"), s.started("d1"),
            s.raised("d2", project="q"), s.bound("d2", s.card("b"), project="q"),
            s.raised("d3"), e.Deferred(demand="d3", project="p", reasons=(reason,)),
            s.raised("d4"), s.withdrawn("d4"),
        )  # fmt: skip
        live = await w.rows("demands")
        assert [(row.demand, row.phase, row.nodes) for row in live] == [
            ("d1", "running", ("a",)),
            ("d2", "bound", ("b",)),
            ("d3", "waiting", ()),
        ]
        assert (live[0].name, live[0].owner, live[0].purpose, live[0].cards) == (
            "chat",
            "ada",
            "demo",
            (s.card("a"),),
        )
        assert live[2].reasons == (reason,)
        assert [row.demand for row in await w.rows("demands", phase="waiting")] == ["d3"]
        assert [row.demand for row in await w.rows("demands", phase="withdrawn")] == ["d4"]
        assert [row.demand for row in await w.rows("demands", phase="all")] == ["d1", "d2", "d3", "d4"]
        assert (await w.rows("demands", phase="all", newest_first=True))[0].demand == "d4"
        assert [row.demand for row in await w.rows("demands", project="q")] == ["d2"]
        assert [row.demand for row in await w.rows("demands", node="a")] == ["d1"]
        assert [row.demand for row in await w.rows("demands", card="b/0", phase="all")] == ["d2"]
        gone = (await w.rows("demand", id="d4"))[0]
        assert (gone.wanted, gone.withdrawn_by, gone.withdrawn) == (False, "ada", s.rfc3339(w.clock.now_ns()))


async def test_a_demand_is_found_by_id_beginning_and_name_live_first_then_latest(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        await w.tell(
            s.joined(),
            s.raised("abcd-1", name="chat"),
            s.bound("abcd-1"),
            s.started("abcd-1"),
            s.exited("abcd-1"),
        )
        await w.tell(s.released("abcd-1"), s.raised("abcd-2", name="chat"), s.withdrawn("abcd-2"))
        assert (await w.rows("demand", id="chat"))[0].demand == "abcd-2"
        await w.tell(s.raised("abxx-3", name="chat"))
        assert (await w.rows("demand", id="chat"))[0].demand == "abxx-3"
        await w.tell(s.raised("zz", name="other"))
        assert (await w.rows("demand", id="chat"))[0].demand == "abxx-3"
        assert (await w.rows("demand", id="abxx"))[0].demand == "abxx-3"
        ended = (await w.rows("demand", id="abcd-1"))[0]
        assert (ended.phase, ended.verdict, ended.nodes, ended.cards) == (
            "ended",
            "completed",
            ("a",),
            (s.card("a"),),
        )
        code, text = await w.failure("demand", id="abcd")
        assert code == "ambiguous"
        assert "abcd-1, abcd-2" in text
        assert (await w.failure("demand", id="nobody"))[0] == "not_found"
        assert (await w.failure("demand"))[0] == "bad_question"


async def test_a_demand_that_the_fold_forgot_is_found_in_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rigbook_ledger.steps.ENDED_MAX", 2)
    async with desk(tmp_path) as w:
        for number in range(5):
            await w.tell(s.raised(f"d{number}", name=f"name-{number}"))
            await w.tell(s.withdrawn(f"d{number}"))
            await w.rows("projects")  # folded: so many ends do not come in one batch but here
        assert (await w.rows("status"))[0].demands == {"withdrawn": 2}
        assert (await w.rows("demand", id="d0"))[0].phase == "withdrawn"
        assert (await w.rows("demand", id="name-1"))[0].demand == "d1"
        assert len(await w.rows("demands", phase="all")) == 5


async def test_bindings(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        await w.tell(s.joined(), s.raised(), s.bound("d", s.card("a", 0), s.card("a", 1)), s.evicted())
        row = (await w.rows("bindings"))[0]
        assert (row.epoch, row.demand, row.owner, row.phase, row.eviction) == (
            3,
            "d",
            "ada",
            "releasing",
            "operator",
        )
        assert row.memory_bytes == 2 * s.CARD_BYTES
        assert await w.rows("bindings", node="a", project="p", card="1") == [row]
        assert await w.rows("bindings", project="q") == []


async def test_cards_show_books_and_observation_side_by_side(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        slice_ = {"mode": v.Mode.MEMORY_SLICE, "memory_bytes": 8 * GIB}
        await w.tell(
            s.joined("a", 7),
            s.raised("d1"), s.bound("d1", s.card("a", 0), memory_bytes=20 * GIB), s.started("d1"),
            s.raised("d2"), s.bound("d2", s.card("a", 1), **slice_), s.raised("d3"), s.bound("d3", s.card("a", 1), **slice_),
            e.GpuQuarantined(card=s.card("a", 2), reason="ecc"),
            s.changed("a", [*(s.inventory("a", i) for i in range(6) if i != 3), s.inventory("a", 3, usable=False, why="lost")]),
        )  # fmt: skip
        ours = v.ProcessObservation(pid=1, memory_bytes=5 * GIB, epoch=3)
        foreign = v.ProcessObservation(pid=2, memory_bytes=10 * GIB)
        unlabelled = v.ProcessObservation(pid=3, memory_bytes=GIB)
        component = v.ComponentObservation(
            epoch=3,
            demand="d1",
            component="main",
            engine=v.Engine.PROCESS,
            ref="pid:3",
            running=True,
            pids=(3,),
        )
        await heard(
            w,
            v.CardObservation(uuid=s.card("a", 0), processes=(ours, unlabelled)),
            v.CardObservation(uuid=s.card("a", 1), processes=(foreign,)),
            v.CardObservation(uuid=s.card("a", 4), processes=None),
            v.CardObservation(uuid=s.card("a", 5), processes=(v.ProcessObservation(pid=9),)),
            components=(component,),
        )
        rows = await w.rows("cards")
        assert [(row.index, row.status, row.free_bytes // GIB, row.foreign_bytes) for row in rows] == [
            (0, "held", 0, 0),  # exclusive: nothing else fits, however little was asked
            (1, "shared", 48 - 16 - 10, 10 * GIB),
            (2, "quarantined", 48, None),
            (3, "unusable", 48, None),
            (4, "free", 48, None),  # processes unknown is not "none"
            (5, "free", 48, None),  # one without a figure: the sum is unknown
        ]
        assert rows[0].holders == ("d1",)
        assert rows[0].epochs == (3,)
        assert rows[1].mode == "memory-slice"
        assert rows[1].reserved_bytes == 16 * GIB
        assert (rows[2].why, rows[3].why) == ("ecc", "lost")
        assert rows[0].observed is not None
        assert rows[0].observed_age_seconds is not None
        await w.tell(e.NodeCordoned(node="a", reason="new driver"))
        assert [row.status for row in await w.rows("cards")][:5] == [
            "held",
            "shared",
            "quarantined",
            "unusable",
            "cordoned",
        ]
        await w.tell(e.NodeUnreachable(node="a", silent_seconds=9.0))
        assert [row.status for row in await w.rows("cards")][:4] == [
            "unreachable",
            "unreachable",
            "unreachable",
            "unusable",
        ]
        await w.tell(s.changed("a", [s.inventory("a", 1)]))
        rows = await w.rows("cards", node="a")
        assert [(row.index, row.status) for row in rows] == [(0, "absent"), (1, "shared"), (2, "absent")]


async def test_a_card_is_found_by_uuid_beginning_index_and_place(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        cards = (
            v.CardInventory(uuid="GPU-1f00aa", index=0, model="A100", memory_bytes=GIB),
            v.CardInventory(uuid="GPU-1f00bb", index=1, model="A100", memory_bytes=GIB),
        )
        await w.tell(e.NodeJoined(node="a", incarnation="i-1", cards=cards))
        for name, uuid in {
            "GPU-1f00bb": "GPU-1f00bb", "gpu-1f00b": "GPU-1f00bb", "1f00b": "GPU-1f00bb", "1": "GPU-1f00bb",
            "GPU-1": "GPU-1f00bb", "gpu1": "GPU-1f00bb", "a/1": "GPU-1f00bb", "a/GPU-1": "GPU-1f00bb", "a/0": "GPU-1f00aa",
        }.items():  # fmt: skip
            assert [row.uuid for row in await w.rows("cards", id=name)] == [uuid], name
        code, text = await w.failure("cards", id="GPU-1f00")
        assert code == "ambiguous"
        assert "a/0 (GPU-1f00aa), a/1 (GPU-1f00bb)" in text
        await w.tell(s.joined("b", 2))
        code, text = await w.failure("who", id="1")
        assert code == "ambiguous"
        assert "a/1" in text
        assert "b/1" in text
        assert [row.uuid for row in await w.rows("cards", id="1", node="b")] == [s.card("b", 1)]
        assert (await w.failure("cards", id="a/7"))[1] == "node a has no card 7; it has 0, 1"
        assert (await w.failure("cards", id="c/0"))[1] == "node 'c' has never joined; known nodes: a, b"
        assert (await w.failure("who", card="GPU-77"))[0] == "not_found"


async def test_nodes_and_projects(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        await w.tell(
            s.joined("a", 2, labels={"rack": "1"}), s.joined("b", 1, driver_ok=False, driver_text="mismatch"), s.joined("c", 1),
            s.raised(), s.bound("d", s.card("a")), e.NodeCordoned(node="c", reason="drain"),
            e.QuotaSet(project="p", memory_bytes=10 * GIB),
        )  # fmt: skip
        await heard(w, pressure=v.Pressure(load1=0.5))
        nodes = await w.rows("nodes")
        assert [(n.name, n.status, n.gpu_count, n.free_bytes // GIB, n.bindings, n.why) for n in nodes] == [
            ("a", "ready", 2, 48, 1, ""),
            ("b", "driver_mismatch", 1, 48, 0, "mismatch"),
            ("c", "cordoned", 1, 48, 0, "drain"),
        ]
        assert (nodes[0].gpu_model, nodes[0].labels, nodes[0].pressure) == (
            "RTX 4090",
            {"rack": "1"},
            v.Pressure(load1=0.5),
        )
        assert nodes[0].heard_seconds_ago is not None
        assert nodes[1].heard_seconds_ago is None
        assert [n.name for n in await w.rows("nodes", id="c")] == ["c"]
        project = (await w.rows("projects"))[0]
        assert (project.project, project.used_bytes, project.over_bytes) == (
            "p",
            s.CARD_BYTES,
            s.CARD_BYTES - 10 * GIB,
        )
        assert (await w.rows("status"))[0].nodes == {"cordoned": 1, "driver_mismatch": 1, "ready": 1}


# -- pages --------------------------------------------------------------------------------------


async def test_pages_hold_still_while_the_log_grows(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        await w.tell(
            s.joined("a", 8),
            *(s.raised(f"d{n}") for n in range(10)),
            *(s.bound(f"d{n}", s.card("a", n)) for n in range(8)),
        )
        await w.rows("events")
        for what, count, more in (
            ("demands", 10, {}), ("demands", 10, {"phase": "all"}), ("cards", 8, {}), ("bindings", 8, {}), ("events", 19, {}),
            ("who", 8, {"since": ALL}), ("events", 19, {"newest_first": True}), ("nodes", 1, {}),
        ):  # fmt: skip
            found, pages = await w.all_pages(what, limit=3, **more)
            assert len(found) == count, what
            assert pages == -(-count // 3), what
        first = await w.ask("demands", limit=4)
        await w.tell(s.withdrawn("d9"), s.raised("d10"), s.withdrawn("d8"))
        await w.rows("demands")
        second = await w.ask("demands", limit=4, cursor=first.next)
        third = await w.ask("demands", limit=4, cursor=second.next)
        assert [row["demand"] for page in (first, second, third) for row in page.items] == [
            f"d{n}" for n in (*range(8), 10)
        ]
        assert third.next == ""


async def test_a_page_fits_into_one_message(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        big = {"environment": "v" * 200_000}
        for number in range(10):
            await w.tell(s.raised(f"d{number}", labels=big, purpose="long " * 300))
        events, pages = await w.all_pages("events", position_min=10)
        assert len(events) == 10
        assert pages > 1
        assert all(row.data["labels"] == big for row in events)
        huge = e.DemandRaised(
            demand="huge", project="p", owner=v.Owner(name="ada"), resources=v.Request(memory_bytes=GIB),
            components=(v.Component(env={"X": "v" * 1_000_000}),),
        )  # fmt: skip
        await w.tell(huge)
        row = (await w.rows("events", since_seq=10))[0]
        assert row.data == {}
        assert "too many for an answer" in row.omitted


# -- bad questions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "body", "named"),
    [
        ("demands", b"not json", "malformed"),
        ("demands", b"[]", "Expected `object`"),
        ("demands", b'{"limit": 0}', "$.limit"),
        ("demands", b'{"limit": "many"}', "$.limit"),
        ("demands", b'{"phase": "sleeping"}', "phase:"),
        ("demands", b'{"cursor": "xyz"}', "cursor:"),
        ("events", b'{"cursor": "[\\"a\\"]"}', "cursor:"),
        ("events", b'{"since": "yesterday"}', "since:"),
        ("events", b'{"since_seq": -1}', "$.since_seq"),
        ("events", b"[" * 100_000, ""),
        ("who", b'{"until": "12"}', "until:"),
        ("who", b'{"at": "2026-13-01T00:00:00Z"}', "at:"),
        ("nodes", b'{"position_min": 99}', "position_min:"),
        ("unheard_of", b"{}", "no such question"),
    ],
)
async def test_a_bad_question_is_told_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, body: bytes, named: str
) -> None:
    monkeypatch.setattr("rigbook_ledger.answers.POSITION_SECONDS_MAX", 0.01)
    async with desk(tmp_path) as w:
        reply = msgspec.json.decode(await w.client.request(f"rig.query.{what}", body))
        assert reply["error"]["code"] in ("bad_question", "not_ready")
        assert named in reply["error"]["text"]
        assert len(await w.rows("status")) == 1, "and the service answers on"

"""What the ledger answers about the past. Goal: who, when and why, out of the tables, to the very moment.

Method: as in `test_answers`: a running ledger over the in-memory server; the test owns the clock.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rigbook_schemas import events as e
from rigbook_schemas import values as v

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


# -- the past -----------------------------------------------------------------------------------


async def test_who_over_time_with_a_requeue_and_a_forced_release(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        await w.tell(s.joined("a", 2), s.raised("d1", name="train", purpose="thesis"))
        before = at(w)
        await w.tell(s.bound("d1"), s.started("d1"))
        first = at(w)
        await w.tell(s.evicted("d1", requeue=True, by="placer"), s.released("d1"))
        between = at(w)
        await w.tell(s.raised("d2"), s.bound("d2"))
        second = at(w)
        await w.tell(s.withdrawn("d2"))
        stopped = at(w)
        await w.tell(s.released("d2", forced=True, by="root", text="node burnt"), s.bound("d1"))

        assert await w.rows("who", id="a/0", at=before) == []
        row = (await w.rows("who", id="a/0", at=first))[0]
        assert (row.demand, row.name, row.owner, row.purpose, row.epoch) == (
            "d1",
            "train",
            "ada",
            "thesis",
            3,
        )
        assert row.end == "evicted (operator) by placer; back in the queue"
        assert row.released == between
        assert await w.rows("who", id="a/0", at=between) == [], "at the very moment of the release it is free"
        row = (await w.rows("who", id="a/0", at=second))[0]
        assert (row.demand, row.forced, row.desired_stopped) == ("d2", True, stopped)
        assert row.end == "released by force by root: node burnt; withdrawn by ada"
        assert (await w.rows("who", id="a/0", at=stopped))[0].demand == "d2", "a stop frees nothing"

        now = await w.rows("who", id="a/0")
        assert [(row.demand, row.released) for row in now] == [("d1", "")]
        assert await w.rows("who", id="a/1") == []
        history = await w.rows("who", id="GPU-a-0", since=ALL)
        assert [row.demand for row in history] == ["d1", "d2", "d1"]
        assert [row.demand for row in await w.rows("who", since=ALL, newest_first=True)] == ["d1", "d2", "d1"]
        assert [row.demand for row in await w.rows("who", id="a/0", since=between, until=second)] == [
            "d1",
            "d2",
        ]
        assert (await w.failure("who", id="a/0", at=ALL))[0] == "before_record"
        code, text = await w.failure("who", id="a/0", at="2999-01-01T00:00:00Z")
        assert code == "bad_question"
        assert "lies ahead" in text
        assert (await w.failure("who", at="two o'clock"))[1].startswith('at: "two o\'clock"')
        assert (await w.failure("who", at="2026-11-30T02:00:00"))[0] == "bad_question", (
            "a time without a zone is two times"
        )


async def test_who_held_a_card_that_is_no_more(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        await w.tell(
            s.joined("a", 2),
            s.raised(),
            s.bound("d", s.card("a", 1)),
            s.released(),
            s.changed("a", [s.inventory("a")]),
        )
        assert [row.index for row in await w.rows("cards")] == [0]
        assert [row.demand for row in await w.rows("who", id=s.card("a", 1), since=ALL)] == ["d"]


async def test_a_binding_of_something_already_withdrawn_is_stopped_from_the_start(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        await w.tell(s.joined(), s.raised(), s.withdrawn())
        withdrawn = at(w)
        await w.tell(s.bound())
        row = (await w.rows("who"))[0]
        assert row.desired_stopped == withdrawn


async def test_a_void_binding_and_a_release_by_a_stranger_leave_no_trace(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        await w.tell(s.joined("a", 1), s.joined("b", 1), s.raised(), s.bound("d", "GPU-a-9"), s.bound("d"))
        await w.tell(s.released("d", "b"))
        assert [(row.epoch, row.released) for row in await w.rows("who", since=ALL)] == [(5, "")]


async def test_a_gang_is_released_node_by_node(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        await w.tell(
            s.joined("a", 1),
            s.joined("b", 1),
            s.raised(),
            s.bound("d", s.card("a"), s.card("b")),
            s.released("d", "b"),
        )
        assert [(row.node, bool(row.released)) for row in await w.rows("who", since=ALL)] == [
            ("a", False),
            ("b", True),
        ]
        assert [row.node for row in await w.rows("who")] == ["a"]
        events = await w.rows("events", kinds=["bound"])
        assert events[0].node == "a,b"
        assert len(await w.rows("events", node="b")) == 3


async def test_drifts_open_cleared_and_told_again(tmp_path: Path) -> None:
    def detected(drift: str, sightings: int = 2, node: str = "a") -> e.DriftDetected:
        return e.DriftDetected(
            drift=drift, kind=v.DriftKind.LEFTOVER, node=node, sentence="it still runs", card=s.card(node), demand="d",
            sightings=sightings,
        )  # fmt: skip

    def cleared(drift: str) -> e.DriftCleared:
        return e.DriftCleared(drift=drift, kind=v.DriftKind.LEFTOVER, node="a", how="healed")

    async with desk(tmp_path) as w:
        await w.tell(s.joined(), s.joined("b"), detected("x1"), detected("x1", 7), detected("y", node="b"))
        assert [(row.drift.drift, row.drift.sightings, row.seq) for row in await w.rows("drifts")] == [
            ("x1", 7, 3),
            ("y", 2, 5),
        ]
        assert [row.drifts for row in await w.rows("cards", id="a/0")] == [("x1",)]
        await w.tell(cleared("x1"), cleared("x1"), detected("x1", 3), cleared("x1"), detected("x1", 1))
        rows = await w.rows("drifts", open_only=False, node="a")
        assert [(row.seq, row.drift.sightings, bool(row.cleared), row.how) for row in rows] == [
            (3, 7, True, "healed"),
            (8, 3, True, "healed"),
            (10, 1, False, ""),
        ]
        assert [row.seq for row in await w.rows("drifts", id="x1")] == [10]
        assert [row.drift.drift for row in await w.rows("drifts", card="b/0")] == ["y"]


async def test_events_by_what_they_are_about(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        await w.tell(s.joined("a"), s.joined("b"), s.raised("d1", name="chat"), s.bound("d1"))
        middle = at(w)
        await w.tell(
            s.raised("d2", project="q"),
            s.started("d1"),
            s.released("d1"),
            s.Raw(subject="rig.demand.q", body=b"[1"),
        )

        async def seqs(**question: object) -> list[int]:
            return [row.seq for row in await w.rows("events", **question)]

        assert await seqs() == [1, 2, 3, 4, 5, 6, 7, 8]
        assert await seqs(newest_first=True, limit=2) == [8, 7]
        assert await seqs(since_seq=6) == [7, 8]
        assert await seqs(since=middle) == [4, 5, 6, 7, 8]
        assert await seqs(until=middle) == [1, 2, 3, 4]
        assert await seqs(since="2999-01-01T00:00:00Z") == []
        assert await seqs(kinds=["bound", "started"]) == [4, 6]
        assert await seqs(kinds=["malformed"]) == [8]
        assert await seqs(id="chat") == [3, 4, 6, 7]
        assert await seqs(node="b") == [2]
        assert await seqs(node="a", id="d1") == [4, 6, 7]
        assert await seqs(card="a/0") == [4, 6, 7]
        assert await seqs(project="q") == [5]
        row = (await w.rows("events", kinds=["started"]))[0]
        assert (row.subject, row.node, row.demand, row.source, row.data["epoch"]) == (
            "rig.run.a",
            "a",
            "d1",
            "test",
            4,
        )
        broken = (await w.rows("events", kinds=["malformed"]))[0]
        assert broken.malformed.startswith("malformed_envelope")
        code, text = await w.failure("events", kinds=["bind"])
        assert code == "bad_question"
        assert text.startswith("kinds: 'bind'")


async def test_findings_by_code_and_sequence(tmp_path: Path) -> None:
    async with desk(tmp_path) as w:
        await w.tell(s.joined(), s.withdrawn("x"), s.Raw(subject="rig.demand.p", body=b"{"), s.withdrawn("y"))
        assert [row.seq for row in await w.rows("findings", kinds=["unknown_demand"])] == [2, 4]
        assert [row.seq for row in await w.rows("findings", since_seq=2, newest_first=True)] == [4, 3]

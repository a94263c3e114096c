"""Whatever a Docker Engine answers, the engine says unknown with the reason, and lives.

Method: an HTTP server on a socket that answers what the test wants, in place of dockerd.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rigbook_nodeagent.engines.container_config import running_of
from rigbook_nodeagent.engines.container_story import ContainerStory
from rigbook_nodeagent.engines.docker import DockerEngine
from rigbook_nodeagent.engines.protocol import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LABELS = {
    "dev.rigbook.cluster": "c",
    "dev.rigbook.node": "a",
    "dev.rigbook.epoch": "7",
    "dev.rigbook.component": "main",
}
LISTED = {"Id": "3f2a", "State": "running", "Names": ["/x"], "Labels": LABELS}
SHOWN: dict[str, Any] = {
    "Id": "3f2a", "Image": "sha256:1", "Config": {"Labels": LABELS},
    "State": {"Status": "exited", "Running": False, "ExitCode": 0, "FinishedAt": "2026-11-30T02:00:00Z"},
}  # fmt: skip


class Answers:
    """By the first word of the path after the version: `info`, `events`, `list`, `show`."""

    def __init__(self) -> None:
        self.info: Any = {"ServerVersion": "1"}
        self.list: Any = [LISTED]
        self.show: Any = SHOWN
        self.events: list[Any] = []
        self.raw: bytes | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1].decode()
            body = self.raw if self.raw is not None else json.dumps(self._answer(path)).encode()
            if "/events" in path:
                body = b"".join(json.dumps(event).encode() + b"\n" for event in self.events)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n")
            writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            if "/events" in path:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _answer(self, path: str) -> Any:
        if "/containers/json" in path:
            return self.list
        if path.endswith("/json") or "/json?" in path:
            return self.show
        return {"ApiVersion": "1.41", **self.info} if isinstance(self.info, dict) else self.info


@pytest.fixture
async def answers() -> AsyncIterator[tuple[Answers, DockerEngine]]:
    with tempfile.TemporaryDirectory(prefix="rba-", dir="/tmp") as name:
        folder, given_ = Path(name), Answers()
        server = await asyncio.start_unix_server(given_.serve, folder / "s")
        engine = DockerEngine(folder / "engine", cluster="c", node="a", url=f"unix://{folder}/s")
        await engine.open()
        yield given_, engine
        await engine.close()
        server.close()
        await server.wait_closed()


async def test_the_answers_of_this_server_are_taken_when_they_make_sense(
    answers: tuple[Answers, DockerEngine],
) -> None:
    _, engine = answers
    (running,) = await engine.inventory()
    assert (running.epoch, running.running, running.exit_code) == (7, False, 0)
    assert (await engine.containers())["3f2a"].name == "x"


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("list", {"message": "no"}), ("list", [1]), ("list", [{}]), ("list", [None]), ("list", "text"),
        ("show", {}), ("show", {"Id": 1}), ("show", {**SHOWN, "State": None}), ("show", {**SHOWN, "Config": []}),
        ("show", {**SHOWN, "Config": {"Labels": {**LABELS, "dev.rigbook.epoch": "٣"}}}),
        ("show", {**SHOWN, "State": {"Status": "running", "Running": True, "Pid": "x"}}), ("show", []), ("show", "text"),
        ("raw", b""), ("raw", b"{"), ("raw", b"\xff\xfe"), ("raw", b"<html>"),
    ],
)  # fmt: skip
async def test_an_answer_that_makes_no_sense_is_unknown(
    answers: tuple[Answers, DockerEngine], what: str, value: Any
) -> None:
    given_, engine = answers
    setattr(given_, what, value)
    for question in (engine.inventory, engine.containers, lambda: engine.inspect(7, "main")):
        with contextlib.suppress(EngineError):
            await question()
    given_.list, given_.show, given_.raw = [LISTED], SHOWN, None
    assert len(await engine.inventory()) == 1, "it lives, and the next answer counts"


async def test_events_that_make_no_sense_end_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="rba-", dir="/tmp") as name:
        folder, given_ = Path(name), Answers()
        good = {"Action": "die", "Actor": {"ID": "3f2a", "Attributes": LABELS}}
        given_.events = [
            {"Action": "die", "Actor": 1}, {"Action": "kill", "Actor": {"Attributes": 5}}, {},
            {"Action": "die", "Actor": {"ID": "3f2a", "Attributes": {**LABELS, "dev.rigbook.epoch": ""}}}, good,
        ]  # fmt: skip
        server = await asyncio.start_unix_server(given_.serve, folder / "s")
        engine = DockerEngine(folder / "engine", cluster="c", node="a", url=f"unix://{folder}/s")
        await engine.open()
        hint = await asyncio.wait_for(anext(engine.ends()), 10)
        assert (hint.epoch, hint.ref) == (7, "3f2a")
        await engine.close()
        server.close()
        await server.wait_closed()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.fixed_dictionaries(
        {}, optional={"State": JSON, "Config": JSON, "NetworkSettings": JSON, "Image": JSON, "Id": JSON}
    )
)
def test_an_inspection_of_anything_is_read_or_refused_in_known_ways(odd: dict[str, Any]) -> None:
    try:
        running_of({**SHOWN, **odd}, pids=(), stopped_by_us=False)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON, JSON)
def test_the_story_of_a_container_survives_any_note(tmp_path: Path, note: Any, shown: Any) -> None:
    story = ContainerStory(tmp_path, boot_ns=0)
    story.open()
    (tmp_path / "starts" / "x").write_text(json.dumps(note))
    told, changed = story.replaced("x", {"Id": "1", "Image": shown})
    assert isinstance(told, str)
    assert isinstance(changed, bool)

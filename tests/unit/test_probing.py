"""Startup and liveness of a share, on virtual time: what is told, and when it is ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from rigbook_nodeagent.circumstances import ProbeFailure
from rigbook_nodeagent.probes import Target, probe_once
from rigbook_nodeagent.probing import Probing, ends_it
from rigbook_schemas.values import Component, Probe, Restart

from tests.unit.virtual_time import VirtualClock, run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable


class Probed:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.failure: ProbeFailure | None = None
        self.unknown = ""

    async def target(self, component: Component) -> Target:
        return Target(unknown=self.unknown)

    async def became_ready(self, seconds: float) -> None:
        self.told.append("ready")

    async def became_unready(self, component: str, why: str) -> None:
        self.told.append(f"unready {component}: {why}")

    def noted(self, what: str, value: str) -> None:
        self.told.append(f"{what}: {value}")

    def failed(self, failure: ProbeFailure) -> None:
        self.failure = failure


def probing(
    probed: Probed,
    components: list[Component],
    ask: Callable[[Probe], str],
    *,
    restart: Restart,
    seconds: float,
) -> None:
    async def asked(probe: Probe, _target: Target) -> str:
        return ask(probe)

    async def go() -> None:
        run = Probing(probed, components, restart=restart, attempt=1, clock=VirtualClock(), ask=asked)
        body = asyncio.create_task(run.run())
        await asyncio.sleep(seconds)
        body.cancel()
        await asyncio.gather(body, return_exceptions=True)

    run_virtual(go())


ALWAYS = Restart(policy="always")
PROBE = Probe(kind="tcp", port=1, every_seconds=10, startup_seconds_max=60, failures_max=3)


def test_a_startup_that_takes_too_long_ends_it_once() -> None:
    """Case 22."""
    probed = Probed()
    probing(probed, [Component(probe=PROBE)], lambda _: "refused", restart=ALWAYS, seconds=300)
    assert probed.failure is not None
    assert (probed.failure.kind, probed.failure.component) == ("startup", "main")
    assert 60 <= probed.failure.seconds < 62


def test_failures_before_the_first_yes_count_for_nothing() -> None:
    probed, answers = Probed(), ["no"] * 20 + [""] * 1000
    probing(probed, [Component(probe=PROBE)], lambda _: answers.pop(0), restart=ALWAYS, seconds=55)
    assert (probed.told, probed.failure) == (["ready"], None)


def test_three_failures_in_a_row_end_it_and_two_do_not() -> None:
    probed, answers = Probed(), ["", "no", "no", "", "no", "no", "no"]
    probing(
        probed,
        [Component(probe=PROBE)],
        lambda _: answers.pop(0) if answers else "no",
        restart=ALWAYS,
        seconds=300,
    )
    assert probed.failure is not None
    assert (probed.failure.kind, probed.failure.failures) == ("liveness", 3)
    assert probed.told[0] == "ready"
    assert probed.told[-1] == "unready main: no"


def test_an_own_startup_probe_is_asked_at_its_own_pace_and_then_no_more() -> None:
    startup = Probe(kind="exec", command=("x",), every_seconds=20, startup_seconds_max=600)
    asked: list[str] = []

    def ask(probe: Probe) -> str:
        asked.append(probe.kind)
        return "no" if len(asked) < 4 else ""

    probed = Probed()
    probing(probed, [Component(probe=PROBE, startup=startup)], ask, restart=ALWAYS, seconds=95)
    assert asked[:4] == ["exec"] * 4
    assert set(asked[4:]) == {"tcp"}
    assert probed.told == ["ready"]


def test_the_share_is_ready_when_all_its_components_are() -> None:
    slow = Probe(kind="exec", command=("x",), every_seconds=1, startup_seconds_max=600)
    count = 0

    def ask(probe: Probe) -> str:
        nonlocal count
        count += probe.kind == "exec"
        return "no" if probe.kind == "exec" and count < 30 else ""

    probed = Probed()
    components = [Component(name="a", probe=PROBE), Component(name="b", probe=slow), Component(name="c")]
    probing(probed, components, ask, restart=ALWAYS, seconds=20)
    assert probed.told == []
    count = 100
    probing(probed, components, ask, restart=ALWAYS, seconds=20)
    assert probed.told == ["ready"]


def test_where_it_cannot_be_asked_the_reason_is_the_answer() -> None:
    probed = Probed()
    probed.unknown = "the engine does not answer"
    probing(probed, [Component(probe=PROBE)], lambda _: "", restart=Restart(), seconds=120)
    assert "ready" not in probed.told
    assert any("the engine does not answer" in line for line in probed.told)
    assert probed.failure is None, "no restart policy: only told"


@pytest.mark.parametrize(
    ("on_failure", "policy", "attempt", "expected"),
    [
        ("restart", "never", 1, False),
        ("restart", "on-failure", 1, True),
        ("restart", "on-failure", 4, False),
        ("report", "always", 1, False),
        ("stop", "never", 1, True),
    ],
)
def test_what_a_failure_does(on_failure: str, policy: str, attempt: int, *, expected: bool) -> None:
    assert ends_it(Probe(on_failure=on_failure), Restart(policy=policy), attempt=attempt) is expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n", ""), (b"HTTP/1.1 302 Found\r\n\r\n", ""), (b"HTTP/1.0 503 no\r\n", "HTTP 503"),
        (b"hello", "not an HTTP answer"), (b"", "not an HTTP answer"), (b"\xff\xfe \xff\r\n", "HTTP"),
        (b"x" * 100_000, "line"),
    ],
)  # fmt: skip
async def test_whatever_answers_the_probe_lives(answer: bytes, expected: str) -> None:
    async def serve(reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    why = await probe_once(Probe(kind="http", port=port, timeout_seconds=2), Target())
    server.close()
    await server.wait_closed()
    if answer.startswith(b"HTTP/1.0 200") or b"302" in answer:
        assert why == ""
    else:
        assert why

"""The loop of a simulated world: time jumps, order is drawn, a killed process does nothing more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.simulation.loop import Process, SimLoop, Stuck

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from typing import Any


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    made = SimLoop(1)
    yield made
    made.end()


def run(loop: SimLoop, body: Coroutine[Any, Any, None]) -> None:
    loop.run_until_complete(body)


def test_hours_pass_at_once(loop: SimLoop) -> None:
    run(loop, asyncio.sleep(7200))
    assert loop.time() == 7200


def test_the_order_of_what_is_ready_is_the_seeds() -> None:
    def order(seed: int) -> str:
        loop = SimLoop(seed)
        seen: list[str] = []

        async def body() -> None:
            for letter in "abcdefgh":
                loop.call_soon(seen.append, letter)
            await asyncio.sleep(1)

        run(loop, body())
        loop.end()
        return "".join(seen)

    orders = {order(seed) for seed in range(20)}
    assert len(orders) > 15
    assert all(sorted(one) == list("abcdefgh") for one in orders)
    assert order(3) == order(3)


def _counting(seen: list[str]) -> Callable[[], Coroutine[Any, Any, None]]:
    async def body() -> None:
        try:
            while True:
                seen.append("step")
                await asyncio.sleep(1)
        finally:
            seen.append("finally")

    return body


def test_a_killed_process_puts_nothing_in_order(loop: SimLoop) -> None:
    seen: list[str] = []
    process = Process("victim", loop)

    async def body() -> None:
        process.spawn(_counting(seen)())
        await asyncio.sleep(2.5)
        process.dead = True
        await asyncio.sleep(10)

    run(loop, body())
    assert seen == ["step"] * 3


def test_a_process_dies_between_two_given_steps(loop: SimLoop) -> None:
    seen: list[str] = []
    process = Process("victim", loop)

    def die() -> None:
        process.dead = True

    async def body() -> None:
        process.at_fuse, process.fuse = die, 5
        process.spawn(_counting(seen)())
        await asyncio.sleep(20)

    run(loop, body())
    assert 0 < len(seen) < 5


def test_a_stopped_process_goes_on_later(loop: SimLoop) -> None:
    seen: list[str] = []
    process = Process("sleeper", loop)

    async def body() -> None:
        process.spawn(_counting(seen)())
        await asyncio.sleep(0.5)
        process.stopped = True
        await asyncio.sleep(10)
        assert seen == ["step"]
        process.go_on()
        await asyncio.sleep(0.5)

    run(loop, body())
    assert seen == ["step", "step"]


def test_a_world_in_which_nothing_can_happen_is_an_error(loop: SimLoop) -> None:
    async def for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match="nothing will ever happen"):
        run(loop, for_ever())


def test_a_world_in_which_time_stands_still_is_an_error(loop: SimLoop) -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match="time does not pass"):
        run(loop, spin())

"""What the engine tests share: launches, waiting for what is seen, and a private Docker Engine."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rigbook_nodeagent.engines.protocol import Launch
from rigbook_schemas.values import Component

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rigbook_nodeagent.engines.protocol import Engines, Running

CARD = "GPU-0f4c0d2e-1111-5222-8333-444455556666"
PATIENCE_SECONDS = 10.0


def launch(
    *command: str,
    epoch: int = 100,
    component: str = "main",
    cluster: str = "test",
    node: str = "node-a",
    cards: tuple[str, ...] = (CARD,),
    environment: dict[str, str] | None = None,
    **fields: object,
) -> Launch:
    return Launch(
        cluster=cluster,
        node=node,
        demand=f"demand-{epoch}",
        epoch=epoch,
        project="vision",
        owner="wei",
        component=Component(name=component, command=command, **fields),  # type: ignore[arg-type]
        cards=cards,
        indices=tuple(range(len(cards))),
        memory_bytes=8 * 1024**3,
        card_memory_bytes=24 * 1024**3,
        environment=environment or {},
    )


async def eventually(question: Callable[[], Awaitable[object]], *, seconds: float = PATIENCE_SECONDS) -> None:
    """Ask until the answer is true; the engine tests look at real processes, which take their time."""
    deadline = time.monotonic() + seconds
    while not await question():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def until_ended(engine: Engines, running: Running) -> Running:
    """The component as inspected after its end."""
    seen: list[Running] = []

    async def ended() -> bool:
        now = await engine.inspect(running.epoch, running.component)
        assert now is not None
        seen.append(now)
        return not now.running

    await eventually(ended)
    return seen[-1]


def alive(pid: int) -> bool:
    """Does it run? A zombie does not."""
    try:
        state = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()[0]
        )
    except OSError:
        return False
    return state not in "ZX"


async def output_of(engine: Engines, running: Running) -> str:
    return b"".join([line async for line in engine.logs(running, follow=False, lines_max=1000)]).decode()


async def reap_everything(engine: Engines) -> None:
    """Leave nothing behind, whatever a test did."""
    from rigbook_schemas.values import StopScope

    for running in await engine.inventory():
        await engine.stop(running, grace_seconds=0, scope=StopScope.EVERYTHING)
        await engine.remove(running)


def as_root() -> bool:
    return os.geteuid() == 0

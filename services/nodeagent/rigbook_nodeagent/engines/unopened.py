"""An engine that could not be opened yet: what it runs is unknown, which is not the same as nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rigbook_nodeagent.engines.protocol import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from rigbook_schemas.values import Engine, StopScope

    from rigbook_nodeagent.engines.protocol import Ended, Launch, Running
    from rigbook_nodeagent.strangers import Container

__all__ = ["Unopened"]

NO_HINTS: tuple[Ended, ...] = ()


class Unopened:
    """Stands in for an engine until it opens. Containers of an earlier run may live behind it."""

    def __init__(self, kind: Engine, why: str) -> None:
        self.kind = kind
        self.facts = f"not open: {why}"

    def _unknown(self) -> EngineError:
        return EngineError(self.facts)

    async def open(self) -> None:
        raise self._unknown()

    async def start(self, launch: Launch) -> Running:
        raise self._unknown()

    async def stop(self, running: Running, *, grace_seconds: float, scope: StopScope) -> None:
        raise self._unknown()

    async def signal(self, running: Running, name: str) -> None:
        raise self._unknown()

    async def execute(self, running: Running, command: tuple[str, ...]) -> int:
        raise self._unknown()

    async def inventory(self) -> Sequence[Running]:
        raise self._unknown()

    async def containers(self) -> Mapping[str, Container]:
        raise self._unknown()

    async def inspect(self, epoch: int, component: str) -> Running | None:
        raise self._unknown()

    async def remove(self, running: Running) -> None:
        raise self._unknown()

    async def ends(self) -> AsyncIterator[Ended]:
        await asyncio.Event().wait()
        for hint in NO_HINTS:
            yield hint

    async def logs(self, running: Running, *, follow: bool, lines_max: int) -> AsyncIterator[bytes]:
        if self.kind:
            raise self._unknown()
        yield b""

    async def close(self) -> None:
        return

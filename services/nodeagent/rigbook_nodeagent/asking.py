"""Asks the components of a share to save before a preemption or a drain takes their cards.

Those that use a card, or say how they save, are asked side by side; what each answers is told as it comes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

import structlog
from rigbook_schemas import subjects
from rigbook_schemas.events import EvictionAnswered

from rigbook_nodeagent.checkpoints import checkpoint_of, save
from rigbook_nodeagent.engines.protocol import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_schemas.values import Component

    from rigbook_nodeagent.checkpoints import Saving
    from rigbook_nodeagent.engines.protocol import Running
    from rigbook_nodeagent.orders import Order, Stop
    from rigbook_nodeagent.probes import Target
    from rigbook_nodeagent.workload import Surroundings

__all__ = ["Asked", "Asking"]

ENGINE_RETRY_SECONDS: Final = 1.0


class Asked(Protocol):
    """The workload that is asked."""

    @property
    def order(self) -> Order:
        """As the book has it now."""
        ...

    async def target(self, component: Component) -> Target: ...

    def noted(self, what: str, value: str) -> None: ...


class Asking:
    """Of one share. An order is asked for once; what came of it stays."""

    def __init__(self, surroundings: Surroundings, epoch: int, asked: Asked) -> None:
        self._s = surroundings
        self._epoch = epoch
        self._asked = asked
        self._asked_for = 0  # sequence of the order
        self._saved = False
        self._log = structlog.get_logger().bind(epoch=epoch, node=surroundings.node)

    async def may_stop(self, stop: Stop, alive: Sequence[Running]) -> bool:
        """Once all that were asked have saved; else never by this order, unless it insists."""
        if self._asked_for == stop.seq:
            return self._saved
        declared = {c.name: c for c in self._asked.order.share.components}
        asked = [
            r
            for r in alive
            if r.running
            and (c := declared.get(r.component)) is not None
            and (c.gpu or c.checkpoint is not None)
        ]
        results = await asyncio.gather(*(self._ask(stop, r, declared[r.component]) for r in asked))
        if self._overtaken(stop):
            return False  # another order has come: looked at anew
        self._asked_for = stop.seq
        self._saved = stop.insist or all(s is not None and s.saved for s in results)
        if not self._saved:
            self._log.warning("asked to save, without an answer; it is not killed", reason=stop.reason)
        return self._saved

    def _overtaken(self, stop: Stop) -> bool:
        latest = self._asked.order.stop
        return latest is None or latest.seq != stop.seq

    async def _ask(self, stop: Stop, running: Running, component: Component) -> Saving | None:
        engine = self._s.engines[running.engine]
        while not self._overtaken(stop):
            try:
                return await save(
                    engine, running, checkpoint_of(component, grace_seconds=stop.grace_seconds),
                    clock=self._s.clock, look=lambda: engine.inspect(self._epoch, running.component),
                    target=lambda: self._asked.target(component), given_up=lambda: self._overtaken(stop),
                    told=lambda saving: self._tell(stop, saving),
                )  # fmt: skip
            except EngineError as error:
                self._log.warning("cannot ask to save; will try again", why=str(error))
                await self._s.clock.sleep(ENGINE_RETRY_SECONDS)
        return None

    async def _tell(self, stop: Stop, saving: Saving) -> None:
        order = self._asked.order
        self._asked.noted("asked to save", f"{saving.component}: {saving.answer} ({saving.text})")
        data = EvictionAnswered(
            demand=order.demand, epoch=self._epoch, node=self._s.node, component=saving.component,
            answer=saving.answer, seconds=saving.seconds, text=saving.text,
        )  # fmt: skip
        message_id = f"answered-{self._epoch}-{self._s.node}-{stop.seq}-{saving.component}-{saving.answer}"
        await self._s.publish(
            subjects.run(self._s.node), data, message_id=message_id, order=order, cause=stop.event_id
        )

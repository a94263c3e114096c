"""Carrying a recovery out: what the plan says, in its order, and the operator's word last.

Every append expects the end of the log to be where the plan left it. When somebody else wrote meanwhile
(a client that knows of nothing), it stops there: nothing is decided by anybody yet, so the whole is
looked at anew and begun again.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Final

from rigbook_bus.protocol import BusConflict, BusError, Expect
from rigbook_ledger.streams import ensure_streams
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas.wire import Draft, decode, encode, rfc3339

from rigbook.failures import Failed, WouldConflict, of_bus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rigbook.client import Client
    from rigbook.recovery.plan import Plan
    from rigbook.recovery.survey import Survey

__all__ = ["carry_out"]

# Every subject of the ledger stream: the whole log has to stand still, not only decisions.
ALL: Final = "rig.>"
WINDOW: Final = 128
JOIN_SECONDS: Final = 15.0


async def carry_out(
    client: Client,
    found: Survey,
    plan: Plan,
    *,
    by: str,
    reason: str,
    now_ns: Callable[[], int],
    replicas: int,
    told: Callable[[str], None],
) -> int:
    """The sequence of `log.recovered`. Raises WouldConflict (begin again), Failed, NoAnswer."""
    assert plan.how, "there is something to recover"
    assert not plan.refusals, plan.refusals
    work = _Work(client, found, plan, by=by, now_ns=now_ns)
    try:
        facts = found.facts or await ensure_streams(client.bus, replicas=replicas)
        if plan.copy:
            told(f"appending {len(plan.copy)} events of the second copy again")
            await work.append_copy()
        if plan.how == "adopted" or plan.said or plan.join or plan.skip_to > work.last:
            # At least one: from here on everybody who follows this log waits for the recovery's end.
            end = max(plan.skip_to, work.last + 1)
            told(f"skipping the sequences {work.last + 1} to {end}; nobody decides until this is over")
            await work.skip(end)
        for node in plan.join:
            told(f"asking the agent of {node} to tell its inventory")
            await work.join(node)
        for said in plan.said:
            told(said.why)
            await work.say(said.subject, said.data)
        lost = plan.lost
        return await work.say(
            subjects.policy(subjects.RECOVERY),
            e.LogRecovered(
                generation=plan.generation,
                stream_created=str(facts.created_ns),
                how=plan.how,
                before_created=found.status.stream_created_ns if found.status is not None else "",
                common_position=found.common,
                lost_position=found.known_position,
                lost_events=lost.events if lost is not None else 0,
                lost_kinds=lost.kinds if lost is not None else {},
                adopted=plan.adopted,
                released=plan.released,
                silent=plan.silent,
                by=by,
                reason=reason,
            ),
        )
    except BusConflict as error:
        raise WouldConflict(
            "somebody wrote on the log meanwhile",
            why=str(error),
            remedy="nothing is lost by it: run `rigbook recover` again",
            code="log_moved",
        ) from error
    except BusError as error:
        raise of_bus(error, "recovering the log") from error


class _Work:
    def __init__(
        self, client: Client, found: Survey, plan: Plan, *, by: str, now_ns: Callable[[], int]
    ) -> None:
        self._client = client
        self._plan = plan
        self._by = by
        self._now_ns = now_ns
        self._number = 0
        self.last = found.facts.last_seq if found.facts is not None else 0

    async def append_copy(self) -> None:
        """Byte for byte, each at its own sequence."""
        rows = self._plan.copy
        for at in range(0, len(rows), WINDOW):
            batch: list[tuple[str, bytes, str]] = []
            for row in rows[at : at + WINDOW]:
                body = zlib.decompress(row.body)
                event = decode(row.seq, row.subject, row.received_ns, body).id
                # the id it had: the server drops what it has already, and we would notice
                batch.append((row.subject, body, event or f"copy-{self._plan.generation}-{row.seq}"))
            await self._append(batch)

    async def skip(self, end: int) -> None:
        data = e.SequenceSkipped(generation=self._plan.generation, by=self._by)
        while self.last < end:
            count = min(WINDOW, end - self.last)
            await self._append(
                [self._drafted(subjects.policy(subjects.RECOVERY), data) for _ in range(count)]
            )

    async def join(self, node: str) -> None:
        """The inventory is the agent's to tell; wait until it stands on the log."""
        try:
            await self._client.bus.request(
                subjects.agent_query(node, "join"), b"{}", timeout_seconds=JOIN_SECONDS
            )
        except BusError as error:
            raise Failed(
                f"the agent of {node} does not tell its inventory",
                why=str(error),
                remedy="see its log, then run `rigbook recover` again",
                code="agent_silent",
            ) from error
        facts = await self._client.bus.stream(subjects.LEDGER_STREAM)
        assert facts is not None
        self.last = facts.last_seq

    async def say(self, subject: str, data: e.Payload) -> int:
        await self._append([self._drafted(subject, data)])
        return self.last

    def _drafted(self, subject: str, data: e.Payload) -> tuple[str, bytes, str]:
        self._number += 1
        now = self._now_ns()
        draft = Draft(
            data=data,
            id=f"recovery-{self._plan.generation}-{now}-{self._number}",
            source=self._client.source,
            time=rfc3339(now),
        )
        return subject, encode(draft), draft.id

    async def _append(self, batch: Sequence[tuple[str, bytes, str]]) -> None:
        """In order, each behind the one before: the first that fails makes all after it fail."""
        begin = self.last
        done = await asyncio.gather(
            *(
                self._client.bus.append(
                    subject, body, message_id=mid, expect=Expect(last_seq=begin + i, filter=ALL)
                )
                for i, (subject, body, mid) in enumerate(batch)
            ),
            return_exceptions=True,
        )
        for i, one in enumerate(done):
            if isinstance(one, BaseException):
                raise one
            if one.seq != begin + i + 1 or one.duplicate:
                raise BusConflict(f"event {begin + i + 1} was stored as {one.seq}")
            self.last = one.seq

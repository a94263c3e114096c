"""A decider that is quicker than its tail: the log may be another one after a reconnect, and nothing may be appended
to it before that was looked at. Found by the simulation (seed 329).
"""

from __future__ import annotations

import pytest
from rigbook_bus.memory import MemoryBus, MemoryServer
from rigbook_ledger.continuity import LogDiscontinued
from rigbook_ledger.follower import Follower
from rigbook_ledger.streams import ensure_streams
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas.wire import Draft, encode


async def told(bus: MemoryBus, name: str) -> None:
    data = e.QuotaSet(project=name, memory_bytes=1)
    draft = Draft(data=data, id=f"quota-{name}", source="test", time="2026-01-01T00:00:00Z")
    await bus.append(subjects.policy("quota"), encode(draft), message_id=draft.id)


@pytest.mark.parametrize("lost", ["its end", "all"])
async def test_after_a_reconnect_nothing_is_decided_before_the_log_was_looked_at(lost: str) -> None:
    server = MemoryServer()
    bus = await MemoryBus.connect(server, name="test")
    await ensure_streams(bus)
    for name in ("a", "b", "c"):
        await told(bus, name)
    follower = Follower(bus)
    await follower.open()
    while follower.state.position < 3:
        await follower.batch(wait_seconds=1.0)
    await follower.assure()
    if lost == "all":
        server.recreate(subjects.LEDGER_STREAM)
    else:
        server.truncate(subjects.LEDGER_STREAM, 2)
    with pytest.raises(LogDiscontinued):
        await follower.assure()
    await bus.close()

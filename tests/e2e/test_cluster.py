"""A cluster of three (R3): a member killed, a member cut off. Goal: the side without a majority records nothing and
nothing is bound there, the others go on, and when all are together again there was no double binding.

Method: three nats-servers in network namespaces; two placers, one of them at the member that is cut off; the member is
the leader of the ledger stream each time, which is the worst case.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import pytest
from rigbook_bus.jetstream import JetStreamBus
from rigbook_bus.protocol import BusError, BusUnavailable, BusUnknown
from rigbook_ledger.audit import audit_touched
from rigbook_ledger.digest import digest
from rigbook_ledger.evolve import evolve
from rigbook_ledger.state import Phase, State
from rigbook_ledger.streams import ensure_streams
from rigbook_schemas import subjects
from rigbook_schemas.wire import decode

from tests.e2e.cell import ProcessCell
from tests.e2e.cluster import Cluster
from tests.e2e.network import Network, why_no_network
from tests.e2e.test_kills import ledger_digest, replay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

WANTED = bool(os.environ.get("RIGBOOK_CI") or os.environ.get("RIGBOOK_FAULTS"))
pytestmark = [
    pytest.mark.nats,
    pytest.mark.slow,
    pytest.mark.skipif(not WANTED, reason="takes 45 s: RIGBOOK_FAULTS=1 (or RIGBOOK_CI=1) runs it"),
    pytest.mark.skipif(bool(why_no_network()), reason=why_no_network()),
]

CUT_SECONDS = 12.0


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Network]]:
    with Network(3) as network:
        cluster = Cluster(tmp_path, network)
        try:
            await cluster.open()
            yield cluster, network
        finally:
            cluster.close()


async def log_at(url: str, up_to: int) -> list[tuple[int, str]]:
    """(sequence, event id) as one server tells it; every position audited."""
    bus = await JetStreamBus.connect(url, name="reader")
    tail = await bus.tail(subjects.LEDGER_STREAM, start_seq=1)
    state, found = State(), []
    async with asyncio.timeout(30):
        while state.position < up_to:
            for m in await tail.batch(max_messages=1000, wait_seconds=5.0):
                record = decode(m.seq, m.subject, m.received_ns, m.body)
                state = evolve(state, record)
                assert audit_touched(state) == [], f"at {m.seq}"
                state.touched.clear()
                found.append((m.seq, record.id))
    await tail.close()
    await bus.close()
    return found


async def test_a_member_is_killed_and_a_member_is_cut_off(
    tmp_path: Path, cluster: tuple[Cluster, Network]
) -> None:
    servers, network = cluster
    first = await JetStreamBus.connect(servers.url(1), name="first")
    async with asyncio.timeout(30):
        while True:
            try:
                await ensure_streams(first, replicas=3)
                break
            except BusError:
                await asyncio.sleep(0.2)
    out = await servers.leader(first)  # the one that will be cut off
    await first.close()
    home = next(n for n in network.machines if n != out)
    cell = ProcessCell(
        tmp_path / "cell", gpus="sim:4xRTX4090", placers=2, replicas=3,
        urls={"": servers.url(home), "placer-2": servers.url(out)},
    )  # fmt: skip
    (tmp_path / "cell").mkdir()
    try:
        await cell.open()
        await cell.until(lambda: bool(cell.state.nodes))
        raised = 0

        async def more(count: int) -> None:
            nonlocal raised
            for _ in range(count):
                await cell.raise_demand(f"d-{raised}", "sleep", "0.05", now_ns=time.time_ns())
                raised += 1

        def ended() -> int:
            return sum(d.phase is Phase.ENDED for d in cell.state.demands.values())

        await more(10)
        await cell.until(lambda: ended() == raised)

        # -- the leader is cut off
        lonely = await JetStreamBus.connect(servers.url(out), name="lonely")
        network.cut_off(out)
        began = time.monotonic()
        refused: list[str] = []

        async def try_there() -> None:
            while time.monotonic() - began < CUT_SECONDS:
                try:
                    await lonely.append(
                        "rig.demand.lonely", b"{}", message_id=f"l{len(refused)}", timeout_seconds=1.0
                    )
                except (BusUnknown, BusUnavailable) as error:
                    refused.append(error.code)
                else:
                    refused.append("STORED")
                await asyncio.sleep(0.2)

        trying = asyncio.create_task(try_there())
        await more(10)
        await cell.until(lambda: ended() == raised)
        went_on = time.monotonic() - began
        print(f"the majority had bound and ended 10 demands {went_on:.1f} s after the cut")
        await trying
        assert refused
        assert "STORED" not in refused
        network.heal(out)
        await lonely.close()
        await more(10)
        await cell.until(lambda: ended() == raised)

        # -- whoever leads now is killed
        leader = await servers.leader(cell.bus)
        kill = leader if leader != home else next(n for n in network.machines if n not in (home, out))
        servers.kill(kill)
        began = time.monotonic()
        await more(10)
        await cell.until(lambda: ended() == raised)
        print(
            f"10 demands had ended {time.monotonic() - began:.1f} s after member {kill} (leader {leader}) was killed"
        )
        servers.start(kill)
        await servers.ready(kill)
        await more(5)
        await cell.until(lambda: ended() == raised)

        # -- all agree
        state, released = await replay(cell)
        assert sorted(released) == sorted(f"d-{i}" for i in range(raised))
        assert digest(state) == await ledger_digest(cell, state.position)
        logs = [await log_at(servers.url(n), state.position) for n in network.machines]
        assert logs[0][: state.position] == logs[1][: state.position] == logs[2][: state.position]
        assert cell.ended_parts() == []
    finally:
        await cell.close()

"""One demand is one trace across services: the context travels in each event's `traceparent`.

Method: client, placer and agent share an in-memory exporter, as they would share a collector.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import rigbook_ledger.service as ledger_service
import rigbook_nodeagent.service as agent_service
import rigbook_placer.service as placer_service
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rigbook_bus.clock import SystemClock
from rigbook_bus.memory import MemoryBus, MemoryServer
from rigbook_bus.runner import random_id
from rigbook_bus.telemetry import Telemetry, new_traceparent
from rigbook_ledger.follower import Follower
from rigbook_ledger.state import Phase
from rigbook_ledger.streams import ensure_streams
from rigbook_schemas import events as e
from rigbook_schemas import subjects
from rigbook_schemas.values import GIB, Component, Owner, Request
from rigbook_schemas.wire import Draft, encode, rfc3339

if TYPE_CHECKING:
    from pathlib import Path

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


async def test_one_demand_is_one_trace(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    metrics = InMemoryMetricReader()
    meters = MeterProvider([metrics])
    clock, server = SystemClock(), MemoryServer()

    bus = await MemoryBus.connect(server, name="client")
    await ensure_streams(bus)
    ready = asyncio.Event()
    tasks = [
        asyncio.create_task(
            ledger_service.serve(
                await MemoryBus.connect(server, name="ledger"),
                ledger_service.Options(data=tmp_path / "ledger"),
                clock=clock,
                new_id=random_id,
            )
        ),
        asyncio.create_task(
            placer_service.serve(
                await MemoryBus.connect(server, name="placer"), placer_service.Options(), clock=clock, new_id=random_id,
                telemetry=Telemetry("placer", tracers=tracers, meters=meters),
            )
        ),
        asyncio.create_task(
            agent_service.serve(
                await MemoryBus.connect(server, name="agent"),
                agent_service.Options(node="a", data=tmp_path / "a", gpus="sim:1xRTX4090"), clock=clock, new_id=random_id,
                telemetry=Telemetry("nodeagent", tracers=tracers, meters=meters), ready=ready,
            )
        ),
    ]  # fmt: skip
    await asyncio.wait_for(ready.wait(), 20)  # before that, a new order book takes its orders from the ledger
    follower = Follower(bus)
    await follower.open()
    demand = e.DemandRaised(
        demand="one",
        project="nlp",
        owner=Owner(name="ann"),
        resources=Request(memory_bytes=4 * GIB),
        components=(Component(command=("true",)),),
    )
    parent = new_traceparent(TRACE, SPAN)
    draft = Draft(
        data=demand, id="raised", source="client/ann", time=rfc3339(clock.now_ns()), traceparent=parent
    )
    await bus.append(subjects.demand("nlp"), encode(draft), message_id=draft.id)
    carried: dict[str, str] = {}
    async with asyncio.timeout(20):
        while "one" not in follower.state.demands or follower.state.demands["one"].phase is not Phase.ENDED:
            for record in await follower.batch(wait_seconds=1.0):
                if record.correlation == "one":
                    carried[record.kind] = record.traceparent
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await follower.close()

    assert set(carried) == {"demand.raised", "bound", "started", "exited", "released"}
    assert {t.split("-")[1] for t in carried.values()} == {TRACE}
    spans = {
        span.name: span for span in exporter.get_finished_spans() if span.attributes.get("demand") == "one"
    }  # type: ignore[union-attr]
    assert set(spans) == {"placer.bound", "nodeagent.started", "nodeagent.exited", "nodeagent.released"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    assert f"{spans['placer.bound'].parent.span_id:016x}" == SPAN  # type: ignore[union-attr]
    bound_span = f"{spans['placer.bound'].context.span_id:016x}"
    assert carried["bound"].split("-")[2] == bound_span
    assert f"{spans['nodeagent.started'].parent.span_id:016x}" == bound_span  # type: ignore[union-attr]

    data = metrics.get_metrics_data()
    assert data is not None
    names = {m.name for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert {"rigbook.events.folded", "rigbook.appends"} <= names
    meters.shutdown()

"""Ask Rigbook for a GPU with nothing but a NATS connection: nats-py and the standard library.

    python examples/plain_nats_demand.py nats://127.0.0.1:4222

Publishes one `demand.raised` event (a CloudEvents 1.0 JSON object), waits until it is on the log, and
asks the ledger what became of it.
"""

import asyncio
import json
import sys
import uuid
from datetime import UTC, datetime

import nats


async def main(url: str) -> None:
    bus = await nats.connect(url)
    stream = bus.jetstream()
    demand = f"plain-{uuid.uuid4().hex[:8]}"  # unique for ever
    event = {
        "specversion": "1.0",
        "id": uuid.uuid4().hex,
        "type": "dev.rigbook.demand.raised.v1",
        "source": "example/plain_nats_demand",
        "time": datetime.now(UTC).isoformat(),
        "subject": demand,
        "correlationid": demand,
        "data": {
            "demand": demand,
            "project": "demo",
            "owner": {"name": "Ada Okafor", "contact": "ada@example.org"},
            "purpose": "shows that a client needs nothing of Rigbook's",
            "workload": "batch",
            "resources": {"memory_bytes": 4 * 1024**3, "mode": "memory-slice"},  # bytes, always
            "components": [{"name": "main", "command": ["sleep", "2"]}],
        },
    }
    # `Nats-Msg-Id` = the event's id: sent twice (a retry), it is stored once. The answer means: it is on the log.
    ack = await stream.publish(
        "rig.demand.demo", json.dumps(event).encode(), headers={"Nats-Msg-Id": event["id"]}
    )
    print(f"{demand} is event {ack.seq} of {ack.stream}")

    question = {"id": demand, "position_min": ack.seq}  # not older than what we have just said
    while True:
        reply = await bus.request("rig.query.demand", json.dumps(question).encode(), timeout=5)
        answer = json.loads(reply.data)
        if "error" in answer:
            sys.exit(f"{answer['error']['code']}: {answer['error']['text']}")
        row = answer["items"][0]
        print(f"{row['phase']:<10} {', '.join(row.get('cards', []))}")
        if row["phase"] in ("ended", "refused", "withdrawn"):
            break
        await asyncio.sleep(0.5)
    await bus.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "nats://127.0.0.1:4222"))

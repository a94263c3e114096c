"""Post what starts, ends, fails and is taken away to a chat webhook: nats-py, and a position that survives restarts.

RIGBOOK_WEBHOOK=https://... [NATS_URL=nats://127.0.0.1:4222] python examples/webhook_subscriber.py
The operator makes the durable consumer `webhook` beforehand; where the server lets us (a laptop), we do.
"""

import asyncio
import json
import os
import urllib.request

import nats
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

KINDS = {"started": "started", "exited": "ended", "eviction.ordered": "evicted", "refused": "refused"}
RETRY_SECONDS = 5
FILTERS = ["rig.run.*", "rig.evict.*", "rig.verdict.*"]


def post(text: str) -> None:
    body = json.dumps({"text": text}).encode()
    request = urllib.request.Request(
        os.environ["RIGBOOK_WEBHOOK"], body, {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=10).close()  # raises unless the answer is 2xx


async def main() -> None:
    stream = (await nats.connect(os.environ.get("NATS_URL", "nats://127.0.0.1:4222"))).jetstream()
    try:
        await stream.consumer_info("RIG_LEDGER", "webhook")
    except NotFoundError:  # from now on; each event until it is acknowledged, again after 30 s
        new = ConsumerConfig(
            durable_name="webhook", filter_subjects=FILTERS, deliver_policy=DeliverPolicy.NEW, ack_wait=30
        )
        await stream.add_consumer("RIG_LEDGER", new)
    inbox = await stream.pull_subscribe_bind("webhook", stream="RIG_LEDGER")
    while True:
        try:
            (message,) = await inbox.fetch(1, timeout=30)
        except nats.errors.TimeoutError:
            continue
        try:
            event = json.loads(message.data)
            word = KINDS.get(event["type"].removeprefix("dev.rigbook.").rpartition(".v")[0])
            data = event["data"]
        except (ValueError, LookupError, TypeError, AttributeError):
            await message.ack()  # not an event at all: the ledger keeps it as a finding
            continue
        bad = data.get("verdict") not in (None, "completed", "stopped_by_us")
        why = data.get("sentence") or data.get("text") or ""
        while word:
            try:
                await asyncio.to_thread(post, f"{data['demand']} {'failed' if bad else word} {why}".strip())
                break
            except OSError as error:
                print(f"not posted, will be: {error}", flush=True)
                await message.in_progress()  # still ours: what comes later waits, so the chat reads in order
                await asyncio.sleep(RETRY_SECONDS)
        await message.ack()  # only now: what was not posted comes again, after a restart too


if __name__ == "__main__":
    asyncio.run(main())

"""Golden journals: logs that were written once and must be read, and folded to the same digest, for ever.

    python -m tests.unit.golden_journals            # write those that are not there yet

A journal is never made anew. When the fold changes on purpose, its digest in `digests.json` is updated in the
same change, with the reason in `CHANGELOG.md`; messages and chain never change.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from rigbook_bus.protocol import Message
from rigbook_ledger.digest import digest
from rigbook_replay.journal import Journal
from rigbook_replay.timetravel import fold_journal
from rigbook_schemas import events as e
from rigbook_schemas import values as v
from rigbook_schemas.catalogue import BY_KIND
from rigbook_schemas.wire import Draft, decode, encode

from tests.unit import ledger_story as s
from tests.unit.journal_story import lives, told, write_journal
from tests.unit.ledger_story import START_NS, Story

if TYPE_CHECKING:
    from tests.unit.ledger_story import Step

FOLDER = Path(__file__).parent / "golden" / "journals"
DIGESTS = FOLDER / "digests.json"
EVENTS = Path(__file__).parent / "golden" / "events"


def busy() -> list[Step]:
    """Lives of demands, a gang, an eviction with requeue, rules, a lost node, drifts, and what does not belong there."""
    gang = s.bound("gang", s.card("a", 1), s.card("b", 1))
    return [
        *lives(30),
        s.joined("b"),
        s.raised("gang"), gang, s.started("gang"), s.started("gang", "b"),
        s.raised("again"), s.bound("again"), s.started("again"),
        s.evicted("again", requeue=True), s.exited("again"), s.released("again"), s.bound("again"),
        e.QuotaSet(project="p", memory_bytes=3 * s.CARD_BYTES), e.NodeCordoned(node="b", by="eve", reason="fan"),
        e.GpuQuarantined(card=s.card("a", 3), by="eve"), e.ModeSet(card=s.card("a", 2), mode=v.Mode.MEMORY_SLICE),
        e.NodeUnreachable(node="b", silent_seconds=30.0), e.NodeRecovered(node="b", silent_seconds=31.0),
        s.withdrawn("gang"),
        lambda state: e.DriftDetected(drift="leftover.a.9", kind=v.DriftKind.LEFTOVER, node="a", sentence="it runs on",
                                      card=s.card("a", 1), demand="gang", epoch=s.epoch_of(state, "gang")),
        s.exited("gang"), s.exited("gang", "b"), s.released("gang"),
        e.DriftCleared(drift="leftover.a.9", kind=v.DriftKind.LEFTOVER, node="a", how="it ended"),
        s.released("gang", "b"),
        s.Raw(subject="rig.demand.p", body=b"\xff\x00 no event"),
        s.Raw(subject="rig.run.a", body=b'{"specversion":"1.0","id":"x","source":"s","type":"dev.rigbook.later.v7"}'),
        s.bound("nobody"), s.started("d1"),
        s.Told(data=s.raised("late"), time="2020-01-01T00:00:00Z"),
    ]  # fmt: skip


def kinds() -> list[Message]:
    """Every golden event of its day, as it stands in its file and as our code writes it, on its subject."""
    messages: list[Message] = []
    for path in sorted(EVENTS.glob("*.json")):
        kind = BY_KIND[path.stem.rpartition(".v")[0]]
        body = path.read_bytes()
        record = decode(1, f"{kind.subject}.x", 0, body)
        assert isinstance(record.data, e.Payload)
        ours = encode(
            Draft(data=record.data, id=f"{record.id}-again", source=record.source, time=record.time,
                  causation=record.causation, traceparent=record.traceparent)
        )  # fmt: skip
        for one in (body, ours):
            seq = len(messages) + 1
            messages.append(Message(seq, f"{kind.subject}.node-a", START_NS + seq, one))
    return messages


def facts(path: Path) -> dict[str, object]:
    """What a golden journal must come to."""
    hasher = blake2b(digest_size=16)
    with Journal.open(path) as journal:
        for messages in journal.messages():
            for m in messages:
                hasher.update(f"{m.seq} {m.subject} {m.received_ns} {len(m.body)} ".encode() + m.body)
        state = fold_journal(journal)
    return {
        "events": state.position, "messages": hasher.hexdigest(), "chain": state.chain.hex(),
        "digest": digest(state), "findings": state.finding_count,
    }  # fmt: skip


def main() -> None:
    known = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    story, messages = told(*busy())
    logs: dict[str, tuple[list[Message], Story | None]] = {
        "busy-1": (messages, story),
        "kinds-1": (kinds(), None),
    }
    for name, (log, told_by) in logs.items():
        path = FOLDER / f"{name}.journal"
        if not path.exists():
            write_journal(path, log, told_by)
    for path in sorted(FOLDER.glob("*.journal")):
        known.setdefault(path.name, facts(path))
    DIGESTS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Journals for tests: a story's log in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rigbook_bus.protocol import Message
from rigbook_ledger.digest import digest
from rigbook_ledger.identity import fold_identity
from rigbook_replay.journal import Header
from rigbook_replay.trusted import schema_identity
from rigbook_replay.writer import JournalWriter
from rigbook_schemas.wire import Draft, encode, rfc3339

from tests.unit.ledger_story import START_NS, Raw, Story, Told, subject_of

if TYPE_CHECKING:
    from pathlib import Path

    from rigbook_replay.journal import Index
    from rigbook_schemas.events import Payload

    from tests.unit.ledger_story import Step

SECOND_NS = 10**9
CREATED_NS = START_NS - SECOND_NS


def told(*steps: Step) -> tuple[Story, list[Message]]:
    """The story, and its messages as they would stand on the stream, one second apart."""
    story = Story()
    messages: list[Message] = []
    for step in steps:
        seq = story.state.position + 1
        received_ns = START_NS + seq * SECOND_NS
        subject, body = _body(step, story, seq, received_ns)
        messages.append(Message(seq, subject, received_ns, body))
        story.tell(Raw(subject=subject, body=body))
    return story, messages


def _body(step: Step, story: Story, seq: int, received_ns: int) -> tuple[str, bytes]:
    if isinstance(step, Raw):
        return step.subject, step.body
    one = step if isinstance(step, Told) else Told(data=step)
    data: Payload = one.data(story.state) if callable(one.data) else one.data
    draft = Draft(
        data=data, id=one.id or f"event-{seq}", source="test/story", time=one.time or rfc3339(received_ns),
        causation=one.causation,
    )  # fmt: skip
    return one.subject or subject_of(data), encode(draft)


def lives(count: int, *, cards: int = 4) -> list[Step]:
    """A node, and demands that come and go on it: 1 + 5 events for each."""
    from tests.unit import ledger_story as s

    steps: list[Step] = [s.joined(cards=cards)]
    for number in range(count):
        name = f"d{number}"
        steps += [
            s.raised(name), s.bound(name, s.card("a", number % cards)), s.started(name), s.exited(name), s.released(name),
        ]  # fmt: skip
    return steps


def write_journal(path: Path, messages: list[Message], story: Story | None = None, **header: object) -> Index:
    """A finished journal; with the story it names the digest at its end."""
    writer = JournalWriter.create(path, Header(created_ns=CREATED_NS, schema=schema_identity(), **header))  # type: ignore[arg-type]
    writer.add(messages)
    if story is None:
        return writer.finish()
    state = story.state
    return writer.finish(
        event_id=state.event_id, ledger_chain=state.chain.hex(), digest=digest(state), fold=fold_identity()
    )

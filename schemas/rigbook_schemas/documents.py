"""The contract as documents, made from the types: a JSON Schema per (kind, version), and AsyncAPI 3.0.

The committed copies under `schemas/documents/` are compared with these in the tests. To write them anew:
`rigbook schema --out DIRECTORY`, or `python -m rigbook_schemas.documents DIRECTORY`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rigbook_schemas import subjects
from rigbook_schemas.catalogue import KINDS, Author
from rigbook_schemas.queries import QUESTIONS, Answer, Question

if TYPE_CHECKING:
    from rigbook_schemas.catalogue import Kind

__all__ = ["asyncapi", "documents", "json_schemas"]

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
# What follows the family in the subject.
_LAST_TOKEN: Final = {
    "rig.demand": "project",
    "rig.own.bind": "node",
    "rig.own.policy": "topic",
    "rig.verdict": "project",
    "rig.evict": "node",
    "rig.run": "node",
    "rig.release": "node",
    "rig.node": "node",
    "rig.drift": "node",
    "rig.heartbeat": "node",
}
_TOKENS: Final = {
    "project": "The project of the demand.",
    "node": f"The node's name; `{subjects.GANG}` when the event concerns several nodes.",
    "topic": "What the rule is about: a project, a node, a card's UUID, `healing`, ...",
}
_ABOUT: Final = (
    "Rigbook's bus. Every message is a CloudEvents 1.0 JSON object in structured mode. Each kind has one kind "
    "of author. Memory is in bytes, durations in seconds, instants are RFC 3339 in UTC; the order of events "
    "is the stream sequence, `time` is data. Unknown fields are to be ignored, unknown kinds to be skipped."
)


def json_schemas() -> dict[str, dict[str, Any]]:
    """`<kind>.v<version>` -> JSON Schema (2020-12) of the whole message."""
    return {f"{kind.name}.v{kind.version}": _message_schema(kind) for kind in KINDS}


def asyncapi() -> dict[str, Any]:
    """The bus as an AsyncAPI 3.0 document: channels, who sends what, and the questions to the ledger."""
    families: dict[str, list[Kind]] = {}
    for kind in KINDS:
        families.setdefault(kind.subject, []).append(kind)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Rigbook",
            "version": "1",
            "description": _ABOUT,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {_channel_name(family): _channel(family, kinds) for family, kinds in families.items()}
        | _asking(),
        "operations": _sending(families) | _answering(),
        "components": {
            "messages": {_message_name(kind): _message(kind) for kind in KINDS} | _questions(),
            "schemas": _row_schemas(),
        },
    }


def documents() -> dict[str, str]:
    """File name -> text, for every document."""
    files = {f"{name}.json": schema for name, schema in json_schemas().items()} | {
        "asyncapi.json": asyncapi()
    }
    return {
        name: json.dumps(document, indent=2, ensure_ascii=False) + "\n" for name, document in files.items()
    }


# -- JSON Schema --------------------------------------------------------------------------------


def _message_schema(kind: Kind) -> dict[str, Any]:
    (data,), definitions = msgspec.json.schema_components((kind.payload,), ref_template="#/$defs/{name}")
    text = {"type": "string"}
    return {
        "$schema": DIALECT,
        "$id": f"urn:rigbook:event:{kind.name}:v{kind.version}",
        "title": kind.name,
        "description": f"{kind.summary} Author: {' or '.join(kind.authors)}. Subject: {_address(kind.subject)}.",
        "type": "object",
        "required": ["specversion", "id", "source", "type", "data"],
        "properties": {
            "specversion": {"const": "1.0"},
            "id": {
                "type": "string",
                "minLength": 1,
                "maxLength": 256,
                "description": "Unique; also `Nats-Msg-Id`.",
            },
            "source": {"type": "string", "minLength": 1, "description": "Who says so: `<role>/<name>`."},
            "type": {"const": kind.type},
            "time": {
                "type": "string",
                "format": "date-time",
                "description": "By the author's clock; data, not order.",
            },
            "subject": {"type": "string", "minLength": 1, "description": f"The payload's `{kind.about}`."},
            "datacontenttype": {"const": "application/json"},
            "correlationid": {**text, "description": "The demand that this is about."},
            "causationid": {**text, "description": "`id` of the event that led to this one."},
            "traceparent": {**text, "description": "W3C Trace Context."},
            "data": data,
        },
        "$defs": definitions,
    }


def _row_schemas() -> dict[str, Any]:
    types = (Question, Answer, *dict.fromkeys(QUESTIONS.values()))
    _, definitions = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    return definitions


# -- AsyncAPI -----------------------------------------------------------------------------------


def _message_name(kind: Kind) -> str:
    return f"{kind.name}.v{kind.version}"


def _channel_name(family: str) -> str:
    return family.removeprefix("rig.")


def _address(family: str) -> str:
    return f"{family}.{{{_LAST_TOKEN[family]}}}"


def _channel(family: str, kinds: list[Kind]) -> dict[str, Any]:
    token = _LAST_TOKEN[family]
    stream = subjects.HEARTBEAT_STREAM if family == "rig.heartbeat" else subjects.LEDGER_STREAM
    return {
        "address": _address(family),
        "description": f"Stored in the stream {stream}.",
        "parameters": {token: {"description": _TOKENS[token]}},
        "messages": {
            _message_name(kind): {"$ref": f"#/components/messages/{_message_name(kind)}"} for kind in kinds
        },
    }


def _message(kind: Kind) -> dict[str, Any]:
    return {
        "name": kind.type,
        "title": kind.name,
        "summary": kind.summary,
        "contentType": "application/cloudevents+json",
        "payload": {
            "schemaFormat": "application/schema+json;version=draft-2020-12",
            "schema": {"$ref": f"./{_message_name(kind)}.json"},
        },
    }


def _sending(families: dict[str, list[Kind]]) -> dict[str, Any]:
    """One operation per author and channel: the rights that the bus gives them."""
    operations: dict[str, Any] = {}
    for author in Author:
        for family, kinds in families.items():
            mine = [kind for kind in kinds if author in kind.authors]
            if mine:
                channel = _channel_name(family)
                operations[f"{author}-sends-{channel.replace('.', '-')}"] = {
                    "action": "send",
                    "summary": f"The {author} publishes {', '.join(kind.name for kind in mine)}.",
                    "channel": {"$ref": f"#/channels/{channel}"},
                    "messages": [
                        {"$ref": f"#/channels/{channel}/messages/{_message_name(kind)}"} for kind in mine
                    ],
                    "tags": [{"name": author.value}],
                }
    return operations


def _asking() -> dict[str, Any]:
    return {
        "query": {
            "address": subjects.query("{what}"),
            "description": "Request/reply (core NATS), answered by the ledger.",
            "parameters": {"what": {"description": "What is asked for.", "enum": list(QUESTIONS)}},
            "messages": {"question": {"$ref": "#/components/messages/question"}},
        },
        "answer": {
            "address": None,
            "description": "The inbox that the request names.",
            "messages": {"answer": {"$ref": "#/components/messages/answer"}},
        },
    }


def _answering() -> dict[str, Any]:
    return {
        "ledger-answers-query": {
            "action": "receive",
            "summary": "The ledger answers with a page of items.",
            "channel": {"$ref": "#/channels/query"},
            "messages": [{"$ref": "#/channels/query/messages/question"}],
            "reply": {
                "channel": {"$ref": "#/channels/answer"},
                "messages": [{"$ref": "#/channels/answer/messages/answer"}],
            },
            "tags": [{"name": "ledger"}],
        }
    }


def _questions() -> dict[str, Any]:
    rows = "; ".join(f"`{what}`: {row.__name__}" for what, row in QUESTIONS.items())
    return {
        "question": {
            "name": "question",
            "summary": "Every question takes these fields and reads those that mean something to it.",
            "payload": {"$ref": "#/components/schemas/Question"},
        },
        "answer": {
            "name": "answer",
            "summary": f"A page of items, or an error with a code and a remedy. Items by question: {rows}.",
            "payload": {"$ref": "#/components/schemas/Answer"},
        },
    }


if __name__ == "__main__":
    import sys
    from pathlib import Path

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    for file_name, file_text in documents().items():
        (folder / file_name).write_text(file_text, encoding="utf-8")
    sys.stdout.write(f"{len(documents())} documents written to {folder}\n")

"""The documents made from the types, and the golden events that are kept for ever.

The golden files of a (kind, version) set every field to something that is not its default. They are never
changed: a field that comes later gets one more golden file, a kind that changes its meaning gets a new version, a
new golden file, and an upcast for the old ones.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import msgspec
import pytest
from rigbook_schemas import events as e
from rigbook_schemas.catalogue import BY_KIND, KINDS, Author
from rigbook_schemas.documents import asyncapi, documents, json_schemas
from rigbook_schemas.queries import QUESTIONS
from rigbook_schemas.wire import Draft, Record, decode, encode

if TYPE_CHECKING:
    from rigbook_schemas.catalogue import Kind

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "schemas" / "documents"
GOLDEN = Path(__file__).parent / "golden" / "events"
GOLDENS = sorted(GOLDEN.glob("*.json"))
SCHEMAS = json_schemas()

# CloudEvents 1.0, JSON format: required attributes, names of extensions, types of values.
CLOUDEVENT: dict[str, Any] = {
    "type": "object",
    "required": ["id", "source", "specversion", "type"],
    "properties": {
        "id": {"type": "string", "minLength": 1},
        "source": {"type": "string", "minLength": 1, "format": "uri-reference"},
        "specversion": {"const": "1.0"},
        "type": {"type": "string", "minLength": 1},
        "subject": {"type": "string", "minLength": 1},
        "time": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$"},
        "datacontenttype": {"type": "string", "minLength": 1},
        "data": {},
    },
    "propertyNames": {"pattern": "^[a-z0-9]{1,20}$"},
    "additionalProperties": {"type": ["string", "boolean", "integer"]},
}


def golden(path: Path) -> tuple[Record, dict[str, Any]]:
    text = path.read_bytes()
    kind = BY_KIND[path.stem.rpartition(".v")[0]]
    return decode(1, f"{kind.subject}.x", 0, text), json.loads(text)


# -- golden events ------------------------------------------------------------------------------------


def test_every_kind_and_version_has_its_golden_event() -> None:
    due = {f"{kind.name}.v{version}" for kind in KINDS for version in range(1, kind.version + 1)}
    assert {path.stem for path in GOLDENS} >= due, f"write the missing ones into {GOLDEN.relative_to(ROOT)}"


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_a_golden_event_still_decodes_and_the_current_version_encodes_to_the_same(path: Path) -> None:
    record, body = golden(path)
    assert isinstance(record.data, e.Payload), record.data
    if body["type"] != BY_KIND[record.kind].type:
        return  # an old version: its upcast is what counts
    again = encode(
        Draft(
            data=record.data, id=record.id, source=record.source, time=record.time,
            correlation=record.correlation, causation=record.causation, traceparent=record.traceparent,
        )
    )  # fmt: skip
    assert json.loads(again) == body


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_golden_events_of_a_kind_set_every_field(kind: Kind) -> None:
    """A field that came later is set by one more golden event, `<kind>.v<n>-2.json`; the older ones stay as they are."""
    name = f"{kind.name}.v{kind.version}"
    paths = [path for path in GOLDENS if path.stem == name or path.stem.startswith(f"{name}-")]
    left = [set(left_at_default(golden(path)[0].data, kind.name)) for path in paths]
    never = sorted(set.intersection(*left)) if left else ["(no golden event)"]
    assert not never, (
        f"set these in {GOLDEN.relative_to(ROOT)}/{name}-{len(paths) + 1}.json: {', '.join(never)}"
    )


def left_at_default(value: Any, where: str) -> list[str]:
    """Fields of this struct and those inside that have their default."""
    if isinstance(value, msgspec.Struct):
        left = []
        for field in msgspec.structs.fields(value):
            inside = getattr(value, field.name)
            if (field.default is not msgspec.NODEFAULT and inside == field.default) or (
                field.default_factory is not msgspec.NODEFAULT and inside == field.default_factory()
            ):
                left.append(f"{where}.{field.name}")
            left += left_at_default(inside, f"{where}.{field.name}")
        return left
    if isinstance(value, tuple):
        return [name for inside in value for name in left_at_default(inside, where)]
    return []


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_a_golden_event_is_a_cloudevent_and_fits_its_schema(path: Path) -> None:
    _, body = golden(path)
    jsonschema.validate(body, CLOUDEVENT, cls=jsonschema.Draft202012Validator)
    schema = SCHEMAS.get(path.stem.partition("-")[0])
    if schema is not None:
        jsonschema.validate(body, schema, cls=jsonschema.Draft202012Validator)


# -- JSON Schemas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_is_sound_and_says_no_to_what_decode_refuses(name: str) -> None:
    schema = SCHEMAS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    body = json.loads((GOLDEN / f"{name}.json").read_bytes())
    kind = BY_KIND[name.rpartition(".v")[0]]
    validator = jsonschema.Draft202012Validator(schema)
    wrong = [{**body, "data": []}, {**body, "id": ""}, {**body, "specversion": "0.3"}, {**body, "type": "x"}]
    wrong += [
        {key: told for key, told in body.items() if key != missing} for missing in ("id", "source", "data")
    ]
    required = [field.name for field in msgspec.structs.fields(kind.payload) if field.required]
    wrong += [
        {**body, "data": {k: told for k, told in body["data"].items() if k != name}} for name in required
    ]
    for one in wrong:
        assert not validator.is_valid(one), one
        record = decode(1, f"{kind.subject}.x", 0, json.dumps(one).encode())
        assert not isinstance(record.data, e.Payload), one


def test_the_committed_documents_are_those_that_the_types_give() -> None:
    there = {path.name: path.read_text(encoding="utf-8") for path in COMMITTED.glob("*.json")}
    made = documents()
    differ = sorted(name for name in {*there, *made} if there.get(name) != made.get(name))
    assert not differ, (
        f"{', '.join(differ)}: run `rigbook schema --out schemas/documents` (or `make schema`) and commit what it writes"
    )


def test_the_readme_says_where_they_are() -> None:
    assert "rigbook schema" in (ROOT / "schemas" / "README.md").read_text(encoding="utf-8")


# -- AsyncAPI -------------------------------------------------------------------------------------------


def test_every_kind_is_on_one_channel_and_sent_by_each_of_its_authors() -> None:
    api = asyncapi()
    for kind in KINDS:
        message = f"{kind.name}.v{kind.version}"
        channels = [name for name, channel in api["channels"].items() if message in channel["messages"]]
        assert channels == [kind.subject.removeprefix("rig.")]
        assert re.fullmatch(re.escape(kind.subject) + r"\.\{\w+\}", api["channels"][channels[0]]["address"])
        senders = {
            operation["tags"][0]["name"]
            for operation in api["operations"].values()
            if {"$ref": f"#/channels/{channels[0]}/messages/{message}"} in operation["messages"]
        }
        assert senders == {author.value for author in kind.authors}
    assert set(Author) == {author for kind in KINDS for author in kind.authors}


def test_every_reference_leads_somewhere() -> None:
    api = asyncapi()
    files = documents()

    def follow(node: Any) -> None:
        if isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str):
                resolve(reference)
            for inside in node.values():
                follow(inside)
        elif isinstance(node, list):
            for inside in node:
                follow(inside)

    def resolve(reference: str) -> None:
        file, _, path = reference.partition("#")
        if file:
            assert file.removeprefix("./") in files
            return
        place: Any = api
        for step in path.strip("/").split("/"):
            place = place[step]

    follow(api)


def test_the_questions_and_their_rows_are_in_it() -> None:
    api = asyncapi()
    assert api["channels"]["query"]["parameters"]["what"]["enum"] == list(QUESTIONS)
    for row in QUESTIONS.values():
        assert row.__name__ in api["components"]["schemas"]

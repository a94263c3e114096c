"""`schema`: the contract of the bus as JSON Schema and AsyncAPI documents, made from the types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rigbook.failures import Invalid
from rigbook.output import json_line, say

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("schema")(schema)


def schema(
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write files there.")] = None,
    kind: Annotated[
        str, typer.Option("--kind", metavar="KIND", help="Print this one, such as demand.raised.v1.")
    ] = "",
) -> None:
    """JSON Schemas of every event kind and version, and an AsyncAPI document of the bus."""
    from rigbook_schemas.documents import asyncapi, documents, json_schemas

    schemas = json_schemas()
    if out is not None:
        _write(out, documents())
        return
    if not kind:
        json_line(asyncapi())
        return
    found = schemas.get(kind) or schemas.get(f"{kind}.v1")
    if found is None:
        raise Invalid(f"--kind: {kind!r} is none; expected one of {', '.join(schemas)}", code="invalid_flag")
    json_line(found)


def _write(out: Path, documents: dict[str, str]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in documents.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Invalid(f"--out: cannot write to {out}", why=str(error.strerror), code="not_writable") from None
    say(f"{len(documents)} documents in {out}")

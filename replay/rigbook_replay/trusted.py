"""Payload types without the checks of `rigbook_schemas`, for events that were checked when they were written.

Most of the time of decoding goes into patterns and ranges (a regular expression per name). A journal holds
in its columns only events that the very same types had accepted, under a checksum; to check them again
for every question would cost more than the fold. Each type here is a subclass of the real one with the
same fields, so everything that takes the real one takes it; only `==` between the two says no.
"""

from __future__ import annotations

import functools
import sys
import types
import typing
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec
from rigbook_schemas.catalogue import BY_KIND
from rigbook_schemas.values import FrozenType

__all__ = ["schema_identity", "trusted", "untrusted"]

_CHECKING: Final = ("values", "events", "catalogue", "upcasts", "wire")


@functools.cache
def schema_identity() -> str:
    """16 hexadecimal digits over the code that checks events: what one checked, another of the same name need not."""
    hasher = blake2b(digest_size=8)
    for name in _CHECKING:
        file = sys.modules[f"rigbook_schemas.{name}"].__file__
        assert file is not None
        hasher.update(Path(file).read_bytes())
    return hasher.hexdigest()


@functools.cache
def trusted(kind: str) -> type[msgspec.Struct]:
    """The payload type of a kind, without checks."""
    return _without_checks(BY_KIND[kind].payload)


def untrusted(value: Any) -> Any:
    """`value` in the real types, so that it equals what was decoded elsewhere."""
    if isinstance(value, msgspec.Struct):
        real = _REAL.get(type(value), type(value))
        return real(**{name: untrusted(getattr(value, name)) for name in value.__struct_fields__})
    if isinstance(value, tuple):
        return tuple(untrusted(one) for one in value)
    return value


_REAL: Final[dict[type, type]] = {}


@functools.cache
def _without_checks(real: type[msgspec.Struct]) -> type[msgspec.Struct]:
    hints = typing.get_type_hints(real, include_extras=True)
    members: dict[str, Any] = {"__module__": __name__, "__doc__": real.__doc__}
    annotations: dict[str, Any] = {}
    for field in msgspec.structs.fields(real):
        annotations[field.name] = _stripped(hints[field.name])
        if field.default is not msgspec.NODEFAULT:
            members[field.name] = field.default
        elif field.default_factory is not msgspec.NODEFAULT:
            members[field.name] = msgspec.field(default_factory=field.default_factory)
    members["__annotations__"] = annotations
    made = FrozenType(real.__name__, (real,), members)
    assert issubclass(made, msgspec.Struct)
    _REAL[made] = real
    return made


def _stripped(hint: Any) -> Any:
    """A type without its constraints, however deep."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _stripped(typing.get_args(hint)[0])
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _without_checks(hint)
    arguments = tuple(one if one is Ellipsis else _stripped(one) for one in typing.get_args(hint))
    if not arguments:
        return hint
    if origin in (types.UnionType, typing.Union):
        return typing.Union[arguments]  # noqa: UP007 - made from a tuple
    return origin[arguments]

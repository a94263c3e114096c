"""`NAME=VALUE` pairs of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rigbook.failures import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["pairs"]


def pairs(flag: str, texts: Iterable[str]) -> dict[str, str]:
    """`{"disk": "nvme"}` of `["disk=nvme"]`. Raises Invalid, naming the flag."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise Invalid(f"{flag}: {text!r} is no pair; expected NAME=VALUE", code="invalid_flag")
        found[key.strip()] = value
    return found

"""One thing that is wrong in a demand file."""

from __future__ import annotations

import msgspec

__all__ = ["Problem"]


class Problem(msgspec.Struct, frozen=True, order=True):
    """Where (1-based line and column, and the field's path) and what, with what was expected instead."""

    file: str
    line: int
    column: int
    field: str  # `components[0].probe.port`, "" = the document as a whole
    text: str
    expected: str = ""

    def __str__(self) -> str:
        field = f" {self.field}:" if self.field else ""
        expected = f"; expected {self.expected}" if self.expected else ""
        return f"{self.file}:{self.line}:{self.column}:{field} {self.text}{expected}"

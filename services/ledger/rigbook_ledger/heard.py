"""What was heard of a node last. A value; `heartbeat` reads the stream, `present` shows it."""

from __future__ import annotations

import msgspec
from rigbook_schemas.events import Heartbeat

__all__ = ["Heard"]


class Heard(msgspec.Struct, frozen=True):
    """A node's latest heartbeat."""

    beat: Heartbeat
    seq: int
    at: float  # monotonic seconds, when it was read
    skew_seconds: float | None  # node's clock less the server's

"""A canonical digest of a state: equal on every replica and after every replay at the same position.

Computed at snapshots and on request. Between them the running `chain` tells two logs apart.
Texts that a later version may word differently (findings) are counted, not hashed.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rigbook_ledger.state import State

__all__ = ["digest"]


def digest(state: State) -> str:
    """32 hexadecimal digits over everything ownership depends on, in sorted order."""
    encode = msgspec.msgpack.Encoder(order="deterministic").encode
    hasher = blake2b(digest_size=16)
    for part in (
        (
            state.position,
            state.own_position,
            state.event_id,
            state.chain,
            state.finding_count,
            state.unknown_count,
            state.generation,
            state.recovering,
        ),
        sorted(state.nodes.items()),
        sorted(state.cards.items()),
        sorted(state.demands.items()),
        sorted(state.bindings.items()),
        sorted(state.projects.items()),
        sorted(state.drifts.items()),
        list(state.waiting),
        list(state.ended),
        sorted(state.unknown_open.items()),
        state.policy,
    ):
        hasher.update(encode(part))
    return hasher.hexdigest()

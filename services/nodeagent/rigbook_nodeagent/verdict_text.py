"""What a verdict is made of. Pure."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import msgspec
from rigbook_schemas.values import Evidence, VerdictClass

if TYPE_CHECKING:
    from rigbook_nodeagent.engines.protocol import Running

__all__ = ["Verdict", "how", "said"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why it ended, how sure we are, and the sentence an operator reads."""

    verdict: VerdictClass
    confidence: str  # high, medium, low
    sentence: str
    evidence: tuple[Evidence, ...] = ()


def said(kind: VerdictClass, confidence: str, sentence: str, *evidence: Evidence) -> Verdict:
    return Verdict(verdict=kind, confidence=confidence, sentence=sentence[:1900], evidence=evidence)


def how(component: Running) -> str:
    """How a component ended: `exit code 3`, `signal SIGSEGV`."""
    if component.signal is None:
        return f"exit code {component.exit_code}"
    try:
        return f"signal {signal.Signals(component.signal).name}"
    except ValueError:
        return f"signal {component.signal}"

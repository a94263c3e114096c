"""`verdict`: from evidence to why a workload ended. Pure; first match in the order written here.

Exit 137 alone is never an out-of-memory: a stop order recorded before the end explains it first.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.values import EvictionReason, Evidence, VerdictClass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_nodeagent.engines.protocol import Running
    from rigbook_nodeagent.orders import Stop

__all__ = ["Verdict", "verdict"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why it ended, how sure we are, and the sentence an operator reads."""

    verdict: VerdictClass
    confidence: str
    sentence: str
    evidence: tuple[Evidence, ...] = ()


_REFUSED: Final = {
    "runtime_missing": VerdictClass.RUNTIME_MISSING,
    "image_pull": VerdictClass.IMAGE_PULL,
}


def verdict(
    ended: Sequence[Running], *, stop: Stop | None, refused: tuple[str, str] | None = None
) -> Verdict:
    """The verdict over all components of a share.

    1. The engine refused to start it. 2. We were ordered to stop it. 3. The kernel killed it for memory
    (the engine's own flag). 4. Everything ended with 0. 5. A component ended with something else. 6. Unknown.
    """
    evidence = tuple(e for component in ended for e in _evidence(component))
    if refused is not None:
        code, text = refused
        kind = _REFUSED.get(code, VerdictClass.START_FAILED)
        return Verdict(
            verdict=kind, confidence="high", sentence=f"it could not be started: {text}",
            evidence=(*evidence, Evidence(what=code, value=text, source="engine")),
        )  # fmt: skip
    if stop is not None:
        order = Evidence(
            what="stop order", value=f"{stop.reason} by {stop.by or 'unknown'}", source=f"event {stop.seq}"
        )
        preempted = stop.reason is EvictionReason.PREEMPTION
        return Verdict(
            verdict=VerdictClass.PREEMPTED if preempted else VerdictClass.STOPPED_BY_US,
            confidence="high",
            sentence=f"it was stopped on order ({stop.reason}{f', by {stop.by}' if stop.by else ''})",
            evidence=(order, *evidence),
        )
    for component in ended:
        if component.oom_killed:
            return Verdict(
                verdict=VerdictClass.OOM_CGROUP, confidence="high",
                sentence=f"component {component.component} was killed by the kernel at its own memory limit",
                evidence=evidence,
            )  # fmt: skip
    bad = [c for c in ended if c.exit_code != 0 or c.signal]
    if ended and not bad:
        return Verdict(
            verdict=VerdictClass.COMPLETED,
            confidence="high",
            sentence="every component ended with 0",
            evidence=evidence,
        )
    for component in bad:
        if component.exit_code is not None or component.signal is not None:
            return Verdict(
                verdict=VerdictClass.APPLICATION_EXIT,
                confidence="medium" if component.signal else "high",
                sentence=f"component {component.component} ended by itself with {_how(component)}",
                evidence=evidence,
            )
    return Verdict(
        verdict=VerdictClass.UNKNOWN, confidence="low",
        sentence="it ended while nobody watched (the agent was away), and its exit code is lost" if bad
        else "nothing of it was found, and no end was seen",
        evidence=evidence,
    )  # fmt: skip


def _how(component: Running) -> str:
    if component.signal is None:
        return f"exit code {component.exit_code}"
    try:
        return f"signal {signal.Signals(component.signal).name}"
    except ValueError:
        return f"signal {component.signal}"


def _evidence(component: Running) -> list[Evidence]:
    if component.exit_code is None and component.signal is None and not component.ended:
        return []
    return [
        Evidence(
            what=f"end of {component.component}",
            value=_how(component)
            if component.exit_code is not None or component.signal is not None
            else "exit code unknown",
            source=f"{component.engine} {component.ref}",
            at=component.ended,
        )
    ]

"""Rule 7: did the kernel kill it for memory, and at which boundary? Pure.

Three witnesses, in the order of their weight: the kernel's own log, which names the level; the counters of
the levels (a kill *and* a limit that was hit); the engine's flag. The exit code is none of them.
"""

from __future__ import annotations

import itertools
import signal
from typing import TYPE_CHECKING, Final

from rigbook_schemas.sentences import gib
from rigbook_schemas.values import Evidence, VerdictClass

from rigbook_nodeagent.verdict_text import Verdict, said

if TYPE_CHECKING:
    from rigbook_nodeagent.circumstances import Circumstances, HostMemory, LevelChange, MemoryKill
    from rigbook_nodeagent.engines.protocol import Running

__all__ = ["memory_verdict"]

NEAR: Final = 0.95  # of its limit: below that a level was not what was full
# What the kernel keeps for itself: with less than this available the machine is out of memory.
AVAILABLE_SHARE_MIN: Final = 0.03


def memory_verdict(c: Circumstances) -> Verdict | None:
    """7. The kernel killed it (or a part of it) for memory."""
    bad = [r for r in c.ended if (r.exit_code != 0 or r.signal) and not r.stopped_by_us]
    if not bad and c.ended:
        return None  # it ended well: whatever was killed, it got over it
    if c.kills:
        return _from_kernel(c, c.kills[-1], bad)
    for component in bad:
        told = _from_counters(c, component)
        if told is not None:
            return told
    return None


def _from_kernel(c: Circumstances, kill: MemoryKill, bad: list[Running]) -> Verdict:
    words = Evidence(what="kernel", value=kill.text, source=f"/dev/kmsg {kill.at:.3f}")
    victim = f"process {kill.program or kill.pid} of component {bad[0].component if bad else '?'}"
    confidence = "high" if any(_killed(r) for r in bad) else "medium"
    after = "" if confidence == "high" else ", and the component then ended by itself"
    if kill.everywhere:
        return said(
            VerdictClass.OOM_GLOBAL, confidence,
            f"the kernel killed {victim} because the machine had no memory left{_host(c.host)}{after}; "
            "no limit of its own was at fault",
            words,
        )  # fmt: skip
    level = next((lv for lv in c.levels if lv.path == kill.level or lv.path.endswith(kill.level)), None)
    where = _limit_of(level) if level is not None else f"the limit of {kill.level or 'a level above it'}"
    return said(
        VerdictClass.OOM_CGROUP, confidence, f"the kernel killed {victim} at {where}{after}", words
    )  # fmt: skip


def _from_counters(c: Circumstances, component: Running) -> Verdict | None:
    levels = [lv for lv in c.levels if lv.component == component.component]
    own = next((lv for lv in levels if lv.own), None)
    kills = own.kills if own is not None and not own.gone else None
    killed_below = any((lv.kills or 0) > 0 for lv in levels)
    flagged = component.oom_killed is True or bool(kills)
    full = _full(levels)
    if not flagged and not (_killed(component) and (killed_below or (full is not None and kills is None))):
        return None
    if full is not None:
        sure = flagged and _killed(component)
        counted = Evidence(
            what=f"oom at {full.name}",
            value=f"max +{_number(full.limit_hits)}, oom +{_number(full.ooms)}, oom_kill +{_number(full.kills)}",
            source=full.path,
        )
        if not flagged and not killed_below:
            # It filled its limit and was killed; no counter could be read after the end.
            return said(
                VerdictClass.OOM_CGROUP, "low",
                f"component {component.component} was killed when it had filled {_limit_of(full)}; "
                "its counters were gone before they could be read",
                counted,
            )  # fmt: skip
        child = "" if _killed(component) else "a child of "
        return said(
            VerdictClass.OOM_CGROUP, "high" if sure else "medium",
            f"the kernel killed {child}component {component.component} at {_limit_of(full)}"
            f"{'' if _killed(component) else ', and the component then ended by itself'}",
            counted,
        )  # fmt: skip
    if _exhausted(c.host):
        return said(
            VerdictClass.OOM_GLOBAL, "medium",
            f"the kernel killed component {component.component} for memory; no limit around it was full, and the "
            f"machine had no memory left{_host(c.host)}",
            Evidence(what="oom_kill", value=f"+{_number(kills)}", source=own.path if own else "engine"),
        )  # fmt: skip
    if component.oom_killed is True or kills:
        return said(
            VerdictClass.OOM_CGROUP, "medium",
            f"the kernel killed component {component.component} for memory"
            + (f" at {_limit_of(own)}" if own is not None and own.limit_bytes else "; which limit was full was not seen"),
            Evidence(what="oom_killed", value="true", source=str(component.engine)),
        )  # fmt: skip
    return None


def _full(levels: list[LevelChange]) -> LevelChange | None:
    """The level whose limit was hit: from the inside outwards, counters of the level alone before fullness."""
    limited = [lv for lv in levels if lv.limit_bytes is not None]
    for level in limited:
        if level.ooms:
            return level
    for inner, outer in itertools.pairwise(limited):
        # The inner one is gone; the outer one counts an oom below that was not its own.
        if inner.gone and (outer.ooms_below or 0) > (outer.ooms or 0) and outer.ooms is not None:
            return inner
    for level in limited:
        if level.limit_hits and level.fullness >= NEAR:
            return level
    return next((lv for lv in limited if lv.gone and lv.fullness >= NEAR), None)


def _killed(component: Running) -> bool:
    return component.signal == signal.SIGKILL or component.exit_code == 128 + signal.SIGKILL


def _exhausted(host: HostMemory) -> bool:
    least = host.least_available_bytes if host.least_available_bytes is not None else host.available_bytes
    return (
        least is not None
        and bool(host.total_bytes)
        and least <= AVAILABLE_SHARE_MIN * (host.total_bytes or 0)
    )


def _limit_of(level: LevelChange) -> str:
    own = "its own limit" if level.own else "the limit"
    return f"{own} of {gib(level.limit_bytes)} ({level.name})"


def _host(host: HostMemory) -> str:
    least = host.least_available_bytes if host.least_available_bytes is not None else host.available_bytes
    return f" ({gib(least)} of {gib(host.total_bytes)} available)" if least is not None else ""


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)

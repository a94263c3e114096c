"""`verdict`: from the circumstances of an end to why it ended. Pure; the first rule that matches decides.

The order is that of `RULES` below, and docs/verdicts.md explains it. Three things it never does: call exit
code 137 an out-of-memory, call a new container a crash, and guess where it can say that it does not know.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.sentences import gib
from rigbook_schemas.values import EvictionReason, Evidence, VerdictClass

from rigbook_nodeagent.gpus.xids import ends_card
from rigbook_nodeagent.memory_verdict import memory_verdict
from rigbook_nodeagent.verdict_text import Verdict, how, said

if TYPE_CHECKING:
    from collections.abc import Callable

    from rigbook_nodeagent.circumstances import CardUse, Circumstances
    from rigbook_nodeagent.engines.protocol import Running

__all__ = ["HARDWARE_XIDS", "RULES", "Verdict", "verdict"]

EVIDENCE_MAX: Final = 60
_REFUSED: Final = {
    "runtime_missing": VerdictClass.RUNTIME_MISSING,
    "image_pull": VerdictClass.IMAGE_PULL,
}
# Errors of the hardware that hit this program alone; those after which the card is no good are in `gpus.xids`.
HARDWARE_XIDS: Final = frozenset({54, 61, 81, 82, 94, 121, 136, 149, 155, 156, 158})
# How much of its allotment a program must have held for the allotment to be what was too small.
FILLED: Final = 0.9


def verdict(circumstances: Circumstances) -> Verdict:
    """Why it ended, how sure we are, and the evidence in the order of time."""
    for rule in RULES:
        told = rule(circumstances)
        if told is not None:
            break
    else:
        told = _unknown(circumstances)
    return msgspec.structs.replace(told, evidence=_evidence(circumstances, told))


# -- the rules, in their order --------------------------------------------------------------------------


def refused(c: Circumstances) -> Verdict | None:
    """1. The engine did not start it."""
    if c.refused is None:
        return None
    code, text = c.refused
    return said(
        _REFUSED.get(code, VerdictClass.START_FAILED), "high", f"it could not be started: {text}",
        Evidence(what=code, value=text[:500], source="engine"),
    )  # fmt: skip


def ordered(c: Circumstances) -> Verdict | None:
    """2. A stop order was known before the end: 137 after our own SIGKILL is not out of memory."""
    if c.stop_reason is None or c.ended_before_stop:
        return None
    by = f", by {c.stop_by}" if c.stop_by else ""
    preempted = c.stop_reason is EvictionReason.PREEMPTION
    order = Evidence(
        what="stop order",
        value=f"{c.stop_reason} by {c.stop_by or 'unknown'}",
        source=f"event {c.stop_seq}",
    )
    return said(
        VerdictClass.PREEMPTED if preempted else VerdictClass.STOPPED_BY_US, "high",
        f"it was stopped on order ({c.stop_reason}{by})", order,
    )  # fmt: skip


def hardware(c: Circumstances) -> Verdict | None:
    """3. A card of it failed in the same window: that wins over the exit code, and over a probe it made fail."""
    bad = _bad(c)
    if not bad and c.probe is None and not (c.vanished or c.rebooted):
        return None
    for trouble in c.troubles:
        kind, _, number = trouble.code.partition(" ")
        if kind == "xid" and not (number.isdigit() and _of_hardware(int(number))):
            continue
        words = {"ecc": "reported an uncorrectable memory error", "lost": "is lost to the driver"}
        what = words.get(kind, f"reported Xid {number}")
        return said(
            VerdictClass.GPU_HARDWARE, "high",
            f"card {trouble.card} {what} while it ran; {_ended_with(bad)}is what that looks like from outside",
            Evidence(what=trouble.code, value=trouble.text[:300] or what, source=trouble.card),
        )  # fmt: skip
    return None


def probe_kill(c: Circumstances) -> Verdict | None:
    """4. We ended it because a probe said no."""
    probe = c.probe
    if probe is None:
        return None
    startup = probe.kind == "startup"
    kind = VerdictClass.PROBE_KILL_STARTUP if startup else VerdictClass.PROBE_KILL_LIVENESS
    sentence = (
        f"component {probe.component} was not ready within {probe.seconds:.0f} s and was ended by us"
        if startup
        else f"component {probe.component} failed its probe {probe.failures} times in a row and was ended by us"
    )
    near = next((lv for lv in c.levels if lv.component == probe.component and lv.fullness >= FILLED), None)
    stalled = max((lv.full_avg10 or 0.0 for lv in c.levels if lv.component == probe.component), default=0.0)
    if near is not None or stalled >= 10:
        where = f" at {near.fullness:.0%} of the limit of {near.name}" if near is not None else ""
        waited = f", stalled {stalled:.0f} % of the time" if stalled >= 10 else ""
        sentence += (
            f"; it was short of host memory{where}{waited}: slow, which need not be dead. "
            "Give it more host memory or the probe more time"
        )
    elif startup:
        sentence += "; if loading takes that long, raise startup_max of its probe"
    return said(
        kind, "high", sentence,
        Evidence(what=f"{probe.kind} probe of {probe.component}", value=probe.why[:300], source="probe"),
    )  # fmt: skip


def reboot(c: Circumstances) -> Verdict | None:
    """5. The machine was started anew: of an earlier boot nothing can run."""
    if not c.rebooted:
        return None
    return said(
        VerdictClass.NODE_REBOOT, "high", "the machine was started anew while it ran",
        Evidence(what="boot id", value="another one than when it was started", source="kernel"),
    )  # fmt: skip


def outside(c: Circumstances) -> Verdict | None:
    """6. Somebody else replaced, removed or stopped it."""
    for component in c.ended:
        if component.replaced:
            changed = component.image_changed
            return said(
                VerdictClass.REDEPLOY if changed else VerdictClass.EXTERNAL_REMOVAL,
                "high" if changed else "medium",
                f"component {component.component} was replaced from outside of Rigbook"
                f"{' by one of another image' if changed else ' by another container of the same image'}"
                "; the one before left no record of an end, so this is no crash",
                Evidence(what="replaced", value=component.replaced, source=str(component.engine)),
            )  # fmt: skip
    killed = next(
        (r for r in c.ended if r.killed_by_others and not r.oom_killed and not r.stopped_by_us), None
    )
    if killed is not None:
        return said(
            VerdictClass.EXTERNAL_REMOVAL, "high",
            f"component {killed.component} was stopped from outside of Rigbook ({killed.killed_by_others})",
            Evidence(what="kill", value=killed.killed_by_others, source=str(killed.engine)),
        )  # fmt: skip
    if c.vanished:
        return said(
            VerdictClass.EXTERNAL_REMOVAL, "high" if c.watched else "medium",
            f"component {c.vanished[0]} is gone, and it was not us who removed it"
            f"{'' if c.watched else '; no agent watched when it happened'}",
            Evidence(what="gone", value=", ".join(c.vanished), source="engine"),
        )  # fmt: skip
    return None


def card_memory(c: Circumstances) -> Verdict | None:
    """8. It said itself that the card had no memory for it; the books say whose fault that is."""
    failure = c.refusal
    if failure is None or not _bad(c):
        return None
    wanted = f" ({gib(failure.wanted_bytes)} wanted)" if failure.wanted_bytes is not None else ""
    words = Evidence(what=f"output of {failure.component}", value=failure.text, source="log")
    beside = next((use for use in c.cards if use.starts_beside), None)
    if beside is not None:
        return said(
            VerdictClass.GPU_ALLOC_RACE, "high" if failure.measured else "medium",
            f"component {failure.component} found no memory on card {beside.card}{wanted} while "
            f"{', '.join(beside.starts_beside[:3])} was starting on it too: they measured it at the same time",
            words,
        )  # fmt: skip
    short = next((use for use in c.cards if _short(use)), None)
    if short is not None:
        return said(
            VerdictClass.GPU_ALLOC_REAL, "high",
            f"component {failure.component} found no memory on card {short.card}{wanted}: others held "
            f"{gib(short.others_bytes)} of {gib(short.total_bytes)} there, and {gib(short.allotted_bytes)} are its "
            "allotment: the card had less than the books say",
            words,
        )  # fmt: skip
    filled = next((use for use in c.cards if _asked_more(use, failure.wanted_bytes)), None)
    if filled is not None:
        return said(
            VerdictClass.GPU_ALLOC_RESERVE, "high",
            f"component {failure.component} asked for more than its allotment of {gib(filled.allotted_bytes)} on "
            f"card {filled.card}{wanted}, and held {gib(filled.own_bytes)}: ask for more GPU memory, or let it reserve less",
            words,
        )  # fmt: skip
    return said(
        VerdictClass.GPU_ALLOC_RESERVE, "low",
        f"component {failure.component} found no memory on its card{wanted}; no other start and no other use of the "
        "card was seen, so it is taken to have asked for more than there is",
        words,
    )  # fmt: skip


def completed(c: Circumstances) -> Verdict | None:
    """9. Everything ended with 0."""
    if not c.ended or _bad(c):
        return None
    return said(VerdictClass.COMPLETED, "high", "every component ended with 0")


def application(c: Circumstances) -> Verdict | None:
    """10. It ended by itself."""
    for component in _bad(c):
        if component.exit_code is None and component.signal is None:
            continue
        # SIGKILL comes from somebody; nobody is found here, so this is not sure.
        killed = component.signal == signal.SIGKILL or component.exit_code == 128 + signal.SIGKILL
        return said(
            VerdictClass.APPLICATION_EXIT, "low" if killed else "medium" if component.signal else "high",
            f"component {component.component} ended by itself with {how(component)}"
            f"{', and nothing shows who killed it: it is not taken for out of memory' if killed else ''}",
        )  # fmt: skip
    return None


def _unknown(c: Circumstances) -> Verdict:
    """11. Nothing explains it."""
    return said(
        VerdictClass.UNKNOWN, "low",
        "it ended while nobody watched (the agent was away), and its exit code is lost"
        if _bad(c) else "nothing of it was found, and no end was seen",
    )  # fmt: skip


RULES: Final[tuple[Callable[[Circumstances], Verdict | None], ...]] = (
    refused, ordered, hardware, probe_kill, reboot, outside, memory_verdict, card_memory, completed, application,
)  # fmt: skip


# -- helpers ------------------------------------------------------------------------------------------


def _of_hardware(xid: int) -> bool:
    return ends_card(xid) or xid in HARDWARE_XIDS


def _bad(c: Circumstances) -> list[Running]:
    """Components that ended badly, and not because we stopped them after another one had ended."""
    bad = [r for r in c.ended if r.exit_code != 0 or r.signal]
    return [r for r in bad if not r.stopped_by_us] or bad


def _ended_with(bad: list[Running]) -> str:
    return f"{how(bad[0])} of component {bad[0].component} " if bad else "its end "


def _short(use: CardUse) -> bool:
    """Others held so much that the allotment was not there."""
    if use.others_bytes is None or not use.total_bytes:
        return False
    return use.total_bytes - use.others_bytes < use.allotted_bytes


def _asked_more(use: CardUse, wanted_bytes: int | None) -> bool:
    if not use.allotted_bytes or use.own_bytes is None:
        return False
    return (
        use.own_bytes + (wanted_bytes or 0) > use.allotted_bytes
        or use.own_bytes >= FILLED * use.allotted_bytes
    )


def _evidence(c: Circumstances, told: Verdict) -> tuple[Evidence, ...]:
    """What decided comes first; then the ends; then all boundaries; then the story, which is the longest."""
    found = [*told.evidence]
    for component in c.ended:
        if component.exit_code is not None or component.signal is not None or component.ended:
            known = component.exit_code is not None or component.signal is not None
            found.append(
                Evidence(
                    what=f"end of {component.component}", value=how(component) if known else "exit code unknown",
                    source=f"{component.engine} {component.ref[:20]}", at=component.ended,
                )
            )  # fmt: skip
    if c.attempt > 1:
        found.append(Evidence(what="attempt", value=str(c.attempt), source="agent"))
    kernel = [Evidence(what="kernel", value=k.text, source=f"/dev/kmsg {k.at:.3f}") for k in c.kills]
    found += [item for item in kernel if item not in found]
    for level in c.levels:
        if level.limit_bytes is None and not level.kills and not level.own:
            continue
        limit = gib(level.limit_bytes) if level.limit_bytes is not None else "no limit"
        counts = "".join(
            f", {word} +{number}"
            for word, number in (("max", level.limit_hits), ("oom", level.ooms), ("oom_kill", level.kills))
            if number
        )
        found.append(
            Evidence(
                what=f"memory of {level.component} at {level.name}",
                value=f"{gib(level.last_bytes)} of {limit}, peak {gib(level.peak_bytes)}{counts}"
                f"{' (last seen; the level is gone)' if level.gone else ''}",
                source=level.path,
            )
        )  # fmt: skip
    if c.host.available_bytes is not None:
        stalled = f", stalled {c.host.full_avg10:.0f} %" if c.host.full_avg10 is not None else ""
        found.append(
            Evidence(
                what="memory of the machine", source="/proc/meminfo",
                value=f"{gib(c.host.available_bytes)} of {gib(c.host.total_bytes)} available, at least "
                f"{gib(c.host.least_available_bytes)} shortly before{stalled}",
            )
        )  # fmt: skip
    found += [
        Evidence(
            what="memory of card", source=use.card,
            value=f"own {gib(use.own_bytes)} of {gib(use.allotted_bytes)} allotted, others {gib(use.others_bytes)}",
        )
        for use in c.cards
        if use.own_bytes is not None or use.others_bytes is not None
    ]  # fmt: skip
    for trouble in c.troubles[:8]:
        item = Evidence(what=trouble.code, value=trouble.text[:300], source=trouble.card)
        if item not in found:
            found.append(item)
    room = max(0, EVIDENCE_MAX - len(found))
    return (*found[:EVIDENCE_MAX], *(c.story[-room:] if room else ()))

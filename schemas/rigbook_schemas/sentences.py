"""Reasons as the lines a person reads. Codes and numbers travel; the words are made here, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rigbook_schemas.values import GIB, Mode, ReasonCode

if TYPE_CHECKING:
    from rigbook_schemas.values import Reason

__all__ = ["enforcement", "gib", "sentence"]


def gib(memory_bytes: int | None) -> str:
    """Memory for people, in GiB with one digit; "?" when unknown."""
    if memory_bytes is None:
        return "?"
    if 0 < abs(memory_bytes) < GIB // 10:
        return f"{memory_bytes / 1024**2:.0f} MiB" if abs(memory_bytes) >= 1024**2 else f"{memory_bytes} B"
    return f"{memory_bytes / GIB:.1f} GiB"


def sentence(reason: Reason) -> str:
    """One line: `vram_short: GPU 1 of node a has 30.0 GiB free of 48.0 GiB (18.0 GiB bound), 82.0 GiB asked`."""
    return f"{reason.code}: {_words(reason)}"


def _where(reason: Reason) -> str:
    if not reason.node:
        return "the fleet"
    if reason.index is None:
        return f"node {reason.node}"
    return f"GPU {reason.index} of node {reason.node}"


def _lasting(seconds: float | None) -> str:
    if seconds is None:
        return "unknown time"
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def _held_by(reason: Reason) -> str:
    if not reason.holders:
        return "another binding"
    stopped = set(reason.holders_stopped)
    names = [f"{h} (desired state: stopped)" if h in stopped else h for h in reason.holders[:4]]
    more = f" and {len(reason.holders) - 4} more" if len(reason.holders) > 4 else ""
    return ", ".join(names) + more


def _words(r: Reason) -> str:  # one branch per code, nothing else
    where = _where(r)
    also = f" (so do {r.cards - 1} more cards)" if r.cards > 1 else ""
    match r.code:
        case ReasonCode.INVALID_UNIT:
            return (
                f"{r.asked_bytes} bytes per card cannot be meant: memory is in bytes on the wire, at least "
                f"16 MiB and at most 16 TiB; write 24GiB, or 24 * 1024**3"
            )
        case ReasonCode.INVALID_REQUEST:
            return f"{r.asked or 'the request'}: {r.found or 'cannot be met'}"
        case ReasonCode.NO_NODES:
            return "no node has joined yet; start an agent with `rigbook agent --join URL`"
        case ReasonCode.CAPACITY_NEVER:
            return (
                f"{where} has {gib(r.total_bytes)} per card even when empty, {gib(r.asked_bytes)} asked{also}"
            )
        case ReasonCode.COUNT_SHORT:
            if not r.node:
                return f"{where} has {r.found or 'no node'} that could take a part now, {r.asked} asked"
            return f"{where} offers {r.found or '0'} fitting cards at once, {r.asked} asked"
        case ReasonCode.GPU_BUSY:
            return f"{where} is shared by {_held_by(r)}, and the card was asked for exclusively{also}"
        case ReasonCode.VRAM_SHORT:
            foreign = f", {gib(r.foreign_bytes)} used by others" if r.foreign_bytes else ""
            return (
                f"{where} has {gib(r.free_bytes)} free of {gib(r.total_bytes)} ({gib(r.bound_bytes)} bound{foreign}), "
                f"{gib(r.asked_bytes)} asked, {gib(r.short_bytes)} short{also}"
            )
        case ReasonCode.MODE_CONFLICT:
            return f"{where} serves {r.found}, {r.asked} asked{also}"
        case ReasonCode.EXCLUSIVE_HELD:
            return f"{where} is held exclusively by {_held_by(r)}{also}"
        case ReasonCode.PROJECT_QUOTA:
            return f"project {r.found} holds {gib(r.bound_bytes)} of its {gib(r.total_bytes)}, {gib(r.asked_bytes)} asked"
        case ReasonCode.PRIORITY_CAP:
            return f"high priority holds {gib(r.bound_bytes)} of the {gib(r.total_bytes)} it may, {gib(r.asked_bytes)} asked"
        case ReasonCode.NODE_CORDONED:
            return f"{where} is cordoned{f' ({r.found})' if r.found else ''}{also}"
        case ReasonCode.NODE_UNREACHABLE:
            return f"{where} has not been heard of{f' since {r.found}' if r.found else ''}{also}"
        case ReasonCode.NODE_MISMATCH:
            return f"{where} is not the node asked for ({r.asked}){also}"
        case ReasonCode.DRIVER_MISMATCH:
            return (
                f"{where}: {r.found or 'the GPU driver does not answer'}; bindings resume when it does{also}"
            )
        case ReasonCode.ENGINE_MISSING:
            return f"{where} runs {r.found or 'no engine'}, the components need {r.asked}{also}"
        case ReasonCode.GPU_QUARANTINED:
            return f"{where} is quarantined{f' ({r.found})' if r.found else ''}{also}"
        case ReasonCode.GPU_UNKNOWN:
            return f"{where}: {r.found or 'its state cannot be read'}{also}"
        case ReasonCode.LABEL_MISMATCH:
            return f"{where} has {r.found or 'no such label'}, {r.asked} required{also}"
        case ReasonCode.MODEL_MISMATCH:
            return f"{where} is a {r.found}, {r.asked} asked{also}"
        case ReasonCode.FOREIGN_USE:
            return (
                f"{where} has {gib(r.free_bytes)} free of {gib(r.total_bytes)}; "
                f"{gib(r.foreign_bytes)} used by {r.found or 'processes that are not managed'}, {gib(r.asked_bytes)} asked{also}"
            )
        case ReasonCode.START_GATE:
            return f"{where} is starting another engine; one at a time"
        case ReasonCode.BIND_BACKOFF:
            when = (
                f"the next try is at {r.at}" if r.at else "no more tries: mend the cause and raise it again"
            )
            return f"it could not be started ({r.found}), {r.asked}; {when}"
        case ReasonCode.SAFE_MODE:
            return f"nothing is bound: {r.found or 'the log does not continue what was known'}; run `rigbook doctor`"
        case ReasonCode.BEHIND_OTHERS:
            return f"it would fit, but {_held_by(r)} came first"
        case ReasonCode.HELD_BACK:
            return f"{where} is kept for {_held_by(r)}, which came first{also}"
        case ReasonCode.MODE_SWITCHING:
            return f"{where} is being switched to {r.found}, and takes nothing until it is{also}"
        case ReasonCode.OUTSIDE_WINDOW:
            return f"it runs {r.asked} only; the next time is {r.at or 'never'}"
        case ReasonCode.WEIGHTS_NOT_CACHED:
            return f"{where} fits, but has not the weights {r.asked} ({_lasting(r.seconds)} to fetch them)"


def enforcement(mode: Mode, enforces: str) -> str:
    """What keeps a binding of this mode within its part of a card, said honestly."""
    if enforces == "mig":
        return "enforced by the hardware (MIG)"
    if enforces == "mps" and mode is Mode.MEMORY_SLICE:
        return "memory enforced by CUDA (MPS limit)"
    if enforces == "compute-mode" and mode is Mode.EXCLUSIVE:
        return "one process at a time enforced by the driver (compute mode)"
    return "accounted and watched, not enforced"

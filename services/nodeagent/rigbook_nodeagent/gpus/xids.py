"""Xid errors: what NVIDIA's numbers mean, and which of them put a card out of service. Pure.

After NVIDIA's "XID Errors" guide (docs.nvidia.com/deploy/xid-errors). An Xid of an application (a wild pointer, a
killed program) says nothing about the card; those of the hardware do, and what runs next on it would fail too.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FALLEN_OFF", "ends_card", "meaning"]

FALLEN_OFF: Final = 79
MEANINGS: Final = {
    8: "the GPU stopped processing",
    13: "graphics engine exception (mostly the program's fault)",
    31: "GPU memory page fault (mostly the program's fault)",
    32: "invalid or corrupted push buffer",
    43: "the GPU stopped processing (reset of one program's channel)",
    45: "preemptive clean-up after an earlier error, or a killed program",
    46: "the GPU stopped processing",
    48: "double bit ECC error",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "a row is to be remapped, or a page was retired",
    64: "a row could not be remapped, or a page not be retired",
    68: "video processor exception",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high single bit ECC error rate",
    94: "contained ECC error: one program is hit",
    95: "uncontained ECC error: every program on the card is hit",
    109: "context switch time-out",
    110: "security fault",
    119: "the GPU's system processor (GSP) does not answer",
    120: "the GPU's system processor (GSP) failed",
    140: "unrecovered ECC error",
    143: "the GPU could not be initialised",
    144: "NVLink: SAW error",
    145: "NVLink: RLW error",
    149: "NVLink: NETIR error",
    154: "the GPU's recovery action changed",
}
# What runs next on the card would fail as well, until it is reset, the node rebooted or the card replaced.
ENDING: Final = frozenset({46, 48, 62, 64, 74, 79, 95, 110, 119, 120, 140, 143})


def meaning(code: int) -> str:
    return MEANINGS.get(code, "see NVIDIA's Xid catalogue")


def ends_card(code: int) -> bool:
    """Should the card take nothing more until somebody has looked at it?"""
    return code in ENDING

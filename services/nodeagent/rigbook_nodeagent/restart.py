"""Whether an ended workload is started again, and when: by the demand's policy and by the verdict. Pure.

| verdict | started again |
|---|---|
| stopped, preempted, refused by the engine | no |
| `gpu_hardware` | no: the card is not fit; the demand must go elsewhere |
| `completed` | only with policy `always` |
| `gpu_alloc(race)` | once in any case, when the other start is over; then by policy |
| `oom_cgroup`, `gpu_alloc(reserve)`, `gpu_alloc(real)` | by policy, four times slower: the same limit gives the same end |
| all others | by policy, with a doubling back-off |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rigbook_schemas.values import VerdictClass

if TYPE_CHECKING:
    from rigbook_schemas.values import Restart

__all__ = ["seconds_until_again"]

BACKOFF_SECONDS_MAX: Final = 60.0
RACE_SECONDS: Final = 5.0
_NEVER: Final = frozenset(
    {
        VerdictClass.STOPPED_BY_US,
        VerdictClass.PREEMPTED,
        VerdictClass.GPU_HARDWARE,
        VerdictClass.RUNTIME_MISSING,
        VerdictClass.IMAGE_PULL,
        VerdictClass.START_FAILED,
    }
)
_SLOWER: Final = frozenset(
    {VerdictClass.OOM_CGROUP, VerdictClass.GPU_ALLOC_RESERVE, VerdictClass.GPU_ALLOC_REAL}
)
_SLOWER_TIMES: Final = 4.0


def seconds_until_again(restart: Restart, verdict: VerdictClass, *, attempt: int) -> float | None:
    """Back-off before the next attempt; None = it is not started again. `attempt` counts from 1."""
    if verdict in _NEVER:
        return None
    backoff: float = min(BACKOFF_SECONDS_MAX, restart.backoff_seconds * 2 ** min(attempt - 1, 20))
    if verdict is VerdictClass.GPU_ALLOC_RACE and attempt == 1:
        return max(RACE_SECONDS, backoff)
    if attempt > restart.attempts_max or restart.policy == "never":
        return None
    if verdict is VerdictClass.COMPLETED and restart.policy != "always":
        return None
    if verdict in _SLOWER:
        return min(_SLOWER_TIMES * BACKOFF_SECONDS_MAX, _SLOWER_TIMES * backoff)
    return backoff

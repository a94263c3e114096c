"""What will probably go wrong with a demand, told when it is raised. Pure; nothing here refuses anything."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rigbook_schemas.events import DemandRaised
    from rigbook_schemas.values import Component

__all__ = ["advice"]

_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh"})
_OPTIONS: Final = re.compile(r"-[a-z]*c[a-z]*\Z")
# The shell hands the signal on, or is replaced by the program.
_FINE: Final = re.compile(r"(^|[;&|\n]|\bthen\b|\bdo\b)\s*(exec\s+\S|trap\s)")


def advice(spec: DemandRaised) -> list[str]:
    """Sentences for whoever raises it; [] when there is nothing to say."""
    said: list[str] = []
    for component in spec.components:
        script = _script(component.command)
        if script is None or _FINE.search(script):
            continue
        # In a container the shell is what a stop signal reaches; the program in it is killed unasked.
        if component.image or spec.preemptible or component.checkpoint is not None:
            said.append(
                f"component {component.name}: its first process is a shell, which keeps the stop signal to itself, so the "
                f"program cannot save or end by itself. Write the command as a list without a shell, or let the "
                "shell become the program: sh -c '...; exec PROGRAM'"
            )
        said += _beyond(component)
    return said


def _beyond(component: Component) -> list[str]:
    checkpoint = component.checkpoint
    if (
        checkpoint is not None
        and checkpoint.acknowledge == "exit"
        and checkpoint.signal not in ("SIGTERM", "SIGINT")
    ):
        return [
            (
                f"component {component.name}: its checkpoint answers by ending, and a shell ends at {checkpoint.signal} "
                "before the program has saved"
            )
        ]
    return []


def _script(command: Sequence[str]) -> str | None:
    """The script of a shell that is started as the first process; None when it is not one."""
    if len(command) < 3 or command[0].rpartition("/")[2] not in _SHELLS:
        return None
    for place, word in enumerate(command[1:-1], start=1):
        if _OPTIONS.match(word):
            return command[place + 1]
        if not word.startswith("-"):
            return None
    return None

"""What Docker itself does not keep: that we ordered a stop, which container we started, who else sent a signal.

Stop orders and starts are small files, so they survive the agent. Kills and outages come from Docker's
events, which the daemon keeps a few hundred of: what happened before them is not known, and not guessed.
"""

from __future__ import annotations

import collections
import contextlib
import json
import signal
from typing import TYPE_CHECKING, Any, Final

import structlog
from rigbook_schemas.wire import instant, rfc3339

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["ContainerStory"]

# A kill that a container outlives by longer than this was not its end.
KILL_TO_END_SECONDS: Final = 120.0
OUTAGES_KEPT: Final = 16
KILLS_KEPT: Final = 4_000
# From the last event of a dying daemon to its being away; and from the first answer to the ends it found.
OUTAGE_SLACK_NS: Final = 30 * 10**9
_NS: Final = 10**9
_ENDING: Final = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT})

_log = structlog.stdlib.get_logger(__name__)


class ContainerStory:
    """Of one engine. `boot_ns`: when this machine was started, Unix ns; 0 = unknown."""

    def __init__(self, directory: Path, *, boot_ns: int) -> None:
        self._stops = directory / "stops"
        self._starts = directory / "starts"
        self._boot_ns = boot_ns
        self._ours: dict[str, set[int]] = collections.defaultdict(set)  # container to signals we sent
        self._kills: collections.OrderedDict[str, tuple[int, int]] = collections.OrderedDict()  # signal, when
        self._outages: collections.deque[tuple[int, int]] = collections.deque(maxlen=OUTAGES_KEPT)
        self._away_ns = 0  # the engine is away since then; 0 = it is there

    def open(self) -> None:
        """Raises OSError."""
        for folder in (self._stops, self._starts):
            folder.mkdir(parents=True, exist_ok=True)

    # -- what we do -----------------------------------------------------------------------------------

    def stop_ordered(self, identity: str) -> None:
        """Before the first signal: what ends afterwards was stopped by us."""
        (self._stops / identity).touch()

    def stopped_by_us(self, identity: str) -> bool:
        return (self._stops / identity).exists()

    def signalled(self, identity: str, number: int) -> None:
        """Before we send it: its event is then not somebody else's."""
        self._ours[identity].add(number)

    def started(self, name: str, shown: Mapping[str, Any]) -> None:
        """This container is what we started (or took) under this name."""
        note = {"id": str(shown["Id"]), "image": str(shown.get("Image", ""))}
        with contextlib.suppress(OSError):  # a full disk: a replacement will not be noticed, all else works
            (self._starts / name).write_text(json.dumps(note), encoding="utf-8")

    def removed(self, name: str, identity: str) -> None:
        (self._stops / identity).unlink(missing_ok=True)
        (self._starts / name).unlink(missing_ok=True)
        self._ours.pop(identity, None)
        self._kills.pop(identity, None)

    def was_started(self, name: str) -> bool:
        return (self._starts / name).exists()

    # -- what others do -------------------------------------------------------------------------------

    def heard(self, event: Mapping[str, Any]) -> None:
        """An event of one of our containers."""
        self._back(_when_ns(event))
        if event.get("Action") != "kill":
            return
        actor = event.get("Actor") or {}
        identity, number = str(actor.get("ID", "")), str((actor.get("Attributes") or {}).get("signal", ""))
        if not number.isdigit() or int(number) not in _ENDING:
            return
        if int(number) in self._ours.get(identity, ()) or self.stopped_by_us(identity):
            return
        self._kills[identity] = (int(number), _when_ns(event))
        if len(self._kills) > KILLS_KEPT:
            self._kills.popitem(last=False)

    def away(self, now_ns: int) -> None:
        """The engine does not answer from here on."""
        if not self._away_ns:
            self._away_ns = now_ns

    def answers(self, now_ns: int) -> None:
        """It does again."""
        self._back(now_ns)

    def _back(self, now_ns: int) -> None:
        if self._away_ns:
            self._outages.append((self._away_ns, max(now_ns, self._away_ns)))
            self._away_ns = 0

    # -- what is concluded ----------------------------------------------------------------------------

    def killed_by_others(self, identity: str, ended: str) -> str:
        """Who else ended this container, in words; "" when nothing says so."""
        if self.stopped_by_us(identity):
            return ""
        ended_ns = instant(ended) or 0
        for since_ns, until_ns in self._outages:
            if since_ns - OUTAGE_SLACK_NS <= ended_ns <= until_ns + OUTAGE_SLACK_NS:
                return "the Docker Engine was stopped or restarted, without live restore"
        number, when_ns = self._kills.get(identity, (0, 0))
        if number and -_NS <= ended_ns - when_ns <= KILL_TO_END_SECONDS * _NS:
            return f"{signal.Signals(number).name} through the Docker Engine at {rfc3339(when_ns)}"
        return ""

    def replaced(self, name: str, shown: Mapping[str, Any]) -> tuple[str, bool]:
        """(in words, another image) when this is not the container that we started under this name."""
        try:
            note: dict[str, str] = json.loads((self._starts / name).read_text(encoding="utf-8"))
            before, image = str(note["id"]), str(note["image"])
        except FileNotFoundError:
            return "", False
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("note of a started container cannot be read", container=name, why=str(error))
            return "", False
        identity, now = str(shown["Id"]), str(shown.get("Image", ""))
        if before == identity:
            return "", False
        told = f"container {before[:12]} ({image[:19]}) by {identity[:12]} ({now[:19]})"
        return told, now != image

    def other_boot(self, started: str) -> bool:
        """Was it started before this machine was?"""
        started_ns = instant(started)
        return bool(self._boot_ns) and started_ns is not None and started_ns < self._boot_ns


def _when_ns(event: Mapping[str, Any]) -> int:
    when = event.get("timeNano")
    return when if isinstance(when, int) else 0

"""What an agent remembers of its Docker Engine between calls: pulls under way, and whether containers get cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rigbook_nodeagent.engines.docker_client import PullProgress

__all__ = ["DockerNotes"]


class DockerNotes:
    """One node's. `no_cards` is why a container with cards could not be started; the toolkit is set up with a restart
    of Docker, so that (or a start that works) ends it.
    """

    def __init__(self) -> None:
        self.pulls: dict[str, PullProgress] = {}  # by image; the latest word on each
        self.no_cards = ""

    def pulled(self, progress: PullProgress) -> None:
        self.pulls[progress.image] = progress

    def refused(self, code: str, text: str) -> None:
        if code == "runtime_missing":
            self.no_cards = text

    def started(self) -> None:
        """A container with cards runs."""
        self.no_cards = ""

    def returned(self) -> None:
        """The daemon was away and is back."""
        self.no_cards = ""
        self.pulls.clear()

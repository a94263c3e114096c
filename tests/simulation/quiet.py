"""Logs of simulated services: thrown away, or shown with virtual time."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["hush", "show"]


def hush() -> None:
    """Nothing is logged: a line costs more than a decision."""
    logging.getLogger("rigbook_bus").setLevel(logging.CRITICAL + 1)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL),
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )


def show(time: Callable[[], float], write: Callable[[str], Any]) -> None:
    """One line per happening, with virtual time in front."""

    def line(_logger: object, name: str, event: dict[str, Any]) -> str:
        who = str(event.pop("instance", None) or event.pop("node", None) or "")
        rest = " ".join(f"{key}={value}" for key, value in event.items() if key not in ("event", "exc_info"))
        write(f"{time():9.3f} {name:7} {who:10} {event.get('event')} {rest}")
        raise structlog.DropEvent

    structlog.configure(
        processors=[line],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )

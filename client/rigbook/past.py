"""From a command's options to the past: a journal file or the bus, the moment asked for, and how far one has read."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from rigbook_replay.export import NothingToExport
from rigbook_replay.imports import CannotImport
from rigbook_replay.journal import Journal, NotAJournal
from rigbook_replay.source import BusSource, JournalSource, NoLedger
from rigbook_replay.timetravel import BeforeRecord, CannotFold, state_on
from rigbook_replay.views import Unanswerable
from rigbook_replay.writer import CannotResume
from rigbook_schemas.wire import instant

from rigbook.commands.invoke import connected, run
from rigbook.context import find_url
from rigbook.failures import (
    Failed,
    Invalid,
    NoAnswer,
    NotFound,
    RigbookFailure,
    WouldConflict,
    of_answer,
    of_bus,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator
    from pathlib import Path

    from rigbook_replay.source import Source
    from rigbook_replay.timetravel import Arrival

__all__ = ["moment_ns", "opened", "past_of", "progress", "said_plainly", "source_of"]


def past_of(moment: str, journal: Path | None, nats: str | None, data: Path | None) -> Arrival:
    """The state at an RFC 3339 moment ("" = at the end), from the journal, or read from the bus."""

    async def go() -> Arrival:
        async with source_of(journal, nats, data) as source:
            with progress("folding") as told:
                return await state_on(source, at_ns=moment_ns(moment), told=told)

    return run(go())


def moment_ns(moment: str) -> int | None:
    """Unix nanoseconds of an RFC 3339 moment, None for "": the end of its microsecond, as that is how times are shown."""
    at_ns = instant(moment) if moment else None
    return None if at_ns is None else at_ns + 999


@contextlib.asynccontextmanager
async def source_of(journal: Path | None, nats: str | None, data: Path | None) -> AsyncGenerator[Source]:
    """Where events are read from. Errors of reading become failures that a person can act on."""
    if journal is not None:
        with said_plainly(), Journal.open(journal) as there:
            yield JournalSource(there)
        return
    with said_plainly():
        async with connected(nats, data) as client:
            yield await BusSource.of(client.bus, find_url(nats, data))


@contextlib.contextmanager
def opened(path: Path) -> Generator[Journal]:
    """A journal, with errors said plainly."""
    with said_plainly(), Journal.open(path) as journal:
        yield journal


@contextlib.contextmanager
def said_plainly() -> Generator[None]:
    """Errors of the replay as failures: what, and what to do."""
    from rigbook_bus.protocol import BusError

    try:
        yield
    except RigbookFailure:
        raise
    except NotAJournal as error:
        raise Invalid(str(error), code=error.code) from error
    except CannotFold as error:
        raise Failed(
            str(error), code=error.code, remedy="`rigbook journal verify` says what is damaged or missing"
        ) from error
    except BeforeRecord as error:
        raise of_answer(error.code, str(error), "ask for a later moment") from error
    except NothingToExport as error:
        raise NotFound(str(error), code=error.code) from error
    except (CannotResume, CannotImport) as error:
        raise WouldConflict(str(error), code=error.code) from error
    except NoLedger as error:
        raise NoAnswer(str(error), code=error.code, remedy="run `rigbook doctor`") from error
    except Unanswerable as error:
        raise of_answer(error.failure.code, error.failure.text, error.failure.remedy) from error
    except BusError as error:
        raise of_bus(error, "reading the log") from error
    except OSError as error:
        raise Invalid(f"{error.filename}: {error.strerror}", code="file") from error


@contextlib.contextmanager
def progress(doing: str) -> Generator[Callable[[int, int], None] | None]:
    """A bar on the terminal's standard error, for what takes longer than a moment; None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from rigbook.output import console

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        line = bar.add_task(doing, total=None)

        def told(position: int, last: int) -> None:
            bar.update(line, completed=position, total=last)

        yield told

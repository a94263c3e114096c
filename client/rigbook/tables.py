"""Rows of answers as tables, with the columns people know. Pure: rows and `now` in, a rich table out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from rigbook_schemas.sentences import enforcement, gib
from rigbook_schemas.values import Mode
from rigbook_schemas.wire import instant

from rigbook.moments import ago
from rigbook.narrative import asked, event_line, printable, short_card, standing, stranger_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, RenderableType
    from rigbook_schemas.queries import CardRow, DemandRow, DriftRow, EventRow, NodeRow, ProjectRow, TenureRow

__all__ = [
    "cards",
    "cell",
    "clock",
    "demands",
    "drifts",
    "events",
    "facts",
    "fitted",
    "model",
    "nodes",
    "plain",
    "projects",
    "tenures",
]

WATCHED: Final = "watched"
# Columns of free text: they give way when the terminal is narrow.
FOLDED: Final = frozenset(
    {"WHY", "WHAT", "HELD BY", "PURPOSE", "HOW IT ENDED", "REMEDY", "RESULT", "OWNER", "GPU", "CARDS"}
)
STYLES: Final = {
    "running": "green", "ready": "green", "free": "green", "ok": "green",
    "bound": "cyan", "starting": "cyan", "shared": "cyan", "held": "cyan",
    "waiting": "yellow", "releasing": "yellow", "cordoned": "yellow", "quarantined": "yellow", "warn": "yellow",
    "refused": "red", "unreachable": "red", "unusable": "red", "absent": "red", "driver_mismatch": "red", "bad": "red",
    "ended": "dim", "withdrawn": "dim",
}  # fmt: skip


def demands(rows: Iterable[DemandRow], now_ns: int) -> Table:
    table = plain("DEMAND", "PROJECT", "OWNER", "GPU", "STATUS", "NODE NAME", "CARDS", "FOR", "WHY")
    for row in rows:
        _add(
            table,
            row.demand,
            row.project,
            row.owner,
            asked(row.memory_bytes, row.count, row.mode),
            status(row.phase if row.wanted or row.phase != "running" else "releasing"),
            ",".join(row.nodes),
            ",".join(short_card(card) for card in row.cards),
            age(row.since, now_ns),
            standing(row),
        )
    return table


def cards(rows: Iterable[CardRow]) -> Table:
    table = plain(
        "NODE NAME",
        "GPU",
        "UUID",
        "GPU MODEL",
        "VRAM TOTAL",
        "VRAM FREE",
        "VRAM USED",
        "LIMIT",
        "MODE",
        "STATUS",
        "HELD BY",
    )
    watched = False
    for row in rows:
        used = row.observed.memory_used_bytes if row.observed is not None else None
        told = ", ".join(row.holders)
        if row.why:
            told = f"{told} ({row.why})" if told else row.why
        if stranger := stranger_line(row):
            told = f"{told}; {stranger}" if told else stranger
        if row.drifts:
            told = f"{told} drift: {', '.join(row.drifts)}".strip()
        _add(
            table,
            row.node,
            str(row.index),
            short_card(row.uuid),
            model(row.model, simulated=row.simulated),
            gib(row.memory_bytes),
            gib(row.free_bytes),
            gib(used),
            _limit(row),
            (row.mode or "-") + (" (pinned)" if row.mode_pinned else ""),
            status(row.status),
            told,
        )
        watched = watched or _limit(row) == WATCHED
    if watched:
        table.caption = f"limit {WATCHED}: memory is accounted and watched, not enforced"
        table.caption_justify = "left"
    return table


def _limit(row: CardRow) -> str:
    """What keeps bindings within their part of the card."""
    if not row.mode:
        return row.enforces or "-"
    kept = not enforcement(Mode(row.mode), row.enforces).startswith("accounted")
    return row.enforces if kept else WATCHED


def nodes(rows: Iterable[NodeRow]) -> Table:
    table = plain(
        "NODE NAME", "GPU MODEL", "GPU COUNT", "VRAM TOTAL", "VRAM FREE", "BINDINGS", "STATUS", "HEARD", "WHY"
    )
    for row in rows:
        _add(
            table,
            row.name,
            model(row.gpu_model, simulated=row.simulated),
            str(row.gpu_count),
            gib(row.memory_bytes),
            gib(row.free_bytes),
            str(row.bindings),
            status(row.status),
            "never" if row.heard_seconds_ago is None else f"{ago(row.heard_seconds_ago)} ago",
            row.why,
        )
    return table


def drifts(rows: Iterable[DriftRow], now_ns: int) -> Table:
    table = plain("DRIFT", "NODE NAME", "GPU", "DEMAND", "FOR", "STATUS", "WHAT")
    for row in rows:
        state = "cleared" if row.cleared else "healing" if row.drift.healing else "open (dry run)"
        _add(
            table,
            row.drift.kind,
            row.drift.node,
            short_card(row.drift.card),
            row.drift.demand,
            age(row.detected, now_ns),
            status(state),
            row.drift.sentence
            if not row.cleared
            else f"{row.drift.sentence}; cleared: {row.how or row.cleared}",
        )
    return table


def projects(rows: Iterable[ProjectRow]) -> Table:
    table = plain("PROJECT", "VRAM USED", "RELEASING", "QUOTA", "OVER BY")
    for row in rows:
        quota = "no bound" if row.quota_bytes is None else gib(row.quota_bytes)
        _add(
            table,
            row.project,
            gib(row.used_bytes),
            gib(row.releasing_bytes),
            quota,
            gib(row.over_bytes) if row.over_bytes else "",
        )
    return table


def tenures(rows: Iterable[TenureRow]) -> Table:
    """The answer to `who`: one line per binding's time on the card."""
    table = plain("FROM", "UNTIL", "DEMAND", "PROJECT", "OWNER", "GPU", "EPOCH", "PURPOSE", "HOW IT ENDED")
    for row in rows:
        stopped = f"stop wanted {clock(row.desired_stopped)}" if row.desired_stopped else ""
        until = clock(row.released) if row.released else "still"
        _add(
            table,
            clock(row.bound),
            until,
            row.demand,
            row.project,
            f"{row.owner} <{row.contact}>" if row.contact else row.owner,
            f"{gib(row.memory_bytes)} {row.mode}",
            str(row.epoch),
            row.purpose,
            "; ".join(
                part for part in (row.end or row.verdict, stopped, "forced" if row.forced else "") if part
            ),
        )
    return table


def events(rows: Iterable[EventRow], *, with_demand: bool = True) -> Table:
    columns = ("SEQ", "TIME", "KIND", "DEMAND", "WHAT") if with_demand else ("SEQ", "TIME", "KIND", "WHAT")
    table = plain(*columns)
    for row in rows:
        about = (row.demand or row.node,) if with_demand else ()
        _add(table, str(row.seq), clock(row.received), row.kind or "?", *about, event_line(row))
    return table


def facts(pairs: Iterable[tuple[str, Any]]) -> Table:
    """Names and values, one a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        _add(table, name, value if isinstance(value, Text) else str(value))
    return table


def plain(*columns: str) -> Table:
    """An empty table; names and numbers stay whole as long as there is room, texts fold."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column,
            overflow="fold",
            no_wrap=column not in FOLDED,
            min_width=14 if column == "HELD BY" else None,
        )
    return table


def fitted(renderable: RenderableType, to: Console) -> RenderableType:
    """The same for a console that may be too narrow: then everything folds, and nothing is cut off."""
    if isinstance(renderable, Group):
        for part in renderable.renderables:
            fitted(part, to)
    elif isinstance(renderable, Table) and Measurement.get(to, to.options, renderable).minimum > to.width:
        for column in renderable.columns:
            column.no_wrap, column.min_width = False, None
    return renderable


def model(name: str, *, simulated: bool) -> str:
    """A card's model without the maker's words that every card has."""
    for word in ("NVIDIA ", "GeForce ", "Tesla "):
        name = name.removeprefix(word)
    return f"{name} (simulated)" if simulated else name


def _add(table: Table, *cells: str | Text) -> None:
    table.add_row(*(one if isinstance(one, Text) else cell(one) for one in cells))


def cell(text: str) -> Text:
    """A text that others wrote, as it may stand in a table."""
    return Text(printable(text))


def status(word: str) -> Text:
    return Text(printable(word), style=STYLES.get(word.split(" ", maxsplit=1)[0], ""))


def age(since: str, now_ns: int) -> str:
    at = instant(since) if since else None
    return "?" if at is None else ago((now_ns - at) / 1e9)


def clock(text: str) -> str:
    """An instant of the wire in the reader's zone: `2026-11-30 20:25:18`; as it stands when it is none."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return text

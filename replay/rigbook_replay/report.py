"""The answer as one HTML page that opens anywhere: no scripts, no requests, plots as inline SVG. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rigbook_replay.comparison import Answer, Outcome, Waits

__all__ = ["Row", "distance_words", "figures", "page", "span"]

# Projects shown on the page; the JSON has all.
ROWS_MAX: Final = 40
_WIDTH: Final = 900
_HEIGHT: Final = 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26
# Colours of Okabe and Ito, which people with any colour vision tell apart; and each line has a dash of its own.
COLOURS: Final = {"recorded": "#808080", "simulated, same rules": "#0072B2", "simulated, changed": "#D55E00"}
_DASHES: Final = {"recorded": "2 3", "simulated, same rules": "7 3", "simulated, changed": ""}

Row = tuple[str, tuple[str, ...]]


def page(answer: Answer, made: str) -> str:
    """The page. `made`: when and by what, for the foot."""
    names = [outcome.name for outcome in answer.outcomes]
    changes = "; ".join(answer.changes) or "nothing is changed: this shows how near the simulator is"
    template = Template(files("rigbook_replay").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"What if: {changes}"),
        changes=escape(changes),
        past=escape(answer.past),
        since=escape(answer.since[:16].replace("T", " ")),
        until=escape(answer.until[:16].replace("T", " ")),
        figures=_table("", names, figures(answer)),
        projects=_table("Project", names, _waits_rows(answer, lambda o: o.waits_by_project)),
        priorities=_table("Priority", names, _waits_rows(answer, lambda o: o.waits_by_priority)),
        plots="".join(
            _plot(answer, field, title, share=share)
            for field, title, share in (
                ("utilisation", "Memory bound", True),
                ("waiting", "Demands waiting", False),
                ("fragmentation", "Fragmentation of what is free", True),
            )
        ),
        distance=escape(distance_words(answer)),
        notes="".join(f"<li>{escape(note)}</li>" for note in answer.notes),
        made=escape(made),
    )


def figures(answer: Answer) -> list[Row]:
    """The rows of the main table, the same for every form; a row that nobody has a figure for is left out."""

    def of(title: str, told: Callable[[Outcome], str]) -> Row:
        return title, tuple(told(outcome) for outcome in answer.outcomes)

    rows = [
        of("demands", lambda o: str(o.demands)),
        of("got cards", lambda o: str(o.bound)),
        of("wait still", lambda o: _with(o.waiting, o.reasons_waiting if o.waiting else {})),
        of("gave up waiting", lambda o: str(o.gave_up)),
        of("can never be met", lambda o: _with(o.refused, o.reasons_refused)),
        of("waiting, median", lambda o: span(o.waits.p50) if o.waits else "–"),
        of("waiting, 95 %", lambda o: span(o.waits.p95) if o.waits else "–"),
        of("waiting, mean", lambda o: span(o.waits.mean) if o.waits else "–"),
        of("memory bound", lambda o: _percent(o.utilisation)),
        of("cards held", lambda o: _percent(o.cards_held)),
        of("fragmentation", lambda o: _percent(o.fragmentation)),
        of("evictions", lambda o: _with(o.evictions, o.evictions_by_reason)),
        of("idle servers", lambda o: _amount(o.idle_server_hours, " h")),
        of("energy of idle servers", lambda o: _amount(o.idle_energy_kwh, " kWh")),
        of("its cost", lambda o: _amount(o.idle_energy_money)),
        of("cost of all cards", lambda o: _amount(o.money)),
        of("of it for idle cards", lambda o: _amount(o.money_idle)),
    ]
    always = {"demands", "got cards", "waiting, median", "waiting, 95 %"}
    return [row for row in rows if row[0] in always or any(cell not in ("–", "0") for cell in row[1])]


def distance_words(answer: Answer) -> str:
    """How far to trust it."""
    far = answer.distance
    if far is None:
        return "The past does not say when demands got their cards: there is nothing to hold the simulator against."
    said = (
        f"Under the recorded rules the simulator gives {far.demands} demands their cards within {span(far.wait_p50)} "
        f"(median) and {span(far.wait_p95)} (95 %) of the record"
    )
    if far.same_node is not None:
        said += f", {far.same_node:.0%} of them on the same node"
    said += f"; memory bound differs by {far.utilisation:+.1%}." if far.utilisation else "."
    if far.only_recorded or far.only_simulated:
        said += (
            f" {far.only_recorded} got cards only in the record, {far.only_simulated} only in the simulation."
        )
    return f"{said} Compare the two simulated runs; a difference smaller than this distance means nothing."


def span(seconds: float) -> str:
    """`0 s`, `40 s`, `12 min`, `3.4 h`, `2.1 d`."""
    if seconds < 1:
        return "0 s" if seconds < 0.05 else f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} d"


def _with(count: int, parts: dict[str, int]) -> str:
    told = ", ".join(f"{n} {name}" for name, n in parts.items())
    return f"{count} ({told})" if told and count else str(count)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _amount(value: float | None, unit: str = "") -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}{unit}" if abs(value) >= 100 else f"{value:,.2f}{unit}"


def _waits_rows(answer: Answer, told: Callable[[Outcome], dict[str, Waits]]) -> list[Row]:
    keys = dict.fromkeys(key for outcome in answer.outcomes for key in told(outcome))

    def cell(outcome: Outcome, key: str) -> str:
        waits = told(outcome).get(key)
        return "–" if waits is None else f"{span(waits.p50)} / {span(waits.p95)}"

    return [(key, tuple(cell(outcome, key) for outcome in answer.outcomes)) for key in list(keys)[:ROWS_MAX]]


def _table(corner: str, names: Sequence[str], rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{_key(name)}{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><th>{escape(title)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for title, cells in rows
    )
    return f"<table><thead><tr><th>{escape(corner)}</th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _key(name: str) -> str:
    dash = f' stroke-dasharray="{_DASHES[name]}"' if _DASHES[name] else ""
    return (
        f'<svg class="key" width="22" height="8" aria-hidden="true"><line x1="0" x2="22" y1="4" y2="4" '
        f'stroke="{COLOURS[name]}" stroke-width="2.5"{dash}/></svg>'
    )


def _plot(answer: Answer, field: str, title: str, *, share: bool) -> str:
    """A plot with its axes; nothing when no run has the figures."""
    runs = [o for o in answer.outcomes if o.series]
    if not runs:
        return ""
    top = 1.0 if share else _round_up(max(max(o.series[field]) for o in runs))
    first, last = runs[0].series["at"][0], runs[0].series["at"][-1]
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(at: float) -> float:
        return _LEFT + wide * (at - first) / max(1, last - first)

    def y(value: float) -> float:
        return _TOP + high * (1 - min(value, top) / top)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">']
    for part in (0.0, 0.5, 1.0):
        level = y(top * part)
        label = f"{part:.0%}" if share else f"{top * part:g}"
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">{label}</text>')
    form = "%H:%M:%S" if last - first < 600 else "%d %b %H:%M" if last - first < 14 * 86400 else "%d %b %Y"
    for number in range(5):
        at = first + (last - first) * number / 4
        anchor = ("start", "middle", "middle", "middle", "end")[number]
        told = datetime.fromtimestamp(at, UTC).strftime(form)
        parts.append(f'<text x="{x(at):.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{told}</text>')
    for run in runs:
        points = " ".join(
            f"{x(at):.1f},{y(value):.1f}"
            for at, value in zip(run.series["at"], run.series[field], strict=True)
        )
        dash = f' stroke-dasharray="{_DASHES[run.name]}"' if _DASHES[run.name] else ""
        parts.append(
            f'<polyline points="{points}" stroke="{COLOURS[run.name]}"{dash}><title>{escape(run.name)}</title></polyline>'
        )
    parts.append("</svg>")
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(parts)}</figure>"


def _round_up(value: float) -> float:
    """The next of 2, 4, 6, 10, 20, 40, 60, 100 ...: half of it is a whole number, too."""
    size = 1
    while True:
        for step in (2, 4, 6, 10):
            if value <= step * size:
                return float(step * size)
        size *= 10

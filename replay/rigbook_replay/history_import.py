"""Foreign history as demands: the openb trace, Slurm's accounting, the Philly trace. Pure: text in, a past out.

Each names who asked for how many cards, when, and for how long. What it does not name is told in the notes. A line
that cannot be read stops the import, with its number: half a history gives a wrong answer.
"""

from __future__ import annotations

import csv
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rigbook_schemas.events import DemandRaised, NodeJoined
from rigbook_schemas.values import GIB, CardInventory, Component, Engine, Mode, Owner, Request

from rigbook_replay.lifetimes import Happening, Known, Lifetime, Past, Span, finished_past

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["BadHistory", "of_openb", "of_philly", "of_sacct"]

_SECOND_NS: Final = 10**9
# An instant for histories that count from 0: what is asked is how long things take, not when.
EPOCH_NS: Final = 1_700_000_000 * _SECOND_NS
# Cards of a server where a history only counts cards: more than this is a gang over several.
SERVER_CARDS: Final = 8
# A whole card, whichever it is: an exclusive binding has all of it on its books anyway.
WHOLE_CARD_BYTES: Final = GIB
# The card that a share is a share of, where no model is named.
SHARE_CARD_BYTES: Final = 16 * GIB
# GPU memory by the names of the openb trace; G2 and G3 are not disclosed and taken as their nearest kin.
OPENB_MEMORY_GIB: Final = {"P100": 16, "T4": 16, "V100M16": 16, "V100M32": 32, "G2": 32, "G3": 80, "A10": 24}
_TOKEN: Final = re.compile(r"[^A-Za-z0-9_-]+")
_COMMAND: Final = (Component(command=("imported",)),)


class BadHistory(ValueError):
    """A file that is not what it was said to be; the text names the line and what is wrong with it."""

    code = "bad_history"


def _rows(name: str, lines: Iterable[str], needed: tuple[str, ...], delimiter: str = ",") -> Iterator[tuple[int, dict[str, str]]]:  # fmt: skip
    """Rows with their line numbers. Raises BadHistory when the head lacks a column, or a row one of its fields."""
    reader = csv.reader(
        lines, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE
    )
    try:
        head = [word.strip() for word in next(reader, [])]
        missing = [column for column in needed if column not in head]
        if missing:
            raise BadHistory(
                f"{name}, line 1: the head has no column {', '.join(missing)}; it has {', '.join(head)[:200] or 'nothing'}"
            )
        for row in reader:
            if not row:
                continue
            if len(row) != len(head):
                raise BadHistory(
                    f"{name}, line {reader.line_num}: {len(row)} fields, the head has {len(head)}"
                )
            yield reader.line_num, dict(zip(head, row, strict=True))
    except csv.Error as error:
        raise BadHistory(f"{name}, line {reader.line_num}: {error}") from error
    except UnicodeDecodeError as error:
        raise BadHistory(f"{name}: no text in UTF-8 ({error.reason})") from error


def _number(name: str, line: int, row: Mapping[str, str], column: str) -> float:
    text = row[column].strip()
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e12:
        raise BadHistory(f"{name}, line {line}: {column} is {text[:40]!r}, expected a number of 0 or more")
    return value


def _token(text: str, otherwise: str) -> str:
    """`text` as a name that may stand in a subject."""
    word = _TOKEN.sub("-", text.strip()).strip("-_")[:60]
    return word or otherwise


def _lifetime(
    demand: str, project: str, owner: str, request: Request, raised_ns: int, *, priority: int = 50
) -> Lifetime:
    spec = DemandRaised(
        demand=demand, project=project, owner=Owner(name=owner[:128] or "unknown"), resources=request,
        components=_COMMAND, priority=priority,
    )  # fmt: skip
    return Lifetime(spec=spec, raised_ns=raised_ns)


def _held(life: Lifetime, start_ns: int, end_ns: int) -> None:
    """It held cards from `start_ns` on; `end_ns` 0 = still."""
    life.spans.append(Span(start_ns, end_ns))
    if end_ns:
        life.hold_ns = max(1, end_ns - start_ns)
    else:
        life.known = Known.CENSORED


def _past(
    name: str, lives: list[Lifetime], notes: list[str], happenings: list[Happening], *, waits: bool
) -> Past:
    """Raises BadHistory when nothing is left of it."""
    if not lives:
        raise BadHistory(f"{name}: no demand for a GPU in it{'; ' + '; '.join(notes) if notes else ''}")
    seen: set[str] = set()
    for life in lives:
        if life.spec.demand in seen:
            raise BadHistory(f"{name}: {life.spec.demand} stands there twice")
        seen.add(life.spec.demand)
    lives.sort(key=lambda life: (life.raised_ns, life.spec.demand))
    ends = [span.end_ns or span.bound_ns for life in lives for span in life.spans]
    return finished_past(
        Past(
            name=name, from_ns=lives[0].raised_ns, until_ns=max([*ends, lives[-1].raised_ns]) + _SECOND_NS,
            lifetimes=lives, happenings=happenings, recorded_waits=waits, notes=notes,
        )
    )  # fmt: skip


# -- openb --------------------------------------------------------------------------------------


def of_openb(name: str, pods: Iterable[str], nodes: Iterable[str] | None = None) -> Past:
    """The FGD trace: `pods` with name, num_gpu, gpu_milli, creation_time, deletion_time; `nodes` with sn, gpu, model."""
    needed = ("name", "num_gpu", "gpu_milli", "creation_time", "deletion_time")
    lives: list[Lifetime] = []
    without, either = 0, 0
    for line, row in _rows(name, pods, needed):
        cards = int(_number(name, line, row, "num_gpu"))
        milli = _number(name, line, row, "gpu_milli")
        if not cards:
            without += 1
            continue
        created, deleted = (_number(name, line, row, c) for c in ("creation_time", "deletion_time"))
        if deleted < created:
            raise BadHistory(
                f"{name}, line {line}: deletion_time {deleted:g} is before creation_time {created:g}"
            )
        models = [m for m in row.get("gpu_spec", "").split("|") if m]
        model = _in_all(models)
        either += bool(models and not model)
        if cards == 1 and 0 < milli < 1000:
            card = min((OPENB_MEMORY_GIB.get(m, 16) * GIB for m in models), default=SHARE_CARD_BYTES)
            request = Request(memory_bytes=int(card * milli / 1000), mode=Mode.MEMORY_SLICE, model=model)
        else:
            request = Request(memory_bytes=WHOLE_CARD_BYTES, count=cards, model=model)
        raised_ns = EPOCH_NS + int(created * _SECOND_NS)
        scheduled = row.get("scheduled_time", "").strip()
        began = _number(name, line, row, "scheduled_time") if scheduled else None
        life = _lifetime(_token(row["name"], f"pod-{line}"), _token(row.get("qos", ""), "openb"), "openb", request,
                         raised_ns, priority={"BE": 25, "LS": 60}.get(row.get("qos", ""), 50))  # fmt: skip
        if began is None:  # it was deleted before it ever ran
            life.known, life.gave_up = Known.ESTIMATED, True
            life.leaves_ns = EPOCH_NS + int(deleted * _SECOND_NS)
        else:
            start_ns = EPOCH_NS + int(max(began, created) * _SECOND_NS)
            _held(life, start_ns, max(start_ns + 1, EPOCH_NS + int(deleted * _SECOND_NS)))
        lives.append(life)
    notes = [
        "openb gives shares of cards, not bytes: a share is taken of 16 GiB where no model is named",
        "its qos is taken as priority: BE 25, LS 60, others 50",
    ]
    if without:
        notes.append(f"{without} pods ask for no GPU and are left out")
    if either:
        notes.append(f"{either} pods name models without a common name; they are taken as any model")
    past = _past(name, lives, notes, [], waits=True)
    if nodes is not None:
        past.happenings.extend(_openb_nodes(name, nodes, past.from_ns))
    return past


def _in_all(models: list[str]) -> str:
    """What all names begin with: the part of a model that says "one of these"."""
    if not models:
        return ""
    first, last = min(models), max(models)
    size = next((i for i, letter in enumerate(first) if i >= len(last) or last[i] != letter), len(first))
    return first[:size]


def _openb_nodes(name: str, nodes: Iterable[str], at_ns: int) -> Iterator[Happening]:
    for line, row in _rows(f"{name} (nodes)", nodes, ("sn", "gpu", "model")):
        count = int(_number(f"{name} (nodes)", line, row, "gpu"))
        if not 0 <= count <= 128:
            raise BadHistory(f"{name} (nodes), line {line}: {count} cards on one node")
        if not count:
            continue
        node = _token(row["sn"], f"node-{line}")
        size = OPENB_MEMORY_GIB.get(row["model"], 16) * GIB
        cards = tuple(
            CardInventory(uuid=f"GPU-{node}-{i}", index=i, model=row["model"], memory_bytes=size)
            for i in range(count)
        )
        engines = (Engine.PROCESS.value, Engine.DOCKER.value)
        joined = NodeJoined(node=node, incarnation="openb", cards=cards, engines=engines, simulated=True)
        yield Happening(at_ns, "node.joined", joined)


# -- Slurm --------------------------------------------------------------------------------------

_TRES: Final = re.compile(r"gres/gpu(?::(?P<model>[^=,]+))?=(?P<count>\d+)")
_GRES: Final = re.compile(r"gpu(?::(?P<model>[A-Za-z][^:,(]*))?:(?P<count>\d+)")
_ELAPSED: Final = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?")
_NO_TIME: Final = frozenset({"", "Unknown", "None", "N/A"})


def of_sacct(name: str, text: Iterable[str]) -> Past:
    """`sacct -P -a -X -o JobID,User,Account,State,Submit,Start,End,ReqTRES,AllocTRES,NNodes`; more columns are welcome."""
    lives: list[Lifetime] = []
    without = steps = 0
    for line, row in _rows(name, text, ("JobID", "Submit", "Start", "End"), "|"):
        if "." in row["JobID"]:
            steps += 1
            continue
        cards, model = _gpus(name, line, row)
        if not cards:
            without += 1
            continue
        submitted = _moment(name, line, row, "Submit")
        if submitted is None:
            raise BadHistory(f"{name}, line {line}: Submit is {row['Submit'][:40]!r}, expected a time")
        nodes_text = row.get("NNodes", "1").strip() or "1"
        if not nodes_text.isdigit() or not 1 <= int(nodes_text) <= 1024:
            raise BadHistory(f"{name}, line {line}: NNodes is {nodes_text[:20]!r}, expected 1 to 1024")
        nodes = max(1, min(int(nodes_text), cards))
        request = Request(memory_bytes=WHOLE_CARD_BYTES, count=-(-cards // nodes), nodes=nodes, model=model)
        life = _lifetime(
            _token(f"slurm-{row['JobID']}", f"slurm-{line}"), _token(row.get("Account", ""), "slurm"),
            row.get("User", ""), request, submitted,
        )  # fmt: skip
        start, end = _moment(name, line, row, "Start"), _moment(name, line, row, "End")
        if start is not None and end is not None and end < start:
            raise BadHistory(f"{name}, line {line}: End {row['End']} is before Start {row['Start']}")
        cancelled = row.get("State", "").startswith("CANCELLED")
        if start is None or (cancelled and start == end):
            life.known = Known.ESTIMATED
            life.gave_up = cancelled
            life.leaves_ns = end or 0 if cancelled else 0
        else:
            _held(life, max(start, submitted), end or 0)
        lives.append(life)
    notes = ["Slurm gives whole cards: each is taken exclusively; times without a zone are taken as UTC"]
    if without:
        notes.append(f"{without} entries ask for no GPU and are left out")
    if steps:
        notes.append(f"{steps} lines are steps of others and are left out")
    return _past(name, lives, notes, [], waits=True)


def _gpus(name: str, line: int, row: Mapping[str, str]) -> tuple[int, str]:
    """How many cards, of which model: from AllocTRES, else ReqTRES, else the columns of older versions."""
    columns = ("AllocTRES", "ReqTRES", "AllocGRES", "ReqGRES")
    if not any(column in row for column in columns):
        raise BadHistory(f"{name}, line 1: no column says how many GPUs; ask for AllocTRES or ReqTRES")
    for column in columns:
        pattern = _TRES if column.endswith("TRES") else _GRES
        found = list(pattern.finditer(row.get(column, "")))
        if found:
            plain = [m for m in found if not m["model"]]
            named = next((m["model"] for m in found if m["model"]), "")
            count = sum(int(m["count"]) for m in (plain or found))
            if count > 8192:
                raise BadHistory(f"{name}, line {line}: {column} asks for {count} GPUs")
            return count, named
    return 0, ""


def _moment(name: str, line: int, row: Mapping[str, str], column: str) -> int | None:
    text = row[column].strip()
    if text in _NO_TIME:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadHistory(
            f"{name}, line {line}: {column} is {text[:40]!r}, expected a time such as 2026-11-30T02:00:00"
        ) from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()) * _SECOND_NS


# -- Philly -------------------------------------------------------------------------------------


def of_philly(name: str, text: str) -> Past:
    """The published JSON (vc, submitted_time, attempts with start, end and cards), or the CSV cut of it in minutes."""
    return (
        _philly_json(name, text) if text.lstrip()[:1] in ("[", "{") else _philly_csv(name, text.splitlines())
    )


def _philly_csv(name: str, lines: Iterable[str]) -> Past:
    lives: list[Lifetime] = []
    for line, row in _rows(name, lines, ("job_id", "user", "num_gpu", "submit_time", "duration")):
        cards = int(_number(name, line, row, "num_gpu"))
        raised_ns = EPOCH_NS + int(_number(name, line, row, "submit_time") * 60 * _SECOND_NS)
        hold_ns = max(1, int(_number(name, line, row, "duration") * 60 * _SECOND_NS))
        if not 1 <= cards <= 8192:
            raise BadHistory(f"{name}, line {line}: num_gpu is {cards}")
        project = _token(row["user"], "philly")
        life = _lifetime(f"philly-{_token(row['job_id'], str(line))}", project, project, _gang(cards), raised_ns,
                         priority=25 if row.get("job_type") == "best" else 50)  # fmt: skip
        life.hold_ns = hold_ns
        lives.append(life)
    past = _past(name, lives, ["this history does not say when anybody got cards: there is nothing to compare with"],
                 [], waits=False)  # fmt: skip
    past.until_ns = max(life.raised_ns + (life.hold_ns or 0) for life in lives)
    return past


class _Attempt(msgspec.Struct):
    start_time: str | None = None
    end_time: str | None = None
    detail: list[Any] = []


class _Entry(msgspec.Struct):
    jobid: str
    vc: str
    submitted_time: str
    user: str = ""
    status: str = ""
    attempts: list[_Attempt] = []


def _philly_json(name: str, text: str) -> Past:
    try:
        entries = msgspec.json.decode(text, type=list[_Entry])
    except msgspec.MsgspecError as error:
        raise BadHistory(f"{name}: {error}") from error
    lives: list[Lifetime] = []
    without = 0
    for number, entry in enumerate(entries, 1):
        where = f"{name}, entry {number} ({entry.jobid[:40]})"
        cards = max((sum(len(d.get("gpus", ())) for d in a.detail if isinstance(d, dict)) for a in entry.attempts), default=0)  # fmt: skip
        if not cards:
            without += 1
            continue
        project = _token(entry.vc, "philly")
        life = _lifetime(_token(entry.jobid, f"philly-{number}"), project, entry.user, _gang(cards),
                         _philly_time(where, entry.submitted_time) or 0)  # fmt: skip
        for attempt in entry.attempts:
            start, end = _philly_time(where, attempt.start_time), _philly_time(where, attempt.end_time)
            if start is None:
                continue
            if end is not None and end < start:
                raise BadHistory(f"{where}: an attempt ends before it starts")
            life.spans.append(Span(max(start, life.raised_ns), end or 0))
        if not life.raised_ns:
            raise BadHistory(f"{where}: submitted_time is missing")
        if not life.spans:
            life.known = Known.ESTIMATED
        elif not life.spans[-1].end_ns:
            life.known = Known.CENSORED
        else:
            life.hold_ns = max(1, sum(max(0, (s.end_ns or s.bound_ns) - s.bound_ns) for s in life.spans))
        lives.append(life)
    notes = [f"{without} entries name no GPU and are left out"] if without else []
    return _past(name, lives, notes, [], waits=True)


def _philly_time(where: str, text: str | None) -> int | None:
    word = (text or "").strip()
    if word in _NO_TIME:
        return None
    try:
        return int(datetime.fromisoformat(word.removesuffix(" PST").removesuffix(" PDT")).replace(tzinfo=UTC).timestamp()) * _SECOND_NS  # fmt: skip
    except ValueError:
        raise BadHistory(f"{where}: {word[:40]!r} is no time such as 2017-10-07 01:12:41") from None


def _gang(cards: int) -> Request:
    nodes = -(-cards // SERVER_CARDS)
    return Request(memory_bytes=WHOLE_CARD_BYTES, count=-(-cards // nodes), nodes=nodes)

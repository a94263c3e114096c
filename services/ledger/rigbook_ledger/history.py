"""The past as rows: what each question about then gives, out of the book's tables.

As in `present`, (key, row) pairs in the order of the key. Instants in the tables are Unix nanoseconds
by the server's clock; all questions are answered as of the last committed position.
"""

from __future__ import annotations

import zlib
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rigbook_schemas.events import Bound, DriftDetected, EvictionOrdered
from rigbook_schemas.queries import DriftRow, EventRow, FindingRow, RawRow, TenureRow
from rigbook_schemas.wire import Malformed, decode, rfc3339

from rigbook_ledger.entries import MALFORMED, UNKNOWN, card_key, demand_key, node_key
from rigbook_ledger.present import demand_row
from rigbook_ledger.state import Demand
from rigbook_ledger.tables import TENURE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rigbook_schemas.queries import DemandRow

    from rigbook_ledger.present import Key
    from rigbook_ledger.store import Store

__all__ = ["BODIES_BYTES_MAX", "Condition", "History"]

# An answer travels in one message (the server takes 1 MiB); event bodies are fetched up to this much.
BODIES_BYTES_MAX: Final = 768 * 1024
FOREVER: Final = 2**63 - 1

_demands: Final = msgspec.msgpack.Decoder(Demand)
_drifts: Final = msgspec.msgpack.Decoder(DriftDetected)


class Condition:
    """The WHERE of a question: fixed texts, values as parameters."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.values: list[Any] = []

    def add(self, text: str, *values: Any) -> None:
        self._texts.append(text)
        self.values.extend(values)

    def page(self, columns: Sequence[str], after: Key, *, newest_first: bool) -> str:
        """Begin behind the key `after`; the text in order of `columns`."""
        if after:
            self.add(
                f"({', '.join(columns)}) {'<' if newest_first else '>'} ({', '.join('?' * len(after))})",
                *after,
            )
        where = f" WHERE {' AND '.join(self._texts)}" if self._texts else ""
        return where + " ORDER BY " + ", ".join(f"{one} DESC" if newest_first else one for one in columns)


class History:
    """Questions to the tables. Every method raises sqlite3.Error."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def begins_ns(self) -> int | None:
        """When the first event was received; None = nothing is recorded yet."""
        rows = await self._store.rows("SELECT received_ns FROM events ORDER BY seq LIMIT 1")
        return rows[0][0] if rows else None

    # -- demands --------------------------------------------------------------------------------

    async def find_demand(self, name: str) -> str | None:
        """Id of the demand with this id, or of the latest with this name."""
        rows = await self._store.rows(
            "SELECT demand FROM (SELECT demand, 1 AS rank, raised_seq FROM demands WHERE demand = ?1 UNION ALL "
            "SELECT demand, 2, raised_seq FROM demands WHERE name = ?1 AND name <> '') ORDER BY rank, raised_seq DESC LIMIT 1",
            (name,),
        )
        return rows[0][0] if rows else None

    async def demands(
        self, *, demand: str = "", phase: str = "all", project: str = "", node: str = "", card: str = "",
        after: Key = (), newest_first: bool = False, limit: int,
    ) -> Iterator[tuple[Key, DemandRow]]:  # fmt: skip
        """Key: (raised sequence, demand)."""
        where = Condition()
        if demand:
            where.add("demand = ?", demand)
        if phase != "all":
            where.add("phase = ?", phase)
        if project:
            where.add("project = ?", project)
        if node:
            where.add("demand IN (SELECT demand FROM tenures WHERE node = ?)", node)
        if card:
            where.add("demand IN (SELECT demand FROM tenures WHERE card = ?)", card)
        text = where.page(("raised_seq", "demand"), after, newest_first=newest_first)
        rows = await self._store.rows(f"SELECT body FROM demands{text} LIMIT ?", (*where.values, limit))  # noqa: S608
        found = [_demands.decode(row[0]) for row in rows]
        places = await self.places([one.epoch_last for one in found])
        return (
            ((one.raised_seq, one.spec.demand), demand_row(one, places.get(one.epoch_last, ())))
            for one in found
        )

    async def places(self, epochs: Sequence[int]) -> dict[int, list[tuple[str, str]]]:
        """(node, card) of each of these bindings, live or not."""
        places: dict[int, list[tuple[str, str]]] = {}
        for epoch, node, card in await self._store.rows(
            f"SELECT epoch, node, card FROM tenures WHERE epoch IN ({', '.join('?' * len(epochs))}) "  # noqa: S608
            "ORDER BY epoch, node, card_index",
            epochs,
        ):
            places.setdefault(epoch, []).append((node, card))
        return places

    # -- tenures --------------------------------------------------------------------------------

    async def known_card(self, name: str) -> str | None:
        """UUID of a card that was once held, by UUID."""
        rows = await self._store.rows("SELECT card FROM tenures WHERE card = ? LIMIT 1", (name,))
        return rows[0][0] if rows else None

    async def tenures(
        self, *, card: str = "", node: str = "", project: str = "", demand: str = "", at_ns: int | None = None,
        since_ns: int | None = None, until_ns: int | None = None, after: Key = (), newest_first: bool = False, limit: int,
    ) -> Iterator[tuple[Key, TenureRow]]:  # fmt: skip
        """Who held what: at a moment, in a range (touching it is enough), or, with neither, right now.

        A tenure begins with `bound` and ends with `released`; at the very moment of the release it is over.
        Key: (epoch, card).
        """
        where = Condition()
        for column, value in (("card", card), ("node", node), ("project", project), ("demand", demand)):
            if value:
                where.add(f"{column} = ?", value)
        if at_ns is not None:
            where.add("bound_ns <= ? AND (released_ns = 0 OR released_ns > ?)", at_ns, at_ns)
        elif since_ns is not None or until_ns is not None:
            where.add("bound_ns <= ?", FOREVER if until_ns is None else until_ns)
            where.add("(released_ns = 0 OR released_ns >= ?)", since_ns or 0)
        else:
            where.add("released_ns = 0")
        text = where.page(("epoch", "card"), after, newest_first=newest_first)
        rows = await self._store.rows(f"SELECT {TENURE} FROM tenures{text} LIMIT ?", (*where.values, limit))  # noqa: S608
        return (((row[11], row[0]), _tenure(row)) for row in rows)

    # -- events ---------------------------------------------------------------------------------

    async def raw(
        self, *, position: int, since_seq: int, after: Key, limit: int
    ) -> Iterator[tuple[Key, RawRow | None]]:
        """The events themselves, up to `position`; None at the end when they are more than an answer takes."""
        begin = max(since_seq, after[0] if after else 0)
        sizes = await self._store.rows(
            "SELECT seq, length(body) FROM events WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?",
            (begin, position, limit),
        )
        last, total = begin, 0
        for seq, size in sizes:
            total += size
            if total > BODIES_BYTES_MAX and last > begin:
                break
            last = seq
        rows = await self._store.rows(
            "SELECT seq, subject, received_ns, body FROM events WHERE seq > ? AND seq <= ? ORDER BY seq",
            (begin, last),
        )
        found: list[tuple[Key, RawRow | None]] = [
            ((seq,), RawRow(seq=seq, subject=subject, received_ns=at, body=zlib.compress(body, 1)))
            for seq, subject, at, body in rows
        ]
        if sizes and last < sizes[-1][0]:
            found.append(((last,), None))
        return iter(found)

    async def events(
        self, *, position: int, since_seq: int = 0, since_ns: int | None = None, until_ns: int | None = None,
        kinds: Sequence[str] = (), demand: str = "", node: str = "", card: str = "", project: str = "",
        after: Key = (), newest_first: bool = False, limit: int,
    ) -> Iterator[tuple[Key, EventRow | None]]:  # fmt: skip
        """Events up to `position`; None at the end when their bodies are more than an answer takes. Key: (seq,)."""
        where = Condition()
        where.add("seq <= ?", position)
        if since_seq:
            where.add("seq > ?", since_seq)
        if since_ns is not None:
            # the server's clock may step back: the bound by sequence makes it quick, the one by time makes it right
            first = await self._store.rows("SELECT min(seq) FROM events WHERE received_ns >= ?", (since_ns,))
            where.add(
                "seq >= ? AND received_ns >= ?", FOREVER if first[0][0] is None else first[0][0], since_ns
            )
        if until_ns is not None:
            last = await self._store.rows("SELECT max(seq) FROM events WHERE received_ns <= ?", (until_ns,))
            where.add("seq <= ? AND received_ns <= ?", last[0][0] or 0, until_ns)
        if kinds:
            where.add(f"kind IN ({', '.join('?' * len(kinds))})", *kinds)
        if project:
            where.add(
                "seq IN (SELECT m.seq FROM demands d JOIN mentions m ON m.name = 'd:' || d.demand WHERE d.project = ?)",
                project,
            )
        for name in (demand_key(demand) if demand else "", node_key(node) if node else ""):
            if name:
                where.add("seq IN (SELECT seq FROM mentions WHERE name = ?)", name)
        if card:
            # what names the card, and all that its holders went through while they held it
            where.add(
                "seq IN (SELECT seq FROM mentions WHERE name = ? UNION SELECT m.seq FROM tenures t JOIN mentions m ON "
                "m.name = 'd:' || t.demand AND m.seq BETWEEN t.epoch AND iif(t.released_seq = 0, ?, t.released_seq) "
                "WHERE t.card = ?)",
                card_key(card), FOREVER, card,
            )  # fmt: skip
        text = where.page(("seq",), after, newest_first=newest_first)
        sizes = await self._store.rows(
            f"SELECT seq, length(body) FROM events{text} LIMIT ?",  # noqa: S608
            (*where.values, limit),
        )
        chosen: list[int] = []
        total = 0
        for seq, size in sizes:
            total += size
            if chosen and total > BODIES_BYTES_MAX:
                break
            chosen.append(seq)
        order = "DESC" if newest_first else "ASC"
        rows = await self._store.rows(
            f"SELECT seq, subject, received_ns, kind, body FROM events WHERE seq IN ({', '.join('?' * len(chosen))}) "  # noqa: S608
            f"ORDER BY seq {order}",
            chosen,
        )
        found: Iterator[tuple[Key, EventRow | None]] = (((row[0],), _event(*row)) for row in rows)
        return found if len(chosen) == len(sizes) else chain(found, [((), None)])

    # -- drifts and findings --------------------------------------------------------------------

    async def drifts(
        self, *, drift: str = "", node: str = "", card: str = "", demand: str = "", open_only: bool = True,
        since_ns: int | None = None, until_ns: int | None = None, after: Key = (), newest_first: bool = False, limit: int,
    ) -> Iterator[tuple[Key, DriftRow]]:  # fmt: skip
        """Drifts by the sequence of their detection; in a range when they were open in it. Key: (seq,)."""
        where = Condition()
        if open_only:
            where.add("cleared_seq = 0")
        if drift:
            where.add("(drift = ? OR substr(drift, 1, ?) = ?)", drift, len(drift), drift)
        for column, value in (("node", node), ("card", card), ("demand", demand)):
            if value:
                where.add(f"{column} = ?", value)
        if since_ns is not None:
            where.add("(cleared_ns = 0 OR cleared_ns >= ?)", since_ns)
        if until_ns is not None:
            where.add("detected_ns <= ?", until_ns)
        text = where.page(("seq",), after, newest_first=newest_first)
        rows = await self._store.rows(
            f"SELECT seq, body, detected_ns, cleared_ns, how FROM drifts{text} LIMIT ?",  # noqa: S608
            (*where.values, limit),
        )
        return (((row[0],), _drift(*row)) for row in rows)

    async def findings(
        self, *, codes: Sequence[str] = (), since_seq: int = 0, since_ns: int | None = None, until_ns: int | None = None,
        after: Key = (), newest_first: bool = False, limit: int,
    ) -> Iterator[tuple[Key, FindingRow]]:  # fmt: skip
        """Findings in the order they were written down. Key: (number,)."""
        where = Condition()
        if codes:
            where.add(f"code IN ({', '.join('?' * len(codes))})", *codes)
        if since_seq:
            where.add("seq > ?", since_seq)
        if since_ns is not None:
            where.add("at_ns >= ?", since_ns)
        if until_ns is not None:
            where.add("at_ns <= ?", until_ns)
        text = where.page(("number",), after, newest_first=newest_first)
        rows = await self._store.rows(
            f"SELECT number, stream, seq, code, text, subject, event_id, at_ns FROM findings{text} LIMIT ?",  # noqa: S608
            (*where.values, limit),
        )
        return (((row[0],), _finding(*row)) for row in rows)


# -- rows ---------------------------------------------------------------------------------------


def _time(ns: int) -> str:
    return rfc3339(ns) if ns else ""


def _tenure(row: tuple[Any, ...]) -> TenureRow:
    (card, node, index, demand, name, project, owner, contact, purpose, mode, memory_bytes, epoch, bound_ns,
     released_ns, stopped_ns, verdict, ending, forced) = row  # fmt: skip
    return TenureRow(
        card=card, node=node, index=index, demand=demand, name=name, project=project, owner=owner, contact=contact,
        purpose=purpose, mode=mode, memory_bytes=memory_bytes, epoch=epoch, bound=rfc3339(bound_ns),
        released=_time(released_ns), desired_stopped=_time(stopped_ns), verdict=verdict, end=ending, forced=bool(forced),
    )  # fmt: skip


def _event(seq: int, subject: str, received_ns: int, kind: str, body: bytes) -> EventRow:
    record = decode(seq, subject, received_ns, body)
    malformed, omitted, data = "", "", {}
    if isinstance(record.data, Malformed):
        malformed = f"{record.data.code}: {record.data.text}"
    if len(body) > BODIES_BYTES_MAX:
        omitted = f"{len(body)} bytes are too many for an answer; read event {seq} from the stream"
    elif not (malformed and not record.id):
        found = msgspec.json.decode(body).get("data")
        data = found if isinstance(found, dict) else {}
    return EventRow(
        seq=seq,
        subject=subject,
        received=rfc3339(received_ns),
        kind="" if kind in (UNKNOWN, MALFORMED) else kind,
        id=record.id,
        source=record.source,
        demand=record.correlation,
        node=_nodes(record.data),
        causation=record.causation,
        traceparent=record.traceparent,
        time=record.time,
        data=data,
        malformed=malformed[:2000],
        omitted=omitted,
    )


def _nodes(data: object) -> str:
    """The node an event is about; several with commas between."""
    if isinstance(data, Bound):
        return ",".join(share.node for share in data.shares)
    if isinstance(data, EvictionOrdered):
        return ",".join(data.nodes)
    return str(getattr(data, "node", ""))


def _drift(seq: int, body: bytes, detected_ns: int, cleared_ns: int, how: str) -> DriftRow:
    return DriftRow(
        drift=_drifts.decode(body), seq=seq, detected=rfc3339(detected_ns), cleared=_time(cleared_ns), how=how
    )


def _finding(
    number: int, stream: str, seq: int, code: str, text: str, subject: str, event_id: str, at_ns: int
) -> FindingRow:
    del number
    return FindingRow(
        stream=stream, seq=seq, code=code, text=text, subject=subject, event_id=event_id, at=_time(at_ns)
    )

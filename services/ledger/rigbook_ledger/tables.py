"""The tables of the book, and the statements that fill them. Instants are Unix nanoseconds, 0 = not yet."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = [
    "APPLICATION_ID",
    "DERIVED",
    "FORMAT",
    "INSERTS",
    "ROWS_MAX",
    "SCHEMA",
    "TENURE",
    "UPDATES",
    "WRITE_BOOK",
    "Insert",
]

# "RIGB": whose file this is. See https://www.sqlite.org/pragma.html#pragma_application_id
APPLICATION_ID: Final = 0x52494742
# Of the tables below. Another format's file is moved aside and made anew from the stream.
FORMAT: Final = 1

# `book.stream_created_ns, position, event_id` keep their names and meaning in every format: they tell
# an older or newer version which place in the log a file stands for, before it is moved aside.
SCHEMA: Final = """
CREATE TABLE book (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    stream_created_ns INTEGER NOT NULL,
    position INTEGER NOT NULL,
    event_id TEXT NOT NULL,
    received_ns INTEGER NOT NULL,
    chain BLOB NOT NULL,
    fold TEXT NOT NULL
);
CREATE TABLE snapshot (one INTEGER PRIMARY KEY CHECK (one = 1), position INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE events (
    seq INTEGER PRIMARY KEY,
    subject TEXT NOT NULL,
    received_ns INTEGER NOT NULL,
    kind TEXT NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX events_received ON events (received_ns);
CREATE INDEX events_kind ON events (kind);
CREATE TABLE mentions (name TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (name, seq)) WITHOUT ROWID;
CREATE TABLE demands (
    demand TEXT PRIMARY KEY,
    raised_seq INTEGER NOT NULL,
    name TEXT NOT NULL,
    project TEXT NOT NULL,
    phase TEXT NOT NULL,
    body BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX demands_raised ON demands (raised_seq);
CREATE INDEX demands_name ON demands (name, raised_seq);
CREATE TABLE tenures (
    epoch INTEGER NOT NULL,
    card TEXT NOT NULL,
    node TEXT NOT NULL,
    card_index INTEGER NOT NULL,
    demand TEXT NOT NULL,
    name TEXT NOT NULL,
    project TEXT NOT NULL,
    owner TEXT NOT NULL,
    contact TEXT NOT NULL,
    purpose TEXT NOT NULL,
    mode TEXT NOT NULL,
    memory_bytes INTEGER NOT NULL,
    bound_ns INTEGER NOT NULL,
    stopped_ns INTEGER NOT NULL,
    released_ns INTEGER NOT NULL DEFAULT 0,
    released_seq INTEGER NOT NULL DEFAULT 0,
    verdict TEXT NOT NULL DEFAULT '',
    ending TEXT NOT NULL DEFAULT '',
    forced INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (epoch, card)
) WITHOUT ROWID;
CREATE INDEX tenures_card ON tenures (card, epoch);
CREATE INDEX tenures_demand ON tenures (demand);
CREATE INDEX tenures_open ON tenures (released_ns) WHERE released_ns = 0;
CREATE TABLE drifts (
    seq INTEGER PRIMARY KEY,
    drift TEXT NOT NULL,
    node TEXT NOT NULL,
    card TEXT NOT NULL,
    demand TEXT NOT NULL,
    detected_ns INTEGER NOT NULL,
    body BLOB NOT NULL,
    cleared_seq INTEGER NOT NULL DEFAULT 0,
    cleared_ns INTEGER NOT NULL DEFAULT 0,
    how TEXT NOT NULL DEFAULT ''
);
CREATE INDEX drifts_drift ON drifts (drift);
CREATE INDEX drifts_open ON drifts (cleared_seq) WHERE cleared_seq = 0;
CREATE TABLE findings (
    number INTEGER PRIMARY KEY,
    stream TEXT NOT NULL,
    seq INTEGER NOT NULL,
    code TEXT NOT NULL,
    text TEXT NOT NULL,
    subject TEXT NOT NULL,
    event_id TEXT NOT NULL,
    at_ns INTEGER NOT NULL,
    UNIQUE (stream, seq, code, text)
);
"""

# What a fold makes of the events, `findings` about the ledger stream included.
DERIVED: Final = ("mentions", "snapshot", "demands", "tenures", "drifts")

TENURE: Final = (
    "card, node, card_index, demand, name, project, owner, contact, purpose, mode, memory_bytes, epoch, bound_ns, "
    "released_ns, stopped_ns, verdict, ending, forced"
)


class Insert(msgspec.Struct, frozen=True):
    """Rows for a table, many to a statement: one step of SQLite and one change of threads for `ROWS_MAX` rows.

    (One row per step is half as fast, and starves when the fold keeps the interpreter busy meanwhile.)
    """

    rows: str  # the attribute of `Entries`
    into: str
    columns: int
    conflict: str = ""

    def statement(self, count: int) -> str:
        one = f"({', '.join('?' * self.columns)})"
        return f"{self.into} VALUES {', '.join([one] * count)} {self.conflict}"


class Update(msgspec.Struct, frozen=True):
    """Changes of rows that are there; each names the position it speaks for, so their order is free."""

    rows: str
    statement: str


# Times the columns of the widest table it stays far below SQLite's 32,766 parameters.
ROWS_MAX: Final = 50

INSERTS: Final = (
    Insert("events", "INSERT INTO events", 5),
    Insert("mentions", "INSERT OR IGNORE INTO mentions", 2),
    Insert(
        "demands",
        "INSERT INTO demands",
        6,
        "ON CONFLICT (demand) DO UPDATE SET raised_seq = excluded.raised_seq, name = excluded.name, "
        "project = excluded.project, phase = excluded.phase, body = excluded.body",
    ),
    Insert(
        "tenures",
        "INSERT OR REPLACE INTO tenures (epoch, card, node, card_index, demand, name, project, owner, contact, purpose, "
        "mode, memory_bytes, bound_ns, stopped_ns)",
        14,
    ),
    Insert("drifts", "INSERT INTO drifts (seq, drift, node, card, demand, detected_ns, body)", 7),
    Insert(
        "findings",
        "INSERT OR IGNORE INTO findings (stream, seq, code, text, subject, event_id, at_ns)",
        7,
    ),
)
# After the inserts: what they change may have been inserted with them.
UPDATES: Final = (
    Update("stops", "UPDATE tenures SET stopped_ns = ? WHERE epoch = ?"),
    Update(
        "releases",
        "UPDATE tenures SET released_ns = ?, released_seq = ?, verdict = ?, ending = ?, forced = ? "
        "WHERE epoch = ? AND node = ?",
    ),
    Update(
        "drift_updates",
        "UPDATE drifts SET body = ? WHERE drift = ? AND seq < ? AND (cleared_seq = 0 OR cleared_seq > ?)",
    ),
    Update(
        "drift_ends",
        "UPDATE drifts SET cleared_seq = ?, cleared_ns = ?, how = ? WHERE drift = ? AND cleared_seq = 0 AND seq < ?",
    ),
)

WRITE_BOOK: Final = (
    "INSERT INTO book VALUES (1, ?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT (one) DO UPDATE SET "
    "stream_created_ns = ?1, position = ?2, event_id = ?3, received_ns = ?4, chain = ?5, fold = ?6 "
    "WHERE position = ?7"
)

"""The tables of a journal. Each row has a salt, with which its digest enters the chain.

The salt is drawn when the row is written and stored nowhere else. When a row is deleted or replaced, its salt goes with
it, and the digest that stays in the chain (:mod:`fedcohort.journal.chain`) reveals nothing about it. Without a salt, a
row with few possible values could be found by trying all of them.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
from collections.abc import Sequence
from typing import Any

SCHEMA_VERSION = 5  # raise it whenever a released fedcohort could misread what this one writes; 0.2 wrote version 3
APPLICATION_ID = 0x46434A31  # "FCJ1"
ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What reading can raise. Python fails to decode a message in which SQLite quotes bytes of a damaged file."""
_TYPES: dict[str, type] = {"INTEGER": int, "REAL": float, "TEXT": str, "BLOB": bytes}


class _SqlTable:
    """One table.

    Parameters
    ----------
    columns : str
        SQL declarations, without the salt. The columns of the key come first.
    key : str
        The columns of the primary key, if there are several.
    compact : bool
        Store rows in the key's own tree, without a row number.

    Attributes
    ----------
    names : str
        The columns without the salt, for a statement.
    insert, replace : str
        Statements that add a row; ``replace`` removes an earlier row with the same key.
    where_key : str
        The condition that selects one row.
    """

    def __init__(self, name: str, columns: str, *, key: str = "", compact: bool = False) -> None:
        self.name = name
        declared = [column.split() for column in columns.split(", ")]
        self.columns = tuple(words[0] for words in declared)
        self.types = tuple(_TYPES[words[1]] for words in declared)
        self.key = tuple(key.split(", ")) if key else (self.columns[0],)
        end = f", PRIMARY KEY ({key}))" if key else ")"
        self.create = f"CREATE TABLE {name} (salt BLOB NOT NULL, {columns}{end}" + " WITHOUT ROWID" * compact
        self.names = ", ".join(self.columns)
        places = ", ".join("?" * (len(self.columns) + 1))
        self.insert = f"INSERT INTO {name} (salt, {self.names}) VALUES ({places})"
        self.replace = self.insert.replace("INSERT", "INSERT OR REPLACE", 1)
        self.where_key = " AND ".join(f"{column} = ?" for column in self.key)

    def to_stored_types(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return a row in the types that SQLite will return, so that its digest is the same when it is read."""
        row = list(values)
        for i, kind in enumerate(self.types):
            value = row[i]
            if value is None or (type(value) is kind and kind is not float):
                continue
            row[i] = kind(value)
            if kind is float:  # SQLite stores -0.0 as 0.0, and NaN as NULL
                row[i] = None if math.isnan(row[i]) else row[i] + 0.0
        return tuple(row)

    def digest(self, salt: bytes, row: Sequence[Any]) -> bytes:
        """Return the digest of a row that :meth:`to_stored_types` returned or SQLite read."""
        contents = hashlib.sha256(salt)
        shape: list[Any] = [self.name]
        for value in row:
            kind = type(value)  # faster than isinstance(), and SQLite returns nothing else
            if kind is bytes:
                contents.update(value)
                shape.append((True, len(value)))  # the lengths, so that no two rows give the same bytes
            elif kind is str:
                data = value.encode()
                contents.update(data)
                shape.append((False, len(data)))
            else:
                shape.append(value)  # repr() keeps the type and every bit of a float
        contents.update(repr(shape).encode())
        return contents.digest()


TABLES = {
    table.name: table
    for table in (
        _SqlTable("meta", "key TEXT PRIMARY KEY, value TEXT NOT NULL", compact=True),
        _SqlTable("facts", "name TEXT PRIMARY KEY, data BLOB NOT NULL"),
        _SqlTable(
            "cohorts",
            "ticket INTEGER PRIMARY KEY, round INTEGER NOT NULL, asked_at REAL NOT NULL, wanted INTEGER, "
            "n_candidates INTEGER NOT NULL, clients BLOB NOT NULL, weights BLOB, work BLOB, notes TEXT NOT NULL, "
            "stop TEXT",
        ),
        # Not columns of cohorts: a cohort is never written again, so its digest stays what clients got as a receipt.
        _SqlTable("candidates", "ticket INTEGER PRIMARY KEY, data BLOB NOT NULL"),
        _SqlTable("closed", "ticket INTEGER PRIMARY KEY, at REAL NOT NULL"),
        _SqlTable(
            "replies",
            "id INTEGER PRIMARY KEY, ticket INTEGER NOT NULL, at REAL NOT NULL, late INTEGER NOT NULL, "
            "data BLOB NOT NULL",
        ),
        _SqlTable(
            "scores",
            "ticket INTEGER NOT NULL, selector TEXT NOT NULL, picked BLOB NOT NULL, arrays BLOB, note TEXT",
            key="ticket, selector",
        ),
        _SqlTable(
            "states",
            "selector TEXT NOT NULL, field TEXT NOT NULL, scalar TEXT, data BLOB",
            key="selector, field",
        ),
        _SqlTable("deltas", "id INTEGER PRIMARY KEY, selector TEXT NOT NULL, field TEXT NOT NULL, data BLOB NOT NULL"),
        _SqlTable("metrics", "round INTEGER NOT NULL, key TEXT NOT NULL, value REAL", key="round, key", compact=True),
        _SqlTable("events", "id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL"),
        # Only with audit=True: what the selector was told before it chose, and each version of the client table.
        _SqlTable("answers", "ticket INTEGER PRIMARY KEY, data BLOB NOT NULL"),
        _SqlTable("versions", "id INTEGER PRIMARY KEY, data BLOB NOT NULL"),
    )
}
CHAIN = (
    "CREATE TABLE chain (id INTEGER PRIMARY KEY, generation INTEGER NOT NULL, in_use INTEGER NOT NULL, "
    "added BLOB NOT NULL, removed BLOB NOT NULL, link BLOB NOT NULL, signature BLOB)"
)
INDEXES = {
    "cohorts_round": "CREATE INDEX cohorts_round ON cohorts (round)",
    "replies_ticket": "CREATE INDEX replies_ticket ON replies (ticket)",
}
SCHEMA = {table.name: table.create for table in TABLES.values()} | {"chain": CHAIN} | INDEXES

"""The tables of a journal, and the checksum in every row.

The checksum is a CRC-32 over the row's other columns, their types and the table's name. It reveals a row that is read
back differently from how it was written. It guards against faulty disks, not against people; the chain of digests is
for those (:mod:`fedcohort.journal.chain`).
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from typing import Any
from zlib import crc32

SCHEMA_VERSION = 4  # raise it whenever a released fedcohort could misread what this one writes; 0.2 wrote version 3
APPLICATION_ID = 0x46434A31  # "FCJ1"
ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What reading can raise. Python fails to decode a message in which SQLite quotes bytes of a damaged file."""
_TYPES: dict[str, type] = {"INTEGER": int, "REAL": float, "TEXT": str, "BLOB": bytes}


class SqlTable:
    """One table.

    Parameters
    ----------
    columns : str
        SQL declarations, without the checksum. The columns of the key come first.
    key : str
        The columns of the primary key, if there are several.
    compact : bool
        Store rows in the key's own tree, without a row number.

    Attributes
    ----------
    names : str
        The columns without the checksum, for a statement.
    insert, replace : str
        Statements that add a row; ``replace`` removes an earlier row with the same key.
    where_key : str
        The condition that selects one row.
    select_sum : str
        The statement that reads one row's checksum.
    """

    def __init__(self, name: str, columns: str, *, key: str = "", compact: bool = False) -> None:
        self.name = name
        declared = [column.split() for column in columns.split(", ")]
        self.columns = tuple(words[0] for words in declared)
        self.types = tuple(_TYPES[words[1]] for words in declared)
        self.key = tuple(key.split(", ")) if key else (self.columns[0],)
        end = f", PRIMARY KEY ({key}))" if key else ")"
        # The checksum comes first: SQLite reaches a column behind a large value only by reading all of that value.
        self.create = f"CREATE TABLE {name} (sum INTEGER NOT NULL, {columns}{end}" + " WITHOUT ROWID" * compact
        self.names = ", ".join(self.columns)
        places = ", ".join("?" * (len(self.columns) + 1))
        self.insert = f"INSERT INTO {name} ({self.names}, sum) VALUES ({places})"
        self.replace = self.insert.replace("INSERT", "INSERT OR REPLACE", 1)
        self.where_key = " AND ".join(f"{column} = ?" for column in self.key)
        self.select_sum = f"SELECT sum FROM {name} WHERE {self.where_key}"
        self._seed = crc32(name.encode())

    def to_stored_types(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return a row in the types that SQLite will return, so that its checksum still matches when it is read."""
        return tuple(
            [
                value if value is None or (type(value) is kind and kind is not float) else _sql_value(value, kind)
                for value, kind in zip(values, self.types, strict=True)
            ]
        )

    def sum(self, row: Sequence[Any]) -> int:
        """Return the checksum of a row that :meth:`to_stored_types` returned or SQLite read."""
        crc = self._seed
        shape: list[Any] = []
        for value in row:
            kind = type(value)
            if kind is bytes:
                crc = crc32(value, crc)
                shape.append([len(value)])
            elif kind is str:
                data = value.encode()
                crc = crc32(data, crc)
                shape.append((len(data),))
            else:
                shape.append(value)
        return crc32(repr(shape).encode(), crc)


def _sql_value(value: Any, kind: type) -> Any:
    if kind is not float:
        return kind(value)
    number = float(value) + 0.0  # SQLite stores -0.0 as 0.0
    return None if math.isnan(number) else number  # and NaN as NULL


TABLES = {
    table.name: table
    for table in (
        SqlTable("meta", "key TEXT PRIMARY KEY, value TEXT NOT NULL", compact=True),
        SqlTable("facts", "name TEXT PRIMARY KEY, data BLOB NOT NULL"),
        SqlTable(
            "cohorts",
            "ticket INTEGER PRIMARY KEY, round INTEGER NOT NULL, asked_at REAL NOT NULL, told_at REAL, wanted INTEGER, "
            "n_candidates INTEGER NOT NULL, candidates BLOB, clients BLOB NOT NULL, weights BLOB, work BLOB, "
            "notes TEXT NOT NULL, stop TEXT",
        ),
        SqlTable(
            "replies",
            "id INTEGER PRIMARY KEY, ticket INTEGER NOT NULL, at REAL NOT NULL, late INTEGER NOT NULL, "
            "data BLOB NOT NULL",
        ),
        SqlTable(
            "scores",
            "ticket INTEGER NOT NULL, selector TEXT NOT NULL, picked BLOB NOT NULL, arrays BLOB, note TEXT",
            key="ticket, selector",
        ),
        SqlTable(
            "states",
            "selector TEXT NOT NULL, field TEXT NOT NULL, scalar TEXT, data BLOB",
            key="selector, field",
        ),
        SqlTable("deltas", "id INTEGER PRIMARY KEY, selector TEXT NOT NULL, field TEXT NOT NULL, data BLOB NOT NULL"),
        SqlTable("metrics", "round INTEGER NOT NULL, key TEXT NOT NULL, value REAL", key="round, key", compact=True),
        SqlTable("events", "id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL"),
        SqlTable(
            "chain",
            "id INTEGER PRIMARY KEY, kind TEXT NOT NULL, ref INTEGER NOT NULL, data BLOB, link BLOB NOT NULL",
        ),
    )
}
SEAL = SqlTable("seal", "id INTEGER PRIMARY KEY, body TEXT NOT NULL")
INDEXES = {
    "cohorts_round": "CREATE INDEX cohorts_round ON cohorts (round)",
    "replies_ticket": "CREATE INDEX replies_ticket ON replies (ticket)",
}
SCHEMA = {table.name: table.create for table in (*TABLES.values(), SEAL)} | INDEXES

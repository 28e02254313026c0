"""Reads journals of format 4, which versions shortly before 0.3 wrote, so that they can be read and continued.

Each row of these had a CRC-32, and a seal held their number and sum for each table. Both are checked before anything is
converted. The chain of digests that ``audit=True`` gave them ends there: an audit begins anew with the next session.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from fedcohort.core.errors import JournalError
from fedcohort.journal.chain import Head
from fedcohort.journal.database import Database
from fedcohort.journal.schema import APPLICATION_ID, ERRORS, TABLES

_SAME = ("meta", "facts", "replies", "scores", "states", "deltas", "metrics", "events")
_COHORTS = "ticket, round, asked_at, told_at, wanted, n_candidates, candidates, clients, weights, work, notes, stop"
_NAMES = {**{name: TABLES[name].names for name in _SAME}, "cohorts": _COHORTS, "chain": "id, kind, ref, data, link"}


def is_format_4(connection: sqlite3.Connection) -> bool:
    """Whether a database is a journal of format 4."""
    pragmas = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    return pragmas == [APPLICATION_ID, 4]


def check_rows(connection: sqlite3.Connection) -> Head:
    """Return what the seal says about the newest commit; :class:`JournalError` if it or any row is damaged."""
    try:
        ((number, body, check),) = connection.execute("SELECT id, body, sum FROM seal").fetchall()
        if _sum("seal", (number, body)) != check:
            raise JournalError("The seal over all rows is not as it was written.")
        seal = json.loads(body)
        for name, columns in _NAMES.items():
            sums = []
            for *row, check in connection.execute(f"SELECT {columns}, sum FROM {name}"):
                if _sum(name, row) != check:
                    raise JournalError(f"The row of {name} with the key {row[0]!r} is not as it was written.")
                sums.append(check)
            if [len(sums), sum(sums) % (1 << 64)] != seal["tables"][name]:
                raise JournalError(f"The table {name} has other rows than were written.")
        return Head(seal["id"], seal["commits"], seal["generation"], seal["in_use"], b"")
    except (*ERRORS, ValueError, LookupError, TypeError) as error:
        if isinstance(error, JournalError):
            raise
        raise JournalError(f"The journal cannot be read: {error}.") from error


def _sum(name: str, row: Sequence[Any]) -> int:
    crc = crc32(name.encode())
    shape: list[Any] = []
    for value in row:
        if isinstance(value, bytes | str):
            data = value if isinstance(value, bytes) else value.encode()
            crc = crc32(data, crc)
            shape.append([len(data)] if isinstance(value, bytes) else (len(data),))
        else:
            shape.append(value)
    return crc32(repr(shape).encode(), crc)


def convert(connection: sqlite3.Connection, to: Database) -> None:
    """Write the rows of a journal of format 4 to an empty journal, in its first transaction."""
    for name in _SAME:
        for row in connection.execute(f"SELECT {_NAMES[name]} FROM {name}"):
            if name != "meta" or row[0] not in ("audit", "signature"):
                to.add(name, *row)
    for row in connection.execute(f"SELECT {_COHORTS} FROM cohorts"):
        values = dict(zip(_COHORTS.split(", "), row, strict=True))
        told_at, candidates = values.pop("told_at"), values.pop("candidates")
        to.add("cohorts", *values.values())
        if candidates is not None:
            to.add("candidates", values["ticket"], candidates)
        if told_at is not None:
            to.add("closed", values["ticket"], told_at)
    to.put("meta", "audit", "false")
    if not to.fetch("SELECT 1 FROM meta WHERE key = 'signer'"):
        to.put("meta", "signer", "null")


def leave_closed(connection: sqlite3.Connection) -> None:
    """Leave a journal of format 4 complete in its main file, so that it can be converted again after a kill."""
    ((number, body),) = connection.execute("SELECT id, body FROM seal").fetchall()
    closed = json.dumps({**json.loads(body), "in_use": False})
    connection.execute("UPDATE seal SET body = ?, sum = ?", (closed, _sum("seal", (number, closed))))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()

"""What an attacker does who can write a journal: change rows, and compute the whole chain anew. It needs no secret."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from fedcohort.journal.chain import START, TAGS, links
from fedcohort.journal.schema import TABLES

Statement = tuple[str, tuple[Any, ...]]


def forge(path: Path, *statements: Statement) -> Path:
    """Change a journal by SQL so that its chain holds again, with other links."""
    with sqlite3.connect(path) as db:
        before = {digest: place for place, digest in _digests(db).items()}
        chain = list(links(db))
        for statement, arguments in statements:
            db.execute(statement, arguments)
        after = _digests(db)
        db.execute("DELETE FROM chain")
        head = START
        for number, link in enumerate(chain, 1):
            added = [after.pop(before[d], b"") if d in before else d for d in link.added]
            if number == len(chain):
                added += after.values()
            data, removed = b"".join(added), b"".join(link.removed)
            head = head.following(data, removed, in_use=link.head.in_use, generation=link.head.generation)
            row = (head.number, head.generation, head.in_use, data, removed, head.link, link.signature)
            db.execute("INSERT INTO chain VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    return path


def _digests(db: sqlite3.Connection) -> dict[tuple[str, tuple[Any, ...]], bytes]:
    return {
        (name, tuple(row[: len(table.key)])): TAGS[name] + table.digest(salt, row)
        for name, table in TABLES.items()
        for salt, *row in db.execute(f"SELECT salt, {table.names} FROM {name}")
    }

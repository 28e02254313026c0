"""The newest rounds of journals that are made durable only now and then, for readers in other processes.

A simulation commits its journals with its checkpoints, so that both always agree; until then nobody else can read
them. :class:`LiveRounds` copies what is newer into one small file without waiting for the disk, and
:func:`read_with_live` shows a journal with those rounds at its end. The copies are dropped once the journals have them.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from fedcohort.journal.schema import ERRORS
from fedcohort.journal.store import Journal, read_journal

_COLUMNS = {
    "cohorts": "ticket, round, asked_at, told_at, wanted, n_candidates, candidates, clients, weights, work, notes, "
    "stop",
    "scores": "ticket, selector, picked, arrays, note",
    "replies": "id, ticket, at, late, data",
}


class LiveRounds:
    """Copies of the rounds that journals hold but have not made durable.

    Parameters
    ----------
    path : the file; what an earlier process left there is removed
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._remove()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = OFF")  # a copy: nothing is lost with it
        for table, columns in _COLUMNS.items():
            self._db.execute(f"CREATE TABLE {table} (run TEXT NOT NULL, {columns})")
            self._db.execute(f"CREATE INDEX {table}_place ON {table} (run, ticket)")
        self._copied: dict[str, tuple[int, int]] = {}  # by run: highest ticket and reply copied

    def publish(self, journals: Mapping[str, Journal]) -> None:
        """Copy what is new in each run's journal."""
        self._db.execute("BEGIN")
        for run, journal in journals.items():
            ticket, reply = self._copied.get(run, journal.durable)
            found = journal.newer(ticket, reply, _COLUMNS)
            for table, rows in found.items():
                if rows:
                    marks = ", ".join("?" * (len(rows[0]) + 1))
                    self._db.executemany(f"INSERT INTO {table} VALUES ({marks})", [(run, *row) for row in rows])
            self._copied[run] = (
                max((row[0] for row in found["cohorts"]), default=ticket),
                max((row[0] for row in found["replies"]), default=reply),
            )
        self._db.execute("COMMIT")

    def forget(self) -> None:
        """Drop the copies: the journals have been made durable."""
        self._db.execute("BEGIN")
        for table in _COLUMNS:
            self._db.execute(f"DELETE FROM {table}")
        self._db.execute("COMMIT")

    def close(self) -> None:
        """Remove the file."""
        self._db.close()
        self._remove()

    def _remove(self) -> None:
        for name in (self._path.name, f"{self._path.name}-wal", f"{self._path.name}-shm"):
            self._path.with_name(name).unlink(missing_ok=True)


def read_with_live(path: str | Path, live: Path, run: str) -> Journal:
    """Open a journal for reading, with the rounds that are only in the live copies at its end.

    Parameters
    ----------
    path : the run's journal
    live : the file of :class:`LiveRounds`; without it the journal alone is read
    run : name of the run in that file
    """
    journal = read_journal(path)
    if not live.is_file():
        return journal
    try:
        journal.extend(f"{live.absolute().as_uri()}?mode=ro", run, _COLUMNS)
    except ERRORS:  # it was removed meanwhile: then the journal has everything
        with contextlib.suppress(Exception):
            journal.close()
        return read_journal(path)
    return journal

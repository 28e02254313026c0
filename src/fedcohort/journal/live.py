"""Rounds that are not durable yet, for readers in other processes.

A simulation commits its journals together with its checkpoints, so that they always agree. Until then, no other
process sees the new rounds. :class:`LiveRounds` copies them to one small file, without waiting for the disk, and
:func:`read_with_live` opens a journal with these rounds at its end. Once a journal has a round, its copy is deleted.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedcohort.journal.database import Database
from fedcohort.journal.schema import ERRORS, TABLES
from fedcohort.journal.store import Journal, read_journal

_COLUMNS = {name: f"{TABLES[name].names}, salt" for name in ("cohorts", "candidates", "closed", "scores", "replies")}


class LiveRounds:
    """Copies of the rounds that journals have not yet made durable, each with a text about it.

    Parameters
    ----------
    path : the file to write; an earlier one is removed
    journals : the journals, by the name of the run
    """

    def __init__(self, path: Path, journals: Mapping[str, Journal]) -> None:
        self._path, self._journals = path, journals
        remove_live(path)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        # Anybody may delete this file at any time; the journal is the record.
        self._db.execute("PRAGMA synchronous = OFF")  # it is only a copy
        for table, columns in _COLUMNS.items():
            self._db.execute(f"CREATE TABLE {table} (run TEXT NOT NULL, {columns})")
            self._db.execute(f"CREATE INDEX {table}_place ON {table} (run, ticket)")
        self._db.execute("CREATE TABLE rounds (row TEXT NOT NULL)")
        self._copied: dict[str, tuple[int, int]] = {}  # by run, the highest ticket and id of replies

    def publish(self, texts: Iterable[str]) -> None:
        """Copy what is new in each run's journal, and add the texts about these rounds."""
        self._db.execute("BEGIN")
        for run, journal in self._journals.items():
            ticket, reply = self._copied.get(run, journal.durable)
            for table in ("candidates", "closed", "scores"):
                self._copy(run, journal, table, "ticket", ticket)
            self._copied[run] = (
                self._copy(run, journal, "cohorts", "ticket", ticket),
                self._copy(run, journal, "replies", "id", reply),
            )
        self._db.executemany("INSERT INTO rounds VALUES (?)", [(text,) for text in texts])
        self._db.execute("COMMIT")

    def _copy(self, run: str, journal: Journal, table: str, key: str, after: int) -> int:
        """Copy the rows whose key is above ``after`` and return the highest key."""
        rows = journal.database.fetch(f"SELECT {_COLUMNS[table]} FROM {table} WHERE {key} > ?", (after,))
        if rows:
            places = ", ".join("?" * (len(rows[0]) + 1))
            self._db.executemany(f"INSERT INTO {table} VALUES ({places})", [(run, *row) for row in rows])
        return max((row[0] for row in rows), default=after)

    def mark(self) -> dict[str, int]:
        """Return how far each table has come, for :meth:`forget`."""
        return {
            table: int(self._db.execute(f"SELECT COALESCE(MAX(rowid), 0) FROM {table}").fetchone()[0])
            for table in (*_COLUMNS, "rounds")
        }

    def forget(self, upto: Mapping[str, int]) -> None:
        """Delete the rows up to a :meth:`mark`, which the journals have made durable."""
        self._db.execute("BEGIN")
        for table, last in upto.items():
            self._db.execute(f"DELETE FROM {table} WHERE rowid <= ?", (last,))
        self._db.execute("COMMIT")

    def close(self) -> None:
        """Remove the file."""
        self._db.close()
        remove_live(self._path)


def live_files(folder: Path) -> list[Path]:
    """Return the files of live rounds in an experiment's folder, one for each process that runs rounds."""
    return sorted(folder.glob("live*.sqlite"))


def live_of(folder: Path, run: str) -> Path | None:
    """Return the file that has live rounds of a run, or None if the journal has all rounds."""
    for path in live_files(folder):
        with contextlib.suppress(*ERRORS), contextlib.closing(sqlite3.connect(_address(path), uri=True)) as connection:
            if connection.execute("SELECT 1 FROM cohorts WHERE run = ? LIMIT 1", (run,)).fetchone():
                return path
    return None


def remove_live(path: Path) -> None:
    """Delete a file of :class:`LiveRounds` and its companions, if it exists."""
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)


def read_live(path: Path) -> list[str]:
    """Return the texts about the rounds that are not durable yet; none if there is no such file."""
    if not path.is_file():
        return []
    try:
        with contextlib.closing(sqlite3.connect(_address(path), uri=True)) as connection:
            return [str(row) for (row,) in connection.execute("SELECT row FROM rounds ORDER BY rowid")]
    except ERRORS:  # removed in the meantime, or damaged; it is only a copy
        return []


def read_with_live(path: str | Path, live: Path, run: str) -> Journal:
    """Open a journal for reading, followed by the rounds that are only in the live copies.

    Parameters
    ----------
    path : the run's journal
    live : the file of :class:`LiveRounds`; it need not exist
    run : the name of the run in that file
    """
    journal = read_journal(path)
    if not live.is_file():
        return journal
    try:
        attach_live(journal.database, live, run)
    except ERRORS:  # it was removed in the meantime, so the journal has everything
        with contextlib.suppress(Exception):
            journal.close()
        return read_journal(path)
    return journal


def attach_live(database: Database, live: Path, run: str) -> None:
    """Append the live rounds of ``run`` to what a journal, open for reading, returns."""
    connection = database.connection
    connection.execute("ATTACH DATABASE ? AS live", (_address(live),))
    for table in _COLUMNS:
        connection.execute(f"SELECT 1 FROM live.{table} LIMIT 1")  # raises if the copy is damaged
    quoted = run.replace("'", "''")  # SQLite allows no parameters in the definition of a view
    for table, columns in _COLUMNS.items():
        connection.execute(
            f"CREATE TEMP VIEW {table} AS SELECT {columns} FROM main.{table} UNION ALL SELECT {columns} "
            f"FROM live.{table} WHERE run = '{quoted}' AND ticket > "
            "(SELECT COALESCE(MAX(ticket), -1) FROM main.cohorts)"
        )


def _address(live: Path) -> str:
    return f"{live.absolute().as_uri()}?mode=ro"

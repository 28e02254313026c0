"""Clients shared by several runs of one federation: a common file says which client works for which run.

A client that works for one run is not a candidate in another. A lease ends when the client answers, or after some time,
so that a run that dies does not keep its clients forever. A run that is started again finds its leases by its name.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from fedcohort.core.errors import InputError

_SCHEMA = "CREATE TABLE lease (client TEXT PRIMARY KEY, run TEXT NOT NULL, until REAL NOT NULL)"
_APPLICATION_ID = 0x46434C31  # "FCL1"
_BUSY = 30.0  # seconds to wait while another run uses the file
LONGEST = 7 * 86400.0  # seconds; a lease beyond that was not written by a run, and holds nobody


class Leases:
    """The leases of one run.

    Parameters
    ----------
    path : path
        The file that all runs share; it is created if it does not exist.
    run : str
        The run's name, which must be the same after a restart. The path of its journal is a good choice.
    seconds : float
        How long a lease lasts if the client does not answer, at most a week.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ours, theirs = (Leases(Path(folder) / "leases.sqlite", run) for run in ("ours", "theirs"))
    ...     first = ours.take(["anna", "ben"])
    ...     second = theirs.take(["ben", "cem"])
    ...     ours.release(["ben"])
    ...     third = theirs.take(["ben", "cem"])
    >>> first, second, third
    ({}, {'ben': 'ours'}, {})
    """

    def __init__(
        self, path: str | Path, run: str, *, seconds: float = 3600.0, clock: Callable[[], float] = time.time
    ) -> None:
        if not run or not 0 < seconds <= LONGEST:
            raise InputError(
                f"A lease needs a run's name and a time above 0 and at most {LONGEST:.0f} seconds. Got {run!r} and "
                f"{seconds!r}."
            )
        self.path = Path(path)
        self.run = run
        self.seconds = seconds
        self._clock = clock
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._error(error.strerror or str(error)) from error
        with self._open():
            pass

    def _error(self, why: str) -> InputError:
        return InputError(
            f"The leases {self.path} cannot be used: {why}.",
            hint="stop the runs that share this file, move it away and start them again; they continue where they were",
        )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file, which anybody may have deleted or replaced since the last time."""
        # SQLite would create what a link names, and wait for a pipe.
        if self.path.is_symlink():
            raise self._error("it is a symbolic link, which is not followed")
        if os.path.lexists(self.path) and not self.path.is_file():
            raise self._error("it is no file")
        try:
            with closing(sqlite3.connect(self.path, timeout=_BUSY, isolation_level=None)) as file:
                self._prepare(file)
                yield file
        except sqlite3.Error as error:
            raise self._error(str(error)) from error

    def _prepare(self, file: sqlite3.Connection) -> None:
        """Make an empty file a file of leases; refuse the file of another program."""
        (application,) = file.execute("PRAGMA application_id").fetchone()
        if application == _APPLICATION_ID:
            return
        file.execute("BEGIN IMMEDIATE")  # another run may be doing the same
        (application,) = file.execute("PRAGMA application_id").fetchone()
        if application != _APPLICATION_ID:
            if application or file.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise self._error("it belongs to something else")
            file.execute(_SCHEMA)
            file.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        file.execute("COMMIT")

    def elsewhere(self) -> dict[str, str]:
        """Return the clients that work for other runs, each with its run."""
        with self._open() as file:
            return self._elsewhere(file)

    def _elsewhere(self, file: sqlite3.Connection) -> dict[str, str]:
        now = self._clock()
        query = "SELECT client, run FROM lease WHERE run != ? AND until > ? AND until <= ?"
        return dict(file.execute(query, (self.run, now, now + LONGEST)).fetchall())

    def take(self, clients: Iterable[str]) -> dict[str, str]:
        """Lease all of the clients or none; return those that now work for other runs, each with its run."""
        names, until = list(clients), self._clock() + self.seconds
        with self._open() as file:
            file.execute("BEGIN IMMEDIATE")  # no other run can lease them between the check and the lease
            elsewhere = self._elsewhere(file)
            conflicts = {name: elsewhere[name] for name in names if name in elsewhere}
            if not conflicts:
                file.executemany(
                    "INSERT OR REPLACE INTO lease VALUES (?, ?, ?)",
                    [(name, self.run, until) for name in names],
                )
            file.execute("COMMIT")
        return conflicts

    def release(self, clients: Iterable[str]) -> None:
        """End the leases of clients of this run."""
        with self._open() as file:
            file.execute("BEGIN IMMEDIATE")
            file.executemany("DELETE FROM lease WHERE client = ? AND run = ?", [(name, self.run) for name in clients])
            file.execute("COMMIT")


def leases_of(path: Path, journal: Path | None, deadline: float | None) -> Leases:
    """Return the leases of a run, named after its journal; with a deadline, a lease lasts twice as long."""
    run = f"run-{uuid.uuid4().hex[:8]}" if journal is None else str(journal.resolve())
    # After two deadlines, the client's message has expired and it works for nobody.
    return Leases(path, run) if deadline is None else Leases(path, run, seconds=min(2 * deadline, LONGEST))

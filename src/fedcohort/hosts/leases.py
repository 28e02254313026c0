"""Clients shared by several runs of one federation: a common file says which client works for which run.

A client that works for one run is not a candidate in another. A lease ends when the client answers, or after some time,
so that a run that dies does not keep its clients forever. A run that is started again finds its leases by its name.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from fedcohort.core.errors import InputError

_SCHEMA = "CREATE TABLE IF NOT EXISTS lease (client TEXT PRIMARY KEY, run TEXT NOT NULL, until REAL NOT NULL)"
_BUSY = 30.0  # seconds to wait while another run uses the file


class Leases:
    """The leases of one run.

    Parameters
    ----------
    path : path
        The file that all runs share; it is created if it does not exist.
    run : str
        The run's name, which must be the same after a restart. The path of its journal is a good choice.
    seconds : float
        How long a lease lasts if the client does not answer.

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
        if not run or seconds <= 0:
            raise InputError(f"A lease needs a run's name and a time above 0. Got {run!r} and {seconds!r}.")
        self._path = Path(path)
        self.run = run
        self.seconds = seconds
        self._clock = clock
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with closing(self._open()) as file:
            file.execute(_SCHEMA)

    def _open(self) -> sqlite3.Connection:
        try:
            return sqlite3.connect(self._path, timeout=_BUSY, isolation_level=None)
        except sqlite3.Error as error:
            raise InputError(f"The leases {self._path} cannot be opened: {error}.") from error

    def elsewhere(self) -> dict[str, str]:
        """Return the clients that work for other runs, each with its run."""
        with closing(self._open()) as file:
            return self._elsewhere(file)

    def _elsewhere(self, file: sqlite3.Connection) -> dict[str, str]:
        query = "SELECT client, run FROM lease WHERE run != ? AND until > ?"
        return dict(file.execute(query, (self.run, self._clock())).fetchall())

    def take(self, clients: Iterable[str]) -> dict[str, str]:
        """Lease all of the clients or none; return those that now work for other runs, each with its run."""
        names, until = list(clients), self._clock() + self.seconds
        with closing(self._open()) as file:
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
        with closing(self._open()) as file:
            file.execute("BEGIN IMMEDIATE")
            file.executemany("DELETE FROM lease WHERE client = ? AND run = ?", [(name, self.run) for name in clients])
            file.execute("COMMIT")


def leases_of(path: Path, journal: Path | None, deadline: float | None) -> Leases:
    """Return the leases of a run, named after its journal; with a deadline, a lease lasts twice as long."""
    run = f"run-{uuid.uuid4().hex[:8]}" if journal is None else str(journal.resolve())
    # After two deadlines, the client's message has expired and it works for nobody.
    return Leases(path, run) if deadline is None else Leases(path, run, seconds=2 * deadline)

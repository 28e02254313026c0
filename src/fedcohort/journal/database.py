"""The database that holds a journal: rows with checksums, and a seal over all of them in every commit.

For each table, the seal holds the number of rows and the sum of their checksums. So it also reveals rows that vanished
or came back from an earlier state. It counts how often the journal was opened and committed, and says whether it is
in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import secrets
import shutil
import sqlite3
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedcohort.core.errors import JournalError
from fedcohort.core.files import sync_folder
from fedcohort.journal.lock import COMPANIONS, Lock, Mark
from fedcohort.journal.schema import ERRORS, SEAL, TABLES

Commit = Literal["always", "manual"]
CHECKPOINT_SECONDS = 30.0  # the main file may lag this far behind its companion
_WRAP = 1 << 64  # sums of checksums wrap around here, so their size stays fixed
_REWRITTEN = ("states", "meta")  # small tables whose rows are replaced in every round
_compact_json = json.JSONEncoder(separators=(",", ":")).encode
_REOPEN = "close the session and continue it with Session.open(path), once the cause is fixed"


@dataclass(frozen=True)
class Seal:
    """What a commit says about the whole journal.

    Parameters
    ----------
    id : str
        A random number drawn when the journal was created.
    generation : int
        How often the journal was opened for writing.
    in_use : bool
        Whether a session had it open.
    tables : dict of str to (number of rows, sum of their checksums)
    """

    id: str
    generation: int
    commits: int
    in_use: bool
    tables: dict[str, tuple[int, int]]

    @classmethod
    def fresh(cls) -> Seal:
        """Return the seal of a new journal."""
        return cls(secrets.token_hex(16), 1, 0, True, dict.fromkeys(TABLES, (0, 0)))

    @classmethod
    def read(cls, connection: sqlite3.Connection) -> Seal:
        """Return the seal in a database; raise :class:`JournalError` if it is missing or damaged."""
        rows = connection.execute(f"SELECT {SEAL.names}, sum FROM seal").fetchall()
        if len(rows) != 1 or SEAL.sum(rows[0][:-1]) != rows[0][-1]:
            raise JournalError("The seal over all rows is not as it was written.")
        body = json.loads(rows[0][1])
        body["tables"] = {name: tuple(pair) for name, pair in body["tables"].items()}
        return cls(**body)

    def write(self, connection: sqlite3.Connection) -> None:
        """Write the seal within the current transaction."""
        row = (0, _compact_json(vars(self)))
        connection.execute(SEAL.replace, (*row, SEAL.sum(row)))

    @property
    def mark(self) -> Mark:
        """What the lock file says about this commit."""
        return Mark(self.id, self.commits)


class Database:
    """A connection that keeps checksums and the seal up to date as rows are written.

    Parameters
    ----------
    connection : sqlite3.Connection
    name : str
        The journal's name in messages.
    seal : Seal, optional
        Without a seal (in memory, or for reading), rows get no checksums.
    commit : "always" or "manual"
    being_created : Path, optional
        The file that holds the rows until :meth:`establish`.
    folder : Path, optional
        The folder of a temporary copy, removed when the database is closed.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        name: str,
        *,
        seal: Seal | None = None,
        lock: Lock | None = None,
        commit: Commit = "always",
        being_created: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self._being_created = being_created
        self._folder = folder
        self.manual = commit == "manual"
        self._connection: sqlite3.Connection | None = connection
        self._lock = lock
        self._seal = seal
        self._tables = {} if seal is None else dict(seal.tables)
        self._last: dict[str, int] = {}  # the highest id in each table
        self._sums: dict[tuple[str, tuple[Any, ...]], int] = {}  # checksums of rows that are often replaced
        self._dirty = False
        self._unusable: tuple[str, str] | None = None
        self._checkpointed = time.monotonic()

    # -- the connection -------------------------------------------------------------------------------------------

    @property
    def connection(self) -> sqlite3.Connection:
        """The open connection; JournalError if it is closed or must not be used any more."""
        if self._unusable is not None:
            problem, hint = self._unusable
            raise JournalError(f"The journal {self.name} {problem}.", hint=hint)
        if self._connection is None:
            raise JournalError(f"The journal {self.name} is closed.", hint="open it again with Session.open(path)")
        return self._connection

    def fetch(self, query: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """Return the rows of a query."""
        try:
            return self.connection.execute(query, arguments).fetchall()
        except ERRORS as error:
            raise self._error(error) from error

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise SQLite's errors as JournalError."""
        try:
            yield
        except (*ERRORS, OverflowError) as error:
            raise self._error(error) from error

    def _error(self, error: sqlite3.Error | UnicodeDecodeError | OverflowError) -> JournalError:
        hint: str | None = None
        if self._unusable is not None:
            problem, hint = self._unusable
        elif isinstance(error, (sqlite3.DataError, OverflowError)):  # beyond SQLite's limit, or beyond a C integer
            problem, hint = "cannot hold so large a row: SQLite's are below 2 GB", "let fewer clients report at once"
        else:
            problem = f"could not be used: {error}"
        return JournalError(f"The journal {self.name} {problem}.", hint=hint)

    @property
    def seal(self) -> Seal:
        """The seal of the newest commit."""
        assert self._seal is not None, "only a journal that is being written has a seal"
        return self._seal

    # -- rows -----------------------------------------------------------------------------------------------------

    def add(self, name: str, *values: Any) -> None:
        """Add a row."""
        table = TABLES[name]
        row = table.to_stored_types(values)
        # SQLite may return other types than it was given, such as 1.0 for 1. The checksum is of what it returns.
        self.connection.execute(table.insert, (*row, self._add_to_seal(name, row)))

    def append(self, name: str, *values: Any) -> int:
        """Add a row under the next id and return the id."""
        if name not in self._last:
            ((self._last[name],),) = self.fetch(f"SELECT COALESCE(MAX(id), 0) FROM {name}")
        self._last[name] += 1
        self.add(name, self._last[name], *values)
        return self._last[name]

    def put(self, name: str, *values: Any) -> None:
        """Add a row, replacing any row with the same key."""
        table = TABLES[name]
        row = table.to_stored_types(values)
        key = row[: len(table.key)]
        if self._seal is not None:
            # A few rows are replaced in every round. Remembering their checksums saves a query each time.
            known = self._sums.get((name, key))
            self._remove_from_seal(name, self.fetch(table.select_sum, key) if known is None else [(known,)])
        check = self._add_to_seal(name, row)
        self.connection.execute(table.replace, (*row, check))
        if name in _REWRITTEN:
            self._sums[name, key] = check

    def change(self, name: str, key: Sequence[Any], **values: Any) -> None:
        """Change columns of the row with this key."""
        table = TABLES[name]
        rows = self.fetch(f"SELECT {table.names}, sum FROM {name} WHERE {table.where_key}", key)
        if not rows:
            raise JournalError(f"The journal {self.name} has no row {tuple(key)} of {name}.")
        *before, check = rows[0]
        after = dict(zip(table.columns, before, strict=True)) | values
        row = table.to_stored_types(tuple(after.values()))
        self._remove_from_seal(name, [(check,)])
        self._sums.pop((name, row[: len(table.key)]), None)  # the next put() must not count with the old checksum
        changes = ", ".join(f"{column} = ?" for column in values)
        new = [row[table.columns.index(column)] for column in values]
        statement = f"UPDATE {name} SET {changes}, sum = ? WHERE {table.where_key}"
        self.connection.execute(statement, (*new, self._add_to_seal(name, row), *key))

    def delete(self, name: str, where: str, arguments: Sequence[Any]) -> None:
        """Delete the rows that satisfy a condition."""
        self._remove_from_seal(name, self.fetch(f"SELECT sum FROM {name} WHERE {where}", arguments))
        # Both may hold something about the deleted rows.
        self._last.pop(name, None)
        self._sums.clear()
        self.connection.execute(f"DELETE FROM {name} WHERE {where}", arguments)

    def _add_to_seal(self, name: str, row: Sequence[Any]) -> int:
        """Add a new row to the seal and return its checksum."""
        if self._seal is None:
            return 0
        check = TABLES[name].sum(row)
        count, total = self._tables[name]
        self._tables[name] = (count + 1, (total + check) % _WRAP)
        self._dirty = True
        return check

    def _remove_from_seal(self, name: str, checks: Sequence[tuple[int]]) -> None:
        """Remove rows from the seal, given their checksums."""
        if self._seal is not None and checks:
            count, total = self._tables[name]
            self._tables[name] = (count - len(checks), (total - sum(check for (check,) in checks)) % _WRAP)
            self._dirty = True

    # -- creation -------------------------------------------------------------------------------------------------

    def establish(self, file: Path | None) -> None:
        """End the first transaction and give the file its name, once everything in it is durable."""
        with self.errors():
            self._seal_and_commit()
            if file is not None and self._being_created is not None and self._lock is not None:
                # A kill at any line below leaves either no journal or a complete one. The content is durable before
                # the file gets its name, and the lock file counts the commit before a file without it could appear.
                new, connection = self._being_created, self.connection
                connection.execute("PRAGMA journal_mode = WAL")
                connection.close()
                with open(new, "rb+") as stream:
                    os.fsync(stream.fileno())
                self._lock.mark(self.seal.mark, sync=True)
                # SQLite would replay the -wal of an earlier journal of this name into the new one.
                for end in COMPANIONS:
                    file.with_name(file.name + end).unlink(missing_ok=True)
                os.replace(new, file)
                self._being_created = None
                sync_folder(file.parent)
                self._connection = connect(file)
            self.begin()

    # -- transactions ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """In manual mode, begin the transaction that the next :meth:`commit` ends."""
        if self.manual:
            self.connection.execute("BEGIN IMMEDIATE")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all writes inside durable together (in manual mode, with the next commit), or none of them."""
        connection, tables = self.connection, dict(self._tables)
        commits = 0 if self._seal is None else self._seal.commits
        try:
            connection.execute("SAVEPOINT event" if self.manual else "BEGIN IMMEDIATE")
            yield
            if self.manual:
                connection.execute("RELEASE event")
            else:
                self._seal_and_commit()
                self._after_commit()
        except BaseException as error:  # Ctrl-C too: the next event must not commit half of this one
            self._tables, self._last, self._sums = tables, {}, {}
            self._undo(error, commits)
            if isinstance(error, (*ERRORS, OverflowError)):
                raise self._error(error) from error
            raise

    def _undo(self, error: BaseException, commits: int) -> None:
        """Roll an event back; if that is no longer possible, make the journal unusable."""
        connection = self._connection
        assert connection is not None
        try:
            if self.manual:
                connection.execute("ROLLBACK TO event")
                connection.execute("RELEASE event")
                return
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            # An interrupt may come after SQLite's COMMIT but before we know about it. The seal in the file tells.
            if self._seal is None or Seal.read(connection).commits == commits:
                return
            problem = "was interrupted during a commit, so the session does not know what is on record"
        except (sqlite3.Error, JournalError):  # SQLite has already rolled everything back
            problem = f"has lost what was not committed: {error}"
        self._unusable = (problem, _REOPEN)

    def commit(self) -> None:
        """In manual mode, make everything so far durable."""
        if not self.manual:
            return
        with self.errors():
            connection = self.connection
            try:
                self._seal_and_commit()
                self._after_commit()
                self.begin()
            except BaseException as error:
                if not connection.in_transaction:
                    self._unusable = (f"has lost what was not committed: {error}", _REOPEN)
                raise

    def _seal_and_commit(self) -> None:
        if self._seal is None or not self._dirty:
            self.connection.execute("COMMIT")
            return
        self._commit_seal(self._next_seal())

    def _commit_seal(self, seal: Seal) -> None:
        seal.write(self.connection)
        self.connection.execute("COMMIT")
        self._seal, self._dirty = seal, False

    def _next_seal(self) -> Seal:
        seal = self.seal
        return Seal(seal.id, seal.generation, seal.commits + 1, seal.in_use, dict(self._tables))

    def _after_commit(self) -> None:
        """Note in the lock file what is durable, and update the main file from time to time."""
        if self._seal is None:
            return
        # Never before the commit: a mark that is ahead of the file looks like a loss.
        if self._lock is not None:
            self._lock.mark(self._seal.mark)
        if time.monotonic() - self._checkpointed > CHECKPOINT_SECONDS:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Copy the companion's commits to the main file, as far as readers allow; it keeps them until then."""
        with contextlib.suppress(sqlite3.Error):
            self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        self._checkpointed = time.monotonic()

    def rewrite(self) -> None:
        """Rewrite the file, so that no trace of deleted rows is left in it."""
        self.commit()
        with self.errors():
            connection = self.connection
            if self.manual:
                connection.execute("COMMIT")
            try:
                if self._lock is not None:
                    self._lock.mark(self.seal.mark, sync=True)  # the only proof while the companion is empty
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                if self._lock is not None:
                    self.reseal(in_use=True)
            finally:
                self.begin()

    def reseal(self, *, in_use: bool, generation: int | None = None) -> None:
        """Commit only a seal that says whether the journal is in use; not within a transaction."""
        generation = self.seal.generation if generation is None else generation
        with self.errors():
            self.connection.execute("BEGIN IMMEDIATE")
            self._commit_seal(dataclasses.replace(self._next_seal(), in_use=in_use, generation=generation))
        if self._lock is not None:
            self._lock.mark(self.seal.mark)
        self.checkpoint()

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file; in manual mode, uncommitted events are lost."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            if self._seal is not None and self._lock is not None and self._being_created is None:
                with contextlib.suppress(sqlite3.Error, JournalError):  # the seal then still says "in use"
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    self._connection, self._unusable, self._tables = connection, None, dict(self._seal.tables)
                    # Only if the file is as we left it. Otherwise the next opening must see that something is wrong.
                    if Seal.read(connection) == self._seal:
                        self.reseal(in_use=False)
            connection.close()
        finally:
            self._connection = None
            if self._being_created is not None:
                self._being_created.unlink(missing_ok=True)
            if self._lock is not None:
                self._lock.release()
                self._lock = None
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def orphan(self) -> None:
        """Let go of the parent's connection in a forked child, without closing it."""
        if self._connection is None:
            return
        if self._lock is not None:
            self._lock.drop()
            self._lock = None
        # Closing it would make SQLite tidy up files that the parent still uses. So keep it until the process ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
        self._connection = None
        self._unusable = (
            "was opened before this process was forked, and belongs to the parent",
            "in the child, read it with read_journal(path), or open it once the parent has closed it",
        )


_OPEN: weakref.WeakSet[Database] = weakref.WeakSet()


def orphan_after_fork(database: Database) -> Database:
    """Register a database that has a file, so that forked children leave it to the parent; return it."""
    _OPEN.add(database)
    return database


def _orphan_all() -> None:
    for database in list(_OPEN):
        database.orphan()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_orphan_all)


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection for writing. Its commits are durable when they return."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection

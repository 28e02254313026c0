"""The database a journal is written to: rows with checksums, and a seal over all of them in every commit.

The seal holds, for each table, the number of rows and the sum of their checksums, so that a row that vanished or came
back from the past is noticed too; and how often the journal was opened and committed, and whether it is in use.
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
CHECKPOINT_SECONDS = 30.0  # so far the file itself may lag behind its companion
_WRAP = 1 << 64  # sums of checksums wrap around, so that they stay numbers of fixed size
_REWRITTEN = ("states", "meta")  # tables whose rows are replaced in every round; there are few of them
_encoded = json.JSONEncoder(separators=(",", ":")).encode
_AGAIN = "close the session and continue it with Session.open(path), once the cause is fixed"


@dataclass(frozen=True)
class Seal:
    """What a commit says about the whole journal.

    Parameters
    ----------
    id : str
        Drawn when the journal was created.
    generation : int
        How often it was opened for writing.
    in_use : bool
        Whether a session had it open.
    tables : dict of str to (rows, sum of their checksums)
    """

    id: str
    generation: int
    commits: int
    in_use: bool
    tables: dict[str, tuple[int, int]]

    @classmethod
    def fresh(cls) -> Seal:
        """Return the seal of a journal that is being created."""
        return cls(secrets.token_hex(16), 1, 0, True, dict.fromkeys(TABLES, (0, 0)))

    @classmethod
    def read(cls, connection: sqlite3.Connection) -> Seal:
        """Return the seal in a database; :class:`JournalError` when there is no sound one."""
        rows = connection.execute(f"SELECT {SEAL.names}, sum FROM seal").fetchall()
        if len(rows) != 1 or SEAL.sum(rows[0][:-1]) != rows[0][-1]:
            raise JournalError("The seal over all rows is not as it was written.")
        body = json.loads(rows[0][1])
        body["tables"] = {name: tuple(pair) for name, pair in body["tables"].items()}
        return cls(**body)

    def write(self, connection: sqlite3.Connection) -> None:
        """Put the seal into a database, in the transaction that is going on."""
        row = (0, _encoded(vars(self)))
        connection.execute(SEAL.replace, (*row, SEAL.sum(row)))

    @property
    def mark(self) -> Mark:
        """What is noted beside the journal."""
        return Mark(self.id, self.commits)


class Database:
    """A connection, with everything that must happen when rows are written.

    Parameters
    ----------
    connection : sqlite3.Connection
    name : str
        How messages call the journal.
    seal : Seal, optional
        Without one (in memory, or for reading) rows get no checksums.
    commit : "always" or "manual"
    being_created : Path, optional
        Where the rows lie until :meth:`establish`.
    folder : Path, optional
        Of a copy that goes when the connection does.
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
        self._last: dict[str, int] = {}  # by table the highest number given out
        self._sums: dict[tuple[str, tuple[Any, ...]], int] = {}  # checksums of rows that are often written anew
        self._dirty = False
        self._unusable: tuple[str, str] | None = None
        self._checkpointed = time.monotonic()

    # -- the connection -------------------------------------------------------------------------------------------

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection, for the process that opened it."""
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
        """Turn SQLite's errors into our own."""
        try:
            yield
        except (*ERRORS, OverflowError) as error:
            raise self._error(error) from error

    def _error(self, error: sqlite3.Error | UnicodeDecodeError | OverflowError) -> JournalError:
        usual: tuple[str, str | None] = f"could not be used: {error}", None
        if isinstance(error, (sqlite3.DataError, OverflowError)):  # larger than SQLite's limit, or than a C integer
            usual = "cannot hold so large a row: SQLite's are below 2 GB", "let fewer clients report at once"
        problem, hint = self._unusable or usual
        return JournalError(f"The journal {self.name} {problem}.", hint=hint)

    @property
    def seal(self) -> Seal:
        """The seal of the newest commit."""
        assert self._seal is not None, "only a journal that is written has one"
        return self._seal

    # -- rows -----------------------------------------------------------------------------------------------------

    def add(self, name: str, *values: Any) -> None:
        """Add a row."""
        table = TABLES[name]
        row = table.to_stored_types(values)
        # The checksum is of the row as SQLite will give it back, not as it was handed over: 1 may come back as 1.0.
        self.connection.execute(table.insert, (*row, self._add_to_seal(name, row)))

    def append(self, name: str, *values: Any) -> int:
        """Add a row under the next number and return that."""
        if name not in self._last:
            ((self._last[name],),) = self.fetch(f"SELECT COALESCE(MAX(id), 0) FROM {name}")
        self._last[name] += 1
        self.add(name, self._last[name], *values)
        return self._last[name]

    def put(self, name: str, *values: Any) -> None:
        """Add a row, in the place of the one that has its key, if there is one."""
        table = TABLES[name]
        row = table.to_stored_types(values)
        key = tuple(value for column, value in zip(table.columns, row, strict=True) if column in table.key)
        if self._seal is not None:
            # A few rows are rewritten in every round. Remembering their checksums saves a query each time.
            known = self._sums.get((name, key))
            gone = self.fetch(f"SELECT sum FROM {name} WHERE {table.where_key}", key) if known is None else [(known,)]
            self._discount(name, gone)
        check = self._add_to_seal(name, row)
        self.connection.execute(table.replace, (*row, check))
        if name in _REWRITTEN:
            self._sums[name, key] = check

    def change(self, name: str, key: Sequence[Any], **values: Any) -> None:
        """Change columns of the row with this key."""
        table = TABLES[name]
        found = self.fetch(f"SELECT {table.names}, sum FROM {name} WHERE {table.where_key}", key)
        if not found:
            raise JournalError(f"The journal {self.name} has no row {tuple(key)} of {name}.")
        *before, check = found[0]
        row = table.to_stored_types(
            [values.get(column, old) for column, old in zip(table.columns, before, strict=True)]
        )
        self._discount(name, [(check,)])
        changes = ", ".join(f"{column} = ?" for column in values)
        new = [value for column, value in zip(table.columns, row, strict=True) if column in values]
        statement = f"UPDATE {name} SET {changes}, sum = ? WHERE {table.where_key}"
        self.connection.execute(statement, (*new, self._add_to_seal(name, row), *key))

    def delete(self, name: str, where: str, arguments: Sequence[Any]) -> None:
        """Delete rows."""
        self._discount(name, self.fetch(f"SELECT sum FROM {name} WHERE {where}", arguments))
        # Both remember rows that may be among those deleted.
        self._last.pop(name, None)
        self._sums.clear()
        self.connection.execute(f"DELETE FROM {name} WHERE {where}", arguments)

    def _add_to_seal(self, name: str, row: Sequence[Any]) -> int:
        """Return the checksum of a row that is about to be written, once it is part of the seal."""
        if self._seal is None:
            return 0
        check = TABLES[name].sum(row)
        count, total = self._tables[name]
        self._tables[name] = (count + 1, (total + check) % _WRAP)
        self._dirty = True
        return check

    def _discount(self, name: str, checks: Sequence[tuple[int]]) -> None:
        """Take rows that are about to go, by their checksums, out of the seal."""
        if self._seal is not None and checks:
            count, total = self._tables[name]
            self._tables[name] = (count - len(checks), (total - sum(check for (check,) in checks)) % _WRAP)
            self._dirty = True

    # -- creation -------------------------------------------------------------------------------------------------

    def establish(self, file: Path | None) -> None:
        """End the first transaction; the file gets its name when everything in it is durable."""
        with self.errors():
            self._seal_and_commit()
            if file is not None and self._being_created is not None and self._lock is not None:
                # A kill at any line below leaves no journal or a whole one: the content is durable before the file
                # has its name, and the lock file knows of the commit before there is a file that could lack it.
                new, connection = self._being_created, self.connection
                connection.execute("PRAGMA journal_mode = WAL")
                connection.close()
                with open(new, "rb+") as written:
                    os.fsync(written.fileno())
                self._count_commit()
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
        """In manual mode, start the transaction that the next :meth:`commit` ends."""
        if self.manual:
            self.connection.execute("BEGIN IMMEDIATE")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All writes inside become durable together (in manual mode with the next commit), or none does."""
        with self.errors():
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
            except BaseException as error:  # also of Ctrl-C: half an event must not be committed by the next one
                self._tables, self._last, self._sums = tables, {}, {}
                self._undo(error, commits)
                raise

    def _undo(self, error: BaseException, commits: int) -> None:
        """Take back an event; where that is not possible any more, nothing may follow it."""
        connection = self._connection
        assert connection is not None
        try:
            if self.manual:
                connection.execute("ROLLBACK TO event")
                connection.execute("RELEASE event")
                return
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            # An interrupt may come after SQLite's COMMIT and before we know of it. The seal in the file says which.
            if self._seal is None or Seal.read(connection).commits == commits:
                return
            problem = "was interrupted during a commit, so the session does not know what is on record"
        except (sqlite3.Error, JournalError):  # SQLite has rolled back everything by itself
            problem = f"has lost what was not committed: {error}"
        self._unusable = (problem, _AGAIN)

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
                    self._unusable = (f"has lost what was not committed: {error}", _AGAIN)
                raise

    def _seal_and_commit(self) -> None:
        if self._seal is not None and self._dirty:
            self._next_seal().write(self.connection)
        self.connection.execute("COMMIT")

    def _after_commit(self) -> None:
        """Note what is durable now, and bring the file itself up to date every now and then."""
        if self._seal is None or not self._dirty:
            return
        # After the commit and never before: a mark ahead of the file would read as a loss.
        self._count_commit()
        if self._lock is not None:
            self._lock.mark(self._seal.mark)
        if time.monotonic() - self._checkpointed > CHECKPOINT_SECONDS:
            self.checkpoint()

    def _count_commit(self) -> None:
        self._seal = self._next_seal()
        self._dirty = False

    def _next_seal(self) -> Seal:
        seal = self.seal
        return Seal(seal.id, seal.generation, seal.commits + 1, seal.in_use, dict(self._tables))

    def checkpoint(self) -> None:
        """Bring the file itself up to date, as far as readers let it; its companion keeps everything until then."""
        with contextlib.suppress(sqlite3.Error):
            self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        self._checkpointed = time.monotonic()

    def rewrite(self) -> None:
        """Rewrite the file without what was deleted, so that it can no longer be found there."""
        self.commit()
        with self.errors():
            connection = self.connection
            if self.manual:
                connection.execute("COMMIT")
            try:
                if self._lock is not None:
                    self._lock.mark(self.seal.mark, sync=True)  # vouches for the file while its companion is empty
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                if self._lock is not None:
                    self.reseal(in_use=True)
            finally:
                self.begin()

    def reseal(self, *, in_use: bool, generation: int | None = None) -> None:
        """Commit nothing but a seal that says whether the journal is in use; outside of a transaction."""
        seal = self.seal
        new = dataclasses.replace(
            seal,
            in_use=in_use,
            generation=seal.generation if generation is None else generation,
            commits=seal.commits + 1,
            tables=dict(self._tables),
        )
        with self.errors():
            self.connection.execute("BEGIN IMMEDIATE")
            new.write(self.connection)
            self.connection.execute("COMMIT")
        self._seal, self._dirty = new, False
        if self._lock is not None:
            self._lock.mark(new.mark)
        self.checkpoint()

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file; in manual mode what was not committed is dropped."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            if self._seal is not None and self._lock is not None and self._being_created is None:
                with contextlib.suppress(sqlite3.Error, JournalError):  # then it stays marked as in use
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    self._connection, self._unusable, self._tables = connection, None, dict(self._seal.tables)
                    # Only where the file is as we left it: whoever opens it next must see that something is wrong.
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
        """In a child made by fork: touch nothing of the parent's any more, not even to close it."""
        if self._connection is None:
            return
        if self._lock is not None:
            self._lock.drop()
            self._lock = None
        # Closing would let SQLite tidy up files that the parent is using, so it must outlive the interpreter.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
        self._connection = None
        self._unusable = (
            "was opened before this process was forked, and belongs to the parent",
            "in the child, read it with read_journal(path), or open it once the parent has closed it",
        )


_OPEN: weakref.WeakSet[Database] = weakref.WeakSet()


def orphan_after_fork(database: Database) -> Database:
    """Remember a database with a file, so that a child made by fork keeps its hands off it."""
    _OPEN.add(database)
    return database


def _orphan_all() -> None:
    for database in list(_OPEN):
        database.orphan()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_orphan_all)


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection for writing, whose commits are durable when they return."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection

"""The database that holds a journal: its rows, and a link of the chain for each event that writes any."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import sqlite3
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from fedcohort.core.errors import JournalError
from fedcohort.core.files import sync_folder
from fedcohort.journal.chain import TAGS, Head, read_head
from fedcohort.journal.lock import COMPANIONS, Lock, Mark
from fedcohort.journal.schema import ERRORS, TABLES
from fedcohort.journal.signing import Signer

Commit = Literal["always", "manual"]
CHECKPOINT_SECONDS = 30.0  # the main file may lag this far behind its companion
_SALT = 16  # bytes
_REWRITTEN = frozenset({"meta", "facts", "states", "deltas"})  # few rows, which are replaced all the time
_REOPEN = "close the session and continue it with Session.open(path), once the cause is fixed"


class Database:
    """A connection that adds what it writes to the chain.

    Parameters
    ----------
    connection : sqlite3.Connection
    name : str
        The journal's name in messages.
    head : Head, optional
        The newest link. Without one (in memory, or for reading), rows are not chained.
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
        head: Head | None = None,
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
        self.head = head
        self._durable = head  # in manual mode, the newest link that is committed
        self.signer: Signer | None = None
        self.link_each_event = False
        # Since the last link: the tagged digests of rows that were written, and of those that were replaced or deleted.
        self._added: list[bytes] = []
        self._removed: list[bytes] = []
        # Tagged digests of rows that are often replaced. Otherwise each of them would be read before it is replaced.
        self._digests: dict[tuple[str, tuple[Any, ...]], bytes] = {}
        self._last: dict[str, int] = {}  # the highest id in each table
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

    # -- rows -----------------------------------------------------------------------------------------------------

    def add(self, name: str, *values: Any) -> None:
        """Add a row."""
        table = TABLES[name]
        # SQLite may return other types than it was given, such as 1.0 for 1. The digest is of what it returns.
        row = table.to_stored_types(values)
        self.connection.execute(table.insert, (self._chain_row(name, row), *row))

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
        known = self._digests.get((name, key))
        if known is not None:
            self._removed.append(known)
        else:
            self._unchain(name, table.where_key, key)
        self.connection.execute(table.replace, (self._chain_row(name, row), *row))

    def change(self, name: str, key: Sequence[Any], **values: Any) -> None:
        """Change columns of the row with this key, which keeps its place."""
        table = TABLES[name]
        # A row's digest is over all its columns, so all are read, although few change.
        rows = self.fetch(f"SELECT {table.names} FROM {name} WHERE {table.where_key}", key)
        if not rows:
            raise JournalError(f"The journal {self.name} has no row {tuple(key)} of {name}.")
        self._unchain(name, table.where_key, key)
        row = table.to_stored_types(tuple((dict(zip(table.columns, rows[0], strict=True)) | values).values()))
        changes = ", ".join(f"{column} = ?" for column in ("salt", *table.columns))
        salt = self._chain_row(name, row)
        self.connection.execute(f"UPDATE {name} SET {changes} WHERE {table.where_key}", (salt, *row, *key))

    def delete(self, name: str, where: str, arguments: Sequence[Any]) -> None:
        """Delete the rows that satisfy a condition."""
        self._unchain(name, where, arguments)
        self._last.pop(name, None)
        self.connection.execute(f"DELETE FROM {name} WHERE {where}", arguments)

    def _chain_row(self, name: str, row: tuple[Any, ...]) -> bytes:
        """Add a row to the link of this event and return its salt."""
        if self.head is None:
            return b""
        table, salt = TABLES[name], secrets.token_bytes(_SALT)
        digest = TAGS[name] + table.digest(salt, row)
        self._added.append(digest)
        if name in _REWRITTEN:
            self._digests[name, row[: len(table.key)]] = digest
        return salt

    def _unchain(self, name: str, where: str, arguments: Sequence[Any]) -> None:
        """Note in the link of this event that rows are about to be replaced or deleted."""
        if self.head is None:
            return
        table = TABLES[name]
        for key in self.fetch(f"SELECT {', '.join(table.key)} FROM {name} WHERE {where}", arguments):
            digest = self._digests.pop((name, key), None)
            if digest is None:
                ((salt, *row),) = self.fetch(f"SELECT salt, {table.names} FROM {name} WHERE {table.where_key}", key)
                digest = TAGS[name] + table.digest(salt, row)
            self._removed.append(digest)

    def _add_link(self, *, in_use: bool = True, generation: int | None = None) -> None:
        """Add a link for what was written since the last one."""
        if self.head is None or not (self._added or self._removed or generation is not None):
            return
        added, removed = b"".join(self._added), b"".join(self._removed)
        self._added, self._removed = [], []
        generation = self.head.generation if generation is None else generation
        head = self.head.following(added, removed, in_use=in_use, generation=generation)
        signature = None if self.signer is None else self.signer.sign(head.link)
        self.connection.execute(
            "INSERT INTO chain VALUES (?, ?, ?, ?, ?, ?, ?)",
            (head.number, generation, in_use, added, removed, head.link, signature),
        )
        self.head = head

    # -- creation -------------------------------------------------------------------------------------------------

    def establish(self, file: Path | None) -> None:
        """End the first transaction and give the file its name, once everything in it is durable."""
        with self.errors():
            self._add_link()
            self._commit()
            if file is not None and self._being_created is not None and self._lock is not None:
                # A kill at any line below leaves either no journal or a complete one. The content is durable before
                # the file gets its name, and the lock file counts the commit before a file without it could appear.
                new, connection = self._being_created, self.connection
                # In WAL mode readers never wait for the session, nor it for them.
                connection.execute("PRAGMA journal_mode = WAL")
                connection.close()
                with open(new, "rb+") as stream:
                    os.fsync(stream.fileno())
                self._lock.mark(self._mark, sync=True)
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
        connection, head, begun = self.connection, self.head, (len(self._added), len(self._removed))
        try:
            connection.execute("SAVEPOINT event" if self.manual else "BEGIN IMMEDIATE")
            yield
            # Nobody sees an event before its commit, so then one link for all is enough, unless clients keep links.
            if self.link_each_event or not self.manual:
                self._add_link()
            if self.manual:
                connection.execute("RELEASE event")
            else:
                self._commit()
                self._after_commit()
        except BaseException as error:  # Ctrl-C too: the next event must not commit half of this one
            self.head, self._digests, self._last = head, {}, {}
            del self._added[begun[0] :], self._removed[begun[1] :]
            self._undo(error)
            if isinstance(error, (*ERRORS, OverflowError)):
                raise self._error(error) from error
            raise

    def _undo(self, error: BaseException) -> None:
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
            # An interrupt may come after SQLite's COMMIT but before we know about it. The chain in the file tells.
            if self.head is None or read_head(connection) == self.head:
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
                self._add_link()
                self._commit()
                self._after_commit()
                self.begin()
            except BaseException as error:
                if not connection.in_transaction:
                    self._unusable = (f"has lost what was not committed: {error}", _REOPEN)
                raise

    def _commit(self) -> None:
        self.connection.execute("COMMIT")
        self._durable = self.head

    @property
    def _newest(self) -> Head:
        assert self._durable is not None, "only a journal that is being written has a chain"
        return self._durable

    @property
    def _mark(self) -> Mark:
        return Mark(self._newest.id, self._newest.number)

    def _after_commit(self) -> None:
        """Note in the lock file what is durable, and update the main file from time to time."""
        if self._lock is None:
            return
        # Never before the commit: a mark that is ahead of the file looks like a loss.
        self._lock.mark(self._mark)
        # Copying after every commit would wait for the disk twice; never copying would make -wal grow without end.
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
                    self._lock.mark(self._mark, sync=True)  # the only proof while the companion is empty
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                if self._lock is not None:
                    self.say(in_use=True)  # so that the companion is not empty while a session is at work
            finally:
                self.begin()

    def say(self, *, in_use: bool, generation: int | None = None) -> None:
        """Commit a link that only says whether the journal is in use, and how often it was opened."""
        with self.errors():
            self.connection.execute("BEGIN IMMEDIATE")
            self._add_link(in_use=in_use, generation=generation or self._newest.generation)
            self._commit()
        self._after_commit()
        self.checkpoint()

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file; in manual mode, uncommitted events are lost."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            if self._lock is not None and self._being_created is None:
                with contextlib.suppress(sqlite3.Error, JournalError):  # the chain then still says "in use"
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    self._added, self._removed = [], []
                    self._connection, self._unusable, self.head = connection, None, self._durable
                    # Only if the file is as we left it. Otherwise the next opening must see that something is wrong.
                    if read_head(connection) == self.head:
                        self.say(in_use=False)
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
        # A forked child has the same file descriptors and locks as its parent.
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

"""Creates, checks, opens and copies the file of a journal."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from fedcohort.core.errors import JournalError
from fedcohort.core.files import sync_folder
from fedcohort.core.version import __version__
from fedcohort.journal.chain import START, TAGS, Head, links, read_head, table_of
from fedcohort.journal.database import Commit, Database, connect, orphan_after_fork
from fedcohort.journal.format4 import check_rows, convert, is_format_4, leave_closed
from fedcohort.journal.lock import COMPANIONS, NEW, Lock, Mark, companion, has_companion, target
from fedcohort.journal.schema import APPLICATION_ID, ERRORS, SCHEMA, SCHEMA_VERSION, TABLES
from fedcohort.journal.signing import Signer

_COMPUTED = re.compile(r"\bAS\b", re.IGNORECASE)  # in views and computed columns: code in a data file
COPY = "restore it from a copy; `fedcohort journal copy` makes a complete one, even of a journal in use"


def is_blank(path: str | Path) -> bool:
    """Whether a new journal can be created at a path: there is no file, or an empty one."""
    path = target(path)
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return True
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    except ERRORS:
        return False  # not a database, so not ours to overwrite
    return bool(tables == 0)


# -- creating ---------------------------------------------------------------------------------------------------------


def in_memory(commit: Commit, chained: bool) -> Database:
    """Return an empty journal without a file, in its first transaction."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _declare(connection)
    return Database(connection, "in memory", head=START if chained else None, commit=commit)


def create(path: Path, commit: Commit) -> Database:
    """Return an empty journal in its first transaction, which :meth:`Database.establish` ends.

    Until then, the file has another name. So a kill leaves either no journal or a complete one.
    """
    file = target(path)
    if not is_blank(file):
        raise JournalError(
            f"The journal {path} already exists; a new session would overwrite it.",
            hint="continue it with Session.open(path), or choose another file",
        )
    if not file.parent.is_dir():
        raise JournalError(f"The folder {file.parent} of the journal does not exist.")
    lock = Lock(file)
    try:
        if not file.exists() and has_companion(file):
            raise JournalError(
                f"There is no journal {path}, but its companion {companion(file).name} exists. It holds the newest "
                "commits of a journal.",
                hint="put the journal back next to it, or delete the companion if you know that it is not needed",
            )
        return _new_file(file, path, lock, commit)
    except BaseException as error:
        lock.release()
        if isinstance(error, sqlite3.Error | OSError) and not isinstance(error, JournalError):
            raise JournalError(f"The journal {path} cannot be created: {error}.") from error
        raise


def _new_file(file: Path, path: Path, lock: Lock, commit: Commit) -> Database:
    new = file.with_name(file.name + NEW)
    for end in ("", *COMPANIONS):  # left by a process that was killed
        new.with_name(new.name + end).unlink(missing_ok=True)
    connection = sqlite3.connect(new, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = OFF")  # nothing to roll back to, and synced as a whole
    connection.execute("PRAGMA synchronous = OFF")
    _declare(connection)
    return orphan_after_fork(Database(connection, str(path), head=START, lock=lock, commit=commit, being_created=new))


def _declare(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for statement in SCHEMA.values():
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


# -- opening ----------------------------------------------------------------------------------------------------------


def open_for_writing(
    path: Path,
    commit: Commit,
    may_continue: Callable[[Database], None],
    *,
    accept_loss: bool = False,
    sign: Signer | None = None,
) -> Database:
    """Return an existing journal, checked and marked as in use.

    Parameters
    ----------
    commit : "always" or "manual"
    may_continue : callable
        Called with the journal, open for reading, before anything is changed; raises if it must not be continued.
    accept_loss : bool
        Continue although the newest events are missing.
    sign : Signer, optional
        Signs every link.
    """
    file = _existing(path)
    # SQLite would open it for reading, and the first event would fail after clients have trained.
    if not os.access(file, os.W_OK):
        raise JournalError(
            f"The journal {path} is read-only, so no session can continue it.",
            hint="make it writable, or read it with read_journal(path)",
        )
    lock = Lock(file)
    connection = None
    try:
        # Before SQLite opens the file, because that may create or remove the companion.
        mark, with_companion = Mark.of(file), has_companion(file)
        with _errors(path):
            connection = connect(file)
            head = _check(connection, path, mark, with_companion, accept_loss=accept_loss)
            with contextlib.closing(Database(_connect(file, "mode=ro"), str(path))) as reading:
                may_continue(reading)
            if is_format_4(connection):
                converted = _new_file(file, path, lock, commit)
                converted.signer = sign
                convert(connection, converted)
                leave_closed(connection)
                converted.establish(file)
                return converted
            connection.execute("PRAGMA journal_mode = WAL")
    except BaseException:
        if connection is not None:
            connection.close()
        lock.release()
        raise
    database = orphan_after_fork(Database(connection, str(path), head=head, lock=lock, commit=commit))
    database.signer = sign
    try:
        # From here on, the next opening can detect a crash: the chain says "in use", and nobody holds the lock.
        database.say(in_use=True, generation=head.generation + 1)
    except BaseException:
        database.close()
        raise
    return database


def open_for_reading(path: Path) -> Database:
    """Return an existing journal, checked. A session may be writing it, and its folder may be read-only."""
    # The mark is read before the file: a session may commit in between, and a mark that is too new looks like a loss.
    database, mark, with_companion = open_unchecked(path)
    try:
        with _errors(path):
            database.connection.execute("BEGIN")  # so that the whole check sees the same rows
            _check(database.connection, path, mark, with_companion)
            if is_format_4(database.connection):
                converted = in_memory("always", chained=True)
                convert(database.connection, converted)
                converted.establish(None)
                database.close()
                return converted
            database.connection.execute("COMMIT")
    except BaseException:
        database.close()
        raise
    return database


def open_declared(path: Path) -> Database:
    """Return an existing journal for reading, after checking its declarations but not its rows.

    A journal that is not in use is opened as a file that never changes, so that SQLite creates no companion.
    """
    database = _at_rest(path) or open_unchecked(path)[0]
    if is_format_4(database.connection):
        database.close()
        return open_for_reading(path)
    try:
        with _errors(path):
            check_version(database.connection, path)
            for problem in _schema_problems(database.connection):
                raise JournalError(f"The journal {path} is damaged: {problem}.", hint=COPY)
    except BaseException:
        database.close()
        raise
    return database


def _at_rest(path: Path) -> Database | None:
    """Return a journal if it is not in use, otherwise None."""
    file = _existing(path)
    if has_companion(file):
        return None
    try:
        connection = _connect(file, "immutable=1")
    except (*ERRORS, OSError):
        return None
    try:
        if not read_head(connection).in_use:
            return orphan_after_fork(Database(connection, str(path)))
    except (*ERRORS, JournalError, ValueError, TypeError, KeyError):  # opening it the usual way reports the damage
        pass
    connection.close()
    return None


def open_unchecked(path: Path) -> tuple[Database, Mark | None, bool]:
    """Return an existing journal for reading, the mark in its lock file, and whether it had a companion."""
    file = _existing(path)
    mark, with_companion = Mark.of(file), has_companion(file)
    with _errors(path):
        connection, folder = _readable(file)
    return orphan_after_fork(Database(connection, str(path), folder=folder)), mark, with_companion


def _existing(path: Path) -> Path:
    file = target(path)
    if not file.exists():
        raise JournalError(f"There is no journal {path}.", hint="start one with Session(..., journal=path)")
    if not file.is_file():
        raise JournalError(f"{path} is not a file, so it cannot be a journal.")
    return file


def _readable(file: Path) -> tuple[sqlite3.Connection, Path | None]:
    """Return a connection for reading, and the folder of the copy if a copy was needed.

    SQLite reads a journal together with its companion only in a folder where it can create files. In other folders, a
    journal without a companion is opened as a file that never changes, and one with a companion is copied with it.
    """
    try:
        return _connect(file, "mode=ro"), None
    except sqlite3.OperationalError as error:
        with open(file, "rb"):  # if we may not read it, the system's error is clearer than SQLite's
            pass
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
    if not has_companion(file):
        return _connect(file, "immutable=1"), None
    folder = Path(tempfile.mkdtemp(prefix="fedcohort-"))
    try:
        for original in (file, companion(file)):
            shutil.copyfile(original, folder / original.name)
        return _connect(folder / file.name, "mode=ro"), folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _connect(file: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{file.as_uri()}?{mode}", uri=True, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()  # SQLite opens a file at the first read
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise JournalError(f"The journal {path} cannot be opened: {error}.") from error
    except ERRORS as error:
        raise JournalError(f"The journal {path} is damaged: {error}.", hint=COPY) from error
    except OSError as error:
        if isinstance(error, JournalError):
            raise
        raise JournalError(f"The journal {path} cannot be read: {error.strerror or error}.") from error


# -- checking ---------------------------------------------------------------------------------------------------------


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Raise a :class:`JournalError` if a file is not a journal, or a journal of another version."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise JournalError(
            f"The file {path} is not a fedcohort journal.",
            hint="delete it if you know that it is not needed, and start again",
        )
    if version != SCHEMA_VERSION:
        raise JournalError(
            f"The journal {path} has format {version}; this fedcohort ({__version__}) needs format {SCHEMA_VERSION}.",
            hint="use the version of fedcohort that wrote it, or start a new journal",
        )


def file_problems(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield what SQLite finds wrong with the file, and what is wrong with its declarations."""
    try:
        yield from (line for (line,) in connection.execute("PRAGMA integrity_check(10)") if line != "ok")
        yield from _schema_problems(connection)
    except ERRORS as error:
        yield str(error)


def row_problems(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield which rows are not as they were written."""
    try:
        expected: set[bytes] = set()  # the tagged digests of all rows that there must be
        for link in links(connection):
            expected.update(link.added)
            expected.difference_update(link.removed)
        for name, table in TABLES.items():
            for salt, *row in connection.execute(f"SELECT salt, {table.names} FROM {name}"):
                try:
                    expected.remove(TAGS[name] + table.digest(salt, row))
                except (KeyError, TypeError):
                    key = dict(zip(table.columns, row, strict=True))
                    where = ", ".join(f"{column} {key[column]!r}" for column in table.key)
                    yield f"the row of {name} with {where} is not as it was written"
        for name, lost in Counter(map(table_of, expected)).items():
            yield f"{name} lacks rows as they were written: {lost}"
    except (sqlite3.Error, JournalError, ValueError, TypeError, KeyError) as error:
        yield error.message if isinstance(error, JournalError) else str(error)


def _schema_problems(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield the declarations that differ from those of a journal."""
    declared = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    for kind, name, sql in declared:  # code that would run when the file is read
        if kind not in ("table", "index") or _COMPUTED.search(str(sql)):
            yield f"it has a {kind} {name!r} with something to compute, which no journal has"
    if is_format_4(connection):
        return
    statements = {name: sql for _, name, sql in declared}
    for name, sql in SCHEMA.items():
        if statements.get(name) != sql:
            yield f"the table or index {name!r} is not declared as version {SCHEMA_VERSION} declares it"


def missing(path: Path, head: Head, mark: Mark | None, companion: bool) -> str | None:
    """Return why a journal's newest links seem to be missing, or None.

    Parameters
    ----------
    head : Head
        The newest link in the file.
    mark : Mark, optional
        The mark in the lock file.
    companion : bool
        Whether SQLite's companion file existed before the journal was opened.
    """
    # The lock file may belong to another journal, if this one was copied here. Then its mark means nothing.
    known = mark if mark is not None and mark.id == head.id else None
    if known is not None and known.links > head.number:
        lost = known.links - head.number
        why = "is damaged, or both are an older copy" if companion else "is missing, or this is an older copy"
        newest = f"The journal {path} lacks its newest {lost} of {known.links} events"
        return f"{newest}: its companion {path.name}-wal {why}."
    if known is None and head.in_use and not companion:
        return (
            f"The journal {path} was in use when it was copied, and its companion {path.name}-wal, which holds the "
            "newest events, is missing."
        )
    return None


def _check(
    connection: sqlite3.Connection, path: Path, mark: Mark | None, companion: bool, *, accept_loss: bool = False
) -> Head:
    """Check a whole journal and return its newest link; :class:`JournalError` says what is wrong."""
    old = is_format_4(connection)
    if not old:
        check_version(connection, path)
    for problem in chain(file_problems(connection), () if old else row_problems(connection)):
        raise JournalError(f"The journal {path} is damaged: {problem}.", hint=COPY)
    try:
        head = check_rows(connection) if old else read_head(connection)
    except JournalError as error:
        raise JournalError(f"The journal {path} is damaged: {error.message}", hint=COPY) from error
    lost = missing(path, head, mark, companion)
    if lost is not None and not accept_loss:
        raise JournalError(
            lost,
            hint="put the original -wal file (and the .lock) next to it, or use a copy made with `fedcohort journal "
            "copy`; if they are lost, `fedcohort journal recover` continues from what is there",
        )
    return head


# -- copies -----------------------------------------------------------------------------------------------------------


def copy(path: Path, to: Path) -> None:
    """Copy a journal to one complete file. A session may be writing the original."""
    if to.exists():
        raise JournalError(f"The file {to} already exists; a copy would overwrite it.", hint="choose another file")
    # Under another name until it is complete: half a backup must not look like one.
    new = to.with_name(to.name + NEW)
    try:
        new.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
            _copy(path, connection)
        with open(new, "rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(new, to)
        sync_folder(to.parent)
    except (OSError, *ERRORS) as error:
        new.unlink(missing_ok=True)
        if isinstance(error, JournalError):
            raise
        raise JournalError(f"The copy {to} cannot be written: {error}.") from error


def snapshot(path: Path) -> bytes:
    """Return the bytes of a complete copy of a journal. A session may be writing the original."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as memory:
        _copy(path, memory)
        return memory.serialize()


def _copy(path: Path, to: sqlite3.Connection) -> None:
    source = open_for_reading(path)
    try:
        # SQLite's backup reads one state of the file, however long it takes and whatever is written meanwhile.
        source.connection.backup(to)  # includes the companion's commits, which a copy of the file would lack
    finally:
        source.close()
    Database(to, str(path), head=read_head(to)).say(in_use=False)

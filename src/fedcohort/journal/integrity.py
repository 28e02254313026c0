"""Checks that a journal is what was written, whenever it is opened."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from fedcohort.core.errors import JournalError
from fedcohort.core.version import __version__
from fedcohort.journal.chain import TAGS, Head, digests_at_end, read_head, table_of
from fedcohort.journal.format4 import check_rows, is_format_4
from fedcohort.journal.lock import Mark
from fedcohort.journal.schema import APPLICATION_ID, ERRORS, SCHEMA, SCHEMA_VERSION, TABLES

_COMPUTED = re.compile(r"\bAS\b", re.IGNORECASE)  # in views and computed columns: code in a data file
COPY = "restore it from a copy; `fedcohort journal copy` makes a complete one, even of a journal in use"


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
        yield from schema_problems(connection)
    except ERRORS as error:
        yield str(error)


def row_problems(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield which rows are not as they were written."""
    try:
        expected = digests_at_end(connection)
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


def schema_problems(connection: sqlite3.Connection) -> Iterator[str]:
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
    known = mark if mark is not None and mark.id == head.first[: Mark.DIGITS] else None
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


LOST_HINT = (
    "put the original -wal file (and the .lock) next to it, or use a copy made with `fedcohort journal copy`; if they "
    "are lost, `fedcohort journal recover` continues from what is there"
)


def check(
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
        raise JournalError(lost, hint=LOST_HINT)
    return head

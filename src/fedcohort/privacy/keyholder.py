"""The key holder: returns inner products of the label counts that enrolled clients have stated."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedcohort.core.arrays import IntArray
from fedcohort.core.errors import FedcohortError, InputError, KeyHolderError, UnknownNameError
from fedcohort.core.validate import instance, mapping, texts
from fedcohort.privacy.scheme import SecretKey, Statement, open_statement, set_digest, sign_confirmation

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS statements (client TEXT PRIMARY KEY, statement BLOB NOT NULL);
"""


class KeyHolder:
    """Holds the secret key of one federation.

    It accepts signed statements of enrolled clients and decrypts nothing else. A client's first valid statement is
    final as long as the key is used. So the server can only ever learn one matrix S, of what the clients themselves
    signed, even if it asks for it in parts.

    Parameters
    ----------
    clients : mapping of str to bytes
        The enrolled clients and their public keys; see :func:`~fedcohort.privacy.scheme.parse_clients`.
    record : path, optional
        The file for the statements, which stay sealed there. Default: in memory.
    """

    def __init__(self, secret: SecretKey, clients: Mapping[str, bytes], record: str | Path | None = None) -> None:
        self._secret = instance(secret, SecretKey, "'secret'")
        self.public = secret.public
        self._clients: dict[str, bytes] = dict(mapping(clients, "'clients'"))
        self._lock = threading.Lock()  # the service answers requests in several threads
        self._record = record or ":memory:"
        self._db = sqlite3.connect(self._record, check_same_thread=False)
        with self._writing():
            self._db.executescript(_SCHEMA)
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('key', ?)", (self.public.name,))
            (key,) = self._db.execute("SELECT value FROM meta WHERE key = 'key'").fetchone()
            rows = self._db.execute("SELECT client, statement FROM statements").fetchall()
        if key != self.public.name:
            raise KeyHolderError(
                f"The record {record} belongs to the key {key}; the key holder's is {self.public.name}.",
                hint="new keys need a new record: make a new folder with fedcohort privacy keyholder new",
            )
        self._statements = {
            name: open_statement(secret, name, None, data) for name, data in rows if name in self._clients
        }
        self._set: str | None = None  # the digest of all statements, computed when it is needed

    def close(self) -> None:
        """Close the record."""
        self._db.close()

    @property
    def enrolled(self) -> tuple[str, ...]:
        """The names of the enrolled clients."""
        return tuple(self._clients)

    def admit(self, statements: Mapping[str, bytes]) -> dict[str, str]:
        """Accept statements; return the clients that were refused, each with the reason. The others are not affected.

        A client's first statement is final. A later one is ignored, and refused if its size is different.
        """
        refused: dict[str, str] = {}
        with self._lock:
            news: dict[str, Statement] = {}
            for name, data in mapping(statements, "'statements'").items():
                try:
                    if name not in self._clients:
                        raise InputError(f"Client {name!r} is not enrolled with the key holder.")
                    statement = open_statement(self._secret, name, self._clients[name], data)
                except FedcohortError as error:
                    refused[name] = error.message
                    continue
                before = self._statements.get(name)
                if before is None:
                    news[name] = statement
                elif before.size != statement.size:
                    refused[name] = (
                        f"Client {name!r} stated {before.size} samples under the key {self.public.name} and now states "
                        f"{statement.size}; counts that changed need new keys."
                    )
            with self._writing():
                self._db.executemany("INSERT INTO statements VALUES (?,?)", [(n, statements[n]) for n in news])
            # Only after they are on disk: the set that clients are told about must survive a restart.
            self._statements.update(news)
            self._set = None if news else self._set
        return refused

    def products(self, rows: Sequence[str], columns: Sequence[str]) -> IntArray:
        """Return the inner products of some clients' counts with other clients' counts, (rows, columns)."""
        rows, columns = texts(rows, "'rows'"), texts(columns, "'columns'")
        with self._lock:
            left, right = ([self._statement(name).counts for name in names] for names in (rows, columns))
        # No clients are a matrix without rows, which still has its columns.
        shape = (-1, self.public.classes)
        return np.reshape(left, shape).astype(np.int64) @ np.reshape(right, shape).astype(np.int64).T

    def confirm(self, clients: Sequence[str]) -> dict[str, bytes]:
        """Return a signed confirmation for each client: what it stated, and the set of all clients that did."""
        clients = texts(clients, "'clients'")
        with self._lock:
            if self._set is None:
                self._set = set_digest(self._statements.values())
            number, digest = len(self._statements), self._set
            statements = [self._statement(name) for name in clients]
        return {s.client: sign_confirmation(self._secret, s, number, digest) for s in statements}

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Write everything inside, or nothing."""
        try:
            with self._db:
                yield
        except sqlite3.Error as error:
            raise KeyHolderError(
                f"The record {self._record} cannot be used: {error}. Nothing was changed.",
                hint="is the disk full, is the file damaged, or does another process serve the same folder?",
            ) from error

    def _statement(self, name: str) -> Statement:
        if name not in self._statements:
            raise UnknownNameError(
                f"Client {name!r} has stated nothing under the key {self.public.name}.",
                hint="its statement must be admitted first; after new keys, start with a new journal",
            )
        return self._statements[name]

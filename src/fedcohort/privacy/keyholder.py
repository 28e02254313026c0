"""The key holder: opens inner products of label counts, each pair of clients once, and nothing else."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.arrays import FloatArray, IntArray
from fedcohort.errors import CiphertextError, InputError, KeyHolderError, UnknownNameError
from fedcohort.guard import guarded
from fedcohort.privacy.products import Row, read_products
from fedcohort.privacy.scheme import DEGREE, SecretKey, largest_count, loaded, scheme, sealapi

ROW_LIMIT = 2 * DEGREE * 8 + 4096
"""Bytes of the largest row anybody has a reason to send."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sizes (client INTEGER PRIMARY KEY, size INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS opened (row INTEGER, col INTEGER, value INTEGER NOT NULL, PRIMARY KEY (row, col));
"""


class ClientRefusedError(CiphertextError):
    """What a client encrypted cannot be label counts of the size it stated.

    Attributes
    ----------
    client : str
        Whom to leave out; the others' products are not touched.
    """

    def __init__(self, client: str, message: str) -> None:
        super().__init__(message, hint=f"leave out client {client!r}; the products of the others stand")
        self.client = client


@guarded(methods=True)
class KeyHolder:
    """Holds the secret key of one federation.

    It decrypts what can be an inner product of two agreed clients: whole numbers in the range their sizes allow, equal
    for (i, j) and (j, i), and with all others a matrix of inner products of at most B counts. Every ordered pair is
    opened once; asking again returns what is on record. A refusal changes nothing.

    Parameters
    ----------
    secret : SecretKey
    agreed : iterable of str
        The clients whose products may be opened.
    record : path, optional
        Where to remember what was opened, so that a restart opens nothing twice. Default: in memory.
    """

    def __init__(self, secret: SecretKey, agreed: Iterable[str], record: str | Path | None = None) -> None:
        self._secret = secret
        self.classes = secret.public.classes
        self.key_name = secret.public.name
        self.agreed = tuple(agreed)
        self._index = {name: i for i, name in enumerate(self.agreed)}
        if len(self._index) < len(self.agreed):
            raise InputError("The agreed clients must have different names.")
        self._lock = threading.Lock()
        self._db = sqlite3.connect(record or ":memory:", check_same_thread=False)
        self._db.executescript(_SCHEMA)
        self._db.execute("INSERT OR IGNORE INTO meta VALUES ('key', ?)", (json.dumps(self.key_name),))
        self._db.execute("INSERT OR IGNORE INTO meta VALUES ('agreed', ?)", (json.dumps(self.agreed),))
        self._db.commit()
        kept = {key: json.loads(value) for key, value in self._db.execute("SELECT key, value FROM meta")}
        before = kept["agreed"]
        if kept["key"] != self.key_name or list(self.agreed[: len(before)]) != before:
            raise KeyHolderError(
                f"The record {record} is of another key, or the agreed clients are no longer the first {len(before)}.",
                hint="agreed clients are only ever added at the end; new keys need a new record",
            )
        self._db.execute("UPDATE meta SET value = ? WHERE key = 'agreed'", (json.dumps(self.agreed),))
        self._db.commit()
        n = len(self.agreed)
        self._values = np.full((n, n), -1, np.int64)  # -1: not opened
        self._sizes = np.full(n, -1, np.int64)
        for row, col, value in self._db.execute("SELECT row, col, value FROM opened"):
            self._values[row, col] = value
        for client, size in self._db.execute("SELECT client, size FROM sizes"):
            self._sizes[client] = size

    def close(self) -> None:
        """Close the record."""
        self._db.close()

    def _place(self, name: str) -> int:
        if name not in self._index:
            raise UnknownNameError(
                f"The key holder has not agreed to client {name!r}; it opens products of {len(self.agreed)} clients.",
                hint="add the client to the key holder's list of clients",
            )
        return self._index[name]

    def known(self, rows: Sequence[str], columns: Sequence[str]) -> FloatArray:
        """Return the products on record, (rows, columns), NaN where nothing was opened."""
        with self._lock:
            at = np.ix_([self._place(n) for n in rows], [self._place(n) for n in columns])
            values = np.maximum(self._values[at], self._values.T[at]).astype(np.float64)
        values[values < 0] = np.nan
        return values

    def open(self, rows: Iterable[Row], sizes: Mapping[str, int]) -> list[list[int]]:
        """Return the inner products in ``rows``.

        Parameters
        ----------
        rows : iterable of Row
        sizes : mapping of name to int
            How many samples each client in them states to have. Stated once, it stands and need not be said again.

        Raises
        ------
        ClientRefusedError
            When a client's products cannot come from label counts of its size. Nothing is opened.
        """
        with self._lock:
            values, stated = self._values.copy(), self._sizes.copy()
            opened, news = [], []
            for row in rows:
                client, block = self._place(row.client), [self._place(name) for name in row.block]
                if len(set(block)) < len(block):
                    raise CiphertextError(f"The row of client {row.client!r} names a client twice.")
                if (values[client, block] >= 0).any():
                    other = self.agreed[block[int(np.argmax(values[client, block] >= 0))]]
                    raise CiphertextError(
                        f"The product of clients {row.client!r} and {other!r} was opened before; each is opened once.",
                        hint="ask for what is on record instead",
                    )
                for place in {client, *block}:
                    self._state_size(stated, place, sizes)
                numbers = self._decrypted(row)
                values[client, block] = numbers
                opened.append(numbers)
                news += [(client, col, value) for col, value in zip(block, numbers, strict=True)]
            self._check(values, stated)
            with self._db:
                self._db.executemany("INSERT INTO opened VALUES (?,?,?)", news)
                self._db.executemany(
                    "INSERT OR IGNORE INTO sizes VALUES (?,?)",
                    [(i, int(stated[i])) for i in np.flatnonzero(stated >= 0).tolist()],
                )
            self._values, self._sizes = values, stated
        return opened

    def readable(self, rows: Iterable[Row]) -> list[bool]:
        """Return for each row whether this key opens it, without opening it; finds who used another key."""
        with self._lock:
            found = []
            for row in rows:
                try:
                    self._loaded(row)
                except CiphertextError:
                    found.append(False)
                else:
                    found.append(True)
        return found

    def _state_size(self, stated: IntArray, place: int, sizes: Mapping[str, int]) -> None:
        name = self.agreed[place]
        size = sizes.get(name, int(stated[place]) if stated[place] >= 0 else None)
        most = self.classes * largest_count(self.classes)
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= most:
            raise CiphertextError(f"The size of client {name!r} must be a whole number from 0 to {most}. Got {size!r}.")
        if stated[place] not in (-1, size):
            raise CiphertextError(f"Client {name!r} stated {stated[place]} samples before. Got {size}.")
        stated[place] = size

    def _loaded(self, row: Row) -> Any:
        for name in (row.client, *row.block):
            self._place(name)
        what = f"The row of client {row.client!r}"
        if len(row.body) > ROW_LIMIT:
            raise CiphertextError(f"{what} is oversize: {len(row.body)} bytes, at most {ROW_LIMIT} are possible.")
        ciphertext = loaded("Ciphertext", row.body, what)
        last = list(ciphertext.parms_id()) == list(scheme().context.last_parms_id())
        if ciphertext.size() != 2 or not last or ciphertext.is_transparent():
            raise CiphertextError(f"{what} is not a product that was made ready for the key holder.")
        if self._secret.decryptor.invariant_noise_budget(ciphertext) <= 0:
            raise CiphertextError(
                f"{what} cannot be opened with the key {self.key_name}: it, or a client of its block, used another one."
            )
        return ciphertext

    def _decrypted(self, row: Row) -> list[int]:
        plain = sealapi().Plaintext()
        self._secret.decryptor.decrypt(self._loaded(row), plain)
        return read_products(plain, len(row.block), self.classes)

    def _check(self, values: IntArray, sizes: IntArray) -> None:
        """Refuse numbers that cannot be inner products of label counts of these sizes; name whose they are."""
        known = np.maximum(values, values.T)
        there = known >= 0
        impossible = there & (known > np.outer(sizes, sizes))
        impossible |= (values >= 0) & (values.T >= 0) & (values != values.T)
        own = known.diagonal()
        # Counts that sum to q have q^2/B <= sum of squares <= q^2, and a square is as odd as its root.
        wrong = (own >= 0) & ((own * self.classes < sizes**2) | (own > sizes**2) | ((own - sizes) % 2 != 0))
        if impossible.any() or wrong.any():
            # Who lies disagrees with many, and with itself; who is honest only with those who lie.
            blame = int(np.argmax(impossible.sum(axis=1) + len(values) * wrong))
            raise ClientRefusedError(
                self.agreed[blame],
                f"What client {self.agreed[blame]!r} sent is not {sizes[blame]} samples counted in {self.classes} "
                f"classes: its products with {int(impossible[blame].sum() + wrong[blame])} clients are impossible.",
            )
        whole = np.flatnonzero(own >= 0)
        square = known[np.ix_(whole, whole)]
        if (square < 0).any() or len(whole) < 2:
            return
        scale = np.sqrt(np.maximum(square.diagonal(), 1.0))
        spectrum = np.linalg.eigvalsh(square / np.outer(scale, scale))
        slack = 1e-9 * len(whole)
        beyond = spectrum[: -self.classes] if len(whole) > self.classes else spectrum[:0]
        if spectrum[0] < -slack or (len(beyond) and beyond[-1] > slack):
            raise CiphertextError(
                f"The {len(whole)} x {len(whole)} numbers are not inner products of counts of {self.classes} classes."
            )

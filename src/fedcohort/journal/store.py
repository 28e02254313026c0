"""The SQLite file behind a session.

One transaction per event (or per :meth:`Journal.commit` in manual mode), WAL so that readers never block the writer,
a schema version inside, and a lock so that two sessions never write the same file.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

import fedcohort
from fedcohort.arrays import AnyArray, FloatArray, IntArray
from fedcohort.clients import ClientTable
from fedcohort.errors import JournalError
from fedcohort.journal.chain import (
    Chain,
    Link,
    cohort_payload,
    links,
    replies_payload,
    start_payload,
)
from fedcohort.journal.codec import (
    changed_rows,
    decode_scalar,
    encode_scalar,
    pack,
    pack_many,
    state_fields,
    unpack,
    unpack_many,
)
from fedcohort.journal.replies import ReplyBlock, ReplyRow, newest
from fedcohort.journal.tables import table_facts, table_of

SCHEMA_VERSION = 2  # 1 kept a row for each client's reply
_APPLICATION_ID = 0x46434A31  # "FCJ1"
EXCLUDED = "excluded"  # the event that says whom rules kept from a cohort
_SMALL_FIELD = 1 << 16  # bytes below which a changed array is simply written whole
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE facts (name TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE cohorts (
    ticket INTEGER PRIMARY KEY, round INTEGER NOT NULL, asked_at REAL NOT NULL, told_at REAL,
    wanted INTEGER, n_candidates INTEGER NOT NULL, candidates BLOB, clients BLOB NOT NULL,
    weights BLOB, work BLOB, notes TEXT NOT NULL, stop TEXT);
CREATE INDEX cohorts_round ON cohorts (round);
CREATE TABLE replies (
    id INTEGER PRIMARY KEY, ticket INTEGER NOT NULL, at REAL NOT NULL, late INTEGER NOT NULL, data BLOB NOT NULL);
CREATE INDEX replies_ticket ON replies (ticket);
CREATE TABLE scores (
    ticket INTEGER NOT NULL, selector TEXT NOT NULL, picked BLOB NOT NULL, arrays BLOB, note TEXT,
    PRIMARY KEY (ticket, selector));
CREATE TABLE states (selector TEXT NOT NULL, field TEXT NOT NULL, scalar TEXT, data BLOB,
    PRIMARY KEY (selector, field));
CREATE TABLE deltas (id INTEGER PRIMARY KEY, selector TEXT NOT NULL, field TEXT NOT NULL, data BLOB NOT NULL);
CREATE TABLE metrics (round INTEGER NOT NULL, key TEXT NOT NULL, value REAL, PRIMARY KEY (round, key)) WITHOUT ROWID;
CREATE TABLE events (id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL);
"""
Commit = Literal["always", "manual"]


@dataclass(frozen=True)
class CohortRow:
    """One recorded cohort."""

    ticket: int
    round: int
    asked_at: float
    told_at: float | None
    wanted: int | None
    n_candidates: int
    clients: IntArray
    weights: FloatArray | None
    work: FloatArray | None
    notes: Mapping[str, Any]
    stop: str | None


def _optional(data: bytes | None) -> AnyArray | None:
    return None if data is None else unpack(data)


class Journal:
    """A session's journal file, or an in-memory one when ``path`` is None.

    Use :meth:`create`, :meth:`open` or :func:`read_journal`.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path | None, lock: IO[bytes] | None, commit: Commit):
        self._db = connection
        self._lock = lock
        self.path = path
        self._manual = commit == "manual"
        self._delta_bytes: dict[tuple[str, str], int] = {}
        self._saved: dict[str, dict[str, AnyArray | Any]] = {}
        self._durable = (-1, -1)
        self._chain: Chain | None = None

    # -- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | Path | None, meta: Mapping[str, Any], commit: Commit = "always") -> Journal:
        """Start a journal in a new file; an existing file is never overwritten."""
        if path is None:
            memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            journal = cls(memory, None, None, commit)
        else:
            path = Path(path)
            if not is_blank(path):
                raise JournalError(
                    f"The journal {path} exists already; a new session would overwrite it.",
                    hint="continue it with Session.open(path), or choose another file",
                )
            if not path.parent.is_dir():
                raise JournalError(f"The folder {path.parent} of the journal does not exist.")
            lock = _locked(path)
            journal = cls(_connect(path, lock), path, lock, commit)
        with journal._sqlite_errors():
            # One transaction, so that a kill leaves either no journal or a whole one.
            journal._db.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.strip().split(";\n"):
                journal._db.execute(statement)
            journal._db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            journal._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            everything = {**meta, "fedcohort": fedcohort.__version__, "created": time.time()}
            for key, value in everything.items():
                journal.set_meta(key, value)
            if meta.get("audit") is not None:
                journal._chain = Chain.started(journal._db, meta)
        return journal

    def created(self) -> None:
        """End the first transaction, once the session has written its tables into it."""
        self._db.execute("COMMIT")
        if self._manual:
            self._db.execute("BEGIN IMMEDIATE")

    @classmethod
    def open(cls, path: str | Path, commit: Commit = "always") -> Journal:
        """Continue an existing journal; it must be whole, ours and of this schema."""
        path = Path(path)
        lock = _locked(path) if path.exists() else None
        journal = cls(_checked(path, lock), path, lock, commit)
        if journal.meta().get("audit") is not None:
            journal._chain = Chain(journal._db)
        if commit == "manual":
            journal._mark_durable()
            journal._db.execute("BEGIN IMMEDIATE")
        return journal

    def close(self) -> None:
        """Close the file; in manual mode what was not committed is dropped."""
        self._db.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @contextlib.contextmanager
    def _sqlite_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise JournalError(f"The journal {self.path or 'in memory'} could not be used: {error}.") from error

    @contextlib.contextmanager
    def event(self) -> Iterator[None]:
        """All writes inside become durable together, or none does."""
        begin, end, undo = (
            ("SAVEPOINT event", "RELEASE event", "ROLLBACK TO event; RELEASE event")
            if self._manual
            else ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK")
        )
        with self._sqlite_errors():
            self._db.execute(begin)
            try:
                yield
                self._db.execute(end)
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # a full disk may have rolled back by itself
                    for statement in undo.split("; "):
                        self._db.execute(statement)
                self._saved.clear()
                if self._chain is not None:
                    self._chain.forget()
                raise

    def commit(self) -> None:
        """In manual mode, make everything so far durable."""
        if self._manual:
            with self._sqlite_errors():
                self._db.execute("COMMIT")
                self._mark_durable()
                self._db.execute("BEGIN IMMEDIATE")

    # -- for readers of what is not durable yet; see fedcohort.journal.live ---------------------------------------

    @property
    def durable(self) -> tuple[int, int]:
        """The highest ticket, and the highest number of a block of replies, that other processes can read."""
        return self._durable

    def _mark_durable(self) -> None:
        (reply,) = self._db.execute("SELECT COALESCE(MAX(id), -1) FROM replies").fetchone()
        self._durable = (self.last()[1], int(reply))

    def newer(self, ticket: int, reply: int, columns: Mapping[str, str]) -> dict[str, list[tuple[Any, ...]]]:
        """Return the rows of cohorts and scores above ``ticket`` and of replies above ``reply``, as they are stored."""
        above = {"cohorts": ("ticket", ticket), "scores": ("ticket", ticket), "replies": ("id", reply)}
        return {
            table: self._db.execute(f"SELECT {columns[table]} FROM {table} WHERE {key} > ?", (value,)).fetchall()
            for table, (key, value) in above.items()
        }

    def extend(self, live: str, run: str, columns: Mapping[str, str]) -> None:
        """Show the rounds of ``run`` in the database ``live`` after the own ones; for a journal opened for reading."""
        self._db.execute("ATTACH DATABASE ? AS live", (live,))
        quoted = run.replace("'", "''")
        for table, names in columns.items():
            self._db.execute(
                f"CREATE TEMP VIEW {table} AS SELECT {names} FROM main.{table} UNION ALL SELECT {names} "
                f"FROM live.{table} WHERE run = '{quoted}' AND ticket > "
                "(SELECT COALESCE(MAX(ticket), -1) FROM main.cohorts)"
            )

    def compact(self) -> None:
        """Write the file anew without what was deleted, so that it cannot be found in it any more."""
        self.commit()
        with self._sqlite_errors():
            if self._manual:
                self._db.execute("COMMIT")
            self._db.execute("VACUUM")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            if self._manual:
                self._db.execute("BEGIN IMMEDIATE")

    # -- writing ------------------------------------------------------------------------------------------------

    def set_meta(self, key: str, value: Any) -> None:
        """Store a JSON value under ``key``."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def add_event(self, kind: str, body: Mapping[str, Any]) -> None:
        """Append something that happened."""
        text = json.dumps(body)
        self._db.execute("INSERT INTO events (at, kind, body) VALUES (?, ?, ?)", (time.time(), kind, text))
        if self._chain is not None:
            self._chain.add(kind, int(body.get("ticket", -1)), text.encode(), text.encode())

    def set_table(self, table: ClientTable, active: AnyArray) -> None:
        """Store the client table and who is a member."""
        facts = table_facts(table, active)
        self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())
        if self._chain is not None:
            self._chain.add_table(facts)

    def add_answer(self, ticket: int, answer: Mapping[Any, AnyArray]) -> None:
        """Record what a selector was told before it chose; only a chained journal keeps it."""
        if self._chain is not None:
            self._chain.add_answer(ticket, {str(signal): values for signal, values in answer.items()})

    def add_cohort(self, row: CohortRow, candidates: IntArray | None, n: int) -> None:
        """Record a cohort; ``candidates`` is None when everybody in the federation was one."""
        mask = None
        if candidates is not None:
            bits = np.zeros(n, np.bool_)
            bits[candidates] = True
            mask = zlib.compress(np.packbits(bits).tobytes(), 1)
        weights, work = (None if x is None else pack(x) for x in (row.weights, row.work))
        chosen = (row.wanted, row.n_candidates, mask, pack(row.clients), weights, work)
        self._db.execute(
            "INSERT INTO cohorts VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
            (row.ticket, row.round, row.asked_at, row.told_at, *chosen, json.dumps(dict(row.notes)), row.stop),
        )
        if self._chain is not None:
            self._chain.add("cohort", row.ticket, cohort_payload((row.ticket, row.round, *chosen)))

    def add_scores(self, ticket: int, selector: str, picked: IntArray, scores: bytes | None, note: str | None) -> None:
        """Record what a selector ('' is the session's own) picked and the scores it picked by, as packed arrays."""
        self._db.execute("INSERT INTO scores VALUES (?,?,?,?,?)", (ticket, selector, pack(picked), scores, note))

    def add_replies(self, block: ReplyBlock) -> None:
        """Record the replies of one report; they take the place of what was recorded for the same clients before."""
        data = block.encoded()
        added = self._db.execute(
            "INSERT INTO replies (ticket, at, late, data) VALUES (?,?,?,?)", (block.ticket, block.at, block.late, data)
        )
        if self._chain is not None:
            self._chain.add("replies", int(added.lastrowid or 0), replies_payload(block.ticket, block.late, data))

    def close_cohort(self, ticket: int) -> None:
        """Mark a cohort as told."""
        self._db.execute("UPDATE cohorts SET told_at = ? WHERE ticket = ?", (time.time(), ticket))
        if self._chain is not None:
            self._chain.add("close", ticket, str(ticket).encode())

    def add_metrics(self, round_: int, values: Mapping[str, float | None]) -> None:
        """Record numbers about the global model after a round."""
        self._db.executemany(
            "INSERT OR REPLACE INTO metrics VALUES (?,?,?)", [(round_, key, value) for key, value in values.items()]
        )

    def save_state(self, selector: str, state: object) -> None:
        """Record a selector's state, writing only what changed since it was last saved. Not for in-memory journals."""
        if self.path is None:
            return
        before = self._saved.get(selector, {})
        after: dict[str, AnyArray | Any] = {}
        for name, value in state_fields(state):
            after[name] = value
            known = name in before
            if not isinstance(value, np.ndarray):
                if not known or before[name] is not value:
                    self._db.execute(
                        "INSERT OR REPLACE INTO states VALUES (?,?,?,NULL)", (selector, name, encode_scalar(value))
                    )
                continue
            if known and before[name] is value:
                continue
            rows = changed_rows(before[name], value) if known and isinstance(before[name], np.ndarray) else None
            if rows is not None and len(rows) == 0:
                continue
            key = (selector, name)
            if rows is not None and value.nbytes > _SMALL_FIELD and len(rows) * 4 < len(value):
                block = pack_many({"rows": rows, "values": value[rows]})
                spent = self._delta_bytes.get(key, 0) + len(block)
                if spent < value.nbytes:
                    self._db.execute("INSERT INTO deltas (selector, field, data) VALUES (?,?,?)", (*key, block))
                    self._delta_bytes[key] = spent
                    continue
            self._db.execute("DELETE FROM deltas WHERE selector = ? AND field = ?", key)
            self._db.execute("INSERT OR REPLACE INTO states VALUES (?,?,NULL,?)", (*key, pack(value)))
            self._delta_bytes[key] = 0
        self._saved[selector] = after

    def add_exclusions(self, ticket: int, codes: AnyArray, reasons: Sequence[str]) -> None:
        """Record whom rules excluded from a cohort, by code: 0, or one more than the place of the reason."""
        data = base64.b64encode(zlib.compress(np.ascontiguousarray(codes, "<i2").tobytes(), 1)).decode()
        self.add_event(EXCLUDED, {"ticket": ticket, "reasons": list(reasons), "codes": data})

    def set_attributes(
        self, attributes: Mapping[str, Mapping[str, Any]], news: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Store what clients say about themselves, by name; an audited journal also keeps what was said when."""
        if self._chain is not None:
            self.add_event("attributes", {"clients": {name: dict(said) for name, said in news.items()}})
        data = zlib.compress(json.dumps(attributes).encode(), 1)
        self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", ("attributes", data))

    def drop_state(self, selector: str) -> None:
        """Forget a selector's state."""
        self._db.execute("DELETE FROM states WHERE selector = ?", (selector,))
        self._db.execute("DELETE FROM deltas WHERE selector = ?", (selector,))
        self._saved.pop(selector, None)
        for key in [key for key in self._delta_bytes if key[0] == selector]:
            del self._delta_bytes[key]

    @property
    def commitment(self) -> str | None:
        """The newest link of the chain over everything recorded, in hexadecimal; None without a chain."""
        return None if self._chain is None else self._chain.tip.hex()

    # -- reading ------------------------------------------------------------------------------------------------

    def meta(self) -> dict[str, Any]:
        """Return everything stored with :meth:`set_meta`."""
        return {key: json.loads(value) for key, value in self._db.execute("SELECT key, value FROM meta")}

    def table(self) -> tuple[ClientTable, AnyArray]:
        """Return the client table and the (N,) mask of members."""
        return table_of(dict(self._db.execute("SELECT name, data FROM facts")))

    def attributes(self) -> dict[str, dict[str, Any]]:
        """Return what clients said about themselves, by name."""
        row = self._db.execute("SELECT data FROM facts WHERE name = 'attributes'").fetchone()
        return {} if row is None else dict(json.loads(zlib.decompress(row[0])))

    def exclusions(self, ticket: int) -> dict[int, str]:
        """Return whom rules excluded from a cohort, each with the reason."""
        query = "SELECT body FROM events WHERE kind = ? AND json_extract(body, '$.ticket') = ?"
        row = self._db.execute(query, (EXCLUDED, ticket)).fetchone()
        if row is None:
            return {}
        body = json.loads(row[0])
        codes = np.frombuffer(zlib.decompress(base64.b64decode(body["codes"])), "<i2")
        return {int(c): str(body["reasons"][codes[c] - 1]) for c in np.flatnonzero(codes)}

    def state(self, selector: str) -> dict[str, Any]:
        """Return the fields of a selector's state as last saved."""
        found: dict[str, Any] = {}
        for name, scalar, data in self._db.execute(
            "SELECT field, scalar, data FROM states WHERE selector = ?", (selector,)
        ):
            found[name] = decode_scalar(scalar) if data is None else unpack(data)
        for name, data in self._db.execute(
            "SELECT field, data FROM deltas WHERE selector = ? ORDER BY id", (selector,)
        ):
            block = unpack_many(data)
            if not found[name].flags.writeable:
                found[name] = found[name].copy()
            found[name][block["rows"]] = block["values"]
        for value in found.values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
        return found

    def resume_state(self, selector: str, cls: type) -> Any:
        """Return a state object of ``cls`` as last saved, and continue saving from it."""
        fields = self.state(selector)
        expected = {f.name for f in dataclasses.fields(cls)}
        if set(fields) != expected:
            raise JournalError(
                f"The journal {self.path} holds a state with fields {sorted(fields)}, but {cls.__name__} has "
                f"{sorted(expected)}: it was written by another version of the selector."
            )
        for name, size in self._db.execute(
            "SELECT field, SUM(LENGTH(data)) FROM deltas WHERE selector = ? GROUP BY field", (selector,)
        ):
            self._delta_bytes[(selector, name)] = size
        self._saved[selector] = fields
        return cls(**fields)

    def links(self) -> list[tuple[Link, bytes]]:
        """Return the links of the chain, each with the bytes on record that it should be over."""
        found = []
        for link in links(self._db):
            match link.kind:
                case "start":
                    payload = start_payload(self.meta())
                case "cohort":
                    row = self._db.execute(
                        "SELECT ticket, round, wanted, n_candidates, candidates, clients, weights, work FROM cohorts "
                        "WHERE ticket = ?",
                        (link.ref,),
                    ).fetchone()
                    payload = cohort_payload(row or ())
                case "replies":
                    row = self._db.execute(
                        "SELECT ticket, late, data FROM replies WHERE id = ?", (link.ref,)
                    ).fetchone()
                    payload = replies_payload(*row) if row else b""
                case "close":
                    payload = str(link.ref).encode()
                case _:
                    payload = link.data or b""
            found.append((link, payload))
        return found

    def cohorts(self, *, round_: int | None = None, pending: bool = False, after: int = -1) -> list[CohortRow]:
        """Return cohorts in order: all, of one round, those not yet told, or those with a ticket above ``after``."""
        where = "WHERE ticket > ?" + (" AND round = ?" if round_ is not None else "")
        where += " AND told_at IS NULL" if pending else ""
        arguments = (after,) if round_ is None else (after, round_)
        rows = self._db.execute(
            "SELECT ticket, round, asked_at, told_at, wanted, n_candidates, clients, weights, work, notes, stop "
            f"FROM cohorts {where} ORDER BY ticket",
            arguments,
        )
        return [
            CohortRow(t, r, asked, told, wanted, n, unpack(c), _optional(w), _optional(k), json.loads(notes), stop)
            for t, r, asked, told, wanted, n, c, w, k, notes, stop in rows
        ]

    def picks(self, upto: int | None = None) -> Iterator[tuple[int, IntArray]]:
        """Yield the round and the clients of every cohort in order, up to a round."""
        last = self.last()[0] if upto is None else upto
        rows = self._db.execute("SELECT round, clients FROM cohorts WHERE round <= ? ORDER BY ticket", (last,))
        for round_, clients in rows.fetchall():
            yield round_, unpack(clients)

    def candidates(self, ticket: int, n: int) -> IntArray:
        """Return who could have been picked for a cohort."""
        (mask,) = self._db.execute("SELECT candidates FROM cohorts WHERE ticket = ?", (ticket,)).fetchone()
        if mask is None:
            return np.arange(n)
        bits = np.unpackbits(np.frombuffer(zlib.decompress(mask), np.uint8))
        return np.flatnonzero(bits[:n])

    def reply_blocks(self, ticket: int | None = None) -> list[ReplyBlock]:
        """Return the replies as they were reported, of one cohort or all, oldest first."""
        where, arguments = ("", ()) if ticket is None else ("WHERE ticket = ?", (ticket,))
        rows = self._db.execute(f"SELECT ticket, at, late, data FROM replies {where} ORDER BY id", arguments)
        return [ReplyBlock.decoded(t, at, bool(late), data) for t, at, late, data in rows]

    def replies(self, ticket: int | None = None) -> list[ReplyRow]:
        """Return what became of each client, of one cohort or all, ordered by ticket and client."""
        return newest(self.reply_blocks(ticket))

    def scores(self, ticket: int) -> dict[str, tuple[IntArray, dict[str, AnyArray], str | None]]:
        """Return by selector ('' is the session's own): picked clients, stored score arrays, note."""
        rows = self._db.execute("SELECT selector, picked, arrays, note FROM scores WHERE ticket = ?", (ticket,))
        found = {s: (unpack(p), {} if a is None else unpack_many(a), note) for s, p, a, note in rows}
        if "" not in found:  # a selector that gave no scores; whom it picked is in the cohort's own row
            for (clients,) in self._db.execute("SELECT clients FROM cohorts WHERE ticket = ?", (ticket,)):
                found[""] = (unpack(clients), {}, None)
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the bodies of all events of a kind, oldest first."""
        rows = self._db.execute("SELECT body FROM events WHERE kind = ? ORDER BY id", (kind,))
        return [json.loads(body) for (body,) in rows]

    def metrics(self) -> dict[int, dict[str, float]]:
        """Return the recorded numbers about the global model by round."""
        found: dict[int, dict[str, float]] = {}
        for round_, key, value in self._db.execute("SELECT round, key, value FROM metrics ORDER BY round"):
            found.setdefault(round_, {})[key] = value
        return found

    def last(self) -> tuple[int, int]:
        """Return the highest round and ticket recorded, -1 when there is none."""
        row = self._db.execute("SELECT COALESCE(MAX(round), -1), COALESCE(MAX(ticket), -1) FROM cohorts").fetchone()
        return int(row[0]), int(row[1])


def is_blank(path: str | Path) -> bool:
    """Whether a path holds no journal yet: no file, or one whose creation was cut off before anything was written."""
    path = Path(path)
    if not path.exists() or path.stat().st_size == 0:
        return True
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        finally:
            connection.close()
    except sqlite3.Error:
        return False  # not a database: certainly not ours to overwrite
    return bool(tables == 0)


def _locked(path: Path) -> IO[bytes] | None:
    """Hold an advisory lock beside the journal for as long as this process lives."""
    try:
        import fcntl
    except ImportError:  # no advisory locks on this platform; SQLite still guards single writes
        return None
    lock = open(path.with_name(path.name + ".lock"), "ab")  # noqa: SIM115  # held until close()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise JournalError(
            f"The journal {path} is in use by another process.",
            hint="stop the other session first; reading is possible at any time with read_journal(path)",
        ) from None
    return lock


def _connect(path: Path, lock: IO[bytes] | None) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.Error as error:
        if lock is not None:
            lock.close()
        raise JournalError(f"The journal {path} cannot be opened: {error}.") from error
    return connection


def _checked(path: Path, lock: IO[bytes] | None, *, readonly: bool = False) -> sqlite3.Connection:
    if not path.exists():
        raise JournalError(f"There is no journal {path}.", hint="start one with Session(..., journal=path)")
    try:
        if readonly:
            connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
            )
        else:
            connection = _connect(path, lock)
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application != _APPLICATION_ID:
            raise JournalError(
                f"The file {path} is not a fedcohort journal"
                + (", or its creation was cut off; it holds nothing." if os.path.getsize(path) < 8192 else "."),
                hint="delete it if you know that it is not needed, and start again",
            )
        if version != SCHEMA_VERSION:
            raise JournalError(
                f"The journal {path} has schema version {version}; this fedcohort ({fedcohort.__version__}) reads "
                f"version {SCHEMA_VERSION}.",
                hint="use the version of fedcohort that wrote it, or start a new journal",
            )
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise JournalError(f"The journal {path} is damaged: {verdict}.", hint="restore it from a copy")
    except sqlite3.Error as error:
        if lock is not None:
            lock.close()
        raise JournalError(f"The journal {path} is damaged: {error}.", hint="restore it from a copy") from error
    except JournalError:
        if lock is not None:
            lock.close()
        raise
    return connection


def read_journal(path: str | Path) -> Journal:
    """Open a journal for reading only, while a session may be writing it."""
    return Journal(_checked(Path(path), None, readonly=True), Path(path), None, "always")

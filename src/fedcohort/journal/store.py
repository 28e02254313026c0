"""The SQLite file behind a session.

Each event is one link of the chain and one transaction (in manual mode, each :meth:`Journal.commit`). WAL mode keeps
readers from blocking the writer, and a lock keeps two sessions from writing at once.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import Cohort
from fedcohort.core.version import __version__
from fedcohort.journal import opening
from fedcohort.journal.candidates import CandidateEncoder, base_of, decode, whole
from fedcohort.journal.codec import (
    as_json,
    changed_rows,
    compress,
    decode_scalar,
    decompress,
    decompress_json,
    encode_scalar,
    pack,
    pack_indices,
    pack_many,
    state_fields,
    unpack,
    unpack_many,
)  # fmt: skip
from fedcohort.journal.database import Commit, Database
from fedcohort.journal.events import ATTRIBUTES, EXCLUDED
from fedcohort.journal.lock import check_journal_path, target
from fedcohort.journal.replies import ReplyBlock, ReplyRow, newest
from fedcohort.journal.scores import unpack_scores
from fedcohort.journal.signing import Signer
from fedcohort.journal.tables import LABELS, client_count, client_table, table_facts, version_facts

_SMALL_FIELD = 1 << 16  # bytes; smaller arrays are always written whole


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


def excluded_clients(body: Mapping[str, Any], clients: int) -> dict[int, str]:
    """Return the clients that an event of kind :data:`EXCLUDED` names, each with the reason."""
    data = decompress(base64.b64decode(body["codes"]), 2 * clients, "The list of excluded clients")
    codes = np.frombuffer(data, "<i2")
    return {int(c): str(body["reasons"][codes[c] - 1]) for c in np.flatnonzero(codes)}


class Journal:
    """A session's journal file, or a journal in memory if ``path`` is None.

    Use :meth:`create`, :meth:`open` or :func:`read_journal`.

    Attributes
    ----------
    durable : (int, int)
        In manual mode, the highest ticket and the highest id of a block of replies that other processes can read.
    """

    def __init__(self, database: Database, path: Path | None) -> None:
        self.database = database
        self.path = path
        self.durable = (-1, -1)
        # By selector and field: bytes of changed rows since the array was last written whole.
        self._delta_bytes: dict[tuple[str, str], int] = {}
        self._saved: dict[str, dict[str, AnyArray | Any]] = {}
        self._candidates = CandidateEncoder()
        self.audited = False  # whether everything is recorded that an audit needs
        weakref.finalize(self, database.close)  # even if the program ends without closing it

    # -- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str | Path | None,
        meta: Mapping[str, Any],
        commit: Commit = "always",
        *,
        sign: Signer | None = None,
    ) -> Journal:
        """Start a journal in a new file, and never overwrite one. Call :meth:`finish_creation` when it is filled."""
        path = None if path is None else Path(path)
        audited = bool(meta["audit"])
        journal = cls(opening.in_memory(commit, audited) if path is None else opening.create(path, commit), path)
        try:
            with journal.database.errors():
                journal.audited = journal.database.link_each_event = audited
                journal.database.signer = sign
                signer = None if sign is None else sign.public
                all_meta = {**meta, "signer": signer, "fedcohort": __version__, "created": time.time()}
                for key, value in all_meta.items():
                    journal.set_meta(key, value)
        except BaseException:
            journal.close()
            raise
        return journal

    def finish_creation(self) -> None:
        """End the first transaction, after the session has written its tables; the file appears."""
        try:
            self.database.establish(None if self.path is None else target(self.path))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, JournalError):
                raise JournalError(f"The journal {self.path} cannot be created: {error.strerror or error}.") from error
            raise

    @classmethod
    def open(
        cls,
        path: str | Path,
        commit: Commit = "always",
        *,
        accept_loss: bool = False,
        sign: Signer | None = None,
    ) -> Journal:
        """Open an existing journal to continue it, after checking all of it.

        Parameters
        ----------
        commit : "always" or "manual"
        accept_loss : bool
            Continue although the newest commits are missing.
        sign : Signer, optional
            The key to sign with: the one the journal was created with.
        """
        path = Path(path)

        def check(database: Database) -> None:
            signer = Journal(database, path).meta().get("signer")  # format 4 has it only with audit=True
            if signer != (None if sign is None else sign.public):
                expected = (
                    "is not signed" if signer is None else f"is signed with the key whose public part is {signer}"
                )
                given = "no key was given" if sign is None else f"{sign.public} was given"
                raise JournalError(
                    f"The journal {path} {expected}, but {given}.",
                    hint="give the key it was started with: sign= in Python, --sign on the command line",
                )

        database = opening.open_for_writing(path, commit, check, accept_loss=accept_loss, sign=sign)
        journal = cls(database, path)
        try:
            journal.audited = database.link_each_event = bool(journal.meta()["audit"])
            if commit == "manual":
                journal._mark_durable()
            with journal.database.errors():
                journal.database.begin()
        except BaseException:
            journal.close()
            raise
        return journal

    @contextlib.contextmanager
    def event(self) -> Iterator[None]:
        """Make all writes inside durable together, or none of them."""
        try:
            with self.database.transaction():
                yield
        except BaseException:
            self._saved.clear()
            self._delta_bytes.clear()
            self._candidates.restart()
            raise

    def commit(self) -> None:
        """In manual mode, make everything so far durable."""
        if self.database.manual:
            self.database.commit()
            self._mark_durable()

    def _mark_durable(self) -> None:
        self.durable = self.newest()[:2]

    def close(self) -> None:
        """Close the file; in manual mode, uncommitted events are lost."""
        self.database.close()

    def compact(self) -> None:
        """Rewrite the file, so that no trace of deleted rows is left in it."""
        self.database.rewrite()

    # -- writing ------------------------------------------------------------------------------------------------

    def set_meta(self, key: str, value: Any) -> None:
        """Store a JSON value under ``key``."""
        self.database.put("meta", key, as_json(value, f"What is stored under {key!r}"))

    def add_event(self, kind: str, body: Mapping[str, Any]) -> None:
        """Record an event."""
        # The kind is a column of its own, so that readers need not parse the bodies of all events.
        self.database.append("events", time.time(), kind, as_json(body, f"The event {kind!r}"))

    def set_table(self, table: ClientTable, active: AnyArray) -> None:
        """Store the client table and which clients are members."""
        facts, before = table_facts(table, active), self.facts()
        for name in LABELS.difference(facts):  # labels may be known in another form than before
            self.database.delete("facts", "name = ?", [name])
        news = {name: data for name, data in facts.items() if before.get(name) != data}
        for name, data in news.items():
            self.database.put("facts", name, data)
        self.add_version(facts, news)

    def add_version(self, facts: Mapping[str, bytes], news: Mapping[str, bytes]) -> None:
        """In an audited journal, record which facts make up the client table from now on, and those that are new."""
        if self.audited:
            header = json.dumps([list(facts), [[name, len(data)] for name, data in news.items()]]).encode()
            self.database.append("versions", header + b"\n" + b"".join(news.values()))

    def add_answer(self, ticket: int, answer: Mapping[Any, AnyArray]) -> None:
        """Record what a selector was told before it chose; only an audited journal stores it."""
        if self.audited:
            self.database.add("answers", ticket, pack_many({str(signal): values for signal, values in answer.items()}))

    def add_cohort(self, cohort: Cohort, wanted: int | None, candidates: IntArray, n: int) -> None:
        """Record a cohort, chosen from ``candidates`` out of ``n`` clients when the host wanted so many.

        One without clients is closed at once, because there is no report to wait for.
        """
        now = time.time()
        if len(candidates) < n:  # without a row, all clients were candidates
            self.database.add("candidates", cohort.ticket, self._candidates.encode(cohort.ticket, candidates, n))
        weights, work = (None if values is None else pack(values) for values in (cohort.weights, cohort.work))
        notes = as_json(dict(cohort.notes), "What a selector noted about its cohort")
        clients = pack_indices(cohort.clients)
        first = (cohort.ticket, cohort.round, now, wanted, len(candidates))
        self.database.add("cohorts", *first, clients, weights, work, notes, cohort.stop)
        if not cohort.size:
            self.database.add("closed", cohort.ticket, now)

    def drop_candidates(self, tickets: Iterable[int]) -> None:
        """Delete the candidates of some cohorts, after storing whole those of others that refer to them."""
        gone = set(tickets)
        stored = self.database.fetch("SELECT ticket, data FROM candidates WHERE length(data) > 0")
        for ticket, data in stored:
            if ticket not in gone and base_of(data) in gone:
                bits = self.candidate_bits(ticket)
                assert bits is not None
                self.database.change("candidates", (ticket,), data=whole(bits))
        for ticket in gone.intersection(ticket for ticket, _ in stored):
            self.database.change("candidates", (ticket,), data=b"")  # without a row, all clients were candidates
        self._candidates.restart()

    def add_scores(self, ticket: int, selector: str, picked: IntArray, scores: bytes | None, note: str | None) -> None:
        """Record the clients that a selector picked, and its scores as :func:`~.scores.pack_scores` packs them.

        The session's own selector is called ''. The clients it picked are already in the cohort's row.
        """
        self.database.add("scores", ticket, selector, pack_indices(picked) if selector else b"", scores, note)

    def add_replies(self, block: ReplyBlock) -> None:
        """Record the replies of one report; they replace earlier replies of the same clients."""
        self.database.append("replies", block.ticket, block.at, block.late, block.encode())

    def close_cohort(self, ticket: int) -> None:
        """Mark a cohort as closed now."""
        self.database.add("closed", ticket, time.time())

    def add_metrics(self, round_: int, values: Mapping[str, float | None]) -> None:
        """Record numbers about the global model after a round."""
        for key, value in values.items():
            self.database.put("metrics", round_, key, value)

    def save_state(self, selector: str, state: object) -> None:
        """Record a selector's state, writing only what changed since it was last saved; in memory, do nothing."""
        # Nobody reads a journal in memory again, and comparing arrays would be most of a small round's time.
        if self.path is not None:
            self.save_fields(selector, state_fields(state))

    def save_fields(self, selector: str, fields: Iterable[tuple[str, AnyArray | Any]]) -> None:
        """Record the fields of a selector's state, writing only what changed since they were last saved."""
        before = self._saved.get(selector, {})
        after = dict(fields)
        for name, value in after.items():
            if name in before and before[name] is value:  # selectors pass unchanged fields on
                continue
            if isinstance(value, np.ndarray):
                self._save_array((selector, name), before.get(name), value)
            else:
                self.database.put("states", selector, name, encode_scalar(value), None)
        self._saved[selector] = after

    def _save_array(self, key: tuple[str, str], before: object, value: AnyArray) -> None:
        """Record an array of a state: the rows that changed, or all of it if that takes no more bytes."""
        rows = changed_rows(before, value) if isinstance(before, np.ndarray) else None
        if rows is not None and len(rows) == 0:
            return
        # An index takes as much room as a number, so beyond a quarter of the rows the whole array is smaller.
        if rows is not None and value.nbytes > _SMALL_FIELD and len(rows) * 4 < len(value):
            block = pack_many({"rows": rows, "values": value[rows]})
            # Once the changed rows take as many bytes as the whole array, reading them costs more than they save.
            total = self._delta_bytes.get(key, 0) + len(block)
            if total < value.nbytes:
                self.database.append("deltas", *key, block)
                self._delta_bytes[key] = total
                return
        if self._delta_bytes.get(key) != 0:  # there are changed rows, or we do not know
            self.database.delete("deltas", "selector = ? AND field = ?", key)
        self.database.put("states", *key, None, pack(value))
        self._delta_bytes[key] = 0

    def add_exclusions(self, ticket: int, codes: AnyArray, reasons: Sequence[str]) -> None:
        """Record which clients the rules excluded from a cohort.

        A client's code is 0 if it was not excluded; code i stands for the i-th reason, counted from 1.
        """
        # One code for each client, because a reason for each of a million clients would be a million strings.
        data = base64.b64encode(compress(np.ascontiguousarray(codes, "<i2").tobytes())).decode()
        self.add_event(EXCLUDED, {"ticket": ticket, "reasons": list(reasons), "codes": data})

    def set_attributes(
        self, attributes: Mapping[str, Mapping[str, Any]], news: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Store clients' attributes by name; an audited journal also records each change (``news``)."""
        if self.audited:
            self.add_event(ATTRIBUTES, {"clients": {name: dict(values) for name, values in news.items()}})
        self.database.put("facts", "attributes", compress(json.dumps(attributes).encode()))

    def drop_state(self, selector: str) -> None:
        """Delete a selector's state."""
        self.database.delete("states", "selector = ?", (selector,))
        self.database.delete("deltas", "selector = ?", (selector,))
        self._saved.pop(selector, None)
        for key in [key for key in self._delta_bytes if key[0] == selector]:
            del self._delta_bytes[key]

    @property
    def generation(self) -> int:
        """How often the journal was opened for writing; 0 in memory."""
        return 0 if self.database.head is None else self.database.head.generation

    @property
    def commitment(self) -> str | None:
        """The newest link of the chain, in hexadecimal; None without a chain, in memory."""
        return None if self.database.head is None else self.database.head.link.hex()

    @property
    def signature(self) -> str | None:
        """The signature of :attr:`commitment`, in hexadecimal; None without a key."""
        head, signer = self.database.head, self.database.signer
        return None if head is None or signer is None else signer.sign(head.link).hex()

    def resume_state(self, selector: str, cls: type) -> Any:
        """Return the state that was last saved, as an object of ``cls``; later saves write what changed since."""
        fields = self.state(selector)
        expected = {f.name for f in dataclasses.fields(cls)}
        if set(fields) != expected:
            raise JournalError(
                f"The journal {self.path} holds a state with fields {sorted(fields)}, but {cls.__name__} has "
                f"{sorted(expected)}: it was written by another version of the selector.",
                hint=f"continue it with fedcohort {self.meta().get('fedcohort')}, which wrote it; this one can read it",
            )
        for name, size in self.database.fetch(
            "SELECT field, SUM(LENGTH(data)) FROM deltas WHERE selector = ? GROUP BY field", (selector,)
        ):
            self._delta_bytes[(selector, name)] = size
        self._saved[selector] = fields
        return cls(**fields)

    # -- reading ------------------------------------------------------------------------------------------------

    def meta(self) -> dict[str, Any]:
        """Return everything stored with :meth:`set_meta`."""
        return {key: json.loads(value) for key, value in self.database.fetch("SELECT key, value FROM meta")}

    def table(self) -> tuple[ClientTable, AnyArray]:
        """Return the client table and the (N,) mask of members."""
        return client_table(self.facts())

    def client_count(self) -> int:
        """Return the number of clients, members or not."""
        return client_count(dict(self.database.fetch("SELECT name, data FROM facts WHERE name IN ('n', 'active')")))

    def attributes(self) -> dict[str, dict[str, Any]]:
        """Return the attributes of clients, by name."""
        rows = self.database.fetch("SELECT data FROM facts WHERE name = 'attributes'")
        return dict(decompress_json(rows[0][0], "The table of attributes")) if rows else {}

    def exclusions(self, ticket: int) -> dict[int, str]:
        """Return the clients that the rules excluded from a cohort, each with the reason."""
        query = "SELECT body FROM events WHERE kind = ? AND json_extract(body, '$.ticket') = ?"
        rows = self.database.fetch(query, (EXCLUDED, ticket))
        return excluded_clients(json.loads(rows[0][0]), self.client_count()) if rows else {}

    def state(self, selector: str) -> dict[str, Any]:
        """Return the fields of a selector's state as last saved."""
        fields: dict[str, Any] = {}
        for name, scalar, data in self.database.fetch(
            "SELECT field, scalar, data FROM states WHERE selector = ?", (selector,)
        ):
            fields[name] = decode_scalar(scalar) if data is None else unpack(data)
        for name, data in self.database.fetch(
            "SELECT field, data FROM deltas WHERE selector = ? ORDER BY id", (selector,)
        ):
            block = unpack_many(data)
            # Unpacked arrays are read-only; copy them before the first change.
            if not fields[name].flags.writeable:
                fields[name] = fields[name].copy()
            fields[name][block["rows"]] = block["values"]
        for value in fields.values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
        return fields

    def facts(self) -> dict[str, bytes]:
        """Return the facts about clients, by name, as they are stored."""
        return dict(self.database.fetch("SELECT name, data FROM facts"))

    def versions(self) -> Iterator[dict[str, bytes]]:
        """Yield the facts of each version of the client table, oldest first; none unless the journal is audited."""
        facts: dict[str, bytes] = {}
        for (data,) in self.database.fetch("SELECT data FROM versions ORDER BY id"):
            facts = version_facts(facts, data)
            yield facts

    def cohorts(
        self, *, round_: int | None = None, pending: bool = False, after: int = -1, ticket: int | None = None
    ) -> list[CohortRow]:
        """Return cohorts in order: all, that of one ticket, those of one round, still open, or after a ticket."""
        where = "WHERE ticket > ?" + (" AND round = ?" if round_ is not None else "")
        where += " AND at IS NULL" if pending else ""
        where += " AND ticket = ?" if ticket is not None else ""
        arguments = tuple(number for number in (after, round_, ticket) if number is not None)
        rows = self.database.fetch(
            "SELECT ticket, round, asked_at, at, wanted, n_candidates, clients, weights, work, notes, stop "
            f"FROM cohorts LEFT JOIN closed USING (ticket) {where} ORDER BY ticket",
            arguments,
        )
        return [
            CohortRow(
                t, r, asked_at, told_at, wanted, n, unpack(c), _optional(w), _optional(k), json.loads(notes), stop
            )
            for t, r, asked_at, told_at, wanted, n, c, w, k, notes, stop in rows
        ]

    def picks(self, upto: int | None = None) -> Iterator[tuple[int, IntArray, int]]:
        """Yield the round, clients and number of candidates of every cohort in order, up to a round."""
        last = self.last()[0] if upto is None else upto
        rows = self.database.fetch(
            "SELECT round, clients, n_candidates FROM cohorts WHERE round <= ? ORDER BY ticket", (last,)
        )
        for round_, clients, candidates in rows:
            yield round_, unpack(clients), candidates

    def candidates(self, ticket: int, n: int) -> IntArray | None:
        """Return the candidates for a cohort; None if they were pruned."""
        if self._stored_candidates(ticket) is None:
            return np.arange(n)
        bits = self.candidate_bits(ticket)
        return None if bits is None else np.flatnonzero(bits[:n])

    def candidate_bits(self, ticket: int) -> BoolArray | None:
        """Return the mask of candidates for a cohort; None if all clients were candidates, or they were pruned."""
        data = self._stored_candidates(ticket)
        if not data:
            return None
        base = base_of(data)
        other = None if base is None else self._stored_candidates(base)
        return decode(data, other, self.client_count(), f"The list of candidates of ticket {ticket}")

    def _stored_candidates(self, ticket: int) -> bytes | None:
        rows = self.database.fetch("SELECT data FROM candidates WHERE ticket = ?", (ticket,))
        return rows[0][0] if rows else None

    def reply_blocks(self, ticket: int | None = None) -> list[ReplyBlock]:
        """Return the reports on one cohort or all, oldest first."""
        where, arguments = ("", ()) if ticket is None else ("WHERE ticket = ?", (ticket,))
        rows = self.database.fetch(f"SELECT ticket, at, late, data FROM replies {where} ORDER BY id", arguments)
        return [ReplyBlock.decode(t, at, bool(late), data) for t, at, late, data in rows]

    def replies(self, ticket: int | None = None) -> list[ReplyRow]:
        """Return the last reply of each client to one cohort or all, ordered by ticket and client."""
        return newest(self.reply_blocks(ticket))

    def scores(self, ticket: int) -> dict[str, tuple[IntArray, dict[str, AnyArray], str | None]]:
        """Return by selector ('' is the session's own): picked clients, stored score arrays, note."""
        rows = self.database.fetch("SELECT selector, picked, arrays, note FROM scores WHERE ticket = ?", (ticket,))
        cohort = self.database.fetch("SELECT clients FROM cohorts WHERE ticket = ?", (ticket,))
        n = self.client_count()
        scores = {}
        # The session's own selector has no row if it gave no scores.
        for selector, picked, arrays, note in [*rows, *(("", b"", None, None) for _ in cohort)]:
            if selector not in scores:
                clients = unpack(picked or cohort[0][0])  # the session's own picks are in the cohort's row
                scores[selector] = (clients, {} if arrays is None else unpack_scores(arrays, n), note)
        return scores

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the bodies of all events of a kind, oldest first."""
        return [body for _, body in self.timed_events(kind)]

    def timed_events(self, kind: str) -> list[tuple[float, dict[str, Any]]]:
        """Return the times, in seconds since 1970, and bodies of all events of a kind, oldest first."""
        rows = self.database.fetch("SELECT at, body FROM events WHERE kind = ? ORDER BY id", (kind,))
        return [(at, json.loads(body)) for at, body in rows]

    def metrics(self, since: int = 0) -> dict[int, dict[str, float]]:
        """Return the recorded numbers about the global model, by round, from round ``since`` on."""
        numbers: dict[int, dict[str, float]] = {}
        rows = self.database.fetch("SELECT round, key, value FROM metrics WHERE round >= ? ORDER BY round", (since,))
        for round_, key, value in rows:
            numbers.setdefault(round_, {})[key] = value
        return numbers

    def newest(self) -> tuple[int, int, int]:
        """Return the highest ticket, id of a report and id of an event, each -1 if there is none."""
        ((reply,),) = self.database.fetch("SELECT COALESCE(MAX(id), -1) FROM replies")
        ((event,),) = self.database.fetch("SELECT COALESCE(MAX(id), -1) FROM events")
        return self.last()[1], int(reply), int(event)

    def last(self) -> tuple[int, int]:
        """Return the highest round and ticket recorded, each -1 if there is none."""
        ((round_, ticket),) = self.database.fetch(
            "SELECT COALESCE(MAX(round), -1), COALESCE(MAX(ticket), -1) FROM cohorts"
        )
        return int(round_), int(ticket)


def read_journal(path: str | Path) -> Journal:
    """Open a journal for reading. A session may be writing it, and the folder may be read-only."""
    path = check_journal_path(path)
    return Journal(opening.open_for_reading(path), path)

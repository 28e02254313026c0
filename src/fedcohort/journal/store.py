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
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import JournalError
from fedcohort.core.version import __version__
from fedcohort.journal import opening
from fedcohort.journal.candidates import CandidateEncoder, base_of, whole
from fedcohort.journal.codec import (
    as_json,
    changed_rows,
    compress,
    encode_scalar,
    pack,
    pack_indices,
    pack_many,
    state_fields,
)
from fedcohort.journal.database import Commit, Database
from fedcohort.journal.events import ATTRIBUTES, EXCLUDED
from fedcohort.journal.lock import check_journal_path, target
from fedcohort.journal.reading import CohortRow, JournalReader
from fedcohort.journal.replies import ReplyBlock
from fedcohort.journal.signing import Signer
from fedcohort.journal.tables import LABELS, table_facts

_SMALL_FIELD = 1 << 16  # bytes; smaller arrays are always written whole


class Journal(JournalReader):
    """A session's journal file, or a journal in memory if ``path`` is None.

    Use :meth:`create`, :meth:`open` or :func:`read_journal`.

    Attributes
    ----------
    durable : (int, int)
        In manual mode, the highest ticket and the highest id of a block of replies that other processes can read.
    """

    def __init__(self, database: Database, path: Path | None) -> None:
        super().__init__(database, path)
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
            signer = JournalReader(database, path).meta().get("signer")  # format 4 has it only with audit=True
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

    def compact(self) -> None:
        """Rewrite the file, so that no trace of deleted rows is left in it."""
        self.database.rewrite()

    # -- writing ------------------------------------------------------------------------------------------------

    def set_meta(self, key: str, value: Any) -> None:
        """Store a JSON value under ``key``."""
        self.database.put("meta", key, as_json(value, f"What is stored under {key!r}"))

    def add_event(self, kind: str, body: Mapping[str, Any]) -> None:
        """Record an event."""
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

    def add_cohort(self, row: CohortRow, candidates: IntArray | None, n: int) -> None:
        """Record a cohort; ``candidates`` is None if all ``n`` clients were candidates."""
        if candidates is not None:
            self.database.add("candidates", row.ticket, self._candidates.encode(row.ticket, candidates, n))
        self.database.add(
            "cohorts",
            row.ticket,
            row.round,
            row.asked_at,
            row.wanted,
            row.n_candidates,
            pack_indices(row.clients),
            None if row.weights is None else pack(row.weights),
            None if row.work is None else pack(row.work),
            as_json(dict(row.notes), "What a selector noted about its cohort"),
            row.stop,
        )
        if row.told_at is not None:
            self.database.add("closed", row.ticket, row.told_at)

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


def read_journal(path: str | Path) -> Journal:
    """Open a journal for reading. A session may be writing it, and the folder may be read-only."""
    path = check_journal_path(path)
    return Journal(opening.open_for_reading(path), path)

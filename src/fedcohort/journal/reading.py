"""Reads everything in a journal, while it is being written or afterwards."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.journal.candidates import base_of, decode
from fedcohort.journal.codec import decode_scalar, decompress, decompress_json, unpack, unpack_many
from fedcohort.journal.database import Database
from fedcohort.journal.events import EXCLUDED
from fedcohort.journal.replies import ReplyBlock, ReplyRow, newest
from fedcohort.journal.scores import unpack_scores
from fedcohort.journal.tables import client_count, client_table, version_facts


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


class JournalReader:
    """The reading half of a journal."""

    def __init__(self, database: Database, path: Path | None) -> None:
        self.database = database
        self.path = path

    def close(self) -> None:
        """Close the file; in manual mode, uncommitted events are lost."""
        self.database.close()

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

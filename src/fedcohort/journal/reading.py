"""Everything that can be read from a journal, while it is being written or afterwards."""

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
from fedcohort.journal.chain import Link, links, payload_of, strays
from fedcohort.journal.codec import decode_scalar, decompress, decompress_json, unpack, unpack_many
from fedcohort.journal.database import Database
from fedcohort.journal.events import EXCLUDED
from fedcohort.journal.replies import ReplyBlock, ReplyRow, newest
from fedcohort.journal.scores import unpack_scores
from fedcohort.journal.tables import client_count, table_of


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


class JournalReader:
    """The reading half of a journal."""

    def __init__(self, database: Database, path: Path | None) -> None:
        self.database = database
        self.path = path

    def close(self) -> None:
        """Close the file; in manual mode what was not committed is dropped."""
        self.database.close()

    def meta(self) -> dict[str, Any]:
        """Return everything stored with :meth:`set_meta`."""
        return {key: json.loads(value) for key, value in self.database.fetch("SELECT key, value FROM meta")}

    def table(self) -> tuple[ClientTable, AnyArray]:
        """Return the client table and the (N,) mask of members."""
        return table_of(self.facts())

    def client_count(self) -> int:
        """Return how many clients there are, whether or not they are members."""
        return client_count(dict(self.database.fetch("SELECT name, data FROM facts WHERE name IN ('n', 'active')")))

    def attributes(self) -> dict[str, dict[str, Any]]:
        """Return the attributes of clients, by name."""
        rows = self.database.fetch("SELECT data FROM facts WHERE name = 'attributes'")
        return dict(decompress_json(rows[0][0], "What clients say about themselves")) if rows else {}

    def exclusions(self, ticket: int) -> dict[int, str]:
        """Return the clients that rules excluded from a cohort, each with the reason."""
        query = "SELECT body FROM events WHERE kind = ? AND json_extract(body, '$.ticket') = ?"
        rows = self.database.fetch(query, (EXCLUDED, ticket))
        if not rows:
            return {}
        body = json.loads(rows[0][0])
        data = decompress(base64.b64decode(body["codes"]), 2 * self.client_count(), "The list of whom rules excluded")
        codes = np.frombuffer(data, "<i2")
        return {int(c): str(body["reasons"][codes[c] - 1]) for c in np.flatnonzero(codes)}

    def state(self, selector: str) -> dict[str, Any]:
        """Return the fields of a selector's state as last saved."""
        found: dict[str, Any] = {}
        for name, scalar, data in self.database.fetch(
            "SELECT field, scalar, data FROM states WHERE selector = ?", (selector,)
        ):
            found[name] = decode_scalar(scalar) if data is None else unpack(data)
        for name, data in self.database.fetch(
            "SELECT field, data FROM deltas WHERE selector = ? ORDER BY id", (selector,)
        ):
            block = unpack_many(data)
            # Copied once, for the first delta; unpacked arrays are read-only.
            if not found[name].flags.writeable:
                found[name] = found[name].copy()
            found[name][block["rows"]] = block["values"]
        for value in found.values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
        return found

    def links(self) -> list[Link]:
        """Return the links of the chain, oldest first."""
        return list(links(self.database))

    def fits(self, link: Link) -> bool:
        """Whether what a link is over is on record as it was."""
        return link.fits(payload_of(self.database, link))

    def strays(self, chained: list[Link]) -> list[tuple[str, tuple[Any, ...]]]:
        """Return the kind and key of what is on record outside the chain."""
        return list(strays(self.database, chained))

    def facts(self) -> dict[str, bytes]:
        """Return what is known about the clients, as it is stored."""
        return dict(self.database.fetch("SELECT name, data FROM facts"))

    def cohorts(self, *, round_: int | None = None, pending: bool = False, after: int = -1) -> list[CohortRow]:
        """Return cohorts in order: all, of one round, those still open, or those with a ticket above ``after``."""
        where = "WHERE ticket > ?" + (" AND round = ?" if round_ is not None else "")
        where += " AND told_at IS NULL" if pending else ""
        arguments = (after,) if round_ is None else (after, round_)
        rows = self.database.fetch(
            "SELECT ticket, round, asked_at, told_at, wanted, n_candidates, clients, weights, work, notes, stop "
            f"FROM cohorts {where} ORDER BY ticket",
            arguments,
        )
        return [
            CohortRow(t, r, asked, told, wanted, n, unpack(c), _optional(w), _optional(k), json.loads(notes), stop)
            for t, r, asked, told, wanted, n, c, w, k, notes, stop in rows
        ]

    def picks(self, upto: int | None = None) -> Iterator[tuple[int, IntArray, int]]:
        """Yield round, clients and number of candidates of every cohort in order, up to a round."""
        last = self.last()[0] if upto is None else upto
        rows = self.database.fetch(
            "SELECT round, clients, n_candidates FROM cohorts WHERE round <= ? ORDER BY ticket", (last,)
        )
        for round_, clients, candidates in rows:
            yield round_, unpack(clients), candidates

    def candidates(self, ticket: int, n: int) -> IntArray | None:
        """Return the candidates for a cohort; None where they were pruned."""
        data = self._stored_candidates(ticket)
        if data is None:
            return np.arange(n)
        bits = self.candidate_bits(ticket) if data else None
        return None if bits is None else np.flatnonzero(bits[:n])

    def candidate_bits(self, ticket: int) -> BoolArray | None:
        """Return which clients were candidates for a cohort; None where all were, or where they were pruned."""
        data = self._stored_candidates(ticket)
        if not data:
            return None
        base = base_of(data)
        other = None if base is None else self._stored_candidates(base)
        return decode(data, other, self.client_count(), f"The list of candidates of ticket {ticket}")

    def _stored_candidates(self, ticket: int) -> bytes | None:
        rows = self.database.fetch("SELECT candidates FROM cohorts WHERE ticket = ?", (ticket,))
        return rows[0][0] if rows else b""

    def reply_blocks(self, ticket: int | None = None) -> list[ReplyBlock]:
        """Return the replies as they were reported, of one cohort or all, oldest first."""
        where, arguments = ("", ()) if ticket is None else ("WHERE ticket = ?", (ticket,))
        rows = self.database.fetch(f"SELECT ticket, at, late, data FROM replies {where} ORDER BY id", arguments)
        return [ReplyBlock.decode(t, at, bool(late), data) for t, at, late, data in rows]

    def reply_block(self, number: int) -> ReplyBlock:
        """Return one report's replies by their number in the chain."""
        ((t, at, late, data),) = self.database.fetch(
            "SELECT ticket, at, late, data FROM replies WHERE id = ?", (number,)
        )
        return ReplyBlock.decode(t, at, bool(late), data)

    def numbered_event(self, number: int) -> tuple[float, str, dict[str, Any]]:
        """Return one event by its number in the chain: when, its kind, its body."""
        ((at, kind, body),) = self.database.fetch("SELECT at, kind, body FROM events WHERE id = ?", (number,))
        return at, kind, json.loads(body)

    def replies(self, ticket: int | None = None) -> list[ReplyRow]:
        """Return the outcome of each client, of one cohort or all, ordered by ticket and client."""
        return newest(self.reply_blocks(ticket))

    def scores(self, ticket: int) -> dict[str, tuple[IntArray, dict[str, AnyArray], str | None]]:
        """Return by selector ('' is the session's own): picked clients, stored score arrays, note."""
        rows = self.database.fetch("SELECT selector, picked, arrays, note FROM scores WHERE ticket = ?", (ticket,))
        cohort = self.database.fetch("SELECT clients FROM cohorts WHERE ticket = ?", (ticket,))
        n = self.client_count()
        found = {}
        for selector, picked, arrays, note in [*rows, *(("", b"", None, None) for _ in cohort)]:
            if selector not in found:  # a selector that gave no scores has no row
                who = picked or cohort[0][0]  # whom the session's own picked is in the cohort's row
                found[selector] = (unpack(who), {} if arrays is None else unpack_scores(arrays, n), note)
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the bodies of all events of a kind, oldest first."""
        return [body for _, body in self.timed_events(kind)]

    def timed_events(self, kind: str) -> list[tuple[float, dict[str, Any]]]:
        """Return when events of a kind happened, in seconds since 1970, and their bodies, oldest first."""
        rows = self.database.fetch("SELECT at, body FROM events WHERE kind = ? ORDER BY id", (kind,))
        return [(at, json.loads(body)) for at, body in rows]

    def metrics(self) -> dict[int, dict[str, float]]:
        """Return the recorded numbers about the global model by round."""
        found: dict[int, dict[str, float]] = {}
        for round_, key, value in self.database.fetch("SELECT round, key, value FROM metrics ORDER BY round"):
            found.setdefault(round_, {})[key] = value
        return found

    def newest(self) -> tuple[int, int, int]:
        """Return the highest numbers of a ticket, a block of replies and an event, -1 when there is none."""
        ((reply,),) = self.database.fetch("SELECT COALESCE(MAX(id), -1) FROM replies")
        ((event,),) = self.database.fetch("SELECT COALESCE(MAX(id), -1) FROM events")
        return self.last()[1], int(reply), int(event)

    def last(self) -> tuple[int, int]:
        """Return the highest round and ticket recorded, -1 when there is none."""
        ((round_, ticket),) = self.database.fetch(
            "SELECT COALESCE(MAX(round), -1), COALESCE(MAX(ticket), -1) FROM cohorts"
        )
        return int(round_), int(ticket)

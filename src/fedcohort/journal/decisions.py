"""The cohorts and replies of each round, for programs that read many journals at once.

:func:`~fedcohort.journal.read_journal` checks every row of a file before it returns one. This module reads only what is
new since the last time, and checks those rows against the new links of the chain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.arrays import IntArray
from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import Status
from fedcohort.journal.chain import START, TAGS, links, read_head, table_of
from fedcohort.journal.codec import unpack
from fedcohort.journal.database import Database
from fedcohort.journal.live import attach_live, live_of
from fedcohort.journal.opening import COPY, open_declared
from fedcohort.journal.replies import ReplyBlock
from fedcohort.journal.schema import ERRORS, TABLES


class Decisions:
    """The cohort and the replies of each round of one simulated run.

    A simulated round has one cohort and one report. In an asynchronous run, a round has many cohorts of one client
    each: the clients that started from the same model. A client that is still training has the status "missing".

    Parameters
    ----------
    journal : the run's journal
    folder : the folder with rounds that the journal does not have yet; see :mod:`fedcohort.journal.live`
    """

    def __init__(self, journal: Path, folder: Path) -> None:
        self._journal, self._folder = journal, folder
        self._clear()
        self.refresh()

    def _clear(self) -> None:
        # By round.
        self._cohorts: dict[int, IntArray] = {}
        self._replies: dict[int, ReplyBlock] = {}
        self._tickets: dict[int, list[int]] = {}
        # By ticket.
        self._round_of: dict[int, int] = {}
        self._clients: dict[int, IntArray] = {}
        self._blocks: dict[int, ReplyBlock] = {}
        self._last_ticket = self._last_reply = -1
        self._head = START
        self._valid: dict[str, set[bytes]] = {"cohorts": set(), "replies": set()}  # digests of rows not read yet

    def refresh(self) -> None:
        """Read what is new at the next access."""
        self._unread = {"cohorts", "replies"}

    @property
    def cohorts(self) -> dict[int, IntArray]:
        """By round, the clients in the order in which they were chosen."""
        if "cohorts" in self._unread:
            with self._open() as database:
                self._read_cohorts(database)
        return self._cohorts

    @property
    def tickets(self) -> dict[int, list[int]]:
        """By round, the tickets of its cohorts."""
        _ = self.cohorts
        return self._tickets

    @property
    def replies(self) -> dict[int, ReplyBlock]:
        """By round, the replies of its clients."""
        if "replies" in self._unread:
            changed: set[int] = set()
            with self._open() as database:
                self._read_cohorts(database)
                for row in self._rows(database, "replies", "id", self._last_reply):
                    number, ticket, at, late, data, _ = row
                    self._last_reply = max(self._last_reply, number)
                    if ticket in self._round_of:
                        self._blocks[ticket] = ReplyBlock.decode(ticket, at, bool(late), data)
                        changed.add(self._round_of[ticket])
                for round_ in changed:
                    self._replies[round_] = self._join_round(round_)
            self._unread.discard("replies")
        return self._replies

    def _read_cohorts(self, database: Database) -> None:
        columns = TABLES["cohorts"].columns
        round_, clients = columns.index("round"), columns.index("clients")
        rows = self._rows(database, "cohorts", "ticket", self._last_ticket)
        for row in rows:
            self._round_of[row[0]] = row[round_]
            self._clients[row[0]] = unpack(row[clients])
            self._tickets.setdefault(row[round_], []).append(row[0])
        for number in {row[round_] for row in rows}:
            parts = [self._clients[ticket] for ticket in self._tickets[number]]
            self._cohorts[number] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._last_ticket = rows[-1][0] if rows else self._last_ticket
        self._unread.discard("cohorts")

    def _join_round(self, round_: int) -> ReplyBlock:
        """Return the replies of all clients of a round, in the order in which the clients were chosen."""
        tickets = self._tickets[round_]
        if len(tickets) == 1:
            return self._blocks[tickets[0]]
        blocks = [
            self._blocks.get(ticket) or ReplyBlock.with_status(ticket, 0.0, self._clients[ticket], Status.MISSING)
            for ticket in tickets
        ]
        return ReplyBlock.join(tickets[-1], blocks)

    def _rows(self, database: Database, name: str, key: str, after: int) -> list[tuple[Any, ...]]:
        """Return the rows whose key is above ``after``, after looking for each in the chain."""
        table = TABLES[name]
        query = f"SELECT {table.names}, salt FROM {{}}{name} WHERE {key} > ? ORDER BY {key}"
        checked: list[tuple[Any, ...]] = database.fetch(query.format("main."), (after,))
        for *row, salt in checked:
            digest = TAGS[name] + table.digest(salt, row)
            if digest not in self._valid[name]:
                raise JournalError(
                    f"The journal {self._journal} is damaged: the row of {name} with {key} {row[0]!r} is not as it was "
                    "written.",
                    hint=COPY,
                )
            self._valid[name].remove(digest)  # it is read only once
        # Rounds that are not durable yet have no links; SQLite finds them in the copies, if there are any.
        last = max((row[0] for row in checked), default=after)
        return checked + database.fetch(query.format(""), (last,))

    @contextlib.contextmanager
    def _open(self) -> Iterator[Database]:
        database = open_declared(self._journal)
        try:
            live = live_of(self._folder, self._journal.stem)
            if live is not None:
                with contextlib.suppress(*ERRORS):  # removed in the meantime, so the journal has everything
                    attach_live(database, live, self._journal.stem)
            database.connection.execute("BEGIN")  # links and rows of the same moment, while a session writes
            ((newest,),) = database.fetch("SELECT COALESCE(MAX(ticket), -1) FROM cohorts")
            # Tickets only grow, unless the run went back to a checkpoint or began again; then all may have changed.
            if newest < self._last_ticket or read_head(database.connection).first != self._head.first:
                self._clear()
            for link in links(database.connection, self._head):
                for digest in link.added:
                    if table_of(digest) in self._valid:
                        self._valid[table_of(digest)].add(digest)
                for digest in link.removed:
                    self._valid.get(table_of(digest), set()).discard(digest)
                self._head = link.head
            yield database
        except (*ERRORS, ValueError, LookupError, TypeError) as error:
            if isinstance(error, JournalError):
                raise
            raise JournalError(f"The journal {self._journal} is damaged: {error}.", hint=COPY) from error
        finally:
            database.close()

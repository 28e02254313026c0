"""The cohorts whose reports are not complete yet."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from fedcohort.core.arrays import IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import TicketError
from fedcohort.core.protocol import Cohort, Status
from fedcohort.journal import Journal, ReplyBlock

_NOBODY = np.empty(0, np.int64)


@dataclass
class PendingCohort:
    """A cohort and its partial reports."""

    cohort: Cohort
    replies: list[ReplyBlock] = field(default_factory=list)

    def closing_replies(self, news: list[ReplyBlock]) -> list[ReplyBlock]:
        """Return ``news``, and a block with the status MISSING for clients that no report names."""
        blocks = (*self.replies, *news)
        if sum(len(block.clients) for block in blocks) == self.cohort.size:
            return news
        reported = np.concatenate([_NOBODY, *(block.clients for block in blocks)])
        missing = self.cohort.clients[~np.isin(self.cohort.clients, reported)]
        return [*news, ReplyBlock.with_status(self.cohort.ticket, time.time(), missing, Status.MISSING)]


class PendingCohorts:
    """Pending cohorts by ticket, oldest first.

    Examples
    --------
    >>> pending = PendingCohorts()
    >>> pending.add(Cohort([2, 5], ticket=7))
    >>> pending.tickets
    (7,)
    >>> pending.find(8) is None
    True
    """

    def __init__(self) -> None:
        self._by_ticket: dict[int, PendingCohort] = {}
        self._clients: dict[int, list[int]] = {}  # by ticket; many small lists are joined faster than arrays

    @classmethod
    def from_journal(cls, journal: Journal, table: ClientTable) -> PendingCohorts:
        """Return the cohorts of a journal that have no complete report."""
        self = cls()
        for row in journal.cohorts(pending=True):
            cohort = Cohort(
                clients=row.clients,
                weights=row.weights,
                work=row.work,
                notes=row.notes,
                stop=row.stop,
                round=row.round,
                ticket=row.ticket,
                names=table.names_of(row.clients),
            )
            self.add(cohort)
            self._by_ticket[row.ticket].replies = journal.reply_blocks(row.ticket)
        return self

    def add(self, cohort: Cohort) -> None:
        """Add a new cohort."""
        self._by_ticket[cohort.ticket] = PendingCohort(cohort)
        self._clients[cohort.ticket] = cohort.clients.tolist()

    def find(self, ticket: int) -> PendingCohort | None:
        """Return the pending cohort with this ticket, or None."""
        return self._by_ticket.get(ticket)

    def get(self, ticket: int) -> PendingCohort:
        """Return the pending cohort with this ticket, or raise a TicketError."""
        if ticket not in self._by_ticket:
            pending = ", ".join(map(str, self._by_ticket)) or "none"
            raise TicketError(f"Ticket {ticket} is not pending. Pending: {pending}.")
        return self._by_ticket[ticket]

    def remove(self, ticket: int) -> None:
        """Remove a cohort whose report is complete."""
        del self._by_ticket[ticket], self._clients[ticket]

    @property
    def items(self) -> tuple[PendingCohort, ...]:
        """The pending cohorts with their partial reports."""
        return tuple(self._by_ticket.values())

    @property
    def tickets(self) -> tuple[int, ...]:
        """The pending tickets."""
        return tuple(self._by_ticket)

    @property
    def training(self) -> IntArray:
        """The clients of all pending cohorts, cohort after cohort."""
        return np.fromiter(chain.from_iterable(self._clients.values()), np.int64)

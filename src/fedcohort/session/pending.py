"""The cohorts whose reports are not complete yet, and reports in the order of their cohort."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray, freeze
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Cohort, Status
from fedcohort.journal import Journal, ReplyBlock


@dataclass
class PendingCohort:
    """A cohort, its clients as a list, and its partial reports."""

    cohort: Cohort
    clients: list[int]  # many small lists are joined faster than arrays
    replies: list[ReplyBlock] = field(default_factory=list)

    def closing_replies(self, news: list[ReplyBlock]) -> list[ReplyBlock]:
        """Return ``news``, and a block with the status MISSING for clients that no report names."""
        blocks = (*self.replies, *news)
        if sum(len(block.clients) for block in blocks) == self.cohort.size:
            return news
        reported = np.concatenate([self.cohort.clients[:0], *(block.clients for block in blocks)])
        missing = self.cohort.clients[~np.isin(self.cohort.clients, reported)]
        return [*news, ReplyBlock.with_status(self.cohort.ticket, time.time(), missing, Status.MISSING)]


def pending_cohorts(journal: Journal, table: ClientTable) -> dict[int, PendingCohort]:
    """Return by ticket, oldest first, the cohorts of a journal that have no complete report."""
    pending = {}
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
        pending[row.ticket] = PendingCohort(cohort, row.clients.tolist(), journal.reply_blocks(row.ticket))
    return pending


def in_cohort_order(ticket: int, clients: IntArray, blocks: Sequence[ReplyBlock]) -> ReplyBlock:
    """Join reports that together name every client of a cohort once, in the order of the cohort."""
    (first, *others) = blocks
    if not others and (first.clients is clients or np.array_equal(first.clients, clients)):
        return first
    order, size = np.argsort(clients), len(clients)
    status, kept = np.full(size, Status.MISSING, np.int8), np.zeros(size, np.bool_)
    metrics: dict[str, FloatArray] = {}
    for block in blocks:
        at = order[np.searchsorted(clients, block.clients, sorter=order)]
        status[at] = block.status
        kept[at] = block.kept
        for name, column in block.metrics.items():
            metrics.setdefault(name, np.full((size, *column.shape[1:]), np.nan))[at] = column
    for column in metrics.values():
        freeze(column)
    return ReplyBlock(ticket, max(b.at for b in blocks), False, clients, freeze(status), freeze(kept), metrics)

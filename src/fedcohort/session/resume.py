"""What a continued session reads from its journal: the next round, and a referee with the participations so far."""

from __future__ import annotations

import numpy as np

from fedcohort.core.protocol import Cohort, Status
from fedcohort.journal import Journal
from fedcohort.journal.events import ABANDONED, JOINED, NEW_MODEL
from fedcohort.session.outcomes import in_cohort_order
from fedcohort.session.referee import Referee
from fedcohort.session.rules import Rules


def is_asynchronous(journal: Journal) -> bool:
    """Whether the session of a journal is asynchronous."""
    return bool(journal.meta().get("asynchronous"))


def next_round(journal: Journal) -> tuple[int, int]:
    """Return the number of the next round, and how many cohorts of that round were abandoned before.

    In an asynchronous session, return the number of the newest model, and how many cohorts it has had.
    """
    if is_asynchronous(journal):
        models = len(journal.events(NEW_MODEL))
        return models, len(journal.cohorts(round_=models))
    _, last = journal.last()
    rows = journal.cohorts(after=last - 1)
    following = rows[-1].round + 1 if rows else 0  # the next round if nothing was abandoned
    abandoned = journal.events(ABANDONED)
    # An abandoned round is repeated only if it was the newest, so only cohorts abandoned since the last request count.
    recent = [body for body in abandoned if body["asked"] == last + 1]
    round_ = int(recent[-1]["next"]) if recent else following
    return round_, sum(body["round"] == round_ for body in abandoned) if round_ < following else 0


def participations(journal: Journal) -> dict[str, int]:
    """Return how often each client has taken part so far, as the rules count it."""
    table, _ = journal.table()
    abandoned = {body["ticket"] for body in journal.events(ABANDONED)}
    counts = np.zeros(table.n, np.int64)
    for row in journal.cohorts():
        if row.ticket not in abandoned:
            counts[row.clients] += 1
    return dict(zip(table.names, counts.tolist(), strict=True))


def referee_from(rules: Rules, journal: Journal) -> Referee:
    """Return a referee that has counted every cohort in a journal."""
    table, _ = journal.table()
    referee = Referee(rules, table)
    referee.set_attributes(journal.attributes())
    for body in journal.events(JOINED):
        first = int(body["first"])
        referee.ledger.joined[first : first + int(body["count"])] = int(body["round"])
    abandoned = {body["ticket"] for body in journal.events(ABANDONED)}
    for row in journal.cohorts():
        if not len(row.clients):
            continue
        if row.ticket not in abandoned:
            referee.ledger.count_cohort(row.round, row.clients)
        blocks = [block for block in journal.reply_blocks(row.ticket) if not block.late]
        if row.told_at is not None and blocks:
            cohort = Cohort(row.clients, round=row.round, ticket=row.ticket)
            status = np.asarray(in_cohort_order(cohort, blocks).status)
            # Failures count once per cohort, also if its reports came in parts.
            # A client that had not replied when its cohort was abandoned has not failed.
            answered = status != Status.MISSING if row.ticket in abandoned else np.ones(len(status), np.bool_)
            referee.ledger.count_replies(row.ticket, row.clients[answered], status[answered])
    return referee

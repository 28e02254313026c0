"""What a session reads from its journal to go on: the next round, the participations so far, a referee."""

from __future__ import annotations

import numpy as np

from fedcohort.core.protocol import Cohort, Status
from fedcohort.journal import Journal
from fedcohort.journal.events import ABANDONED, JOINED, NEW_MODEL
from fedcohort.session.outcomes import in_cohort_order
from fedcohort.session.referee import Referee
from fedcohort.session.rules import Rules


def is_asynchronous(journal: Journal) -> bool:
    """Whether a session's rounds are its global models, and its cohorts single clients."""
    return bool(journal.meta().get("asynchronous"))


def next_round(journal: Journal) -> tuple[int, int]:
    """Return the number of the next round, and how often cohorts of that number were abandoned before.

    In an asynchronous session, the number of the newest model, and how many cohorts it has had.
    """
    if is_asynchronous(journal):
        models = len(journal.events(NEW_MODEL))
        return models, len(journal.cohorts(round_=models))
    _, last = journal.last()
    rows = journal.cohorts(after=last - 1)
    upto = rows[-1].round + 1 if rows else 0  # if nothing was abandoned
    abandoned = journal.events(ABANDONED)
    # A number is free again if its round was the newest; only cohorts abandoned since the last request count.
    since = [body for body in abandoned if body.get("asked", body["ticket"] + 1) == last + 1]
    round_ = int(since[-1].get("next", since[-1]["round"])) if since else upto
    return round_, sum(body["round"] == round_ for body in abandoned) if round_ < upto else 0


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
        referee.ledger.joined[first : first + int(body["count"])] = int(body.get("round", 0))
    abandoned = {body["ticket"] for body in journal.events(ABANDONED)}
    for row in journal.cohorts():
        if not len(row.clients):
            continue
        if row.ticket not in abandoned:
            referee.ledger.count_cohort(row.ticket, row.round, row.clients)
        blocks = [block for block in journal.reply_blocks(row.ticket) if not block.late]
        if row.told_at is not None and blocks:
            cohort = Cohort(row.clients, round=row.round, ticket=row.ticket)
            status = np.asarray(in_cohort_order(cohort, blocks).status)
            # A client that had not answered when its cohort was abandoned has not failed.
            answered = status != Status.MISSING if row.ticket in abandoned else np.ones(len(status), np.bool_)
            referee.ledger.count_replies(row.ticket, row.clients[answered], status[answered])
    return referee

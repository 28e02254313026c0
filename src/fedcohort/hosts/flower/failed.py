"""Who failed in which round and why, and whose reply was corrected, read from the journal of a live federation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcohort.core.guard import guarded
from fedcohort.core.protocol import Status
from fedcohort.journal import Journal, read_journal
from fedcohort.journal.events import CORRECTED, FAILURES
from fedcohort.session.explain import reasons_of

EVENT = FAILURES


@dataclass(frozen=True)
class Failure:
    """One client whose model did not enter a round's average.

    Attributes
    ----------
    round : int
        Counted from 0; Flower's own count begins with 1.
    client : str
    status : Status
    reason : str
    """

    round: int
    client: str
    status: Status
    reason: str


@guarded
def failures(journal: str | Path | Journal) -> list[Failure]:
    """Return every failure on record, oldest first; a client that answered late at last is LATE, not MISSING."""
    if not isinstance(journal, Journal):
        opened = read_journal(journal)
        try:
            return failures(opened)
        finally:
            opened.close()
    table, _ = journal.table()
    reasons = reasons_of(journal)
    rounds = {row.ticket: row.round for row in journal.cohorts()}
    found = []
    for reply in journal.replies():
        if reply.status == Status.OK:
            continue
        name = table.name(reply.client)
        round_ = rounds[reply.ticket]
        found.append(Failure(round_, name, Status(reply.status), reasons.get(reply.ticket, {}).get(name, "no answer")))
    return found


@dataclass(frozen=True)
class Correction:
    """Something that was changed about a client's reply before it entered an average.

    Attributes
    ----------
    round : int
        Counted from 0.
    client : str
    what : str
    """

    round: int
    client: str
    what: str


@guarded
def corrections(journal: str | Path | Journal) -> list[Correction]:
    """Return what was changed about replies, oldest first: weights, lengths of updates, metrics that were left out."""
    if not isinstance(journal, Journal):
        opened = read_journal(journal)
        try:
            return corrections(opened)
        finally:
            opened.close()
    return [
        Correction(body["round"], client, text)
        for body in journal.events(CORRECTED)
        for client, texts in body["corrections"].items()
        for text in texts
    ]


def event(round_: int, ticket: int, reasons: dict[str, str]) -> dict[str, Any]:
    """Return the body of the journal's event for a cohort."""
    return {"round": round_, "ticket": ticket, "failures": reasons}

"""The failed and corrected replies in the journal of a live federation, with their reasons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedcohort.core.protocol import Status
from fedcohort.journal import Journal, read_journal
from fedcohort.journal.events import CORRECTED
from fedcohort.session.explain import reasons_of


@dataclass(frozen=True)
class Incident:
    """A client's reply that failed, or that was corrected before it entered an average.

    Attributes
    ----------
    round : int
        Counted from 0; Flower counts from 1.
    status : Status
        OK for a corrected reply.
    reason : str
        Why it failed, or what was corrected.
    """

    round: int
    client: str
    status: Status
    reason: str


def failures(journal: str | Path | Journal) -> list[Incident]:
    """Return every recorded failure, oldest first; a client that answered after its round closed is LATE."""
    incidents = []
    with _reading(journal) as record:
        table, _ = record.table()
        reasons = reasons_of(record)
        rounds = {row.ticket: row.round for row in record.cohorts()}
        for reply in record.replies():
            if reply.status == Status.OK:
                continue
            name = table.name(reply.client)
            reason = reasons.get(reply.ticket, {}).get(name, "no answer")
            incidents.append(Incident(rounds[reply.ticket], name, Status(reply.status), reason))
    return incidents


def corrections(journal: str | Path | Journal) -> list[Incident]:
    """Return every recorded correction, oldest first: smaller weights, shorter updates, metrics left out."""
    with _reading(journal) as record:
        return [
            Incident(body["round"], client, Status.OK, text)
            for body in record.events(CORRECTED)
            for client, texts in body["corrections"].items()
            for text in texts
        ]


@contextmanager
def _reading(journal: str | Path | Journal) -> Iterator[Journal]:
    """Yield a journal; if it was given as a path, close it afterwards."""
    if isinstance(journal, Journal):
        yield journal
        return
    with closing(read_journal(journal)) as record:
        yield record

"""What a continued session takes from its journal: the next cohort, participations so far, and whether it is the same.

A federation changes during a session. A host may pass the table it started with or the current one; both are right. So
the journal keeps digests of the facts it began with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcohort.core import rng as streams
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import Status
from fedcohort.core.signals import Signal
from fedcohort.journal import Journal, events
from fedcohort.journal.codec import pack
from fedcohort.session.pending import in_cohort_order
from fedcohort.session.referee import Referee
from fedcohort.session.rules import Rules

CLIENT_DIGESTS = "clients"  # the journal's key for the digests


@dataclass(frozen=True, slots=True)
class NextCohort:
    """The next cohort's place in the session.

    Parameters
    ----------
    seed : int
        The session's seed.
    round : int
        The number of the next round, from 0; in an asynchronous session, the number of the newest global model.
    attempt : int
        How often that round was abandoned before; in an asynchronous session, how many cohorts it has had.
    ticket : int
        The number of the next cohort, which is never used again, even if the round is repeated.
    asynchronous : bool
        Whether a round lasts until there is a new model, however many cohorts it has.

    Examples
    --------
    >>> NextCohort(seed=3).following()
    NextCohort(seed=3, round=1, attempt=0, ticket=1, asynchronous=False)
    """

    seed: int
    round: int = 0
    attempt: int = 0
    ticket: int = 0
    asynchronous: bool = False

    @classmethod
    def from_journal(cls, journal: Journal, seed: int) -> NextCohort:
        """Return the cohort with which a session of this journal continues."""
        round_, attempt = next_round(journal)
        return cls(seed, round_, attempt, journal.last()[1] + 1, is_asynchronous(journal))

    def following(self) -> NextCohort:
        """Return what follows a cohort."""
        if self.asynchronous:
            return NextCohort(self.seed, self.round, self.attempt + 1, self.ticket + 1, True)
        return NextCohort(self.seed, self.round + 1, 0, self.ticket + 1)

    def stream(self, kind: str, name: str = "") -> np.random.Generator:
        """Return the generator for one purpose; ``name`` is the shadow's, if it is for a shadow."""
        # Every cohort of a round needs its own random numbers.
        attempt = (self.attempt,) if self.attempt else ()
        return streams.stream(self.seed, f"{kind}:{name}" if name else kind, self.round, *attempt)


def is_asynchronous(journal: Journal) -> bool:
    """Whether the session of a journal is asynchronous."""
    return bool(journal.meta().get("asynchronous"))


def next_round(journal: Journal) -> tuple[int, int]:
    """Return the number of the next round, and how many cohorts of that round were abandoned before.

    In an asynchronous session, return the number of the newest model, and how many cohorts it has had.
    """
    if is_asynchronous(journal):
        models = len(journal.events(events.NEW_MODEL))
        return models, len(journal.cohorts(round_=models))
    _, last = journal.last()
    rows = journal.cohorts(after=last - 1)
    following = rows[-1].round + 1 if rows else 0  # the next round if nothing was abandoned
    abandoned = journal.events(events.ABANDONED)
    # An abandoned round is repeated only if it was the newest, so only cohorts abandoned since the last request count.
    recent = [body for body in abandoned if body["asked"] == last + 1]
    round_ = int(recent[-1]["next"]) if recent else following
    return round_, sum(body["round"] == round_ for body in abandoned) if round_ < following else 0


def participations(journal: Journal) -> dict[str, int]:
    """Return how often each client has taken part so far, as the rules count it."""
    table, _ = journal.table()
    abandoned = {body["ticket"] for body in journal.events(events.ABANDONED)}
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
    for body in journal.events(events.JOINED):
        first = int(body["first"])
        referee.ledger.joined[first : first + int(body["count"])] = int(body["round"])
    abandoned = {body["ticket"] for body in journal.events(events.ABANDONED)}
    for row in journal.cohorts():
        if not len(row.clients):
            continue
        if row.ticket not in abandoned:
            referee.ledger.count_cohort(row.round, row.clients)
        blocks = [block for block in journal.reply_blocks(row.ticket) if not block.late]
        if row.told_at is not None and blocks:
            status = np.asarray(in_cohort_order(row.ticket, row.clients, blocks).status)
            # Failures count once per cohort, also if its reports came in parts.
            # A client that had not replied when its cohort was abandoned has not failed.
            answered = status != Status.MISSING if row.ticket in abandoned else np.ones(len(status), np.bool_)
            referee.ledger.count_replies(row.ticket, row.clients[answered], status[answered])
    return referee


def client_digests(table: ClientTable) -> dict[str, str]:
    """Return a digest of each kind of fact about the clients."""
    facts = {"number": str(table.n).encode()}
    if table.has_names:
        facts["names"] = json.dumps(table.names).encode()
    if Signal.SIZES in table.signals:
        facts["sizes"] = pack(table.sizes)
    if Signal.LABEL_PRODUCTS in table.signals:
        labels = table.labels
        parts = [getattr(labels, name) for name in labels.__dataclass_fields__]
        facts["labels"] = b"".join([type(labels).__name__.encode(), *(pack(np.asarray(part)) for part in parts)])
    return {name: hashlib.sha256(data).hexdigest() for name, data in facts.items()}


def check_same(
    journal: Journal,
    *,
    seed: int,
    clients: ClientTable,
    signals: Iterable[Signal] | None,
    audit: bool,
    asynchronous: bool,
) -> None:
    """Raise an error that says what differs if a journal belongs to a session that was started otherwise."""
    meta = journal.meta()
    # All differences at once: a host that passes the wrong file usually differs in several.
    differences = []
    if int(meta["seed"]) != seed:
        differences.append(f"its seed is {meta['seed']}, but {seed} was given")
    recorded = meta["signals"]
    passed = None if signals is None else sorted(s.name for s in signals)
    if recorded != passed:
        differences.append(f"its host supplies {_signal_list(recorded)}, but signals are {_signal_list(passed)}")
    if audit and not meta["audit"]:
        differences.append("it cannot be audited, but audit=True was given")
    if is_asynchronous(journal) != asynchronous:
        kind = "has rounds" if asynchronous else "is asynchronous"
        differences.append(f"it {kind}, but asynchronous={asynchronous} was given")
    differences += _other_clients(journal, meta, clients)
    if differences:
        raise JournalError(
            f"The journal {journal.path} belongs to another session: {'; '.join(differences)}.",
            hint="pass what it was started with, or use Session.open(path), which takes everything from the journal; "
            "for a new session choose another file",
        )


def _signal_list(signals: Iterable[str] | None) -> str:
    return "whatever the selector requires (signals=None)" if signals is None else ", ".join(signals) or "no signals"


def _other_clients(journal: Journal, meta: Mapping[str, Any], theirs: ClientTable) -> Iterator[str]:
    """Yield how the clients given differ from those that the session began with, and from those it has now."""
    ours, _ = journal.table()
    if client_digests(theirs) in (meta[CLIENT_DIGESTS], client_digests(ours)):
        return
    if journal.events(events.FORGOTTEN):
        yield from _other_names(journal, ours, theirs)
        return
    if ours.n != theirs.n:
        yield f"it has {ours.n} clients, but {theirs.n} were given"
        return
    for i, (one, other) in enumerate(zip(ours.names, theirs.names, strict=True)):
        if one != other:
            yield f"its client {i} is named {one!r}, but {other!r} was given"
            return
    if ours.signals != theirs.signals:
        recorded, given = (_signal_list(sorted(s.name for s in table.signals)) for table in (ours, theirs))
        yield f"its clients have {recorded}, but those given have {given}"
        return
    differing = ours.differing(theirs)
    if len(differing):
        more = f" and {len(differing) - 1} others" if len(differing) > 1 else ""
        yield f"sizes or labels of its client {ours.name(int(differing[0]))!r}{more} differ from those given"
    else:
        yield "its clients' labels have another form than those given"


def _other_names(journal: Journal, ours: ClientTable, theirs: ClientTable) -> Iterator[str]:
    """Yield clients that only one of two tables has; either may lack clients that were forgotten or joined later."""
    forgotten = {ours.name(int(body["client"])) for body in journal.events(events.FORGOTTEN)}
    first = min((int(body["first"]) for body in journal.events(events.JOINED)), default=ours.n)
    lacking = sorted(set(ours.names[:first]) - set(theirs.names) - forgotten)
    unknown = sorted(set(theirs.names) - set(ours.names))
    if lacking:
        yield f"it has the client {lacking[0]!r}, which was not given"
    if len(unknown) > len(forgotten):
        yield f"it lacks {len(unknown)} of the clients given, and only {len(forgotten)} were forgotten"

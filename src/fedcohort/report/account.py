"""The account of a run, from its journal alone: every round, every client, and what shadows would have done.

``fedcohort explain``, the report of a live run and the dashboard show the same account. Abandoned rounds are counted
separately, but their replies still count for the clients.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.audit.participation import Proof, prove_participation
from fedcohort.core.arrays import BoolArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Status
from fedcohort.core.selector_spec import described_name
from fedcohort.core.signals import Signal
from fedcohort.journal import CohortRow, Journal, ReplyRow
from fedcohort.journal.events import ABANDONED, CHANGED, FORGOTTEN, NEW_MODEL, PROPOSED, SELECTOR, SHADOW, WAITED
from fedcohort.journal.presence import planned_rounds, run_state
from fedcohort.report.render import sentences
from fedcohort.selectors.numerics.class_balance import qcid
from fedcohort.session.explain import reasons_of
from fedcohort.session.resume import is_asynchronous
from fedcohort.simulate.store.results import open_journal, read_runs

_LATE = 20  # this many of the newest cohorts are read again, because late answers may still arrive


@dataclass(frozen=True)
class _RoundSummary:
    """One cohort.

    Attributes
    ----------
    valid : how many clients returned a valid model
    seconds : from choosing the cohort to closing it; None while it trains
    abandoned : why its round was not counted, or None
    failures : status and reason of each client without a valid model, by name
    excluded : how many clients the rules excluded, by reason
    """

    round: int
    ticket: int
    candidates: int
    clients: tuple[str, ...]
    valid: int
    seconds: float | None
    abandoned: str | None
    failures: Mapping[str, str]
    excluded: Mapping[str, int]


@dataclass(frozen=True)
class _ClientSummary:
    """One client over all rounds.

    Attributes
    ----------
    member : whether it belongs to the federation now
    picked : how often it was in a cohort
    statuses : how often it ended with each status
    last : the last round it was in, or None
    seconds : its mean duration, or None
    reason : why it last returned no valid model; empty if it never failed
    """

    name: str
    member: bool
    picked: int
    statuses: Mapping[str, int]
    last: int | None
    seconds: float | None
    reason: str


@dataclass(frozen=True)
class _ShadowSummary:
    """One shadow selector over all rounds in which it named picks.

    Attributes
    ----------
    rounds : number of rounds in which it named picks
    silent : number of rounds in which it could not; ``note`` is the last reason
    dropped : why it was removed, or None
    same : mean share of its picks that were picked
    chance : what that share would be by chance
    qcid : mean class imbalance of the cohorts (``as_it_was``) and of its picks (``with_it``), if labels are known
    seconds : mean expected duration of the cohorts and of its picks, if any is known
    """

    name: str
    rounds: int
    silent: int
    note: str
    dropped: str | None
    same: float | None
    chance: float | None
    qcid: Mapping[str, float] | None
    seconds: Mapping[str, float] | None

    def sentence(self) -> str:
        """Return the summary in words."""
        return sentences("shadow.txt", s=self)[0]


@dataclass(frozen=True)
class Account:
    """A run: its state, rounds, clients and shadows."""

    name: str
    selector: str
    changes: tuple[str, ...]
    seed: int
    state: str
    reason: str
    planned: int | None
    rounds: tuple[_RoundSummary, ...]
    clients: tuple[_ClientSummary, ...]
    shadows: tuple[_ShadowSummary, ...]
    metrics: Mapping[int, Mapping[str, float]]
    proof: Proof | None
    models: int | None = None  # global models so far, if clients answer one by one
    waits: Counter[str] = field(default_factory=Counter)  # how often a place stayed free although this client was
    left_out: tuple[int, int] | None = None  # clients that the newest automatic deadline leaves out, and those asked

    @property
    def done(self) -> int:
        """Number of rounds that were closed and counted; without rounds, the number of global models."""
        if self.models is not None:
            return self.models
        # An empty cohort trained nothing, so its round does not count.
        return sum(r.abandoned is None and r.seconds is not None and bool(r.clients) for r in self.rounds)

    @property
    def training(self) -> int:
        """Number of clients that have not replied yet."""
        return sum(
            len(r.clients) - r.valid - len(r.failures) for r in self.rounds if r.seconds is None and r.abandoned is None
        )

    @property
    def never(self) -> tuple[str, ...]:
        """Members that were never picked, by name."""
        return tuple(client.name for client in self.clients if client.member and not client.picked)

    def failures(self) -> Counter[str]:
        """Return how often clients ended with each status other than OK."""
        counts: Counter[str] = Counter()
        for client in self.clients:
            counts.update(client.statuses)
        counts.pop(Status.OK.name, None)
        return counts

    def sentences(self) -> list[str]:
        """Return sentences on the run's progress and end, and on clients that failed or were never picked."""
        return sentences("account.txt", run=self)

    def to_dict(self) -> dict[str, Any]:
        """Return the account for machines."""
        rules = None if self.proof is None else self.proof.rules
        return {
            "journal": self.name,
            "selector": self.selector,
            "changes": self.changes,
            "seed": self.seed,
            "state": self.state,
            "reason": self.reason,
            "planned": self.planned,
            "done": self.done,
            "never_picked": self.never,
            "failures": self.failures(),
            "waits": self.waits,
            "left_out": self.left_out,
            "rounds": [vars(r) for r in self.rounds],
            "clients": [{("client" if k == "name" else k): v for k, v in vars(c).items()} for c in self.clients],
            "shadows": [vars(s) for s in self.shadows],
            "rules": None if rules is None else rules.to_dict(),
            "rules_held": None if rules is None or self.proof is None else self.proof.holds,
        }


class JournalHistory:
    """The cohorts of a journal and what belongs to each; after the first call only new and open ones are read."""

    def __init__(self) -> None:
        self._forgotten = 0
        self._clear()

    def _clear(self) -> None:
        self.cohorts: dict[int, CohortRow] = {}
        self.replies: dict[int, list[ReplyRow]] = {}
        self.excluded: dict[int, dict[str, int]] = {}
        self.shadows: dict[int, dict[str, tuple[IntArray, str | None]]] = {}
        self._settled = -1  # up to this ticket, every cohort is closed and no late answer is expected
        self._newest = (-1, -1, -1)

    @property
    def in_order(self) -> list[CohortRow]:
        """All cohorts, oldest first."""
        return [self.cohorts[ticket] for ticket in sorted(self.cohorts)]

    def read(self, journal: Journal) -> bool:
        """Read what is new, and return whether there was anything new."""
        forgotten, newest = len(journal.events(FORGOTTEN)), journal.newest()
        if forgotten != self._forgotten:  # forgotten clients must not be shown again
            self._clear()
            self._forgotten = forgotten
        # A closed cohort is read again while late answers may still be added to it.
        fresh = journal.cohorts(after=self._settled)
        closed = any(row.told_at != self.cohorts[row.ticket].told_at for row in fresh if row.ticket in self.cohorts)
        if newest == self._newest and not closed:
            return False
        # Exclusions are one query a round, so they are read only where there may be some.
        ruled = bool(journal.meta().get("rules") or journal.events(CHANGED))
        for row in fresh:
            ticket = row.ticket
            self.replies[ticket] = journal.replies(ticket)
            if ticket not in self.cohorts:
                self.excluded[ticket] = dict(Counter(journal.exclusions(ticket).values())) if ruled else {}
                scores = journal.scores(ticket)
                # Scores without a name are the selector's own.
                self.shadows[ticket] = {name: (picks, note) for name, (picks, _, note) in scores.items() if name}
            self.cohorts[ticket] = row
        open_tickets = [t for t, row in self.cohorts.items() if row.told_at is None]
        last = max(self.cohorts, default=-1)
        self._settled = min([last - _LATE, *(t - 1 for t in open_tickets)])
        self._newest = newest
        return True

    def duration(self, reply: ReplyRow) -> float:
        """Return the seconds a client took: as the host reported, or else until its reply arrived."""
        # The host knows how long training took; the journal only when the reply arrived.
        reported = reply.metrics.get("duration")
        return reported if isinstance(reported, float) else reply.at - self.cohorts[reply.ticket].asked_at


def read_account(path: str | Path) -> Account:
    """Return the account of the run with the journal ``path``."""
    file = Path(path)
    with closing(open_journal(file)) as journal:
        found = account(journal, file.stem)
    if file.parent.name != "journal" or not (file.parent.parent / "runs.json").is_file():
        return found
    # A journal does not say how a simulated run ended; its experiment does.
    ends = {run.id: run for run in read_runs(file.parent.parent)}
    run = ends.get(file.stem)
    return found if run is None else replace(found, state=run.state, reason=run.reason)


def account(journal: Journal, name: str, past: JournalHistory | None = None) -> Account:
    """Return the account of a run; ``past`` holds what was read from its journal before."""
    past = past or JournalHistory()
    past.read(journal)
    table, active = journal.table()
    abandoned = {int(body["ticket"]): str(body["reason"]) for body in journal.events(ABANDONED)}
    reasons = reasons_of(journal)
    rounds = []
    for row in past.in_order:
        replies, whys = past.replies[row.ticket], reasons.get(row.ticket, {})
        failures = {table.name(r.client): Status(r.status).name for r in replies if r.status != Status.OK}
        rounds.append(
            _RoundSummary(
                round=row.round,
                ticket=row.ticket,
                candidates=row.n_candidates,
                clients=table.names_of(row.clients),
                valid=sum(r.status == Status.OK for r in replies),
                seconds=None if row.told_at is None else row.told_at - row.asked_at,
                abandoned=abandoned.get(row.ticket),
                failures={who: f"{why}: {whys[who]}" if who in whys else why for who, why in failures.items()},
                excluded=past.excluded[row.ticket],
            )
        )
    clients = _clients(table, active, rounds, past)
    meta, changes, run = journal.meta(), journal.events(SELECTOR), run_state(journal)
    newest = journal.events(PROPOSED)[-1:]  # automatic deadlines; one says if it leaves out more than a fifth
    return Account(
        name=name,
        selector=described_name(changes[-1]["to"] if changes else meta.get("selector")),
        changes=tuple(
            f"round {c['round']}: from {described_name(c['from'])} to {described_name(c['to'])}" for c in changes
        ),
        seed=int(meta.get("seed", 0)),
        state=run.state,
        reason=run.why,
        planned=planned_rounds(journal),
        rounds=tuple(rounds),
        clients=clients,
        shadows=_shadows(journal, table, past, clients),
        metrics=journal.metrics(),
        proof=prove_participation(journal) if meta.get("rules") or journal.events(CHANGED) else None,
        models=len(journal.events(NEW_MODEL)) if is_asynchronous(journal) else None,
        left_out=(newest[0]["left_out"], newest[0]["asked"]) if newest and "left_out" in newest[0] else None,
        waits=Counter(client for body in journal.events(WAITED) for client in body["clients"]),
    )


def _clients(
    table: ClientTable, active: BoolArray, rounds: Sequence[_RoundSummary], past: JournalHistory
) -> tuple[_ClientSummary, ...]:
    picked, last = np.zeros(table.n, np.int64), np.full(table.n, -1, np.int64)
    statuses: list[Counter[str]] = [Counter() for _ in range(table.n)]
    seconds: list[list[float]] = [[] for _ in range(table.n)]
    reason = [""] * table.n
    for row, summary in zip(past.in_order, rounds, strict=True):
        picked[row.clients] += 1
        last[row.clients] = row.round
        for reply in past.replies[row.ticket]:
            statuses[reply.client][Status(reply.status).name] += 1
            took = past.duration(reply)
            if reply.status != Status.OK:
                reason[reply.client] = f"round {row.round}: {summary.failures[table.name(reply.client)]}"
            elif math.isfinite(took):
                seconds[reply.client].append(took)
    return tuple(
        _ClientSummary(
            name=table.name(c),
            member=bool(active[c]),
            picked=int(picked[c]),
            statuses=dict(statuses[c]),
            last=int(last[c]) if last[c] >= 0 else None,
            seconds=sum(seconds[c]) / len(seconds[c]) if seconds[c] else None,
            reason=reason[c],
        )
        for c in range(table.n)
    )


def _shadows(
    journal: Journal, table: ClientTable, past: JournalHistory, clients: Sequence[_ClientSummary]
) -> tuple[_ShadowSummary, ...]:
    """Return what each shadow selector would have done, over all rounds.

    The expected duration of a cohort is that of its slowest client, by the clients' mean durations. A client that never
    answered counts with the median of the others.
    """
    dropped = {}  # why each was dropped, or None if it was added later
    for event in journal.events(SHADOW):
        dropped[str(event["name"])] = None if event["what"] == "added" else str(event.get("reason", event["what"]))
    # Shadows that have not named picks are listed too.
    named: dict[str, list[tuple[CohortRow, IntArray, str | None]]] = {}
    for row in past.in_order:
        for name, (picks, note) in past.shadows[row.ticket].items() if len(row.clients) else ():
            named.setdefault(name, []).append((row, picks, note))
    seconds = np.array([math.nan if c.seconds is None else c.seconds for c in clients])
    usual = np.where(np.isnan(seconds), np.median(seconds[~np.isnan(seconds)] if any(seconds > 0) else 0), seconds)
    sizes = table.sizes if Signal.SIZES in table.signals else None
    # Products of labels without sizes say nothing about balance.
    known = Signal.LABEL_COUNTS in table.signals or (Signal.LABEL_PRODUCTS in table.signals and sizes is not None)
    summaries = []
    for name in dict.fromkeys((*named, *(journal.meta().get("shadows") or {}), *dropped)):
        all_rounds = named.get(name, [])
        rounds = [(row, picks) for row, picks, _ in all_rounds if len(picks)]
        pairs = [(row.clients, picks) for row, picks in rounds]
        summaries.append(
            _ShadowSummary(
                name=name,
                rounds=len(rounds),
                silent=len(all_rounds) - len(rounds),
                note=next((note for _, picks, note in reversed(all_rounds) if note and not len(picks)), ""),
                dropped=dropped.get(name),
                same=_mean(np.isin(picks, cohort).mean() for cohort, picks in pairs),
                # If k of n clients are picked, any client is among them with probability k / n.
                chance=_mean(len(row.clients) / max(1, row.n_candidates) for row, _ in rounds),
                qcid=_compare(pairs if known else (), lambda group: qcid(table.labels, group, sizes)),
                seconds=_compare(pairs if any(seconds > 0) else (), lambda group: usual[group].max()),
            )
        )
    return tuple(summaries)


def _compare(
    pairs: Sequence[tuple[IntArray, IntArray]], measure: Callable[[IntArray], float]
) -> dict[str, float] | None:
    """Return the mean of a measure over the cohorts, and over the picks that a shadow named in the same rounds."""
    if not pairs:
        return None
    cohorts, picks = zip(*pairs, strict=True)
    return {
        "as_it_was": statistics.fmean(map(measure, cohorts)),
        "with_it": statistics.fmean(map(measure, picks)),
    }


def _mean(values: Iterable[float]) -> float | None:
    listed = [float(value) for value in values]
    return statistics.fmean(listed) if listed else None

"""The account of a run, from its journal alone: every round, every client, and what shadows would have done.

``fedcohort explain``, the report of a live run and the dashboard show the same account. Abandoned rounds are counted
separately, but their replies still count for the clients.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.audit.participation import Proof, prove_participation
from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Status
from fedcohort.core.selector_spec import described_name
from fedcohort.core.signals import Signal
from fedcohort.journal import CohortRow, Journal, ReplyRow
from fedcohort.journal.events import ABANDONED, CHANGED, FORGOTTEN, NEW_MODEL, PROPOSED, SELECTOR, SHADOW, WAITED
from fedcohort.journal.presence import planned_rounds, run_state
from fedcohort.selectors.numerics.class_balance import qcid
from fedcohort.session.explain import reasons_of
from fedcohort.session.resume import is_asynchronous
from fedcohort.simulate.leaderboard.words import quantity
from fedcohort.simulate.store.results import open_journal, read_runs

_LATE = 20  # this many of the newest cohorts are read again, because late answers may still arrive
_ALL_LABELS = frozenset({Signal.LABEL_COUNTS, Signal.LABEL_PRODUCTS})


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
    balance : mean QCID of the cohorts and of its picks, or None if labels are not known
    seconds : mean expected duration of the cohorts and of its picks, or None if no duration is known
    """

    name: str
    rounds: int
    silent: int
    note: str
    dropped: str | None
    same: float
    chance: float
    balance: tuple[float, float] | None
    seconds: tuple[float, float] | None

    def to_dict(self) -> dict[str, Any]:
        """Return the summary for machines; shares are None if the shadow named no picks."""
        return {
            "name": self.name,
            "rounds": self.rounds,
            "silent": self.silent,
            "note": self.note,
            "dropped": self.dropped,
            "same": self.same if self.rounds else None,
            "chance": self.chance if self.rounds else None,
            "qcid": None if self.balance is None else {"as_it_was": self.balance[0], "with_it": self.balance[1]},
            "seconds": None if self.seconds is None else {"as_it_was": self.seconds[0], "with_it": self.seconds[1]},
        }

    def sentence(self) -> str:
        """Return the summary in words."""
        removed = f" It was removed: {self.dropped}." if self.dropped else ""
        if not self.rounds:
            return f"{self.name} has not picked any clients ({self.note or 'nothing was chosen yet'}).{removed}"
        text = (
            f"{self.name}: over {quantity(self.rounds, 'round')}, {self.same:.0%} of its picks were actually picked "
            f"({self.chance:.0%} by chance)"
        )
        if self.balance is not None:
            text += f"; class imbalance (QCID) {_short(self.balance[1])} instead of {_short(self.balance[0])}"
        if self.seconds is not None:
            text += f"; by its clients' mean durations, a round would take {self.seconds[1]:.3g} s instead of "
            text += f"{self.seconds[0]:.3g} s"
        if self.silent:
            text += f"; in {quantity(self.silent, 'round')}, it picked no clients ({self.note})"
        return f"{text}.{removed}"


def _short(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}" if value else "0"


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
        return sum(r.abandoned is None and r.seconds is not None and bool(r.clients) for r in self.rounds)

    @property
    def never(self) -> tuple[str, ...]:
        """Members that were never picked, by name."""
        return tuple(client.name for client in self.clients if client.member and not client.picked)

    def failures(self) -> Counter[str]:
        """Return how often clients ended with each status other than OK."""
        counts: Counter[str] = Counter()
        for client in self.clients:
            counts.update({status: n for status, n in client.statuses.items() if status != Status.OK.name})
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Return the account for machines."""
        return {
            "journal": self.name,
            "selector": self.selector,
            "changes": list(self.changes),
            "seed": self.seed,
            "state": self.state,
            "reason": self.reason,
            "planned": self.planned,
            "done": self.done,
            "never_picked": list(self.never),
            "failures": dict(self.failures()),
            "waits": dict(self.waits),
            "left_out": self.left_out,
            "rounds": [{**vars(r), "clients": list(r.clients)} for r in self.rounds],
            "clients": [
                {"client": c.name, **{key: value for key, value in vars(c).items() if key != "name"}}
                for c in self.clients
            ],
            "shadows": [s.to_dict() for s in self.shadows],
            "rules": None if self.proof is None or self.proof.rules is None else self.proof.rules.to_dict(),
            "rules_held": None if self.proof is None or self.proof.rules is None else self.proof.holds,
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
        fresh = journal.cohorts(after=self._settled)
        closed = any(row.told_at != self.cohorts[row.ticket].told_at for row in fresh if row.ticket in self.cohorts)
        if newest == self._newest and not closed:
            return False
        ruled = bool(journal.meta().get("rules") or journal.events(CHANGED))
        for row in fresh:
            ticket = row.ticket
            self.replies[ticket] = journal.replies(ticket)
            if ticket not in self.cohorts:
                self.excluded[ticket] = dict(Counter(journal.exclusions(ticket).values())) if ruled else {}
                scores = journal.scores(ticket)
                self.shadows[ticket] = {name: (picks, note) for name, (picks, _, note) in scores.items() if name}
            self.cohorts[ticket] = row
        open_tickets = [t for t, row in self.cohorts.items() if row.told_at is None]
        last = max(self.cohorts, default=-1)
        self._settled = min([last - _LATE, *(t - 1 for t in open_tickets)])
        self._newest = newest
        return True

    def duration(self, reply: ReplyRow) -> float:
        """Return the seconds a client took: as the host reported, or else until its reply arrived."""
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
    rounds = [_round(row, table, past, abandoned.get(row.ticket), reasons.get(row.ticket, {})) for row in past.in_order]
    means = _mean_durations(table.n, past)
    meta = journal.meta()
    changes = journal.events(SELECTOR)
    run = run_state(journal)
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
        clients=_clients(table, active.tolist(), rounds, past, means),
        shadows=_shadows(journal, table, past, means),
        metrics=journal.metrics(),
        proof=prove_participation(journal) if meta.get("rules") or journal.events(CHANGED) else None,
        models=len(journal.events(NEW_MODEL)) if is_asynchronous(journal) else None,
        left_out=_left_out(journal),
        waits=Counter(client for body in journal.events(WAITED) for client in body["clients"]),
    )


def _left_out(journal: Journal) -> tuple[int, int] | None:
    """Return how many of the clients asked the newest automatic deadline leaves out, if it is more than a fifth."""
    newest = journal.events(PROPOSED)[-1:]
    return (newest[0]["left_out"], newest[0]["asked"]) if newest and "left_out" in newest[0] else None


def _round(
    row: CohortRow, table: ClientTable, past: JournalHistory, abandoned: str | None, reasons: Mapping[str, str]
) -> _RoundSummary:
    replies = past.replies[row.ticket]
    return _RoundSummary(
        round=row.round,
        ticket=row.ticket,
        candidates=row.n_candidates,
        clients=table.names_of(row.clients),
        valid=sum(r.status == Status.OK for r in replies),
        seconds=None if row.told_at is None else row.told_at - row.asked_at,
        abandoned=abandoned,
        failures=_failures(table, replies, reasons),
        excluded=past.excluded[row.ticket],
    )


def _failures(table: ClientTable, replies: Iterable[ReplyRow], reasons: Mapping[str, str]) -> dict[str, str]:
    failures = {}
    for reply in replies:
        if reply.status != Status.OK:
            name = table.name(reply.client)
            failures[name] = Status(reply.status).name + (f": {reasons[name]}" if name in reasons else "")
    return failures


def _mean_durations(n: int, past: JournalHistory) -> FloatArray:
    """(N,) mean seconds until each client returned a valid model; NaN if it never did."""
    total, count = np.zeros(n), np.zeros(n)
    for row in past.in_order:
        for reply in past.replies[row.ticket]:
            seconds = past.duration(reply)
            if reply.status == Status.OK and math.isfinite(seconds):
                total[reply.client] += seconds
                count[reply.client] += 1
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _clients(
    table: ClientTable,
    active: list[bool],
    rounds: Sequence[_RoundSummary],
    past: JournalHistory,
    means: FloatArray,
) -> tuple[_ClientSummary, ...]:
    picked, last = np.zeros(table.n, np.int64), np.full(table.n, -1, np.int64)
    statuses: list[Counter[str]] = [Counter() for _ in range(table.n)]
    reason = [""] * table.n
    for row, summary in zip(past.in_order, rounds, strict=True):
        picked[row.clients] += 1
        last[row.clients] = row.round
        for reply in past.replies[row.ticket]:
            statuses[reply.client][Status(reply.status).name] += 1
            if reply.status != Status.OK:
                reason[reply.client] = f"round {row.round}: {summary.failures[table.name(reply.client)]}"
    return tuple(
        _ClientSummary(
            name=table.name(c),
            member=active[c],
            picked=int(picked[c]),
            statuses=dict(statuses[c]),
            last=int(last[c]) if last[c] >= 0 else None,
            seconds=float(means[c]) if math.isfinite(means[c]) else None,
            reason=reason[c],
        )
        for c in range(table.n)
    )


@dataclass
class _Tally:
    """One shadow's rounds."""

    same: list[float] = field(default_factory=list)
    chance: list[float] = field(default_factory=list)
    cohorts: list[IntArray] = field(default_factory=list)
    picks: list[IntArray] = field(default_factory=list)
    silent: int = 0
    note: str = ""

    def add(self, row: CohortRow, picks: IntArray, note: str | None) -> None:
        """Count one round."""
        if not len(picks):
            self.silent, self.note = self.silent + 1, note or self.note
            return
        self.same.append(float(np.isin(picks, row.clients).mean()))
        # If k of n clients are picked, any client is among them with probability k / n.
        self.chance.append(len(row.clients) / max(1, row.n_candidates))
        self.cohorts.append(row.clients)
        self.picks.append(picks)


def _shadows(
    journal: Journal, table: ClientTable, past: JournalHistory, means: FloatArray
) -> tuple[_ShadowSummary, ...]:
    """Return what each shadow selector would have done, over all rounds.

    The expected duration of a cohort is that of its slowest client, by the clients' mean durations (``means``, (N,)). A
    client that never answered counts with the median of the others.
    """
    tallies: dict[str, _Tally] = {}
    for row in past.in_order:
        for name, (picks, note) in past.shadows[row.ticket].items() if len(row.clients) else ():
            tallies.setdefault(name, _Tally()).add(row, picks, note)
    # Shadows that have not named picks are listed too.
    dropped = _dropped(journal)
    for name in [*(journal.meta().get("shadows") or {}), *dropped]:
        tallies.setdefault(name, _Tally())
    known = means[np.isfinite(means)]
    usual = np.where(np.isfinite(means), means, np.median(known)) if len(known) else None
    return tuple(
        _ShadowSummary(
            name=name,
            rounds=len(tally.same),
            silent=tally.silent,
            note=tally.note,
            dropped=dropped.get(name),
            same=statistics.fmean(tally.same) if tally.same else math.nan,
            chance=statistics.fmean(tally.chance) if tally.chance else math.nan,
            balance=_balance(table, tally),
            seconds=None if usual is None else _expected_seconds(usual, tally),
        )
        for name, tally in tallies.items()
    )


def _dropped(journal: Journal) -> dict[str, str | None]:
    """Return why each shadow was dropped, or None if it was added later."""
    reasons = {}
    for event in journal.events(SHADOW):
        reasons[str(event["name"])] = None if event["what"] == "added" else str(event.get("reason", event["what"]))
    return reasons


def _expected_seconds(usual: FloatArray, tally: _Tally) -> tuple[float, float] | None:
    if not tally.cohorts:
        return None
    return _mean(usual[group].max() for group in tally.cohorts), _mean(usual[group].max() for group in tally.picks)


def _balance(table: ClientTable, tally: _Tally) -> tuple[float, float] | None:
    if not tally.cohorts or not table.signals & _ALL_LABELS:
        return None
    sizes = table.sizes if Signal.SIZES in table.signals else None
    try:
        return (
            _mean(qcid(table.labels, group, sizes) for group in tally.cohorts),
            _mean(qcid(table.labels, group, sizes) for group in tally.picks),
        )
    except InputError:  # products of labels without sizes say nothing about balance
        return None


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(float(v) for v in values)

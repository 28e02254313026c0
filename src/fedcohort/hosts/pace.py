r"""The deadline and the spares of the next round, from how long clients have taken so far.

A round asks :math:`n = k + s` clients and closes at the k-th sound model, when everybody has answered or failed, or at
the deadline D. If clients answer independently, with the share :math:`F(t)` that has answered and the share
:math:`G(t)` that has failed after t seconds, then with :math:`A(t) \sim Bin(n, F(t))`

.. math:: E[T] = \int_0^D 1 - P(A(t) \ge k) - \sum_{a<k} \binom{n}{a} F(t)^a G(t)^{n-a} dt, \qquad
          E[M] = E[\min(A(D), k)].

A round that misses k counts with the models it has, and the next one asks others. So many models take
:math:`(E[T] + p)/E[M]` seconds each, where p is the usual pause between two rounds, and the pair (D, s) for which that
is least is proposed. Models of rounds that bring too few count as none in E[M]. A round that must have a number of
models goes on after D until it has them; :func:`expected_rounds` counts that time too.

F and G are Aalen-Johansen estimates: a client that has not answered yet is censored. A late answer is seen when it
comes, so a deadline hides slow clients only for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln, xlogy

from fedcohort.core.arrays import BoolArray, FloatArray
from fedcohort.journal.events import TIMES
from fedcohort.session.session import Session

_MOST = 1000  # clients, about, after which no older ones are looked at
_DIFFERENT = 3.0  # standard deviations at which older cohorts are taken to be of another time
_POINTS = 100  # deadlines that are compared
_MARGIN = 1.02  # a deadline at the very time of an answer would miss the next one of the same length
_COHORTS = 1000  # that are kept
_CHOICES = 6  # numbers of spares that are compared
_FIRST = 2.0  # before anything is known, how many times the newest answer's time a round goes on without another


class Proposal(NamedTuple):
    """What a round should do.

    Attributes
    ----------
    deadline : float or None
        Seconds; None before anything is known.
    """

    deadline: float | None
    spares: int


class Incidence(NamedTuple):
    """Shares of clients by time; the arrays are (m,)."""

    times: FloatArray  # ascending
    answered: FloatArray  # share that has answered by then
    failed: FloatArray


def incidence(seconds: FloatArray, answered: BoolArray, failed: BoolArray) -> Incidence:
    """Return the Aalen-Johansen estimate of how many answer and how many fail by each time.

    Parameters
    ----------
    seconds : (n,) float array
        When each client answered or failed; for the others, until when it is known that they had not.
    answered, failed : (n,) bool array

    Examples
    --------
    >>> found = incidence(np.array([1.0, 2.0, 3.0]), np.array([True, False, True]), np.zeros(3, bool))
    >>> found.times, found.answered.round(2)
    (array([1., 3.]), array([0.33, 1.  ]))
    """
    order = np.argsort(seconds, kind="stable")
    times, first = np.unique(seconds[order], return_index=True)
    # Who is still at work just before each time; clients of one time leave together.
    at_risk = len(seconds) - first
    answers = np.add.reduceat(answered[order].astype(np.float64), first) / at_risk
    failures = np.add.reduceat(failed[order].astype(np.float64), first) / at_risk
    # The share that has neither answered nor failed (Kaplan-Meier), on which both kinds of events build.
    before = np.concatenate([[1.0], np.cumprod(1.0 - answers - failures)[:-1]])
    known = answers + failures > 0
    return Incidence(times[known], np.cumsum(before * answers)[known], np.cumsum(before * failures)[known])


def expected_rounds(found: Incidence, n: int, enough: int, least: int, needed: int) -> tuple[FloatArray, FloatArray]:
    """Return how long rounds last on average and how many models they bring, with each of the times as deadline.

    Parameters
    ----------
    n : int
        Clients that are asked.
    enough : int
        Models that close the round.
    least : int
        With fewer models a round is worth nothing.
    needed : int
        With fewer models it goes on after the deadline.
    """
    count = np.arange(n + 1)[:, None]  # (n + 1, 1)
    ways = gammaln(n + 1) - gammaln(count + 1) - gammaln(n - count + 1)
    yes, no = found.answered, np.clip(1.0 - found.answered, 0.0, None)
    share = np.exp(ways + xlogy(count, yes) + xlogy(n - count, no))  # (n + 1, m) of so many answers
    # Of so many answers, while nobody is at work any more.
    over = np.exp(ways + xlogy(count, yes) + xlogy(n - count, np.clip(found.failed, 0.0, None)))
    in_time = np.clip((share - over)[:enough].sum(0), 0.0, 1.0)  # that a round is still open, before the deadline
    after = np.clip((share - over)[:needed].sum(0), 0.0, 1.0)  # and after it
    steps = np.diff(found.times)
    seconds = np.cumsum(np.concatenate([found.times[:1], steps * in_time[:-1]]))
    seconds[:-1] += np.cumsum((steps * after[:-1])[::-1])[::-1]
    worth = np.where(count >= max(least, needed), np.minimum(count, enough), 0)
    reached = share[needed:].sum(0)
    later = np.clip(reached[-1:] - reached, 0.0, 1.0)
    return seconds, (worth * share).sum(0) + (needed if needed >= least else 0) * later


def log_rank(seconds: FloatArray, answered: BoolArray, others: FloatArray, theirs: BoolArray) -> float:
    """Return by how many standard deviations one group of clients answered more often than it would among the others.

    >>> log_rank(np.arange(1.0, 9.0), np.ones(8, bool), np.arange(11.0, 19.0), np.ones(8, bool)) > 3
    True
    """
    times, count = np.unique(np.concatenate([seconds[answered], others[theirs]]), return_counts=True)
    own = len(seconds) - np.searchsorted(np.sort(seconds), times)
    both = own + len(others) - np.searchsorted(np.sort(others), times)
    share = own / both
    spread = np.sqrt((count * share * (1 - share) * (both - count) / np.maximum(both - 1, 1)).sum())
    return float((answered.sum() - (count * share).sum()) / spread) if spread > 0 else 0.0


def first_deadline(arrived: FloatArray, least: int) -> float | None:
    """Return the deadline of a round of which nothing is known but its own sound answers: a long pause ends it.

    A round goes on until twice the time of the newest answer; None before there are ``least``.

    >>> first_deadline(np.array([1.0, 1.5, 40.0]), 1)
    3.0
    """
    counted = arrived[max(least, 1) - 1 :]
    if not len(counted):
        return None
    pauses = np.flatnonzero(counted[1:] > _FIRST * counted[:-1])
    return float(_FIRST * counted[pauses[0] if len(pauses) else -1])


@dataclass
class _Times:
    """How long the clients of one cohort took."""

    ticket: int
    begun: float
    closed: float
    seconds: FloatArray  # (k,) when each answered or failed; infinity: not yet
    failed: BoolArray  # (k,)
    until: float = np.inf  # after so many seconds nothing can come any more, because the server was restarted


class Pace:
    """How long the clients of a session have taken, and what follows for the next round.

    Everything it knows is on record: after a restart, :meth:`of` makes the same proposals. Times are seconds of any
    clock that goes on while rounds do.

    Examples
    --------
    >>> pace = Pace()
    >>> pace.propose(now=0.0, size=2, spares=2, least=1)  # nothing is known
    Proposal(deadline=None, spares=2)
    >>> for ticket in range(5):
    ...     pace.observe(ticket, 0.0, 1.1, np.array([1.0, 1.1, 1.2, 60.0]), np.zeros(4, bool))
    >>> pace.propose(now=100.0, size=2, spares=2, least=1)
    Proposal(deadline=1.224, spares=2)
    """

    def __init__(self) -> None:
        self._offset = 0.0  # from a host's clock to the one that goes on over restarts
        # More than any proposal looks at, and always as many, so that a restart changes nothing.
        self._cohorts: deque[_Times] = deque(maxlen=_COHORTS)

    @classmethod
    def of(cls, session: Session, now: float | None = None) -> Pace:
        """Read what is on record.

        Parameters
        ----------
        now : float, optional
            The time of a clock that began anew with this process: nobody who was at work before will answer. Default:
            the clock goes on, as in a simulation.
        """
        pace = cls()
        for body in session.journal.events(TIMES):
            seconds = np.array([np.inf if found is None else found for found in body["seconds"]], np.float64)
            failed = np.isin(np.arange(len(seconds)), body["failed"])
            if "begun" in body:
                pace.observe(body["ticket"], body["begun"], body["closed"], seconds, failed)
            else:
                pace.correct(body["ticket"], body["places"], seconds, failed)
        if now is not None:
            last = max((cohort.closed for cohort in pace._cohorts), default=0.0)
            pace._offset = last - now
            for cohort in pace._cohorts:
                cohort.until = last - cohort.begun
        return pace

    def time(self, now: float) -> float:
        """Return the time, which continues over restarts; ``now`` is the host's."""
        return now + self._offset

    def observe(self, ticket: int, begun: float, closed: float, seconds: FloatArray, failed: BoolArray) -> None:
        """Take what is known of a cohort.

        Parameters
        ----------
        begun, closed : float
            When its round began, and when it was closed.
        seconds : (k,) float array
            When each client answered or failed; infinity for one that has not.
        failed : (k,) bool array
            Who returned no model.
        """
        # Without the noise of subtracting times, so that every host finds the same ties.
        self._cohorts.append(_Times(ticket, begun, closed, np.round(seconds, 9), failed.copy()))

    def correct(self, ticket: int, places: Sequence[int], seconds: FloatArray, failed: BoolArray) -> None:
        """Take late answers of a cohort's clients at ``places``."""
        for cohort in self._cohorts:
            if cohort.ticket == ticket:
                cohort.seconds[places], cohort.failed[places] = seconds, failed

    def propose(self, now: float, size: int, spares: int, least: int, needed: int = 0) -> Proposal:
        """Return the deadline and the spares of a round that begins now.

        Parameters
        ----------
        size : int
            Models it needs.
        spares : int
            Clients that it may ask besides.
        least : int
            With fewer models it is worth nothing.
        needed : int
            With fewer models it goes on after the deadline.
        """
        recent = self._alike(now)
        found = _incidence_of(recent, now)
        best, cost = Proposal(None, spares), np.inf
        pauses = [after.begun - before.closed for before, after in pairwise(recent)]
        pause = max(float(np.median(pauses)), 0.0) if pauses else 0.0
        for more in np.unique(np.linspace(0, spares, min(spares + 1, _CHOICES)).round().astype(np.int64)).tolist():
            lasts, models = expected_rounds(found, size + more, size, least, needed)
            # Seconds for each model that counts; infinite where a deadline brings none.
            each = np.full(len(models), np.inf)
            np.divide(lasts + pause, models, out=each, where=models > 0)
            at = int(np.argmin(each)) if len(each) else 0
            if len(each) and each[at] < cost:
                best, cost = Proposal(round(float(found.times[at]) * _MARGIN, 9), more), float(each[at])
        return best

    def _alike(self, now: float) -> list[_Times]:
        """Return the newest cohorts, as far back as clients took alike."""
        cohorts = list(self._cohorts)
        begin = max(len(cohorts) - 1, 0)
        while begin > 0 and _clients(cohorts[begin:]) < _MOST:
            # As many older cohorts again: a change is found within a factor of two of when it happened.
            before = max(2 * begin - len(cohorts), 0)
            if abs(log_rank(*_answers(cohorts[begin:], now), *_answers(cohorts[before:begin], now))) > _DIFFERENT:
                break
            begin = before
        return cohorts[begin:]


def _clients(cohorts: Sequence[_Times]) -> int:
    return sum(len(cohort.seconds) for cohort in cohorts)


def _observations(cohorts: Sequence[_Times], now: float) -> tuple[FloatArray, BoolArray, BoolArray]:
    """Return for each client when it answered or failed or was last seen at work, and whether it did either."""
    seconds = np.concatenate([cohort.seconds for cohort in cohorts])
    failed = np.concatenate([cohort.failed for cohort in cohorts])
    so_far = np.repeat([min(now - c.begun, c.until) for c in cohorts], [len(c.seconds) for c in cohorts])
    known = seconds <= so_far + 1e-9 * (1.0 + abs(now))  # the answer that closed a round came at its very end
    return np.where(known, seconds, so_far), known & ~failed, known & failed


def _answers(cohorts: Sequence[_Times], now: float) -> tuple[FloatArray, BoolArray]:
    return _observations(cohorts, now)[:2]


def _incidence_of(cohorts: Sequence[_Times], now: float) -> Incidence:
    """Return how many clients answered and failed by which time, as far as can be known now."""
    if not cohorts:
        return Incidence(np.empty(0), np.empty(0), np.empty(0))
    seconds, answered, failed = _observations(cohorts, now)
    found = incidence(seconds, answered, failed)
    if len(found.times) <= _POINTS:
        return found
    places = np.unique(np.linspace(0, len(found.times) - 1, _POINTS).round().astype(np.int64))
    return Incidence(*(column[places] for column in found))

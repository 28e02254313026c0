r"""Deadline and spares of the next round, computed from how long clients have taken so far.

A round asks :math:`n = k + s` clients and closes at the k-th valid model, when everybody has answered or failed, or at
the deadline D. If clients answer independently, with the share :math:`F(t)` that has answered and the share
:math:`G(t)` that has failed after t seconds, then with :math:`A(t) \sim Bin(n, F(t))`

.. math:: E[T] = \int_0^D 1 - P(A(t) \ge k) - \sum_{a<k} \binom{n}{a} F(t)^a G(t)^{n-a} dt, \qquad
          E[M] = E[\min(A(D), k)].

A round with fewer than k models counts with the models it has, and the next round asks other clients. A model takes
:math:`(E[T] + p)/E[M]` seconds, where p is the usual pause between two rounds. The proposal is the pair (D, s) that
minimises this time. Rounds with too few models contribute nothing to E[M]. A round that needs a minimum of models
continues after D until it has them; :func:`_expected_rounds` counts this time too.

F and G are Aalen-Johansen estimates, in which a client that has not answered yet is censored. A late answer is added
when it arrives, so a deadline hides slow clients only for a while.

The fastest models may all be those of a few clients, which would then own the global model. A deadline leaves a client
out if none of its newest three answers would have been in time. Unless it is permitted, no deadline is proposed that
leaves out more than a fifth of the clients that ever answered, and spares only if no more than a fifth are four times
faster than that. As long as fewer than three fifths of the clients asked have answered, there is no proposal at all,
and each round lasts twice as long as the longest before it, up to a minute. Otherwise clients that answer at once could
play hundreds of rounds among themselves while all others are still at work.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln, xlogy

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.journal.events import TIMES
from fedcohort.session.session import Session

_MAX_CONSIDERED = 1000  # about how many of the newest clients to consider
_DIFFERENT = 3.0  # standard deviations by which older cohorts must differ to be ignored
_POINTS = 100  # how many deadlines to compare
_MARGIN = 1.02  # a deadline at exactly an answer's time would miss the next answer that takes as long
_COHORTS = 1000  # how many cohorts to keep
_CHOICES = 6  # how many numbers of spares to compare
MAX_LEFT_OUT = 0.2  # the share of clients that a deadline may leave out
_NEWEST = 3  # answers of each client
_KNOWN = 0.6  # the share of clients that must have answered before others are left out
_FASTER = 4.0  # times as fast as the slowest that is not left out
_PROBE = 60.0  # seconds that a round lasts at most for this
_FIRST = 2.0  # in the first round, the deadline is this multiple of the newest answer's time


class Proposal(NamedTuple):
    """Deadline and spares for a round.

    Attributes
    ----------
    deadline : float or None
        Seconds; None if nothing is known yet.
    """

    deadline: float | None
    spares: int


class _Incidence(NamedTuple):
    """The shares of clients that have answered or failed by each time; the arrays are (m,)."""

    times: FloatArray  # ascending
    answered: FloatArray
    failed: FloatArray


def _incidence(seconds: FloatArray, answered: BoolArray, failed: BoolArray) -> _Incidence:
    """Return the Aalen-Johansen estimate of the shares of clients that answer or fail by each time.

    Parameters
    ----------
    seconds : (n,) float array
        When each client answered or failed; for other clients, how long they are known to have been at work.
    answered, failed : (n,) bool array

    Examples
    --------
    >>> shares = _incidence(np.array([1.0, 2.0, 3.0]), np.array([True, False, True]), np.zeros(3, bool))
    >>> shares.times, shares.answered.round(2)
    (array([1., 3.]), array([0.33, 1.  ]))
    """
    order = np.argsort(seconds, kind="stable")
    times, first = np.unique(seconds[order], return_index=True)
    at_risk = len(seconds) - first  # clients at work just before each time
    answers = np.add.reduceat(answered[order].astype(np.float64), first) / at_risk
    failures = np.add.reduceat(failed[order].astype(np.float64), first) / at_risk
    # The share that has neither answered nor failed before each time (Kaplan-Meier).
    before = np.concatenate([[1.0], np.cumprod(1.0 - answers - failures)[:-1]])
    known = answers + failures > 0
    return _Incidence(times[known], np.cumsum(before * answers)[known], np.cumsum(before * failures)[known])


def _expected_rounds(shares: _Incidence, n: int, enough: int, least: int, needed: int) -> tuple[FloatArray, FloatArray]:
    """Return the average duration of a round and its number of models, with each of the times as deadline.

    Parameters
    ----------
    n : int
        How many clients are asked.
    enough : int
        How many models close the round.
    least : int
        A round with fewer models is worth nothing.
    needed : int
        With fewer models, the round continues after the deadline.
    """
    count = np.arange(n + 1)[:, None]  # (n + 1, 1)
    ways = gammaln(n + 1) - gammaln(count + 1) - gammaln(n - count + 1)
    yes, no = shares.answered, np.clip(1.0 - shares.answered, 0.0, None)
    # (n + 1, m): the probability of each number of answers, and the part of it in which nobody is at work any more.
    share = np.exp(ways + xlogy(count, yes) + xlogy(n - count, no))
    over = np.exp(ways + xlogy(count, yes) + xlogy(n - count, np.clip(shares.failed, 0.0, None)))
    # The probability that a round is still open, before and after the deadline.
    in_time = np.clip((share - over)[:enough].sum(0), 0.0, 1.0)
    after = np.clip((share - over)[:needed].sum(0), 0.0, 1.0)
    steps = np.diff(shares.times)
    seconds = np.cumsum(np.concatenate([shares.times[:1], steps * in_time[:-1]]))
    seconds[:-1] += np.cumsum((steps * after[:-1])[::-1])[::-1]
    utility = np.where(count >= max(least, needed), np.minimum(count, enough), 0)
    reached = share[needed:].sum(0)
    later = np.clip(reached[-1:] - reached, 0.0, 1.0)
    return seconds, (utility * share).sum(0) + (needed if needed >= least else 0) * later


def _log_rank(seconds: FloatArray, answered: BoolArray, others: FloatArray, others_answered: BoolArray) -> float:
    """Return by how many standard deviations a group of clients answered earlier than expected from both groups.

    >>> _log_rank(np.arange(1.0, 9.0), np.ones(8, bool), np.arange(11.0, 19.0), np.ones(8, bool)) > 3
    True
    """
    times, count = np.unique(np.concatenate([seconds[answered], others[others_answered]]), return_counts=True)
    at_risk = len(seconds) - np.searchsorted(np.sort(seconds), times)
    both = at_risk + len(others) - np.searchsorted(np.sort(others), times)
    share = at_risk / both
    spread = np.sqrt((count * share * (1 - share) * (both - count) / np.maximum(both - 1, 1)).sum())
    return float((answered.sum() - (count * share).sum()) / spread) if spread > 0 else 0.0


def first_deadline(arrived: FloatArray, least: int) -> float | None:
    """Return the deadline of a round if only its own valid answers are known: twice the time of the newest answer.

    An answer after a longer pause than this does not count. None before there are ``least`` answers.

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
    clients: IntArray  # (k,)
    begun: float
    closed: float
    seconds: FloatArray  # (k,) when each client answered or failed; infinity if it has not
    failed: BoolArray  # (k,)
    until: float = np.inf  # when the server was restarted, after which no answer can arrive


class Pace:
    """How long the clients of a session have taken, and a proposal for the next round.

    All times are recorded in the journal, so a pace from :meth:`of` makes the same proposals after a restart.

    Examples
    --------
    >>> pace = Pace()
    >>> pace.propose(now=0.0, size=2, spares=2, least=1)  # nothing is known
    Proposal(deadline=None, spares=2)
    >>> for ticket in range(5):
    ...     pace.observe(ticket, np.arange(4), 0.0, 1.1, np.array([1.0, 1.1, 1.2, 60.0]), np.zeros(4, bool))
    >>> pace.propose(now=100.0, size=2, spares=2, least=1)  # one of four is more than a fifth
    Proposal(deadline=61.2, spares=0)
    >>> pace.propose(now=100.0, size=2, spares=2, least=1, leave_out_slow=True), pace.left_out(1.224)
    (Proposal(deadline=1.224, spares=2), (1, 4))
    """

    def __init__(self) -> None:
        self._offset = 0.0  # from the host's clock to one that continues over restarts
        # More than any proposal uses, so that dropping older ones changes nothing.
        self._cohorts: deque[_Times] = deque(maxlen=_COHORTS)
        # For each client, however old its answers are.
        self._newest: dict[int, deque[float]] = {}  # seconds of its newest answers
        self._silent: set[int] = set()  # asked, and neither answered nor failed so far
        self._coming: list[tuple[float, int, float]] = []  # answers after the end of their round: time, client, seconds
        self._longest = 0.0  # round

    @classmethod
    def of(cls, session: Session, now: float | None = None) -> Pace:
        """Read the times in a session's journal.

        Parameters
        ----------
        now : float, optional
            The time on a clock that started with this process; clients that were at work before will not answer.
            Default: the clock continues, as in a simulation.
        """
        pace = cls()
        clients = {row.ticket: row.clients for row in session.journal.cohorts()}
        for body in session.journal.events(TIMES):
            seconds = np.array([np.inf if at is None else at for at in body["seconds"]], np.float64)
            failed = np.isin(np.arange(len(seconds)), body["failed"])
            if "begun" in body:
                pace.observe(body["ticket"], clients[body["ticket"]], body["begun"], body["closed"], seconds, failed)
            else:
                pace.correct(body["ticket"], body["places"], seconds, failed)
        if now is not None:
            last = max((cohort.closed for cohort in pace._cohorts), default=0.0)
            pace._offset = last - now
            for cohort in pace._cohorts:
                cohort.until = last - cohort.begun
        return pace

    def time(self, now: float) -> float:
        """Convert the host's time to that of a clock that continues over restarts."""
        return now + self._offset

    def observe(
        self, ticket: int, clients: IntArray, begun: float, closed: float, seconds: FloatArray, failed: BoolArray
    ) -> None:
        """Add the times of a cohort.

        Parameters
        ----------
        clients : (k,) int array
        begun, closed : float
            When its round began, and when it was closed.
        seconds : (k,) float array
            When each client answered or failed; infinity if it has not.
        failed : (k,) bool array
            Whether each client failed.
        """
        # Rounded, because differences of times have rounding errors, and every host must find the same ties.
        cohort = _Times(ticket, clients, begun, closed, np.round(seconds, 9), failed.copy())
        self._cohorts.append(cohort)
        self._longest = max(self._longest, closed - begun)
        for place, client in enumerate(clients.tolist()):
            if client not in self._newest:
                self._silent.add(client)
            self._expect(cohort, place)

    def _expect(self, cohort: _Times, place: int) -> None:
        client, seconds = int(cohort.clients[place]), float(cohort.seconds[place])
        if cohort.failed[place]:
            self._silent.discard(client)
        elif seconds < np.inf:
            heapq.heappush(self._coming, (cohort.begun + seconds, client, seconds))

    def _advance(self, now: float) -> None:
        """Take over the answers that have arrived by now; a simulation knows the later ones, too."""
        while self._coming and self._coming[0][0] <= now + 1e-9 * (1.0 + abs(now)):
            _, client, seconds = heapq.heappop(self._coming)
            self._silent.discard(client)
            self._newest.setdefault(client, deque(maxlen=_NEWEST)).append(seconds)

    def correct(self, ticket: int, places: Sequence[int], seconds: FloatArray, failed: BoolArray) -> None:
        """Add the times of late answers from a cohort's clients at ``places``."""
        for cohort in self._cohorts:
            if cohort.ticket == ticket:
                cohort.seconds[places], cohort.failed[places] = seconds, failed
                for place in places:
                    self._expect(cohort, place)

    @property
    def exploring(self) -> bool:
        """Whether too few of the clients asked have answered to know who would be left out."""
        return len(self._newest) < _KNOWN * (len(self._newest) + len(self._silent))

    def left_out(self, deadline: float) -> tuple[int, int]:
        """Return how many clients took longer lately or have not answered, and how many were asked."""
        slower = sum(min(answers) > deadline for answers in self._newest.values())
        return slower + len(self._silent), len(self._newest) + len(self._silent)

    def shortest_round(self, now: float) -> float:
        """Return how long the next round must last at least, even if everybody has answered."""
        self._advance(now)
        return min(_FIRST * self._longest, _PROBE) if self.exploring else 0.0

    def propose(
        self, now: float, size: int, spares: int, least: int, needed: int = 0, *, leave_out_slow: bool = False
    ) -> Proposal:
        """Return the deadline and the spares of a round that begins now.

        Parameters
        ----------
        size : int
            How many models the round needs.
        spares : int
            How many extra clients it may ask.
        least : int
            A round with fewer models is worth nothing.
        needed : int
            With fewer models, the round continues after the deadline.
        leave_out_slow : bool
            Whether the deadline may leave out more than a fifth of the clients that ever answered.
        """
        self._advance(now)
        best, cost, shortest = Proposal(None, spares), np.inf, 0.0
        if not leave_out_slow:
            if self.exploring:
                return Proposal(None, 0)
            fastest = np.sort([min(answers) for answers in self._newest.values()])
            shortest = float(fastest[len(fastest) - int(MAX_LEFT_OUT * len(fastest)) - 1]) if len(fastest) else 0.0
            # With spares, a round closes with its first answers. If many are far faster, these would always be theirs.
            if (fastest < shortest / _FASTER).sum() > MAX_LEFT_OUT * len(fastest):
                spares = 0
        recent = self._similar_cohorts(now)
        nothing = np.empty(0)
        shares = _incidence(*_observations(recent, now)) if recent else _Incidence(nothing, nothing, nothing)
        if len(shares.times) > _POINTS:
            some = np.unique(np.linspace(0, len(shares.times) - 1, _POINTS).round().astype(np.int64))
            shares = _Incidence(*(column[some] for column in shares))
        pauses = [after.begun - before.closed for before, after in pairwise(recent)]
        pause = max(float(np.median(pauses)), 0.0) if pauses else 0.0
        for extra in np.unique(np.linspace(0, spares, min(spares + 1, _CHOICES)).round().astype(np.int64)).tolist():
            seconds, models = _expected_rounds(shares, size + extra, size, least, needed)
            # Seconds per model that counts; infinite if a deadline gives none.
            per_model = np.full(len(models), np.inf)
            np.divide(seconds + pause, models, out=per_model, where=models > 0)
            # The last one stays: older answers may all be slower than those of the newest cohorts.
            per_model[:-1][shares.times[:-1] < shortest] = np.inf
            at = int(np.argmin(per_model)) if len(per_model) else 0
            if len(per_model) and per_model[at] < cost:
                deadline = max(float(shares.times[at]), shortest)
                best, cost = Proposal(round(deadline * _MARGIN, 9), extra), float(per_model[at])
        return best

    def _similar_cohorts(self, now: float) -> list[_Times]:
        """Return the newest cohorts, back to when clients took different times."""
        cohorts = list(self._cohorts)
        begin = max(len(cohorts) - 1, 0)
        while begin > 0 and sum(len(cohort.seconds) for cohort in cohorts[begin:]) < _MAX_CONSIDERED:
            # Compared with as many older cohorts, so a change is found within a factor of two of its age.
            before = max(2 * begin - len(cohorts), 0)
            groups = cohorts[begin:], cohorts[before:begin]
            (seconds, answered, _), (older, older_answered, _) = (_observations(group, now) for group in groups)
            if abs(_log_rank(seconds, answered, older, older_answered)) > _DIFFERENT:
                break
            begin = before
        return cohorts[begin:]


def _observations(cohorts: Sequence[_Times], now: float) -> tuple[FloatArray, BoolArray, BoolArray]:
    """Return when each client answered, failed or was last known to be at work, and whether it answered or failed."""
    seconds = np.concatenate([cohort.seconds for cohort in cohorts])
    failed = np.concatenate([cohort.failed for cohort in cohorts])
    so_far = np.repeat([min(now - c.begun, c.until) for c in cohorts], [len(c.seconds) for c in cohorts])
    # With a tolerance, because the answer that closed a round came at exactly its end.
    known = seconds <= so_far + 1e-9 * (1.0 + abs(now))
    return np.where(known, seconds, so_far), known & ~failed, known & failed

r"""FedCompass: assign work so that clients of different speeds answer together.

.. [Li2024] Z. Li et al., "FedCompass: Efficient Cross-Silo Federated Learning on Heterogeneous Client Devices Using a
   Computing Power-Aware Scheduler", ICLR 2024, arXiv:2309.14675.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import ParameterError
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal


@dataclass(frozen=True)
class _CompassState:
    """What FedCompass knows about time and speed."""

    now: float  # seconds, from reported durations
    pace: FloatArray = per_client()  # (N,) seconds for the usual work; NaN before the first report
    begun: FloatArray = per_client()  # (N,) when the client was last asked
    work: FloatArray = per_client()  # (N,) the work it was assigned
    due: FloatArray = per_client()  # (N,) when its group is expected (T_a); NaN: not in a group
    latest: FloatArray = per_client()  # (N,) how long the server waits for its group (T_max)


@register("fedcompass")
@dataclass(frozen=True, kw_only=True)
class FedCompass(Selector[_CompassState]):
    r"""Choose clients uniformly, and assign each the work with which it answers together with others ([Li2024]_).

    A client of known speed joins the group of busy clients in which it can do the most work,
    :math:`q = (T_a - t) / s_i`, if that is between ``least`` and ``most``. Otherwise it starts a new group, timed so
    that the clients of an existing group can join it after their next answer: q is the largest
    :math:`(T_{max} + s_f \, Q_{max} - t) / s_i` over the existing groups that is at most :math:`Q_{max}`, but at least
    :math:`Q_{min}`. If there is none, :math:`q = Q_{max}`. The new group is expected at :math:`T_a = t + q s_i`, and
    the server waits for it until :math:`T_{max} = t + \lambda q s_i`.

    Symbols: s_i = seconds for the usual local steps, from Signal.DURATION and the work done, averaged over reports by
    ``momentum``; s_f = that of the fastest client of a group; Q_min, Q_max = ``least``, ``most``, multiples of the
    usual local steps; lambda = ``slack``; t = now.

    Both rules are those of the paper's software (APPFL). Deviations: in the paper, all clients train all the time.
    Here, if there are more clients than places, clients are drawn uniformly. Work is not rounded to steps. A group
    consists of those of its clients that are still busy. The host decides when a new model is made, so groups are not
    averaged as such; ``run.period``, or a buffer of about a group's size, comes closest. A selector does not see the
    time, so t is the time of the last answer: when that client was asked, plus how long it took. Before its first
    report, a client gets ``most``, as in the paper.

    Examples
    --------
    Client 1 takes twice as long as client 0, so it gets half the work.

    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(FedCompass(), ClientTable(n=2), seed=1)
    >>> both = session.ask(RoundRequest(size=2))
    >>> session.tell(RoundReport(both.ticket, [0, 1], metrics={Signal.DURATION: [1.0, 2.0]}))
    >>> again = session.ask(RoundRequest(size=2))
    >>> dict(zip(again.clients.tolist(), again.work.tolist()))
    {0: 1.0, 1: 0.5}
    """

    requires = frozenset({Signal.DURATION})

    one_at_a_time = True
    picks_by: ClassVar[str] = "Clients are drawn uniformly at random. The score is how long the usual work takes."
    part_meanings: ClassVar[Mapping[str, str]] = {"seconds": "how long its usual work takes"}
    checked_params: ClassVar[ParamSets] = {
        "no freedom": {"least": 1.0, "most": 1.0},
        "much freedom": {"least": 0.01, "most": 10.0, "slack": 3.0, "momentum": 0.1},
    }

    least: float = param(0.2, Interval(float, 0, None, "neither"), "least work of a client (Q_min)")
    most: float = param(1.0, Interval(float, 0, 100, "right"), "most work of a client (Q_max)")
    slack: float = param(
        1.2, Interval(float, 1, None), "how much longer than expected the server waits for a group (lambda)"
    )
    momentum: float = param(0.9, Interval(float, 0, 1, "right"), "share of the newest report in a client's speed")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise ParameterError(
                f"The 'least' parameter of FedCompass must be at most 'most'. Got {self.least:g} and {self.most:g}."
            )

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _CompassState:
        """Start without durations."""
        zeros, unknown = np.zeros(clients.n), np.full(clients.n, np.nan)
        return _CompassState(0.0, unknown, zeros, zeros, unknown, unknown)

    def select(
        self, state: _CompassState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _CompassState]:
        """Draw clients, and assign work to the fastest first."""
        pace = slate.of_candidates(state.pace)
        clients = slate.candidates[rng.choice(len(pace), slate.size, replace=False)]
        begun, work, due, latest = (a.copy() for a in (state.begun, state.work, state.due, state.latest))
        # The fastest first, so that slower clients of this draw can join the groups they start. NaN, a client without a
        # report, comes last: it starts no group that anybody could plan for.
        busy = list(() if slate.busy is None else slate.busy)
        for client in clients[np.argsort(state.pace[clients], kind="stable")].tolist():
            grouped = np.array([c for c in busy if np.isfinite(due[c])], np.int64)
            amount = self.assigned_work(state.pace, client, grouped, due, latest, state.now)
            seconds = amount * state.pace[client]  # NaN without a report, which means no group
            begun[client], work[client] = state.now, amount
            # A client that joins a group gets the group's own deadline, not one that differs by rounding.
            group = grouped[np.isclose(due[grouped], state.now + seconds, rtol=1e-12, atol=0.0)]
            due[client] = due[group[0]] if len(group) else state.now + seconds
            latest[client] = latest[group[0]] if len(group) else state.now + self.slack * seconds
            busy.append(client)
        cohort = Cohort(clients, candidates=slate.candidates, score=pace, parts={"seconds": pace}, work=work[clients])
        return cohort, replace(state, begun=begun, work=work, due=due, latest=latest)

    def assigned_work(
        self, pace: FloatArray, client: int, grouped: IntArray, due: FloatArray, latest: FloatArray, now: float
    ) -> float:
        """Return the work of a client, given the busy clients that are in a group (``grouped``)."""
        client_pace = pace[client]
        if not client_pace > 0 or not len(grouped):
            return self.most
        to_join = (due[grouped] - now) / client_pace
        fits = to_join[(to_join >= self.least) & (to_join <= self.most)]
        if len(fits):
            return float(fits.max())
        # No group fits. So start one that the clients of an existing group can join after their next answer.
        ends, group = np.unique(due[grouped], return_inverse=True)
        fastest, last = np.full(len(ends), np.inf), np.full(len(ends), -np.inf)
        np.minimum.at(fastest, group, pace[grouped])
        np.maximum.at(last, group, latest[grouped])
        to_start = ((last + fastest * self.most - now) / client_pace)[last > now]
        to_start = to_start[to_start <= self.most]
        return max(float(to_start.max()), self.least) if len(to_start) else self.most

    def update(self, state: _CompassState, outcome: Outcome) -> _CompassState:
        """Update the speed of clients that answered; clients that answered or failed leave their group."""
        ok = outcome.ok
        clients, seconds = outcome.clients[ok], np.maximum(outcome[Signal.DURATION][ok], 0.0)
        pace, due, latest = state.pace.copy(), state.due.copy(), state.latest.copy()
        # Seconds for the usual work, whatever share of it the client was given.
        measured = seconds / np.where(state.work[clients] > 0, state.work[clients], 1.0)
        known = np.isfinite(pace[clients])
        mixed = (1.0 - self.momentum) * pace[clients] + self.momentum * measured
        pace[clients] = np.where(known, mixed, measured)
        # Also those that failed: nobody should plan to answer together with a client that is not at work.
        due[outcome.clients] = latest[outcome.clients] = np.nan
        # Answers may be told out of order, but time does not go back.
        now = max(state.now, float((state.begun[clients] + seconds).max(initial=state.now)))
        return replace(state, now=now, pace=pace, due=due, latest=latest)

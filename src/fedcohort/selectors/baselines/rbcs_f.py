r"""RBCS-F: fast rounds, with a guaranteed share of them for every client.

.. [Huang2021] T. Huang, W. Lin, W. Wu, L. He, K. Li, A. Y. Zomaya, "An Efficiency-Boosting Client Selection Scheme for
   Federated Learning with Fairness Guarantee", IEEE Transactions on Parallel and Distributed Systems 32(7), 2021,
   arXiv:2011.01783.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal

_BLOCK = 4096  # clients compared with the smallest debt of the heap at a time


@dataclass(frozen=True)
class _QueueState:
    """What RBCS-F remembers about each client."""

    queue: FloatArray = per_client()  # (N,) Z, rounds that the client is owed
    last: FloatArray = per_client()  # (N,) round it was last picked in, -2 before the first
    warm: FloatArray = per_client()  # (N,) 1 if it had also taken part in the round before that one
    count: FloatArray = per_client()  # (N,) number of durations seen
    count_warm: FloatArray = per_client()  # (N,) how many of them with warm = 1
    total: FloatArray = per_client()  # (N,) sum of durations
    total_warm: FloatArray = per_client()  # (N,) sum of those with warm = 1


@register("rbcs-f")
@dataclass(frozen=True, kw_only=True)
class RbcsF(Selector[_QueueState]):
    r"""Choose the cohort that best trades the round's duration against what clients are owed ([Huang2021]_, RBCS-F).

    .. math::

        S_t &= \arg\min_{|S| = m}\; V \max_{n \in S} \bar\tau_n - \sum_{n \in S} Z_n, \qquad
        Z_n \leftarrow \max(Z_n + \beta - x_n, 0) \\
        \bar\tau_n &= \max\Big(\theta_n^T c_n - \alpha \sqrt{c_n^T H_n^{-1} c_n}, 0\Big), \qquad
        H_n = \lambda I + \sum c c^T, \quad \theta_n = H_n^{-1} \sum \tau c

    The minimum is exact: for every possible slowest client, the m largest queues are found among the clients whose
    :math:`\bar\tau` is not larger.

    Symbols: m = slate.size, x_n = 1 for the cohort, tau = Signal.DURATION, beta = ``fairness`` times m divided by the
    number of candidates, V = ``speed``, alpha = ``exploration``, lambda = ``ridge``, c_n = (1, whether n took part in
    the last round).

    Deviations: the paper's context also has the client's free CPU and bandwidth, which are not reported here. Durations
    are divided by the mean of all reports, so that V and alpha need no units. A queue grows only in rounds in which
    its client is available, and beta depends on how many are, so that the guarantee can be kept. A client that did not
    report counts as slow as the slowest known client.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(RbcsF(exploration=0.0), ClientTable(n=3), seed=1)
    >>> picked = []
    >>> for _ in range(12):  # client 2 is slow, and owed half of a third of the rounds
    ...     cohort = session.ask(RoundRequest(size=1))
    ...     seconds = [5.0 if client == 2 else 1.0 for client in cohort.clients.tolist()]
    ...     session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={Signal.DURATION: seconds}))
    ...     picked += cohort.clients.tolist()
    >>> picked.count(2) < min(picked.count(0), picked.count(1))
    True
    """

    requires = frozenset({Signal.DURATION})

    picks_by: ClassVar[str] = (
        "The cohort weighs what clients are owed against its slowest member, so a client that is owed little may "
        "join slower ones."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "owed": "turns it is owed by its guaranteed share",
        "expected duration": "how long it is expected to take",
        "exploration": "how much faster it could be, given what is known",
    }

    checked_params: ClassVar[ParamSets] = {
        "fairness alone": {"fairness": 1.0, "speed": 0.0},
        "speed alone": {"fairness": 0.0, "speed": 100.0, "exploration": 0.0},
        "stiff": {"ridge": 1000000.0},
    }

    fairness: float = param(
        0.5, Interval(float, 0, 1), "guaranteed share of the rounds, as a fraction of an equal share"
    )
    speed: float = param(1.0, Interval(float, 0, None), "weight of the round's duration against the queues (V)")
    exploration: float = param(0.2, Interval(float, 0, None), "width of the bounds on durations (alpha)")
    ridge: float = param(0.1, Interval(float, 0, None, "neither"), "regularisation of the estimates (lambda)")

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _QueueState:
        """Start with empty queues."""
        zeros = np.zeros(clients.n)
        return _QueueState(zeros, np.full(clients.n, -2.0), zeros, zeros, zeros, zeros, zeros)

    def select(
        self, state: _QueueState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _QueueState]:
        """Minimise the duration minus the queues; let queues grow, and shrink those of the cohort."""
        warm = (state.last == slate.round - 1).astype(np.float64)
        estimate, width = (slate.of_candidates(a) for a in self.durations(state, warm))
        bound = np.maximum(estimate - self.exploration * width, 0.0)
        owed = slate.of_candidates(state.queue)
        picks = _quickest_fair(self.speed * bound, owed, slate.size, rng)
        clients = slate.candidates[picks]
        queue, last, context = state.queue.copy(), state.last.copy(), state.warm.copy()
        # Owed only while it could be asked: no rule can pay what a client that is away is owed.
        queue[slate.candidates] += self.fairness * slate.size / len(slate.candidates)
        queue[clients] -= 1.0
        last[clients] = slate.round
        context[clients] = warm[clients]
        cohort = Cohort(
            clients,
            candidates=slate.candidates,
            score=owed - self.speed * bound,
            parts={"owed": owed, "expected duration": estimate, "exploration": -self.exploration * width},
            notes={"bound of the slowest": float(bound[picks].max()), "most owed": float(owed.max())},
        )
        # Nobody owes anything for turns beyond its share; the queue starts at 0 again.
        changed = dataclasses.replace(state, queue=np.maximum(queue, 0.0), last=last, warm=context)
        return cohort, changed

    def update(self, state: _QueueState, outcome: Outcome) -> _QueueState:
        """Learn durations."""
        ok, seconds = outcome.ok, outcome[Signal.DURATION]
        means = state.total[state.count > 0] / state.count[state.count > 0]
        # Without a duration it is taken for the slowest there is, or a dead client would stay attractive.
        seconds = np.where(ok, seconds, max(seconds[ok].max(initial=0.0), means.max(initial=0.0)))
        clients, warm = outcome.clients, state.warm[outcome.clients]
        new = {name: getattr(state, name).copy() for name in ("count", "count_warm", "total", "total_warm")}
        new["count"][clients] += 1.0
        new["count_warm"][clients] += warm
        new["total"][clients] += seconds
        new["total_warm"][clients] += seconds * warm
        return dataclasses.replace(state, **new)

    def durations(self, state: _QueueState, warm: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(N,) expected durations as multiples of the mean, and widths of their bounds, for contexts (1, warm)."""
        # Two contexts, so H is two by two and inverted by hand for all clients at once.
        # H = [[first, m], [m, second]] with m = count_warm, as warm is 0 or 1.
        m = state.count_warm
        first, second = self.ridge + state.count, self.ridge + m
        determinant = first * second - m * m
        # In multiples of the mean duration, so that V and alpha mean the same in every federation.
        reports = float(state.count.sum())
        mean = float(state.total.sum()) / reports if reports else 0.0
        scale = mean if mean > 0 else 1.0
        constant = (second * state.total - m * state.total_warm) / determinant
        change = (first * state.total_warm - m * state.total) / determinant
        variance = (second + warm * (first - 2.0 * m)) / determinant
        return (constant + warm * change) / scale, np.sqrt(np.maximum(variance, 0.0))


def _quickest_fair(cost: FloatArray, owed: FloatArray, size: int, rng: np.random.Generator) -> IntArray:
    """Return the ``size`` positions that minimise the largest cost minus the sum of ``owed``; ties at random.

    In ascending order of cost, the best group with a given largest cost has the largest debts so far, so one pass with
    a heap sees all such groups. Blocks without a debt larger than the smallest in the heap are skipped.

    >>> _quickest_fair(np.array([1.0, 1.0, 9.0]), np.array([0.0, 1.0, 20.0]), 2, np.random.default_rng(0))
    array([1, 2])
    """
    order = rng.permutation(len(cost))  # decides ties, because the sort is stable
    order = order[np.argsort(cost[order], kind="stable")]
    costs, debts = cost[order], owed[order]
    heap = [(debt, i) for i, debt in enumerate(debts[:size].tolist())]
    total = float(debts[:size].sum())
    best, group = float(costs[size - 1]) - total, list(heap)
    heapq.heapify(heap)
    for start in range(size, len(order), _BLOCK):
        block = slice(start, start + _BLOCK)
        for i in (start + np.flatnonzero(debts[block] > heap[0][0])).tolist():
            debt = float(debts[i])
            if debt > heap[0][0]:
                total += debt - heapq.heappushpop(heap, (debt, i))[0]
                if float(costs[i]) - total < best:
                    best, group = float(costs[i]) - total, list(heap)
    return np.asarray(order[sorted(i for _, i in group)], np.int64)

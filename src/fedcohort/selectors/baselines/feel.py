r"""FEEL: draw clients by importance and speed, without bias.

.. [Ren2020] J. Ren, Y. He, D. Wen, G. Yu, K. Huang, D. Guo, "Scheduling for Cellular Federated Edge Learning with
   Importance and Channel Awareness", IEEE Transactions on Wireless Communications 19(11), 2020.
.. [Raj1956] D. Raj, "Some Estimators in Sampling with Varying Probabilities without Replacement", JASA 51, 1956.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.optimize import brentq

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, OneOf, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.running import fill_with_mean
from fedcohort.selectors.numerics.sampling import scale_to_all_clients, weighted_sample

_NEGLIGIBLE = 1e-100  # the square of a smaller importance underflows
_MIN_NORM = 0.01  # least norm as a share of the mean, so that a client whose gradient was 0 can still be drawn


@dataclass(frozen=True)
class _FeelState:
    """What FEEL remembers of each client's last report; NaN before the first."""

    norm: FloatArray = per_client()  # (N,) norm of the gradient
    seconds: FloatArray = per_client()  # (N,) duration


@register("feel")
@dataclass(frozen=True, kw_only=True)
class Feel(Selector[_FeelState]):
    r"""Draw clients by importance and speed, with weights that keep the average unbiased ([Ren2020]_).

    With one client a round, the distribution p minimises the expected time and the variance of the aggregated gradient,

    .. math:: \min_p\; \rho \sum_k p_k T_k + (1 - \rho) \sum_k \frac{a_k^2}{p_k}, \qquad
        p_k^* = a_k \sqrt{\frac{1 - \rho}{\rho T_k + \lambda}}, \qquad a_k = \frac{n_k}{n} \lVert g_k \rVert,

    with lambda such that the sum is 1. Several clients are drawn one by one without replacement, and
    ``Cohort.weights`` make the average unbiased: the r-th of m drawn clients counts :math:`\frac{1}{m}\big(\frac{1 -
    \sum_{i < r} p_i}{p_r} + m - r\big)` times ([Raj1956]_).

    Symbols: n_k = clients.sizes, :math:`\lVert g_k \rVert` = Signal.GRADIENT_NORM or Signal.UPDATE_NORM at the client's
    last report, T_k = Signal.DURATION there, rho = ``rho``.

    Deviations: in the paper, every client computes its gradient and reports its norm before one is scheduled, and the
    time to send is known from the channel. Here both come from the client's last report (the mean before the first),
    and T_k is the whole round trip. T_k is relative to its mean and a_k to its sum, so that rho needs no units. A norm
    counts as at least a hundredth of the mean norm. For several clients, the paper's estimate is replaced by Raj's. If
    all candidates are taken, each counts once.

    **Aggregator**: ``inverse-probability``. It is the default. ``fedavg`` and others that
    divide by the sum of the weights are biased towards clients with large gradients.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(Feel(rho=0.0), ClientTable(sizes=[10, 10, 10]), seed=1)
    >>> cohort = session.ask(RoundRequest(size=3))
    >>> norms = [3.0 if client == 2 else 1.0 for client in cohort.clients.tolist()]
    >>> session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={Signal.GRADIENT_NORM: norms}))
    >>> session.ask(RoundRequest(size=1)).score.round(3)  # by norm
    array([0.2, 0.2, 0.6])
    """

    aggregator = "inverse-probability"

    picks_by: ClassVar[str] = "Clients are drawn at random, and the score is the probability of the first draw."
    part_meanings: ClassVar[Mapping[str, str]] = {
        "importance": "size times the norm of its last gradient or update",
        "seconds": "how long it took",
    }

    checked_params: ClassVar[ParamSets] = {
        "variance alone": {"rho": 0.0},
        "time above all": {"rho": 0.999},
        "updates": {"importance": "update-norm"},
    }

    rho: float = param(0.5, Interval(float, 0, 1, "left"), "weight of time against variance (rho)")
    importance: str = param(
        "gradient-norm",
        OneOf(("gradient-norm", "update-norm")),
        "norm of the full gradient (as in the paper) or of the update",
    )

    @property
    def requires(self) -> frozenset[Signal]:
        """Sizes, norms, and durations if they count."""
        needed = {Signal.SIZES, Signal.by_name(self.importance)}
        return frozenset(needed | {Signal.DURATION} if self.rho > 0 else needed)

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _FeelState:
        """Start without reports."""
        unknown = np.full(clients.n, np.nan)
        return _FeelState(unknown, unknown)

    def select(
        self, state: _FeelState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _FeelState]:
        """Draw by the optimal distribution."""
        sizes = slate.of_candidates(slate.clients.sizes)
        # A client without a report is taken for an average one, so that it is neither sought nor avoided.
        norm = fill_with_mean(slate.of_candidates(state.norm))
        importance = sizes * np.maximum(norm, _MIN_NORM * norm.mean()) if norm.mean() > 0 else sizes
        seconds = fill_with_mean(slate.of_candidates(state.seconds))
        p = _optimal_distribution(importance, seconds, self.rho)
        drawn = weighted_sample(p, slate.size, rng)
        # If everybody is drawn, there is nothing to estimate, and Raj's weights would only add noise.
        weights = np.ones(len(drawn)) if slate.size == len(p) else _raj_weights(p[drawn])
        cohort = Cohort(
            slate.candidates[drawn],
            candidates=slate.candidates,
            score=p,
            parts={"importance": importance, "seconds": seconds},
            weights=scale_to_all_clients(slate.clients.weights, slate.candidates) * weights,
            notes={"never reported": int(np.isnan(slate.of_candidates(state.norm)).sum())},
        )
        return cohort, state

    def update(self, state: _FeelState, outcome: Outcome) -> _FeelState:
        """Remember the norms and durations that were reported."""
        ok = outcome.ok
        clients = outcome.clients[ok]
        norm, seconds = state.norm.copy(), state.seconds.copy()
        norm[clients] = outcome[Signal.by_name(self.importance)][ok]
        # With rho = 0 time does not count, and durations are not asked for.
        seconds[clients] = outcome[Signal.DURATION][ok] if self.rho > 0 else 0.0
        return _FeelState(norm, seconds)


def _optimal_distribution(importance: FloatArray, seconds: FloatArray, rho: float) -> FloatArray:
    r"""Return p that minimises :math:`\rho \sum p_k t_k + (1 - \rho) \sum a_k^2 / p_k`.

    t are the seconds divided by their mean, a the importances divided by their sum. If all importances are zero, they
    count as equal.

    >>> _optimal_distribution(np.array([1.0, 1.0]), np.array([1.0, 3.0]), rho=0.5).round(3)
    array([0.613, 0.387])
    """
    total, mean = float(importance.sum()), float(seconds.mean())
    a = importance / total if total > 0 else np.full(len(importance), 1.0 / len(importance))
    # Without time, p is proportional to the importance.
    if rho == 0 or mean <= 0:
        return a
    time = rho * seconds / mean
    counts = a > _NEGLIGIBLE
    # lambda may be negative, but is above -min rho t. So the search is over x > 0, with lambda = x - min rho t.
    above = time - time[counts].min()
    # The sum of p falls as x grows: at the lower end the fastest alone sum to 1, at the upper end all sum to at most 1.
    fastest = float(a[counts & (above <= 0)].sum())
    low, high = np.log((1 - rho) * fastest**2), np.log(1 - rho)

    def shares(log_x: float) -> FloatArray:
        return np.asarray(np.where(counts, a * np.sqrt((1 - rho) / (np.maximum(above, 0.0) + np.exp(log_x))), 0.0))

    # Rounding must not put both ends on one side of 1.
    p = shares(brentq(lambda log_x: float(shares(log_x).sum()) - 1.0, low - 1e-9, high + 1e-9, xtol=1e-13))
    return np.asarray(p / p.sum())


def _raj_weights(p: FloatArray) -> FloatArray:
    """(m,) weights of m clients that were drawn one by one, with first-draw probabilities p (m,).

    >>> _raj_weights(np.array([0.5, 0.25]))
    array([1.5, 1. ])
    """
    m = len(p)
    before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
    rest = np.maximum(1.0 - before, 0.0)
    rank: IntArray = np.arange(1, m + 1)
    return np.asarray((np.divide(rest, p, out=np.ones(m), where=p > 0) + m - rank) / m)

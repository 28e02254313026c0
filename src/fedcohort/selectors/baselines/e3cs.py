r"""E3CS: exponential weights for clients that finish, and a quota for every client.

.. [Huang2022] T. Huang, W. Lin, L. Shen, K. Li, A. Y. Zomaya, "Stochastic Client Selection for Federated Learning with
   Volatile Clients", IEEE Internet of Things Journal 9(20), 2022, arXiv:2011.08756.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Boolean, Interval, Optional, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.selectors.numerics.sampling import systematic_sample, weighted_sample

_RANGE = 30.0  # of the log weights: the smallest weight is 1e-13 of the largest


@dataclass(frozen=True)
class _WeightState:
    """What E3CS remembers about each client."""

    weight: FloatArray = per_client()  # (N,) log w, at most 0
    gain: FloatArray = per_client()  # (N,) the increase of log w if the client finishes the round it was picked for


@register("e3cs")
@dataclass(frozen=True, kw_only=True)
class E3CS(Selector[_WeightState]):
    r"""Guarantee every client a minimum probability, and divide the rest by weights, as Exp3 does ([Huang2022]_).

    .. math::

        p_i &= \sigma + (k - K \sigma) \frac{w'_i}{\sum_j w'_j}, \qquad w'_i = \min(w_i, (1 - \sigma) \alpha) \\
        w_i &\leftarrow w_i \exp\Big(\frac{(k - K \sigma) \eta}{K} \frac{x_i}{p_i}\Big)
            \quad \text{for } i \text{ in the cohort with } p_i < 1

    with alpha such that no p exceeds 1. The weights of clients that finish grow. Clients are drawn one by one without
    replacement, with probabilities proportional to p.

    Symbols: K = number of candidates, k = slate.size, x_i = 1 if the client's model arrived valid and in time
    (outcome.ok), eta = ``rate``, sigma = ``fairness`` times k / K. The paper's E3CS-0, E3CS-0.5 and E3CS-0.8 are
    ``fairness`` 0, 0.5 and 0.8; E3CS-inc is ``fairness=0`` with ``until`` a quarter of the rounds.

    Drawn in this way, clients with p = 1 are left out in up to a third of the rounds, and :math:`x_i / p_i` is not an
    unbiased estimate. With ``exact=True``, which is ours, the cohort is drawn systematically: client i is in it with
    probability exactly :math:`p_i`, so clients with p = 1 always take part, and the estimate is unbiased.

    Deviations: K counts the clients that are available now; in the paper, all clients. No weight is less than
    :math:`e^{-30}` of the largest.

    Examples
    --------
    Client 1 never finishes. Its probability falls towards its quota of one in four.

    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(E3CS(fairness=0.5), ClientTable(n=2), seed=1)
    >>> for _ in range(60):
    ...     cohort = session.ask(RoundRequest(size=1))
    ...     session.tell(RoundReport(cohort.ticket, cohort.clients, status=cohort.clients.tolist()))
    >>> cohort.score.round(2)
    array([0.75, 0.25])
    """

    picks_by: ClassVar[str] = "Clients are drawn at random, with better odds for higher scores."
    part_meanings: ClassVar[Mapping[str, str]] = {
        "quota": "the probability that every client is guaranteed",
        "by weight": "the probability it earned by finishing its rounds",
    }

    checked_params: ClassVar[ParamSets] = {
        "no quota": {"fairness": 0.0, "rate": 50.0},
        "quota alone": {"fairness": 1.0},
        "E3CS-inc": {"fairness": 0.0, "until": 3},
        "exact": {"exact": True},
    }

    fairness: float = param(
        0.5, Interval(float, 0, 1), "least probability of a client, as a fraction of k / K (sigma K / k)"
    )
    rate: float = param(0.5, Interval(float, 0, None, "neither"), "learning rate of the weights (eta)")
    until: int | None = param(
        None, Optional(Interval(int, 0, None)), "rounds after which all probabilities are equal (E3CS-inc); None: never"
    )
    exact: bool = param(
        False, Boolean(), "whether clients take part with exactly the probability p; in the paper, nearly (ours)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fairness == 0 and self.until is None:
            object.__setattr__(
                self, "starves", "without a quota, a client that does not finish is asked less and less often"
            )

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _WeightState:
        """Start with equal weights."""
        zeros = np.zeros(clients.n)
        return _WeightState(zeros, zeros)

    def select(
        self, state: _WeightState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _WeightState]:
        """Draw by the allocated probabilities."""
        size, count = slate.size, len(slate.candidates)
        fairness = self.fairness if self.until is None or slate.round < self.until else 1.0
        weight = slate.of_candidates(state.weight)
        quota = fairness * size / count
        chance, full = _allocate(np.exp(weight - weight.max()), size, quota)
        picks = systematic_sample(chance, rng) if self.exact else weighted_sample(chance, size, rng)
        gain = state.gain.copy()
        step = (size - count * quota) * self.rate / count
        # Computed here, because x_i / p_i needs the probabilities of this round. A client that had to take part (p = 1)
        # proves nothing by it and gains nothing.
        gain[slate.candidates[picks]] = np.where(full[picks], 0.0, step / np.maximum(chance[picks], 1e-300))
        cohort = Cohort(
            slate.candidates[picks],
            candidates=slate.candidates,
            score=chance,
            parts={"quota": np.full(count, quota), "by weight": chance - quota},
            notes={"stated chance 1": int(full.sum()), "quota": round(quota, 6)},
        )
        return cohort, _WeightState(state.weight, gain)

    def update(self, state: _WeightState, outcome: Outcome) -> _WeightState:
        """Raise the weights of the clients that finished."""
        clients = outcome.clients[outcome.ok]
        weight = state.weight.copy()
        weight[clients] += state.gain[clients]
        weight -= weight.max()  # only ratios count, and the range below is relative to the largest
        return _WeightState(np.maximum(weight, -_RANGE), state.gain)

    def grow(self, state: _WeightState, clients: ClientTable, rng: np.random.Generator) -> _WeightState:
        """Let new clients start with the median weight."""
        grown = super().grow(state, clients, rng)
        weight = grown.weight.copy()
        # The largest weight is 0, so the zeros of ``init`` would put newcomers level with the best.
        weight[len(state.weight) :] = np.median(state.weight) if len(state.weight) else 0.0
        return _WeightState(weight, grown.gain)


def _allocate(weights: FloatArray, size: int, quota: float) -> tuple[FloatArray, BoolArray]:
    """Return probabilities (c,) in [``quota``, 1] that sum to ``size``, and which of them were capped at 1 (c,).

    >>> _allocate(np.array([8.0, 1.0, 1.0]), size=2, quota=0.0)
    (array([1. , 0.5, 0.5]), array([ True, False, False]))
    """
    count = len(weights)
    free = size - count * quota  # divided by weight
    if size == count:
        return np.ones(count), np.ones(count, np.bool_)
    if free <= 0:  # the quotas take all places, up to rounding
        return np.full(count, size / count), np.zeros(count, np.bool_)
    # With the s heaviest capped: (1 - quota) alpha = (1 - quota) W_rest / (free - s (1 - quota)). The right s is the
    # smallest for which no other client is above.
    heavy = np.argsort(-weights, kind="stable")[:size]
    heaviest = weights[heavy]
    rest = float(weights.sum())
    full = np.zeros(count, np.bool_)
    share = 1.0 - quota
    for s, value in enumerate(heaviest.tolist()):
        room = free - s * share
        if value * room <= share * rest:
            break
        full[heavy[s]] = True
        rest -= value
    room = free - float(full.sum()) * share
    chance = np.ones(count)
    light = ~full
    rest = float(weights[light].sum())
    chance[light] = quota + (room * weights[light] / rest if rest > 0 else room / light.sum())
    return chance, full

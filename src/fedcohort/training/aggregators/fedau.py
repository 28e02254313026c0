r"""FedAU: averaging with larger weights for clients that rarely take part.

.. [Wang2024] S. Wang, M. Ji, "A Lightweight Method for Tackling Unknown Participation Statistics in Federated
   Averaging", ICLR 2024 (arXiv 2306.03401), Algorithms 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.params import Interval, OneOf, Optional, param
from fedcohort.training.aggregators.base import AGGREGATORS, Aggregator, Combined, Members, Memory, Server
from fedcohort.training.arithmetic import average


class _ParticipationGaps(Memory):
    """The intervals between the rounds in which each client takes part, as three numbers per client.

    Attributes
    ----------
    count : (N,) float array
        M_n, the number of finished intervals.
    mean : (N,) float array
        omega_n, their mean length; 1 before the first interval ends.
    start : (N,) int array
        The round in which the current interval began.
    """

    saved = ("count", "mean", "start")

    def __init__(self, federation: int) -> None:
        self.count = np.zeros(federation)
        self.mean = np.ones(federation)
        self.start = np.zeros(federation, np.int64)

    def _finish(self, clients: IntArray, number: FloatArray, length: FloatArray) -> None:
        """Count ``number`` (k,) more intervals of ``length`` (k,) each."""
        total = self.count[clients] * self.mean[clients] + number * length
        self.count[clients] += number
        self.mean[clients] = np.where(number > 0, total / np.maximum(self.count[clients], 1.0), self.mean[clients])

    def weights(self, clients: IntArray, round: int, cutoff: int | None) -> FloatArray:
        """(k,) omega_n of clients that take part in ``round``, from earlier rounds; then count this round.

        An interval that reaches ``cutoff`` rounds ends, and the next one begins. For absent clients this is computed
        only when they return.
        """
        if cutoff is not None:
            # Algorithm 2 checks every client in every round. Here all checks since the last time are done at once.
            reached = np.maximum(round - self.start[clients], 0) // cutoff
            self._finish(clients, reached.astype(np.float64), np.full(len(clients), float(cutoff)))
            self.start[clients] += reached * cutoff
        weights = self.mean[clients]
        # At least one round, also for a client that takes part twice in rounds of the same number.
        self._finish(clients, np.ones(len(clients)), np.maximum(round + 1.0 - self.start[clients], 1.0))
        self.start[clients] = round + 1
        return weights


@AGGREGATORS.register("fedau")
@dataclass(frozen=True, kw_only=True)
class FedAu(Aggregator):
    r"""FedAU: weights are the mean interval between a client's rounds ([Wang2024]_, Algorithms 1 and 2).

    .. math:: w \leftarrow w + \eta \frac{1}{N} \sum_{n \in S} \omega_n (w_n - w), \qquad
              \omega_n = \frac{1}{M_n} \sum_{m=1}^{M_n} s_n^m,

    where the :math:`s_n^m` are the lengths in rounds of the :math:`M_n` intervals of client n that had ended before
    this round, the last round of an interval being the one in which the client took part. An absence of K rounds
    counts as an interval of K, and the next one begins. :math:`\omega_n` is 1 before the first interval has ended.

    A client that takes part in a share :math:`\pi_n` of the rounds has intervals of :math:`1 / \pi_n` rounds on
    average. So no client counts for more because it is present more often, whether by availability, failures, the
    filter or the selector. Taking part means that the model was kept.

    A client that answers twice before a model takes part once, with the mean of its updates.

    Symbols: K = ``cutoff``, eta = ``global_rate``. The cutoff limits the weight of clients that are rarely present: it
    trades variance for bias. Deviations: ``weighting="size"`` weighs clients by their samples instead of 1 / N.
    Multiplicities are ignored, because the intervals already account for them.

    >>> rule, old = FedAu(cutoff=None), np.zeros(1)
    >>> memory = rule.memory(2, old)
    >>> def step(round):
    ...     alone = Members(np.array([0]), np.full(1, 0.5), np.ones(1), 2, np.ones(1), round=round)
    ...     return float(rule.combine(old, np.ones((1, 1)), alone, memory).model[0])
    >>> step(2), step(3), step(8)  # weights 1, then the mean of the interval 3, then of 3 and 1; each over N = 2
    (0.5, 1.5, 1.0)
    """

    cutoff: int | None = param(
        50, Optional(Interval(int, 1, 10**9)), "rounds after which an absence counts as an interval (K); None: never"
    )
    global_rate: float = param(1.0, Interval(float, 0, None, "neither"), "global step size (eta)")
    weighting: str = param("count", OneOf(("count", "size")), "clients count equally (the paper) or by their samples")

    def memory(self, federation: int, model: Any) -> _ParticipationGaps:
        """Return a memory without intervals."""
        return _ParticipationGaps(federation)

    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Add the updates, each weighted by how rarely its client takes part."""
        memory = self._own(memory, _ParticipationGaps)
        rarity = memory.weights(members.clients, members.round, self.cutoff)
        # A client that answered twice in one buffer took part once; its answers share the weight.
        _, place, answers = np.unique(members.clients, return_inverse=True, return_counts=True)
        weights = self.global_rate * rarity * members.shares_by(self.weighting) / answers[place]
        return Combined(old + average(weights, models - old), weights)

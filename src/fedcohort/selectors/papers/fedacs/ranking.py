r"""Skewness analytics: rank the clients of a federation by their duels in FedACS ([Wang2021]_).

To rank clients by skewness, run rounds with ``pool_share=1`` (uniform cohorts, so that all clients meet the same
opponents), report the gradient distances, and call :func:`ranking` on the state.

.. [Wang2021] Z. Wang et al., "FedACS: Federated Skewness Analytics in Heterogeneous Decentralized Data Environments",
   IWQoS 2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import special

from fedcohort.core.arrays import AnyArray, FloatArray, IntArray
from fedcohort.core.errors import ParameterError

if TYPE_CHECKING:
    from fedcohort.selectors.papers.fedacs.selector import FedAcsState


class Ranking(NamedTuple):
    """A federation ranked by skewness. Arrays are by client, except ``order``.

    Attributes
    ----------
    order : (N,) int array
        Clients from the least skewed to the most.
    win_rate, low, high : (N,) float array
        Probability of winning a duel: posterior mean and credible interval.
    best_rank, worst_rank : (N,) int array
        The range of ranks, counted from 1, that the intervals leave open: a client whose interval is wholly above
        another's always ranks before it.
    rounds : (N,) float array
        Rounds in which the client duelled.
    """

    order: IntArray
    win_rate: FloatArray
    low: FloatArray
    high: FloatArray
    best_rank: IntArray
    worst_rank: IntArray
    rounds: FloatArray


def ranking(state: FedAcsState, level: float = 0.95) -> Ranking:
    r"""Rank all clients by skewness, with credible intervals of their probability of winning a duel.

    The duels of one round share the client's one reward. They are not independent, so counting each as an observation
    gives intervals that are too narrow. Instead, a round counts as one observation, the share of duels won. That
    gives :math:`Beta(1 + T_i \hat p_i, 1 + T_i (1 - \hat p_i))` with :math:`\hat p_i = A_i / (A_i + B_i)` and T_i
    rounds. These intervals are conservative, because the share of a round never varies more than a coin with the same
    mean.

    Parameters
    ----------
    state : FedAcsState
        From rounds with uniform cohorts (``pool_share=1``). Cohorts chosen by the bandit pit good clients against each
        other, which narrows the differences.
    level : float
        Level of the credible intervals.

    Returns
    -------
    Ranking

    Examples
    --------
    >>> from fedcohort.selectors.papers.fedacs import FedAcsState
    >>> wins, losses = np.array([2.0, 80.0]), np.array([70.0, 5.0])
    >>> found = ranking(FedAcsState(wins=wins, losses=losses, rounds=np.array([9.0, 9.0])))
    >>> found.order
    array([1, 0])
    >>> found.best_rank, found.worst_rank
    (array([2, 1]), array([2, 1]))
    """
    if not 0 < level < 1:
        raise ParameterError(f"The 'level' of a credible interval must be a number in (0, 1). Got {level!r}.")
    fought = state.wins + state.losses
    # Rounds per duel. A client that never duelled keeps Beta(1, 1), whose interval leaves every rank open.
    scale = np.divide(state.rounds, fought, out=np.zeros(len(fought)), where=fought > 0)
    alpha, beta = 1 + scale * state.wins, 1 + scale * state.losses
    tail = (1 - level) / 2
    rate: FloatArray = alpha / (alpha + beta)
    low: FloatArray = special.betaincinv(alpha, beta, tail)
    high: FloatArray = special.betainccinv(alpha, beta, tail)
    return Ranking(
        order=np.argsort(-rate, kind="stable"),
        win_rate=rate,
        low=low,
        high=high,
        best_rank=1 + _count_above(low, high),
        worst_rank=len(rate) - _count_above(-high, -low),
        rounds=state.rounds,
    )


def _count_above(values: FloatArray, bounds: FloatArray) -> AnyArray:
    """(n,) how many of ``values`` are larger than each bound."""
    return len(values) - np.searchsorted(np.sort(values), bounds, side="right")

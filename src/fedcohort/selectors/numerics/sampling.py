"""Weighted sampling."""

from __future__ import annotations

import math

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.top import top_k

_SUM_BLOCK = 1024  # weights summed at a time
_MIN_WEIGHT = 1e-300  # a smaller weight counts as 0, because dividing by it would overflow


def weighted_sample(weights: FloatArray, k: int, rng: np.random.Generator) -> IntArray:
    """Draw ``k`` positions one by one without replacement, each with probability proportional to its weight.

    The probability of being among the k is not proportional to the weight; see :func:`systematic_sample` for that.

    Taking the smallest of exponential keys E_i / w_i has exactly the same distribution as drawing one by one.
    Positions of weight zero come last, in random order. O(n).

    >>> weighted_sample(np.array([0.0, 1.0, 0.0]), 1, np.random.default_rng(0))
    array([1])
    """
    # One draw per position whatever the weights are, so that equal seeds stay comparable when a weight changes.
    keys = rng.standard_exponential(len(weights))
    positive = weights > _MIN_WEIGHT
    if positive.all():
        keys = keys / weights
    else:
        # Positions of weight zero are eligible only when no others are left.
        keys = np.where(positive, keys / np.where(positive, weights, 1.0), np.inf)
        missing = k - int(positive.sum())
        if missing > 0:
            chosen = top_k(-keys, k - missing)
            return np.concatenate([chosen, rng.choice(np.flatnonzero(~positive), missing, replace=False)])
    return top_k(-keys, k)


def systematic_sample(chance: FloatArray, rng: np.random.Generator) -> IntArray:
    """Draw as many positions as ``chance`` sums to, position i with probability exactly ``chance[i]``.

    Certain positions come first. The others are laid out in random order as intervals of the length of their
    probabilities, and the intervals that contain one of the points u, u + 1, u + 2, ... with a uniform u are taken.
    """
    certain = np.flatnonzero(chance >= 1.0)
    others = rng.permutation(np.flatnonzero(chance < 1.0))
    count = round(float(chance[others].sum()))  # an integer up to rounding
    ends = np.cumsum(chance[others])
    points = rng.random() + np.arange(count)
    # An interval is at most 1 long, so no position is hit twice. Rounding can put the last point past the end.
    hit = np.minimum(np.searchsorted(ends, points, side="right"), len(others) - 1)
    return np.concatenate([certain, others[np.unique(hit)]])


def inclusion_probabilities(importance: FloatArray, m: int) -> FloatArray:
    """Return probabilities (n,) proportional to ``importance`` but at most 1, which sum to m.

    Of all samplings of m items on average, the one with these probabilities has the least variance (W. Chen et al.,
    "Optimal Client Sampling for Federated Learning", 2020).

    Parameters
    ----------
    importance : (n,) float array
        u_i, at least 0. If all u_i below the certain ones are 0, their probabilities are equal.
    m : int
        The sum of the probabilities; with n or more, all are 1.

    Examples
    --------
    >>> inclusion_probabilities(np.array([1.0, 1.0, 2.0]), 2)
    array([0.5, 0.5, 1. ])
    """
    n = len(importance)
    if m >= n:
        return np.ones(n)
    order = np.argsort(importance, kind="stable")
    u = importance[order]
    total = np.cumsum(u)
    left = np.arange(1, m + 1)  # m + l - n for l = n - m + 1, ..., n
    # The largest l whose largest member has a probability of at most 1; all above it are certain.
    fits = left * u[n - m :] <= total[n - m :]
    places = int(left[fits][-1])  # of those that are not certain; the first always fits
    uncertain = n - m + places  # l
    chance = np.ones(n)
    if total[uncertain - 1] > 0:
        chance[order[:uncertain]] = np.minimum(places * u[:uncertain] / total[uncertain - 1], 1.0)
    else:
        chance[order[:uncertain]] = places / uncertain
    return chance


def softmax_sample(logits: FloatArray, k: int, rng: np.random.Generator) -> IntArray:
    """Draw ``k`` positions without replacement with probabilities proportional to exp(logits), in log space.

    The Gumbel form of :func:`weighted_sample`. It never overflows, and -inf comes last.
    """
    return top_k(logits - np.log(rng.standard_exponential(len(logits))), k)


def log_choice(logits: FloatArray, uniform: float) -> tuple[int, float]:
    """Return a position drawn with probability proportional to exp(logits), and the logarithm of that probability.

    ``uniform`` is one uniform random number in [0, 1).

    >>> log_choice(np.array([-np.inf, 800.0, -np.inf]), 0.99)
    (1, 0.0)
    """
    highest = float(logits.max())
    weights = logits - highest  # at most 0, so no power overflows
    np.exp(weights, out=weights)
    start, before, total = 0, 0.0, None
    if len(weights) > _SUM_BLOCK:
        # A long cumulative sum is slow, so sum blocks first. Only the block that is hit needs a cumulative sum.
        below = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _SUM_BLOCK)))
        total = float(below[-1])
        block = min(int(below.searchsorted(uniform * total, side="right")), len(below) - 1)
        start, before = block * _SUM_BLOCK, float(below[block - 1]) if block else 0.0
    inside = weights[start : start + _SUM_BLOCK].cumsum()
    total = float(inside[-1]) if total is None else total
    position = start + min(int(inside.searchsorted(uniform * total - before, side="right")), len(inside) - 1)
    return position, float(logits[position]) - highest - math.log(total)


def scale_to_all_clients(shares: FloatArray, candidates: IntArray) -> float:
    """Return the factor by which the candidates' data must count more to stand for the data of all clients.

    Only available clients can be drawn, so only their mean update can be estimated without bias. Without this factor,
    the others would count as updates of 0, and with few clients available the model would hardly move.

    >>> scale_to_all_clients(np.array([0.5, 0.3, 0.2]), np.array([1, 2]))
    2.0
    """
    present = float(shares[candidates].sum())
    return 1.0 / present if present > 0 else 1.0


def beta_draws(alpha: FloatArray, beta: FloatArray, rng: np.random.Generator) -> FloatArray:
    r"""Return one draw :math:`\theta_i \sim Beta(\alpha_i, \beta_i)` per arm.

    Beta(1, 1) is the uniform distribution, which costs a tenth of a Beta draw. In a large federation, nearly all arms
    are still at Beta(1, 1).

    Parameters
    ----------
    alpha, beta : (n,) float array
        Positive.
    rng : Generator

    Returns
    -------
    (n,) float array
    """
    theta = rng.random(len(alpha))
    touched = np.flatnonzero((alpha != 1) | (beta != 1))
    if len(touched):
        theta[touched] = rng.beta(alpha[touched], beta[touched])
    return theta

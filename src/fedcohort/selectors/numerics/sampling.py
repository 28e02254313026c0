"""Weighted sampling, one or several without replacement."""

from __future__ import annotations

import math

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.top import top_k

_SUM_BLOCK = 1024


_LEAST_WEIGHT = 1e-300  # a smaller one counts as none: divided by it, a key would be infinite


def weighted_sample(weights: FloatArray, k: int, rng: np.random.Generator) -> IntArray:
    """Draw ``k`` positions without replacement, each next one with probability proportional to its weight.

    Several together are not in the draw with probabilities proportional to the weights; see
    :func:`systematic_sample` for that.

    Exponential keys E_i / w_i in ascending order have exactly the law of drawing one after the other; positions of
    weight zero come last, in random order. O(n).

    >>> weighted_sample(np.array([0.0, 1.0, 0.0]), 1, np.random.default_rng(0))
    array([1])
    """
    keys = rng.standard_exponential(len(weights))
    positive = weights > _LEAST_WEIGHT
    if positive.all():
        keys = keys / weights
    else:
        # Clients without data are eligible only when nobody else is left.
        keys = np.where(positive, keys / np.where(positive, weights, 1.0), np.inf)
        missing = k - int(positive.sum())
        if missing > 0:
            chosen = top_k(-keys, k - missing)
            return np.concatenate([chosen, rng.choice(np.flatnonzero(~positive), missing, replace=False)])
    return top_k(-keys, k)


def systematic_sample(chance: FloatArray, rng: np.random.Generator) -> IntArray:
    """Draw positions of a fixed number, the sum of ``chance``, among which i is with probability exactly ``chance[i]``.

    The certain ones come first. The others are laid out in random order as intervals as long as their probabilities,
    and those are taken that contain one of the points u, u + 1, u + 2, ... with a uniform u.
    """
    certain = np.flatnonzero(chance >= 1.0)
    others = rng.permutation(np.flatnonzero(chance < 1.0))
    wanted = round(float(chance[others].sum()))
    ends = np.cumsum(chance[others])
    points = rng.random() + np.arange(wanted)
    hit = np.minimum(np.searchsorted(ends, points, side="right"), len(others) - 1)
    return np.concatenate([certain, others[np.unique(hit)]])


def inclusion_probabilities(importance: FloatArray, m: int) -> FloatArray:
    """Return the probabilities (n,) to be among m, in proportion to ``importance`` but at most 1; they sum to m.

    Of all samplings of m things on average, one with these has the least variance (W. Chen et al., "Optimal Client
    Sampling for Federated Learning", 2020).

    Parameters
    ----------
    importance : (n,) float array
        u_i, at least 0. Where those that are not certain are all 0, they share what is left equally.
    m : int
        How many clients are wanted; n or more makes everybody certain.

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
    fits = left * u[n - m :] <= total[n - m :]
    wanted = int(left[fits][-1])  # the first always fits
    uncertain = n - m + wanted  # l
    chance = np.ones(n)
    if total[uncertain - 1] > 0:
        chance[order[:uncertain]] = np.minimum(wanted * u[:uncertain] / total[uncertain - 1], 1.0)
    else:
        chance[order[:uncertain]] = wanted / uncertain
    return chance


def softmax_sample(logits: FloatArray, k: int, rng: np.random.Generator) -> IntArray:
    """Draw ``k`` positions without replacement with probabilities proportional to exp(logits), in log space.

    The Gumbel form of :func:`weighted_sample`: no overflow whatever the logits; -inf comes last.
    """
    return top_k(logits - np.log(rng.standard_exponential(len(logits))), k)


def log_choice(logits: FloatArray, uniform: float) -> tuple[int, float]:
    """Return a position drawn with probability proportional to exp(logits), and the logarithm of that probability.

    ``uniform`` is one uniform random number in [0, 1).

    >>> log_choice(np.array([-np.inf, 800.0, -np.inf]), 0.99)
    (1, 0.0)
    """
    highest = float(logits.max())
    weights = logits - highest
    np.exp(weights, out=weights)
    start, before, total = 0, 0.0, None
    if len(weights) > _SUM_BLOCK:
        # A long running sum is slow; sums of blocks are not, and only the block that is hit needs the running sum.
        below = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _SUM_BLOCK)))
        total = float(below[-1])
        block = min(int(below.searchsorted(uniform * total, side="right")), len(below) - 1)
        start, before = block * _SUM_BLOCK, float(below[block - 1]) if block else 0.0
    inside = weights[start : start + _SUM_BLOCK].cumsum()
    total = float(inside[-1]) if total is None else total
    position = start + min(int(inside.searchsorted(uniform * total - before, side="right")), len(inside) - 1)
    return position, float(logits[position]) - highest - math.log(total)


def scale_to_everybody(shares: FloatArray, candidates: IntArray) -> float:
    """Return by how much candidates must count more for their data to stand for that of all clients.

    An unbiased estimate of the update of all clients can be had only of those that can be drawn. Without this factor
    the others would count as if they had left the model as it was, and with few available the model would hardly move.

    >>> scale_to_everybody(np.array([0.5, 0.3, 0.2]), np.array([1, 2]))
    2.0
    """
    there = float(shares[candidates].sum())
    return 1.0 / there if there > 0 else 1.0


def beta_draws(alpha: FloatArray, beta: FloatArray, rng: np.random.Generator) -> FloatArray:
    r"""Return one draw :math:`\theta_i \sim Beta(\alpha_i, \beta_i)` per arm.

    Beta(1, 1) is the uniform distribution, which costs a tenth of a Beta draw: in a large federation nearly every
    client is still untouched.

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

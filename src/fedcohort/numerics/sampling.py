"""Weighted sampling, one or several without replacement."""

from __future__ import annotations

import numpy as np

from fedcohort.arrays import FloatArray, IntArray
from fedcohort.numerics.top import top_k


def weighted_sample(weights: FloatArray, k: int, rng: np.random.Generator) -> IntArray:
    """Draw ``k`` positions without replacement, each next one with probability proportional to its weight.

    Exponential keys E_i / w_i in ascending order have exactly the law of drawing one after the other; positions of
    weight zero come last, in random order. O(n).

    >>> weighted_sample(np.array([0.0, 1.0, 0.0]), 1, np.random.default_rng(0))
    array([1])
    """
    keys = rng.standard_exponential(len(weights))
    positive = weights > 0
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


def softmax_sample(logits: FloatArray, k: int, rng: np.random.Generator) -> IntArray:
    """Draw ``k`` positions without replacement with probabilities proportional to exp(logits), in log space.

    The Gumbel form of :func:`weighted_sample`: no overflow whatever the logits; -inf comes last.
    """
    return top_k(logits - np.log(rng.standard_exponential(len(logits))), k)


def log_choice(log_weights: FloatArray, uniform: float) -> int:
    """Return one position, drawn with probability proportional to exp(log_weights) by one uniform number in [0, 1).

    >>> log_choice(np.array([-np.inf, 800.0, -np.inf]), 0.99)
    1
    """
    running = np.exp(log_weights - log_weights.max()).cumsum()
    return min(int(running.searchsorted(uniform * running[-1], side="right")), len(running) - 1)

"""Largest-k selection without a full sort."""

from __future__ import annotations

import numpy as np

from fedcohort.arrays import FloatArray, IntArray


def top_k(scores: FloatArray, k: int, rng: np.random.Generator | None = None) -> IntArray:
    """Return the positions of the ``k`` largest scores, largest first.

    Ties at the boundary are broken at random with ``rng`` and by the lower position without; NaN counts as -inf.
    O(n + k log k), n = len(scores).

    >>> top_k(np.array([1.0, 5.0, 3.0]), 2)
    array([1, 2])
    """
    n = len(scores)
    k = min(k, n)
    if k <= 0:
        return np.empty(0, np.int64)
    if np.isnan(scores.max()):
        scores = np.where(np.isnan(scores), -np.inf, scores)
    chosen = np.arange(n) if k == n else _largest(scores, k, rng)
    if rng is not None:
        chosen = rng.permutation(chosen)
    return np.asarray(chosen[np.argsort(-scores[chosen], kind="stable")], dtype=np.int64)


def _largest(scores: FloatArray, k: int, rng: np.random.Generator | None) -> IntArray:
    """Return the positions of the ``k`` largest of more than ``k`` scores, in no order.

    Bandits give most clients of a large federation one and the same score, the largest or the smallest, and
    partitioning is an order of magnitude slower among equals: both heaps are set apart first.
    """
    low, high = scores.min(), scores.max()
    tied = np.flatnonzero(scores == high)
    above: IntArray = np.empty(0, np.int64)
    if len(tied) < k:
        middle = np.flatnonzero(scores > low)
        if len(middle) < k:
            above, tied = middle, np.flatnonzero(scores == low)
        else:
            part = scores if len(middle) == len(scores) else scores[middle]
            threshold = np.partition(part, len(part) - k)[len(part) - k]
            above, tied = np.flatnonzero(scores > threshold), np.flatnonzero(scores == threshold)
    wanted = k - len(above)
    if len(tied) > wanted and rng is not None:
        tied = rng.choice(tied, wanted, replace=False)
    return np.concatenate([above, tied[:wanted]])

"""Largest-k selection without a full sort."""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray

_SAMPLE = 1024  # scores that give a guess of the threshold; fewer than 16 times as many scores need no guess


def top_k(scores: FloatArray, k: int, rng: np.random.Generator | None = None) -> IntArray:
    """Return the positions of the ``k`` largest scores, largest first.

    With ``rng``, ties are broken at random; without, the lower position wins. NaN counts as -inf.
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
    chosen = np.arange(n) if k == n else _k_largest(scores, k, rng)
    if rng is not None:  # then a stable sort leaves equal scores in random order
        chosen = rng.permutation(chosen)
    return np.asarray(chosen[np.argsort(-scores[chosen], kind="stable")], dtype=np.int64)


def _k_largest(scores: FloatArray, k: int, rng: np.random.Generator | None) -> IntArray:
    """Return the positions of the ``k`` largest of more than ``k`` scores, in no order.

    Bandits give most clients of a large federation the same score, and partitioning equal values is ten times slower.
    So a sample gives a guess a little below the threshold. Usually, at least k scores lie above the guess but few
    enough to partition quickly, or the guess is the threshold.
    """
    part = np.arange(len(scores))
    if len(scores) > 16 * _SAMPLE:
        sample = scores[:: len(scores) // _SAMPLE]
        # Four times the expected rank plus 16 is below the threshold in nearly all samples, however small k is.
        rank = min(len(sample), int(4 * k * len(sample) / len(scores)) + 16)
        guess = np.partition(sample, len(sample) - rank)[len(sample) - rank]
        above = np.flatnonzero(scores > guess)
        if len(above) >= k:
            part = above
        else:
            equal = np.flatnonzero(scores == guess)
            if len(above) + len(equal) >= k:
                return _fill_with_ties(above, equal, k, rng)
    if len(part) == k:
        return part
    values = scores[part]
    threshold = np.partition(values, len(part) - k)[len(part) - k]
    return _fill_with_ties(part[values > threshold], part[values == threshold], k, rng)


def _fill_with_ties(above: IntArray, tied: IntArray, k: int, rng: np.random.Generator | None) -> IntArray:
    """Fill ``above`` up to ``k`` positions from ``tied``: random ones, or the first ones without ``rng``."""
    places = k - len(above)
    if len(tied) > places and rng is not None:
        tied = rng.choice(tied, places, replace=False)
    return np.concatenate([above, tied[:places]])

"""Running means of reported values, and expected durations of clients that have not reported."""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray


def update_means(
    mean: FloatArray, count: FloatArray, clients: IntArray, new: FloatArray, memory: int
) -> tuple[FloatArray, FloatArray]:
    """Return means (N,) and counts (N,) after ``clients`` (k,) reported ``new`` (k,); older values fade.

    >>> update_means(np.array([4.0, 0.0]), np.array([1.0, 0.0]), np.array([0]), np.array([2.0]), memory=10)
    (array([3., 0.]), array([2., 0.]))
    """
    mean, count = mean.copy(), count.copy()
    count[clients] += 1
    mean[clients] += (new - mean[clients]) / np.minimum(count[clients], memory)
    return mean, count


def expected_seconds(seconds: FloatArray, timed: FloatArray, asked: FloatArray) -> FloatArray:
    """(n,) expected seconds of each client: its mean, 0 if never asked, the largest mean if it never answered.

    Parameters
    ----------
    seconds : (n,) float array
        Mean duration.
    timed : (n,) float array
        Number of durations in that mean.
    asked : (n,) float array
        Number of cohorts the client was in.

    >>> expected_seconds(np.array([2.0, 5.0, 0.0, 0.0]), np.array([1.0, 3.0, 0.0, 0.0]), np.array([1.0, 3.0, 0.0, 1.0]))
    array([2., 5., 0., 5.])
    """
    known = timed > 0
    if known.all():
        return seconds
    most = float(seconds[known].max()) if known.any() else 1.0
    return np.where(known, seconds, np.where(asked > 0, most, 0.0))

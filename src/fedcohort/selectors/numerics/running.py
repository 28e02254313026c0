"""Running means of reported values."""

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

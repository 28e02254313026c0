"""Running means of reported values, and what stands for values that were not reported."""

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
    # A plain mean at first; then each new value counts one part in ``memory``.
    mean[clients] += (new - mean[clients]) / np.minimum(count[clients], memory)
    return mean, count


def fill_with_mean(values: FloatArray) -> FloatArray:
    """Return the values with NaN replaced by the mean of the others; ones if all are NaN.

    >>> fill_with_mean(np.array([1.0, np.nan, 3.0]))
    array([1., 2., 3.])
    """
    unknown = np.isnan(values)
    if not unknown.any():
        return values
    return np.where(unknown, 1.0 if unknown.all() else float(values[~unknown].mean()), values)

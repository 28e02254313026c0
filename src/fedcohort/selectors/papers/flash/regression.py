r"""The linear bandit of FLASH: ridge regression and one Thompson draw (Eqs. 1, 2).

V = X'X + lambda I and b = X'r over all observations so far.

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import linalg

from fedcohort.core.arrays import FloatArray


def add_observations(
    gram: FloatArray, moment: FloatArray, x: FloatArray, r: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return V and b after more observations, in O(k d^2).

    Parameters
    ----------
    gram : (d, d) float array
        V, at the start lambda times the identity.
    moment : (d,) float array
        b, at the start 0.
    x : (k, d) float array
        Contexts.
    r : (k,) float array
        Rewards.

    Returns
    -------
    gram, moment : new arrays
    """
    return gram + x.T @ x, moment + x.T @ r


def solution(gram: FloatArray, moment: FloatArray) -> FloatArray:
    """Return the ridge solution V^-1 b, (d,).

    >>> solution(np.array([[2.0, 0], [0, 4.0]]), np.array([1.0, 1.0]))
    array([0.5 , 0.25])
    """
    # Always possible, because lambda I is part of V.
    theta: FloatArray = linalg.cho_solve((linalg.cholesky(gram, lower=True), True), moment)
    return theta


def posterior_draw(gram: FloatArray, mean: FloatArray, scale: float, rng: np.random.Generator) -> FloatArray:
    """Return one draw of N(mean, scale^2 V^-1), (d,): with V = L L', mean + scale L^-T z has that covariance."""
    z = rng.standard_normal(len(mean))
    step: FloatArray = linalg.solve_triangular(linalg.cholesky(gram, lower=True), z, trans="T", lower=True)
    return mean + scale * step


def confidence_width(t: int, clients: int, elements: int, ridge: float, delta: float) -> float:
    r"""Return :math:`\alpha_t = \sqrt\lambda + \sqrt{d \ln((1 + t m) / \delta)}`."""
    return math.sqrt(ridge) + math.sqrt(elements * math.log((1 + t * clients) / delta))

r"""Greedy choice of a cohort by the expected drop of the global loss (Sec. 4.3, Algorithm 1).

.. [Tang2022] M. Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated
   Learning", CVPR 2022. The paper writes X as (d, N); here clients are rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray

_BLOCK = 32_768  # rows processed at a time, so that intermediate results stay in the cache


class Greedy(NamedTuple):
    """A cohort picked by the expected drop of the global loss, and the numbers behind it.

    Attributes
    ----------
    picks : (k,) int array
        Positions among the candidates, in the order of the picks.
    drop : (c,) float array
        Expected drop of the global loss, alpha_k sum_i p_i Sigma_ik sigma_k / (sigma_k^2 + s^2): for a picked client
        at its pick, for the others at the last pick.
    variance : (c,) float array
        sigma_k^2 before the first pick.
    covariance : (c,) float array
        sum_i p_i Sigma_ik before the first pick.
    """

    picks: IntArray
    drop: FloatArray
    variance: FloatArray
    covariance: FloatArray


def pick_by_expected_drop(
    embedding: FloatArray, direction: FloatArray, alpha: FloatArray | float, size: int, noise: float
) -> Greedy:
    r"""Pick a cohort greedily by the expected drop of the global loss ([Tang2022]_ Algorithm 1), O(c d) per pick.

    Conditioning on client k turns the covariance X A X' into X A_new X' with

    .. math:: A_{new} = A - \frac{A x_k x_k^T A}{\sigma_k^2 + s^2},

    so the embedding is never rewritten. One product u = X A x_k per pick holds Sigma_ik for every i and updates

    1. the variances, sigma_i^2 -= u_i^2 / (sigma_k^2 + s^2),
    2. the numerators n_i = sum_j p_j Sigma_ji, n_i -= u_i n_k / (sigma_k^2 + s^2),
    3. the scores, alpha_i n_i sigma_i / (sigma_i^2 + s^2).

    Parameters
    ----------
    embedding : (c, d) float array
        Embeddings of the candidates.
    direction : (d,) float array
        X' p over **all** clients, candidates or not, because the global loss is that of all clients.
    alpha : (c,) float array or float
        Scale of the predicted drop of each client's own loss, alpha_k = a beta^tau_k.
    size : int
        Number of clients to pick, at most c.
    noise : float
        s > 0.

    Examples
    --------
    There are two pairs of similar clients. The second pick comes from the other pair.

    >>> x = np.array([[1.0, 0.0], [0.9, 0.0], [0.0, 1.0], [0.0, 0.8]])
    >>> pick_by_expected_drop(x, x.mean(axis=0), 1.0, size=2, noise=0.01).picks
    array([0, 2])
    """
    c, d = embedding.shape
    s2 = noise * noise
    scale = np.broadcast_to(np.asarray(alpha, dtype=np.float64), (c,))
    variance = np.einsum("nd,nd->n", embedding, embedding)
    covariance = embedding @ direction
    # For the explanation, because the picks below change both in place.
    prior_variance, prior_covariance = variance.copy(), covariance.copy()
    inner = np.eye(d)
    drop = np.empty(c)
    picks = np.empty(size, dtype=np.int64)
    gains = np.empty(size)
    product, work = np.empty(min(c, _BLOCK)), np.empty(min(c, _BLOCK))
    bounds = [slice(start, min(start + _BLOCK, c)) for start in range(0, c, _BLOCK)]
    taken: list[list[int]] = [[] for _ in bounds]  # positions within each block
    column = np.zeros(d)  # A x_k of the client picked last
    shrink, shift = 0.0, 0.0  # 1 / (sigma_k^2 + s^2) and n_k / (sigma_k^2 + s^2) of that client
    for turn in range(size):
        best, best_drop = -1, -math.inf
        for rows, picked in zip(bounds, taken, strict=True):
            v, n, out = variance[rows], covariance[rows], drop[rows]
            u, w = product[: len(out)], work[: len(out)]
            if turn > 0:
                np.dot(embedding[rows], column, out=u)
                np.multiply(u, shift, out=w)
                n -= w
                u *= u
                u *= shrink
                v -= u
                np.maximum(v, 0.0, out=v)  # rounding can make the variance of a fully explained client negative
            np.sqrt(v, out=out)
            np.add(v, s2, out=w)
            out /= w
            out *= n
            out *= scale[rows]
            out[picked] = -math.inf  # conditioning leaves a picked client some variance, s^2
            local = int(out.argmax())
            if out[local] > best_drop:
                best, best_drop = rows.start + local, float(out[local])
        picks[turn], gains[turn] = best, best_drop
        taken[best // _BLOCK].append(best % _BLOCK)
        column = inner @ embedding[best]
        shrink = 1.0 / (float(variance[best]) + s2)
        shift = float(covariance[best]) * shrink
        inner -= np.outer(column, column) * shrink
    drop[picks] = gains
    return Greedy(picks, drop, prior_variance, prior_covariance)

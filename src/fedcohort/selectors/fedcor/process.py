r"""A Gaussian process over client losses with a low-rank covariance: likelihood and fit (Secs. 4.2, 4.5).

The loss changes of the N clients in one round are modelled as :math:`\Delta l \sim N(0, X X^T + s^2 I)`, where row i of
X (N, d) is the embedding of client i. Nothing here ever forms an N x N matrix.

.. [Tang2022] M. Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated
   Learning", CVPR 2022. The paper writes X as (d, N); here clients are rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedcohort.arrays import FloatArray, IntArray

BLOCK = 32_768  # rows worked on at a time, so that what is computed of them stays in the cache


@dataclass(frozen=True)
class SampleGroup:
    """Samples of loss changes in which the same clients answered.

    Attributes
    ----------
    rows : (n,) int array or None
        Who answered, ascending; None stands for all N clients.
    changes : (n, T) float array
        Loss changes, one column per sample.
    weights : (T,) float array
        Weight of each sample in the likelihood.
    """

    rows: IntArray | None
    changes: FloatArray
    weights: FloatArray


def group_samples(changes: FloatArray, weights: FloatArray) -> list[SampleGroup]:
    """Sort the samples by who answered, so that samples with the same clients share one matrix inversion.

    Parameters
    ----------
    changes : (N, T) float array
        Loss changes, one column per sample; NaN for a client that did not answer.
    weights : (T,) float array
        Weight of each sample; samples of weight 0 and samples nobody answered are left out.
    """
    seen = ~np.isnan(changes)
    alike: dict[bytes, list[int]] = {}
    for t in range(changes.shape[1]):
        if weights[t] > 0 and seen[:, t].any():
            alike.setdefault(np.packbits(seen[:, t]).tobytes(), []).append(t)
    groups = []
    for columns in alike.values():
        mask = seen[:, columns[0]]
        rows = None if mask.all() else np.flatnonzero(mask)
        values = changes[:, columns] if rows is None else changes[rows][:, columns]
        groups.append(SampleGroup(rows, np.ascontiguousarray(values), weights[columns]))
    return groups


def log_likelihood(embedding: FloatArray, groups: list[SampleGroup], noise: float) -> float:
    r"""Return the weighted log-likelihood of the samples, :math:`\Phi(X)` of [Tang2022]_ Eq. 17.

    With K = X X' + s^2 I over the n clients that answered and the inner matrix A = X' X + s^2 I (d, d),

    1. log det K = (n - d) log s^2 + log det A (determinant lemma),
    2. y' K^-1 y = (y'y - b' A^-1 b) / s^2, b = X'y (Woodbury),

    so one sample costs O(n d^2 + d^3).

    Parameters
    ----------
    embedding : (N, d) float array
        X.
    groups : list of SampleGroup
        From :func:`group_samples`.
    noise : float
        s, a standard deviation, > 0.
    """
    s2 = noise * noise
    total = 0.0
    for group in groups:
        x = embedding if group.rows is None else embedding[group.rows]
        n, d = x.shape
        y, w = group.changes, group.weights
        inner = x.T @ x
        inner[np.diag_indices(d)] += s2
        b = x.T @ y
        log_det = (n - d) * math.log(s2) + float(np.linalg.slogdet(inner)[1])
        quadratic = (np.einsum("nt,nt->t", y, y) - np.einsum("dt,dt->t", b, np.linalg.solve(inner, b))) / s2
        total += -0.5 * float(w @ (quadratic + log_det + n * math.log(2 * math.pi)))
    return total


def likelihood_gradient(embedding: FloatArray, groups: list[SampleGroup], noise: float) -> FloatArray:
    r"""Return the gradient (N, d) of :func:`log_likelihood` with respect to the embedding.

    For one sample, with c = A^-1 X'y: :math:`\partial/\partial X = -X A^{-1} + s^{-2} (y - X c) c^T`, because
    K^-1 X = X A^-1. Collected over samples that share their clients this is X P + Y Q with a (d, d) matrix P and a
    (T, d) matrix Q.
    """
    return _gradient_rows(embedding, groups, _gradient_factors(embedding, groups, noise), 0, len(embedding))


Factors = list[tuple[FloatArray, FloatArray]]


def _gradient_factors(embedding: FloatArray, groups: list[SampleGroup], noise: float) -> Factors:
    """Return P (d, d) and Q (T, d) of each group."""
    s2 = noise * noise
    factors = []
    for group in groups:
        x = embedding if group.rows is None else embedding[group.rows]
        inner = x.T @ x
        inner.flat[:: len(inner) + 1] += s2
        inverse = np.linalg.inv(inner)
        c = inverse @ (x.T @ group.changes)  # (d, T)
        q = (c * (group.weights / s2)).T
        factors.append((inverse * -group.weights.sum() - c @ q, q))
    return factors


def _gradient_rows(
    embedding: FloatArray, groups: list[SampleGroup], factors: Factors, start: int, stop: int
) -> FloatArray:
    """Return rows ``start`` to ``stop`` of the gradient."""
    gradient = np.zeros((stop - start, embedding.shape[1]))
    for group, (p, q) in zip(groups, factors, strict=True):
        if group.rows is None:
            gradient += embedding[start:stop] @ p
            gradient += group.changes[start:stop] @ q
        else:
            first, last = np.searchsorted(group.rows, (start, stop))
            rows = group.rows[first:last]
            gradient[rows - start] += embedding[rows] @ p + group.changes[first:last] @ q
    return gradient


def fit_embedding(
    embedding: FloatArray,
    changes: FloatArray,
    weights: FloatArray,
    *,
    noise: float,
    learning_rate: float,
    steps: int,
) -> FloatArray:
    """Climb the likelihood from ``embedding`` with Adam and return the new embedding ([Tang2022]_ Eqs. 16, 17).

    The likelihood of few samples is maximised by a covariance of their rank, which is not wanted: the number of steps
    is what ties the result to the embedding it started from.

    Parameters
    ----------
    embedding : (N, d) float array
        Start, the embedding before; not modified.
    changes : (N, T) float array
        Loss changes, one column per sample; NaN for clients that did not answer.
    weights : (T,) float array
        gamma^m of each sample.
    noise : float
        s, standard deviation of what the embedding does not explain.
    learning_rate : float
        Adam's step size (beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8).
    steps : int
        Number of Adam steps.

    Returns
    -------
    (N, d) float array
    """
    x = np.array(embedding, dtype=np.float64)
    groups = group_samples(changes, weights)
    if not groups:
        return x
    first, second = np.zeros_like(x), np.zeros_like(x)
    for step in range(1, steps + 1):
        factors = _gradient_factors(x, groups, noise)
        length, spread = learning_rate / (1.0 - 0.9**step), math.sqrt(1.0 - 0.999**step)
        for start in range(0, len(x), BLOCK):
            stop = min(start + BLOCK, len(x))
            gradient = _gradient_rows(x, groups, factors, start, stop)
            m, v = first[start:stop], second[start:stop]
            m *= 0.9
            m += 0.1 * gradient
            v *= 0.999
            gradient *= gradient
            gradient *= 0.001
            v += gradient
            np.sqrt(v, out=gradient)
            gradient /= spread
            gradient += 1e-8
            np.divide(m, gradient, out=gradient)
            gradient *= length
            x[start:stop] += gradient
    return x


def correlations(embedding: FloatArray, rows: IntArray | None = None) -> FloatArray:
    """Return the correlations r_ij of the loss changes of some clients, (n, n): cosines of their embeddings.

    >>> correlations(np.array([[3.0, 0.0], [1.0, 1.0]])).round(3)
    array([[1.   , 0.707],
           [0.707, 1.   ]])
    """
    unit = unit_embedding(embedding if rows is None else embedding[rows])
    return unit @ unit.T


def unit_embedding(embedding: FloatArray) -> FloatArray:
    """Return the embeddings scaled to length 1, as they are drawn ([Tang2022]_ Fig. 7); zero rows stay zero."""
    lengths = np.sqrt(np.einsum("nd,nd->n", embedding, embedding))
    return embedding / np.where(lengths > 0, lengths, 1.0)[:, None]

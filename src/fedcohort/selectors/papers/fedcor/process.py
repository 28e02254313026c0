r"""A Gaussian process over client losses with a low-rank covariance, and its fit (Secs. 4.2, 4.5).

The loss changes of the N clients in one round are modelled as :math:`\Delta l \sim N(0, X X^T + s^2 I)`, where row i of
X (N, d) is the embedding of client i. No N x N matrix is formed.

.. [Tang2022] M. Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated
   Learning", CVPR 2022. The paper writes X as (d, N); here clients are rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray

_BLOCK = 2_048  # clients processed at a time, so that intermediate results stay in the cache
_MANY = 100_000  # with this many clients or more, the fit is in single precision
_MAX_SINGLE = 1e16  # largest square of change over noise for single precision


class _SampleGroup(NamedTuple):
    """Samples of loss changes in which the same clients answered.

    Attributes
    ----------
    rows : (n,) int array or None
        Clients that answered, ascending; None: all N clients.
    changes : (n, T) float array
        Loss changes, one column per sample.
    weights : (T,) float array
        Weight of each sample in the likelihood.
    """

    rows: IntArray | None
    changes: FloatArray
    weights: FloatArray


def _group_samples(changes: FloatArray, weights: FloatArray) -> list[_SampleGroup]:
    """Group the samples by the clients that answered, so that each group needs only one matrix inversion.

    Parameters
    ----------
    changes : (N, T) float array
        Loss changes, one column per sample; NaN for a client that did not answer.
    weights : (T,) float array
        Weight of each sample; samples without weight or answers are left out.
    """
    answered = ~np.isnan(changes)
    by_clients: dict[bytes, list[int]] = {}
    for t in range(changes.shape[1]):
        # Packed bits of who answered are the key: nearly always all samples have one key, and one inverse.
        if weights[t] > 0 and answered[:, t].any():
            by_clients.setdefault(np.packbits(answered[:, t]).tobytes(), []).append(t)
    groups = []
    for columns in by_clients.values():
        mask = answered[:, columns[0]]
        rows = None if mask.all() else np.flatnonzero(mask)
        values = changes[:, columns] if rows is None else changes[rows][:, columns]
        groups.append(_SampleGroup(rows, np.ascontiguousarray(values), weights[columns]))
    return groups


_Factors = list[tuple[FloatArray, FloatArray]]  # P (d, d) and Q (T, d) of each group


def _factors(sums: FloatArray, groups: list[_SampleGroup], noise: float) -> _Factors:
    r"""Return P and Q of each group, given the total of :meth:`_Block.sums`.

    The gradient of the weighted log-likelihood is :math:`\Phi(X)` of [Tang2022]_ Eq. 17. With the inner matrix
    A = X' X + s^2 I (d, d) and c = A^-1 X'y, that of one sample is :math:`-X A^{-1} + s^{-2} (y - X c) c^T`, because
    (X X' + s^2 I)^-1 X = X A^-1. The sum over samples with the same clients is X P + Y Q with a (d, d) matrix P and a
    (T, d) matrix Q.
    """
    s2, d = noise * noise, len(sums)
    factors = []
    below = d * len(groups)
    for number, group in enumerate(groups):
        inverse = np.linalg.inv(sums[:, number * d : (number + 1) * d] + s2 * np.eye(d))
        c = inverse @ sums[:, below : below + len(group.weights)]  # (d, T)
        q = (c * (group.weights / s2)).T
        factors.append((inverse * -group.weights.sum() - c @ q, q))
        below += len(group.weights)
    return factors


class _Block:
    """Consecutive clients: their embeddings, samples and Adam's moments, one column per client.

    Attributes
    ----------
    z : (d + T, n) float array
        The embeddings, and below them the samples of all groups, so that one product covers both; zero where a client
        did not answer, which adds nothing to any sum.
    """

    def __init__(
        self,
        embedding: FloatArray,
        groups: list[_SampleGroup],
        start: int,
        stop: int,
        memory: FloatArray,
        room: FloatArray,
    ) -> None:
        d, n = embedding.shape[1], stop - start
        self.room = room[: d * n].reshape(d, n)
        height = d + sum(len(group.weights) for group in groups)
        block = memory[(height + 2 * d) * start : (height + 2 * d) * stop].reshape(height + 2 * d, n)
        self.z, self.first, self.second = block[:height], block[height : height + d], block[height + d :]
        self.x = self.z[:d]
        self.x[:] = embedding[start:stop].T
        self.samples: list[slice] = []  # rows of z of each group
        self.answered: list[FloatArray | None] = []  # per group, (n,) 1 if the client answered, else 0; None: all
        below = d
        for group in groups:
            samples = slice(below, below + len(group.weights))
            self.samples.append(samples)
            below = samples.stop
            if group.rows is None:
                self.answered.append(None)
                self.z[samples] = group.changes[start:stop].T
                continue
            first, last = np.searchsorted(group.rows, (start, stop))
            here = group.rows[first:last] - start
            mask = np.zeros(n, memory.dtype)
            mask[here] = 1.0
            self.answered.append(mask)
            self.z[samples, here] = group.changes[first:last].T

    def sums(self) -> FloatArray:
        """Return this block's part of X' X of each group and, as last columns, of X' Y of all groups: (d, G d + T)."""
        d = len(self.x)
        # One product for embeddings and samples. Only groups in which somebody is missing need one of their own.
        products = self.x @ self.z.T
        inner = [products[:, :d] if answered is None else (self.x * answered) @ self.x.T for answered in self.answered]
        return np.hstack([*inner, products[:, d:]]).astype(np.float64, copy=False)

    def gradient(self, factors: _Factors) -> FloatArray:
        """Return the gradient of the likelihood, (d, n), in memory that the next call of any block overwrites."""
        d = len(self.x)
        total = np.zeros((d, len(self.z)), self.z.dtype)
        for (p, q), answered, samples in zip(factors, self.answered, self.samples, strict=True):
            if answered is None:
                total[:, :d] += p
            total[:, samples] = q.T
        gradient = np.matmul(total, self.z, out=self.room)
        for (p, _), answered in zip(factors, self.answered, strict=True):
            if answered is not None:
                gradient += (p.astype(self.z.dtype, copy=False) @ self.x) * answered
        return gradient

    def climb(self, factors: _Factors, step: int, learning_rate: float) -> FloatArray:
        """Take a step of Adam and return the next sums; the moments are kept without their factors 0.1 and 0.001."""
        length, spread = 0.1 * learning_rate / (1.0 - 0.9**step), math.sqrt(0.001 / (1.0 - 0.999**step))
        # The bias corrections and the factors of the moments are two numbers, so that no pass over the block is needed
        # for them.
        gradient = self.gradient(factors)
        self.first *= 0.9
        self.first += gradient
        self.second *= 0.999
        gradient *= gradient
        self.second += gradient
        np.sqrt(self.second, out=gradient)
        gradient += 1e-8 / spread
        np.divide(self.first, gradient, out=gradient)
        gradient *= length / spread
        self.x += gradient
        return self.sums()


def fit_embedding(
    embedding: FloatArray,
    changes: FloatArray,
    weights: FloatArray,
    *,
    noise: float,
    learning_rate: float,
    steps: int,
) -> FloatArray:
    """Maximise the likelihood with Adam, starting from ``embedding`` ([Tang2022]_ Eqs. 16, 17).

    The likelihood of few samples is largest for a covariance of their rank, which is not the aim. A small number of
    steps keeps the result close to the embedding it started from.

    A step of Adam needs only a few (d, d) sums over the other clients, so it is done block by block, with all data of a
    block in the cache. From 100,000 clients on, blocks compute in single precision and their sums are added in double
    precision. This loses little: Adam's steps have the length of the learning rate whatever the size of the gradient,
    so the relative error of a step is that of the gradient, about 1e-6. Only if a gradient is zero up to rounding can
    its sign be wrong, and an element of the embedding be off by a step or two.

    Parameters
    ----------
    embedding : (N, d) float array
        The start; not modified.
    changes : (N, T) float array
        Loss changes, one column per sample; NaN for clients that did not answer.
    weights : (T,) float array
        gamma^m of each sample.
    noise : float
        s, the standard deviation that the embedding does not explain.
    learning_rate : float
        Adam's step size (beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8).
    steps : int
        Number of Adam steps.

    Returns
    -------
    (N, d) float array
    """
    groups = _group_samples(changes, weights)
    if not groups:
        return np.array(embedding, dtype=np.float64)
    precision: type[np.floating[Any]] = np.float64
    if len(changes) >= _MANY:
        # Only if no squared gradient can overflow in it.
        largest = max(float(np.nanmax(changes)), -float(np.nanmin(changes)))
        precision = np.float32 if (largest / noise) ** 2 < _MAX_SINGLE else np.float64
    blocks = _blocks(embedding, groups, precision)
    sums: FloatArray = np.sum([block.sums() for block in blocks], axis=0)
    for step in range(1, steps + 1):
        factors = _factors(sums, groups, noise)
        sums = np.sum([block.climb(factors, step, learning_rate) for block in blocks], axis=0)
    # Contiguous rows, like those of an embedding read from a journal, so that products round in the same way.
    return np.ascontiguousarray(np.concatenate([block.x.T for block in blocks]), dtype=np.float64)


def _blocks(embedding: FloatArray, groups: list[_SampleGroup], precision: type[np.floating[Any]]) -> list[_Block]:
    """Divide the clients into blocks, which are consecutive in memory."""
    n, d = embedding.shape
    height = d + sum(len(group.weights) for group in groups)
    memory, room = np.zeros((height + 2 * d) * n, precision), np.empty(d * min(n, _BLOCK), precision)
    starts = range(0, n, _BLOCK)
    return [_Block(embedding, groups, start, min(start + _BLOCK, n), memory, room) for start in starts]

r"""A Gaussian process over client losses with a low-rank covariance: likelihood and fit (Secs. 4.2, 4.5).

The loss changes of the N clients in one round are modelled as :math:`\Delta l \sim N(0, X X^T + s^2 I)`, where row i of
X (N, d) is the embedding of client i. Nothing here ever forms an N x N matrix.

.. [Tang2022] M. Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated
   Learning", CVPR 2022. The paper writes X as (d, N); here clients are rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray

BLOCK = 2_048  # clients worked on at a time, so that what is computed of them stays in the cache
MANY = 100_000  # clients from which the fit is made in single precision
_LARGEST_SINGLE = 1e16  # of the largest change over the noise, squared, there


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


def likelihood_gradient(embedding: FloatArray, groups: list[SampleGroup], noise: float) -> FloatArray:
    r"""Return the gradient (N, d) of the weighted log-likelihood, :math:`\Phi(X)` of [Tang2022]_ Eq. 17.

    For one sample, with c = A^-1 X'y: :math:`\partial/\partial X = -X A^{-1} + s^{-2} (y - X c) c^T`, because
    K^-1 X = X A^-1. Collected over samples that share their clients this is X P + Y Q with a (d, d) matrix P and a
    (T, d) matrix Q.
    """
    blocks = _blocks(embedding, groups, np.float64)
    factors = _factors(np.sum([block.sums() for block in blocks], axis=0), groups, noise)
    return np.concatenate([block.gradient(factors).T.copy() for block in blocks])


Factors = list[tuple[FloatArray, FloatArray]]  # P (d, d) and Q (T, d) of each group


def _factors(sums: FloatArray, groups: list[SampleGroup], noise: float) -> Factors:
    """Return P and Q of each group, given what :meth:`_Block.sums` adds up to."""
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
    """Some clients next to each other: embedding, samples and Adam's moments, one client a column.

    Attributes
    ----------
    z : (d + T, n) float array
        The embeddings, and below them the samples of all groups, so that one product takes both; zero where a client
        did not answer, which adds nothing to any sum.
    """

    def __init__(
        self,
        embedding: FloatArray,
        groups: list[SampleGroup],
        start: int,
        stop: int,
        memory: FloatArray,
        room: FloatArray,
    ) -> None:
        d, n = embedding.shape[1], stop - start
        self.room = room[: d * n].reshape(d, n)
        height = d + sum(len(group.weights) for group in groups)
        mine = memory[(height + 2 * d) * start : (height + 2 * d) * stop].reshape(height + 2 * d, n)
        self.z, self.first, self.second = mine[:height], mine[height : height + d], mine[height + d :]
        self.x = self.z[:d]
        self.x[:] = embedding[start:stop].T
        self.samples: list[slice] = []  # of each group, which rows of z
        self.answered: list[FloatArray | None] = []  # of each group, (n,) 1 for who answered, 0 for others; None: all
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
        """Return this block's part of X' X of each group and, as the last columns, of X' Y of all: (d, G d + T)."""
        d = len(self.x)
        products = self.x @ self.z.T
        inner = [products[:, :d] if answered is None else (self.x * answered) @ self.x.T for answered in self.answered]
        return np.hstack([*inner, products[:, d:]]).astype(np.float64, copy=False)

    def gradient(self, factors: Factors) -> FloatArray:
        """Return the gradient of the likelihood, (d, n), in memory that the next call of any block uses again."""
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

    def climb(self, factors: Factors, step: int, learning_rate: float) -> FloatArray:
        """Take a step of Adam (the moments are kept without their factors 0.1 and 0.001); return the next sums."""
        length, spread = 0.1 * learning_rate / (1.0 - 0.9**step), math.sqrt(0.001 / (1.0 - 0.999**step))
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
    """Climb the likelihood from ``embedding`` with Adam and return the new embedding ([Tang2022]_ Eqs. 16, 17).

    The likelihood of few samples is maximised by a covariance of their rank, which is not wanted: the number of steps
    is what ties the result to the embedding it started from.

    A step of Adam needs of the other clients nothing but a few (d, d) sums, so it is made block by block, with
    everything a block needs in the cache. From 100,000 clients on, blocks compute in single precision and their sums
    are added in double. What is lost: Adam's steps have the length of the learning rate whatever the gradient's size,
    so the relative error of a gradient, about 1e-6, is that of a step; only where a gradient is zero but for rounding
    may its sign be the other, and an element of the embedding be off by a step or two.

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
    groups = group_samples(changes, weights)
    if not groups:
        return np.array(embedding, dtype=np.float64)
    blocks = _blocks(embedding, groups, _precision(changes, noise))
    sums: FloatArray = np.sum([block.sums() for block in blocks], axis=0)
    for step in range(1, steps + 1):
        factors = _factors(sums, groups, noise)
        sums = np.sum([block.climb(factors, step, learning_rate) for block in blocks], axis=0)
    # Rows next to each other, as an embedding that was read back has them: products round alike for both.
    return np.ascontiguousarray(np.concatenate([block.x.T for block in blocks]), dtype=np.float64)


def _precision(changes: FloatArray, noise: float) -> type[np.floating[Any]]:
    """Return single precision for very many clients, unless a square of the gradient might not be a number in it."""
    if len(changes) < MANY:
        return np.float64
    largest = max(float(np.nanmax(changes)), -float(np.nanmin(changes)))
    return np.float32 if (largest / noise) ** 2 < _LARGEST_SINGLE else np.float64


def _blocks(embedding: FloatArray, groups: list[SampleGroup], precision: type[np.floating[Any]]) -> list[_Block]:
    """Cut the clients into blocks, which lie one after the other in memory."""
    n, d = embedding.shape
    height = d + sum(len(group.weights) for group in groups)
    memory, room = np.zeros((height + 2 * d) * n, precision), np.empty(d * min(n, BLOCK), precision)
    starts = range(0, n, BLOCK)
    return [_Block(embedding, groups, start, min(start + BLOCK, n), memory, room) for start in starts]

r"""Greedy choice of rows whose sum is near the uniform distribution, by Kullback-Leibler divergence.

.. [Duan2019] M. Duan et al., "Astraea: Self-balancing Federated Learning for Improving Classification Accuracy of
   Mobile Deep Learning Applications", ICCD 2019.
.. [Yang2020] M. Yang, X. Wang, H. Zhu, H. Wang, H. Qian, "Federated Learning with Class Imbalance Reduction"
   (Fed-cucb), EUSIPCO 2021.
"""

from __future__ import annotations

import numpy as np
from scipy.special import xlogy

from fedcohort.arrays import BoolArray, FloatArray, IntArray

_BLOCK = 8_192  # rows worked on at a time, so that they stay in the cache
_TIE = 1e-12  # divergences nearer than this are equal but for rounding


def divergence_from_uniform(masses: FloatArray) -> FloatArray:
    r"""Return :math:`D_{KL}(p \| U) = \ln B + \sum_b p_b \ln p_b` of each row's shares p; ln B for rows without mass.

    Parameters
    ----------
    masses : (c, B) float array
        Not negative.

    Examples
    --------
    >>> divergence_from_uniform(np.array([[5.0, 5.0], [8.0, 0.0], [0.0, 0.0]])).round(4)
    array([0.    , 0.6931, 0.6931])
    """
    worst = float(np.log(masses.shape[1]))
    total = masses.sum(axis=1)
    some = np.where(total > 0, total, 1.0)
    entropy = np.log(some) - xlogy(masses, masses).sum(axis=1) / some
    return np.asarray(np.where(total > 0, np.maximum(worst - entropy, 0.0), worst))


class GreedyBalance:
    """A group of rows that grows by the row which leaves its sum nearest to uniform.

    Parameters
    ----------
    rows : (c, B) float array
        Label counts or shares. A row without any comes last, so that it does not join a good group for leaving it as
        it is.
    rng : Generator
        Breaks ties.

    Examples
    --------
    >>> group = GreedyBalance(np.array([[4.0, 0.0], [3.0, 3.0], [0.0, 4.0]]), np.random.default_rng(0))
    >>> group.grow(1, np.array([True, True, True]))
    >>> group.members, round(group.divergence, 12)
    ([1], 0.0)
    """

    def __init__(self, rows: FloatArray, rng: np.random.Generator) -> None:
        self.members: list[int] = []
        self.seen = np.full(len(rows), np.nan)  # (c,) divergence of the group with the row, when it was last tried
        self._rows = rows
        self._empty = rows.sum(axis=1) <= 0
        self._sum = np.zeros(rows.shape[1])
        self._rng = rng

    @property
    def divergence(self) -> float:
        """Divergence of the group's sum from the uniform distribution."""
        return float(divergence_from_uniform(self._sum[None])[0])

    def add(self, position: int) -> None:
        """Add a row."""
        self.members.append(position)
        self._sum = self._sum + self._rows[position]

    def grow(self, count: int, allowed: BoolArray) -> None:
        """Add ``count`` of the allowed rows one by one, each the best for the group so far."""
        free = allowed.copy()
        free[self.members] = False
        for _ in range(count):
            positions = np.flatnonzero(free)
            best = self._best(positions)
            free[best] = False
            self.add(best)

    def _best(self, positions: IntArray) -> int:
        for start in range(0, len(positions), _BLOCK):
            block = positions[start : start + _BLOCK]
            values = divergence_from_uniform(self._rows[block] + self._sum)
            self.seen[block] = np.where(self._empty[block], np.inf, values)
        tried = self.seen[positions]
        return int(self._rng.choice(positions[tried <= tried.min() + _TIE]))

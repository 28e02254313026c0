r"""Choose rows greedily so that their sum is close to uniform, by Kullback-Leibler divergence.

.. [Duan2019] M. Duan et al., "Astraea: Self-balancing Federated Learning for Improving Classification Accuracy of
   Mobile Deep Learning Applications", ICCD 2019.
.. [Harremoes2001] P. Harremoës, F. Topsøe, "Inequalities between Entropy and Index of Coincidence Derived from
   Information Diagrams", IEEE Transactions on Information Theory 47(7), 2001.
.. [Yang2020] M. Yang, X. Wang, H. Zhu, H. Wang, H. Qian, "Federated Learning with Class Imbalance Reduction"
   (Fed-cucb), EUSIPCO 2021.
"""

from __future__ import annotations

import numpy as np
from scipy.special import xlogy

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray

_BLOCK = 8_192  # rows processed at a time, so that they stay in the cache
_TIE = 1e-12  # divergences that differ by less are equal up to rounding


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
    divisor = np.where(total > 0, total, 1.0)
    # The entropy of the shares without computing them, which saves a division per entry.
    entropy = np.log(divisor) - xlogy(masses, masses).sum(axis=1) / divisor
    return np.asarray(np.where(total > 0, np.maximum(worst - entropy, 0.0), worst))


class GreedyBalance:
    """A group of rows that grows by the row that leaves its sum closest to uniform.

    Parameters
    ----------
    rows : (c, B) float array
        Label counts or shares. A row of zeros comes last; otherwise it would join because it leaves a good group
        unchanged.
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
        # (c,) divergence of the group with the row when last computed; NaN if a bound always ruled the row out.
        self.seen = np.full(len(rows), np.nan)
        self._rows = rows
        self._sizes = rows.sum(axis=1)
        self._squares = np.einsum("nb,nb->n", rows, rows)
        self._sum = np.zeros(rows.shape[1])
        self._rng = rng

    @property
    def divergence(self) -> float:
        """Divergence of the group's sum from the uniform distribution."""
        return float(divergence_from_uniform(self._sum[None])[0])

    def with_each(self) -> FloatArray:
        """(c,) divergence of the group, or for other rows, if they had joined instead of the last member.

        NaN for rows whose divergence was never computed.
        """
        values = self.seen.copy()
        values[self.members] = self.divergence
        return values

    def add(self, position: int) -> None:
        """Add a row."""
        self.members.append(position)
        self._sum = self._sum + self._rows[position]

    def grow(self, count: int, allowed: BoolArray) -> None:
        """Add ``count`` of the allowed rows one by one, each the best for the group so far."""
        free = allowed.copy()
        free[self.members] = False
        for _ in range(count):
            # For few rows the bound costs more than it saves.
            positions = self._promising(free) if len(free) > _BLOCK else np.flatnonzero(free)
            for start in range(0, len(positions), _BLOCK):
                block = positions[start : start + _BLOCK]
                values = divergence_from_uniform(self._rows[block] + self._sum)
                self.seen[block] = np.where(self._sizes[block] > 0, values, np.inf)
            values = self.seen[positions]
            best = int(self._rng.choice(positions[values <= values.min() + _TIE]))
            free[best] = False
            self.add(best)

    def _promising(self, free: BoolArray) -> IntArray:
        """Return the free rows that can be the best, by a bound that only needs products with the group's sum.

        For a given sum of squared shares, the entropy is largest if one share differs and the others are equal
        ([Harremoes2001]_). One row is tried. Rows whose sum of squares is above that of such shares with the same
        divergence are worse than it.
        """
        usable = free & (self._sizes > 0)
        if not usable.any() or self._rows.shape[1] < 2:
            return np.flatnonzero(free)
        coincidence = np.full(len(free), np.inf)
        total = float(self._sum.sum()) + self._sizes
        joint = self._squares + 2.0 * (self._rows @ self._sum) + float(self._sum @ self._sum)
        np.divide(joint, total * total, out=coincidence, where=usable)
        first = int(coincidence.argmin())
        reached = float(divergence_from_uniform((self._rows[first] + self._sum)[None])[0])
        return np.flatnonzero(coincidence <= _largest_coincidence(reached + _TIE, self._rows.shape[1]) * (1 + _TIE))


def _largest_coincidence(divergence: float, classes: int) -> float:
    r"""Return the largest :math:`\sum p_b^2` of shares p whose divergence from uniform is at most ``divergence``.

    Shares of the form :math:`(x, y, \dots, y)` with :math:`x \ge y` attain it ([Harremoes2001]_).

    >>> round(_largest_coincidence(0.0, 4), 12), round(_largest_coincidence(float(np.log(4)), 4), 12)
    (0.25, 1.0)
    """
    low, high = 1.0 / classes, 1.0
    # The divergence grows with x and has no formula for its inverse. 60 halvings reach double precision.
    for _ in range(60):
        x = (low + high) / 2
        rest = (1.0 - x) / (classes - 1)
        reached = np.log(classes) + float(xlogy(x, x) + (classes - 1) * xlogy(rest, rest))
        low, high = (x, high) if reached <= divergence else (low, x)
    return high * high + (1.0 - high) ** 2 / (classes - 1)

r"""Class imbalance of a group of clients (QCID), by Theorem 3.1.

For a group M of clients with q_n samples each and label inner products S (N, N),

.. math:: QCID(M) = \frac{\sum_{n, n' \in M} S_{nn'}}{(\sum_{n \in M} q_n)^2} - \frac{1}{B}

is the squared distance of the group's label distribution to the uniform one over B classes (Theorem 3.1). It needs the
sums over the group only, so a group is kept as running sums: adding a client is O(N) with S and O(N r) with a factor of
S, and nothing N x N is formed.

.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from fedcohort.arrays import FloatArray, IntArray
from fedcohort.clients import LabelCounts, LabelFactor, LabelGram, LabelInfo
from fedcohort.errors import InputError

RESOLUTION = 16 * float(np.finfo(np.float64).eps)
"""QCID below this is rounding error of Theorem 3.1's difference and counts as 0."""

_LARGE = 2.0**400  # squares of larger counts would leave the range of a float
BLOCK = 32_768  # candidates worked on at a time: their few vectors stay in the second-level cache


class ClassBalance(ABC):
    """Running sums of a group of clients, and the QCID it would have with each candidate added.

    Candidates are addressed by position 0..c-1. Build one with :func:`group_of`.

    Parameters
    ----------
    sizes : (c,) float array
        q_n.
    classes : int
        B.
    own : (c,) float array
        S_nn.
    unit : float
        How many samples a size of 1 stands for; not 1 where counts would be too large to square.
    """

    def __init__(self, sizes: FloatArray, classes: int, own: FloatArray, unit: float = 1.0) -> None:
        if classes < 1:
            raise InputError(f"There must be at least one class. Got classes={classes}.")
        self.n = len(sizes)
        self.members: list[int] = []
        self.classes = classes
        self.sizes = sizes
        self._own = own
        self._unit = unit
        self._size = 0.0
        self._empty = np.flatnonzero(sizes == 0)
        self._work = np.empty(min(self.n, BLOCK))

    @abstractmethod
    def _cross(self, factor: float, rows: slice, out: FloatArray) -> None:
        """Write ``factor`` times sum_{n' in M} S_nn' for the candidates n in ``rows``."""

    @abstractmethod
    def _move(self, position: int, sign: int) -> None:
        """Add (sign 1) or remove (sign -1) a client's products; ``members`` is up to date."""

    @property
    @abstractmethod
    def total(self) -> float:
        """Sum of S over all pairs of members."""

    @property
    def worst(self) -> float:
        """The largest possible QCID: all samples of one class."""
        return 1.0 - 1.0 / self.classes

    def add(self, position: int) -> None:
        """Add a candidate to the group."""
        self.members.append(position)
        self._size += float(self.sizes[position])
        self._move(position, 1)

    def remove(self, position: int) -> None:
        """Take a member out of the group."""
        self.members.remove(position)
        self._size = float(self.sizes[self.members].sum())  # anew, so that no rounding error stays behind
        self._move(position, -1)

    def qcid(self) -> float:
        """Return the group's QCID; the worst value for a group without samples."""
        if self._size <= 0:
            return self.worst
        value = self.total / (self._size * self._size) - 1.0 / self.classes
        return value if value > RESOLUTION else 0.0

    def extended(self, out: FloatArray) -> FloatArray:
        """Write to ``out`` (c,) the QCID of the group with each candidate added; infinite for members.

        Clients without samples count as the worst case, so that they are not drawn for leaving a good group as it is.
        Values below :data:`RESOLUTION`, and negative ones of an inexact S, mean 0.
        """
        size, total, even = self._size, self.total, 1.0 / self.classes
        for start in range(0, self.n, BLOCK):
            rows = slice(start, min(start + BLOCK, self.n))
            part, sizes = out[rows], self.sizes[rows]
            work = self._work[: len(part)]
            self._cross(2.0, rows, part)
            part += self._own[rows]
            part += total
            np.add(sizes, size, out=work)
            if size == 0 and len(self._empty):
                work[sizes == 0] = 1.0
            work *= work
            part /= work
            part -= even  # exactly 0 for a balanced group of integer label counts: the quotient is rounded 1 / B
        out[self._empty] = self.worst
        out[self.members] = np.inf
        return out

    def extended_by_chance(self) -> FloatArray:
        """Return (c,) the QCID that chance alone leaves in the group with each candidate added.

        >>> group_of(LabelCounts([[4, 0], [3, 3]])).extended_by_chance()
        array([0.125     , 0.08333333])
        """
        return chance((self.sizes + self._size) * self._unit, self.classes)


def chance(samples: FloatArray, classes: int) -> FloatArray:
    r"""Return the mean QCID of groups of ``samples`` samples drawn from balanced classes.

    The share of class b among q such samples has variance :math:`(1/B)(1 - 1/B) / q`; the sum over the classes is
    :math:`E[QCID] = (1 - 1/B) / q`. A group below it is not better balanced than one above, it was lucky.
    """
    return np.asarray((1.0 - 1.0 / classes) / np.maximum(samples, 1.0))


class _FactorBalance(ClassBalance):
    def __init__(self, factor: FloatArray, sizes: FloatArray, classes: int, unit: float) -> None:
        super().__init__(sizes, classes, np.einsum("nr,nr->n", factor, factor), unit)
        self._factor = factor
        self._sum = np.zeros(factor.shape[1])

    def _cross(self, factor: float, rows: slice, out: FloatArray) -> None:
        np.dot(self._factor[rows], factor * self._sum, out=out)

    def _move(self, position: int, sign: int) -> None:
        if sign > 0:
            self._sum = self._sum + self._factor[position]
        else:  # anew, so that no rounding error stays behind
            self._sum = self._factor[self.members].sum(axis=0)

    @property
    def total(self) -> float:
        return float(self._sum @ self._sum)


class _GramBalance(ClassBalance):
    def __init__(
        self, gram: FloatArray, columns: IntArray | None, sizes: FloatArray, classes: int, unit: float
    ) -> None:
        own = np.diagonal(gram)
        super().__init__(sizes, classes, own.copy() if columns is None else own[columns], unit)
        self._gram, self._columns = gram, columns
        self._sums = np.zeros(len(sizes))

    def _cross(self, factor: float, rows: slice, out: FloatArray) -> None:
        np.multiply(self._sums[rows], factor, out=out)

    def _move(self, position: int, sign: int) -> None:
        row = self._gram[position] if self._columns is None else self._gram[self._columns[position]][self._columns]
        self._sums += sign * row

    @property
    def total(self) -> float:
        return float(self._sums[self.members].sum())


def group_of(labels: LabelInfo, sizes: FloatArray | None = None, candidates: IntArray | None = None) -> ClassBalance:
    """Return an empty group over some of a federation's clients.

    Parameters
    ----------
    labels : LabelCounts, LabelFactor or LabelGram
        What is known about labels.
    sizes : (N,) float array, optional
        q_n. Label counts bring their own; a factor or a Gram matrix do not tell.
    candidates : (c,) int array, optional
        Who may join, default everybody.

    Examples
    --------
    >>> group = group_of(LabelCounts([[4, 0], [0, 4], [2, 2]]))
    >>> group.add(0)
    >>> group.qcid(), group.extended(np.empty(3)).round(4)
    (0.5, array([  inf, 0.   , 0.125]))
    """
    if not isinstance(labels, LabelCounts) and sizes is None:
        raise InputError(
            f"{type(labels).__name__} does not tell how many samples a client has.", hint="pass sizes as well"
        )
    rows: IntArray | slice = slice(None) if candidates is None else candidates
    match labels:
        case LabelCounts():
            counts = labels.counts[rows]
            unit = _unit(counts)
            counts = counts if unit == 1.0 else counts / unit
            return _FactorBalance(counts, counts.sum(axis=1), labels.classes, unit)
        case LabelFactor():
            assert sizes is not None
            factor, sizes = labels.factor[rows], sizes[rows]
            unit = _unit(factor, sizes)
            if unit != 1.0:
                factor, sizes = factor / unit, sizes / unit
            return _FactorBalance(factor, sizes, labels.classes, unit)
        case LabelGram():
            assert sizes is not None
            gram, sizes = labels.gram, sizes[rows]
            unit = _unit(np.sqrt(np.abs(np.diagonal(gram))), sizes)
            if unit != 1.0:
                gram, sizes = gram / unit / unit, sizes / unit
            return _GramBalance(gram, candidates, sizes, labels.classes, unit)


def _unit(*arrays: FloatArray) -> float:
    """Return the power of two by which counts are divided, exactly, before they are squared; nearly always 1."""
    largest = max(max(float(a.max(initial=0.0)), -float(a.min(initial=0.0))) for a in arrays)
    return 1.0 if largest <= _LARGE else float(2.0 ** (math.frexp(largest)[1] - 1))


def qcid(labels: LabelInfo, clients: Iterable[int], sizes: FloatArray | None = None) -> float:
    """Return QCID of a group of clients by Theorem 3.1.

    >>> qcid(LabelCounts([[10, 0], [0, 10], [10, 0]]), [0, 1])
    0.0
    >>> qcid(LabelCounts([[10, 0], [0, 10], [10, 0]]), [0, 2])
    0.5
    """
    chosen = np.asarray(list(clients), dtype=np.int64)
    group = group_of(labels, sizes, chosen)
    for position in range(len(chosen)):
        group.add(position)
    return group.qcid()

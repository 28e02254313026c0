r"""Class imbalance (QCID) of a group of clients, by Theorem 3.1 of Fed-CBS [Zhang2023]_.

For a group M of clients with q_n samples each and label inner products S (N, N),

.. math:: QCID(M) = \frac{\sum_{n, n' \in M} S_{nn'}}{(\sum_{n \in M} q_n)^2} - \frac{1}{B}

is the squared distance of the group's label distribution from the uniform one over B classes. It needs only sums over
the group, so a group is kept as running sums. Adding a client costs O(N) with S and O(N r) with a factor of S, and no
N x N matrix is formed.

.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import LabelCounts, LabelFactor, LabelGram, LabelInfo
from fedcohort.core.errors import InputError

RESOLUTION = 16 * float(np.finfo(np.float64).eps)
"""A QCID below this is rounding error of the difference in Theorem 3.1 and counts as 0."""

BLOCK = 32_768  # candidates processed at a time, so that their vectors stay in the second-level cache


@dataclass(frozen=True)
class Past:
    """Clients whose samples count as if they were in the group already, each with a weight.

    Attributes
    ----------
    clients : (p,) int array
        Rows of the labels that the group is built from.
    weights : (p,) float array
        How many times each counts.
    """

    clients: IntArray
    weights: FloatArray


NOTHING = Past(np.zeros(0, np.int64), np.zeros(0))


class ClassBalance(ABC):
    """Running sums of a group of clients, and the QCID it would have with each candidate added.

    Candidates are addressed by position 0..c-1. Build a group with :func:`group_of`. It may include data of the past,
    which counts in all of its sums except those of :meth:`qcid_of_members`.

    Parameters
    ----------
    sizes : (c,) float array
        q_n.
    classes : int
        B.
    own : (c,) float array
        S_nn.
    past : float
        Samples of the past.
    """

    def __init__(self, sizes: FloatArray, classes: int, squares: FloatArray, past: float) -> None:
        if classes < 1:
            raise InputError(f"There must be at least one class. Got classes={classes}.")
        self.n = len(sizes)
        self.members: list[int] = []
        self.classes = classes
        self.sizes = sizes
        self._own = squares
        self._past_size = past
        self._size = past
        self._empty = np.flatnonzero(sizes == 0)
        self._work = np.empty(min(self.n, BLOCK))

    @abstractmethod
    def _cross(self, factor: float, rows: slice, out: FloatArray) -> None:
        """Write ``factor`` times sum_{n' in M} S_nn' for the candidates n in ``rows``."""

    @abstractmethod
    def _move(self, position: int, sign: int) -> None:
        """Add (sign 1) or remove (sign -1) a client's products; ``members`` is already up to date."""

    @property
    @abstractmethod
    def total(self) -> float:
        """Sum of S over all pairs of members."""

    @property
    @abstractmethod
    def _total_alone(self) -> float:
        """The same without the past."""

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
        """Remove a member from the group."""
        self.members.remove(position)
        # Sum again instead of subtracting, so that no rounding error stays behind.
        self._size = self._past_size + float(self.sizes[self.members].sum())
        self._move(position, -1)

    def qcid(self) -> float:
        """Return the group's QCID; the worst value for a group without samples."""
        return self._value(self.total, self._size)

    def qcid_of_members(self) -> float:
        """Return the QCID of the members without the past."""
        return self._value(self._total_alone, float(self.sizes[self.members].sum()))

    def _value(self, total: float, size: float) -> float:
        if size <= 0:
            return self.worst
        value = total / (size * size) - 1.0 / self.classes
        return value if value > RESOLUTION else 0.0

    def qcid_with_each(self, out: FloatArray) -> FloatArray:
        """Write to ``out`` (c,) the QCID of the group with each candidate added; infinite for members.

        Clients without samples count as the worst case; otherwise they would be drawn because they leave a good group
        unchanged. Values below :data:`RESOLUTION`, and negative values from an inexact S, mean 0.
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
            part -= even  # exactly 0 for a balanced group of integer counts, because the quotient rounds to 1 / B
        out[self._empty] = self.worst
        out[self.members] = np.inf
        return out

    def by_chance(self) -> float:
        """Return the QCID that chance alone would leave in this group."""
        return float(chance(np.asarray(self._size), self.classes))

    def extended_by_chance(self) -> FloatArray:
        """Return (c,) the QCID that chance alone would leave in the group with each candidate added.

        >>> group_of(LabelCounts([[4, 0], [3, 3]])).extended_by_chance()
        array([0.125     , 0.08333333])
        """
        return chance(self.sizes + self._size, self.classes)


def chance(samples: FloatArray, classes: int) -> FloatArray:
    r"""Return the mean QCID of groups of ``samples`` samples drawn from balanced classes.

    The share of class b among q such samples has variance :math:`(1/B)(1 - 1/B) / q`; the sum over the classes is
    :math:`E[QCID] = (1 - 1/B) / q`. A group below it is not better balanced than a group at it, only luckier.
    """
    return np.asarray((1.0 - 1.0 / classes) / np.maximum(samples, 1.0))


class FactorBalance(ClassBalance):
    """A group over rows of a factor F of S = F F', such as label counts. ``past`` is the sum of rows of the past."""

    def __init__(
        self,
        factor: FloatArray,
        sizes: FloatArray,
        classes: int,
        past: FloatArray,
        past_size: float,
        own: FloatArray | None = None,
    ) -> None:
        own = np.einsum("nr,nr->n", factor, factor) if own is None else own
        super().__init__(sizes, classes, own, past_size)
        self._factor = factor
        self._past = self._sum = past

    def _cross(self, factor: float, rows: slice, out: FloatArray) -> None:
        np.dot(self._factor[rows], factor * self._sum, out=out)

    def _move(self, position: int, sign: int) -> None:
        if sign > 0:
            self._sum = self._sum + self._factor[position]
        else:  # sum again, so that no rounding error stays behind
            self._sum = self._past + self._factor[self.members].sum(axis=0)

    @property
    def total(self) -> float:
        """Sum of S over all pairs of members."""
        return float(self._sum @ self._sum)

    @property
    def _total_alone(self) -> float:
        total = self._factor[self.members].sum(axis=0)
        return float(total @ total)


class _GramBalance(ClassBalance):
    def __init__(
        self,
        gram: FloatArray,
        columns: IntArray | None,
        sizes: FloatArray,
        classes: int,
        past: Past,
        past_size: float,
    ) -> None:
        squares = np.diagonal(gram)
        super().__init__(sizes, classes, squares.copy() if columns is None else squares[columns], past_size)
        self._gram, self._columns = gram, columns
        with_all = past.weights @ gram[past.clients]
        self._past_sums = with_all if columns is None else with_all[columns]
        self._past_total = float(with_all[past.clients] @ past.weights)
        self._sums = self._past_sums.copy()

    def _cross(self, factor: float, rows: slice, out: FloatArray) -> None:
        np.multiply(self._sums[rows], factor, out=out)

    def _move(self, position: int, sign: int) -> None:
        row = self._gram[position] if self._columns is None else self._gram[self._columns[position]][self._columns]
        self._sums += sign * row

    @property
    def total(self) -> float:
        return self._past_total + float((self._sums + self._past_sums)[self.members].sum())

    @property
    def _total_alone(self) -> float:
        return float((self._sums - self._past_sums)[self.members].sum())


def group_of(
    labels: LabelInfo,
    sizes: FloatArray | None = None,
    candidates: IntArray | None = None,
    past: Past = NOTHING,
) -> ClassBalance:
    """Return an empty group over some clients of a federation.

    Parameters
    ----------
    labels : LabelCounts, LabelFactor or LabelGram
        What is known about the labels.
    sizes : (N,) float array, optional
        q_n. Label counts contain the sizes; a factor or a Gram matrix does not.
    candidates : (c,) int array, optional
        The clients that may join; default: all.
    past : Past, optional
        Clients that count already; default: none.

    Examples
    --------
    >>> group = group_of(LabelCounts([[4, 0], [0, 4], [2, 2]]))
    >>> group.add(0)
    >>> group.qcid(), group.qcid_with_each(np.empty(3)).round(4)
    (0.5, array([  inf, 0.   , 0.125]))

    After a round with client 0, client 1 restores the balance.

    >>> later = group_of(LabelCounts([[4, 0], [0, 4], [2, 2]]), past=Past(np.array([0]), np.ones(1)))
    >>> later.qcid_with_each(np.empty(3))
    array([0.5  , 0.   , 0.125])
    """
    if not isinstance(labels, LabelCounts) and sizes is None:
        raise InputError(
            f"{type(labels).__name__} does not say how many samples a client has.", hint="pass sizes as well"
        )
    weights = past.weights
    match labels:
        case LabelCounts():
            past_rows = labels.counts[past.clients]
            return FactorBalance(
                _rows(labels.counts, candidates),
                _rows(labels.sizes, candidates),
                labels.classes,
                weights @ past_rows,
                float(weights @ past_rows.sum(axis=1)),
                _rows(labels.squares, candidates),
            )
        case LabelFactor():
            assert sizes is not None
            past_sum, past_size = weights @ labels.factor[past.clients], float(weights @ sizes[past.clients])
            factor = _rows(labels.factor, candidates)
            return FactorBalance(factor, _rows(sizes, candidates), labels.classes, past_sum, past_size)
        case LabelGram():
            assert sizes is not None
            own, past_size = _rows(sizes, candidates), float(weights @ sizes[past.clients])
            return _GramBalance(labels.gram, candidates, own, labels.classes, past, past_size)


def _rows(values: FloatArray, clients: IntArray | None) -> FloatArray:
    """Return the rows of some clients, or all rows without a copy. ``take`` is several times as fast as indexing."""
    return values if clients is None else values.take(clients, axis=0)


def qcid(labels: LabelInfo, clients: Iterable[int], sizes: FloatArray | None = None) -> float:
    """Return the QCID of a group of clients by Theorem 3.1.

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

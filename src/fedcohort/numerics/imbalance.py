r"""Class imbalance of a group of clients (QCID), and drawing groups in which it is small.

For a group M of clients with q_n samples each and label inner products S (N, N),

.. math:: QCID(M) = \frac{\sum_{n, n' \in M} S_{nn'}}{(\sum_{n \in M} q_n)^2} - \frac{1}{B}

is the squared distance of the group's label distribution to the uniform one over B classes (Theorem 3.1). It needs the
sums over the group only, so a group is kept as running sums: adding a client is O(N) with S and O(N r) with a factor of
S, and nothing N x N is formed.

.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedcohort.arrays import FloatArray, IntArray
from fedcohort.clients import LabelCounts, LabelFactor, LabelGram, LabelInfo
from fedcohort.errors import InputError

RESOLUTION = 16 * float(np.finfo(np.float64).eps)
"""QCID below this is rounding error of Theorem 3.1's difference and counts as 0."""

_LOG_RESOLUTION = 53 * math.log(2)  # a uniform random double has 53 bits
_MOST_ORDERED = 2_000_000
_SUM_BLOCK = 1024
_BLOCK = 32_768  # candidates worked on at a time: their few vectors stay in the second-level cache


class Group(ABC):
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
    """

    def __init__(self, sizes: FloatArray, classes: int, own: FloatArray) -> None:
        if classes < 1:
            raise InputError(f"There must be at least one class. Got classes={classes}.")
        self.n = len(sizes)
        self.members: list[int] = []
        self.classes = classes
        self._sizes = sizes
        self._own = own
        self._size = 0.0
        self._empty = np.flatnonzero(sizes == 0)
        self._work = np.empty(min(self.n, _BLOCK))

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
        self._size += float(self._sizes[position])
        self._move(position, 1)

    def remove(self, position: int) -> None:
        """Take a member out of the group."""
        self.members.remove(position)
        self._size = float(self._sizes[self.members].sum())  # anew, so that no rounding error stays behind
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
        for start in range(0, self.n, _BLOCK):
            rows = slice(start, min(start + _BLOCK, self.n))
            part, sizes = out[rows], self._sizes[rows]
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


class _FactorGroup(Group):
    def __init__(self, factor: FloatArray, sizes: FloatArray, classes: int) -> None:
        super().__init__(sizes, classes, np.einsum("nr,nr->n", factor, factor))
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


class _GramGroup(Group):
    def __init__(self, gram: FloatArray, columns: IntArray | None, sizes: FloatArray, classes: int) -> None:
        own = np.diagonal(gram)
        super().__init__(sizes, classes, own.copy() if columns is None else own[columns])
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


def group_of(labels: LabelInfo, sizes: FloatArray | None = None, candidates: IntArray | None = None) -> Group:
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
    match labels:
        case LabelCounts():
            counts = labels.counts if candidates is None else labels.counts[candidates]
            return _FactorGroup(counts, counts.sum(axis=1), labels.classes)
        case LabelFactor():
            assert sizes is not None
            if candidates is None:
                return _FactorGroup(labels.factor, sizes, labels.classes)
            return _FactorGroup(labels.factor[candidates], sizes[candidates], labels.classes)
        case LabelGram():
            assert sizes is not None
            return _GramGroup(
                labels.gram, candidates, sizes if candidates is None else sizes[candidates], labels.classes
            )


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


@dataclass(frozen=True)
class Weighting:
    r"""The weights of [Zhang2023]_ Sec. 3.3, in logarithms.

    The first client of round k has weight :math:`QCID(M_1)^{-\beta_1} + \lambda \sqrt{3 \ln k / 2 T_n}`, the m-th
    :math:`QCID(M_m)^{-\beta_m}`; factors that are the same for every candidate are left out.

    Attributes
    ----------
    beta : float
        beta_m = beta * m.
    floor : float
        L_b, the least value of QCID.
    exploration : (c,) float array or None
        lambda sqrt(3 ln k / 2 T_n) of every candidate; None is 0.
    """

    beta: float = 1.0
    floor: float = 1e-20
    exploration: FloatArray | None = None

    def bounded(self, values: FloatArray) -> FloatArray:
        """Return QCID values with the floor in place of what is 0 or below rounding error."""
        return np.where(values > max(RESOLUTION, self.floor), values, self.floor)

    def balance(self, values: FloatArray, m: int) -> FloatArray:
        """Return -beta_m log QCID(M_m) of every candidate (m from 1); -inf for members."""
        return np.asarray(-self.beta * m * np.log(self.bounded(values)))

    def first(self, values: FloatArray) -> FloatArray:
        """Return the logarithms of the first client's weights, which alone contain the exploration."""
        balance = self.balance(values, 1)
        if self.exploration is None:
            return balance
        with np.errstate(divide="ignore"):  # no exploration in round 1, where ln k = 0
            return np.logaddexp(balance, np.log(self.exploration))


def exploration_bonus(strength: float, round_number: int, pulls: FloatArray) -> FloatArray:
    r"""Return :math:`\lambda \sqrt{3 \ln k / 2 T_n}` for round k, counted from 1."""
    return np.asarray(strength * np.sqrt(1.5 * math.log(round_number) / pulls))


def _draw(logits: FloatArray, uniform: float) -> tuple[int, float]:
    """Return a position drawn with probability proportional to exp(logits), and that probability's logarithm."""
    highest = float(logits.max())
    weights = logits - highest
    np.exp(weights, out=weights)
    start, before, total = 0, 0.0, None
    if len(weights) > _SUM_BLOCK:
        # A long running sum is slow; sums of blocks are not, and only the block that is hit needs the running sum.
        below = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _SUM_BLOCK)))
        total = float(below[-1])
        block = min(int(below.searchsorted(uniform * total, side="right")), len(below) - 1)
        start, before = block * _SUM_BLOCK, float(below[block - 1]) if block else 0.0
    inside = weights[start : start + _SUM_BLOCK].cumsum()
    total = float(inside[-1]) if total is None else total
    position = start + min(int(inside.searchsorted(uniform * total - before, side="right")), len(inside) - 1)
    return position, float(logits[position]) - highest - math.log(total)


def draw_next(values: FloatArray, m: int, weighting: Weighting, uniform: float) -> tuple[int, float]:
    r"""Draw a client with probability proportional to :math:`QCID(M_m)^{-\beta_m}`.

    Candidates whose weights together are below 2^-53 of the best one's cannot be told from 0 with a double: those with
    QCID above (c 2^53)^(1 / beta_m) times the smallest. They are cut off by one comparison, and logarithms and powers
    are taken of the few that remain.

    Parameters
    ----------
    values : (c,) float array
        QCID(M_m) with each candidate; infinite for members.
    m : int
        Size of the group with the new client.
    weighting : Weighting
        Exponents and floor; the exploration plays no part here.
    uniform : float
        A uniform random number in [0, 1).

    Returns
    -------
    position : int
    log_probability : float
    """
    lowest = float(values.min())
    lowest = max(lowest, weighting.floor) if lowest > RESOLUTION else weighting.floor
    reach = (math.log(len(values)) + _LOG_RESOLUTION) / (weighting.beta * m)
    cut = math.exp(min(math.log(lowest) + reach, 700.0))
    near = np.flatnonzero(values <= max(cut, RESOLUTION))
    position, log_probability = _draw(weighting.balance(values[near], m), uniform)
    return int(near[position]), log_probability


@dataclass(frozen=True)
class Draw:
    """A drawn group and the numbers behind it.

    Attributes
    ----------
    picks : (M,) int array
        Positions among the candidates, in the order they were drawn; after swaps a replacement stands in the place of
        the one it replaced.
    log_probability : (c,) float array
        Logarithm of the probability of being drawn: for members when they were, for the others at the last draw.
    exploration : (c,) float array
        What the exploration bonus added to it; 0 where the first draw did not decide.
    qcid : float
        Of the group.
    """

    picks: IntArray
    log_probability: FloatArray
    exploration: FloatArray
    qcid: float


def draw_group(group: Group, size: int, weighting: Weighting, rng: np.random.Generator, swaps: int = 0) -> Draw:
    r"""Draw a group client by client ([Zhang2023]_ Sec. 3.3), then optionally move it towards the wanted distribution.

    1. Draw c_1 by its weight with exploration, c_2 ... c_M by :math:`QCID(M_m)^{-\beta_m}`.
    2. ``swaps`` times: take one member out (each in turn, in random order) and draw its replacement, which may be the
       same client, with probability proportional to :math:`QCID(M)^{-\beta_M}` of the resulting group.

    The conditional probabilities of step 1 are normalised one by one, so their product is not
    :math:`P(M) \propto QCID(M)^{-\beta_M}`, which the paper wants. Each swap is a Metropolis-Hastings move with that
    distribution as its target: the replacement is proposed from the exact conditional distribution, so the move is
    always accepted, and P(M) is stationary.

    Parameters
    ----------
    group : Group
        Empty; holds the drawn group afterwards.
    size : int
        M, at most the number of candidates.
    weighting : Weighting
        Exponents, floor and exploration.
    rng : numpy.random.Generator
        Source of randomness.
    swaps : int
        0 is the paper. A single client, and everybody, are never swapped.
    """
    if not 1 <= size <= group.n:
        raise InputError(f"Between 1 and {group.n} clients can be drawn. Got size={size}.")
    values = np.empty(group.n)
    picks = np.empty(size, dtype=np.int64)
    chance, bonus = np.empty(size), np.zeros(size)
    first = weighting.first(group.extended(values))
    picks[0], chance[0] = _draw(first, rng.random())
    explored = first - weighting.balance(values, 1)
    bonus[0] = explored[picks[0]]
    last = first
    group.add(int(picks[0]))
    for m in range(2, size + 1):
        picks[m - 1], chance[m - 1] = draw_next(group.extended(values), m, weighting, rng.random())
        group.add(int(picks[m - 1]))
    moves = swaps if 1 < size < group.n else 0
    order = np.empty(0, dtype=np.int64)
    for move in range(moves):
        if move % size == 0:
            order = rng.permutation(size)
        place = int(order[move % size])
        group.remove(int(picks[place]))
        picks[place], chance[place] = draw_next(group.extended(values), size, weighting, rng.random())
        bonus[place] = 0.0
        group.add(int(picks[place]))
    if size > 1:
        last = weighting.balance(values, size)
        explored = np.zeros(group.n)
    highest = float(last.max())
    log_probability = last - (highest + math.log(float(np.exp(last - highest).sum())))
    log_probability[picks] = chance
    explored[picks] = bonus
    return Draw(picks, log_probability, explored, group.qcid())


def ordered_probabilities(
    labels: LabelInfo, size: int, weighting: Weighting, sizes: FloatArray | None = None
) -> tuple[IntArray, FloatArray]:
    """Return every ordered pick of ``size`` clients, (P, M), and its exact probability under the sequential draw, (P,).

    For small federations: P = N! / (N - M)! must not exceed two million.

    Examples
    --------
    Figure 3 of [Zhang2023]_: the optimum {0, 2, 3} comes out seldom.

    >>> labels = LabelCounts([[5] * 6, [6, 6, 6, 6, 6, 0], [0, 0, 0, 10, 10, 10], [10, 10, 10, 0, 0, 0]])
    >>> picks, chances = ordered_probabilities(labels, 3, Weighting())
    >>> best = [set(pick) == {0, 2, 3} for pick in picks.tolist()]
    >>> round(float(chances[best].sum()), 3)
    0.074
    """
    group = group_of(labels, sizes)
    count = math.perm(group.n, size)
    if not 1 <= size <= group.n or count > _MOST_ORDERED:
        raise InputError(
            f"Ordered picks can be enumerated for 1 to {group.n} clients and at most {_MOST_ORDERED} picks. "
            f"Got size={size}, which has {count}."
        )
    picks: list[tuple[int, ...]] = []
    chances: list[float] = []

    def descend(chance: float) -> None:
        m = len(group.members) + 1
        if m > size:
            picks.append(tuple(group.members))
            chances.append(chance)
            return
        values = group.extended(np.empty(group.n))
        logits = weighting.first(values) if m == 1 else weighting.balance(values, m)
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        for position in np.flatnonzero(np.isfinite(values)):
            group.add(int(position))
            descend(chance * float(weights[position]))
            group.remove(int(position))

    descend(1.0)
    return np.array(picks, dtype=np.int64), np.array(chances)


def target_probabilities(
    labels: LabelInfo, size: int, weighting: Weighting, sizes: FloatArray | None = None
) -> tuple[IntArray, FloatArray]:
    r"""Return every group of ``size`` clients, (P, M) ascending, and :math:`P(M) \propto QCID(M)^{-\beta_M}`, (P,)."""
    n = group_of(labels, sizes).n
    if not 1 <= size <= n or math.comb(n, size) > _MOST_ORDERED:
        raise InputError(
            f"Groups can be enumerated for 1 to {n} clients and at most {_MOST_ORDERED} groups. "
            f"Got size={size}, which has {math.comb(n, size)}."
        )
    groups = np.array(list(itertools.combinations(range(n), size)), dtype=np.int64)
    logits = weighting.balance(np.array([qcid(labels, group, sizes) for group in groups]), size)
    weights = np.exp(logits - logits.max())
    return groups, weights / weights.sum()


def expected_qcid(
    labels: LabelInfo, groups: IntArray, probabilities: FloatArray, sizes: FloatArray | None = None
) -> float:
    """Return the mean QCID of enumerated groups (P, M) under their probabilities (P,)."""
    return float(np.dot(probabilities, [qcid(labels, group, sizes) for group in groups]))

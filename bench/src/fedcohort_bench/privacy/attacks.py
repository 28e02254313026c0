r"""Attacks on label counts by an observer who sees S, noisy counts, or plain updates.

Fed-CBS's Theorem 3.2 says that counts cannot be derived from S, because a rotation changes the counts but not S. But
counts are whole numbers, so they can (:func:`from_products`). The integer combinations of the clients' counts form a
lattice. S gives all its lengths and angles, and its dimension is only the number of classes, so it is quickly reduced.
Every vector of the lattice has a whole number for each class, and few whole numbers are possible. The counts of all
clients follow exactly, up to the names of the classes, even if all sizes share a factor or are equal.
If the counts of one client are known, the names follow too. With B known clients, one linear system is enough
(:func:`from_sybils`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flint import fmpz, fmpz_mat
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.privacy.noise import fit_rows

_STEPS = 200_000  # a search gives up after this many
_FACTORS = 10_000  # the largest common factor of all counts to try


@dataclass(frozen=True)
class RecoveredCounts:
    """What an attack found.

    Parameters
    ----------
    counts : (N, B) array
        The attacker's estimate of all clients' label counts.
    named : bool
        Whether the attacker knows which column is which class; if not, the order of the columns means nothing.
    """

    counts: FloatArray
    named: bool


# -- lattices -----------------------------------------------------------------------------------------------------


def reduced_basis(gram: fmpz_mat) -> tuple[fmpz_mat, fmpz_mat]:
    """Return a reduced basis of the lattice that vectors with these inner products generate.

    Parameters
    ----------
    gram : (m, m) integer matrix
        Inner products of the generating vectors, which may be linearly dependent.

    Returns
    -------
    coefficients : (r, m) integer matrix
        The basis vectors as combinations of the generating vectors.
    gram : (r, r) integer matrix
        The inner products of the basis vectors.
    """
    # A combination of vectors is zero if and only if the same combination of their inner products is zero. Without
    # these relations, the inner products are nonsingular, as FLINT's LLL requires.
    basis = _relations_and_basis(gram)[1]
    inner = basis * gram * basis.transpose()
    if not basis.nrows():
        return basis, inner
    reduced, turns = inner.lll(True, 0.99, 0.51, "gram")
    return turns * basis, reduced


def _relations_and_basis(rows: fmpz_mat) -> tuple[fmpz_mat, fmpz_mat]:
    """Return a basis of the integer combinations of ``rows`` that vanish, and combinations that generate the rest."""
    reduced, turns = rows.lll(True)
    pairs = list(zip(reduced.tolist(), turns.tolist(), strict=True))
    relations = [coefficients for row, coefficients in pairs if not any(row)]
    basis = [coefficients for row, coefficients in pairs if any(row)]
    return _matrix(relations, rows.nrows()), _matrix(basis, rows.nrows())


def _matrix(rows: Sequence[Sequence[int | fmpz]], columns: int) -> fmpz_mat:
    return fmpz_mat(len(rows), columns, [entry for row in rows for entry in row])


def _floats(matrix: fmpz_mat) -> FloatArray:
    return np.array([float(entry) for entry in matrix.entries()]).reshape(matrix.nrows(), matrix.ncols())


def from_products(gram: ArrayLike, sizes: ArrayLike, classes: int) -> RecoveredCounts | None:
    """Return the counts of all clients from S, up to the order of the classes; None if the lattice is not enough.

    Parameters
    ----------
    gram : (N, N) whole numbers
        S.
    sizes : (N,) array
        Samples of each client.
    classes : int
        B.

    Examples
    --------
    >>> counts = np.array([[9, 1, 0], [2, 2, 6], [0, 5, 4], [1, 1, 1], [7, 0, 2]])
    >>> found = from_products(counts @ counts.T, counts.sum(axis=1), 3)
    >>> sorted(map(tuple, found.counts.T.astype(int).tolist())) == sorted(map(tuple, counts.T.tolist()))
    True
    """
    s = np.asarray(gram)
    total = np.asarray(sizes, np.int64)
    if s.ndim != 2 or s.shape[0] != s.shape[1] or len(total) != len(s):
        raise InputError(f"The attack takes S (N, N) and N sizes. Got {s.shape} and {total.shape}.")
    whole = np.rint(s)
    if not np.isfinite(s).all() or (np.abs(s - whole) > 1e-3).any():
        return None  # these are not products of whole numbers, but noisy or estimated
    products = _Products([list(map(int, row)) for row in whole], total.tolist())
    # Small clients make short generators; clients without samples make none.
    order = [i for i in np.argsort(np.diag(whole)).tolist() if whole[i, i] > 0]
    # A few more clients than classes usually span the lattice. If not, try twice as many.
    chosen = min(len(order), 2 * classes + 6)
    while chosen:
        counts = products.solve(order[:chosen])
        if counts is not None and counts.shape[1] <= classes:
            return RecoveredCounts(_pad_classes(counts, classes), named=False)
        if chosen == len(order):
            break
        chosen = min(len(order), 2 * chosen)
    return None


@dataclass(frozen=True)
class _Products:
    """S and the sizes. The lattice of some clients gives the counts of all."""

    gram: list[list[int]]
    sizes: list[int]

    def solve(self, chosen: list[int]) -> FloatArray | None:
        """Return the counts of all clients from the lattice of the chosen ones, or None if it is not enough."""
        between = fmpz_mat([[self.gram[i][j] for j in chosen] for i in chosen])
        basis, inner = reduced_basis(between)
        sums = basis * _matrix([[self.sizes[i]] for i in chosen], 1)
        rank = basis.nrows()
        # The squared length of the part of (1, ..., 1) that the clients span: r, if there are r classes.
        ones = _floats(sums)[:, 0]
        if abs(float(ones @ np.linalg.solve(_floats(inner), ones)) - rank) > 1e-6:
            return None
        level = _relations_and_basis(sums)[0] * basis  # vectors with sum 0
        turns, inner = reduced_basis(level * between * level.transpose())
        level = turns * level
        along = _floats(level * fmpz_mat([self.gram[i] for i in chosen]))
        quadratic: FloatArray = np.linalg.inv(_floats(inner)).astype(np.float64)
        # Each vector with sum 0 has a whole number for a class; together they are n. The axis of the class, without its
        # part along the ones, has the squared length 1 - 1/r = n' inner^-1 n, and few n satisfy that. If all counts
        # share a factor, only its multiples are tried, because there would be too many others.
        for factor in _square_factors(inner):
            entries = _of_length(factor * factor * quadratic, 1 - 1 / rank)
            if entries is None:
                return None
            counts = self._classes(factor * entries, quadratic, along)
            if counts is not None:
                return counts
        return None

    def _classes(self, entries: FloatArray, quadratic: FloatArray, along: FloatArray) -> FloatArray | None:
        """Return (N, r) counts, if r of the candidates for a class reproduce S and the sizes."""
        rank = len(quadratic) + 1
        sizes = np.array(self.sizes, np.float64)
        counts = entries @ quadratic @ along + sizes / rank
        possible = (np.abs(counts - np.rint(counts)) < 1e-4).all(axis=1) & (counts > -0.5).all(axis=1)
        entries, counts = entries[possible], np.rint(counts[possible])
        apart = np.abs(entries @ quadratic @ entries.T + 1 / rank) < 1e-6
        frame = _clique(apart, rank)
        if frame is None:
            return None
        columns = counts[frame].T
        # These are whole numbers below 2^53, so the comparison is exact.
        same = np.array_equal(columns @ columns.T, np.array(self.gram, np.float64))
        return columns if same and np.array_equal(columns.sum(axis=1), sizes) else None


def _square_factors(gram: fmpz_mat) -> list[int]:
    """Return the whole numbers whose square divides all products, largest first; all counts may share one of them."""
    content = math.gcd(*map(int, gram.entries()))
    return [m for m in range(min(math.isqrt(content), _FACTORS), 0, -1) if content % (m * m) == 0] or [1]


def _of_length(quadratic: FloatArray, length: float) -> FloatArray | None:
    """Return all whole x with x' quadratic x = length (Fincke and Pohst 1985), or None if the search is too long."""
    n = len(quadratic)
    # With quadratic = U'U, the length is a sum of squares, one for each entry, starting with the last.
    upper = np.linalg.cholesky(quadratic).T
    squares, mixed = np.diag(upper) ** 2, upper / np.diag(upper)[:, None]
    solutions: list[list[float]] = []
    x = np.zeros(n)
    steps = 0
    levels = [_level(n - 1, length + 1e-6, squares, mixed, x)] if n else []
    while levels:
        k, left, centre, values = levels[-1]
        value = next(values, None)
        if value is None:
            x[k] = 0.0
            levels.pop()
            continue
        steps += 1
        if steps > _STEPS:
            return None
        x[k] = value
        rest = left - squares[k] * (value - centre) ** 2
        if k:
            levels.append(_level(k - 1, rest, squares, mixed, x))
        elif rest < 2e-6:
            solutions.append(x.tolist())
    return np.array(solutions, np.float64).reshape(-1, n) if n else np.zeros((1, 0))


def _level(
    k: int, left: float, squares: FloatArray, mixed: FloatArray, x: FloatArray
) -> tuple[int, float, float, Iterator[int]]:
    """Return the possible values of the k-th entry, given the entries after it."""
    centre = -float(mixed[k, k + 1 :] @ x[k + 1 :])
    radius = math.sqrt(max(left, 0.0) / squares[k])
    return k, left, centre, iter(range(math.ceil(centre - radius), math.floor(centre + radius) + 1))


def _clique(related: BoolArray, size: int) -> list[int] | None:
    """Return ``size`` candidates that are all related, or None if there are none or the search is too long."""
    steps = 0

    def grow(chosen: list[int], rest: IntArray) -> list[int] | None:
        nonlocal steps
        steps += 1
        if len(chosen) == size:
            return chosen
        while len(chosen) + len(rest) >= size and steps < _STEPS:
            clique = grow([*chosen, int(rest[0])], rest[related[rest[0], rest]])
            if clique is not None:
                return clique
            rest = rest[1:]
        return None

    return grow([], np.arange(len(related)))


def _pad_classes(counts: FloatArray, classes: int) -> FloatArray:
    return np.pad(counts, ((0, 0), (0, classes - counts.shape[1])))


# -- factors ------------------------------------------------------------------------------------------------------


def from_factor(
    gram: ArrayLike, sizes: ArrayLike, classes: int, rng: np.random.Generator, *, tries: int = 10, steps: int = 300
) -> RecoveredCounts:
    """Return nonnegative counts with the given sums whose products are near S, for an S with noise.

    Alternates between the rotation that brings a factor of S nearest to the counts (Procrustes) and the counts of the
    given size that are nearest to the rotated factor (projection); returns the best of several random starts.
    """
    s = np.asarray(gram, np.float64)
    total = np.asarray(sizes, np.float64)
    values, vectors = np.linalg.eigh((s + s.T) / 2)
    top = np.argsort(values)[::-1][:classes]
    factor = _pad_classes(vectors[:, top] * np.sqrt(np.maximum(values[top], 0.0)), classes)
    best, best_miss = None, np.inf
    for _ in range(tries):
        rotation = np.linalg.qr(rng.standard_normal((classes, classes)))[0]
        counts = factor
        for _ in range(steps):
            rotated = factor @ rotation
            counts = fit_rows(rotated, total)
            left, _, right = np.linalg.svd(factor.T @ counts)
            rotation = left @ right
        miss = float(((factor @ rotation - counts) ** 2).sum())
        if miss < best_miss:
            best, best_miss = counts, miss
    assert best is not None
    return RecoveredCounts(np.asarray(best, np.float64), named=False)


# -- updates ------------------------------------------------------------------------------------------------------


def shares_by_moments(updates: ArrayLike, step: float) -> FloatArray:
    r"""Return (k, B) label shares :math:`1 / B + \Delta b / \eta R`, from updates of the output layer's bias.

    They are exact for one full-batch step of an untrained model; see
    :mod:`fedcohort.selectors.numerics.label_shares`. Shares below 0 are moved to the nearest possible ones.

    Parameters
    ----------
    updates : (k, B) array
    step : float
        :math:`\eta R`, learning rate times local steps.
    """
    moved = np.atleast_2d(np.asarray(updates, np.float64))
    return fit_rows(1.0 / moved.shape[1] + moved / step, np.ones(len(moved)))


# -- coalitions ---------------------------------------------------------------------------------------------------


def from_sybils(products: ArrayLike, known: ArrayLike) -> RecoveredCounts:
    """Return the counts of all clients from the rows of S that belong to k clients with known counts.

    Parameters
    ----------
    products : (k, N) array
        The known clients' rows of S.
    known : (k, B) array
        Their counts. If k = B and they are linearly independent, such as ten clients with one class each, the counts of
        all clients are exact. With fewer clients, only the part that they span is.

    Examples
    --------
    >>> counts = np.array([[3, 4, 0], [1, 0, 6]])
    >>> sybils = np.eye(3, dtype=int)
    >>> from_sybils(sybils @ counts.T, sybils).counts.astype(int).tolist()
    [[3, 4, 0], [1, 0, 6]]
    """
    # Least squares also covers fewer sybils than classes, and dependent ones.
    rows, basis = np.asarray(products, np.float64), np.asarray(known, np.float64)
    return RecoveredCounts(np.asarray(np.linalg.lstsq(basis, rows, rcond=None)[0].T, np.float64), named=True)


def name_classes(result: RecoveredCounts, known: Mapping[int, ArrayLike]) -> RecoveredCounts:
    """Return the result with its columns in the order of the classes, as far as the known counts determine it.

    Parameters
    ----------
    known : mapping of client to (B,) counts
        The clients of a coalition.
    """
    if result.named or not known:
        return result
    clients = list(known)
    truth = np.array([np.asarray(known[c], np.float64) for c in clients])  # (k, B)
    ours = result.counts[clients]
    cost = np.abs(truth[:, :, None] - ours[:, None, :]).sum(axis=0)  # class x column
    columns = linear_sum_assignment(cost)[1]
    # The order of classes with equal counts in the whole coalition remains unknown.
    distinct = len({tuple(column) for column in np.round(truth, 6).T.tolist()}) == truth.shape[1]
    return RecoveredCounts(result.counts[:, columns], named=distinct)


# -- how good -----------------------------------------------------------------------------------------------------


def share_error(result: RecoveredCounts, truth: ArrayLike) -> FloatArray:
    """Return (N,) total variation distances between found and true label shares, 0 to 1.

    Columns without names are first put into the order that fits the truth best. So the error is what the attacker does
    not know, apart from the names of the classes.
    """
    true = np.asarray(truth, np.float64)
    return np.asarray(0.5 * np.abs(_shares(_best_order(result, true)) - _shares(true)).sum(axis=1))


def exact(result: RecoveredCounts, truth: ArrayLike) -> BoolArray:
    """Return (N,) whether each client's counts were found exactly, apart from the names of the classes."""
    true = np.asarray(truth, np.float64)
    return np.asarray((np.abs(_best_order(result, true) - true) < 0.5).all(axis=1))


def _best_order(result: RecoveredCounts, truth: FloatArray) -> FloatArray:
    """Return the counts with their columns in the order of the classes, or the best guess at it."""
    if result.named:
        return result.counts
    cost = np.abs(_shares(truth)[:, :, None] - _shares(result.counts)[:, None, :]).sum(axis=0)
    return result.counts[:, linear_sum_assignment(cost)[1]]


def _shares(counts: FloatArray) -> FloatArray:
    positive = np.maximum(counts, 0.0)
    total = positive.sum(axis=1, keepdims=True)
    return np.asarray(np.where(total > 0, positive / np.maximum(total, 1e-12), 1.0 / counts.shape[1]))


def guess_bound(epsilon: float) -> float:
    """Return how often an observer can at most guess which of two neighbours a client's data are, under epsilon-DP.

    >>> round(guess_bound(1.0), 3)
    0.731
    """
    return float(1.0 / (1.0 + np.exp(-epsilon)))

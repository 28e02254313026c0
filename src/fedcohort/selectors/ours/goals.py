"""What `balanced` aims at: how often each client should be asked, and what counts as its classes without labels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import LabelCounts, LabelFactor, LabelGram, LabelInfo, label_rows
from fedcohort.selectors.numerics.class_balance import ClassBalance, FactorBalance, Past, chance, group_of

_SOLVE_STEPS, _SOLVE_ERROR = 200, 1e-12
_MEMORY = 10  # a direction is the mean of about this many updates

NEGLIGIBLE = 1e-3
"""A QCID that does not matter: one sample in thirty is of another class."""


def balancing_rates(labels: LabelInfo, sizes: FloatArray, share: float) -> FloatArray:
    r"""Return (N,) how often clients should be asked, 1 on average, so that all data together are balanced.

    They are between 1 / ``share`` and ``share``, because accounts do not permit more.

    The rates r minimise :math:`QCID(r) + \mu \, \overline{(r_n - 1)^2}`, where QCID is that of the whole federation
    with client n counted :math:`r_n` times, and as many samples as before. :math:`\mu` is five times
    :data:`NEGLIGIBLE` plus twice the sampling error of all counts, by about which rates fitted to these counts look
    better than they are. Then the rates are drawn towards 1 by the cube of the share of the imbalance that they leave,
    where a negligible imbalance is none. Solved by conjugate gradients to six digits, so that all forms of labels give
    the same result.

    Examples
    --------
    >>> counts = LabelCounts([[60, 0], [60, 0], [60, 0], [0, 60]])
    >>> balancing_rates(counts, counts.counts.sum(axis=1), share=4).round(2).tolist()
    [0.67, 0.67, 0.67, 1.98]
    """
    n, samples = len(sizes), float(sizes.sum())
    if n == 0 or samples <= 0:
        return np.ones(n)
    stiffness = 5.0 * NEGLIGIBLE + 2.0 * float(chance(np.asarray(samples), labels.classes))
    shares = sizes / samples
    if isinstance(labels, LabelGram):
        gram = labels.gram / samples / samples

        def imbalance(rates: FloatArray) -> FloatArray:
            return np.asarray(gram @ rates - shares * (shares @ rates) / labels.classes)
    else:
        rows = label_rows(labels) / samples
        rows = rows - np.outer(shares, _ones(labels, sizes) / labels.classes)

        def imbalance(rates: FloatArray) -> FloatArray:
            return np.asarray(rows @ (rates @ rows))

    def product(rates: FloatArray) -> FloatArray:
        return np.asarray(n * imbalance(rates) + stiffness * rates)

    # Without the constraint on the number of samples, all rates but those of clients with few samples would fall.
    free, per_sample = _solved(product, np.full(n, stiffness)), _solved(product, shares)
    if free is None or per_sample is None:  # a Gram matrix that is not one: label products contradict each other
        return np.ones(n)
    rates = free + (1.0 - shares @ free) / (shares @ per_sample) * per_sample
    if rates.mean() <= 0:
        return np.ones(n)
    rates = np.clip(rates / rates.mean(), 1 / share, share)
    # Rates that hardly help are not worth the data they leave out, and count as little: every writer has more digits
    # than letters. The cube lets those count that remove half of an imbalance, which is all that S may permit.
    even = np.ones(n)
    before, after = (max(float(r @ imbalance(r)) / float(r @ shares) ** 2, NEGLIGIBLE) for r in (even, rates))
    helped = 1.0 - min(after / before, 1.0) ** 3
    return np.asarray(np.round(even + helped * (rates - even), 6))


def _solved(product: Callable[[FloatArray], FloatArray], target: FloatArray) -> FloatArray | None:
    """Return the x with ``product(x) == target``; None if the product is not positive.

    By conjugate gradients: few steps, and only products with the labels, so that a factor or a Gram matrix will do as
    well as counts.
    """
    x, rest = np.zeros_like(target), target.copy()
    step, length = rest.copy(), float(rest @ rest)
    enough = length * _SOLVE_ERROR**2
    for _ in range(_SOLVE_STEPS):
        if length <= enough:
            break
        moved = product(step)
        curve = float(step @ moved)
        if curve <= 0:
            return None
        x += length / curve * step
        rest -= length / curve * moved
        length, before = float(rest @ rest), length
        step = rest + length / before * step
    return x


def _ones(labels: LabelCounts | LabelFactor, sizes: FloatArray) -> FloatArray:
    """Return the vector of ones in the coordinates of the labels, which may be rotated."""
    if isinstance(labels, LabelCounts):
        return np.ones(labels.classes)
    return np.asarray(np.linalg.lstsq(labels.factor, sizes, rcond=None)[0], np.float64)


def aim_of(labels: LabelInfo, sizes: FloatArray, rates: FloatArray) -> FloatArray:
    """Return how far the mix of all data is from balance, with client n counted ``rates[n]`` times.

    That is a vector of classes, or in the coordinates of a factor; for a Gram matrix its product with each client.
    If these rates can balance the federation, it is 0. Otherwise, balanced cohorts would have to leave out data that
    is as good as any: every writer has more digits than letters.
    """
    counted = float(rates @ sizes)
    if isinstance(labels, LabelGram):
        return np.asarray(labels.gram @ rates / max(counted, 1.0) - sizes / labels.classes)
    if counted <= 0:
        return np.zeros(label_rows(labels).shape[1])
    return np.asarray(rates @ label_rows(labels) / counted - _ones(labels, sizes) / labels.classes)


def group_with_aim(
    labels: LabelInfo, sizes: FloatArray, rates: FloatArray, aim: FloatArray, candidates: IntArray, past: Past
) -> ClassBalance:
    r"""Return an empty group whose QCID is the squared distance from the mix that ``aim`` describes.

    With t the mix and u the balanced one, the counts become :math:`c_n - q_n (t - u)`. Their products are
    :math:`S - a q^T - q a^T + k q q^T`, where a = ``aim`` has the products of all clients with t - u, and k is that of
    t - u with itself.

    Examples
    --------
    Two of three clients have class 0. One of them and the third are balanced, but only all three match the federation.

    >>> counts, nothing = LabelCounts([[6, 0], [6, 0], [0, 6]]), Past(np.zeros(0, np.int64), np.zeros(0))
    >>> sizes, even = np.full(3, 6.0), np.ones(3)
    >>> group = group_with_aim(counts, sizes, even, aim_of(counts, sizes, even), np.arange(3), nothing)
    >>> group.add(0)
    >>> group.qcid_with_each(np.empty(3)).round(4)
    array([   inf, 0.2222, 0.0556])
    """
    if isinstance(labels, LabelGram):
        k = float(aim @ rates) / max(float(rates @ sizes), 1.0)
        across = np.outer(aim, sizes)
        gram = labels.gram - across - across.T + k * np.outer(sizes, sizes)
        return group_of(LabelGram(gram, labels.classes), sizes, candidates, past)
    clients, count = np.concatenate([candidates, past.clients]), len(candidates)  # only these rows are centred
    size = sizes.take(clients)
    rows = label_rows(labels).take(clients, axis=0) - np.outer(size, aim)
    weights = past.weights
    return FactorBalance(
        rows[:count], size[:count], labels.classes, weights @ rows[count:], float(weights @ size[count:])
    )


def update_directions(
    directions: FloatArray, seen: FloatArray, clients: IntArray, updates: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return directions (N, V) and how often each client was seen (N,) after ``updates`` (k, V) of ``clients``.

    A client's direction is the mean of its last updates, each scaled to length 1.
    """
    length = np.linalg.norm(updates, axis=1, keepdims=True)
    new = updates / np.where(length > 0, length, 1.0)
    seen = seen.copy()
    directions = directions.copy() if directions.shape[1] else np.zeros((len(seen), new.shape[1]))
    seen[clients] += 1
    directions[clients] += (new - directions[clients]) / np.minimum(seen[clients, None], _MEMORY)
    return directions, seen


def direction_group(
    directions: FloatArray, seen: FloatArray, sizes: FloatArray, candidates: IntArray, past: Past
) -> ClassBalance:
    """Return an empty group whose QCID is the squared distance of its mean direction from that of all clients.

    A cohort whose mean update points in the direction of the mean of all clients trains what all of them would train.
    A client that was never seen has the mean direction.
    """
    clients = np.concatenate([candidates, past.clients])
    count = len(candidates)
    mean = directions[seen > 0].mean(axis=0)
    rows = np.where(seen[clients, None] > 0, directions[clients], mean)
    # The last column makes the QCID of these rows the squared distance of their mean from the mean of all.
    factor = np.column_stack([(rows - mean) * sizes[clients, None], sizes[clients] / np.sqrt(2.0)])
    return group_of(
        LabelFactor(factor, 2), sizes[clients], np.arange(count), Past(np.arange(count, len(clients)), past.weights)
    )

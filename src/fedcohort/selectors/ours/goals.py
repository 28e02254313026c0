"""What `balanced` aims at: how often each client should be asked, and what counts as its classes without labels."""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import LabelCounts, LabelFactor, LabelGram, LabelInfo, label_rows
from fedcohort.selectors.numerics.class_balance import ClassBalance, Past, chance, group_of

_MAX_RATE = 20.0  # accounts end a client's lead long before; this only keeps rates positive
_SOLVE_STEPS, _SOLVE_ERROR = 200, 1e-12
_MEMORY = 10  # a direction is the mean of about this many updates


def balancing_rates(labels: LabelInfo, sizes: FloatArray) -> FloatArray:
    r"""Return (N,) how often clients should be asked, 1 on average, so that all data together are balanced.

    The rates r minimise :math:`QCID(r) + \mu \, \overline{(r_n - 1)^2}`, where QCID is that of the whole federation
    with client n counted :math:`r_n` times. :math:`\mu` is the imbalance that balanced data of the size of a mean
    client has by chance: the classes of few samples are no reason to ask a client often. Solved by conjugate gradients
    to six digits, so that all forms of labels give the same result.

    Examples
    --------
    >>> counts = LabelCounts([[60, 0], [60, 0], [60, 0], [0, 60]])
    >>> balancing_rates(counts, counts.counts.sum(axis=1)).round(2).tolist()
    [0.67, 0.67, 0.67, 1.98]
    """
    n, samples = len(sizes), float(sizes.sum())
    if n == 0 or samples <= 0:
        return np.ones(n)
    stiffness = float(chance(np.asarray(samples / n), labels.classes))
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

    rates = np.ones(n)
    rest = stiffness * rates - product(rates)
    step = rest.copy()
    length = float(rest @ rest)
    for _ in range(_SOLVE_STEPS):
        if length <= n * _SOLVE_ERROR**2:
            break
        moved = product(step)
        curve = float(step @ moved)
        if curve <= 0:  # a Gram matrix that is not one: somebody's label products contradict another's
            return np.ones(n)
        rates += length / curve * step
        rest -= length / curve * moved
        length, before = float(rest @ rest), length
        step = rest + length / before * step
    mean = float(rates.mean())
    return np.clip(np.round(rates / mean, 6), 1 / _MAX_RATE, _MAX_RATE) if mean > 0 else np.ones(n)


def _ones(labels: LabelCounts | LabelFactor, sizes: FloatArray) -> FloatArray:
    """Return the vector of ones in the coordinates of the labels, which may be rotated."""
    if isinstance(labels, LabelCounts):
        return np.ones(labels.classes)
    return np.asarray(np.linalg.lstsq(labels.factor, sizes, rcond=None)[0], np.float64)


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

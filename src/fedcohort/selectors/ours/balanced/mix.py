"""The mix of classes in all clients' data: how far a group is from it, and rates that balance it."""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import LabelCounts, LabelFactor, LabelGram, LabelInfo, label_rows
from fedcohort.selectors.numerics.class_balance import ClassBalance, FactorBalance, Past, group_of

_SOLVE_STEPS, _SOLVE_ERROR = 200, 1e-12


def group_off_mix(labels: LabelInfo, sizes: FloatArray, candidates: IntArray, past: Past) -> ClassBalance:
    """Return an empty group whose QCID is the squared distance from the mix of all clients' data.

    Examples
    --------
    Two of three clients have class 0. One of them and the third are balanced, but only all three match the federation.

    >>> counts, nothing = LabelCounts([[6, 0], [6, 0], [0, 6]]), Past(np.zeros(0, np.int64), np.zeros(0))
    >>> group = group_off_mix(counts, np.full(3, 6.0), np.arange(3), nothing)
    >>> group.add(0)
    >>> group.qcid_with_each(np.empty(3)).round(4)
    array([   inf, 0.2222, 0.0556])
    """
    if float(sizes.sum()) <= 0:
        return group_of(labels, sizes, candidates, past)
    if isinstance(labels, LabelGram):
        return group_of(_centre_gram(labels, sizes), sizes, candidates, past)
    # Only the rows that are needed are centred.
    clients, count = np.concatenate([candidates, past.clients]), len(candidates)
    client_sizes = sizes.take(clients)
    rows = label_rows(labels).take(clients, axis=0) - np.outer(client_sizes, _off_mix(labels, sizes))
    weights = past.weights
    return FactorBalance(
        rows[:count],
        client_sizes[:count],
        labels.classes,
        weights @ rows[count:],
        float(weights @ client_sizes[count:]),
    )


def balancing_rates(labels: LabelInfo, sizes: FloatArray, stiffness: float) -> FloatArray:
    r"""Return (N,) how often clients should take part, 1 on average, so that all data together are balanced.

    The rates r minimise :math:`QCID(r) + \mu \, \overline{(r_n - 1)^2}`, where QCID is that of the whole federation
    with client n counted r_n times. Clients with a rare class come more often, within what ``stiffness``
    (:math:`\mu`) allows. Solved by conjugate gradients to six digits, so that all forms of labels give the same result.

    Examples
    --------
    >>> counts = LabelCounts([[6, 0], [6, 0], [6, 0], [0, 6]])
    >>> balancing_rates(counts, counts.counts.sum(axis=1), stiffness=0.01).round(2).tolist()
    [0.68, 0.68, 0.68, 1.97]
    """
    n, samples = len(sizes), float(sizes.sum())
    if n == 0 or samples <= 0:
        return np.ones(n)
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
        if curve <= 0:  # S is not a matrix of inner products
            return np.ones(n)
        rates += length / curve * step
        rest -= length / curve * moved
        length, before = float(rest @ rest), length
        step = rest + length / before * step
    mean = float(rates.mean())
    return np.round(rates / mean, 6) if mean > 0 else np.ones(n)


def mix_qcid(labels: LabelInfo, sizes: FloatArray, rates: FloatArray) -> float:
    """Return the QCID of all clients' data together, with client n counted ``rates[n]`` times.

    >>> counts = LabelCounts([[6, 0], [6, 0], [0, 6]])
    >>> mix_qcid(counts, counts.counts.sum(axis=1), np.array([0.75, 0.75, 1.5]))
    0.0
    """
    no_candidates = np.zeros(0, np.int64)
    return group_of(labels, sizes, no_candidates, Past(np.arange(len(sizes)), rates)).qcid()


def _centre_gram(labels: LabelGram, sizes: FloatArray) -> LabelGram:
    r"""Return the products of counts :math:`c_n - q_n (p - u)`, with p the mix of all data and u the uniform one.

    They are :math:`S - a q^T - q a^T + k q q^T` with :math:`a = S 1 / \sum q - q / B` and :math:`k = QCID` of all
    clients.
    """
    gram, samples = labels.gram, float(sizes.sum())
    off = (gram / samples).sum(axis=1) - sizes / labels.classes
    k = float(off.sum()) / samples
    return LabelGram(gram - np.outer(off, sizes) - np.outer(sizes, off) + k * np.outer(sizes, sizes), labels.classes)


def _off_mix(labels: LabelCounts | LabelFactor, sizes: FloatArray) -> FloatArray:
    """Return p - u."""
    totals = labels.totals if isinstance(labels, LabelCounts) else labels.factor.sum(axis=0)
    return np.asarray(totals / float(sizes.sum()) - _ones(labels, sizes) / labels.classes)


def _ones(labels: LabelCounts | LabelFactor, sizes: FloatArray) -> FloatArray:
    """Return the vector of ones in the coordinates of the labels, which may be rotated."""
    if isinstance(labels, LabelCounts):
        return np.ones(labels.classes)
    return np.asarray(np.linalg.lstsq(labels.factor, sizes, rcond=None)[0], np.float64)

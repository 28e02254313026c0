"""Shapley values of the models of a round: how much each client contributes to the gain of the average.

.. [Liu2022] Z. Liu et al., "GTG-Shapley: Efficient and Accurate Participant Contribution Evaluation in Federated
   Learning", ACM TIST 13, 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray

Worth = Callable[[BoolArray], FloatArray]

TRUNCATION = 1e-4  # a smaller difference of worth counts as none
_MOST_ORDERS = 50  # per member
_LEAST_ORDERS = 20  # before the values may count as settled
_WINDOW, _SETTLED = 10, 0.01  # settled: the mean change over the last 10 orders is below 1%


def gtg_shapley(worth: Worth, members: int, rng: np.random.Generator) -> FloatArray:
    """Estimate the Shapley value of each member of a coalition from permutations ([Liu2022]_).

    The value of member i is the mean, over all orders in which members may join, of what i adds to the members before
    it. Orders are drawn in cycles in which every member is first once. Two truncations save work. If all members
    together change the worth by less than :data:`TRUNCATION`, all values are 0. Once the members that have joined are
    worth as much as all members, the rest of that order adds nothing. Drawing ends when the values settle: when their
    mean change over the last 10 orders is below 1% of their mean size, but after at most 50 orders per member. No
    coalition is evaluated twice. With up to seven members, evaluating all coalitions is no more work than twenty
    orders, so the values are computed exactly.

    Parameters
    ----------
    worth : callable
        Takes coalitions (s, m), one per row, and returns the worth of each, (s,).
    members : int
        The number of members (m).
    rng : numpy.random.Generator

    Returns
    -------
    (m,) float array
        Without truncation, they sum to the worth of all members minus that of the empty coalition.

    Examples
    --------
    Two members that each add 1, and 4 more together: 3 each. The others add nothing.

    >>> def worth(coalitions):
    ...     return 1.0 * coalitions[:, 0] + coalitions[:, 1] + 4.0 * (coalitions[:, 0] & coalitions[:, 1])
    >>> gtg_shapley(worth, 4, np.random.default_rng(0)).round(3)
    array([3., 3., 0., 0.])
    """
    if members == 0:
        return np.zeros(0)
    nobody, everybody = np.zeros((1, members), np.bool_), np.ones((1, members), np.bool_)
    first, last = (float(value) for value in worth(np.concatenate([nobody, everybody])))
    if members == 1:
        return np.array([last - first])
    if abs(last - first) < TRUNCATION:  # the paper's truncation between rounds
        return np.zeros(members)
    if 2**members <= _LEAST_ORDERS * members:
        return exact_shapley(worth, members)
    return _from_orders(worth, members, rng, {nobody.tobytes(): first, everybody.tobytes(): last}, first, last)


def _from_orders(
    worth: Worth, members: int, rng: np.random.Generator, known: dict[bytes, float], first: float, last: float
) -> FloatArray:
    """(m,) the mean gain of each member over random orders, which are drawn until the means settle.

    ``known`` collects the worth of coalitions. ``first`` is the worth of the empty coalition, ``last`` that of all.
    """
    total, drawn = np.zeros(members), 0
    recent: list[FloatArray] = []  # the estimates after the last orders
    while drawn < _MOST_ORDERS * members:
        # Guided sampling: the first places matter most, and every member has them equally often.
        orders = np.stack([_order_beginning_with(i, members, rng) for i in range(members)])
        for gains in _gains(orders, worth, known, first, last):
            total += gains
            drawn += 1
            recent = [*recent[-_WINDOW:], total / drawn]
        now = recent[-1]
        change = np.mean([np.abs(before - now).mean() for before in recent[:-1]])
        if drawn >= _LEAST_ORDERS and change < _SETTLED * np.abs(now).mean():
            break
    return np.asarray(total / drawn)


def exact_shapley(worth: Worth, members: int) -> FloatArray:
    """Return the Shapley values (m,) by their definition, from all 2^m coalitions."""
    numbers = np.arange(2**members)
    coalitions = (numbers[:, None] >> np.arange(members)) & 1 == 1
    value, size = worth(coalitions), coalitions.sum(axis=1)
    # The share of orders in which exactly these s - 1 others come before the member: (s - 1)! (m - s)! / m!.
    chance = np.array([1 / (members * comb(members - 1, s - 1)) if s else 0.0 for s in range(members + 1)])
    shapley = np.empty(members)
    for k in range(members):
        with_k = numbers[coalitions[:, k]]
        shapley[k] = ((value[with_k] - value[with_k ^ (1 << k)]) * chance[size[with_k]]).sum()
    return shapley


def _order_beginning_with(member: int, members: int, rng: np.random.Generator) -> IntArray:
    """Return a random order of all members in which ``member`` is first."""
    others = np.delete(np.arange(members), member)
    return np.concatenate([[member], rng.permutation(others)])


def _gains(orders: IntArray, worth: Worth, known: dict[bytes, float], first: float, last: float) -> FloatArray:
    """(r, m) what each member adds in each of ``orders`` (r, m), computed for all orders at once, step by step."""
    count, members = orders.shape
    joined = np.zeros((count, members), np.bool_)
    before = np.full(count, first)
    gains = np.zeros((count, members))
    rows = np.arange(count)
    for step in range(members):
        joined[rows, orders[:, step]] = True
        unfinished = np.flatnonzero(np.abs(last - before) >= TRUNCATION)  # the paper's truncation within an order
        new = {joined[row].tobytes(): joined[row] for row in unfinished if joined[row].tobytes() not in known}
        if new:
            values = worth(np.stack(list(new.values())))
            known.update(zip(new, (float(value) for value in values), strict=True))
        after = before.copy()
        after[unfinished] = [known[joined[row].tobytes()] for row in unfinished]
        gains[rows, orders[:, step]] = after - before
        before = after
    return gains

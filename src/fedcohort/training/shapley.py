"""Shapley values of the models of a round: how much of the average's gain is each client's.

.. [Liu2022] Z. Liu et al., "GTG-Shapley: Efficient and Accurate Participant Contribution Evaluation in Federated
   Learning", ACM TIST 13, 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray

Worth = Callable[[BoolArray], FloatArray]

TRUNCATION = 1e-4  # a difference of worth below this counts as none
_PER_MEMBER = 50  # most permutations, for each member
_LEAST, _LOOK_BACK, _SETTLED = 20, 10, 0.01  # permutations before settling; how many must differ by less than this


def gtg_shapley(worth: Worth, members: int, rng: np.random.Generator) -> FloatArray:
    """Estimate the Shapley value of each member of a coalition from permutations ([Liu2022]_).

    The value of member i is the mean, over the orders in which members may join, of what i adds to those who joined
    before it. Orders are drawn in cycles, in each of which every member is first once. Two truncations save work: where
    all members together change little (by :data:`TRUNCATION`), all values are 0; and once those who joined are worth
    as much as all members, the rest of that order adds nothing. It ends when values settle, their mean change over
    the last 10 orders being below 1% of their mean size, at the latest after 50 orders for each member. No coalition
    is evaluated twice. Up to seven members, whose coalitions are no more than twenty orders look at, the definition is
    summed up instead.

    Parameters
    ----------
    worth : callable
        Takes coalitions (s, m), one row each, and returns what each is worth, (s,).
    members : int
        How many there are (m).
    rng : numpy.random.Generator

    Returns
    -------
    (m,) float array
        Without truncation they sum to what all are worth less what nobody is.

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
    if abs(last - first) < TRUNCATION:  # between rounds
        return np.zeros(members)
    if 2**members <= _LEAST * members:
        return exact_shapley(worth, members)
    return _from_orders(worth, members, rng, {nobody.tobytes(): first, everybody.tobytes(): last}, first, last)


def _from_orders(
    worth: Worth, members: int, rng: np.random.Generator, found: dict[bytes, float], first: float, last: float
) -> FloatArray:
    """(m,) the mean gain of each member over random orders, drawn until it settles.

    ``found`` remembers what coalitions are worth; ``first`` is what nobody is worth, ``last`` what everybody is.
    """
    total, made = np.zeros(members), 0
    recent: list[FloatArray] = []  # the estimates after the last orders
    while made < _PER_MEMBER * members:
        # Guided sampling: the first places count most, and everybody has them equally often.
        orders = np.stack([_led_by(i, members, rng) for i in range(members)])
        for gains in _gains(orders, worth, found, first, last):
            total += gains
            made += 1
            recent = [*recent[-_LOOK_BACK:], total / made]
        now = recent[-1]
        change = np.mean([np.abs(before - now).mean() for before in recent[:-1]])
        if made >= _LEAST and change < _SETTLED * np.abs(now).mean():
            break
    return np.asarray(total / made)


def exact_shapley(worth: Worth, members: int) -> FloatArray:
    """Return the Shapley values (m,) by their definition, from all 2^m coalitions."""
    numbers = np.arange(2**members)
    coalitions = (numbers[:, None] >> np.arange(members)) & 1 == 1
    value, size = worth(coalitions), coalitions.sum(axis=1)
    # The share of orders in which exactly these s - 1 others come before it: (s - 1)! (m - s)! / m!.
    chance = np.array([1 / (members * comb(members - 1, s - 1)) if s else 0.0 for s in range(members + 1)])
    found = np.empty(members)
    for k in range(members):
        having = numbers[coalitions[:, k]]
        found[k] = ((value[having] - value[having ^ (1 << k)]) * chance[size[having]]).sum()
    return found


def _led_by(member: int, members: int, rng: np.random.Generator) -> IntArray:
    """Return a random order of all members in which ``member`` is first."""
    others = np.delete(np.arange(members), member)
    return np.concatenate([[member], rng.permutation(others)])


def _gains(orders: IntArray, worth: Worth, found: dict[bytes, float], first: float, last: float) -> FloatArray:
    """(r, m) what each member adds in each of ``orders`` (r, m), step by step in all of them at once."""
    count, members = orders.shape
    joined = np.zeros((count, members), np.bool_)
    before = np.full(count, first)
    gains = np.zeros((count, members))
    rows = np.arange(count)
    for step in range(members):
        joined[rows, orders[:, step]] = True
        open_ = np.flatnonzero(np.abs(last - before) >= TRUNCATION)  # truncation within an order
        new = {joined[row].tobytes(): joined[row] for row in open_ if joined[row].tobytes() not in found}
        if new:
            values = worth(np.stack(list(new.values())))
            found.update(zip(new, (float(value) for value in values), strict=True))
        after = before.copy()
        after[open_] = [found[joined[row].tobytes()] for row in open_]
        gains[rows, orders[:, step]] = after - before
        before = after
    return gains

r"""Everybody in turn, as a promise.

Client n has the rate :math:`r_n`. Each time it takes part it has had :math:`1 / r_n` of a turn, so the mean of all
turns, weighted by the rates, rises by the same amount in every round: k / R with cohorts of k and R the sum of rates.
A client's *lead* is its turns less that mean. Whoever is D turns behind comes first, the furthest behind before others;
a client D turns ahead is left out while enough others are available. What follows from that is on the selector's page.
"""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray


def mean_turns(turns: FloatArray, rates: FloatArray) -> float:
    """Return the mean of the turns (c,) of candidates with ``rates`` (c,).

    >>> mean_turns(np.array([3.0, 1.0, 0.0]), np.array([1.0, 1.0, 2.0]))
    1.0
    """
    return float((rates @ turns) / rates.sum())


def first_and_eligible(lead: FloatArray, size: int, slack: float) -> tuple[BoolArray, BoolArray]:
    """Return who comes first in a cohort of ``size`` (c,), and who may come at all (c,).

    The clients that come first are never more than ``size``, the eligible ones never fewer.

    >>> lead = np.array([-4.0, -3.0, -3.0, 0.0, 1.0, 5.0])
    >>> first_and_eligible(lead, size=4, slack=3)
    (array([ True,  True,  True, False, False, False]), array([ True,  True,  True,  True,  True, False]))
    >>> first_and_eligible(lead, size=2, slack=3)
    (array([ True, False, False, False, False, False]), array([ True,  True,  True, False, False, False]))
    """
    if size >= len(lead):
        return np.ones(len(lead), np.bool_), np.ones(len(lead), np.bool_)
    # Of the cohort, if the furthest behind were taken. Partitioning is slow among many that are equal.
    last = lead.min() if size == 1 else np.partition(lead, size - 1)[size - 1]
    if last <= -slack:
        return lead < last, lead <= last
    return lead <= -slack, (lead < slack) | (lead <= last)


def cap_debt(turns: FloatArray, there: IntArray, mean: float, slack: float) -> FloatArray:
    """Return a copy of turns (N,) in which no absent client is owed more than ``slack`` turns by those present.

    Somebody who comes back after a long absence is due at once, but does not fill every cohort for weeks. Those present
    have had ``mean`` turns.

    >>> cap_debt(np.array([9.0, 0.0, 7.0]), np.array([0]), mean=9.0, slack=3)
    array([9., 6., 7.])
    """
    capped, behind = turns.copy(), turns < mean - slack
    if behind.any():
        behind[there] = False
        capped[behind] = mean - slack
    return capped

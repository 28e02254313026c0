r"""The guarantee that every client gets its turns.

Client n has the rate :math:`r_n`. Each time it takes part, it has had :math:`1 / r_n` of a turn. So the mean of all
turns, weighted by the rates, rises by the same amount in every round: k / R with cohorts of k and R the sum of rates.
A client's *lead* is its turns minus that mean. Clients D turns behind come first, the furthest behind before the
others. Clients D turns ahead are left out while enough others are available. The selector's page proves what follows.
"""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray


def first_and_eligible(lead: FloatArray, size: int, slack: float) -> tuple[BoolArray, BoolArray]:
    """Return which candidates come first in a cohort of ``size`` (c,), and which are eligible at all (c,).

    At most ``size`` candidates come first, and at least ``size`` are eligible.

    >>> lead = np.array([-4.0, -3.0, -3.0, 0.0, 1.0, 5.0])
    >>> first_and_eligible(lead, size=4, slack=3)
    (array([ True,  True,  True, False, False, False]), array([ True,  True,  True,  True,  True, False]))
    >>> first_and_eligible(lead, size=2, slack=3)
    (array([ True, False, False, False, False, False]), array([ True,  True,  True, False, False, False]))
    """
    if size >= len(lead):
        return np.ones(len(lead), np.bool_), np.ones(len(lead), np.bool_)
    # The largest lead in the cohort, if those furthest behind were taken. Partitioning many equal values is slow.
    last = lead.min() if size == 1 else np.partition(lead, size - 1)[size - 1]
    if last <= -slack:
        return lead < last, lead <= last
    return lead <= -slack, (lead < slack) | (lead <= last)


def cap_debt(turns: FloatArray, present: IntArray, mean: float, slack: float) -> FloatArray:
    """Return a copy of turns (N,) in which no absent client is owed more than ``slack`` turns by those present.

    A client that returns after a long absence is due at once, but does not fill every cohort for weeks. The clients
    present have had ``mean`` turns on average.

    >>> cap_debt(np.array([9.0, 0.0, 7.0]), np.array([0]), mean=9.0, slack=3)
    array([9., 6., 7.])
    """
    capped, behind = turns.copy(), turns < mean - slack
    if behind.any():
        behind[present] = False
        capped[behind] = mean - slack
    return capped

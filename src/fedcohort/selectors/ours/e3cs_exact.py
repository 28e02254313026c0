r"""E3CS that draws with exactly the probabilities it computes.

.. [Huang2022] T. Huang, W. Lin, L. Shen, K. Li, A. Y. Zomaya, "Stochastic Client Selection for Federated Learning with
   Volatile Clients", IEEE Internet of Things Journal 9(20), 2022, arXiv:2011.08756.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.protocol import register
from fedcohort.selectors.baselines.e3cs import E3CS
from fedcohort.selectors.numerics.sampling import systematic_sample


@register("e3cs-exact")
@dataclass(frozen=True, kw_only=True)
class E3CSExact(E3CS):
    r"""E3CS in which client i is in the cohort with probability exactly :math:`p_i`.

    :class:`~fedcohort.selectors.baselines.e3cs.E3CS` ([Huang2022]_) draws clients one by one in proportion to p, which
    leaves clients with p = 1 out in up to a third of the rounds. Here the cohort is drawn systematically. Clients with
    p = 1 always take part, every client takes part at least with its quota, and :math:`x_i / p_i` is unbiased.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundRequest
    >>> session = Session(E3CSExact(fairness=1.0), ClientTable(n=4), seed=1)
    >>> session.ask(RoundRequest(size=2)).score
    array([0.5, 0.5, 0.5, 0.5])
    """

    picks_by: ClassVar[str] = "Clients are drawn at random, and the score is the probability of being in the cohort."

    def draw(self, chance: FloatArray, size: int, rng: np.random.Generator) -> IntArray:
        """Return ``size`` positions, each drawn with exactly the probability in ``chance`` (c,)."""
        return systematic_sample(chance, rng)

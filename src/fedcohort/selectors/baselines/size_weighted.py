"""Sampling by data size with replacement.

.. [Li2018] T. Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx), arXiv:1812.06127.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.protocol import Answer, Cohort, Slate, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines.uniform import NoState, Stateless


@register("size-weighted")
@dataclass(frozen=True, kw_only=True)
class SizeWeighted(Stateless):
    r"""Draw clients in proportion to their data, with replacement ([Li2018]_, Algorithm 2, line 2).

    Each of m draws takes client k with probability :math:`p_k = n_k / \sum_j n_j`. A client drawn several times
    trains once and counts that often in the average (``Cohort.weights``), so the cohort may be smaller than
    requested. Symbols: p_k = clients.weights over the available clients, m = slate.size. Deviations: clients without
    data are drawn only when no client has any.

    **Aggregator**: ``mean`` (or ``fedprox``), which makes the average unbiased. ``mean`` is the default. Under
    ``fedavg``, sizes would count twice.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundRequest
    >>> session = Session(SizeWeighted(), ClientTable(sizes=[0, 0, 1000]), seed=1)
    >>> cohort = session.ask(RoundRequest(size=3))
    >>> cohort.clients, cohort.weights
    (array([2]), array([3.]))
    """

    requires = frozenset({Signal.SIZES})
    aggregator = "mean"

    picks_by: ClassVar[str] = (
        "Each place is drawn at random in proportion to size. A client drawn twice counts twice. The score is the"
        " client's share of the data."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "size": "its share of all data",
    }

    starves = "a client with no data is never picked"
    one_at_a_time = True

    def select(
        self, state: NoState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, NoState]:
        """Draw with replacement and merge duplicates."""
        sizes = slate.of_candidates(slate.clients.sizes)
        # Nobody has data. A cohort must not be empty for that, so all are equally likely.
        if sizes.max() <= 0:
            sizes = np.ones_like(sizes)
        cumulative = np.cumsum(sizes)
        draws = np.searchsorted(cumulative, rng.random(slate.size) * cumulative[-1], side="right")
        # Rounding can put a draw at the end of the sum, which belongs to the last client with data.
        draws = np.minimum(draws, np.flatnonzero(sizes)[-1])
        positions, counts = np.unique(draws, return_counts=True)
        share = sizes / cumulative[-1]
        cohort = Cohort(
            slate.candidates[positions],
            candidates=slate.candidates,
            score=share,
            parts={"size": share},
            weights=counts.astype(np.float64),
        )
        return cohort, state

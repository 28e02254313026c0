"""DELTA: draw clients with unusual updates more often, and keep the average unbiased.

.. [Wang2023] L. Wang, Y. Guo, T. Lin, X. Tang, "DELTA: Diverse Client Sampling for Fasting Federated Learning", NeurIPS
   2023 (arXiv 2205.13925), Eq. 11 and its practical form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.sampling import inclusion_probabilities, scale_to_all_clients, systematic_sample


@dataclass(frozen=True)
class _DeltaState:
    """What DELTA remembers about each client."""

    mass: FloatArray = per_client()  # (N,) p_i times N


@register("delta")
@dataclass(frozen=True, kw_only=True)
class Delta(Selector[_DeltaState]):
    r"""Draw clients in proportion to the diversity of their last updates ([Wang2023]_, Eq. 11, practical form).

    Partial participation causes the least variance when

    .. math:: p_i \propto d_i = \sqrt{\alpha_1 \zeta_i^2 + \alpha_2 \sigma_i^2}, \qquad
              \zeta_i = \|\nabla F_i - \nabla f\|,

    where :math:`\sigma_i^2` is the variance of a client's batch gradients. In practice only the cohort :math:`S_t`
    reports, and the mean of its updates stands for :math:`\nabla f`. At first all :math:`p_i = 1 / N`. After each
    round, the members of the cohort divide the sum of their probabilities among themselves,

    .. math:: p_i \leftarrow \frac{d_i}{\sum_{j \in S_t} d_j} \sum_{j \in S_t} p_j \quad \text{for } i \in S_t.

    In the average, a client counts for its share of the samples divided by its probability of being drawn.

    Symbols: zeta_i = Signal.UPDATE_DISTANCE, :math:`\alpha_2 \sigma^2 / \alpha_1` = ``local_variance`` times the
    cohort's mean of :math:`\zeta^2`, p_i N = ``_DeltaState.mass``.

    Deviations: the constants alpha contain the smoothness of the loss, which is unknown, and hosts do not report the
    variance of batch gradients. So :math:`\alpha_2 \sigma_i^2` is the same for all clients and is given relative to
    the diversity. Exactly m clients are drawn, each with probability :math:`\min(1, c\, p_i)` (systematically, in
    random order), where the paper draws m times. Clients that join start with the mean probability.

    **Aggregator**: ``inverse-probability``, as in the paper. It is the default.

    Examples
    --------
    Client 0 is far from the others. Next time it is the most likely, and counts for less.

    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(Delta(local_variance=0.0), ClientTable(sizes=[10, 10, 10, 10]), seed=0)
    >>> everybody = session.ask(RoundRequest(size=4))
    >>> apart = np.array([3.0, 1.0, 1.0, 1.0])[everybody.clients]
    >>> session.tell(RoundReport(everybody.ticket, everybody.clients, metrics={Signal.UPDATE_DISTANCE: apart}))
    >>> session.ask(RoundRequest(size=1)).score
    array([0.5       , 0.16666667, 0.16666667, 0.16666667])
    """

    requires = frozenset({Signal.SIZES, Signal.UPDATE_DISTANCE})
    aggregator = "inverse-probability"

    picks_by: ClassVar[str] = "Clients are drawn at random, and the score is the probability of being in the cohort."
    part_meanings: ClassVar[Mapping[str, str]] = {
        "diversity": "how far its updates were from the others'",
    }

    checked_params: ClassVar[ParamSets] = {
        "almost only diversity": {"local_variance": 0.001},
        "almost uniform": {"local_variance": 100.0},
    }

    local_variance: float = param(
        0.1,
        Interval(float, 0, None),
        "variance of batch gradients over the mean squared diversity (alpha_2 sigma^2 / alpha_1); 0: only diversity",
    )

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _DeltaState:
        """Start with equal probabilities."""
        return _DeltaState(np.ones(clients.n))

    def select(
        self, state: _DeltaState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _DeltaState]:
        """Draw by the probabilities."""
        mass = slate.of_candidates(state.mass)
        # A client is in the cohort at most once, so its share of m places is capped at 1.
        chance = inclusion_probabilities(mass, slate.size)
        picked = systematic_sample(chance, rng)
        cohort = Cohort(
            slate.candidates[picked],
            candidates=slate.candidates,
            score=chance,
            parts={"diversity": mass},
            weights=scale_to_all_clients(slate.clients.weights, slate.candidates) / chance[picked],
            notes={"certain": int((chance == 1).sum())},
        )
        return cohort, state

    def update(self, state: _DeltaState, outcome: Outcome) -> _DeltaState:
        """Divide the probability of the clients that trained among them by diversity."""
        clients = outcome.clients[outcome.ok]
        if not len(clients):
            return state
        mass = state.mass.copy()
        # Only among those that reported, so the probabilities still sum to 1 without a pass over all clients.
        mass[clients] = _shared_mass(mass[clients], outcome[Signal.UPDATE_DISTANCE][outcome.ok], self.local_variance)
        return _DeltaState(mass)


def _shared_mass(mass: FloatArray, distance: FloatArray, local_variance: float) -> FloatArray:
    """Return ``mass`` (k,) divided among the members of a cohort by their diversity, from ``distance`` (k,).

    Every member keeps at least a millionth of an equal share, because a client at 0 would never be drawn again.

    >>> _shared_mass(np.array([1.0, 3.0]), np.array([3.0, 1.0]), 0.0)
    array([3., 1.])
    """
    # Relative to the largest, because only ratios count and squares of large distances overflow.
    largest = max(float(distance.max()), np.finfo(np.float64).tiny)
    square = (np.maximum(distance, 0.0) / largest) ** 2
    diversity = np.sqrt(square + local_variance * square.mean())
    total = diversity.sum()
    share = diversity / total if total > 0 else np.full(len(mass), 1 / len(mass))
    share = np.maximum(share, 1e-6 / len(mass))
    return np.asarray(share / share.sum() * mass.sum())

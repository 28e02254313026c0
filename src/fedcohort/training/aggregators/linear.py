r"""Weighted means of the kept models.

.. [McMahan2017] B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data".
.. [Li2020] T. Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx).
.. [Li2019] X. Li et al., "On the Convergence of FedAvg on Non-IID Data" (partial device participation).
.. [Horvitz1952] D. G. Horvitz, D. J. Thompson, "A Generalization of Sampling Without Replacement From a Finite
   Universe", JASA 47, 1952.
.. [Kim2020] T. Kim et al., "Accurate and Fast Federated Learning via Combinatorial Multi-Armed Bandits", Table 1.

Symbols: S all N clients, S^t the clients whose models are averaged, p_k client k's share of all training samples,
m_k its multiplicity (1 unless it was drawn several times).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcohort.core.params import Boolean, Interval, OneOf, Optional, param
from fedcohort.training.aggregators.base import AGGREGATORS, Members, Mix, WeightedSum


@AGGREGATORS.register("fedavg")
@dataclass(frozen=True, kw_only=True)
class FedAvg(WeightedSum):
    r"""Mean by size over the kept cohort, :math:`\sum_{k \in S^t} p_k m_k w_k / \sum_{k \in S^t} p_k m_k`.

    The default: FedAvg ([McMahan2017]_) with weights that sum to 1 over the cohort, as in most software. FedPdp with
    normalised weights is the same.

    >>> members = Members(np.array([4, 7]), np.array([0.1, 0.3]), np.array([5., 5.]), 10, np.ones(2))
    >>> FedAvg().mix(members).weights
    array([0.25, 0.75])
    """

    def mix(self, members: Members) -> Mix:
        """Weights by size, summing to 1."""
        return Mix(members.by_size)


@AGGREGATORS.register("mean")
@dataclass(frozen=True, kw_only=True)
class Mean(WeightedSum):
    r"""Plain mean, :math:`\sum_{k \in S^t} m_k w_k / \sum_{k \in S^t} m_k` (FedCor's Eq. 4, 1/C each)."""

    def mix(self, members: Members) -> Mix:
        """Weights by multiplicity, summing to 1."""
        return Mix(members.by_count)


@AGGREGATORS.register("fedavg-with-absent")
@dataclass(frozen=True, kw_only=True)
class FedAvgWithAbsent(WeightedSum):
    r"""FedAvg as FedCM's Table 1 writes it ([Kim2020]_, Eq. 3).

    :math:`\sum_{k \notin S^t} p_k w + \sum_{k \in S^t} p_k w_k`. Absent clients keep the old global model, so a
    small cohort moves it little. For the usual weights over the cohort only, see ``fedavg``. Deviation: if
    multiplicities raise the cohort's weight above 1, it is scaled back to 1, because the old model would get a
    negative weight.
    """

    def mix(self, members: Members) -> Mix:
        """Weights p_k m_k; the old model gets the rest."""
        weights = members.share * members.multiplicity
        present = float(weights.sum())
        if present > 1.0:  # only with multiplicities
            return Mix(weights / present)
        return Mix(weights, 1.0 - present)


@AGGREGATORS.register("inverse-probability")
@dataclass(frozen=True, kw_only=True)
class InverseProbability(WeightedSum):
    r"""Estimate of the update of all clients, :math:`w + \sum_{k \in S^t} p_k m_k (w_k - w)` ([Horvitz1952]_).

    Unbiased with selectors that count every client once on average over draws (m_k is 0 for clients not drawn). Those
    are ``gradnorm`` and ``feel``: :math:`m_k = 1 / \pi_k`, with the probability :math:`\pi_k` that k takes part.
    Weights are not divided by their sum, so the old model has the weight :math:`1 - \sum_k p_k m_k` (may be < 0).
    Clients that failed or that a filter dropped count as if they had not changed the model. To make up for unavailable
    clients, the selectors give the others more weight. ``clip`` trades variance for bias.

    >>> members = Members(np.array([4, 7]), np.array([0.1, 0.3]), np.array([5., 5.]), 10, np.array([5.0, 2.5]))
    >>> mix = InverseProbability().mix(members)
    >>> mix.weights, mix.old
    (array([0.5 , 0.75]), -0.25)
    """

    clip: float | None = param(
        None,
        Optional(Interval(float, 1, None)),
        "largest factor of a client's weight, against huge weights of rare clients; None: no limit",
    )

    def mix(self, members: Members) -> Mix:
        """Weights p_k m_k; the old model gets the difference to 1, which may be negative."""
        counted = members.multiplicity if self.clip is None else np.minimum(members.multiplicity, self.clip)
        weights = members.share * counted
        return Mix(weights, 1.0 - float(weights.sum()))


@AGGREGATORS.register("fedprox")
@dataclass(frozen=True, kw_only=True)
class FedProx(WeightedSum):
    r"""FedProx: mean of the kept models, :math:`\frac{1}{|S^t|} \sum_{k \in S^t} w_k`, and a proximal term ([Li2020]_).

    Local training minimises :math:`F_k(w) + \frac{\mu}{2} \|w - w^t\|^2`. The paper draws clients by size and
    averages them equally. With a selector that does not draw by size, ``weighting="size"`` keeps the weight of
    large clients.
    """

    mu: float = param(0.1, Interval(float, 0, None), "weight of the proximal term (mu); 0.1 in FedCM's comparison")
    weighting: str = param("count", OneOf(("count", "size")), "equal weights (the paper) or weights by client size")

    @property
    def prox(self) -> float:
        """Weight of the proximal term."""
        return float(self.mu)

    def mix(self, members: Members) -> Mix:
        """Equal weights, or weights by size."""
        return Mix(members.weights_by(self.weighting))


@AGGREGATORS.register("fedpdp")
@dataclass(frozen=True, kw_only=True)
class FedPdp(WeightedSum):
    r"""FedAvg with partial device participation ([Li2019]_), :math:`\sum_{k \in S^t} p_k \frac{|S|}{|S^t|} w_k`.

    With a filter, S^t are the kept models, as in FedCA's Eq. 5 ([Kim2020]_). The paper's weights do not sum to 1 when
    client sizes differ, so the scale of the model drifts from round to round. The default, ``normalise=True``, divides
    by their sum. That deviates from the paper and equals ``fedavg``. ``normalise=False`` is the paper's formula.
    """

    normalise: bool = param(True, Boolean(), "divide the weights by their sum, so that the model keeps its scale")

    def mix(self, members: Members) -> Mix:
        """Weights ``p_k N / |S^t|``, or the same divided by their sum."""
        if self.normalise:
            return Mix(members.by_size)
        return Mix(members.share * members.multiplicity * (members.federation / members.multiplicity.sum()))

r"""Aggregators for clients that answer one by one, some with updates of older models.

.. [Nguyen2022] J. Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022 (FedBuff).
.. [Xie2019] C. Xie, S. Koyejo, I. Gupta, "Asynchronous Federated Optimization", 2019 (FedAsync), Sections 4 and 6.

Symbols: w the global model, w_k a client's model, :math:`\Delta_k` its update, the difference to the model it started
from, :math:`\tau_k` the number of global models since then, s the discount of stale updates.

Instead of w_k, hosts pass :math:`w + \Delta_k`, the update on top of the newest model, unless the aggregator has
``mixes_models = True``. So every other aggregator, and every server optimiser, works with stale updates too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.params import Interval, OneOf, param
from fedcohort.training.aggregators.base import AGGREGATORS, Members, Mix, WeightedSum, polynomial

_POSITIVE = Interval(float, 0, None, "neither")
_EXPONENT = Interval(float, 0, None)


@AGGREGATORS.register("fedbuff")
@dataclass(frozen=True, kw_only=True)
class FedBuff(WeightedSum):
    r"""The mean of the buffered updates, stale ones discounted ([Nguyen2022]_, Algorithm 1).

    :math:`w \leftarrow w + \frac{\eta_g}{K} \sum_k s(\tau_k) \Delta_k`, with :math:`s(\tau) = (1 + \tau)^{-a}`, a = 1/2
    in the paper's experiments. K is the number of updates in the buffer. Weights do not sum to 1: the staler the
    updates, the shorter the step. Deviations: none, but the paper's privacy and secure aggregation are not included.

    >>> members = Members(np.arange(2), np.ones(2), np.ones(2), 9, np.ones(2), staleness=np.array([0.0, 3.0]))
    >>> mix = FedBuff().mix(members)
    >>> mix.weights, mix.old
    (array([0.5 , 0.25]), 0.25)
    """

    discounts_staleness = True

    global_rate: float = param(1.0, _POSITIVE, "global step size (eta_g)")
    exponent: float = param(0.5, _EXPONENT, "exponent of the discount of stale updates (a); 0: none")

    def mix(self, members: Members) -> Mix:
        """Weights eta_g s(tau_k) / K."""
        # Divided by the size of the buffer and not by the sum of discounts: stale updates shorten the step.
        weights = self.global_rate * polynomial(members.staleness, self.exponent) * members.multiplicity / len(members)
        return Mix(weights, 1.0 - float(weights.sum()))


@AGGREGATORS.register("fedasync")
@dataclass(frozen=True, kw_only=True)
class FedAsync(WeightedSum):
    r"""Mix each client's model into the global one, with less weight the staler it is ([Xie2019]_, Algorithm 1).

    :math:`w \leftarrow (1 - \alpha_k) w + \alpha_k w_k`, with :math:`\alpha_k = \alpha s(\tau_k)`. The discount s is
    constant, polynomial, :math:`(1 + \tau)^{-a}`, or a hinge: 1 up to b, :math:`1 / (a (\tau - b) + 1)` beyond. Several
    models are mixed in one after another. The paper adds a proximal term to local training, which ``fedprox`` has.
    Deviations: none.

    >>> members = Members(np.arange(1), np.ones(1), np.ones(1), 9, np.ones(1), staleness=np.array([3.0]))
    >>> mix = FedAsync(alpha=0.6, discount="polynomial", exponent=0.5).mix(members)
    >>> mix.weights, mix.old
    (array([0.3]), 0.7)
    """

    mixes_models: ClassVar[bool] = True
    discounts_staleness = True

    alpha: float = param(0.6, Interval(float, 0, 1, "right"), "share of a fresh model (alpha)")
    discount: str = param("polynomial", OneOf(("constant", "polynomial", "hinge")), "form of the discount s")
    exponent: float = param(0.5, _EXPONENT, "exponent of the polynomial (a)")
    slope: float = param(10.0, _POSITIVE, "slope of the hinge (a)")
    limit: float = param(4.0, _EXPONENT, "staleness up to which the hinge discounts nothing (b)")

    def mix(self, members: Members) -> Mix:
        """Weights of mixing in one model after another."""
        shares = self.alpha * self._discount(members.staleness)
        # What the models after it leave of w, and of each model. Their order is that of the answers, and it matters.
        remaining = np.append(np.cumprod((1.0 - shares)[::-1])[::-1], 1.0)
        return Mix(shares * remaining[1:], float(remaining[0]))

    def _discount(self, staleness: FloatArray) -> FloatArray:
        if self.discount == "constant":
            return np.ones(len(staleness))
        if self.discount == "hinge":  # Section 6.3
            return np.asarray(1.0 / (self.slope * np.maximum(staleness - self.limit, 0.0) + 1.0))
        return polynomial(staleness, self.exponent)


@AGGREGATORS.register("fedavg-stale")
@dataclass(frozen=True, kw_only=True)
class FedAvgStale(WeightedSum):
    r"""FedAvg by size and staleness: weights :math:`n_k (1 + \tau_k)^{-a}`, summing to 1.

    Unlike ``fedbuff``, it always makes a full step: fresh updates gain the weight that stale ones lose.

    >>> members = Members(np.arange(2), np.ones(2), np.ones(2), 9, np.ones(2), staleness=np.array([0.0, 3.0]))
    >>> FedAvgStale().mix(members).weights.round(3)
    array([0.667, 0.333])
    """

    discounts_staleness = True

    exponent: float = param(0.5, _EXPONENT, "exponent of the discount of stale updates (a)")

    def mix(self, members: Members) -> Mix:
        """Weights by size and discount."""
        return Mix(members.weights_by("size", self.exponent))

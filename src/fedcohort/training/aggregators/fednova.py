r"""FedNova: normalised averaging.

.. [Wang2020] J. Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.training.aggregators.base import AGGREGATORS, Members, Mix, WeightedSum


def _normaliser(steps: FloatArray, momentum: float) -> FloatArray:
    r"""||a_i||_1, the weight that ``steps`` SGD steps give to their gradients, (k,).

    Without momentum it is the number of steps; with momentum rho it is
    :math:`[\tau - \rho (1 - \rho^\tau) / (1 - \rho)] / (1 - \rho)`.

    >>> _normaliser(np.array([3.0]), 0.0)
    array([3.])
    >>> _normaliser(np.array([2.0]), 0.5)  # 1 + (1 + 0.5)
    array([2.5])
    """
    rest = 1.0 - momentum
    return np.asarray((steps - momentum * (1.0 - momentum**steps) / rest) / rest)


@AGGREGATORS.register("fednova")
@dataclass(frozen=True, kw_only=True)
class FedNova(WeightedSum):
    r"""Average of updates per local step, :math:`w - \tau_{eff} \sum_k p_k (w - w_k) / \|a_k\|_1` ([Wang2020]_, Eq. 6).

    :math:`\tau_{eff} = \sum_k p_k \|a_k\|_1`, p_k normalised over the kept cohort. Clients that do more local steps
    no longer pull harder. There is no correction for a learning rate that changes within the round. Deviations: a
    client without steps is left out.
    """

    def mix(self, members: Members) -> Mix:
        """Weights tau_eff p_k / a_k; the old model gets the rest."""
        scale = _normaliser(members.steps, members.momentum)
        # A client without steps has no update, and would otherwise lower tau_eff for the others.
        p = np.where(scale > 0, members.by_size, 0.0)
        if p.sum() <= 0:
            return Mix(np.zeros_like(p), 1.0)
        p = p / p.sum()
        effective = float((p * scale).sum())  # tau_eff
        weights = effective * np.divide(p, scale, out=np.zeros_like(p), where=scale > 0)
        return Mix(weights, 1.0 - float(weights.sum()))

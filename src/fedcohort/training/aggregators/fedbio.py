r"""FedBiO: the weights of clients are learned, so that the global model does well on clean data of the server.

.. [Li2023] J. Li, F. Huang, H. Huang, "Communication-Efficient Federated Bilevel Optimization with Local and Global
   Lower Level Problems" (FedBiO; its task of federated data cleaning).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.params import Interval, param
from fedcohort.training.aggregators.arithmetic import average, zeros
from fedcohort.training.aggregators.base import AGGREGATORS, Aggregator, Combined, Members, Memory, Server

_REACH = 0.01  # length of the step by which curvature is measured


def _norm(vector: Any) -> float:
    return float((vector * vector).sum() ** 0.5)


def sigmoid(values: FloatArray) -> FloatArray:
    """Return 1 / (1 + exp(-x)), for any x without overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * values)))


class Cleaning(Memory):
    """The upper variables x (N,), one per client, and the direction u (P,)."""

    saved = ("upper", "direction")

    def __init__(self, federation: int, model: Any) -> None:
        self.upper = np.zeros(federation)
        self.direction = zeros(model)


@AGGREGATORS.register("fedbio")
@dataclass(frozen=True, kw_only=True)
class FedBio(Aggregator):
    r"""Federated data cleaning as bilevel optimisation, with one weight per client ([Li2023]_, FedBiO).

    Upper level: the loss f of the global model on labelled samples of the server. Lower level: the model minimises
    :math:`g(x, w) = \sum_k a_k g_k(w)`, where :math:`a_k = p_k \sigma(x_k) / \sum_{j \in S} p_j \sigma(x_j)`, sigma the
    sigmoid. x starts at 0, which is the mean by size. A round's steps are FedBiO's:

    - :math:`u \leftarrow \tau \nabla f(w) + (I - \tau H) u`, which tends to :math:`H^{-1} \nabla f`;
    - :math:`x \leftarrow x - \gamma \nu`, with the hyper-gradient :math:`\nu = -\nabla_{xw} g\, u`, that is
      :math:`\nu_k = -a_k (1 - \sigma(x_k)) \langle \hat g_k - \sum_j a_j \hat g_j,\, u \rangle` for the kept clients;
    - :math:`w \leftarrow w + \sum_k a_k (w_k - w)`, with the new x.

    :math:`\hat g_k = (w - w_k) / (K \eta)` is the mean gradient along a client's local steps.

    FLASH's Table 1 names FedBiO among the aggregations and does not say how it is made one. Weights are the part of it
    that happens at the server and that answers label noise, so this is what is implemented. Deviations: one upper
    variable per client, where the paper's data cleaning has one per sample, which only clients could hold; H is the
    curvature of f instead of g's, by a difference of two gradients, because clients would have to compute
    Hessian-vector products in another exchange; full batches at the server; u, x and w are renewed one after the other,
    not at once; u starts again from :math:`\tau \nabla f` where it has become worse than 0, that is
    :math:`\|\nabla f - H u\| > \|\nabla f\|`. FedBiOAcc's variance reduction is left out.
    """

    needs_server: ClassVar[bool] = True

    upper_rate: float = param(100.0, Interval(float, 0, None), "step size of the upper variables (gamma)")
    tau: float = param(0.1, Interval(float, 0, None, "neither"), "step size of the direction (tau)")

    def memory(self, federation: int, model: Any) -> Cleaning:
        """Return equal upper variables and no direction."""
        return Cleaning(federation, model)

    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Renew the direction and the upper variables, then average by them."""
        self._check(models, members)
        server = self._server(server)
        memory = self._own(memory, Cleaning)
        memory.direction = self._direction(memory.direction, old, server)
        before = memory.upper[members.clients]
        rates = np.where(members.rates > 0, members.rates, 1.0)  # without a step there is no update to divide
        along = np.array([float(((old - model) * memory.direction).sum()) for model in models]) / rates
        weights = self._weights(members, before)
        descent = weights * (1.0 - sigmoid(before)) * (along - weights @ along)
        memory.upper[members.clients] = before + self.upper_rate * descent
        weights = self._weights(members, memory.upper[members.clients])
        return Combined(old + average(weights, models - old), weights)

    def _direction(self, before: Any, model: Any, server: Server) -> Any:
        """Return u after one step towards the solution of H u = grad f."""
        labels, everything = server.labels, np.arange(len(server))
        gradient = server.gradient(model, labels, everything)
        length = _norm(before)
        if not 0.0 < length < float("inf"):
            return self.tau * gradient
        # H u by a central difference along u, scaled so that the step is the same however long u is.
        step = (_REACH / length) * before
        ahead = server.gradient(model + step, labels, everything)
        behind = server.gradient(model - step, labels, everything)
        residual = gradient - (ahead - behind) * (length / (2.0 * _REACH))
        if not _norm(residual) <= _norm(gradient):
            return self.tau * gradient
        return before + self.tau * residual

    @staticmethod
    def _weights(members: Members, upper: FloatArray) -> FloatArray:
        raw = members.by_size * np.maximum(sigmoid(upper), 1e-12)  # where all are 0, they count equally
        return np.asarray(raw / raw.sum())

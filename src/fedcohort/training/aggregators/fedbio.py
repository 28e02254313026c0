r"""FedBiO: learn client weights with which the global model does well on clean data at the server.

.. [Li2023] J. Li, F. Huang, H. Huang, "Communication-Efficient Federated Bilevel Optimization with Local and Global
   Lower Level Problems" (FedBiO; its task of federated data cleaning).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.params import Interval, param
from fedcohort.training.aggregators.base import AGGREGATORS, Aggregator, Combined, Members, Memory, Server
from fedcohort.training.arithmetic import average, zeros

_REACH = 0.01  # length of the finite-difference step


def _norm(vector: Any) -> float:
    return float((vector * vector).sum() ** 0.5)


def _sigmoid(values: FloatArray) -> FloatArray:
    """Return 1 / (1 + exp(-x)) without overflow for any x."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * values)))


class _Cleaning(Memory):
    """The upper variables x (N,), one per client, and the direction u (P,)."""

    saved = ("upper", "direction")

    def __init__(self, federation: int, model: Any) -> None:
        self.upper = np.zeros(federation)
        self.direction = zeros(model)


@AGGREGATORS.register("fedbio")
@dataclass(frozen=True, kw_only=True)
class FedBio(Aggregator):
    r"""Federated data cleaning as bilevel optimisation, with one weight per client ([Li2023]_, FedBiO).

    Upper level: the loss f of the global model on labelled samples at the server. Lower level: the model minimises
    :math:`g(x, w) = \sum_k a_k g_k(w)`, where :math:`a_k = p_k \sigma(x_k) / \sum_{j \in S} p_j \sigma(x_j)`, sigma the
    sigmoid. x starts at 0, which gives the mean by size. Each round makes FedBiO's steps:

    - :math:`u \leftarrow \tau \nabla f(w) + (I - \tau H) u`, which tends to :math:`H^{-1} \nabla f`;
    - :math:`x \leftarrow x - \gamma \nu`, with the hyper-gradient :math:`\nu = -\nabla_{xw} g\, u`, that is
      :math:`\nu_k = -a_k (1 - \sigma(x_k)) \langle \hat g_k - \sum_j a_j \hat g_j,\, u \rangle` for the kept clients;
    - :math:`w \leftarrow w + \sum_k a_k (w_k - w)`, with the new x.

    :math:`\hat g_k = (w - w_k) / (K \eta)` is the mean gradient along a client's local steps.

    FLASH's Table 1 lists FedBiO as an aggregation but does not say how it becomes one. The weights are the part that
    happens at the server and addresses label noise, so they are implemented here. Deviations: one upper variable per
    client, while the paper's data cleaning has one per sample, which only clients could hold; H is the curvature of f
    instead of g, from a difference of two gradients, because clients would need another exchange to compute
    Hessian-vector products; full batches at the server; u, x and w are updated one after another, not at once; u
    restarts from :math:`\tau \nabla f` when it has become worse than 0, that is
    :math:`\|\nabla f - H u\| > \|\nabla f\|`. FedBiOAcc's variance reduction is left out.
    """

    needs_server: ClassVar[bool] = True

    upper_rate: float = param(100.0, Interval(float, 0, None), "step size of the upper variables (gamma)")
    tau: float = param(0.1, Interval(float, 0, None, "neither"), "step size of the direction (tau)")

    def memory(self, federation: int, model: Any) -> _Cleaning:
        """Return a memory with equal upper variables and a direction of zero."""
        return _Cleaning(federation, model)

    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Update the direction and the upper variables, then average by them."""
        server = self._server(server)
        memory = self._own(memory, _Cleaning)
        memory.direction = self._direction(memory.direction, old, server)
        before = memory.upper[members.clients]
        rates = np.where(members.rates > 0, members.rates, 1.0)  # a client without steps has no update to divide
        along = np.array([float(((old - model) * memory.direction).sum()) for model in models]) / rates
        weights = self._weights(members, before)
        # The derivative of a_k by x_k: a softmax-like weight, so only differences to the mean gradient count.
        descent = weights * (1.0 - _sigmoid(before)) * (along - weights @ along)
        np.add.at(memory.upper, members.clients, self.upper_rate * descent)  # a client may have answered twice
        # With the new x, so that a client found harmful in this round counts less in this round.
        weights = self._weights(members, memory.upper[members.clients])
        return Combined(old + average(weights, models - old), weights)

    def _direction(self, before: Any, model: Any, server: Server) -> Any:
        """Return u after one step towards the solution of H u = grad f."""
        labels, places = server.labels, np.arange(len(server))
        gradient = server.gradient(model, labels, places)
        length = _norm(before)
        if not 0.0 < length < float("inf"):
            return self.tau * gradient
        # H u by a central difference along u, with a step whose length does not depend on that of u.
        step = (_REACH / length) * before
        ahead = server.gradient(model + step, labels, places)
        behind = server.gradient(model - step, labels, places)
        residual = gradient - (ahead - behind) * (length / (2.0 * _REACH))
        # Worse than u = 0. Written so that a NaN also starts anew.
        if not _norm(residual) <= _norm(gradient):
            return self.tau * gradient
        return before + self.tau * residual

    @staticmethod
    def _weights(members: Members, upper: FloatArray) -> FloatArray:
        raw = members.by_size * np.maximum(_sigmoid(upper), 1e-12)  # if all are 0, clients count by size
        return np.asarray(raw / raw.sum())

r"""SCAFFOLD: stochastic controlled averaging.

.. [Karimireddy2020] S. P. Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.params import Interval, OneOf, param
from fedcohort.training.aggregators.base import AGGREGATORS, Corrections, Members, Mix, WeightedSum
from fedcohort.training.aggregators.client_rows import ClientRows
from fedcohort.training.arithmetic import zeros


class _ControlVariates(Corrections):
    """The server variate c, and a client variate c_i for each client that took part."""

    saved = ("server", "own")

    def __init__(self, federation: int, model: Any) -> None:
        self.federation = federation
        self.server = zeros(model)
        self.own = ClientRows(federation, zeros(model))

    def corrections(self, clients: IntArray) -> Any:
        """(k, P) c - c_i."""
        return self.server - self.own.of(clients)

    def absorb(self, clients: IntArray, old: Any, models: Any, rates: FloatArray, gradients: Any | None) -> None:
        """Replace c_i of the clients that arrived and move c by their mean change times ``|S| / N``."""
        own = self.own.of(clients)  # a copy, which the rows below do not change
        if gradients is not None:
            fresh = gradients  # option I
        else:
            fresh = own - self.server  # option II: c_i - c + (x - y_i) / (K eta)
            for i, rate in enumerate(rates.tolist()):
                fresh[i] = own[i] if rate <= 0 else fresh[i] + (old - models[i]) / rate
        # Before the rows are replaced, because c must stay the mean of all c_i.
        self.server = self.server + (fresh - own).sum(0) / self.federation
        self.own.put(clients, fresh)


@AGGREGATORS.register("scaffold")
@dataclass(frozen=True, kw_only=True)
class Scaffold(WeightedSum):
    r"""Local steps :math:`y_i \leftarrow y_i - \eta (g_i(y_i) - c_i + c)` ([Karimireddy2020]_, Algorithm 1).

    Then :math:`x \leftarrow x + \eta_g \frac{1}{|S|} \sum_i (y_i - x)` and
    :math:`c \leftarrow c + \frac{1}{N} \sum_i (c_i^+ - c_i)`, where option I takes
    :math:`c_i^+ = g_i(x)`, the full-batch gradient at the received model (one more pass over the client's data,
    booked as its cost), and option II :math:`c_i^+ = c_i - c + (x - y_i) / (K \eta)`. K eta is the sum of the
    learning rates of the local steps. With momentum, option II overstates the variates, as in the paper's own code.
    Model and variate are both sent each way, so twice as many bytes.
    """

    model_copies: ClassVar[int] = 2
    corrects: ClassVar[bool] = True
    option: int = param(2, OneOf((1, 2)), "how client variates are updated: 1 by a gradient, 2 from the update")
    global_rate: float = param(1.0, Interval(float, 0, None, "neither"), "global step size (eta_g)")

    @property
    def needs_gradients(self) -> bool:
        """Option I takes full-batch gradients at the received model."""
        return self.option == 1

    def memory(self, federation: int, model: Any) -> _ControlVariates:
        """Return control variates, all zero."""
        return _ControlVariates(federation, model)

    def mix(self, members: Members) -> Mix:
        """Equal weights, scaled by the global step size."""
        return Mix(members.by_count * self.global_rate, 1.0 - self.global_rate)

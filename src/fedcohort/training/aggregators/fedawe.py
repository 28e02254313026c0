r"""FedAWE: clients make up for missed rounds and continue from their own models.

.. [Xiang2024] M. Xiang, S. Ioannidis, E. Yeh, C. Joe-Wong, L. Su, "Efficient Federated Learning against Heterogeneous
   and Non-stationary Client Unavailability", NeurIPS 2024 (arXiv 2409.17446), Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedcohort.core.arrays import AnyArray, FloatArray, IntArray
from fedcohort.core.params import Interval, param
from fedcohort.training.aggregators.base import AGGREGATORS, Aggregator, Combined, Members, Memory, OwnModels, Server
from fedcohort.training.aggregators.client_rows import ClientRows
from fedcohort.training.arithmetic import as_like, average


class _EchoedModels(OwnModels):
    """The model that each client received when it last took part, and the round of that."""

    def __init__(self, federation: int, model: Any) -> None:
        self.own = ClientRows(federation, model + 0.0)  # a copy, because the global model will change
        self.last = np.full(federation, -1, np.int64)  # (N,) tau_i

    def starts(self, clients: IntArray) -> Any:
        """(k, P) the models that ``clients`` train from."""
        return self.own.of(clients)

    def missed(self, clients: IntArray, round: int) -> FloatArray:
        """(k,) t - tau_i, the rounds since each of ``clients`` last took part."""
        # At least 1, even for a client that takes part twice in rounds of the same number.
        return np.asarray(np.maximum(round - self.last[clients], 1), np.float64)

    def absorb(self, clients: IntArray, round: int, model: Any) -> None:
        """Give the new global ``model`` to ``clients``."""
        self.own.put(clients, [model] * len(clients))
        self.last[clients] = round

    def arrays(self) -> dict[str, Any]:
        """Return the first model, the models of clients that took part, and the last round of each client."""
        return {"first": self.own.default, "last": self.last, **self.own.arrays()}

    def restore(self, arrays: Mapping[str, AnyArray]) -> None:
        """Restore what :meth:`arrays` returned."""
        self.own.default = as_like(arrays["first"], self.own.default)
        self.last = np.array(arrays["last"])
        self.own.restore(arrays)


@AGGREGATORS.register("fedawe")
@dataclass(frozen=True, kw_only=True)
class FedAwe(Aggregator):
    r"""FedAWE: echoed updates and postponed models ([Xiang2024]_, Algorithm 1).

    Client i of the cohort :math:`A_t` trains from its own model :math:`x_i`, the global model at the end of the last
    round :math:`\tau_i` in which it took part. Before its first round, that is the initial model, and
    :math:`\tau_i = -1`. With the model :math:`y_i` after training,

    .. math:: x_i^\dagger = x_i + \eta_g (t - \tau_i) (y_i - x_i), \qquad
              x \leftarrow \frac{1}{|A_t|} \sum_{i \in A_t} x_i^\dagger, \qquad
              x_i \leftarrow x, \; \tau_i \leftarrow t \text{ for } i \in A_t.

    After t rounds, every client that has just taken part has counted for t updates, however often it was present.
    No client gets the newest model before training. So clients mix their models through the server, as in gossip, and
    the mixing is fair to rare clients. Clients keep one model and one number, and send as many bytes as in FedAvg.

    Symbols: eta_g = ``global_rate``. Deviations: none. A long absence multiplies the update of an old model. If cohorts
    are small, lower the learning rate or ``global_rate``: the paper's clients take part in every second to tenth round.

    >>> rule, old = FedAwe(), np.zeros(1)
    >>> memory = rule.memory(2, old)
    >>> one, both = np.array([0]), np.array([0, 1])
    >>> first = Members(one, np.ones(1), np.ones(1), 2, np.ones(1), round=0)
    >>> model = rule.combine(old, np.array([[1.0]]), first, memory).model
    >>> model, memory.starts(both).ravel()  # client 1 has not received it
    (array([1.]), array([1., 0.]))
    >>> second = Members(both, np.ones(2) / 2, np.ones(2), 2, np.ones(2), round=1)
    >>> rule.combine(model, np.array([[1.5], [0.5]]), second, memory).model  # (1 + 0.5 + 0 + 2 * 0.5) / 2
    array([1.25])
    """

    own_models: ClassVar[bool] = True
    global_rate: float = param(1.0, Interval(float, 0, None, "neither"), "global step size (eta_g)")

    def memory(self, federation: int, model: Any) -> _EchoedModels:
        """Give every client the initial model."""
        return _EchoedModels(federation, model)

    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Average the clients' own models, each moved by its update times the rounds since the client took part."""
        memory = self._own(memory, _EchoedModels)
        weights = members.by_count
        echoes = self.global_rate * memory.missed(members.clients, members.round)
        starts = memory.starts(members.clients)
        # Echoes multiply updates only. Multiplying models would move the mean when clients were absent for long.
        model = average(weights, starts) + average(weights * echoes, models - starts)
        memory.absorb(members.clients, members.round, model)
        return Combined(model, weights * echoes)

r"""Averages that remember every client's last update: FedVARP and MIFA.

.. [Jhunjhunwala2022] D. Jhunjhunwala, P. Sharma, A. Nagarkatti, G. Joshi, "FedVARP: Tackling the Variance Due to
   Partial Client Participation in Federated Learning", UAI 2022, Algorithm 1.
.. [Gu2021] X. Gu, K. Huang, J. Zhang, L. Huang, "Fast Federated Learning in the Presence of Arbitrary Device
   Unavailability", NeurIPS 2021, Algorithm 1.

Symbols: w the global model, S the kept cohort of this round, N the number of clients, :math:`y_i` the last update of
client i (MIFA's :math:`-G^i`), zero before its first one. An update is :math:`(w_i - w) / \eta_i`, with the learning
rate :math:`\eta_i` of the round in which the client began, so that remembered and stale updates keep their meaning when
the rate decays. :math:`\eta` is the rate of this round. Of two answers before a model, the later one is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedcohort.core.arrays import FloatArray
from fedcohort.core.params import Interval, OneOf, param
from fedcohort.training.aggregators.base import AGGREGATORS, Aggregator, Combined, Members, Memory, Server
from fedcohort.training.aggregators.client_rows import ClientRows
from fedcohort.training.arithmetic import average, zeros

_WEIGHTING = OneOf(("count", "size"))


class _LastUpdates(Memory):
    """The last update y_i of every client that took part, and their mean over all N clients."""

    saved = ("mean", "own")

    def __init__(self, federation: int, model: Any) -> None:
        self.mean = zeros(model)
        self.own = ClientRows(federation, zeros(model))

    def change(self, old: Any, models: Any, members: Members) -> Any:
        """(k, P) the members' new updates minus their last ones."""
        fresh = models - old
        # Row by row, because a second array of this size might not fit into memory.
        for i, rate in enumerate(members.learning_rates.tolist()):
            fresh[i] = fresh[i] / rate
        return fresh - self.own.of(members.clients)

    def absorb(self, change: Any, members: Members, shares: FloatArray) -> None:
        """Remember each client's newest update; ``shares`` (k,) are its weights in the mean over all clients."""
        # Without rounds, a client may answer twice before a model. Both changes are from the update remembered so far.
        newest = list({client: place for place, client in enumerate(members.clients.tolist())}.values())
        clients, changes = members.clients[newest], [change[place] for place in newest]
        # The mean is moved by the changes, because a sum over all N clients would cost N vectors a round.
        self.mean = self.mean + average(shares[newest], changes)
        self.own.put(clients, [y + step for y, step in zip(self.own.of(clients), changes, strict=True)])


@dataclass(frozen=True, kw_only=True)
class _Remembering(Aggregator):
    """The base of FedVARP and MIFA, which remember each client's last update."""

    weighting: str = param("count", _WEIGHTING, "clients count equally (the paper) or by their samples")

    def memory(self, federation: int, model: Any) -> _LastUpdates:
        """Return a memory with updates of zero."""
        return _LastUpdates(federation, model)


@AGGREGATORS.register("fedvarp")
@dataclass(frozen=True, kw_only=True)
class FedVarp(_Remembering):
    r"""FedVARP: absent clients take part with their last updates ([Jhunjhunwala2022]_, Algorithm 1).

    .. math:: v = \frac{1}{N} \sum_{j=1}^{N} y_j + \frac{1}{|S|} \sum_{i \in S} (\Delta_i - y_i), \qquad
              w \leftarrow w + \eta_s \eta v, \qquad y_i \leftarrow \Delta_i \text{ for } i \in S,

    with the new updates :math:`\Delta_i`. If clients are drawn uniformly, v is an unbiased estimate of the update of
    all clients, and its variance vanishes as updates settle. The first round equals FedAvg's.
    The server remembers one vector for each client that took part. Clients have no extra work.

    A client that answers twice before a model counts as drawn twice.

    Deviations: the paper also divides updates by the number of local steps, which is the same for all its clients.
    Here updates are not divided by it. ``weighting="size"`` weighs clients by their samples, in both means.

    >>> import numpy as np
    >>> rule, old = FedVarp(), np.zeros(1)
    >>> memory = rule.memory(4, old)
    >>> pair = Members(np.array([0, 1]), np.full(2, 0.25), np.ones(2), 4, np.ones(2))
    >>> rule.combine(old, np.array([[2.0], [4.0]]), pair, memory).model  # (2 + 4) / 2, as in FedAvg
    array([3.])
    >>> rule.combine(old, np.array([[2.0], [4.0]]), pair, memory).model  # the same updates again: (2 + 4) / 4
    array([1.5])
    """

    global_rate: float = param(1.0, Interval(float, 0, None, "neither"), "global step size (eta_s)")

    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Move by the mean of all last updates, corrected by how the cohort's updates have changed."""
        memory = self._own(memory, _LastUpdates)
        weights = members.weights_by(self.weighting)
        rate = self.global_rate * float(weights @ (members.learning_rates * members.decay))
        change = memory.change(old, models, members)
        # Before the memory absorbs them: v needs the old mean and the new updates.
        direction = memory.mean + average(weights, change)
        memory.absorb(change, members, members.shares_by(self.weighting))
        return Combined(old + rate * direction, self.global_rate * weights)


@AGGREGATORS.register("mifa")
@dataclass(frozen=True, kw_only=True)
class Mifa(_Remembering):
    r"""MIFA: the mean of the last updates of all clients ([Gu2021]_, Algorithm 1).

    .. math:: y_i \leftarrow \Delta_i \text{ for } i \in S, \qquad w \leftarrow w + \eta \frac{1}{N} \sum_{j=1}^{N} y_j.

    Unlike FedVARP, it assumes nothing about which clients take part. A client that is absent for long is not forgotten,
    and one that is always present counts no more than others. The price is that an old update counts as much as a new
    one.

    Deviations: in the paper's analysis all clients take part in the first round. Otherwise a client's update is zero
    until it takes part, so the first steps are short. ``weighting="size"`` weighs clients by their samples.

    >>> import numpy as np
    >>> rule, old = Mifa(), np.zeros(1)
    >>> memory = rule.memory(4, old)
    >>> first, second = (Members(np.array([i]), np.full(1, 0.25), np.ones(1), 4, np.ones(1)) for i in range(2))
    >>> rule.combine(old, np.array([[2.0]]), first, memory).model  # 2 / 4
    array([0.5])
    >>> rule.combine(old, np.array([[4.0]]), second, memory).model  # (2 + 4) / 4: the absent client's is remembered
    array([1.5])
    """

    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Move by the mean of all last updates, including the cohort's new ones."""
        memory = self._own(memory, _LastUpdates)
        rate = float(members.weights_by(self.weighting) @ (members.learning_rates * members.decay))
        shares = members.shares_by(self.weighting)
        memory.absorb(memory.change(old, models, members), members, shares)
        return Combined(old + rate * memory.mean, shares)

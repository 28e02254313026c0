r"""Optimisers at the server, which use the mean update of a round as a gradient.

.. [Hsu2019] T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
   Visual Classification" (FedAvgM).
.. [Reddi2021] S. J. Reddi et al., "Adaptive Federated Optimization" (FedAdam, FedYogi), Algorithm 2.

Symbols: w the global model, :math:`\Delta = \sum_k p_k (w_k - w)` the mean update of the kept cohort, p_k summing to 1.
A round in which no model is kept changes neither the model nor the moments.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from fedcohort.core.params import Interval, OneOf, param
from fedcohort.training.aggregators.base import AGGREGATORS, Aggregator, Combined, Members, Memory, Server
from fedcohort.training.arithmetic import average, namespace, zeros

_WEIGHTING = OneOf(("size", "count"))
_EXPONENT = Interval(float, 0, None)


class _Momentum(Memory):
    """The running mean of updates, ``first`` (P,)."""

    saved: ClassVar[tuple[str, ...]] = ("first",)

    def __init__(self, model: Any) -> None:
        self.first = zeros(model)


class _Moments(_Momentum):
    """The running means of updates and of their squares, ``second`` (P,)."""

    saved = ("first", "second")

    def __init__(self, model: Any, second: float) -> None:
        super().__init__(model)
        self.second = zeros(model) + second


@AGGREGATORS.register("fedavgm")
@dataclass(frozen=True, kw_only=True)
class FedAvgM(Aggregator):
    r"""Server momentum, :math:`v \leftarrow \beta v + \Delta`, :math:`w \leftarrow w + \eta v` ([Hsu2019]_, Sec. 4.3).

    The paper subtracts :math:`\Delta w = w - w_k`; here the sign is reversed. Weights are by size, as in the paper.
    Deviations: a global rate eta, which is 1 in the paper, because beta = 0.9 makes steps up to ten times as long.

    >>> import numpy as np
    >>> rule, members = FedAvgM(beta=0.5), Members(np.array([0]), np.ones(1), np.ones(1), 2, np.ones(1))
    >>> memory = rule.memory(2, np.zeros(1))
    >>> [float(rule.combine(np.zeros(1), np.ones((1, 1)), members, memory).model[0]) for _ in range(3)]
    [1.0, 1.5, 1.75]
    """

    beta: float = param(0.9, Interval(float, 0, 1, "left"), "momentum of the server (beta)")
    global_rate: float = param(1.0, Interval(float, 0, None, "neither"), "global step size (eta)")
    weighting: str = param("size", _WEIGHTING, "updates count by client size (the paper) or equally")
    exponent: float = param(0.0, _EXPONENT, "exponent of the discount of stale updates, in asynchronous runs; 0: none")

    @property
    def discounts_staleness(self) -> bool:
        """Whether it discounts stale updates: if ``exponent`` is not 0."""
        return self.exponent > 0

    def memory(self, federation: int, model: Any) -> _Momentum:
        """Return a momentum of zero."""
        return _Momentum(model)

    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Move by the momentum."""
        memory = self._own(memory, _Momentum)
        weights = members.weights_by(self.weighting, self.exponent)
        # The sum decays and is not a mean, as in the paper: with equal updates, steps grow to 1 / (1 - beta) of one.
        memory.first = self.beta * memory.first + average(weights, models - old)
        return Combined(old + self.global_rate * memory.first, weights)


@dataclass(frozen=True, kw_only=True)
class _Adaptive(Aggregator):
    """The base of FedAdam and FedYogi, which differ in the second moment."""

    global_rate: float = param(0.01, Interval(float, 0, None, "neither"), "global step size (eta)")
    beta1: float = param(0.9, Interval(float, 0, 1, "left"), "decay of the first moment (beta_1)")
    beta2: float = param(0.99, Interval(float, 0, 1, "left"), "decay of the second moment (beta_2)")
    tau: float = param(0.001, Interval(float, 0, None, "neither"), "adaptivity: the least scale of a coordinate (tau)")
    weighting: str = param("size", _WEIGHTING, "updates count by client size (its experiments) or equally (Alg. 2)")
    exponent: float = param(0.0, _EXPONENT, "exponent of the discount of stale updates, in asynchronous runs; 0: none")

    @property
    def discounts_staleness(self) -> bool:
        """Whether it discounts stale updates: if ``exponent`` is not 0."""
        return self.exponent > 0

    def memory(self, federation: int, model: Any) -> _Moments:
        """Return a first moment of zero and a second one of tau squared."""
        return _Moments(model, self.tau**2)

    @abstractmethod
    def _second(self, before: Any, square: Any) -> Any:
        """Return v_t from v_{t-1} and the squared mean update."""

    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Move by the first moment, each coordinate divided by the root of its second moment."""
        memory = self._own(memory, _Moments)
        weights = members.weights_by(self.weighting, self.exponent)
        update = average(weights, models - old)
        memory.first = self.beta1 * memory.first + (1.0 - self.beta1) * update
        memory.second = self._second(memory.second, update * update)
        # tau is outside the root, as in Algorithm 2.
        return Combined(old + self.global_rate * memory.first / (memory.second**0.5 + self.tau), weights)


@AGGREGATORS.register("fedadam")
@dataclass(frozen=True, kw_only=True)
class FedAdam(_Adaptive):
    r"""Adam at the server ([Reddi2021]_, Algorithm 2).

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) \Delta`, :math:`v \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2`,
    :math:`w \leftarrow w + \eta\, m / (\sqrt v + \tau)`, from m = 0 and v = tau^2; no bias correction, as in the paper.
    Choose eta for the task: a coordinate moves by at most about eta a round, however large the updates are.
    Deviations: updates are weighted by size, as in the paper's experiments. Its Algorithm 2 is ``weighting="count"``.
    """

    def _second(self, before: Any, square: Any) -> Any:
        return self.beta2 * before + (1.0 - self.beta2) * square


@AGGREGATORS.register("fedyogi")
@dataclass(frozen=True, kw_only=True)
class FedYogi(_Adaptive):
    r"""Yogi at the server ([Reddi2021]_, Algorithm 2).

    FedAdam with :math:`v \leftarrow v - (1 - \beta_2)\, \Delta^2 \operatorname{sign}(v - \Delta^2)`: the second moment
    grows and shrinks by no more than the newest square, so it does not forget a large one at once. Deviations: those of
    ``fedadam``.
    """

    def _second(self, before: Any, square: Any) -> Any:
        return before - (1.0 - self.beta2) * square * namespace(square).sign(before - square)

"""GreedyFed: take the clients whose models have improved the average most so far.

.. [Singhal2024] P. Singhal, S. R. Pandey, P. Popovski, "Greedy Shapley Client Selection for Communication-Efficient
   Federated Learning", IEEE Networking Letters 6, 2024 (arXiv 2312.09108), Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, Optional, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.core.top import top_k


@dataclass(frozen=True)
class ShapleyState:
    """What GreedyFed remembers about each client."""

    value: FloatArray = per_client()  # (N,) SV_k, mean of its Shapley values
    rounds: FloatArray = per_client()  # (N,) N_k, rounds in which it was valued
    asked: FloatArray = per_client()  # (N,) rounds in which it was picked


@register("greedyfed")
@dataclass(frozen=True, kw_only=True)
class GreedyFed(Selector[ShapleyState]):
    r"""Ask every client once, then take those with the largest mean Shapley values ([Singhal2024]_, Algorithm 1).

    After each round the server values every model w_k of the cohort S by its Shapley value

    .. math:: SV_k^{(t)} = \frac{1}{|S|} \sum_{A \subseteq S \setminus k} \binom{|S| - 1}{|A|}^{-1}
              \left[ U(A \cup k) - U(A) \right],

    where U(A) is minus the loss, on the server's own samples, of the size-weighted average of the models of A (of the
    old global model if A is empty), estimated by GTG-Shapley. Then

    .. math:: SV_k \leftarrow \frac{(N_k - 1) SV_k + SV_k^{(t)}}{N_k} \quad \text{or} \quad
              SV_k \leftarrow \alpha SV_k + (1 - \alpha) SV_k^{(t)}.

    The first rounds go to clients that were never asked. Then the m clients with the largest :math:`SV_k` are taken.

    Symbols: SV_k^(t) = Signal.SHAPLEY_VALUE, N_k = ``ShapleyState.rounds``, alpha = ``memory``, m = slate.size.

    Deviations: at first, the paper asks clients in a fixed order; here the order is random. The last of these rounds is
    filled up at random, as in the authors' code. Clients that were asked and never delivered have the value 0. Values
    are measured with an average by size, whatever the aggregator is.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> supplied = {Signal.SHAPLEY_VALUE}
    >>> session = Session(GreedyFed(), ClientTable(sizes=[10] * 4), seed=0, signals=supplied)
    >>> for _ in range(2):
    ...     cohort = session.ask(RoundRequest(size=2))
    ...     worth = np.array([0.1, 0.5, -0.2, 0.3])[cohort.clients]
    ...     session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={Signal.SHAPLEY_VALUE: worth}))
    >>> session.ask(RoundRequest(size=2)).names
    ('1', '3')
    """

    picks_by: ClassVar[str] = (
        "Clients that were never asked come first. Then those with the highest value are picked; ties are broken at"
        " random."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "value": "what its models contributed, the mean of its Shapley values",
        "never asked": "1 if it was never asked and so comes first",
    }

    starves = "once all clients have been asked, those that contributed little are not asked again"
    checked_params: ClassVar[ParamSets] = {"exponential mean": {"memory": 0.8}}

    memory: float | None = param(
        None,
        Optional(Interval(float, 0, 1, "left")),
        "weight of the past in an exponential mean of values (alpha); None: the plain mean",
    )

    @property
    def requires(self) -> frozenset[Signal]:
        """Shapley values of the cohort's models."""
        return frozenset({Signal.SHAPLEY_VALUE})

    def init(self, clients: ClientTable, rng: np.random.Generator) -> ShapleyState:
        """Start with no client asked."""
        return ShapleyState(*(np.zeros(clients.n) for _ in range(3)))

    def select(
        self, state: ShapleyState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, ShapleyState]:
        """Take clients that were never asked while there are any, then the most valuable ones."""
        value, asked = slate.of_candidates(state.value), slate.of_candidates(state.asked)
        new = np.flatnonzero(asked == 0)
        if len(new):
            picked = rng.permutation(new)[: slate.size]
            rest = rng.permutation(np.flatnonzero(asked > 0))[: slate.size - len(picked)]
            picked = np.concatenate([picked, rest])
        else:
            picked = top_k(value, slate.size, rng)
        asked_now = state.asked.copy()
        asked_now[slate.candidates[picked]] += 1
        cohort = Cohort(
            slate.candidates[picked],
            candidates=slate.candidates,
            score=np.where(asked == 0, np.maximum(value.max(), 0.0) + 1.0, value),
            parts={"value": value, "never asked": (asked == 0).astype(np.float64)},
            notes={"asked for the first time": int(min(len(new), slate.size))},
        )
        return cohort, ShapleyState(state.value, state.rounds, asked_now)

    def update(self, state: ShapleyState, outcome: Outcome) -> ShapleyState:
        """Update the values of the clients whose models arrived."""
        clients = outcome.clients[outcome.ok]
        new = outcome[Signal.SHAPLEY_VALUE][outcome.ok]
        value, rounds = state.value.copy(), state.rounds.copy()
        rounds[clients] += 1
        past = (rounds[clients] - 1) / rounds[clients] if self.memory is None else self.memory
        value[clients] = past * value[clients] + (1 - past) * new
        return ShapleyState(value, rounds, state.asked)

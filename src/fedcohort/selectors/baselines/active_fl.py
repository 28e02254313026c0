"""Active Federated Learning (AFL).

.. [Goetz2019] J. Goetz et al., "Active Federated Learning", arXiv:1909.12641.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.core.top import top_k
from fedcohort.selectors.numerics.sampling import softmax_sample


@dataclass(frozen=True)
class _ActiveState:
    """What AFL remembers about each client."""

    valuation: FloatArray = per_client()  # (N,) v_k, NaN before the client's first report


@register("active-fl")
@dataclass(frozen=True, kw_only=True)
class ActiveFL(Selector[_ActiveState]):
    r"""Prefer clients whose data the model fits badly ([Goetz2019]_, Algorithm 1).

    Clients are drawn with probability :math:`p_k \propto e^{\alpha_2 v_k}`. The valuation :math:`v_k = \sqrt{n_k} \,
    \bar\ell_k` is updated when a client trains. The :math:`\alpha_1 N` clients with the smallest valuations are
    dropped. Of the rest, :math:`(1 - \alpha_3) m` are drawn by the softmax. The last :math:`\alpha_3 m` places are
    drawn uniformly from all clients that are left.

    Symbols: n_k = clients.sizes, mean loss = Signal.LOSS, m = slate.size; alpha_1 is the fraction *dropped*.
    Deviations: the paper does not value a client before its first report. Here it is worth as much as the best known
    client, so that no client is dropped unseen. Where alpha_3 m is not an integer, its fraction is the chance of one
    more uniform client. If it were rounded, a small cohort would never have a uniform client, and dropped clients
    could not return. When dropping would leave fewer than m clients, fewer are dropped.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(ActiveFL(alpha1=0.5, alpha2=50.0, alpha3=0.0), ClientTable(sizes=[100] * 4), seed=1)
    >>> everybody = session.ask(RoundRequest(size=4))
    >>> session.tell(RoundReport(everybody.ticket, [0, 1, 2, 3], metrics={Signal.LOSS: [0.1, 0.2, 0.3, 9.0]}))
    >>> session.ask(RoundRequest(size=1)).clients
    array([3])
    """

    requires = frozenset({Signal.SIZES, Signal.LOSS})

    one_at_a_time = True
    picks_by: ClassVar[str] = (
        "The clients with the lowest valuations are left out. The others are drawn at random, with better odds for"
        " higher scores. A few places are open to every client."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "valuation": "its last loss, weighted by its size",
        "unknown": "1 if it has not reported yet and so counts as the best",
    }

    checked_params: ClassVar[ParamSets] = {
        "keep all": {"alpha1": 0.0, "alpha2": 0.0},
        "sharp": {"alpha2": 50.0},
        "uniform": {"alpha1": 0.99, "alpha3": 1.0},
    }

    alpha1: float = param(
        0.75, Interval(float, 0, 1, "left"), "fraction of clients dropped for low valuation (alpha_1)"
    )
    alpha2: float = param(0.01, Interval(float, 0, None), "softmax sharpness (alpha_2)")
    alpha3: float = param(0.1, Interval(float, 0, 1), "fraction of the cohort drawn uniformly (alpha_3)")

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _ActiveState:
        """Start without valuations."""
        return _ActiveState(np.full(clients.n, np.nan))

    def select(
        self, state: _ActiveState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _ActiveState]:
        """Drop low valuations, draw by softmax, fill up uniformly."""
        value = slate.of_candidates(state.valuation)
        unknown = np.isnan(value)
        if unknown.any():
            # As good as the best known client, so that nobody is dropped below before it was ever asked.
            best = 0.0 if unknown.all() else float(np.nanmax(value))
            value = np.where(unknown, best, value)
        count = len(value)
        # Dropping must leave enough clients for the cohort.
        dropped = min(int(self.alpha1 * count), count - slate.size)
        logits = self.alpha2 * value
        if dropped > 0:
            logits[top_k(-value, dropped, rng)] = -np.inf
        # Rounded at random. Rounded down, a cohort of five would never have a uniform client at alpha_3 = 0.1.
        drawn = slate.size - int(self.alpha3 * slate.size + rng.random())
        by_value = softmax_sample(logits, drawn, rng) if drawn else np.empty(0, np.int64)
        rest = np.ones(count, np.bool_)
        rest[by_value] = False
        uniform = rng.choice(np.flatnonzero(rest), slate.size - drawn, replace=False)
        cohort = Cohort(
            slate.candidates[np.concatenate([by_value, uniform])],
            candidates=slate.candidates,
            score=logits,
            parts={"valuation": value, "unknown": unknown.astype(np.float64)},
        )
        return cohort, state

    def update(self, state: _ActiveState, outcome: Outcome) -> _ActiveState:
        """Update the valuations of the clients that trained."""
        valuation = state.valuation.copy()
        clients = outcome.clients[outcome.ok]
        # Between the mean and the sum of a client's losses: a client four times as large counts twice.
        valuation[clients] = np.sqrt(outcome.table.sizes[clients]) * outcome[Signal.LOSS][outcome.ok]
        return _ActiveState(valuation)

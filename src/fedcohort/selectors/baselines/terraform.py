"""Terraform: clients whose output layer changes most train again, in smaller and smaller cohorts.

.. [Balivada2026] N. Balivada, S. Gupta, S. S. Bhatt, S. Gupta, "Heterogeneity-Aware Client Selection Methodology For
   Efficient Federated Learning", arXiv 2602.20450, 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.core.top import top_k


@dataclass(frozen=True)
class TerraformState:
    """What Terraform remembers about each client."""

    hard: BoolArray = per_client()  # (N,) whether it trains again
    magnitude: FloatArray = per_client()  # (N,) of its last update of the output layer; 0 before the first


@register("terraform")
@dataclass(frozen=True, kw_only=True)
class Terraform(Selector[TerraformState]):
    r"""Divide the cohort into easy and hard clients, and train the hard ones again ([Balivada2026]_, abstract).

    1. A cohort is drawn at random and trains.
    2. Its clients are sorted by the magnitude :math:`g_{(1)} \le \dots \le g_{(k)}` of their updates of the final
       layer (weights and bias), and divided at

       .. math:: s^* = \arg\min_{k/4 \le s \le 3k/4} \; s \operatorname{Var}(g_{(1)}, \dots, g_{(s)}) +
                 (k - s) \operatorname{Var}(g_{(s+1)}, \dots, g_{(k)}),

       the split between the quartiles with the least variance. The last :math:`k - s^*` clients are hard.
    3. The hard clients are the next cohort, which is divided in the same way, until fewer than eta are left. Then a new
       cohort is drawn.

    Only the draw of step 1 is random.

    Symbols: g = Signal.OUTPUT_UPDATE_NORM, eta = ``threshold``, k = the clients of the cohort whose models arrived.

    Deviations: **we could read only the paper's abstract, introduction and summaries of it.** They say what is sorted,
    that the split minimises the variance within its parts over the interquartile range, and that hard clients train
    again until a threshold is reached. They do not give the threshold, nor how the number of samples enters, so it does
    not enter here. What the paper repeats within a round takes separate rounds here.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(Terraform(), ClientTable(n=8), seed=0)
    >>> everybody = session.ask(RoundRequest(size=8))
    >>> change = np.array([1.0, 9.0, 1.1, 0.9, 8.0, 1.0, 7.0, 1.2])[everybody.clients]
    >>> session.tell(RoundReport(everybody.ticket, everybody.clients, metrics={Signal.OUTPUT_UPDATE_NORM: change}))
    >>> session.ask(RoundRequest(size=8)).names
    ('1', '4', '6')
    """

    picks_by: ClassVar[str] = (
        "Hard clients, whose output layer changed most, train again until few are left. Then a new cohort is drawn."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "magnitude": "how much it changed the output layer last time",
        "hard": "1 if it is among the hard clients",
    }
    checked_params: ClassVar[ParamSets] = {"down to one": {"threshold": 1}}

    threshold: int = param(2, Interval(int, 1, None), "fewest hard clients that train again (eta)")

    @property
    def requires(self) -> frozenset[Signal]:
        """The magnitude of the update of the output layer."""
        return frozenset({Signal.OUTPUT_UPDATE_NORM})

    def init(self, clients: ClientTable, rng: np.random.Generator) -> TerraformState:
        """Start without hard clients."""
        return TerraformState(np.zeros(clients.n, np.bool_), np.zeros(clients.n))

    def select(
        self, state: TerraformState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, TerraformState]:
        """Take the hard clients, or draw a new cohort."""
        hard, magnitude = slate.of_candidates(state.hard), slate.of_candidates(state.magnitude)
        count = int(hard.sum())
        if count >= self.threshold:
            score = np.where(hard, magnitude, -1.0)
            picked = top_k(score, min(count, slate.size))
        else:
            score, count = np.zeros(len(hard)), 0
            picked = rng.permutation(len(hard))[: slate.size]
        cohort = Cohort(
            slate.candidates[picked],
            candidates=slate.candidates,
            score=score,
            parts={"magnitude": magnitude, "hard": hard.astype(np.float64)},
            notes={"train again": count},
        )
        return cohort, state

    def update(self, state: TerraformState, outcome: Outcome) -> TerraformState:
        """Divide the clients whose models arrived into easy and hard ones."""
        clients = outcome.clients[outcome.ok]
        norms = np.maximum(outcome[Signal.OUTPUT_UPDATE_NORM][outcome.ok], 0.0)
        magnitude, hard = state.magnitude.copy(), np.zeros(len(state.hard), np.bool_)
        magnitude[clients] = norms
        if len(clients) > 1:
            order = np.argsort(norms, kind="stable")
            hard[clients[order[split_index(norms[order]) :]]] = True
        return TerraformState(hard, magnitude)


def split_index(ascending: FloatArray) -> int:
    """Return where to divide k > 1 sorted numbers so that the variance within both parts is least.

    Only splits between the quartiles are considered. Of equal ones the first is returned.

    >>> split_index(np.array([1.0, 1.1, 1.2, 5.0, 5.5, 6.0]))
    3
    """
    k = len(ascending)
    values = ascending / max(float(ascending[-1]), np.finfo(np.float64).tiny)
    values = values - values.mean()
    places = np.arange(max(1, -(-k // 4)), max(1, (3 * k) // 4) + 1)
    total, square = np.cumsum(values), np.cumsum(values**2)
    below = square[places - 1] - total[places - 1] ** 2 / places
    above = (square[-1] - square[places - 1]) - (total[-1] - total[places - 1]) ** 2 / (k - places)
    return int(places[np.argmin(np.round(below + above, 12))])

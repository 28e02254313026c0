"""Federated skewness analytics: rank a federation's clients by skewness without training a useful model.

.. [Wang2021] Z. Wang et al., "FedACS: Federated Skewness Analytics in Heterogeneous Decentralized Data Environments",
   IWQoS 2021.

In each round, a uniform cohort makes one full-batch gradient step from the same model (Eqs. 6 to 8). The clients duel
by the distance of their steps to the mean step. One step with learning rate eta moves a client's model by minus eta
times its full-batch gradient, so distances of updates are distances of gradients times eta, and a client computes only
one gradient a round. The model makes the mean step (FedSGD), so that the next round compares at a new point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.errors import InputError
from fedcohort.scenario import Federation
from fedcohort.selectors.papers.fedacs import FedAcs, FedAcsState, Ranking, ranking
from fedcohort.simulate.config.experiment import RunPlan, values_of
from fedcohort.simulate.rounds.group import OnRound
from fedcohort.simulate.rounds.single_run import play_run
from fedcohort.training.local import LocalTraining

ROUNDS_PER_CLIENT = 20  # rounds in which a client duels, on average
_RATE = 0.1  # learning rate of the mean step


@dataclass(frozen=True, eq=False)
class _SkewnessReport:
    """The result of skewness analytics.

    Attributes
    ----------
    ranking : Ranking
        Clients by skewness, with credible intervals.
    federation : Federation
        The clients, whose true skewness is known because they are simulated.
    megabytes : float
        Traffic in both directions.
    """

    ranking: Ranking
    federation: Federation
    rounds: int
    megabytes: float

    @property
    def true_skewness(self) -> FloatArray:
        """(N,) squared distance of each client's true class distribution to that of the whole federation."""
        return self.federation.skewness()

    @property
    def agreement(self) -> float:
        """Spearman's rank correlation between the ranking and the true skewness; 1 is perfect."""
        from scipy.stats import spearmanr

        return float(spearmanr(-self.ranking.win_rate, self.true_skewness).statistic)


def _rounds_needed(clients: int, cohort: int) -> int:
    """Return the rounds after which a client has dueled :data:`ROUNDS_PER_CLIENT` times on average.

    >>> _rounds_needed(200, 10)
    400
    """
    return math.ceil(clients * ROUNDS_PER_CLIENT / cohort)


def rank_by_skewness(
    table: Mapping[str, Any],
    *,
    rounds: int | None = None,
    level: float = 0.95,
    device: str | None = None,
    on_start: Callable[[int], None] | None = None,
    on_round: OnRound | None = None,
) -> _SkewnessReport:
    """Rank the clients of a configuration's federation.

    Parameters
    ----------
    table : mapping
        A configuration; its data, scenario, model, cohort and first seed are used.
    rounds : int, optional
        Default: as many as make a client duel :data:`ROUNDS_PER_CLIENT` times on average.
    level : float
        Level of the credible intervals.
    on_start : callable, optional
        Called before the first round with the number of rounds.
    on_round : callable, optional
        Called after every round, as by :meth:`fedcohort.simulate.rounds.group.Group.step`.
    """

    def adjust_plan(plan: RunPlan, federation: Federation) -> RunPlan:
        cohort = len(federation) if plan.options.size is None else plan.options.size
        if cohort < 2:
            raise InputError(f"Clients duel with each other, so analytics needs at least two a round. Got {cohort}.")
        # A batch holds all data of a client, so its step is its full-batch gradient.
        local = LocalTraining(steps=1, batch_size=int(federation.train_sizes.max()), lr=_RATE)
        options = replace(plan.options, rounds=rounds or _rounds_needed(len(federation), cohort))
        return replace(plan, local=local, options=options)

    # A pool of all clients makes cohorts uniform; the update is the full-batch step.
    selectors = {"fedacs": values_of(FedAcs(pool_share=1.0, insight="update"))}
    # Local training is set above, and the configuration's own might contradict it.
    sections = {key: value for key, value in table.items() if key != "local"}
    with play_run(sections, selectors, adjust_plan, device=device, on_start=on_start, on_round=on_round) as group:
        (run,) = group.runs
        rows = group.drain()
        traffic = sum(float(np.sum(rows.column(name).to_numpy())) for name in ("bytes_down", "bytes_up"))
        state: FedAcsState = run.session.state
        return _SkewnessReport(ranking(state, level), run.federation, run.round, traffic / 1e6)

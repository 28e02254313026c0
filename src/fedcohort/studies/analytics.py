"""Federated skewness analytics: rank a federation's clients without training a model for its own sake.

.. [Wang2021] Z. Wang et al., "FedACS: Federated Skewness Analytics in Heterogeneous Decentralized Data Environments",
   IWQoS 2021.

In a round some clients, drawn uniformly, make one full-batch gradient step from the same model (Eqs. 6 to 8); their
steps duel by their distance to the mean step. One step of rate eta moves a client's model by minus eta times its
full-batch gradient, so the distance of updates is the distance of gradients times eta, and a client computes one
gradient a round and nothing else. The mean step is taken (FedSGD), so that the next round compares at a new point.
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

ROUNDS_PER_CLIENT = 20  # in which a client duels, on average


@dataclass(frozen=True, eq=False)
class SkewnessReport:
    """What analytics found out.

    Attributes
    ----------
    ranking : Ranking
        Clients by skewness, with credible intervals.
    federation : Federation
        The clients; being simulated, their true skewness is known.
    megabytes : float
        Sent both ways.
    """

    ranking: Ranking
    federation: Federation
    rounds: int
    megabytes: float

    @property
    def true_skewness(self) -> FloatArray:
        """(N,) squared distance of each client's true class distribution to that of all together."""
        return self.federation.skewness()

    @property
    def agreement(self) -> float:
        """Spearman's rank correlation between the ranking and the true skewness; 1 is perfect."""
        from scipy.stats import spearmanr

        return float(spearmanr(-self.ranking.win_rate, self.true_skewness).statistic)


def rounds_needed(clients: int, cohort: int) -> int:
    """Return how many rounds let every client duel :data:`ROUNDS_PER_CLIENT` times on average.

    >>> rounds_needed(200, 10)
    400
    """
    return math.ceil(clients * ROUNDS_PER_CLIENT / cohort)


def rank_by_skewness(
    table: Mapping[str, Any],
    *,
    rounds: int | None = None,
    level: float = 0.95,
    rate: float = 0.1,
    device: str | None = None,
    on_start: Callable[[int], None] | None = None,
    on_round: OnRound | None = None,
) -> SkewnessReport:
    """Rank the clients of a configuration's federation.

    Parameters
    ----------
    table : mapping
        A configuration; its data, scenario, model, cohort and first seed are used.
    rounds : int, optional
        Default: :func:`rounds_needed`.
    level : float
        Of the credible intervals.
    rate : float
        Learning rate of the mean step, positive.
    on_start : callable, optional
        Called with the number of rounds before the first.
    on_round : callable, optional
        Called after every round, as by :meth:`fedcohort.simulate.rounds.group.Group.step`.
    """
    if not rate > 0:
        raise InputError(f"The learning rate of analytics must be positive. Got {rate!r}.")

    def adjust_plan(plan: RunPlan, federation: Federation) -> RunPlan:
        cohort = len(federation) if plan.options.size is None else plan.options.size
        if cohort < 2:
            raise InputError(f"Clients duel with each other: analytics needs at least two a round. Got {cohort}.")
        # The whole of every client's data in one batch: its step is its full-batch gradient.
        local = LocalTraining(steps=1, batch_size=int(federation.train_sizes.max()), lr=rate)
        options = replace(plan.options, rounds=rounds or rounds_needed(len(federation), cohort))
        return replace(plan, local=local, options=options)

    # Uniform cohorts, so that everybody meets the same opponents; one full-batch step is the update.
    selectors = {"fedacs": values_of(FedAcs(pool_share=1.0, insight="update"))}
    # Local training is ours to set here, and a configuration's own might not fit it.
    sections = {key: value for key, value in table.items() if key != "local"}
    with play_run(sections, selectors, adjust_plan, device=device, on_start=on_start, on_round=on_round) as group:
        (run,) = group.runs
        made = group.drain()
        traffic = sum(float(np.sum(made.column(name).to_numpy())) for name in ("bytes_down", "bytes_up"))
        state: FedAcsState = run.session.state
        return SkewnessReport(ranking(state, level), run.federation, run.round, traffic / 1e6)

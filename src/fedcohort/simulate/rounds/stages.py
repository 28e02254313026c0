"""A run's turn in a lock-step round, stage by stage. Each type holds what is known at that stage.

OpenTurn -> AnsweredTurn -> CohortTurn -> TrainedTurn -> AveragedTurn -> TestedTurn. The cohort has k clients; the
models of m of them arrive in time. The types are tuples because every run makes one of each in every round, and tuples
are fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from fedcohort.core.protocol import Answer, Cohort, Query
from fedcohort.core.signals import Signal
from fedcohort.hosts.round import Round, late_discount
from fedcohort.simulate.rounds.costs import RoundCost
from fedcohort.simulate.rounds.judge import ModelScore
from fedcohort.simulate.rounds.late import LateUpdate, columns
from fedcohort.simulate.rounds.run import Run
from fedcohort.training.aggregators import Members


class OpenTurn(NamedTuple):
    """The selector has asked its question, if it has one."""

    run: Run
    available: BoolArray | None  # (N,); None means everybody
    query: Query | None

    def reachable(self, clients: IntArray | None) -> IntArray:
        """Return which of ``clients`` are available; None means all clients."""
        if self.available is None:
            return np.arange(len(self.run.federation)) if clients is None else clients
        return np.flatnonzero(self.available) if clients is None else clients[self.available[clients]]

    def seconds(self, clients: IntArray, work: FloatArray | float) -> FloatArray:
        """Return how many simulated seconds (k,) these clients need for some work on the current model."""
        return self.run.seconds(clients, work, self.run.costs.model_bytes)


class AnsweredTurn(NamedTuple):
    """The query is answered and paid for."""

    open_turn: OpenTurn
    answer: Answer | None
    holders: IntArray | None  # clients that received the current model with the query
    cost: RoundCost  # grows until the round ends


class CohortTurn(NamedTuple):
    """The cohort is chosen, and it is known which clients will answer in time."""

    run: Run
    round: Round
    available: BoolArray | None
    cost: RoundCost
    arrived: IntArray  # (m,) places in the cohort

    @property
    def cohort(self) -> Cohort:
        """The round's cohort."""
        return self.round.cohort

    @property
    def clients(self) -> IntArray:
        """(m,) the clients whose models arrive in time."""
        return self.cohort.clients[self.arrived]


class TrainedTurn(NamedTuple):
    """The models are trained, and it is known which of them are finite."""

    cohort_turn: CohortTurn
    clients: IntArray  # (m,)
    jobs: slice  # rows of their models in the group's batch
    valid: BoolArray  # (m,) which models are finite

    @property
    def run(self) -> Run:
        """The run."""
        return self.cohort_turn.run

    @property
    def seconds(self) -> FloatArray:
        """(m,) how long the clients worked."""
        return self.cohort_turn.round.seconds[self.cohort_turn.arrived]

    def column(self, values: AnyArray) -> FloatArray:
        """Spread values of the arrived models, (m,) or (m, V), over the cohort; NaN for its other clients."""
        count = self.cohort_turn.cohort.size
        if len(values) == count:
            return np.asarray(values, np.float64)
        column = np.full((count, *values.shape[1:]), np.nan)
        column[self.cohort_turn.arrived] = values
        return column

    def members(
        self,
        kept: BoolArray,
        steps: IntArray,
        signals: Mapping[Signal, FloatArray],
        late: Sequence[LateUpdate] = (),
    ) -> Members:
        """Describe the models in the average to the aggregator.

        Parameters
        ----------
        kept : (m,) bool array
            Which of the arrived models the filter kept.
        steps : (m,) int array
            Local steps of each client.
        signals : mapping of Signal to (m,) array
            What is known of each model; the aggregator gets the signals it requires.
        late : sequence of LateUpdate
            Models of earlier rounds that count in this one; they are last in the result.
        """
        cohort, run = self.cohort_turn.cohort, self.run
        weights = None if cohort.weights is None else cohort.weights[self.cohort_turn.arrived[kept]]
        metrics = {signal: signals[signal][kept] for signal in run.aggregator.requires}
        if not late:
            return members(run, self.clients[kept], steps[kept], weights, metrics)
        clients, late_steps, times, staleness = columns(late, run.round)
        fresh = np.ones(int(kept.sum()))
        if not run.aggregator.discounts_staleness:
            times = times * late_discount(staleness)
        return members(
            run,
            np.concatenate([self.clients[kept], clients]),
            np.concatenate([steps[kept], late_steps]),
            np.concatenate([fresh if weights is None else weights, times]),
            metrics,
            np.concatenate([0.0 * fresh, staleness]),
        )


class TrainedModels(NamedTuple):
    """Models of one run for which signals are computed."""

    run: Run
    clients: IntArray  # (m,)
    jobs: slice  # rows of their models in the group's batch
    valid: BoolArray  # (m,) which models are finite
    seconds: FloatArray  # (m,) how long the clients worked


class AveragedTurn(NamedTuple):
    """The next global model is ready, and so is everything in the report."""

    cohort_turn: CohortTurn
    kept: BoolArray  # (k,)
    weight: FloatArray  # (k,) in the average
    metrics: Mapping[Signal, FloatArray]  # (k,) or (k, V) each

    @classmethod
    def without_models(cls, turn: CohortTurn) -> AveragedTurn:
        """Return the end of a round in which no model arrived."""
        count = turn.cohort.size
        return cls(turn, np.zeros(count, np.bool_), np.zeros(count), {})

    @property
    def run(self) -> Run:
        """The run."""
        return self.cohort_turn.run

    def mean(self, signal: Signal) -> float:
        """Return the mean of a signal over the clients that reported it, weighted by size; NaN if nobody did."""
        values = self.metrics.get(signal)
        if values is None:
            return float("nan")
        weights = np.where(np.isnan(values), 0.0, self.run.context.share[self.cohort_turn.cohort.clients])
        total = weights.sum()
        return float(np.nansum(weights * values) / total) if total > 0 else float("nan")


class TestedTurn(NamedTuple):
    """The new global model has been tested, if a test was due. Only the report is left."""

    averaged_turn: AveragedTurn
    stop: str | None  # why the selector or the early-stop rule ends the run
    score: ModelScore | None


def members(
    run: Run,
    clients: IntArray,
    steps: IntArray,
    multiplicity: FloatArray | None,
    metrics: Mapping[Signal, FloatArray],
    staleness: FloatArray | None = None,
) -> Members:
    """Describe models to a run's aggregator.

    Parameters
    ----------
    clients : (j,) int array
    steps : (j,) int array
        Local steps of each client.
    multiplicity : (j,) float array or None
        How often each model counts; None means once.
    metrics : mapping of Signal to (j,) array
        The signals that the aggregator requires.
    staleness : (j,) float array or None
        How many new global models there were while each client trained; None means none.
    """
    if staleness is None:
        staleness = np.zeros(len(clients))
    begun = run.round - staleness.astype(np.int64)
    return Members(
        clients=clients,
        share=run.context.share[clients],
        steps=steps.astype(np.float64),
        federation=len(run.federation),
        multiplicity=np.ones(len(clients)) if multiplicity is None else multiplicity,
        momentum=run.plan.local.momentum,
        rates=run.rate_sums(steps, clients, begun),
        metrics=metrics,
        round=run.round,
        staleness=staleness,
        decay=run.plan.local.lr_at(run.round) / run.rates_at(begun),
    )

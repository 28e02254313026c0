"""What is known of one run's turn in a round, filled in as the round goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

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


class Stopwatch:
    """Adds up the real seconds that pass in its ``with`` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._began


class Turn:
    """A run's turn: a question, a cohort of k clients, m models that arrive in time, and the next global model."""

    # In the order in which they become known. Asynchronous runs have no round; they fill in what they need.
    round: Round
    cohort: Cohort

    def __init__(self, run: Run, available: BoolArray | None = None, query: Query | None = None) -> None:
        self.run = run
        self.selecting = Stopwatch()  # what the selector's question, choice and learning take, with their record
        self.available = available  # (N,); None means everybody
        self.query = query
        self.answer: Answer | None = None
        self.holders: IntArray | None = None  # clients that received the current model with the query
        self.cost = RoundCost()  # grows until the round ends
        self.arrived: IntArray = np.empty(0, np.int64)  # (m,) places in the cohort
        self.clients: IntArray = np.empty(0, np.int64)  # (m,)
        self.seconds: FloatArray = np.empty(0)  # (m,) how long the clients worked
        self.jobs = slice(0, 0)  # rows of their models in the group's batch
        self.valid: BoolArray = np.empty(0, np.bool_)  # (m,) which models are finite
        self.kept: BoolArray = np.empty(0, np.bool_)  # (m,) which of them are in the average
        self.weights: FloatArray = np.empty(0)  # (m,) in the average
        self.signals: dict[Signal, FloatArray] = {}  # (m,) or (m, V) each
        self.stop: str | None = None  # why the selector or the early-stop rule ends the run
        self.score: ModelScore | None = None  # of the new global model, if a test was due

    def reachable(self, clients: IntArray | None) -> IntArray:
        """Return which of ``clients`` are available; None means all clients."""
        if self.available is None:
            return np.arange(len(self.run.federation)) if clients is None else clients
        return np.flatnonzero(self.available) if clients is None else clients[self.available[clients]]

    def work_seconds(self, clients: IntArray, work: FloatArray | float) -> FloatArray:
        """Return how many simulated seconds (k,) these clients need for some work on the current model."""
        return self.run.seconds(clients, work, self.run.costs.model_bytes)

    def in_cohort(self, values: AnyArray, missing: float) -> FloatArray:
        """Spread values of the arrived models, (m,) or (m, V), over the cohort."""
        column = np.full((self.cohort.size, *values.shape[1:]), missing)
        column[self.arrived] = values
        return column

    def mean(self, signal: Signal) -> float:
        """Return the mean of a signal over the clients that reported it, weighted by size; NaN if nobody did."""
        values = self.signals.get(signal)
        if values is None:
            return float("nan")
        weights = np.where(np.isnan(values), 0.0, self.run.context.share[self.clients])
        total = weights.sum()
        return float(np.nansum(weights * values) / total) if total > 0 else float("nan")

    def members(self, steps: IntArray, late: Sequence[LateUpdate] = ()) -> Members:
        """Describe the kept models to the aggregator, followed by ``late`` models of earlier rounds.

        Parameters
        ----------
        steps : (m,) int array
            Local steps of each client.
        """
        run, kept = self.run, self.kept
        weights = None if self.cohort.weights is None else self.cohort.weights[self.arrived[kept]]
        metrics = {signal: self.signals[signal][kept] for signal in run.aggregator.requires}
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

"""What is known of one run's turn, from the question to the next global model, filled in as it goes on."""

from __future__ import annotations

import time

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from fedcohort.core.protocol import Answer, Cohort, Query
from fedcohort.core.signals import Signal
from fedcohort.hosts.round import Round
from fedcohort.simulate.rounds.costs import RoundCost
from fedcohort.simulate.rounds.run import Run


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

    def __init__(self, run: Run) -> None:
        self.run = run
        self.selecting = Stopwatch()  # what the selector's question, choice and learning take, with their record
        self.available: BoolArray | None = None  # (N,); None means everybody
        self.query: Query | None = None
        self.answer: Answer | None = None
        self.holders: IntArray | None = None  # clients that received the current model with the query
        self.cost = RoundCost()  # grows until the turn ends
        self.arrived: IntArray = np.empty(0, np.int64)  # (m,) places in the cohort
        self.clients: IntArray = np.empty(0, np.int64)  # (m,)
        self.seconds: FloatArray = np.empty(0)  # (m,) how long the clients worked
        self.jobs = slice(0, 0)  # rows of their models in the group's batch
        self.valid: BoolArray = np.empty(0, np.bool_)  # (m,) which models are finite
        self.kept: BoolArray = np.empty(0, np.bool_)  # (m,) which of them are in the average
        self.weights: FloatArray = np.empty(0)  # (m,) in the average
        self.signals: dict[Signal, FloatArray] = {}  # (m,) or (m, V) each
        self.stop: str | None = None  # why the selector or the early-stop rule ends the run

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

"""What a round costs: bytes each way, client compute, simulated seconds. No question to a client is free.

These are all the rules:

- A model is 4 bytes per parameter, a reported number 8 bytes. SCAFFOLD sends two vectors each way. Each signal
  says which numbers and vectors a client sends for it; a row of V numbers costs V times as much as one.
- A client gets the current global model at most once a round: a client that was asked a question before the
  cohort was chosen has it already.
- A client that fails during the round uploads nothing; a late one uploads after the deadline.
- Client compute is counted in sample passes: a forward pass over one sample is 1, forward and backward together 3. The
  scenario says how many seconds a client's usual local training takes. The time for everything else in that round is
  proportional to its sample passes. With devices, sending bytes takes time too.
- A loss on a client's data costs a forward pass, a full-batch gradient a forward and a backward pass. Losses of one
  model on the same samples share one pass.
- A :class:`~fedcohort.core.protocol.Losses` query: the model goes to every client that is asked, and one number per
  signal comes back. The query takes as long as its slowest client.
- A :class:`~fedcohort.core.protocol.Trial` query: all available clients evaluate the current model; each trial
  cohort trains and uploads; all available clients evaluate each trial average and send one number. These steps follow
  one another, and each takes as long as its slowest client.
- Every available client answers queries. Failures and the deadline apply only to training.
- What clients share about their labels (``[labels]``) is booked with the first round, as a query: the bytes that would
  be sent, and the seconds that encryption and products took.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.signals import BACKWARD, FORWARD, GRADIENT_PASS, Pass, Signal
from fedcohort.simulate.label_sharing import LabelKnowledge

BYTES_PER_PARAMETER = 4
BYTES_PER_NUMBER = 8


@dataclass
class RoundCost:
    """The costs of one round of a run, added up during the round."""

    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    client_seconds: float = 0.0
    query_seconds: float = 0.0
    query_bytes_down: int = 0
    query_bytes_up: int = 0
    query_client_seconds: float = 0.0
    asked: int = 0  # questions to clients before the cohort was chosen, one for each client and model

    def add(self, other: RoundCost) -> None:
        """Add other costs of the same round."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class CostModel:
    """Costs of one federation under one model and local training.

    Parameters
    ----------
    parameters : int
        Size of the model.
    train, validation : (N,) arrays
        Samples of each client.
    samples : (N,) int array
        How many samples a client's usual local training goes through.
    classes : int
        Length of a signal that is one number per class.
    """

    def __init__(self, parameters: int, train: IntArray, validation: IntArray, samples: IntArray, classes: int) -> None:
        self.parameters, self.classes = parameters, classes
        self.train: FloatArray = np.asarray(train, np.float64)
        self.validation: FloatArray = np.asarray(validation, np.float64)
        # Sample passes of the usual local training. At least 1, because other work is measured by it.
        self.usual: FloatArray = np.maximum((FORWARD + BACKWARD) * np.asarray(samples, np.float64), 1.0)

    @property
    def model_bytes(self) -> int:
        """Bytes of one model."""
        return self.parameters * BYTES_PER_PARAMETER

    def _work(self, clients: IntArray, passes: Set[Pass]) -> FloatArray:
        """Return the work (k,) of some passes over clients' data, relative to the usual local training."""
        total = np.zeros(len(clients))
        for one in passes:
            total += one.weight * getattr(self, one.part)[clients]
        return np.asarray(total / self.usual[clients])

    def loss_work(self, clients: IntArray, signals: Iterable[Signal]) -> FloatArray:
        """Return the work (k,) of answering a Losses query, relative to the usual local training."""
        return self._work(clients, _passes_of(signals))

    def round_work(
        self, clients: IntArray, work: FloatArray | None, signals: Iterable[Signal], gradients: bool
    ) -> FloatArray | float:
        """Return the work (k,) of local training and of what the report needs, relative to the usual local training.

        Parameters
        ----------
        clients : (k,) int array
        work : (k,) float array or None
            Multiple of the usual number of steps; None means 1 for all.
        signals : collection of Signal
            What the report contains.
        gradients : bool
            Whether the aggregator wants full-batch gradients.
        """
        passes = _passes_of(signals) | ({GRADIENT_PASS} if gradients else frozenset())
        training = 1.0 if work is None else work
        return training + self._work(clients, passes) if passes else training

    def samples(self, clients: IntArray, work: FloatArray | float) -> FloatArray:
        """Return on how many samples (k,) a client trains in the time of some work, relative to the usual training."""
        return np.asarray(work * self.usual[clients] / (FORWARD + BACKWARD))

    def upload(self, signals: Iterable[Signal], copies: int) -> int:
        """Return how many bytes one client sends at the end of a round."""
        numbers, models = 0, copies
        for signal in signals:
            numbers += signal.numbers_sent(self.classes)
            models += signal.models_sent
        return models * self.model_bytes + numbers * BYTES_PER_NUMBER

    def book_round(
        self,
        cost: RoundCost,
        seconds: float,
        durations: FloatArray,
        *,
        uploads: int,
        holders: int,
        cohort: int,
        signals: frozenset[Signal],
        copies: int,
    ) -> None:
        """Add the training part of a round.

        Parameters
        ----------
        seconds : float
            How long the round's training lasts.
        durations : (k,) float array
            Seconds each client worked.
        uploads : int
            How many clients sent something back.
        holders : int
            How many clients of the cohort already had the current model, from a query.
        copies : int
            Vectors of the model's size that go each way per client.
        """
        cost.seconds += seconds
        cost.client_seconds += float(durations.sum())
        cost.bytes_down += (cohort * copies - holders) * self.model_bytes
        cost.bytes_up += uploads * self.upload(signals, copies)

    def book_losses(self, cost: RoundCost, durations: FloatArray, signals: frozenset[Signal]) -> None:
        """Add a Losses query answered by ``len(durations)`` clients."""
        asked = len(durations)
        cost.asked += asked
        cost.query_bytes_down += asked * self.model_bytes
        cost.query_bytes_up += asked * sum(s.numbers_sent(self.classes) for s in signals) * BYTES_PER_NUMBER
        self._book_query_time(cost, durations)

    def book_trial(
        self,
        cost: RoundCost,
        evaluation: FloatArray,
        training: list[FloatArray],
        copies: int,
    ) -> None:
        """Add a Trial query.

        Parameters
        ----------
        evaluation : (a,) float array
            Seconds each available client takes for one evaluation.
        training : list of (k,) float arrays
            Seconds each member of each trial cohort trains.
        copies : int
            Vectors of the model's size that go each way per training client.
        """
        everyone = len(evaluation)
        cost.asked += everyone * (1 + len(training)) + sum(map(len, training))
        cost.query_bytes_down += everyone * self.model_bytes
        cost.query_bytes_up += everyone * BYTES_PER_NUMBER
        self._book_query_time(cost, evaluation)
        for durations in training:
            # Clients that train have the model from the evaluation and need only what the aggregator adds to it.
            cost.query_bytes_down += len(durations) * (copies - 1) * self.model_bytes + everyone * self.model_bytes
            cost.query_bytes_up += len(durations) * copies * self.model_bytes + everyone * BYTES_PER_NUMBER
            self._book_query_time(cost, durations)
            self._book_query_time(cost, evaluation)

    @staticmethod
    def book_labels(cost: RoundCost, labels: LabelKnowledge) -> None:
        """Add the cost of sharing labels."""
        cost.query_bytes_up += labels.bytes_up
        cost.query_client_seconds += labels.client_seconds
        cost.query_seconds += labels.seconds
        cost.seconds += labels.seconds

    @staticmethod
    def _book_query_time(cost: RoundCost, durations: FloatArray) -> None:
        slowest = float(durations.max(initial=0.0))
        cost.query_seconds += slowest
        cost.seconds += slowest
        cost.query_client_seconds += float(durations.sum())


def _passes_of(signals: Iterable[Signal]) -> frozenset[Pass]:
    """Return what a client computes for several signals together."""
    return frozenset[Pass]().union(*(signal.passes for signal in signals))

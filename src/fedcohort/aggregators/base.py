"""What an aggregator is: weights for the kept models, perhaps a rule for local training, perhaps a memory.

Models are flat vectors of parameters; the formulas use only arithmetic and indexing, so that NumPy arrays and torch
tensors both flow through. The simulator averages all runs of a lock-step group in one operation from the weights
alone; an aggregator that does more than a weighted sum overrides :meth:`Aggregator.combine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedcohort.arrays import FloatArray, IntArray
from fedcohort.errors import InputError
from fedcohort.params import Parameterized
from fedcohort.registry import Registry


@dataclass(frozen=True, eq=False)
class Members:
    """The clients whose models are averaged in one round (those that arrived and that the filter kept).

    Attributes
    ----------
    clients : (k,) int array
    share : (k,) float array
        p_k, each client's part of all training samples of the federation.
    steps : (k,) float array
        Local SGD steps each client made.
    federation : int
        Number of clients N of the whole federation.
    multiplicity : (k,) float array
        How often each client counts (1 unless the selector drew with replacement).
    momentum : float
        Of local training; FedNova's normalisation depends on it.
    """

    clients: IntArray
    share: FloatArray
    steps: FloatArray
    federation: int
    multiplicity: FloatArray
    momentum: float = 0.0

    @property
    def by_size(self) -> FloatArray:
        """(k,) shares times multiplicities, summing to 1; equal shares when nobody has any data."""
        raw = self.share * self.multiplicity
        total = raw.sum()
        if total > 0:
            return np.asarray(raw / total)
        return np.full(len(raw), 1.0 / len(raw))

    @property
    def by_count(self) -> FloatArray:
        """(k,) multiplicities, summing to 1."""
        return np.asarray(self.multiplicity / self.multiplicity.sum())


@dataclass(frozen=True, eq=False)
class Mix:
    """A weighted sum: ``old`` times the global model plus ``weights`` (k,) times the clients' models."""

    weights: FloatArray
    old: float = 0.0


class Memory(ABC):
    """What an aggregator remembers of one run between rounds; :mod:`fedcohort.simulate` saves it in checkpoints."""

    @abstractmethod
    def corrections(self, clients: IntArray) -> Any:
        """(k, P) vectors added to every local gradient of ``clients``."""

    @abstractmethod
    def absorb(self, clients: IntArray, old: Any, models: Any, rates: FloatArray, gradients: Any | None) -> None:
        """Learn from the models that arrived.

        Parameters
        ----------
        clients : (k,) int array
        old : (P,) the global model they started from
        models : (k, P) their models after training
        rates : (k,) float array
            Sum of the learning rates over the local steps of each client (K times eta).
        gradients : (k, P), optional
            Full-batch gradients at ``old``, where the aggregator asked for them.
        """

    @abstractmethod
    def arrays(self) -> dict[str, Any]:
        """Return everything worth saving, by name."""

    @abstractmethod
    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Take over what :meth:`arrays` returned."""


class Aggregator(Parameterized, ABC):
    """Turns the kept models into the next global model. Derive a frozen dataclass and fill in :meth:`mix`."""

    name: ClassVar[str]
    model_copies: ClassVar[int] = 1  # vectors of the model's size sent each way per client (SCAFFOLD: 2)

    @property
    def prox(self) -> float:
        """Weight mu of the proximal term mu/2 ||w - w_global||^2 in local training; 0 for none."""
        return 0.0

    @property
    def needs_gradients(self) -> bool:
        """Whether clients also compute the full-batch gradient at the received model."""
        return False

    def memory(self, federation: int, model: Any) -> Memory | None:
        """Return what is remembered between rounds, before the first one; None for most."""
        return None

    @abstractmethod
    def mix(self, members: Members) -> Mix:
        """Return the weights of the kept models, at least one."""

    def combine(self, old: Any, models: Any, members: Members) -> Any:
        """Return the next global model (P,) from the old one (P,) and the kept ones (k, P)."""
        if len(members.clients) == 0:
            raise InputError("An average needs at least one model. Got none; keep the old global model instead.")
        mix = self.mix(members)
        result = mix.old * old if mix.old else 0.0
        for weight, model in zip(mix.weights.tolist(), models, strict=True):
            result = result + weight * model
        return result


AGGREGATORS: Registry[Aggregator] = Registry("aggregator", package="fedcohort.aggregators")

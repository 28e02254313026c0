"""What goes into the engine and what comes out: clients as index slices, jobs as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedcohort.arrays import FloatArray, IntArray
from fedcohort.errors import FedcohortError, InputError


class WorkerError(FedcohortError, RuntimeError):
    """A worker process of the training engine died or failed."""


@dataclass(frozen=True)
class ClientData:
    """The clients of one federation over the shared training set.

    Client i owns ``indices[offsets[i]:offsets[i + 1]]``; the last ``validation[i]`` of these are its local validation
    set and are not trained on.
    """

    indices: IntArray  # (total,) positions in the training set, client after client
    offsets: IntArray  # (N + 1,)
    labels: IntArray  # (total,) labels as the clients see them
    validation: IntArray  # (N,) size of each client's local validation set

    @property
    def n_clients(self) -> int:
        """Number of clients N."""
        return len(self.offsets) - 1

    def check(self, samples: int, classes: int) -> None:
        """Raise :class:`InputError` unless this fits a training set of ``samples`` samples and ``classes`` classes."""
        total = len(self.indices)
        if self.offsets.ndim != 1 or len(self.offsets) < 2 or self.offsets[0] != 0 or self.offsets[-1] != total:
            raise InputError(f"The offsets of a ClientData must run from 0 to {total}, the number of indices.")
        if (np.diff(self.offsets) < 0).any():
            raise InputError("The offsets of a ClientData must not decrease.")
        if len(self.labels) != total:
            raise InputError(f"A ClientData has {total} indices but {len(self.labels)} labels.")
        if len(self.validation) != self.n_clients:
            raise InputError(f"A ClientData of {self.n_clients} clients has {len(self.validation)} validation sizes.")
        if (self.validation < 0).any() or (self.validation > np.diff(self.offsets)).any():
            raise InputError("A client's validation set must be between 0 and its number of samples.")
        if total and (self.indices.min() < 0 or self.indices.max() >= samples):
            raise InputError(f"The indices of a ClientData must be in [0, {samples}), the training set.")
        if total and (self.labels.min() < 0 or self.labels.max() >= classes):
            raise InputError(f"The labels of a ClientData must be in [0, {classes}).")


@dataclass(frozen=True)
class Jobs:
    """J local trainings of one lock-step round, as arrays of length J."""

    run: IntArray  # (J,) row of the global models it starts from
    federation: IntArray  # (J,) which ClientData
    client: IntArray  # (J,)
    round: IntArray  # (J,)
    seed: IntArray  # (J,) the run's seed of the batch plans
    steps: IntArray | None = None  # (J,) number of local steps, instead of what LocalTraining says

    def __len__(self) -> int:
        return len(self.client)


class Trained:
    """What J jobs came back with.

    Parameters
    ----------
    params : torch.Tensor
        (J, P) on the engine's device.
    steps : array of int
        (J,) SGD steps done.
    samples : array of int
        (J,) training samples of the client.
    first_loss : torch.Tensor
        (J,) see :attr:`first_loss`.
    """

    def __init__(self, params: torch.Tensor, steps: IntArray, samples: IntArray, first_loss: torch.Tensor) -> None:
        self.params = params
        self.steps = steps
        self.samples = samples
        self._first_loss = first_loss

    @property
    def first_loss(self) -> FloatArray:
        """Mean loss (J,) of the first batch at the global model; NaN for a job without steps.

        Fetched from the device when it is looked at, so that a round that does not ask for it waits for nothing.
        """
        return self._first_loss.double().cpu().numpy()

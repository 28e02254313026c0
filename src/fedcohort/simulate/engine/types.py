"""The engine's inputs and outputs: clients as index slices, jobs as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedcohort.core.arrays import IntArray


@dataclass(frozen=True)
class ClientData:
    """The clients of one federation over the shared training set.

    Client i owns ``indices[offsets[i]:offsets[i + 1]]``; the last ``validation[i]`` of these are its local validation
    set and are not trained on.
    """

    # Several clients may own the same sample, and label it differently.
    indices: IntArray  # (total,) positions in the training set, client by client
    offsets: IntArray  # (N + 1,)
    labels: IntArray  # (total,) labels as the clients see them
    validation: IntArray  # (N,) size of each client's local validation set

    @property
    def n_clients(self) -> int:
        """Number of clients N."""
        return len(self.offsets) - 1


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Samples on which models are tested, and the cells in which right answers are counted.

    Attributes
    ----------
    first : int
        Row of the first one in the store; the others follow it.
    y : (n,) int array
        Their labels.
    cell : (n,) int array
        The cell of each sample: its class or its owner.
    cells : int
        Number of cells.
    """

    first: int
    y: IntArray
    cell: IntArray
    cells: int

    @property
    def counts(self) -> IntArray:
        """(cells,) the number of samples in each cell."""
        return np.bincount(self.cell, minlength=self.cells)


@dataclass(frozen=True)
class Jobs:
    """J local trainings of one lock-step round, as arrays of length J."""

    run: IntArray  # (J,) row of the global model to start from
    federation: IntArray  # (J,) which ClientData
    client: IntArray  # (J,)
    round: IntArray  # (J,)
    seed: IntArray  # (J,) the run's seed for batch plans
    steps: IntArray | None = None  # (J,) number of local steps, if not the one from LocalTraining

    def __len__(self) -> int:
        return len(self.client)


@dataclass(frozen=True)
class Spans:
    """Q pairs of a model and a span of a client's samples, as arrays of length Q.

    Pair i has the model in row ``run[i]`` and the ``count[i]`` slots of the store that start at ``first[i]``.
    """

    run: IntArray
    first: IntArray
    count: IntArray

    def __len__(self) -> int:
        return len(self.run)

    def __getitem__(self, rows: IntArray) -> Spans:
        return Spans(self.run[rows], self.first[rows], self.count[rows])


@dataclass(frozen=True)
class TrainingResult:
    """The results of J jobs."""

    params: torch.Tensor  # (J, P) on the engine's device
    steps: IntArray  # (J,) SGD steps done

"""Partitions that are given: by the clients that the data name, or by explicit lists of samples.

.. [Caldas2018] S. Caldas et al., "LEAF: A Benchmark for Federated Settings".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedcohort.core.errors import ScenarioError
from fedcohort.core.params import Interval, Optional, Sequence, param
from fedcohort.scenario.partition import PARTITIONS, Assignment, Partition, Pool


@PARTITIONS.register("natural")
@dataclass(frozen=True, kw_only=True)
class Natural(Partition):
    """The clients that the data name: the writers of FEMNIST ([Caldas2018]_), or a column of your own table.

    >>> pool = Pool.of([0, 1, 0, 1, 1], writers=[1, 0, 1, 1, 2])
    >>> Natural(least=1).assign(pool, np.random.default_rng(0)).offsets
    array([0, 1, 4, 5])
    """

    by_class = False

    clients: int | None = param(None, Optional(Interval(int, 1, None)), "number of random clients; None is all")
    least: int = param(1, Interval(int, 1, None), "writers with fewer samples are left out")

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Group the samples by writer."""
        if pool.writers is None:
            raise ScenarioError(
                "The partition 'natural' needs a dataset that says which client each sample belongs to.",
                hint="name the column with data.client, give an array clients, or use the dataset 'femnist'",
            )
        # Writers may have no samples here: the server may have kept theirs, or they are in the test set only.
        sizes = np.bincount(pool.writers)
        chosen = np.flatnonzero(sizes >= self.least)
        count = len(chosen) if self.clients is None else self.clients
        if count > len(chosen) or count == 0:
            raise ScenarioError(
                f"The partition 'natural' needs {count or 1:,} writers with at least {self.least:,} samples, but "
                f"the dataset has {len(chosen):,} (largest: {int(sizes.max()):,} samples)."
            )
        if count < len(chosen):
            chosen = np.sort(rng.permutation(chosen)[:count])  # sorted, so that names keep the data's order
        number = np.full(len(sizes), -1, dtype=np.int64)
        number[chosen] = np.arange(count)
        owner = number[pool.writers]
        places = np.argsort(owner, kind="stable")[int((owner < 0).sum()) :]  # without those of other writers, -1
        offsets = np.concatenate([[0], np.cumsum(sizes[chosen])]).astype(np.int64)
        names = None
        if pool.writer_names is not None:
            names = tuple(pool.writer_names[w] for w in chosen)
        return Assignment(places, offsets, {"writer": chosen}, (), names)


@PARTITIONS.register("custom")
@dataclass(frozen=True, kw_only=True)
class Custom(Partition):
    """Lists of positions in the training set, one per client; a sample may have several owners.

    >>> Custom(parts=((0, 2), (1,))).assign(Pool.of([0, 1, 1]), np.random.default_rng(0)).places
    array([0, 2, 1])
    """

    by_class = False

    parts: tuple[tuple[int, ...], ...] = param(
        dataclasses.MISSING, Sequence(Sequence(Interval(int, 0, None)), least=1), "positions of every client's samples"
    )

    @classmethod
    def of(cls, parts: Iterable[npt.ArrayLike]) -> Custom:
        """Build it from arrays."""
        return cls(parts=tuple(tuple(np.asarray(part, dtype=np.int64).tolist()) for part in parts))

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Check the positions and use them as they are."""
        positions = np.concatenate([np.asarray(part, dtype=np.int64) for part in self.parts])
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in self.parts])]).astype(np.int64)
        end = int(pool.positions.max()) + 1
        # The lists name positions in the whole training set, of which the server may have kept some.
        place_of = np.full(max(end, int(positions.max(initial=0)) + 1), -1, dtype=np.int64)
        place_of[pool.positions] = np.arange(len(pool))
        places = place_of[positions]
        if (places < 0).any():
            bad = int(np.argmax(places < 0))
            k = int(np.searchsorted(offsets, bad, side="right")) - 1
            raise ScenarioError(
                f"The partition 'custom' gives client {k} the sample {int(positions[bad])}, which is not one of the "
                f"{len(pool):,} available samples (positions below {end:,}, without those the server keeps)."
            )
        return Assignment(places, offsets)

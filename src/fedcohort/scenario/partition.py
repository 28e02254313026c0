"""The base class of partitions, which divide a training set among clients, their registry and shared functions.

Nearly every partition is a matrix of integers: how many samples of each class each client gets. :meth:`Partition.deal`
turns such a matrix into samples. The partitions are in ``classwise``, ``dirichlet``, ``unequal`` and ``predefined``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedcohort.core.arrays import AnyArray, FloatArray, IntArray
from fedcohort.core.errors import InputError, ScenarioError
from fedcohort.core.registry import Registry
from fedcohort.scenario.part import NamedPart

PARTITIONS: Registry[Partition] = Registry("partition", package="fedcohort.scenario")


@dataclass(frozen=True, eq=False)
class Pool:
    """The samples that a partition may assign.

    Attributes
    ----------
    labels : (n,) int64
        Their labels.
    classes : int
        How many classes there are.
    positions : (n,) int64
        Their positions in the training set.
    writers : (n,) int64 or None
        The writer of each sample, if the dataset names writers.
    writer_names : tuple of str or None
        Names of writers 0, 1, ...
    """

    labels: IntArray
    classes: int
    positions: IntArray
    writers: IntArray | None = None
    writer_names: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        labels: npt.ArrayLike,
        classes: int | None = None,
        writers: npt.ArrayLike | None = None,
        writer_names: tuple[str, ...] | None = None,
    ) -> Pool:
        """Check the labels of a whole training set and make a pool of it.

        >>> Pool.of([0, 1, 1]).counts
        array([1, 2])
        """
        array = np.asarray(labels)
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise InputError(
                f"Labels must be a non-empty one-dimensional array of integers. Got shape {array.shape}, {array.dtype}."
            )
        low, high = int(array.min()), int(array.max())
        if classes is None:
            classes = high + 1
        if low < 0 or high >= classes:
            raise InputError(f"Labels must be in 0 .. {classes - 1} for {classes} classes. Got {low} .. {high}.")
        owners = None if writers is None else np.asarray(writers)
        if owners is not None and (owners.shape != array.shape or owners.dtype.kind not in "iu" or owners.min() < 0):
            raise InputError(
                f"Writers must be non-negative integers, one per label ({len(array)}). Got shape {owners.shape}, "
                f"{owners.dtype}."
            )
        owners = None if owners is None else owners.astype(np.int64)
        return cls(array.astype(np.int64), classes, np.arange(len(array), dtype=np.int64), owners, writer_names)

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def counts(self) -> IntArray:
        """How many samples each class has (classes,)."""
        return np.bincount(self.labels, minlength=self.classes)

    def without(self, places: IntArray) -> Pool:
        """Return the pool without the samples at ``places`` of this pool."""
        keep = np.ones(len(self), dtype=bool)
        keep[places] = False
        return dataclasses.replace(
            self,
            labels=self.labels[keep],
            positions=self.positions[keep],
            writers=None if self.writers is None else self.writers[keep],
        )


@dataclass(frozen=True, eq=False)
class Assignment:
    """The result of a partition: places in the pool, client after client.

    Attributes
    ----------
    places : (total,) int64
        Places in the pool, client-major.
    offsets : (N + 1,) int64
        Where each client begins.
    traits : mapping
        Values drawn for each client, (N,) arrays by name.
    remarks : tuple of str
        Notes for the user.
    names : tuple of str or None
        The clients' names, if the data name them.
    """

    places: IntArray
    offsets: IntArray
    traits: Mapping[str, AnyArray] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None


class Partition(NamedPart):
    """A way to divide a training set among clients: frozen parameters and one pure function."""

    by_class: ClassVar[bool] = True  # whether it uses classes, which not every task has

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Divide the pool, with random numbers only from ``rng``.

        Raises ScenarioError if the constraints cannot be met.
        """
        raise NotImplementedError(type(self).__name__)

    def deal(
        self,
        pool: Pool,
        counts: IntArray,
        rng: np.random.Generator,
        *,
        replacement: bool = False,
        traits: Mapping[str, AnyArray] | None = None,
        remarks: tuple[str, ...] = (),
        hint: str = "fewer clients or fewer samples per client fit",
    ) -> Assignment:
        """Give each client ``counts`` random samples of each class.

        Parameters
        ----------
        pool : Pool
            The samples to assign.
        counts : (N, classes) int
            How many samples of each class each client gets.
        rng : Generator
            The source of all random numbers.
        replacement : bool
            Draw every sample independently; otherwise no sample is used twice.
        traits, remarks
            For the assignment.
        hint : str
            The hint of the error if a class has too few samples.
        """
        clients, classes = counts.shape
        wanted = counts.sum(axis=0)
        have = pool.counts
        # With replacement, one sample of a class is enough for any number of draws.
        short = (wanted > 0) & (have == 0) if replacement else wanted > have
        if short.any():
            worst = int(np.argmax(wanted - have))
            raise ScenarioError(
                f"The partition {self.name!r} wants {int(wanted[worst]):,} samples of class {worst}, but the training "
                f"set has {int(have[worst]):,}.",
                hint=hint,
            )
        # Class by class, so that each class needs one permutation and not one for each client.
        by_class = np.argsort(pool.labels, kind="stable")
        starts = np.concatenate([[0], np.cumsum(have)])
        chosen, owners = [], []
        client = np.arange(clients, dtype=np.int64)
        for c in range(classes):
            if wanted[c] == 0:
                continue
            members = by_class[starts[c] : starts[c + 1]]
            if replacement:
                chosen.append(members[rng.integers(0, len(members), int(wanted[c]))])
            else:
                chosen.append(rng.permutation(members)[: wanted[c]])
            owners.append(np.repeat(client, counts[:, c]))
        owner = np.concatenate(owners) if owners else np.zeros(0, np.int64)
        places = (np.concatenate(chosen) if chosen else np.zeros(0, np.int64))[np.argsort(owner, kind="stable")]
        offsets = np.concatenate([[0], np.cumsum(counts.sum(axis=1))]).astype(np.int64)
        return Assignment(places, offsets, traits or {}, remarks)

    def equal_size(self, pool: Pool, clients: int, samples: int | None) -> int:
        """Return the number of samples per client: ``samples``, or the largest number that all clients can have."""
        most = len(pool) // clients
        if samples is None:
            if most == 0:
                raise ScenarioError(
                    f"The partition {self.name!r} has {clients:,} clients for {len(pool):,} samples, less than one "
                    "each.",
                    hint=f"at most {len(pool):,} clients fit",
                )
            return most
        if samples > most:
            raise ScenarioError(
                f"The partition {self.name!r} wants {clients:,} clients x {samples:,} samples = {clients * samples:,}, "
                f"but the training set has {len(pool):,}.",
                hint=f"at most {most:,} samples per client fit" if most else f"at most {len(pool):,} clients fit",
            )
        return samples


def dirichlet(rng: np.random.Generator, concentration: FloatArray) -> FloatArray:
    """Draw one Dirichlet vector per row of ``concentration`` (N, B), in log space.

    With a concentration of 0.01, most Gamma draws underflow to exactly 0, sometimes all of a row. The logarithm
    log G(a) = log G(a + 1) + log(U) / a never underflows. Entries with concentration 0 get probability 0.

    >>> float(dirichlet(np.random.default_rng(0), np.full((3, 10), 1e-9)).sum())
    3.0
    """
    positive = concentration > 0
    # For a smaller concentration the division by it overflows. One entry has all the probability long before.
    safe = np.where(positive, np.maximum(concentration, 1e-12), 1.0)
    logs = np.log(rng.standard_gamma(safe + 1.0)) + np.log1p(-rng.random(safe.shape)) / safe
    logs = np.where(positive, logs, -np.inf)
    shares = np.exp(logs - logs.max(axis=1, keepdims=True))
    result: FloatArray = shares / shares.sum(axis=1, keepdims=True)
    return result


def round_to_total(shares: FloatArray, total: int) -> IntArray:
    """Round ``shares`` (non-negative, with a positive sum) to integers that add up to ``total``, by largest remainder.

    >>> round_to_total(np.array([1.4, 1.4, 1.2]), 4)
    array([2, 1, 1])
    """
    # Rounding each share by itself would miss the total, and a class would lack or keep samples.
    exact = shares * (total / float(shares.sum()))
    whole = np.floor(exact).astype(np.int64)
    missing = total - int(whole.sum())
    if missing > 0:
        order = np.argsort(whole - exact, kind="stable")  # largest remainder first
        whole[order[:missing]] += 1
    elif missing < 0:  # rounding errors pushed a value up to the next integer
        order = np.argsort(exact - whole, kind="stable")
        order = order[whole[order] > 0]
        whole[order[:-missing]] -= 1
    return whole


def nearest(value: float) -> int:
    """Round half up, unlike Python, which rounds 2.5 to 2."""
    return int(np.floor(value + 0.5))

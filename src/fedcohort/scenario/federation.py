"""A simulated federation: which training samples belong to which client, and with which labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray, freeze
from fedcohort.scenario.groups import Groups

Int32Array = npt.NDArray[np.int32]

Part = Literal["train", "validation", "all"]


class _ClientSamples(NamedTuple):
    """The samples of one client; views into the federation's arrays, the validation samples last."""

    train: Int32Array  # positions in the training set of the samples that the client trains on
    held_out: Int32Array  # positions of its own validation samples
    labels: Int32Array  # of both, as the client sees them


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients as slices of one index array, client after client.

    Client k owns ``indices[offsets[k]:offsets[k + 1]]`` in random order. Its last ``validation[k]`` samples are its
    local validation set. All arrays are read-only.

    Attributes
    ----------
    indices : (total,) int32
        Positions in the training set, client-major. A position may occur more than once if the scenario draws with
        replacement.
    offsets : (N + 1,) int64
        Where each client begins; ``offsets[0] == 0`` and ``offsets[N] == total``.
    labels : (total,) int32
        Labels as the clients see them, with any label noise.
    true_labels : (total,) int32
        Labels of the dataset.
    classes : int
        How many classes there are; labels are 0 .. classes - 1.
    validation : (N,) int64
        How many of each client's last samples are held out for local validation.
    noise_rate : (N,) float64
        The exact share of wrong labels of each client.
    server_validation : (v,) int32
        Positions in the training set that the server keeps; no client owns them.
    traits : mapping of str to (N,) arrays
        Values that the scenario drew for each client ("beta", "dominant_class", ...).
    remarks : tuple of str
        Notes for the user on how it was built ("2 draws left a client too small and were repeated").
    client_names : tuple of str or None
        Names from the data (writers); None numbers the clients.
    groups : Groups or None
        Which clients are evaluated together; None if samples have no classes and clients no test data of their own.

    Examples
    --------
    >>> federation = Federation.of([[0, 1, 2], [3, 4]], labels=[0, 0, 1, 1, 1], classes=2)
    >>> federation
    Federation(clients=2, samples=5, classes=2)
    >>> federation.label_counts()
    array([[2, 1],
           [0, 2]])
    >>> federation.indices[federation.owner == 1]
    array([3, 4], dtype=int32)
    """

    indices: Int32Array
    offsets: IntArray
    labels: Int32Array
    true_labels: Int32Array
    classes: int
    validation: IntArray
    noise_rate: FloatArray
    server_validation: Int32Array
    traits: Mapping[str, AnyArray] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    client_names: tuple[str, ...] | None = None
    groups: Groups | None = None

    def __post_init__(self) -> None:
        # All runs of a lock-step group share these arrays.
        for field in ("indices", "offsets", "labels", "true_labels", "validation", "noise_rate", "server_validation"):
            freeze(getattr(self, field))
        for trait in self.traits.values():
            freeze(trait)

    @classmethod
    def of(
        cls, parts: list[list[int]] | list[npt.NDArray[np.integer]], labels: npt.ArrayLike, classes: int
    ) -> Federation:
        """Build a federation without noise or validation.

        ``parts`` has a list of positions per client, ``labels`` (n,) are those of the whole training set.
        """
        all_labels = np.asarray(labels, dtype=np.int32)
        sizes = [len(part) for part in parts]
        indices = np.concatenate([np.asarray(part, dtype=np.int32) for part in parts] or [np.zeros(0, np.int32)])
        return cls(
            indices=indices,
            offsets=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64),
            labels=all_labels[indices],
            true_labels=all_labels[indices],
            classes=classes,
            validation=np.zeros(len(parts), np.int64),
            noise_rate=np.zeros(len(parts)),
            server_validation=np.zeros(0, np.int32),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"Federation(clients={len(self)}, samples={len(self.indices)}, classes={self.classes})"

    @cached_property
    def sizes(self) -> IntArray:
        """Number of samples of each client (N,), including validation."""
        return freeze(np.diff(self.offsets))

    @cached_property
    def train_sizes(self) -> IntArray:
        """Number of samples that each client trains on (N,)."""
        return freeze(self.sizes - self.validation)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Name of each client: from the data, or its number."""
        # Rules, journals and reports know clients by name, so that they mean the same client in another run.
        return tuple(map(str, range(len(self)))) if self.client_names is None else self.client_names

    @cached_property
    def owner(self) -> Int32Array:
        """Client of each entry of ``indices`` (total,)."""
        return freeze(np.repeat(np.arange(len(self), dtype=np.int32), self.sizes))

    @cached_property
    def main_class(self) -> IntArray:
        """The most frequent true class of each client (N,); the smallest one in a tie."""
        return freeze(self.label_counts(part="all", true=True).argmax(axis=1).astype(np.int64))

    @cached_property
    def holds_rare(self) -> BoolArray:
        """Whether a third or more of each client's samples (N,) are of classes with less than 3/4 of the mean size."""
        counts = self.label_counts(part="all", true=True)
        total = counts.sum(axis=0)
        # Compared with the mean class and not the largest, so that a balanced federation has no rare class.
        rare = total < 0.75 * total.mean()
        return freeze(3 * counts[:, rare].sum(axis=1) >= np.maximum(counts.sum(axis=1), 1))

    def client(self, k: int) -> _ClientSamples:
        """Return the samples of client ``k`` as views. The Flower and FLARE apps of ``flower new`` train on them."""
        start, end = int(self.offsets[k]), int(self.offsets[k + 1])
        cut = end - int(self.validation[k])
        return _ClientSamples(self.indices[start:cut], self.indices[cut:end], self.labels[start:end])

    def is_validation(self) -> BoolArray:
        """Return which entries of ``indices`` are for local validation (total,)."""
        return np.arange(len(self.indices)) >= np.repeat(self.offsets[1:] - self.validation, self.sizes)

    def label_counts(self, *, part: Part = "train", true: bool = False) -> IntArray:
        """Count the labels of every client.

        Parameters
        ----------
        part : {"train", "validation", "all"}
            Which of the client's samples count.
        true : bool
            Count the dataset's labels instead of those that the client sees.

        Returns
        -------
        (N, classes) int64
        """
        labels = self.true_labels if true else self.labels
        # One bincount over (client, class) cells; int64, because clients times classes may exceed int32.
        cells = self.owner.astype(np.int64) * self.classes + labels
        if part != "all":
            held_out = self.is_validation()
            cells = cells[held_out if part == "validation" else ~held_out]
        return np.bincount(cells, minlength=len(self) * self.classes).reshape(len(self), self.classes)

    def describe(self) -> str:
        """Return a summary in a few lines: sizes, classes, skewness, noise and validation."""
        sizes = self.sizes
        counts = self.label_counts(part="all", true=True)
        present = (counts > 0).sum(axis=1)
        distinct = len(np.unique(self.indices))
        used = f"{len(self.indices):,} samples"
        if distinct != len(self.indices):
            used += f" ({distinct:,} distinct)"
        median, low, high = int(np.median(sizes)), int(sizes.min()), int(sizes.max())
        lines = [
            f"{len(self):,} clients, {used}, {self.classes} classes",
            f"samples per client  {low:,} to {high:,}, median {median:,}",
            f"classes per client  {present.min()} to {present.max()}, median {int(np.median(present))}",
            f"skewness            {self.skewness().mean():.3f} mean squared distance to the global class distribution",
        ]
        if self.noise_rate.any():
            lines.append(
                f"wrong labels        {self.noise_rate.mean():.1%} per client on average, "
                f"{self.noise_rate.min():.1%} to {self.noise_rate.max():.1%}"
            )
        if self.validation.any():
            lines.append(f"local validation    {int(self.validation.sum()):,} samples")
        if len(self.server_validation):
            lines.append(f"server validation   {len(self.server_validation):,} samples, owned by no client")
        lines += [f"note                {remark}" for remark in self.remarks]
        return "\n".join(lines)

    def skewness(self) -> FloatArray:
        """Squared distance of each client's true class distribution to that of all clients together (N,)."""
        counts = self.label_counts(part="all", true=True).astype(np.float64)
        whole = counts.sum(axis=0) / max(counts.sum(), 1.0)
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
        # From the whole and not from uniform: a federation of which some classes are rare is not skewed by that.
        distance: FloatArray = ((shares - whole) ** 2).sum(axis=1)
        return distance

"""Use data that a partitioner of flwr_datasets has divided."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from fedcohort.core import rng
from fedcohort.core.arrays import AnyArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.scenario.predefined import Custom
from fedcohort.simulate.data.dataset import Dataset, from_arrays


class _Partitioner(Protocol):
    """The part of flwr_datasets' partitioner interface that is used here."""

    @property
    def num_partitions(self) -> int:
        """How many partitions there are."""
        ...

    def load_partition(self, partition_id: int) -> Any:
        """Return a partition in which ``partition[column]`` is a sequence."""
        ...


def from_flwr_partitioner(
    partitioner: _Partitioner,
    image_key: str = "image",
    label_key: str = "label",
    *,
    test: Any | None = None,
    test_share: float = 0.2,
    seed: int = 0,
    classes: int | None = None,
    name: str = "flwr",
) -> tuple[Dataset, Custom]:
    """Make a dataset and a partition with a partitioner's clients.

    Parameters
    ----------
    partitioner : _Partitioner
        Any partitioner of flwr_datasets with its dataset assigned.
    image_key, label_key : str
        The columns of samples and labels.
    test : dataset, optional
        A test set with the same columns. Without one, ``test_share`` of every client's samples is held out.
    test_share : float
        How much to hold out without a test set, in (0, 1).
    seed : int
        Seed of that choice.
    classes : int, optional
        How many classes there are; default: the largest label + 1.
    name : str
        Name of the dataset.

    Returns
    -------
    Dataset, Custom
        The samples, and the partition that assigns them to the clients: ``Scenario(partition=custom)``.
    """
    count = int(partitioner.num_partitions)
    if count < 1:
        raise InputError(f"The partitioner must have at least one partition. Got {count}.")
    if test is None and not 0 < test_share < 1:
        raise InputError(f"'test_share' must be in (0, 1). Got {test_share!r}.")
    draw = rng.stream(seed, rng.DATA)
    images: dict[bool, list[AnyArray]] = {False: [], True: []}
    labels: dict[bool, list[IntArray]] = {False: [], True: []}
    sizes = []
    for k in range(count):
        x, y = columns_of(partitioner.load_partition(k), image_key, label_key, f"partition {k} of the partitioner")
        held_out = np.zeros(len(y), dtype=bool)
        if test is None:
            held_out[draw.permutation(len(y))[: round(test_share * len(y))]] = True
        for is_test in (False, True):
            images[is_test].append(x[held_out == is_test])
            labels[is_test].append(y[held_out == is_test])
        sizes.append(int((~held_out).sum()))
    if test is not None:
        x, y = columns_of(test, image_key, label_key, "the test set")
        images[True], labels[True] = [x], [y]
    arrays = [np.concatenate(parts) for parts in (images[False], labels[False], images[True], labels[True])]
    if classes is None:
        classes = 1 + max(int(arrays[1].max()), int(arrays[3].max(initial=0)))  # partitions need not hold every class
    dataset = from_arrays(*arrays, name=name, classes=classes)
    ends = np.cumsum(sizes)
    return dataset, Custom.of(np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True))


def columns_of(partition: Any, image_key: str, label_key: str, what: str) -> tuple[AnyArray, IntArray]:
    """Return a partition's samples and labels as arrays; images may be arrays or PIL images."""
    columns = []
    for key in (image_key, label_key):
        try:
            columns.append(partition[key])
        except (KeyError, ValueError, TypeError) as error:
            known = getattr(partition, "column_names", None) or list(getattr(partition, "keys", list)())
            raise InputError(
                f"There is no column {key!r} in {what}. Known: {', '.join(map(str, known)) or 'none'}.",
                hint="name the columns: image_key and label_key, or data.inputs, data.label and data.client",
            ) from error
    y = np.asarray(columns[1])
    if len(y) == 0:
        raise InputError(f"{what} is empty.")
    try:
        x = np.stack([np.asarray(image) for image in columns[0]])
    except ValueError as error:
        raise InputError(f"The samples in {what} differ in shape: {error}.") from error
    if x.shape[:1] != y.shape:
        raise InputError(f"{what} has {len(x)} samples and labels of shape {y.shape}.")
    return x, y

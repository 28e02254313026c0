"""Use data that a partitioner of flwr_datasets has divided."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from fedcohort.core.arrays import AnyArray, IntArray
from fedcohort.core.errors import InputError
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
) -> Dataset:
    """Make a dataset whose clients are the partitions of a partitioner.

    Parameters
    ----------
    partitioner : Partitioner
        Any partitioner of flwr_datasets with its dataset assigned.
    image_key, label_key : str
        The columns of samples and labels.
    test : dataset, optional
        A test set with the same columns. Without one, ``test_share`` of every class is held out.
    test_share, seed, classes, name
        As in :func:`~fedcohort.simulate.data.from_arrays`.
    """
    count = int(partitioner.num_partitions)
    if count < 1:
        raise InputError(f"The partitioner must have at least one partition. Got {count}.")
    parts = [
        columns_of(partitioner.load_partition(k), image_key, label_key, f"partition {k} of the partitioner")
        for k in range(count)
    ]
    # Client by client, in the order of the partitions.
    x, y = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    x_test, y_test = (None, None) if test is None else columns_of(test, image_key, label_key, "the test set")
    return from_arrays(
        x,
        y,
        x_test,
        y_test,
        name=name,
        test_share=test_share,
        seed=seed,
        classes=classes,
        writers=np.repeat(np.arange(count), [len(labels) for _, labels in parts]),
    )


def columns_of(partition: Any, image_key: str, label_key: str, what: str) -> tuple[AnyArray, IntArray]:
    """Return a partition's samples and labels as arrays; images may be arrays or PIL images."""
    # A partition of flwr_datasets has column_names, a mapping has keys.
    known = getattr(partition, "column_names", None) or list(getattr(partition, "keys", list)())
    for key in (image_key, label_key):
        if key not in known:
            raise InputError(
                f"There is no column {key!r} in {what}. Known: {', '.join(map(str, known)) or 'none'}.",
                hint="name the columns: image_key and label_key, or data.inputs, data.label and data.client",
            )
    # Labels first: decoding all images only to find that there are none would take minutes.
    y = np.asarray(partition[label_key])
    if len(y) == 0:
        raise InputError(f"{what} is empty.")
    try:
        x = np.stack([np.asarray(image) for image in partition[image_key]])
    except ValueError as error:
        raise InputError(f"The samples in {what} differ in shape: {error}.") from error
    if x.shape[:1] != y.shape:
        raise InputError(f"{what} has {len(x)} samples and labels of shape {y.shape}.")
    return x, y

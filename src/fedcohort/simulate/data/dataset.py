"""A dataset in memory, and how to make one from arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedcohort import rng
from fedcohort.arrays import AnyArray, BoolArray, IntArray
from fedcohort.errors import InputError


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training set and a test set.

    Attributes
    ----------
    name : str
        What it is called.
    x_train, x_test : (n, ...) arrays
        Samples: images as uint8 (n, H, W) or (n, H, W, channels), anything else as float32.
    y_train, y_test : (n,) int64
        Labels 0 .. classes - 1.
    classes : int
        How many classes there are.
    class_names : tuple of str
        What they are called.
    writers, writers_test : (n,) int64 or None
        Who produced each sample, where it is known.
    writer_names : tuple of str or None
        Names of writers 0, 1, ...
    source : str
        Where it came from.
    """

    name: str
    x_train: AnyArray
    y_train: IntArray
    x_test: AnyArray
    y_test: IntArray
    classes: int
    class_names: tuple[str, ...]
    writers: IntArray | None = None
    writers_test: IntArray | None = None
    writer_names: tuple[str, ...] | None = None
    source: str = "memory"

    def __post_init__(self) -> None:
        if self.classes < 1 or len(self.class_names) != self.classes:
            raise InputError(
                f"The dataset {self.name!r} has {self.classes} classes and {len(self.class_names)} class names."
            )
        for part in ("train", "test"):
            self._check_part(part)
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise InputError(
                f"Samples of the dataset {self.name!r} must have one shape. Got {self.x_train.shape[1:]} for training "
                f"and {self.x_test.shape[1:]} for testing."
            )
        for writers, labels in ((self.writers, self.y_train), (self.writers_test, self.y_test)):
            if writers is not None and writers.shape != labels.shape:
                raise InputError(
                    f"The dataset {self.name!r} must have one writer per sample. "
                    f"Got {writers.shape} for {labels.shape}."
                )
        if self.writer_names is not None and self.writers is not None:
            most = int(self.writers.max(initial=-1))
            if most >= len(self.writer_names):
                raise InputError(
                    f"The dataset {self.name!r} names {len(self.writer_names)} writers, one of its samples is by "
                    f"writer {most}."
                )

    def _check_part(self, part: str) -> None:
        x, y = getattr(self, f"x_{part}"), getattr(self, f"y_{part}")
        if x.ndim < 2 or y.ndim != 1 or len(x) != len(y) or len(y) == 0:
            raise InputError(
                f"The {part}ing samples of {self.name!r} must be (n, ...) with (n,) labels, n > 0. Got {x.shape} and "
                f"{y.shape}."
            )
        if x.dtype.kind not in "fiu" or y.dtype.kind not in "iu":
            raise InputError(
                f"The {part}ing samples of {self.name!r} must be numbers and their labels integers. Got {x.dtype} and "
                f"{y.dtype}."
            )
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            raise InputError(f"The {part}ing samples of {self.name!r} contain NaN or infinite numbers.")
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= self.classes:
            raise InputError(
                f"The {part}ing labels of {self.name!r} must be in 0 .. {self.classes - 1}. Got {low} .. {high}."
            )

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name!r}, train={len(self.y_train)}, test={len(self.y_test)}, shape={self.shape}, "
            f"classes={self.classes})"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x_train.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return int(self.x_train.nbytes + self.x_test.nbytes)


def every_fifth(labels: IntArray, share: float = 0.2) -> BoolArray:
    """Return a fixed stratified test split (n,): evenly spaced samples of every class, ``share`` of them.

    >>> every_fifth(np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1])).nonzero()[0]
    array([4, 9])
    """
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    rank = np.empty(len(labels), dtype=np.int64)
    rank[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    # the quota of the first r + 1 samples of a class has risen by one over that of the first r; the nudge keeps
    # 0.2 * 5, which is a hair below 1 in binary for other shares, on the right side
    picked: BoolArray = np.floor((rank + 1) * share + 1e-9) > np.floor(rank * share + 1e-9)
    return picked


def from_arrays(
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    x_test: npt.ArrayLike | None = None,
    y_test: npt.ArrayLike | None = None,
    *,
    name: str = "arrays",
    test_share: float = 0.2,
    seed: int = 0,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
    writers: npt.ArrayLike | None = None,
    writer_names: Sequence[str] | None = None,
) -> Dataset:
    """Make a dataset of any pair of arrays.

    Parameters
    ----------
    x : (n, ...) array
        Samples. Integers and floats other than uint8 become float32; images of uint8 stay as they are.
    y : (n,) array
        Labels, integers from 0.
    x_test, y_test : arrays, optional
        A test set. Without one, ``test_share`` of every class is held out, at random by ``seed``.
    name : str
        What to call it.
    test_share : float
        How much of every class to hold out where no test set is given, in (0, 1).
    seed : int
        Seed of that split.
    classes : int, optional
        How many classes there are; default: the largest label + 1.
    class_names : sequence of str, optional
        Default: the numbers.
    writers : (n,) int array, optional
        Who produced each sample.
    writer_names : sequence of str, optional
        Names of writers 0, 1, ...

    Examples
    --------
    >>> from_arrays(np.zeros((10, 3)), [0, 1] * 5)
    Dataset('arrays', train=8, test=2, shape=(3,), classes=2)
    """
    samples, labels = _samples(x), _labels(name, y)
    if samples.ndim < 2 or labels.ndim != 1 or len(samples) != len(labels) or len(labels) == 0:
        raise InputError(
            f"The arrays of {name!r} must be (n, ...) samples and (n,) labels, n > 0. Got {samples.shape} and "
            f"{labels.shape}."
        )
    if int(labels.min()) < 0:
        raise InputError(f"The labels of {name!r} must count from 0. Got {int(labels.min())}.")
    owners = None if writers is None else np.asarray(writers).astype(np.int64)
    owners_test: IntArray | None = None
    if x_test is None and y_test is None:
        if not 0 < test_share < 1:
            raise InputError(f"'test_share' must be in (0, 1). Got {test_share!r}.")
        if owners is not None and owners.shape != labels.shape:
            raise InputError(f"There must be one writer per label ({labels.shape}). Got {owners.shape}.")
        shuffled = rng.stream(seed, rng.DATA).permutation(len(labels))
        held_out = np.zeros(len(labels), dtype=bool)
        held_out[shuffled[every_fifth(labels[shuffled], test_share)]] = True
        if not held_out.any() or held_out.all():
            raise InputError(
                f"A test share of {test_share:g} leaves nothing to test on or to train with: {len(labels)} samples of "
                f"{len(np.unique(labels))} classes."
            )
        if owners is not None:
            owners, owners_test = owners[~held_out], owners[held_out]
        tests, test_labels = samples[held_out], labels[held_out]
        samples, labels = samples[~held_out], labels[~held_out]
    elif x_test is None or y_test is None:
        raise InputError("A test set needs both 'x_test' and 'y_test'; one of them is missing.")
    else:
        tests, test_labels = _samples(x_test), _labels(name, y_test)
    if classes is None:
        classes = 1 + max(int(labels.max()), int(test_labels.max(initial=0)))
    names = tuple(class_names) if class_names is not None else tuple(map(str, range(classes)))
    return Dataset(
        name=name,
        x_train=samples,
        y_train=labels,
        x_test=tests,
        y_test=test_labels,
        classes=classes,
        class_names=names,
        writers=owners,
        writers_test=owners_test,
        writer_names=None if writer_names is None else tuple(writer_names),
    )


def _samples(x: npt.ArrayLike) -> AnyArray:
    array = np.asarray(x)
    if array.dtype.kind not in "fiub":
        raise InputError(f"Samples must be numbers. Got an array of {array.dtype}.")
    return array if array.dtype == np.uint8 else array.astype(np.float32, copy=False)


def _labels(name: str, y: npt.ArrayLike) -> IntArray:
    array = np.asarray(y)
    if array.dtype.kind not in "iu":
        raise InputError(f"The labels of {name!r} must be integers. Got an array of {array.dtype}.")
    return array.astype(np.int64, copy=False)

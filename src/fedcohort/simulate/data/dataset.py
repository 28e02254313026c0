"""A dataset in memory, and how to make one from arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedcohort.core import rng
from fedcohort.core.arrays import AnyArray, BoolArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.core.text import short_repr
from fedcohort.core.validate import array as as_array
from fedcohort.core.validate import integer, number, one_of, text, texts

Target = Literal["class", "number", "token"]
REGRESSION_HINT = "to predict numbers: --task regression, in Python task='regression'"
MAX_CATEGORIES = 100  # different texts of a column, or numbers as labels, before they look like something else
_FEW_PER_CLASS = 10  # samples; with fewer for each of many labels, these are numbers rather than classes
_SHOWN = 5


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training set and a test set.

    Attributes
    ----------
    name : str
        Its name.
    x_train, x_test : (n, ...) arrays
        Samples: images as uint8 (n, H, W) or (n, H, W, channels), tokens and categories as int64 (n, length), anything
        else as float32.
    y_train, y_test : arrays
        Targets: labels 0 .. classes - 1 as (n,) integers; a token 0 .. classes - 1 for each position of a sequence as
        (n, length) integers; or numbers as (n, outputs) float32.
    classes : int
        How many classes (or tokens) there are; 0 if numbers are predicted.
    class_names : tuple of str
        Their names.
    writers, writers_test : (n,) int64 or None
        The writer of each sample, if known; the partition "natural" makes each writer a client.
    writer_names : tuple of str or None
        Names of writers 0, 1, ...
    source : str
        Where it came from.
    remarks : tuple of str
        Notes for the user, for example that labels were numbered or samples held out.
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
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        def require(valid: bool, problem: str, hint: str | None = None) -> None:
            if not valid:
                raise InputError(f"The dataset {self.name!r} cannot be used: {problem}.", hint=hint)

        # In this order each check may rely on those before it.
        train, test = (self.x_train, self.y_train, self.writers), (self.x_test, self.y_test, self.writers_test)
        for part, (x, y, writers) in (("training", train), ("test", test)):
            shaped = x.ndim >= 2 and y.ndim in (1, 2) and len(x) == len(y) > 0
            require(shaped, f"its {part} set must be samples (n, ...) and labels (n,), n > 0. Got {x.shape}, {y.shape}")
            numbers = x.dtype.kind in "fiu" and (y.dtype.kind in "iu" or (y.dtype.kind == "f" and y.ndim == 2))
            require(
                numbers,
                f"its {part} samples must be numbers, and labels integers. Got {x.dtype}, {y.dtype} {y.shape}",
                "numbers to be predicted are (n, outputs) float32, as from_arrays(..., target='number') makes",
            )
            for content, array, first in (("samples", x, self.x_train), ("labels", y, self.y_train)):
                # Bytes are standardised later, floats are not: a mixture would be on two scales.
                require(
                    array.shape[1:] == first.shape[1:] and array.dtype.kind == first.dtype.kind,
                    f"its {content} must have one type and one shape. Got {first.dtype} {first.shape[1:]} for training "
                    f"and {array.dtype} {array.shape[1:]} for testing",
                    "give samples both as uint8, or both as float32 on one scale",
                )
                finite = array.dtype.kind != "f" or bool(np.isfinite(array).all())
                require(finite, f"its {part} {content} contain NaN or infinite numbers")
            low, high = y.min(), y.max()
            if self.target != "number":
                known = 0 <= low <= high < self.classes
                require(known, f"its {part} labels must be in 0 .. {self.classes - 1}. Got {low} .. {high}")
            if writers is not None:
                require(writers.shape == y.shape[:1], f"it must name one writer per sample. Got {writers.shape}")
        named = len(self.class_names)
        require(named == self.classes, f"it has {self.classes} classes and {named} class names")
        if self.writer_names is not None and self.writers is not None:
            known, last = len(self.writer_names), int(self.writers.max(initial=-1))
            require(last < known, f"it names {known} writers, but one of its samples is by writer {last}")

    def __deepcopy__(self, memo: object) -> Dataset:
        """Return itself, because a dataset is immutable and may be large."""
        return self

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
    def target(self) -> Target:
        """What is predicted: a class, numbers, or a token for each position of a sequence."""
        if self.y_train.dtype.kind == "f":
            return "number"
        return "class" if self.y_train.ndim == 1 else "token"

    @property
    def outputs(self) -> int:
        """How many outputs a model has for a sample, or for each position of a sequence."""
        return int(self.y_train.shape[1]) if self.target == "number" else self.classes

    @property
    def labels(self) -> IntArray:
        """The class of each training sample (n,), for partitions; all 0 if no class is predicted."""
        return self.y_train if self.target == "class" else np.zeros(len(self.y_train), dtype=np.int64)


def rank_within(groups: IntArray) -> IntArray:
    """Return the rank of each sample (n,) within its group, in the order of the data.

    >>> rank_within(np.array([1, 0, 1, 1]))
    array([0, 0, 1, 2])
    """
    order = np.argsort(groups, kind="stable")
    counts = np.bincount(groups)
    rank = np.empty(len(groups), dtype=np.int64)
    rank[order] = np.arange(len(groups)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank


def stratified_test(labels: IntArray, share: float = 0.2) -> BoolArray:
    """Return which samples (n,) are for testing: a ``share`` of each class, evenly spaced.

    >>> stratified_test(np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1])).nonzero()[0]
    array([4, 9])
    """
    rank = rank_within(labels)
    # A sample is chosen if it raises the quota of its class. The margin is for products such as share * 5 that
    # rounding puts just below an integer.
    chosen: BoolArray = np.floor((rank + 1) * share + 1e-9) > np.floor(rank * share + 1e-9)
    return chosen


def from_arrays(
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    x_test: npt.ArrayLike | None = None,
    y_test: npt.ArrayLike | None = None,
    *,
    name: str = "arrays",
    target: Target = "class",
    integers: bool = False,
    test_share: float = 0.2,
    seed: int = 0,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
    writers: npt.ArrayLike | None = None,
    writer_names: Sequence[str] | None = None,
) -> Dataset:
    """Make a dataset from arrays.

    Parameters
    ----------
    x : (n, ...) array
        Samples. Images of uint8 stay as they are; other numbers become float32.
    y : (n,) or (n, ...) array
        Targets. Classes: integers or texts (also a pandas column), which are numbered in order; with ``classes`` or
        ``class_names`` these are the numbers already. Numbers: (n,) or (n, outputs). Tokens: (n, length) integers.
    x_test, y_test : arrays, optional
        A test set. Without one, ``test_share`` of every class is held out, at random by ``seed``.
    name : str
        Name of the dataset.
    target : "class", "number" or "token"
        What is predicted.
    integers : bool
        Whether integer samples stay integers (tokens, categories). With tokens as the target, they always do.
    test_share : float
        How much of each class to hold out without a test set, in (0, 1).
    seed : int
        Seed of that split.
    classes : int, optional
        How many classes or tokens there are; default: as many as occur, or the largest token + 1.
    class_names : sequence of str, optional
        Default: the labels.
    writers : (n,) array, optional
        The writer of each sample: integers from 0 or, without ``writer_names``, any integers or texts.
    writer_names : sequence of str, optional
        Names of writers 0, 1, ...

    Examples
    --------
    >>> from_arrays(np.zeros((10, 3)), [0, 1] * 5)
    Dataset('arrays', train=8, test=2, shape=(3,), classes=2)
    >>> from_arrays(np.zeros((10, 3)), ["no", "yes"] * 5, writers=["ann", "bob"] * 5).writer_names
    ('ann', 'bob')
    """
    text(name, "'name'")
    one_of(target, ("class", "number", "token"), f"The 'target' of {name!r}")
    integer(seed, "'seed'", least=0)
    if not 0 < number(test_share, "'test_share'") < 1:
        raise InputError(f"'test_share' must be in (0, 1). Got {test_share!r}.")
    if (x_test is None) != (y_test is None):
        raise InputError("A test set needs both 'x_test' and 'y_test'; one of them is missing.")
    samples = [_samples(name, part, integers or target == "token") for part in (x, x_test) if part is not None]
    targets = [_values(name, "label", part) for part in (y, y_test) if part is not None]
    remarks: tuple[str, ...] = ()
    if target == "number":
        if any(part.dtype.kind not in "fiub" for part in targets):
            raise InputError(f"The numbers that {name!r} predicts must be numbers. Got an array of {targets[0].dtype}.")
        classes, targets = 0, [part.astype(np.float32).reshape(len(part), -1) for part in targets]
    elif target == "class" and classes is None and class_names is None:
        targets, class_names, remarks = _number_labels(name, targets)
        classes = len(class_names)
    else:
        if any(part.dtype.kind not in "iu" or (part.ndim != 1) is (target == "class") for part in targets):
            raise InputError(
                f"The labels of {name!r} must be integers, {'(n,)' if target == 'class' else '(n, length)'}. Got "
                f"{targets[0].shape} of {targets[0].dtype}."
            )
        targets = [part.astype(np.int64, copy=False) for part in targets]
        class_names = None if class_names is None else texts(class_names, "'class_names'")
        if classes is None:
            largest = max(int(part.max(initial=-1)) for part in targets)
            classes = largest + 1 if class_names is None else len(class_names)
        integer(classes, "'classes'", least=0)
    # Of training samples only: a separate test set is the server's.
    owners = None
    if writers is not None:
        owners, writer_names = _owners(name, writers, writer_names)
    # Checked before it is split, so that errors refer to the user's arrays.
    unsplit = Dataset(
        name=name,
        x_train=samples[0],
        y_train=targets[0],
        x_test=samples[-1],
        y_test=targets[-1],
        classes=classes,
        class_names=tuple(map(str, range(classes)) if class_names is None else class_names),
        writers=owners,
        writer_names=None if writer_names is None else texts(writer_names, "'writer_names'"),
        remarks=remarks,
    )
    return unsplit if x_test is not None else _hold_out(unsplit, test_share, seed)


def _number_labels(name: str, parts: list[AnyArray]) -> tuple[list[AnyArray], list[str], tuple[str, ...]]:
    """Return the labels for training and testing as classes 0, 1, ..., their names, and a remark if that changed them.

    >>> _number_labels("zoo", [np.array(["eel", "cat"])])[1:]
    (['cat', 'eel'], ("the labels of zoo were numbered: 'cat' is 0, 'eel' is 1",))
    """
    # uint8 and int64 are the same kind. uint64 does not fit into int64 and is left unchanged.
    if all(part.dtype.kind in "iu" and part.dtype != np.uint64 for part in parts):
        parts = [part.astype(np.int64) for part in parts]
    if any(part.dtype.kind not in "iuUb" or part.ndim != 1 or part.dtype.kind != parts[0].dtype.kind for part in parts):
        got = " and ".join(f"{part.shape} of {part.dtype}" for part in parts)
        raise InputError(
            f"The labels of {name} must be classes: all whole numbers or all texts, one per sample. Got {got}.",
            hint=REGRESSION_HINT,
        )
    whole = np.concatenate(parts)
    values, codes = np.unique(whole, return_inverse=True)
    if whole.dtype.kind in "iu" and len(values) > MAX_CATEGORIES and len(whole) < _FEW_PER_CLASS * len(values):
        raise InputError(
            f"The labels of {name} are {len(values):,} different numbers in {len(whole):,} samples, too many for "
            "classes.",
            hint=f"{REGRESSION_HINT}; if they are classes, store them as text",
        )
    unseen = np.setdiff1d(values, parts[0])
    if len(unseen):
        raise InputError(f"The label {str(unseen[0])!r} of {name} is only in the test set, so it cannot be learned.")
    names = [str(value) for value in values.tolist()]
    remark: tuple[str, ...] = ()
    if names != [str(i) for i in range(len(names))]:
        shown = ", ".join(f"{label!r} is {i}" for i, label in enumerate(names[:_SHOWN]))
        remark = (f"the labels of {name} were numbered: {shown}{', ...' if len(names) > _SHOWN else ''}",)
    return np.split(codes.astype(np.int64), [len(parts[0])])[: len(parts)], names, remark


def _hold_out(data: Dataset, share: float, seed: int) -> Dataset:
    """Return the dataset with a share of its training samples as test set, of every class if there are classes."""
    # At random, because rows of a file are often sorted by time or class; by class, so that rare ones are tested too.
    order = rng.stream(seed, rng.DATA).permutation(len(data.labels))
    held_out = np.zeros(len(order), dtype=bool)
    held_out[order[stratified_test(data.labels[order], share)]] = True
    if not held_out.any() or held_out.all():
        raise InputError(
            f"A test share of {share:g} leaves {data.name!r} nothing to test on, or to train on: {len(order)} samples "
            f"of {len(np.unique(data.labels))} classes."
        )
    each = " of every class" if data.target == "class" else ""
    count = int(held_out.sum())
    return replace(
        data,
        x_train=data.x_train[~held_out],
        y_train=data.y_train[~held_out],
        x_test=data.x_train[held_out],
        y_test=data.y_train[held_out],
        writers=None if data.writers is None else data.writers[~held_out],
        writers_test=None if data.writers is None else data.writers[held_out],
        remarks=(
            *data.remarks,
            f"{data.name} has no test set: {share:.0%}{each} is held out for testing, at random ({count:,} samples)",
        ),
    )


def _samples(name: str, x: npt.ArrayLike, integers: bool) -> AnyArray:
    array = as_array(x, f"The samples of {name!r}", "an array whose rows have the same length")
    if array.dtype.kind not in "fiub":
        raise InputError(
            f"Samples must be numbers. Got an array of {array.dtype}.",
            hint="from_pandas accepts a frame with columns of text" if hasattr(x, "columns") else None,
        )
    if integers:
        if array.dtype.kind not in "iu":
            raise InputError(
                f"The samples of {name!r} must be integers to stay integers. Got an array of {array.dtype}."
            )
        return array.astype(np.int64, copy=False)
    return array if array.dtype == np.uint8 else array.astype(np.float32, copy=False)


def _values(name: str, content: str, values: npt.ArrayLike) -> AnyArray:
    """Return labels or writers as an array of texts or numbers, even if they are objects, as in pandas."""
    array = as_array(values, f"The {content}s of {name!r}")
    if array.dtype.kind != "O":
        return array
    listed = array.ravel().tolist()
    # Missing values are found by their text, because pandas' NA and NaT need pandas, and NaN != NaN.
    nothing = ("None", "nan", "np.float64(nan)", "<NA>", "NaT")
    missing = [i for i, value in enumerate(listed) if not isinstance(value, str) and short_repr(value) in nothing]
    if missing:
        raise InputError(
            f"The {content} is missing in {len(missing):,} of {len(listed):,} samples of {name!r} (first: sample "
            f"{missing[0]}).",
            hint="complete or remove these samples",
        )
    kinds = {type(value) for value in listed}
    if kinds == {str} or (kinds and all(issubclass(kind, (int, np.integer)) for kind in kinds)):
        return np.array(listed).reshape(array.shape)
    got = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise InputError(f"The {content}s of {name!r} must be all strings or all whole numbers. Got {got}.")


def _owners(name: str, writers: npt.ArrayLike, names: Sequence[str] | None) -> tuple[IntArray, Sequence[str] | None]:
    """Return the writers as numbers (n,), and their names."""
    array = _values(name, "writer", writers)
    if array.dtype.kind not in "iuU" or array.ndim != 1:
        raise InputError(
            f"The writers of {name!r} must be integers or texts, one per sample. Got {array.shape} of {array.dtype}."
        )
    if names is not None and (array.dtype.kind == "U" or (array.size and int(array.min()) < 0)):
        raise InputError(f"'writer_names' of {name!r} is for writers given as numbers from 0. Got {array[0]!r}.")
    if names is not None:
        return array.astype(np.int64), names
    known, codes = np.unique(array, return_inverse=True)
    # Writers 0, 1, ... need no names, because clients without names are called by their numbers.
    dense = array.dtype.kind != "U" and np.array_equal(known, np.arange(len(known)))
    return codes.astype(np.int64), None if dense else tuple(str(value) for value in known.tolist())

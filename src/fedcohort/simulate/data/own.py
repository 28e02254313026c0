"""The user's own data: a table (CSV, Parquet), an npz archive, a folder of arrays, flwr_datasets, or memory."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from fedcohort.core.archives import DAMAGE, ArchiveError, array_shapes, check_parquet, read_arrays
from fedcohort.core.arrays import AnyArray, BoolArray
from fedcohort.core.errors import DataError, FedcohortError, InputError, MissingExtraError
from fedcohort.core.params import Boolean, Interval, OneOf, Optional, Sequence, Text, param
from fedcohort.core.registry import nearest
from fedcohort.core.text import short_repr
from fedcohort.core.validate import integer, number, text, texts
from fedcohort.simulate.arrow import arrow
from fedcohort.simulate.data.dataset import Dataset, Target, from_arrays
from fedcohort.simulate.data.partitioner import columns_of
from fedcohort.simulate.data.sources import DATASETS, Source
from fedcohort.simulate.memory_check import memory_limit

_TABLES = (".csv", ".parquet")
_ARRAYS = ("x_train", "y_train", "x_test", "y_test", "clients", "client_names", "class_names")
_FLWR = "flwr:"
_SHOWN = 5


def data_section(name: str) -> dict[str, str]:
    """Return the section ``[data]`` for a name, a path or ``flwr:NAME``.

    >>> data_section("digits"), data_section("flwr:ylecun/mnist")
    ({'name': 'digits'}, {'name': 'flwr', 'dataset': 'ylecun/mnist'})
    >>> data_section("people.csv")
    {'name': 'file', 'path': 'people.csv'}
    """
    if name.startswith(_FLWR):
        return {"name": "flwr", "dataset": name.removeprefix(_FLWR)}
    if ":" in name or name in DATASETS:
        return {"name": name}
    is_path = "/" in name or os.sep in name or bool(Path(name).suffix) or os.path.exists(name)
    return {"name": "file", "path": name} if is_path else {"name": name}


class InMemory(Source):
    """A dataset in memory; an experiment keeps a copy of it in its directory."""

    name: ClassVar[str] = "memory"

    def __init__(self, dataset: Dataset) -> None:
        # The copy must have the same names when it is read again.
        if dataset.writers is not None and dataset.writer_names is None:
            names = tuple(map(str, range(int(dataset.writers.max()) + 1)))
            dataset = dataclasses.replace(dataset, writer_names=names)
        self.dataset = dataset

    def names_clients(self, folder: str | os.PathLike[str] | None = None) -> bool:
        """Whether it names the client of each sample."""
        return self.dataset.writers is not None

    def load(self, folder: str | os.PathLike[str] | None = None, download: bool = False) -> Dataset:
        """Return it."""
        return self.dataset


def to_npz(dataset: Dataset) -> bytes:
    """Return a dataset as the npz archive that the source "file" reads."""
    arrays: dict[str, AnyArray] = {
        "x_train": dataset.x_train,
        "y_train": dataset.y_train,
        "x_test": dataset.x_test,
        "y_test": dataset.y_test,
        "class_names": np.array(dataset.class_names, dtype=np.str_),
    }
    if dataset.writers is not None:
        arrays["clients"] = dataset.writers
    if dataset.writer_names is not None:
        arrays["client_names"] = np.array(dataset.writer_names, dtype=np.str_)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


@DATASETS.register("file")
@dataclass(frozen=True, kw_only=True)
class OwnFile(Source):
    """Your own data: a CSV or Parquet file, an npz archive, or a folder of x_train.npy, y_train.npy, ...

    A table has one row per sample: one column is the label, one may name the client of a sample, and all others are
    features. An archive or folder has ``x_train`` and ``y_train``, and may have ``x_test`` and ``y_test``, ``clients``
    (the client of each training sample), ``client_names`` and ``class_names``.
    """

    path: str = param(dataclasses.MISSING, Text(), "the file or folder; data.folder, or the current one, if relative")
    test: str | None = param(None, Optional(Text()), "a table for testing; without one a share is held out")
    label: str = param("label", Text(), "of a table: the column that is predicted")
    client: str | None = param(None, Optional(Text()), "of a table: the column with the client of each row")
    features: tuple[str, ...] = param((), Sequence(Text()), "of a table: the columns to learn from; empty: all others")
    standardise: bool = param(True, Boolean(), "of a table: scale features to mean 0 and deviation 1")
    target: Target = param(
        "class", OneOf(("class", "number", "token")), "what is predicted; default: what the task predicts"
    )
    integers: bool = param(False, Boolean(), "of arrays: keep integers as integers (tokens, categories)")
    test_share: float = param(0.2, Interval(float, 0, 1, "neither"), "share held out without a test set")
    seed: int = param(0, Interval(int, 0, None), "seed of that choice")

    def with_absolute_paths(self, folder: str | os.PathLike[str] | None) -> OwnFile:
        """Return a copy whose paths are absolute, so that it works from any folder."""
        base = Path(folder or ".").expanduser()

        def absolute(path: str) -> str:
            return str((base / Path(path).expanduser()).resolve())

        return dataclasses.replace(
            self, path=absolute(self.path), test=None if self.test is None else absolute(self.test)
        )

    def load(self, folder: str | os.PathLike[str] | None = None, download: bool = False) -> Dataset:
        """Read the file or folder; there is nothing to download."""
        here = self.with_absolute_paths(folder)
        path = Path(here.path)
        if not path.exists():
            raise DataError(f"There is no file or folder {path} to load data from.")
        dataset = here._table(path) if path.suffix in _TABLES else here._arrays(path)
        return dataclasses.replace(dataset, source=str(path))

    def names_clients(self, folder: str | os.PathLike[str] | None = None) -> bool:
        """Whether the file names the client of each sample; False if it cannot be read, which :meth:`load` reports."""
        path = Path(self.with_absolute_paths(folder).path)
        if path.suffix in _TABLES:
            return self.client is not None
        if path.is_dir():
            return (path / "clients.npy").is_file()
        try:
            return path.suffix == ".npz" and "clients" in array_shapes(path, _memory())
        except (ArchiveError, OSError, FedcohortError):
            return False

    # -- arrays ----------------------------------------------------------------------------------------------------

    def _arrays(self, path: Path) -> Dataset:
        unused = [key for key in ("test", "client", "features") if getattr(self, key)]
        if unused:
            raise InputError(
                f"'data.{unused[0]}' is for tables, but {path} holds arrays.",
                hint="with arrays, use x_test and y_test for testing, and 'clients' for the client of each sample",
            )
        arrays = _read_folder(path) if path.is_dir() else _read_npz(path)
        _check_names(path, arrays)
        names = {key: arrays[key].tolist() if key in arrays else None for key in ("class_names", "client_names")}
        y, y_test, classes = arrays["y_train"], arrays.get("y_test"), names["class_names"]
        remark: tuple[str, ...] = ()
        if self.target == "class" and not classes:
            y, y_test, classes, remark = _number_labels(path.name, y, y_test)
        dataset = from_arrays(
            arrays["x_train"],
            y,
            arrays.get("x_test"),
            y_test,
            name=path.stem,
            target=self.target,
            integers=self.integers,
            test_share=self.test_share,
            seed=self.seed,
            classes=len(classes) if classes else None,
            class_names=classes or None,
            writers=arrays.get("clients"),
            writer_names=names["client_names"],
        )
        return dataclasses.replace(dataset, remarks=(*remark, *dataset.remarks))

    # -- tables ----------------------------------------------------------------------------------------------------

    def _table(self, path: Path) -> Dataset:
        if self.target == "token" or self.integers:
            raise InputError(f"A table such as {path} holds no sequences of tokens.", hint="give an npz archive")
        tables = [_TableFile.read(path), *([] if self.test is None else [_TableFile.read(Path(self.test))])]
        return _dataset_from_tables(
            path.stem,
            tables,
            label=self.label,
            client=self.client,
            features=self.features,
            standardise=self.standardise,
            target=self.target,
            test_share=self.test_share,
            seed=self.seed,
        )


def _check_names(path: Path, arrays: Mapping[str, AnyArray]) -> None:
    missing = [key for key in ("x_train", "y_train") if key not in arrays]
    if missing:
        raise DataError(
            f"{path} has no {' and no '.join(missing)}. It has: {', '.join(arrays) or 'no arrays'}.",
            hint=f"arrays are found by name: {', '.join(_ARRAYS)}; x_train and y_train are required",
        )
    extra = [key for key in arrays if key not in _ARRAYS]
    if extra:
        near = nearest(extra[0], [key for key in _ARRAYS if key not in arrays])
        raise DataError(
            f"{path} has an array {extra[0]!r}, which is not part of a dataset. Known: {', '.join(_ARRAYS)}.",
            hint=f"did you mean {near!r}?"
            if near
            else "the client of each sample goes into 'clients'; remove other arrays",
        )


def from_pandas(
    frame: Any,
    *,
    label: str,
    client: str | None = None,
    test: Any = None,
    features: Iterable[str] = (),
    standardise: bool = True,
    target: Literal["class", "number"] = "class",
    name: str = "frame",
    test_share: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Make a dataset from a pandas frame with a row per sample.

    Parameters
    ----------
    frame : pandas.DataFrame
    label : str
        The column that is predicted.
    client : str, optional
        The column with the client of each row. These are the clients unless a partition is set.
    test : pandas.DataFrame, optional
        Rows for testing; without them, ``test_share`` is held out.
    features : iterable of str
        The columns to learn from, which must be numbers; default: all others.
    standardise : bool
        Scale features to mean 0 and deviation 1 in the training set.
    target : "class" or "number"
        What is predicted.
    name : str
        Name of the dataset.
    test_share, seed : float, int
        How much is held out without a test set, and the seed of that choice.

    Examples
    --------
    >>> import pandas
    >>> frame = pandas.DataFrame({"age": range(10), "ill": ["no", "yes"] * 5, "ward": list("aabbccddee")})
    >>> from_pandas(frame, label="ill", client="ward")
    Dataset('frame', train=8, test=2, shape=(1,), classes=2)
    """
    if target not in ("class", "number"):
        raise InputError(f"The 'target' of a frame must be 'class' or 'number'. Got {short_repr(target)}.")
    text(label, "'label'")
    text(name, "'name'")
    if client is not None:
        text(client, "'client'")
    number(test_share, "'test_share'")
    integer(seed, "'seed'", least=0)
    tables = [_TableFile.of_frame(frame, repr(name))]
    if test is not None:
        tables.append(_TableFile.of_frame(test, f"{name!r} (test)"))
    columns = (features,) if isinstance(features, str) else texts(features, "'features'", "columns")
    return _dataset_from_tables(
        name,
        tables,
        label=label,
        client=client,
        features=columns,
        standardise=standardise,
        target=target,
        test_share=test_share,
        seed=seed,
    )


def _dataset_from_tables(
    name: str,
    tables: list[_TableFile],
    *,
    label: str,
    client: str | None,
    features: tuple[str, ...],
    standardise: bool,
    target: Target,
    test_share: float,
    seed: int,
) -> Dataset:
    """Make a dataset from a table for training and, optionally, one for testing."""
    first, tested = tables[0], len(tables) > 1
    features = features or tuple(n for n in first.names if n not in (label, client))
    _check_columns(tables, label, client, features)
    x = [np.stack([table.numbers(column) for column in features], axis=1) for table in tables]
    y, y_test, names, remark = _target_column(tables, label, target)
    dataset = from_arrays(
        x[0],
        y,
        x[1] if tested else None,
        y_test,
        name=name,
        target=target,
        test_share=test_share,
        seed=seed,
        class_names=names,
        writers=None if client is None else first.owners(client),
    )
    dataset = _standardise(dataset) if standardise else dataset
    return dataclasses.replace(dataset, remarks=(*remark, *dataset.remarks))


def _target_column(
    tables: list[_TableFile], label: str, target: Target
) -> tuple[AnyArray, AnyArray | None, list[str] | None, tuple[str, ...]]:
    """Return the targets for training and testing, the classes' names, and remarks."""
    if target == "number":
        numbers = [table.numbers(label) for table in tables]
        return numbers[0], numbers[1] if len(tables) > 1 else None, None, ()
    values = [table.labels(label) for table in tables]
    return _number_labels(tables[0].short, values[0], values[1] if len(tables) > 1 else None)


def _check_columns(tables: list[_TableFile], label: str, client: str | None, features: tuple[str, ...]) -> None:
    """Check that each table has its columns. A test table needs no clients, because the server tests."""
    first = tables[0]
    for table in tables:
        for column in (label, *features):
            table.require_column(column)
    if client is not None:
        first.require_column(client)
    for column in features:
        if column in (label, client):
            raise InputError(
                f"The column {column!r} of {first.title} cannot be a feature, because it is the label or the client."
            )
    if not features:
        raise DataError(f"{first.title} has no column to learn from except {label!r}.")


def _standardise(dataset: Dataset) -> Dataset:
    """Scale each feature to mean 0 and deviation 1 in the training samples."""
    mean, deviation = dataset.x_train.mean(axis=0, dtype=np.float64), dataset.x_train.std(axis=0, dtype=np.float64)
    scale = 1 / np.where(deviation > 0, deviation, 1)  # a constant feature stays constant
    x_train, x_test = (((part - mean) * scale).astype(np.float32) for part in (dataset.x_train, dataset.x_test))
    return dataclasses.replace(dataset, x_train=x_train, x_test=x_test)


def _number_labels(
    name: str, y: AnyArray, y_test: AnyArray | None
) -> tuple[AnyArray, AnyArray | None, list[str], tuple[str, ...]]:
    """Return labels of any kind as classes 0, 1, ..., their names, and a remark if that changed them."""
    parts = _labels_of_one_kind(name, [y] if y_test is None else [y, y_test])
    values, codes = np.unique(np.concatenate(parts), return_inverse=True)
    names = [str(value) for value in values.tolist()]
    unseen = np.setdiff1d(values, y)
    if len(unseen):
        raise InputError(f"The label {str(unseen[0])!r} of {name} is only in the test set, so it cannot be learned.")
    split = np.split(codes.astype(np.int64), [len(y)])
    return split[0], None if y_test is None else split[1], names, _numbering(name, names)


def _labels_of_one_kind(name: str, parts: list[AnyArray]) -> list[AnyArray]:
    """Return the labels for training and testing with the same type. Labels that cannot be classes are an error."""
    for part in parts:
        if part.dtype.kind not in "iuUb" or part.ndim != 1:
            raise InputError(
                f"The labels of {name} must be classes: whole numbers or texts, one per sample. Got {part.shape} of "
                f"{part.dtype}.",
                hint="to predict numbers, set task.name=regression",
            )
    # uint8 and int64 are the same kind. uint64 does not fit into int64 and is left unchanged.
    if all(part.dtype.kind in "iu" and part.dtype != np.uint64 for part in parts):
        parts = [part.astype(np.int64) for part in parts]
    if len({part.dtype.kind for part in parts}) > 1:
        raise InputError(f"The labels of {name} have different types in training and testing.")
    return parts


def _numbering(name: str, names: list[str]) -> tuple[str, ...]:
    """Return a remark on the number of each label; none if the labels were 0, 1, ... already."""
    if names == [str(i) for i in range(len(names))]:
        return ()
    shown = ", ".join(f"{label!r} is {i}" for i, label in enumerate(names[:_SHOWN]))
    return (f"the labels of {name} were numbered: {shown}{', ...' if len(names) > _SHOWN else ''}",)


def _memory() -> int:
    """Return the bytes of memory, which a small file may claim to exceed."""
    return memory_limit() or sys.maxsize


def _read_npz(path: Path) -> dict[str, AnyArray]:
    if path.suffix != ".npz":
        raise DataError(
            f"{path} is not a data file that fedcohort can read.",
            hint=f"name the class in that file: {path.name}:CLASS"
            if path.suffix == ".py"
            else "it reads .csv, .parquet, .npz and folders of .npy",
        )
    try:
        return read_arrays(path, _memory())
    except (ArchiveError, FileNotFoundError) as error:
        raise DataError(f"{path} cannot be read as an npz archive of plain arrays: {error}.") from error


def _read_folder(path: Path) -> dict[str, AnyArray]:
    arrays: dict[str, AnyArray] = {}
    for file in sorted(path.glob("*.npy")):
        if file.stem not in _ARRAYS:
            continue  # a folder may contain other files
        try:
            arrays[file.stem] = np.load(file, allow_pickle=False)
        except DAMAGE as error:
            raise DataError(f"{file} cannot be read as a plain array: {error}.") from error
    return arrays


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class _TableFile:
    """A CSV or Parquet file, or a frame in memory. Errors name the table, the column and the row."""

    def __init__(
        self, table: Any, title: str, short: str, named_with: str = "data.label, data.client and data.features"
    ) -> None:
        self._table = table
        self.title, self.short, self._named_with = title, short, named_with
        self.names: list[str] = list(table.column_names)
        duplicate = next((name for name in self.names if self.names.count(name) > 1), None)
        if duplicate is not None:
            raise DataError(f"{title} has more than one column {duplicate!r}.")
        if not table.num_rows:
            raise DataError(f"{title} has no rows.")

    @classmethod
    def read(cls, path: Path) -> _TableFile:
        """Read a file."""
        pa = arrow()
        if not path.is_file():
            raise DataError(f"There is no file {path}.")
        try:
            if path.suffix == ".parquet":
                file = pa.parquet.ParquetFile(path)
                check_parquet(file.metadata, _memory())
                table = file.read(use_threads=False)
            else:
                # An empty cell is missing, in columns of text too. No threads, because those that Arrow leaves behind
                # may abort the process at its end.
                nulls = pa.csv.ConvertOptions(strings_can_be_null=True)
                no_threads = pa.csv.ReadOptions(use_threads=False)
                table = pa.csv.read_csv(path, read_options=no_threads, convert_options=nulls)
        except (pa.ArrowException, ArchiveError, OSError) as error:
            raise DataError(f"{path} cannot be read as a table: {error}.") from error
        return cls(table, str(path), path.name)

    @classmethod
    def of_frame(cls, frame: Any, title: str) -> _TableFile:
        """Wrap a pandas frame."""
        pa = arrow()
        if type(frame).__name__ != "DataFrame" or not hasattr(frame, "iloc"):
            raise InputError(
                f"{title} must be a pandas DataFrame. Got {type(frame).__name__}.",
                hint="for arrays, use from_arrays",
            )
        no_text = next((name for name in frame.columns if not isinstance(name, str)), None)
        if no_text is not None:
            raise InputError(
                f"The names of a frame's columns must be texts. Got {short_repr(no_text)}.",
                hint="frame.columns = frame.columns.astype(str)",
            )
        try:
            return cls(
                pa.Table.from_pandas(frame, preserve_index=False, nthreads=1),
                title,
                title,
                "label=, client= and features=",
            )
        except (pa.ArrowException, TypeError, ValueError) as error:  # for example, a column with several types
            raise InputError(
                f"{title} cannot be read as a table: {short_repr(' '.join(map(str, error.args)))}.",
                hint="a column must have values of one kind: numbers or texts",
            ) from error

    def require_column(self, name: str) -> None:
        """Raise an error if there is no such column."""
        if name not in self.names:
            near = nearest(name, self.names)
            raise DataError(
                f"{self.title} has no column {name!r}. It has: {', '.join(map(repr, self.names))}.",
                hint=f"{f'did you mean {near!r}? ' if near else ''}Columns are named with {self._named_with}",
            )

    def _column(self, name: str) -> Any:
        column = self._table.column(name).combine_chunks()
        self._refuse(name, np.asarray(column.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)), "is missing")
        if hasattr(column, "dictionary_decode"):
            column = column.dictionary_decode()
        return column

    def _refuse(self, name: str, bad: BoolArray, problem: str, hint: str | None = None) -> None:
        rows = np.flatnonzero(bad)
        if len(rows):
            shown = ", ".join(str(int(row) + 1) for row in rows[:_SHOWN]) + (", ..." if len(rows) > _SHOWN else "")
            raise InputError(
                f"The column {name!r} of {self.title} {problem} in {len(rows):,} of {len(bad):,} rows (row {shown}; "
                "the first row after the header is 1).",
                hint=hint or "complete or remove these rows",
            )

    def numbers(self, name: str) -> AnyArray:
        """Return a column of finite numbers (n,)."""
        values = self._column_values(name)
        if values.dtype.kind not in "iufb":
            example = next((str(value) for value in values if not _is_number(str(value))), str(values[0]))
            raise InputError(
                f"The column {name!r} of {self.title} does not hold numbers ({self._table.column(name).type}), e.g. "
                f"{example!r}.",
                hint="name the columns to learn from (features), or turn this one into numbers first",
            )
        array = values.astype(np.float64)
        self._refuse(name, ~np.isfinite(array), "is not finite")
        return array

    def labels(self, name: str) -> AnyArray:
        """Return a column of classes (n,): whole numbers or texts."""
        values = self._column_values(name)
        if values.dtype.kind == "f":
            whole = values == np.round(values)
            self._refuse(name, ~whole, "is a fraction, not a class,", "to predict numbers, set task.name=regression")
            return values.astype(np.int64)
        return values

    def owners(self, name: str) -> AnyArray:
        """Return a column of client ids (n,): whole numbers or texts."""
        values = self._column_values(name)
        if values.dtype.kind == "f":
            self._refuse(name, values != np.round(values), "is a fraction, not a client,")
            return values.astype(np.int64)
        if values.dtype.kind in "iu":
            return values
        blank = np.char.strip(values.astype(np.str_)) == ""
        self._refuse(name, blank, "is missing")
        return values

    def _column_values(self, name: str) -> AnyArray:
        values = np.asarray(self._column(name).to_numpy(zero_copy_only=False))
        return values.astype(np.str_) if values.dtype.kind not in "iufbU" else values


@DATASETS.register("flwr")
@dataclass(frozen=True, kw_only=True)
class FlwrDataset(Source):
    """A dataset on the Hugging Face Hub, by name. It needs flwr_datasets."""

    dataset: str = param(dataclasses.MISSING, Text(), "its name, for example ylecun/mnist")
    subset: str | None = param(None, Optional(Text()), "its subset or version")
    inputs: str = param("image", Text(), "the column of samples: images, or lists of numbers")
    label: str = param("label", Text(), "the column of classes")
    client: str | None = param(None, Optional(Text()), "the column with the client of each sample")
    train: str = param("train", Text(), "the split to train on")
    test: str = param("test", Text(), "the split to test on")

    def names_clients(self, folder: str | os.PathLike[str] | None = None) -> bool:
        """Whether a column of clients is set."""
        return self.client is not None

    def load(self, folder: str | os.PathLike[str] | None = None, download: bool = False) -> Dataset:
        """Load it with flwr_datasets, which downloads what is missing."""
        try:
            from flwr_datasets import FederatedDataset
        except ImportError as error:
            raise MissingExtraError(
                f"The dataset {self.dataset!r} is one of flwr_datasets, which is not installed.",
                hint="pip install 'flwr-datasets[vision]'",
            ) from error
        try:
            federated = FederatedDataset(dataset=self.dataset, subset=self.subset, partitioners={}, shuffle=False)
            splits = [federated.load_split(self.train), federated.load_split(self.test)]
        except FedcohortError:
            raise
        except Exception as error:  # the hub, the network and the dataset's code may raise anything
            raise DataError(
                f"flwr_datasets cannot load {self.dataset!r}: {type(error).__name__}: {error}.",
                hint="is the name right, and this machine online? Splits are named with data.train and data.test",
            ) from error
        (x, y), (x_test, y_test) = (
            columns_of(split, self.inputs, self.label, f"the split {name!r}")
            for split, name in zip(splits, (self.train, self.test), strict=True)
        )
        writers = None
        if self.client is not None:
            writers = columns_of(splits[0], self.inputs, self.client, f"the split {self.train!r}")[1]
            if writers.dtype.kind not in "iu":
                writers = writers.astype(np.str_)
        dataset = from_arrays(x, y, x_test, y_test, name=self.dataset, writers=writers)
        return dataclasses.replace(dataset, source=f"flwr_datasets, {self.dataset}")

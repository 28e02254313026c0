"""Tables with a row per sample: CSV and Parquet files, and frames in memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcohort.core.archives import ArchiveError, check_parquet
from fedcohort.core.arrays import AnyArray, BoolArray
from fedcohort.core.errors import DataError, InputError
from fedcohort.core.registry import nearest
from fedcohort.core.text import short_repr
from fedcohort.simulate.arrow import arrow
from fedcohort.simulate.data.dataset import MAX_CATEGORIES, REGRESSION_HINT, Dataset, from_arrays
from fedcohort.simulate.memory_check import memory_limit

if TYPE_CHECKING:
    from fedcohort.simulate.data.own import OwnFile

_SHOWN = 5


def dataset_of_tables(name: str, tables: list[TableFile], options: OwnFile) -> Dataset:
    """Make a dataset from a table for training and, optionally, one for testing."""
    first, label, client = tables[0], options.label, options.client
    # In the order of the table, so that the same file always gives the same model.
    features = options.features or tuple(n for n in first.names if n not in (label, client))
    if not features:
        raise DataError(f"{first.title} has no column to learn from except {label!r}.")
    for table in tables:  # a test table needs no clients, because the server tests
        for column in (label, *features, *([client] if client is not None and table is first else [])):
            table.require_column(column)
    used_twice = next((column for column in features if column in (label, client)), None)
    if used_twice is not None:
        raise InputError(
            f"The column {used_twice!r} of {first.title} cannot be a feature, because it is the label or the client."
        )
    columns: list[list[AnyArray]] = [[] for _ in tables]
    is_number: list[bool] = []
    categories: list[str] = []
    for column in features:
        parts = [table.feature(column) for table in tables]
        if len({part.dtype.kind for part in parts}) > 1:
            titles = " and ".join(table.title for table in tables)
            raise InputError(f"The column {column!r} holds numbers in one of {titles} and text in the other.")
        is_text = parts[0].dtype.kind == "U"
        if is_text:
            # A text that only the test table has is none of the known ones, so all its columns are 0.
            known = np.unique(parts[0])
            categories.append(f"{column!r} ({len(known)})")
            parts = [(part[:, None] == known).astype(np.float64) for part in parts]
        for held, part in zip(columns, parts, strict=True):
            held.append(part.reshape(len(part), -1))
        is_number += [not is_text] * columns[0][-1].shape[1]
    remarks: tuple[str, ...] = ()
    if categories:
        shown = ", ".join(categories[:_SHOWN]) + (", ..." if len(categories) > _SHOWN else "")
        remarks = (f"each text in these columns of {first.short} became a feature that is 0 or 1: {shown}",)
    arrays: list[AnyArray] = []
    for table, held in zip(tables, columns, strict=True):
        arrays += [np.hstack(held), table.numbers(label) if options.target == "number" else table.labels(label)]
    dataset = from_arrays(
        *arrays,
        name=name,
        target=options.target,
        test_share=options.test_share,
        seed=options.seed,
        writers=None if client is None else first.owners(client),
    )
    # With the mean and deviation of the training set, so that nothing of the test set leaks into training.
    if options.standardise:
        mean, deviation = (getattr(dataset.x_train, of)(axis=0, dtype=np.float64) for of in ("mean", "std"))
        scaled = np.array(is_number)  # of a column of zeros and ones, a rare one would become large
        shift, scale = np.where(scaled, mean, 0), np.where(scaled & (deviation > 0), deviation, 1)
        x_train, x_test = (((part - shift) / scale).astype(np.float32) for part in (dataset.x_train, dataset.x_test))
        dataset = dataclasses.replace(dataset, x_train=x_train, x_test=x_test)
    return dataclasses.replace(dataset, remarks=(*remarks, *dataset.remarks))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class TableFile:
    """A CSV or Parquet file, or a frame in memory. Errors name the table, the column and the row."""

    def __init__(
        self, table: Any, title: str, short: str, named_with: str = "data.label, data.client and data.features"
    ) -> None:
        # Kept as Arrow: a column is converted when it is asked for, and most tables have columns that nobody needs.
        self._table = table
        self.title, self.short, self._named_with = title, short, named_with
        self.names: list[str] = list(table.column_names)
        duplicate = next((name for name in self.names if self.names.count(name) > 1), None)
        if duplicate is not None:
            raise DataError(f"{title} has more than one column {duplicate!r}.")
        if not table.num_rows:
            raise DataError(f"{title} has no rows.")

    @classmethod
    def read(cls, path: Path) -> TableFile:
        """Read a file."""
        pa = arrow()
        if not path.is_file():
            raise DataError(f"There is no file {path}.")
        try:
            if path.suffix == ".parquet":
                file = pa.parquet.ParquetFile(path)
                check_parquet(file.metadata, memory_limit())
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
    def of_frame(cls, frame: Any, title: str) -> TableFile:
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
            table = pa.Table.from_pandas(frame, preserve_index=False, nthreads=1)
        except (pa.ArrowException, TypeError, ValueError) as error:  # for example, a column with several types
            raise InputError(
                f"{title} cannot be read as a table: {short_repr(' '.join(map(str, error.args)))}.",
                hint="a column must have values of one kind: numbers or texts",
            ) from error
        return cls(table, title, title, "label=, client= and features=")

    def require_column(self, name: str) -> None:
        """Raise an error if there is no such column."""
        if name not in self.names:
            near = nearest(name, self.names)
            raise DataError(
                f"{self.title} has no column {name!r}. It has: {', '.join(map(repr, self.names))}.",
                hint=f"{f'did you mean {near!r}? ' if near else ''}Columns are named with {self._named_with}",
            )

    def _refuse(self, name: str, bad: BoolArray, problem: str, hint: str = "complete or remove these rows") -> None:
        rows = np.flatnonzero(bad)
        if len(rows):
            shown = ", ".join(str(int(row) + 1) for row in rows[:_SHOWN]) + (", ..." if len(rows) > _SHOWN else "")
            raise InputError(
                f"The column {name!r} of {self.title} {problem} in {len(rows):,} of {len(bad):,} rows (row {shown}; "
                "the first row after the header is 1).",
                hint=hint,
            )

    def _values(self, name: str) -> AnyArray:
        """Return a column without missing values: numbers, or texts."""
        # A file is read in blocks, but a mask needs the whole column.
        column = self._table.column(name).combine_chunks()
        self._refuse(name, np.asarray(column.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)), "is missing")
        # A categorical column of pandas.
        if hasattr(column, "dictionary_decode"):
            column = column.dictionary_decode()
        values = np.asarray(column.to_numpy(zero_copy_only=False))
        return values.astype(np.str_) if values.dtype.kind not in "iufbU" else values

    def numbers(self, name: str) -> AnyArray:
        """Return a column of finite numbers (n,)."""
        values = self._values(name)
        if values.dtype.kind == "U":
            self._refuse(name, np.array([not _is_number(value) for value in values]), "is not a number")
            values = values.astype(np.float64)
        array = values.astype(np.float64)
        self._refuse(name, ~np.isfinite(array), "is not finite")
        return array

    def feature(self, name: str) -> AnyArray:
        """Return a column of finite numbers, or of texts that may be categories (n,)."""
        values = self._values(name)
        # Mostly numbers: the few others are mistakes, such as "n/a", and no categories.
        if values.dtype.kind != "U" or 2 * sum(map(_is_number, values)) > len(values):
            return self.numbers(name)
        count = len(np.unique(values))
        if count > MAX_CATEGORIES or not self._is_text(name):
            what = f"{count:,} different texts" if self._is_text(name) else str(self._table.column(name).type)
            raise InputError(
                f"The column {name!r} of {self.title} cannot be learned from: it holds {what}, e.g. "
                f"{short_repr(str(values[0]))}. It must hold numbers, or at most {MAX_CATEGORIES} different texts.",
                hint="name the columns to learn from (features), or turn this one into numbers first",
            )
        return values

    def _is_text(self, name: str) -> bool:
        return "string" in str(self._table.column(name).type)  # also of a dictionary's values; dates are none

    def labels(self, name: str, what: str = "class", hint: str = REGRESSION_HINT) -> AnyArray:
        """Return a column of classes (n,): whole numbers or texts."""
        values = self._values(name)
        if values.dtype.kind == "f":
            self._refuse(name, values != np.round(values), f"is a fraction, not a {what},", hint)
            return values.astype(np.int64)
        return values

    def owners(self, name: str) -> AnyArray:
        """Return a column of client ids (n,): whole numbers or texts."""
        values = self.labels(name, "client", "complete or remove these rows")
        if values.dtype.kind not in "iu":
            self._refuse(name, np.char.strip(values.astype(np.str_)) == "", "is missing")
        return values

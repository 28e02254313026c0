"""The user's own data: a table (CSV, Parquet), arrays, images in folders, the Hugging Face Hub, or memory."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from fedcohort.core.archives import DAMAGE, ArchiveError, array_shapes, read_arrays
from fedcohort.core.arrays import AnyArray
from fedcohort.core.errors import DataError, FedcohortError, InputError, MissingExtraError
from fedcohort.core.params import Boolean, Interval, OneOf, Optional, Sequence, Text, param
from fedcohort.core.registry import nearest
from fedcohort.core.validate import one_of, text, texts
from fedcohort.simulate.data.dataset import Dataset, Target, from_arrays
from fedcohort.simulate.data.partitioner import columns_of
from fedcohort.simulate.data.pictures import read_pictures
from fedcohort.simulate.data.sources import DATASETS, Source
from fedcohort.simulate.data.tables import TableFile, dataset_of_tables
from fedcohort.simulate.memory_check import memory_limit

_TABLES = (".csv", ".parquet")
_ARRAYS = ("x_train", "y_train", "x_test", "y_test", "clients", "client_names", "class_names")
_NAMES = {"class_names": "class_names", "writer_names": "client_names"}  # of arguments, and of arrays in a file
_HUBS = {"flwr:": "flwr", "hf:": "huggingface"}  # by prefix, the dataset that loads by name


def data_section(name: str) -> dict[str, str]:
    """Return the section ``[data]`` for a name, a path, ``hf:NAME`` or ``flwr:NAME``.

    >>> data_section("digits"), data_section("flwr:ylecun/mnist")
    ({'name': 'digits'}, {'name': 'flwr', 'dataset': 'ylecun/mnist'})
    >>> data_section("hf:ylecun/mnist")
    {'name': 'huggingface', 'dataset': 'ylecun/mnist'}
    >>> data_section("people.csv")
    {'name': 'file', 'path': 'people.csv'}
    """
    hub, colon, dataset = name.partition(":")
    # Before paths are looked at: a hub's datasets have a slash in their names, too.
    if hub + colon in _HUBS:
        return {"name": _HUBS[hub + colon], "dataset": dataset}
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
    # The names under which OwnFile looks for them.
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
    """Your own data: a CSV or Parquet file, an npz archive, or a folder of arrays or of images.

    A table has one row per sample: one column is the label, one may name the client of a sample, and all others are
    features; each text of a column of texts becomes a feature that is 0 or 1. A folder of images has a subfolder for
    each class: ``cat/1.png``, or ``train/cat/1.png`` and ``test/cat/2.png``. An archive or a folder of arrays has
    ``x_train`` and ``y_train``, and may have ``x_test`` and ``y_test``, ``clients`` (the client of each training
    sample), ``client_names`` and ``class_names``.
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
            siblings = sorted(file.name for file in path.parent.iterdir()) if path.parent.is_dir() else []
            near = nearest(path.name, siblings)
            raise DataError(
                f"There is no file or folder {path} to load data from.",
                hint=f"did you mean {near!r}?" if near else "is the path relative to another folder?",
            )
        # By its name, as everybody's tools do; a file's first bytes do not tell a CSV from other text.
        if path.suffix in _TABLES:
            if self.target == "token" or self.integers:
                raise InputError(f"A table such as {path} holds no sequences of tokens.", hint="give an npz archive")
            # Both before anything is computed, so that a mistake in the second is found at once.
            tables = [TableFile.read(Path(name)) for name in (here.path, here.test) if name is not None]
            dataset = dataset_of_tables(path.stem, tables, here)
        else:
            dataset = here._arrays(path)
        return dataclasses.replace(dataset, source=str(path))

    def names_clients(self, folder: str | os.PathLike[str] | None = None) -> bool:
        """Whether the file names the client of each sample; False if it cannot be read, which :meth:`load` reports."""
        path = Path(self.with_absolute_paths(folder).path)
        if path.suffix in _TABLES:
            return self.client is not None
        # Only the names of the arrays are read: this is asked before anybody decides to load the data.
        if path.is_dir():
            return (path / "clients.npy").is_file()
        try:
            return path.suffix == ".npz" and "clients" in array_shapes(path, memory_limit())
        except (ArchiveError, OSError, FedcohortError):
            return False

    def _arrays(self, path: Path) -> Dataset:
        """Read an archive, or a folder of arrays or images."""
        unused = [key for key in ("test", "client", "features") if getattr(self, key)]
        if unused:
            raise InputError(
                f"'data.{unused[0]}' is for tables, but {path} holds arrays.",
                hint="with arrays, use x_test and y_test for testing, and 'clients' for the client of each sample",
            )
        arrays, remarks = _read_arrays(path, self.target)
        dataset = from_arrays(
            arrays["x_train"],
            arrays["y_train"],
            arrays.get("x_test"),
            arrays.get("y_test"),
            name=path.stem,
            target=self.target,
            integers=self.integers,
            test_share=self.test_share,
            seed=self.seed,
            writers=arrays.get("clients"),
            **{key: arrays[array].tolist() for key, array in _NAMES.items() if array in arrays and arrays[array].size},
        )
        return dataclasses.replace(dataset, remarks=(*remarks, *dataset.remarks))


def _read_arrays(path: Path, target: Target) -> tuple[dict[str, AnyArray], tuple[str, ...]]:
    """Read an archive or a folder, and return what :func:`from_arrays` takes, by name, and remarks."""
    remarks: tuple[str, ...] = ()
    hint = f"arrays are found by name: {', '.join(_ARRAYS)}; x_train and y_train are required"
    try:
        if path.suffix == ".npz":
            arrays = read_arrays(path, memory_limit())
        elif path.is_dir():  # which may hold other files, too
            files = [file for file in sorted(path.glob("*.npy")) if file.stem in _ARRAYS]
            arrays = {file.stem: np.load(file, allow_pickle=False) for file in files}
            hint += "; images are found in a subfolder for each class"
        else:
            raise DataError(
                f"{path} is not a data file that fedcohort can read.",
                hint=f"name the class in that file: {path.name}:CLASS"
                if path.suffix == ".py"
                else "it reads .csv, .parquet, .npz, folders of .npy, and folders of images by class",
            )
    except (ArchiveError, *DAMAGE) as error:
        raise DataError(f"{path} cannot be read as plain arrays: {error}.") from error
    # A folder with arrays may hold pictures as well, for people to look at.
    if not arrays and (pictures := read_pictures(path)) is not None:
        if target != "class":
            raise InputError(f"{path} is a folder of images, which have classes.", hint="leave out --task")
        (x_train, y_train), test, remarks = pictures
        arrays = {"x_train": x_train, "y_train": y_train}
        if test is not None:
            arrays["x_test"], arrays["y_test"] = test
    missing = [key for key in ("x_train", "y_train") if key not in arrays]
    if missing:
        has = ", ".join(arrays) or "no arrays"
        raise DataError(f"{path} has no {' and no '.join(missing)}. It has: {has}.", hint=hint)
    extra = [key for key in arrays if key not in _ARRAYS]
    if extra:
        near = nearest(extra[0], [key for key in _ARRAYS if key not in arrays])
        raise DataError(
            f"{path} has an array {extra[0]!r}, which is not part of a dataset. Known: {', '.join(_ARRAYS)}.",
            hint=f"did you mean {near!r}?" if near else "remove it; the client of each sample goes into 'clients'",
        )
    return arrays, remarks


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
        The columns to learn from; default: all others. Each text becomes a feature that is 0 or 1.
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
    text(name, "'name'")
    columns = (features,) if isinstance(features, str) else texts(features, "'features'", "columns")
    # A frame is read as a file with these columns would be, so both give the same dataset.
    options = OwnFile(
        path=name or "frame",
        label=label,
        client=client,
        features=columns,
        standardise=standardise,
        target=one_of(target, ("class", "number"), "The 'target' of a frame"),
        test_share=test_share,
        seed=seed,
    )
    tables = [TableFile.of_frame(frame, repr(name))]
    if test is not None:
        tables.append(TableFile.of_frame(test, f"{name!r} (test)"))
    return dataset_of_tables(name, tables, options)


@DATASETS.register("huggingface")
@dataclass(frozen=True, kw_only=True)
class HuggingFaceDataset(Source):
    """A dataset on the Hugging Face Hub, by name, or files that its library reads. It needs datasets."""

    library: ClassVar[str] = "datasets"

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
        """Load it with its library, which downloads what is missing."""
        try:
            # Both libraries keep what they download in their own cache.
            splits = [self._split(self.train), self._split(self.test)]
        except ImportError as error:
            raise MissingExtraError(
                f"The dataset {self.dataset!r} is loaded by {self.library}, which is not installed.",
                hint=f"pip install {self.library.replace('_', '-')} pillow",
            ) from error
        except FedcohortError:
            raise
        except Exception as error:  # the hub, the network and the dataset's code may raise anything
            raise DataError(
                f"{self.library} cannot load {self.dataset!r}: {type(error).__name__}: {error}.",
                hint="is the name right, and this machine online? Splits are named with data.train and data.test",
            ) from error
        (x, y), (x_test, y_test) = (
            columns_of(split, self.inputs, self.label, f"the split {name!r}")
            for split, name in zip(splits, (self.train, self.test), strict=True)
        )
        writers = None
        if self.client is not None:
            writers = columns_of(splits[0], self.inputs, self.client, f"the split {self.train!r}")[1]
            # Columns of text arrive as Python objects.
            if writers.dtype.kind not in "iu":
                writers = writers.astype(np.str_)
        dataset = from_arrays(x, y, x_test, y_test, name=self.dataset, writers=writers)
        return dataclasses.replace(dataset, source=f"{self.library}, {self.dataset}")

    def _split(self, name: str) -> Any:
        from datasets import load_dataset

        return load_dataset(self.dataset, self.subset, split=name)


@DATASETS.register("flwr")
class FlwrDataset(HuggingFaceDataset):
    """A dataset on the Hugging Face Hub, by name. It needs flwr_datasets."""

    library: ClassVar[str] = "flwr_datasets"

    def _split(self, name: str) -> Any:
        from flwr_datasets import FederatedDataset

        federated = FederatedDataset(dataset=self.dataset, subset=self.subset, partitioners={}, shuffle=False)
        return federated.load_split(name)

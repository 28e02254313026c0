"""Load datasets by name: built-in, synthetic, or from files."""

from __future__ import annotations

import hashlib
import importlib.resources
import logging
import math
import os
import struct
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedcohort.core import rng
from fedcohort.core.arrays import AnyArray, IntArray
from fedcohort.core.errors import DataError, InputError, needs_extra
from fedcohort.core.params import Boolean, Interval, Parameterized, Sequence, param
from fedcohort.core.registry import Registry
from fedcohort.core.validate import path as check_path
from fedcohort.simulate.data import files
from fedcohort.simulate.data.dataset import Dataset, stratified_test
from fedcohort.simulate.data.places import Resource, download_folder, fetch, folders
from fedcohort.simulate.memory_check import check_memory

log = logging.getLogger(__name__)

_DIGITS = tuple("0123456789")
_PARTS = ("x_train", "y_train", "x_test", "y_test")


class Source(Parameterized):
    """Where a dataset comes from: frozen parameters and a function that loads it."""

    name: ClassVar[str]

    def load(self, folder: str | os.PathLike[str] | None = None, download: bool = False) -> Dataset:
        """Return the dataset; see :func:`load_dataset`."""
        raise NotImplementedError(type(self).__name__)

    def names_clients(self, folder: str | os.PathLike[str] | None = None) -> bool:
        """Whether the data name the client of each sample. These are the clients unless a partition is set."""
        return False


DATASETS: Registry[Source] = Registry("dataset", base=Source)


def load_dataset(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    download: bool = False,
    **parameters: object,
) -> Dataset:
    """Load a dataset by name.

    Files are searched for in ``folder``, in the folder that the environment variable FEDCOHORT_DATA names, in ``data``
    here and one level up, and in the user's cache folder. The first copy is used; if it is damaged, that is an error.

    Parameters
    ----------
    name : str
        A registered name such as "digits", "synthetic", "mnist", "fashion-mnist" or "cifar10"; "file" for
        your own data; "flwr" for flwr_datasets; or ``file.py:Class`` for your own :class:`Source`.
    folder : path, optional
        Where you keep datasets.
    download : bool
        Fetch missing files from their publisher, check them, and keep them.
    **parameters
        The dataset's parameters, for example ``difficulty`` of "synthetic". An unknown one is an error.

    Examples
    --------
    >>> load_dataset("synthetic", samples=100, test_samples=20, classes=4)
    Dataset('synthetic', train=100, test=20, shape=(32,), classes=4)
    >>> load_dataset("synthetic", dificulty=1)
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.ParameterError: The dataset 'synthetic' has no parameter 'dificulty'. ...
      hint: did you mean 'difficulty'?
    """
    where = None if folder is None else check_path(folder, "'folder'")
    return DATASETS.create(name, **parameters).load(where, download)


@DATASETS.register("digits")
@dataclass(frozen=True, kw_only=True)
class Digits(Source):
    """1,797 handwritten digits of 8 x 8 pixels from scikit-learn; every fifth of a class is for testing.

    Grey values 0 .. 16 become 0 .. 255, as in all other image datasets.
    """

    def load(self, folder: str | os.PathLike[str] | None = None, download: bool = False) -> Dataset:
        """Return it; needs neither folder nor download."""
        with needs_extra("The dataset 'digits' is part of scikit-learn, which is not installed.", "sim"):
            from sklearn.datasets import load_digits
        raw = load_digits()
        x = np.rint(raw.images * (255.0 / 16.0)).astype(np.uint8)
        y = raw.target.astype(np.int64)
        # Not drawn: everybody has the same test set, whatever the seed.
        test = stratified_test(y)
        return Dataset(self.name, x[~test], y[~test], x[test], y[test], 10, _DIGITS, source="scikit-learn")


@DATASETS.register("synthetic")
@dataclass(frozen=True, kw_only=True)
class Synthetic(Source):
    """Gaussian class mixtures: every class has ``modes`` centres in random directions, with unit noise around them.

    With ``difficulty`` 0, centres are about 8 standard deviations apart and hardly overlap. With 1, all are in the same
    place and there is nothing to learn. In between, the distance falls linearly. Classes are equally frequent.

    >>> float(Synthetic(samples=50, difficulty=1).load().x_train.mean().round(0))
    0.0
    """

    samples: int = param(10_000, Interval(int, 1, None), "training samples")
    test_samples: int = param(2_000, Interval(int, 1, None), "test samples")
    classes: int = param(10, Interval(int, 1, None), "number of classes")
    shape: tuple[int, ...] = param((32,), Sequence(Interval(int, 1, None), least=1), "shape of a sample")
    difficulty: float = param(0.5, Interval(float, 0, 1), "0 is separable, 1 is hopeless")
    modes: int = param(2, Interval(int, 1, None), "centres per class")
    seed: int = param(0, Interval(int, 0, None), "seed of centres and samples")

    def load(self, folder: str | os.PathLike[str] | None = None, download: bool = False) -> Dataset:
        """Draw it; needs neither folder nor download."""
        features = math.prod(self.shape)
        sizes = (self.samples, self.test_samples)
        sample_bytes = sum(sizes) * (4 * features + 16)
        check_memory("The synthetic data", sample_bytes + self.classes * self.modes * features * 8)
        # A stream for each purpose, so that more samples do not change the centres.
        directions = rng.stream(self.seed, rng.DATA, 0).standard_normal((self.classes, self.modes, features))
        directions /= np.linalg.norm(directions, axis=2, keepdims=True)
        # Random directions are nearly orthogonal, so centres of radius r are r * sqrt(2) apart.
        centres = (8.0 * (1.0 - self.difficulty) / np.sqrt(2.0) * directions).astype(np.float32)
        parts = [self._draw(n, centres, rng.stream(self.seed, rng.DATA, 1 + i)) for i, n in enumerate(sizes)]
        (x, y), (x_test, y_test) = parts
        names = tuple(map(str, range(self.classes)))
        return Dataset(self.name, x, y, x_test, y_test, self.classes, names, source=f"drawn with seed {self.seed}")

    def _draw(self, n: int, centres: AnyArray, draw: np.random.Generator) -> tuple[AnyArray, IntArray]:
        # Permuted and not drawn, so that classes are equally frequent.
        y = draw.permutation(np.arange(n, dtype=np.int64) % self.classes)
        x = draw.standard_normal((n, centres.shape[2]), dtype=np.float32)
        x += centres[y, draw.integers(0, self.modes, n)]
        return x.reshape(n, *self.shape), y


class FileSource(Source):
    """A dataset in files of one of several formats, in one of several folders."""

    system: ClassVar[str | None] = None  # the folder in which a system package installs it
    resources: ClassVar[tuple[Resource, ...]] = ()
    advice: ClassVar[str] = ""
    subfolders: ClassVar[tuple[str, ...]] = ()

    def load(self, folder: str | os.PathLike[str] | None = None, download: bool = False) -> Dataset:
        """Read the first copy, or download one if there is none."""
        # The user's own folders win over what the system has installed.
        places = [*folders(folder), *([] if self.system is None else [Path(self.system)])]
        for place in places:
            # Its own folder first, because the idx files of MNIST and Fashion-MNIST have the same names.
            for candidate in (*(place / sub for sub in self.subfolders), place):
                found = self.read(candidate) if candidate.is_dir() else None
                if found is not None:
                    log.info("read %s from %s", self.name, found.source)
                    return found
        # Only now: a copy that somebody has put into a folder always comes first.
        if download and self.resources:
            target = download_folder(folder) / self.subfolders[0]
            for resource in self.resources:
                fetch(resource, target)
            found = self.read(target)
            if found is not None:
                return found
        more = "; or download it (download=True)" if self.resources and not download else ""
        raise DataError(
            f"The dataset {self.name!r} was not found. Looked in:\n"
            + "\n".join(f"    {place}" for place in places)
            + f"\n  for {self.expected_files()}.",
            hint=f"{self.advice}{more}",
        )

    def read(self, folder: Path) -> Dataset | None:
        """Return the dataset in ``folder``; None if it has none of the files."""
        raise NotImplementedError(type(self).__name__)

    def expected_files(self) -> str:
        """Name the files that :meth:`read` needs."""
        raise NotImplementedError(type(self).__name__)


def first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """Return the first of these files that a folder has."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _existing(folder: Path, *names: str) -> Path:
    """Return the first of these files; that there is none is an error, because the folder has others of the dataset."""
    found = first_file(folder, names)
    if found is None:
        more = " (or .gz)" if names[-1].endswith(".gz") else ""
        raise DataError(f"The folder {folder} has part of a dataset; {names[0]}{more} is missing.", hint="complete it")
    return found


def assemble(
    name: str,
    where: Path,
    arrays: Mapping[str, AnyArray],
    *,
    class_names: tuple[str, ...],
    shape: tuple[int, ...],
    writers: tuple[IntArray | None, IntArray | None, tuple[str, ...] | None] = (None, None, None),
) -> Dataset:
    """Make a dataset of arrays that were read from ``where``, which errors name."""
    # Checked before the dataset does, because here the file can be named.
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x.shape[1:] != shape or x.dtype != np.uint8:
            raise files.content_error(
                where, f"x_{part} must be (n, {', '.join(map(str, shape))}) uint8, but it is {x.shape} {x.dtype}"
            )
        if y.shape != (len(x),) or y.dtype.kind not in "iu":
            raise files.content_error(where, f"y_{part} must be {len(x):,} integers, but it is {y.shape} {y.dtype}")
    # Labels are stored as bytes, and computed with as indices.
    y_train, y_test = (arrays[key].astype(np.int64) for key in ("y_train", "y_test"))
    x_train, x_test = arrays["x_train"], arrays["x_test"]
    try:
        return Dataset(
            name, x_train, y_train, x_test, y_test, len(class_names), class_names, *writers, source=str(where)
        )
    except InputError as error:
        raise files.content_error(where, error.message.rstrip(".")) from error


def _published(name: str) -> Callable[[type[_Published]], type[_Published]]:
    """Register a class under a name, with what ``published.toml`` says about the dataset as attributes."""

    def register(cls: type[_Published]) -> type[_Published]:
        facts = tomllib.loads((importlib.resources.files(__package__) / "published.toml").read_text())[name]
        cls.resources = tuple(Resource(**file) for file in facts.pop("files"))
        for key, value in facts.items():
            setattr(cls, key, tuple(value) if isinstance(value, list) else value)
        DATASETS.register(name)(cls)
        return cls

    return register


_IDX = {
    "x_train": ("train-images-idx3-ubyte", "train-images.idx3-ubyte"),
    "y_train": ("train-labels-idx1-ubyte", "train-labels.idx1-ubyte"),
    "x_test": ("t10k-images-idx3-ubyte", "t10k-images.idx3-ubyte"),
    "y_test": ("t10k-labels-idx1-ubyte", "t10k-labels.idx1-ubyte"),
}


@dataclass(frozen=True, kw_only=True)
class _Published(FileSource):
    """Images with published checksums."""

    check: bool = param(True, Boolean(), "compare full-size data with their published checksums")

    labels: ClassVar[tuple[str, ...]]
    shape: ClassVar[tuple[int, ...]]  # of an image
    full_size: ClassVar[int]  # training samples
    sums: ClassVar[tuple[str, str, str, str]]

    def arrays(self, folder: Path) -> tuple[Path, dict[str, AnyArray]] | None:
        """Return where the data are, and the four arrays; None if the folder has none of the files."""
        raise NotImplementedError(type(self).__name__)

    def digest(self, array: AnyArray) -> str:
        """Return the checksum of bytes, whatever format they were read from."""
        return hashlib.sha256(array.data).hexdigest()

    def read(self, folder: Path) -> Dataset | None:
        """Read the first format that the folder has."""
        found = self.arrays(folder)
        if found is None:
            return None
        where, arrays = found
        data = assemble(self.name, where, arrays, class_names=self.labels, shape=self.shape)
        size = len(data.y_train)
        # Excerpts are welcome, for tests and demonstrations, but nobody has published their checksums.
        if self.check and size != self.full_size:
            log.warning("%s has %d training samples, not %d, so it is not checked", where, size, self.full_size)
        elif self.check:
            for key, expected in zip(_PARTS, self.sums, strict=True):
                if self.digest(arrays[key].astype(np.uint8, copy=False)) != expected:
                    raise DataError(
                        f"The data in {where} are damaged, changed or another dataset: {key} does not have the "
                        f"published checksum {expected}.",
                        hint="fetch them again; with check=False they are read without this check",
                    )
        return data


class _MnistLike(_Published):
    """28 x 28 grey images in idx files or one NumPy archive."""

    archives: ClassVar[tuple[str, ...]]
    kind: ClassVar[str] = "md5"  # of the checksums, which are of the four uncompressed idx files
    shape = (28, 28)
    full_size = 60_000

    def expected_files(self) -> str:
        """Name the files."""
        return f"{self.archives[0]} or train-images-idx3-ubyte.gz and its three companions"

    def digest(self, array: AnyArray) -> str:
        """Return the checksum of the uncompressed idx file with this array."""
        head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        digest = hashlib.new(self.kind, head, usedforsecurity=False)  # a system in FIPS mode refuses MD5 otherwise
        digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def arrays(self, folder: Path) -> tuple[Path, dict[str, AnyArray]] | None:
        """Read the archive or the idx files."""
        where = first_file(folder, self.archives)
        if where is not None:
            return where, files.read_npz(where, _PARTS)
        names = {key: (*plain, *(f"{name}.gz" for name in plain)) for key, plain in _IDX.items()}
        # None of the files: another folder may have them. Only some of them is an error, which names what lacks.
        if not any(first_file(folder, each) for each in names.values()):
            return None
        return folder, {
            key: files.read_idx(_existing(folder, *each), 3 if key.startswith("x") else 1)
            for key, each in names.items()
        }


@_published("mnist")
class Mnist(_MnistLike):
    """MNIST: 60,000 + 10,000 handwritten digits of 28 x 28 pixels (LeCun et al. 1998)."""


@_published("fashion-mnist")
class FashionMnist(_MnistLike):
    """Fashion-MNIST: 60,000 + 10,000 pieces of clothing of 28 x 28 pixels (Xiao, Rasul and Vollgraf 2017)."""


_CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_CIFAR_DELTA = ("cifar10_train_1.npz", "cifar10_train_2.npz", "cifar10_test.npz")


@_published("cifar10")
class Cifar10(_Published):
    """CIFAR-10: 50,000 + 10,000 colour images of 32 x 32 pixels (Krizhevsky 2009)."""

    shape = (32, 32, 3)
    full_size = 50_000

    def expected_files(self) -> str:
        """Name the files."""
        return "cifar10.npz, cifar10_train_1.npz and its two companions, data_batch_1 to 5, or cifar-10-python.tar.gz"

    def arrays(self, folder: Path) -> tuple[Path, dict[str, AnyArray]] | None:
        """Read the first format that the folder has."""
        where: Path | None
        # The formats in which CIFAR-10 is passed on, the quickest to read first.
        if (where := first_file(folder, ("cifar10.npz",))) is not None:
            return where, files.read_npz(where, _PARTS)
        if first_file(folder, _CIFAR_DELTA) is not None:
            where, parts = folder, [files.read_delta(_existing(folder, name)) for name in _CIFAR_DELTA]
        elif first_file(folder, _CIFAR_BATCHES) is not None:
            where = folder
            parts = [files.read_cifar_batch(_existing(folder, name), None) for name in _CIFAR_BATCHES]
        elif (where := first_file(folder, ("cifar-10-python.tar.gz",))) is not None:
            parts = [files.read_cifar_batch(where, f"cifar-10-batches-py/{name}") for name in _CIFAR_BATCHES]
        else:
            return None
        *train, (x_test, y_test) = parts
        x, y = (np.concatenate(part) for part in zip(*train, strict=True))
        return where, {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}

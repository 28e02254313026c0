"""FEMNIST of LEAF: handwritten digits and letters with their writers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedcohort.core.arrays import AnyArray, IntArray
from fedcohort.core.errors import DataError
from fedcohort.core.params import Boolean, param
from fedcohort.simulate.data import files
from fedcohort.simulate.data.dataset import Dataset
from fedcohort.simulate.data.sources import DATASETS, FileSource, assemble, first_file

_PARTS = ("x_train", "y_train", "x_test", "y_test")


@DATASETS.register("femnist")
@dataclass(frozen=True, kw_only=True)
class Femnist(FileSource):
    """FEMNIST of LEAF: handwritten digits and letters of 28 x 28 pixels with their writers (Caldas et al. 2018).

    As in LEAF, the background is white (255) and ink is dark. Writers without test samples keep their training samples.
    """

    digits: bool = param(False, Boolean(), "only the digits: ten classes, about equally frequent for each writer")

    labels: ClassVar[tuple[str, ...]] = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
    subfolders = ("femnist", "femnist/data", "leaf/data/femnist/data")
    advice = (
        "make it with LEAF (github.com/TalwalkarLab/leaf, data/femnist/preprocess.sh -s niid -t sample) and put its "
        "folders train and test into one of these"
    )

    def expected_files(self) -> str:
        """Name the files."""
        return "femnist.npz, or LEAF's train/*.json and test/*.json"

    def read(self, folder: Path) -> Dataset | None:
        """Read the archive or LEAF's files."""
        where = first_file(folder, ("femnist.npz",))
        if where is not None:
            return self._read_npz(where)
        train, test = (sorted((folder / part).glob("*.json")) for part in ("train", "test"))
        if not train:
            return None
        if not test:
            raise DataError(f"The folder {folder} has LEAF's train/*.json but no test/*.json.", hint="complete it")
        return self._read_leaf(folder, train, test)

    def _read_npz(self, where: Path) -> Dataset:
        arrays = files.read_npz(where, [*_PARTS, "w_train", "w_test", "writers"])
        names = tuple(n.decode() if isinstance(n, bytes) else str(n) for n in arrays["writers"].tolist())
        owners = []
        for part in ("train", "test"):
            w = arrays[f"w_{part}"]
            if w.shape != arrays[f"y_{part}"].shape or w.dtype.kind not in "iu" or int(w.max(initial=0)) >= len(names):
                raise files.content_error(
                    where, f"w_{part} must name one of {len(names)} writers per sample, but it is {w.shape}"
                )
            owners.append(w.astype(np.int64))
        return self._dataset(where, arrays, owners, names)

    def _read_leaf(self, where: Path, train: list[Path], test: list[Path]) -> Dataset:
        parts = {"train": _read_leaf_files(train), "test": _read_leaf_files(test)}
        names = tuple(sorted(set(parts["train"]) | set(parts["test"])))
        number = {name: i for i, name in enumerate(names)}
        arrays: dict[str, AnyArray] = {}
        owners = []
        for part, users in parts.items():
            arrays[f"x_{part}"] = np.concatenate([x for x, _ in users.values()] or [np.empty((0, 28, 28), np.uint8)])
            arrays[f"y_{part}"] = np.concatenate([y for _, y in users.values()] or [np.empty(0, np.int64)])
            owners.append(np.repeat([number[u] for u in users], [len(y) for _, y in users.values()]).astype(np.int64))
        return self._dataset(where, arrays, owners, names)

    def _dataset(
        self, where: Path, arrays: Mapping[str, AnyArray], owners: list[IntArray], names: tuple[str, ...]
    ) -> Dataset:
        labels = self.labels
        if self.digits:
            labels = labels[:10]
            digits = [arrays[f"y_{part}"] < len(labels) for part in ("train", "test")]
            owners = [owner[mask] for owner, mask in zip(owners, digits, strict=True)]
            arrays = {key: arrays[key][digits["test" in key]] for key in _PARTS}
        writers = (owners[0], owners[1], names)
        return assemble(self.name, where, arrays, class_names=labels, shape=(28, 28), writers=writers)


def _read_leaf_files(paths: Sequence[Path]) -> dict[str, tuple[AnyArray, AnyArray]]:
    """Return images (n, 28, 28) uint8 and labels (n,) of every writer in LEAF's json files for FEMNIST.

    LEAF writes a pixel as its grey value divided by 255. Each writer is in one file.
    """
    users: dict[str, tuple[AnyArray, AnyArray]] = {}
    for path in paths:
        with files.file_errors(path, "LEAF's json"):
            with open(path, encoding="utf-8") as file:
                table = json.load(file)
            if not isinstance(table, dict) or not isinstance(table.get("user_data"), dict):
                raise files.content_error(path, "it has no table 'user_data'")
            for user, samples in table["user_data"].items():
                if user in users:
                    raise files.content_error(path, f"writer {user!r} is also in another file")
                users[user] = _leaf_samples(path, user, samples)
    return users


def _leaf_samples(path: Path, user: str, samples: Any) -> tuple[AnyArray, AnyArray]:
    """Return one writer's images (n, 28, 28) and labels (n,)."""
    x = np.asarray(samples["x"], dtype=np.float32)
    y = np.asarray(samples["y"])
    if x.shape != (len(y), 784) or y.dtype.kind not in "iu":
        raise files.content_error(path, f"writer {user!r} has samples {x.shape}, {y.shape} instead of (n, 784), (n,)")
    if not (np.isfinite(x).all() and x.min(initial=0) >= 0 and x.max(initial=0) <= 1):
        raise files.content_error(path, f"writer {user!r} has pixels outside [0, 1]")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, 28, 28), y

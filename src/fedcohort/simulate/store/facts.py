"""What the results keep of a federation: ``federation-KEY.npz`` in an experiment's directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcohort.core.archives import ArchiveError, array_shapes, read_arrays
from fedcohort.core.arrays import AnyArray, FloatArray, IntArray


@dataclass(frozen=True)
class FederationFacts:
    """What the results keep of a federation."""

    label_counts: FloatArray  # (N, B) as the clients see them
    true_counts: FloatArray  # (N, B)
    sizes: FloatArray  # (N,)
    noise_rate: FloatArray  # (N,)
    names: tuple[str, ...] | None
    groups: IntArray | None = None  # (N,) the group of each client
    group_names: tuple[str, ...] = ()


def read_facts(path: Path) -> FederationFacts:
    """Return what a file holds; :class:`~fedcohort.core.archives.ArchiveError` when it is damaged or too large."""
    arrays = read_arrays(path)
    names = tuple(map(str, arrays["names"].tolist())) if "names" in arrays else None
    counts, true, sizes, noise = (np.asarray(arrays[k]) for k in ("label_counts", "true_counts", "sizes", "noise_rate"))
    facts = (counts, true, sizes, noise)
    lengths = {*(len(array) for array in facts if array.ndim), *([] if names is None else [len(names)])}
    if [array.ndim for array in facts] != [2, 2, 1, 1] or len(lengths) != 1:
        raise ArchiveError("its arrays are not about one number of clients")
    if any(array.dtype.kind not in "iuf" for array in facts):
        raise ArchiveError("its arrays are no numbers")
    groups, group_names = _read_groups(arrays, len(sizes))
    return FederationFacts(counts, true, sizes, noise, names, groups, group_names)


def _read_groups(arrays: Mapping[str, AnyArray], clients: int) -> tuple[IntArray | None, tuple[str, ...]]:
    """Return the group of each client and the groups' names; files of earlier versions have none."""
    if "groups" not in arrays:
        return None, ()
    groups, names = np.asarray(arrays["groups"]), tuple(map(str, arrays["group_names"].tolist()))
    if groups.shape != (clients,) or groups.dtype.kind not in "iu" or not _inside(groups, len(names)):
        raise ArchiveError("its groups are not about its clients")
    return groups, names


def _inside(numbers: IntArray, limit: int) -> bool:
    return not len(numbers) or bool(0 <= numbers.min() <= numbers.max() < limit)


def count_clients(path: Path) -> int:
    """Return how many clients a file is about; reads no more than that."""
    (count,) = array_shapes(path)["sizes"]
    return count

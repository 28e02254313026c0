"""Facts about a federation, stored as ``federation-KEY.npz`` in an experiment's directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcohort.core.archives import ArchiveError, array_shapes, read_arrays
from fedcohort.core.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class FederationFacts:
    """Facts about the clients of a federation."""

    label_counts: FloatArray  # (N, B) as the clients see them
    true_counts: FloatArray  # (N, B)
    sizes: FloatArray  # (N,)
    noise_rate: FloatArray  # (N,)
    names: tuple[str, ...] | None
    groups: IntArray | None = None  # (N,) the group of each client
    group_names: tuple[str, ...] = ()


def read_facts(path: Path) -> FederationFacts:
    """Read a file; raises :class:`~fedcohort.core.archives.ArchiveError` if it is damaged or too large."""
    arrays = read_arrays(path)
    names = tuple(map(str, arrays["names"].tolist())) if "names" in arrays else None
    counts, true, sizes, noise = (np.asarray(arrays[k]) for k in ("label_counts", "true_counts", "sizes", "noise_rate"))
    # The file may be from anywhere: a report draws what it says, so lengths and types must agree.
    facts = (counts, true, sizes, noise)
    lengths = {*(len(array) for array in facts if array.ndim), *([] if names is None else [len(names)])}
    if [array.ndim for array in facts] != [2, 2, 1, 1] or len(lengths) != 1:
        raise ArchiveError("its arrays disagree about the number of clients")
    if any(array.dtype.kind not in "iuf" for array in facts):
        raise ArchiveError("its arrays are not numbers")
    if "groups" not in arrays:  # a federation may have none
        return FederationFacts(counts, true, sizes, noise, names)
    groups, titles = np.asarray(arrays["groups"]), tuple(map(str, arrays["group_names"].tolist()))
    if groups.shape != sizes.shape or groups.dtype.kind not in "iu" or not np.isin(groups, range(len(titles))).all():
        raise ArchiveError("its groups do not fit its clients")
    return FederationFacts(counts, true, sizes, noise, names, groups, titles)


def count_clients(path: Path) -> int:
    """Return the number of clients in a file, without reading the rest."""
    (count,) = array_shapes(path)["sizes"]
    return count

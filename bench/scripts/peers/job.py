"""What every peer gets: the data, the clients, the first model and the local training. Needs only numpy.

:mod:`run` writes it to a folder, and the adapters ``on_*.py`` read it in their own environments.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GIVEN: dict[str, Any] = {}  # what an adapter passes to classes that its framework loads by name


@dataclass(frozen=True, eq=False)
class Job:
    """One workload."""

    name: str
    model: str  # "mlp" or "lenet"
    classes: int
    steps: int
    batch: int
    lr: float
    decay: float
    cohort: int
    x: np.ndarray  # (n, ...) float32, standardised, channels first; memory-mapped
    y: np.ndarray  # (n,) int64
    parts: list[np.ndarray]  # positions of each client's samples
    start: dict[str, np.ndarray]  # the first global model, by the names of torch's module
    folder: Path

    def test(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the test set."""
        return np.load(self.folder / "x_test.npy", mmap_mode="r"), np.load(self.folder / "y_test.npy")

    def batches(self, client: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """Yield the positions of each step's batch; epochs are shuffled, and the last batch of one may be short."""
        mine, done = self.parts[client], 0
        while True:
            order = mine[rng.permutation(len(mine))]
            for first in range(0, len(order), self.batch):
                yield order[first : first + self.batch]
                done += 1
                if done == self.steps:
                    return


def processor_time() -> float:
    """Return the processor time of this process and of its living descendants, in seconds."""
    parents: dict[int, list[int]] = {}
    spent = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(place.name))
        spent[int(place.name)] = sum(map(int, fields[11:15]))
    total, left = 0, [os.getpid()]
    while left:
        process = left.pop()
        total += spent.get(process, 0)
        left += parents.get(process, [])
    return total / os.sysconf("SC_CLK_TCK")


def write(folder: Path, facts: dict[str, object], arrays: dict[str, np.ndarray], start: dict[str, np.ndarray]) -> None:
    """Write a job."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "facts.json").write_text(json.dumps(facts))
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    np.savez(folder / "start.npz", **start)


def read(folder: str | Path) -> Job:
    """Read a job; large arrays are mapped into memory."""
    place = Path(folder)
    facts = json.loads((place / "facts.json").read_text())
    order, offsets = np.load(place / "order.npy"), np.load(place / "offsets.npy")
    parts = [order[a:b] for a, b in itertools.pairwise(offsets)]
    start = dict(np.load(place / "start.npz"))
    x, y = np.load(place / "x.npy", mmap_mode="r"), np.load(place / "y.npy")
    return Job(**facts, x=x, y=y, parts=parts, start=start, folder=place)

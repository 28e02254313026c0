"""Draw batch plans in compiled code: the same as :func:`~fedcohort.training.local.batch_plan`, but faster."""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path

import numpy as np

from fedcohort.core import rng
from fedcohort.simulate.engine.library import address, load, load_compiled
from fedcohort.training.local import BatchPlan, LocalTraining, batch_plan, plan_counts

_MOST_SAMPLES = 2**31  # of one client
_STREAM = zlib.crc32(rng.TRAINING.encode())


def draw_plan(seed: int, round: int, client: int, n: int, local: LocalTraining, steps: int) -> BatchPlan:
    """Draw the batches of one client in one round."""
    library = load_compiled("plans")
    if library is None or n == 0 or steps == 0 or n >= _MOST_SAMPLES:
        return batch_plan(seed, round, client, n, local, steps)
    return _draw(library, seed, round, client, n, local, steps)


def _draw(
    library: ctypes.CDLL, seed: int, round: int, client: int, n: int, local: LocalTraining, steps: int
) -> BatchPlan:
    width = min(local.batch_size, n)
    # Put the key, the indices and space for one epoch into one array: allocation is most of the remaining cost.
    room = np.empty(3 + steps * width + n, dtype=np.int64)
    room[:3] = _STREAM, round, client
    key = address(room)
    indices = room[3 : 3 + steps * width].reshape(steps, width)
    out = key + 8 * 3
    library.fedcohort_plan(seed, key, 3, n, width, steps, out, out + 8 * steps * width)
    return BatchPlan(indices, plan_counts(n, width, steps))


def try_out(path: str) -> None:
    """Raise unless the library at ``path`` draws what numpy draws."""
    library = load("plans", Path(path))
    generator = np.random.default_rng(0)
    for n in (1, 2, 3, 7, 64, 600, 5001):
        for batch_size in (1, 5, 64):
            seed, round, client = (int(value) for value in generator.integers(0, 2**40, 3))
            seed, round, client = (seed, round, client) if n % 2 else (n - 2, 0, client % 100)
            local = LocalTraining(steps=9, batch_size=batch_size)
            got, want = _draw(library, seed, round, client, n, local, 9), batch_plan(seed, round, client, n, local)
            if not (np.array_equal(got.indices, want.indices) and np.array_equal(got.counts, want.counts)):
                raise RuntimeError(f"its batches differ from numpy's for seed {seed}, round {round}, client {client}")

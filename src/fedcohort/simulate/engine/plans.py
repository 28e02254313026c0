"""Draw the batches of many jobs at once, in compiled code where there is a compiler.

The batches are those of :func:`~fedcohort.training.local.batch_plan`, drawn many times faster.
"""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path

import numpy as np

from fedcohort.core import rng
from fedcohort.core.arrays import AnyArray, IntArray
from fedcohort.simulate.engine.library import address, load, load_compiled
from fedcohort.training.local import LocalTraining, batch_plan

_MAX_SAMPLES = 2**31  # of one client
_STREAM = zlib.crc32(rng.TRAINING.encode())
# The fields of a job in csrc/plans.c, in that order.
JOB = np.dtype(
    [(name, np.int64) for name in ("seed", "round", "client", "n", "steps", "base", "start", "stride", "row")]
)


def draw_batches(jobs: AnyArray, local: LocalTraining, out: IntArray) -> None:
    """Write the batches of all jobs into ``out``.

    Parameters
    ----------
    jobs : array of :data:`JOB`
        ``seed``, ``round``, ``client``, ``n`` and ``steps`` are the arguments of ``batch_plan``. The row of step s has
        ``row`` numbers and starts at ``out[start + s * stride]``. It holds the positions plus ``base``; a row that is
        longer than the batch ends in ``base``. All jobs have samples and steps.
    out : flat array
    """
    library = load_compiled("plans")
    if library is None or (jobs["n"] >= _MAX_SAMPLES).any():
        for seed, round, client, n, steps, base, start, stride, row in jobs.tolist():
            indices = batch_plan(seed, round, client, n, local, steps).indices
            rows = start + stride * np.arange(len(indices))[:, None] + np.arange(row)
            out[rows] = base
            out[rows[:, : indices.shape[1]]] += indices
    else:
        _draw(library, jobs, local, out)


def _draw(library: ctypes.CDLL, jobs: AnyArray, local: LocalTraining, out: IntArray) -> None:
    order = np.empty(jobs["n"].max(initial=0), np.int64)
    library.fedcohort_plans(address(jobs), len(jobs), local.batch_size, _STREAM, address(out), address(order))


def try_out(path: str) -> None:
    """Raise unless the library at ``path`` draws what numpy draws."""
    library = load("plans", Path(path))
    generator = np.random.default_rng(0)
    for n in (1, 2, 3, 7, 64, 600, 5001):
        for batch_size in (1, 5, 64):
            seed, round, client = (int(value) for value in generator.integers(0, 2**40, 3))
            seed, round, client = (seed, round, client) if n % 2 else (n - 2, 0, client % 100)
            local = LocalTraining(steps=9, batch_size=batch_size)
            want = batch_plan(seed, round, client, n, local).indices
            got, width = np.empty_like(want), want.shape[1]
            _draw(library, np.array([(seed, round, client, n, 9, 0, 0, width, width)], JOB), local, got)
            if not np.array_equal(got, want):
                raise RuntimeError(f"its batches differ from numpy's for seed {seed}, round {round}, client {client}")

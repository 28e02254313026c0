"""The CPU backend: this process alone, or with worker processes when the work is worth waking them."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator

import numpy as np
import torch

from fedcohort.arrays import FloatArray, IntArray
from fedcohort.simulate.engine.groups import JobTable
from fedcohort.simulate.engine.pool import Arena, Pool, Recipe
from fedcohort.simulate.engine.program import Program
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.engine.tasks import EVALUATION_CHUNK, Executor, Work, train_work

_POOL_AFTER = 1.0  # seconds of work after which starting workers is worth its second or two
_POOL_FROM = 1.5e-3  # seconds a call must be expected to last for waking the workers to pay


class ProcessBackend:
    """Runs a CPU program in this process and, for larger work, in worker processes beside it.

    Parameters
    ----------
    store : Store
        The data.
    program : Program
        The architecture.
    recipe : Recipe
        From which a worker builds the same program.
    device : torch.device
        Where the vectors are; anything but the CPU means one process.
    workers : int, optional
        Processes that compute; None decides by itself.
    """

    def __init__(
        self, store: Store, program: Program, recipe: Recipe, *, device: torch.device, workers: int | None
    ) -> None:
        self.device = device
        self._recipe = recipe
        self._executor = Executor(store.to(device), program)
        self._store = store
        self._arena = Arena()
        self._pool: Pool | None = None
        self._processes = workers or usable_cores()
        if recipe.model.startswith("__main__:") or os.name != "posix" or device.type != "cpu":
            self._processes = 1  # a worker could not import the model, or could not be given memory
        self._spent = 0.0
        self._cost: dict[str, float] = {}  # seconds of one unit by kind, as last seen
        self._explicit = workers is not None
        self._borrowed: int | None = None  # torch's number of threads before there were workers
        if self._explicit and self._processes > 1:
            self._pool = self._new_pool()

    def train(
        self, table: JobTable, models: torch.Tensor, prox: float, correction: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Train every job; return vectors (J, P) and first losses (J,)."""
        work = train_work(table, self._executor.program, prox, self._tensor, correction is not None, len(models))
        work.tensors["models"].copy_(models)
        self._add_result(work, (len(table), models.shape[1]))
        if correction is not None:
            work.tensors["correction"].copy_(correction)
        self._run(work)
        return work.tensors["out"], work.tensors["first_loss"].clone()

    def losses(
        self, models: torch.Tensor, queries: IntArray, wanted: dict[str, bool], pseudo_models: torch.Tensor | None
    ) -> FloatArray:
        """Return (Q, 4): loss, validation loss, robust loss, pseudo-label loss; NaN where there is none."""
        tensors = {"queries": self._filled("queries", queries), "models": self._filled("models", models)}
        if pseudo_models is not None:
            tensors["pseudo_models"] = self._filled("pseudo_models", pseudo_models)
        tensors["numbers"] = self._tensor("numbers", torch.float64, (len(queries), 4))
        tensors["numbers"].fill_(float("nan"))
        self._run(Work("losses", len(queries), tensors, {name: float(flag) for name, flag in wanted.items()}))
        return tensors["numbers"].numpy().copy()

    def gradients(self, models: torch.Tensor, queries: IntArray) -> torch.Tensor:
        """Return full-batch gradients (Q, P)."""
        tensors = {
            "queries": self._filled("queries", queries),
            "models": self._filled("models", models),
        }
        work = self._add_result(Work("gradients", len(queries), tensors), (len(queries), models.shape[1]))
        self._run(work)
        return work.tensors["out"]

    def evaluate(self, models: torch.Tensor) -> tuple[FloatArray, FloatArray]:
        """Return test loss (M,) and accuracy (M,)."""
        count = self._store.shape.n_test
        chunks = -(-count // EVALUATION_CHUNK)
        tensors = {
            "models": self._filled("models", models),
            "numbers": self._tensor("numbers", torch.float64, (len(models) * chunks, 2)),
        }
        self._run(Work("evaluate", len(models) * chunks, tensors, {"chunks": chunks}))
        sums = tensors["numbers"].numpy().reshape(len(models), chunks, 2).sum(1)
        return sums[:, 0] / count, sums[:, 1] / count

    def logits(self, models: torch.Tensor, positions: IntArray) -> torch.Tensor:
        """Return logits (M, V, C) on training samples."""
        chunks = -(-len(positions) // EVALUATION_CHUNK)
        tensors = {
            "models": self._filled("models", models),
            "positions": self._filled("positions", positions),
        }
        work = Work("logits", len(models) * chunks, tensors, {"chunks": chunks})
        self._run(self._add_result(work, (len(models), len(positions), self._recipe.classes)))
        return work.tensors["out"]

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._borrowed is not None:
            torch.set_num_threads(self._borrowed)
            self._borrowed = None

    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:
            self.close()

    # -- running -------------------------------------------------------------------------------------------------

    def _run(self, work: Work) -> None:
        """Do the work here, or here and in the workers, whichever is expected to be sooner."""
        claims = self._tensor("claims", torch.uint8, (max(work.units, 1),))
        claims.zero_()
        began = time.perf_counter()
        pool = self._usable_pool(work)
        with _one_thread():
            if pool is None:
                self._executor.run(work, claims, 0)
            else:
                try:
                    pool.start(work, claims)
                    self._executor.run(work, claims, 0)
                    pool.finish()
                except BaseException:
                    # Workers may still be writing; a pool whose answers are out of step is of no use to anybody.
                    self.close()
                    raise
        elapsed = time.perf_counter() - began
        if pool is None and work.units:
            self._cost[work.kind] = elapsed / work.units
        self._spent += elapsed
        if self._pool is None and not self._explicit and self._processes > 1 and self._spent > _POOL_AFTER:
            self._pool = self._new_pool()

    def _usable_pool(self, work: Work) -> Pool | None:
        """Return the pool when it is up and the work is worth it; a pool that was asked for is waited for."""
        if self._explicit and self._processes > 1 and self._pool is None:
            self._pool = self._new_pool()
        if self._pool is None or work.units < 2:
            return None
        expected = self._cost.get(work.kind, 0.0) * work.units
        if not self._explicit and expected < _POOL_FROM:
            return None
        return self._pool if self._pool.ready(wait=self._explicit) else None

    def _new_pool(self) -> Pool:
        # From now on the workers are the parallelism. A second thread here would gain little in what is left to do
        # between calls, and would go on spinning for milliseconds on the core a worker needs.
        self._borrowed = one_torch_thread()
        return Pool(self._processes - 1, self._store, self._recipe, self._arena)

    def _tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if dtype == torch.float32 and self.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self._arena.tensor(name, dtype, shape)

    def _add_result(self, work: Work, shape: tuple[int, ...]) -> Work:
        """Give the work a tensor ``out`` that is handed to the caller as it is: one no earlier caller still holds."""
        for number in itertools.count():
            name = f"out-{number}"
            block = self._arena.blocks.get(name)
            if block is None or not block.in_use:
                work.tensors["out"] = self._tensor(name, torch.float32, shape)
                work.blocks["out"] = name
                break
        return work

    def _filled(self, name: str, values: torch.Tensor | IntArray) -> torch.Tensor:
        source = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
        return self._tensor(name, source.dtype, tuple(source.shape)).copy_(source)


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_torch_thread() -> int | None:
    """Let torch compute with one thread; return how many it had, or None if it had no more (nothing to give back)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    return before if before > 1 else None


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: the workers are the parallelism, and results do not depend on who does a unit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

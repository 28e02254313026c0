"""Any module, with autograd: one client after the other on each core, or on a CUDA device."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedcohort import rng
from fedcohort.arrays import FloatArray, IntArray
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.jobs import JobTable
from fedcohort.simulate.engine.losses import cross_entropy
from fedcohort.simulate.engine.plain import train_plain
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.engine.types import Spans
from fedcohort.simulate.local import LocalTraining

_CHUNK = 1000  # samples of one forward pass outside training


class ModuleBackend:
    """Trains and evaluates any module with the plain loop; on the CPU each thread has a copy of the module.

    Parameters
    ----------
    module : nn.Module
        The architecture; moved to the device.
    store : Store
        The data.
    local : LocalTraining
        How clients train.
    sample : tuple of int
        Shape of a sample.
    device : torch.device
        Where to compute.
    threads : int
        How many threads compute, on the CPU. A module that draws random numbers gets one: torch has one generator.
    """

    def __init__(
        self,
        module: nn.Module,
        store: Store,
        local: LocalTraining,
        *,
        sample: tuple[int, ...],
        device: torch.device,
        threads: int,
    ) -> None:
        self._store, self._local, self._sample, self._device = store.to(device), local, sample, device
        self._draws = draws(module, sample)
        if device.type != "cpu" or self._draws:
            threads = 1
        self._flats = [FlatModel(copy.deepcopy(module).to(device)) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads - 1, "fedcohort") if threads > 1 else None

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def train(
        self, table: JobTable, models: torch.Tensor, prox: float, correction: torch.Tensor | None
    ) -> torch.Tensor:
        """Train every job with the plain loop; return vectors (J, P)."""
        store, local = self._store, self._local
        out = models[torch.from_numpy(table.run)]

        def train(flat: FlatModel, job: int) -> None:
            if not table.steps[job]:
                return
            first, n = int(table.first[job]), int(table.n[job])
            with torch.enable_grad(), self._seeded(table, job):
                train_plain(
                    flat.load(out[job]),
                    store.x[store.sample[first : first + n]].view(n, *self._sample),
                    store.label[first : first + n],
                    table.plan(job, local),
                    local,
                    round=int(table.round[job]),
                    batches_per_epoch=int(table.per_epoch[job]),
                    prox=prox,
                    correction=None if correction is None else correction[job],
                )
            flat.store(out[job])

        self._each(len(table), train)
        return out

    def cross_entropies(
        self, models: torch.Tensor, spans: Spans, pseudo: bool, teachers: torch.Tensor | None
    ) -> Iterator[tuple[IntArray, torch.Tensor, torch.Tensor | None]]:
        """Yield which questions (q,), and their samples' cross-entropies with labels and pseudo-labels."""
        some = np.flatnonzero(spans.count)
        if not len(some):
            return
        found: list[list[torch.Tensor]] = [[] for _ in some]

        def judge(flat: FlatModel, unit: int) -> None:
            question = some[unit]
            run, first, count = int(spans.run[question]), int(spans.first[question]), int(spans.count[question])
            x, labels = self._samples(first, count)
            logits = self._scores(flat, models[run], x)
            found[unit].append(cross_entropy(logits, labels))
            if pseudo:
                guide = logits if teachers is None else self._scores(flat, teachers[run], x)
                found[unit].append(cross_entropy(logits, guide.argmax(1)))

        self._each(len(some), judge)
        columns = [torch.cat(column) for column in zip(*found, strict=True)]
        yield some, columns[0], columns[1] if pseudo else None

    def gradients(self, models: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Return full-batch gradients (Q, P), summed over chunks; buffers get zeros."""
        out = torch.zeros(len(spans), models.shape[1], device=models.device)

        def differentiate(flat: FlatModel, unit: int) -> None:
            count = int(spans.count[unit])
            if not count:
                return
            x, y = self._samples(int(spans.first[unit]), count)
            module = flat.load(models[int(spans.run[unit])]).eval()
            parameters = list(module.parameters())
            with torch.enable_grad():
                for part, labels in zip(torch.split(x, _CHUNK), torch.split(y, _CHUNK), strict=True):
                    loss = F.cross_entropy(module(part.view(len(part), *self._sample)), labels, reduction="sum") / count
                    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
                    for slot, grad in zip(flat.slots, grads, strict=False):
                        if grad is not None:
                            slot.of(out[unit]).add_(grad)

        self._each(len(spans), differentiate)
        return out

    def evaluate(self, models: torch.Tensor) -> tuple[FloatArray, FloatArray]:
        """Return test loss (M,) and accuracy (M,)."""
        x, y = self._store.x_test, self._store.y_test
        found = np.empty((len(models), 2))

        def judge(flat: FlatModel, unit: int) -> None:
            logits = self._scores(flat, models[unit], x)
            right = logits.argmax(1) == y
            found[unit] = float(cross_entropy(logits, y).double().mean()), float(right.double().mean())

        self._each(len(models), judge)
        return found[:, 0].copy(), found[:, 1].copy()

    def logits(self, models: torch.Tensor, positions: IntArray) -> torch.Tensor:
        """Return logits (M, V, C) on training samples."""
        x = self._store.x[torch.from_numpy(positions).to(self._device)]
        found: list[torch.Tensor] = [torch.empty(0)] * len(models)

        def score(flat: FlatModel, unit: int) -> None:
            found[unit] = self._scores(flat, models[unit], x)

        self._each(len(models), score)
        return torch.stack(found)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _samples(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = slice(first, first + count)
        return self._store.x[self._store.sample[slots]], self._store.label[slots]

    def _scores(self, flat: FlatModel, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the logits (n, C) of the model ``vector`` on ``x`` (n, F)."""
        module = flat.load(vector).eval()
        with torch.no_grad():
            return torch.cat([module(part.view(len(part), *self._sample)) for part in torch.split(x, _CHUNK)])

    @contextlib.contextmanager
    def _seeded(self, table: JobTable, job: int) -> Iterator[None]:
        """Let a module that draws (dropout) do so from a stream of the job, never from the caller's generator."""
        if not self._draws:
            yield
            return
        stream = rng.stream(int(table.seed[job]), rng.MODEL, int(table.round[job]), int(table.client[job]))
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(int(stream.integers(2**63)))
            yield

    def _each(self, units: int, do: Callable[[FlatModel, int], None]) -> None:
        """Do every unit; its result depends on nothing but the unit, so it does not matter which thread takes it."""
        waiting = iter(range(units))

        def take(flat: FlatModel) -> None:
            for unit in waiting:
                do(flat, unit)

        before = one_torch_thread() if self._device.type == "cpu" else None
        try:
            others = [] if self._pool is None else [self._pool.submit(take, flat) for flat in self._flats[1:units]]
            try:
                take(self._flats[0])
            finally:
                for other in others:
                    other.result()
        finally:
            if before is not None:
                torch.set_num_threads(before)


def draws(module: nn.Module, sample: tuple[int, ...]) -> bool:
    """Whether a module in training draws random numbers, as dropout does."""
    tried = copy.deepcopy(module).cpu().train()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        tried(torch.zeros(2, *sample))
        return not torch.equal(before, torch.get_rng_state())


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_torch_thread() -> int | None:
    """Let torch compute with one thread; return how many it had, or None if it had no more (nothing to give back)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    return before if before > 1 else None

"""Train any module with autograd, one client after another on each core, or on a CUDA device."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import torch
from torch import nn

from fedcohort.core import rng
from fedcohort.core.arrays import IntArray
from fedcohort.simulate.cores import free_cores
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.jobs import JobTable
from fedcohort.simulate.engine.layer_rules import LayerRules, stream_keys
from fedcohort.simulate.engine.plain import train_plain
from fedcohort.simulate.engine.precision import autocast, products
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.engine.types import Spans
from fedcohort.simulate.own_code import own_code
from fedcohort.training.local import LocalTraining
from fedcohort.training.losses import cross_entropy

_CHUNK = 1000  # samples in one forward pass outside training


class ModuleBackend:
    """Trains and evaluates any module with the plain loop.

    On the CPU, ``workers`` clients are trained at once, each by one thread of torch. So a result has the same bits
    however many there are, and no client waits for the threads of another; a sum that torch cuts into as many parts as
    there are threads would differ from machine to machine, and a thread that waits for its turn on a busy core holds
    up every single operation.

    Parameters
    ----------
    flat : FlatModel
        The architecture; moved to the device.
    store : Store
        The data.
    local : LocalTraining
        How clients train.
    losses : function or None
        Loss of each sample (n,), from outputs and targets; None: a classifier's cross-entropy.
    device : torch.device
        Where to compute.
    workers : int, optional
        How many clients to train at once on the CPU; default: as many as there are free cores at the time.
    precision : str
        "single", "tf32" or "bf16".
    """

    def __init__(
        self,
        flat: FlatModel,
        store: Store,
        local: LocalTraining,
        losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
        *,
        device: torch.device,
        workers: int | None = None,
        precision: str = "tf32",
    ) -> None:
        # On the CPU this is the engine's own store, not a copy.
        self._store, self._local, self._device = store.to(device), local, device
        self._own, self._losses = losses, losses or cross_entropy
        self._precision = precision
        module = copy.deepcopy(flat.module).to(device)
        self._draws, self._foreign = draws_random_numbers(module, store.shape, store.x.dtype)
        # Random numbers that only torch's generator gives come from one for the whole process.
        self._workers = workers if device.type == "cpu" and not self._foreign else 1
        self._models = [FlatModel(module)]
        self._give_back = torch_threads(self, 1 if device.type == "cpu" else None)

    def close(self) -> None:
        """Restore torch's number of threads."""
        self._give_back()

    def train(
        self, table: JobTable, models: torch.Tensor, prox: float, correction: torch.Tensor | None
    ) -> torch.Tensor:
        """Train all jobs with the plain loop; return vectors (J, P)."""
        store, local = self._store, self._local
        out = models[torch.from_numpy(table.run)]

        def work(flat: FlatModel, job: int) -> None:
            first, n, steps = int(table.first[job]), int(table.n[job]), int(table.steps[job])
            seed, round_, client = (np.asarray(part) for part in table.key(job))
            flat.load(out[job])
            with self._seed_torch(table, job):
                train_plain(
                    flat,
                    store.x.view(len(store.x), *store.shape),
                    store.targets_of(first, n),
                    table.plan(job, local),
                    local,
                    round=int(table.round[job]),
                    batches_per_epoch=int(table.per_epoch[job]),
                    prox=prox,
                    correction=None if correction is None else correction[job],
                    crops=table.crops(job, local) if local.augment else None,
                    losses=self._own,
                    keys=stream_keys(seed, round_, client, np.arange(steps)) if self._draws else None,
                    rows=store.sample[first : first + n],
                    precision=self._precision,
                )
            flat.store(out[job])

        # The longest jobs first, so that the last ones to finish are short.
        order = np.argsort(-(table.steps * np.minimum(table.n, local.batch_size)), kind="stable")
        self._each(order[table.steps[order] > 0].tolist(), work)
        return out

    def cross_entropies(
        self, models: torch.Tensor, spans: Spans, pseudo: bool, teachers: torch.Tensor | None
    ) -> Iterator[tuple[IntArray, torch.Tensor, torch.Tensor | None]]:
        """Yield the indices of spans (q,), and their samples' cross-entropies with labels and pseudo-labels."""
        filled = np.flatnonzero(spans.count)
        by_label = [torch.empty(0)] * len(filled)
        by_pseudo = list(by_label)

        def work(flat: FlatModel, place: int) -> None:
            span = filled[place]
            run, first, count = int(spans.run[span]), int(spans.first[span]), int(spans.count[span])
            x, labels = self._samples(first, count)
            logits = self._scores(flat, models[run], x)
            by_label[place] = self._losses(logits, labels)
            if pseudo:
                guide = logits if teachers is None else self._scores(flat, teachers[run], x)
                by_pseudo[place] = self._losses(logits, guide.argmax(1))

        self._each(range(len(filled)), work)
        if len(filled):
            yield filled, torch.cat(by_label), torch.cat(by_pseudo) if pseudo else None

    def gradients(self, models: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Return full-batch gradients (Q, P), summed over chunks; buffers get zeros."""
        out = torch.zeros(len(spans), models.shape[1], device=models.device)

        def work(flat: FlatModel, unit: int) -> None:
            count = int(spans.count[unit])
            x, y = self._samples(int(spans.first[unit]), count)
            module = flat.load(models[int(spans.run[unit])]).eval()
            with torch.enable_grad():
                for part, labels in zip(torch.split(x, _CHUNK), torch.split(y, _CHUNK), strict=True):
                    with own_code(), autocast(self._precision, self._device):
                        logits = module(part.view(len(part), *self._store.shape))
                    loss = self._losses(logits.float(), labels).sum() / count
                    with own_code():
                        found = torch.autograd.grad(loss, flat.parameters, allow_unused=True)
                    for total, gradient in zip(flat.split(out[unit]), found, strict=True):
                        if gradient is not None:
                            total.add_(gradient)

        self._each(np.flatnonzero(spans.count).tolist(), work)
        return out

    def answers(self, models: torch.Tensor, first: int, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the loss (1,) of each model on samples from row ``first`` on, and the predicted classes (1, n)."""
        for logits in self.outputs(models, slice(first, first + len(y))):
            yield self._losses(logits, y).double().mean()[None], logits.argmax(1)[None]

    def outputs(self, models: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
        """Return the outputs (M, V, ...) of models on rows of the data."""
        # In pieces, so that all workers are busy even with a single model.
        parts = torch.split(self._store.x[rows], _CHUNK)
        found = [[torch.empty(0)] * len(parts) for _ in models]

        def work(flat: FlatModel, unit: int) -> None:
            model, part = divmod(unit, len(parts))
            found[model][part] = self._scores(flat, models[model], parts[part])

        self._each(range(len(models) * len(parts)), work)
        return torch.stack([torch.cat(row) for row in found])

    # -- parts ---------------------------------------------------------------------------------------------------

    def _each(self, units: Iterable[int], work: Callable[[FlatModel, int], None]) -> None:
        """Do the work for each unit; a module of its own is free for whoever works."""
        units = list(units)
        workers = max(1, min(self._workers or free_cores(), len(units)))
        while len(self._models) < workers:  # they share what is frozen
            frozen = {id(p): p for p in self._models[0].module.parameters() if not p.requires_grad}
            self._models.append(FlatModel(copy.deepcopy(self._models[0].module, frozen)))
        # A queue and not one module per thread: threads of the pool come and go, modules stay.
        free: SimpleQueue[FlatModel] = SimpleQueue()
        for flat in self._models:
            free.put(flat)

        def one(unit: int) -> None:
            flat = free.get()
            try:
                work(flat, unit)
            finally:
                free.put(flat)

        with products(self._precision, self._device):
            if workers == 1:
                for unit in units:
                    work(self._models[0], unit)
            else:
                with ThreadPoolExecutor(workers) as pool:
                    for _ in pool.map(one, units):  # the first error is raised, in the order of the units
                        pass

    def _samples(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = slice(first, first + count)
        return self._store.x[self._store.sample[slots]], self._store.targets_of(first, count)

    def _scores(self, flat: FlatModel, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs (n, ...) of the model ``vector`` on ``x`` (n, F)."""
        module = flat.load(vector).eval()
        parts = [part.view(len(part), *self._store.shape) for part in torch.split(x, _CHUNK)]
        with torch.no_grad(), own_code(), autocast(self._precision, self._device):
            return torch.cat([module(part).float() for part in parts])

    @contextlib.contextmanager
    def _seed_torch(self, table: JobTable, job: int) -> Iterator[None]:
        """Seed torch for a module with random numbers of its own making, without touching the caller's generator."""
        if not self._foreign:
            yield
            return
        seed, *which = table.key(job)
        stream = rng.stream(seed, rng.MODEL, *which)
        # By seed, round and client: the numbers do not depend on who trained before, nor on a resume.
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(int(stream.integers(2**63)))
            yield


def draws_random_numbers(module: nn.Module, sample: tuple[int, ...], dtype: torch.dtype) -> tuple[bool, bool]:
    """Return whether a module in training draws random numbers by our rules, and whether it draws any others."""
    tried = copy.deepcopy(module).cpu().train()  # a copy, because a pass in training moves running statistics
    rules = LayerRules(torch.tensor(0))
    with torch.random.fork_rng(devices=[]), torch.no_grad(), own_code():
        before = torch.get_rng_state()
        with rules:
            tried(torch.zeros(2, *sample, dtype=dtype))
        return rules.draws > 0, not torch.equal(before, torch.get_rng_state())


def torch_threads(owner: object, count: int | None) -> Callable[[], object]:
    """Set torch's number of threads, unless ``count`` is None; return a function that restores it.

    It is restored at the latest when ``owner`` is garbage-collected.
    """
    before = torch.get_num_threads()
    if count is None or count == before:
        return lambda: None
    torch.set_num_threads(count)
    return weakref.finalize(owner, torch.set_num_threads, before)

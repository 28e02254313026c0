"""Train any module with autograd, one client after another, on the CPU with torch's threads or on a CUDA device."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from fedcohort.core import rng
from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.registry import is_reference
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.jobs import JobTable
from fedcohort.simulate.engine.plain import train_plain
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.engine.types import HeldOut, Spans, by_class, right_by_cell
from fedcohort.simulate.own_code import own_code
from fedcohort.simulate.tasks import Task
from fedcohort.training.local import LocalTraining
from fedcohort.training.losses import cross_entropy

_CHUNK = 1000  # samples in one forward pass outside training


class ModuleBackend:
    """Trains and evaluates any module with the plain loop.

    Parameters
    ----------
    module : nn.Module
        The architecture; moved to the device.
    store : Store
        The data.
    local : LocalTraining
        How clients train.
    device : torch.device
        Where to compute.
    threads : int
        Number of threads that torch's operators may use on the CPU.
    task : Task, optional
        What is learned, if it is not classification with cross-entropy.
    """

    def __init__(
        self,
        module: nn.Module,
        store: Store,
        local: LocalTraining,
        *,
        device: torch.device,
        threads: int,
        task: Task | None = None,
    ) -> None:
        self._task = task
        # Our own tasks tell the user's functions from their own code. A user's own task is the user's code as a whole.
        is_users = task is not None and is_reference(task.name)
        self._task_code: Callable[[], contextlib.AbstractContextManager[None]] = (
            own_code if is_users else contextlib.nullcontext
        )
        self._store, self._local, self._device = store.to(device), local, device
        self._draws = draws_random_numbers(module, store.shape, store.x.dtype)
        self._flat = FlatModel(module.to(device))
        self._give_back = torch_threads(self, threads if device.type == "cpu" else None)

    def close(self) -> None:
        """Restore torch's number of threads."""
        self._give_back()

    def train(
        self, table: JobTable, models: torch.Tensor, prox: float, correction: torch.Tensor | None
    ) -> torch.Tensor:
        """Train all jobs with the plain loop; return vectors (J, P)."""
        store, local = self._store, self._local
        out = models[torch.from_numpy(table.run)]
        for job in np.flatnonzero(table.steps).tolist():
            first, n = int(table.first[job]), int(table.n[job])
            plan = table.plan(job, local)
            with torch.enable_grad(), self._seed_torch(table, job):
                train_plain(
                    self._flat.load(out[job]),
                    store.x[store.sample[first : first + n]].view(n, *self._store.shape),
                    store.targets_of(first, n),
                    plan,
                    local,
                    round=int(table.round[job]),
                    batches_per_epoch=int(table.per_epoch[job]),
                    prox=prox,
                    correction=None if correction is None else correction[job],
                    crops=table.crops(job, local) if local.augment else None,
                    losses=None if self._task is None else self._losses,
                )
            self._flat.store(out[job])
        return out

    def cross_entropies(
        self, models: torch.Tensor, spans: Spans, pseudo: bool, teachers: torch.Tensor | None
    ) -> Iterator[tuple[IntArray, torch.Tensor, torch.Tensor | None]]:
        """Yield the indices of spans (q,), and their samples' cross-entropies with labels and pseudo-labels."""
        for span in np.flatnonzero(spans.count):
            run, first, count = int(spans.run[span]), int(spans.first[span]), int(spans.count[span])
            x, labels = self._samples(first, count)
            logits = self._scores(models[run], x)
            by_pseudo = None
            if pseudo:
                guide = logits if teachers is None else self._scores(teachers[run], x)
                by_pseudo = self._losses(logits, guide.argmax(1))
            yield np.array([span]), self._losses(logits, labels), by_pseudo

    def gradients(self, models: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Return full-batch gradients (Q, P), summed over chunks; buffers get zeros."""
        out = torch.zeros(len(spans), models.shape[1], device=models.device)
        for unit in np.flatnonzero(spans.count).tolist():
            count = int(spans.count[unit])
            x, y = self._samples(int(spans.first[unit]), count)
            module = self._flat.load(models[int(spans.run[unit])]).eval()
            parameters = list(module.parameters())
            with torch.enable_grad():
                for part, labels in zip(torch.split(x, _CHUNK), torch.split(y, _CHUNK), strict=True):
                    samples = part.view(len(part), *self._store.shape)
                    with own_code():
                        logits = module(samples)
                    loss = self._losses(logits, labels).sum() / count
                    with own_code():
                        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
                    for slot, grad in zip(self._flat.slots, grads, strict=False):
                        if grad is not None:
                            slot.of(out[unit]).add_(grad)
        return out

    def evaluate(self, models: torch.Tensor) -> tuple[FloatArray, FloatArray]:
        """Return test loss (M,) and the task's metric (M,)."""
        y = self._store.y_test
        loss, metric = np.empty(len(models)), np.empty(len(models))
        for unit, model in enumerate(models):
            logits = self._store.to_target_units(self._scores(model, self._store.x_test))
            losses = self._losses(logits, y)
            loss[unit] = float(losses.double().mean())
            if self._task is None:
                metric[unit] = float((logits.argmax(1) == y).double().mean())
            else:
                with self._task_code():
                    metric[unit] = self._task.measure(logits, y, losses)
        return loss, metric

    def evaluate_cells(self, models: torch.Tensor, test: HeldOut) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the loss (M,), right answers by cell (M, cells), and right and all answers by class (M, 2, C)."""
        y, cell = (torch.as_tensor(values).to(models.device) for values in (test.y, test.cell))
        x = self._store.x[test.first : test.first + len(y)]
        loss, right = np.empty(len(models)), np.empty((len(models), test.cells))
        answers = []
        for unit, model in enumerate(models):
            logits = self._scores(model, x)
            loss[unit] = float(self._losses(logits, y).double().mean())
            predicted = logits.argmax(1)
            right[unit] = right_by_cell((predicted == y)[None], cell, test.cells)[0].cpu().numpy()
            answers.append(by_class(predicted[None], y, logits.shape[1])[0].cpu().numpy())
        return loss, right, np.array(answers)

    def logits(self, models: torch.Tensor, positions: IntArray) -> torch.Tensor:
        """Return logits (M, V, C) on training samples."""
        x = self._store.x[torch.from_numpy(positions).to(self._device)]
        return torch.stack([self._scores(model, x) for model in models])

    # -- parts ---------------------------------------------------------------------------------------------------

    def _samples(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = slice(first, first + count)
        return self._store.x[self._store.sample[slots]], self._store.targets_of(first, count)

    def _losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._task is None:
            return cross_entropy(outputs, targets)
        with self._task_code():
            return self._task.losses(outputs, targets)

    def _scores(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the logits (n, C) of the model ``vector`` on ``x`` (n, F)."""
        module = self._flat.load(vector).eval()
        parts = [part.view(len(part), *self._store.shape) for part in torch.split(x, _CHUNK)]
        with torch.no_grad(), own_code():
            return torch.cat([module(part) for part in parts])

    @contextlib.contextmanager
    def _seed_torch(self, table: JobTable, job: int) -> Iterator[None]:
        """Seed torch for a module that draws random numbers (dropout), without touching the caller's generator."""
        if not self._draws:
            yield
            return
        seed, *which = table.key(job)
        stream = rng.stream(seed, rng.MODEL, *which)
        # By seed, round and client: dropout does not depend on who trained before, nor on a resume.
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(int(stream.integers(2**63)))
            yield


def draws_random_numbers(module: nn.Module, sample: tuple[int, ...], dtype: torch.dtype = torch.float32) -> bool:
    """Whether a module in training draws random numbers, as dropout does."""
    tried = copy.deepcopy(module).cpu().train()  # a copy, because a pass in training moves running statistics
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        tried(torch.zeros(2, *sample, dtype=dtype))
        return not torch.equal(before, torch.get_rng_state())


def torch_threads(owner: object, count: int | None) -> Callable[[], object]:
    """Set torch's number of threads, unless ``count`` is None; return a function that restores it.

    It is restored at the latest when ``owner`` is garbage-collected.
    """
    before = torch.get_num_threads()
    if count is None or count == before:
        return lambda: None
    torch.set_num_threads(count)
    return weakref.finalize(owner, torch.set_num_threads, before)

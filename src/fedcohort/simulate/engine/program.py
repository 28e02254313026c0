"""A program trains and evaluates models of one architecture on the CPU; this one works for any module."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fedcohort import rng
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.groups import TrainTask
from fedcohort.simulate.engine.plain import train_plain
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.local import LocalTraining

CHUNK = 1000  # samples of one forward pass


class Program:
    """What a worker can do with one architecture; all vectors are flat parameters of length P."""

    group_size: int = 1  # how many jobs it likes to train at once

    def __init__(self, flat: FlatModel, sample: tuple[int, ...], local: LocalTraining) -> None:
        self.flat = flat
        self.sample = sample
        self.local = local

    def train(self, task: TrainTask, store: Store) -> None:
        """Train the task's jobs and write their vectors and first losses."""
        raise NotImplementedError(type(self).__name__)

    def scores(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the transposed logits (C, n) of the model ``vector`` on ``x`` (n, F).

        Transposed, because everything done to logits runs along the classes, and a strided axis of ten is slow.
        """
        raise NotImplementedError(type(self).__name__)

    def gradient(self, vector: torch.Tensor, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        """Write the gradient of the mean cross-entropy of ``x`` (n, F), ``y`` (n,) into ``out`` (P,)."""
        raise NotImplementedError(type(self).__name__)


class ModuleProgram(Program):
    """Any module, one client after the other, with autograd."""

    def train(self, task: TrainTask, store: Store) -> None:
        """Train each job with the plain loop."""
        for job in task.jobs:
            out = task.out[job]
            out.copy_(task.models[task.table.run[job]])
            steps = int(task.table.steps[job])
            if steps == 0:
                continue
            first, n = int(task.table.first[job]), int(task.table.n[job])
            x = store.x[store.sample[first : first + n]].view(n, *self.sample)
            module = self.flat.load(out)
            with torch.enable_grad(), torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
                # Modules that draw (dropout) do so from a stream of the job, never from the caller's generator.
                torch.manual_seed(job_seed(task, int(job)))
                task.first_loss[job] = train_plain(
                    module,
                    x,
                    store.label[first : first + n],
                    task.table.plan(int(job), self.local),
                    self.local,
                    round=int(task.table.round[job]),
                    batches_per_epoch=int(task.table.per_epoch[job]),
                    prox=task.prox,
                    correction=None if task.correction is None else task.correction[job],
                )
            self.flat.store(out)

    def scores(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the transposed logits (C, n)."""
        module = self.flat.load(vector).eval()
        with torch.no_grad():
            parts = [module(part.view(len(part), *self.sample)) for part in torch.split(x, CHUNK)]
        return torch.cat(parts).t().contiguous()

    def gradient(self, vector: torch.Tensor, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        """Write the full-batch gradient, summed over chunks; buffers get zeros."""
        module = self.flat.load(vector).eval()
        parameters = list(module.parameters())
        out.zero_()
        with torch.enable_grad():
            for part, labels in zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True):
                loss = F.cross_entropy(module(part.view(len(part), *self.sample)), labels, reduction="sum") / len(x)
                grads = torch.autograd.grad(loss, parameters, allow_unused=True)
                for slot, grad in zip(self.flat.slots, grads, strict=False):
                    if grad is not None:
                        slot.of(out).add_(grad)


def job_seed(task: TrainTask, job: int) -> int:
    """Return torch's seed for one job, for modules that draw random numbers."""
    table = task.table
    generator = rng.stream(int(table.seed[job]), rng.MODEL, int(table.round[job]), int(table.client[job]))
    return int(generator.integers(2**63))

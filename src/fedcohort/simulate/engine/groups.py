"""Jobs made ready for a program: which rows of the data each of them uses in each step, and with which rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedcohort.arrays import FloatArray, IntArray
from fedcohort.simulate.engine.plans import draw_plan
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.engine.types import Jobs
from fedcohort.simulate.local import BatchPlan, LocalTraining


@dataclass(frozen=True)
class JobTable:
    """Jobs with what the store and the rules of local training say about them; all arrays of length J."""

    run: IntArray
    first: IntArray  # first slot of the client
    n: IntArray  # training samples
    steps: IntArray  # SGD steps
    client: IntArray
    round: IntArray
    seed: IntArray
    per_epoch: IntArray  # batches of an epoch, for rates that decay per local epoch

    FIELDS = ("run", "first", "n", "steps", "client", "round", "seed", "per_epoch")

    def __len__(self) -> int:
        return len(self.run)

    @staticmethod
    def of(jobs: Jobs, store: Store, local: LocalTraining) -> JobTable:
        """Look the jobs up in the store."""
        count = len(jobs)
        first, n, largest = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
        for federation in np.unique(jobs.federation):
            rows = jobs.federation == federation
            first[rows] = store.first[federation][jobs.client[rows]]
            n[rows] = store.train[federation][jobs.client[rows]]
            largest[rows] = store.largest[federation]
        per_epoch = -(-(largest if local.epochs_of_largest is not None else n) // local.batch_size)
        if jobs.steps is not None:
            steps = np.asarray(jobs.steps, dtype=np.int64)
        elif local.steps is not None:
            steps = np.full(count, local.steps, dtype=np.int64)
        else:
            steps = (local.epochs or local.epochs_of_largest or 0) * per_epoch
        return JobTable(
            run=np.asarray(jobs.run, dtype=np.int64),
            first=first,
            n=n,
            steps=np.where(n > 0, steps, 0),
            client=np.asarray(jobs.client, dtype=np.int64),
            round=np.asarray(jobs.round, dtype=np.int64),
            seed=np.asarray(jobs.seed, dtype=np.int64),
            per_epoch=np.maximum(per_epoch, 1),
        )

    def plan(self, job: int, local: LocalTraining) -> BatchPlan:
        """Draw the batches of one job."""
        return draw_plan(
            int(self.seed[job]),
            int(self.round[job]),
            int(self.client[job]),
            int(self.n[job]),
            local,
            int(self.steps[job]),
        )

    def rates(self, job: int, local: LocalTraining) -> FloatArray:
        """Return the learning rates of one job's steps."""
        return local.lr_schedule(int(self.round[job]), int(self.steps[job]), int(self.per_epoch[job]))

    def groups(self, size: int, local: LocalTraining) -> list[IntArray]:
        """Put jobs of equal learning rates and similar shape together, at most ``size`` of them.

        Depends on the jobs alone, so that a run is the same whoever computes a group.
        """
        # Longest first; then jobs that share the shape of a batch stand side by side.
        order = np.lexsort((self.n, -self.steps, self.round))
        result: list[IntArray] = []
        part: list[int] = []
        key: tuple[int, int] | None = None
        for job in order:
            mine = (int(self.round[job]), int(self.per_epoch[job]) if local.lr_decay_epoch != 1.0 else 0)
            if part and (len(part) == size or mine != key):
                result.append(np.array(part, dtype=np.int64))
                part = []
            part.append(int(job))
            key = mine
        if part:
            result.append(np.array(part, dtype=np.int64))
        return result


@dataclass
class TrainTask:
    """What a program trains at once: some jobs of a table, their start vectors and where the results go."""

    table: JobTable
    jobs: IntArray  # (g,) rows of the table, longest first
    models: torch.Tensor  # (R, P) global models
    out: torch.Tensor  # (J, P) results, rows of the table
    first_loss: FloatArray  # (J,)
    prox: float
    correction: torch.Tensor | None  # (J, P)

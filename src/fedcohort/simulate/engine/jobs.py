"""Prepare jobs for a backend: which rows of the data each job uses in each step, and with which learning rate."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.simulate.engine.plans import draw_plan
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.engine.types import Jobs
from fedcohort.training.local import BatchPlan, LocalTraining, crop_plan


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

    def __len__(self) -> int:
        return len(self.run)

    def __getitem__(self, some: IntArray) -> JobTable:
        """Return some of the jobs."""
        return JobTable(**{part.name: getattr(self, part.name)[some] for part in fields(self)})

    @staticmethod
    def of(jobs: Jobs, store: Store, local: LocalTraining) -> JobTable:
        """Look the jobs up in the store."""
        columns = (jobs.run, jobs.federation, jobs.client, jobs.round, jobs.seed)
        run, federation, client, round_, seed = (np.asarray(values, dtype=np.int64) for values in columns)
        spans = store.spans(run, federation, client)
        longest = spans.count if local.epochs_of_largest is None else store.largest[federation]
        per_epoch = -(-longest // local.batch_size)
        if jobs.steps is not None:
            steps = np.asarray(jobs.steps, dtype=np.int64)
        elif local.steps is not None:
            steps = np.full(len(jobs), local.steps, dtype=np.int64)
        else:
            steps = (local.epochs or local.epochs_of_largest or 0) * per_epoch
        steps = np.where(spans.count > 0, steps, 0)
        return JobTable(run, spans.first, spans.count, steps, client, round_, seed, np.maximum(per_epoch, 1))

    def key(self, job: int) -> tuple[int, int, int]:
        """Return what the random numbers of one job are drawn from: seed, round and client."""
        return int(self.seed[job]), int(self.round[job]), int(self.client[job])

    def plan(self, job: int, local: LocalTraining) -> BatchPlan:
        """Draw the batches of one job."""
        return draw_plan(*self.key(job), int(self.n[job]), local, int(self.steps[job]))

    def crops(self, job: int, plan: BatchPlan) -> IntArray:
        """Draw how the images of one job's batches are augmented."""
        return crop_plan(*self.key(job), plan)

    def rates(self, job: int, local: LocalTraining) -> FloatArray:
        """Return the learning rates of one job's steps."""
        return local.lr_schedule(int(self.round[job]), int(self.steps[job]), int(self.per_epoch[job]))

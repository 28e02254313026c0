"""Jobs as a backend takes them: which rows of the data each job uses in each step, and with which learning rate."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.simulate.engine.plans import JOB, draw_batches
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.engine.types import Jobs, Spans
from fedcohort.training.local import BatchPlan, LocalTraining, batch_plan, crop_plan, plan_counts


@dataclass(frozen=True)
class JobTable:
    """Jobs with their facts from the store and the rules of local training; all arrays have length J."""

    run: IntArray
    first: IntArray  # first slot of the client
    n: IntArray  # training samples
    steps: IntArray  # SGD steps
    client: IntArray
    round: IntArray
    seed: IntArray
    per_epoch: IntArray  # batches per epoch, for rates that decay with every local epoch

    def __len__(self) -> int:
        return len(self.run)

    def __getitem__(self, rows: IntArray) -> JobTable:
        """Return the jobs in these rows."""
        return JobTable(**{part.name: getattr(self, part.name)[rows] for part in fields(self)})

    @staticmethod
    def of(jobs: Jobs, spans: Spans, store: Store, local: LocalTraining) -> JobTable:
        """Add to jobs where their clients' samples are, and how many steps they make."""
        client, round_, seed = (np.asarray(values, np.int64) for values in (jobs.client, jobs.round, jobs.seed))
        # Where all clients make as many steps as the largest, its epochs also decide when rates decay.
        longest = spans.count if local.epochs_of_largest is None else store.largest[jobs.federation]
        per_epoch = -(-longest // local.batch_size)
        if jobs.steps is not None:
            steps = np.asarray(jobs.steps, dtype=np.int64)
        elif local.steps is not None:
            steps = np.full(len(jobs), local.steps, dtype=np.int64)
        else:
            steps = (local.epochs or local.epochs_of_largest or 0) * per_epoch
        # A client without samples takes part, and returns the model that it received.
        steps = np.where(spans.count > 0, steps, 0)
        return JobTable(spans.run, spans.first, spans.count, steps, client, round_, seed, np.maximum(per_epoch, 1))

    def plan(self, job: int, local: LocalTraining) -> BatchPlan:
        """Draw the batches of one job."""
        return batch_plan(*self.key(job), int(self.n[job]), local, int(self.steps[job]))

    def draw(
        self,
        local: LocalTraining,
        out: IntArray,
        *,
        base: IntArray | int,
        start: IntArray,
        stride: IntArray | int,
        row: IntArray | int,
    ) -> None:
        """Draw the batches of all jobs into a flat array; see :func:`draw_batches`."""
        jobs = np.empty(len(self), JOB)
        for name in ("seed", "round", "client", "n", "steps"):
            jobs[name] = getattr(self, name)
        jobs["base"], jobs["start"], jobs["stride"], jobs["row"] = base, start, stride, row
        # The compiled code expects at least one sample and one step of each job.
        draw_batches(jobs[self.steps > 0], local, out)

    def crops(self, job: int, local: LocalTraining) -> IntArray:
        """Draw how the images of one job's batches are augmented."""
        return crop_plan(*self.key(job), (int(self.steps[job]), min(local.batch_size, int(self.n[job]))))

    def batch_sizes(self, local: LocalTraining) -> IntArray:
        """Return how many samples each step uses, job by job; all jobs have steps."""
        sizes = functools.cache(plan_counts)  # many clients have the same number of samples
        jobs = zip(self.n.tolist(), self.steps.tolist(), strict=True)
        return np.concatenate([sizes(n, min(n, local.batch_size), steps) for n, steps in jobs])

    def rates(self, local: LocalTraining) -> FloatArray:
        """Return the learning rate of each step, job by job; all jobs have steps."""
        schedule = functools.cache(local.lr_schedule)  # most jobs of a call are in the same round
        jobs = zip(self.round.tolist(), self.steps.tolist(), self.per_epoch.tolist(), strict=True)
        return np.concatenate([schedule(*job) for job in jobs])

    def key(self, job: int) -> tuple[int, int, int]:
        """Return what determines the random numbers of one job: seed, round and client."""
        return int(self.seed[job]), int(self.round[job]), int(self.client[job])

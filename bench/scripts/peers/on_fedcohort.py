"""fedcohort as users run it: an experiment with a selector, a session with its journal, results on disk."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from job import GIVEN
from models_torch import build

from fedcohort import Cohort, Selector
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.data import from_arrays
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load


@dataclass(frozen=True)
class Nothing:
    pass


@dataclass(frozen=True, kw_only=True)
class Given(Selector[Nothing]):
    """Chooses the cohorts that all peers get."""

    def init(self, clients, rng):
        return Nothing()

    def select(self, state, slate, answer, rng):
        return Cohort(np.array(GIVEN["cohorts"][slate.round])), state

    def update(self, state, outcome):
        return state


def start_model():
    return build(GIVEN["job"])


class Clock(Listener):
    def __init__(self):
        self.times = []

    def on_round(self, run, row):
        self.times.append((time.perf_counter(), time.process_time()))


class Peer:
    def __init__(self, job):
        GIVEN["job"] = job
        x_test, y_test = job.test()
        images, tests = np.moveaxis(job.x, 1, -1), np.moveaxis(x_test, 1, -1)  # channels last
        self.data = from_arrays(images, job.y, tests, y_test, classes=job.classes)
        self.score = None

    def rounds(self, cohorts):
        GIVEN["cohorts"], job, clock = cohorts, GIVEN["job"], Clock()
        with tempfile.TemporaryDirectory() as folder:
            config = {
                "data": self.data,
                "scenario": {"partition": {"name": "custom", "parts": [part.tolist() for part in job.parts]}},
                "model": {"name": f"{__file__}:start_model"},
                "local": {"steps": job.steps, "batch_size": job.batch, "lr": job.lr, "weight_decay": job.decay},
                "aggregator": {"name": "fedavg"},
                "run": {"rounds": len(cohorts), "cohort": len(cohorts[0]), "eval_every": len(cohorts)},
                "selectors": {"given": {"name": f"{__file__}:Given"}},
            }
            Simulation(Experiment.from_dict(config), Path(folder), listeners=[clock]).run()
            results = load(folder)
            self.score = results.rounds.column("accuracy")[-1].as_py()
        self.times = clock.times[0], clock.times[-2]  # without the start, and without the test after the last

    def accuracy(self):
        return self.score

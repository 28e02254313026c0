"""Every selector goes with every aggregator and filter, under a scenario that has everything, in lock-step."""

import numpy as np
import pytest

from fedcohort.core.protocol import SELECTORS
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load
from fedcohort.training.aggregators import AGGREGATORS
from fedcohort.training.filters import FILTERS

BASE = {
    "seeds": [1],
    "data": {"name": "synthetic", "samples": 400, "test_samples": 60, "classes": 4, "shape": [6]},
    "scenario": {
        "partition": {"name": "dirichlet", "clients": 15, "alpha": 0.5},
        "noise": {"level": 0.2},
        "latency": {"name": "shifted-exponential"},
        "availability": {"name": "uniform-share", "share": 0.7},
        "failure": 0.1,
        "deadline": 0.2,
        "validation": 0.2,
        "server_validation": 5,
    },
    "model": {"name": "logistic"},
    "local": {"batch_size": 8, "steps": 2, "lr": 0.05},
    "run": {"rounds": 6, "cohort": 4, "eval_every": 3, "device": "cpu", "workers": 1},
}


def run_all(tmp_path, variants, rounds=6, chosen=lambda i, j: True):
    selectors = {
        f"{name}-{j}": {"name": name, **({"warmup": 2, "interval": 2} if name == "fedcor" else {}), **variant}
        for i, name in enumerate(SELECTORS.names())
        for j, variant in enumerate(variants)
        if chosen(i, j)
    }
    table = {**BASE, "run": {**BASE["run"], "rounds": rounds, "eval_every": rounds // 2}, "selectors": selectors}
    simulation = Simulation(Experiment.from_dict(table), tmp_path / "out", device="cpu")
    assert simulation.run() == "finished"
    results = load(tmp_path / "out")
    assert {run.state for run in results.runs} == {"finished"}
    assert len(results.rounds) == rounds * len(selectors)
    accuracy = np.array(results.rounds["accuracy"].to_pylist(), dtype=float)
    assert np.isfinite(accuracy).sum() == 2 * len(selectors)
    return results


# A third of the pairs every day, so that every selector and every aggregator has many partners.
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2))])
def test_every_selector_with_every_aggregator(tmp_path, part):
    variants = [{"aggregator": {"name": name}} for name in AGGREGATORS.names()]
    results = run_all(tmp_path, variants, rounds=2, chosen=lambda i, j: (i + j) % 3 == part)
    weights = np.array(results.clients["weight"].to_pylist(), dtype=float)
    kept = np.array(results.clients["kept"].to_pylist(), dtype=bool)
    assert np.isfinite(weights[kept]).all()
    assert (weights[~kept] == 0).all()


def test_every_selector_with_every_filter(tmp_path):
    results = run_all(tmp_path, [{"filter": {"name": name}} for name in FILTERS.names()])
    assert max(results.clients.group_by(["run", "round"]).aggregate([("kept", "sum")])["kept_sum"].to_pylist()) > 1

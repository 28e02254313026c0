"""On digits with one class per client, FedCor and Fed-CBS do what they are for: balanced cohorts, a better model."""

import numpy as np
import pytest

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    table = {
        "seeds": [0, 1, 2],
        "data": {"name": "digits"},
        "scenario": {"partition": {"name": "shards", "clients": 50, "per_client": 1}},
        "model": {"name": "mlp"},
        "local": {"batch_size": 16, "steps": 10, "lr": 0.05},
        "run": {"rounds": 40, "cohort": 10, "eval_every": 1, "device": "cpu", "workers": 1},
        "selectors": {"uniform": {}, "fedcbs": {}, "fedcor": {"warmup": 12}},
    }
    out = tmp_path_factory.mktemp("balance") / "out"
    assert Simulation(Experiment.from_dict(table), out, device="cpu").run() == "finished"
    results = load(out)
    label = {run.id: run.label for run in results.runs}
    rows = [(label[row["run"]], row["round"], row["qcid"], row["accuracy"]) for row in results.rounds.to_pylist()]

    def mean(name, column, first):
        return float(np.mean([row[column] for row in rows if row[0] == name and row[1] >= first]))

    return mean


@pytest.mark.parametrize(("name", "share"), [("fedcbs", 0.2), ("fedcor", 0.6)])
def test_cohorts_are_more_balanced_than_uniform_ones(outcome, name, share):
    assert outcome(name, 2, 13) < share * outcome("uniform", 2, 13)


@pytest.mark.parametrize("name", ["fedcbs", "fedcor"])
def test_the_model_is_better_for_it(outcome, name):
    assert outcome(name, 3, 25) > outcome("uniform", 3, 25)

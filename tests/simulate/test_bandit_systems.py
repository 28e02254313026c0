"""FedCM, FedACS and FLASH do on digits what they are for; each fails when its system stops doing it."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")

from fedcohort.selectors.papers.fedacs import FedAcs, ranking
from fedcohort.session import Session
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load

SEEDS = [0, 1]


def results_of(tmp_path, scenario, selectors, *, rounds, cohort, local=None):
    table = {
        "name": "bandits",
        "seeds": SEEDS,
        "data": {"name": "digits"},
        "scenario": scenario,
        "model": {"name": "mlp"},
        "local": {"batch_size": 16, "steps": 10, "lr": 0.05, **(local or {})},
        "run": {"rounds": rounds, "cohort": cohort, "eval_every": rounds, "device": "cpu"},
        "selectors": selectors,
    }
    simulation = Simulation(Experiment.from_dict(table), tmp_path / "out", device="cpu")
    assert simulation.run() == "finished"
    return load(tmp_path / "out")


def runs_of(results, label):
    return [run for run in results.runs if run.label == label]


def cohorts(results, run):
    return results.cohorts(run)


def test_flash_advantage_lowers_the_noise_of_its_picks(tmp_path):
    scenario = {
        "partition": {"name": "iid", "clients": 30},
        "noise": {"level": 0.4},
        "latency": {"name": "shifted-exponential"},
        "validation": 0.1,
    }
    selectors = {"uniform": {}, "flash-advantage": {}, "half": {"name": "flash-advantage", "pool": 0.5}}
    results = results_of(tmp_path, scenario, selectors, rounds=80, cohort=4, local={"loss": "robust"})

    def late_noise(label):
        """Noise of the picks of the last 20 rounds, relative to the federation's."""
        found = []
        for run in runs_of(results, label):
            noise = results.federation(run).noise_rate
            found.append(np.mean([noise[c].mean() for c in cohorts(results, run)[-20:]]) / noise.mean())
        return np.mean(found)

    found = [late_noise(label) for label in ("half", "flash-advantage", "uniform")]
    assert found[0] < 0.75 < found[1] < found[2], found


def skew(counts):
    """Distance of each client's labels to the federation's."""
    shares = counts / counts.sum(1, keepdims=True)
    return ((shares - counts.sum(0) / counts.sum()) ** 2).sum(1)


def test_fedacs_lowers_the_skew_of_its_pool(tmp_path):
    scenario = {"partition": {"name": "skewness", "clients": 40, "samples": 40}}
    selectors = {
        "uniform": {},
        "fedacs": {"pool_share": 0.3},
        "analytics": {"name": "fedacs", "pool_share": 1.0},
    }
    results = results_of(tmp_path, scenario, selectors, rounds=60, cohort=6)

    def late_skew(label):
        """Skew of the picks of the second half, relative to the federation's."""
        found = []
        for run in runs_of(results, label):
            skews = skew(results.federation(run).label_counts)
            found.append(np.mean([skews[c].mean() for c in cohorts(results, run)[30:]]) / skews.mean())
        return np.mean(found)

    found = {label: late_skew(label) for label in ("uniform", "fedacs")}
    assert found["fedacs"] < 0.75 and found["uniform"] > 0.93, found
    for run in runs_of(results, "analytics"):
        skews = skew(results.federation(run).label_counts)
        with Session.open(results.journal(run), FedAcs(pool_share=1.0)) as session:
            found = ranking(session.state)
        assert skews[found.order[:10]].mean() < 0.6 * skews[found.order[-10:]].mean()


def test_fedcm_raises_the_share_of_kept_models(tmp_path):
    scenario = {"partition": {"name": "class-heterogeneity", "clients": 16, "alpha": 0.1}, "server_validation": 20}
    fedca = {"name": "fedca"}
    selectors = {"uniform": {"filter": fedca}, "fedcm-ucb": {"filter": fedca}, "fedcm-ts": {"filter": fedca}}
    results = results_of(tmp_path, scenario, selectors, rounds=60, cohort=6)

    def kept(label):
        found = [results.members(run) for run in runs_of(results, label)]
        return np.mean([members["kept"][members["round"] >= 20].mean() for members in found])

    assert kept("uniform") < 0.95  # the filter does drop models
    for label in ("fedcm-ucb", "fedcm-ts"):
        assert kept(label) > kept("uniform") + 0.02, (label, kept(label), kept("uniform"))

"""FedCor's checks on a simulated federation."""

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fedcohort import ClientTable
from fedcohort.cli.app import app
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Answer, Slate, Trial
from fedcohort.core.signals import Signal
from fedcohort_bench.diagnose import Diagnosis, UniformTrials, diagnose
from fedcohort_bench.diagnostics import normality, stationarity

TABLE = {
    "data": {"name": "synthetic", "samples": 400, "test_samples": 40, "shape": [6], "classes": 4},
    "scenario": {"partition": {"name": "shards", "clients": 8, "per_client": 1}},
    "model": {"name": "logistic"},
    "local": {"batch_size": 10, "steps": 3, "lr": 0.1},
    "run": {"rounds": 99, "cohort": 3, "targets": [0.5]},
}


def test_looks_come_every_so_many_rounds():
    seen = []
    found = diagnose(TABLE, looks=3, every=2, samples=25, on_start=seen.append)
    assert seen == [5]  # rounds 0 to 4
    assert found.rounds.tolist() == [0, 2, 4]
    assert [n.components.shape[0] for n in found.normality] == [25] * 3
    assert found.similarity.shape == (2,) and ((found.similarity > 0) & (found.similarity <= 1)).all()
    with pytest.raises(InputError, match="at least 2"):
        diagnose(TABLE, looks=1)


def test_trials_are_uniform_and_their_answers_are_kept():
    selector = UniformTrials(samples=400, every=3)
    rng = np.random.default_rng(0)
    state = selector.init(ClientTable(n=6), rng)
    slate = Slate(round=3, size=2, candidates=np.array([0, 1, 2, 4, 5]), clients=ClientTable(n=6))
    query = selector.query(state, slate, rng)
    assert isinstance(query, Trial) and len(query.cohorts) == 400
    share = np.bincount(np.concatenate(query.cohorts), minlength=6) / 400
    assert share == pytest.approx([0.4, 0.4, 0.4, 0, 0.4, 0.4], abs=0.1)
    changes = rng.normal(size=(400, 6))
    cohort, state = selector.select(state, slate, Answer(query, {Signal.LOSS_CHANGE: changes}), rng)
    assert cohort.size == 2
    assert np.array_equal(state.changes, changes[None])
    later = Slate(round=4, size=2, candidates=slate.candidates, clients=slate.clients)
    assert selector.query(state, later, rng) is None


def gaussian_diagnosis(skewed=False):
    rng = np.random.default_rng(1)
    base = rng.normal(size=(2, 9))
    draws = [rng.exponential(size=(500, 2)) if skewed else rng.normal(size=(500, 2)) for _ in range(3)]
    changes = [draw * [3.0, 1.0] @ base for draw in draws]
    return Diagnosis(np.array([0, 10, 20]), [normality(c) for c in changes], stationarity(changes))


def test_distance_tells_gaussians_from_others():
    assert gaussian_diagnosis().distance < 0.045
    assert gaussian_diagnosis(skewed=True).distance > 0.1


def judged(distance, similarity, samples=400):
    one = normality(np.random.default_rng(0).normal(size=(samples, 3)))
    looks = [dataclasses.replace(one, distance=np.full(len(one.distance), distance)) for _ in range(2)]
    return Diagnosis(np.array([0, 9]), looks, np.array([similarity])).verdict


def test_the_verdict_follows_from_both_numbers():
    assert judged(0.03, 0.95).endswith("FedCor's assumption holds here.")
    assert judged(0.08, 0.95).endswith("roughly holds here.") and "nearly Gaussian (distance 0.08" in judged(0.08, 0.95)
    assert judged(0.03, 0.6).endswith("roughly holds here.") and "changes slowly" in judged(0.03, 0.6)
    wrong = judged(0.2, 0.95)
    assert "are not Gaussian" in wrong
    assert wrong.endswith("does not hold here: a Gaussian process describes these losses badly.")
    fast = judged(0.03, 0.3)
    assert "changes quickly" in fast and fast.endswith("does not hold here: what it learns is soon out of date.")
    assert judged(0.2, 0.3).count(" and ") >= 2 and "holds here" not in judged(0.2, 0.3)
    assert gaussian_diagnosis().verdict.startswith("Loss changes look Gaussian")
    assert gaussian_diagnosis(skewed=True).verdict.startswith("Loss changes are not Gaussian")


def test_the_command(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(
        'selectors = {uniform = {}}\n[data]\nname = "synthetic"\nsamples = 400\nshape = [6]\n'
        '[scenario.partition]\nname = "shards"\nclients = 8\nper_client = 1\n[model]\nname = "logistic"\n'
        "[local]\nsteps = 2\n[run]\nrounds = 5\ncohort = 3\n"
    )
    options = ["--looks", "2", "--every", "1", "--samples", "20"]
    done = CliRunner().invoke(app, ["diagnose", str(path), *options, "--format", "json"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert [look["round"] for look in printed["looks"]] == [0, 1]
    assert printed["looks"][0]["similarity"] is None and 0 < printed["looks"][1]["similarity"] <= 1
    assert len(printed["looks"][0]["distance"]) == len(printed["looks"][0]["explained"]) <= 5
    shown = CliRunner().invoke(app, ["diagnose", str(path), *options])
    assert "distance from" in shown.stdout.lower()
    assert printed["verdict"].startswith("Loss changes ") and "FedCor's assumption" in " ".join(shown.stdout.split())

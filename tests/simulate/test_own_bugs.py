"""A bug of fedcohort ends the experiment as itself; it is never put down to a run's selector, filter or model."""

import pytest

from fedcohort.journal import Journal
from fedcohort.scenario import Scenario
from fedcohort.session.session import Session
from fedcohort.simulate import tasks
from fedcohort.simulate.rounds.costs import CostModel
from tests.experiments import run_experiment

TABLE = {
    "seeds": [0],
    "data": {"name": "synthetic", "samples": 120, "test_samples": 40, "classes": 3, "shape": [4]},
    "scenario": {
        "partition": {"name": "shards", "clients": 6, "per_client": 2},
        "latency": {"name": "shifted-exponential", "straggling": 2},
    },
    "model": {"name": "logistic"},
    "local": {"steps": 1, "batch_size": 8},
    "run": {"rounds": 3, "cohort": 2, "workers": 1, "device": "cpu"},
    "selectors": {"uniform": {}},
}
OURS = [
    (Journal, "finish_creation"),
    (Journal, "add_cohort"),
    (Journal, "close_cohort"),
    (Session, "query"),
    (Journal, "add_replies"),
    (Scenario, "events"),
    (CostModel, "round_work"),
]
OWN = """
import dataclasses
from torch import nn
from fedcohort.training.filters import Filter, FilterDecision


class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Linear(shape[0], 4), nn.Tanh(), nn.Linear(4, classes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noting(Filter):
    name = "noting"

    def judge(self, replies):
        return FilterDecision(replies.ok, {"note": NOTE})
"""


def plant(monkeypatch, owner, method):
    def broken(*arguments, **options):
        raise KeyError("planted")

    monkeypatch.setattr(owner, method, broken)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("owner", "method"), OURS, ids=[method for _, method in OURS])
def test_a_bug_of_ours_is_not_the_selectors(owner, method, mode, tmp_path, monkeypatch):
    plant(monkeypatch, owner, method)
    with pytest.raises(KeyError, match="planted"):
        run_experiment({**TABLE, "run": {**TABLE["run"], "mode": mode}}, tmp_path / "x")


def test_a_bug_of_ours_is_not_the_models(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    plant(monkeypatch, Session, "record")
    with pytest.raises(KeyError, match="planted"):
        run_experiment({**TABLE, "model": {"name": f"{tmp_path / 'own.py'}:Net"}}, tmp_path / "x")


@pytest.mark.parametrize("after", [0, 1], ids=["before the first round", "in a round"])
def test_a_bug_of_ours_is_not_that_of_an_own_loss(after, tmp_path, monkeypatch):
    """A known metric that is broken, beside a loss of the user's own."""
    (tmp_path / "own.py").write_text("def loss(outputs, targets):\n    return -outputs.log_softmax(1)[:, 0]\n")
    direction, targets, known = tasks._METRICS["perplexity"]
    calls = []

    def broken(*arguments):
        calls.append(arguments)
        if len(calls) > after:
            raise KeyError("planted")
        return known(*arguments)

    monkeypatch.setitem(tasks._METRICS, "perplexity", (direction, targets, broken))
    task = {"loss": f"{tmp_path / 'own.py'}:loss", "metric": "perplexity"}
    with pytest.raises(KeyError, match="planted"):
        run_experiment({**TABLE, "task": task}, tmp_path / "x")


def test_a_bug_of_ours_is_not_the_filters(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN.replace("NOTE", "1"))
    plant(monkeypatch, Session, "note")
    with pytest.raises(KeyError, match="planted"):
        run_experiment({**TABLE, "filter": {"name": f"{tmp_path / 'own.py'}:Noting"}}, tmp_path / "x")

"""Something of one's own that raises ends its own run, is named, and disturbs no other."""

import json
import re

import pytest

from fedcohort.core.errors import FedcohortError
from fedcohort.simulate.leaderboard import leaderboard_table
from fedcohort.simulate.leaderboard.formats import to_text
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load
from tests.experiments import run_experiment

TABLE = {
    "seeds": [0],
    "data": {"name": "synthetic", "samples": 200, "test_samples": 60, "classes": 3, "shape": [5]},
    "scenario": {"partition": {"name": "shards", "clients": 8, "per_client": 2}},
    "model": {"name": "logistic"},
    "local": {"steps": 2, "batch_size": 8},
    "run": {"rounds": 4, "cohort": 2, "eval_every": 1, "workers": 1, "device": "cpu"},
    "selectors": {"uniform": {}},
}
SELECTORS = """
import dataclasses
import numpy as np
from fedcohort import Cohort
from fedcohort.core.protocol import Losses, Selector
from fedcohort.core.signals import Signal


@dataclasses.dataclass(frozen=True)
class State:
    rounds: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy(Selector):
    stage = "STAGE"
    at = AT

    @property
    def requires(self):
        return frozenset({Signal.LOSS}) if self.stage == "query" else frozenset()

    def _mind(self, stage, rounds):
        if stage == self.stage and rounds == self.at:
            raise ZeroDivisionError("nobody is greedy enough")

    def init(self, clients, rng):
        return State()

    def query(self, state, request, rng):
        self._mind("query", request.round)
        return None

    def select(self, state, request, answer, rng):
        self._mind("select", request.round)
        if self.stage == "twice" and request.round == self.at:
            return Cohort(np.array([1, 1])), state
        return Cohort(request.candidates[: request.size]), state

    def update(self, state, outcome):
        self._mind("update", state.rounds)
        return State(state.rounds + 1)
"""
OWN = """
import torch
from torch import nn

CALLS = []


class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Linear(shape[0], 4), nn.Tanh(), nn.Linear(4, classes))

    def forward(self, x):
        CALLS.append(len(x))
        if len(CALLS) > 12:
            raise ArithmeticError("the model is tired")
        return super().forward(x)


def judge(outputs, targets):
    CALLS.append(0)
    if len(CALLS) > 3:
        raise KeyError("no such verdict")
    return float((outputs.argmax(1) == targets).float().mean())
"""


FILTER = """
import dataclasses
import numpy as np
from fedcohort.training.filters import Filter, FilterDecision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strict(Filter):
    name = "strict"

    def judge(self, replies):
        WHAT
"""
AGGREGATOR = """
import dataclasses
import numpy as np
from fedcohort.training.aggregators import Aggregator, Combined, Corrections, Mix, WeightedSum


class Memory(Corrections):
    def arrays(self):
        return {}

    def restore(self, arrays):
        pass

    def corrections(self, clients):
        CORRECTIONS

    def absorb(self, clients, old, models, rates, gradients):
        ABSORB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sum(WeightedSum):
    name = "sum"

    def mix(self, members):
        WHAT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole(Aggregator):
    name = "whole"

    def combine(self, old, models, members, memory=None, server=None):
        WHAT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correcting(Aggregator):
    name = "correcting"
    corrects = True

    def memory(self, federation, model):
        MEMORY

    def combine(self, old, models, members, memory=None, server=None):
        return Combined(models.mean(0), members.by_count)
"""
BAD = 'raise ZeroDivisionError("no good")'
RAISED = "ZeroDivisionError: no good (own.py, line"


def fails_alone(tmp_path, section, named, said):
    """Run it next to a good run, which must not change; the bad run must fail with an error that names the culprit."""
    assert run_experiment(TABLE, tmp_path / "alone") == "finished"
    both = {"uniform": {}, "own": {"name": "uniform", **section}}
    out = tmp_path / "both"
    assert run_experiment({**TABLE, "selectors": both}, out) == "finished"
    infos = {info.label: info for info in load(out).runs}
    assert infos["uniform"].state == "finished"
    assert rows(out, "uniform-s0") == rows(tmp_path / "alone", "uniform-s0")
    assert (infos["own"].state, infos["own"].rounds_done) == ("failed", 0)
    assert re.match(rf"the {named} .*raised an error in round 0: ", infos["own"].reason), infos["own"].reason
    assert said in infos["own"].reason
    assert "base.py" not in infos["own"].reason  # it is nothing of ours that is to blame
    assert Simulation.open(out).run() == "finished"
    assert {info.label: info for info in load(out).runs} == infos


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows(out, run):
    results, keep = load(out), ("round", "accuracy", "loss")
    cohorts = {round_: cohort.tolist() for round_, cohort in results.decisions(run).cohorts.items()}
    mine = [row for row in results.rounds.to_pylist() if row["run"] == run]
    return [{**{k: r[k] for k in keep}, "cohort": cohorts[r["round"]]} for r in mine]


@pytest.mark.parametrize("at", [3])  # later than the rounds in which a user's selector is tried before anything runs
@pytest.mark.parametrize("stage", ["query", "select", "twice", "update"])
def test_a_selector_that_raises_ends_its_own_run(tmp_path, stage, at):
    assert run_experiment(TABLE, tmp_path / "alone") == "finished"
    (tmp_path / "mine.py").write_text(SELECTORS.replace("STAGE", stage).replace("AT", str(at)))
    out = tmp_path / "both"
    both = {"uniform": {}, "greedy": {"name": "mine.py:Greedy"}}
    assert run_experiment({**TABLE, "selectors": both}, out) == "finished"
    infos = {info.label: info for info in load(out).runs}
    assert infos["uniform"].state == "finished"
    assert rows(out, "uniform-s0") == rows(tmp_path / "alone", "uniform-s0")
    failed = infos["greedy"]
    assert (failed.state, failed.rounds_done, len(rows(out, "greedy-s0"))) == ("failed", at, at)
    assert (
        f"the selector {failed.selector!r} raised" in failed.reason
        and "Greedy" in failed.selector
        and f"in round {at}" in failed.reason
    )
    if stage != "twice":
        assert "ZeroDivisionError: nobody is greedy enough (mine.py, line" in failed.reason
    (board,) = load(out).leaderboards()
    text = to_text(leaderboard_table(board))
    assert "1 failed" in text and "runs.json says why" in " ".join(text.split())
    json.dumps(board.to_dict(), allow_nan=False)
    assert Simulation.open(out).run() == "finished"
    assert {info.label: info for info in load(out).runs} == infos


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {"name": "own.py:Net"}}, "the model .*own.py:Net.*ArithmeticError: the model is tired"),
        ({"task": {"metric": "own.py:judge", "higher_is_better": True}}, "the metric .*own.py:judge.*no such verdict"),
    ],
    ids=["model", "metric"],
)
def test_a_model_or_metric_that_raises_ends_the_runs_that_share_it(tmp_path, change, named):
    (tmp_path / "own.py").write_text(OWN)
    settings = [{"name": "own", **change}, {"name": "ours"}] if "model" in change else [{"name": "own"}]
    base = {**TABLE, **({} if "model" in change else change), "settings": settings}
    assert run_experiment(base, tmp_path / "x") == "finished"
    states = {info.setting["name"]: info for info in load(tmp_path / "x").runs}
    assert states["own"].state == "failed"
    assert re.search(named, states["own"].reason)
    if "ours" in states:
        assert states["ours"].state == "finished"


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (BAD, RAISED),
        ("return None", "FilterDecision"),
        ("return FilterDecision(np.ones(len(replies) + 1, bool))", "array of shape (2,)"),
    ],
    ids=["raises", "nothing", "length"],
)
def test_a_filter_that_raises_or_returns_nonsense_ends_its_own_run(tmp_path, does, said):
    (tmp_path / "own.py").write_text(FILTER.replace("WHAT", does))
    fails_alone(tmp_path, {"filter": {"name": "own.py:Strict"}}, "filter 'strict'", said)


@pytest.mark.parametrize(
    ("name", "does", "said"),
    [
        ("Sum", {"WHAT": BAD}, RAISED),
        ("Sum", {"WHAT": "return members.by_count"}, "must return a Mix. Got ndarray"),
        ("Sum", {"WHAT": "return Mix(np.ones(1))"}, "one weight per model, an array of shape (2,)"),
        ("Whole", {"WHAT": BAD}, RAISED),
        ("Whole", {"WHAT": "return old"}, "must return a Combined. Got Tensor"),
        ("Whole", {"WHAT": "return Combined(old[:1], members.by_count)"}, "Got a Tensor of shape torch.Size([1])"),
        ("Whole", {"WHAT": "return Combined(0.0, members.by_count)"}, "a model like the one it was given"),
        ("Whole", {"WHAT": "return Combined(old, [1.0])"}, "one weight per model, an array of shape (2,)"),
        ("Correcting", {"MEMORY": BAD}, RAISED),
        ("Correcting", {"MEMORY": "return None"}, "must be Corrections"),
        ("Correcting", {"CORRECTIONS": BAD}, RAISED),
        ("Correcting", {"CORRECTIONS": "return np.zeros(3)"}, "Got ndarray of shape (3,)"),
        ("Correcting", {"ABSORB": BAD}, RAISED),
    ],
)
def test_an_aggregator_that_raises_or_returns_nonsense_ends_its_own_run(tmp_path, name, does, said):
    given = {"WHAT": "pass", "MEMORY": "return Memory()", "CORRECTIONS": "return ZEROS", "ABSORB": "pass", **does}
    text = AGGREGATOR
    for key, value in given.items():
        text = text.replace(f"        {key}\n", f"        {value}\n")
    size = 3 * 5 + 3  # of a logistic model
    (tmp_path / "own.py").write_text(text.replace("ZEROS", f"__import__('torch').zeros(len(clients), {size})"))
    fails_alone(tmp_path, {"aggregator": {"name": f"own.py:{name}"}}, f"aggregator '{name.lower()}'", said)


def test_a_filter_and_an_aggregator_of_ones_own_are_found_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        FILTER.replace("WHAT", "return FilterDecision(replies.ok & (np.arange(len(replies)) > 0))")
        + AGGREGATOR.replace("WHAT", "return Mix(members.by_count)").replace("MEMORY", "return None")
    )
    table = {
        **TABLE,
        "aggregator": {"name": "own.py:Sum"},
        "selectors": {"uniform": {}, "own": {"name": "uniform", "filter": {"name": "own.py:Strict"}}},
        "settings": [{"name": "a"}, {"name": "b", "aggregator": "own.py:Sum", "filter": "own.py:Strict"}],
    }
    short = {**TABLE["run"], "rounds": 1}
    assert run_experiment({**table, "run": short}, tmp_path / "x") == "finished"
    found = load(tmp_path / "x")
    kept = {run.id: found.members(run)["kept"].sum() for run in found.runs}
    assert kept == {"uniform-a-s0": 2, "own-a-s0": 1, "uniform-b-s0": 1, "own-b-s0": 1}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert Simulation.open(tmp_path / "x").run() == "finished"
    assert run_experiment(tmp_path / "x" / "config.toml", tmp_path / "y") == "finished"
    assert rows(tmp_path / "y", "own-b-s0") == rows(tmp_path / "x", "own-b-s0")


def test_data_that_raises_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "own.py").write_text(
        "from fedcohort.simulate.data import Source\n\n\nclass Data(Source):\n    name = 'data'\n\n"
        "    def load(self, folder=None, download=False):\n        raise LookupError('the shelf is empty')\n"
    )
    with pytest.raises(FedcohortError, match=r"own\.py:Data(.|\n)*LookupError: the shelf is empty"):
        run_experiment({**TABLE, "data": {"name": "own.py:Data"}}, tmp_path / "x")
    assert not (tmp_path / "x").exists()

"""Selectors, filters and aggregators that do everything wrong: each ends its own run and changes no other."""

import re

import pytest

import fedcohort
from fedcohort.core.errors import FedcohortError, InputError, SelectorError
from fedcohort.report.page import assemble
from fedcohort.simulate import runner
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.parts import ResultsError
from fedcohort.simulate.store.results import load
from tests.experiments import run_experiment

TABLE = {
    "seeds": [0],
    "data": {"name": "synthetic", "samples": 120, "test_samples": 40, "classes": 3, "shape": [4]},
    "scenario": {"partition": {"name": "shards", "clients": 6, "per_client": 2}},
    "model": {"name": "logistic"},
    "local": {"steps": 1, "batch_size": 8},
    "run": {"rounds": 3, "cohort": 2, "workers": 1, "device": "cpu", "checkpoint_seconds": 0.0},
    "selectors": {"uniform": {}},
}
HEAD = """
import dataclasses
import sys
import numpy as np
from fedcohort import Cohort, Losses, Selector, Signal, per_client
from fedcohort.training.aggregators import Aggregator, Combined, Mix, WeightedSum
from fedcohort.training.filters import Filter, FilterDecision
from fedcohort.core.protocol import Trial


@dataclasses.dataclass(frozen=True)
class State:
    picked: np.ndarray = per_client()


@dataclasses.dataclass(frozen=True)
class Any:
    value: object = None


class Odd:
    def __repr__(self):
        raise RuntimeError("no words")


def deep(n=0):
    return deep(n + 1)


def forever():
    yield 1


class Hostile(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base(Selector):
    def init(self, clients, rng):
        return State(np.zeros(clients.n))

    def select(self, state, slate, answer, rng):
        return Cohort(slate.candidates[: slate.size]), state

    def update(self, state, outcome):
        return state


"""
INIT, QUERY = "def init(self, clients, rng):", "def query(self, state, slate, rng):"
SELECT, UPDATE = "def select(self, state, slate, answer, rng):", "def update(self, state, outcome):"
SIZE, REQUIRES = "def size(self, state, asked, candidates):", "@property\n    def requires(self):"
ASKS = "@property\n    def requires(self):\n        return frozenset({Signal.LOSS_QUERY, Signal.TRIAL_QUERY})\n\n    "
COHORT = "Cohort(slate.candidates[: slate.size])"
# By name: a method of a selector, and what it does. Each must end its own run, in the round it says.
BAD = {
    "init raises": (INIT, "raise ZeroDivisionError('no')"),
    "init returns nothing": (INIT, "return None"),
    "init returns a number": (INIT, "return 3"),
    "init returns a dict": (INIT, "return {'a': np.zeros(3)}"),
    "init returns a generator": (INIT, "yield 1"),
    "init returns its class": (INIT, "return State"),
    "init leaves": (INIT, "sys.exit(5)"),
    "init recurses": (INIT, "return deep()"),
    "init has too few rows": (INIT, "return State(np.zeros(2))"),
    "init has objects": (INIT, "return State(np.array([object()] * clients.n))"),
    "init has an object": (INIT, "return Any(Odd())"),
    "init has a function": (INIT, "return Any(len)"),
    "init has a circle": (INIT, "found = {}; found['a'] = found; return Any(found)"),
    "init exhausts the memory": (INIT, "raise MemoryError('too much')"),
    "init raises without words": (INIT, "raise Hostile"),
    "query raises": (QUERY, "raise ZeroDivisionError('no')"),
    "query is a text": (QUERY, "return 'what?'"),
    "query is its class": (QUERY, "return Losses"),
    "query names nobody": (QUERY, "return Losses(np.array([99]))"),
    "query names a negative number": (QUERY, "return Losses(np.array([-1]))"),
    "query names one twice": (QUERY, "return Losses(np.array([1, 1]))"),
    "query asks for a signal that is none": (QUERY, "return Losses(slate.candidates, frozenset({'joy'}))"),
    "query is two-dimensional": (QUERY, "return Losses(np.zeros((2, 2), int))"),
    "query tries nobody": (QUERY, "return Trial(())"),
    "query tries a stranger": (QUERY, "return Trial((np.array([77]),))"),
    "query is a generator": (QUERY, "yield Losses(slate.candidates)"),
    "size is a text": (SIZE, "return 'two'"),
    "size is not a number": (SIZE, "return float('nan')"),
    "select raises": (SELECT, "raise KeyError('no')"),
    "select leaves": (SELECT, "sys.exit('bye')"),
    "select recurses": (SELECT, "return deep()"),
    "select exhausts the memory": (SELECT, "raise MemoryError('too much')"),
    "select returns nothing": (SELECT, "return None"),
    "select returns a cohort alone": (SELECT, f"return {COHORT}"),
    "select returns a list": (SELECT, "return [0, 1], state"),
    "select is a generator": (SELECT, f"yield {COHORT}, state"),
    "select picks fractions": (SELECT, "return Cohort(np.array([0.5])), state"),
    "select picks texts": (SELECT, "return Cohort(np.array(['a'])), state"),
    "select picks one twice": (SELECT, "return Cohort(np.array([1, 1])), state"),
    "select picks a stranger": (SELECT, "return Cohort(np.array([99])), state"),
    "select gives odd weights": (SELECT, "return Cohort(slate.candidates[:1], weights=np.array([np.nan])), state"),
    "select gives objects for weights": (
        SELECT,
        "return Cohort(slate.candidates[:1], weights=np.array([Odd()])), state",
    ),
    "select gives endless work": (SELECT, "return Cohort(slate.candidates[:1], work=np.array([1e300])), state"),
    "select gives odd scores": (SELECT, "return Cohort(slate.candidates[:1], score=np.array(['a'])), state"),
    "select gives odd notes": (SELECT, f"return dataclasses.replace({COHORT}, notes={{'a': Odd()}}), state"),
    "select notes a number": (SELECT, f"return dataclasses.replace({COHORT}, notes={{3: np.arange(3)}}), state"),
    "select stops with a number": (SELECT, f"return dataclasses.replace({COHORT}, stop=3), state"),
    "select returns an odd state": (SELECT, f"return {COHORT}, Any(Odd())"),
    "select returns another state": (SELECT, f"return {COHORT}, 7"),
    "select changes its state": (SELECT, f"state.picked[0] = 1; return {COHORT}, state"),
    "select changes its slate": (SELECT, f"slate.candidates[0] = 5; return {COHORT}, state"),
    "update raises": (UPDATE, "raise AttributeError('no')"),
    "update returns nothing": (UPDATE, "return None"),
    "update returns objects": (UPDATE, "return State(np.array([object()] * 6))"),
    "update returns a circle": (UPDATE, "found = []; found.append(found); return Any(found)"),
    "update returns other rows": (UPDATE, "return State(np.zeros(99))"),
    "update reads what nobody said": (UPDATE, "return State(outcome[Signal.LOSS])"),
    "update leaves": (UPDATE, "raise SystemExit"),
    "update recurses": (UPDATE, "return deep()"),
    "update is a generator": (UPDATE, "yield state"),
    "update raises without words": (UPDATE, "raise Hostile"),
}
# What is asked before anything is made: the experiment is refused, with the selector's name.
EARLY = {
    "requires raises": (REQUIRES, "raise ZeroDivisionError('no')"),
    "requires is a text": (REQUIRES, "return 'loss'"),
    "requires holds a text": (REQUIRES, "return frozenset({'joy'})"),
    "requires is nothing": (REQUIRES, "return None"),
    "its filter is none": (REQUIRES, "return frozenset({Signal.KEPT})\n\n    default_filter = 'no-such'"),
    "adapted raises": ("def adapt(self, supplied):", "raise ZeroDivisionError('no')"),
    "adapted returns nothing": ("def adapt(self, supplied):", "return None"),
    "the constructor raises": ("def __post_init__(self):", "raise ZeroDivisionError('no')"),
    "the constructor leaves": ("def __post_init__(self):", "sys.exit(1)"),
}


class StopAfter(Listener):
    def __init__(self, rows):
        self.rows = rows
        self.simulation = None

    def on_round(self, run, row):
        self.rows -= 1
        if not self.rows:
            self.simulation.stop()


def written(folder, method, does):
    asks = ASKS if method == QUERY else ""
    (folder / "own.py").write_text(
        f"{HEAD}@dataclasses.dataclass(frozen=True, kw_only=True)\n"
        f"class Bad(Base):\n    {asks}{method}\n        {does}\n"
    )
    return {**TABLE, "selectors": {"uniform": {}, "bad": {"name": f"{folder / 'own.py'}:Bad"}}}


def rows(out, name):
    found = [row for row in load(out).rounds.to_pylist() if row["run"] == name]
    return [{key: value for key, value in row.items() if key != "selection_seconds"} for row in found]


@pytest.fixture
def untried(monkeypatch):
    """Without the trial, mistakes of the first rounds stand for those that come later than a trial sees."""
    monkeypatch.setattr(runner, "try_selectors", lambda prepared, known: None)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "x"
    assert run_experiment(TABLE, out) == "finished"
    return rows(out, "uniform-s0")


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("name", BAD)
def test_a_bad_selector_ends_its_own_run(name, tmp_path, alone):
    table = written(tmp_path, *BAD[name])
    assert run_experiment(table, tmp_path / "x") == "finished"
    good, bad = load(tmp_path / "x").runs
    assert good.state == "finished" and rows(tmp_path / "x", "uniform-s0") == alone
    assert bad.state == "failed" and "Bad" in bad.reason, (bad.state, bad.reason)
    assert Simulation.open(tmp_path / "x").run() == "finished"
    assert load(tmp_path / "x").runs == [good, bad]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", ["init raises", "select raises", "select returns nothing", "update raises"])
def test_a_trial_finds_mistakes_before_anything_is_made(name, mode, tmp_path):
    method, does = BAD[name]
    table = written(tmp_path, f"one_at_a_time = True\n\n    {method}", does)
    with pytest.raises(SelectorError, match=r"'Bad'[^§]*Nothing was run") as caught:
        run_experiment({**table, "run": {**TABLE["run"], "mode": mode}}, tmp_path / "x")
    assert "fedcohort check" in caught.value.hint and not (tmp_path / "x").exists()
    if "raises" in name:
        assert re.search(r"\(own.py, line \d+\)", caught.value.message)


def test_an_error_without_a_line_of_the_users_own_names_the_class(tmp_path):
    table = written(tmp_path, "def init(self, clients):", "return 0")
    with pytest.raises(SelectorError, match=r"init\(\) takes 2 [^§]*\(own.py, line \d+\)\. Nothing was run"):
        run_experiment(table, tmp_path / "x")


def test_the_trial_has_the_clients_of_the_experiment(tmp_path):
    table = written(tmp_path, INIT, "assert clients.n == 6; return State(np.zeros(6))")
    assert run_experiment(table, tmp_path / "x") == "finished"
    assert {run.state for run in load(tmp_path / "x").runs} == {"finished"}


def test_selectors_with_the_same_mistake_are_named_in_one_warning(tmp_path):
    table = written(tmp_path, SELECT, f"assert slate.round < 4; return {COHORT}, state")
    run_experiment({**table, "seeds": [0, 1], "run": {**TABLE["run"], "rounds": 6}}, tmp_path / "x")
    (warning,) = [text for text in load(tmp_path / "x").warnings() if "failed" in text]
    assert warning.startswith("bad-s0 and bad-s1 failed: the selector 'Bad' raised an error in round 4: AssertionError")


@pytest.mark.parametrize("name", EARLY)
def test_a_selector_that_cannot_even_be_asked_is_refused_before_anything_is_made(name, tmp_path):
    with pytest.raises(FedcohortError, match=r"[Bb]ad"):
        run_experiment(written(tmp_path, *EARLY[name]), tmp_path / "x")
    assert not (tmp_path / "x" / "meta.json").exists()


PARTS = """
@dataclasses.dataclass(frozen=True, kw_only=True)
class Strict(Filter):
    name = "strict"

    def judge(self, replies):
        DOES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sum(WeightedSum):
    name = "sum"

    def mix(self, members):
        DOES
"""


@pytest.mark.parametrize("does", ["sys.exit(0)", "raise MemoryError", "raise Hostile", "return deep()", "yield 1"])
@pytest.mark.parametrize(("kind", "cls"), [("filter", "Strict"), ("aggregator", "Sum")])
def test_a_bad_filter_or_aggregator_ends_its_own_run(kind, cls, does, tmp_path, alone):
    (tmp_path / "own.py").write_text(HEAD + PARTS.replace("DOES", does))
    own = {"name": "uniform", kind: {"name": f"{tmp_path / 'own.py'}:{cls}"}}
    assert run_experiment({**TABLE, "selectors": {"uniform": {}, "bad": own}}, tmp_path / "x") == "finished"
    good, bad = load(tmp_path / "x").runs
    assert good.state == "finished" and rows(tmp_path / "x", "uniform-s0") == alone
    assert bad.state == "failed" and f"the {kind} {cls.lower()!r}" in bad.reason


@pytest.mark.usefixtures("untried")
def test_a_run_that_failed_before_its_first_round_stays_out_when_the_others_go_on(tmp_path, alone):
    table = written(tmp_path, *BAD["init raises"])
    listener = StopAfter(1)
    listener.simulation = Simulation(Experiment.from_dict(table), tmp_path / "x", listeners=[listener])
    assert listener.simulation.run() == "interrupted"
    assert Simulation.open(tmp_path / "x").run() == "finished"
    good, bad = load(tmp_path / "x").runs
    assert (good.state, bad.state) == ("finished", "failed")
    assert rows(tmp_path / "x", "uniform-s0") == alone
    assert not list((tmp_path / "x" / "journal").glob("bad*"))
    report = assemble([tmp_path / "x"])
    assert any("bad-s0 failed" in warning for warning in report.warnings)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("others", [{}, {"uniform": {}}], ids=["alone", "beside a good run"])
def test_the_result_of_a_run_without_rounds_is_printed_and_read(others, tmp_path, capsys):
    table = written(tmp_path, *BAD["init raises"])
    table = {**table, "selectors": {**others, "bad": table["selectors"]["bad"]}}
    results = fedcohort.run(table, out=tmp_path / "x")
    assert "bad-s0 failed: the selector 'Bad' raised" in " ".join(capsys.readouterr().err.split())
    assert "bad" in str(results) and "bad" in results._repr_html_()
    assert results.cohorts("bad-s0") == [] and results.clients.num_rows == 6 * len(others)
    assert results.coverage("bad-s0").clients == 6
    with pytest.raises(ResultsError, match="bad-s0 failed before its first round: the selector"):
        results.explain("bad-s0", 0)
    if not others:
        with pytest.raises(InputError, match=r"No round has been recorded[^§]*Run bad-s0 failed"):
            assemble([tmp_path / "x"])


@pytest.mark.usefixtures("untried")
def test_ctrl_c_in_a_selector_ends_everything(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_experiment(written(tmp_path, SELECT, "raise KeyboardInterrupt"), tmp_path / "x")
    assert load(tmp_path / "x").status["state"] == "interrupted"

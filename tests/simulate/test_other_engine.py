"""An experiment continues with the engine that ran its first rounds, or says that another engine did."""

import json

import pytest
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort.core.errors import OtherEngineError
from fedcohort.report.data import load_bundle
from fedcohort.simulate.engine.library import load_compiled
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load
from tests.experiments import run_experiment

COMPILED, PLAIN = "compiled code on cpu", "plain loop on cpu"
TABLE = {
    "seeds": [0],
    "data": {"name": "synthetic", "samples": 400, "test_samples": 100, "classes": 4, "shape": [6]},
    "scenario": {"partition": {"name": "shards", "clients": 12, "per_client": 2}},
    "model": {"name": "logistic"},
    "local": {"batch_size": 8, "steps": 4, "lr": 0.1},
    "run": {"rounds": 6, "cohort": 3, "workers": 1, "device": "cpu", "checkpoint_seconds": 0.0},
    "selectors": {"uniform": {}, "fedcor": {"warmup": 2, "interval": 3}},
}


class StopAfter(Listener):
    def __init__(self, rounds):
        self.rounds = rounds
        self.simulation = None

    def on_round(self, run, row):
        self.rounds -= 1
        if not self.rounds:
            self.simulation.stop()


@pytest.fixture(autouse=True)
def compiler():
    load_compiled.cache_clear()
    if load_compiled("train") is None:
        pytest.skip("no C compiler")
    yield
    load_compiled.cache_clear()


def lose_the_compiler(monkeypatch):
    monkeypatch.setenv("FEDCOHORT_CC", "")
    load_compiled.cache_clear()


def interrupted(out, **changes):
    from fedcohort.simulate.config.experiment import Experiment

    listener = StopAfter(6)
    simulation = Simulation(Experiment.from_dict({**TABLE, **changes}), out, listeners=[listener])
    listener.simulation = simulation
    assert simulation.run() == "interrupted"


def content(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_a_resume_without_the_compiler_is_refused_and_changes_nothing(tmp_path, monkeypatch):
    interrupted(tmp_path / "x")
    assert {info.engines for info in load(tmp_path / "x").runs} == {((0, COMPILED),)}
    before = content(tmp_path / "x")
    lose_the_compiler(monkeypatch)
    with pytest.raises(
        OtherEngineError, match=f"trained by {COMPILED} so far and would continue with {PLAIN}"
    ) as caught:
        Simulation.open(tmp_path / "x")
    assert "C compiler" in caught.value.hint and "--allow-other-engine" in caught.value.hint
    done = CliRunner().invoke(app, ["run", "--resume", str(tmp_path / "x")])
    assert isinstance(done.exception, OtherEngineError)
    assert content(tmp_path / "x") == before


def test_the_switch_is_on_record_where_it_is_allowed(tmp_path, monkeypatch, caplog):
    interrupted(tmp_path / "x")
    lose_the_compiler(monkeypatch)
    done = CliRunner().invoke(app, ["run", "--resume", str(tmp_path / "x"), "--allow-other-engine", "-q"])
    assert done.exit_code == 0, done.output
    assert COMPILED in caplog.text and PLAIN in caplog.text
    assert {info.engines for info in load(tmp_path / "x").runs} == {((0, COMPILED), (3, PLAIN))}
    (warning, _) = load_bundle([tmp_path / "x"]).warnings
    assert f"by {COMPILED}, from round 3 by {PLAIN}" in warning


def test_an_experiment_can_go_back_to_its_engine_after_a_switch_only_if_that_is_allowed_too(tmp_path, monkeypatch):
    interrupted(tmp_path / "x")
    lose_the_compiler(monkeypatch)
    listener = StopAfter(2)
    listener.simulation = Simulation.open(tmp_path / "x", allow_other_engine=True)
    listener.simulation.listeners.append(listener)
    assert listener.simulation.run() == "interrupted"
    Simulation.open(tmp_path / "x")  # the plain loop made the last rounds
    monkeypatch.delenv("FEDCOHORT_CC")
    load_compiled.cache_clear()
    with pytest.raises(OtherEngineError, match=f"trained by {PLAIN} so far and would continue with {COMPILED}"):
        Simulation.open(tmp_path / "x")


@pytest.mark.parametrize("more", [["--rounds", "8"], ["--seeds", "2"], ["--selectors", "size-weighted"]])
def test_an_extension_without_the_compiler_is_refused_and_changes_nothing(tmp_path, monkeypatch, more):
    assert run_experiment(TABLE, tmp_path / "x") == "finished"
    before = content(tmp_path / "x")
    lose_the_compiler(monkeypatch)
    done = CliRunner().invoke(app, ["extend", str(tmp_path / "x"), *more])
    assert isinstance(done.exception, OtherEngineError)
    assert content(tmp_path / "x") == before
    done = CliRunner().invoke(app, ["extend", str(tmp_path / "x"), *more, "--allow-other-engine", "-q"])
    assert done.exit_code == 0, done.output
    assert PLAIN in json.dumps([info.engines for info in load(tmp_path / "x").runs])


def test_a_setting_with_a_model_that_is_never_compiled_goes_on(tmp_path, monkeypatch):
    own = tmp_path / "own.py"
    own.write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self, shape, classes):\n"
        "        super().__init__()\n        self.layer = nn.Linear(shape[0], classes)\n\n"
        "    def forward(self, x):\n        return self.layer(x)\n"
    )
    interrupted(tmp_path / "x", model={"name": f"{own}:Net"})
    lose_the_compiler(monkeypatch)
    assert Simulation.open(tmp_path / "x").run() == "finished"
    assert {info.engines for info in load(tmp_path / "x").runs} == {((0, PLAIN),)}


@pytest.mark.parametrize("command", [["run", "--resume"], ["extend", "--rounds", "9"], ["report"]])
def test_an_experiment_of_version_0_2_is_refused(tmp_path, command):
    """There 'fedavg' let absent clients keep the old model, and 'flash' was another selector."""
    out = tmp_path / "x"
    interrupted(out, aggregator={"name": "fedavg"})
    meta = json.loads((out / "meta.json").read_text())
    (out / "meta.json").write_text(json.dumps({**meta, "format": 1, "fedcohort": "0.2.0"}))
    before = content(out)
    done = CliRunner().invoke(app, [command[0], *command[1:], str(out)])
    assert done.exit_code == 1 and "0.2.0" in str(done.exception) and "with that version" in str(done.exception)
    assert content(out) == before

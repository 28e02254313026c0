"""Seeds, rounds and selectors added to an existing experiment: the results equal those of a new one."""

import hashlib

import pytest

from fedcohort.core.errors import FedcohortError, SignalError
from fedcohort.simulate.config.toml import ConfigError, merge_tables
from fedcohort.simulate.leaderboard.rows import AT_THE_END, SO_FAR
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.parts import ResultsError
from fedcohort.simulate.store.results import load
from fedcohort.simulate.store.writer import lock_folder
from tests.experiments import run_experiment

TABLE = {
    "name": "small",
    "seeds": [0, 1],
    "data": {"name": "synthetic", "samples": 300, "test_samples": 60, "classes": 4, "shape": [6]},
    "scenario": {"partition": {"name": "shards", "clients": 10, "per_client": 2}, "server_validation": 3},
    "model": {"name": "logistic"},
    "local": {"steps": 3, "batch_size": 8, "lr": 0.1},
    "run": {"rounds": 5, "cohort": 3, "eval_every": 2, "workers": 1, "device": "cpu"},
    "selectors": {"uniform": {}, "fedcor": {"warmup": 2}},
    "settings": [
        {"name": "a"},
        {"name": "b", "aggregator": {"name": "fedavgm"}, "scenario": {"noise": {"level": 0.3}}},
    ],
}
MORE = {"seeds": [0, 1, 5], "run": {"rounds": 8}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The larger experiment, run in one go."""
    out = tmp_path_factory.mktemp("whole") / "out"
    table = merge_tables(TABLE, MORE)
    table["selectors"] = {**TABLE["selectors"], "fedcm-ts": {}, "fedacs": {}}
    assert run_experiment(table, out) == "finished"
    return out


@pytest.fixture
def small(tmp_path):
    out = tmp_path / "out"
    assert run_experiment(TABLE, out) == "finished"
    return out


def rows(out, kind="rounds", *, evaluated=True):
    """Rows by run and round, without wall-clock times and, on request, without evaluations."""
    measured = {"accuracy", "loss", "groups", *AT_THE_END, *SO_FAR}
    apart = {"selection_seconds", *(() if evaluated else measured)} if kind == "rounds" else set()
    found = {}
    for row in getattr(load(out), kind).to_pylist():
        key = (row["run"], row["round"], row.get("client"))
        assert key not in found
        found[key] = {name: value for name, value in row.items() if name not in apart}
    return found


def content(out):
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def journals(out):
    """What every journal records about each round's choice."""
    from contextlib import closing

    from fedcohort.journal import read_journal

    found = {}
    for path in sorted((out / "journal").glob("*.sqlite")):
        with closing(read_journal(path)) as journal:
            found[path.stem] = [(row.round, row.clients.tolist(), row.notes) for row in journal.cohorts()]
    return found


def test_seeds_rounds_and_selectors_at_once_equal_a_new_experiment(small, whole):
    before, clients, federations = rows(small), rows(small, "clients"), sorted(small.glob("federation-*"))
    kept = {path.name: path.read_bytes() for path in federations}
    assert Simulation.extend(small, seeds=[5], rounds=8, selectors={"fedcm-ts": {}, "fedacs": {}}).run() == "finished"
    after = rows(small)
    assert {key: after[key] for key in before} == before  # bit for bit
    assert {key: value for key, value in rows(small, "clients").items() if key in clients} == clients
    assert all((small / name).read_bytes() == data for name, data in kept.items())
    assert rows(small, evaluated=False) == rows(whole, evaluated=False)
    assert rows(small, "clients") == rows(whole, "clients")
    # The former last round stays evaluated; all other rounds are evaluated as in the new experiment.
    differ = {key[1] for key, row in rows(whole).items() if row != after[key]}
    assert differ == {4}
    assert [run.id for run in load(small).runs] == [run.id for run in load(whole).runs]
    assert all(run.state == "finished" and run.rounds_done == 8 for run in load(small).runs)
    one, other = journals(small), journals(whole)
    assert one == other
    for run in load(whole).runs:
        ours, theirs = load(small).federation(run.id), load(whole).federation(run.id)
        assert (ours.label_counts == theirs.label_counts).all() and (ours.noise_rate == theirs.noise_rate).all()
    config = load(small).config
    assert config["seeds"] == [0, 1, 5] and config["run"]["rounds"] == 8
    assert config["selectors"] == load(whole).config["selectors"]


def test_several_extensions_with_an_interruption_equal_a_new_experiment(small, whole):
    assert Simulation.extend(small, selectors={"fedcm-ts": {}}).run() == "finished"
    assert Simulation.extend(small, rounds=7).run() == "finished"

    class Stop(Listener):
        def on_round(self, run, row):
            simulation.stop()

    simulation = Simulation.extend(small, seeds=[5], rounds=8, selectors={"fedacs": {}})
    simulation.listeners.append(Stop())
    assert simulation.run() == "interrupted"
    assert Simulation.open(small).run() == "finished"
    assert rows(small, evaluated=False) == rows(whole, evaluated=False)
    assert rows(small, "clients") == rows(whole, "clients")


def test_only_missing_rounds_are_computed(small):
    made = []

    class Count(Listener):
        def on_round(self, run, row):
            made.append((run.id, row["round"]))

    parts = sorted((small / "journal").glob("*.sqlite"))
    old = {path.name: path.read_bytes() for path in parts}
    simulation = Simulation.extend(small, seeds=3)
    simulation.listeners.append(Count())
    assert simulation.run() == "finished"
    assert {name for name, _ in made} == {run.id for run in load(small).runs if run.seed == 2}
    assert len(made) == 2 * 2 * 5
    assert all((small / "journal" / name).read_bytes() == data for name, data in old.items())


def test_runs_that_stopped_or_diverged_stay_as_they_ended(tmp_path):
    out = tmp_path / "out"
    run_experiment({**merge_tables(TABLE, {"local": {"lr": 3e38}}), "settings": []}, out)
    before = {run.id: run for run in load(out).runs}
    assert {run.state for run in before.values()} == {"diverged"}
    assert Simulation.extend(out, rounds=9, seeds=3).run() == "finished"
    after = {run.id: run for run in load(out).runs}
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rounds": 4}, ConfigError, "5 rounds.* 4"),
        ({"rounds": 0}, ConfigError, r"'rounds' parameter"),
        ({"rounds": 5}, ConfigError, r"nothing to add.*8 runs of 5 rounds"),
        ({"seeds": 2}, ConfigError, r"nothing to add"),
        ({"seeds": 1}, ConfigError, "2 seeds.* 1"),
        ({"seeds": [0]}, ConfigError, r"nothing to add"),
        ({"seeds": [-3]}, ConfigError, r"from 0 to .*-3"),
        ({"selectors": {"uniform": {}}}, ConfigError, r"'uniform'"),
        ({"selectors": {"unifrom": {}}}, FedcohortError, "'uniform'"),
        ({"selectors": {"x": {"name": "fedcor", "warmup": -1}}}, FedcohortError, r"'warmup' parameter.*Got -1"),
        ({"selectors": {"flash": {}}}, SignalError, r"hold out no data.*keeps its federation"),
        ({"seeds": 3, "device": "cuda:9"}, FedcohortError, r"cuda"),
    ],
)
def test_a_refused_extension_changes_nothing(shared, change, error, message):
    before = content(shared)
    with pytest.raises(error, match=rf"(?s){message}"):
        Simulation.extend(shared, **change).run()
    assert content(shared) == before


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    out = tmp_path_factory.mktemp("shared") / "out"
    run_experiment(TABLE, out)
    return out


def test_a_running_experiment_or_one_without_checkpoints_is_not_extended(small):
    before = content(small)
    with lock_folder(small), pytest.raises(ResultsError, match="Another process is working"):
        Simulation.extend(small, seeds=3).run()
    assert content(small) == before
    for path in (small / "checkpoint").iterdir():
        path.unlink()
    before = content(small)
    with pytest.raises(ResultsError, match="no checkpoint"):
        Simulation.extend(small, seeds=3).run()
    assert content(small) == before


def test_a_changed_configuration_is_refused(small):
    config = small / "config.toml"
    text = config.read_text()
    config.write_text(text.replace("lr = 0.1", "lr = 0.2"))
    before = content(small)
    for attempt in (lambda: Simulation.extend(small, seeds=3).run(), lambda: Simulation.open(small)):
        with pytest.raises(ResultsError, match="changed"):
            attempt()
    assert content(small) == before
    config.write_text(text)
    assert Simulation.extend(small, seeds=3).run() == "finished"
    assert Simulation.open(small).run() == "finished"  # the larger one is now its own


def test_there_must_be_an_experiment(tmp_path):
    with pytest.raises(ResultsError, match="no experiment"):
        Simulation.extend(tmp_path / "nowhere", seeds=3).run()

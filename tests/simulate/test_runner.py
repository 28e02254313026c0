"""Whole experiments: directory, resume, interruption, bad input, full disk."""

import errno
import json
import math
import os
import shutil

import numpy as np
import pyarrow.parquet
import pytest

from fedcohort.core.errors import (
    DataError,
    DeviceError,
    FedcohortError,
    InputError,
    JournalError,
    ScenarioError,
    SignalError,
)
from fedcohort.journal import read_journal
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.rounds.prepare import prepare
from fedcohort.simulate.runner import Simulation, default_out
from fedcohort.simulate.store import results
from fedcohort.simulate.store.checkpoint import Checkpoint, newest
from fedcohort.simulate.store.parts import ResultsError
from fedcohort.simulate.store.results import load
from fedcohort.simulate.store.writer import ExperimentWriter, lock_folder
from tests.experiments import run_experiment

TABLE = {
    "name": "small",
    "seeds": [0, 1],
    "data": {"name": "synthetic", "samples": 400, "test_samples": 100, "classes": 4, "shape": [6]},
    "scenario": {
        "partition": {"name": "shards", "clients": 12, "per_client": 2},
        "latency": {"name": "shifted-exponential"},
        "validation": 0.1,
    },
    "model": {"name": "logistic"},
    "local": {"batch_size": 8, "steps": 4, "lr": 0.1},
    "run": {"rounds": 8, "cohort": 3, "eval_every": 3, "workers": 1, "device": "cpu", "checkpoint_seconds": 3600.0},
    "selectors": {
        "uniform": {},
        "flash": {},
        "fedcor": {"warmup": 2, "interval": 3},
        "scaffolded": {"name": "fedcbs", "aggregator": {"name": "scaffold"}},
    },
}


OWN_MODEL = """
from torch import nn


class Tanh(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Linear(shape[0], 8), nn.Tanh(), nn.Linear(8, classes))
"""


def table(**changes):
    merged = json.loads(json.dumps(TABLE))
    for key, value in changes.items():
        merged[key] = {**merged[key], **value} if isinstance(value, dict) and key != "selectors" else value
    return merged


class StopAfter(Listener):
    """Stops the simulation after a number of rows."""

    def __init__(self, rows):
        self.rows = rows
        self.simulation = None

    def on_round(self, run, row):
        self.rows -= 1
        if self.rows == 0:
            self.simulation.stop()


def run(out, config=TABLE, stop_after=None, resume=False):
    simulation = Simulation.open(out) if resume else Simulation(Experiment.from_dict(config), out)
    if stop_after:
        listener = StopAfter(stop_after)
        listener.simulation = simulation
        simulation.listeners.append(listener)
    return simulation.run()


def sorted_rows(out, kind):
    rows = getattr(load(out), kind).to_pylist()
    for row in rows:
        row.pop("selection_seconds", None)
    key = ("run", "round", "client") if kind == "clients" else ("run", "round")
    return sorted(rows, key=lambda row: [row[name] for name in key])


def assert_same(out, whole):
    """Assert that two experiments have the same results, bit for bit."""
    assert sorted_rows(out, "rounds") == sorted_rows(whole, "rounds")
    assert repr(sorted_rows(out, "clients")) == repr(sorted_rows(whole, "clients"))
    assert load(out).runs == load(whole).runs
    for info in load(out).runs:
        one, other = (read_journal(load(path).journal(info)) for path in (out, whole))
        assert one.metrics() == other.metrics()
        assert [c.clients.tolist() for c in one.cohorts()] == [c.clients.tolist() for c in other.cohorts()]
        assert repr(one.state("")) == repr(other.state(""))
        one.close()
        other.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "experiment"
    assert run(out) == "finished"
    return out


def test_the_directory_holds_what_it_promises(whole):
    found_results = load(whole)
    assert found_results.status["state"] == "finished"
    assert found_results.status["rounds_done"] == found_results.status["rounds_total"] == 4 * 2 * 8
    assert found_results.meta["format"] == results.FORMAT_VERSION
    assert {"fedcohort", "torch", "numpy", "python", "device", "command", "created", "datasets"} <= set(
        found_results.meta
    )
    assert len(found_results.runs) == 8
    assert {info.state for info in found_results.runs} == {"finished"}
    assert found_results.rounds.num_rows == 8 * 8
    assert found_results.clients.num_rows == sum(len(row["weights"]) for row in found_results.rounds.to_pylist())
    assert sorted(path.name for path in (whole / "rounds").iterdir()) == ["part-00000.parquet"]
    evaluated = found_results.curves["uniform-s0"].rounds
    assert evaluated.tolist() == [2, 5, 7]
    facts = found_results.federation("uniform-s1")
    assert facts.label_counts.shape == (12, 4)
    assert facts.label_counts.sum() == facts.sizes.sum() == facts.true_counts.sum()
    for info in found_results.runs:
        journal = read_journal(found_results.journal(info))
        assert journal.last()[0] == 7
        journal.close()


def test_selectors_of_one_seed_share_their_federation(whole):
    runs = load(whole).runs
    assert len({info.federation for info in runs}) == 2
    assert len({info.federation for info in runs if info.seed == 0}) == 1


def test_the_written_configuration_repeats_the_experiment(whole, tmp_path):
    config = load(whole).config
    assert run(tmp_path / "again", config) == "finished"
    assert sorted_rows(tmp_path / "again", "rounds") == sorted_rows(whole, "rounds")


@pytest.mark.parametrize("stop_after", [1, 20, 37])
def test_a_resumed_experiment_equals_an_uninterrupted_one(whole, tmp_path, stop_after):
    out = tmp_path / "stopped"
    assert run(out, stop_after=stop_after) == "interrupted"
    assert load(out).status["state"] == "interrupted"
    assert run(out, resume=True) == "finished"
    assert_same(out, whole)


def test_a_crash_loses_only_what_came_after_the_last_checkpoint(whole, tmp_path):
    """Stop at a checkpoint, continue without one and die: rounds after the checkpoint are repeated."""
    out = tmp_path / "crashed"
    config = table(run={"checkpoint_seconds": 0.0})
    config["run"]["checkpoint_seconds"] = 0.0

    class Crash(Listener):
        def __init__(self):
            self.left = 30

        def on_round(self, run, row):
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("the plug was pulled")

    simulation = Simulation(Experiment.from_dict(config), out, listeners=[Crash()])
    with pytest.raises(RuntimeError, match="plug"):
        simulation.run()
    assert load(out).status["state"] == "failed"
    assert "plug" in load(out).status["message"]
    assert run(out, resume=True) == "finished"
    assert sorted_rows(out, "rounds") == sorted_rows(whole, "rounds")


def test_rows_and_journals_ahead_of_the_checkpoint_are_undone(whole, tmp_path):
    out = tmp_path / "ahead"
    assert run(out, stop_after=20) == "interrupted"
    shutil.copytree(out / "checkpoint", tmp_path / "checkpoint")
    assert run(out, resume=True, stop_after=20) == "interrupted"
    shutil.rmtree(out / "checkpoint")
    shutil.copytree(tmp_path / "checkpoint", out / "checkpoint")
    assert run(out, resume=True) == "finished"
    assert_same(out, whole)


def test_temporary_files_of_a_dead_process_are_removed(tmp_path):
    out = tmp_path / "x"
    assert run(out, table(selectors={"uniform": {}}), stop_after=4) == "interrupted"
    for name in ("rounds/.part-00007.parquet.tmp", "checkpoint/.group-0-round-9.npz.tmp", ".status.json.tmp"):
        (out / name).write_bytes(b"half")
    assert run(out, resume=True) == "finished"
    assert not list(out.rglob("*.tmp"))


def test_an_old_checkpoint_is_removed_even_if_its_group_has_ended(tmp_path):
    out = tmp_path / "run"
    run_experiment(TABLE, out)
    last = sorted(out.glob("checkpoint/*.npz"))
    shutil.copy(last[0], out / "checkpoint" / "group-0-round-7.npz")
    Simulation.open(out).run()
    assert sorted(out.glob("checkpoint/*.npz")) == last


def test_a_group_without_a_checkpoint_starts_over(whole, tmp_path):
    out = tmp_path / "lost"
    assert run(out, stop_after=20) == "interrupted"
    for path in (out / "checkpoint").iterdir():
        path.unlink()
    assert run(out, resume=True) == "finished"
    assert_same(out, whole)


def test_results_can_be_read_while_a_run_has_no_rows_left(whole, tmp_path):
    out = tmp_path / "experiment"
    shutil.copytree(whole, out)
    first, *others = [run.id for run in load(whole).runs]
    ExperimentWriter(out).forget({first: 0})
    again = load(out)
    assert set(again.curves) == set(others) and len(again.column(first, "round")) == 0


def test_a_journal_older_than_the_checkpoint_is_refused(tmp_path):
    out = tmp_path / "old"
    config = table(selectors={"uniform": {}})
    assert run(out, config, stop_after=4) == "interrupted"
    shutil.copy(out / "journal" / "uniform-s0.sqlite", tmp_path / "kept.sqlite")
    assert run(out, resume=True, stop_after=4) == "interrupted"
    for file in (out / "journal").glob("uniform-s0.sqlite*"):
        file.unlink()
    shutil.copy(tmp_path / "kept.sqlite", out / "journal" / "uniform-s0.sqlite")
    with pytest.raises(JournalError, match="older copy"):
        run(out, resume=True)


def test_dying_before_the_first_checkpoint_starts_again(whole, tmp_path):
    out = tmp_path / "early"
    simulation = Simulation(Experiment.from_dict(TABLE), out)
    group = simulation.prepared.group(0, journals=out / "journal", device="cpu", workers=1)
    simulation.begin(0, group)
    group.step()
    group.close()
    assert run(out, resume=True) == "finished"
    assert sorted_rows(out, "rounds") == sorted_rows(whole, "rounds")


def test_resuming_a_finished_experiment_changes_nothing(tmp_path):
    config = table(selectors={"uniform": {}})
    assert run(tmp_path / "x", config) == "finished"
    before = sorted_rows(tmp_path / "x", "rounds")
    assert run(tmp_path / "x", resume=True) == "finished"
    assert sorted_rows(tmp_path / "x", "rounds") == before


def test_lockstep_limits_the_size_of_groups():
    prepared = prepare(Experiment.from_dict(table(run={"lockstep": 2})))
    assert sorted(len(places) for places in prepared.groups.values()) == [2, 2, 2, 2]
    assert len(prepare(Experiment.from_dict(TABLE)).groups) == 2  # SCAFFOLD trains by another rule


@pytest.mark.parametrize("model", ["mlp-64", "test_runner_model.py:Tanh"], ids=["machine code", "plain loop"])
def test_results_do_not_depend_on_which_runs_share_a_batch(tmp_path, monkeypatch, model):
    """On the CPU, bit for bit: one at a time, in pairs, and all together."""
    (tmp_path / "test_runner_model.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    selectors = {**TABLE["selectors"], "filtered": {"name": "fedcm-ts", "filter": {"name": "fedca"}}, "divfl": {}}
    config = table(model={"name": model}, selectors=selectors, scenario={"server_validation": 3}, seeds=[0])
    config["run"]["rounds"] = 6
    for lockstep in (256, 2, 1):
        config["run"]["lockstep"] = lockstep
        assert run(tmp_path / f"by-{lockstep}", config) == "finished"
    assert_same(tmp_path / "by-2", tmp_path / "by-256")
    assert_same(tmp_path / "by-1", tmp_path / "by-256")


def test_a_full_disk_is_a_clear_error_and_nothing_is_lost(whole, tmp_path, monkeypatch):
    out = tmp_path / "full"
    assert run(out, stop_after=20) == "interrupted"
    rows = sorted_rows(out, "rounds")
    real = os.fsync

    def full(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if "part-" in name:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResultsError, match=r"disk is full(.|\n)*--resume"):
        run(out, resume=True)
    monkeypatch.undo()
    assert sorted_rows(out, "rounds") == rows
    assert not list(out.rglob("*.tmp"))
    assert load(out).status["state"] == "failed"
    assert run(out, resume=True) == "finished"
    assert sorted_rows(out, "rounds") == sorted_rows(whole, "rounds")


def test_a_diverged_run_is_marked_and_the_others_finish(tmp_path):
    selectors = {"uniform": {}, "wild": {"name": "uniform", "local": {"lr": 3e38}}}
    assert run(tmp_path / "x", table(selectors=selectors)) == "finished"
    states = {info.id: info.state for info in load(tmp_path / "x").runs}
    assert states == {
        "uniform-s0": "finished",
        "uniform-s1": "finished",
        "wild-s0": "diverged",
        "wild-s1": "diverged",
    }
    (board,) = load(tmp_path / "x").leaderboards()
    wild = next(row for row in board.rows if row.label == "wild")
    assert wild.diverged == 2
    json.dumps(board.to_dict(), allow_nan=False)


def test_leaderboard_of_targets_and_baseline(whole):
    curves = load(whole).curves
    target = float(np.median(curves["uniform-s0"].accuracy))
    (board,) = load(whole).leaderboards(targets=[target])
    assert board.baseline == "uniform"
    uniform = next(row for row in board.rows if row.label == "uniform")
    reached = [curves[f"uniform-s{seed}"].rounds_to(target) for seed in (0, 1)]
    assert uniform.to_target[0].rounds.median == np.median([math.inf if r is None else r for r in reached])
    assert uniform.best.mean == pytest.approx(np.mean([curves[f"uniform-s{s}"].best for s in (0, 1)]))
    assert uniform.runs == 2
    cor = next(row for row in board.rows if row.label == "fedcor")
    assert cor.query_share > 0 and uniform.query_share == 0
    assert cor.paired.difference == pytest.approx(cor.terminal.mean - uniform.terminal.mean)


def test_improvement_is_measured_against_the_iid_setting(tmp_path):
    settings = [{"name": "skewed"}, {"name": "iid", "scenario": {"partition": {"name": "iid", "clients": 12}}}]
    config = table(selectors={"uniform": {}, "fedcbs": {}}, settings=settings, run={"reference": "iid", "terminal": 4})
    assert run(tmp_path / "x", config) == "finished"
    rows = {(b.setting, row.label): row for b in load(tmp_path / "x").leaderboards() for row in b.rows}
    terminal = {key: row.terminal.mean for key, row in rows.items()}
    row = rows["skewed", "fedcbs"]
    lost = terminal["iid", "uniform"] - terminal["skewed", "uniform"]
    assert row.improvement == pytest.approx((terminal["skewed", "fedcbs"] - terminal["skewed", "uniform"]) / lost)
    assert load(tmp_path / "x").run("fedcbs-iid-s0").setting["name"] == "iid"


def test_two_processes_never_write_one_directory(tmp_path):
    config = table(selectors={"uniform": {}})
    assert run(tmp_path / "x", config, stop_after=2) == "interrupted"
    with lock_folder(tmp_path / "x"), pytest.raises(ResultsError, match="Another process"):
        run(tmp_path / "x", resume=True)
    assert run(tmp_path / "x", resume=True) == "finished"


# -- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": {"name": "cifar10", "folder": "nowhere"}}, DataError, "nowhere"),
        ({"model": {"name": "lenet"}}, InputError, "images"),
        ({"local": {"augment": True}}, InputError, "images"),
        ({"model": {"name": "mpl"}}, FedcohortError, "'mlp'"),
        ({"model": {"name": "torch.nn:Identity"}}, InputError, "classes"),
        ({"run": {"cohort": 13}}, InputError, "13.* 12"),
        ({"run": {"device": "cuda:99"}}, DeviceError, "cuda"),
        ({"run": {"device": "gpu"}}, DeviceError, "gpu"),
        ({"scenario": {"partition": {"name": "shards", "clients": 5000}}}, ScenarioError, "5,?000"),
        ({"scenario": {"validation": 0.0}}, SignalError, "scenario.validation"),
        ({"filter": {"name": "fedca"}}, InputError, "server_validation"),
    ],
    ids=[
        "dataset",
        "shape",
        "augment",
        "model",
        "output",
        "cohort",
        "cuda",
        "device",
        "partition",
        "validation",
        "filter",
    ],
)
def test_impossible_experiments_are_refused_before_anything_is_written(tmp_path, change, error, message):
    if "data" in change:
        config = {**TABLE, "data": change["data"]}
    else:
        config = table(**{key: {**TABLE.get(key, {}), **value} for key, value in change.items() if key in TABLE})
        config.update({key: value for key, value in change.items() if key not in TABLE})
    with pytest.raises(error, match=message):
        run(tmp_path / "x", config)
    assert not (tmp_path / "x").exists()


def test_a_truncated_dataset_is_named(tmp_path):
    (tmp_path / "fashion_mnist.npz").write_bytes(b"PK\x03\x04 this is not all of it")
    config = {**TABLE, "data": {"name": "fashion-mnist", "folder": str(tmp_path)}}
    with pytest.raises(DataError, match="fashion_mnist"):
        run(tmp_path / "x", config)


def test_an_existing_directory_is_not_overwritten(whole):
    before = sorted_rows(whole, "rounds")
    with pytest.raises(ResultsError, match="exists"):
        run(whole)
    assert sorted_rows(whole, "rounds") == before


def test_directories_that_are_not_experiments(tmp_path, whole):
    with pytest.raises(ResultsError, match="no experiment"):
        load(tmp_path / "none")
    with pytest.raises(ResultsError, match="is empty"):
        load(tmp_path)
    (tmp_path / "something.txt").write_text("else")
    with pytest.raises(ResultsError, match=r"no meta\.json"):
        load(tmp_path)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(ResultsError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(ResultsError, match="names no format"):
        load(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": 99, "fedcohort": "9.9"}')
    with pytest.raises(ResultsError, match=r"newer fedcohort(.|\n)*9\.9"):
        load(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": 2}')
    with pytest.raises(ResultsError, match="half-written"):
        load(tmp_path)
    (tmp_path / "config.toml").write_text((whole / "config.toml").read_text())
    with pytest.raises(ResultsError, match=r"runs\.json is missing(.|\n)*--resume"):
        load(tmp_path)
    (tmp_path / "runs.json").write_text("[]")
    empty = load(tmp_path)
    assert empty.rounds.num_rows == 0 and empty.runs == [] and empty.curves == {}
    assert empty.leaderboards() == ()
    (tmp_path / "runs.json").write_text("[3]")
    with pytest.raises(ResultsError, match=r"runs\.json"):
        load(tmp_path)


def test_damaged_parts_and_checkpoints_are_named(tmp_path):
    out = tmp_path / "x"
    assert run(out, stop_after=10) == "interrupted"
    checkpoint = newest(out / "checkpoint", 0)
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with pytest.raises(ResultsError, match="damaged"):
        run(out, resume=True)
    part = next((out / "rounds").iterdir())
    part.write_bytes(b"PAR1")
    with pytest.raises(ResultsError, match="is damaged"):
        load(out).rounds


def test_a_checkpoint_is_decoded_once_when_an_experiment_continues(tmp_path, monkeypatch):
    out, decoded, decode = tmp_path / "x", [], Checkpoint.from_bytes
    assert run(out, stop_after=10) == "interrupted"
    monkeypatch.setattr(Checkpoint, "from_bytes", lambda *data: decoded.append(data) or decode(*data))
    assert run(out, resume=True) == "finished" and len(decoded) == 1


def test_a_damaged_part_is_named_wherever_the_damage_is(whole, tmp_path):
    """Truncated, a flipped bit, other columns: never wrong numbers, and always our own error."""
    expected = repr(sorted_rows(whole, "rounds"))
    out = tmp_path / "x"
    shutil.copytree(whole, out)
    part = out / "rounds" / "part-00000.parquet"
    data = part.read_bytes()
    rng = np.random.default_rng(3)
    damages = [data[:size] for size in rng.integers(0, len(data), 20)]
    for place, bit in zip(rng.integers(0, len(data), 150), rng.integers(0, 8, 150), strict=True):
        flipped = bytearray(data)
        flipped[place] ^= 1 << bit
        damages.append(bytes(flipped))
    refused = []
    for damage in damages:
        part.write_bytes(damage)
        try:
            assert repr(sorted_rows(out, "rounds")) == expected
        except ResultsError as error:
            refused.append(str(error))
    assert len(refused) > 160
    assert all("part-00000.parquet is damaged" in error for error in refused)
    pyarrow.parquet.write_table(pyarrow.table({"round": [1, 2]}), part)
    with pytest.raises(ResultsError, match=r"is damaged(.|\n)*restore it"):
        load(out).rounds
    pyarrow.parquet.write_table(pyarrow.table({"run": ["a"], "round": ["first"]}), part)
    with pytest.raises(ResultsError, match="is damaged"):
        load(out).rounds


def test_resuming_over_a_damaged_part_says_so(tmp_path):
    out = tmp_path / "x"
    assert run(out, table(selectors={"uniform": {}}), stop_after=4) == "interrupted"
    part = next((out / "rounds").iterdir())
    part.write_bytes(part.read_bytes()[:-40])
    with pytest.raises(ResultsError, match=r"part-00000\.parquet"):
        run(out, resume=True)


@pytest.mark.parametrize("stop_after", [None, 20])
@pytest.mark.parametrize("left", [None, "[{]", ""])
def test_a_lost_runs_json_is_written_again(whole, tmp_path, stop_after, left):
    out = tmp_path / "x"
    assert run(out, stop_after=stop_after) == ("interrupted" if stop_after else "finished")
    for name in ("runs.json", "status.json"):
        (out / name).unlink() if left is None else (out / name).write_text(left)
    with pytest.raises(ResultsError, match=r"(runs|status)\.json"):
        load(out)
    for path in out.glob("federation-*.npz"):
        path.unlink()
    assert run(out, resume=True) == "finished"
    assert_same(out, whole)
    assert load(out).status["state"] == "finished"
    assert load(out).federation("uniform-s0").sizes.tolist() == load(whole).federation("uniform-s0").sizes.tolist()


def test_an_interrupted_creation_starts_again(whole, tmp_path):
    out = tmp_path / "x"
    shutil.copytree(whole, out)
    for name in ("rounds", "journal", "checkpoint"):
        shutil.rmtree(out / name)
        (out / name).mkdir()
    for name in ("meta.json", "status.json", ".lock"):
        (out / name).unlink()
    (out / ".meta.json.tmp").write_text("{")
    with pytest.raises(ResultsError, match=r"was interrupted(.|\n)*same --out"):
        run(out, resume=True)
    (out / "notes.txt").write_text("somebody's")
    with pytest.raises(ResultsError, match="not empty"):
        run(out)
    (out / "notes.txt").unlink()
    assert run(out) == "finished"
    assert_same(out, whole)


def test_an_unknown_run(whole):
    with pytest.raises(KeyError, match="'uniform-s0'"):
        load(whole).run("unifrom-s0")


def test_an_interrupted_compaction_counts_nothing_twice(tmp_path, monkeypatch):
    out = tmp_path / "x"
    config = table(run={"checkpoint_seconds": 0.0}, selectors={"uniform": {}})
    monkeypatch.setattr(ExperimentWriter, "compact", lambda self: None)
    assert run(out, config) == "finished"
    monkeypatch.undo()
    rows = sorted_rows(out, "rounds")
    assert len(list((out / "rounds").iterdir())) > 1
    from pathlib import Path

    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
    ExperimentWriter(out).compact()
    monkeypatch.undo()
    assert sorted_rows(out, "rounds") == rows
    ExperimentWriter(out).compact()
    assert sorted_rows(out, "rounds") == rows
    assert [p.name for p in (out / "rounds").iterdir()] == ["part-00000.parquet"]
    assert pyarrow.parquet.read_table(out / "rounds" / "part-00000.parquet").num_rows == len(rows)


def test_checkpoints_are_plain_arrays():
    point = Checkpoint(3, {"a": [1, None]}, {"models": np.arange(4.0)})
    again = Checkpoint.from_bytes(point.to_bytes())
    assert (again.round, again.facts) == (3, {"a": [1, None]})
    np.testing.assert_array_equal(again.arrays["models"], np.arange(4.0))
    with pytest.raises(ResultsError, match="damaged"):
        Checkpoint.from_bytes(b"nonsense")


def test_default_out_is_a_new_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = default_out("a b/c")
    first.mkdir(parents=True)
    assert first.parent.resolve() == tmp_path / "runs"
    assert default_out("a b/c") != first

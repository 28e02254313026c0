"""Aggregators in the simulator: interrupted and resumed, in trial cohorts, without any model to average."""

import copy

import numpy as np
import pytest

from fedcohort.core.signals import Signal
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.rounds.prepare import prepare
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.checkpoint import Checkpoint, newest
from fedcohort.simulate.store.results import load
from fedcohort.training.aggregators import AGGREGATORS
from fedcohort.training.aggregators.distillation import _confidences
from fedcohort.training.filters import Filter, FilterDecision

TABLE = {
    "seeds": [3],
    "data": {"name": "synthetic", "samples": 300, "test_samples": 50, "classes": 3, "shape": [4]},
    "scenario": {"partition": {"name": "dirichlet", "clients": 9, "alpha": 0.5}, "server_validation": 6},
    "model": {"name": "logistic"},
    "local": {"batch_size": 8, "steps": 3, "lr": 0.1},
    "run": {"rounds": 6, "cohort": 4, "eval_every": 2, "device": "cpu", "workers": 1, "checkpoint_seconds": 3600.0},
}


def table(**changes):
    result = copy.deepcopy(TABLE)
    for key, value in changes.items():
        result[key] = {**result.get(key, {}), **value}
    return result


class StopAfter(Listener):
    def __init__(self, rows):
        self.rows = rows
        self.simulation = None

    def on_round(self, run, row):
        self.rows -= 1
        if self.rows == 0:
            self.simulation.stop()


class Nobody(Filter):
    """Keeps no model."""

    def judge(self, replies):
        return FilterDecision(np.zeros(len(replies), bool))


def last_checkpoints(out):
    """Models and memories of every group, by group and name."""
    arrays = {}
    for group in range(len(list((out / "checkpoint").glob("group-*.npz")))):
        path = newest(out / "checkpoint", group)
        arrays |= {f"{group}/{name}": value for name, value in Checkpoint.from_bytes(path.read_bytes()).arrays.items()}
    return arrays


def test_every_aggregator_continues_exactly_where_it_stopped(tmp_path):
    names = AGGREGATORS.names()
    config = table(selectors={name: {"name": "uniform", "aggregator": {"name": name}} for name in names})
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert Simulation(Experiment.from_dict(config), whole).run() == "finished"
    listener = StopAfter(2 * len(names) - 1)
    simulation = Simulation(Experiment.from_dict(config), stopped, listeners=[listener])
    listener.simulation = simulation
    assert simulation.run() == "interrupted"
    assert Simulation.open(stopped).run() == "finished"
    want, got = last_checkpoints(whole), last_checkpoints(stopped)
    assert want.keys() == got.keys()
    remembered = {name for name in names if AGGREGATORS.create(name).memory(2, np.zeros(2)) is not None}
    assert {"scaffold", "fedavgm", "fedadam", "fedyogi", "fedvarp", "mifa", "fedau", "fedawe"} <= remembered
    assert len({name.rpartition("/")[0] for name in want if "/memory/" in name}) == len(remembered)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("name", AGGREGATORS.names())
def test_a_filter_that_keeps_no_model_leaves_the_old_one(name):
    config = table(selectors={"uniform": {"aggregator": {"name": name}}})
    group = prepare(Experiment.from_dict(config)).group(0, journals=None, device="cpu", workers=1)
    group.start()
    before = group.models.clone()
    remembered = {} if group.runs[0].memory is None or name == "scaffold" else group.runs[0].memory.arrays()
    remembered = {key: np.asarray(value).copy() for key, value in remembered.items()}
    group.runs[0].filter = Nobody()
    group.step()
    np.testing.assert_array_equal(group.models.numpy(), before.numpy())
    for key, value in remembered.items():
        np.testing.assert_array_equal(np.asarray(group.runs[0].memory.arrays()[key]), value)
    group.close()


@pytest.mark.parametrize("name", AGGREGATORS.names())
def test_one_client_in_the_cohort(tmp_path, name):
    config = table(run={"cohort": 1, "rounds": 2}, selectors={"uniform": {"aggregator": {"name": name}}})
    assert Simulation(Experiment.from_dict(config), tmp_path / "out").run() == "finished"
    results = load(tmp_path / "out")
    assert np.isfinite(results.clients["weight"].to_pylist()).all()
    assert results.runs[0].state == "finished"


def test_a_trial_cohort_leaves_no_trace_in_the_memory():
    selector = {"warmup": 0, "interval": 1, "samples": "trial", "aggregator": {"name": "fedavgm"}}
    group = prepare(Experiment.from_dict(table(selectors={"fedcor": selector}))).group(
        0, journals=None, device="cpu", workers=1
    )
    group.start()
    (run,) = group.runs
    real, calls = run.combine, []

    def watched(old, models, members, *, trial=False):
        calls.append((trial, (models - old).numpy().T @ members.by_size))
        return real(old, models, members, trial=trial)

    run.combine = watched
    group.step()
    assert [trial for trial, _ in calls] == [True, False]
    np.testing.assert_allclose(run.memory.first.numpy(), calls[1][1], atol=1e-6)  # of the round alone
    group.close()


def test_rhfl_gets_the_losses_it_requires_and_their_cost_is_booked():
    rules = {"mean": {"name": "mean"}, "rhfl": {"name": "rhfl", "steps": 0, "impact": 3.0}}
    selectors = {label: {"name": "uniform", "aggregator": rule} for label, rule in rules.items()}
    group = prepare(Experiment.from_dict(table(selectors=selectors))).group(0, journals=None, device="cpu", workers=1)
    group.start()
    _, rhfl = group.runs
    real, seen = rhfl.combine, []

    def watched(old, models, members, **more):
        seen.append((members, real(old, models, members, **more)))
        return seen[-1][1]

    rhfl.combine = watched
    rows = {}
    group.step(lambda info, row: rows.setdefault(info.label, row))
    members, combined = seen[0]
    before, after = (members.metrics[signal] for signal in (Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER))
    assert (before > 0).all()
    assert (before != after).all()
    np.testing.assert_allclose(combined.weights, _confidences(before, after, 3.0))
    assert combined.weights.std() > 0
    assert rows["rhfl"]["bytes_up"] == rows["mean"]["bytes_up"] + 4 * 2 * 8  # two numbers of each of four clients
    group.close()


def test_fedbio_finds_the_clients_whose_labels_are_wrong():
    scenario = {
        "partition": {"name": "iid", "clients": 10},
        "noise": {"level": 0.5, "concentration": 0.2},  # most clients are all right or all wrong
        "server_validation": 15,
    }
    data = {"samples": 800, "classes": 3}
    config = table(
        data=data, run={"rounds": 60, "cohort": 10}, selectors={"uniform": {"aggregator": {"name": "fedbio"}}}
    )
    config["scenario"] = scenario
    group = prepare(Experiment.from_dict(config)).group(0, journals=None, device="cpu", workers=1)
    group.start()
    while not group.done:
        group.step()
    noise, upper = group.runs[0].federation.noise_rate, group.runs[0].memory.upper
    assert noise.max() - noise.min() > 0.5
    assert np.corrcoef(noise, upper)[0, 1] < -0.7
    group.close()


def models_after(names, rounds=3):
    selectors = {name: {"name": "uniform", "aggregator": {"name": name}} for name in names}
    prepared = prepare(Experiment.from_dict(table(run={"rounds": rounds}, selectors=selectors)))
    models = {}
    for number in range(len(prepared.groups)):
        group = prepared.group(number, journals=None, device="cpu", workers=1)
        group.start()
        while not group.done:
            group.step()
        models |= {run.plan.label: group.models[run.row].numpy().copy() for run in group.runs}
        group.close()
    return models


def test_an_aggregator_does_the_same_alone_and_next_to_others():
    together = models_after(AGGREGATORS.names())
    for name in ("fedadam", "feddf", "rhfl", "fedbio", "multi-krum", "fedvarp", "mifa", "fedau", "fedawe"):
        np.testing.assert_array_equal(models_after([name])[name], together[name], err_msg=name)
    without_weights = together.pop("inverse-probability")  # of a selector that declares no probabilities
    np.testing.assert_array_equal(without_weights, together["fedavg-with-absent"])
    distinct = {model.tobytes() for model in together.values()}
    # Equal to others: fedpdp by default, fednova with equal steps, fedbuff and fedavg-stale without staleness.
    assert len(distinct) >= len(together) - 5

"""Running statistics of normalisation layers: averaged by weight, never moved or remembered like parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.prepare import prepare
from fedcohort.training.aggregators import AGGREGATORS

OWN = """
from dataclasses import dataclass

import torch
from fedcohort.training.aggregators import Mix, WeightedSum


class Net(torch.nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(torch.nn.Linear(shape[0], 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(),
                         torch.nn.Linear(8, classes))


@dataclass(frozen=True, kw_only=True)
class Odd(WeightedSum):
    name = "odd"

    def mix(self, members):
        weights = members.by_count * 3
        weights[0] = -0.5
        return Mix(weights, 1 - weights.sum())
"""
TABLE: dict[str, Any] = {
    "seeds": [3],
    "data": {"name": "synthetic", "samples": 300, "test_samples": 50, "classes": 3, "shape": [4]},
    "scenario": {"partition": {"name": "dirichlet", "clients": 9, "alpha": 0.5}, "server_validation": 6},
    "model": {"name": "own.py:Net"},
    "local": {"batch_size": 8, "steps": 3, "lr": 0.1, "lr_decay": 0.95},
    "run": {"rounds": 6, "cohort": 4},
}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build a group, and remember every model that its engine has trained."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    groups = []

    def build(journals: Path | None = None, saved: bytes | None = None, **changes: Any) -> Any:
        table = {key: {**value, **changes.pop(key, {})} if isinstance(value, dict) else value
                 for key, value in TABLE.items()}  # fmt: skip
        group = prepare(Experiment.from_dict({**table, **changes}), "cpu").group(
            0, journals=journals, device="cpu", workers=1
        )
        groups.append(group)
        group.trained = []
        train = group.engine.train

        def watched(*arguments: Any, **options: Any) -> Any:
            result = train(*arguments, **options)
            group.trained.append(result.params.clone())
            return result

        monkeypatch.setattr(group.engine, "train", watched)
        if journals is not None:
            journals.mkdir(exist_ok=True)
        group.begin(saved)
        return group

    yield build
    for group in groups:
        group.close()


def statistics(group: Any, models: torch.Tensor) -> np.ndarray:
    return models[..., group.engine.n_params - 16 :].double().numpy()


def check_range(group: Any, before: np.ndarray, after: np.ndarray, trained: np.ndarray) -> None:
    """The statistics lie between those of the clients' models and of the one before, so no variance is negative."""
    lowest, highest = np.minimum(before, trained.min(0)), np.maximum(before, trained.max(0))
    assert (after >= lowest - 1e-6).all() and (after <= highest + 1e-6).all()
    assert (after[8:] >= 0).all()


@pytest.mark.parametrize("name", [*AGGREGATORS.names(), "own.py:Odd"])
def test_no_aggregator_takes_statistics_outside_the_range_of_the_models(name: str, made: Any) -> None:
    group = made(aggregator={"name": name})
    while not group.done:
        before = statistics(group, group.models[0])
        group.trained.clear()
        group.step()
        check_range(group, before, statistics(group, group.models[0]), statistics(group, torch.cat(group.trained)))
    assert group.runs[0].state == "finished"


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "fedyogi", "fedvarp", "mifa", "fedau", "fedawe", "scaffold"])
def test_statistics_are_averaged_with_the_recorded_weights(name: str, made: Any) -> None:
    group = made(aggregator={"name": name})
    while not group.done:
        group.trained.clear()
        group.step()
        (row,) = group.drain().to_pylist()
        weights = np.array(row["weights"])
        (trained,) = group.trained
        expected = weights @ statistics(group, trained) / weights.sum()
        np.testing.assert_allclose(statistics(group, group.models[0]), expected, rtol=1e-5, atol=1e-6)


def test_statistics_keep_the_share_of_the_old_model_in_an_average(made: Any) -> None:
    group = made(aggregator={"name": "fedavg-with-absent"})
    for _ in range(3):
        before = statistics(group, group.models[0])
        group.trained.clear()
        group.step()
        (row,) = group.drain().to_pylist()
        weights = np.array(row["weights"])
        expected = weights @ statistics(group, group.trained[0]) + (1 - weights.sum()) * before
        np.testing.assert_allclose(statistics(group, group.models[0]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("selector", ["gradnorm", "feel"])
def test_weights_above_one_do_not_extrapolate_statistics(selector: str, made: Any) -> None:
    group = made(selectors={selector: {}}, run={"rounds": 12, "cohort": 2})
    largest = 0.0
    while not group.done:
        before = statistics(group, group.models[0])
        group.trained.clear()
        group.step()
        largest = max(largest, sum(group.drain().to_pylist()[0]["weights"]))
        check_range(group, before, statistics(group, group.models[0]), statistics(group, torch.cat(group.trained)))
    assert group.runs[0].state == "finished" and largest > 1.1


@pytest.mark.parametrize("name", ["fedbuff", "fedasync", "fedavg-stale", "fedavgm", "fedadam", "mifa", "fedau"])
def test_stale_models_bring_their_own_statistics(name: str, made: Any) -> None:
    devices = {"speed": 5.0, "speed_spread": 0.7, "bandwidth": 2000.0, "bandwidth_spread": 0.5}
    scenario = {"partition": {"name": "dirichlet", "clients": 9, "alpha": 0.5}, "devices": devices}
    group = made(
        aggregator={"name": name}, scenario=scenario, run={"mode": "async", "rounds": 12, "cohort": 5, "buffer": 3}
    )
    while not group.done:
        before = statistics(group, group.models[0])
        group.step()
        check_range(group, before, statistics(group, group.models[0]), statistics(group, torch.cat(group.trained)))
    assert group.runs[0].state == "finished"


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "median"])
def test_late_models_bring_their_own_statistics(name: str, made: Any) -> None:
    scenario = {
        "partition": {"name": "dirichlet", "clients": 9, "alpha": 0.5},
        "latency": {"name": "shifted-exponential", "straggling": 20},
        "deadline": 0.3,
    }
    group = made(aggregator={"name": name}, scenario=scenario, run={"late": "count", "rounds": 10, "cohort": 6})
    (run,) = group.runs
    while not group.done:
        before = statistics(group, group.models[0])
        group.step()
        check_range(group, before, statistics(group, group.models[0]), statistics(group, torch.cat(group.trained)))
    assert len(run.session.journal.events("late-counted")) > 2 and run.state == "finished"


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "krum", "multi-krum"])
def test_a_robust_mean_does_not_believe_a_liar_s_statistics(
    name: str, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = made(aggregator={"name": name}, run={"cohort": 5})
    train = group.engine.train

    def lying(*arguments: Any, **options: Any) -> Any:
        result = train(*arguments, **options)
        result.params[0, -8:] = 1e20
        return result

    monkeypatch.setattr(group.engine, "train", lying)
    while not group.done:
        group.step()
    assert group.runs[0].state == "finished" and statistics(group, group.models[0]).max() < 1e3


@pytest.mark.parametrize("name", ["fedadam", "mifa", "scaffold", "fedawe"])
def test_a_memory_without_statistics_is_saved_and_restored(name: str, made: Any, tmp_path: Path) -> None:
    whole, cut = (made(aggregator={"name": name}, journals=tmp_path / folder) for folder in ("whole", "cut"))
    for _ in range(3):
        whole.step()
        cut.step()
    cut.commit()
    saved = cut.checkpoint()
    cut.close()
    again = made(aggregator={"name": name}, journals=tmp_path / "cut", saved=saved.to_bytes())
    while not whole.done:
        whole.step()
        again.step()
    assert torch.equal(whole.models, again.models)


def test_filters_and_signals_compare_parameters_only(made: Any) -> None:
    group = made(selectors={"gradnorm": {}}, filter={"name": "cmfl"})
    (run,), shapes = group.runs, []

    class Watched(type(run.filter)):  # type: ignore[misc]
        name = "watched"

        def judge(self, replies: Any) -> Any:
            shapes.append(tuple(replies.updates.shape))
            return super().judge(replies)

    run.filter = Watched()
    before, parameters = group.models[0].clone(), group.engine.n_params - 16
    group.step()
    assert shapes == [(4, parameters)]
    norms = (group.trained[0] - before)[:, :parameters].norm(dim=1).tolist()
    replies = {reply.client: reply.metrics["update-norm"] for reply in run.session.journal.replies(0)}
    (cohort,) = run.session.journal.cohorts()
    assert [replies[client] for client in cohort.clients.tolist()] == pytest.approx(norms, rel=1e-5)

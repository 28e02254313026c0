"""Late models that count in a later round, against a plain loop over the definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Status
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.prepare import prepare
from fedcohort.simulate.rounds.run import Run
from fedcohort.training.aggregators import Members


def table(**changes: Any) -> dict[str, Any]:
    return {
        "seeds": [4],
        "data": {"name": "synthetic", "samples": 300, "test_samples": 60, "classes": 4, "shape": [6]},
        "scenario": {
            "partition": {"name": "client-heterogeneity", "clients": 12, "alpha": 1.0},
            "latency": {"name": "shifted-exponential", "straggling": 20},
            "failure": 0.2,
            "deadline": 0.5,
        },
        "model": {"name": "mlp-64"},
        "local": {"batch_size": 7, "epochs": 1, "lr": 0.1},
        "run": {"rounds": 12, "cohort": 5, "late": "count"},
        **changes,
    }


def by_definition(group: Any, oracle: Any) -> list[dict[str, int]]:
    """Step ``group`` to its end; check every model with clients that ``oracle`` trains one by one."""
    (run,), (twin,) = group.runs, oracle.runs
    scenario, federation, seed = run.plan.scenario, run.federation, run.plan.seed
    waiting: list[tuple[float, int, int, torch.Tensor]] = []
    found: list[dict[str, int]] = []
    while not group.done:
        number, begun, before = run.round, run.clock, group.models[0].clone()
        group.step()
        cohort = run.session.journal.cohorts(round_=number)[0].clients
        events = scenario.events(federation, cohort, seed=seed, round=number)
        models, weights = [], []
        oracle.models[0], twin.round = before, number

        def train(client: int) -> torch.Tensor:
            return oracle.batch.train([twin], [np.array([client])], np.array([seed]), None).params[0].clone()

        for client, seconds, status in zip(cohort.tolist(), events.durations, events.status, strict=True):
            if status == Status.OK and seconds <= scenario.deadline:
                models.append(train(client))
                weights.append(float(federation.train_sizes[client]))
                waiting = [one for one in waiting if one[1] != client or one[0] > run.clock]
            elif status == Status.OK:
                waiting.append((begun + seconds, client, number, train(client) - before))
        counted: dict[str, int] = {}
        if models:
            for one in [one for one in sorted(waiting, key=lambda one: one[0]) if one[0] <= run.clock]:
                waiting.remove(one)
                assert str(one[1]) not in counted  # the seed has no client that is late twice
                counted[str(one[1])] = number - one[2]
                models.append(before + one[3])
                weights.append(float(federation.train_sizes[one[1]]) / np.sqrt(1 + number - one[2]))
            share = torch.as_tensor(np.array(weights) / np.sum(weights)).to(before)
            torch.testing.assert_close(group.models[0], share @ torch.stack(models), rtol=1e-4, atol=1e-5)
        found.append(counted)
    return found


def groups(count: int, folder: Path | None = None, **changes: Any) -> list[Any]:
    prepared = prepare(Experiment.from_dict(table(**changes)), "cpu")
    return [prepared.group(0, journals=folder, device="cpu", workers=1) for _ in range(count)]


def test_late_models_are_averaged_as_the_definition_says() -> None:
    group, oracle = groups(2)
    group.start()
    expected = by_definition(group, oracle)
    notes = {note["round"]: note["clients"] for note in group.runs[0].session.journal.events("late-counted")}
    assert {number: {c: one["staleness"] for c, one in found.items()} for number, found in notes.items()} == {
        number: found for number, found in enumerate(expected) if found
    }
    assert sum(map(len, expected)) >= 4
    for one in (group, oracle):
        one.close()


@pytest.mark.parametrize("aggregator", ["fedavg", "fedadam", "inverse-probability"])
def test_a_resumed_simulation_counts_the_same_late_models(aggregator: str, tmp_path: Path) -> None:
    selectors = {"gradnorm" if aggregator == "inverse-probability" else "uniform": {}}

    def played(folder: str, stop: int | None) -> Any:
        (tmp_path / folder).mkdir()
        (group,) = groups(1, tmp_path / folder, aggregator={"name": aggregator}, selectors=selectors)
        group.start()
        while not group.done:
            group.step()
            if group.runs[0].round == stop:
                assert group.runs[0].late
                group.commit()
                saved = group.checkpoint()
                group.close()
                (group,) = groups(1, tmp_path / folder, aggregator={"name": aggregator}, selectors=selectors)
                group.resume(type(saved).from_bytes(saved.to_bytes()))
        return group

    unbroken, resumed = played("a", None), played("b", 5)
    assert unbroken.runs[0].state == "finished"
    assert torch.equal(unbroken.models, resumed.models)
    found = [group.runs[0].session.journal.events("late-counted") for group in (unbroken, resumed)]
    assert found[0] == found[1] and len(found[0]) > 2
    for group in (unbroken, resumed):
        group.close()


@pytest.mark.parametrize("selector", ["gradnorm", "feel"])
def test_a_late_model_keeps_the_weight_that_its_selector_gave_the_client(
    selector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group,) = groups(1, selectors={selector: {}}, aggregator={"name": "inverse-probability"})
    group.start()
    (run,), seen, original = group.runs, [], Run.mix

    def watch(self: Run, members: Members) -> Any:
        seen.append(members)
        return original(self, members)

    monkeypatch.setattr(Run, "mix", watch)
    while not group.done:
        group.step()
    cohorts = {row.ticket: row for row in run.session.journal.cohorts()}
    late = [(int(client), one) for note in run.session.journal.events("late-counted")
            for client, one in sorted(note["clients"].items(), key=lambda item: int(item[0]))]  # fmt: skip
    given = [float(cohorts[one["ticket"]].weights[cohorts[one["ticket"]].clients == client][0]) for client, one in late]
    counted = [
        (int(members.clients[place]), members.multiplicity[place])
        for members in seen
        for place in np.flatnonzero(members.staleness > 0)
    ]
    expected = [weight / (1 + one["staleness"]) ** 0.5 for weight, (_, one) in zip(given, late, strict=True)]
    assert [client for client, _ in counted] == [client for client, _ in late]
    np.testing.assert_allclose([times for _, times in counted], expected)
    assert len(late) > 3 and max(given) > 1.5
    group.close()


def test_where_a_round_belongs_together_late_models_cannot_count() -> None:
    with pytest.raises(InputError, match="'scaffold' changes local training"):
        groups(1, aggregator={"name": "scaffold"})
    with pytest.raises(InputError, match="the filter 'cmfl' compares"):
        groups(1, filter={"name": "cmfl"})


OWN = """
from dataclasses import dataclass
from fedcohort.training.aggregators import Mix, WeightedSum


@dataclass(frozen=True, kw_only=True)
class Halving(WeightedSum):
    name = "halving"
    discounts_staleness = True

    def mix(self, members):
        weights = members.share * 0.5**members.staleness
        return Mix(weights / weights.sum())
"""


@pytest.mark.parametrize(
    ("aggregator", "discounts"),
    [
        ({"name": "fedavg"}, False),
        ({"name": "fedbuff"}, True),
        ({"name": "fedavg-stale"}, True),
        ({"name": "fedavgm", "exponent": 0.5}, True),
        ({"name": "fedadam"}, False),
        ({"name": "fedadam", "exponent": 0.5}, True),
        ({"name": "fedyogi", "exponent": 1.0}, True),
        ({"name": "own.py:Halving"}, True),
    ],
)
def test_a_late_model_is_discounted_once(
    aggregator: dict[str, Any], discounts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    (group,) = groups(1, aggregator=aggregator)
    group.start()
    assert group.runs[0].aggregator.discounts_staleness == discounts
    stale = 0
    for method in ("mix", "combine"):
        original = getattr(Run, method)

        def watch(self: Run, *arguments: Any, original: Any = original) -> Any:
            nonlocal stale
            members = next(one for one in arguments if isinstance(one, Members))
            stale += int((members.staleness > 0).sum())
            expected = np.ones(len(members)) if discounts else (1 + members.staleness) ** -0.5
            np.testing.assert_array_equal(members.multiplicity, expected)
            return original(self, *arguments)

        monkeypatch.setattr(Run, method, watch)
    while not group.done:
        group.step()
    assert stale and group.runs[0].state == "finished"
    group.close()

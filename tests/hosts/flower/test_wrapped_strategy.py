"""Strategies inside a CohortStrategy work as before, or are refused."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.client.mod import LocalDpMod as LegacyLocalDpMod
from flwr.clientapp.mod import LocalDpMod
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)

from fedcohort.core.errors import ParameterError
from fedcohort.hosts import Policy
from fedcohort.hosts.flower import (
    Answers,
    AsyncCohortStrategy,
    CohortStrategy,
    Facts,
    cohort_client,
    failures,
)
from fedcohort.hosts.flower.wrapped_strategy import InnerStrategyError
from fedcohort.selectors import Uniform
from fedcohort.training.filters import CMFL


def value(arrays: Any) -> float:
    return float(arrays["bias"].numpy()[0])


class Halving(FedAvg):
    """Flower's documented schedule: the strategy writes into the config and finds it there next time."""

    def configure_train(self, server_round: int, arrays: Any, config: ConfigRecord, grid: Any) -> Any:
        config["lr"] = config["lr"] * 0.5
        return super().configure_train(server_round, arrays, config, grid)


def test_a_schedule_in_the_config_goes_on_over_rounds_and_restarts(kit: Any, tmp_path: Path) -> None:
    heard: list[float] = []

    def train(message: Any, context: Any) -> RecordDict:
        heard.append(message.content["config"]["lr"])
        return kit.step(message, context)

    for rounds in (2, 4):
        fleet = kit.Fleet()
        for number in range(2):
            fleet.grid.add(fleet.node(number, cohort_client(kit.client_app(train), kit.ANSWERS)))
        strategy = fleet.strategy("all", Halving(), journal=tmp_path / "j")
        strategy.start(fleet.grid, kit.model(), rounds, train_config=ConfigRecord({"lr": 1.0}))
    assert heard == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625]


def test_a_round_that_is_tried_again_is_configured_once(empty_fleet: Any, kit: Any) -> None:
    heard: list[float] = []

    def train(message: Any, context: Any) -> RecordDict:
        heard.append(message.content["config"]["lr"])
        if len(heard) <= 2:
            raise ValueError("not yet")
        return kit.step(message, context)

    for number in range(2):
        empty_fleet.grid.add(empty_fleet.node(number, cohort_client(kit.client_app(train), kit.ANSWERS)))
    strategy = empty_fleet.strategy("all", Halving())
    strategy.start(empty_fleet.grid, kit.model(), 2, train_config=ConfigRecord({"lr": 1.0}))
    assert heard == [0.5, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_what_cannot_be_wrapped_is_refused_by_name(tmp_path: Path) -> None:
    class Own(FedAvg):
        def start(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    for inner in (Own(), DifferentialPrivacyServerSideFixedClipping(Own(), 0.1, 10.0, 3), CohortStrategy("uniform")):
        with pytest.raises(InnerStrategyError, match="start"):
            CohortStrategy("uniform", inner, journal=tmp_path / "j")
    assert not (tmp_path / "j").exists()
    with pytest.raises(ParameterError, match=r"flwr.serverapp.strategy. Got FedAvg(?s:.*)legacy API"):
        CohortStrategy("uniform", LegacyFedAvg())  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"Got FedAvg, a class"):
        CohortStrategy("uniform", FedAvg)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="Uniform"):
        CohortStrategy(Uniform)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="CMFL"):
        CohortStrategy("uniform", filter=CMFL)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="rules"):
        CohortStrategy("uniform", rules={"blocked": ["anna"]})  # type: ignore[arg-type]
    assert type(CohortStrategy("uniform", filter="cmfl").filter).__name__ == "CMFL"


def test_privacy_wrappers_judge_errors_themselves(fleet: Any, kit: Any, tmp_path: Path) -> None:
    """Flower's wrapper releases nothing when a client failed: noise made for six does not hide a mean of five."""
    tries = 0

    def train(message: Any, context: Any) -> RecordDict:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("out of memory")
        return kit.step(message, context)

    fleet.grid.nodes[fleet.grid.node_of("client-0")].app = cohort_client(kit.client_app(train), kit.ANSWERS)
    inner = DifferentialPrivacyServerSideFixedClipping(FedAvg(fraction_evaluate=0.0), 0.0, 1e9, 6)
    strategy = fleet.strategy("all", inner, journal=tmp_path / "j")
    result = strategy.start(fleet.grid, kit.model(counter=False), num_rounds=1)
    assert value(result.arrays) == pytest.approx(91 / 21)  # of all six, in the second try
    assert [(f.client, f.round) for f in failures(tmp_path / "j")] == [("client-0", 0)]


@pytest.mark.parametrize("mod", [LocalDpMod, LegacyLocalDpMod])
def test_exact_losses_beside_a_noised_model_are_refused(mod: Any, kit: Any) -> None:
    app = kit.client_app(mods=[mod(1.0, 1.0, 1.0, 1e-5)])
    for bare, what in (
        (kit.ANSWERS, "exact losses and gradient"),
        (Answers(losses=kit.losses), "exact losses"),
        (Answers(gradient=kit.gradient), "exact gradient"),
    ):
        with pytest.raises(ParameterError, match=f"LocalDpMod.*{what} of the data"):
            cohort_client(app, bare)
    cohort_client(app, Answers(facts=lambda context: Facts(size=3)))
    assert cohort_client(app, dataclasses.replace(kit.ANSWERS, noised=True))


@pytest.mark.parametrize("labels", [{"label_counts": [1, 2]}, {"sealed_labels": b"sealed"}])
def test_exact_labels_beside_a_noised_model_never_leave(labels: Any, fleet: Any, kit: Any, caplog: Any) -> None:
    """The client refuses to describe itself, so it is left out; nothing of its labels is sent."""
    app = kit.client_app(mods=[LocalDpMod(1.0, 1.0, 1.0, 1e-5)])
    wrapped = cohort_client(app, Answers(facts=lambda context: Facts(size=3, **labels)))
    fleet.grid.nodes[fleet.grid.node_of("client-0")].app = wrapped
    fleet.strategy("uniform", FedAvg(), cohort_size=3).start(fleet.grid, kit.model(), 2)
    assert "is left out for now" in caplog.text and "exact label counts" in caplog.text
    replies = fleet.grid.replies
    sent = [r.content["fedcohort"] for r in replies if not r.has_error() and "fedcohort" in r.content]
    assert len([r for r in sent if "label-counts" in r]) == 5 and not any("sealed-labels" in r for r in sent)


def test_a_fraction_of_one_is_warned_about(fleet: Any, kit: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "flwr.fedcohort"):
        fleet.strategy("uniform", FedAvg()).start(fleet.grid, kit.model(), 1)
        assert "fraction_train=1.0 asks for every client" in caplog.text
        caplog.clear()
        fleet.strategy("uniform", FedAvg(), cohort_size=3).start(fleet.grid, kit.model(), 1)
        fleet.strategy("all", FedAvg()).start(fleet.grid, kit.model(), 1)
        assert "fraction_train=1.0" not in caplog.text


def test_the_parameters_of_before_are_fields_of_the_policy_and_warn() -> None:
    with pytest.warns(FutureWarning, match="size=3") as caught:
        strategy = CohortStrategy("uniform", cohort_size=3, deadline=5.0)
    assert strategy.policy == Policy(size=3, deadline=5.0) and caught[0].filename == __file__
    with pytest.warns(FutureWarning, match="deadline=5.0") as caught:
        AsyncCohortStrategy("uniform", busy=3, deadline=5.0)
    assert caught[0].filename == __file__
    with pytest.raises(TypeError, match="dedline"):
        CohortStrategy("uniform", dedline=5.0)

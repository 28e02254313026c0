"""Waiting for clients, starting again, and what has changed since."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import (
    FedAvg,
)

from fedcohort.flower import (
    Facts,
    FederationTimeoutError,
    cohort_client,
)
from fedcohort.journal import read_journal
from fedcohort.session import Session


def value(arrays: Any) -> float:
    return float(arrays["bias"].numpy()[0])


def test_the_minimum_online_holds_in_every_round(fleet: Any, kit: Any) -> None:
    fleet.clock.at.append((3.0, lambda: [fleet.grid.remove(fleet.grid.node_of(f"client-{i}")) for i in range(4)]))
    fleet.clock.at.append((40.0, lambda: [fleet.grid.add(fleet.node(i)) for i in range(4)]))
    strategy = fleet.strategy("uniform", FedAvg(fraction_evaluate=0.0), cohort_size=2, wait_for=5)
    strategy.start(fleet.grid, kit.model(), num_rounds=8)
    assert fleet.clock.now > 40
    fleet.clock.at.append((fleet.clock.now + 1, lambda: fleet.grid.remove(fleet.grid.node_of("client-5"))))
    strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, wait_for=6, patience=20.0)
    with pytest.raises(FederationTimeoutError, match=r"5 of 6 clients have been online for 20 s in round \d"):
        strategy.start(fleet.grid, kit.model(), num_rounds=8)


def test_a_finished_run_says_so_at_once(kit: Any, tmp_path: Path, caplog: Any) -> None:
    fleet = kit.Fleet()
    fleet.fill(3)
    evaluate = lambda r, a: MetricRecord({"accuracy": 0.1 * r})  # noqa: E731
    done = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j").start(
        fleet.grid, kit.model(), 2, evaluate_fn=evaluate
    )
    empty = kit.Fleet()  # nobody is online, and nobody is needed
    with caplog.at_level(logging.INFO, "flwr.fedcohort"):
        again = empty.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j").start(
            empty.grid, kit.model(), 2, evaluate_fn=evaluate
        )
    assert empty.clock.now == 0 and "the run is finished" in caplog.text
    assert value(again.arrays) == value(done.arrays)
    assert again.evaluate_metrics_serverapp[2]["accuracy"] == pytest.approx(0.2)
    assert again.train_metrics_clientapp[1]["train-loss"] == done.train_metrics_clientapp[1]["train-loss"]


def test_metrics_of_the_last_round_survive_a_kill(kit: Any, tmp_path: Path) -> None:
    class PowerCut(BaseException):
        pass

    def run(cut: int | None) -> None:
        def evaluate(server_round: int, arrays: Any) -> MetricRecord:
            if server_round == cut:
                raise PowerCut
            return MetricRecord({"accuracy": server_round / 10})

        fleet = kit.Fleet()
        fleet.fill(3)
        strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j")
        strategy.start(fleet.grid, kit.model(), 3, evaluate_fn=evaluate)

    with pytest.raises(PowerCut):
        run(cut=2)  # round 2 is closed, its evaluation is not on record
    assert read_journal(tmp_path / "j").metrics()[0]["accuracy"] == 0.1
    run(cut=None)
    assert [m["accuracy"] for m in read_journal(tmp_path / "j").metrics().values()] == [0.1, 0.2, 0.3]


def test_new_facts_reach_the_table(fleet: Any, kit: Any, tmp_path: Path) -> None:
    samples = {"client-0": 10}

    def facts(context: Any) -> Facts:
        return Facts(size=samples.get(str(context.node_config["client-name"]), 1))

    for node in fleet.grid.nodes.values():
        node.app = cohort_client(kit.client_app(), dataclasses.replace(kit.ANSWERS, facts=facts))
    fleet.clock.at.append((10.0, lambda: samples.update({"client-0": 500})))
    strategy = fleet.strategy("size-weighted", FedAvg(), cohort_size=2, journal=tmp_path / "j", describe_every=5.0)
    strategy.start(fleet.grid, kit.model(), num_rounds=30)
    with Session.open(tmp_path / "j") as session:
        assert session.table.sizes[0] == 500
    assert read_journal(tmp_path / "j").events("facts") == [{"clients": [0]}]


def test_other_settings_are_recorded(kit: Any, tmp_path: Path, caplog: Any) -> None:
    for size in (2, 3):
        fleet = kit.Fleet()
        fleet.fill(4)
        with caplog.at_level(logging.WARNING, "flwr.fedcohort"):
            fleet.strategy("uniform", FedAvg(), cohort_size=size, journal=tmp_path / "j").start(
                fleet.grid, kit.model(), size
            )
    assert "cohort-size was 2, is 3" in caplog.text
    assert [body["cohort-size"] for body in read_journal(tmp_path / "j").events("settings")] == [2, 3]

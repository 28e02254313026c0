"""A twin of a run on Flower: real ClientApps that train on digits, behind a grid on a clock of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedcohort.advice.drift import changes
from fedcohort.advice.fit import Fit
from fedcohort.advice.record import read_record
from fedcohort.hosts.flower import Answers, Facts, cohort_client
from fedcohort.simulate.data import load_dataset

CLIENTS, ROUNDS = 8, 40
USUAL = np.array([3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 20.0, 40.0])


def federation(kit: Any, journal: Path, rounds: int = ROUNDS) -> None:
    """Run softmax regression on digits; client 3 fails now and then, clients 6 and 7 are slow."""
    digits, rng = load_dataset("digits"), np.random.default_rng(4)
    x, y = np.asarray(digits.x_train).reshape(-1, 64) / 16.0, np.asarray(digits.y_train)
    xt, yt = np.asarray(digits.x_test).reshape(-1, 64) / 16.0, np.asarray(digits.y_test)
    order = np.argsort(y + rng.normal(0, 1.5, len(y)), kind="stable")
    parts = np.array_split(order, CLIENTS)

    def train(message: Any, context: Any) -> RecordDict:
        number = int(context.node_config["partition-id"])
        if number == 3 and rng.random() < 0.4:
            raise RuntimeError("out of memory")
        w = np.array(message.content["arrays"]["w"].numpy(), np.float64)
        xs, ys = x[parts[number]], y[parts[number]]
        for _ in range(5):
            scores = np.exp(xs @ w - (xs @ w).max(axis=1, keepdims=True))
            scores /= scores.sum(axis=1, keepdims=True)
            w -= 0.5 * xs.T @ (scores - np.eye(10)[ys]) / len(ys)
        metrics = MetricRecord({"num-examples": len(ys), "train-loss": 1.0})
        return RecordDict({"arrays": ArrayRecord({"w": Array(w.astype(np.float32))}), "metrics": metrics})

    def facts(context: Any) -> Facts:
        counts = np.bincount(y[parts[int(context.node_config["partition-id"])]], minlength=10)
        return Facts(size=int(counts.sum()), label_counts=counts.tolist())

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": float(((xt @ arrays["w"].numpy()).argmax(axis=1) == yt).mean())})

    fleet = kit.Fleet()
    for number in range(CLIENTS):
        app = cohort_client(kit.client_app(train), Answers(facts=facts))
        seconds = lambda message, usual=USUAL[number]: float(usual * np.exp(0.1 * rng.standard_normal()))  # noqa: E731
        fleet.grid.add(fleet.node(number, app, latency=seconds))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 1.7e9 + fleet.clock.now)
        strategy = fleet.strategy("balanced", FedAvg(fraction_evaluate=0.0), cohort_size=3, journal=journal, seed=1)
        initial = ArrayRecord({"w": Array(np.zeros((64, 10), np.float32))})
        strategy.start(fleet.grid, initial, num_rounds=rounds, evaluate_fn=evaluate)


def test_a_twin_of_a_run_on_flower_has_its_clients(kit: Any, tmp_path: Path) -> None:
    federation(kit, tmp_path / "run.sqlite")
    record = read_record(tmp_path / "run.sqlite")
    fit = Fit(record)
    clients = fit.draw(None)
    where = [int(name.rpartition("-")[2]) for name in record.names]
    assert clients.seconds is not None
    assert np.allclose(clients.seconds, USUAL[where], rtol=0.25)
    assert clients.failures[where.index(3)] == max(clients.failures) > 0.15
    assert record.selector == "balanced" and record.cohort == 3 and record.metric == "accuracy"
    assert len(record.curve) >= ROUNDS and record.curve[-1, 1] > 0.7
    assert record.sizes is not None and record.mixes is not None
    assert not any(change.found for change in changes(record))

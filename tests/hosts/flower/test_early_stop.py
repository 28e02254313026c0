"""A Flower run ends when a metric no longer improves, whoever measures it, in rounds and without."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg

from fedcohort.hosts import EarlyStop, Policy
from fedcohort.hosts.flower import AsyncCohortStrategy
from fedcohort.journal import read_journal


@pytest.mark.parametrize("kind", ["rounds", "flow"])
@pytest.mark.parametrize("metric", ["value", "evaluate/value", "train/train-loss"])
def test_a_run_ends_early_on_a_metric_and_stays_ended(
    kind: str, metric: str, fleet: Any, kit: Any, tmp_path: Path
) -> None:
    def evaluate(server_round: int, arrays: Any) -> MetricRecord:
        return MetricRecord({"value": min(float(server_round), 4.0)})

    def start() -> Any:
        rule = EarlyStop(metric, models=3, min_improvement=0.0 if metric == "value" else 1e9)
        settings: dict[str, Any] = {"strategy": FedAvg(fraction_train=0.5), "journal": tmp_path / "j", "seed": 3}
        settings["policy"] = Policy(early_stop=rule)
        strategy: Any
        if kind == "rounds":
            strategy = fleet.strategy("uniform", **settings)
        else:
            strategy = AsyncCohortStrategy("uniform", busy=2, **settings)
            strategy.clock, strategy.sleep = fleet.clock, fleet.clock.sleep
        return strategy.start(fleet.grid, kit.model(), num_rounds=30, evaluate_fn=evaluate)

    # The value stands still after model 3; with so large a least improvement, no other one counts after the first.
    assert max(start().train_metrics_clientapp) == (7 if metric == "value" else 4)
    sent = len(fleet.trained())
    assert max(start().train_metrics_clientapp) == (7 if metric == "value" else 4) and len(fleet.trained()) == sent
    with closing(read_journal(tmp_path / "j")) as record:
        assert f"{metric} has not improved" in record.events("ended")[-1]["reason"]

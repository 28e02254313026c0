"""Every way of sharing labels: the same cohorts if S is exact, costs are booked, noise is seeded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography.hazmat.primitives.hpke")

from fedcohort.core.errors import SignalError
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.toml import ConfigError
from fedcohort.simulate.label_sharing import LABEL_SHARING
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load


def table(**selectors: Any) -> dict[str, Any]:
    return {
        "seeds": [0],
        "data": {"name": "digits"},
        "scenario": {"partition": {"name": "shards", "clients": 30, "per_client": 2}},
        "model": {"name": "mlp"},
        "local": {"batch_size": 16, "steps": 2, "lr": 0.05},
        "run": {"rounds": 12, "cohort": 6, "eval_every": 12, "device": "cpu", "workers": 1},
        "selectors": {label: {"name": "fedcbs", **own} for label, own in selectors.items()},
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    ways: dict[str, Any] = {name: {"labels": name} for name in ("counts", "rotated", "encrypted", "noisy")}
    ways["loud"] = {"labels": {"name": "noisy", "epsilon": 0.05, "mechanism": "gaussian", "delta": 1e-6}}
    out = tmp_path_factory.mktemp("private") / "out"
    assert Simulation(Experiment.from_dict(table(**ways)), out, device="cpu").run() == "finished"
    return load(out)


def cohorts(results: Any, label: str) -> list[Any]:
    rows = [row for row in results.clients.to_pylist() if row["run"] == f"{label}-s0"]
    return [sorted(row["client"] for row in rows if row["round"] == r) for r in range(12)]


def test_exact_products_give_the_same_cohorts(results: Any) -> None:
    plain = cohorts(results, "counts")
    assert all(len(cohort) == 6 for cohort in plain)
    assert cohorts(results, "encrypted") == plain
    assert cohorts(results, "rotated") == plain
    assert cohorts(results, "loud") != plain


def test_costs_are_booked_with_the_first_round(results: Any) -> None:
    first = {row["run"]: row for row in results.rounds.to_pylist() if row["round"] == 0}
    later = [row for row in results.rounds.to_pylist() if row["round"] > 0]
    assert all(row["query_bytes_up"] == 0 for row in later)
    assert first["counts-s0"]["query_bytes_up"] == 0
    assert first["rotated-s0"]["query_bytes_up"] == first["noisy-s0"]["query_bytes_up"] == 30 * 10 * 8
    assert 30 * 1_000 < first["encrypted-s0"]["query_bytes_up"] < 30 * 2_000
    assert 0 < first["encrypted-s0"]["query_seconds"] < 300


def test_noise_costs_balance(results: Any) -> None:
    qcid = {
        label: np.mean([row["qcid"] for row in results.rounds.to_pylist() if row["run"] == f"{label}-s0"])
        for label in ("counts", "loud")
    }
    assert qcid["counts"] < qcid["loud"]


def test_a_selector_that_needs_labels_is_refused_without_them(tmp_path: Path) -> None:
    with pytest.raises(SignalError, match="label-products"):
        Simulation(Experiment.from_dict(table(mute={"labels": "none"})), tmp_path / "out", device="cpu").run()


def test_the_section_is_checked() -> None:
    assert LABEL_SHARING.names() == ["counts", "encrypted", "noisy", "none", "rotated"]
    with pytest.raises(ConfigError, match="epsilon"):
        Experiment.from_dict({**table(a={}), "labels": {"name": "noisy", "epsilon": -1.0}})
    with pytest.raises(ConfigError, match="no label sharing 'nosy'"):
        Experiment.from_dict({**table(a={}), "labels": "nosy"})
    whole = Experiment.from_dict({**table(a={}), "labels": {"name": "noisy", "epsilon": 2.0}}).table
    assert whole["labels"] == {"name": "noisy", "epsilon": 2.0, "mechanism": "geometric", "delta": 1e-5}

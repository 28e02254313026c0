"""Shadows on a live federation fail, come and go, and lack signals, and the run continues."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import (
    FedAvg,
)

from fedcohort.journal import read_journal
from fedcohort.selectors import PowerOfChoice, Uniform
from fedcohort.session import Session


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breaking(Uniform):
    """Breaks in one of its functions, in round 1."""

    where: str = "update"

    def update(self, state: Any, outcome: Any) -> Any:
        if self.where == "update" and outcome.round == 1:
            raise ValueError("broken in update")
        return super().update(state, outcome)

    def select(self, state: Any, slate: Any, answer: Any, rng: Any) -> Any:
        cohort, after = super().select(state, slate, answer, rng)
        if self.where == "scores" and slate.round == 1:
            odd = np.array([object()] * len(slate.candidates))
            return dataclasses.replace(cohort, candidates=slate.candidates, score=odd), after
        return cohort, after


@pytest.mark.parametrize("where", ["update", "scores"])
def test_a_shadow_that_fails_is_dropped_and_the_run_goes_on(where: str, fleet: Any, kit: Any, tmp_path: Path) -> None:
    shadows = {"bad": Breaking(where=where), "good": Uniform()}
    strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j", shadows=shadows)
    strategy.start(fleet.grid, kit.model(), num_rounds=4)
    record = read_journal(tmp_path / "j")
    (body,) = record.events("shadow")
    assert (body["name"], body["what"]) == ("bad", "failed") and body["round"] in (1, 2)
    assert set(record.scores(record.cohorts()[-1].ticket)) == {"", "good"}
    with Session.open(tmp_path / "j") as session:
        assert session.round == 4 and set(session.shadows) == {"good"}
    again = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j", shadows=shadows)
    again.start(fleet.grid, kit.model(), num_rounds=5)  # the app still names the broken one
    with Session.open(tmp_path / "j", shadows=shadows) as session:  # a journal's word is no reason to import code
        assert session.round == 5 and "good" in session.shadows


def test_shadows_come_and_go_in_a_running_journal(kit: Any, tmp_path: Path) -> None:
    def run(rounds: int, shadows: Any) -> None:
        fleet = kit.Fleet()
        fleet.fill(6)
        strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j", shadows=shadows)
        strategy.start(fleet.grid, kit.model(), num_rounds=rounds)

    run(2, {"old": "uniform"})
    run(4, {"new": "fedcm-ts"})
    record = read_journal(tmp_path / "j")
    per_round = [set(record.scores(row.ticket)) - {""} for row in record.cohorts()]
    assert per_round == [{"old"}, {"old"}, {"new"}, {"new"}]
    assert [(b["name"], b["what"]) for b in record.events("shadow")] == [("old", "removed"), ("new", "added")]


def test_a_shadow_without_its_signals_says_so(fleet: Any, kit: Any, tmp_path: Path) -> None:
    shadows = {"poc": PowerOfChoice()}
    strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j", shadows=shadows)
    strategy.start(fleet.grid, kit.model(), num_rounds=2)
    with Session.open(tmp_path / "j") as session:
        said = session.explain(1).shadows["poc"]
    assert isinstance(said, str) and said.startswith("lacked its signals: it asks") and "loss" in said
